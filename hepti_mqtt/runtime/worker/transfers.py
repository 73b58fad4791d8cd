"""What compiled code needs to exchange a stretch's tensors with peers itself, learned while Python does it.

Python sends and checks each frame of a Program's first runs. From then on, rows of the tape send the heads that it has
sent, and expect those that it has checked; what else a peer sends goes back to Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from numpy.typing import NDArray

from hepti_mqtt.kernels.calls import Scratch
from hepti_mqtt.kernels.tape import Tape
from hepti_mqtt.kernels.transfers import LARGEST
from hepti_mqtt.program import Recv, Send, Slot
from hepti_mqtt.protocol.frames import HEADER_BYTES


class Sockets(Protocol):
    """The connections to peers, for compiled code of the thread that holds them."""

    @property
    def version(self) -> int:
        """Return a number that changes with what `route` returns."""

    @property
    def wake(self) -> int:
        """Return the descriptor that is readable when the thread is wanted."""

    def hold(self) -> AbstractContextManager[bool]:
        """Keep other threads off; gives False if one of them waits already."""

    def channel(self, peer: str) -> int:
        """Return the address of the channel to a peer (`kernels.transfers`), which stays."""

    def route(self, peer: str, topic: str, nbytes: int) -> bytes | None:
        """Return what stands before a payload of so many bytes; None if it does not go straight to this peer alone."""

    def keep(self, peer: str, parts: Sequence[bytes | NDArray[Any]], sent: int) -> None:
        """Send the rest of a frame, of which some bytes were sent."""

    def give_back(self, peer: str, data: bytes) -> None:
        """Take what was read of a peer."""


class KnownTransfer:
    """A row that sends to one peer, or receives from one."""

    __slots__ = ("head", "op", "owner", "peer", "row", "topic")

    def __init__(self, owner: StretchTransfers, row: int, op: Send | Recv, peer: str) -> None:
        self.owner, self.row, self.op, self.peer = owner, row, op, peer
        #: of a Send the frame's header and its topic; of a Recv the whole head; empty before they are known
        self.head, self.topic = b"", ""

    def learn(self, head: bytes, topic: str = "") -> None:
        """Take what Python has sent, or has received and checked."""
        if not self.head and self.nbytes <= LARGEST:
            self.head, self.topic, self.owner.version = head, topic, -1

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
        #: of the sockets for which the tape has learned the heads; -1 for none
        self.version = 0
        #: of each array the last row that reads it
        self.last_rows: Mapping[Slot | Scratch, int] = {}
        #: whether compiled code receives all of it
        self.complete = False

    def apply(self, sockets: Sockets) -> None:
        """Let the tape learn all that is known, and forget what is not so any more."""
        if self.version == sockets.version:
            return
        self.version = sockets.version
        for each in (*self.sends.values(), *self.receives.values()):
            before = sockets.route(each.peer, each.topic, HEADER_BYTES + each.nbytes) if each.topic else b""
            if each.head and before is not None:
                counted = HEADER_BYTES + each.nbytes
                self.tape.learn(each.row, sockets.channel(each.peer), before + each.head, counted)
            else:
                self.tape.forget(each.row)
        self.complete = all(each.head for each in self.receives.values())
