"""Frames that compiled code sends and receives, each for one row of a tape.

A frame is a head, which ends with the number of its run, and a body, an array of the run. Compiled code does not parse
it: `Tape.learn` sets the head that a row sends or expects. A frame that differs, is late or incomplete is left to
Python, with the bytes that were read or sent.

A channel is int64 [CHANNEL] in memory of the sockets' owner. A row has a descriptor, int64 [WORDS]. Its `msghdr` and
`iovec`s have the layout of 64-bit Linux.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.kernels.jit import helper, lowered
from hepti_mqtt.kernels.threads import CLOCK, _compiled_alone, _get, _now, _of_system, _put

# Places in a channel: descriptors of the sockets for sending to a peer and receiving from it, negative if Python must
# do so; then frames and their bytes without the packet's own head, sent and received.
OUT, IN, FRAMES_OUT, BYTES_OUT, FRAMES_IN, BYTES_IN, CHANNEL = 0, 1, 2, 3, 4, 5, 8

# Places in a descriptor: address of the channel, 0 for none; bytes of the head, of the body, of the frame without the
# packet's head; bytes that were sent or received; addresses of the run's number and of an arriving head; whether the
# array has arrived; address of the arriving body; `iovec`s of head and body; `msghdr`.
_AT, _HEAD, _BODY, _COUNTED, DONE_BYTES, _STAMP, _CAME, FILLED, PLACE, _IOV, _MESSAGE = *range(9), 9, 13
SENT_PLACE: Final = _IOV + 2  # of the body's address, in the descriptor of a row that sends
WORDS: Final = 20

# Places in a pool's `control`: number of the run; milliseconds to wait for a frame, 0 for none; the descriptor that
# ends a wait; nanoseconds that were waited, and those of all exchanges; bytes that were sent; two `pollfd`s.
RUN, PATIENCE, WAKE, WAITED, SPENT, SENT, _POLLS = *range(8, 14), 14

#: bytes of a body: larger ones would fill the kernel's memory while a device computes
LARGEST: Final = 1 << 18

_NOSIGNAL_DONTWAIT, _POLLIN, _WORD = 0x4040, 1, 8
Words = NDArray[np.int64]

_sendmsg: Final = lowered(_of_system("sendmsg", 3), _compiled_alone)
_readv: Final = lowered(_of_system("readv", 3), _compiled_alone)
_poll: Final = lowered(_of_system("poll", 3), _compiled_alone)
_differ: Final = lowered(_of_system("memcmp", 3), _compiled_alone)


class Peers(NamedTuple):
    """A run's data for the exchanges of a tape."""

    run_id: int
    #: descriptor that ends a wait
    wake: int
    #: longest wait for a frame, 0 for none
    patience_ms: int


NO_PEERS: Final = Peers(0, -1, 0)


def describe(words: Words, channel: int, head: bytes, nbytes: int, counted: int) -> Words:
    """Write a descriptor except the address of the body; return memory that must live as long as the descriptor.

    nbytes: of the body. counted: bytes of the frame that the channel counts.
    """
    padding = bytes(-len(head) % _WORD)  # so that a head ends with a whole word
    own = np.frombuffer(2 * (padding + head), np.int64).copy()  # the second one is for an arriving head
    second = own.__array_interface__["data"][0] + own.nbytes - len(head)
    first = second - own.nbytes // 2
    words[[_AT, _HEAD, _BODY, _COUNTED, DONE_BYTES]] = channel, len(head), nbytes, counted, 0
    words[[_STAMP, _CAME]] = first + len(head) - _WORD, second
    words[[_IOV, _IOV + 1, _IOV + 3]] = first, len(head), nbytes
    words[_MESSAGE : _MESSAGE + 7] = 0, 0, words.__array_interface__["data"][0] + _WORD * _IOV, 2, 0, 0, 0
    return own


def sent_head(words: Words, own: Words) -> bytes:
    """Return the head that was sent; own: what `describe` returned."""
    size = int(words[_HEAD])
    return own.tobytes()[-size % _WORD :][:size]


def came(words: Words, own: Words, body: memoryview) -> bytes:
    """Return the received bytes of an incomplete or other frame."""
    got, size = int(words[DONE_BYTES]), int(words[_HEAD])
    return own.tobytes()[-size:][:got] + body[: max(got - size, 0)]


@helper
def _send(row: int, control: int) -> Any:
    """Send a frame; return whether all bytes were sent."""
    channel = _get(row + 8 * _AT)
    _put(row + 8 * DONE_BYTES, 0)
    if channel == 0 or _get(channel + 8 * OUT) < 0:
        return False
    _put(_get(row + 8 * _STAMP), _get(control + 8 * RUN))
    size = _get(row + 8 * _HEAD) + _get(row + 8 * _BODY)
    sent = _sendmsg(_get(channel + 8 * OUT), row + 8 * _MESSAGE, _NOSIGNAL_DONTWAIT)
    if sent != size:
        _put(row + 8 * DONE_BYTES, max(sent, 0))
        _put(channel + 8 * OUT, -1)  # later frames wait for the rest
        return False
    _put(channel + 8 * FRAMES_OUT, _get(channel + 8 * FRAMES_OUT) + 1)
    _put(channel + 8 * BYTES_OUT, _get(channel + 8 * BYTES_OUT) + _get(row + 8 * _COUNTED))
    _put(control + 8 * SENT, _get(control + 8 * SENT) + size)
    return True


@helper
def _wait(descriptor: int, control: int) -> Any:
    """Wait for bytes to read; return whether there are any."""
    patience = _get(control + 8 * PATIENCE)
    if patience == 0:
        return False
    _put(control + 8 * _POLLS, descriptor | (_POLLIN << 32))
    _put(control + 8 * (_POLLS + 1), _get(control + 8 * WAKE) | (_POLLIN << 32))
    begun = _now(control + 8 * CLOCK)
    ready = _poll(control + 8 * _POLLS, 2, patience)
    _put(control + 8 * WAITED, _get(control + 8 * WAITED) + _now(control + 8 * CLOCK) - begun)
    return ready > 0 and (_get(control + 8 * _POLLS) >> 48) != 0


@helper
def _receive(row: int, control: int) -> Any:
    """Receive a frame, waiting for it; return whether its array has arrived."""
    if _get(row + 8 * FILLED):
        return True
    channel = _get(row + 8 * _AT)
    _put(row + 8 * DONE_BYTES, 0)
    if channel == 0 or _get(channel + 8 * IN) < 0:
        return False
    descriptor, iov = _get(channel + 8 * IN), row + 8 * _IOV
    head, stamp, place = _get(row + 8 * _HEAD), _get(row + 8 * _STAMP), _get(row + 8 * _CAME)
    size = head + _get(row + 8 * _BODY)
    _put(stamp, _get(control + 8 * RUN))
    got = 0
    may_wait = True
    while got < size:
        _put(iov, place + min(got, head))
        _put(iov + 8, max(head - got, 0))
        _put(iov + 16, _get(row + 8 * PLACE) + max(got - head, 0))
        _put(iov + 24, min(size - got, size - head))
        taken = _readv(descriptor, iov, 2)
        if taken <= 0:
            # No bytes, the end of the stream or an error: Python meets the latter two again.
            if taken == 0 or not may_wait or not _wait(descriptor, control):
                return False
            may_wait = False
            continue
        may_wait = True
        if got < head and _differ(stamp + 8 - head, place, min(got + taken, head)) != 0:
            _put(row + 8 * DONE_BYTES, got + taken)
            return False
        got += taken
        _put(row + 8 * DONE_BYTES, got)
    _put(channel + 8 * FRAMES_IN, _get(channel + 8 * FRAMES_IN) + 1)
    _put(channel + 8 * BYTES_IN, _get(channel + 8 * BYTES_IN) + _get(row + 8 * _COUNTED))
    return True


@helper
def exchange(row: int, sends: bool, control: int) -> Any:
    """Send or receive a frame; return whether it is complete. row: address of the descriptor."""
    begun = _now(control + 8 * CLOCK)
    is_done = _send(row, control) if sends else _receive(row, control)
    _put(control + 8 * SPENT, _get(control + 8 * SPENT) + _now(control + 8 * CLOCK) - begun)
    return is_done
