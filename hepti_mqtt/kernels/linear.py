"""Kernel `linear`: out [m, n] = activation(x [m, k] @ [W_1 | ... | W_p] + [b_1 | ... | b_p]) + residual.

Reads x, or x and residual [m, n]. Weights: W_1 ... W_p packed [k, n_i], then with a bias b_1 ... b_p plain [n_i].
Attributes: bias and residual (bool), activation (one of `ACTIVATIONS`).

A tile is finished (bias, activation, residual) while it is in the first-level cache, so that memory is written once.
Every output is one sum over k in ascending order, so its bits depend neither on its tile nor on the threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numba import float32
from numpy.typing import NDArray

from hepti_mqtt.kernels import elementary, linear_storage, references
from hepti_mqtt.kernels.base import Array, Check, Kernel, Run, nothing
from hepti_mqtt.kernels.jit import INT, TABLE, fills, helper, kernel, reads
from hepti_mqtt.kernels.matmul import MR, NR, tile_of_rows
from hepti_mqtt.kernels.weights import NarrowMatrix, Weight
from hepti_mqtt.kernels.workers import Part, Workers, ranges
from hepti_mqtt.program import Compute, SlotSpec
from hepti_mqtt.work import Work

ACTIVATIONS: Final = (None, "gelu", "gelu_tanh", "relu", "tanh")
_GELU, _GELU_TANH, _RELU, _TANH = 1, 2, 3, 4

# A panel is used for ROWS rows of x, in pieces [DEPTH, NR] that stay in the first-level cache while the tiles pass over
# them; the rows of x stay in the second level.
ROWS: Final = 384
DEPTH: Final = 256

_ADDRESS, _COLUMN, _VALID = 0, 1, 2

# Multiply-adds below which a hand-over to another thread costs more than it saves.
_GRAIN: Final = 1 << 19

_gelu, _gelu_tanh, _relu, _tanh = elementary.gelu, elementary.gelu_tanh, elementary.relu, elementary.tanh


@helper
def _activate(tile: Any, activation: int) -> None:
    if activation == _GELU:
        for i in range(tile.size):
            tile[i] = _gelu(tile[i])
    elif activation == _GELU_TANH:
        for i in range(tile.size):
            tile[i] = _gelu_tanh(tile[i])
    elif activation == _RELU:
        for i in range(tile.size):
            tile[i] = _relu(tile[i])
    elif activation == _TANH:
        for i in range(tile.size):
            tile[i] = _tanh(tile[i])


@helper
def _sums(x: Any, first: int, rows: int, panel: int, bias: int, sums: Any) -> None:
    """Fill sums [rows, NR] with x[first : first + rows] @ panel + bias, in blocks of k."""
    k = x.shape[1]
    tiles = -(-rows // MR)
    for p in range(0, max(k, 1), DEPTH):
        depth = min(DEPTH, k - p)
        for t in range(tiles):
            # Tiles of nearly equal height: 13 rows as 6 + 7 keep the pipelines fuller than 12 + 1.
            i = t * rows // tiles
            count = (t + 1) * rows // tiles - i
            at = x.ctypes.data + 4 * ((first + i) * k + p)
            out = sums.ctypes.data + 4 * i * NR
            start, stride = (out, NR) if p > 0 else (bias, 0)
            tile_of_rows(count, at, k, depth, panel + 4 * p * NR, start, stride, out)


@helper
def _store(
    sums: Any, first: int, rows: int, out: Any, residual: Any, column: int, valid: int, has_residual: int
) -> None:
    for i in range(rows):
        if has_residual:
            for j in range(valid):
                out[first + i, column + j] = sums[i * NR + j] + residual[first + i, column + j]
        else:
            for j in range(valid):
                out[first + i, column + j] = sums[i * NR + j]


@kernel(reads(float32, 2), fills(float32, 2), reads(float32, 2), TABLE, fills(float32, 2), INT, INT, INT, INT, INT, INT)
def _linear(
    x: Any,
    out: Any,
    residual: Any,
    panels: Any,
    bias: Any,
    activation: int,
    has_residual: int,
    first_panel: int,
    last_panel: int,
    first_row: int,
    last_row: int,
) -> None:
    scratch = np.empty(min(ROWS, last_row - first_row) * NR, np.float32)
    for block in range(first_row, last_row, ROWS):
        rows = min(ROWS, last_row - block)
        for p in range(first_panel, last_panel):
            _sums(x, block, rows, panels[p, _ADDRESS], bias.ctypes.data + 4 * p * NR, scratch)
            _activate(scratch[: rows * NR], activation)
            _store(scratch, block, rows, out, residual, panels[p, _COLUMN], panels[p, _VALID], has_residual)


def _panels(
    check: Check, matrices: Sequence[Weight], biases: Sequence[Weight], k: int
) -> tuple[NDArray[np.int64], NDArray[np.float32], int]:
    """Return (table of panels: address, first column, valid columns; bias by panel [P, NR]; n)."""
    table: list[tuple[int, int, int]] = []
    bias_rows: list[NDArray[np.float32]] = []
    column = 0
    for place, weight in enumerate(matrices):
        matrix = check.packed(weight)
        check.that(matrix.rows == k, f"weight {place} has {matrix.rows} rows, x has {k} columns")
        padded = np.zeros((len(matrix.panels), NR), np.float32)
        if biases:
            padded.reshape(-1)[: matrix.columns] = check.plain(biases[place], (matrix.columns,))
        bias_rows.append(padded)
        address = matrix.panels.__array_interface__["data"][0]
        for p in range(len(matrix.panels)):
            valid = min(NR, matrix.columns - p * NR)
            table.append((address + 4 * p * k * NR, column + p * NR, valid))
        column += matrix.columns
    return np.asarray(table, np.int64).reshape(-1, 3), np.concatenate(bias_rows), column


def _parts(panels: int, rows: int, k: int, pool: Workers) -> list[Part]:
    threads = min(pool.threads, 1 + panels * NR * rows * k // _GRAIN)
    by_panel = ranges(panels, threads)
    by_row = ranges(rows, -(-threads // max(1, len(by_panel))))
    return [(*p, *r) for p in by_panel for r in by_row]


def _bind(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], pool: Workers) -> Run:
    if any(isinstance(w, NarrowMatrix) for w in weights):
        return linear_storage.bind(op, slots, weights, pool)
    check = Check(op, slots)
    has_residual, has_bias = int(bool(op.attrs["residual"])), bool(op.attrs["bias"])
    check.count(2 if has_residual else 1)
    check.dtypes()
    check.rank(2)
    check.that(op.attrs["activation"] in ACTIVATIONS, f"activation {op.attrs['activation']!r} is not in {ACTIVATIONS}")
    activation = ACTIVATIONS.index(op.attrs["activation"])
    count = len(weights) // 2 if has_bias else len(weights)
    check.that(count >= 1, "needs a weight")
    check.weights(weights, 2 * count if has_bias else count)
    m, k = check.reads[0].shape
    table, bias, n = _panels(check, weights[:count], weights[count:], k)
    check.shape(check.writes[0], (m, n))
    if has_residual:
        check.shape(check.reads[1], (m, n))
    parts = _parts(len(table), m, k, pool)
    if not parts:
        return nothing
    alive = tuple(weights)  # the table has only addresses

    def run(reads: Sequence[Array], writes: Sequence[Array], _alive: tuple[Weight, ...] = alive) -> None:
        arguments = (reads[0], writes[0], reads[-1], table, bias, activation, has_residual)
        pool.each(_linear, arguments, parts)

    return run


def _reference(
    op: Compute,
    _slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    weights: Sequence[Array],
) -> list[Array]:
    count = len(weights) // 2 if op.attrs["bias"] else len(weights)
    out = reads[0].astype(np.float64) @ np.concatenate([w.astype(np.float64) for w in weights[:count]], axis=1)
    if op.attrs["bias"]:
        out += np.concatenate(weights[count:])
    out = references.ACTIVATIONS[op.attrs["activation"]](out)
    return [out + reads[1] if op.attrs["residual"] else out]


def _work(op: Compute, slots: Sequence[SlotSpec]) -> Work:
    m, k = slots[op.reads[0]].shape
    n = slots[op.writes[0]].shape[1]
    return Work("linear", rows=m, k=k, n=n, flops=2.0 * m * k * n)


LINEAR: Final = Kernel("linear", _bind, _reference, _work)
