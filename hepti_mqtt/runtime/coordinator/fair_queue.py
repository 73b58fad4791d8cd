"""A queue that is fair between clients (fewest tokens served first), and the choice of a batch from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import chain, islice
from math import inf
from typing import Final

from hepti_mqtt.core.recent import Recent
from hepti_mqtt.protocol.frames import MAX_TOGETHER
from hepti_mqtt.runtime.coordinator.requests import WorkItem


@dataclass(frozen=True, slots=True)
class Batching:
    """Which requests run together."""

    max_requests: int = 16
    delay_s: float = 0.0  #: how long a request waits for others


def select_batch(
    turns: Iterator[WorkItem], batching: Batching, max_tokens: int, max_items: int | None = None
) -> tuple[tuple[WorkItem, ...], float]:
    """Return the items of the next run, and when it is due; turns: queued items in order.

    The batch has the first item and others of its kind, a power of two in number, sorted by length, so that few shapes
    occur. Two batches of one request never share a run, because its forecast assumes separate runs. Decoding steps do
    not wait. A batch with room for more is due after the delay of its first item; a full batch, or a batch after a
    failed run, is due now. max_items: limit for this replica.
    """
    first = next(turns)
    if first.request.generation is not None:  # a decoding step is joined by the steps of other sessions
        steps = (item for item in turns if item.batchable and first.joins(item)) if first.batchable else ()
        return (first, *islice(steps, min(batching.max_requests, MAX_TOGETHER) - 1)), -inf
    chosen, requests, tokens = [first], {id(first.request)}, first.tokens
    full = not first.batchable or first.request.failed_attempts[first.index] > 0
    for item in turns if first.batchable else ():
        if len(chosen) == batching.max_requests:
            break
        if not (item.batchable and first.joins(item)) or id(item.request) in requests:
            continue
        if tokens + item.tokens > max_tokens:
            full = True
            continue
        chosen.append(item)
        requests.add(id(item.request))
        tokens += item.tokens
    full = full or len(chosen) == batching.max_requests or tokens == max_tokens
    due_s = -inf if full else min(map(partial(_waits_until, batching.delay_s), chosen))
    size = 1 << (min(len(chosen), max_items or len(chosen)).bit_length() - 1)
    return tuple(sorted(chosen[:size], key=lambda item: item.batch.shape.sizes)), due_s


def _waits_until(delay_s: float, item: WorkItem) -> float:
    """Return until when a request may wait for others: for the delay, at most until `delay_s` before its deadline."""
    deadline_s = inf if item.request.deadline_s is None else item.request.deadline_s
    return min(item.request.arrived_s + delay_s, deadline_s - delay_s)


MAX_REMEMBERED_CLIENTS: Final = 1024


class FairQueue:
    """The queue of a plan group: one line per client, and a front line for the items of failed runs.

    A new client starts with the token count of the client served last, so that idle time gives no credit. A generation
    queues before each of its runs, so that the texts of all users grow together.
    """

    def __init__(self) -> None:
        self._front: deque[WorkItem] = deque()
        self._lines: dict[str, deque[WorkItem]] = {}
        self._tokens_served: dict[str, int] = {}  # tokens served to clients with queued items
        self._last_served_tokens = 0  # count of the client that was last in turn, before that turn
        self._served_before = Recent[str, int](MAX_REMEMBERED_CLIENTS)  # tokens served to clients without queued items

    def copy(self) -> FairQueue:
        """Return an independent queue with the same items."""
        queue = FairQueue()
        queue._front, queue._tokens_served = deque(self._front), dict(self._tokens_served)
        queue._last_served_tokens = self._last_served_tokens
        queue._served_before.update(self._served_before)
        queue._lines = {client: deque(line) for client, line in self._lines.items()}
        return queue

    def __len__(self) -> int:
        return len(self._front) + sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[WorkItem]:
        """Yield all items, client by client."""
        return chain(self._front, *self._lines.values())

    def in_turn(self) -> Iterator[WorkItem]:
        """Yield all items in the order of their turns."""
        yield from self._front
        # At equal counts the earlier request is first, then the client that queued first.
        turns = [
            (self._tokens_served[c], line[0].request.sequence, i, c) for i, (c, line) in enumerate(self._lines.items())
        ]
        heapify(turns)
        places = dict.fromkeys(self._lines, 0)
        while turns:
            served, _, i, client = heappop(turns)
            line, place = self._lines[client], places[client]
            yield line[place]
            places[client] = place + 1
            if place + 1 < len(line):
                heappush(turns, (served + line[place].turn, line[place + 1].request.sequence, i, client))

    def served(self, client: str) -> int:
        """Return the tokens served to a client."""
        return self._tokens_served.get(client, self._served_before.get(client, 0))

    def oldest_sequence(self) -> float:
        """Return the sequence number of the oldest queued request, infinity if the queue is empty."""
        heads = [item.request.sequence for item in self._front]
        return min([*heads, *(line[0].request.sequence for line in self._lines.values())], default=inf)

    def append(self, items: Iterable[WorkItem]) -> None:
        """Add items to the ends of their clients' lines."""
        for item in items:
            self._line(item.request.key.client).append(item)

    def prepend(self, items: Iterable[WorkItem]) -> None:
        """Add items before all others, in order; they do not count as turns."""
        self._front.extendleft(reversed(list(items)))

    def resume(self, item: WorkItem) -> None:
        """Add an item that continues, before the other items of its client."""
        self._line(item.request.key.client).appendleft(item)

    def count_step(self, client: str) -> None:
        """Count a token that a client without queued items gets."""
        served = max(self._served_before.pop(client, 0), self._last_served_tokens)
        self._served_before[client], self._last_served_tokens = served + 1, served

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
        """Remove the line of a client if it is empty."""
        if not self._lines[client]:
            del self._lines[client]
            self._served_before[client] = self._tokens_served.pop(client)
