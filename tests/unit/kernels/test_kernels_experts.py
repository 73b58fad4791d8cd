"""Products with the matrices of chosen experts: what NumPy computes, row by row and in blocks."""

from __future__ import annotations

import numpy as np
import pytest
from gguf_writer import quantised
from kernels_support import checked, pool

from hepti_mqtt.core.program import Compute, SlotSpec, WeightRef
from hepti_mqtt.core.storage import STORAGES, StoredRows
from hepti_mqtt.kernels import KERNELS, allocate

RNG = np.random.default_rng(3)
EXPERTS, CHOSEN, H, F = 5, 2, 64, 96


def matrices(storage: str, count: int, k: int, n: int) -> tuple[list, list]:
    """Return packed matrices [k, n], and their values."""
    packed, values = [], []
    for _ in range(count):
        rows = StoredRows(STORAGES[storage], quantised(RNG.standard_normal((n, k)), storage))
        buffer = allocate(WeightRef("w", (0, k), (0, n), "packed", storage))
        buffer.put(rows if storage != "f32" else rows.values(), 0, 0)
        packed.append(buffer.finish())
        values.append(rows.values())
    return packed, values


def run(kernel: str, attrs: dict, reads: list, columns: int, packed: list) -> np.ndarray:
    m = len(reads[1])
    rows = m * CHOSEN if kernel == "experts_up" else m
    slots = [*(SlotSpec(read.shape) for read in reads), SlotSpec((rows, columns))]
    out = np.full((rows, columns), np.nan, np.float32)
    with pool(1) as workers:
        checked(operation(kernel, attrs), slots, packed, workers)(reads, [out])
    return out


def operation(kernel: str, attrs: dict) -> Compute:
    return Compute(kernel, (0, 1), (2,), attrs={"experts": EXPERTS, "chosen": CHOSEN, **attrs})


@pytest.mark.parametrize("storage", ["f32", "q4_0"])
@pytest.mark.parametrize("m", [1, 13])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("more", [{}, {"bias": True, "limit": 3.0, "offset": 1.0}], ids=str)
def test_chosen_experts_are_those_of_the_reference_and_a_row_has_its_own(
    storage: str, m: int, normed: bool, more: dict
) -> None:
    x, logits = (RNG.standard_normal((m, n)).astype(np.float32) for n in (H, EXPERTS))
    ups, up_values = matrices(storage, 2 * EXPERTS, H, F)
    downs, down_values = matrices(storage, EXPERTS, F, H)
    steps = (
        ("experts_up", {"activation": "silu", **more}, F, ups, up_values),
        ("experts_down", {"normed": normed, **more}, H, downs, down_values),
    )
    for _, _, columns, packed, values in steps if more else ():
        tables = [RNG.standard_normal((EXPERTS, columns)).astype(np.float32) for _ in range(len(packed) // EXPERTS)]
        packed += tables
        values += tables
    read = x
    for kernel, attrs, columns, packed, values in steps:
        out = run(kernel, attrs, [read, logits], columns, packed)
        op, slots = operation(kernel, attrs), [SlotSpec(read.shape), SlotSpec(logits.shape), SlotSpec(out.shape)]
        (want,) = KERNELS[kernel].reference(op, slots, [read, logits], values)
        np.testing.assert_allclose(out, want, atol=2e-5 * np.abs(want).max())
        if m > 1:
            of_last = slice(-CHOSEN, None) if kernel == "experts_down" else slice(-1, None)
            alone = run(kernel, attrs, [np.ascontiguousarray(read[of_last]), logits[-1:]], columns, packed)
            np.testing.assert_array_equal(alone, out[-len(alone) :])
        read = out
