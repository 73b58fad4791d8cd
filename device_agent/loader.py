"""Weight loader: reads packed weights from the disk cache, or packs tiles from the cache, peers or the planner.

`LoadJob` is one load, `WeightLoader` a state machine with the time as an argument, `LoaderThread` gives it a thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from math import inf
from queue import Empty, SimpleQueue
from typing import Final, Literal

import numpy as np

from device_agent.budget import BACKGROUND_SHARE, Budget, give_way
from device_agent.tile_cache import TileCache, packed_key
from device_agent.tile_peers import MessageKind, TilePeers
from hepti_mqtt.core.errors import HeptiError, ModelError, PlanError, WireError
from hepti_mqtt.core.ids import PLANNER
from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.core.recent import Recent
from hepti_mqtt.cost.loads import TileMap
from hepti_mqtt.cost.memory import weights_bytes
from hepti_mqtt.kernels import BlockBuffer, Weight, WeightBuffer, allocate, loading_bytes, part, weight_bytes
from hepti_mqtt.kernels.jit import return_memory
from hepti_mqtt.protocol.manifest import HASH_BYTES, TILES_AHEAD, Manifest, TileLocation, tile_array, tile_hash
from hepti_mqtt.protocol.messages import CachedTiles
from hepti_mqtt.runtime.worker.interface import Load, Loaded, LoadFailed, LoadProgress, ReadCaches, Unload
from hepti_mqtt.runtime.worker.residents import Place
from hepti_mqtt.runtime.worker.tile_sources import (
    BUSY_WINDOW,
    PLANNER_ANSWER_S,
    PLANNER_WINDOW,
    WHOLE_LINK,
    TileSources,
    Windows,
)

MANIFESTS: Final = 4  # kept in memory


@dataclass(slots=True)
class LoadJob:
    """A load and its progress."""

    load: Load
    early_manifest: bytes | None = None  #: the manifest's bytes, if they arrived during another load
    manifest: Manifest | None = None
    manifest_asked_s: float = inf  #: when the manifest was last requested
    buffers: dict[WeightRef, WeightBuffer | BlockBuffer] = field(default_factory=dict)
    tiles_left: dict[WeightRef, int] = field(default_factory=dict)
    #: The matrices of each tile, in the order in which tiles are taken.
    destinations: dict[bytes, tuple[WeightRef, ...]] = field(default_factory=dict)
    #: Tile locations of started matrices: those of all matrices would take as much memory as many weights.
    places: dict[WeightRef, dict[bytes, list[TileLocation]]] = field(default_factory=dict)
    #: Matrices with an unread packed copy in the cache, and its key.
    packed: deque[tuple[WeightRef, bytes]] = field(default_factory=deque)
    tiled: list[WeightRef] = field(default_factory=list)  #: matrices of several tiles: a packed copy is worth a file
    #: Tiles, packed copies and the manifest: the cache must not evict them for this load.
    pinned: frozenset[bytes] = frozenset()
    order: dict[bytes, int] = field(default_factory=dict)  #: number of each tile in this order
    missing: set[bytes] = field(default_factory=set)
    #: Missing tiles, if they must be taken nearly in order; else empty.
    ordered_missing: deque[bytes] = field(default_factory=deque)
    on_disk: deque[bytes] = field(default_factory=deque)  #: unread tiles in the cache
    sources: TileSources | None = None
    weights: dict[WeightRef, Weight] = field(default_factory=dict)
    done_bytes: int = 0
    total_bytes: int = 0  #: bytes of the tiles; until the manifest arrives, of the weights
    hash_mismatches: int = 0

    @property
    def is_complete(self) -> bool:
        """Return whether all matrices are complete."""
        return not self.missing and not self.packed

    def limit(self) -> int | None:
        """Return the number of the first tile that may not be taken yet; None without a limit."""
        while self.ordered_missing and self.ordered_missing[0] not in self.missing:
            self.ordered_missing.popleft()
        return self.order[self.ordered_missing[0]] + TILES_AHEAD if self.ordered_missing else None

    def may_accept(self, digest: bytes) -> bool:
        """Return whether a missing tile may be taken now: if order matters, only while few older ones are missing."""
        limit = self.limit()
        return limit is None or self.order[digest] < limit

    def plan_tiles(
        self,
        manifest: Manifest,
        tiles: TileMap,
        held: Mapping[WeightRef, Weight],
        first: int,
        is_cached: Callable[[bytes], bool] = lambda _: False,
    ) -> None:
        """List the packed matrices to read and the missing tiles; raises ModelError for another model's manifest.

        held: resident matrices. first: position in the manifest at which this device begins. is_cached: whether the
        cache has the packed matrix of a key.
        """
        if manifest.model != self.load.model:
            raise ModelError(f"the manifest is of model {manifest.model}, not {self.load.model}; restart the planner")
        self.manifest = manifest
        needed: list[WeightRef] = []
        for ref in dict.fromkeys(self.load.matrices.values()):
            if ref in held:
                self.weights[ref] = held[ref]
                continue
            if is_cached(key := packed_key(self.load.manifest, ref)):
                self.packed.append((ref, key))
                continue
            places = manifest.tiles(ref)
            self.buffers[ref], self.tiles_left[ref] = allocate(ref), len(places)
            if places:
                needed.append(ref)
                self.tiled += [ref] if len(places) > 1 else []
            else:
                self.weights[ref] = self.buffers.pop(ref).finish()
        start = next((n for n, ref in enumerate(needed) if tiles.position[manifest.tiles(ref)[-1].hash] >= first), 0)
        self.total_bytes = sum(weight_bytes(ref) for ref, _ in self.packed)
        for ref in needed[start:] + needed[:start]:
            alone = (ref,)
            for place in manifest.tiles(ref):
                others = self.destinations.get(place.hash)
                self.total_bytes += place.nbytes if others is None else 0
                self.destinations[place.hash] = alone if others is None else tuple(dict.fromkeys((*others, ref)))
        self.missing = set(self.destinations)
        self.pinned = frozenset((self.load.manifest, *self.destinations, *(key for _, key in self.packed)))
        self.order = {digest: number for number, digest in enumerate(self.destinations)}
        # Only int8 blocks are held wide until they are complete; other storages take tiles in any order.
        self.ordered_missing = deque(self.destinations if any(loading_bytes(ref) for ref in self.buffers) else ())

    def write_tile(self, digest: bytes, data: bytes | memoryview) -> None:
        """Write a tile into its weights."""
        assert self.manifest is not None
        for ref in self.destinations[digest]:
            if ref not in self.places:
                self.places[ref] = {}
                for place in self.manifest.tiles(ref):
                    self.places[ref].setdefault(place.hash, []).append(place)
            for place in self.places[ref][digest]:
                self.buffers[ref].put(tile_array(place, data), place.row0, place.column0)
                self.tiles_left[ref] -= 1
            if not self.tiles_left[ref]:
                self.weights[ref] = self.buffers.pop(ref).finish()
                del self.places[ref]


# ----------------------------------------------------------------------------------------------------------------------
# The state machine. Loads run one after the other and take their tiles nearly in order, so that a load's memory is the
# weights, the few tiles in flight, and incomplete int8 blocks (`cost.memory.loading_overhead_bytes`).


PROGRESS_S: Final = 0.5
CACHED_S: Final = 2.0  # between two reports of cached tiles during a load
MAX_MISMATCHES: Final = 3
RATE_BYTES: Final = 16 << 20
MAX_REMEMBERED: Final = 1 << 16  # hashes of earlier requests: a late answer to them is no damaged tile

LoadEvent = Loaded | LoadFailed | LoadProgress


class Rate:
    """A rate in bytes per second of the last megabytes; per_s: 0 before it is measured."""

    def __init__(self, per_s: float) -> None:
        self.per_s = per_s
        self._nbytes, self._seconds = 0.0, 0.0

    def record(self, nbytes: int, seconds: float) -> None:
        """Add bytes and their seconds."""
        self._nbytes, self._seconds = self._nbytes + nbytes, self._seconds + seconds
        if self._nbytes >= RATE_BYTES and self._seconds > 0:
            self.per_s = self._nbytes / self._seconds
            self._nbytes, self._seconds = self._nbytes / 2, self._seconds / 2


class WeightLoader:
    """Makes matrices resident; weights of plan versions are views of them. The session lists the matrices to keep.

    emit: gets Loaded, LoadFailed, LoadProgress. request_tiles: (model, hashes, share) sends RequestTiles to the
    planner. is_busy: whether runs are active, which share the link. report: sends a report of cached tiles to the
    planner. counters: `tiles_asked`, `tiles_reasked`, `tiles_received`, `tile_bytes_received`, its part
    `tile_bytes_from_peers`; `tiles_cached`, `tile_bytes_cached`, `packed_cached`; `tiles_mismatched`,
    `tiles_unneeded`.
    """

    def __init__(
        self,
        cache: TileCache,
        emit: Callable[[LoadEvent], None],
        request_tiles: Callable[[str, tuple[bytes, ...], float], None],
        counters: Counter[str],
        peers: TilePeers | None = None,
        device: str = "",
        is_busy: Callable[[], bool] = lambda: False,
        report: Callable[[CachedTiles], None] = lambda _: None,
    ) -> None:
        self.peers = peers or TilePeers(cache, lambda *_: False, counters)
        self._cache, self._device = cache, device
        self._emit = emit
        self._ask, self._is_busy = request_tiles, is_busy
        self._counters, self._report = counters, report
        self._record = cache.read_record()
        self.read_rate, self.receive_rate = Rate(self._record.read_bytes_per_s), Rate(self._record.receive_bytes_per_s)
        self._jobs: deque[LoadJob] = deque()
        self._held: dict[Place, Weight] = {}
        self._manifests = Recent[bytes, tuple[Manifest, TileMap]](MANIFESTS)
        self._requested_before: set[bytes] = set()
        self._unsaved: deque[Place] = deque()  #: matrices to be saved as packed copies
        self._last_report_s = self._last_cached_s = float("-inf")

    # -- orders of the session -----------------------------------------------------------------------------------

    def load(self, load: Load, now: float) -> None:
        """Begin or queue a load, and report its progress."""
        self._keep(load.keep)
        new = {m for m in load.matrices.values() if (load.manifest, m) not in self._held}
        self._jobs.append(job := LoadJob(load, total_bytes=max(weights_bytes(new), 1)))
        if len(self._jobs) == 1:
            self._begin(now)
        if any(other is job for other in self._jobs):
            self._emit_progress(job)

    def unload(self, unload: Unload, now: float) -> None:
        """Cancel the load of a plan version, and drop weights that are not to be kept."""
        active = self._jobs[0] if self._jobs else None
        self._jobs = deque(j for j in self._jobs if j.load.key != unload.key)
        self._keep(unload.keep)
        if active is not None and (not self._jobs or self._jobs[0] is not active):
            self.peers.end(active.load.model)
        if self._jobs and self._jobs[0] is not active:
            self._begin(now)
        return_memory()

    def _keep(self, places: Collection[Place]) -> None:
        self._held = {place: weight for place, weight in self._held.items() if place in places}

    # -- messages of the network ---------------------------------------------------------------------------------

    def on_tile(self, body: bytes | memoryview, source: str, now: float) -> None:
        """Accept a tile or a manifest from the planner or a peer."""
        job, digest = self._jobs[0] if self._jobs else None, tile_hash(body)
        waiting = [other for other in self._jobs if other.manifest is None and other.load.manifest == digest]
        if waiting:
            self._receive(digest, body, source)
            for other in waiting:
                other.early_manifest = bytes(body)
            if waiting[0] is job:
                self._fail_on_error(job, lambda: self._take_manifest(job, body, now), now)
        elif job is None or (digest in self._requested_before and digest not in job.order):
            self._counters["tiles_unneeded"] += 1
        elif job.sources is None:
            self._mismatch(job, now)
        else:
            answer = job.sources.receive(source, digest, now)
            if answer == "unknown":
                self._mismatch(job, now, source)
            elif answer == "unneeded" or not job.may_accept(digest):
                self._counters["tiles_unneeded"] += 1
            else:
                self._receive(digest, body, source)
                self._fail_on_error(job, lambda: self._accept(job, digest, body, now), now)
            self._go_on(now)

    def _receive(self, digest: bytes, body: bytes | memoryview, source: str) -> None:
        if digest not in self._cache:
            self._counters["tiles_received"] += 1
            self._counters["tile_bytes_received"] += len(body)
            if source != PLANNER:
                self._counters["tile_bytes_from_peers"] += len(body)
        self._cache.put(digest, body, self._jobs[0].pinned)
        self.peers.note(self._jobs[0].load.model, digest)

    def on_peer_message(self, peer: str, model: str, kind: MessageKind, body: bytes, now: float) -> None:
        """Handle a peer's message about tiles."""
        job = self._jobs[0] if self._jobs and self._jobs[0].load.model == model else None
        match kind:
            case "wanted":
                self.peers.handle_request(peer, model, body)
            case "held":
                report = self.peers.handle_report(peer, model, body)
                if report is not None and job is not None and job.sources is not None:
                    job.sources.report(peer, report, now)
            case "refused" if job is not None and job.sources is not None:
                job.sources.refuse(peer, [body[at : at + HASH_BYTES] for at in range(0, len(body), HASH_BYTES)])
        self._go_on(now)

    def on_peer(self, peer: str, model: str | None, now: float, *, is_joined: bool) -> None:
        """Add or remove a peer that exchanges tiles of a model; None: of all models."""
        job = self._jobs[0] if self._jobs and model in (None, self._jobs[0].load.model) else None
        if is_joined and model is not None:
            self.peers.join(peer, model)
        else:
            self.peers.lose(peer, model)
        if job is not None and job.sources is not None:
            if is_joined:
                job.sources.add_peer(peer, now)
            else:
                job.sources.remove_peer(peer)
        self._go_on(now)

    def report_caches(self) -> None:
        """Report the cached tiles of all models."""
        for model in self._record.manifests:
            self._report_cached(model)

    def request_again(self, now: float) -> None:
        """Repeat open requests to the planner and report cached tiles, after the connection or the planner is back."""
        self.report_caches()
        job = self._jobs[0] if self._jobs else None
        if job is None:
            return
        if job.sources is not None:
            self._counters["tiles_reasked"] += job.sources.reopen(PLANNER)
            self._go_on(now)
        elif job.manifest_asked_s < inf:
            self._counters["tiles_reasked"] += 1
            self._request_manifest(job, now)

    # -- time ----------------------------------------------------------------------------------------------------

    @property
    def has_cached(self) -> bool:
        """Return whether `step` can read a matrix or a tile from disk."""
        job = self._jobs[0] if self._jobs else None
        return job is not None and (bool(job.packed) or (bool(job.on_disk) and job.may_accept(job.on_disk[0])))

    def step(self, now: float) -> bool:
        """Take one packed matrix or tile from disk; return whether there is more."""
        if not self.has_cached:
            return False
        job = self._jobs[0]
        if job.packed:
            self._fail_on_error(job, lambda: self._read_packed(job, now), now)
            return self.has_cached
        digest = job.on_disk.popleft()
        if digest not in job.missing:  # a source sent it meanwhile
            return self.has_cached
        data = self._cache.get(digest)
        if data is None:
            assert job.sources is not None
            job.sources.put_back(digest)
            self.peers.note(job.load.model, digest)
            self._go_on(now)
        else:
            self._counters["tiles_cached"] += 1
            self._counters["tile_bytes_cached"] += len(data)
            self._fail_on_error(job, lambda: self._accept(job, digest, data, now), now)
            if job.ordered_missing:  # the limit of requests has moved
                self._go_on(now)
        return self.has_cached

    @property
    def has_unsaved(self) -> bool:
        """Return whether `save` can write a matrix, and no load is active."""
        return bool(self._unsaved) and not self._jobs

    def save(self) -> None:
        """Store the packed copy of one matrix in the cache, if no tile has to make room for it."""
        manifest, matrix = place = self._unsaved.popleft()
        if (weight := self._held.get(place)) is not None:
            self._cache.put_packed(packed_key(manifest, matrix), weight)

    def retry_if_due(self, now: float) -> None:
        """Repeat overdue requests at other sources; without a manifest, begin the next load first."""
        if now < self.deadline():
            return
        job = self._jobs[0]
        if job.sources is not None:
            late, again = job.sources.expire(now)
            self._counters["tiles_reasked"] += late + (again is not None)
            if again is not None:
                self._request(job, PLANNER, [again])
            self._go_on(now)
        elif len(self._jobs) > 1:  # no manifest: the Prepare may be forged
            self._jobs.rotate(-1)
            self._begin(now)
        else:
            self._counters["tiles_reasked"] += 1
            self._request_manifest(job, now)

    def deadline(self) -> float:
        """Return the time of the next retry; infinity if there is none."""
        if not self._jobs:
            return inf
        job = self._jobs[0]
        return job.manifest_asked_s + PLANNER_ANSWER_S if job.sources is None else job.sources.deadline()

    @property
    def share(self) -> float:
        """Return the share of the device that the current load may take from runs."""
        return max(self._jobs[0].load.share, BACKGROUND_SHARE) if self._jobs else BACKGROUND_SHARE

    def fail_current(self, error: HeptiError, now: float) -> None:
        """Fail the active load."""
        if self._jobs:
            self._fail(self._jobs[0], error, now)

    @property
    def is_loading(self) -> bool:
        """Return whether a load is active."""
        return bool(self._jobs)

    # -- the active load -----------------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        job, self._last_cached_s = self._jobs[0], now
        is_decoded = job.load.manifest in self._manifests
        data = b"" if is_decoded else job.early_manifest or self._cache.get(job.load.manifest)
        if data is None:
            self._request_manifest(job, now)
        else:
            self._fail_on_error(job, lambda: self._take_manifest(job, data, now), now)

    def _request_manifest(self, job: LoadJob, now: float) -> None:
        job.manifest_asked_s = now
        self._request(job, PLANNER, [job.load.manifest])

    def _take_manifest(self, job: LoadJob, data: bytes | memoryview, now: float) -> None:
        """List the needed tiles with their destinations and sources."""
        digest, model = job.load.manifest, job.load.model
        manifest, tiles = self._map(digest, data)
        self._record.manifests.pop(model, None)
        self._record.manifests[model] = digest
        devices = job.load.devices if self._device in job.load.devices else (self._device,)
        first = len(tiles.hashes) * devices.index(self._device) // len(devices)
        held = {matrix: weight for (other, matrix), weight in self._held.items() if other == digest}
        job.plan_tiles(manifest, tiles, held, first, self._cache.__contains__)
        job.on_disk = deque(tile for tile in job.destinations if tile in self._cache)
        order = tuple(job.destinations)
        positions = [tiles.position[tile] for tile in order]
        on_disk = frozenset(job.on_disk)
        job.sources = TileSources(order, positions, len(tiles.hashes), self._device, devices, now, on_disk)
        self.peers.begin(model, digest, tiles, order)
        for peer in self.peers.reachable(model):
            job.sources.add_peer(peer, now)
            if (report := self.peers.report_of(peer, model)) is not None:
                job.sources.report(peer, report, now)
        if job.is_complete:
            self._finish(job, now)
        else:
            self._go_on(now)

    def _map(self, digest: bytes, data: bytes | memoryview) -> tuple[Manifest, TileMap]:
        """Return the manifest of a hash and the map of its tiles; raises WireError if the data is no manifest."""
        if digest not in self._manifests:
            manifest = Manifest.decode(bytes(data))
            self._manifests[digest] = manifest, TileMap(manifest)
        return self._manifests[digest]

    def _report_cached(self, model: str) -> None:
        """Report to the planner which tiles of a model are in the cache."""
        digest = self._record.manifests.get(model, b"")
        data = b"" if digest in self._manifests else self._cache.get(digest)
        if data is None:
            return
        try:
            _, tiles = self._map(digest, data)
        except WireError:
            return
        held = tiles.pack(np.array([tile in self._cache for tile in tiles.hashes], np.bool_))
        self._report(CachedTiles(model, digest, held, self.read_rate.per_s, self.receive_rate.per_s))

    def _accept(self, job: LoadJob, digest: bytes, data: bytes | memoryview, now: float) -> None:
        assert job.sources is not None
        job.missing.remove(digest)
        job.sources.take(digest)
        job.done_bytes += len(data)
        job.write_tile(digest, data)
        self._finish_or_report(job, now)

    def _read_packed(self, job: LoadJob, now: float) -> None:
        """Read one packed matrix from the cache; if it is damaged, begin the load again with tiles."""
        matrix, key = job.packed.popleft()
        weight = self._cache.get_packed(key, matrix)
        if weight is None:
            self._held.update(((job.load.manifest, ref), weight) for ref, weight in job.weights.items())
            self._jobs[0] = LoadJob(job.load)
            self._begin(now)
            return
        job.weights[matrix] = weight
        job.done_bytes += weight_bytes(matrix)
        self._counters["packed_cached"] += 1
        self._finish_or_report(job, now)

    def _finish_or_report(self, job: LoadJob, now: float) -> None:
        if job.is_complete:
            self._finish(job, now)
        else:
            self._report_progress(now)

    def _go_on(self, now: float) -> None:
        """Request the next tiles of the active load."""
        job = self._jobs[0] if self._jobs else None
        if job is not None and job.sources is not None:
            windows = WHOLE_LINK
            if self._is_busy():  # the planner limits itself to a request's share
                windows = Windows(BUSY_WINDOW, BUSY_WINDOW if self.share == BACKGROUND_SHARE else PLANNER_WINDOW)
            for source, digests in job.sources.requests(now, windows, job.limit()).items():
                self._request(job, source, digests)

    def _request(self, job: LoadJob, source: str, digests: list[bytes]) -> None:
        if len(self._requested_before) > MAX_REMEMBERED:
            self._requested_before.clear()
        self._requested_before.update(digests)
        self._counters["tiles_asked"] += len(digests)
        if source == PLANNER:
            self._ask(job.load.model, tuple(digests), self.share)
        else:
            self.peers.request(source, job.load.model, digests)

    def _mismatch(self, job: LoadJob, now: float, source: str = PLANNER) -> None:
        self._counters["tiles_mismatched"] += 1
        if source != PLANNER:
            return  # another source gets the request
        job.hash_mismatches += 1
        if job.hash_mismatches >= MAX_MISMATCHES:
            error = WireError(
                f"{job.hash_mismatches} weight tiles of {job.load.model} arrived with a wrong SHA-256; "
                "run `hepti model verify` on the planner's machine"
            )
            self._fail(job, error, now)
        elif job.sources is None:
            self.request_again(now)

    def _finish(self, job: LoadJob, now: float) -> None:
        load = job.load
        self._held.update(((load.manifest, matrix), weight) for matrix, weight in job.weights.items())
        views = {ref: part(job.weights[matrix], matrix, ref) for ref, matrix in load.matrices.items()}
        self._emit(Loaded(load.model, load.plan_version, views))
        if job.tiled and self._cache.is_kept:
            self._unsaved.extend((load.manifest, matrix) for matrix in job.tiled)
        self._next(now)

    def _fail(self, job: LoadJob, error: HeptiError, now: float) -> None:
        self._emit(LoadFailed(job.load.model, job.load.plan_version, error))
        self._next(now)

    def _next(self, now: float) -> None:
        model = self._jobs.popleft().load.model
        self.peers.end(model)
        self._record.read_bytes_per_s = self.read_rate.per_s
        self._record.receive_bytes_per_s = self.receive_rate.per_s
        self._cache.write_record(self._record)
        self._report_cached(model)
        return_memory()
        if self._jobs:
            self._begin(now)

    def _report_progress(self, now: float) -> None:
        if now - self._last_report_s < PROGRESS_S:
            return
        self._last_report_s = now
        for job in self._jobs:  # waiting ones too, or the planner would give them up
            self._emit_progress(job)
        if now - self._last_cached_s >= CACHED_S:
            self._last_cached_s = now
            self._report_cached(self._jobs[0].load.model)

    def _emit_progress(self, job: LoadJob) -> None:
        self._emit(LoadProgress(job.load.model, job.load.plan_version, job.done_bytes, job.total_bytes))

    def _fail_on_error(self, job: LoadJob, act: Callable[[], None], now: float) -> None:
        """Run `act`; an error fails this load only."""
        try:
            act()
        except HeptiError as exc:
            self._fail(job, exc, now)
        except MemoryError:
            error = PlanError(f"no memory left for the weights of {job.load.model}; give the agent a smaller --memory")
            self._fail(job, error, now)
        except ValueError as exc:
            self._fail(job, ModelError(f"the tiles of {job.load.model} do not make up its weights: {exc}"), now)


# ----------------------------------------------------------------------------------------------------------------------
# The weight loader's thread, and its inputs.


QUEUED_BYTES: Final = 64 << 20  # of tiles waiting for the thread; more than the windows only if unrequested


@dataclass(frozen=True, slots=True)
class TileIn:
    """The body of a tile frame from the planner or a peer."""

    body: bytes | memoryview
    source: str = PLANNER


@dataclass(frozen=True, slots=True)
class PeerMessageIn:
    """A peer's message about tiles of a model; a tile itself is a `TileIn`."""

    peer: str
    model: str
    kind: MessageKind
    body: bytes


@dataclass(frozen=True, slots=True)
class TilePeerChanged:
    """A peer exchanges tiles of a model from now on, or no longer; model None: of all models."""

    peer: str
    model: str | None
    is_joined: bool


@dataclass(frozen=True, slots=True)
class RequestAgain:
    """The connection or the planner is back."""


Input = Load | Unload | ReadCaches | TileIn | PeerMessageIn | TilePeerChanged | RequestAgain


class LoaderThread:
    """Runs a `WeightLoader` in its own thread; `post` is safe from any thread.

    Tiles from the network and to peers are handled one by one as the budget allows. Cached tiles cost no link and
    little time, so they are read without a pause. read_caches: reports saved KV caches.
    """

    def __init__(
        self,
        loader: WeightLoader,
        counters: Counter[str],
        log: logging.Logger,
        budget: Budget | None = None,
        read_caches: Callable[[ReadCaches], None] = lambda _: None,
    ) -> None:
        self._loader, self._read_caches = loader, read_caches
        self._counters = counters
        self._log = log
        self._budget = budget or Budget()
        self._arrived: deque[TileIn] = deque()
        self._inputs: SimpleQueue[Input | Literal["stop"]] = SimpleQueue()
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self._thread = threading.Thread(target=self._run, name="hepti-loader", daemon=True)

    def start(self) -> None:
        """Report the cached tiles, so that the planner has the report before the device is online; start the thread."""
        self._loader.report_caches()
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._inputs.put("stop")
        if self._thread.is_alive():
            self._thread.join()

    def post(self, item: Input) -> None:
        """Queue an input; tiles and messages beyond `QUEUED_BYTES` are dropped, counted, and requested again later."""
        if isinstance(item, TileIn | PeerMessageIn):
            with self._lock:
                if self._queued_bytes + len(item.body) > QUEUED_BYTES:
                    self._counters["tiles_overflowed"] += 1
                    return
                self._queued_bytes += len(item.body)
        self._inputs.put(item)

    def _run(self) -> None:
        give_way()
        while (item := self._next()) != "stop":
            try:
                self._turn(item)
            except Exception as exc:
                self._abandon(exc)

    def _next(self) -> Input | Literal["stop"] | None:
        """Return the next input, or None if other work is due first."""
        if self._loader.has_cached:
            timeout_s = 0.0
        elif self._arrived or self._loader.peers.has_requests or self._loader.has_unsaved:
            timeout_s = self._budget.pause_s(time.perf_counter())
        else:
            deadline = min(self._loader.deadline(), self._loader.peers.deadline())
            timeout_s = max(deadline - time.monotonic(), 0.0)
        try:
            return self._inputs.get(block=timeout_s > 0, timeout=None if timeout_s == inf else timeout_s)
        except Empty:
            return None

    def _abandon(self, cause: Exception) -> None:
        """Fail the current load; never raises, because the thread must continue."""
        try:
            self._log.exception("the weight loader failed")
            error = ModelError(f"the weight loader failed: {cause!r}; see the agent's log")
            self._loader.fail_current(error, time.monotonic())
        except Exception:
            self._log.exception("the load that failed could not be given up")

    def _turn(self, item: Input | None) -> None:
        now, loader = time.monotonic(), self._loader
        match item:
            case Load():
                loader.load(item, now)
            case Unload():
                loader.unload(item, now)
            case ReadCaches():
                self._read_caches(item)
            case TileIn():
                self._arrived.append(item)
            case PeerMessageIn(peer, model, kind, body):
                with self._lock:
                    self._queued_bytes -= len(body)
                loader.on_peer_message(peer, model, kind, body, now)
            case TilePeerChanged(peer, model, is_joined):
                loader.on_peer(peer, model, now, is_joined=is_joined)
            case RequestAgain():
                loader.request_again(now)
            case None if not self._arrived:  # else requested tiles have arrived
                loader.retry_if_due(now)
        self._timed(loader.read_rate, "tile_bytes_cached", lambda: loader.step(now))
        loader.peers.report_if_due(now)
        self._budget.share, self._budget.loading = loader.share, loader.is_loading
        if self._budget.pause_s(time.perf_counter()) == 0:
            begun_s = time.thread_time()
            self._timed(loader.receive_rate, "tile_bytes_received", lambda: self._exchange(now))
            self._budget.spend(time.thread_time() - begun_s, time.perf_counter())

    def _timed(self, rate: Rate, counter: str, act: Callable[[], object]) -> None:
        """Run `act`, and record the rate of the bytes that it counts, unless a run took the processor."""
        before, begun_s, was_running = self._counters[counter], time.perf_counter(), self._budget.running
        act()
        nbytes = self._counters[counter] - before
        if nbytes and not was_running and not self._budget.running:
            rate.record(nbytes, time.perf_counter() - begun_s)

    def _exchange(self, now: float) -> None:
        """Take one received tile, and answer one request of a peer or save one packed matrix."""
        if self._arrived:
            tile = self._arrived.popleft()
            with self._lock:
                self._queued_bytes -= len(tile.body)
            self._loader.on_tile(tile.body, tile.source, now)
        if self._loader.peers.has_requests:
            self._loader.peers.serve()
        elif self._loader.has_unsaved:
            self._loader.save()
