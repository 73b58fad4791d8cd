"""Numba kernels for neural networks, each with a NumPy reference.

A `Compute` op names a kernel of `KERNELS`. `allocate` makes weights, `Workers` run parts of a kernel.
"""

from hepti_mqtt.kernels.base import Kernel
from hepti_mqtt.kernels.blocks import BlockBuffer, BlockMatrix
from hepti_mqtt.kernels.cpu import isa
from hepti_mqtt.kernels.jit import Warm, warm_up
from hepti_mqtt.kernels.registry import KERNELS, works
from hepti_mqtt.kernels.threads import Workers
from hepti_mqtt.kernels.weights import (
    NarrowMatrix,
    PackedMatrix,
    Weight,
    WeightBuffer,
    allocate,
    arrays_of,
    is_part,
    layout_of,
    loading_bytes,
    part,
    twin,
    weight_bytes,
    with_arrays,
)

__all__ = [
    "KERNELS",
    "BlockBuffer",
    "BlockMatrix",
    "Kernel",
    "NarrowMatrix",
    "PackedMatrix",
    "Warm",
    "Weight",
    "WeightBuffer",
    "Workers",
    "allocate",
    "arrays_of",
    "is_part",
    "isa",
    "layout_of",
    "loading_bytes",
    "part",
    "twin",
    "warm_up",
    "weight_bytes",
    "with_arrays",
    "works",
]
