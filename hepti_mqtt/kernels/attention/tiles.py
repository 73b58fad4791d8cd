"""The compiled part of attention: tiles of queries over blocks of keys.

A tile is up to NR queries of one sequence and one head. In its scores, K @ Q.T [keys, NR], queries lie along the
vector lanes, so that maximum, exponential and sum over keys need no horizontal reduction; as many vectors count as
there are queries. The result, P @ V [queries, d], has d along the lanes, as it is stored. Both are the register tile of
the matmul. A query alone, as in decoding, would leave most lanes empty: it runs with the vector lanes along d.
Keys come in blocks with a running maximum and
sum (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; FlashAttention, Dao et al. 2022,
algorithm 1).

A head's keys and values are copied side by side once for all tiles that attend to them: rows of kv lie some KB apart,
where they fall into a few sets of a cache and drive each other out.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numba import float32
from numpy.typing import NDArray

from hepti_mqtt.kernels.attention.softmax import LN2, LOG2E, scaled_rows, softmax_tile, transpose_tile
from hepti_mqtt.kernels.elementary import ONE, ZERO, exp_of_negative
from hepti_mqtt.kernels.gemm.tile import MR, NR, panel_of_columns, panel_of_rows
from hepti_mqtt.kernels.machine.isa import TILE
from hepti_mqtt.kernels.machine.jit import FLOAT, INT, INT_ARRAY, TABLE, fills, helper, kernel, reads

# Scores and values [KEYS, NR] stay in the second-level cache; 64 and 128 were slower (more rescaling), 512 no faster.
KEYS: Final = 256

# Queries of a tile up to which one after the other, with lanes along d, is faster than all in the lanes of one vector.
FEW: Final = 1

LANES: Final = TILE.lanes

_MINUS_INF: Final = np.float32(-np.inf)

_FIRST, _STOP, _LOW, _HIGH = 0, 1, 2, 3


@helper
def scores_of(k: int, stride: int, keys: int, vectors: int, queries: Any, d: int, zeros: Any, scores: Any) -> None:
    """Fill scores [keys, NR] with keys [keys, d], whose address is k, times queries [d, NR]."""
    for i in range(0, keys, MR):
        at, out = k + 4 * i * stride, scores.ctypes.data + 4 * i * NR
        rows = min(MR, keys - i)
        panel_of_rows(rows, vectors, at, stride, d, queries.ctypes.data, zeros.ctypes.data, 0, out, NR)


@helper
def _copy_rows(
    kv: Any, column: int, first: int, rows: int, d: int, copies: Any, at: int, stride: int, apart: int
) -> None:
    """Copy kv[first : first + rows, column : column + d] to copies[at:], in panels of NR columns.

    Rows of a panel lie `stride` floats apart, panels `apart`. What is beyond column d of the last one is left alone.
    """
    for c in range(0, d, NR):
        vectors, place = min(NR, d - c) // LANES, at + c // NR * apart
        source = kv.ctypes.data + 4 * (first * kv.shape[1] + column + c)
        scaled_rows(vectors, rows, source, kv.shape[1], ONE, copies.ctypes.data + 4 * place, stride)
        for i in range(rows):
            for j in range(vectors * LANES, min(NR, d - c)):
                copies[place + i * stride + j] = kv[first + i, column + c + j]


@helper
def _weighted_values(
    keys: int, count: int, d: int, scores: Any, values: int, zeros: Any, started: Any, total: Any
) -> None:
    """Add scores.T @ values to total [count, d up to whole panels], or start it.

    values: the address of panels [KEYS, NR], of which the first `keys` rows count.
    """
    stride = len(total) // NR
    for c in range(0, d, NR):
        vectors = -(-min(NR, d - c) // LANES)
        panel = values + 4 * c * KEYS
        for i in range(0, count, MR):
            out = total.ctypes.data + 4 * (i * stride + c)
            start, start_stride = (out, stride) if started else (zeros.ctypes.data, 0)
            at = scores.ctypes.data + 4 * i
            panel_of_columns(min(MR, count - i), vectors, at, NR, keys, panel, start, start_stride, out, stride)


@helper
def transpose(q: Any, row: int, count: int, column: int, d: int, scale: Any, queries: Any) -> None:
    """Fill the vectors of queries [d, NR] that have a query with scale * q.T; lanes beyond it repeat the last."""
    whole = d // LANES * LANES
    for j in range(0, count, LANES):
        rows = min(LANES, count - j)
        for c in range(0, whole, LANES):
            at = q.ctypes.data + 4 * ((row + j) * q.shape[1] + column + c)
            transpose_tile(at, q.shape[1], rows, scale, queries.ctypes.data + 4 * (c * NR + j))
        for c in range(whole, d):
            for i in range(LANES):
                queries[c * NR + j + i] = q[row + j + min(i, rows - 1), column + c] * scale


@helper
def _most_keys(tiles: Any) -> Any:
    """Return how many keys are copied at once; a query alone, as in every step of a decoder, needs no copies."""
    found = 0
    for tile in range(len(tiles)):
        if tiles[tile, _STOP] - tiles[tile, _FIRST] > FEW:
            found = max(found, tiles[tile, _HIGH] - tiles[tile, _LOW])
    return found


@helper
def _shortest(limits: Any, row: int, count: int) -> Any:
    found = limits[row]
    for j in range(1, count):
        found = min(found, limits[row + j])
    return found


@helper
def _has_nan(total: Any, count: int, d: int) -> bool:
    stride = len(total) // NR
    found = False
    for i in range(count):
        for c in range(d):
            found |= np.isnan(total[i * stride + c])
    return found


@helper
def _mask(scores: Any, low: int, keys: int, limits: Any, row: int, count: int) -> None:
    """Set the scores of keys at or beyond a query's limit to -inf."""
    for j in range(count):
        for i in range(max(0, limits[row + j] - low), keys):
            scores[i * NR + j] = _MINUS_INF


@helper
def _scale_rows(total: Any, count: int, stride: int, d: int, by: Any) -> None:
    for i in range(count):
        for c in range(d):
            total[i * stride + c] *= by[i]


@helper
def _query_alone(
    query: Any, kv: Any, k_column: int, v_column: int, low: int, high: int, scores: Any, total: Any
) -> tuple[Any, Any]:
    """Fill total [d] with the sum of exp(score - maximum) v over keys low..high; return (maximum, sum of exp)."""
    d = len(query)
    top, norm = _MINUS_INF, ZERO
    total[:] = ZERO
    for block in range(low, high, KEYS):
        keys = min(KEYS, high - block)
        before = top
        for i in range(keys):
            key = kv[block + i, k_column : k_column + d]
            s = ZERO
            for c in range(d):
                s += query[c] * key[c]
            scores[i] = s
            top = s if s > top else top
        above = top if top > _MINUS_INF else ZERO
        rescale = exp_of_negative(before - above)
        block_norm = ZERO
        for i in range(keys):
            scores[i] = exp_of_negative(scores[i] - above)
            block_norm += scores[i]
        norm = norm * rescale + block_norm
        for c in range(d):
            total[c] *= rescale
        for i in range(keys):
            weight = scores[i]
            value = kv[block + i, v_column : v_column + d]
            for c in range(d):
                total[c] += weight * value[c]
    return top, norm


@helper
def _store(total: Any, d: int, high: Any, norm: Any, with_state: int, out: Any, at: int) -> None:
    """Write one query's result to out[at:]: its state, or the sum total [d] divided by the norm."""
    by = ONE if with_state or norm == ZERO else ONE / norm
    whole = d // LANES * LANES
    for c in range(0, whole, NR):
        vectors = min(NR, whole - c) // LANES
        scaled_rows(vectors, 1, total.ctypes.data + 4 * c, NR, by, out.ctypes.data + 4 * (at + c), NR)
    for c in range(whole, d):
        out[at + c] = total[c] * by
    if with_state:
        out[at + d] = high
        out[at + d + 1] = norm


class HeadLayout(NamedTuple):
    """Where the heads of an op lie in q and kv; compiled code reads it as a table in this order.

    d: columns of a head. with_state: 1 if states are written, else 0.
    """

    q_column: int
    k_column: int
    v_column: int
    heads: int
    d: int
    with_state: int

    def table(self) -> NDArray[np.int64]:
        """Return the layout as compiled code reads it."""
        return np.asarray(self, np.int64)


@kernel(reads(float32, 2), reads(float32, 2), fills(float32, 1), TABLE, INT_ARRAY, INT_ARRAY, FLOAT, INT, INT, part=2)
def attention_units(
    q: Any, kv: Any, out: Any, tiles: Any, limits: Any, layout: Any, scale: Any, first: int, stop: int
) -> None:
    """Fill out [r, heads, d] (or d + 2 with state, flat) for the units first..stop; a unit is head * tiles + tile.

    limits [r] is the end of each query's keys, layout the table of `HeadLayout`.
    """
    heads, d, with_state = layout[3], layout[4], layout[5]
    queries = np.empty(d * NR, np.float32)
    scores = np.empty(KEYS * NR, np.float32)
    stride = -(-d // NR) * NR
    most = _most_keys(tiles)
    copied_keys, values = np.empty(most * d, np.float32), np.empty(-(-most // KEYS) * KEYS * stride, np.float32)
    copied_head, copied_low, copied_to, near = -1, 0, 0, False
    total = np.empty(NR * stride, np.float32)
    zeros = np.zeros(NR, np.float32)
    high, norm, rescale = np.empty(NR, np.float32), np.empty(NR, np.float32), np.empty(NR, np.float32)
    width = d + 2 if with_state else d
    for unit in range(first, stop):
        head, tile = unit // len(tiles), unit % len(tiles)
        row, count = tiles[tile, _FIRST], tiles[tile, _STOP] - tiles[tile, _FIRST]
        low, end = tiles[tile, _LOW], tiles[tile, _HIGH]
        column, k_column, v_column = layout[0] + head * d, layout[1] + head * d, layout[2] + head * d
        alone = count <= FEW or end <= low
        if not alone:
            vectors = -(-count // LANES)
            transpose(q, row, count, column, d, scale * LOG2E, queries)
            high[:] = _MINUS_INF
            norm[:] = ZERO
            masked = False
            if head != copied_head or low != copied_low:
                copied_head, copied_low, copied_to = head, low, low
                # Keys that no other tile reads are read where they lie.
                near = unit + 1 < stop and tile + 1 < len(tiles) and tiles[tile + 1, _LOW] == low
            for block in range(low, end, KEYS):
                keys = min(KEYS, end - block)
                k, k_stride = kv.ctypes.data + 4 * (block * kv.shape[1] + k_column), kv.shape[1]
                at, new = (block - low) * stride, max(block, copied_to)
                if new < block + keys:
                    rows = block + keys - new
                    if near:
                        _copy_rows(kv, k_column, new, rows, d, copied_keys, (new - low) * d, d, NR)
                    _copy_rows(kv, v_column, new, rows, d, values, at + (new - block) * NR, NR, KEYS * NR)
                    copied_to = new + rows
                if near:
                    k, k_stride = copied_keys.ctypes.data + 4 * (block - low) * d, d
                scores_of(k, k_stride, keys, vectors, queries, d, zeros, scores)
                if _shortest(limits, row, count) < block + keys:
                    _mask(scores, block, keys, limits, row, count)
                    masked = True
                softmax_tile(vectors, scores.ctypes.data, keys, high.ctypes.data, norm.ctypes.data, rescale.ctypes.data)
                if block > low:
                    _scale_rows(total, count, stride, d, rescale)
                _weighted_values(keys, count, d, scores, values.ctypes.data + 4 * at, zeros, block > low, total)
            # A masked key weighs 0, but 0 times a value that is not finite is NaN, which its query must not see.
            alone = masked and _has_nan(total, count, d)
        for j in range(count):
            at = ((row + j) * heads + head) * width
            if alone:
                for c in range(d):
                    queries[c] = q[row + j, column + c] * scale
                stop_key = max(low, limits[row + j])
                top, weight = _query_alone(queries[:d], kv, k_column, v_column, low, stop_key, scores, total[:d])
                _store(total, d, top, weight, with_state, out, at)
            else:
                _store(total[j * stride :], d, high[j] * LN2, norm[j], with_state, out, at)
