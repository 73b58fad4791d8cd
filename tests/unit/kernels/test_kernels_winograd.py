"""Convolutions 3 x 3 in tiles of 2 x 2 outputs: what the definition says, and the same bits in every part of a map."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels_support import Case, array

from hepti_mqtt.kernels.conv2d import LEAST_CHANNELS, PIECE, TILES
from hepti_mqtt.kernels.jit import JIT

C = LEAST_CHANNELS
# The map that each case is a part of.
WHOLE = (64, 64)
# Error of an output for each sum of |x| |w| that it is of, beside that of a sum of 9 C products.
MORE_ERROR = 4.0


def conv(x, weight, *, pad=(1, 1, 1, 1), activation=None, bias=None, residual=None, **more):
    y, across = x.shape[0] + pad[0] + pad[2] - 2, x.shape[1] + pad[1] + pad[3] - 2
    out = (max(y, 0), max(across, 0), weight.shape[1])
    attrs = {"kernel": (3, 3), "stride": (1, 1), "pad": pad, "activation": activation, "bias": bias is not None}
    weights = [weight] if bias is None else [weight, bias]
    reads = [x] if residual is None else [x, residual]
    return Case("conv2d", reads, [out], weights, packed=1, residual=residual is not None, whole=WHOLE, **attrs, **more)


def part(x, weight, rows, columns, **more):
    """Return the outputs of some rows and columns of a map with a border of 1, from the part of it that they see."""
    ranges, pad, seen = (rows, columns), [0] * 4, []
    for side, (first, stop) in enumerate(ranges):
        low, high = first - 1, stop + 1
        pad[side], pad[side + 2] = max(-low, 0), max(high - x.shape[side], 0)
        seen.append(slice(max(low, 0), min(high, x.shape[side])))
    return conv(np.ascontiguousarray(x[tuple(seen)]), weight, pad=tuple(pad), origin=(rows[0], columns[0]), **more)


@given(
    height=st.integers(0, 7),
    width=st.integers(0, 7),
    pad=st.tuples(*[st.integers(0, 3)] * 4),
    channels=st.sampled_from([C, C + 16]),
    n=st.integers(0, 70),
    origin=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    activation=st.sampled_from([None, "relu6", "tanh"]),
    residual=st.booleans(),
    first=st.booleans(),
)
def test_any_part_of_any_map(height, width, pad, channels, n, origin, activation, residual, first):
    x, weight = array(height, width, channels), array(9 * channels, n, scale=(9 * channels) ** -0.5)
    case = conv(x, weight, pad=pad, origin=origin, activation=activation, bias=array(n), residual_first=first)
    if residual:
        more = {"residual": array(*case.slots[-1].shape), "residual_first": first, "bias": array(n)}
        case = conv(x, weight, pad=pad, origin=origin, activation=activation, **more)
    case.check()


@given(
    cuts=st.lists(st.integers(1, 12), max_size=3, unique=True),
    columns=st.lists(st.integers(1, 8), max_size=1),
    n=st.sampled_from([16, 70]),
)
def test_parts_of_a_map_have_the_bits_of_the_whole(cuts, columns, n):
    x, weight = array(13, 9, C), array(9 * C, n)
    more = {"activation": "relu", "bias": array(n)}
    whole = conv(x, weight, **more).run()[0]
    rows, across = [0, *sorted(cuts), 13], [0, *columns, 9]
    for top, bottom in pairwise(rows):
        for left, right in pairwise(across):
            got = part(x, weight, (top, bottom), (left, right), **more).run()[0]
            np.testing.assert_array_equal(got, whole[top:bottom, left:right])


@pytest.mark.parametrize(
    ("side", "channels", "n"),
    [pytest.param(39, C, 130, marks=pytest.mark.nightly), (4, 2 * PIECE + 16, 20), (2, PIECE, 64)],
)
def test_beside_the_sizes_of_blocks_and_pieces_on_any_number_of_threads(side, channels, n):
    if not JIT:
        side, channels = min(side, 5), min(channels, 48)
    assert not JIT or side != 39 or (side // 2 + 1) ** 2 > 2 * TILES
    k = 9 * channels
    case = conv(array(side, side, channels), array(k, n, scale=k**-0.5), activation="relu6", bias=array(n))
    np.testing.assert_array_equal(case.check()[0], case.run(3)[0])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_the_outputs_that_see_it(value):
    x, weight = array(9, 9, C), np.abs(array(9 * C, 5))
    clean = conv(x, weight).run()[0]
    for y, column in ((4, 4), (5, 5), (0, 7), (8, 8)):
        spoilt = x.copy()
        spoilt[y, column, 1] = value
        got = conv(spoilt, weight).run()[0]
        sees = np.zeros((9, 9), bool)
        sees[max(y - 1, 0) : y + 2, max(column - 1, 0) : column + 2] = True
        assert not np.isfinite(got[sees]).any()
        np.testing.assert_array_equal(got[~sees], clean[~sees])


@pytest.mark.parametrize("spread", [0.0, 4.0])
def test_the_error_is_within_what_is_stated(spread):
    """Values of one size, and of sizes over several powers of ten."""
    channels, n = (256, 64) if JIT else (C, 5)
    x = array(8, 8, channels) * np.exp(array(8, 8, channels) * np.float32(spread))
    weight = array(9 * channels, n)
    case = conv(x, weight)
    exact = case.kernel.reference_function(case.op, case.slots, case.reads, case.plain)[0]
    size = conv(np.abs(x), np.abs(weight))
    scale = size.kernel.reference_function(size.op, size.slots, size.reads, size.plain)[0]
    # Of the patch of 4 x 4 that the four outputs share: a small value beside a large one takes its error.
    around = np.pad(scale, ((1, 1), (1, 1), (0, 0)))
    most = np.max([around[i : i + 8, j : j + 8] for i in range(3) for j in range(3)], axis=0)
    assert (np.abs(case.run()[0] - exact) <= MORE_ERROR * 9 * channels * 2.0**-24 * most).all()
