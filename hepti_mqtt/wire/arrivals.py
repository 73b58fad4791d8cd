"""Tensors as they come from peers: what all frames of one exchange have in common is read and checked once.

The same exchanges come with every request of a shape. Of a frame whose sender, topic, size and header (but for its
admission number) are those of one that was checked before, only the number is new: nothing else is read of it, and no
`Frame` is made, which on a slow host took as long as the kernel did to receive it.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.ids import Epoch
from hepti_mqtt.program import NUMPY_DTYPE, Key
from hepti_mqtt.wire.frames import ABOUT_BYTES, HEADER_BYTES, U63, Frame, decode

REMEMBERED: Final = 2048  # exchanges, 1 KB each: those of a large model


class Exchange(NamedTuple):
    """What the frames of an exchange have in common. of: model and epoch. nbytes: of a whole frame."""

    of: tuple[str, Epoch]
    key: Key
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int


class Arrival(NamedTuple):
    """A tensor that has come over mesh, as good as checked; payload: its whole frame."""

    exchange: Exchange
    admission: int
    payload: memoryview

    def array(self) -> NDArray[Any]:
        """Return its read-only array: a view, no copy."""
        # An ndarray made of the payload itself would refer to the memory behind it, and not to the view by which
        # `Buffers` knows that it is in use.
        array = np.frombuffer(self.payload, self.exchange.dtype, -1, HEADER_BYTES).reshape(self.exchange.shape)
        array.flags.writeable = False
        return array

    def frame(self) -> Frame:
        """Return all that its frame says."""
        return decode(self.payload)


class Exchanges:
    """The exchanges whose frames were checked, by sender, topic and header."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, bytes], Exchange] = {}

    def arrival(self, peer: str, topic: str, payload: memoryview) -> Arrival | None:
        """Return a payload as an arrival of a known exchange; None for what has to be read and checked as a whole."""
        exchange = self._known.get((peer, topic, bytes(payload[:ABOUT_BYTES])))
        if exchange is None or exchange.nbytes != payload.nbytes:
            return None
        admission = int.from_bytes(payload[ABOUT_BYTES:HEADER_BYTES], "little")
        return Arrival(exchange, admission, payload) if admission <= U63 else None

    def learn(self, peer: str, topic: str, payload: memoryview, frame: Frame) -> None:
        """Remember the exchange of a tensor's frame that was read from `payload` and may come from there."""
        if payload.nbytes == HEADER_BYTES:
            return  # an empty array has no place in a payload
        if len(self._known) >= REMEMBERED:
            self._known.clear()
        self._known[peer, topic, bytes(payload[:ABOUT_BYTES])] = Exchange(
            (frame.model, frame.epoch),
            (frame.node, frame.part, frame.source),
            np.dtype(NUMPY_DTYPE[frame.dtype]),
            frame.shape,
            payload.nbytes,
        )
