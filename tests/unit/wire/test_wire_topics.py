"""Topics: builders and parser agree, foreign topics are refused, and packet sizes are MQTT's."""

import contextlib
from dataclasses import asdict
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hepti_mqtt.core.errors import BadNameError, WireError
from hepti_mqtt.core.ids import ALL_DEVICES, PLANNER
from hepti_mqtt.protocol.topics import MAX_LAYER, Kind, ParsedTopic, Topics, publish_bytes
from hepti_mqtt.transport.codec import matches

NAMES = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,63}", fullmatch=True).filter(lambda n: n not in (ALL_DEVICES, PLANNER))
LONGEST = "z" * 64
HOME = Topics("home")


OF_A_DEVICE = ("status", "caps", "heartbeat", "command", "probe", "use")


def every_topic(t, device, model, other, layer):
    """Return topics of every kind, each with what it is parsed to."""
    ends = ((device, other), (device, ALL_DEVICES), (PLANNER, ALL_DEVICES), (device, PLANNER))
    activation = {"kind": "activation", "model": model, "layer": layer}
    return {
        **{getattr(t, kind)(device): ParsedTopic(kind, device=device) for kind in OF_A_DEVICE},
        t.reports(device): ParsedTopic("up", device=device),
        **{t.activation(model, layer, a, b): ParsedTopic(**activation, source=a, to=b) for a, b in ends},
        t.planner_status(): ParsedTopic("planner_status"),
        t.plan(model): ParsedTopic("plan", model=model),
        t.planner_status(other): ParsedTopic("planner_status", group=other),
        t.plan(model, other): ParsedTopic("plan", model=model, group=other),
        t.work(model, device): ParsedTopic("work", model=model, to=device),
        t.weights(device): ParsedTopic("weights", to=device),
        t.request(model, other): ParsedTopic("request", model=model, client=other),
        t.text(model, other): ParsedTopic("text", model=model, client=other),
        t.text_response(model, other): ParsedTopic("response", model=model, client=other),
        t.response(model, other, device): ParsedTopic("response", model=model, client=other, request=device),
        t.event(other): ParsedTopic("event", event=other),
    }


@given(NAMES, NAMES, NAMES, NAMES, st.integers(0, MAX_LAYER))
def test_every_built_topic_parses_to_its_names(site, device, model, other, layer):
    topics = Topics(site)
    built = every_topic(topics, device, model, other, layer)
    assert {topic: topics.parse(topic) for topic in built} == built
    assert {parsed.kind for parsed in built.values()} == set(get_args(Kind))


FILTERS = {
    (HOME.all_status(),): {"kind": "status"},
    (HOME.all_caps(),): {"kind": "caps"},
    (HOME.all_heartbeats(),): {"kind": "heartbeat"},
    (HOME.all_reports(),): {"kind": "up"},
    (HOME.all_plans(),): {"kind": "plan", "group": ""},
    (HOME.all_requests(),): {"kind": "request"},
    (HOME.all_texts(),): {"kind": "text"},
    (HOME.all_uses(),): {"kind": "use"},
    (HOME.weights("a"),): {"kind": "weights", "to": "a"},
    (HOME.responses("c"),): {"kind": "response", "client": "c", "request": "a"},
    (HOME.responses("c", "m"),): {"kind": "response", "client": "c", "request": "a", "model": "m"},
    HOME.activations_from("m", "a", "c"): {"kind": "activation", "model": "m", "source": "a"},
}


@pytest.mark.parametrize("filters", FILTERS)
def test_filters_match_their_own_topics_and_no_others(filters):
    topics = {
        topic: parsed for names in ("amc", "bnd", "anc") for topic, parsed in every_topic(HOME, *names, 3).items()
    }
    matched = [topics[topic] for topic in topics if any(matches(one, topic) for one in filters)]
    own = [one for one in topics.values() if FILTERS[filters].items() <= asdict(one).items() and one.to != PLANNER]
    assert matched == own
    assert matched


@pytest.mark.parametrize("bad", ["", "A", "a/b", "a+", "#", "-a", "a" * 65, ALL_DEVICES, PLANNER, "ä", "a\n"])
def test_an_invalid_name_is_refused(bad):
    for build in (
        lambda: Topics(bad),
        lambda: HOME.status(bad),
        lambda: HOME.plan(bad),
        lambda: HOME.request("m", bad),
        lambda: HOME.request(bad, "c"),
        lambda: HOME.response("m", "c", bad),
        lambda: HOME.event(bad),
        lambda: HOME.responses(bad),
        lambda: HOME.activations_from("m", "a", bad) if bad != PLANNER else HOME.status(bad),
        lambda: HOME.activation("m", 0, bad if bad != PLANNER else ALL_DEVICES, "b"),
    ):
        with pytest.raises(BadNameError):
            build()


@given(st.text())
def test_any_text_is_a_topic_of_ours_or_a_wire_error(tail):
    for topic in (tail, f"hepti/v1/home/{tail}"):
        with contextlib.suppress(WireError):
            assert isinstance(HOME.parse(topic), ParsedTopic)


def test_a_reply_is_allowed_only_below_the_clients_own_response_topic():
    own = HOME.response("m", "c", "r")
    assert HOME.response_allowed(own, "m", "c")
    assert HOME.response_allowed(own + "/deeper", "m", "c")
    for reply_to in (
        HOME.response("m", "other", "r"),
        HOME.response("n", "c", "r"),
        HOME.command("c"),
        "hepti/v1/home/infer/m/res/c/",
        "hepti/v1/home/infer/m/res/c",
        "hepti/v1/home/infer/m/res/c/+",
        "hepti/v1/home/infer/m/res/c/a/#",
        "hepti/v1/home/infer/m/res/c//a",
        "hepti/v1/home/infer/m/res/c/a\0",
        "hepti/v1/home/infer/m/res/c/\ud800",
        "hepti/v1/home/infer/m/res/c/" + "a" * 600,
        "",
    ):
        assert not HOME.response_allowed(reply_to, "m", "c"), reply_to


def reference_publish(topic, payload_bytes, qos):
    """Build the packet of MQTT 3.1.1 section 3.3 and return its length."""
    body = len(topic.encode()).to_bytes(2, "big") + topic.encode() + (b"\0\1" if qos else b"")
    remaining, length = len(body) + payload_bytes, bytearray()
    while True:
        remaining, digit = divmod(remaining, 128)
        length.append(digit | (0x80 if remaining else 0))
        if not remaining:
            return 1 + len(length) + len(body) + payload_bytes


EDGES = (127, 128, 16_383, 16_384, 2_097_151, 2_097_152, 268_435_455)


@given(st.text(max_size=40), st.integers(0, 2**22) | st.sampled_from(EDGES), st.sampled_from([0, 1, 2]))
def test_a_packet_has_mqtts_size_or_is_refused(topic, nbytes, qos):
    head = reference_publish(topic, 0, qos) - 2
    payload_bytes = max(nbytes - head, 0)
    assert publish_bytes(topic, payload_bytes, qos) == reference_publish(topic, payload_bytes, qos)
    with pytest.raises(ValueError):
        publish_bytes(topic, EDGES[-1] - head + 1, qos)


@pytest.mark.parametrize("layer", [-1, MAX_LAYER + 1])
def test_a_layer_outside_its_range_is_refused(layer):
    with pytest.raises(BadNameError):
        HOME.activation("m", layer, "a", "b")


FOREIGN = (
    *("plan/M", "plan/m/", "dev/a/other", "weights/planner", "a/" * 400),
    *(f"x/m/{layer}/a/b" for layer in ("01", "+1", "٣", "32768", "99999999999999")),
    "x/m/1/all/b",
)


ELSEWHERE = ("", "hepti/v1/home", "hepti/v1/homes/plan/m", "hepti/v2/home/plan/m")


@pytest.mark.parametrize("topic", [*ELSEWHERE, *(f"hepti/v1/home/{topic}" for topic in FOREIGN)])
def test_a_foreign_topic_is_a_wire_error(topic):
    with pytest.raises(WireError):
        HOME.parse(topic)
