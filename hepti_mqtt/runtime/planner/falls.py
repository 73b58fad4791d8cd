"""Devices that died twice soon after they were given a plan: most likely of it, so they do not get it a third time.

A control group that has less memory than the device says kills the agent as often as the same plan comes. Once is no
sign: a device that somebody restarts, alone at its site, must serve again at once. One that comes back with the boot
counter it had was only away, for want of a connection or of a core, and has not died of anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

YOUNG_S: Final = 30.0  # a device that dies so long after a plan came may have died of it
AGAIN_S: Final = 300.0  # the second time counts so long after the first
REST_S: Final = 60.0  # it gets less for so long, and for twice as long after each further time
MOST_S: Final = 3600.0
PART: Final = 0.75  # of the memory that the plan needed


@dataclass(slots=True)
class _Fall:
    most_bytes: int
    rest_s: float
    until_s: float
    forgotten_s: float


@dataclass(frozen=True, slots=True)
class _Gone:
    boot: int
    needed_bytes: int


class Falls:
    """The devices that died under young plans of one model; time is an argument."""

    def __init__(self) -> None:
        self._gone: dict[str, _Gone] = {}
        self._falls: dict[str, _Fall] = {}

    def gone(self, device: str, boot: int, needed_bytes: int, given_s: float, now: float) -> None:
        """Take it that a device is gone that was given a plan at `given_s`, for which it needed so many bytes."""
        if now - given_s <= YOUNG_S:
            self._gone[device] = _Gone(boot, needed_bytes)

    def back(self, device: str, boot: int, now: float) -> None:
        """Take it that a device is here: it died if this is another start of it."""
        gone = self._gone.pop(device, None)
        if gone is not None and gone.boot != boot:
            self._died(device, gone.needed_bytes, now)

    def _died(self, device: str, needed_bytes: int, now: float) -> None:
        before = self._falls.get(device)
        if before is None:
            self._falls[device] = _Fall(0, REST_S / 2, now, now + AGAIN_S)
            return
        rest_s = min(2 * before.rest_s, MOST_S)
        self._falls[device] = _Fall(int(PART * needed_bytes), rest_s, now + rest_s, now + rest_s + AGAIN_S)

    def most_bytes(self, now: float) -> dict[str, int]:
        """Return the memory that plans may need now, of the devices that get less."""
        return {device: fall.most_bytes for device, fall in self._falls.items() if now < fall.until_s}

    def rested(self, now: float) -> list[str]:
        """Return the devices that may get everything again, once; who stays up for long is as good as new."""
        over = [device for device, fall in self._falls.items() if now >= fall.forgotten_s]
        for device in over:
            del self._falls[device]
        out = [device for device, fall in self._falls.items() if now >= fall.until_s and fall.most_bytes]
        for device in out:
            self._falls[device].most_bytes = 0
        return out
