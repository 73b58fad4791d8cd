"""Every method by name; the order is that in which people read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from hepti_mqtt.strategies import (
    block,
    coedge,
    column,
    decoder,
    decoupled,
    edgeflow,
    fused_tiles,
    galaxy,
    grid,
    map_rows,
    megatron,
    modnn,
    pipeline,
    replicas,
    row,
    single,
    two_d,
    voltage,
)
from hepti_mqtt.strategies.method import Method

_TRANSFORMERS: Final = (row, column, block, grid, megatron, two_d, galaxy, voltage, pipeline, decoupled, decoder)
_CONVOLUTIONS: Final = (map_rows, modnn, coedge, edgeflow, fused_tiles)

STRATEGIES: Final[Mapping[str, Method]] = {
    module.METHOD.name: module.METHOD for module in (single, *_TRANSFORMERS, *_CONVOLUTIONS, replicas)
}
