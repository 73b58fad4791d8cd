"""The order of starts of processes with the same name, without clocks.

Each process retains a status at the broker. A new start reads this status and takes the next term, so a newer start has
a greater `ids.Start`. Terms may repeat if the broker lost its state or two processes start simultaneously; then the
greater boot wins, and both processes agree on it.
"""

from __future__ import annotations

from math import inf
from typing import Final, Literal

from hepti_mqtt.core.ids import Start
from hepti_mqtt.protocol.messages import Status
from hepti_mqtt.protocol.plausible import MAX_TERM

INSIST_S: Final = 10.0  # limit for a running rival's second status; starting agents need 2 s

Verdict = Literal["ours", "contradict", "taken"]


def next_term(last: Status | None) -> int:
    """Return the term after the retained status; at the end of the range boots decide."""
    return min((0 if last is None else last.term) + 1, MAX_TERM)


class NameHolder:
    """A running start's reaction to each status on its own topic.

    A newer start takes over the name. Its first status may be late or forged, so we contradict it, and a running rival
    contradicts us again. If our connection was lost too, its first status is enough: the rival connected as our client,
    or its will shows that we have disconnected the rival.
    """

    def __init__(self, start: Start) -> None:
        self.start = start
        self._rival = 0  # boot of the last contradicted start
        self._until_s = self._lost_until_s = -inf

    def handle_loss(self, now: float) -> None:
        """Note a lost connection: the broker closes it if another process connects with our client id."""
        self._lost_until_s = now + INSIST_S

    def handle(self, status: Status, now: float) -> Verdict:
        """Return "ours", "contradict" (publish our status again) or "taken" (end without publishing a status)."""
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
