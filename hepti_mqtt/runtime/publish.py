"""The command that both halves have: publish."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Plane = Literal["control", "data"]


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish `payload`; the control plane and the data plane are separate MQTT connections."""

    topic: str
    payload: bytes
    qos: int
    plane: Plane = "control"
    retain: bool = False
