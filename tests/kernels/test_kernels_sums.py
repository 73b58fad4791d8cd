from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels_support import Case, array

from hepti_mqtt.program import Work

ACTIVATIONS = [None, "gelu", "gelu_tanh", "relu", "tanh", "relu6", "leaky_relu"]
SHAPES = st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple) | st.sampled_from(
    [(1023,), (5, 411), (2049, 1)]
)


@given(shape=SHAPES, parts=st.integers(1, 19), activation=st.sampled_from(ACTIVATIONS))
def test_sum(shape, parts, activation):
    Case("sum", [array(*shape) for _ in range(parts)], [shape], activation=activation).check()


def test_the_activation_may_be_left_out():
    x, y = array(3, 4), array(3, 4)
    np.testing.assert_array_equal(Case("sum", [x, y], [(3, 4)]).check()[0], x + y)


@given(shape=SHAPES)
def test_a_part_alone_is_copied(shape):
    x = array(*shape)
    np.testing.assert_array_equal(Case("sum", [x], [shape]).run()[0], x)


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


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_any_number_of_threads_gives_the_same_bits(activation):
    reads = [array(151, 1001), array(151, 1001)]
    case = Case("sum", reads, [(151, 1001)], activation=activation)
    np.testing.assert_array_equal(case.run(3)[0], case.run(1)[0])


def test_ops_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="should be"):
        Case("sum", [array(3, 4), array(3, 5)], [(3, 4)]).run()
    with pytest.raises(ValueError, match="should be"):
        Case("sum", [array(3, 4)], [(12,)]).run()
    with pytest.raises(ValueError, match="must read some slots"):
        Case("sum", [], [(3, 4)]).run()
    with pytest.raises(ValueError, match="activation 'swish' is not in"):
        Case("sum", [array(3, 4)], [(3, 4)], activation="swish").run()


def test_work_is_the_bytes_that_move():
    case = Case("sum", [array(3, 4), array(3, 4)], [(3, 4)])
    assert case.kernel.work(case.op, case.slots) == Work("rowwise", nbytes=3 * 48)
