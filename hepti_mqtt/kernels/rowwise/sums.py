"""Kernel `sum`: p_1 ... p_n f32, all of one shape of any rank -> activation(p_1 + ... + p_n), added in that order.

Attribute activation, where wanted: one of `ACTIVATIONS`. Of a single part it is the activation
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numba import float32

from hepti_mqtt.kernels import references
from hepti_mqtt.kernels.base import Array, Check, Kernel, Run, nothing, row_parts, rowwise
from hepti_mqtt.kernels.gemm.epilogue import activate, activation_of
from hepti_mqtt.kernels.machine.addresses import address_table, floats
from hepti_mqtt.kernels.machine.jit import INT, INT_ARRAY, fills, kernel
from hepti_mqtt.kernels.machine.workers import Workers
from hepti_mqtt.kernels.weights import Weight
from hepti_mqtt.program import Compute, SlotSpec

# Elements that are summed and activated while they are in the first-level cache: a tenth of one of 32 KB.
_BLOCK: Final = 1024


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


def _bind(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], pool: Workers) -> Run:
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

    def run(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        fill([part.reshape(1, -1) for part in reads])
        pool.each(_sum, (table, count, writes[0].reshape(-1), activation), parts)

    return run


def _reference(
    op: Compute,
    _slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    _weights: Sequence[Array],
) -> list[Array]:
    total = reads[0].astype(np.float64)
    for part in reads[1:]:
        total = total + part
    return [references.ACTIVATIONS[op.attrs.get("activation")](total)]


SUM: Final = Kernel("sum", _bind, _reference, rowwise)
