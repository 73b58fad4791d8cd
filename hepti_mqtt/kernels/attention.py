"""Attention: over ragged sequences, over blocks of keys, and over a decoder's cache.

attention            q [r, *], kv [s, *] (may be one slot) -> [r, heads d]. Attributes: q_column, k_column, v_column
                     (first column of q, k and v), heads, head_dim (d), q_rows (packed row of each row of q), k_rows
                     (packed rows of kv: half-open ranges (start, stop) in ascending order without overlap), lengths
                     (tokens of each packed sequence; a query attends to its own sequence), scale. Optional: causal
                     (True: only to keys at its own position or before), window (largest distance of a key), group
                     (heads of q per head of kv), bias_heads (columns of the weight, a table [buckets, *] that is added
                     to scores by `relative_buckets`, or with attribute bias_side by `grid_buckets`: pictures have a
                     class token and bias_side rows of as many patches), disentangled (True: weights are keys and
                     queries of distances by `log_buckets`, [buckets, heads d] each; their products with q and with k
                     are added to scores before the scale).
attention_block      The same, but writes states [r, heads, d + 2]: the sum of exp(score - maximum) v, not normalised,
                     then the maximum and the sum of exp(score - maximum). A row without a key has 0, -inf and 0.
attention_combine    States of several blocks -> [r, heads d], combined in the given order. Attributes: heads, head_dim.
append_rows          state [C, w], new [m, *], at -> state with rows at..at + m replaced by w columns of new. If the
                     result is the state's memory, only the new rows move. The state may be f16. Attribute column: the
                     first column of new, default 0.
attention_at         q [m, *], kv [C, *] of each item, at -> [m, heads d]: query i of an item attends to rows 0..at + i
                     of its kv. Attributes of `attention`: columns, heads, head_dim, scale, window; lengths: of the
                     items, default one item; sinks (True: weights are a logit per head, which counts as a key with a
                     value of zero); together (True: also to the later new rows of its item). Other rows of kv are
                     never read. kv may be f16.

`at` is an i32 slot [B]: the rows in the cache of each item. Rows beyond the cache raise ValueError before any write. A
query without a key gives 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numba import float32, int32, uint16
from numpy.typing import NDArray

from hepti_mqtt.core.program import DTYPE_BYTES, Compute, Work
from hepti_mqtt.kernels import attention_few
from hepti_mqtt.kernels.attention_tile import HeadLayout, attention_by_distance, attention_units
from hepti_mqtt.kernels.base import (
    Array,
    Arrays,
    Check,
    Kernel,
    Slots,
    Weights,
    check_at,
    items_of,
    refuse_at,
    row_parts,
    rowwise,
    starts_of,
)
from hepti_mqtt.kernels.calls import Addresses, CacheWork, Call, Calls, Operand, operands, scratch
from hepti_mqtt.kernels.codecs import from_half_bits, half_bits
from hepti_mqtt.kernels.elementary import ZERO, exp_of_negative
from hepti_mqtt.kernels.jit import INT, INT_ARRAY, TABLE, fills, floats, helper, kernel, reads
from hepti_mqtt.kernels.threads import Parts, Workers, ranges
from hepti_mqtt.kernels.tile import NR

NO_SINKS: Final = np.zeros(0, np.float32)

# Flops per thread at least; above it `choice` decides.
GRAIN: Final = 1 << 17


class KeyRanges(NamedTuple):
    """The rows of kv that each query row attends to."""

    #: int64 [r, 2], (0, 0) for none
    ranges: NDArray[np.int64]
    #: first row in kv of each query's sequence [r]
    begins: NDArray[np.int64]
    #: packed row of each query [r]
    q_at: NDArray[np.int64]
    #: packed row of each key [s]
    k_at: NDArray[np.int64]


def key_ranges_of(op: Compute, keys: int) -> KeyRanges:
    """Return the rows of kv that each query row attends to."""
    starts = starts_of(op.attrs["lengths"])
    rows = np.asarray(op.attrs["q_rows"], np.int64)
    if len(rows) and (rows.min() < 0 or rows.max() >= starts[-1]):
        raise ValueError(
            f"{op.kernel}: q_rows must lie in the {starts[-1]} packed rows of lengths {op.attrs['lengths']}"
        )
    sequence = np.searchsorted(starts, rows, side="right") - 1
    k_rows = _k_rows(op, keys, int(starts[-1]))
    first, stop = starts[sequence], starts[sequence + 1]
    # Ranges ascend, so the keys of a sequence are adjacent in kv.
    begins = np.searchsorted(k_rows, first)
    if op.attrs.get("causal", False):
        stop = np.minimum(stop, rows + 1)
    if (window := op.attrs.get("window")) is not None:
        first, stop = np.maximum(first, rows - window), np.minimum(stop, rows + window + 1)
    ranges = np.stack([np.searchsorted(k_rows, first), np.searchsorted(k_rows, stop)], axis=1)
    ranges[ranges[:, 0] >= ranges[:, 1]] = 0
    return KeyRanges(ranges, begins, rows, k_rows)


def _k_rows(op: Compute, keys: int, m: int) -> NDArray[np.int64]:
    """Return the packed row of every row of kv, int64 [keys]."""
    given = [(int(start), int(stop)) for start, stop in op.attrs["k_rows"]]
    edges = [0, *(edge for given_range in given for edge in given_range), m]
    rows = np.concatenate([np.arange(0), *(np.arange(*r) for r in given)])
    if any(a > b for a, b in pairwise(edges)) or len(rows) != keys:
        raise ValueError(
            f"{op.kernel}: k_rows must be ranges of the {m} packed rows in ascending order, {keys} rows in all as kv "
            f"has, got {given}"
        )
    return rows


def _by_place(op: Compute) -> bool:
    """Return whether scores depend on the distance of query and key."""
    return op.attrs.get("bias_heads") is not None or bool(op.attrs.get("disentangled"))


def tiles_of(alike: NDArray[np.int64], ranges: NDArray[np.int64], begins: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return runs of at most NR query rows with equal rows of `alike`, int64 [tiles, 5].

    Columns: first and last query row, first and last key of any of them, and where their blocks of keys begin.
    """
    changes = np.flatnonzero(np.any(alike[1:] != alike[:-1], axis=1)) + 1
    cuts = [0, *changes.tolist(), len(ranges)]
    rows = [(at, min(at + NR, b)) for a, b in pairwise(cuts) for at in range(a, b, NR)]
    tiles = [(a, b, *_span(ranges[a:b]), begins[a]) for a, b in rows]
    return np.asarray(tiles, np.int64).reshape(-1, 5)


def _span(ranges: NDArray[np.int64]) -> tuple[int, int]:
    """Return the least range that covers some ranges; empty ones are (0, 0)."""
    high = int(ranges[:, 1].max())
    return int(np.where(ranges[:, 1] > 0, ranges[:, 0], high).min()), high


def tiles_of_op(op: Compute, keys: KeyRanges) -> NDArray[np.int64]:
    """Return the tiles of an op: each has one range of keys, or one sequence if keys depend on the distance."""
    alike, begins = keys.ranges, keys.ranges[:, 0]
    if op.attrs.get("causal", False):
        alike = alike[:, :1]
    if op.attrs.get("window") is not None:
        alike, begins = keys.begins[:, None], keys.begins
    if op.attrs.get("window") is not None or _by_place(op):
        along = keys.q_at - np.arange(len(keys.q_at))  # equal for consecutive rows
        alike = np.column_stack([alike, along])
    return tiles_of(alike, keys.ranges, begins)


# ----------------------------------------------------------------------------------------------------------------------
# A bias by the distance of query and key (T5, Raffel et al., 2020; MPNet, Song et al., 2020).


def relative_buckets(distances: NDArray[np.int64], buckets: int, farthest: int) -> NDArray[np.int64]:
    """Return the bucket of each distance, key minus query: half of the buckets are for keys after the query.

    Half of these have one distance each, the others logarithmic widths up to `farthest`. In f32, as in the reference:
    other roundings would move borders.
    """
    half = buckets // 2
    exact = half // 2
    away = np.abs(distances)
    far = np.log(np.maximum(away, 1).astype(np.float32) / np.float32(exact))
    scaled = far / np.float32(math.log(farthest / exact)) * np.float32(half - exact)
    wide = np.minimum(exact + scaled.astype(np.int64), half - 1)
    return np.where(distances > 0, half, 0) + np.where(away < exact, away, wide)


def log_buckets(distances: NDArray[np.int64], rows: int, farthest: int) -> NDArray[np.int64]:
    """Return the row of a table [rows, ...] for each distance, query minus key (DeBERTa, He et al., 2021).

    On either side half of the rows have one distance each, the others logarithmic widths up to `farthest`. In f32, as
    in the reference.
    """
    span = rows // 2
    middle = span // 2
    away = np.abs(distances)
    far = np.log(np.maximum(away, 1).astype(np.float32) / np.float32(middle))
    scaled = np.ceil(far / np.log(np.float32((farthest - 1) / middle)) * np.float32(middle - 1))
    buckets = np.where(away <= middle, distances, np.sign(distances) * (scaled.astype(np.int64) + middle))
    return np.asarray(np.clip(buckets + span, 0, rows - 1))


# On a grid of patches (BEiT, Bao et al., 2022) each row has a place: the difference of two places is one distance for
# each step on the grid. The class token's places as query and as key give distances that no other pair has.


def grid_places(rows: NDArray[np.int64], lengths: Sequence[int], side: int, token: int) -> NDArray[np.int64]:
    """Return the place of each packed row: y (2 side - 1) + x of a patch, `token` of a class token."""
    starts = starts_of(lengths)
    within = rows - starts[np.searchsorted(starts, rows, side="right") - 1]
    y, x = np.divmod(within - 1, side)
    return np.where(within == 0, token, y * (2 * side - 1) + x)


def grid_buckets(side: int) -> NDArray[np.int64]:
    """Return the row of the table for each distance, query minus key, with 0 in the middle.

    The last three rows: the class token to patches, patches to it, and it to itself.
    """
    most = 2 * side * (side - 1)  # between two patches
    away = np.arange(-3 * most - 2, 3 * most + 3)
    cases = [np.abs(away) <= most, away > most, away == -most - 1]
    return np.select(cases, [away + most, 2 * most + 1, 2 * most + 3], 2 * most + 2)


def _placed(op: Compute, keys: KeyRanges) -> KeyRanges:
    """Return the rows with grid places in `q_at` and `k_at`, if the op's bias is by places."""
    side = op.attrs.get("bias_side")
    if not side:
        return keys
    lengths, most = op.attrs["lengths"], 2 * side * (side - 1)
    if {*lengths} - {side * side + 1}:
        raise ValueError(f"{op.kernel}: lengths {lengths} do not fit a class token and {side} x {side} patches")
    q_at = grid_places(keys.q_at, lengths, side, 2 * most + 1)
    return keys._replace(q_at=q_at, k_at=grid_places(keys.k_at, lengths, side, 3 * most + 2))


def _biases(check: Check, weights: Weights) -> NDArray[np.float32]:
    """Return the bias of each head by distance, query minus key, with 0 in the middle: [heads, an odd number].

    Without a bias: [heads, 0].
    """
    chosen, heads = check.op.attrs.get("bias_heads"), check.op.attrs["heads"]
    if chosen is None:
        return np.zeros((heads, 0), np.float32)
    check.that(len(chosen) == heads, f"bias_heads names {len(chosen)} heads of {heads}")
    return np.ascontiguousarray(_by_distance(check.op, check.plain(weights[0], (-1, -1))).astype(np.float32))


def _by_distance(op: Compute, table: Array) -> Array:
    if side := op.attrs.get("bias_side"):
        buckets = grid_buckets(side)
        if len(table) != buckets.max() + 1:
            raise ValueError(f"{op.kernel}: a grid of {side} x {side} needs a table of {buckets.max() + 1} rows")
    else:
        longest = max(op.attrs["lengths"])
        buckets = relative_buckets(np.arange(longest - 1, -longest, -1), len(table), op.attrs["farthest"])
    return np.asarray(table[buckets][:, list(op.attrs["bias_heads"])].T)


class Distances(NamedTuple):
    """Scores by distance, in the order of `attention_by_distance`; arrays without a use are empty."""

    #: places of queries [r] and keys [s]; a distance is the difference of a query's and a key's place
    q_at: NDArray[np.int64]
    k_at: NDArray[np.int64]
    #: f32 [heads, 2 L - 1], by distance with 0 in the middle
    biases: NDArray[np.float32]
    #: int64 [2 L - 1], by distance with 0 in the middle: row of to_queries and to_keys
    buckets: NDArray[np.int64]
    #: keys and queries of distances, f32 [rows, heads d]
    to_queries: NDArray[np.float32]
    to_keys: NDArray[np.float32]


def _distances(check: Check, layout: HeadLayout, weights: Weights, rows: KeyRanges) -> Distances:
    attrs, none = check.op.attrs, np.zeros((0, 0), np.float32)
    biases = _biases(check, weights)
    if not attrs.get("disentangled"):
        return Distances(rows.q_at, rows.k_at, biases, np.zeros(0, np.int64), none, none)
    keys, queries = (check.plain(weight, (-1, layout.heads * layout.d)) for weight in weights)
    check.that(len(keys) == len(queries) >= 4, f"{len(keys)} keys and {len(queries)} queries of distances do not fit")
    check.that(attrs["farthest"] - 1 > len(keys) // 4, f"farthest {attrs['farthest']} leaves no room for wide buckets")
    return Distances(rows.q_at, rows.k_at, biases, _buckets(check.op, len(keys)), keys, queries)


def _buckets(op: Compute, rows: int) -> NDArray[np.int64]:
    longest = max(op.attrs["lengths"])
    return log_buckets(np.arange(1 - longest, longest), rows, op.attrs["farthest"])


def check_heads(check: Check) -> HeadLayout:
    """Return the layout of heads of an op that reads q and kv first; ValueError if they leave their columns."""
    attrs, with_state = check.op.attrs, int(check.op.kernel == "attention_block")
    columns = {name: attrs[name] for name in ("q_column", "k_column", "v_column")}
    group = attrs.get("group", 1)
    layout = HeadLayout(**columns, heads=attrs["heads"], d=attrs["head_dim"], with_state=with_state, group=group)
    check.that(layout.d >= 1 and layout.heads >= 0, f"heads {layout.heads} of {layout.d} columns make no sense")
    check.that(group >= 1 and layout.heads % group == 0, f"{layout.heads} heads are no groups of {group}")
    for (name, column), read in zip(columns.items(), (0, 1, 1), strict=True):
        most = check.reads[read].shape[1] - layout.heads // (group if read else 1) * layout.d
        check.that(0 <= column <= most, f"{name} leaves no room for the heads")
    return layout


def _check(op: Compute, slots: Slots) -> tuple[int, int, HeadLayout]:
    """Return (rows of q, rows of kv, layout of heads)."""
    check = Check.of(op, slots, 2)
    r, s = (spec.shape[0] for spec in check.reads)
    check.that(len(op.attrs["q_rows"]) == r, f"q_rows names {len(op.attrs['q_rows'])} rows, q has {r}")
    layout = check_heads(check)
    wanted = (r, layout.heads, layout.d + 2) if layout.with_state else (r, layout.heads * layout.d)
    check.shape(check.writes[0], wanted)
    return r, s, layout


def _bind(op: Compute, slots: Slots, weights: Weights, pool: Workers) -> Calls:
    r, s, layout = _check(op, slots)
    check, by_distance = Check(op, slots), _by_place(op)
    check.weights(weights, 2 if op.attrs.get("disentangled") else int(by_distance))
    rows = _placed(op, key_ranges_of(op, s))
    added = _distances(check, layout, weights, rows) if by_distance else ()
    if not r * layout.heads:
        return []
    tiles, limits, table = tiles_of_op(op, rows), rows.ranges, layout.table()
    flops = pairs_of(rows.ranges) * 4 * layout.heads * layout.d
    threads = min(pool.threads, 1 + flops // GRAIN)
    # More parts than threads: the tiles of ragged sequences are of uneven cost.
    parts = ranges(layout.heads * len(tiles), threads if threads == 1 else 4 * threads, flops)
    (q, kv), (out,) = operands(op, slots)
    attend, more = pool.bind(attention_by_distance if by_distance else attention_units, parts), added or (NO_SINKS,)
    return attend(q, kv, out.reshape(-1), tiles, limits, table, *more, np.float32(op.attrs["scale"]))


def pairs_of(key_ranges: NDArray[np.int64]) -> int:
    """Return the number of pairs of a query and a key of its range."""
    return int((key_ranges[:, 1] - key_ranges[:, 0]).sum())


def _work(op: Compute, slots: Slots) -> Work:
    keys = slots[op.reads[1]].shape[0]
    if len(op.attrs["lengths"]) == 1 and not op.attrs.get("causal", False) and op.attrs.get("window") is None:
        pairs = len(op.attrs["q_rows"]) * keys  # every row attends to all keys; a short cut for searches
    else:
        pairs = pairs_of(key_ranges_of(op, keys).ranges)
    # A tile multiplies about one row of distances per key, and two per query and key.
    per_pair = 10.0 if op.attrs.get("disentangled") else 4.0
    return Work("attention", flops=per_pair * op.attrs["head_dim"] * op.attrs["heads"] * pairs)


def _reference_states(op: Compute, slots: Slots, q: Array, kv: Array, weights: Arrays = ()) -> Array:
    _, s, (*columns, heads, d, _, group) = _check(op, slots)
    out = np.zeros((len(q), heads, d + 2))
    out[:, :, d] = -np.inf
    queries, keys, values = (  # [heads, rows, d]
        x[:, c : c + heads // by * d]
        .astype(np.float64)
        .reshape(len(x), heads // by, d)
        .transpose(1, 0, 2)
        .repeat(by, axis=0)
        for x, c, by in zip((q, kv, kv), columns, (1, group, group), strict=True)
    )
    key_ranges, _, q_at, k_at = _placed(op, key_ranges_of(op, s))
    for low, high in np.unique(key_ranges, axis=0).tolist():  # rows that attend to the same keys together
        if high > low:
            rows = np.flatnonzero((key_ranges == (low, high)).all(axis=1))
            scores = queries[:, rows] @ keys[:, low:high].transpose(0, 2, 1)
            if op.attrs.get("disentangled"):
                apart = q_at[rows, None] - k_at[None, low:high] + max(op.attrs["lengths"]) - 1
                scores = scores + _met(op, queries[:, rows], keys[:, low:high], weights, apart)
            scores = scores * op.attrs["scale"]
            if op.attrs.get("bias_heads") is not None:
                bias = _by_distance(op, weights[0].astype(np.float64))
                scores = scores + bias[:, q_at[rows, None] - k_at[None, low:high] + bias.shape[1] // 2]
            top = scores.max(axis=-1, keepdims=True)
            p = np.exp(scores - np.where(top > -np.inf, top, 0.0))
            states = np.concatenate([p @ values[:, low:high], top, p.sum(axis=-1, keepdims=True)], axis=-1)
            out[rows] = states.transpose(1, 0, 2)
    return out


def _met(op: Compute, q: Array, k: Array, weights: Arrays, apart: NDArray[np.int64]) -> Array:
    """Return the products of distances' keys with q [heads, r, d], plus those of their queries with k [heads, s, d]."""
    heads, r, d = q.shape
    to_queries, to_keys = (w.astype(np.float64).reshape(len(w), heads, d).transpose(1, 2, 0) for w in weights)
    rows = _buckets(op, to_keys.shape[2])[apart]
    return np.asarray((q @ to_queries)[:, np.arange(r)[:, None], rows] + (k @ to_keys)[:, np.arange(k.shape[1]), rows])


def _finish(states: Array, sinks: Array | None = None) -> Array:
    norm = states[:, :, -1:]
    if sinks is not None:
        norm = norm + np.exp(sinks[:, None] - states[:, :, -2:-1])
    r, heads, width = states.shape
    return np.asarray((states[:, :, :-2] / np.where(norm == 0, 1.0, norm)).reshape(r, heads * (width - 2)))


def _reference(op: Compute, slots: Slots, reads: Arrays, weights: Arrays) -> list[Array]:
    states = _reference_states(op, slots, reads[0], reads[1], weights)
    return [states if op.kernel == "attention_block" else _finish(states)]


ATTENTION: Final = Kernel("attention", _bind, _reference, _work)
ATTENTION_BLOCK: Final = Kernel("attention_block", _bind, _reference, _work)


_MINUS_INF: Final = np.float32(-np.inf)


@kernel(INT_ARRAY, INT, fills(float32, 2), INT, INT, INT, INT, part=2)
def _combine(states: Any, count: int, out: Any, heads: int, d: int, first: int, stop: int) -> None:
    for row in range(first, stop):
        for head in range(heads):
            at = (row * heads + head) * (d + 2)
            top = _MINUS_INF
            for i in range(count):
                high = floats(states[i] + 4 * at, d + 2)[d]
                top = high if high > top else top  # NaN is kept: its own weight below is NaN
            by = ZERO
            result = out[row, head * d : head * d + d]
            result[:] = ZERO
            for i in range(count):
                state = floats(states[i] + 4 * at, d + 2)
                # A block without a key has maximum -inf and weight 0, also if no block has a key.
                weight = ZERO if state[d] == _MINUS_INF else exp_of_negative(state[d] - top)
                by += weight * state[d + 1]
                for c in range(d):
                    result[c] += weight * state[c]
            if by != ZERO:
                for c in range(d):
                    result[c] /= by


def _bind_combine(op: Compute, slots: Slots, weights: Weights, pool: Workers) -> Calls:
    check = Check.of(op, slots, None)
    check.weights(weights, 0)
    heads, d = op.attrs["heads"], op.attrs["head_dim"]
    r = check.writes[0].shape[0]
    for spec in check.reads:
        check.shape(spec, (r, heads, d + 2))
    check.shape(check.writes[0], (r, heads * d))
    count = len(op.reads)
    parts = row_parts(r, heads * d * count, pool)
    if not parts or not heads:
        return []
    states, (out,) = operands(op, slots)
    return pool.bind(_combine, parts)(Addresses(states), count, out, heads, d)


def _reference_combine(op: Compute, _slots: Slots, reads: Arrays, _weights: Arrays) -> list[Array]:
    states = np.stack(reads).astype(np.float64)
    high = states[..., -2]
    top = high.max(axis=0)
    with np.errstate(invalid="ignore"):
        weight = np.where(high == -np.inf, 0.0, np.exp(high - top))
    norm = (weight * states[..., -1]).sum(axis=0)
    total = (weight[..., None] * states[..., :-2]).sum(axis=0)
    out = total / np.where(norm == 0, 1.0, norm)[..., None]
    return [out.reshape(len(out), op.attrs["heads"] * op.attrs["head_dim"])]


ATTENTION_COMBINE: Final = Kernel("attention_combine", _bind_combine, _reference_combine, rowwise)


@helper
def _append(state: Any, out: Any, new: Any, at: Any, copied: int) -> Any:
    """Copy the state if it must be, and return the first new row."""
    first = at[0]
    if first < 0 or first + len(new) > len(out):
        raise ValueError
    if copied:
        out[:] = state
    return first


@kernel(reads(float32, 2), fills(float32, 2), reads(float32, 2), reads(int32, 1), INT, INT)
def _append_rows(state: Any, out: Any, new: Any, at: Any, column: int, copied: int) -> None:
    first = _append(state, out, new, at, copied)
    for row in range(len(new)):
        out[first + row] = new[row, column : column + out.shape[1]]


@kernel(reads(uint16, 2), fills(uint16, 2), reads(float32, 2), reads(int32, 1), INT, INT)
def _append_halves(state: Any, out: Any, new: Any, at: Any, column: int, copied: int) -> None:
    """Append rows as f16; values beyond 65504 become infinity, as on the wire."""
    first = _append(state, out, new, at, copied)
    for row in range(len(new)):
        for i in range(out.shape[1]):
            out[first + row, i] = half_bits(new[row, column + i])


@kernel(reads(uint16, 2), fills(float32, 2), reads(int32, 1), INT, INT, INT, INT, INT)
def _widen_heads(kv: Any, wide: Any, at: Any, item: int, rows: int, near: int, k_column: int, v_column: int) -> None:
    """Widen one head's keys and values for the new rows of an item to wide [.., 2 d]."""
    d = wide.shape[1] // 2
    for row in range(max(at[item] - near, 0), at[item] + rows):
        for c in range(d):
            wide[row, c] = from_half_bits(kv[row, k_column + c])
            wide[row, d + c] = from_half_bits(kv[row, v_column + c])


@kernel(TABLE, reads(int32, 1), INT, INT, INT, INT, TABLE, TABLE)
def _move_limits(empty: Any, at: Any, item: int, near: int, least: int, capacity: int, tiles: Any, limits: Any) -> None:
    """Fill tiles and limits with those of an empty cache, moved by the rows in an item's cache."""
    first = at[item]
    if first < 0 or first + len(limits) > capacity:
        raise ValueError
    for row in range(len(limits)):
        limits[row, 1] = first + max(row + 1, least)
        limits[row, 0] = max(first + row - near, 0)
    for i in range(len(empty)):
        for column in range(empty.shape[1]):
            tiles[i, column] = empty[i, column]
        tiles[i, 2] = limits[empty[i, 0], 0]
        tiles[i, 3] += first


def _bind_append_rows(op: Compute, slots: Slots, weights: Weights, _pool: Workers) -> Calls:
    kept = _kept(op, slots)
    check = check_at(op, slots, (kept, "f32"), result=kept)
    check.weights(weights, 0)
    (rows, width), m = check.reads[0].shape, check.reads[1].shape[0]
    column = op.attrs.get("column", 0)
    check.that(0 <= column <= check.reads[1].shape[1] - width, f"column leaves no room for the {width} of the state")
    check.shape(check.writes[0], (rows, width))
    (state, new, at), (out,) = operands(op, slots)
    refuse, name = refuse_at(op, (m,), rows, "rows of the cache"), slots[op.writes[0]].state
    copied = int(not name or name != slots[op.reads[0]].state)  # else state and result are one array
    if kept == "f32":
        return [Call(_append_rows, (state, out, new, at, column, copied), refuse=refuse)]
    halves = state.view(np.uint16), out.view(np.uint16)
    return [Call(_append_halves, (*halves, new, at, column, copied), refuse=refuse)]


def _kept(op: Compute, slots: Slots, read: int = 0) -> str:
    """Return the dtype that an op's keys and values must have: f16 if they are f16, else f32."""
    return "f16" if read < len(op.reads) and slots[op.reads[read]].dtype == "f16" else "f32"


def _bind_attention_at(op: Compute, slots: Slots, weights: Weights, pool: Workers) -> Calls:
    lengths = items_of(op, slots[op.reads[0]].shape[0])
    kept = _kept(op, slots, 1)
    check = check_at(op, slots, ("f32", *[kept] * len(lengths)), len(lengths))
    sinks = np.concatenate([NO_SINKS, *(check.plain(weight, (-1,)) for weight in weights)])
    check.that(len(sinks) == (op.attrs["heads"] if op.attrs.get("sinks") else 0), f"{len(sinks)} sinks of heads")
    m, caches = check.reads[0].shape[0], check.reads[1:-1]
    check.that(len({spec.shape for spec in caches}) == 1, "the caches of all items must be alike")
    layout = check_heads(check)
    check.shape(check.writes[0], (m, layout.heads * layout.d))
    if not m * layout.heads:
        return []
    fits, caches_of = attention_few.takes(layout.d), _Caches(op, slots, check, layout, lengths, sinks)
    fits = fits and not op.attrs.get("together", False)
    few = [item for item, rows in enumerate(lengths) if fits and rows <= attention_few.ROWS]
    calls = caches_of.attend_few(few, pool) if few else Calls()
    for item, rows in enumerate(lengths):
        if rows and item not in few:
            calls += caches_of.attend(item, pool) if kept == "f32" else caches_of.attend_widened(item, pool)
    return calls


class _Caches:
    """Attention over the caches of items."""

    def __init__(
        self, op: Compute, slots: Slots, check: Check, layout: HeadLayout, lengths: Sequence[int],
        sinks: NDArray[np.float32],
    ) -> None:  # fmt: skip
        (self.q, *self.caches, self.at), (self.out,) = operands(op, slots)
        self.layout, self.lengths, self.sinks = layout, lengths, sinks
        self.capacity, self.width = check.reads[1].shape
        self.near, self.scale = op.attrs.get("window", self.capacity), np.float32(op.attrs["scale"])
        self.together = bool(op.attrs.get("together", False))
        self.starts = list(accumulate(lengths, initial=0))
        self.refuse = refuse_at(op, lengths, self.capacity, "rows of the cache")

    def _work(self, items: Sequence[int], heads: int) -> CacheWork:
        """Return the work of attention for some items and a number of heads."""
        rows = tuple((item, self.lengths[item]) for item in items)
        return CacheWork(self.at, rows, min(self.near + 1, self.capacity), 4 * heads * self.layout.d)

    def attend_few(self, few: Sequence[int], pool: Workers) -> Calls:
        """Return one call for the attention of all items with few rows."""
        nbytes, rows = self.caches[0].dtype.itemsize, sum(self.lengths[item] for item in few)
        items = np.asarray([(item, self.starts[item], self.lengths[item]) for item in few], np.int64)
        units = ranges(len(few) * self.layout.heads, pool.threads)
        work = self._work(few, self.layout.heads)
        attend = pool.bind(attention_few.attention_few, units, (nbytes, self.layout.d, rows), work)
        caches, table = Addresses(self.caches[item] for item in few), self.layout.table()
        how = table, self.sinks, self.width, nbytes, self.capacity, self.near, self.scale
        return attend(self.q, self.out, items, caches, self.at, *how, refuse=self.refuse)

    def attend(self, item: int, pool: Workers, alone: int | None = None, kv: Operand | None = None) -> Calls:
        """Return the attention of an item's rows over its cache.

        alone: the only head of kv, if kv has one head; else all heads attend.
        """
        layout, m, heads, skipped = self.layout, self.lengths[item], self.layout.heads, 0
        if alone is not None:
            heads, skipped = layout.group, alone * layout.group
            layout = layout._replace(k_column=-alone * layout.d, v_column=(1 - alone) * layout.d)
        # Tiles of an empty cache: `at` moves the ends of all ranges of keys, and a window's begins, by its rows.
        least = m if self.together else 0
        ends = np.maximum(np.arange(1, m + 1), least)
        empty = tiles_of(np.zeros((m, 1), np.int64), np.stack([0 * ends, ends], axis=1), 0 * ends)
        tiles, limits = scratch(empty.shape, np.int64), scratch((m, 2), np.int64)
        move = empty, self.at, item, self.near, least, self.capacity, tiles, limits
        begin = skipped * len(empty)
        units = ranges(heads * len(empty), 4 * pool.threads)
        parts = Parts(((begin + a, begin + z) for a, z in units), pool.threads)
        rows, fixed = (
            (self.starts[item], self.starts[item] + m),
            (tiles, limits, layout.table(), self.sinks, self.scale),
        )
        attend = pool.bind(attention_units, parts, None, self._work((item,), heads))
        return [
            Call(_move_limits, move, refuse=self.refuse),
            *attend(self.q.rows(*rows), kv or self.caches[item], self.out.rows(*rows).reshape(-1), *fixed),
        ]

    def attend_widened(self, item: int, pool: Workers) -> Calls:
        """Return the attention of an item's rows over its f16 cache, which is widened head by head."""
        d, cache, calls = self.layout.d, self.caches[item].view(np.uint16), Calls()
        wide = scratch((self.capacity, 2 * d), np.float32)
        for group in range(self.layout.heads // self.layout.group):
            columns = self.layout.k_column + group * d, self.layout.v_column + group * d
            widen = cache, wide, self.at, item, self.lengths[item], self.near, *columns
            move, *attend = self.attend(item, pool, group, wide)
            calls += [move, Call(_widen_heads, widen), *attend]
        return calls


def _reference_append_rows(op: Compute, _slots: Slots, reads: Arrays, _weights: Arrays) -> list[Array]:
    state, new, first = reads[0].copy(), reads[1], int(reads[2][0])
    column = op.attrs.get("column", 0)
    state[first : first + len(new)] = new[:, column : column + state.shape[1]]
    return [state]


def _reference_attention_at(op: Compute, slots: Slots, reads: Arrays, weights: Arrays) -> list[Array]:
    q, *caches, at = reads
    sinks = np.concatenate(weights).astype(np.float64) if weights else None
    ends, out = accumulate(items_of(op, len(q)), initial=0), list[Array]()
    wide = [spec._replace(dtype="f32") if spec.dtype == "f16" else spec for spec in slots]
    for (start, stop), kv, first in zip(pairwise(ends), caches, at.tolist(), strict=True):
        if op.attrs.get("together", False):
            out += _reference_together(op, wide, q[start:stop], kv.astype(np.float32), first, sinks)
            continue
        places = {"q_rows": range(first, first + stop - start), "k_rows": ((0, len(kv)),), "lengths": (len(kv),)}
        whole = op._replace(kernel="attention", reads=op.reads[:2], attrs={**op.attrs, **places, "causal": True})
        states = _reference_states(whole, wide, q[start:stop], kv.astype(np.float32))
        out.append(_finish(states, sinks))
    return [np.concatenate(out)]


def _reference_together(
    op: Compute, slots: Slots, q: Array, kv: Array, first: int, sinks: Array | None
) -> Iterator[Array]:
    """Yield the attention of each row of an item over the keys of its window and the later new rows."""
    kept, stop = {k: v for k, v in op.attrs.items() if k not in ("window", "together")}, first + len(q)
    for row in range(len(q)):
        begin = max(first + row - op.attrs.get("window", stop), 0)
        places = {"q_rows": (0,), "k_rows": ((0, stop - begin),), "lengths": (stop - begin,)}
        one = op._replace(kernel="attention", reads=op.reads[:2], attrs={**kept, **places})
        yield _finish(_reference_states(one, slots, q[row : row + 1], kv[begin:stop]), sinks)


def _work_append_rows(op: Compute, slots: Slots) -> Work:
    return Work("rowwise", nbytes=8.0 * slots[op.reads[1]].shape[0] * slots[op.reads[0]].shape[1])


def _work_attention_at(op: Compute, slots: Slots) -> Work:
    # The mean over all positions at which the rows fit.
    m, capacity = (slots[s].shape[0] for s in op.reads[:2])
    near = min(op.attrs.get("window", capacity) + 1, capacity)
    keys = near - near * (near - 1) / (2 * max(capacity, 1))
    return Work("attention", flops=4.0 * op.attrs["head_dim"] * op.attrs["heads"] * m * keys)


def _scratch_attention_at(op: Compute, slots: Slots) -> int:
    """Return the bytes of one head's keys and values of an f16 cache in f32; attention of few rows needs none."""
    rows, wide = slots[op.reads[1]].shape[0], DTYPE_BYTES["f32"]
    return 2 * op.attrs["head_dim"] * rows * wide if _kept(op, slots, 1) == "f16" else 0


APPEND_ROWS: Final = Kernel("append_rows", _bind_append_rows, _reference_append_rows, _work_append_rows)
ATTENTION_AT: Final = Kernel(
    "attention_at", _bind_attention_at, _reference_attention_at, _work_attention_at, scratch_bytes=_scratch_attention_at
)
