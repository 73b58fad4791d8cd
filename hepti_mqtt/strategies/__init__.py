"""The parallel methods by name, in the order of presentation: each is a table of layouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from hepti_mqtt.strategies import convnets as c
from hepti_mqtt.strategies import encoders as e
from hepti_mqtt.strategies.method import Division, Method

__all__ = ["STRATEGIES", "Division", "Method"]

_ENCODERS: Final = (
    e.ROW, e.COLUMN, e.BLOCK, e.GRID, e.MEGATRON, e.TWO_D, e.GALAXY, e.VOLTAGE, c.PIPELINE, e.DECOUPLED, e.DECODER,
)  # fmt: skip
_CONVNETS: Final = (c.MAP_ROWS, c.MODNN, c.COEDGE, c.EDGEFLOW, c.FUSED_TILES)

STRATEGIES: Final[Mapping[str, Method]] = {m.name: m for m in (e.SINGLE, *_ENCODERS, *_CONVNETS, e.REPLICAS)}
