"""Discovery for Home Assistant: payloads against a schema written from its own, and what follows from its messages."""

import json
import re

import msgpack
import pytest
import voluptuous as vol
from client_support import A_PLAN, a_record
from hypothesis import given, settings
from hypothesis import strategies as st

from hepti_mqtt.protocol.messages import Heartbeat, Status, encode_heartbeat, encode_status
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.service.home_assistant import LONGEST_STATE, RANKING, RETAINED_S, STATE_S, HomeAssistantSession

TOPICS = Topics("home")
TASKS = {"mini": "embedding", "mood": "classification"}

# -- Home Assistant's rules (components/mqtt/schemas.py: device discovery, and those of the platforms used) -----------


def topic(value):
    if not isinstance(value, str) or not value or set("+#\0") & set(value):
        raise vol.Invalid("not a topic to publish to")
    return value


def template(value):
    if not isinstance(value, str) or value.count("{{") != value.count("}}"):
        raise vol.Invalid("not a template")
    return value


def optional(*names):
    return dict.fromkeys(map(vol.Optional, names), str)


ENTITY = {
    vol.Required("platform"): str,
    vol.Required("unique_id"): vol.All(str, vol.Length(min=1)),
    vol.Optional("name"): vol.Any(str, None),
    vol.Optional("entity_category"): vol.Any("diagnostic", "config"),
    vol.Optional("json_attributes_topic"): topic,
    vol.Optional("json_attributes_template"): template,
    vol.Optional("value_template"): template,
    **optional("device_class"),
}
SENSOR = {
    **ENTITY,
    **optional("unit_of_measurement"),
    vol.Optional("state_class"): vol.Any("measurement", "total", "total_increasing"),
    vol.Optional("options"): vol.All([str], vol.Length(min=1)),
}
SWITCH = {
    **ENTITY,
    **optional("payload_on", "payload_off"),
    vol.Required("command_topic"): topic,
    vol.Optional("retain"): bool,
}
PLATFORMS = {"sensor": vol.Schema(SENSOR), "update": vol.Schema(ENTITY), "switch": vol.Schema(SWITCH)}
DISCOVERY = vol.Schema(
    {
        vol.Required("device"): vol.All(
            {
                vol.Optional("identifiers"): [str],
                vol.Optional("connections"): [[str]],
                **optional("name", "manufacturer", "model", "sw_version", "via_device"),
            },
            lambda device: device if device.get("identifiers") or device.get("connections") else vol.Invalid("no id"),
        ),
        vol.Required("origin"): {vol.Required("name"): str, **optional("sw_version")},
        vol.Required("components"): vol.Schema({str: lambda part: PLATFORMS[part["platform"]](part)}),
        vol.Optional("state_topic"): topic,
        vol.Optional("availability"): [{vol.Required("topic"): topic, vol.Optional("value_template"): template}],
        vol.Optional("qos"): vol.Any(0, 1, 2),
    }
)
OBJECT_ID = re.compile(r"homeassistant/device/[a-zA-Z0-9_-]+/config")


class Broker:
    """What is retained."""

    def __init__(self, session):
        self.session, self.kept = session, {}
        self.topics = []

    def take(self, messages):
        for message in messages:
            assert message.retain
            self.topics.append(message.topic)
            if message.payload:
                self.kept[message.topic] = message.payload
            else:
                self.kept.pop(message.topic, None)

    def hear(self, topic_, payload, now=0.0):
        self.take(self.session.handle_message(topic_, payload, now))

    def configs(self):
        return {name: json.loads(body) for name, body in self.kept.items() if name.endswith("/config")}

    def state(self, kind, name):
        return json.loads(self.kept[TOPICS.home(kind, name)])


def started(tasks=TASKS):
    broker = Broker(HomeAssistantSession(TOPICS, "homeassistant", tasks))
    broker.take(broker.session.handle_connection(0.0))
    return broker


def online(name, broker, version="0.2.0"):
    broker.hear(TOPICS.status(name), encode_status(Status("online", 7, version=version)))


def beat(cpu=0.25, temperature=48.5):
    return encode_heartbeat(Heartbeat(7, 1, cpu, 1 << 30, temperature, 2e-3, 1e7, 1.25, 1 << 20))


def test_every_payload_is_valid_and_names_its_own():
    broker = started({**TASKS, "gpt": "generation", "cat": "image_classification", "order": RANKING})
    for name in ("pi-1", "pi_2"):
        online(name, broker)
    configs = broker.configs()
    assert len(configs) == 1 + 5 + 2
    for name, body in configs.items():
        assert OBJECT_ID.fullmatch(name)
        DISCOVERY(body)
    ids = [part["unique_id"] for body in configs.values() for part in body["components"].values()]
    assert len(set(ids)) == len(ids)
    labelled = [name for name, body in configs.items() if "label" in body["components"]]
    assert [("order" in name.lower()) for name in labelled] == [False, False], "a ranker has no label"
    (device, _) = [body["components"] for body in configs.values() if "temperature" in body["components"]]
    assert {device[name].get("state_class") for name in ("temperature", "memory", "round_trip")} == {"measurement"}


@settings(max_examples=30)
@given(st.lists(st.from_regex(r"[a-z0-9][a-z0-9_-]{0,20}", fullmatch=True), unique=True, max_size=6), st.integers(0, 5))
def test_devices_that_are_forgotten_leave_nothing(names, kept):
    broker = started()
    for name in names:
        online(name, broker)
    for name in names[kept:]:
        broker.hear(TOPICS.status(name), b"")
    assert len(broker.configs()) == 1 + len(TASKS) + len(names[:kept])
    assert {TOPICS.home("device", name) for name in names[kept:]}.isdisjoint(broker.kept)


def test_a_birth_message_brings_everything_again():
    broker = started()
    online("pi-1", broker)
    broker.topics.clear()
    broker.hear("homeassistant/status", b"offline")
    assert not broker.topics
    broker.hear("homeassistant/status", b"online")
    assert set(broker.topics) == set(broker.kept)


def test_what_an_earlier_planner_left_is_cleared_and_nothing_else():
    broker = started()
    online("pi-1", broker)
    ghost, other = "homeassistant/device/hepti_home_MODEL_old/config", "homeassistant/device/zigbee_lamp/config"
    neighbour = "homeassistant/device/hepti_home_2_MODEL_old/config"
    for name in (ghost, other, neighbour, *broker.configs()):
        broker.kept.setdefault(name, b"{}")
        broker.hear(name, broker.kept[name])
    broker.take(broker.session.tick(RETAINED_S / 2))
    assert ghost in broker.kept
    broker.take(broker.session.tick(RETAINED_S))
    assert ghost not in broker.kept
    assert {other, neighbour} < broker.kept.keys()


def test_states_say_load_share_and_plan():
    broker = started()
    online("a", broker)
    online("b", broker)
    broker.hear(TOPICS.heartbeat("a"), beat(), STATE_S)
    plan = {"strategy": "row", "devices": ["a", "b"], "weights": {"rows": [3, 1]}, "reason": "why " * 100}
    broker.hear(TOPICS.plan("mini"), msgpack.packb(a_record(active={**A_PLAN, **plan})))
    state = broker.state("device", "a")
    assert (state["load_percent"], state["free_mib"], state["temperature_c"]) == (25.0, 1024, 48.5)
    assert (state["share_percent"], broker.state("device", "b")["share_percent"]) == (75.0, 25.0)
    model = broker.state("model", "mini")
    assert (model["state"], model["plan"]) == ("serving", "row on a, b")
    assert len(model["plan_attributes"]["reason"]) > LONGEST_STATE
    assert broker.state("model", "mood")["state"] == "no plan"


def test_a_switch_shows_what_people_want_whatever_comes_first():
    broker = started()
    broker.hear(TOPICS.use("a"), b"off")  # retained: before the device is known
    online("a", broker)
    assert broker.state("device", "a")["use"] == "off"
    switch = broker.configs()["homeassistant/device/hepti_home_DEVICE_a/config"]["components"]["use"]
    assert (switch["command_topic"], switch["retain"]) == (TOPICS.use("a"), True)
    online("a", broker)
    assert broker.state("device", "a")["use"] == "off"
    for said in (switch["payload_on"].encode(), b""):
        broker.hear(TOPICS.use("a"), b"off")
        broker.hear(TOPICS.use("a"), said)
        assert broker.state("device", "a")["use"] == "on"


def test_heartbeats_are_passed_on_slowly():
    broker = started()
    online("a", broker)
    for second in range(100):
        broker.hear(TOPICS.heartbeat("a"), beat(cpu=second / 100), float(second))
    assert broker.topics.count(TOPICS.home("device", "a")) <= 2 + 100 / STATE_S


def test_labels_long_texts_and_errors():
    broker = started({"mood": "classification", "gpt": "generation", "ears": "transcription"})

    def reply(model, latency_ms, now, **answer):
        broker.take(broker.session.record_reply(model, latency_ms, json.dumps(answer).encode(), now))
        return broker.state("model", model)

    labels = [{"label": "x" * 300, "score": 0.9}, {"label": "b", "score": 0.1}]
    state = reply("mood", 12.34, 5.0, ok=True, result={"labels": labels})
    assert (len(state["label"]), state["answer_attributes"]["labels"]) == (LONGEST_STATE, labels)
    assert (state["latency_ms"], state["requests_per_minute"]) == (12.3, 1)
    written = {"ok": True, "result": {"text": "y" * 999, "ids": []}}
    state = reply("gpt", 1.0, 5.0, **written)
    assert (len(state["text"]), len(state["answer_attributes"]["text"])) == (LONGEST_STATE, 999)
    assert "y" * 9 not in json.dumps(reply("ears", 1.0, 5.0, **written)), "it was said, not kept"
    broker.take(broker.session.tick(66.0))
    assert broker.state("model", "mood")["requests_per_minute"] == 0
    reply("gpt", 1.0, 70.0, ok=False, error={"code": "no_plan", "message": "no device"})
    reply("gpt", 1.0, 71.0, ok=False, error={"code": "cancelled", "message": "taken back"})
    assert "no device" in broker.state("site", "state")["last_error"], "a client that left is no error"


@pytest.mark.parametrize("payload", [b"", b"\xff", b"{}", b"[]", b"null"])
def test_what_cannot_be_read_is_ignored(payload):
    broker = started()
    online("a", broker)
    kept = dict(broker.kept)
    for name in (TOPICS.heartbeat("a"), "homeassistant/status", "homeassistant/device/x/config", "elsewhere"):
        broker.hear(name, payload, 100.0)
    assert broker.kept == kept
