"""How a search makes room: a planner on a busy or a small machine answers requests while it looks for a better plan."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from hepti_mqtt.runtime.planner.commands import Solve

AGAIN: Final = 1.0  # times as long as a search had to wait for the processor it leaves that to others
MOST_S: Final = 2.0  # of one such pause
IN_HAND_S: Final = 0.25  # of one for the planner: it may be busy without an end, and a search must come to one
LOOKS_S: Final = 0.005  # until it is asked again whether the planner has something in hand
SWITCH_S: Final = 0.0005  # of the interpreter: a search must not hold the session thread up for long


class Pace:
    """The pauses of searches beside requests.

    A search does nothing while the planner has something in hand: reads, deals with or answers a request. Beside runs
    it has pauses where it had to wait for the processor itself, because others wait for theirs because of it: in a
    container with a share of a core, or with an agent on the same board. in_hand: whether threads of the planner have
    something to do. clock, computed: seconds that have passed, and that the calling thread has computed. sleep: for so
    many seconds; wait: for so many, or until no run is under way any more.
    """

    def __init__(
        self,
        in_hand: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        computed: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        self._in_hand, self._clock, self._computed, self._sleep = in_hand, clock, computed, sleep
        self._is_first = False
        self._unused = threading.Event()
        self._unused.set()
        self._wait = wait or self._unused.wait

    def first(self, act: Callable[[], None]) -> None:
        """Do something of the session thread, for which searches pause."""
        self._is_first = True
        try:
            act()
        finally:
            self._is_first = False

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
            until_s = self._clock() + IN_HAND_S
            while (self._is_first or self._in_hand()) and self._clock() < until_s:
                self._sleep(LOOKS_S)
            last = self._clock(), self._computed()

        return pause
