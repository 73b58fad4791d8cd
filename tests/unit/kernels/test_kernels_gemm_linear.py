from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels_support import Case, array

from hepti_mqtt.kernels import gemv
from hepti_mqtt.kernels.cpu import TILE
from hepti_mqtt.kernels.jit import JIT
from hepti_mqtt.kernels.linear import DEPTH, ROWS, SHALLOW
from hepti_mqtt.kernels.tile import ACTIVATIONS, NR

PANELS_AT_ONCE = gemv.panels_together(1, TILE)


def linear(m, k, widths, bias=True, activation=None, residual=False, x=None):
    n = sum(widths)
    reads = [array(m, k) if x is None else x, *([array(m, n)] if residual else [])]
    weights = [array(k, w, scale=0.3) for w in widths]
    biases = [array(w) for w in widths] if bias else []
    return Case(
        "linear",
        reads,
        [(m, n)],
        [*weights, *biases],
        packed=len(widths),
        bias=bias,
        activation=activation,
        residual=residual,
    )


@given(
    m=st.integers(0, 40),
    k=st.integers(0, 70),
    widths=st.lists(st.integers(0, 70), min_size=1, max_size=3),
    bias=st.booleans(),
    activation=st.sampled_from(ACTIVATIONS),
    residual=st.booleans(),
)
def test_any_shape_equals_the_reference(m, k, widths, bias, activation, residual):
    linear(m, k, widths, bias, activation, residual).check(rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("m", [1, 2, 13, ROWS - 1, ROWS, ROWS + 1])
@pytest.mark.parametrize("k", [SHALLOW + 1, DEPTH - 1, DEPTH, DEPTH + 1, 3 * DEPTH])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_shapes_beside_the_sizes_of_the_blocks(m, k, activation):
    if not JIT:
        m, k = min(m, 30), min(k, 40)
    linear(m, k, [70, 70], activation=activation, residual=True).check(rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize(("m", "widths"), [(1, [700, 300]), (130, [20]), (130, [300, 300, 300]), (57, [64])])
def test_any_number_of_threads_gives_the_same_bits(threads, m, widths):
    case = linear(m, 300, widths, activation="gelu", residual=True)
    np.testing.assert_array_equal(case.run(threads)[0], case.run(1)[0])


@given(m=st.integers(1, 40), data=st.data())
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(m, data):
    widths = [PANELS_AT_ONCE * NR + 8, 40]
    case = linear(m, 50, widths, activation="gelu")
    first = data.draw(st.integers(0, m - 1))
    stop = data.draw(st.integers(first + 1, m))
    part = linear(stop - first, 50, widths, activation="gelu", x=case.reads[0][first:stop])
    part.weights = case.weights
    np.testing.assert_array_equal(part.run()[0], case.run()[0][first:stop])


@pytest.mark.parametrize("rows", range(1, gemv.MOST_ROWS + 1))
@pytest.mark.parametrize(("activation", "residual"), [(None, False), (None, True), ("gelu", True)])
def test_panels_go_together_only_within_a_matrix(rows, activation, residual):
    """Whole ones with part of one behind them, one alone, and as many as go together, all of one product."""
    together = gemv.panels_together(rows, TILE)
    widths = [together * NR + 3, NR, together * NR, (2 * together + 1) * NR, 1]
    case = linear(rows, 37, widths, activation=activation, residual=residual)
    case.check(rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(case.run(2)[0], case.run(1)[0])


def test_panels_between_two_that_fit_are_looked_at_too():
    """Of four matrices of one panel the first and the last lie as panels of one matrix would, the others elsewhere."""
    case = linear(1, 37, [NR] * 4)
    one = np.concatenate([w.panels for w in case.weights[:4]])
    case.weights[0], case.weights[3] = (replace(case.weights[i], panels=one[i : i + 1]) for i in (0, 3))
    one[1:3] = 7
    case.check(rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30, 1e-42])
def test_odd_values_stay_in_their_row(value):
    x = array(9, 20)
    x[4, 3] = value
    case = linear(9, 20, [11], x=x)
    got, want = case.run()[0], case.reference()[0]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert np.isfinite(np.delete(got, 4, axis=0)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "swish"}, "activation 'swish'"),
        ({"residual": True}, "must read 2 slots"),
        ({"bias": None}, None),
    ],
)
def test_an_op_that_does_not_fit_is_refused(change, message):
    case = linear(4, 6, [8])
    attrs = {**case.op.attrs, **change}
    if message is None:
        del attrs["bias"]
        message = "attribute 'bias' is missing"
    case.op = type(case.op)("linear", case.op.reads, case.op.writes, (), attrs)
    with pytest.raises(ValueError, match=message):
        case.run()


def test_weights_that_do_not_fit_are_refused():
    case = linear(4, 6, [8])
    good = case.weights
    case.weights = linear(4, 5, [8]).weights
    with pytest.raises(ValueError, match="has 5 rows, x has 6 columns"):
        case.run()
    case.weights = good[:1]
    with pytest.raises(ValueError, match="needs"):
        case.run()
    case.weights = good[::-1]
    with pytest.raises(ValueError, match="needs a packed f32 matrix"):
        case.run()
    case.weights = [good[0], good[0]]
    with pytest.raises(ValueError, match="needs a plain array"):
        case.run()


def test_work_is_that_of_the_matmul():
    work = linear(4, 6, [8, 3]).kernel.work(linear(4, 6, [8, 3]).op, linear(4, 6, [8, 3]).slots)
    assert (work.kind, work.rows, work.k, work.n, work.flops) == ("linear", 4, 6, 11, 2 * 4 * 6 * 11)
