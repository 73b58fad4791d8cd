from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels_support import RNG, Case, array

from hepti_mqtt.core.program import Work
from hepti_mqtt.kernels.conv2d import DEPTH, LEAST_CHANNELS, PIECE, TILES
from hepti_mqtt.kernels.conv_tile import PIXELS
from hepti_mqtt.kernels.jit import JIT
from hepti_mqtt.kernels.tile import ACTIVATIONS

RNG.seed(1)  # for the cases below, which are drawn when this file is imported

WINDOWS = {
    "height": st.integers(0, 9),
    "width": st.integers(0, 9),
    "kernel": st.tuples(st.integers(1, 4), st.integers(1, 4)),
    "stride": st.tuples(st.integers(1, 3), st.integers(1, 3)),
    "pad": st.tuples(*[st.integers(0, 5)] * 4),
}
DILATION = st.tuples(st.integers(1, 3), st.integers(1, 3))


def patches(height, width, kernel, stride, pad, dilation=(1, 1)):
    """Return how many patches fit in (rows, columns)."""
    (sy, sx), (top, left, bottom, right) = stride, pad
    ky, kx = ((size - 1) * apart + 1 for size, apart in zip(kernel, dilation, strict=True))
    return max(0, (height + top + bottom - ky) // sy + 1), max(0, (width + left + right - kx) // sx + 1)


def conv2d(x, weight, *, kernel, stride=(1, 1), pad=(0, 0, 0, 0), activation=None, bias=None, residual=False, **more):
    y, across = patches(*x.shape[:2], kernel, stride, pad, more.get("dilation", (1, 1)))
    out = (y, across, weight.shape[1])
    weights = [weight] if bias is None else [weight, bias]
    attrs = {"kernel": kernel, "stride": stride, "pad": pad, "activation": activation, "bias": bias is not None}
    reads = [x, array(*out)] if residual else [x]
    return Case("conv2d", reads, [out], weights, packed=1, residual=residual, **attrs, **more)


def pool2d(x, kernel, stride, pad, name="max_pool2d", out=None, **more):
    out = out or (*patches(*x.shape[:2], kernel, stride, pad), x.shape[2])
    return Case(name, [x], [out], kernel=kernel, stride=stride, pad=pad, **more)


@given(
    **WINDOWS,
    channels=st.integers(0, 5),
    n=st.integers(0, 40),
    bias=st.booleans(),
    residual=st.booleans(),
    activation=st.sampled_from(ACTIVATIONS),
)
def test_conv2d(height, width, kernel, stride, pad, channels, n, bias, residual, activation):
    x, weight = array(height, width, channels), array(kernel[0] * kernel[1] * channels, n)
    more = {"activation": activation, "residual": residual, "bias": array(n) if bias else None}
    conv2d(x, weight, kernel=kernel, stride=stride, pad=pad, **more).check()


@given(
    **WINDOWS,
    dilation=DILATION,
    groups=st.integers(1, 4) | st.integers(5, 150),
    channels=st.integers(0, 3),
    columns=st.integers(1, 18),
    residual_first=st.booleans(),
)
def test_conv2d_in_groups(height, width, kernel, stride, pad, dilation, groups, channels, columns, residual_first):
    if groups > 4:  # depthwise
        channels = columns = 1
    x, weight = array(height, width, groups * channels), array(kernel[0] * kernel[1] * channels, groups * columns)
    attrs = {"kernel": kernel, "stride": stride, "pad": pad, "dilation": dilation, "groups": groups}
    epilogue = {"activation": "relu6", "bias": array(groups * columns), "residual": groups <= 4}
    conv2d(x, weight, **attrs, **epilogue, residual_first=residual_first and groups <= 4).check()


# Pixels beside the size of a block, channels beside that of a piece, and what of a panel and a vector is left over.
@pytest.mark.parametrize(
    ("width", "channels", "kernel", "n"),
    [
        (PIXELS - 1, 5, (1, 2), 33),
        (PIXELS, 20, (1, 2), 16),
        (2 * PIXELS + 3, 20, (1, 3), 64),
        (5, DEPTH - 1, (2, 1), 20),
        (5, DEPTH, (2, 1), 20),
        (5, 2 * DEPTH + 1, (2, 1), 66),
        (7, DEPTH // 3, (2, 2), 129),
        (7, DEPTH // 2, (2, 2), 48),
    ],
)
@pytest.mark.parametrize("activation", ["relu6", "gelu"])
def test_shapes_beside_the_sizes_of_blocks_and_pieces(width, channels, kernel, n, activation):
    if not JIT:
        width, channels = min(width, 20), min(channels, 40)
    k = kernel[0] * kernel[1] * channels
    x, weight = array(2, width, channels), array(k, n, scale=k**-0.5)
    more = {"activation": activation, "bias": array(n), "residual": True}
    for residual_first in (False, True):
        conv2d(x, weight, kernel=kernel, pad=(1, 0, 0, 1), residual_first=residual_first, **more).check(1e-4, 1e-4)


@pytest.mark.parametrize("kernel", [(1, 1), (3, 3)])
def test_any_number_of_threads_gives_the_same_bits(kernel):
    side = 40 if JIT else 9
    x, weight = array(side, side, 32), array(kernel[0] * kernel[1] * 32, 70)
    case = conv2d(x, weight, kernel=kernel, pad=(0, 0, 0, 0), activation="relu", residual=True)
    np.testing.assert_array_equal(case.run(3)[0], case.run(1)[0])
    depthwise = array(kernel[0] * kernel[1], 32)
    case = conv2d(x, depthwise, kernel=kernel, pad=(0, 0, 0, 0), activation="relu6", groups=32)
    np.testing.assert_array_equal(case.run(3)[0], case.run(1)[0])
    for name, more in (("max_pool2d", {}), ("average_pool2d", {"count_pad": False})):
        case = pool2d(x, (5, 5), (1, 1), (2,) * 4, name, **more)
        np.testing.assert_array_equal(case.run(3)[0], case.run(1)[0])


POOLS = {
    "max": ("max_pool2d", {}),
    "average": ("average_pool2d", {"count_pad": False}),
    "with pads": ("average_pool2d", {"count_pad": True}),
}


@pytest.mark.parametrize(("name", "more"), POOLS.values(), ids=POOLS)
@given(**WINDOWS, channels=st.integers(0, 40))
def test_pool2d(name, more, height, width, kernel, stride, pad, channels):
    case = pool2d(array(height, width, channels), kernel, stride, pad, name, **more)
    if case.slots[1].nbytes:
        case.check(*(() if "average" in name else (0, 0)))


@given(
    height=st.integers(0, 9), width=st.integers(0, 9), channels=st.integers(0, 40), scale=st.sampled_from([1.0, 0.1])
)
def test_global_sum(height, width, channels, scale):
    Case("global_sum", [array(height, width, channels)], [(1, channels)], scale=scale).check()


def test_sums_of_those_who_own_rows_add_up_to_the_mean():
    x = array(31, 7, 1030)
    whole = Case("global_sum", [x], [(1, 1030)], scale=1 / (31 * 7))
    parts = [Case("global_sum", [part], [(1, 1030)], scale=1 / (31 * 7)) for part in (x[:3], x[3:3], x[3:])]
    total = sum(part.run()[0] for part in parts)
    np.testing.assert_allclose(total[0], x.astype("f8").mean(axis=(0, 1)), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(whole.run(3)[0], whole.check()[0])


@pytest.mark.parametrize("place", range(9))
def test_nan_is_the_largest_value_and_infinity_the_next(place):
    x = array(3, 3, 20)
    x[place // 3, place % 3] = np.nan
    x[1, 1, 0] = np.inf
    case = pool2d(x, (2, 2), (1, 1), (1,) * 4)
    np.testing.assert_array_equal(case.run()[0], case.reference()[0])


X, WEIGHT = array(6, 5, 3), array(27, 4)
GOOD = {"kernel": (3, 3), "stride": (1, 1), "pad": (0,) * 4, "activation": None, "bias": False, "residual": False}


def op(x=X, out=(4, 3, 4), packed=1, **change):
    return Case("conv2d", [x], [out], [WEIGHT], packed=packed, **{**GOOD, **change})


WRONG = {
    "an empty kernel": op(kernel=(3, 0)),
    "no stride": op(stride=(0, 1)),
    "negative padding": op(pad=(0, -1, 0, 0)),
    "another padding": op(pad=(1, 0, 0, 0)),
    "negative padding of columns": op(kernel=(3, 2), pad=(0, 0, 0, -1)),
    "an unknown activation": op(activation="swish"),
    "no bias": op(bias=True),
    "no residual": op(residual=True),
    "no dilation": op(dilation=(0, 1)),
    "no groups": op(groups=0),
    "groups that divide nothing": op(groups=2),
    "too many columns": op(out=(4, 3, 5)),
    "an unpacked weight": op(packed=0),
    "a matrix as map": op(array(30, 3)),
    "a pool with more channels": pool2d(array(6, 4, 3), (2, 2), (2, 2), (0,) * 4, out=(3, 2, 4)),
    "a pool of a matrix": Case("max_pool2d", [array(6, 5)], [(1, 5)], kernel=(2, 2), stride=(2, 2), pad=(0,) * 4),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_ops_that_do_not_fit_are_refused(wrong):
    with pytest.raises(ValueError, match=r"^(conv2d|max_pool2d): "):
        wrong.run()


PRODUCT = Work("linear", rows=12, k=27, n=4, flops=2 * 12 * 27 * 4, nbytes=12 * 4 * 4)


WORKS = {
    "product": (conv2d(X, WEIGHT, kernel=(3, 3)), PRODUCT),
    "residual": (conv2d(X, WEIGHT, kernel=(3, 3), residual=True), PRODUCT._replace(nbytes=2 * PRODUCT.nbytes)),
    "groups": (
        conv2d(array(6, 5, 4), array(18, 6), kernel=(3, 3), groups=2),
        Work("linear", rows=12, k=18, n=6, flops=2 * 12 * 18 * 6, nbytes=12 * 6 * 4),
    ),
    "depthwise": (
        conv2d(array(6, 5, 4), array(9, 4), kernel=(3, 3), groups=4),
        Work("rowwise", nbytes=4 * 4 * (30 + 12 + 9 / 3 * 12)),
    ),
    "pool": (pool2d(array(6, 4, 3), (2, 2), (2, 2), (0,) * 4), Work("rowwise", nbytes=4 * 3 * 6 * 2 * (4 + 1))),
}


@pytest.mark.parametrize(("case", "work"), WORKS.values(), ids=WORKS)
def test_work_is_that_of_the_product_and_what_is_written(case, work):
    assert case.kernel.work(case.op, case.slots) == work


# -- windows of 3 x 3 over many channels, in tiles of 2 x 2 outputs ----------------------------------------------------

C = LEAST_CHANNELS
TILED = {"kernel": (3, 3), "whole": (64, 64)}  # each map is a part of one that is large enough for tiles
# Error of an output for each sum of |x| |w| that it is of, beside that of a sum of 9 C products.
MORE_ERROR = 4.0


def part(x, weight, rows, columns, **more):
    """Return the outputs of some rows and columns of a map with a border of 1, from the part of it that they see."""
    ranges, pad, seen = (rows, columns), [0] * 4, []
    for side, (first, stop) in enumerate(ranges):
        low, high = first - 1, stop + 1
        pad[side], pad[side + 2] = max(-low, 0), max(high - x.shape[side], 0)
        seen.append(slice(max(low, 0), min(high, x.shape[side])))
    origin = (rows[0], columns[0])
    return conv2d(np.ascontiguousarray(x[tuple(seen)]), weight, pad=tuple(pad), origin=origin, **TILED, **more)


@given(
    height=st.integers(0, 7),
    width=st.integers(0, 7),
    pad=st.tuples(*[st.integers(0, 3)] * 4),
    channels=st.sampled_from([C, C + 16]),
    n=st.integers(0, 70),
    origin=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    activation=st.sampled_from([None, "relu6", "tanh"]),
    residual=st.booleans(),
    residual_first=st.booleans(),
)
def test_any_part_of_any_map(height, width, pad, channels, n, residual, residual_first, **attrs):
    x, weight = array(height, width, channels), array(9 * channels, n, scale=(9 * channels) ** -0.5)
    attrs |= {"residual": residual, "residual_first": residual_first, "bias": array(n)}
    conv2d(x, weight, pad=pad, **TILED, **attrs).check()


@given(
    cuts=st.lists(st.integers(1, 12), max_size=3, unique=True),
    columns=st.lists(st.integers(1, 8), max_size=1),
    n=st.sampled_from([16, 70]),
)
def test_parts_of_a_map_have_the_bits_of_the_whole(cuts, columns, n):
    x, weight = array(13, 9, C), array(9 * C, n)
    more = {"activation": "relu", "bias": array(n)}
    whole = part(x, weight, (0, 13), (0, 9), **more).run()[0]
    for top, bottom in pairwise([0, *sorted(cuts), 13]):
        for left, right in pairwise([0, *columns, 9]):
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
    weight = array(9 * channels, n, scale=(9 * channels) ** -0.5)
    more = {"activation": "relu6", "bias": array(n)}
    case = conv2d(array(side, side, channels), weight, pad=(1,) * 4, **TILED, **more)
    np.testing.assert_array_equal(case.check()[0], case.run(3)[0])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("channels", [3, C])
def test_what_is_not_finite_stays_in_the_outputs_that_see_it(channels, value):
    x, weight = array(9, 9, channels), np.abs(array(9 * channels, 5))
    clean = conv2d(x, weight, pad=(1,) * 4, **TILED).run()[0]
    for y, column in ((4, 4), (5, 5), (0, 7), (8, 8)):
        spoilt = x.copy()
        spoilt[y, column, 1] = value
        got = conv2d(spoilt, weight, pad=(1,) * 4, **TILED).run()[0]
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
    case, size = (conv2d(*arrays, pad=(1,) * 4, **TILED) for arrays in ((x, weight), (np.abs(x), np.abs(weight))))
    exact, scale = (c.kernel.reference_function(c.op, c.slots, c.reads, c.plain)[0] for c in (case, size))
    # Of the patch of 4 x 4 that the four outputs share: a small value beside a large one takes its error.
    around = np.pad(scale, ((1, 1), (1, 1), (0, 0)))
    most = np.max([around[i : i + 8, j : j + 8] for i in range(3) for j in range(3)], axis=0)
    assert (np.abs(case.run()[0] - exact) <= MORE_ERROR * 9 * channels * 2.0**-24 * most).all()
