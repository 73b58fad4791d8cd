"""The sources of a load's tiles: peers that hold a tile, otherwise the planner. A session without I/O.

If no peer holds a tile, exactly one device requests it from the planner, so that it leaves the planner's machine once:
the device of its region of the manifest, or the next device in the plan's order that lacks it. Devices report to each
other the tiles that they hold and lack. A device that has finished its region takes tiles from the end of the largest
other region. Hashes verify the tiles, so peers need not be trusted.

On a busy machine a process may pause for seconds, so one pause does not repeat requests: a peer keeps its other tiles
until it fails twice in a row. The planner sends in the order of requests, so repeating one request shows which tiles
were lost.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.core.ids import PLANNER
from hepti_mqtt.cost.loads import Mask

ANSWER_S: Final = 2.0  # timeout of requests to a peer; then other sources are used
PLANNER_ANSWER_S: Final = 3.0  # timeout of requests to the planner; then one is repeated
SILENT_S: Final = 2 * ANSWER_S  # without a report from a device, before others request its tiles
LOOK_S: Final = ANSWER_S / 2  # between two calls of `requests` without pending requests
REST_S: Final = (2.0, 60.0)  # first and longest pause of a peer that timed out; doubled each time
SLOW_S: Final = 0.25  # a peer is slow if a tile takes longer, and twice as long as from the planner
SMOOTHING: Final = 0.3
PEER_WINDOW: Final = 8  # pending requests at one peer
PLANNER_WINDOW: Final = 16  # pending requests at the planner
OWNER_S: Final = 0.25  # validity of the division of tiles among devices
BUSY_WINDOW: Final = 1  # while runs share the link, so that exchanges wait for one tile at most


class Windows(NamedTuple):
    """Limits of pending requests at one peer, and at the planner."""

    peer: int = PEER_WINDOW
    planner: int = PLANNER_WINDOW


WHOLE_LINK: Final = Windows()


class TileReport(NamedTuple):
    """A device's report on the tiles of one manifest, by position."""

    held: Mask
    lacking: Mask  #: part of its load, but not held


Answer = Literal["needed", "unneeded", "unknown"]  # on a received tile; unknown: not a tile of the load


@dataclass(slots=True)
class _Source:
    """One peer, or the planner."""

    holds: Mask  #: tiles that it offers, in the load's order
    lacking: Mask  #: tiles of its own load that it lacks
    refused: Mask  #: tiles that it refused, or did not send in time
    requested: dict[int, float] = field(default_factory=dict)  #: pending requests: time by tile
    window: int = 2
    answered_s: float = -inf  #: when it last sent a requested tile
    tile_s: float = 0.0  #: smoothed time per tile
    rests_until_s: float = -inf
    rest_s: float = REST_S[0]
    is_banned: bool = False
    has_reported: bool = False
    reported_s: float = inf  #: time of its last report, or of its join
    reported_at: int = 0  #: tiles that this load had at its last report


class TileSources:
    """The requests of one load: `requests` returns the next ones, the other methods record events.

    tiles: hashes in the order of the load. positions: place of each tile in the manifest. total: tiles of the manifest.
    devices: of the plan, in its order, including this one. cached: tiles on this device's disk.
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
        #: Missing, not cached, and not requested.
        self._open = np.array([digest not in cached for digest in tiles], np.bool_)
        self._sources = {PLANNER: self._source()}
        region = self._positions * len(devices) // max(total, 1)
        self._region = np.minimum(region, len(devices) - 1)  # index of the device of each tile's region
        self._owner: NDArray[Any] | None = None  # index of the device that requests each tile from the planner
        self._owner_s = now
        self._look_s = now  # last call of `requests`
        self._taken = 0

    # -- events ----------------------------------------------------------------------------------------------------

    def add_peer(self, peer: str, now: float) -> None:
        """Add a joined peer."""
        if peer not in self._sources:
            self._sources[peer] = self._source()
            self._sources[peer].reported_s = now
            self._owner = None

    def remove_peer(self, peer: str) -> None:
        """Remove a lost peer, and reopen its pending requests."""
        source = self._sources.get(peer)
        if source is not None and peer != PLANNER:
            self._reopen(source)
            if source.is_banned:  # it stays banned when it returns
                return
            del self._sources[peer]
            self._owner = None

    def report(self, peer: str, report: TileReport, now: float) -> None:
        """Record a peer's report of its tiles."""
        source = self._sources.get(peer)
        if source is None:
            return
        source.holds = report.held[self._positions] & ~source.refused
        source.lacking = report.lacking[self._positions]
        source.has_reported, source.reported_at, source.reported_s = True, self._taken, now

    def refuse(self, peer: str, digests: Iterable[bytes]) -> None:
        """Record a peer's refusal of some tiles."""
        source = self._sources.get(peer)
        if source is None:
            return
        for digest in digests:
            index = self._index.get(digest)
            if index is not None and source.requested.pop(index, None) is not None:
                self._give_up(source, index)

    def receive(self, peer: str, digest: bytes, now: float) -> Answer:
        """Record a tile with this hash from a source; ban a peer that sends an unknown hash."""
        source, index = self._sources.get(peer), self._index.get(digest)
        if index is None:
            if source is not None and peer != PLANNER:
                source.is_banned = True
                self._reopen(source)
                self._owner = None
            return "unknown"
        if source is not None and (requested_s := source.requested.pop(index, None)) is not None:
            source.tile_s += SMOOTHING * (now - max(requested_s, source.answered_s) - source.tile_s)
            slow = self._is_slow(source)
            source.window = max(source.window // 2, 1) if slow else min(source.window + 1, PEER_WINDOW)
            source.answered_s, source.rest_s = now, REST_S[0]
            if peer == PLANNER:  # it sends in the order of requests, so earlier tiles are lost
                for other in [other for other, at_s in source.requested.items() if at_s < requested_s]:
                    del source.requested[other]
                    self._open[other] = self._missing[other]
        return "needed" if self._missing[index] else "unneeded"

    def take(self, digest: bytes) -> None:
        """Record that this device has a tile, received or cached."""
        index = self._index[digest]
        self._taken += 1
        self._missing[index] = self._open[index] = False
        for source in self._sources.values():
            source.requested.pop(index, None)

    def put_back(self, digest: bytes) -> None:
        """Record that a cached tile is missing."""
        index = self._index[digest]
        self._missing[index] = self._open[index] = True

    def reopen(self, source: str) -> int:
        """Reopen the pending requests of a source that lost them; return their number."""
        count = len(self._sources[source].requested)
        self._reopen(self._sources[source])
        return count

    def expire(self, now: float) -> tuple[int, bytes | None]:
        """Reopen overdue requests of peers; return their number, and a tile to request from the planner again.

        This is the planner's last pending tile: on its arrival, earlier ones have arrived or are lost.
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
                self._give_up(source, index)
            source.rests_until_s = now + source.rest_s
            source.rest_s, source.window = min(2 * source.rest_s, REST_S[1]), 1
            self._owner = None
            self._reopen(source)
        return late, again

    # -- requests --------------------------------------------------------------------------------------------------

    @property
    def has_requests(self) -> bool:
        """Return whether a request is pending."""
        return any(source.requested for source in self._sources.values())

    def requests(self, now: float, windows: Windows = WHOLE_LINK, limit: int | None = None) -> dict[str, list[bytes]]:
        """Return the tiles to request now, by source; limit: only from the first tiles of the load."""
        requests: dict[str, list[bytes]] = {}
        if now > self._look_s + SILENT_S:  # this device paused, so the silence of others does not count
            for source in self._sources.values():
                source.reported_s = max(source.reported_s, now - ANSWER_S)
        self._look_s = now
        end = len(self._tiles) if limit is None else limit
        # Request several tiles together, after half of the last ones have arrived.
        free = {n for n, s in self._sources.items() if len(s.requested) <= self._window(n, windows) // 2}
        while choice := self._from_peer(now, end, windows, free) or self._from_planner(now, end, windows, free, limit):
            name, index = choice
            self._sources[name].requested[index] = now
            self._open[index] = False
            requests.setdefault(name, []).append(self._tiles[index])
        return requests

    def deadline(self) -> float:
        """Return when to call `expire` and `requests` without another event; infinity if never."""
        overdue = min(self._due_s(name) for name in self._sources)
        return overdue if self.has_requests or not self._open.any() else self._look_s + LOOK_S

    # -- choice of sources -----------------------------------------------------------------------------------------

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
        """Return the limit of pending requests at a source."""
        return windows.planner if name == PLANNER else min(self._sources[name].window, windows.peer)

    def _from_peer(self, now: float, end: int, windows: Windows, free: Container[str]) -> tuple[str, int] | None:
        """Return an open tile, and the peer with the fewest pending requests that holds it."""
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
        """Return the planner, and the next tile that this device should request from it."""
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
            # Other devices request their tiles from the start, assumed as fast as this device.
            largest = int(np.bincount(owners[free]).argmax())
            owner = self._sources.get(self._devices[largest])
            since = 0 if owner is None else int(self._taken - owner.reported_at)
            rest = np.flatnonzero(free & (owners == largest))
            if len(rest) > since + 2 * PLANNER_WINDOW:
                others = len(self._devices) - 1  # each takes another part of the rest, counted from the end
                index = int(rest[-1 - (own - largest - 1) % len(self._devices) * (len(rest) // (2 * others))])
        return None if index is None else (PLANNER, index)

    def _owners(self, now: float) -> NDArray[Any]:
        """Return the index of the device that requests each tile from the planner."""
        if self._owner is None or now >= self._owner_s + OWNER_S:
            count, tiles = len(self._devices), np.arange(len(self._tiles))
            lacking = np.stack([self._lacking(name, now) for name in self._devices])
            self._owner = np.full(len(tiles), self._devices.index(self._device), np.int64)
            for step in reversed(range(count)):  # the region's device, then the nearest one after it, has priority
                number = (self._region + step) % count
                mask = lacking[number, tiles]
                self._owner[mask] = number[mask]
            self._owner_s = now
        return self._owner

    def _lacking(self, name: str, now: float) -> Mask:
        """Return the tiles that a device of the plan probably lacks."""
        if name == self._device:
            return self._missing
        source = self._peers(now).get(name)
        if source is None or now >= source.reported_s + SILENT_S:
            return np.zeros(len(self._tiles), np.bool_)
        return source.lacking if source.has_reported else np.ones(len(self._tiles), np.bool_)


def _first(mask: Mask) -> int | None:
    """Return the index of the first True, None if there is none."""
    return int(mask.argmax()) if mask.any() else None
