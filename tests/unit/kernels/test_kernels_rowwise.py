from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels_support import Case, array

from hepti_mqtt.kernels.base import REFERENCE_ACTIVATIONS

SIZES = {"m": st.integers(0, 9), "h": st.integers(1, 70)}


@given(**SIZES, scale=st.sampled_from([1e-3, 1.0, 1e3]))
def test_layer_norm(m, h, scale):
    x = array(m, h, scale=scale) + np.float32(2 * scale)
    Case("layer_norm", [x], [(m, h)], [array(h), array(h)], eps=1e-5).check(rtol=1e-3, atol=1e-3)


@given(**SIZES, parts=st.integers(0, 19), bias=st.booleans())
def test_add(m, h, parts, bias):
    reads = [array(m, h) for _ in range(1 + parts)]
    Case("add", reads, [(m, h)], [array(h)] if bias else [], bias=bias).check()


@given(**SIZES, parts=st.integers(0, 10), bias=st.booleans(), keep_sum=st.booleans())
def test_add_norm(m, h, parts, bias, keep_sum):
    reads = [array(m, h) for _ in range(1 + parts)]
    weights = [array(h) for _ in range(3 if bias else 2)]
    shapes = [(m, h)] * (2 if keep_sum else 1)
    Case("add_norm", reads, shapes, weights, bias=bias, eps=1e-3, keep_sum=keep_sum).check(rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1500)])
def test_parts_are_added_in_the_order_given_and_before_the_residual(shape):
    reads = [np.full(shape, v, np.float32) for v in (1.0, 1e8, 3.0, -1e8)]
    total = np.float32(1e8) + np.float32(3.0) - np.float32(1e8)
    assert (Case("add", reads, [shape], [], bias=False).run()[0] == np.float32(1.0) + total).all()
    assert (Case("sum", [*reads[1:], reads[0]], [shape]).run()[0] == total + np.float32(1.0)).all()


SHAPES = st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple)


@given(
    shape=SHAPES | st.sampled_from([(1023,), (5, 411), (2049, 1)]),
    parts=st.integers(1, 19),
    activation=st.sampled_from([None, *REFERENCE_ACTIVATIONS]),
)
def test_sum(shape, parts, activation):
    Case("sum", [array(*shape) for _ in range(parts)], [shape], activation=activation).check()


@given(
    lengths=st.lists(st.integers(0, 8), max_size=5),
    h=st.integers(0, 20),
    mode=st.sampled_from(["mean", "sqrt_mean", "weighted_mean", "max"]),
)
def test_pool_rows(lengths, h, mode):
    Case("pool_rows", [array(sum(lengths), h)], [(len(lengths), h)], lengths=tuple(lengths), mode=mode).check()


def test_the_largest_of_no_number_is_no_number():
    for rows in ([[np.nan], [1.0]], [[1.0], [np.nan], [2.0]]):
        pooled = Case("pool_rows", [np.array(rows, np.float32)], [(1, 1)], lengths=(len(rows),), mode="max").run()[0]
        assert np.isnan(pooled).all()


@given(m=st.integers(0, 9), h=st.integers(0, 70), scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e25]))
def test_normalize_rows(m, h, scale):
    Case("normalize_rows", [array(m, h, scale=scale)], [(m, h)]).check()


def test_a_row_of_zeros_stays_zero():
    assert (Case("normalize_rows", [np.zeros((2, 5), np.float32)], [(2, 5)]).run()[0] == 0).all()


def test_a_row_whose_norm_is_no_f32_has_a_length_of_one_all_the_same():
    row = np.array([[3e38, -3e38, 0.0]], np.float32)
    (out,) = Case("normalize_rows", [row], [(1, 3)]).run()
    np.testing.assert_allclose(out, [[0.5**0.5, -(0.5**0.5), 0.0]], rtol=1e-6)


@pytest.mark.parametrize("kernel", ["layer_norm", "add_norm"])
@pytest.mark.parametrize("weights", [1, 2])
def test_a_norm_by_root_mean_square_does_not_centre(kernel, weights):
    x, norm = array(5, 33) + 3, [array(33) for _ in range(weights)]
    attrs = {"eps": 1e-5, "rms": True, "gamma_offset": 1.0, "bias": False, "keep_sum": False}
    got = Case(kernel, [x], [(5, 33)], norm, **attrs).check(1e-5, 1e-5)[0]
    want = x / np.sqrt((x.astype("f8") ** 2).mean(axis=1, keepdims=True) + 1e-5) * (1 + norm[0])
    np.testing.assert_allclose(got, want + (norm[1] if weights > 1 else 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (1, 1), (7, 333)])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "quick_gelu", "relu"])
def test_gate(shape, activation):
    Case("gate", [array(*shape), array(*shape)], [shape], activation=activation).check()


@pytest.mark.parametrize("shape", [(0, 3, 4), (1, 1, 1), (5, 7, 33)])
def test_a_row_scales_every_pixel_of_a_map_and_a_pixel_is_normed_by_itself(shape):
    x, c = array(*shape), shape[2]
    for activation in ("sigmoid", "hard_sigmoid"):
        Case("scale_map", [array(1, c), x], [shape], activation=activation).check()
    Case("layer_norm", [x], [shape], [array(c), array(c)], eps=1e-6).check(1e-3, 1e-3)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kernel", ["layer_norm", "add_norm", "add", "sum", "normalize_rows"])
def test_what_is_not_finite_stays_in_its_row_and_is_not_hidden(kernel, value):
    x = array(3, 33)
    x[1, 7] = value
    norm = [array(33), array(33)] if "norm" in kernel and kernel != "normalize_rows" else []
    case = Case(kernel, [x], [(3, 33)], norm, eps=1e-5, bias=False, keep_sum=False)
    got, want = case.run()[0], case.reference()[0]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert np.isfinite(got[[0, 2]]).all()
    assert not np.isfinite(got[1]).all()


@pytest.mark.parametrize("scale", [1e-41, 1e-20, 1e20, 3e37])
@pytest.mark.parametrize("kernel", ["layer_norm", "add_norm"])
def test_norms_of_denormal_and_huge_rows_are_within_1e_5_of_the_reference(kernel, scale):
    x = (array(5, 700) * np.float64(scale)).astype(np.float32)
    Case(kernel, [x], [x.shape], [array(700), array(700)], eps=1e-5, bias=False, keep_sum=False).check(1e-5, 1e-5)
