"""How much work an op is, in the terms in which devices measure themselves."""

from __future__ import annotations

from typing import Literal, NamedTuple

from hepti_mqtt.plan import Storage

WorkKind = Literal["linear", "attention", "rowwise"]


class Work(NamedTuple):
    """linear: rows × k × n of a matmul over weights in `storage`, and bytes moved beside it; attention: flops over all
    (query, key) pairs; rowwise: bytes moved. flops: those of the op's definition, however it is computed.
    """

    kind: WorkKind
    rows: int = 0
    k: int = 0
    n: int = 0
    flops: float = 0.0
    nbytes: float = 0.0
    storage: Storage = "f32"
