"""The table of all kernels: a `Compute` op names one of them.

The docstring of the module that defines a kernel says what it reads and writes, its weights and attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from hepti_mqtt.kernels.alignment import ALIGN_TOKENS
from hepti_mqtt.kernels.attention import APPEND_ROWS, ATTENTION, ATTENTION_AT, ATTENTION_BLOCK, ATTENTION_COMBINE
from hepti_mqtt.kernels.attention_reordered import ATTENTION_REORDERED
from hepti_mqtt.kernels.base import Kernel, Slots
from hepti_mqtt.kernels.candidates import CANDIDATES, MERGE_CANDIDATES
from hepti_mqtt.kernels.codecs import ASSEMBLE, FROM_F16, FROM_I8, TO_F16, TO_I8
from hepti_mqtt.kernels.conv2d import CONV2D
from hepti_mqtt.kernels.experts import EXPERTS_DOWN, EXPERTS_UP
from hepti_mqtt.kernels.linear import LINEAR
from hepti_mqtt.kernels.rotary import ROTATE
from hepti_mqtt.kernels.rowwise import (
    ADD,
    ADD_NORM,
    GATE,
    LAYER_NORM,
    MOMENTS,
    NORMALISE,
    NORMALIZE_ROWS,
    POOL_ROWS,
    SUM,
)
from hepti_mqtt.kernels.stem import ADD_TABLE, EMBED_AT, EMBED_TOKENS, FRAMES, PATCHIFY, PREPEND_POSITIONS, REPEAT_ROW
from hepti_mqtt.kernels.windows import AVERAGE_POOL2D, GLOBAL_SUM, MAX_POOL2D, SCALE_MAP
from hepti_mqtt.program import Compute, Work

_ALL: Final = (
    LINEAR,
    EXPERTS_UP,
    EXPERTS_DOWN,
    ATTENTION,
    ATTENTION_BLOCK,
    ATTENTION_COMBINE,
    ATTENTION_REORDERED,
    LAYER_NORM,
    ADD_NORM,
    MOMENTS,
    NORMALISE,
    ADD,
    SUM,
    GATE,
    ROTATE,
    ASSEMBLE,
    EMBED_TOKENS,
    PATCHIFY,
    PREPEND_POSITIONS,
    POOL_ROWS,
    NORMALIZE_ROWS,
    CONV2D,
    MAX_POOL2D,
    AVERAGE_POOL2D,
    GLOBAL_SUM,
    SCALE_MAP,
    EMBED_AT,
    FRAMES,
    ADD_TABLE,
    REPEAT_ROW,
    APPEND_ROWS,
    ATTENTION_AT,
    CANDIDATES,
    MERGE_CANDIDATES,
    ALIGN_TOKENS,
    TO_F16,
    FROM_F16,
    TO_I8,
    FROM_I8,
)

KERNELS: Final[Mapping[str, Kernel]] = MappingProxyType({kernel.name: kernel for kernel in _ALL})

if len(KERNELS) != len(_ALL):
    raise ImportError("two kernels have one name")


def works(op: Compute, slots: Slots) -> tuple[Work, ...]:
    """Return how much work each kernel of an op is, for the cost model."""
    return tuple(KERNELS[step.kernel].work(step, slots) for step in op.kernels)
