"""Kernels that choose the likeliest columns of a row of logits on the device of the logits.

candidates        logits [r, c], temperatures i32 [r] (the bits of an f32; 0 counts as 1) -> [r, 2 K + 3]: the K largest
                  values, best first and of equal ones the first, their columns on the whole (attribute first: number
                  of column 0), then two sums over all c, of exp(x - largest) and of the same at the row's temperature,
                  and the temperature. If c is below K the rest is -inf, in column -1. A row that is not finite has NaN
                  sums.
merge_candidates  p_1 ... p_n [r, 2 K + 3] -> the candidates of all columns together.

Columns are whole numbers below 2**24, so that f32 holds them.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import float32, int32

from hepti_mqtt.core.program import Compute
from hepti_mqtt.kernels.base import Array, Arrays, Check, Kernel, Slots, Weights, rowwise
from hepti_mqtt.kernels.calls import Addresses, Call, Calls, operands
from hepti_mqtt.kernels.elementary import ONE, ZERO, exp_of_negative, from_bits
from hepti_mqtt.kernels.jit import INT, INT_ARRAY, fills, floats, helper, kernel, reads
from hepti_mqtt.kernels.threads import Workers

_MINUS_INF: Final = np.float32(-np.inf)
_BLOCK: Final = 64  # values with one test of their maximum
# Values of a row after its candidates.
_SUM, _HEATED, _HEAT = range(3)


@helper
def _insert(result: Any, k: int, count: int, value: Any, column: int) -> None:
    """Insert a value after those of the first `count` that are not below it; the last of k is dropped."""
    at = min(count, k - 1)
    while at > 0 and value > result[at - 1]:
        result[at], result[k + at] = result[at - 1], result[k + at - 1]
        at -= 1
    result[at], result[k + at] = value, np.float32(column)


@kernel(reads(float32, 2), reads(int32, 1), fills(float32, 2), INT, INT)
def _choose(logits: Any, temperatures: Any, out: Any, k: int, first: int) -> None:
    n = logits.shape[1]
    for row in range(len(logits)):
        x, result = logits[row], out[row]
        for i in range(k):
            result[i], result[k + i] = _MINUS_INF, np.float32(-1)
        for i in range(min(k, n)):
            _insert(result, k, i, x[i], first + i)
        for low in range(min(k, n), n, _BLOCK):
            block = x[low : min(low + _BLOCK, n)]
            top = block[0]
            for i in range(len(block)):
                top = block[i] if block[i] > top else top
            if top > result[k - 1] or np.isnan(block[0]):
                for i in range(len(block)):
                    if block[i] > result[k - 1]:
                        _insert(result, k, k, block[i], first + low + i)
        heat = from_bits(temperatures[row])
        heat = heat if heat > ZERO else ONE
        top, spoilt, total, heated = result[0], 0.0, 0.0, 0.0
        for i in range(n):
            spoilt += np.float64(x[i])
            total += np.float64(exp_of_negative(x[i] - top))
        if heat != ONE:
            for i in range(n):
                heated += np.float64(exp_of_negative((x[i] - top) / heat))
        else:
            heated = total
        spoilt *= 0.0  # NaN where a value is not finite
        result[2 * k + _SUM], result[2 * k + _HEATED] = np.float32(total + spoilt), np.float32(heated + spoilt)
        result[2 * k + _HEAT] = heat


@kernel(INT_ARRAY, fills(float32, 2), INT)
def _merge(addresses: Any, out: Any, k: int) -> None:
    width, count = out.shape[1], len(addresses)
    for row in range(len(out)):
        result, taken = out[row], np.zeros(count, np.int64)
        for i in range(k):
            best, value, column = -1, _MINUS_INF, np.float32(0)
            for p in range(count):
                if taken[p] < k:
                    part = floats(addresses[p] + 4 * row * width, width)
                    mine, where = part[taken[p]], part[k + taken[p]]
                    if best < 0 or mine > value or (mine == value and where < column):
                        best, value, column = p, mine, where
            taken[best] += 1
            result[i], result[k + i] = value, column
        heat = floats(addresses[0] + 4 * row * width, width)[2 * k + _HEAT]
        total, heated, by = 0.0, 0.0, np.float64(heat if heat != ZERO else ONE)
        for p in range(count):
            part = floats(addresses[p] + 4 * row * width, width)
            lower = np.float64(part[0]) - np.float64(result[0])
            total += np.float64(part[2 * k + _SUM]) * np.exp(lower)
            heated += np.float64(part[2 * k + _HEATED]) * np.exp(lower / by)
        result[2 * k + _SUM], result[2 * k + _HEATED] = np.float32(total), np.float32(heated)
        result[2 * k + _HEAT] = heat


def _checked(op: Compute, slots: Slots) -> int:
    """Check an op of either kernel; return K."""
    check = Check(op, slots)
    r, width = check.writes[0].shape
    check.that(width > 3 and width % 2 == 1, "must write values, their columns and three numbers")
    check.that(all(s.shape[0] == r for s in check.reads), f"must read {r} rows")
    return (width - 3) // 2


def _bind_candidates(op: Compute, slots: Slots, _weights: Weights, _pool: Workers) -> Calls:
    k, (given, (out,)) = _checked(op, slots), operands(op, slots)
    return [Call(_choose, (given[0], given[-1], out, k, int(op.attrs["first"])))]


def _temperatures(bits: Array) -> Array:
    temperatures = np.ascontiguousarray(bits).view(np.float32)
    return np.where(temperatures > 0, temperatures, np.float32(1))


def _bind_merge(op: Compute, slots: Slots, _weights: Weights, _pool: Workers) -> Calls:
    k, (parts, (out,)) = _checked(op, slots), operands(op, slots)
    return [Call(_merge, (Addresses(parts), out, k))]


def _reference_candidates(op: Compute, slots: Slots, reads: Arrays, _weights: Arrays) -> list[Array]:
    k, first = (slots[op.writes[0]].shape[1] - 3) // 2, op.attrs["first"]
    x = reads[0].astype(np.float64)
    order = np.argsort(-x, axis=1, kind="stable")[:, :k]
    padding = ((0, 0), (0, k - order.shape[1]))
    values = np.pad(np.take_along_axis(x, order, 1), padding, constant_values=-np.inf)
    lower = x - values[:, :1]
    heat = _temperatures(reads[-1])[:, None].astype(np.float64)
    sums = [np.exp(lower).sum(axis=1), np.exp(lower / heat).sum(axis=1)]
    return [np.column_stack([values, np.pad(order + first, padding, constant_values=-1), *sums, heat])]


def _reference_merge(op: Compute, slots: Slots, reads: Arrays, _weights: Arrays) -> list[Array]:
    k = (slots[op.writes[0]].shape[1] - 3) // 2
    parts = [part.astype(np.float64) for part in reads]
    out = np.empty(slots[op.writes[0]].shape)
    for i, row in enumerate(out):
        best = sorted((-v, c) for part in parts for v, c in zip(part[i, :k], part[i, k : 2 * k], strict=True))[:k]
        row[:k], row[k : 2 * k] = [-v for v, _ in best], [c for _, c in best]
        row[-1] = parts[0][i, -1]
        row[-2] = sum(part[i, -2] * np.exp((part[i, 0] - row[0]) / (row[-1] or 1)) for part in parts)
        row[-3] = sum(part[i, -3] * np.exp(part[i, 0] - row[0]) for part in parts)
    return [out]


CANDIDATES: Final = Kernel("candidates", _bind_candidates, _reference_candidates, rowwise)
MERGE_CANDIDATES: Final = Kernel("merge_candidates", _bind_merge, _reference_merge, rowwise)
