"""Numba kernels for one transformer encoder, each with a NumPy reference beside it.

A `Compute` op names a kernel of `KERNELS`; its contract (reads, weights, attributes, result) is in the docstring of
the module that defines it. Weights are made with `allocate`, parts of a kernel run on `Workers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from hepti_mqtt.kernels.attention import ATTENTION, ATTENTION_BLOCK
from hepti_mqtt.kernels.base import Kernel, Run
from hepti_mqtt.kernels.codecs import FROM_F16, FROM_I8, TO_F16, TO_I8
from hepti_mqtt.kernels.combine import ATTENTION_COMBINE
from hepti_mqtt.kernels.conv import CONV2D, MAX_POOL2D
from hepti_mqtt.kernels.copies import ASSEMBLE
from hepti_mqtt.kernels.decoder import APPEND_ROWS, ATTENTION_AT, EMBED_AT
from hepti_mqtt.kernels.isa import isa
from hepti_mqtt.kernels.jit import Warm, warm_up
from hepti_mqtt.kernels.linear import LINEAR
from hepti_mqtt.kernels.moments import MOMENTS, NORMALISE
from hepti_mqtt.kernels.rowwise import ADD, ADD_NORM, LAYER_NORM, MEAN_ROWS, NORMALIZE_ROWS
from hepti_mqtt.kernels.stem import EMBED_TOKENS, PATCHIFY, PREPEND_POSITIONS
from hepti_mqtt.kernels.sums import SUM
from hepti_mqtt.kernels.weights import (
    NarrowMatrix,
    PackedMatrix,
    Weight,
    WeightBuffer,
    allocate,
    loading_bytes,
    weight_bytes,
)
from hepti_mqtt.kernels.workers import Workers

_ALL: Final = (
    LINEAR,
    ATTENTION,
    ATTENTION_BLOCK,
    ATTENTION_COMBINE,
    LAYER_NORM,
    ADD_NORM,
    MOMENTS,
    NORMALISE,
    ADD,
    SUM,
    ASSEMBLE,
    EMBED_TOKENS,
    PATCHIFY,
    PREPEND_POSITIONS,
    MEAN_ROWS,
    NORMALIZE_ROWS,
    CONV2D,
    MAX_POOL2D,
    EMBED_AT,
    APPEND_ROWS,
    ATTENTION_AT,
    TO_F16,
    FROM_F16,
    TO_I8,
    FROM_I8,
)

KERNELS: Final[Mapping[str, Kernel]] = MappingProxyType({kernel.name: kernel for kernel in _ALL})

if len(KERNELS) != len(_ALL):
    raise ImportError("two kernels have one name")


__all__ = [
    "KERNELS",
    "Kernel",
    "NarrowMatrix",
    "PackedMatrix",
    "Run",
    "Warm",
    "Weight",
    "WeightBuffer",
    "Workers",
    "allocate",
    "isa",
    "loading_bytes",
    "warm_up",
    "weight_bytes",
]
