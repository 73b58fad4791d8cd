from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from kernels_support import Case, array

F32 = hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=3, min_side=0, max_side=9))
FINITE = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=3, min_side=0, max_side=9),
    elements=st.floats(-(2.0**100), 2.0**100, width=32),
)


def to_f16(x):
    return Case("to_f16", [x], [x.shape], dtype="f16")


def from_f16(x):
    return Case("from_f16", [x], [x.shape])


def to_i8(x):
    return Case("to_i8", [x], [(*x.shape[:-1], x.shape[-1] + 4)], dtype="i8")


def from_i8(x):
    return Case("from_i8", [x], [(*x.shape[:-1], x.shape[-1] - 4)])


@given(F32)
def test_f16_rounds_as_ieee_754_says(x):
    to_f16(x).check(0, 0)


def test_every_f16_survives_the_round_trip():
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(256, 256)
    wide = from_f16(halves)
    np.testing.assert_array_equal(wide.run()[0], wide.reference()[0])
    np.testing.assert_array_equal(to_f16(wide.run()[0]).run()[0], halves)


def test_f16_of_what_is_too_large_is_infinite():
    x = np.array([[65504, 65519, 65520, 1e30, -1e30, np.inf, -np.inf, np.nan]], np.float32)
    np.testing.assert_array_equal(
        to_f16(x).run()[0], np.array([[65504, 65504, np.inf, np.inf, -np.inf, np.inf, -np.inf, np.nan]], np.float16)
    )


@given(FINITE)
def test_i8_is_within_half_a_step_of_the_row(x):
    coded = to_i8(x).run()[0]
    back = from_i8(coded).check(rtol=1e-6, atol=0)[0]
    step = np.abs(x).max(axis=-1, keepdims=True, initial=0) / 127
    assert (np.abs(back - x) <= step * 0.5001 + 1e-35).all()


def test_i8_layout_is_values_then_a_little_endian_scale():
    coded = to_i8(np.array([[254.0, -127.0, 2.0, 0.9]], np.float32)).run()[0]
    assert coded[0, :4].tolist() == [127, -64, 1, 0]
    assert coded[0, 4:].tobytes() == np.float32(2.0).astype("<f4").tobytes()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_i8_cannot_say_what_is_not_finite_and_does_not_hide_it(value):
    x = array(3, 20)
    x[1, 4] = value
    case = to_i8(x)
    coded = case.run()[0]
    np.testing.assert_array_equal(coded[1, :-4], case.reference()[0][1, :-4])
    back = from_i8(coded).run()[0]
    assert np.isnan(back[1]).all()
    assert np.isfinite(back[[0, 2]]).all()
