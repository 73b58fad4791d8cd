"""The contract of every registered kernel: it runs on arrays of its slots, also on unaligned read-only views.

The ops are those of real Programs (every family, every method, every wire dtype), so that a kernel is tested by being
registered; kernels that no encoder uses have an op here.
"""

from __future__ import annotations

import functools
import itertools
from typing import get_args

import numpy as np
import pytest
from kernels_support import RNG, checked, poisoned, pool
from sites import FAMILIES, METHODS

from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan, WeightDtype
from hepti_mqtt.core.program import NUMPY_DTYPE, Compute, SlotSpec, WeightRef
from hepti_mqtt.kernels import KERNELS, allocate
from hepti_mqtt.models import largest_shape
from hepti_mqtt.strategies.plan_programs import device_programs, make_plan

ROWS = SlotSpec((5, 12))
GAMMA = WeightRef("gamma", (0, 1), (0, 12), "plain")
BESIDE = {"copies": ((1, ((0, 5), (0, 12)), ((0, 5), (12, 24))), (0, ((0, 5), (0, 12)), ((0, 5), (0, 12))))}
IMAGE, MAP = SlotSpec((5, 4, 6)), SlotSpec((3, 2, 4))
WINDOW = {"kernel": (3, 3), "stride": (2, 2), "pad": (1, 1, 1, 1)}
CONV = {**WINDOW, "activation": "relu", "bias": True, "residual": True}
HEADS = {"q_column": 0, "k_column": 4, "v_column": 8, "heads": 2, "head_dim": 2, "scale": 0.5}
BY_HAND = {
    "align_tokens": (
        Compute("align_tokens", (0, 1, 2), (3,), (), {"heads": ((0, 1),), "head_dim": 4}),
        (ROWS, SlotSpec((7, 24)), SlotSpec((3,), "i32"), SlotSpec((5, 1))),
    ),
    "assemble": (Compute("assemble", (0, 1), (2,), (), BESIDE), (ROWS, ROWS, SlotSpec((5, 24)))),
    "sum": (Compute("sum", (0, 1), (2,), (), {"activation": "gelu"}), (ROWS,) * 3),
    "moments": (Compute("moments", (0,), (1,), (), {}), (ROWS, SlotSpec((5, 2)))),
    "normalise": (
        Compute("normalise", (0, 1, 2), (3,), (GAMMA, GAMMA), {"counts": (12, 4), "eps": 1e-5}),
        (ROWS, SlotSpec((5, 2)), SlotSpec((5, 2)), ROWS),
    ),
    "conv2d": (
        Compute(
            "conv2d", (0, 1), (2,), (WeightRef("w", (0, 54), (0, 4)), WeightRef("b", (0, 1), (0, 4), "plain")), CONV
        ),
        (IMAGE, MAP, MAP),
    ),
    "max_pool2d": (Compute("max_pool2d", (0,), (1,), (), WINDOW), (IMAGE, SlotSpec((3, 2, 6)))),
    "average_pool2d": (
        Compute("average_pool2d", (0,), (1,), (), {**WINDOW, "count_pad": False}),
        (IMAGE, SlotSpec((3, 2, 6))),
    ),
    "scale_map": (
        Compute("scale_map", (0, 1), (2,), (), {"activation": "sigmoid"}),
        (SlotSpec((1, 6)), IMAGE, IMAGE),
    ),
    "global_sum": (Compute("global_sum", (0,), (1,), (), {"scale": 0.05}), (IMAGE, SlotSpec((1, 6)))),
    "embed_at": (
        Compute("embed_at", (0, 1), (2,), (WeightRef("w", (0, 7), (0, 12), "plain"),) * 2, {}),
        (SlotSpec((5,), "i32"), SlotSpec((1,), "i32"), ROWS),
    ),
    "frames": (Compute("frames", (0,), (1,), (), {"step": 0.5}), (SlotSpec((120,), "i32"), IMAGE)),
    "add_table": (
        Compute("add_table", (0,), (1,), (WeightRef("w", (0, 9), (0, 15), "plain"),), {"first": (4, 3)}),
        (ROWS, ROWS),
    ),
    "append_rows": (
        Compute("append_rows", (0, 1, 2), (3,), (), {}),
        (SlotSpec((9, 12)), ROWS, SlotSpec((1,), "i32"), SlotSpec((9, 12))),
    ),
    "attention_at": (
        Compute("attention_at", (0, 1, 2), (3,), (), HEADS),
        (ROWS, SlotSpec((9, 12)), SlotSpec((1,), "i32"), SlotSpec((5, 4))),
    ),
    "candidates": (
        Compute("candidates", (0, 1), (2,), (), {"first": 3}),
        (ROWS, SlotSpec((5,), "i32"), SlotSpec((5, 11))),
    ),
    "merge_candidates": (Compute("merge_candidates", (0, 1), (2,), (), {}), (SlotSpec((5, 11)),) * 3),
    "experts_up": (
        Compute(
            "experts_up",
            (0, 1),
            (2,),
            (WeightRef("w", (0, 12), (0, 7)),) * 6,
            {"experts": 3, "chosen": 2, "activation": "silu"},
        ),
        (ROWS, SlotSpec((5, 3)), SlotSpec((10, 7))),
    ),
    "experts_down": (
        Compute(
            "experts_down",
            (0, 1),
            (2,),
            (WeightRef("w", (0, 7), (0, 12)),) * 3,
            {"experts": 3, "chosen": 2, "normed": True},
        ),
        (SlotSpec((10, 7)), SlotSpec((5, 3)), ROWS),
    ),
    "add": (Compute("add", (0, 1), (2,), (), {"bias": False}), (ROWS,) * 3),
}


@functools.cache
def examples():
    """Return {kernel: (op, slots)}: for each kernel the first op of a Program in which every array has elements.

    "linear in STORAGE" is `linear` over weights kept narrow.
    """
    found = dict(BY_HAND)
    for spec, (strategy, options), wire in itertools.product(FAMILIES.values(), METHODS, ("f32", "f16", "i8")):
        if found.keys() >= KERNELS.keys():
            break
        devices = ("a",) if strategy == "single" else ("a", "b")
        template = Plan("m", PlanVersion(1, 1), strategy, devices, "a", wire=wire)
        plan = make_plan(spec, template, strategy, options, [1.0] * len(devices))
        for program in device_programs(spec, plan, largest_shape(spec)).values():
            ops = (op for op in program.ops if isinstance(op, Compute))
            for op in (step for whole in ops for step in whole.kernels):
                if all(program.slots[s].nbytes for s in (*op.reads, *op.writes)):
                    found.setdefault(op.kernel, (op, program.slots))
    op, slots = found["linear"]
    for storage in set(get_args(WeightDtype)) - {"f32"}:
        refs = tuple(r._replace(weight_dtype=storage) if r.layout == "packed" else r for r in op.weights)
        found[f"linear in {storage}"] = op._replace(weights=refs), slots
    return found


def weight(ref):
    buffer = allocate(ref)
    (top, bottom), (left, right) = ref.rows, ref.columns
    buffer.put(RNG.standard_normal((bottom - top, right - left)).astype(np.float32), top, left)
    return buffer.finish()


class Bound:
    """One bound kernel, with arrays of its slots."""

    def __init__(self, name, workers):
        self.op, slots = examples()[name]
        self.run = checked(self.op, slots, [weight(r) for r in self.op.weights], workers)
        self.reads = [np.zeros(slots[s].shape, NUMPY_DTYPE[slots[s].dtype]) for s in self.op.reads]
        self.writes = [poisoned(slots[s]) for s in self.op.writes]


@pytest.fixture(params=sorted([*KERNELS, *(f"linear in {s}" for s in get_args(WeightDtype) if s != "f32")]))
def bound(request):
    assert request.param in examples(), "no Program uses this kernel: give `examples` an op of it"
    with pool(1) as workers:
        yield Bound(request.param, workers)


def at(memory, offset, array):
    """Return an array like `array` at `offset` bytes of `memory`."""
    return memory[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)


def test_what_is_read_may_be_an_unaligned_read_only_view(bound):
    wanted = [w.copy() for w in bound.writes]
    bound.run(bound.reads, wanted)
    views = []
    for array in bound.reads:
        memory = np.zeros(array.nbytes + 64, np.uint8)
        views.append(at(memory, -memory.ctypes.data % 64 + 1, array))
        views[-1][...] = array
        views[-1].flags.writeable = False
    bound.run(views, bound.writes)
    for got, want in zip(bound.writes, wanted, strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_share_of_no_rows_is_legal():
    op, slots = examples()["linear"]
    empty = [s._replace(shape=(0, *s.shape[1:])) for s in slots]
    with pool(1) as workers:
        run = checked(op, empty, [weight(r) for r in op.weights], workers)
        run(*([np.zeros(empty[s].shape, np.float32) for s in group] for group in (op.reads, op.writes)))
