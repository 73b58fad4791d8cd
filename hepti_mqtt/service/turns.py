"""Work of many clients in turn: each has one thing done, then the next client has one."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(slots=True)
class _Line(Generic[Item]):
    """What one client has waiting, the oldest first, with the bytes of each."""

    items: deque[tuple[Item, int]] = field(default_factory=deque)
    nbytes: int = 0
    busy: bool = False


class Turns(Generic[Item]):
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
