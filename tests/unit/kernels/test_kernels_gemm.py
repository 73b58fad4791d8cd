"""`linear` over weights of every storage: f32, f16, int8 with f32 arithmetic, int8 with int8 activations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels_support import RNG, Case, array, held

from hepti_mqtt.kernels import NarrowMatrix, gemv
from hepti_mqtt.kernels.cpu import DOTS, TILE, dot
from hepti_mqtt.kernels.jit import JIT
from hepti_mqtt.kernels.linear import DEPTH, ROWS, SHALLOW
from hepti_mqtt.kernels.quantised import quantise_rows
from hepti_mqtt.kernels.tile import ACTIVATIONS, NR
from hepti_mqtt.kernels.weights import BLOCK, PANELS, blocks

RNG.seed(1)  # for the cases below, which are drawn when this file is imported

STORAGES = ("f32", "f16", "w8a32", "w8a8")
ALL = pytest.mark.parametrize("storage", STORAGES)
STORED = st.sampled_from(STORAGES)
PANELS_AT_ONCE = gemv.panels_together(1, TILE)


def linear(storage, m, k, widths, bias=True, activation=None, residual=False, x=None, weights=None):
    """Return a case whose reference has the matrices as they are stored, so that only the kernel's error is left."""
    n = sum(widths)
    reads = [array(m, k) if x is None else x, *([array(m, n)] if residual else [])]
    matrices = [array(k, w, scale=0.3) for w in widths] if weights is None else weights
    biases = [array(w) for w in widths] if bias else []
    attrs = {"bias": bias, "activation": activation, "residual": residual}
    return Case("linear", reads, [(m, n)], [*(held(w, storage) for w in matrices), *biases], **attrs)


def bound(case, storage, widths):
    """Return how far each result may be from the reference; no activation is steeper than 1.2."""
    x = case.reads[0].astype(np.float64)
    w = np.concatenate([np.abs(p.astype(np.float64)) for p in case.plain[: len(widths)]], axis=1)
    rounding = np.abs(x) @ w * (4 + x.shape[1]) * 2.0**-24
    if storage == "w8a8":
        for start in range(0, x.shape[1], BLOCK):
            part, under = x[:, start : start + BLOCK], w[start : start + BLOCK]
            step = (np.maximum(part, 0).max(axis=1, initial=0) - np.minimum(part, 0).min(axis=1, initial=0)) / 254
            # Half a step; a thousandth for f32; magnitudes that count as 0.
            rounding = rounding + np.outer(0.501 * step + 254e-35, under.sum(axis=0))
    return 1.2 * rounding + 1e-5


@given(
    storage=STORED,
    m=st.integers(0, 40),
    k=st.integers(0, 70) | st.integers(120, 800),
    widths=st.lists(st.integers(0, 70), min_size=1, max_size=3),
    bias=st.booleans(),
    activation=st.none() | st.sampled_from(ACTIVATIONS),
    residual=st.booleans(),
    scale=st.sampled_from([1e-20, 1.0, 1e4]),
    shift=st.sampled_from([0.0, 1.0, -3.0]),
)
def test_any_shape_equals_the_reference(storage, m, k, widths, bias, activation, residual, scale, shift):
    x = (array(m, k) + np.float32(shift)) * np.float32(scale)
    case = linear(storage, m, k, widths, bias, activation, residual, x=x)
    got, want = case.run()[0], case.reference()[0]
    assert (np.abs(got - want) <= bound(case, storage, widths) + 4e-6 * np.abs(want)).all()


@pytest.mark.parametrize(
    ("m", "k"),
    [
        *((1, k) for k in (SHALLOW + 1, DEPTH, 3 * DEPTH)),
        *((13, k) for k in (DEPTH - 1, DEPTH, DEPTH + 1, 3 * DEPTH)),
        *((rows, SHALLOW + 1) for rows in (2, ROWS - 1, ROWS, ROWS + 1)),
    ],
)
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_shapes_beside_the_sizes_of_the_blocks(m, k, activation):
    if not JIT:
        m, k = min(m, 30), min(k, 40)
    linear("f32", m, k, [70, 70], activation=activation, residual=True).check(rtol=1e-3, atol=1e-3)


@ALL
@pytest.mark.parametrize(("m", "widths"), [(1, [700, 300]), (130, [20]), (130, [300] * 3), (600, [200])])
def test_any_number_of_threads_gives_the_same_bits(storage, m, widths):
    case = linear(storage, m, 300, widths, activation="gelu", residual=True)
    np.testing.assert_array_equal(case.run(3)[0], case.run(1)[0])


@given(storage=STORED, m=st.integers(1, 40), k=st.integers(0, 600), data=st.data())
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(storage, m, k, data):
    widths = [PANELS_AT_ONCE * NR + 8, 40]
    case = linear(storage, m, k, widths, activation="gelu")
    first = data.draw(st.integers(0, m - 1))
    stop = data.draw(st.integers(first + 1, m))
    part = linear(storage, stop - first, k, widths, activation="gelu", x=case.reads[0][first:stop])
    part.weights = case.weights
    np.testing.assert_array_equal(part.run()[0], case.run()[0][first:stop])


@pytest.mark.parametrize("rows", range(1, gemv.MOST_ROWS + 1))
@pytest.mark.parametrize(("activation", "residual"), [(None, False), (None, True), ("gelu", True)])
def test_panels_go_together_only_within_a_matrix(rows, activation, residual):
    """Whole ones with part of one behind them, one alone, and as many as go together, all of one product."""
    together = gemv.panels_together(rows, TILE)
    widths = [together * NR + 3, NR, together * NR, (2 * together + 1) * NR, 1]
    case = linear("f32", rows, 37, widths, activation=activation, residual=residual)
    case.check(rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(case.run(2)[0], case.run(1)[0])


@pytest.mark.parametrize("storage", ["f32", "f16", "w8a32"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("beside", [(0, 1, 2, 3), (0, 3)], ids=["all", "the first and the last"])
def test_matrices_whose_panels_lie_side_by_side_keep_their_own_columns_bias_and_scales(storage, rows, beside):
    """Between those that lie as panels of one matrix would there may be others."""
    case = linear(storage, rows, 70, [PANELS[storage].width] * 4)
    one = np.concatenate([w.panels for w in case.weights[:4]])
    for i in beside:
        case.weights[i] = replace(case.weights[i], panels=one[i : i + 1])
    for i in set(range(4)) - set(beside):
        one[i] = 7
    np.testing.assert_allclose(case.run()[0], case.reference()[0], rtol=1e-4, atol=1e-4)


@ALL
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_in_its_row_alone(storage, value):
    x = array(9, 20)
    x[4, 3] = value
    got = linear(storage, 9, 20, [11], x=x).run()[0]
    assert not np.isfinite(got[4]).any()
    if np.isnan(value) or storage == "w8a8":
        assert np.isnan(got[4]).all()
    assert np.isfinite(np.delete(got, 4, axis=0)).all()


@ALL
@pytest.mark.parametrize("value", [3e38, -3e38, 1e30, 1e-30, 1e-42, 0.0])
def test_huge_and_denormal_rows_stay_within_the_bound(storage, value):
    x = array(9, 20)
    x[4] = value
    x[4, ::3] = -value
    case = linear(storage, 9, 20, [11], bias=False, x=x, weights=[array(20, 11, scale=0.01)])
    got, want, near = case.run()[0], case.reference()[0], bound(case, storage, [11])
    if storage == "w8a32" and abs(value) > 1e36:
        assert not np.isfinite(got[4]).any()  # the sum before scaling overflows: loud, not wrong
        got, want, near = (np.delete(each, 4, axis=0) for each in (got, want, near))
    assert np.isfinite(got).all()
    assert (np.abs(got - want) <= near + 1e-6 * np.abs(want)).all()


@pytest.mark.parametrize("storage", ["w8a32", "w8a8"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_column_that_is_not_finite_comes_out_as_nan(storage, value):
    w = array(20, 11)
    w[3, 5] = value
    got = linear(storage, 7, 20, [11], weights=[w]).run()[0]
    assert np.isnan(got[:, 5]).all()
    assert np.isfinite(np.delete(got, 5, axis=1)).all()


@given(k=st.integers(0, 300), scale=st.sampled_from([1e-44, 1e-38, 1e-20, 1.0, 1e38]))
def test_codes_of_int8_weights_are_within_half_a_step_of_their_block(k, scale):
    w = (array(k, 21).clip(-3, 3) * np.float64(scale)).astype(np.float32)
    codes = held(w, "w8a8")
    assert isinstance(codes, NarrowMatrix)
    off = np.abs(codes.plain() - w.astype(np.float64))
    for block in range(blocks(k)):
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        step = np.abs(w[rows]).max(axis=0, initial=0).astype(np.float64) / 127
        # Below 2**-126 a step itself is rounded to a multiple of 2**-149.
        assert (off[rows] <= 0.5001 * step + 127 * 2.0**-149).all()
        groups = slice(block * BLOCK // 4, (block + 1) * BLOCK // 4)
        assert (codes.sums[:, block] == codes.panels[:, groups].sum(axis=(1, 3), dtype=np.int32)).all()


@given(m=st.integers(1, 6), k=st.integers(0, 300), scale=st.sampled_from([1e-30, 1.0, 1e37]))
def test_codes_of_rows_are_within_half_a_step_and_zero_is_exact(m, k, scale):
    x = array(m, k, scale=scale)
    x[:, ::4] = 0
    codes = np.zeros((m, -(-k // 4) * 4), np.uint8)
    scales, zeros = np.zeros((m, blocks(k)), np.float32), np.zeros((m, blocks(k)), np.float32)
    quantise_rows(x, codes, scales, zeros, 0, m)
    signed = codes.view(np.int8) if DOTS[dot()].signed else codes
    step, zero = (np.repeat(a, BLOCK, axis=1)[:, :k] for a in (scales.astype(np.float64), zeros))
    back = (signed[:, :k].astype(np.float64) - zero) * step
    assert (np.abs(back - x) <= 0.501 * step).all()
    assert (back[:, ::4] == 0).all()


def test_every_half_is_widened_exactly():
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    with np.errstate(invalid="ignore"):  # ARM signals a NaN that is cast
        wide = halves.astype(np.float32)
    case = linear("f16", 1, 1, [len(wide)], bias=False, x=np.ones((1, 1), np.float32), weights=[wide[None]])
    np.testing.assert_array_equal(case.run()[0][0], wide)


@pytest.mark.parametrize("change", [{"activation": "swish"}, {"residual": True}, {"bias": None}], ids=str)
def test_an_op_that_does_not_fit_is_refused(change):
    case = linear("f32", 4, 6, [8])
    attrs = {**case.op.attrs, **change}
    case.op = case.op._replace(attrs={name: value for name, value in attrs.items() if (name, value) != ("bias", None)})
    with pytest.raises(ValueError, match=r"^linear: "):
        case.run()


MATRIX, BIAS = linear("f32", 4, 6, [8]).weights
SHORT, HALVES, INT8 = (linear(storage, 4, k, [8]).weights[0] for storage, k in (("f32", 5), ("f16", 6), ("w8a8", 6)))


WRONG = {
    "another depth": (SHORT, MATRIX, BIAS, BIAS),
    "too few": (MATRIX, MATRIX, BIAS),
    "unpacked": (BIAS, MATRIX, BIAS, BIAS),
    "a packed bias": (MATRIX, MATRIX, MATRIX, BIAS),
    "two storages": (HALVES, INT8, BIAS, BIAS),
    "a narrow bias": (HALVES, HALVES, HALVES, BIAS),
}


@pytest.mark.parametrize("weights", WRONG.values(), ids=WRONG)
def test_weights_that_do_not_fit_are_refused(weights):
    case = linear("f32", 4, 6, [8, 8])
    case.run()
    case.weights = list(weights)
    with pytest.raises(ValueError, match=r"^linear: "):
        case.run()
