"""The planner's part of a request: id, deadline, way back, pins."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hepti_mqtt.errors import RequestError
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.service import requests as env

OWN = Pins("row", {"variant": "kv"}, ("a", "b"), "f16")


def test_the_rest_is_the_models_business():
    parts = env.envelope({"id": "x1", "deadline_ms": 1500, "text": "hello", "top_k": 3, "reply_to": "t"}, OWN)
    assert (parts.id, parts.deadline_s, parts.reply_to, parts.pins) == ("x1", 1.5, "t", None)
    assert parts.body == {"text": "hello", "top_k": 3}


def test_pins_that_a_request_leaves_out_are_the_planners():
    assert env.envelope({"strategy": "auto"}, OWN).pins == Pins(None, {}, ("a", "b"), "f16")
    assert env.envelope({"devices": ["b"]}, OWN).pins == Pins("row", {"variant": "kv"}, ("b",), "f16")
    assert env.envelope({"objective": "memory"}, OWN).pins == replace(OWN, objective="memory")
    assert env.envelope({"wire": "i8"}, OWN).pins == Pins("row", {"variant": "kv"}, ("a", "b"), "i8")
    assert env.envelope({"weights": "w8a8"}, OWN).pins == Pins("row", {"variant": "kv"}, ("a", "b"), "f16", "w8a8")
    budget = Pins("row", {"variant": "kv"}, ("a", "b"), accuracy=1e-3)
    assert env.envelope({"accuracy": 1e-3}, OWN).pins == budget, "the wire is the planner's choice then"
    assert env.envelope({"devices": ["a", "b"]}, budget).pins == budget
    assert env.envelope({"wire": "i8"}, budget).pins == Pins("row", {"variant": "kv"}, ("a", "b"), "i8")
    block = env.envelope({"strategy": "block", "devices": ["b", "a", "b"]}, OWN)
    assert block.pins == Pins("block", {}, ("a", "b"), "f16"), "names in one order, so that equal pins are equal"
    assert "devices" not in block.body


def test_a_variant_alone_is_a_pin_that_no_hurried_plan_passes_over():
    assert Pins(wire="f16").free
    assert not env.envelope({"options": {"variant": "heads"}}, Pins()).pins.free


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": 5},
        {"id": "Not A Topic"},
        {"id": "a/b"},
        {"deadline_ms": 0},
        {"deadline_ms": -1},
        {"deadline_ms": "soon"},
        {"deadline_ms": True},
        {"deadline_ms": float("inf")},
        {"deadline_ms": float("nan")},
        {"deadline_ms": 10**400},
        {"reply_to": 5},
        {"strategy": "magic"},
        {"strategy": 5},
        {"strategy": ["row"]},
        {"strategy": {}},
        {"options": "kv"},
        {"options": {"variant": "nothing"}},
        {"strategy": "block", "options": {"variant": "kv"}},
        {"strategy": "two_d", "options": {"x": "3x2"}},
        {"strategy": "pipeline", "options": {"goal": ["latency"]}},
        {"strategy": "pipeline", "options": {"goal": "latency", "micro": "2"}},
        {"devices": []},
        {"devices": "a,b"},
        {"devices": ["UPPER"]},
        {"devices": [1]},
        {"devices": [["a"]]},
        {"wire": "f64"},
        {"objective": "speed"},
        {"objective": ["latency"]},
        {"wire": ["f32"]},
        {"accuracy": 0},
        {"accuracy": 1.5},
        {"accuracy": True},
        {"accuracy": "1e-3"},
        {"accuracy": 1e-3, "wire": "f32"},
        {"weights": "int4"},
        {"weights": ["f32"]},
    ],
)
def test_what_is_wrong_is_named(wrong):
    with pytest.raises(RequestError) as caught:
        env.envelope({"text": "x", **wrong}, Pins())
    assert any(key in str(caught.value) for key in (*wrong, "options"))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_a_request_error(payload):
    try:
        data = env.parse(payload)
    except RequestError:
        return
    assert isinstance(data, dict)


TEXT = st.text("ab9-_/ é", max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(("id", "deadline_ms", "reply_to", *env.PINS), JSON)))
def test_any_values_are_accepted_or_refused_in_words(data):
    try:
        parts = env.envelope(env.parse(json.dumps(data).encode()), OWN)
    except RequestError:
        return
    assert parts.body == {}


def test_deep_and_huge_requests_are_refused(monkeypatch):
    with pytest.raises(RequestError, match="JSON"):
        env.parse(b"[" * 100_000)
    monkeypatch.setattr(env, "MAX_REQUEST_BYTES", 10)
    with pytest.raises(RequestError, match="limit of 10"):
        env.parse(b'{"text": "hello"}')
    with pytest.raises(RequestError, match="object"):
        env.parse(b"[]")


def test_commas_and_brackets_are_counted_before_anything_is_parsed(monkeypatch):
    monkeypatch.setattr(env, "MAX_ITEMS", 5)
    assert env.parse(b'{"ids": [1, 2, 3, 4]}')
    monkeypatch.setattr(env.json, "loads", lambda _: pytest.fail("parsed"))
    with pytest.raises(RequestError, match="6 commas and brackets"):
        env.parse(b'{"ids": [1, 2, 3, 4, 5]}')


def test_requests_that_ask_the_same_have_one_digest_and_no_others_do():
    long, other = "a" * 5000, "a" * 4999 + "b"
    asked = [
        {"text": long},
        {"text": other},
        {"text": len(long)},
        {"texts": [long]},
        {"text": long, "image": other},
        {"text": long + "a", "image": other[1:]},
        {"text": "\ud800" * 5000},
    ]
    assert len({env.digest(data) for data in asked}) == len(asked)
    again = {"image": other, "id": "x", "text": long}
    assert env.digest(again) == env.digest(asked[4])
    assert asked[4] == {"text": long, "image": other}, "and nothing of it has changed"
