"""Tokens are aligned with sound as the reference does, whatever lies beside those that count."""

from __future__ import annotations

import numpy as np
import pytest
from kernels_support import Case

HEADS = ((0, 1), (1, 0), (1, 2))
D, WIDTH, SOUND, ROWS = 4, 12, 40, 16


def case(extent: tuple[int, int, int], spoilt: float = 0.0) -> Case:
    rng = np.random.default_rng(sum(extent))
    layers = [
        (5 * rng.standard_normal(shape)).astype(np.float32) for _ in range(2) for shape in ((ROWS, WIDTH), (SOUND, 24))
    ]
    layers[3][7, 1] += spoilt
    reads = [*layers, np.array(extent, np.int32)]
    return Case("align_tokens", reads, [(ROWS, 1)], heads=HEADS, head_dim=D)


@pytest.mark.parametrize(
    "extent", [(0, 16, 40), (3, 16, 37), (2, 9, 40), (5, 6, 40), (0, 16, 3), (0, 16, 1), (4, 4, 40), (0, 5, 0)]
)
def test_tokens_begin_where_the_reference_has_them(extent):
    one = case(extent)
    one.check()
    (rows,) = one.run()
    start, stop, _ = extent
    assert (np.diff(rows[start:stop, 0]) >= 0).all()
    assert not rows[:start].any()
    assert not rows[stop:].any()


def test_what_is_not_finite_shows():
    (rows,) = case((0, 16, 40), np.nan).run()
    assert np.isnan(rows).any()
