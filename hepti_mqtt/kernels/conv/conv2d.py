"""Kernels of one image in f32, rows first and channels last: x [Y, X, C].

conv2d      x, or x and residual [y, x, n] -> activation(patches @ W + b) + residual, [y, x, n]. Weights: W packed
            [ky kx C, n], whose row (i kx + j) C + c is for pixel (i, j) and channel c of a patch, and with a bias b
            plain [n]. Attributes kernel (ky, kx), stride (sy, sx), pad (top, left, bottom, right: zeros beyond x),
            activation (one of `ACTIVATIONS`), bias and residual (bool).
max_pool2d  x -> the largest value of each channel in each patch, [y, x, C]; attributes kernel, stride, pad (with
            -infinity).

There are as many patches as fit: y = (Y + top + bottom - ky) // sy + 1. Patches of some pixels at a time are copied to
rows of a matrix that is kept, and multiplied by the weights as every matrix is (Chellapilla, Puri and Simard 2006, with
the blocks of an implicit GEMM): each output is one sum over k in ascending order, whatever the block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numba import float32
from numpy.typing import NDArray

from hepti_mqtt.kernels import references
from hepti_mqtt.kernels.base import Array, Check, Kernel, Run, nothing, row_parts, rowwise
from hepti_mqtt.kernels.elementary import ZERO
from hepti_mqtt.kernels.gemm.epilogue import activation_of
from hepti_mqtt.kernels.gemm.linear import bind_product
from hepti_mqtt.kernels.gemm.tile import MR
from hepti_mqtt.kernels.machine.addresses import floats
from hepti_mqtt.kernels.machine.jit import INT, INT_ARRAY, fills, helper, kernel, reads
from hepti_mqtt.kernels.machine.workers import Workers
from hepti_mqtt.kernels.weights import Weight
from hepti_mqtt.program import Compute, SlotSpec
from hepti_mqtt.work import Work

# Elements of patches that are multiplied at once: they stay in the second-level cache. But at least so many pixels,
# since every block reads all weights.
_PATCHES: Final = 1 << 16
_LEAST_PIXELS: Final = 96

_MINUS_INF: Final = np.float32(-np.inf)


class _Window(NamedTuple):
    """How patches lie on an image; compiled code reads it as a table in this order."""

    rows: int
    columns: int
    channels: int
    kernel_rows: int
    kernel_columns: int
    stride_rows: int
    stride_columns: int
    top: int
    left: int
    out_rows: int
    out_columns: int

    def table(self) -> NDArray[np.int64]:
        """Return the window as compiled code reads it."""
        return np.asarray(self, np.int64)

    @property
    def pixels(self) -> int:
        """Return the number of patches."""
        return self.out_rows * self.out_columns


@helper
def _fill(target: int, count: int, value: Any) -> None:
    to = floats(target, count)
    for i in range(len(to)):
        to[i] = value


@helper
def _copy(source: int, target: int, count: int) -> None:
    values, to = floats(source, count), floats(target, count)
    for i in range(len(to)):
        to[i] = values[i]


@kernel(reads(float32, 1), fills(float32, 2), INT_ARRAY, INT, INT, INT, part=2)
def _gather(x: Any, patches: Any, window: Any, pixel: int, first: int, stop: int) -> None:
    """Fill rows first..stop of patches [pixels, ky kx C]; row 0 is patch `pixel` of the image x [Y X C].

    Of a patch's row of pixels, those inside the image lie side by side there.
    """
    height, width, channels = window[0], window[1], window[2]
    ky, kx, across = window[3], window[4], window[10]
    for row in range(first, stop):
        y = (pixel + row) // across * window[5] - window[7]
        x0 = (pixel + row) % across * window[6] - window[8]
        low = min(max(0, -x0), kx)
        high = max(low, min(kx, width - x0))
        for i in range(ky):
            at = patches.ctypes.data + 4 * channels * (row * ky + i) * kx
            if 0 <= y + i < height:
                _fill(at, low * channels, ZERO)
                source = x.ctypes.data + 4 * channels * ((y + i) * width + x0 + low)
                _copy(source, at + 4 * channels * low, (high - low) * channels)
                _fill(at + 4 * channels * high, (kx - high) * channels, ZERO)
            else:
                _fill(at, kx * channels, ZERO)


@kernel(reads(float32, 1), fills(float32, 2), INT_ARRAY, INT, INT, part=2)
def _max_pool2d(x: Any, out: Any, window: Any, first: int, stop: int) -> None:
    """Fill rows first..stop of out [y x, C] with the largest values in the patches of the image x [Y X C]."""
    height, width, channels = window[0], window[1], window[2]
    ky, kx, across = window[3], window[4], window[10]
    for pixel in range(first, stop):
        best = floats(out.ctypes.data + 4 * channels * pixel, channels)
        for c in range(channels):
            best[c] = _MINUS_INF
        y0 = pixel // across * window[5] - window[7]
        x0 = pixel % across * window[6] - window[8]
        for y in range(max(y0, 0), min(y0 + ky, height)):
            for column in range(max(x0, 0), min(x0 + kx, width)):
                values = floats(x.ctypes.data + 4 * channels * (y * width + column), channels)
                for c in range(channels):
                    # NaN is above everything, and nothing is above NaN.
                    is_above = values[c] > best[c] or np.isnan(values[c])
                    best[c] = values[c] if is_above else best[c]


def _window(check: Check, op: Compute) -> _Window:
    """Return the window of an op whose first read is [Y, X, C] and whose result is [y, x, n]."""
    check.that(len(check.reads[0].shape) == len(check.writes[0].shape) == 3, "slots must have 3 dimensions")
    height, width, channels = check.reads[0].shape
    (ky, kx), (sy, sx) = op.attrs["kernel"], op.attrs["stride"]
    top, left, bottom, right = op.attrs["pad"]
    check.that(min(ky, kx, sy, sx) >= 1, f"kernel {(ky, kx)} and stride {(sy, sx)} must be >= 1")
    check.that(min(top, left, bottom, right) >= 0, f"pad {(top, left, bottom, right)} must be >= 0")
    y, x = (height + top + bottom - ky) // sy + 1, (width + left + right - kx) // sx + 1
    check.shape(check.writes[0], (max(0, y), max(0, x), check.writes[0].shape[2]))
    return _Window(height, width, channels, ky, kx, sy, sx, top, left, max(0, y), max(0, x))


def _bind_conv2d(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], pool: Workers) -> Run:
    check = Check(op, slots)
    has_bias, has_residual = bool(op.attrs["bias"]), bool(op.attrs["residual"])
    check.count(2 if has_residual else 1)
    check.dtypes()
    check.weights(weights, 2 if has_bias else 1)
    activation = activation_of(check, op.attrs["activation"])
    window = _window(check, op)
    matrix, n = check.packed(weights[0]), check.writes[0].shape[2]
    k = window.kernel_rows * window.kernel_columns * window.channels
    check.that((matrix.rows, matrix.columns) == (k, n), f"weight {matrix.rows, matrix.columns} should be {(k, n)}")
    biases = [check.plain(weights[1], (n,))] if has_bias else []
    if has_residual:
        check.shape(check.reads[1], check.writes[0].shape)
    if not window.pixels or not n:
        return nothing

    def product(pixels: int) -> Run:
        return bind_product((pixels, k), [matrix], biases, has_residual, activation, pool)

    if window[3:9] == (1, 1, 1, 1, 0, 0) and window[:2] == window[-2:]:
        return _of_pixels(product(window.pixels), n, k)
    return _of_patches(product, window, n, k, pool)


def _of_pixels(product: Run, n: int, k: int) -> Run:
    """Return the run of a convolution whose patches are the pixels."""

    def run(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        pixels = [a.reshape(-1, width) for a, width in zip(reads, (k, n), strict=False)]
        product(pixels, [writes[0].reshape(-1, n)])

    return run


def _of_patches(product: Callable[[int], Run], window: _Window, n: int, k: int, pool: Workers) -> Run:
    """Return the run of a convolution by blocks of patches; `product(rows)` returns that of a product of so many."""
    total = window.pixels
    most = max(_LEAST_PIXELS, _PATCHES // max(k, 1))
    size = min(total, MR * -(-total // (-(-total // most) * MR)))
    cuts = [*range(0, total, size), total]
    scratch, table = np.empty((size, k), np.float32), window.table()
    by_rows = {rows: (scratch[:rows], row_parts(rows, k, pool), product(rows)) for rows in {size, cuts[-1] - cuts[-2]}}
    blocks = [(first, stop, *by_rows[stop - first]) for first, stop in pairwise(cuts)]

    def run(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        x, residuals = reads[0].reshape(-1), [a.reshape(-1, n) for a in reads[1:]]
        out = writes[0].reshape(-1, n)
        for first, stop, patches, parts, multiply in blocks:
            pool.each(_gather, (x, patches, table, first), parts)
            multiply([patches, *(a[first:stop] for a in residuals)], [out[first:stop]])

    return run


def _bind_max_pool2d(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], pool: Workers) -> Run:
    check = Check(op, slots)
    check.count(1)
    check.dtypes()
    check.weights(weights, 0)
    window = _window(check, op)
    c = window.channels
    check.that(check.writes[0].shape[2] == c, f"must write as many channels as it reads, {c}")
    parts = row_parts(window.pixels, c * window.kernel_rows * window.kernel_columns, pool)
    table = window.table()
    if not c:
        return nothing

    def run(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        pool.each(_max_pool2d, (reads[0].reshape(-1), writes[0].reshape(-1, c), table), parts)

    return run


def _patches_of(op: Compute, x: Array, out: SlotSpec, fill: float) -> Array:
    """Return the patches of x as [y, x, ky, kx, C], for references."""
    (ky, kx), (sy, sx) = op.attrs["kernel"], op.attrs["stride"]
    top, left, bottom, right = op.attrs["pad"]
    padded = np.pad(x.astype(np.float64), ((top, bottom), (left, right), (0, 0)), constant_values=fill)
    y, across, _ = out.shape
    found = np.empty((y, across, ky, kx, x.shape[2]))
    for i in range(y):
        for j in range(across):
            found[i, j] = padded[i * sy : i * sy + ky, j * sx : j * sx + kx]
    return found


def _reference_conv2d(
    op: Compute,
    slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    weights: Sequence[Array],
) -> list[Array]:
    out = slots[op.writes[0]]
    patches = _patches_of(op, reads[0], out, 0.0).reshape(out.shape[0] * out.shape[1], len(weights[0]))
    total = patches @ weights[0].astype(np.float64) + (weights[1] if op.attrs["bias"] else 0.0)
    result = references.ACTIVATIONS[op.attrs["activation"]](total).reshape(out.shape)
    return [result + reads[1] if op.attrs["residual"] else result]


def _reference_max_pool2d(
    op: Compute,
    slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    _weights: Sequence[Array],
) -> list[Array]:
    return [_patches_of(op, reads[0], slots[op.writes[0]], -np.inf).max(axis=(2, 3))]


def _work_conv2d(op: Compute, slots: Sequence[SlotSpec]) -> Work:
    y, x, n = slots[op.writes[0]].shape
    k = math.prod(op.attrs["kernel"]) * slots[op.reads[0]].shape[2]
    return Work("linear", rows=y * x, k=k, n=n, flops=2.0 * y * x * k * n)


CONV2D: Final = Kernel("conv2d", _bind_conv2d, _reference_conv2d, _work_conv2d)
MAX_POOL2D: Final = Kernel("max_pool2d", _bind_max_pool2d, _reference_max_pool2d, rowwise)
