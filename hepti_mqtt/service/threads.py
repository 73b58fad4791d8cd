"""Threads that serve clients in turn, and the throttle of plan searches."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final, Generic, NamedTuple, TypeVar

from hepti_mqtt.planner.price import Budget
from hepti_mqtt.runtime.coordinator.interface import Solve
from hepti_mqtt.runtime.coordinator.search_kinds import SEARCHES

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


class Window(NamedTuple):
    """Limits of items in progress, from `take` to `close`."""

    client: int  #: of one client
    group: int  #: of all clients of one group (model)


@dataclass(slots=True)
class _Line(Generic[Item]):
    """The items of one client."""

    group: str
    items: deque[tuple[Item, int]] = field(default_factory=deque)  #: waiting items with their bytes, oldest first
    nbytes: int = 0
    busy: bool = False  #: an item is being processed
    in_progress: int = 0  #: items from `take` to `close`


class RoundRobin(Generic[Item]):
    """Bounded queues of clients, served in turn; a client's items are taken in order, one at a time.

    The first item of an idle client waits for at most one item of each other client. Over the limits, the newest item
    of the client with the largest share is dropped. limit, limit_bytes: of all waiting items. window: of items in
    progress; None closes each item when it is done.
    """

    def __init__(self, limit: float, limit_bytes: float, window: Window | None = None) -> None:
        self._limit, self._limit_bytes, self._window = limit, limit_bytes, window
        self._lines: dict[str, _Line[Item]] = {}
        self._next: OrderedDict[str, None] = OrderedDict()  # clients with an admitted next item
        self._full: dict[str, OrderedDict[str, None]] = {}  # clients that wait for their group's window
        self._in_progress: Counter[str] = Counter()  # by group
        self._count = self._nbytes = self._busy = 0

    @property
    def idle(self) -> bool:
        """Return whether no item is being processed and no item may be taken."""
        return not (self._busy or self._next)

    def put(self, client: str, item: Item, nbytes: int, group: str = "") -> list[Item]:
        """Add an item of a client; return the items, of any client, dropped for it."""
        line = self._lines.setdefault(client, _Line(group))
        line.items.append((item, nbytes))
        self._account(line, 1, nbytes)
        self._admit(client, line)
        refused = []
        while self._count > self._limit or self._nbytes > self._limit_bytes:
            refused.append(self._drop(client))
        return refused

    def take(self) -> tuple[str, Item] | None:
        """Return a client and its next item, None if there is none; its other items wait until `done`."""
        while self._next:
            client, _ = self._next.popitem(last=False)
            line = self._lines[client]
            if self._window is not None and self._in_progress[line.group] >= self._window.group:
                self._full.setdefault(line.group, OrderedDict())[client] = None
                continue
            item, nbytes = line.items.popleft()
            self._account(line, -1, -nbytes)
            line.busy = True
            line.in_progress += 1
            self._in_progress[line.group] += 1
            self._busy += 1
            return client, item
        return None

    def done(self, client: str) -> None:
        """Record that a client's item is done, and move the client to the end of the turn."""
        line = self._lines[client]
        line.busy = False
        self._busy -= 1
        if self._window is None:
            self.close(client)
        else:
            self._admit(client, line)

    def close(self, client: str) -> None:
        """Close an item of a client, which makes room in the windows."""
        line = self._lines[client]
        line.in_progress -= 1
        self._in_progress[line.group] -= 1
        if line.group in self._full:
            self._next[self._full[line.group].popitem(last=False)[0]] = None
            if not self._full[line.group]:
                del self._full[line.group]
        self._admit(client, line)

    def _admit(self, client: str, line: _Line[Item]) -> None:
        """Give a client its turn if it waits and its window allows; forget a client without items."""
        if not (line.items or line.busy or line.in_progress):
            del self._lines[client]
            return
        waits = client in self._full.get(line.group, ())
        has_room = self._window is None or line.in_progress < self._window.client
        if line.items and not line.busy and has_room and not waits:
            self._next.setdefault(client)

    def _account(self, line: _Line[Item], count: int, nbytes: int) -> None:
        line.nbytes += nbytes
        self._count += count
        self._nbytes += nbytes

    def _drop(self, newcomer: str) -> Item:
        """Drop the newest item of the client with the largest share of the limits; among equals the newcomer's."""

        def part(client: str) -> tuple[float, bool]:
            line = self._lines[client]
            return max(len(line.items) / max(self._limit, 1), line.nbytes / self._limit_bytes), client == newcomer

        client = max(self._lines, key=part)
        line = self._lines[client]
        item, nbytes = line.items.pop()
        self._account(line, -1, -nbytes)
        if not line.items:
            self._next.pop(client, None)
            waiting = self._full.get(line.group, OrderedDict())
            waiting.pop(client, None)
            if not waiting:
                self._full.pop(line.group, None)
            self._admit(client, line)
        return item


Act = Callable[[], None]


class _Task(NamedTuple):
    act: Act
    refuse: Act


class FairExecutor:
    """Threads that serve clients in turn; each client has at most one running task.

    limit, limit_bytes: of all waiting tasks. guarded: runs a task and catches every exception. window: of tasks in
    progress, which `close_task` ends; None ends each with its `act`.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        guarded: Callable[[Act], None],
        limit: float = inf,
        limit_bytes: float = inf,
        window: Window | None = None,
    ) -> None:
        self._guarded = guarded
        self._turns: RoundRobin[_Task] = RoundRobin(limit, limit_bytes, window)
        self._changed = threading.Condition()  # guards the turns
        self._closed = False
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(threads)]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Start no further task; does not wait for running ones."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def submit(self, client: str, act: Act, nbytes: int, refuse: Act, group: str = "") -> None:
        """Queue `act` for the client's turn. If the queue overflows, call `refuse` of the busiest client's newest task.

        This may be another client's task, so `refuse` must not block. group: of the client's window.
        """
        with self._changed:
            refused = self._turns.put(client, _Task(act, refuse), nbytes, group)
            self._changed.notify()
        for task in refused:
            task.refuse()

    def submit_or_run(self, client: str, act: Act, at_once: bool = False) -> None:
        """Run `act` in the client's turn; for executors without limits.

        at_once: run it on this thread if the executor is idle, as waking a thread takes longer than a small task.
        """
        if at_once and self.idle:
            self._guarded(act)
        else:
            self.submit(client, act, 0, lambda: None)

    def close_task(self, client: str) -> None:
        """End a task in progress of a client; the windows have room for another one."""
        with self._changed:
            self._turns.close(client)
            self._changed.notify()

    @property
    def idle(self) -> bool:
        """Return whether no task is running and no task may start."""
        with self._changed:
            return self._turns.idle

    def step(self, wait: bool = False) -> bool:
        """Run one task on this thread; return False if there is none, with `wait` only after `close`."""
        with self._changed:
            while (taken := self._turns.take()) is None and wait and not self._closed:
                self._changed.wait()
            if taken is None or self._closed:
                return False
        client, task = taken
        self._guarded(task.act)
        with self._changed:
            self._turns.done(client)
            self._changed.notify()
        return True

    def _work(self) -> None:
        while self.step(wait=True):
            continue


# ----------------------------------------------------------------------------------------------------------------------
# Throttle plan searches so that requests keep the CPU on a small machine.


AGAIN: Final = 1.0  # pause of a search, relative to its wait for the CPU
MOST_S: Final = 2.0  # longest such pause
IN_HAND_S: Final = 0.25  # longest pause while the planner is busy, so that a search ends in any case
SEARCH_S: Final = 10.0  # processor time of a search during requests; then it returns its best plan so far
LOOKS_S: Final = 0.005  # between two checks whether the planner is busy
SWITCH_S: Final = 0.0005  # the interpreter's thread switch interval: a search must not delay the session thread


class SearchThrottle:
    """Pauses of searches in favour of requests.

    A search pauses while the planner reads, handles or answers a request. During runs it also pauses for as long as it
    has waited for the CPU, because agents on the same cores then wait for it, too. in_hand: whether the planner's
    threads have work. clock, computed: wall and thread CPU time in seconds. sleep: for a time; wait: for a time or
    until the last run ends.
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
        self._is_session_busy = False
        self._unused = threading.Event()
        self._unused.set()
        self._wait = wait or self._unused.wait

    def run_before_searches(self, act: Callable[[], None]) -> None:
        """Run an action of the session thread, for which searches pause."""
        self._is_session_busy = True
        try:
            act()
        finally:
            self._is_session_busy = False

    def set_serving(self, is_serving: bool) -> None:
        """Set whether runs are in progress."""
        if is_serving:
            self._unused.clear()
        else:
            self._unused.set()

    def throttled(self, command: Solve) -> Solve:
        """Add pauses to a search, unless no plan is active or its kind has a budget."""
        if command.active is None or SEARCHES[command.kind].budget_s < inf:
            return command
        budget = Budget(SEARCH_S, self._computed)
        return replace(command, question=replace(command.question, pause=self._pauses(), budget=budget))

    def _pauses(self) -> Callable[[], None]:
        last: tuple[float, float] | None = None

        def pause() -> None:
            nonlocal last
            if last is not None and not self._unused.is_set():
                waited = (self._clock() - last[0]) - (self._computed() - last[1])
                self._wait(min(AGAIN * max(waited, 0.0), MOST_S))
            until_s = self._clock() + IN_HAND_S
            while (self._is_session_busy or self._in_hand()) and self._clock() < until_s:
                self._sleep(LOOKS_S)
            last = self._clock(), self._computed()

        return pause


def run_into(future: Future[Outcome], act: Callable[[], Outcome]) -> None:
    """Settle a future with the result or error of an action."""
    try:
        future.set_result(act())
    except BaseException as error:
        future.set_exception(error)
