"""Ways to change the bytes of a message."""

from __future__ import annotations

import random
from collections.abc import Callable


def _flip(data: bytearray, pick: random.Random) -> bytes:
    for _ in range(pick.choice((1, 1, 2, 8))):
        if data:
            data[pick.randrange(len(data))] ^= 1 << pick.randrange(8)
    return bytes(data)


def _cut(data: bytearray, pick: random.Random) -> bytes:
    return bytes(data[: pick.randrange(len(data) + 1)])


def _longer(data: bytearray, pick: random.Random) -> bytes:
    at = pick.randrange(len(data) + 1)
    return bytes(data[:at]) + pick.randbytes(pick.choice((1, 4, 64, 4096))) + bytes(data[at:])


def _extreme(data: bytearray, pick: random.Random) -> bytes:
    """Put the largest and smallest numbers where others were."""
    number = pick.choice((b"\xff" * 8, b"\x00" * 8, b"\x7f" + b"\xff" * 7, b"9" * 8, b"-1"))
    at = pick.randrange(len(data) + 1)
    return bytes(data[:at]) + number + bytes(data[at + len(number) :])


def _again(data: bytearray, _pick: random.Random) -> bytes:
    return bytes(data)


MUTATIONS: tuple[Callable[[bytearray, random.Random], bytes], ...] = (_flip, _flip, _cut, _longer, _extreme, _again)
