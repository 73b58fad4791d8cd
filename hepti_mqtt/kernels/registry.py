"""The table of all kernels: a `Compute` op names one of them.

What a kernel reads and writes, its weights and attributes, is in the docstring of the module that defines it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from hepti_mqtt.kernels.attention.cache import APPEND_ROWS, ATTENTION_AT
from hepti_mqtt.kernels.attention.combine import ATTENTION_COMBINE
from hepti_mqtt.kernels.attention.ragged import ATTENTION, ATTENTION_BLOCK
from hepti_mqtt.kernels.attention.reordered import ATTENTION_REORDERED
from hepti_mqtt.kernels.base import Kernel
from hepti_mqtt.kernels.conv.average_pool2d import AVERAGE_POOL2D
from hepti_mqtt.kernels.conv.conv2d import CONV2D
from hepti_mqtt.kernels.conv.global_sum import GLOBAL_SUM
from hepti_mqtt.kernels.conv.max_pool2d import MAX_POOL2D
from hepti_mqtt.kernels.gemm.linear import LINEAR
from hepti_mqtt.kernels.reorder.codecs import FROM_F16, FROM_I8, TO_F16, TO_I8
from hepti_mqtt.kernels.reorder.copies import ASSEMBLE
from hepti_mqtt.kernels.rowwise.means import MEAN_ROWS
from hepti_mqtt.kernels.rowwise.moments import MOMENTS, NORMALISE
from hepti_mqtt.kernels.rowwise.norms import ADD_NORM, LAYER_NORM, NORMALIZE_ROWS
from hepti_mqtt.kernels.rowwise.sums import ADD, SUM
from hepti_mqtt.kernels.stem.patches import PATCHIFY, PREPEND_POSITIONS
from hepti_mqtt.kernels.stem.tokens import EMBED_AT, EMBED_TOKENS
from hepti_mqtt.program import Compute, SlotSpec, Work

_ALL: Final = (
    LINEAR,
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
    ASSEMBLE,
    EMBED_TOKENS,
    PATCHIFY,
    PREPEND_POSITIONS,
    MEAN_ROWS,
    NORMALIZE_ROWS,
    CONV2D,
    MAX_POOL2D,
    AVERAGE_POOL2D,
    GLOBAL_SUM,
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


def works(op: Compute, slots: Sequence[SlotSpec]) -> tuple[Work, ...]:
    """Return how much work each kernel of an op is, for the cost model."""
    return tuple(KERNELS[step.kernel].work(step, slots) for step in op.steps)
