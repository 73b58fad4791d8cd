"""Kernel `linear`: activation(x [m, k] @ [W_1 | ... | W_p] + [b_1 | ... | b_p]) + residual.

Reads x, or x and residual [m, n]; writes out [m, n]. Weights: W_1 ... W_p packed [k, n_i], then with a bias b_1 ... b_p
plain [n_i]. Attributes: bias and residual (bool), activation (one of `ACTIVATIONS`), and x ("i8": rows of x are rounded
for matrices in blocks, `block_product`).

A tile is finished (activation, residual) in the first-level cache, so that memory is written once; a tile that needs
neither is stored from the registers. Every output is one sum over k in ascending order: its bits depend neither on its
tile nor on the threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numba import float32
from numpy.typing import NDArray

from hepti_mqtt.core.program import Compute, Work
from hepti_mqtt.core.storage import BLOCK_STORAGES, Product
from hepti_mqtt.kernels import block_product, gemv, quantised
from hepti_mqtt.kernels.base import REFERENCE_ACTIVATIONS, Array, Arrays, Check, Kernel, Slots, Weights
from hepti_mqtt.kernels.blocks import BlockMatrix
from hepti_mqtt.kernels.calls import Calls, ProductArrays, operands
from hepti_mqtt.kernels.cpu import TILE
from hepti_mqtt.kernels.jit import INT, TABLE, fills, kernel, lowered, reads
from hepti_mqtt.kernels.panels import BIAS, CODES, COLUMN, VALID, Matrix, panels_of
from hepti_mqtt.kernels.threads import Workers, matmul_parts
from hepti_mqtt.kernels.tile import (
    MR,
    NONE,
    NR,
    activate,
    activation_of,
    emit_tile,
    fetch_rows,
    plain_panel_ahead,
    store,
)
from hepti_mqtt.kernels.weights import NarrowMatrix, Weight

# A panel is used for ROWS rows of x, in pieces [DEPTH, NR] that stay in the cache for all tiles. Every piece begins by
# reading its sums and filling the pipelines: pieces of 512 took up to 2 % longer than pieces of 1024, pieces of 256
# another 1 to 2 %, though even these are larger than the first-level cache (AMD EPYC, AVX-512).
ROWS: Final = 384
DEPTH: Final = TILE.depth

# The last FETCHERS tiles of a piece prefetch the next piece, each its share, so that few rows compute and read memory
# at once. Up to SHALLOW_TILES tiles, pieces are shorter, so that prefetched lines stay in the cache; a single tile
# reads one stream, which the hardware prefetches better alone.
FETCHERS: Final = 4
SHALLOW: Final = 64
SHALLOW_TILES: Final = 3

_LANES: Final = TILE.lanes

# `panel_of_rows` with prefetches: two more arguments, the first address and the bytes for each step of k.
_panel_tile: Final = lowered(emit_tile("rows", TILE, prefetch=True), plain_panel_ahead)


@kernel(reads(float32, 2), fills(float32, 2), reads(float32, 2), TABLE, *[INT] * 5, part=4)
def _linear(
    x: Any, out: Any, residual: Any, panels: Any, activation: int, first_panel: int, last_panel: int, first_row: int,
    last_row: int,
) -> None:  # fmt: skip
    """Fill the columns of some panels in some rows of out; panels: the table of `panels`."""
    k, width = x.shape[1], out.shape[1]
    plain = activation == NONE and residual.size == 0
    most = min(ROWS, last_row - first_row)
    sums = np.empty(most * NR, np.float32)
    for block in range(first_row, last_row, ROWS):
        rows = min(ROWS, last_row - block)
        tiles = -(-rows // MR)
        piece = SHALLOW if 1 < tiles <= SHALLOW_TILES else DEPTH
        for p in range(first_panel, last_panel):
            column, valid = panels[p, COLUMN], panels[p, VALID]
            vectors = -(-valid // _LANES)
            fetchers = min(tiles, FETCHERS)
            direct = plain and valid == vectors * _LANES
            panel = panels[p, CODES]
            for low in range(0, max(k, 1), piece):
                depth = min(piece, k - low)
                final = low + depth >= k
                for t in range(tiles):
                    # Tiles of nearly equal height: 7 rows as 3 + 4 keep the pipelines fuller than 6 + 1.
                    i = t * rows // tiles
                    count = (t + 1) * rows // tiles - i
                    left = x.ctypes.data + 4 * ((block + i) * k + low)
                    right = panel + 4 * low * NR
                    place, stride = sums.ctypes.data + 4 * i * NR, NR
                    start, start_stride = (place, NR) if low > 0 else (panels[p, BIAS], 0)
                    if final:
                        fetch_rows(block + i, count, out, residual, column, valid)
                    if final and direct:
                        place, stride = out.ctypes.data + 4 * ((block + i) * width + column), width
                    # The last tiles prefetch the next piece, each its share.
                    share = t - tiles + fetchers
                    fetch = -(-4 * NR // fetchers) if share >= 0 and tiles > 1 else 0
                    ahead = right + 4 * NR * depth + share * depth * fetch
                    _panel_tile(count, vectors, left, k, depth, right, start, start_stride, place, stride, ahead, fetch)
                    if final and not direct:
                        tile = sums[i * NR : (i + count) * NR]
                        activate(tile, activation)
                        store(tile, NR, block + i, count, out, residual, column, valid)


def _kept(weight: Weight) -> str:
    """Return the kind of storage that all matrices of a product share; "blocks" may be several storages."""
    if isinstance(weight, BlockMatrix):
        return "blocks"
    return weight.storage if isinstance(weight, NarrowMatrix) else "f32"


def _checked(check: Check, weights: Weights, count: int) -> tuple[list[Matrix], list[NDArray[np.float32]]]:
    """Return the matrices, all packed in one storage and as high as x is wide, and their biases, if any."""
    storages = {_kept(w) for w in weights[:count]}
    check.that(len(storages) == 1, f"its matrices must all be packed and in one storage, got {sorted(storages)}")
    k = check.reads[0].shape[1]
    matrices: list[Matrix] = [
        w if isinstance(w, NarrowMatrix | BlockMatrix) else check.packed(w) for w in weights[:count]
    ]
    for place, matrix in enumerate(matrices):
        check.that(matrix.rows == k, f"weight {place} has {matrix.rows} rows, x has {k} columns")
    biases = [check.plain(b, (w.columns,)) for b, w in zip(weights[count:], matrices, strict=False)]
    return matrices, biases


def _bind(op: Compute, slots: Slots, weights: Weights, pool: Workers) -> Calls:
    has_residual, has_bias = bool(op.attrs["residual"]), bool(op.attrs["bias"])
    check = Check.of(op, slots, 2 if has_residual else 1, rank=2)
    activation = activation_of(check, op.attrs["activation"])
    count = len(weights) // 2 if has_bias else len(weights)
    check.that(count >= 1, "needs a weight")
    check.weights(weights, 2 * count if has_bias else count)
    matrices, biases = _checked(check, weights, count)
    m = check.reads[0].shape[0]
    n = sum(w.columns for w in matrices)
    check.shape(check.writes[0], (m, n))
    if has_residual:
        check.shape(check.reads[1], (m, n))
    given, (out,) = operands(op, slots)
    arrays = ProductArrays(given[0], out, given[1] if has_residual else np.empty((0, 0), np.float32))
    in_blocks = [w for w in matrices if isinstance(w, BlockMatrix)]
    if in_blocks and m and n:
        rounded = op.attrs.get("x") == "i8"
        return block_product.bind(arrays, in_blocks, biases, activation, rounded, pool)
    return bind_product(arrays, matrices, biases, activation, pool)


def bind_product(
    arrays: ProductArrays,
    matrices: Sequence[Matrix],
    biases: Sequence[NDArray[np.float32]],
    activation: int,
    pool: Workers,
) -> Calls:
    """Return the calls of a checked product of x [m, k].

    biases: one for each matrix, or none. activation: its place in `ACTIVATIONS`.
    """
    m, k = arrays.x.shape
    if not m or not any(w.columns for w in matrices):
        return []
    narrow_ones = [w for w in matrices if isinstance(w, NarrowMatrix)]
    if narrow_ones:
        bind = gemv.bind_quantised if m <= gemv.MOST_ROWS_QUANTISED[narrow_ones[0].storage] else quantised.bind
        return bind(arrays, narrow_ones, biases, activation, pool)
    table, alive = panels_of(matrices, biases)
    if m <= gemv.MOST_ROWS:
        return gemv.bind_f32(arrays, table, alive, activation, pool)
    parts = matmul_parts(len(table), bool(table[-1, VALID] < NR), m, NR * k, pool.threads, MR)
    return pool.bind(_linear, parts)(*arrays, table, activation, alive=alive)


def _reference(op: Compute, _slots: Slots, reads: Arrays, weights: Arrays) -> list[Array]:
    count = len(weights) // 2 if op.attrs["bias"] else len(weights)
    x = reads[0].astype(np.float64)
    if op.attrs.get("x") == "i8":
        x = block_product.reference_rounded(x)
    biases = weights[count:] if op.attrs["bias"] else [np.zeros(w.shape[1]) for w in weights[:count]]
    parts = [x @ w.astype(np.float64, copy=False) + b for w, b in zip(weights[:count], biases, strict=True)]
    out = REFERENCE_ACTIVATIONS[op.attrs["activation"]](np.concatenate(parts, axis=1))
    return [out + reads[1] if op.attrs["residual"] else out]


def _work(op: Compute, slots: Slots) -> Work:
    m, k = slots[op.reads[0]].shape
    n = slots[op.writes[0]].shape[1]
    storage = op.weights[0].weight_dtype if op.weights else "f32"
    product = Product(storage, op.attrs.get("x") == "i8" and storage in BLOCK_STORAGES)
    return Work("linear", rows=m, k=k, n=n, flops=2.0 * m * k * n, product=product)


def _scratch(op: Compute, slots: Slots) -> int:
    """Return the bytes of x for products in integers: codes or digits, and the words of their blocks."""
    storages = {ref.weight_dtype for ref in op.weights}
    by = 2 if storages & set(BLOCK_STORAGES) else int("w8a8" in storages)
    return by * slots[op.reads[0]].nbytes


LINEAR: Final = Kernel("linear", _bind, _reference, _work, scratch_bytes=_scratch)
