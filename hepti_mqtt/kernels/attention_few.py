"""Attention of few queries over caches, as in a decoder's steps: one or a few rows of each of several sessions.

Lanes lie along the columns of a head, so that one query fills them. Keys come in blocks with a running maximum and sum,
as in `attention_tile`. In a block, LANES keys at a time are copied into adjacent rows for all queries of the heads that
share them: memory is read once, nearly in order. Read head by head, the rows of a cache would lie in as many pages as
there are keys. The copy widens f16 caches. Each query attends to the keys of its own limits, in blocks that begin at
the same keys for all queries: its bits do not depend on other queries, so that guessed tokens are judged as if they
came alone.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import float32, int32

from hepti_mqtt.kernels.attention_tile import AttentionWriter, begun, by_vectors, scaled_rows
from hepti_mqtt.kernels.codecs import from_half_bits
from hepti_mqtt.kernels.cpu import TILE, Tile
from hepti_mqtt.kernels.elementary import ONE, ZERO, bits_of, exp_of_negative
from hepti_mqtt.kernels.ir_vectors import F32, IN_ORDER, emit_sized
from hepti_mqtt.kernels.jit import FLOAT, INT, INT_ARRAY, TABLE, fills, floats, halves, helper, kernel, lowered, reads
from hepti_mqtt.kernels.tile import NR

LANES: Final = TILE.lanes
# The most rows of an item that are few: for more, tiles with queries along the lanes are faster.
ROWS: Final = 8
FLOAT_BYTES: Final = 4

_BLOCK: Final = 128  # keys
_TOGETHER: Final = 4  # keys with interleaved sums
_VECTORS: Final = 8  # vectors of a head's columns with interleaved sums

_MINUS_INF: Final = np.float32(-np.inf)


def write_scores(module: ir.Module, name: str, tile: Tile) -> ir.Function:
    """Write the function of `_scores`."""
    w = AttentionWriter(module, name, tile, 6)
    b, n = w.builder, tile.lanes
    query, keys, stride, rows, vectors, out = w.function.args
    last, sums = b.sub(rows, w.whole(1)), list[Any]()
    for first in range(0, n, _TOGETHER):
        numbers = [w.whole(i) for i in range(first, first + _TOGETHER)]
        places = [b.select(b.icmp_signed("<", i, last), i, last) for i in numbers]
        begin = [b.add(keys, b.mul(place, stride)) for place in places]

        def turn(at: Any, totals: list[Any], begin: list[Any] = begin) -> list[Any]:
            x = w.load(b.add(query, at))
            return [w.multiply_add(w.load(b.add(key, at)), x, t) for key, t in zip(begin, totals, strict=True)]

        sums += w.each(vectors, 4 * n, [w.constant(0.0)] * _TOGETHER, turn)
    halves = [ir.Constant(w.integers, [2 * i + odd for i in range(n)]) for odd in (0, 1)]
    while len(sums) > 1:
        pairs = zip(sums[::2], sums[1::2], strict=True)
        sums = [b.fadd(*(b.shuffle_vector(*pair, half) for half in halves), flags=IN_ORDER) for pair in pairs]
    w.store(sums[0], out)
    b.ret_void()
    return w.function


def write_weighted(module: ir.Module, name: str, tile: Tile, vectors: int) -> ir.Function:
    """Write the function of `_weighted` for a number of vectors."""
    w = AttentionWriter(module, name, tile, 5)
    b = w.builder
    weights, values, stride, rows, total = w.function.args

    def turn(at: Any, totals: list[Any]) -> list[Any]:
        # `at` is the row's number times the bytes of a weight.
        weight = w.splat(b.load(w.pointer(b.add(weights, at), F32)))
        value = w.vectors(b.add(values, b.mul(b.lshr(at, w.whole(2)), stride)), vectors)
        return [w.multiply_add(w.load(own), weight, t) for own, t in zip(value, totals, strict=True)]

    places = w.vectors(total, vectors)
    for place, t in zip(places, w.each(rows, 4, [w.load(at) for at in places], turn), strict=True):
        w.store(t, place)
    b.ret_void()
    return w.function


def _rows_at(address: int, stride: int, rows: int, d: int) -> Any:
    return np.stack([floats(address + i * stride, d) for i in range(rows)])


def _plain_scores(query: int, keys: int, stride: int, rows: int, vectors: int, out: int) -> None:
    d = vectors * LANES
    floats(out, rows)[:] = _rows_at(keys, stride, rows, d) @ floats(query, d)


def _plain_weighted(vectors: int, weights: int, values: int, stride: int, rows: int, total: int) -> None:
    d = vectors * LANES
    floats(total, d)[:] += floats(weights, rows) @ _rows_at(values, stride, rows, d)


# Fill out [LANES] with the products of a query [vectors] and keys [rows]; the last key fills the lanes beyond the rows.
# Arguments: query, keys, bytes between keys, rows (1 to LANES), vectors (at least 1), out.
_scores: Final = lowered(
    emit_sized("hepti_scores", [()], 6, lambda module, name: write_scores(module, name, TILE)), _plain_scores
)

# Add weights [rows] times values to total [vectors]. Arguments: vectors (1 to _VECTORS), weights, values, bytes between
# values, rows (at least 1), total.
_weighted: Final = lowered(by_vectors("hepti_weighted", 5, write_weighted, _VECTORS), _plain_weighted)

# Columns of the table of items: number of the item, first row of q, how many.
ITEM, ROW, COUNT = range(3)


def takes(d: int) -> bool:
    """Return whether the kernel takes heads of d columns."""
    return d % LANES == 0


# A query's place is an address: Numba does not vectorise accesses by an index that it cannot prove to be >= 0.
@helper
def _begin(mine: int, q: Any, row: int, column: int, d: int, scale: Any, top: Any, norm: Any) -> None:
    """Fill a query's place: scores, query, sums, maximum, sum of weights."""
    source, query = floats(q.ctypes.data + 4 * (row * q.shape[1] + column), d), floats(mine + 4 * _BLOCK, d)
    sums, tail = floats(mine + 4 * (_BLOCK + d), d), floats(mine + 4 * (_BLOCK + 2 * d), 2)
    for c in range(d):
        query[c] = source[c] * scale
        sums[c] = ZERO
    tail[0], tail[1] = top, norm


@helper
def _softmax(mine: int, low: int, high: int, d: int) -> None:
    """Turn the scores low..high of a query into weights; rescale its sums; update the maximum and sum of weights."""
    scores, keys = floats(mine + 4 * low, high - low), high - low
    sums, tail = floats(mine + 4 * (_BLOCK + d), d), floats(mine + 4 * (_BLOCK + 2 * d), 2)
    top = tail[0]
    for i in range(keys):
        top = scores[i] if scores[i] > top else top
    above = top if top > _MINUS_INF else ZERO
    rescale, norm = exp_of_negative(tail[0] - above), ZERO
    for i in range(keys):
        scores[i] = exp_of_negative(scores[i] - above)
        norm += scores[i]
    tail[0], tail[1] = top, tail[1] * rescale + norm
    for c in range(d):
        sums[c] *= rescale


@helper
def _end(mine: int, out: Any, row: int, column: int, d: int) -> None:
    """Write the result of a query."""
    sums, target = floats(mine + 4 * (_BLOCK + d), d), floats(out.ctypes.data + 4 * (row * out.shape[1] + column), d)
    by = ONE / floats(mine + 4 * (_BLOCK + 2 * d), 2)[1]
    for c in range(d):
        target[c] = sums[c] * by


@helper
def _copy(source: int, width: int, nbytes: int, rows: int, d: int, copies: int) -> None:
    """Copy rows [rows, d] into adjacent rows: some KB apart, they would fall into a few sets of the cache.

    nbytes: of a value: 4 of f32, or 2 of f16, which becomes f32.
    """
    if nbytes < FLOAT_BYTES:
        for i in range(rows):
            row, to = halves(source + 2 * i * width, d), floats(copies + 4 * i * d, d)
            for c in range(d):
                to[c] = from_half_bits(row[c])
    else:
        for c in range(0, d, NR):
            scaled_rows(min(NR, d - c) // LANES, rows, source + 4 * c, width, bits_of(ONE), copies + 4 * c, d)


@helper
def _add_values(mine: int, values: int, low: int, high: int, d: int) -> None:
    """Add the weighted values of keys low..high of a block to a query's sums; values: the address of the first."""
    for c in range(0, d, _VECTORS * LANES):
        vectors = min(_VECTORS, (d - c) // LANES)
        _weighted(vectors, mine + 4 * low, values + 4 * c, 4 * d, high - low, mine + 4 * (_BLOCK + d + c))


@kernel(
    reads(float32, 2), fills(float32, 2), TABLE, INT_ARRAY, reads(int32, 1), INT_ARRAY, reads(float32, 1), INT, INT,
    INT, INT, FLOAT, INT, INT, part=2,
)  # fmt: skip
def attention_few(
    q: Any, out: Any, items: Any, caches: Any, at: Any, layout: Any, sinks: Any, width: int, nbytes: int, capacity: int,
    near: int, scale: Any, first: int, stop: int,
) -> None:  # fmt: skip
    """Fill out [m, heads d] for the units first..stop; a unit is item * heads + head.

    items [items, 3]: place in `at`, first row of q, rows. at: rows that an item's cache [capacity, width] held before.
    Query i attends to rows held + i - near to held + i. Raises ValueError if new rows leave the cache. nbytes: of a
    value of the cache: 4 of f32, 2 of f16. layout: the table of `HeadLayout`; d is whole vectors. sinks: as in
    `attention_units`.
    """
    heads, d, group, stride = layout[3], layout[4], layout[6], nbytes * width
    size, copies = 4 * (_BLOCK + 2 * d + 2), np.empty(LANES * d, np.float32)
    for item in range(first // heads, (stop + heads - 1) // heads):
        if at[items[item, ITEM]] < 0 or at[items[item, ITEM]] + items[item, COUNT] > capacity:
            raise ValueError
    for item in range(first // heads, (stop + heads - 1) // heads):
        low_head, high_head = max(first - item * heads, 0), min(stop - item * heads, heads)
        row, count, some = items[item, ROW], items[item, COUNT], high_head - low_head
        held = int(at[items[item, ITEM]])
        work = np.empty(count * some * size, np.uint8)
        for j in range(count):
            for head in range(low_head, high_head):
                mine = work.ctypes.data + size * (j * some + head - low_head)
                top, norm = begun(sinks, head)
                _begin(mine, q, row + j, layout[0] + head * d, d, scale, top, norm)
        end = held + count
        for block in range(max(held - near, 0) // _BLOCK * _BLOCK, end, _BLOCK):
            keys, begin = min(_BLOCK, end - block), caches[item] + block * stride
            for i in range(0, keys, LANES):
                rows = min(LANES, keys - i)
                for of_keys in range(low_head // group, (high_head + group - 1) // group):
                    key = begin + i * stride + nbytes * (layout[1] + of_keys * d)
                    _copy(key, width, nbytes, rows, d, copies.ctypes.data)
                    for j in range(count):
                        for head in range(max(low_head, of_keys * group), min(high_head, (of_keys + 1) * group)):
                            mine = work.ctypes.data + size * (j * some + head - low_head)
                            _scores(mine + 4 * _BLOCK, copies.ctypes.data, 4 * d, rows, d // LANES, mine + 4 * i)
            for j in range(count):
                low, high = max(held + j - near - block, 0), min(held + j + 1 - block, keys)
                if low < high:
                    for head in range(some):
                        _softmax(work.ctypes.data + size * (j * some + head), low, high, d)
            for i in range(0, keys, LANES):
                for of_keys in range(low_head // group, (high_head + group - 1) // group):
                    value = begin + i * stride + nbytes * (layout[2] + of_keys * d)
                    _copy(value, width, nbytes, min(LANES, keys - i), d, copies.ctypes.data)
                    for j in range(count):
                        low, high = max(held + j - near - block, i), min(held + j + 1 - block, i + LANES)
                        for head in range(max(low_head, of_keys * group), min(high_head, (of_keys + 1) * group)):
                            if low < high:
                                mine = work.ctypes.data + size * (j * some + head - low_head)
                                _add_values(mine, copies.ctypes.data + 4 * (low - i) * d, low, high, d)
        for j in range(count):
            for head in range(low_head, high_head):
                mine = work.ctypes.data + size * (j * some + head - low_head)
                _end(mine, out, row + j, head * d, d)
