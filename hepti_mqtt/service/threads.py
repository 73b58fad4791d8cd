"""Work of many clients in turn: each has one thing done, then the next client has one."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final, Generic, NamedTuple, TypeVar

from hepti_mqtt.runtime.coordinator.interface import Solve

Item = TypeVar("Item")


@dataclass(slots=True)
class _Line(Generic[Item]):
    """What one client has waiting, the oldest first, with the bytes of each."""

    items: deque[tuple[Item, int]] = field(default_factory=deque)
    nbytes: int = 0
    busy: bool = False


class RoundRobin(Generic[Item]):
    """Bounded queues of clients, served in turn; a client's things are done in their order, one at a time.

    So a client that has nothing waiting is served after at most one thing of each other, and with two workers at once
    if only one other has work. What there is no room for is the newest of whoever has most, be it the newcomer's.
    limit, limit_bytes: of everything that waits.
    """

    def __init__(self, limit: float, limit_bytes: float) -> None:
        self._limit, self._limit_bytes = limit, limit_bytes
        self._lines: dict[str, _Line[Item]] = {}
        self._next: OrderedDict[str, None] = OrderedDict()  # clients that wait and are not being served
        self._count = self._nbytes = 0

    @property
    def idle(self) -> bool:
        """Return whether nothing waits and nothing that was taken is not done."""
        return not self._lines

    def put(self, client: str, item: Item, nbytes: int) -> list[Item]:
        """Let an item of a client wait; return those, of anybody, that there is no room for."""
        line = self._lines.setdefault(client, _Line())
        line.items.append((item, nbytes))
        self._account(line, 1, nbytes)
        if not line.busy:
            self._next.setdefault(client)
        refused = []
        while self._count > self._limit or self._nbytes > self._limit_bytes:
            refused.append(self._drop(client))
        return refused

    def take(self) -> tuple[str, Item] | None:
        """Return the next item and its client, of whom nothing else is taken until `done`; None if nobody can be."""
        if not self._next:
            return None
        client, _ = self._next.popitem(last=False)
        line = self._lines[client]
        item, nbytes = line.items.popleft()
        self._account(line, -1, -nbytes)
        line.busy = True
        return client, item

    def done(self, client: str) -> None:
        """Note that what was taken of a client is done: it is the last in turn now."""
        line = self._lines[client]
        line.busy = False
        if line.items:
            self._next[client] = None
        else:
            del self._lines[client]

    def _account(self, line: _Line[Item], count: int, nbytes: int) -> None:
        line.nbytes += nbytes
        self._count += count
        self._nbytes += nbytes

    def _drop(self, newcomer: str) -> Item:
        """Take back the newest item of the client with the largest part of the room; among equals the newcomer's."""

        def part(client: str) -> tuple[float, bool]:
            line = self._lines[client]
            return max(len(line.items) / max(self._limit, 1), line.nbytes / self._limit_bytes), client == newcomer

        client = max(self._lines, key=part)
        line = self._lines[client]
        item, nbytes = line.items.pop()
        self._account(line, -1, -nbytes)
        if not line.items:
            self._next.pop(client, None)
            if not line.busy:
                del self._lines[client]
        return item


# ----------------------------------------------------------------------------------------------------------------------
# Threads that work for clients in turn.


Act = Callable[[], None]


class _Task(NamedTuple):
    act: Act
    refuse: Act


class FairExecutor:
    """Some threads that do what is offered, one thing of each client in turn and at a time.

    limit, limit_bytes: of everything that waits. guarded: does one thing, and lets no exception through.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        guarded: Callable[[Act], None],
        limit: float = inf,
        limit_bytes: float = inf,
    ) -> None:
        self._guarded = guarded
        self._turns: RoundRobin[_Task] = RoundRobin(limit, limit_bytes)
        self._changed = threading.Condition()  # guards the turns
        self._closed = False
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(threads)]

    def start(self) -> None:
        """Begin to work."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Begin nothing more; what is being done is not waited for."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def submit(self, client: str, act: Act, nbytes: int, refuse: Act) -> None:
        """Do something for a client when its turn comes; or call `refuse`, now or later, if there is no room for it.

        That of others may be called here too, so it must not block.
        """
        with self._changed:
            refused = self._turns.put(client, _Task(act, refuse), nbytes)
            self._changed.notify()
        for errand in refused:
            errand.refuse()

    def submit_or_run(self, client: str, act: Act, here: bool = False) -> None:
        """Do something for a client that must be done; for a crew without limits.

        here: on this thread at once, if nothing waits and nothing is being done: to wake another takes longer than a
        small thing does.
        """
        if here and self.idle:
            self._guarded(act)
        else:
            self.submit(client, act, 0, lambda: None)

    @property
    def idle(self) -> bool:
        """Return whether nothing waits and nothing is being done."""
        with self._changed:
            return self._turns.idle

    def step(self, wait: bool = False) -> bool:
        """Do one thing on this thread; return False if it is nobody's turn, with `wait` only after `close`."""
        with self._changed:
            while (taken := self._turns.take()) is None and wait and not self._closed:
                self._changed.wait()
            if taken is None or self._closed:
                return False
        client, errand = taken
        self._guarded(errand.act)
        with self._changed:
            self._turns.done(client)
            self._changed.notify()
        return True

    def _work(self) -> None:
        while self.step(wait=True):
            continue


# ----------------------------------------------------------------------------------------------------------------------
# How a search makes room: a planner on a busy or a small machine answers requests while it looks for a better plan.


AGAIN: Final = 1.0  # times as long as a search had to wait for the processor it leaves that to others
MOST_S: Final = 2.0  # of one such pause
IN_HAND_S: Final = 0.25  # of one for the planner: it may be busy without an end, and a search must come to one
LOOKS_S: Final = 0.005  # until it is asked again whether the planner has something in hand
SWITCH_S: Final = 0.0005  # of the interpreter: a search must not hold the session thread up for long


class SearchThrottle:
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

    def run_before_searches(self, act: Callable[[], None]) -> None:
        """Do something of the session thread, for which searches pause."""
        self._is_first = True
        try:
            act()
        finally:
            self._is_first = False

    def set_serving(self, is_serving: bool) -> None:
        """Take whether runs are under way."""
        if is_serving:
            self._unused.clear()
        else:
            self._unused.set()

    def throttled(self, command: Solve) -> Solve:
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
