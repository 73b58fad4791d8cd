from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels_support import Case, array

ACTIVATIONS = [
    None,
    "gelu",
    "gelu_tanh",
    "relu",
    "tanh",
    "relu6",
    "leaky_relu",
    "hard_swish",
    "hard_sigmoid",
    "sigmoid",
    "quick_gelu",
]
SHAPES = st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple) | st.sampled_from(
    [(1023,), (5, 411), (2049, 1)]
)


@given(shape=SHAPES, parts=st.integers(1, 19), activation=st.sampled_from(ACTIVATIONS))
def test_sum(shape, parts, activation):
    Case("sum", [array(*shape) for _ in range(parts)], [shape], activation=activation).check()


def test_parts_are_added_in_the_order_given():
    reads = [np.full((2, 1500), v, np.float32) for v in (1e8, 3.0, -1e8, 1.0)]
    want = ((np.float32(1e8) + np.float32(3.0)) + np.float32(-1e8)) + np.float32(1.0)
    assert (Case("sum", reads, [(2, 1500)]).run()[0] == want).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_not_finite_stays_in_its_place(activation, value):
    x, y = array(3, 33), array(3, 33)
    x[1, 7] = value
    case = Case("sum", [x, y], [(3, 33)], activation=activation)
    got, want = case.run()[0].ravel(), case.reference()[0].ravel()
    others = np.arange(99) != 40
    np.testing.assert_allclose(got[others], want[others], rtol=2e-5, atol=2e-5)
    assert np.isnan(got[40]) or not np.isnan(value)
