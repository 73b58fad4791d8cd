"""The wording of twenty common messages; every other test asserts classes and codes."""

from pathlib import Path

import pytest

from device_agent.machine import memory_budget
from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.config.settings import Settings, parse_size
from hepti_mqtt.core.errors import HeptiError, IdInUseError
from hepti_mqtt.core.ids import check_name
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.service.envelope import parse, request_id, request_pins, split_envelope
from hepti_mqtt.transport.url import BrokerUrl


def refuse(error):
    raise error


GOLDEN = [
    (
        lambda: parse(b"{"),
        "bad_request",
        "The request is not valid JSON (Expecting property name enclosed in double quotes: line 1 "
        'column 2 (char 1)). Send an object such as {"text": "..."}.',
    ),
    (lambda: parse(b"[]"), "bad_request", 'A request is a JSON object such as {"text": "..."}.'),
    (
        lambda: request_id({"id": "A b"}),
        "bad_request",
        "id: request name 'A b' cannot stand in an MQTT topic: use 1 to 64 of a-z 0-9 _ -, beginning "
        "with a letter or digit, such as a-b",
    ),
    (
        lambda: refuse(IdInUseError.of("q1")),
        "id_in_use",
        "Id q1 belongs to another of your requests, with a different body. Use a new id for each request, or none.",
    ),
    (
        lambda: split_envelope({"deadline_ms": 0}),
        "bad_request",
        "deadline_ms must be a number above 0, at most 86400000",
    ),
    (lambda: request_pins({"wire": "f64"}, Pins()), "bad_request", "wire must be one of f32, f16, i8, not 'f64'"),
    (
        lambda: request_pins({"weights": "f64"}, Pins()),
        "bad_request",
        "weights must be one of f32, f16, w8a8, w8a32, not 'f64'",
    ),
    (
        lambda: request_pins({"route": "air"}, Pins()),
        "bad_request",
        "route must be one of auto, broker, mesh, not 'air'",
    ),
    (lambda: request_pins({"devices": []}, Pins()), "bad_request", "devices must be a list of at least one name"),
    (
        lambda: request_pins({"accuracy": 2}, Pins()),
        "bad_request",
        "accuracy must be in (0, 1]: the largest relative error that a narrow wire dtype may cause",
    ),
    (
        lambda: split_envelope({"report": 1}),
        "bad_request",
        "report must be true or false: whether the answer waits for the devices' measurements",
    ),
    (
        lambda: request_pins({"wire": "f16", "accuracy": 0.1}, Pins()),
        "bad_request",
        "wire and accuracy exclude each other: accuracy lets the planner choose wire. Send one of them.",
    ),
    (
        lambda: request_pins({"objective": "speed"}, Pins()),
        "bad_request",
        "objective must be one of latency, throughput, memory, not 'speed'",
    ),
    (lambda: split_envelope({"reply_to": 1}), "bad_request", "reply_to must be a topic"),
    (
        lambda: Settings(None, "home").require_broker(),
        "config",
        "no broker: give --broker mqtt://HOST:1883 or a login file, or set HEPTI_BROKER (`hepti broker` "
        "starts one, `hepti demo` needs none)",
    ),
    (
        lambda: BrokerUrl.parse("http://x"),
        "config",
        "the broker's URL has another scheme; write it as mqtt[s]://[user:password@]host[:port], or "
        "ws[s]://[user:password@]host[:port][/path]",
    ),
    (
        lambda: check_name("device", "No Name"),
        "bad_name",
        "device name 'No Name' cannot stand in an MQTT topic: use 1 to 64 of a-z 0-9 _ -, beginning "
        "with a letter or digit, such as no-name",
    ),
    (lambda: parse_size("plenty"), "config", "'plenty' is not a size; write e.g. 400MiB or 2GB"),
    (
        lambda: Checkpoint.open(Path("/nonexistent/model")),
        "model",
        "/nonexistent/model is not a directory; give the Hugging Face directory that holds config.json",
    ),
    (
        lambda: memory_budget(1000, 1 << 30),
        "config",
        "A budget of 0 MiB leaves nothing for weights: loading alone needs 8 MiB. Raise --memory or the "
        "container's limit.",
    ),
]


@pytest.mark.parametrize(("act", "code", "message"), GOLDEN, ids=range(len(GOLDEN)))
def test_a_common_message_keeps_its_wording(act, code, message):
    with pytest.raises(HeptiError) as caught:
        act()
    assert (caught.value.code, str(caught.value)) == (code, message)
