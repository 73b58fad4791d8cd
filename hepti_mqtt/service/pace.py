"""How a search makes room: a planner on a busy or a small machine answers requests while it looks for a better plan."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from hepti_mqtt.runtime.planner.commands import Solve

AGAIN: Final = 2.0  # times as long as a search had to wait for the processor it leaves that to others
SWITCH_S: Final = 0.0005  # of the interpreter: a search must not hold the session thread up for long
MOST_S: Final = 2.0  # of one pause


class Pace:
    """The pauses of searches beside requests.

    On a processor of its own a search has no pauses. Where it has to wait for its turn others wait for theirs because
    of it: a share of a core in a container, an agent on the same board. clock, computed: seconds that have passed, and
    that the calling thread has computed. wait: for so many seconds, or until no run is under way any more.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        computed: Callable[[], float] = time.thread_time,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        self._clock, self._computed = clock, computed
        self._unused = threading.Event()
        self._unused.set()
        self._wait = wait or self._unused.wait

    def serving(self, is_serving: bool) -> None:
        """Take whether runs are under way."""
        if is_serving:
            self._unused.clear()
        else:
            self._unused.set()

    def paced(self, command: Solve) -> Solve:
        """Return a search with pauses; one that requests wait for has none."""
        if command.hurried or command.running is None:
            return command
        return replace(command, question=replace(command.question, pause=self._pauses()))

    def _pauses(self) -> Callable[[], None]:
        last: tuple[float, float] | None = None

        def pause() -> None:
            nonlocal last
            if last is not None and not self._unused.is_set():
                waited = (self._clock() - last[0]) - (self._computed() - last[1])
                self._wait(min(AGAIN * max(waited, 0.0), MOST_S))
            last = self._clock(), self._computed()

        return pause
