"""Kernel `attention_combine`: states of several blocks of keys to attention over all of them, in the order given.

Reads states [r, heads, d + 2] of `attention_block`, writes [r, heads d]. Attributes: heads, head_dim (d). A row that
has no key in any block gives 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numba import float32

from hepti_mqtt.kernels.base import Array, Check, Kernel, Run, nothing, row_parts, rowwise
from hepti_mqtt.kernels.elementary import ZERO, exp_of_negative
from hepti_mqtt.kernels.machine.addresses import address_table, floats
from hepti_mqtt.kernels.machine.jit import INT, INT_ARRAY, fills, kernel
from hepti_mqtt.kernels.machine.workers import Workers
from hepti_mqtt.kernels.weights import Weight
from hepti_mqtt.program import Compute, SlotSpec

_MINUS_INF: Final = np.float32(-np.inf)


@kernel(INT_ARRAY, INT, fills(float32, 2), INT, INT, INT, INT, part=2)
def _combine(states: Any, count: int, out: Any, heads: int, d: int, first: int, stop: int) -> None:
    for row in range(first, stop):
        for head in range(heads):
            at = (row * heads + head) * (d + 2)
            top = _MINUS_INF
            for i in range(count):
                high = floats(states[i] + 4 * at, d + 2)[d]
                top = high if high > top else top  # NaN is not lost: its own weight below is NaN
            by = ZERO
            result = out[row, head * d : head * d + d]
            result[:] = ZERO
            for i in range(count):
                state = floats(states[i] + 4 * at, d + 2)
                # A block without a key has maximum -inf and weighs nothing, also if all blocks are so.
                weight = ZERO if state[d] == _MINUS_INF else exp_of_negative(state[d] - top)
                by += weight * state[d + 1]
                for c in range(d):
                    result[c] += weight * state[c]
            if by != ZERO:
                for c in range(d):
                    result[c] /= by


def _bind(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], pool: Workers) -> Run:
    check = Check(op, slots)
    check.count(None)
    check.dtypes()
    check.weights(weights, 0)
    heads, d = op.attrs["heads"], op.attrs["head_dim"]
    r = check.writes[0].shape[0]
    for spec in check.reads:
        check.shape(spec, (r, heads, d + 2))
    check.shape(check.writes[0], (r, heads * d))
    count = len(op.reads)
    table, fill = address_table(count)
    parts = row_parts(r, heads * d * count, pool)
    if not parts or not heads:
        return nothing
    combine = pool.bind(_combine, parts)

    def run(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        fill([state.reshape(r, -1) for state in reads])
        combine(table, count, writes[0], heads, d)

    return run


def _reference(
    op: Compute,
    _slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    _weights: Sequence[Array],
) -> list[Array]:
    states = np.stack(reads).astype(np.float64)
    high = states[..., -2]
    top = high.max(axis=0)
    with np.errstate(invalid="ignore"):
        weight = np.where(high == -np.inf, 0.0, np.exp(high - top))
    norm = (weight * states[..., -1]).sum(axis=0)
    total = (weight[..., None] * states[..., :-2]).sum(axis=0)
    out = total / np.where(norm == 0, 1.0, norm)[..., None]
    return [out.reshape(len(out), op.attrs["heads"] * op.attrs["head_dim"])]


ATTENTION_COMBINE: Final = Kernel("attention_combine", _bind, _reference, rowwise)
