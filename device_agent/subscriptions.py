"""Which filters the agent's connections hold, and which epochs still wait for an acknowledgement of theirs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from hepti_mqtt.ids import Epoch
from hepti_mqtt.runtime.publish import Plane

Key = tuple[str, Epoch]
Filter = tuple[Plane, str]
Token = tuple[Plane, int]


class Subscriber(Protocol):
    """What subscribes: the network."""

    def subscribe(self, plane: Plane, filters: list[str]) -> int:
        """Return the token of the acknowledgement."""
        ...

    def unsubscribe(self, plane: Plane, filters: list[str]) -> None:
        """Leave filters."""
        ...


class Subscriptions:
    """Filters with their acknowledgements: activations on the data plane, requests on the control plane.

    A filter that several epochs need is subscribed once, so that brokers deliver nothing twice. Which epochs are here,
    and which filters no epoch needs any more, is the session's knowledge.
    """

    def __init__(self, network: Subscriber) -> None:
        self._network = network
        self._held: dict[Filter, Token] = {}
        self._waiting: dict[Token, set[Key]] = {}
        self._pending: dict[Key, set[Token]] = {}  # of epochs that wait for an acknowledgement

    def enter(self, model: str, epoch: Epoch, filters: Iterable[str], work: str) -> bool:
        """Subscribe to what an epoch needs; return whether everything is acknowledged already.

        filters: of activations. work: the topic of its requests.
        """
        key = (model, epoch)
        needed: list[Filter] = [("control", work), *(("data", f) for f in filters)]
        new = [f for f in needed if f not in self._held]
        for plane in dict.fromkeys(plane for plane, _ in new):
            own = [name for p, name in new if p == plane]
            token = (plane, self._network.subscribe(plane, own))
            self._waiting[token] = set()
            self._held.update(((plane, name), token) for name in own)
        tokens = {self._held[f] for f in needed} & self._waiting.keys()
        for token in tokens:
            self._waiting[token].add(key)
        if tokens:
            self._pending[key] = tokens
        return not tokens

    def acknowledged(self, plane: Plane, token: int) -> list[Key]:
        """Take an acknowledgement; return the epochs that now have everything."""
        done = []
        for key in self._waiting.pop((plane, token), ()):
            tokens = self._pending.get(key)
            if tokens is not None:
                tokens.discard((plane, token))
                if not tokens:
                    del self._pending[key]
                    done.append(key)
        return done

    def refused(self, plane: Plane, token: int) -> list[Key]:
        """Take a refusal, forget its filters, and return the epochs that cannot have what they need."""
        keys = self._waiting.pop((plane, token), set())
        names = [f for f, t in self._held.items() if t == (plane, token)]
        self._drop(names)
        return [key for key in keys if key in self._pending]

    def leave(self, filters: Iterable[str], works: Iterable[str] = ()) -> None:
        """Leave activations that no epoch needs any more, and topics of requests likewise."""
        gone: list[Filter] = [*(("data", f) for f in filters), *(("control", topic) for topic in works)]
        self._drop([f for f in gone if f in self._held])

    def release(self, model: str, epoch: Epoch) -> None:
        """An epoch waits for nothing any more."""
        self._pending.pop((model, epoch), None)

    def _drop(self, filters: list[Filter]) -> None:
        for plane in dict.fromkeys(plane for plane, _ in filters):
            self._network.unsubscribe(plane, [name for p, name in filters if p == plane])
        for f in filters:
            del self._held[f]
