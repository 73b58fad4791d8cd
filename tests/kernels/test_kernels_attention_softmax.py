"""The vector steps of attention against NumPy: every number of vectors, what is not finite, and what underflows."""

from __future__ import annotations

import numpy as np
import pytest
from kernels_support import array

from hepti_mqtt.kernels.attention_tile import softmax_tile
from hepti_mqtt.kernels.cpu import TILE
from hepti_mqtt.kernels.jit import INT, kernel, registered
from hepti_mqtt.kernels.tile import NR


def _softmax(vectors, scores, keys, high, norm, rescale):
    softmax_tile(vectors, scores, keys, high, norm, rescale)


@pytest.fixture(scope="module")
def softmax():
    known = len(registered)
    compiled = kernel(*[INT] * 6)(_softmax)  # with the flags of a kernel: "reassoc" must not reach the tile
    del registered[known:]
    return compiled


def run(softmax, scores, vectors, high=-np.inf):
    got, tops = scores.copy(), np.full(NR, high, np.float32)
    norm, rescale = np.ones(NR, np.float32), np.full(NR, 7, np.float32)
    with np.errstate(all="ignore"):
        softmax(vectors, got.ctypes.data, len(got), tops.ctypes.data, norm.ctypes.data, rescale.ctypes.data)
    return got, tops, norm, rescale


@pytest.mark.parametrize("vectors", range(1, TILE.vectors + 1))
def test_powers_are_within_2_ulp_and_other_vectors_are_left_alone(softmax, vectors):
    scores, width = array(50, NR, scale=20), vectors * TILE.lanes
    got, tops, norm, rescale = run(softmax, scores, vectors, high=3)
    want_top = np.maximum(scores.max(axis=0), 3)
    away = (scores - want_top).astype(np.float64)
    want = np.where(away < -125, 0, np.exp2(away))
    np.testing.assert_array_equal(tops[:width], want_top[:width])
    np.testing.assert_allclose(got[:, :width], want[:, :width], rtol=2.4e-7, atol=2**-124)
    np.testing.assert_allclose(rescale[:width], np.exp2(3 - want_top)[:width], rtol=2.4e-7)
    np.testing.assert_allclose(norm[:width], (want.sum(axis=0) + rescale)[:width], rtol=5e-6)
    np.testing.assert_array_equal(got[:, width:], scores[:, width:])
    assert (rescale[width:] == 7).all()


def test_minus_inf_weighs_nothing_and_nan_stays(softmax):
    scores = array(9, NR)
    scores[:, 0], scores[4, 1], scores[4, 2] = -np.inf, -np.inf, np.float32(np.nan)
    scores[5, 3:4].view(np.uint32)[:] = 0x7FC00001  # a NaN whose low bits would disturb an exponent
    got, tops, norm, _ = run(softmax, scores, TILE.vectors)
    assert (got[:, 0] == 0).all()
    assert tops[0] == -np.inf
    assert got[4, 1] == 0
    assert np.isfinite(norm[1])
    assert np.isnan([got[4, 2], got[5, 3], norm[2], norm[3]]).all()
