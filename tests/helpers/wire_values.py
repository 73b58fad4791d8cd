"""Hypothesis strategies for the values of every wire format; numbers have the bounds of the table of fields."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from math import prod
from typing import Any, get_args

from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hepti_mqtt.core.ids import ALL_DEVICES, PLANNER, PlanVersion
from hepti_mqtt.core.program import NUMPY_DTYPE
from hepti_mqtt.core.spec import PlainShape
from hepti_mqtt.protocol import plausible
from hepti_mqtt.protocol.frames import DTYPES, KINDS, Frame
from hepti_mqtt.protocol.keys import Checked, public_key
from hepti_mqtt.protocol.manifest import Manifest, TensorEntry, grid
from hepti_mqtt.protocol.messages import CODES, Endpoint, KeptSession, LinkReport, Peer, PeerStats

NAMES = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,63}", fullmatch=True).filter(lambda n: n not in (ALL_DEVICES, PLANNER))
U63 = st.integers(0, 2**63 - 1)
U32 = st.integers(0, 2**32 - 1)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
HASHES = st.binary(min_size=32, max_size=32)
VERSIONS = st.builds(PlanVersion, U63, U63)
PLAIN = st.dictionaries(
    TEXTS,
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(-1e15, 1e15) | TEXTS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)
SHAPES = (
    st.lists(st.integers(1, 4096), min_size=1, max_size=5).map(lambda sizes: PlainShape(tuple(sizes)))
    | st.builds(PlainShape, st.just((9, 9)), mask_rows=st.sets(st.integers(0, 17)).map(sorted).map(tuple))
    | st.builds(PlainShape, st.tuples(st.integers(1, 60)), st.just("hidden"), session_rows=st.integers(60, 1024))
)
TOKENS = st.text("0123456789abcdef", max_size=64)
ENDPOINTS = st.builds(
    Endpoint, st.ip_addresses().map(str), st.integers(1, 65_535), st.sampled_from(["", "0123456789abcdef" * 4])
)


def tuples(values: st.SearchStrategy[Any], low: int = 0, high: int = 4) -> st.SearchStrategy[Any]:
    return st.lists(values, min_size=low, max_size=high).map(tuple)


#: Fields that are not numbers, by name as in `plausible.FIELDS`.
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "state": st.sampled_from(["online", "offline", "starting"]),
    "mqtt": st.sampled_from([4, 5]),
    "checked": st.sampled_from(get_args(Checked)),
    "model": NAMES,
    "device": NAMES,
    "plan_version": VERSIONS,
    "manifest": HASHES,
    "digest": st.binary(min_size=8, max_size=8),
    "tiles": st.binary(max_size=20),
    "hashes": tuples(HASHES, 1),
    "tasks": tuples(U63),
    "sessions": tuples(U63),
    "KeptSessions.sessions": tuples(st.builds(KeptSession, VERSIONS, U63, U63)),
    "shapes": tuples(SHAPES, high=16),
    "key": st.just(b"") | HASHES,
    "public_key": st.sampled_from(["", public_key(bytes(31) + b"\7")]),
    "endpoint": st.none() | ENDPOINTS,
    "Prepare.peers": tuples(st.builds(Peer, NAMES, ENDPOINTS, TOKENS, TOKENS)),
    "PrepareFailed.peers": tuples(NAMES),
    "Heartbeat.peers": st.dictionaries(
        NAMES, st.builds(LinkReport, st.floats(0, 1e9), st.none() | st.floats(0, 1e15)), max_size=3
    ),
    "edges": st.dictionaries(NAMES, st.builds(PeerStats, *[U63] * 10, TEXTS), max_size=3),
    "counters": st.dictionaries(TEXTS, U63, max_size=4),
    **dict.fromkeys(("plan", "spec", "curves"), PLAIN),
    **dict.fromkeys(("code", "text", "doing", "reason", "isa", "version"), TEXTS),
}


def field_values(cls: type[Any], name: str) -> st.SearchStrategy[Any]:
    """Return the strategy of one field of a message."""
    if (values := FIELDS.get(f"{cls.__name__}.{name}", FIELDS.get(name))) is not None:
        return values
    rule = plausible.number(name)
    numbers = st.floats(rule.low, rule.high) if rule.real else st.integers(int(rule.low), int(rule.high))
    return st.none() | numbers if rule.optional else numbers


def message_values(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Return the strategy of one class of messages."""
    return st.builds(cls, **{entry.name: field_values(cls, entry.name) for entry in fields(cls)})


MESSAGES = st.one_of(*map(message_values, CODES.values()))


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(tuples(st.integers(0, 5)))
    return Frame(
        kind=draw(st.sampled_from(KINDS)),
        model=draw(NAMES),
        plan_version=draw(VERSIONS),
        run_id=draw(U63),
        layer=draw(st.integers(0, 32_767)),
        node=draw(U32),
        source=draw(NAMES | st.just(PLANNER)),
        part=draw(U32),
        dtype=dtype,
        shape=shape,
        row_start=draw(U32),
        numbers=draw(tuples(U32, high=8)),
        body=draw(hnp.arrays(NUMPY_DTYPE[dtype], shape)),
    )


def frame_fields(frame: Frame) -> tuple[Any, ...]:
    """Return the fields of a frame that its header contains."""
    return tuple(getattr(frame, name) for name in Frame.__slots__ if name not in ("body", "header"))


@st.composite
def entries(draw: st.DrawFn) -> TensorEntry:
    shape = draw(tuples(st.integers(1, 700), 1, 2))
    transposed = len(shape) == 2 and draw(st.booleans())
    seed = draw(st.integers())
    hashes = tuple(hashlib.sha256(f"{seed}{i}".encode()).digest() for i in range(prod(grid(shape, transposed))))
    name, dtype = draw(st.text(min_size=1, max_size=20)), draw(st.sampled_from(["f32", "f16"]))
    return TensorEntry(name, shape, dtype, transposed, hashes)


MANIFESTS = st.builds(
    lambda model, some: Manifest(model, tuple(some)),
    NAMES,
    st.lists(entries(), max_size=4, unique_by=lambda entry: entry.name),
)
