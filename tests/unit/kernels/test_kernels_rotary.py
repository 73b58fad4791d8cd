from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels_support import Case, array

from hepti_mqtt.models import plain


def rotate(lengths, d, q, k, v, *, rows=None, weights=(), x=None, **attrs):
    x = array(sum(lengths), (q + k + v) * d) if x is None else x
    rows = range(len(x)) if rows is None else rows
    x = x[list(rows)]
    attrs = {"head_dim": d, "q_heads": q, "k_heads": k, "theta": 1e4, "rows": tuple(rows), "lengths": lengths, **attrs}
    return Case("rotate", [x], [x.shape], weights, **attrs)


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4).map(tuple),
    heads=st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 2)),
    d=st.sampled_from([2, 8, 64]),
    normed=st.booleans(),
    theta=st.sampled_from([1e3, 1e4, 1.6e5]),
    divided=st.booleans(),
)
def test_rotate(lengths, heads, d, normed, theta, divided):
    attrs = {"weights": [array(d), array(d)], "eps": 1e-6, "rms": True, "gamma_offset": 1.0} if normed else {}
    divisors = tuple(np.linspace(1, 8, d // 2).tolist()) if divided else ()
    rotate(lengths, d, *heads, theta=theta, divisors=divisors, **attrs).check(rtol=2e-4, atol=2e-4)


def test_values_stay_and_positions_begin_with_each_sequence():
    x = array(10, 6 * 4)
    got = rotate((4, 6), 4, 2, 2, 2, x=x).check()[0]
    np.testing.assert_array_equal(got[:, 16:], x[:, 16:])
    np.testing.assert_array_equal(got[[0, 4]], x[[0, 4]])
    np.testing.assert_allclose(got[:, :16], plain.rotate(x[:, :16], 4, 1e4, (4, 6)), rtol=1e-5, atol=1e-5)


def test_rows_alone_have_the_bits_of_all_rows():
    x = array(50, 5 * 8)
    whole = rotate((20, 30), 8, 3, 1, 1, x=x).run()[0]
    rows = (3, 19, 20, 48)
    np.testing.assert_array_equal(rotate((20, 30), 8, 3, 1, 1, x=x, rows=rows).run()[0], whole[list(rows)])
    np.testing.assert_array_equal(rotate((20, 30), 8, 3, 1, 1, x=x).run(2)[0], whole)


def test_rows_of_a_session_stand_behind_those_before():
    x = array(12, 3 * 8)
    whole = rotate((12,), 8, 1, 1, 1, x=x).run()[0]
    for first in (0, 7, 8):
        case = rotate((12,), 8, 1, 1, 1, x=x[first : first + 4], rows=range(4))
        attrs = case.op.attrs | {"lengths": (4,), "places": 12}
        at = Case("rotate", [*case.reads, np.array([first], np.int32)], [(4, 24)], **attrs)
        np.testing.assert_array_equal(at.check(rtol=2e-4, atol=2e-4)[0], whole[first : first + 4])
    at = Case("rotate", [*case.reads, np.array([9], np.int32)], [(4, 24)], **attrs)
    with pytest.raises(ValueError, match="places of a sequence"):
        at.run()


@pytest.mark.parametrize("attrs", [{"rows": (0,)}, {"rows": (0, 1, 3)}, {"head_dim": 3}, {"q_heads": 9}], ids=str)
def test_ops_that_do_not_fit_are_refused(attrs):
    case = rotate((3,), 4, 1, 1, 1)
    case.op = case.op._replace(attrs={**case.op.attrs, **attrs})
    with pytest.raises(ValueError, match=r"^rotate: "):
        case.run()
