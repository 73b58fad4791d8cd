"""Kernels that add arrays of f32, in the order given.

add  residual, p_1 ... p_n [m, h] -> residual + (bias + p_1 + ... + p_n), in that order; weight bias if attribute bias.
sum  p_1 ... p_n, all of one shape of any rank -> activation(p_1 + ... + p_n). Attribute activation, where wanted: one
     of `ACTIVATIONS`. Of a single part it is the activation alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numba import float32
from numpy.typing import NDArray

from hepti_mqtt.kernels import references
from hepti_mqtt.kernels.base import Array, Check, Kernel, Run, nothing, row_parts, rowwise
from hepti_mqtt.kernels.gemm.epilogue import activate, activation_of
from hepti_mqtt.kernels.machine.addresses import address_table, floats
from hepti_mqtt.kernels.machine.jit import INT, INT_ARRAY, fills, helper, kernel, reads
from hepti_mqtt.kernels.machine.workers import Workers
from hepti_mqtt.kernels.weights import Weight
from hepti_mqtt.program import Compute, SlotSpec

# Elements that are summed and activated while they are in the first-level cache: a tenth of one of 32 KB.
_BLOCK: Final = 1024


@helper
def add_row(addresses: Any, count: int, bias: Any, at: int, total: Any) -> None:
    """Fill total [h] with residual + (bias + p_1 + ... + p_n); the addresses are of residual, p_1, ..., p_n."""
    h = len(total)
    for i in range(h):
        total[i] = bias[i]
    for p in range(1, count):
        part = floats(addresses[p] + 4 * at, h)
        for i in range(h):
            total[i] += part[i]
    residual = floats(addresses[0] + 4 * at, h)
    for i in range(h):
        total[i] += residual[i]


@kernel(INT_ARRAY, INT, fills(float32, 2), reads(float32, 1), INT, INT, part=2)
def _add(addresses: Any, count: int, out: Any, bias: Any, first: int, stop: int) -> None:
    for row in range(first, stop):
        add_row(addresses, count, bias, row * out.shape[1], out[row])


@kernel(INT_ARRAY, INT, fills(float32, 1), INT, INT, INT, part=2)
def _sum(addresses: Any, count: int, out: Any, activation: int, first: int, stop: int) -> None:
    for low in range(first, stop, _BLOCK):
        block = out[low : min(low + _BLOCK, stop)]
        part = floats(addresses[0] + 4 * low, len(block))
        for i in range(len(block)):
            block[i] = part[i]
        for p in range(1, count):
            part = floats(addresses[p] + 4 * low, len(block))
            for i in range(len(block)):
                block[i] += part[i]
        activate(block, activation)


def same_shapes(op: Compute, slots: Sequence[SlotSpec], reads: int | None, writes: int = 1) -> tuple[Check, int, int]:
    """Check an op whose slots are all f32 [m, h]; return (its checks, m, h)."""
    check = Check(op, slots)
    check.count(reads, writes)
    check.dtypes()
    check.rank(2)
    m, h = check.reads[0].shape
    for spec in (*check.reads, *check.writes):
        check.shape(spec, (m, h))
    return check, m, h


def bias_of(check: Check, op: Compute, weights: Sequence[Weight], h: int) -> NDArray[np.float32]:
    """Return the op's bias [h], its first weight if attribute bias, else zeros."""
    return check.plain(weights[0], (h,)) if op.attrs["bias"] else np.zeros(h, np.float32)


def _bind_add(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], pool: Workers) -> Run:
    check, m, h = same_shapes(op, slots, None)
    check.weights(weights, int(bool(op.attrs["bias"])))
    bias, count = bias_of(check, op, weights, h), len(op.reads)
    table, fill = address_table(count)
    parts = row_parts(m, h * count, pool)
    if not parts or not h:
        return nothing
    add = pool.bind(_add, parts)

    def run(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        fill(reads)
        add(table, count, writes[0], bias)

    return run


def _bind_sum(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], pool: Workers) -> Run:
    check = Check(op, slots)
    check.count(None)
    check.dtypes()
    check.weights(weights, 0)
    activation = activation_of(check, op.attrs.get("activation"))
    for spec in check.reads:
        check.shape(spec, check.writes[0].shape)
    count = len(op.reads)
    table, fill = address_table(count)
    parts = row_parts(check.writes[0].nbytes // 4, count, pool)
    if not parts:
        return nothing
    add_up = pool.bind(_sum, parts)

    def run(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        fill([part.reshape(1, -1) for part in reads])
        add_up(table, count, writes[0].reshape(-1), activation)

    return run


def total_of(op: Compute, reads: Sequence[Array], weights: Sequence[Array]) -> Array:
    """Return residual + (bias + p_1 + ... + p_n) in float64, for references."""
    parts = [p.astype(np.float64) for p in reads[1:]]
    start = weights[0].astype(np.float64) if op.attrs["bias"] else np.zeros(reads[0].shape[1])
    return np.asarray(reads[0] + sum(parts, np.broadcast_to(start, reads[0].shape)))


def _reference_add(
    op: Compute,
    _slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    weights: Sequence[Array],
) -> list[Array]:
    return [total_of(op, reads, weights)]


def _reference_sum(
    op: Compute,
    _slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    _weights: Sequence[Array],
) -> list[Array]:
    total = reads[0].astype(np.float64)
    for part in reads[1:]:
        total = total + part
    return [references.ACTIVATIONS[op.attrs.get("activation")](total)]


ADD: Final = Kernel("add", _bind_add, _reference_add, rowwise)
SUM: Final = Kernel("sum", _bind_sum, _reference_sum, rowwise)
