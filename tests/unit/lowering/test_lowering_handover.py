"""A run that continues under another plan from a block on gives the answer of one device."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program_builder import validate
from sites import EVERY_FAMILY, FAMILIES, TOLERANCE, plan, request, served, tensors
from together import bound

from hepti_mqtt import models
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.core.ids import PLANNER
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.lowering.handover import HandoverError
from hepti_mqtt.models import representative_shape
from hepti_mqtt.runtime.worker.executor import BoundProgram, Executor
from hepti_mqtt.strategies.plan_programs import device_programs, handover_moves, handover_program

METHODS = {
    "row": ("row", {"variant": "kv"}),
    "heads": ("row", {"variant": "heads"}),
    "voltage": ("voltage", {"shares": "uneven"}),
    "block": ("block", {}),
    "galaxy": ("galaxy", {"exchange": "direct"}),
    "megatron": ("megatron", {"reduce": "direct"}),
    "column": ("column", {}),
}
BEFORE, AFTER = 1, 2


def continued(
    before: Mapping[str, BoundProgram], after: Mapping[str, BoundProgram], block: int, inputs: np.ndarray, seed: int
) -> np.ndarray:
    """Return the output of a run that every device stops before a block, and that goes on with other Programs.

    Devices stop at moments of their own, as long as none has begun with the block; frames arrive in any order.
    """
    rng = random.Random(seed)
    executors = {name: Executor() for name in before}
    held: set[str] = set()
    frames = [(name, BEFORE, key, inputs) for name in before for key in before[name].template.inputs]
    for name, executor in executors.items():
        executor.admit(BEFORE, before[name])
        executor.admit(AFTER, after[name])
        if rng.random() < 0.5:  # the others later, when some ops have run
            assert executor.hold(BEFORE, block)
            held.add(name)
    outputs: list[tuple[int, np.ndarray]] = []
    idle = 0
    while frames or idle < 40 * len(executors):
        idle += 1
        if frames and rng.random() < 0.5:
            name, run, key, array = frames.pop(rng.randrange(len(frames)))
            if name in executors and (run == AFTER or BEFORE in executors[name]):
                executors[name].deliver(run, key, array)
            idle = 0
            continue
        name = rng.choice(sorted(executors))
        executor = executors[name]
        if name not in held and rng.random() < 0.3 and executor.hold(BEFORE, block):
            held.add(name)
        if BEFORE in executor and name in held and executor.is_done(BEFORE):
            executor.hand_over(BEFORE, AFTER)
        step = executor.next_step() if name in held else None
        if step is None:
            continue
        idle, out = 0, step.run(ops=rng.choice((0, 1, 2)))
        if out is None:
            continue
        array = np.array(out.array)
        if out.op.to == (PLANNER,):
            outputs.append((out.op.row, array))
        frames += [(to, out.run_id, (out.op.node, out.op.part, name), array) for to in out.op.to if to != PLANNER]
    assert all(executor.finish_if_done(AFTER) for executor in executors.values()), "a device waits for nothing"
    return np.concatenate([array for _, array in sorted(outputs, key=lambda part: part[0])])


def check(family: str, before: Plan, after: Plan, block: int, seed: int = 0, want: str = "task") -> None:
    spec = EVERY_FAMILY[family]
    shape, inputs = request(spec, served(spec, (13,)), want)
    parts = device_programs(spec, before, shape)
    handed = {d: handover_program(spec, before, after, shape, block, d) for d in before.devices}
    for one in handed.values():
        validate(one.program)
    then = bound(parts, tensors(spec))
    now = bound({d: h.program for d, h in handed.items()}, tensors(spec))
    now = {d: replace(rest, taken=handed[d].taken) for d, rest in now.items()}
    output = continued(then, now, block, inputs, seed)
    expected = models.reference(spec, tensors(spec), inputs, shape)[1 if want == "task" else 0]
    assert np.abs(output - expected).max() < TOLERANCE * (100 if "f16" in (before.wire, after.wire) else 1)


@pytest.mark.parametrize("family", ["bert-embedding", "vit-classifier"])
@pytest.mark.parametrize("method", METHODS)
def test_borders_give_the_answer_of_one_device(family, method):
    """Every border except in the last layer, where the task may need some rows only."""
    spec = FAMILIES[family]
    before, after = (plan(spec, METHODS[method], shares) for shares in ((1.0, 1.0, 1.0), (3.0, 1.0, 2.0)))
    for block in range(1, len(models.graph(spec, request(spec, (13,))[0]).blocks) - 2):
        check(family, before, after, block, seed=block)


@pytest.mark.parametrize("then", [(3.0, 1.0, 2.0), (3.0, 1.0)], ids=["other rows", "fewer devices"])
@pytest.mark.parametrize("variant", [{"cut": "none"}, {"cut": "none", "halo": "ahead"}], ids=["halo", "halo ahead"])
def test_rows_of_maps_go_on_at_most_borders_and_are_refused_at_the_others(variant, then):
    """A device holds the rows that its windows read, too, and those may be gone before the border."""
    spec = EVERY_FAMILY["tiny-convnet"]
    before, after = (plan(spec, ("map_rows", variant), shares) for shares in ((1.0, 1.0, 1.0), then))
    shape, refused = request(spec, (1,))[0], 0
    borders = range(1, len(models.graph(spec, shape).blocks))
    for block in borders:
        try:
            for device in before.devices:
                handover_program(spec, before, after, shape, block, device)
        except HandoverError:
            refused += 1
        else:
            check("tiny-convnet", before, after, block, seed=block)
    assert 2 * refused < len(borders)


PAIRS = [(a, b) for a in METHODS for b in METHODS if a != b]


@given(
    pair=st.sampled_from(PAIRS),
    shares=st.tuples(*[st.lists(st.integers(1, 9), min_size=n, max_size=3) for n in (3, 2)]),
    wires=st.tuples(*[st.sampled_from(("f32", "f16"))] * 2),
    block=st.integers(1, 2),
    seed=st.integers(0, 99),
)
@settings(max_examples=25)
def test_any_method_goes_on_with_any_other(pair, shares, wires, block, seed):
    """Shares, wire, method and devices may change; what cannot be handed over is refused before it begins."""
    spec = FAMILIES["bert-embedding"]
    before, after = (
        replace(plan(spec, METHODS[name], tuple(map(float, weights))), wire=wire)
        for name, weights, wire in zip(pair, shares, wires, strict=True)
    )
    try:
        handover_moves(spec, before, after, request(spec, (13,))[0], block)
    except HandoverError:
        return
    check("bert-embedding", before, after, block, seed)


def test_borders_within_a_repeated_layer():
    """In a net of many equal layers one stands for several: each border of each kind of copy, and bytes that move."""
    spec = replace(FAMILIES["bert-embedding"], layers=9)
    shape, _ = request(spec, (13,))
    before, after = (plan(spec, METHODS["row"], shares) for shares in ((1.0, 1.0), (9.0, 4.0)))
    for block in range(2, 9):
        for device in before.devices:
            validate(handover_program(spec, before, after, shape, block, device).program)
        moved = [m for m in handover_moves(spec, before, after, shape, block) if m.source != m.target]
        assert [(m.source, m.target, m.nbytes) for m in moved] == [("d1", "d0", 2 * 32 * 4)]


def test_rows_that_a_device_only_relays_never_break_a_handover():
    spec = replace(spec_of_kind("bert-large"), layers=9)
    shape, mlp = representative_shape(spec, 128), ("row", {"variant": "mlp"})
    before, after = (
        replace(plan(spec, mlp, rows), shares={"rows": rows}, ranges={"heads": heads})
        for rows, heads in (
            ((0.512, 0.19, 0.19, 0.108), ((0, 576), (576, 768), (768, 960), (960, 1024))),
            ((0.568, 0.216, 0.216), ((0, 576), (576, 768), (768, 1024))),
        )
    )
    for block in range(1, 9):
        with suppress(HandoverError):
            handover_moves(spec, before, after, shape, block)


def test_what_cannot_go_on_is_refused():
    spec = FAMILIES["bert-embedding"]
    shape, _ = request(spec, (13,))
    rows, more = plan(spec, METHODS["row"], (1.0, 1.0)), plan(spec, METHODS["row"], (1.0, 1.0, 1.0))
    decoder = EVERY_FAMILY["tiny-gpt2"]
    for refused in (
        lambda: handover_moves(spec, rows, rows, shape, 0),
        lambda: handover_moves(spec, rows, rows, shape, 99),
        lambda: handover_moves(spec, rows, more, shape, 1),
        lambda: handover_moves(
            decoder, *[plan(decoder, ("decoder", {}), (1.0, 1.0))] * 2, models.largest_shape(decoder), 1
        ),
    ):
        with pytest.raises(HandoverError):
            refused()
