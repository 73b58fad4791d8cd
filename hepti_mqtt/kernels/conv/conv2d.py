"""Kernel `conv2d` of one image in f32: x, or x and residual [y, x, n] -> activation(patches @ W + b) + residual.

Patches and the attributes kernel, stride, pad (zeros beyond x) and dilation are those of `windows`; writes [y, x, n].
Attributes: activation (one of `ACTIVATIONS`), bias and residual (bool); where wanted, residual_first (bool: the
residual is added before the activation) and groups (int, 1 where absent): channels of x, and columns of W, fall into so
many groups, in order, and a column sees the channels of its group. Weights: W packed [ky kx C / groups, n], whose row
(i kx + j) C / groups + c is for pixel (i, j) and channel c of the group, and with a bias b plain [n].

Patches of some pixels at a time are copied to rows of a matrix that is kept, and multiplied by the weights as every
matrix is (Chellapilla, Puri and Simard 2006, with the blocks of an implicit GEMM): each output is one sum over k in
ascending order, whatever the block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numba import float32

from hepti_mqtt.kernels import references
from hepti_mqtt.kernels.base import Array, Check, Kernel, Run, nothing, row_parts, rowwise
from hepti_mqtt.kernels.conv.windows import Window, patches_of, window_of
from hepti_mqtt.kernels.elementary import ZERO
from hepti_mqtt.kernels.gemm.epilogue import NONE, activation_of
from hepti_mqtt.kernels.gemm.linear import bind_product
from hepti_mqtt.kernels.gemm.tile import MR
from hepti_mqtt.kernels.machine.addresses import floats
from hepti_mqtt.kernels.machine.jit import INT, INT_ARRAY, fills, helper, kernel, reads
from hepti_mqtt.kernels.machine.workers import Workers
from hepti_mqtt.kernels.rowwise.sums import SUM
from hepti_mqtt.kernels.weights import PackedMatrix, Weight, allocate
from hepti_mqtt.program import Compute, SlotSpec, WeightRef
from hepti_mqtt.work import Work

# Elements of patches that are multiplied at once: they stay in the second-level cache. But at least so many pixels,
# since every block reads all weights.
_PATCHES: Final = 1 << 16
_LEAST_PIXELS: Final = 96


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


@kernel(reads(float32, 1), fills(float32, 2), INT_ARRAY, INT, INT, INT, part=2, maps=True)
def _gather(x: Any, patches: Any, window: Any, pixel: int, first: int, stop: int) -> None:
    """Fill rows first..stop of patches [pixels, ky kx C]; row 0 is patch `pixel` of the image x [Y X C].

    Of a patch's row of pixels, those inside the image lie side by side there.
    """
    height, width, channels = window[0], window[1], window[2]
    ky, kx, across = window[3], window[4], window[10]
    for row in range(first, stop):
        y = (pixel + row) // across * window[5] - window[7]
        x0 = (pixel + row) % across * window[6] - window[8]
        for i in range(ky):
            for j in range(kx):
                at = patches.ctypes.data + 4 * channels * ((row * ky + i) * kx + j)
                at_y, at_x = y + i * window[11], x0 + j * window[12]
                if 0 <= at_y < height and 0 <= at_x < width:
                    _copy(x.ctypes.data + 4 * channels * (at_y * width + at_x), at, channels)
                else:
                    _fill(at, channels, ZERO)


def _bind(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], pool: Workers) -> Run:
    check = Check(op, slots)
    has_bias, has_residual = bool(op.attrs["bias"]), bool(op.attrs["residual"])
    check.count(2 if has_residual else 1)
    check.dtypes()
    check.weights(weights, 2 if has_bias else 1)
    activation = activation_of(check, op.attrs["activation"])
    window = window_of(check, op)
    matrix, n = check.packed(weights[0]), check.writes[0].shape[2]
    groups = int(op.attrs.get("groups", 1))
    check.that(groups >= 1, f"groups {groups} must be >= 1")
    divides = window.channels % groups == n % groups == 0
    check.that(divides, f"groups {groups} must divide {window.channels} channels and {n} columns")
    k = window.places * window.channels // groups
    check.that((matrix.rows, matrix.columns) == (k, n), f"weight {matrix.rows, matrix.columns} should be {(k, n)}")
    biases = [check.plain(weights[1], (n,))] if has_bias else []
    if has_residual:
        check.shape(check.reads[1], check.writes[0].shape)
    if not window.pixels or not n:
        return nothing

    def run_of(matrix: PackedMatrix, biases: Sequence[Array], window: Window, residual: bool, activation: int) -> Run:
        def product(pixels: int) -> Run:
            return bind_product((pixels, k), [matrix], biases, residual, activation, pool)

        if window[3:9] == (1, 1, 1, 1, 0, 0) and window[:2] == (window.out_rows, window.out_columns):
            return _of_pixels(product(window.pixels), matrix.columns, k)
        return _of_patches(product, window, matrix.columns, k, pool)

    residual_first = has_residual and bool(op.attrs.get("residual_first", False))
    if groups == 1 and not residual_first:
        return run_of(matrix, biases, window, has_residual, activation)
    parts = []
    c, wide = window.channels // groups, n // groups
    plain = matrix.plain()
    for g in range(groups):
        buffer = allocate(WeightRef("w", (0, k), (0, wide)))
        buffer.put(np.ascontiguousarray(plain[:, g * wide : (g + 1) * wide]), 0, 0)
        of_group = check.packed(buffer.finish())
        bias = [biases[0][g * wide : (g + 1) * wide].copy()] if biases else []
        run = run_of(of_group, bias, window._replace(channels=c), has_residual, NONE if residual_first else activation)
        parts.append((run, slice(g * c, (g + 1) * c), slice(g * wide, (g + 1) * wide)))
    y, x = window.out_rows, window.out_columns
    one = np.zeros((y, x, n), np.float32)
    finish: Run = nothing
    if residual_first and activation != NONE:
        name = op.attrs["activation"]
        same = Compute("sum", (0,), (1,), (), {"activation": name})
        finish = SUM.bind(same, [check.writes[0], check.writes[0]], [], pool)

    def grouped(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        for run, channels, columns in parts:
            out = np.empty((y, x, wide), np.float32)
            seen = [np.ascontiguousarray(reads[0][..., channels])]
            seen += [np.ascontiguousarray(r[..., columns]) for r in reads[1:]]
            run(seen, [out])
            writes[0][..., columns] = out
        if finish is not nothing:
            np.copyto(one, writes[0])
            finish([one], writes)

    return grouped


def _of_pixels(product: Run, n: int, k: int) -> Run:
    """Return the run of a convolution whose patches are the pixels."""

    def run(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        pixels = [a.reshape(-1, width) for a, width in zip(reads, (k, n), strict=False)]
        product(pixels, [writes[0].reshape(-1, n)])

    return run


def _of_patches(product: Callable[[int], Run], window: Window, n: int, k: int, pool: Workers) -> Run:
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


def _reference(
    op: Compute,
    slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    weights: Sequence[Array],
) -> list[Array]:
    out = slots[op.writes[0]]
    y, x, n = out.shape
    groups, activation = op.attrs.get("groups", 1), references.ACTIVATIONS[op.attrs["activation"]]
    patches = patches_of(op, reads[0], out, 0.0)
    c = reads[0].shape[2] // groups
    by_group = np.moveaxis(patches.reshape(*patches.shape[:4], groups, c), 4, 0).reshape(groups, y * x, len(weights[0]))
    of_groups = weights[0].astype(np.float64).reshape(len(weights[0]), groups, n // groups).transpose(1, 0, 2)
    total = (by_group @ of_groups).transpose(1, 0, 2).reshape(out.shape)
    total += weights[1] if op.attrs["bias"] else 0.0
    if not op.attrs["residual"]:
        return [activation(total)]
    is_first = op.attrs.get("residual_first", False)
    return [activation(total + reads[1]) if is_first else activation(total) + reads[1]]


def _work(op: Compute, slots: Sequence[SlotSpec]) -> Work:
    y, x, n = slots[op.writes[0]].shape
    channels, groups = slots[op.reads[0]].shape[2], op.attrs.get("groups", 1)
    if channels == groups:
        return rowwise(op, slots)
    k = math.prod(op.attrs["kernel"]) * channels // groups
    return Work("linear", rows=y * x, k=k, n=n, flops=2.0 * y * x * k * n)


CONV2D: Final = Kernel("conv2d", _bind, _reference, _work, maps=True)
