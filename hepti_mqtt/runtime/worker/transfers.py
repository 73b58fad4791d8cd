"""Frame headers and socket channels by which compiled code exchanges a stretch's tensors with peers.

Python sends and checks each frame of a Program's first runs. Later, rows of the tape send the same headers, and expect
the checked headers; other frames go back to Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.core.program import Recv, Send, Slot
from hepti_mqtt.kernels.calls import Scratch
from hepti_mqtt.kernels.tape import Tape
from hepti_mqtt.kernels.transfers import LARGEST
from hepti_mqtt.protocol.frames import HEADER_BYTES, HEADER_PREFIX_BYTES, run_id_bytes
from hepti_mqtt.protocol.keys import UNKEYED, FrameKey, header_tags


class Sockets(Protocol):
    """The connections to peers, for compiled code of the thread that holds the lock."""

    @property
    def version(self) -> int:
        """Return a number that changes whenever a result of `route` changes."""

    @property
    def wake(self) -> int:
        """Return the file descriptor that becomes readable to interrupt the thread."""

    def hold(self) -> AbstractContextManager[bool]:
        """Lock out other threads; gives False if another thread waits."""

    def channel(self, peer: str) -> int:
        """Return the constant address of the channel to a peer (`kernels.transfers`)."""

    def route(self, peer: str, topic: str, nbytes: int) -> bytes | None:
        """Return the packet header before a payload; None unless the topic goes directly to this peer alone."""

    def keep(self, peer: str, parts: Sequence[bytes | NDArray[Any]], sent: int) -> None:
        """Send the rest of a frame after `sent` bytes."""

    def give_back(self, peer: str, data: bytes) -> None:
        """Take data that was read from a peer."""


class KnownTransfer:
    """A row that sends to a peer, or receives from one."""

    __slots__ = ("head", "key", "op", "owner", "peer", "row", "topic")

    def __init__(self, owner: StretchTransfers, row: int, op: Send | Recv, peer: str) -> None:
        self.owner, self.row, self.op, self.peer = owner, row, op, peer
        #: Send: frame header and topic. Recv: whole head. Empty before the first exchange by Python.
        self.head, self.topic = b"", ""
        self.key = UNKEYED  #: key of its tags

    def learn(self, head: bytes, key: FrameKey, topic: str = "") -> None:
        """Record the first head that Python sent, or received and checked, unless tags cover arrays."""
        if not self.head and self.nbytes <= LARGEST and not (key.key and key.checked == "whole"):
            self.head, self.key, self.topic = head, key, topic
            self.owner.changed.append(self)

    @property
    def nbytes(self) -> int:
        """Return the bytes of its array."""
        return self.owner.tape.calls[self.row].operands()[0].nbytes


class StretchTransfers:
    """The exchanges of one stretch, in the order of its rows."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.sends: dict[int, KnownTransfer] = {}
        self.receives: dict[int, KnownTransfer] = {}
        self.version = 0  #: version of the sockets that the tape's heads are for; -1 for none
        self.changed: list[KnownTransfer] = []  #: transfers whose head is not in the tape yet
        self.last_rows: Mapping[Slot | Scratch, int] = {}  #: last row that reads each array
        self.complete = False  #: compiled code receives all tensors of the stretch
        #: functions from a run id to its tag, and the words of the heads to write it to
        self.tags: list[tuple[Callable[[bytes], bytes], NDArray[np.int64]]] = []
        self.tagged = -1  #: run id of the current tags

    def forget(self) -> None:
        """Forget all heads."""
        self.version = -1
        self.changed.clear()
        for each in (*self.sends.values(), *self.receives.values()):
            each.head = b""

    def apply(self, sockets: Sockets) -> None:
        """Write new heads to the tape, or all heads if routes have changed."""
        changed = self.changed
        if self.version != sockets.version:
            self.version, changed = sockets.version, [*self.sends.values(), *self.receives.values()]
            self.tags.clear()
        if not changed:
            return
        self.changed, self.tagged = [], -1
        for each in changed:
            nbytes = HEADER_BYTES + each.nbytes
            packet_header = sockets.route(each.peer, each.topic, nbytes) if each.topic else b""
            if each.head and packet_header is not None:
                words = self.tape.learn(each.row, sockets.channel(each.peer), packet_header + each.head, nbytes)
                if each.key.key:
                    prefix = each.head[-HEADER_BYTES:][:HEADER_PREFIX_BYTES]
                    self.tags.append((header_tags(each.key, prefix), words))
            else:
                self.tape.forget(each.row)
        self.complete = all(each.head for each in self.receives.values())

    def tag(self, run_id: int) -> None:
        """Write the tags of a run into the heads."""
        if self.tags and run_id != self.tagged:
            self.tagged, number = run_id, run_id_bytes(run_id)
            for tag, words in self.tags:
                words[-2] = int.from_bytes(tag(number), "little", signed=True)
