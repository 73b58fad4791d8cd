"""Narrower weights in memory, for every strategy alike: a pass from Program to Program.

The matrices of the layers are stored narrow; what the stem and the task head use, biases and norms stay f32. Plans of
models whose layers read them by other kernels than `linear` have f32 alone (`models.storages`).
"""

from __future__ import annotations

from dataclasses import replace

from hepti_mqtt.plan import Storage
from hepti_mqtt.program import Compute, Program, WeightRef

_PREFIX = "layers."


def stored(ref: WeightRef, storage: Storage) -> WeightRef:
    """Return a weight as it is kept in `storage`: matrices of the layers alone are narrow."""
    if ref.layout == "packed" and ref.tensor.startswith(_PREFIX):
        return ref._replace(storage=storage)
    return ref


def store(program: Program, storage: Storage) -> Program:
    """Return `program` with every packed matrix of its layers kept in `storage`."""
    return replace(
        program,
        ops=tuple(
            op._replace(weights=tuple(stored(ref, storage) for ref in op.weights)) if isinstance(op, Compute) else op
            for op in program.ops
        ),
    )
