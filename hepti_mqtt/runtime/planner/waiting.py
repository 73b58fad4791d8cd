"""Requests that wait for a run, fair between clients: next is whoever has had the fewest tokens of late."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import chain
from math import inf

from hepti_mqtt.runtime.planner.flight import Item


class Waiting:
    """The queue of a slot: a line for each client, and one before all for what goes on or was lost.

    A client that begins to wait starts even with whoever is next, so that nobody saves turns up.
    """

    def __init__(self) -> None:
        self._before: deque[Item] = deque()
        self._lines: dict[str, deque[Item]] = {}
        self._had: dict[str, int] = {}  # tokens of clients that wait
        self._least = 0  # tokens that the last client in turn had had

    def copy(self) -> Waiting:
        """Return a queue of its own with the same items."""
        made = Waiting()
        made._before, made._had, made._least = deque(self._before), dict(self._had), self._least
        made._lines = {client: deque(line) for client, line in self._lines.items()}
        return made

    def __len__(self) -> int:
        return len(self._before) + sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[Item]:
        """Yield all that waits, client by client."""
        return chain(self._before, *self._lines.values())

    def turns(self) -> Iterator[Item]:
        """Yield what waits in the order of its turns, as if it was taken one by one."""
        yield from self._before
        # Of clients that are even the one whose request came first, then as they began to wait.
        turns = [(self._had[c], line[0].job.number, i, c) for i, (c, line) in enumerate(self._lines.items())]
        heapify(turns)
        places = dict.fromkeys(self._lines, 0)
        while turns:
            had, _, i, client = heappop(turns)
            line, place = self._lines[client], places[client]
            yield line[place]
            places[client] = place + 1
            if place + 1 < len(line):
                heappush(turns, (had + line[place].tokens, line[place + 1].job.number, i, client))

    def first(self) -> float:
        """Return the number of the request that came first, infinity if none waits."""
        heads = [item.job.number for item in self._before]
        return min([*heads, *(line[0].job.number for line in self._lines.values())], default=inf)

    def add(self, items: Iterable[Item]) -> None:
        """Take what has come to the end of its client's line."""
        for item in items:
            client = item.job.key.client
            self._lines.setdefault(client, deque()).append(item)
            self._had.setdefault(client, self._least)

    def add_first(self, items: Iterable[Item]) -> None:
        """Take what comes before all others, in its order; no turn of its client's is counted for it."""
        self._before.extendleft(reversed(list(items)))

    def take(self, items: Iterable[Item]) -> None:
        """Take items out, which count as their clients' turns."""
        for item in items:
            if item in self._before:
                self._before.remove(item)
                continue
            client = item.job.key.client
            self._lines[client].remove(item)
            self._least = max(self._least, self._had[client])
            self._had[client] += item.tokens
            self._forget(client)

    def forget_over(self) -> None:
        """Take out those requests that have ended while they waited."""
        if not any(item.job.over for item in self):
            return
        self._before = deque(item for item in self._before if not item.job.over)
        for client in list(self._lines):
            self._lines[client] = deque(item for item in self._lines[client] if not item.job.over)
            self._forget(client)

    def _forget(self, client: str) -> None:
        """Forget a client of whom nothing waits."""
        if not self._lines[client]:
            del self._lines[client], self._had[client]
