"""Tiles between this device and its peers: reachable peers, their reports, and this device's answers.

A session without I/O: the loader's thread calls it and passes the time.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from device_agent.tile_cache import TileCache
from hepti_mqtt.core.recent import Recent
from hepti_mqtt.cost.loads import Mask, TileMap
from hepti_mqtt.protocol.manifest import HASH_BYTES
from hepti_mqtt.runtime.worker.tile_sources import TileReport

REPORT_S: Final = 0.25  # between two reports to a peer
MAX_WAITING: Final = 32  # unsent tiles that one peer may have requested: more are refused
MAX_MODELS: Final = 16  # reports of one peer that are kept
MAX_REPORT_BYTES: Final = 1 << 20

MessageKind = Literal["tile", "held", "wanted", "refused"]
#: (peer, model, kind, body): sends a message to a peer; returns whether the peer reads it.
Send = Callable[[str, str, MessageKind, bytes], bool]


@dataclass(slots=True)
class _Model:
    """The tiles of one model on this device."""

    digest: bytes
    tiles: TileMap
    held: Mask  #: in the cache
    lacking: Mask  #: of the load under way, and not in the cache
    version: int = 1  #: number of the last change
    reported: dict[str, int] = field(default_factory=dict)  #: version of the last report to each peer


class TilePeers:
    """The peers with which this device exchanges tiles, by model.

    send: carries a message to a peer. counters: `tiles_to_peers`, `tile_bytes_to_peers`, `tiles_refused`.
    """

    def __init__(self, cache: TileCache, send: Send, counters: Counter[str]) -> None:
        self._cache, self._send, self._counters = cache, send, counters
        self._joined: dict[str, set[str]] = {}
        self._models = Recent[str, _Model](MAX_MODELS)
        self._reports: dict[str, Recent[str, bytes]] = {}
        self._waiting: OrderedDict[str, deque[tuple[str, bytes]]] = OrderedDict()
        self._next_report_s = -inf

    # -- reachable peers -------------------------------------------------------------------------------------------

    def join(self, peer: str, model: str) -> None:
        """Add a peer that exchanges tiles of a model."""
        self._joined.setdefault(model, set()).add(peer)
        if (there := self._models.get(model)) is not None:
            there.reported.pop(peer, None)

    def lose(self, peer: str, model: str | None = None) -> None:
        """Forget a peer's tiles of a model, or of all models: its connection or its plan has ended."""
        for name in list(self._joined) if model is None else [model]:
            self._joined.get(name, set()).discard(peer)
            if (reports := self._reports.get(peer)) is not None:
                reports.pop(name, None)
            if (there := self._models.get(name)) is not None:
                there.reported.pop(peer, None)
        if not any(peer in peers for peers in self._joined.values()):
            self._waiting.pop(peer, None)
            self._reports.pop(peer, None)

    def reachable(self, model: str) -> Iterable[str]:
        """Return the peers that exchange tiles of a model."""
        return tuple(self._joined.get(model, ()))

    # -- this device's tiles ---------------------------------------------------------------------------------------

    def begin(self, model: str, digest: bytes, tiles: TileMap, needed: Iterable[bytes]) -> None:
        """Set the manifest and the tiles of a load that begins."""
        held = np.fromiter((each in self._cache for each in tiles.hashes), np.bool_, len(tiles.hashes))
        there = _Model(digest, tiles, held, np.zeros_like(held))
        if self._cache.is_kept:  # else peers can never get them from here
            there.lacking[_positions(tiles, needed)] = True
            there.lacking &= ~held
        self._models[model] = there

    def end(self, model: str) -> None:
        """End the load of a model: nothing is lacking."""
        if (there := self._models.get(model)) is not None and there.lacking.any():
            there.lacking[:] = False
            there.version += 1

    def note(self, model: str, digest: bytes) -> None:
        """Record that a tile has arrived, and whether the cache keeps it."""
        there = self._models.get(model)
        position = None if there is None else there.tiles.position.get(digest)
        if there is not None and position is not None:
            there.held[position], there.lacking[position] = digest in self._cache, False
            there.version += 1

    # -- messages of peers -----------------------------------------------------------------------------------------

    def handle_report(self, peer: str, model: str, body: bytes) -> TileReport | None:
        """Store a peer's report; return it if it is of this device's manifest."""
        if peer not in self._joined.get(model, ()) or len(body) > MAX_REPORT_BYTES:
            return None
        self._reports.setdefault(peer, Recent(MAX_MODELS))[model] = body
        return self.report_of(peer, model)

    def report_of(self, peer: str, model: str) -> TileReport | None:
        """Return a peer's last report of a model, None if there is none of this device's manifest."""
        there, kept = self._models.get(model), self._reports.get(peer)
        body = None if kept is None else kept.get(model)
        if there is None or body is None or body[:HASH_BYTES] != there.digest:
            return None
        bits = body[HASH_BYTES:]
        half = len(bits) // 2
        held, lacking = there.tiles.unpack(bits[:half]), there.tiles.unpack(bits[half:])
        return None if held is None or lacking is None else TileReport(held, lacking)

    def handle_request(self, peer: str, model: str, body: bytes) -> None:
        """Queue the tiles of a peer's request; refuse tiles beyond MAX_WAITING or not in the cache."""
        if peer not in self._joined.get(model, ()):
            return
        waiting, refused = self._waiting.setdefault(peer, deque()), bytearray()
        for digest in _digests(body[: HASH_BYTES * MAX_WAITING]):
            if len(waiting) < MAX_WAITING and digest in self._cache:
                waiting.append((model, digest))
            else:
                refused += digest
        if refused:
            self._refuse(peer, model, bytes(refused))

    # -- messages to peers -----------------------------------------------------------------------------------------

    def request(self, peer: str, model: str, digests: Iterable[bytes]) -> None:
        """Request tiles from a peer; if the peer does not read it, the tiles become overdue."""
        self._send(peer, model, "wanted", b"".join(digests))

    @property
    def has_requests(self) -> bool:
        """Return whether a peer waits for a tile."""
        return any(self._waiting.values())

    def serve(self) -> None:
        """Send one tile, to each peer in turn."""
        for peer in list(self._waiting):
            self._waiting.move_to_end(peer)
            if self._waiting[peer]:
                model, digest = self._waiting[peer].popleft()
                data = self._cache.get(digest)
                if data is None:
                    self.note(model, digest)
                    self._refuse(peer, model, digest)
                elif self._send(peer, model, "tile", data):
                    self._counters["tiles_to_peers"] += 1
                    self._counters["tile_bytes_to_peers"] += len(data)
                return

    def report_if_due(self, now: float) -> None:
        """Report this device's tiles to peers with an older report; retry later if a peer does not read yet."""
        if now < self._next_report_s:
            return
        for model, peer in self._unreported():
            there = self._models[model]
            body = there.digest + there.tiles.pack(there.held) + there.tiles.pack(there.lacking)
            if self._send(peer, model, "held", body):
                there.reported[peer] = there.version
            self._next_report_s = now + REPORT_S

    def deadline(self) -> float:
        """Return the time of the next report; infinity if there is none to send."""
        return self._next_report_s if any(self._unreported()) else inf

    def _unreported(self) -> Iterable[tuple[str, str]]:
        return (
            (model, peer)
            for model, there in self._models.items()
            for peer in self._joined.get(model, ())
            if there.reported.get(peer) != there.version
        )

    def _refuse(self, peer: str, model: str, digests: bytes) -> None:
        self._counters["tiles_refused"] += len(digests) // HASH_BYTES
        self._send(peer, model, "refused", digests)


def _digests(body: bytes) -> list[bytes]:
    return [body[at : at + HASH_BYTES] for at in range(0, len(body) - HASH_BYTES + 1, HASH_BYTES)]


def _positions(tiles: TileMap, digests: Iterable[bytes]) -> NDArray[Any]:
    return np.array([tiles.position[digest] for digest in digests], np.int64)
