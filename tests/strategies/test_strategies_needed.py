"""Every op of every device is needed for the answer: who has all of the answer knows that nobody computes any more.

A decoder's next step relies on it: its devices have cached their rows then.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sites import FAMILIES, METHODS, plan, request

from hepti_mqtt import models
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.ids import PLANNER
from hepti_mqtt.models.shapes import PackedTokens
from hepti_mqtt.plan_programs import programs
from hepti_mqtt.program import Compute, Program, Recv, Send, written
from hepti_mqtt.strategies import STRATEGIES

GPT = spec_of_kind("tiny-gpt2")
CACHING = [n for n, s in STRATEGIES.items() if s.unsupported(models.graph(GPT, PackedTokens((1,), cache=64))) is None]


def unneeded(parts: Mapping[str, Program]) -> list[tuple[str, int]]:
    """Return (device, place) of the ops on which nothing depends that the planner is sent."""
    makers = {(d, slot): (d, i) for d, p in parts.items() for i, op in enumerate(p.ops) for slot in written(op)}
    sends = [(d, i, op) for d, p in parts.items() for i, op in enumerate(p.ops) if isinstance(op, Send)]
    senders = {(op.node, op.part, d): (d, i) for d, i, op in sends}
    waiting = [(d, i) for d, i, op in sends if op.to == (PLANNER,)]
    needed: set[tuple[str, int]] = set()
    while waiting:
        device, place = at = waiting.pop()
        if at in needed:
            continue
        needed.add(at)
        program = parts[device]
        op = program.ops[place]
        if isinstance(op, Recv) and op.source != PLANNER:
            waiting.append(senders[op.key])
        waiting += [makers[device, slot] for slot in program.reads(op) if (device, slot) in makers]
    return [(d, i) for d, p in parts.items() for i in range(len(p.ops)) if (d, i) not in needed]


share = st.one_of(st.just(0.0), st.floats(0.01, 10.0))


@settings(max_examples=60)
@given(
    name=st.sampled_from(CACHING),
    weights=st.lists(share, min_size=1, max_size=6).filter(any),
    head=st.integers(0, 5),
    tokens=st.integers(1, 20),
)
def test_all_of_a_step_is_needed_for_its_token(name, weights, head, tokens):
    weights = weights if STRATEGIES[name].most_devices is None else [1.0]
    chosen = plan(GPT, (name, {}), weights, head % len(weights))
    parts = programs(GPT, chosen, PackedTokens((tokens,), cache=64))
    kept = [op for p in parts.values() for op in p.ops if isinstance(op, Compute) and op.kernel == "append_rows"]
    assert len(kept) >= GPT.layers
    assert not unneeded(parts)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_all_of_a_run_is_needed_for_its_answer(family, method):
    spec = FAMILIES[family]
    weights = (1.0, 3.0, 0.5) if STRATEGIES[method[0]].most_devices is None else (1.0,)
    for want in ("task", "hidden"):
        shape, _ = request(spec, (9, 4), want)
        assert not unneeded(programs(spec, plan(spec, method, weights), shape))
