"""The likeliest of a row of logits: wherever its columns lie, they and the sums of all are those of the whole row."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from kernels_support import Case

HEAT = np.array([0.0, 1.0, 0.3], np.float32)
K = 8


def logits(columns: int, equal: bool = False) -> np.ndarray:
    rng = np.random.default_rng(columns)
    return (rng.integers(-2, 3, (3, columns)) if equal else 4 * rng.standard_normal((3, columns))).astype(np.float32)


def found(x: np.ndarray, first: int = 0) -> np.ndarray:
    return Case("candidates", [x, HEAT.view(np.int32)], [(3, 2 * K + 3)], first=first).run()[0]


@pytest.mark.parametrize("columns", [1, 5, 8, 9, 64, 65, 1000])
@pytest.mark.parametrize("equal", [False, True])
def test_candidates_are_those_of_the_reference_however_the_row_is_divided(columns, equal):
    x = logits(columns, equal)
    Case("candidates", [x, HEAT.view(np.int32)], [(3, 2 * K + 3)], first=7).check()
    whole, cuts = found(x), sorted({0, columns // 3, columns // 2, columns})
    parts = [found(x[:, a:z].copy(), a) for a, z in pairwise(cuts)]
    merged = Case("merge_candidates", parts, [whole.shape]).run()[0]
    np.testing.assert_array_equal(merged[:, : 2 * K], whole[:, : 2 * K])
    np.testing.assert_allclose(merged[:, 2 * K :], whole[:, 2 * K :], rtol=1e-5)
    Case("merge_candidates", parts, [whole.shape]).check()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows(value):
    x = logits(40)
    x[1, 30] = value
    with np.errstate(invalid="ignore"):
        rows = found(x)
    assert np.isfinite(rows).all(axis=1).tolist() == [True, False, True]
