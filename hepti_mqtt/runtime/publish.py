"""The command that both halves have: publish."""

from __future__ import annotations

from typing import Literal, NamedTuple

Plane = Literal["control", "data"]  # separate MQTT connections to the broker
_NOTHING = memoryview(b"")


class Publish(NamedTuple):
    """Publish `payload`, and `body` behind it, on a connection to the broker or to the peers that read from us (mesh).

    body: of a tensor alone: a view of its array, so that no copy joins it with its header, and valid until the next op.
    """

    topic: str
    payload: bytes
    qos: int
    plane: Plane | Literal["mesh"] = "control"
    retain: bool = False
    body: memoryview = _NOTHING

    @property
    def whole(self) -> bytes:
        """Return payload and body as one."""
        return b"".join((self.payload, self.body))

    @property
    def nbytes(self) -> int:
        """Return the bytes of payload and body."""
        return len(self.payload) + self.body.nbytes
