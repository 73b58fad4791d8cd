from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels_support import Case, array


def softmax(x):
    return Case("softmax", [x], [x.shape])


@given(m=st.integers(0, 9), n=st.integers(0, 150), scale=st.sampled_from([1e-41, 1e-3, 1.0, 30.0, 1e38]))
def test_softmax_is_within_1e_5_of_the_reference(m, n, scale):
    # A difference of up to 87 from the maximum, rounded to f32, alone makes a relative error of 4e-6.
    with np.errstate(over="ignore"):
        x = np.clip(array(m, n) * np.float64(scale), -3e38, 3e38).astype(np.float32)
    got = softmax(x).check(rtol=1e-5, atol=1e-37)[0]
    if n:
        np.testing.assert_allclose(got.sum(axis=1), 1.0, rtol=1e-5)


@given(m=st.integers(1, 9), n=st.integers(1, 70), data=st.data())
def test_masked_values_weigh_nothing(m, n, data):
    x = array(m, n)
    visible = data.draw(st.integers(0, n))
    x[:, visible:] = -np.inf
    got = softmax(x).check(rtol=1e-5, atol=1e-37)[0]
    assert (got[:, visible:] == 0).all()
    np.testing.assert_allclose(got[:, :visible], softmax(x[:, :visible].copy()).run()[0], rtol=1e-5)


def test_a_row_that_is_masked_as_a_whole_gives_zero():
    x = array(3, 20)
    x[1] = -np.inf
    assert (softmax(x).check()[0][1] == 0).all()


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 7, 32])
def test_what_is_not_a_number_gives_nan_in_its_row_alone(value, place):
    x = array(3, 33)
    x[1, place] = value
    got = softmax(x).run()[0]
    assert np.isnan(got[1]).any() if value == np.inf else np.isnan(got[1]).all()
    np.testing.assert_allclose(got[[0, 2]], softmax(x).reference()[0][[0, 2]], rtol=1e-5)


def test_any_number_of_threads_gives_the_same_bits():
    case = softmax(array(150, 1000))
    np.testing.assert_array_equal(case.run(3)[0], case.run(1)[0])


def test_ops_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="should be"):
        Case("softmax", [array(3, 4)], [(3, 5)]).run()
    with pytest.raises(ValueError, match="must have 2 dimensions"):
        Case("softmax", [array(4)], [(4,)]).run()
