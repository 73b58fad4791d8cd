"""Topics: builders and parser agree, foreign topics are refused, and packet sizes are MQTT's."""

import contextlib
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hepti_mqtt.core.errors import BadNameError, WireError
from hepti_mqtt.core.ids import ALL_DEVICES, PLANNER
from hepti_mqtt.protocol.topics import MAX_LAYER, Kind, ParsedTopic, Topics, publish_bytes

NAMES = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,63}", fullmatch=True).filter(lambda n: n not in (ALL_DEVICES, PLANNER))
LONGEST = "z" * 64
HOME = Topics("home")


@given(NAMES, NAMES, NAMES, NAMES, st.integers(0, MAX_LAYER))
def test_every_built_topic_parses_to_its_names(site, device, model, other, layer):
    t = Topics(site)
    built = {
        t.status(device): ParsedTopic("status", device=device),
        t.caps(device): ParsedTopic("caps", device=device),
        t.heartbeat(device): ParsedTopic("heartbeat", device=device),
        t.command(device): ParsedTopic("command", device=device),
        t.reports(device): ParsedTopic("up", device=device),
        t.probe(device): ParsedTopic("probe", device=device),
        t.use(device): ParsedTopic("use", device=device),
        t.planner_status(): ParsedTopic("planner_status"),
        t.plan(model): ParsedTopic("plan", model=model),
        t.planner_status(other): ParsedTopic("planner_status", group=other),
        t.plan(model, other): ParsedTopic("plan", model=model, group=other),
        t.work(model, device): ParsedTopic("work", model=model, to=device),
        t.weights(device): ParsedTopic("weights", to=device),
        t.activation(model, layer, device, other): ParsedTopic(
            "activation", model=model, layer=layer, source=device, to=other
        ),
        t.activation(model, layer, PLANNER, ALL_DEVICES): ParsedTopic(
            "activation", model=model, layer=layer, source=PLANNER, to=ALL_DEVICES
        ),
        t.activation(model, layer, device, PLANNER): ParsedTopic(
            "activation", model=model, layer=layer, source=device, to=PLANNER
        ),
        t.request(model, other): ParsedTopic("request", model=model, client=other),
        t.text(model, other): ParsedTopic("text", model=model, client=other),
        t.text_response(model, other): ParsedTopic("response", model=model, client=other),
        t.response(model, other, device): ParsedTopic("response", model=model, client=other, request=device),
        t.event(other): ParsedTopic("event", event=other),
    }
    assert {topic: t.parse(topic) for topic in built} == built
    assert {parsed.kind for parsed in built.values()} == set(get_args(Kind))


def matches(topic_filter, topic):
    """Return whether an MQTT filter without `#` matches: the definition, as a reference."""
    a, b = topic_filter.split("/"), topic.split("/")
    return len(a) == len(b) and all(x in ("+", y) for x, y in zip(a, b, strict=True))


def test_filters_match_their_own_topics_and_no_others():
    t = HOME
    topics = {
        "status": t.status("a"),
        "caps": t.caps("a"),
        "hb": t.heartbeat("a"),
        "cmd": t.command("a"),
        "up": t.reports("a"),
        "planner": t.planner_status(),
        "plan": t.plan("m"),
        "x_me": t.activation("m", 3, "peer", "me"),
        "x_all": t.activation("m", 7, "peer", ALL_DEVICES),
        "x_other": t.activation("m", 3, "peer", "other"),
        "x_stranger": t.activation("m", 3, "stranger", "me"),
        "req": t.request("m", "c"),
        "text": t.text("m", "c"),
        "use": t.use("a"),
        "res": t.response("m", "c", "r1"),
        "res_n": t.response("n", "c", "r1"),
        "res_other": t.response("m", "other", "r1"),
        "evt": t.event("joined"),
        "w": t.weights("a"),
        "w_other": t.weights("b"),
    }
    expected = {
        (t.all_status(),): {"status"},
        (t.all_caps(),): {"caps"},
        (t.all_heartbeats(),): {"hb"},
        (t.all_reports(),): {"up"},
        (t.all_plans(),): {"plan"},
        (t.all_requests(),): {"req"},
        (t.all_texts(),): {"text"},
        (t.all_uses(),): {"use"},
        t.activations_from("m", "peer", "me"): {"x_me", "x_all"},
        (t.weights("a"),): {"w"},
        (t.responses("c"),): {"res", "res_n"},
        (t.responses("c", "m"),): {"res"},
    }
    matched = {f: {name for name, topic in topics.items() if any(matches(one, topic) for one in f)} for f in expected}
    assert matched == expected


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
