from __future__ import annotations

import functools
import math

import numba
import numpy as np
import pytest

from hepti_mqtt.kernels import elementary
from hepti_mqtt.kernels.base import REFERENCE_ACTIVATIONS as ACTIVATIONS
from hepti_mqtt.kernels.jit import JIT

ODD = np.array([0.0, -0.0, 1e-45, -1e-40, 1e-20, 87.3, -87.3, -87.4, -104.0, 1e30, -1e30], np.float32)


@functools.cache
def loop_of(function):
    @numba.njit(error_model="numpy")
    def loop(x, out):
        for i in range(len(x)):
            out[i] = function(x[i])

    return loop


def apply(function, x):
    out = np.empty_like(x)
    with np.errstate(all="ignore"):
        loop_of(function)(x, out)
    return out


def grid(low, high):
    count = 20_001 if JIT else 301
    return np.concatenate([np.linspace(low, high, count, dtype=np.float32), ODD[(low <= ODD) & (high >= ODD)]])


def ulps(got, want):
    return np.abs(got.astype(np.float64) - want) / np.spacing(np.abs(want).astype(np.float32))


@pytest.mark.parametrize(
    ("name", "reference", "low", "high"), [("exp_of_negative", np.exp, -87.3, 0.0), ("tanh", np.tanh, -12.0, 12.0)]
)
def test_within_two_units_in_the_last_place(name, reference, low, high):
    x = grid(low, high)
    want = reference(x.astype(np.float64))
    normal = np.abs(want) >= np.finfo(np.float32).tiny
    assert ulps(apply(getattr(elementary, name), x), want)[normal].max() <= 2


@pytest.mark.parametrize(
    "name",
    ["gelu", "gelu_tanh", "relu", "relu6", "leaky_relu", "silu", "quick_gelu", "sigmoid", "hard_sigmoid", "hard_swish"],
)
def test_activations_equal_their_references(name):
    x = grid(-20.0, 20.0)
    want = ACTIVATIONS[name](x.astype(np.float64))
    np.testing.assert_allclose(apply(getattr(elementary, name), x), want, rtol=2e-6, atol=1e-6)


def test_gelu_is_within_its_bounds():
    x = grid(-20.0, 20.0)
    want = np.array([0.5 * v * math.erfc(-v / math.sqrt(2)) for v in x.tolist()])
    error = np.abs(apply(elementary.gelu, x) - want)
    assert (error <= np.where(x > 0, 4e-7 * want + 1e-44, 4e-7)).all()  # half of the least denormal is 0


def test_limits_and_nan():
    x = np.array([-np.inf, np.inf, np.nan, -1e30, 1e30], np.float32)
    assert apply(elementary.exp_of_negative, x[[0, 3]]).tolist() == [0, 0]
    np.testing.assert_array_equal(apply(elementary.tanh, x), [-1, 1, np.nan, -1, 1])
    for name in ("exp_of_negative", "gelu", "gelu_tanh", "relu", "relu6", "leaky_relu", "quick_gelu"):
        assert np.isnan(apply(getattr(elementary, name), x[2:3])).all()
    np.testing.assert_array_equal(apply(elementary.gelu, x[3:]), [0, x[4]])
    np.testing.assert_array_equal(apply(elementary.relu, x), [0, np.inf, np.nan, 0, x[4]])
    np.testing.assert_array_equal(apply(elementary.relu6, x), [0, 6, np.nan, 0, 6])
    np.testing.assert_array_equal(apply(elementary.leaky_relu, x), [-np.inf, np.inf, np.nan, np.float32(-1e29), x[4]])
