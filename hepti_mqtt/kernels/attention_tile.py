"""The compiled part of attention: softmax and transposition as LLVM vector IR, tiles of queries over blocks of keys.

A tile is up to NR queries of one sequence and one head. In its scores, K @ Q.T [keys, NR], queries lie along the vector
lanes: maximum, exponential and sum over keys need no horizontal reduction. The result, P @ V [queries, d], has d along
the lanes, as it is stored. Both products use the register tile. A single query, as in decoding, would leave most lanes
empty and runs with the lanes along d. Keys come in blocks with a running maximum and sum (Milakov and Gimelshein 2018,
"Online normalizer calculation for softmax"; FlashAttention, Dao et al. 2022, algorithm 1). Scores are in units of
log2(e), so that 2**(score - maximum) needs no reduction by ln 2. NaN gives NaN, -inf gives 0.

A head's keys and values are copied into adjacent rows once for all tiles that attend to them: rows of kv lie some KB
apart, fall into a few sets of a cache and evict each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
from llvmlite import ir
from numba import float32
from numpy.typing import NDArray

from hepti_mqtt.kernels.cpu import TILE, Tile
from hepti_mqtt.kernels.elementary import ONE, ZERO, bits_of, exp_of_negative, from_bits
from hepti_mqtt.kernels.ir_vectors import F32, I32, IN_ORDER, VectorWriter, emit_sized, loop
from hepti_mqtt.kernels.jit import FLOAT, INT, INT_ARRAY, TABLE, fills, floats, helper, kernel, lowered, reads
from hepti_mqtt.kernels.tile import MR, NR, panel_of_columns, panel_of_rows

LOG2E: Final = np.float32(1.4426950408889634)
LN2: Final = np.float32(0.6931471805599453)

# 2**r = 1 + r (c0 + r (c1 + ...)) for |r| <= 1/2: relative error 9.2e-8, least in the largest (fitted over Chebyshev
# nodes with weights moved to where the error is largest).
_EXP2: Final = (0.6931469775918806, 0.2402224208045559, 0.05550733753733339, 0.009671512865311795, 0.001326472404241906)

# 1.5 * 2**23 + 127: the low bits of its sum with n are the exponent of 2**n. At n = -127 these bits are 0, the float 0;
# lower values are raised to -127.
_SHIFT: Final = 12582912.0 + 127
_LOWEST: Final = -127.0


class AttentionWriter(VectorWriter):
    """Writes a function of attention."""

    def __init__(self, module: ir.Module, name: str, tile: Tile, arguments: int) -> None:
        super().__init__(module, name, arguments, tile.lanes, tile.fma)

    def vectors(self, address: Any, count: int) -> list[Any]:
        """Return the addresses of adjacent vectors."""
        return [self.after(address, 4 * self.lanes * j) for j in range(count)]

    def exp2(self, x: Any) -> Any:
        """Return 2**x for x <= 0 to 2 ulp; 0 below -126.5; NaN for NaN."""
        b, shift = self.builder, self.constant(_SHIFT)
        y = self.select(">", self.constant(_LOWEST), x)
        shifted = b.fadd(y, shift, flags=IN_ORDER)
        r = b.fsub(y, b.fsub(shifted, shift, flags=IN_ORDER), flags=IN_ORDER)
        p = self.constant(_EXP2[-1])
        for c in (*_EXP2[-2::-1], 1.0):
            p = self.multiply_add(p, r, self.constant(c))
        exponent = b.shl(b.bitcast(shifted, self.integers), self.every(self.integers, 23))
        return b.fmul(p, b.bitcast(exponent, self.floats), flags=IN_ORDER)

    def each(self, count: Any, stride: int, start: list[Any], step: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
        """Run step(bytes, values) -> values `count` (at least 1) times, bytes from 0 on by `stride`."""
        stop = self.builder.mul(count, self.whole(stride))
        return loop(self.builder, (self.whole(0), stop, stride), start, step)


def _write_softmax(module: ir.Module, name: str, tile: Tile, vectors: int) -> ir.Function:
    w = AttentionWriter(module, name, tile, 5)
    b = w.builder
    scores, keys, high, norm, rescale = w.function.args
    stride = 4 * tile.width
    before = [w.load(at) for at in w.vectors(high, vectors)]

    def maxima(key: Any, tops: list[Any]) -> list[Any]:
        own = w.vectors(b.add(scores, key), vectors)
        return [w.select(">", w.load(at), top) for at, top in zip(own, tops, strict=True)]

    tops = w.each(keys, stride, before, maxima)
    # If all scores are -inf, subtracting their maximum would give NaN.
    lowest, zero = w.constant(-np.inf), w.constant(0.0)
    above = [b.select(b.fcmp_ordered(">", t, lowest), t, zero) for t in tops]
    by = [w.exp2(b.fsub(was, a, flags=IN_ORDER)) for was, a in zip(before, above, strict=True)]
    for values, place in ((by, rescale), (tops, high)):
        for value, at in zip(values, w.vectors(place, vectors), strict=True):
            w.store(value, at)
    norms = w.vectors(norm, vectors)
    sums = [b.fmul(w.load(at), value, flags=IN_ORDER) for at, value in zip(norms, by, strict=True)]

    def exponentials(key: Any, totals: list[Any]) -> list[Any]:
        new = []
        for at, a, total in zip(w.vectors(b.add(scores, key), vectors), above, totals, strict=True):
            e = w.exp2(b.fsub(w.load(at), a, flags=IN_ORDER))
            w.store(e, at)
            new.append(b.fadd(total, e, flags=IN_ORDER))
        return new

    for at, total in zip(norms, w.each(keys, stride, sums, exponentials), strict=True):
        w.store(total, at)
    b.ret_void()
    return w.function


def _scale(w: AttentionWriter, bits: Any) -> Any:
    """Return the f32 of some bits in all lanes."""
    return w.splat(w.builder.bitcast(w.builder.trunc(bits, I32), F32))


def _write_transpose(module: ir.Module, name: str, tile: Tile) -> ir.Function:
    """Rows interleaved with those half a block on, log2(lanes) times over, are the columns."""
    n = tile.lanes
    w = AttentionWriter(module, name, tile, 5)
    b = w.builder
    x, stride, count, scale, out = w.function.args
    by, last, rows = _scale(w, scale), b.sub(count, w.whole(1)), []
    for i in range(n):
        at = b.select(b.icmp_signed("<", w.whole(i), last), w.whole(i), last)
        rows.append(b.fmul(w.load(b.add(x, b.mul(b.mul(at, stride), w.whole(4)))), by, flags=IN_ORDER))
    low, high = ([k // 2 + (k % 2) * n + half for k in range(n)] for half in (0, n // 2))
    for _ in range(n.bit_length() - 1):
        pairs = list(zip(rows[: n // 2], rows[n // 2 :], strict=True))
        rows = [b.shuffle_vector(p, q, ir.Constant(w.integers, m)) for p, q in pairs for m in (low, high)]
    for i, row in enumerate(rows):
        w.store(row, w.after(out, 4 * i * tile.width))
    b.ret_void()
    return w.function


def _write_copy(module: ir.Module, name: str, tile: Tile, vectors: int) -> ir.Function:
    w = AttentionWriter(module, name, tile, 6)
    b = w.builder
    rows, x, stride, scale, out, out_stride = w.function.args
    by = _scale(w, scale)

    def copy(at: Any, _: list[Any]) -> list[Any]:
        # `at` is the row's number times the bytes of an f32.
        source, target = b.add(x, b.mul(at, stride)), b.add(out, b.mul(at, out_stride))
        for own, to in zip(w.vectors(source, vectors), w.vectors(target, vectors), strict=True):
            w.store(b.fmul(w.load(own), by, flags=IN_ORDER), to)
        return []

    w.each(rows, 4, [], copy)
    b.ret_void()
    return w.function


def by_vectors(name: str, arguments: int, write: Callable[..., ir.Function], most: int = TILE.vectors) -> Any:
    """Return the Numba intrinsic of a function of 1 to `most` vectors."""
    return emit_sized(
        name, [(n,) for n in range(1, most + 1)], arguments, lambda module, own, n: write(module, own, TILE, n)
    )


def _plain_softmax(vectors: int, scores: int, keys: int, high: int, norm: int, rescale: int) -> None:
    width = vectors * TILE.lanes
    s = floats(scores, keys * NR).reshape(keys, NR)[:, :width]
    tops, sums = floats(high, width), floats(norm, width)
    top = np.fmax(tops, np.fmax.reduce(s, axis=0))
    above = np.where(top > -np.inf, top, np.float32(0))
    by = np.exp2(tops - above)
    s[:] = np.exp2(s - above)
    floats(rescale, width)[:] = by
    sums[:] = sums * by + s.sum(axis=0, dtype=np.float32)
    tops[:] = top


def _plain_copy(vectors: int, rows: int, x: int, stride: int, scale: Any, out: int, out_stride: int) -> None:
    n = vectors * TILE.lanes
    for i in range(rows if n else 0):
        floats(out + 4 * i * out_stride, n)[:] = floats(x + 4 * i * stride, n) * from_bits(scale)


def _plain_transpose(x: int, stride: int, count: int, scale: Any, out: int) -> None:
    n = TILE.lanes
    for i in range(n):
        row = floats(x + 4 * min(i, count - 1) * stride, n) * from_bits(scale)
        for c in range(n):
            floats(out + 4 * (c * NR + i), 1)[:] = row[c : c + 1]


# Turn the first `vectors` vectors of scores [keys, NR] (keys at least 1) into 2**(score - high), where high [NR] is
# raised to their maximum; write to rescale [NR] what sums of before must be multiplied by, and add to norm [NR],
# rescaled, the sum over the keys in ascending order. Arguments: vectors (1 to TILE.vectors), scores, keys, high, norm,
# rescale; all but the numbers are addresses.
softmax_tile: Final = lowered(by_vectors("hepti_softmax", 5, _write_softmax), _plain_softmax)

# Fill out [lanes, NR], its first vector, with scale * the transpose of x [count, lanes]; the last row stands for those
# that there are not. Arguments: x, floats between its rows, count (at least 1), bits of the scale, out.
transpose_tile: Final = lowered(
    emit_sized("hepti_transpose", [()], 5, lambda module, name: _write_transpose(module, name, TILE)), _plain_transpose
)

# Fill out [rows, vectors] with scale * x [rows, vectors]. Arguments: vectors (0 to TILE.vectors), rows (at least 1), x,
# floats between its rows, bits of the scale, out, floats between its rows.
scaled_rows: Final = lowered(by_vectors("hepti_copy", 6, _write_copy), _plain_copy)


# Scores and values [KEYS, NR] stay in the second-level cache; 64 and 128 were slower (more rescaling), 512 no faster.
KEYS: Final = 256

# Queries of a tile up to which one after the other, with lanes along d, is faster than all in the lanes of one vector.
FEW: Final = 1

LANES: Final = TILE.lanes

_MINUS_INF: Final = np.float32(-np.inf)

# Columns of the tables of tiles and of limits.
_FIRST, _STOP, _LOW, _HIGH, _ANCHOR = range(5)
_BEGIN, _END = 0, 1


@helper
def scores_of(k: int, stride: int, keys: int, vectors: int, queries: Any, d: int, zeros: Any, scores: Any) -> None:
    """Fill scores [keys, NR] with keys [keys, d] times queries [d, NR]; k: address of the keys."""
    for i in range(0, keys, MR):
        at, out = k + 4 * i * stride, scores.ctypes.data + 4 * i * NR
        rows = min(MR, keys - i)
        panel_of_rows(rows, vectors, at, stride, d, queries.ctypes.data, zeros.ctypes.data, 0, out, NR)


@helper
def _copy_rows(
    kv: Any, column: int, first: int, rows: int, d: int, copies: Any, at: int, stride: int, apart: int
) -> None:
    """Copy kv[first : first + rows, column : column + d] to copies[at:], in panels of NR columns.

    Rows of a panel lie `stride` floats apart, panels `apart`. Columns of the last panel beyond d stay as they are.
    """
    for c in range(0, d if rows > 0 else 0, NR):
        vectors, place = min(NR, d - c) // LANES, at + c // NR * apart
        source = kv.ctypes.data + 4 * (first * kv.shape[1] + column + c)
        scaled_rows(vectors, rows, source, kv.shape[1], bits_of(ONE), copies.ctypes.data + 4 * place, stride)
        for i in range(rows):
            for j in range(vectors * LANES, min(NR, d - c)):
                copies[place + i * stride + j] = kv[first + i, column + c + j]


@helper
def _weighted_values(
    keys: int, count: int, d: int, scores: Any, values: int, zeros: Any, started: Any, total: Any
) -> None:
    """Add scores.T @ values to total [count, d up to whole panels], or start it.

    values: the address of panels [KEYS, NR]; their first `keys` rows count.
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
            transpose_tile(at, q.shape[1], rows, bits_of(scale), queries.ctypes.data + 4 * (c * NR + j))
        for c in range(whole, d):
            for i in range(LANES):
                queries[c * NR + j + i] = q[row + j + min(i, rows - 1), column + c] * scale


@helper
def _most_keys(tiles: Any) -> tuple[Any, Any]:
    """Return the most keys of a copy, and the most blocks.

    A single query, as in every step of a decoder, needs no copies.
    """
    keys, blocks = 0, 0
    for tile in range(len(tiles)):
        if tiles[tile, _STOP] - tiles[tile, _FIRST] > FEW:
            low, high, anchor = tiles[tile, _LOW], tiles[tile, _HIGH], tiles[tile, _ANCHOR]
            keys = max(keys, high - low)
            blocks = max(blocks, -(-(high - anchor) // KEYS) - (low - anchor) // KEYS)
    return keys, blocks


@helper
def _all_see(limits: Any, row: int, count: int, low: int, high: int) -> bool:
    """Return whether all `count` queries attend to all keys low..high."""
    all_see = True
    for j in range(row, row + count):
        all_see &= limits[j, _BEGIN] <= low and high <= limits[j, _END]
    return all_see


@helper
def _has_nan(total: Any, count: int, d: int) -> bool:
    stride = len(total) // NR
    has_nan = False
    for i in range(count):
        for c in range(d):
            has_nan |= np.isnan(total[i * stride + c])
    return has_nan


@helper
def _mask(scores: Any, low: int, keys: int, limits: Any, row: int, count: int) -> None:
    """Set the scores of keys beyond a query's limits to -inf."""
    for j in range(count):
        for i in range(min(keys, limits[row + j, _BEGIN] - low)):
            scores[i * NR + j] = _MINUS_INF
        for i in range(max(0, limits[row + j, _END] - low), keys):
            scores[i * NR + j] = _MINUS_INF


@helper
def _add_bias(
    scores: Any, first: int, keys: int, row: int, count: int, q_at: Any, k_at: Any, bias: Any, by: Any
) -> None:
    """Add the bias [2 L - 1] of each query and key to their scores, times `by`; the queries are consecutive rows."""
    middle = len(bias) // 2
    for i in range(keys):
        line = bias[middle + q_at[row] - k_at[first + i] :]
        for j in range(count):
            scores[i * NR + j] += line[j] * by


@helper
def _add_positions(
    scores: Any, kv: Any, k_column: int, first: int, keys: int, row: int, count: int, queries: Any, scale: Any,
    distances: Any, column: int, scratch: Any, zeros: Any,
) -> None:  # fmt: skip
    """Add the products of distances' keys with queries [d, NR], and of their queries with the keys of kv, to scores.

    Keys and queries of distances are in columns from `column` on. Up to NR keys need few rows of distances, because
    buckets ascend with the distance.
    """
    q_at, k_at, _, buckets, to_queries, to_keys = distances
    d, middle, stride = len(queries) // NR, len(buckets) // 2 + q_at[row], to_queries.shape[1]
    most = len(to_queries) * NR
    by_query, by_key, turned = scratch[:most], scratch[most : 2 * most], scratch[2 * most :]
    low = buckets[middle - k_at[first + keys - 1]]
    rows = buckets[middle + count - 1 - k_at[first]] + 1 - low
    met = to_queries.ctypes.data + 4 * (low * stride + column)
    scores_of(met, stride, rows, -(-count // LANES), queries, d, zeros, by_query)
    for at in range(0, keys, NR):
        some, begin = min(NR, keys - at), first + at
        near = buckets[middle - k_at[begin + some - 1]]
        rows = buckets[middle + count - 1 - k_at[begin]] + 1 - near
        transpose(kv, begin, some, k_column, d, scale, turned)
        met = to_keys.ctypes.data + 4 * (near * stride + column)
        scores_of(met, stride, rows, -(-some // LANES), turned, d, zeros, by_key)
        for i in range(some):
            line = buckets[middle - k_at[begin + i] :]
            for j in range(count):
                bucket = line[j]
                scores[(at + i) * NR + j] += by_query[(bucket - low) * NR + j] + by_key[(bucket - near) * NR + i]


@helper
def _with_distance(s: Any, row: int, key_row: int, head: int, query: Any, key: Any, scale: Any, distances: Any) -> Any:
    """Return the score of a query and a key plus the terms of their distance."""
    q_at, k_at, biases, buckets, to_queries, to_keys = distances
    bias, d = biases[head], len(query)
    if len(bias) > 0:
        s += bias[len(bias) // 2 + q_at[row] - k_at[key_row]]
    if len(buckets) > 0:
        bucket, column = buckets[len(buckets) // 2 + q_at[row] - k_at[key_row]], head * d
        other = ZERO
        for c in range(d):
            s += query[c] * to_queries[bucket, column + c]
            other += key[c] * to_keys[bucket, column + c]
        s += other * scale
    return s


@helper
def _scale_rows(total: Any, count: int, stride: int, d: int, by: Any) -> None:
    for i in range(count):
        for c in range(d):
            total[i * stride + c] *= by[i]


@helper
def begun(sinks: Any, head: int) -> tuple[Any, Any]:
    """Return the maximum and the sum of weights before the first key: of the head's sink, if it has one."""
    top, norm = _MINUS_INF, ZERO
    if sinks is not None and len(sinks) > 0:
        top, norm = sinks[head], ONE
    return top, norm


@helper
def _query_alone(
    query: Any, kv: Any, k_column: int, v_column: int, low: int, high: int, row: int, head: int, scale: Any,
    distances: Any, sinks: Any, scores: Any, total: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Fill total [d] with the sum of exp(score - maximum) v over keys low..high; return (maximum, sum of exp).

    row, head: of the query, for `distances`.
    """
    d = len(query)
    top, norm = begun(sinks, head)
    total[:] = ZERO
    for block in range(low, high, KEYS):
        keys = min(KEYS, high - block)
        before = top
        for i in range(keys):
            key = kv[block + i, k_column : k_column + d]
            s = ZERO
            for c in range(d):
                s += query[c] * key[c]
            if distances is not None:
                s = _with_distance(s, row, block + i, head, query, key, scale, distances)
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
        scaled_rows(vectors, 1, total.ctypes.data + 4 * c, NR, bits_of(by), out.ctypes.data + 4 * (at + c), NR)
    for c in range(whole, d):
        out[at + c] = total[c] * by
    if with_state:
        out[at + d] = high
        out[at + d + 1] = norm


@helper
def _store_rows(
    total: Any, row: int, count: int, d: int, high: Any, norm: Any, with_state: int, out: Any, heads: int, head: int
) -> None:
    """Write the results of `count` queries from `row` on; their maxima `high` are in units of log2(e)."""
    for j in range(count):
        to = ((row + j) * heads + head) * (d + 2 if with_state else d)
        _store(total[j * (len(total) // NR) :], d, high[j] * LN2, norm[j], with_state, out, to)


@helper
def _each_alone(
    q: Any, kv: Any, out: Any, limits: Any, layout: Any, distances: Any, sinks: Any, scale: Any, row: int, count: int,
    head: int, scores: Any, total: Any, query: Any,
) -> None:  # fmt: skip
    """Write the results of `count` queries from `row` on, one after the other."""
    heads, d, with_state, of_keys = layout[3], layout[4], layout[5], head // layout[6]
    column, k_column, v_column = layout[0] + head * d, layout[1] + of_keys * d, layout[2] + of_keys * d
    for j in range(row, row + count):
        for c in range(d):
            query[c] = q[j, column + c] * scale
        low, high = limits[j, _BEGIN], limits[j, _END]
        top, weight = _query_alone(
            query[:d], kv, k_column, v_column, low, high, j, head, scale, distances, sinks, scores, total[:d]
        )
        _store(total, d, top, weight, with_state, out, (j * heads + head) * (d + 2 if with_state else d))


class HeadLayout(NamedTuple):
    """The layout of an op's heads in q and kv; compiled code reads it as a table in this order."""

    q_column: int
    k_column: int
    v_column: int
    heads: int
    #: columns of a head
    d: int
    #: 1 if states are written, else 0
    with_state: int
    #: heads of q per head of kv
    group: int = 1

    def table(self) -> NDArray[np.int64]:
        """Return the table for compiled code."""
        return np.asarray(self, np.int64)


@helper
def _attend(
    q: Any, kv: Any, out: Any, tiles: Any, limits: Any, layout: Any, distances: Any, sinks: Any, scale: Any, first: int,
    stop: int,
) -> None:  # fmt: skip
    """Compute `attention_units` or `attention_by_distance`.

    distances: the arrays of `Distances`, or None (no code for them). sinks: of `attention_units`, or None.
    """
    heads, d, with_state, group = layout[3], layout[4], layout[5], layout[6]
    queries, scores = np.empty(d * NR, np.float32), np.empty(KEYS * NR, np.float32)
    stride = -(-d // NR) * NR
    most, blocks = _most_keys(tiles)
    copied_keys, values = np.empty(most * d, np.float32), np.empty(blocks * KEYS * stride, np.float32)
    copied_head, copied_low, copied_to, near = -1, 0, 0, False
    total, zeros = np.empty(NR * stride, np.float32), np.zeros(NR, np.float32)
    high, norm, rescale = np.empty(NR, np.float32), np.empty(NR, np.float32), np.empty(NR, np.float32)
    if distances is not None:
        scratch = np.empty((2 * len(distances[4]) + d) * NR, np.float32)
    for unit in range(first, stop):
        head, tile = unit // len(tiles), unit % len(tiles)
        row, low, end, anchor = tiles[tile, _FIRST], tiles[tile, _LOW], tiles[tile, _HIGH], tiles[tile, _ANCHOR]
        count, column, of_keys = tiles[tile, _STOP] - row, layout[0] + head * d, head // group
        k_column, v_column = layout[1] + of_keys * d, layout[2] + of_keys * d
        alone = count <= FEW or end <= low
        if not alone:
            vectors = -(-count // LANES)
            transpose(q, row, count, column, d, scale * LOG2E, queries)
            top, weight = begun(sinks, head)
            high[:] = top * LOG2E
            norm[:] = weight
            if of_keys != copied_head or low != copied_low:
                copied_head, copied_low, copied_to = of_keys, low, low
                near = unit + 1 < stop and tile + 1 < len(tiles) and tiles[tile + 1, _LOW] == low  # else read in place
            masked, block, at = False, low, 0
            while block < end:
                keys = min(KEYS - (block - anchor) % KEYS, end - block)
                k, k_stride = kv.ctypes.data + 4 * (block * kv.shape[1] + k_column), kv.shape[1]
                new, copied_to = max(block, copied_to), max(block + keys, copied_to)
                if near:
                    _copy_rows(kv, k_column, new, copied_to - new, d, copied_keys, (new - low) * d, d, NR)
                    k, k_stride = copied_keys.ctypes.data + 4 * (block - low) * d, d
                _copy_rows(kv, v_column, new, copied_to - new, d, values, at + (new - block) * NR, NR, KEYS * NR)
                scores_of(k, k_stride, keys, vectors, queries, d, zeros, scores)
                if distances is not None:
                    if distances[2].shape[1] > 0:
                        bias = distances[2][head]
                        _add_bias(scores, block, keys, row, count, distances[0], distances[1], bias, LOG2E)
                    if len(distances[3]) > 0:
                        by = scale * LOG2E
                        _add_positions(
                            scores, kv, k_column, block, keys, row, count, queries, by, distances, head * d, scratch,
                            zeros,
                        )  # fmt: skip
                if not _all_see(limits, row, count, block, block + keys):
                    _mask(scores, block, keys, limits, row, count)
                    masked = True
                softmax_tile(vectors, scores.ctypes.data, keys, high.ctypes.data, norm.ctypes.data, rescale.ctypes.data)
                if block > low:
                    _scale_rows(total, count, stride, d, rescale)
                _weighted_values(keys, count, d, scores, values.ctypes.data + 4 * at, zeros, block > low, total)
                block, at = block + keys, at + KEYS * stride
            # A masked key has weight 0, but 0 times a value that is not finite is NaN; its query must not get it.
            alone = masked and _has_nan(total, count, d)
        if alone:
            _each_alone(q, kv, out, limits, layout, distances, sinks, scale, row, count, head, scores, total, queries)
        else:
            _store_rows(total, row, count, d, high, norm, with_state, out, heads, head)


@kernel(
    reads(float32, 2), reads(float32, 2), fills(float32, 1), TABLE, TABLE, INT_ARRAY, reads(float32, 1), FLOAT, INT,
    INT, part=2,
)  # fmt: skip
def attention_units(
    q: Any, kv: Any, out: Any, tiles: Any, limits: Any, layout: Any, sinks: Any, scale: Any, first: int, stop: int
) -> None:
    """Fill out [r, heads, d] (or d + 2 with state, flat) for the units first..stop; a unit is head * tiles + tile.

    tiles [tiles, 5]: query rows first..stop, their keys low..high, and where blocks of keys begin, equal for all tiles
    of a sequence. limits [r, 2]: begin and end of each query's keys. layout: the table of `HeadLayout`. sinks: a logit
    for each head, which counts as a key with a value of zero; empty for none.
    """
    _attend(q, kv, out, tiles, limits, layout, None, sinks, scale, first, stop)


@kernel(
    reads(float32, 2), reads(float32, 2), fills(float32, 1), TABLE, TABLE, INT_ARRAY, INT_ARRAY, INT_ARRAY,
    reads(float32, 2), INT_ARRAY, reads(float32, 2), reads(float32, 2), FLOAT, INT, INT, part=2, seldom=True,
)  # fmt: skip
def attention_by_distance(
    q: Any, kv: Any, out: Any, tiles: Any, limits: Any, layout: Any, q_at: Any, k_at: Any, biases: Any, buckets: Any,
    to_queries: Any, to_keys: Any, scale: Any, first: int, stop: int,
) -> None:  # fmt: skip
    """Compute `attention_units` with scores by the distance of query and key: see `Distances`."""
    distances = q_at, k_at, biases, buckets, to_queries, to_keys
    _attend(q, kv, out, tiles, limits, layout, distances, None, scale, first, stop)
