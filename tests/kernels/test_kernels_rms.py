from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels_support import Case, array

SIZES = {"m": st.integers(0, 9), "h": st.integers(0, 70)}


def rms_norm(x, eps=1e-6):
    return Case("rms_norm", [x], [x.shape], [array(x.shape[1])], eps=eps)


@given(**SIZES, scale=st.sampled_from([1e-41, 1e-20, 1e-3, 1.0, 1e3, 1e25, 3e37]))
def test_rms_norm_is_within_1e_6_of_the_reference(m, h, scale):
    x = (array(m, h) * np.float64(scale)).astype(np.float32)
    rms_norm(x).check(rtol=1e-6, atol=1e-37)


@given(**SIZES, parts=st.integers(0, 10), bias=st.booleans(), keep_sum=st.booleans())
def test_add_rms_norm_is_within_1e_4_of_the_reference(m, h, parts, bias, keep_sum):
    # The sum of up to eleven f32 may cancel; that error is what remains.
    reads = [array(m, h) for _ in range(1 + parts)]
    weights = [array(h) for _ in range(2 if bias else 1)]
    shapes = [(m, h)] * (2 if keep_sum else 1)
    Case("add_rms_norm", reads, shapes, weights, bias=bias, eps=1e-3, keep_sum=keep_sum).check(rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kernel", ["rms_norm", "add_rms_norm"])
def test_what_is_not_finite_stays_in_its_row_and_is_not_hidden(kernel, value):
    x = array(3, 33)
    x[1, 7] = value
    case = Case(kernel, [x], [(3, 33)], [array(33)], eps=1e-5, bias=False, keep_sum=False)
    got, want = case.run()[0], case.reference()[0]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert np.isfinite(got[[0, 2]]).all()
    assert np.isnan(got[1, 7])


@pytest.mark.parametrize("kernel", ["rms_norm", "add_rms_norm"])
def test_any_number_of_threads_gives_the_same_bits(kernel):
    case = Case(kernel, [array(150, 1000)], [(150, 1000)], [array(1000)], eps=1e-5, bias=False, keep_sum=False)
    np.testing.assert_array_equal(case.run(3)[0], case.run(1)[0])


def test_ops_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="needs 1 weights, got 2"):
        Case("rms_norm", [array(3, 4)], [(3, 4)], [array(4), array(4)], eps=1e-5).run()
    with pytest.raises(ValueError, match="should be"):
        Case("add_rms_norm", [array(3, 4)], [(3, 5)], [array(4)], bias=False, eps=1e-5, keep_sum=False).run()
