"""Copies of copies are one op, with the same bits: drawn chains of `assemble`, run as they are and joined."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from sites import FAMILIES, plan, request

from hepti_mqtt.kernels import Workers
from hepti_mqtt.lowering.passes import joined
from hepti_mqtt.plan_programs import program
from hepti_mqtt.program import Builder, Compute, Program, check
from hepti_mqtt.runtime.worker.executor import Executor, bind

ROWS, COLUMNS = 5, 6


def run(made: Program, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Return what a Program sends, in the order of its Sends."""
    executor = Executor()
    executor.admit(1, bind(made, {}, Workers(1)))
    for n, array in enumerate(inputs):
        executor.deliver(1, (n, 0, "b"), array)
    sent = {}
    while (step := executor.next()) is not None:
        if (out := step.run()) is not None:
            sent[out.op.node] = np.array(out.array)
    return [sent[node] for node in sorted(sent)]


@st.composite
def chains(draw) -> Program:
    """Return a Program that cuts rectangles out of what comes, puts them together, and does so again."""
    b = Builder("a")
    slots = [b.recv((ROWS, COLUMNS), "b", n) for n in range(2)]
    for _ in range(draw(st.integers(2, 5))):
        at = draw(st.integers(0, ROWS))
        first, second = draw(st.sampled_from(slots)), draw(st.sampled_from(slots))
        left = draw(st.integers(0, COLUMNS))
        whole, top, rest = (0, COLUMNS), (0, at), (at, ROWS)
        turned = ((0, ROWS - at), (0, COLUMNS))
        pieces = [
            (0, (top, (0, left)), (top, (0, left))),
            (0, (top, (left, COLUMNS)), (top, (left, COLUMNS))),
            (1, turned, (rest, whole)),
        ]
        copies = tuple(p for p in pieces if all(a < z for a, z in p[2]))
        slots.append(b.compute("assemble", (first, second), (ROWS, COLUMNS), copies=copies))
        if draw(st.booleans()):
            slots.append(b.view(slots[-1], 0, (ROWS, COLUMNS)))
    for node, slot in enumerate(slots[2:]):
        if slot == slots[-1] or draw(st.booleans()):
            b.send(slot, ("c",), 10 + node)
    return b.build()


@given(chains())
def test_what_is_sent_has_the_same_bits(made):
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((ROWS, COLUMNS)).astype(np.float32) for _ in range(2)]
    fewer = joined(made)
    check(fewer)
    assert len(fewer.ops) <= len(made.ops)
    for before, after in zip(run(made, inputs), run(fewer, inputs), strict=True):
        np.testing.assert_array_equal(before, after)


def test_keys_and_values_of_all_devices_are_put_together_by_one_op():
    spec = FAMILIES["bert-embedding"]
    shape, _ = request(spec, (12,))
    made = program(spec, plan(spec, ("row", {"variant": "heads"}), (1.0, 1.0, 1.0)), shape, "d0")
    assembled = {op.writes[0] for op in made.ops if isinstance(op, Compute) and op.kernel == "assemble"}
    again = [op for op in made.ops if isinstance(op, Compute) and op.kernel == "assemble"]
    assert assembled
    assert not any(set(op.reads) <= assembled for op in again)
