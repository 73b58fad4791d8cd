"""Products with the matrices of chosen experts: what NumPy computes, row by row and in blocks."""

from __future__ import annotations

import numpy as np
import pytest
from gguf_writer import quantised
from kernels_support import Case, held

from hepti_mqtt.core.storage import STORAGES, StoredRows
from hepti_mqtt.kernels import Weight

EXPERTS, CHOSEN, H, F = 5, 2, 64, 96


def matrix(storage: str, values: np.ndarray) -> Weight:
    """Return a packed matrix [k, n] of values [n, k]."""
    return held(values.T if storage == "f32" else StoredRows(STORAGES[storage], quantised(values, storage)))


def product(kernel: str, reads: list[np.ndarray], columns: int, weights: list[Weight], **attrs: object) -> Case:
    rows = len(reads[1]) * (CHOSEN if kernel == "experts_up" else 1)
    return Case(kernel, reads, [(rows, columns)], weights, experts=EXPERTS, chosen=CHOSEN, **attrs)


@pytest.mark.parametrize("storage", ["f32", "q4_0"])
@pytest.mark.parametrize("m", [1, 13])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("more", [{}, {"bias": True, "limit": 3.0, "offset": 1.0}], ids=str)
def test_chosen_experts_are_those_of_the_reference_and_a_row_has_its_own(
    storage: str, m: int, normed: bool, more: dict
) -> None:
    rng = np.random.default_rng(m)

    def normals(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    read, logits = normals(m, H), normals(m, EXPERTS)
    for kernel, count, k, n, how in (
        ("experts_up", 2 * EXPERTS, H, F, {"activation": "silu"}),
        ("experts_down", EXPERTS, F, H, {"normed": normed}),
    ):
        weights = [matrix(storage, normals(n, k)) for _ in range(count)]
        weights += [normals(EXPERTS, n) for _ in range(count // EXPERTS) if more]
        case = product(kernel, [read, logits], n, weights, **how, **more)
        (out,), (want,) = case.run(), case.reference()
        np.testing.assert_allclose(out, want, atol=2e-5 * np.abs(want).max())
        if m > 1:
            last = read[-CHOSEN:] if kernel == "experts_down" else read[-1:]
            (alone,) = product(kernel, [last, logits[-1:]], n, case.weights, **how, **more).run()
            np.testing.assert_array_equal(alone, out[-len(alone) :])
        read = out
