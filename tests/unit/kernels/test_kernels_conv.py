from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels_support import Case, array

from hepti_mqtt.kernels.conv2d import DEPTH
from hepti_mqtt.kernels.conv_tile import PIXELS
from hepti_mqtt.kernels.jit import JIT
from hepti_mqtt.kernels.tile import ACTIVATIONS
from hepti_mqtt.program import Work

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


def pool2d(x, kernel, stride, pad, name="max_pool2d", **more):
    out = (*patches(*x.shape[:2], kernel, stride, pad), x.shape[2])
    return Case(name, [x], [out], kernel=kernel, stride=stride, pad=pad, **more)


@given(**WINDOWS, channels=st.integers(0, 5), n=st.integers(0, 40), bias=st.booleans(), residual=st.booleans())
def test_conv2d(height, width, kernel, stride, pad, channels, n, bias, residual):
    x, weight = array(height, width, channels), array(kernel[0] * kernel[1] * channels, n)
    bias = array(n) if bias else None
    conv2d(x, weight, kernel=kernel, stride=stride, pad=pad, bias=bias, residual=residual).check()


@given(
    **WINDOWS,
    dilation=DILATION,
    groups=st.integers(1, 4),
    channels=st.integers(0, 3),
    columns=st.integers(1, 18),
    residual_first=st.booleans(),
)
def test_conv2d_in_groups(height, width, kernel, stride, pad, dilation, groups, channels, columns, residual_first):
    x, weight = array(height, width, groups * channels), array(kernel[0] * kernel[1] * channels, groups * columns)
    attrs = {"kernel": kernel, "stride": stride, "pad": pad, "dilation": dilation, "groups": groups}
    epilogue = {"activation": "relu", "bias": array(groups * columns), "residual": True}
    conv2d(x, weight, **attrs, **epilogue, residual_first=residual_first).check()


@given(**WINDOWS, dilation=DILATION, channels=st.integers(1, 150))
def test_depthwise(height, width, kernel, stride, pad, dilation, channels):
    x, weight = array(height, width, channels), array(kernel[0] * kernel[1], channels)
    attrs = {"kernel": kernel, "stride": stride, "pad": pad, "dilation": dilation, "groups": channels}
    conv2d(x, weight, **attrs, activation="relu6", bias=array(channels)).check()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("residual", [False, True])
def test_what_is_fused_is_what_linear_fuses(activation, residual):
    x, weight, bias = array(7, 9, 6), array(54, 40), array(40)
    case = conv2d(x, weight, kernel=(3, 3), pad=(1,) * 4, activation=activation, bias=bias, residual=residual)
    got = case.check()[0]
    plain = conv2d(x, weight, kernel=(3, 3), pad=(1,) * 4, bias=bias).run()[0].reshape(63, 40)
    eye = Case(
        "linear",
        [plain, *(r.reshape(63, 40) for r in case.reads[1:])],
        [(63, 40)],
        [np.eye(40, dtype="f4")],
        packed=1,
        activation=activation,
        bias=False,
        residual=residual,
    )
    np.testing.assert_array_equal(got.reshape(63, 40), eye.run()[0])


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


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("groups", [1, 32])
def test_relu6_keeps_nan_and_cuts_infinities(value, groups):
    x, weight = np.full((1, 1, 32), value, np.float32), np.ones((32 // groups, 32), np.float32)
    case = conv2d(x, weight, kernel=(1, 1), activation="relu6", groups=groups)
    want = {np.inf: 6.0, -np.inf: 0.0}.get(value, np.nan)
    np.testing.assert_array_equal(case.run()[0], np.full((1, 1, 32), want))


@pytest.mark.parametrize("groups", [1, 2, 32])
@pytest.mark.parametrize("stride", [1, 2])
def test_rows_of_a_map_in_groups_have_the_bits_of_the_whole(groups, stride):
    x, weight = array(29, 11, 32), array(9 * 32 // groups, 64 if groups < 32 else 32)
    more = {"kernel": (3, 3), "stride": (stride, stride), "groups": groups, "activation": "relu6"}
    whole = conv2d(x, weight, pad=(1, 1, 1, 1), **more).run()[0]
    first = 0
    for stop in (3, 4, len(whole)):
        low, high = first * stride - 1, (stop - 1) * stride + 2
        pad = (max(-low, 0), 1, max(high - 29, 0), 1)
        seen = np.ascontiguousarray(x[max(low, 0) : min(high, 29)])
        place = {"origin": (first, 0), "whole": whole.shape[:2]}
        part = conv2d(seen, weight, pad=pad, **more, **place).run()[0]
        np.testing.assert_array_equal(part, whole[first:stop])
        first = stop


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


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_the_patches_that_have_it(value):
    x, weight = array(8, 8, 3), np.abs(array(27, 5))
    x[4, 4, 1] = value
    got = conv2d(x, weight, kernel=(3, 3), pad=(1,) * 4).check()[0]
    hit = ~np.isfinite(got).all(axis=2)
    assert hit[3:6, 3:6].all()
    assert hit.sum() == 9


@given(**WINDOWS, channels=st.integers(0, 40))
def test_max_pool2d(height, width, kernel, stride, pad, channels):
    case = pool2d(array(height, width, channels), kernel, stride, pad)
    got = case.run()[0]
    if got.size:
        np.testing.assert_array_equal(got, case.reference()[0])


@given(**WINDOWS, channels=st.integers(0, 40), count_pad=st.booleans())
def test_average_pool2d(height, width, kernel, stride, pad, channels, count_pad):
    pool2d(array(height, width, channels), kernel, stride, pad, "average_pool2d", count_pad=count_pad).check()


def test_places_beyond_the_map_count_where_they_shall():
    x = np.ones((2, 2, 1), np.float32)
    for count_pad, corner in ((True, 4 / 9), (False, 1.0)):
        got = pool2d(x, (3, 3), (1, 1), (1,) * 4, "average_pool2d", count_pad=count_pad).check()[0]
        np.testing.assert_allclose(got, np.full((2, 2, 1), corner), rtol=1e-6)


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


def test_ops_that_do_not_fit_are_refused():
    x, weight = array(6, 5, 3), array(27, 4)
    good = {"kernel": (3, 3), "stride": (1, 1), "pad": (0,) * 4, "activation": None, "bias": False, "residual": False}
    for change, message in (
        ({"kernel": (3, 0)}, "must be >= 1"),
        ({"stride": (0, 1)}, "must be >= 1"),
        ({"pad": (0, -1, 0, 0)}, "must be >= 0"),
        ({"pad": (1, 0, 0, 0)}, "should be"),
        ({"kernel": (3, 2), "pad": (0, 0, 0, -1)}, "must be >= 0"),
        ({"activation": "swish"}, "activation 'swish' is not in"),
        ({"bias": True}, "needs 2 weights, got 1"),
        ({"residual": True}, "must read 2 slots"),
    ):
        with pytest.raises(ValueError, match=message):
            Case("conv2d", [x], [(4, 3, 4)], [weight], packed=1, **{**good, **change}).run()
    for change, message in (
        ({"dilation": (0, 1)}, "dilation .* must be >= 1"),
        ({"groups": 0}, "groups 0 must be >= 1"),
        ({"groups": 2}, "groups 2 must divide 3 channels and 4 columns"),
    ):
        with pytest.raises(ValueError, match=message):
            Case("conv2d", [x], [(4, 3, 4)], [weight], packed=1, **{**good, **change}).run()
    with pytest.raises(ValueError, match=r"weight \(27, 4\) should be \(27, 5\)"):
        Case("conv2d", [x], [(4, 3, 5)], [weight], packed=1, **good).run()
    with pytest.raises(ValueError, match="needs a packed f32 matrix"):
        Case("conv2d", [x], [(4, 3, 4)], [weight], **good).run()
    with pytest.raises(ValueError, match="3 dimensions"):
        Case("conv2d", [array(30, 3)], [(4, 3, 4)], [weight], packed=1, **good).run()
    window = {"kernel": (2, 2), "stride": (2, 2), "pad": (0,) * 4}
    with pytest.raises(ValueError, match="as many channels as it reads, 3"):
        Case("max_pool2d", [x], [(3, 2, 4)], **window).run()
    with pytest.raises(ValueError, match="3 dimensions"):
        Case("max_pool2d", [array(6, 5)], [(1, 5)], **window).run()


def test_work_is_that_of_the_product_and_what_is_written():
    case = conv2d(array(6, 5, 3), array(27, 4), kernel=(3, 3))
    product = Work("linear", rows=12, k=27, n=4, flops=2 * 12 * 27 * 4, nbytes=12 * 4 * 4)
    assert case.kernel.work(case.op, case.slots) == product
    case = conv2d(array(6, 5, 3), array(27, 4), kernel=(3, 3), residual=True)
    assert case.kernel.work(case.op, case.slots) == product._replace(nbytes=2 * product.nbytes)
    case = conv2d(array(6, 5, 4), array(18, 6), kernel=(3, 3), groups=2)
    assert case.kernel.work(case.op, case.slots) == Work(
        "linear", rows=12, k=18, n=6, flops=2 * 12 * 18 * 6, nbytes=12 * 6 * 4
    )
    case = conv2d(array(6, 5, 4), array(9, 4), kernel=(3, 3), groups=4)
    assert case.kernel.work(case.op, case.slots) == Work("rowwise", nbytes=4 * 4 * (30 + 12 + 9 / 3 * 12))
    case = pool2d(array(6, 4, 3), (2, 2), (2, 2), (0,) * 4)
    assert case.kernel.work(case.op, case.slots) == Work("rowwise", nbytes=4 * 3 * 6 * 2 * (4 + 1))
