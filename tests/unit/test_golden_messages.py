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


def pinned(**pins):
    return lambda: request_pins(pins, Pins())


# Messages by code.
GOLDEN = {
    "bad_request": {
        "The request is not valid JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)). "
        'Send an object such as {"text": "..."}.': lambda: parse(b"{"),
        'A request is a JSON object such as {"text": "..."}.': lambda: parse(b"[]"),
        "id: request name 'A b' cannot stand in an MQTT topic: use 1 to 64 of a-z 0-9 _ -, beginning with a letter or "
        "digit, such as a-b": lambda: request_id({"id": "A b"}),
        "deadline_ms must be a number above 0, at most 86400000": lambda: split_envelope({"deadline_ms": 0}),
        "report must be true or false: whether the answer waits for the devices' measurements": (
            lambda: split_envelope({"report": 1})
        ),
        "reply_to must be a topic": lambda: split_envelope({"reply_to": 1}),
        "wire must be one of f32, f16, i8, not 'f64'": pinned(wire="f64"),
        "weights must be one of f32, f16, w8a8, w8a32, not 'f64'": pinned(weights="f64"),
        "route must be one of auto, broker, mesh, not 'air'": pinned(route="air"),
        "devices must be a list of at least one name": pinned(devices=[]),
        "accuracy must be in (0, 1]: the largest relative error that a narrow wire dtype may cause": pinned(accuracy=2),
        "wire and accuracy exclude each other: accuracy lets the planner choose wire. Send one of them.": pinned(
            wire="f16", accuracy=0.1
        ),
        "objective must be one of latency, throughput, memory, not 'speed'": pinned(objective="speed"),
    },
    "id_in_use": {
        "Id q1 belongs to another of your requests, with a different body. Use a new id for each request, or none.": (
            lambda: refuse(IdInUseError.of("q1"))
        ),
    },
    "bad_name": {
        "device name 'No Name' cannot stand in an MQTT topic: use 1 to 64 of a-z 0-9 _ -, beginning with a letter or "
        "digit, such as no-name": lambda: check_name("device", "No Name"),
    },
    "config": {
        "no broker: give --broker mqtt://HOST:1883 or a login file, or set HEPTI_BROKER (`hepti broker` starts one, "
        "`hepti demo` needs none)": lambda: Settings(None, "home").require_broker(),
        "the broker's URL has another scheme; write it as mqtt[s]://[user:password@]host[:port], or "
        "ws[s]://[user:password@]host[:port][/path]": lambda: BrokerUrl.parse("http://x"),
        "'plenty' is not a size; write e.g. 400MiB or 2GB": lambda: parse_size("plenty"),
        "A budget of 0 MiB leaves nothing for weights: loading alone needs 8 MiB. Raise --memory or the container's "
        "limit.": lambda: memory_budget(1000, 1 << 30),
    },
    "model": {
        "/nonexistent/model is not a directory; give the Hugging Face directory that holds config.json": (
            lambda: Checkpoint.open(Path("/nonexistent/model"))
        ),
    },
}
CASES = [(act, code, message) for code, messages in GOLDEN.items() for message, act in messages.items()]


@pytest.mark.parametrize(("act", "code", "message"), CASES, ids=range(len(CASES)))
def test_a_common_message_keeps_its_wording(act, code, message):
    with pytest.raises(HeptiError) as caught:
        act()
    assert (caught.value.code, str(caught.value)) == (code, message)
