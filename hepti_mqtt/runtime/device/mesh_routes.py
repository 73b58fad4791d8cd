"""Which peers this device hears directly under each epoch, and what follows when it does not.

An epoch is not ready before all of these are joined. A peer that cannot be reached within a while is told to the
planner, which makes a plan whose frames from there go over the broker. A connection that is lost later takes with it
what was on it: requests that await frames of that peer end at once and are issued again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Final

from hepti_mqtt.runtime.device.commands import Admit, Command, Join, Part
from hepti_mqtt.runtime.device.epochs import Key
from hepti_mqtt.wire.messages import Prepare
from hepti_mqtt.wire.peers import Peer

JOIN_S: Final = 5.0  # a peer that cannot be connected to for so long will not be
WELCOME_S: Final = 20.0  # one that is there, but has not heard of the epoch, is waited for
RETURN_S: Final = 2.0  # a connection that was lost comes back within so long, or its pair is given up


@dataclass(slots=True)
class _Routes:
    """One epoch's. heard: peers by name; missing: those that are not joined now, with when each is given up.

    welcome_by_s: until then a peer that is there may have yet to hear of the epoch.
    """

    heard: Mapping[str, Peer]
    missing: dict[str, float]
    welcome_by_s: float


@dataclass(frozen=True, slots=True)
class Overdue:
    """An epoch that waits in vain for peers."""

    key: Key
    peers: tuple[str, ...]


class MeshRoutes:
    """The mesh routes of all epochs on one device."""

    def __init__(self) -> None:
        self._admitted: dict[Key, frozenset[str]] = {}  # who may read here under each epoch
        self._routes: dict[Key, _Routes] = {}

    def admit(self, key: Key, message: Prepare) -> list[Command]:
        """Let those in that a Prepare names, before this device itself is as far: its peers may be faster."""
        guests = tuple(peer for peer in message.peers if peer.token_in)
        if not guests:
            return []
        self._admitted[key] = frozenset(peer.device for peer in guests)
        return [Admit(*key, guests)]

    def join(self, key: Key, peers: Iterable[Peer], now: float) -> list[Command]:
        """Hear peers directly from now on."""
        heard = {peer.device: peer for peer in peers}
        if not heard:
            return []
        self._admitted.setdefault(key, frozenset())
        self._routes[key] = _Routes(heard, dict.fromkeys(heard, now + JOIN_S), now + WELCOME_S)
        return [Join(*key, tuple(heard.values()))]

    def part(self, key: Key) -> list[Command]:
        """An epoch is over."""
        self._routes.pop(key, None)
        return [] if self._admitted.pop(key, None) is None else [Part(*key)]

    def complete(self, key: Key) -> bool:
        """Return whether every peer that an epoch hears directly is joined."""
        routes = self._routes.get(key)
        return routes is None or not routes.missing

    def joined(self, peer: str, key: Key) -> bool:
        """Take it that a peer is joined; return whether it was missing."""
        routes = self._routes.get(key)
        return routes is not None and routes.missing.pop(peer, None) is not None

    def refused(self, peer: str, key: Key) -> None:
        """Take it that a peer is there but does not know this device yet."""
        routes = self._routes.get(key)
        if routes is not None and peer in routes.missing:
            routes.missing[peer] = max(routes.missing[peer], routes.welcome_by_s)

    def lost(self, peer: str, now: float) -> list[Key]:
        """Take it that the connection to a peer is gone; return the epochs that heard it."""
        keys = [k for k, r in self._routes.items() if peer in r.heard and peer not in r.missing]
        for key in keys:
            self._routes[key].missing[peer] = now + RETURN_S
        return keys

    def deadline(self) -> float:
        """Return when `overdue` has something to tell, infinity if nothing is waited for."""
        deadline = inf
        for routes in self._routes.values():
            if routes.missing:  # hardly ever; this is asked between ops
                deadline = min(deadline, *routes.missing.values())
        return deadline

    def overdue(self, now: float) -> list[Overdue]:
        """Return the epochs that wait for peers in vain, each peer once."""
        found = []
        for key, routes in self._routes.items():
            late = [peer for peer, at in routes.missing.items() if at <= now]
            for peer in late:
                routes.missing[peer] = inf
            if late:
                found.append(Overdue(key, tuple(sorted(late))))
        return found

    def sends_to(self, peer: str) -> list[Key]:
        """Return the epochs under which a peer reads what this device sends, whether it is heard or not."""
        return [key for key, guests in self._admitted.items() if peer in guests]
