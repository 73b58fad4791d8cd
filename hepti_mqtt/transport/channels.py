"""A mesh's plain sockets for compiled code; each is open while Python neither sends nor receives on it.

`Channels.hold` takes the endpoint's lock, so no other thread can write or close a socket meanwhile.
A thread that needs the lock calls `Turns.on_wait` before it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.kernels.transfers import BYTES_IN, BYTES_OUT, CHANNEL, FRAMES_IN, FRAMES_OUT, IN, OUT
from hepti_mqtt.transport.endpoint import Endpoint
from hepti_mqtt.transport.peer import Peer, PeerStats

_CLOSED: Final = [-1, -1, 0, 0, 0, 0, 0, 0]


class Channels:
    """The channels of one mesh (`kernels.transfers`) by peer, for the thread that calls `Mesh.wait`.

    wake: descriptor that ends a wait. stats_of: returns the counters of a peer.
    """

    def __init__(
        self, endpoint: Endpoint, peers: Mapping[str, Peer], wake: int, stats_of: Callable[[str], PeerStats]
    ) -> None:
        self._endpoint, self._peers, self.wake, self._stats_of = endpoint, peers, wake, stats_of
        self._words: dict[str, NDArray[np.int64]] = {}
        #: (peer, topic, bytes): a payload's PUBLISH header; None unless the peer is the only reader on a plain socket
        self.route: Callable[[str, str, int], bytes | None] = endpoint.head_for
        #: (peer, parts, sent): sends the rest of a frame after its first `sent` bytes
        self.keep: Callable[[str, Sequence[bytes | NDArray[Any]], int], None] = endpoint.keep
        self.traffic = (0, 0)  #: frames and payload bytes, sent and received

    @property
    def version(self) -> int:
        """Return a number that changes with what `route` returns."""
        return self._endpoint.version

    @contextmanager
    def hold(self) -> Iterator[bool]:
        """Open the channels for compiled code; yield False if another thread waits for the endpoint."""
        if not self._endpoint.lock.take():
            yield False
            return
        try:
            self._open()
            yield True
        finally:
            self._close()
            self._endpoint.lock.release()

    def channel(self, peer: str) -> int:
        """Return the constant address of a peer's channel."""
        if peer not in self._words:
            self._words[peer] = np.array(_CLOSED, np.int64)
            self._open()
        return int(self._words[peer].__array_interface__["data"][0])

    def give_back(self, peer: str, data: bytes) -> None:
        """Pass bytes that compiled code received to the peer's decoder."""
        if (subscription := self._peers.get(peer)) is not None:
            subscription.take(memoryview(data))

    def _open(self) -> None:
        readers = self._endpoint.open_readers()
        for name, words in self._words.items():
            peer = self._peers.get(name)
            words[OUT], words[IN] = readers.get(name, -1), -1 if peer is None else peer.open_descriptor()

    def _close(self) -> None:
        frames, nbytes = self.traffic
        for name, words in self._words.items():
            counted = words.tolist()
            words[:] = _CLOSED
            if counted[FRAMES_IN] or counted[FRAMES_OUT]:
                stats = self._stats_of(name)
                stats.frames_in += counted[FRAMES_IN]
                stats.bytes_in += counted[BYTES_IN]
                stats.frames_out += counted[FRAMES_OUT]
                stats.bytes_out += counted[BYTES_OUT]
                frames += counted[FRAMES_IN] + counted[FRAMES_OUT]
                nbytes += counted[BYTES_IN] + counted[BYTES_OUT]
        self.traffic = frames, nbytes


assert len(_CLOSED) == CHANNEL
