"""Several ranges of rows of a map in one convolution: the bits of each range alone, whichever way it is computed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels_support import Case, array

from hepti_mqtt.kernels.conv2d import LEAST_CHANNELS

C = LEAST_CHANNELS
WHOLE = (64, 64)  # what each map is a part of: large enough for tiles of 2 x 2


class Way(NamedTuple):
    """A convolution of a square window with a border of `pad` on all sides, made in a way of its own."""

    channels: int
    n: int
    size: int
    stride: int = 1
    groups: int = 1
    dilation: int = 1
    pad: int = 1


WAYS = {
    "tiles": Way(C, 64, 3),
    "tiles that fill no panel": Way(C, 70, 3, pad=2),
    "a pixel": Way(24, 40, 1, pad=0),
    "a stride": Way(24, 40, 3, stride=2),
    "a dilation": Way(20, 16, 3, dilation=2, pad=2),
    "few channels": Way(3, 20, 7, stride=2, pad=3),
    "few channels, apart": Way(3, 20, 3, dilation=2, pad=2),
    "groups": Way(32, 32, 3, groups=2),
    "depthwise": Way(40, 40, 3, stride=2, groups=40),
}


def conv(way, x, weight, rows, residual=None, **more):
    """Return the op of some ranges of rows of x [Y, X, C] with its border: several as bands, one as it always was."""
    reach, seen = (way.size - 1) * way.dilation + 1, []
    for first, stop in rows:
        low, high = first * way.stride - way.pad, (stop - 1) * way.stride - way.pad + reach
        seen.append((max(low, 0), min(high, len(x)), max(-low, 0), max(high - len(x), 0)))
    held = sorted({row for low, high, *_ in seen for row in range(low, high)})
    bands = [(held.index(a), held.index(z - 1) + 1, *beyond) for a, z, *beyond in seen]
    top, bottom = bands[0][2:] if len(rows) == 1 else (0, 0)
    attrs = {"kernel": (way.size,) * 2, "stride": (way.stride,) * 2, "dilation": (way.dilation,) * 2, **more}
    attrs |= {"pad": (top, way.pad, bottom, way.pad), "groups": way.groups, "whole": WHOLE, "origin": (rows[0][0], 0)}
    if len(rows) > 1:
        attrs["bands"] = tuple((*band, first) for band, (first, _) in zip(bands, rows, strict=True))
    columns = (x.shape[1] + 2 * way.pad - reach) // way.stride + 1
    out = (sum(stop - first for first, stop in rows), columns, way.n)
    reads = [x[held]] if residual is None else [x[held], of(residual, rows)]
    return Case("conv2d", reads, [out], weight, packed=1, bias=True, residual=residual is not None, **attrs)


def of(array, rows):
    """Return some ranges of rows of an array, one behind the other."""
    return np.concatenate([array[first:stop] for first, stop in rows])


def made(way, height=13, width=9):
    """Return a map and the weights of a way to convolve it."""
    k = way.size**2 * way.channels // way.groups
    return array(height, width, way.channels), [array(k, way.n, scale=k**-0.5), array(way.n)]


def ranges(rows):
    """Return a strategy of several ranges of so many rows that do not touch."""
    ends = st.lists(st.integers(0, rows), min_size=4, max_size=6, unique=True)
    return ends.map(lambda found: [tuple(sorted(found)[i : i + 2]) for i in range(0, len(found) - 1, 2)])


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
@given(data=st.data(), activation=st.sampled_from([None, "relu", "tanh"]), residual=st.booleans(), first=st.booleans())
def test_bands_have_the_bits_of_the_whole(way, data, activation, residual, first):
    x, weight = made(way)
    most = (13 + 2 * way.pad - (way.size - 1) * way.dilation - 1) // way.stride + 1
    rows = data.draw(ranges(most))
    columns = (9 + 2 * way.pad - (way.size - 1) * way.dilation - 1) // way.stride + 1
    more = {"activation": activation, "residual_first": first}
    more["residual"] = array(most, columns, way.n) if residual else None
    got = conv(way, x, weight, rows, **more).check(1e-4, 1e-4)[0]
    whole = conv(way, x, weight, [(0, most)], **more).run()[0]
    np.testing.assert_array_equal(got, of(whole, rows))


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_one_band_is_the_op_without_bands(way):
    x, weight = made(way)
    case = conv(way, x, weight, [(1, 4)], activation=None)
    top, _, bottom, _ = case.op.attrs["pad"]
    more = {"bands": ((0, len(case.reads[0]), top, bottom, 1),), "pad": (0, way.pad, 0, way.pad)}
    banded = Case("conv2d", case.reads, [case.slots[1].shape], weight, packed=1, **{**case.op.attrs, **more})
    np.testing.assert_array_equal(banded.check(1e-4, 1e-4)[0], case.run()[0])
    assert banded.kernel.work(banded.op, banded.slots) == case.kernel.work(case.op, case.slots)


@pytest.mark.parametrize(
    "wrong",
    [
        {"bands": ((0, 3, 1, 0, 0), (3, 7, 0, 1, 6))},
        {"bands": ((3, 0, 1, 0, 0), (3, 6, 0, 1, 6))},
        {"bands": ((0, 3, -1, 0, 0), (3, 6, 0, 1, 6))},
        {"bands": ((0, 3, 1, 0, -1), (3, 6, 0, 1, 6))},
        {"bands": ((0, 3, 1, 0), (3, 6, 0, 1, 6))},
        {"bands": ((0, 3, 1, 0, 0), (3, 6, 0, 0, 6))},
        {"bands": ()},
        {"pad": (1, 1, 0, 1)},
    ],
    ids=str,
)
def test_bands_that_do_not_fit_are_refused(wrong):
    x, weight = made(Way(3, 4, 3), 8, 5)
    case = conv(Way(3, 4, 3), x, weight, [(0, 2), (6, 8)], activation=None)
    case.run()
    with pytest.raises(ValueError, match=r"^conv2d: "):
        Case("conv2d", case.reads, [(4, 5, 4)], weight, packed=1, **{**case.op.attrs, **wrong}).run()
