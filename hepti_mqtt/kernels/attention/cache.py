"""Kernels of a decoder's cache of keys and values, whose one Program serves every position.

append_rows   state [C, w], new [m, w], at -> state with rows at..at + m replaced by new. It may be written in place:
              where the result is the memory of the state, only the new rows move. f32.
attention_at  q [m, *], kv [C, *], at -> [m, heads d]: query i over rows 0..at + i of kv, its own included. Attributes
              q_column, k_column, v_column, heads, head_dim (d) and scale, as `attention` has. What is in the other
              rows of kv is never read.

`at` is what `positions` says, the rows that the cache has; rows beyond the cache raise ValueError before anything is
written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from hepti_mqtt.kernels.attention.ragged import ATTENTION, GRAIN, check_heads, tiles_of
from hepti_mqtt.kernels.attention.tiles import attention_units
from hepti_mqtt.kernels.base import Array, Kernel, Run, nothing
from hepti_mqtt.kernels.machine.workers import Workers, ranges
from hepti_mqtt.kernels.positions import check_at, first_of
from hepti_mqtt.kernels.weights import Weight
from hepti_mqtt.program import Compute, SlotSpec, Work


def _bind_append_rows(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], _pool: Workers) -> Run:
    check = check_at(op, slots, ("f32", "f32"))
    check.weights(weights, 0)
    (rows, width), m = check.reads[0].shape, check.reads[1].shape[0]
    check.shape(check.reads[1], (m, width))
    check.shape(check.writes[0], (rows, width))

    def run(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        state, new, at = reads
        out = writes[0]
        first = first_of(op, at, m, rows, "rows of the cache")
        if out is not state and not np.may_share_memory(out, state):
            out[...] = state
        out[first : first + m] = new

    return run


def _bind_attention_at(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], pool: Workers) -> Run:
    check = check_at(op, slots, ("f32", "f32"))
    check.weights(weights, 0)
    m, capacity = check.reads[0].shape[0], check.reads[1].shape[0]
    layout = check_heads(check)
    check.shape(check.writes[0], (m, layout.heads * layout.d))
    if not m * layout.heads:
        return nothing
    # As of an empty cache; `at` moves the ends of all ranges of keys alike.
    ends = np.arange(1, m + 1)
    empty = tiles_of(np.stack([0 * ends, ends], axis=1), causal=True)
    tiles, limits = empty.copy(), ends.copy()
    units, per_key = layout.heads * len(tiles), 4 * layout.heads * layout.d * m
    parts = (ranges(units, n if n == 1 else 4 * n) for n in range(1, pool.threads + 1))
    attend = [pool.bind(attention_units, divided) for divided in parts]
    table, scale = layout.table(), np.float32(op.attrs["scale"])

    def run(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        q, kv, at = reads
        first = first_of(op, at, m, capacity, "rows of the cache")
        np.add(empty[:, 3], first, out=tiles[:, 3])
        np.add(ends, first, out=limits)
        threads = min(pool.threads, 1 + per_key * (first + m // 2 + 1) // GRAIN)
        attend[threads - 1](q, kv, writes[0].reshape(-1), tiles, limits, table, scale)

    return run


def _reference_append_rows(
    _op: Compute,
    _slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    _weights: Sequence[Array],
) -> list[Array]:
    state, new, first = reads[0].copy(), reads[1], int(reads[2][0])
    state[first : first + len(new)] = new
    return [state]


def _reference_attention_at(
    op: Compute,
    slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    _weights: Sequence[Array],
) -> list[Array]:
    (q, kv), first = reads[:2], int(reads[2][0])
    rows = {"q_rows": range(first, first + len(q)), "k_rows": ((0, len(kv)),), "lengths": (len(kv),), "causal": True}
    whole = op._replace(kernel="attention", reads=op.reads[:2], attrs={**op.attrs, **rows})
    return [ATTENTION.reference(whole, slots, (q, kv), ())[0]]


def _work_append_rows(op: Compute, slots: Sequence[SlotSpec]) -> Work:
    return Work("rowwise", nbytes=2.0 * slots[op.reads[1]].nbytes)


def _work_attention_at(op: Compute, slots: Sequence[SlotSpec]) -> Work:
    # The mean over all positions at which the rows fit.
    m, capacity = (slots[s].shape[0] for s in op.reads[:2])
    return Work("attention", flops=4.0 * op.attrs["head_dim"] * op.attrs["heads"] * m * (capacity + 1) / 2)


APPEND_ROWS: Final = Kernel("append_rows", _bind_append_rows, _reference_append_rows, _work_append_rows, in_place=True)
ATTENTION_AT: Final = Kernel("attention_at", _bind_attention_at, _reference_attention_at, _work_attention_at)
