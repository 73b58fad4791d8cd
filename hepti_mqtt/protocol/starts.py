"""Which start of a process holds its name: order without clocks.

Every process retains a status at the broker. A new start reads the last one and takes the next term, so of two starts
the greater `ids.Start` is the newer. Where the broker has lost its state, or two start in the same moment, terms may
repeat; then one of both still wins, and both find the same one.
"""

from __future__ import annotations

from math import inf
from typing import Final, Literal

from hepti_mqtt.ids import Start
from hepti_mqtt.protocol.messages import Status
from hepti_mqtt.protocol.plausible import MAX_TERM

INSIST_S: Final = 10.0  # within which a process that is there contradicts again; agents that start do so after 2 s

Verdict = Literal["ours", "contradict", "taken"]


def next_term(last: Status | None) -> int:
    """Return the term of a start after the last retained status; at the end of the range boots decide."""
    return min((0 if last is None else last.term) + 1, MAX_TERM)


class NameHolder:
    """A running start: it says what to do about each status that appears on its own topic.

    A newer start takes the name over. A single status of one may be late or forged, so it is contradicted first: a
    process that is there contradicts back. Where it takes our connection, too, any status of it is enough: it is its
    will where we have taken the connection back.
    """

    def __init__(self, start: Start) -> None:
        self.start = start
        self._rival = 0  # boot of the newer start that was contradicted last
        self._until_s = self._lost_until_s = -inf

    def handle_loss(self, now: float) -> None:
        """Record that our connection was lost: a broker ends one when another process connects under its name."""
        self._lost_until_s = now + INSIST_S

    def handle(self, status: Status, now: float) -> Verdict:
        """Return "ours", "contradict" (publish our own status again) or "taken" (end, and leave the status alone)."""
        if status.boot == self.start.boot:
            return "contradict" if status.state == "offline" else "ours"
        if status.start < self.start:
            return "contradict"
        if now < self._lost_until_s:
            return "taken"
        if status.state == "offline":
            return "contradict"
        if status.boot == self._rival and now < self._until_s:
            return "taken"
        self._rival, self._until_s = status.boot, now + INSIST_S
        return "contradict"
