"""The compiled part of attention: tiles of queries over blocks of keys.

A tile is up to NR queries of one sequence and one head. Queries lie along the vector lanes: scores are K @ Q.T
[keys, NR], so that maximum, exponential and sum over keys need no horizontal reduction, and the result is V.T @ P
[d, NR]; both are the register tile of the matmul. A tile of at most FEW queries, as in decoding, would leave most lanes
empty: there each query runs alone, with the vector lanes along d. Keys come in blocks with a running maximum and
sum (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; FlashAttention, Dao et al. 2022,
algorithm 1).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import float32

from hepti_mqtt.kernels.elementary import ONE, ZERO, exp_of_negative
from hepti_mqtt.kernels.jit import FLOAT, INT, INT_ARRAY, TABLE, fills, helper, kernel, reads
from hepti_mqtt.kernels.matmul import MR, NR, tile_of_columns, tile_of_rows

# Scores [KEYS, NR] and the accumulator [d, NR] stay in the first-level cache.
KEYS: Final = 128

# Queries of a tile up to which one after the other, with lanes along d, is faster than all in the lanes of one tile.
FEW: Final = 4

_MINUS_INF: Final = np.float32(-np.inf)

_FIRST, _STOP, _LOW, _HIGH = 0, 1, 2, 3


@helper
def _scores(kv: Any, column: int, low: int, keys: int, queries: Any, d: int, zeros: Any, scores: Any) -> None:
    width = kv.shape[1]
    for i in range(0, keys, MR):
        rows = min(MR, keys - i)
        at = kv.ctypes.data + 4 * ((low + i) * width + column)
        out = scores.ctypes.data + 4 * i * NR
        tile_of_rows(rows, at, width, d, queries.ctypes.data, zeros.ctypes.data, 0, out)


@helper
def _weighted_values(kv: Any, column: int, low: int, keys: int, scores: Any, d: int, total: Any) -> None:
    width = kv.shape[1]
    for c in range(0, d, MR):
        rows = min(MR, d - c)
        at = kv.ctypes.data + 4 * (low * width + column + c)
        out = total.ctypes.data + 4 * c * NR
        tile_of_columns(rows, at, width, keys, scores.ctypes.data, out, NR, out)


@helper
def _softmax_step(scores: Any, keys: int, d: int, total: Any, high: Any, norm: Any, scale: Any) -> None:
    """Turn scores into exp(score - running maximum), and scale what was summed before to the new maximum."""
    for j in range(NR):
        scale[j] = high[j]
    for i in range(keys):
        for j in range(NR):
            s = scores[i * NR + j]
            high[j] = s if s > high[j] else high[j]
    for j in range(NR):
        # A maximum of -inf would make -inf - -inf = NaN of scores that are all -inf.
        top = high[j] if high[j] > _MINUS_INF else ZERO
        scale[j] = exp_of_negative(scale[j] - top)
        norm[j] = norm[j] * scale[j]
    for i in range(keys):
        for j in range(NR):
            top = high[j] if high[j] > _MINUS_INF else ZERO
            e = exp_of_negative(scores[i * NR + j] - top)
            scores[i * NR + j] = e
            norm[j] += e
    for c in range(d):
        for j in range(NR):
            total[c * NR + j] *= scale[j]


@helper
def _transpose(q: Any, row: int, count: int, column: int, d: int, scale: Any, queries: Any) -> None:
    """Fill queries [d, NR] with scale * q.T; lanes without a query with 0."""
    if count < NR:
        queries[:] = ZERO
    for j in range(count):
        for c in range(d):
            queries[c * NR + j] = q[row + j, column + c] * scale


@helper
def _shortest(limits: Any, row: int, count: int) -> Any:
    found = limits[row]
    for j in range(1, count):
        found = min(found, limits[row + j])
    return found


@helper
def _has_nan(values: Any) -> bool:
    found = False
    for i in range(len(values)):
        found |= np.isnan(values[i])
    return found


@helper
def _mask(scores: Any, low: int, keys: int, limits: Any, row: int, count: int) -> None:
    """Set the scores of keys at or beyond a query's limit to -inf."""
    for j in range(count):
        for i in range(max(0, limits[row + j] - low), keys):
            scores[i * NR + j] = _MINUS_INF


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
def _store(total: Any, stride: int, d: int, high: Any, norm: Any, with_state: int, out: Any, at: int) -> None:
    """Write one query's result to out[at:]: its state, or the sum divided by the norm; total[c * stride] is its sum."""
    if with_state:
        for c in range(d):
            out[at + c] = total[c * stride]
        out[at + d] = high
        out[at + d + 1] = norm
    else:
        by = norm if norm != ZERO else ONE
        for c in range(d):
            out[at + c] = total[c * stride] / by


_SIGNATURE = (
    reads(float32, 2),
    reads(float32, 2),
    fills(float32, 1),
    TABLE,
    INT_ARRAY,
    INT_ARRAY,
    INT,
    FLOAT,
    INT,
    INT,
    INT,
    INT,
    INT,
)


@kernel(*_SIGNATURE)
def attention_units(
    q: Any,
    kv: Any,
    out: Any,
    tiles: Any,
    limits: Any,
    columns: Any,
    d: int,
    scale: Any,
    heads: int,
    group: int,
    with_state: int,
    first: int,
    stop: int,
) -> None:
    """Fill out [r, heads, d] (or d + 2 with state, flat) for the units first..stop; a unit is head * tiles + tile.

    limits [r] is the end of each query's keys, group how many heads of queries share one of keys.
    """
    queries = np.empty(d * NR, np.float32)
    scores = np.empty(KEYS * NR, np.float32)
    total = np.empty(d * NR, np.float32)
    zeros = np.zeros(NR, np.float32)
    high, norm, rescale = np.empty(NR, np.float32), np.empty(NR, np.float32), np.empty(NR, np.float32)
    width = d + 2 if with_state else d
    for unit in range(first, stop):
        head, tile = unit // len(tiles), unit % len(tiles)
        row, count = tiles[tile, _FIRST], tiles[tile, _STOP] - tiles[tile, _FIRST]
        low, end = tiles[tile, _LOW], tiles[tile, _HIGH]
        column = columns[0] + head * d
        k_column, v_column = columns[1] + head // group * d, columns[2] + head // group * d
        alone = count <= FEW
        if not alone:
            _transpose(q, row, count, column, d, scale, queries)
            total[:] = ZERO
            high[:] = _MINUS_INF
            norm[:] = ZERO
            masked = False
            for block in range(low, end, KEYS):
                keys = min(KEYS, end - block)
                _scores(kv, k_column, block, keys, queries, d, zeros, scores)
                if _shortest(limits, row, count) < block + keys:
                    _mask(scores, block, keys, limits, row, count)
                    masked = True
                _softmax_step(scores, keys, d, total, high, norm, rescale)
                _weighted_values(kv, v_column, block, keys, scores, d, total)
            # A masked key weighs 0, but 0 times a value that is not finite is NaN, which its query must not see.
            alone = masked and _has_nan(total)
        for j in range(count):
            at = ((row + j) * heads + head) * width
            if alone:
                for c in range(d):
                    queries[c] = q[row + j, column + c] * scale
                stop_key = max(low, limits[row + j])
                top, weight = _query_alone(queries[:d], kv, k_column, v_column, low, stop_key, scores, total[:d])
                _store(total, 1, d, top, weight, with_state, out, at)
            else:
                _store(total[j:], NR, d, high[j], norm[j], with_state, out, at)
