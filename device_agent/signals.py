"""How an agent is told to end."""

from __future__ import annotations

import signal
import threading

from device_agent.events import AgentEvent, Stop
from hepti_mqtt.config.ending import farewells
from hepti_mqtt.transport import Inbox


class ToldToEnd(BaseException):
    """The device is told to end before its session thread runs.

    No KeyboardInterrupt: one that passes through `exec`, as in many an import, makes Python kill itself with SIGINT in
    the end, whoever has caught it.
    """


class Signals:
    """Signals to end: an event for the session thread once it runs, an interrupt before, nothing while all ends.

    An interrupt is lost where it falls into a callback, of a weak reference for example, so what was asked is kept too.
    """

    def __init__(self) -> None:
        self._inbox: Inbox[AgentEvent] | None = None
        self._asked = self._ending = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in farewells():
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def deliver_to(self, inbox: Inbox[AgentEvent]) -> None:
        """From now on the session thread ends in its own time."""
        self._inbox = inbox
        if self._asked:
            inbox.post(Stop())

    def check(self) -> None:
        """Interrupt again if the device was told to end before the session thread runs."""
        if self._asked:
            raise ToldToEnd

    def ending(self) -> None:
        """From now on the device ends: whoever says so again interrupts nothing."""
        self._ending = True

    def _handle(self, *_: object) -> None:
        self._asked = True
        if self._inbox is not None:
            self._inbox.post(Stop())
        elif not self._ending:
            raise ToldToEnd
