"""Whom one load asks for which tile: peers that hold it, else the planner. A session without I/O; `now` is an argument.

Each tile that no peer holds has one device that requests it from the planner, so that it leaves the planner's machine
once for the site: the device of its region of the manifest, or the next one in the plan's order that lacks it. Devices
report to each other which tiles they hold and which they lack. A device without tiles left in its region takes those at
the end of the largest other region. The hash decides whether a tile is right, so no peer is trusted.

A process that gets no time for seconds, on a busy machine, is slow and not lost, so one pause repeats no requests: a
peer keeps its other tiles until it fails twice in a row, and of the planner's tiles, which come in the order of
requests, one is requested again to learn which were lost.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.cost.loads import Mask
from hepti_mqtt.ids import PLANNER

ANSWER_S: Final = 2.0  # without a tile from a peer that owes some: others are asked
PLANNER_ANSWER_S: Final = 3.0  # the same for the planner, which is asked again
SILENT_S: Final = 2 * ANSWER_S  # without a report from a device: others request its part of the tiles
LOOK_S: Final = ANSWER_S / 2  # between two looks at whom to ask while nothing is under way
REST_S: Final = (2.0, 60.0)  # a peer that did not answer is not asked; doubled each time
SLOW_S: Final = 0.25  # for one tile, and twice as long as the planner: others bring what such a peer holds, too
SMOOTHING: Final = 0.3
PEER_WINDOW: Final = 8  # requests under way at one peer
PLANNER_WINDOW: Final = 16  # the same at the planner
OWNER_S: Final = 0.25  # for which the division of tiles among devices stands
BUSY_WINDOW: Final = 1  # while runs share the link: exchanges wait for one tile at most


class Windows(NamedTuple):
    """How many requests may be under way at one peer, and at the planner."""

    peer: int = PEER_WINDOW
    planner: int = PLANNER_WINDOW


WHOLE_LINK: Final = Windows()


class TileReport(NamedTuple):
    """What a device says of the tiles of one manifest, by position there."""

    held: Mask
    #: Not held, and part of its load.
    lacking: Mask


#: Of a tile that a source sent: `unknown` if it is no tile of the load.
Answer = Literal["needed", "unneeded", "unknown"]


@dataclass(slots=True)
class _Source:
    """One peer, or the planner."""

    #: Tiles it can be asked for, by the load's order.
    holds: Mask
    #: Tiles it announced as part of its own load.
    lacking: Mask
    #: Tiles it refused, or did not send in time.
    refused: Mask
    #: Requests under way: tile and time of the request.
    requested: dict[int, float] = field(default_factory=dict)
    window: int = 2
    #: When it last sent a tile that was requested.
    answered_s: float = -inf
    #: Smoothed time for one tile.
    tile_s: float = 0.0
    rests_until_s: float = -inf
    rest_s: float = REST_S[0]
    is_banned: bool = False
    #: Whether it has reported its tiles.
    has_reported: bool = False
    #: When it last did, or was joined.
    reported_s: float = inf
    #: Tiles that this load had at its last report.
    reported_at: int = 0


class TileSources:
    """The requests of one load: `requests` says what to ask now, the other methods what has happened.

    tiles: hashes in the order in which the load takes them. positions: of each in the manifest. total: tiles of the
    manifest. devices: of the plan, in its order, with this one. cached: tiles that this device has on its disk.
    """

    def __init__(
        self,
        tiles: Sequence[bytes],
        positions: Sequence[int],
        total: int,
        device: str,
        devices: Sequence[str],
        now: float,
        cached: Collection[bytes] = (),
    ) -> None:
        self._tiles, self._positions = tiles, np.array(positions, np.int64)
        self._index = {digest: index for index, digest in enumerate(tiles)}
        self._device, self._devices = device, tuple(devices)
        self._missing = np.ones(len(tiles), np.bool_)
        #: Missing, not in the cache, and requested from nobody.
        self._open = np.array([digest not in cached for digest in tiles], np.bool_)
        self._sources = {PLANNER: self._source()}
        region = self._positions * len(devices) // max(total, 1)
        self._region = np.minimum(region, len(devices) - 1)  # number of the device of each tile's region
        self._owner: NDArray[Any] | None = None  # number of the device that requests each tile from the planner
        self._owner_s = now
        self._look_s = now  # when it was last decided whom to ask
        self._taken = 0

    # -- what has happened -----------------------------------------------------------------------------------------

    def add_peer(self, peer: str, now: float) -> None:
        """Take a peer that can be asked from now on."""
        if peer not in self._sources:
            self._sources[peer] = self._source()
            self._sources[peer].reported_s = now
            self._owner = None

    def remove_peer(self, peer: str) -> None:
        """Ask others for what a peer owes: the connection to it is lost."""
        source = self._sources.get(peer)
        if source is not None and peer != PLANNER:
            self._reopen(source)
            if source.is_banned:  # it returns as what it was
                return
            del self._sources[peer]
            self._owner = None

    def report(self, peer: str, report: TileReport, now: float) -> None:
        """Take a peer's report of its tiles."""
        source = self._sources.get(peer)
        if source is None:
            return
        source.holds = report.held[self._positions] & ~source.refused
        source.lacking = report.lacking[self._positions]
        source.has_reported, source.reported_at, source.reported_s = True, self._taken, now

    def refuse(self, peer: str, digests: Iterable[bytes]) -> None:
        """Take a peer's refusal of some tiles."""
        source = self._sources.get(peer)
        if source is None:
            return
        for digest in digests:
            index = self._index.get(digest)
            if index is not None and source.requested.pop(index, None) is not None:
                self._give_up(source, index)

    def receive(self, peer: str, digest: bytes, now: float) -> Answer:
        """Take a tile with this hash from a source; a hash that the load does not know is the sender's fault.

        A peer that sends one is asked for nothing more.
        """
        source, index = self._sources.get(peer), self._index.get(digest)
        if index is None:
            if source is not None and peer != PLANNER:
                source.is_banned = True
                self._reopen(source)
                self._owner = None
            return "unknown"
        if source is not None and (asked_s := source.requested.pop(index, None)) is not None:
            source.tile_s += SMOOTHING * (now - max(asked_s, source.answered_s) - source.tile_s)
            slow = self._is_slow(source)
            source.window = max(source.window // 2, 1) if slow else min(source.window + 1, PEER_WINDOW)
            source.answered_s, source.rest_s = now, REST_S[0]
            if peer == PLANNER:  # it sends in the order of requests: those before have been lost
                for other in [other for other, at_s in source.requested.items() if at_s < asked_s]:
                    del source.requested[other]
                    self._open[other] = self._missing[other]
        return "needed" if self._missing[index] else "unneeded"

    def take(self, digest: bytes) -> None:
        """Note that a tile is there: received, or from the cache."""
        index = self._index[digest]
        self._taken += 1
        self._missing[index] = self._open[index] = False
        for source in self._sources.values():
            source.requested.pop(index, None)

    def put_back(self, digest: bytes) -> None:
        """Note that a tile is missing although the cache had it."""
        index = self._index[digest]
        self._missing[index] = self._open[index] = True

    def reopen(self, source: str) -> int:
        """Forget the requests of a source, which lost them; return how many there were."""
        there = self._sources[source]
        count = len(there.requested)
        self._reopen(there)
        return count

    def expire(self, now: float) -> tuple[int, bytes | None]:
        """Give up peers' requests that are overdue; return how many, and a tile to request from the planner again.

        The planner's last one alone: when it comes, those before it have come or were lost.
        """
        late, again = 0, None
        for name in [name for name in self._sources if self._due_s(name) <= now]:
            source = self._sources[name]
            if name == PLANNER:
                last = next(reversed(source.requested))
                source.requested[last], again = now, self._tiles[last]
                continue
            late += len(source.requested)
            for index in source.requested:
                source.holds[index] = False
                source.refused[index] = True
            source.rests_until_s = now + source.rest_s
            source.rest_s, source.window = min(2 * source.rest_s, REST_S[1]), 1
            self._owner = None
            self._reopen(source)
        return late, again

    # -- what follows ----------------------------------------------------------------------------------------------

    @property
    def missing_count(self) -> int:
        """Return how many tiles are not there."""
        return int(self._missing.sum())

    @property
    def has_requests(self) -> bool:
        """Return whether a source owes a tile."""
        return any(source.requested for source in self._sources.values())

    def requests(self, now: float, windows: Windows = WHOLE_LINK, limit: int | None = None) -> dict[str, list[bytes]]:
        """Return the tiles to request now, by source. limit: only the first tiles of the load."""
        asked: dict[str, list[bytes]] = {}
        if now > self._look_s + SILENT_S:  # this device itself had a pause, in which nobody was heard
            for source in self._sources.values():
                source.reported_s = max(source.reported_s, now - ANSWER_S)
        self._look_s = now
        end = len(self._tiles) if limit is None else limit
        # Several at once, when half of the last ones have come.
        free = {n for n, s in self._sources.items() if len(s.requested) <= self._window(n, windows) // 2}
        while choice := self._from_peer(now, end, windows, free) or self._from_planner(now, end, windows, free, limit):
            name, index = choice
            self._sources[name].requested[index] = now
            self._open[index] = False
            asked.setdefault(name, []).append(self._tiles[index])
        return asked

    def deadline(self) -> float:
        """Return when `expire` and `requests` have something to do if nothing happens; infinity if never."""
        overdue = min(self._due_s(name) for name in self._sources)
        return overdue if self.has_requests or not self._open.any() else self._look_s + LOOK_S

    # -- whom to ask -----------------------------------------------------------------------------------------------

    def _source(self) -> _Source:
        holds, lacking, refused = np.zeros((3, len(self._tiles)), np.bool_)
        return _Source(holds, lacking, refused)

    def _is_slow(self, source: _Source) -> bool:
        return source.tile_s > max(SLOW_S, 2 * self._sources[PLANNER].tile_s)

    def _reopen(self, source: _Source) -> None:
        for index in source.requested:
            self._open[index] = self._missing[index]
        source.requested.clear()

    def _give_up(self, source: _Source, index: int) -> None:
        source.holds[index] = False
        source.refused[index] = True
        self._open[index] = self._missing[index]

    def _due_s(self, name: str) -> float:
        """Return when a source's requests are overdue."""
        source = self._sources[name]
        if not source.requested:
            return inf
        patience_s = PLANNER_ANSWER_S if name == PLANNER else ANSWER_S
        return max(source.answered_s, *source.requested.values()) + patience_s

    def _peers(self, now: float) -> Mapping[str, _Source]:
        return {
            name: source
            for name, source in self._sources.items()
            if name != PLANNER and not source.is_banned and source.rests_until_s <= now
        }

    def _window(self, name: str, windows: Windows) -> int:
        """Return how many requests may be under way at a source."""
        return windows.planner if name == PLANNER else min(self._sources[name].window, windows.peer)

    def _from_peer(self, now: float, end: int, windows: Windows, free: Container[str]) -> tuple[str, int] | None:
        """Return the peer with the fewest requests that holds an open tile, and the tile."""
        peers = self._peers(now)
        for name in sorted(peers, key=lambda peer: len(peers[peer].requested)):
            source = peers[name]
            if name not in free or len(source.requested) >= self._window(name, windows):
                continue
            index = _first(self._open[:end] & source.holds[:end])
            if index is not None:
                return name, index
        return None

    def _from_planner(
        self, now: float, end: int, windows: Windows, free_sources: Container[str], limit: int | None
    ) -> tuple[str, int] | None:
        """Return the planner and the next tile that this device is to request from it."""
        if PLANNER not in free_sources or len(self._sources[PLANNER].requested) >= self._window(PLANNER, windows):
            return None
        free = self._open[:end].copy()
        for name, source in self._sources.items():
            fails = source.is_banned or source.rest_s > 2 * REST_S[0] or self._is_slow(source)
            if name != PLANNER and not fails:
                free &= ~source.holds[:end]
        if not free.any():
            return None
        own, owners = self._devices.index(self._device), self._owners(now)[:end]
        index = _first(free & (owners == own))
        if index is None and limit is None:
            # Other devices request the rest, each from the beginning of its tiles, and as fast as this one.
            largest = int(np.bincount(owners[free]).argmax())
            owner = self._sources.get(self._devices[largest])
            since = 0 if owner is None else int(self._taken - owner.reported_at)
            rest = np.flatnonzero(free & (owners == largest))
            if len(rest) > since + 2 * PLANNER_WINDOW:
                others = len(self._devices) - 1  # each takes another part of the rest, from its end
                index = int(rest[-1 - (own - largest - 1) % len(self._devices) * (len(rest) // (2 * others))])
        return None if index is None else (PLANNER, index)

    def _owners(self, now: float) -> NDArray[Any]:
        """Return the number of the device that requests each tile from the planner."""
        if self._owner is None or now >= self._owner_s + OWNER_S:
            count, tiles = len(self._devices), np.arange(len(self._tiles))
            brings = np.stack([self._brings(name, now) for name in self._devices])
            self._owner = np.full(len(tiles), self._devices.index(self._device), np.int64)
            for step in reversed(range(count)):  # the nearest after the region's device comes last and stays
                number = (self._region + step) % count
                mask = brings[number, tiles]
                self._owner[mask] = number[mask]
            self._owner_s = now
        return self._owner

    def _brings(self, name: str, now: float) -> Mask:
        """Return the tiles that a device of the plan is believed to request from the planner."""
        if name == self._device:
            return self._missing
        source = self._peers(now).get(name)
        if source is None or now >= source.reported_s + SILENT_S:
            return np.zeros(len(self._tiles), np.bool_)
        return source.lacking if source.has_reported else np.ones(len(self._tiles), np.bool_)


def _first(mask: Mask) -> int | None:
    """Return the index of the first True, None without one."""
    if not mask.any():
        return None
    return int(mask.argmax())
