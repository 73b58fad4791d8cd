from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels_support import Case, array

SCALES = [1e-41, 1e-20, 1e-3, 1.0, 1e3, 1e20, 3e37]


def moments(x):
    return Case("moments", [x], [(len(x), 2)])


def normalise(x, parts, counts, gamma, beta, eps=1e-5, **attrs):
    weights = [gamma, beta] if beta is not None else [gamma]
    return Case("normalise", [x, *parts], [x.shape], weights, counts=tuple(counts), eps=eps, **attrs)


def scaled(*shape, scale):
    return (array(*shape) * np.float64(scale) + 2 * scale).astype(np.float32)


@given(r=st.integers(0, 9), c=st.integers(0, 70), scale=st.sampled_from(SCALES))
def test_moments(r, c, scale):
    moments(scaled(r, c, scale=scale)).check(rtol=1e-6, atol=1e-6 * scale)


@given(
    r=st.integers(0, 5),
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any),
    scale=st.sampled_from(SCALES),
)
def test_the_norm_of_all_parts_is_the_layer_norm_of_the_row(r, counts, scale):
    c = sum(counts)
    x, gamma, beta = scaled(r, c, scale=scale), array(c), array(c)
    columns = np.split(np.arange(c), np.cumsum(counts)[:-1])
    parts = [moments(np.ascontiguousarray(x[:, mine])).run()[0] for mine in columns]
    want = Case("layer_norm", [x], [(r, c)], [gamma, beta], eps=1e-5).reference()[0]
    for mine in columns:
        case = normalise(np.ascontiguousarray(x[:, mine]), parts, counts, gamma[mine], beta[mine])
        # A mean of f32 is 1e-7 off, here for values some times as large as their deviation.
        np.testing.assert_allclose(case.check(1e-5, 1e-5)[0], want[:, mine], rtol=1e-4, atol=1e-5)
    want = Case("layer_norm", [x], [(r, c)], [gamma], eps=1e-5, rms=True).reference()[0]
    for mine in columns:
        case = normalise(np.ascontiguousarray(x[:, mine]), parts, counts, gamma[mine], None, rms=True)
        np.testing.assert_allclose(case.check(1e-5, 1e-5)[0], want[:, mine], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row_and_is_not_hidden(value):
    x = array(3, 33)
    x[1, 7] = value
    case = moments(x)
    part, want = case.run()[0], case.reference()[0]
    np.testing.assert_allclose(part, want, rtol=1e-5, atol=1e-5)
    other = moments(array(3, 20)).run()[0]
    for parts, counts in (((part, other), (33, 20)), ((other, part), (20, 33))):
        got = normalise(array(3, 20), parts, counts, array(20), array(20)).run()[0]
        assert np.isfinite(got[[0, 2]]).all()
        assert np.isnan(got[1]).all()


def test_ops_that_do_not_fit_are_refused():
    x, part, gamma = array(3, 4), array(3, 2), array(4)
    wrong = [
        ([part], (4, 4)),
        ([part], (3,)),
        ([part, part], (5, -1)),
        ([array(3, 3)], (4,)),
        ([array(2, 2)], (4,)),
        ([], ()),
    ]
    cases = [Case("moments", [x], [(3, 3)]), Case("normalise", [x, part], [(3, 4)], [gamma, gamma], eps=1e-5)]
    for case in (*cases, *(normalise(x, parts, counts, gamma, gamma) for parts, counts in wrong)):
        with pytest.raises(ValueError, match=r"^(moments|normalise): "):
            case.run()
