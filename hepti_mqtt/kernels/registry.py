"""The table of all kernels: a `Compute` op names one of them.

The docstring of a kernel's module lists the kernel's inputs, outputs, weights and attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from hepti_mqtt.core.program import Compute, Work
from hepti_mqtt.kernels import (
    alignment,
    attention,
    attention_reordered,
    candidates,
    codecs,
    conv2d,
    experts,
    linear,
    rotary,
    rowwise,
    stem,
    windows,
)
from hepti_mqtt.kernels.base import Kernel, Slots

_MODULES: Final = (
    linear, experts, attention, attention_reordered, rowwise, rotary, codecs, stem, conv2d, windows, candidates,
    alignment,
)  # fmt: skip
_ALL: Final = dict.fromkeys(k for module in _MODULES for k in vars(module).values() if isinstance(k, Kernel))

KERNELS: Final[Mapping[str, Kernel]] = MappingProxyType({kernel.name: kernel for kernel in _ALL})

if len(KERNELS) != len(_ALL):
    raise ImportError("two kernels have one name")


def works(op: Compute, slots: Slots) -> tuple[Work, ...]:
    """Return the work of each kernel of an op, for the cost model."""
    return tuple(KERNELS[step.kernel].work(step, slots) for step in op.kernels)
