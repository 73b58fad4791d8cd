"""Devices' last words, held back for a moment: a broker that ends says them of everybody, and nobody is gone."""

from __future__ import annotations

from typing import Final

from hepti_mqtt.runtime.planner.commands import CoordinatorCommand
from hepti_mqtt.runtime.planner.coordinator import CoordinatorSession
from hepti_mqtt.runtime.planner.events import Connection, CoordinatorEvent, DeviceStatus, Tick

HELD_S: Final = 0.2  # between a broker's last words and the end of our own connection, at the most
BACK_S: Final = 3.0  # in which devices meet a broker again that has retained that they are gone


class Wills:
    """Hands events to a session, last words of devices a little later.

    A device that says meanwhile that it is online was never away. What the broker said before our own connection ended
    is forgotten: it says it again when it is back, if it holds.
    """

    def __init__(self, session: CoordinatorSession) -> None:
        self._session = session
        self._held: dict[str, tuple[float, DeviceStatus]] = {}
        self._back_by_s = float("-inf")

    def handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorCommand]:
        """Take one event and return the commands that follow from it, and from what was held back long enough."""
        out: list[CoordinatorCommand] = []
        if isinstance(event, DeviceStatus):
            self._held.pop(event.device, None)
            if event.status.state == "offline":
                self._held[event.device] = (max(now + HELD_S, self._back_by_s), event)
                return []
        elif isinstance(event, Connection):
            self._held.clear()
            self._back_by_s = now + BACK_S if event.online else self._back_by_s
        elif isinstance(event, Tick):
            for will in [will for due_s, will in self._held.values() if due_s <= now]:
                del self._held[will.device]
                out += self._session.handle(will, now)
        return out + self._session.handle(event, now)
