"""A fair queue, and which of its items run together: the client with the fewest tokens served so far is next."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import chain, islice
from math import inf
from typing import Final

from hepti_mqtt.protocol.frames import MAX_TOGETHER
from hepti_mqtt.runtime.coordinator.requests import WorkItem


@dataclass(frozen=True, slots=True)
class Batching:
    """How many requests run together at most; delay_s: how long one waits for others."""

    max_requests: int = 16
    delay_s: float = 0.0


def select_batch(
    turns: Iterator[WorkItem], batching: Batching, max_tokens: int, max_items: int | None = None
) -> tuple[tuple[WorkItem, ...], float]:
    """Return the items of the next run, from all queued ones in their order, and when it is due.

    It is the first item with others that may run with it: a power of two, sorted by length, so that shapes repeat.
    Batches of one request run apart, as its forecast said. Steps of sessions wait for no others. A batch with room for
    more is due when its first item has waited for the delay; a full one, and one that was lost before, at once.
    max_items: the others run elsewhere.
    """
    first = next(turns)
    if first.request.generation is not None:
        return _select_steps(first, turns, min(batching.max_requests, MAX_TOGETHER)), -inf
    chosen, jobs, tokens = [first], {id(first.request)}, first.tokens
    full = not first.batchable or first.request.losses[first.index] > 0
    for item in turns if first.batchable else ():
        if len(chosen) == batching.max_requests:
            break
        if not (item.batchable and first.joins(item)) or id(item.request) in jobs:
            continue
        if tokens + item.tokens > max_tokens:
            full = True
            continue
        chosen.append(item)
        jobs.add(id(item.request))
        tokens += item.tokens
    full = full or len(chosen) == batching.max_requests or tokens == max_tokens
    due_s = -inf if full else min(map(partial(_waits_until, batching.delay_s), chosen))
    size = 1 << (min(len(chosen), max_items or len(chosen)).bit_length() - 1)
    return tuple(sorted(chosen[:size], key=lambda item: item.batch.shape.sizes)), due_s


def _select_steps(first: WorkItem, turns: Iterator[WorkItem], most: int) -> tuple[WorkItem, ...]:
    """Return the next run of a session, where that is a step with the steps that may be made beside it."""
    others = (item for item in turns if item.batchable and first.joins(item))
    return (first, *(islice(others, most - 1) if first.batchable else ()))


def _waits_until(delay_s: float, item: WorkItem) -> float:
    """Return until when a request may wait for others: the delay, or as long before its deadline."""
    deadline_s = inf if item.request.deadline_s is None else item.request.deadline_s
    return min(item.request.arrived_s + delay_s, deadline_s - delay_s)


MAX_REMEMBERED_CLIENTS: Final = 1024


class FairQueue:
    """The queue of a plan group: one line per client, and one before all for items that were lost.

    A new client starts even with the next one in turn, so that idle clients save up no turns. A generation waits in its
    client's line before each of its runs, so that all users' texts grow side by side.
    """

    def __init__(self) -> None:
        self._front: deque[WorkItem] = deque()
        self._lines: dict[str, deque[WorkItem]] = {}
        self._tokens_served: dict[str, int] = {}  # tokens of clients that wait
        self._last_served_tokens = 0  # tokens that the last client in turn had had
        self._served_before: OrderedDict[str, int] = OrderedDict()  # tokens of clients of whom nothing waits now

    def copy(self) -> FairQueue:
        """Return a queue of its own with the same items."""
        made = FairQueue()
        made._front, made._tokens_served = deque(self._front), dict(self._tokens_served)
        made._last_served_tokens = self._last_served_tokens
        made._served_before = self._served_before.copy()
        made._lines = {client: deque(line) for client, line in self._lines.items()}
        return made

    def __len__(self) -> int:
        return len(self._front) + sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[WorkItem]:
        """Yield all that waits, client by client."""
        return chain(self._front, *self._lines.values())

    def in_turn(self) -> Iterator[WorkItem]:
        """Yield the items in the order in which they would be taken one by one."""
        yield from self._front
        # Even clients: the earlier request first, then the one that queued first.
        turns = [
            (self._tokens_served[c], line[0].request.sequence, i, c) for i, (c, line) in enumerate(self._lines.items())
        ]
        heapify(turns)
        places = dict.fromkeys(self._lines, 0)
        while turns:
            had, _, i, client = heappop(turns)
            line, place = self._lines[client], places[client]
            yield line[place]
            places[client] = place + 1
            if place + 1 < len(line):
                heappush(turns, (had + line[place].turn, line[place + 1].request.sequence, i, client))

    def served(self, client: str) -> int:
        """Return the tokens that a client has had so far."""
        return self._tokens_served.get(client, self._served_before.get(client, 0))

    def oldest_sequence(self) -> float:
        """Return the number of the request that came first, infinity if none waits."""
        heads = [item.request.sequence for item in self._front]
        return min([*heads, *(line[0].request.sequence for line in self._lines.values())], default=inf)

    def append(self, items: Iterable[WorkItem]) -> None:
        """Add items to the ends of their clients' lines."""
        for item in items:
            self._line(item.request.key.client).append(item)

    def prepend(self, items: Iterable[WorkItem]) -> None:
        """Add items before all others, in their order; they cost their clients no turn."""
        self._front.extendleft(reversed(list(items)))

    def resume(self, item: WorkItem) -> None:
        """Add an item that continues before all others of its client."""
        self._line(item.request.key.client).appendleft(item)

    def count_step(self, client: str) -> None:
        """Count a step of a client of whom nothing waits: a token that is computed without waiting."""
        had = max(self._served_before.pop(client, 0), self._last_served_tokens)
        self._served_before[client], self._last_served_tokens = had + 1, had

    def _line(self, client: str) -> deque[WorkItem]:
        if client not in self._lines:
            before = self._served_before.pop(client, 0)
            self._lines[client], self._tokens_served[client] = deque(), max(before, self._last_served_tokens)
        return self._lines[client]

    def remove(self, items: Iterable[WorkItem]) -> None:
        """Remove items; each counts as a turn of its client."""
        for item in items:
            if item in self._front:
                self._front.remove(item)
                continue
            client = item.request.key.client
            self._lines[client].remove(item)
            self._last_served_tokens = max(self._last_served_tokens, self._tokens_served[client])
            self._tokens_served[client] += item.turn
            self._forget(client)

    def discard_finished(self) -> None:
        """Remove the items of requests that have ended."""
        if not any(item.request.finished for item in self):
            return
        self._front = deque(item for item in self._front if not item.request.finished)
        for client in list(self._lines):
            self._lines[client] = deque(item for item in self._lines[client] if not item.request.finished)
            self._forget(client)

    def _forget(self, client: str) -> None:
        """End the line of a client of whom nothing waits."""
        if self._lines[client]:
            return
        del self._lines[client]
        self._served_before[client] = self._tokens_served.pop(client)
        if len(self._served_before) > MAX_REMEMBERED_CLIENTS:
            self._served_before.popitem(last=False)
