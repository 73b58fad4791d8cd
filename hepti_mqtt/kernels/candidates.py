"""Kernels that choose the likeliest of a row of logits, where the logits are.

candidates        logits [r, c], temperatures i32 [r] (the bits of an f32; 0 counts as 1) -> [r, 2 K + 3]: the K largest
                  values, best first and of equal ones the first, their columns on the whole (attribute first: that of
                  column 0), then two sums over all c, of exp(x - largest) and of the same at the row's temperature,
                  and the temperature. Where c is below K the rest is -inf, in column -1. A row that is not finite has
                  sums that are NaN.
merge_candidates  p_1 ... p_n [r, 2 K + 3] -> the same of all columns together.

Columns are whole numbers below 2**24, so that f32 holds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from hepti_mqtt.kernels.base import Array, Check, Kernel, rowwise
from hepti_mqtt.kernels.calls import Call, Calls, operands
from hepti_mqtt.kernels.threads import Workers
from hepti_mqtt.kernels.weights import Weight
from hepti_mqtt.program import Compute, SlotSpec

_GROUPS: Final = 8  # times K: of whose largest values the K-th is a bound


def _checked(op: Compute, slots: Sequence[SlotSpec]) -> int:
    """Check what both kernels have in common; return K."""
    check = Check(op, slots)
    r, width = check.writes[0].shape
    check.that(width > 3 and width % 2 == 1, "must write values, their columns and three numbers")
    check.that(all(s.shape[0] == r for s in check.reads), f"must read {r} rows")
    return (width - 3) // 2


def _bind_candidates(op: Compute, slots: Sequence[SlotSpec], _weights: Sequence[Weight], _pool: Workers) -> Calls:
    k, first, columns = _checked(op, slots), int(op.attrs["first"]), slots[op.reads[0]].shape[1]
    scratch = np.empty(columns, np.float32)

    def choose(logits: Array, temperatures: Array, results: Array) -> None:
        for x, temperature, out in zip(logits, _temperatures(temperatures), results, strict=True):
            best = _best(x, k)
            out[:k], out[k : 2 * k] = -np.inf, -1.0
            out[: len(best)] = x[best]
            out[k : k + len(best)] = best + first
            out[2 * k :] = *_sums(x, x[best[0]], temperature, scratch), temperature

    given, (out,) = operands(op, slots)
    return [Call(choose, (given[0], given[-1], out))]


def _best(x: Array, k: int) -> Array:
    """Return the places of the k largest values, best first and of equal ones the first."""
    groups = min(len(x), _GROUPS * k)
    bound = -np.inf
    if len(x) > k:  # at least k groups have a value that is not below this
        largest = x[: len(x) // groups * groups].reshape(-1, groups).max(axis=0)
        bound = np.partition(largest, groups - k)[groups - k]
    near = np.flatnonzero(~(x < bound))
    return near[np.argsort(-x[near], kind="stable")[:k]]


def _sums(x: Array, top: Any, temperature: np.float32, scratch: Array) -> tuple[Any, Any]:
    spoilt = 0 * x.sum()  # NaN where a value is not finite
    np.subtract(x, top, out=scratch)
    if temperature == 1:
        np.exp(scratch, out=scratch)
        plain = scratch.sum(dtype=np.float64)
        return plain + spoilt, plain + spoilt
    at_one = np.exp(scratch).sum(dtype=np.float64)
    np.divide(scratch, temperature, out=scratch)
    np.exp(scratch, out=scratch)
    return at_one + spoilt, scratch.sum(dtype=np.float64) + spoilt


def _temperatures(bits: Array) -> Array:
    found = np.ascontiguousarray(bits).view(np.float32)
    return np.where(found > 0, found, np.float32(1))


def _bind_merge(op: Compute, slots: Sequence[SlotSpec], _weights: Sequence[Weight], _pool: Workers) -> Calls:
    k = _checked(op, slots)

    def merge(results: Array, *parts: Array) -> None:
        for i, out in enumerate(results):
            rows = np.stack([part[i] for part in parts])  # [n, 2 K + 3]
            values, columns = rows[:, :k].ravel(), rows[:, k : 2 * k].ravel()
            order = np.lexsort((columns, -values))[:k]
            out[:k], out[k : 2 * k] = values[order], columns[order]
            lower = rows[:, 0].astype(np.float64) - out[0]
            out[2 * k] = (rows[:, -3] * np.exp(lower)).sum()
            out[2 * k + 1] = (rows[:, -2] * np.exp(lower / (rows[0, -1] or 1))).sum()
            out[2 * k + 2] = rows[0, -1]

    given, (out,) = operands(op, slots)
    return [Call(merge, (out, *given))]


def _reference_candidates(
    op: Compute, slots: Sequence[SlotSpec], reads: Sequence[Array], _weights: Sequence[Array]
) -> list[Array]:
    k, first = (slots[op.writes[0]].shape[1] - 3) // 2, op.attrs["first"]
    x = reads[0].astype(np.float64)
    order = np.argsort(-x, axis=1, kind="stable")[:, :k]
    beside = ((0, 0), (0, k - order.shape[1]))
    values = np.pad(np.take_along_axis(x, order, 1), beside, constant_values=-np.inf)
    lower = x - values[:, :1]
    heat = _temperatures(reads[-1])[:, None].astype(np.float64)
    sums = [np.exp(lower).sum(axis=1), np.exp(lower / heat).sum(axis=1)]
    return [np.column_stack([values, np.pad(order + first, beside, constant_values=-1), *sums, heat])]


def _reference_merge(
    op: Compute, slots: Sequence[SlotSpec], reads: Sequence[Array], _weights: Sequence[Array]
) -> list[Array]:
    k = (slots[op.writes[0]].shape[1] - 3) // 2
    parts = [part.astype(np.float64) for part in reads]
    out = np.empty(slots[op.writes[0]].shape)
    for i, row in enumerate(out):
        found = sorted((-v, c) for part in parts for v, c in zip(part[i, :k], part[i, k : 2 * k], strict=True))[:k]
        row[:k], row[k : 2 * k] = [-v for v, _ in found], [c for _, c in found]
        row[-1] = parts[0][i, -1]
        row[-2] = sum(part[i, -2] * np.exp((part[i, 0] - row[0]) / (row[-1] or 1)) for part in parts)
        row[-3] = sum(part[i, -3] * np.exp(part[i, 0] - row[0]) for part in parts)
    return [out]


CANDIDATES: Final = Kernel("candidates", _bind_candidates, _reference_candidates, rowwise)
MERGE_CANDIDATES: Final = Kernel("merge_candidates", _bind_merge, _reference_merge, rowwise)
