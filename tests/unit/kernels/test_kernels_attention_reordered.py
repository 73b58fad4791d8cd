"""Attention over x itself: the same as attention over keys and values, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels_support import Case, array

from hepti_mqtt.kernels.attention_tile import KEYS, LANES
from hepti_mqtt.kernels.tile import NR

LENGTHS = st.lists(st.integers(0, 45), min_size=1, max_size=4).map(tuple)
WIDTHS = st.sampled_from([1, 5, 16, 33, 64])


def attention(lengths, heads, d, w, *, rows=None, q=None, x=None, bias=True, scale=0.3):
    """All queries (or `rows`) over all rows of x; queries begin in column 2 of their array."""
    m, h = sum(lengths), heads * d
    rows = range(m) if rows is None else rows
    q = array(m, h + 3) if q is None else q
    x = array(m, w) if x is None else x
    return Case(
        "attention_reordered",
        [np.ascontiguousarray(q[list(rows)]), x],
        [(len(rows), h)],
        weights=[array(w, h), array(w, h), *([array(h), array(h)] if bias else [])],
        packed=2,
        q_column=2,
        heads=heads,
        head_dim=d,
        q_rows=rows,
        k_rows=((0, m),),
        lengths=lengths,
        scale=scale / w**0.5,
        bias=bias,
    )


@given(lengths=LENGTHS, heads=st.integers(0, 5), d=st.sampled_from([1, 3, 8, 16, 64]), w=WIDTHS, bias=st.booleans())
def test_ragged_sequences_equal_the_reference(lengths, heads, d, w, bias):
    attention(lengths, heads, d, w, bias=bias).check(rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 3, LANES - 1, LANES, LANES + 1, NR - 1, NR, NR + 1])
@pytest.mark.parametrize("d", [7, 16, NR - 1, NR, NR + 1])
def test_sizes_beside_those_of_lanes_and_panels(rows, d):
    attention((rows + 3,), 5, d, 40, rows=range(rows)).check(rtol=1e-4, atol=1e-4)


def test_more_keys_than_a_block():
    attention((2 * KEYS + 3, 5), 3, 16, 48, rows=(*range(11), 2 * KEYS + 4), scale=4).check(rtol=1e-3, atol=1e-3)


@given(m=st.integers(1, 80), data=st.data())
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(m, data):
    first = data.draw(st.integers(0, m - 1))
    stop = data.draw(st.integers(first + 1, m))
    case, q = attention((m,), 3, 8, 20), array(m, 27)
    case.reads[0] = q
    part = attention((m,), 3, 8, 20, rows=range(first, stop), q=q, x=case.reads[1])
    part.weights = case.weights
    np.testing.assert_array_equal(part.run()[0], case.run()[0][first:stop])


def test_a_query_without_a_key_gives_zeros():
    case = attention((4, 6), 2, 8, 24)
    part = Case("attention_reordered", [case.reads[0], case.reads[1][4:]], [(10, 16)], **case.op.attrs)
    part.op = part.op._replace(attrs={**case.op.attrs, "k_rows": ((4, 10),)})
    part.weights, part.plain = case.weights, case.plain
    assert (part.check()[0][:4] == 0).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_sequence_and_is_not_hidden(value):
    x = array(20, 24)
    x[3, 12] = value
    case = attention((8, 12), 2, 8, 24, x=x)
    got, want = case.run()[0], case.reference()[0]
    np.testing.assert_allclose(got[8:], want[8:], rtol=1e-4, atol=1e-4)
    assert np.isnan(got[:8]).any()


def test_scores_that_overflow_the_exponential():
    q, x = array(30, 19, scale=300), array(30, 24, scale=300)
    case = attention((30,), 2, 8, 24, q=q, x=x)
    assert np.isclose(case.run()[0], case.reference()[0], rtol=1e-3, atol=1e-1).mean() > 0.95


@pytest.mark.parametrize(
    "wrong", [{"q_column": 4}, {"q_rows": (0,)}, {"head_dim": 0}, {"k_rows": ((0, 2),)}, {}], ids=str
)
def test_ops_that_do_not_fit_are_refused(wrong):
    case = attention((3,), 2, 4, 12)
    case.op = case.op._replace(attrs={**case.op.attrs, **wrong})
    if not wrong:
        case.weights[1] = attention((3,), 2, 4, 11).weights[1]
    with pytest.raises(ValueError, match=r"^attention_reordered: "):
        case.run()
