"""Threads that work for clients in turn."""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import inf
from typing import NamedTuple

from hepti_mqtt.service.turns import Turns

Act = Callable[[], None]


class _Errand(NamedTuple):
    act: Act
    refuse: Act


class Crew:
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
        self._turns: Turns[_Errand] = Turns(limit, limit_bytes)
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

    def offer(self, client: str, act: Act, nbytes: int, refuse: Act) -> None:
        """Do something for a client when its turn comes; or call `refuse`, now or later, if there is no room for it.

        That of others may be called here too, so it must not block.
        """
        with self._changed:
            refused = self._turns.put(client, _Errand(act, refuse), nbytes)
            self._changed.notify()
        for errand in refused:
            errand.refuse()

    def post(self, client: str, act: Act, here: bool = False) -> None:
        """Do something for a client that must be done; for a crew without limits.

        here: on this thread at once, if nothing waits and nothing is being done: to wake another takes longer than a
        small thing does.
        """
        if here and self.idle:
            self._guarded(act)
        else:
            self.offer(client, act, 0, lambda: None)

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
