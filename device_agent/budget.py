"""The budget of a device's background work: loads, Programs of coming plans, compiling, measuring again."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from math import inf
from typing import Final, NamedTuple

BACKGROUND_SHARE: Final = 0.05  # of the time that runs take, unless the planner allows a load more
KEPT_S: Final = 0.02  # most that may be saved up: some ten steps
IN_USE_S: Final = 5.0  # longest time after a run in which the next one is expected
MAX_PAUSE_S: Final = 0.02  # longest pause of waiting work
NICE: Final = 10


class _State(NamedTuple):
    """The session thread's state since `since_s`; served_s: of earlier runs. gap_s: between the last two runs."""

    running: bool = False
    waiting: bool = True
    since_s: float = -inf
    served_s: float = 0.0
    gap_s: float = inf


class Budget:
    """The one budget of all background work; time is an argument, in seconds of one clock.

    Work is free while no run is active, and while all runs wait for other devices. Otherwise it gets `share` of the
    runs' time. quota_cores: cores of the processor's quota, None without a quota. Under a quota, work in a pause takes
    processor time from the run after the pause. So it is free only if no run is expected soon, and a second of it
    counts as 1 / quota_cores seconds. `note` and `expect_run` are for the thread that runs ops, other methods for any
    thread.
    """

    def __init__(self, quota_cores: float | None = None) -> None:
        self._throttled = quota_cores is not None
        self.cores = min(quota_cores or 1.0, 1.0)  # cores of one thread
        #: Share of the runs' time that background work may take; the loader raises it for a load that has a share.
        self.share = BACKGROUND_SHARE
        #: Whether weights are loading: the compiling of unneeded kernels waits for the end of the load.
        self.loading = False
        self._state = _State()  # replaced as a whole, so that other threads read a consistent one
        self._lock = threading.Lock()
        self._left_s, self._counted_s = 0.0, 0.0

    def note(self, running: bool, waiting: bool, now: float) -> None:
        """Note whether runs are active, and whether all of them wait for other devices."""
        state = self._state
        if running != state.running:
            gap_s = now - state.since_s if running else state.gap_s
            self._state = _State(running, waiting, now, self._served_s(state, now), gap_s)
        elif waiting != state.waiting:
            self._state = state._replace(waiting=waiting)

    def expect_run(self, now: float) -> None:
        """Expect the first run of a plan soon, as if a run had just ended."""
        if not self._state.running:
            self._state = self._state._replace(since_s=now)

    @property
    def running(self) -> bool:
        """Return whether runs are active."""
        return self._state.running

    def pause_s(self, now: float) -> float:
        """Return 0 if a step of background work may begin now, else the seconds until the next try."""
        if self._is_free(now):
            return 0.0
        with self._lock:
            left_s = self._refill(now)
        return 0.0 if left_s > 0 else min(max(-left_s / self.share, 1e-3), MAX_PAUSE_S)

    def spend(self, seconds: float, now: float) -> None:
        """Charge the processor time of work that has just ended, unless it was free."""
        if not self._is_free(now):
            with self._lock:
                self._left_s = self._refill(now) - seconds / self.cores

    def last_run_s(self, now: float) -> float:
        """Return the last time at which a run was active."""
        state = self._state
        return now if state.running else state.since_s

    def is_unused(self, now: float) -> bool:
        """Return whether no run is active or expected soon, so that work may use the whole device."""
        return now - self.last_run_s(now) > IN_USE_S

    def _is_free(self, now: float) -> bool:
        state = self._state
        if self._throttled:
            return not state.running and now - state.since_s > _expected_s(state)
        return not state.running or state.waiting

    def _refill(self, now: float) -> float:
        served_s = self._served_s(self._state, now)
        self._left_s = min(self._left_s + self.share * (served_s - self._counted_s), KEPT_S)
        self._counted_s = served_s
        return self._left_s

    def _served_s(self, state: _State, now: float) -> float:
        """Return the time of runs so far; with a quota the time between two of them counts, too."""
        if state.running:
            return state.served_s + now - state.since_s
        between_s = min(now - state.since_s, _expected_s(state)) if self._throttled and state.since_s > -inf else 0.0
        return state.served_s + between_s


def _expected_s(state: _State) -> float:
    """Return for how long after a run the next one is expected: twice the last gap."""
    return min(2 * state.gap_s, IN_USE_S)


def give_way() -> None:
    """Lower the priority of the calling thread and its children."""
    if sys.platform != "linux":
        return  # other systems have no priority of a thread
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
