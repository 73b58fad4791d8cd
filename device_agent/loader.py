"""The tile cache on disk: content-addressed files under a size limit, least recently used first out."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sys
import threading
import time
from bisect import insort
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final, Literal, NamedTuple

from device_agent.budget import BACKGROUND_SHARE, Budget, give_way
from hepti_mqtt.config.state import write_atomically
from hepti_mqtt.cost.memory import weights_bytes
from hepti_mqtt.errors import HeptiError, ModelError, PlanError, WireError
from hepti_mqtt.kernels import BlockBuffer, Weight, WeightBuffer, allocate, loading_bytes, part
from hepti_mqtt.kernels.jit import return_memory
from hepti_mqtt.program import WeightRef
from hepti_mqtt.protocol.manifest import TILES_AHEAD, Manifest, TileLocation, tile_array, tile_hash
from hepti_mqtt.runtime.worker.interface import Load, Loaded, LoadFailed, LoadProgress, Unload
from hepti_mqtt.runtime.worker.residents import Place

RESERVE_BYTES: Final = 64 << 20  # of the disk, or a twentieth of a small one: left to whatever else must be written
_SMALL: Final = 20
_log: Final = logging.getLogger("hepti.agent")


def free_cache_bytes(directory: Path) -> int:
    """Return the disk space left for tiles; negative if they already use too much."""
    usage = shutil.disk_usage(directory)
    return usage.free - min(RESERVE_BYTES, usage.total // _SMALL)


class _Stamp(NamedTuple):
    """By what a file is known to be the one that was read before."""

    inode: int
    nbytes: int
    modified_ns: int


def _stamp(stat: os.stat_result) -> _Stamp:
    return _Stamp(stat.st_ino, stat.st_size, stat.st_mtime_ns)


class TileCache:
    """Blobs by their SHA-256 in files `<directory>/<two hex digits>/<hash>`.

    limit_bytes: most that the files may take; 0 turns the cache off. A disk that others fill takes tiles away too: they
    can be fetched again, and nothing else of a device can. room_bytes: as the function of that name. counters:
    `cache_corrupt` files whose bytes were not those of their name, `cache_evicted`, `cache_errors` of the file system.
    Not thread safe.
    """

    def __init__(
        self,
        directory: Path,
        limit_bytes: int,
        counters: Counter[str],
        room_bytes: Callable[[Path], int] = free_cache_bytes,
    ) -> None:
        self._directory = directory
        self._limit, self._room_bytes = limit_bytes, room_bytes
        self._counters = counters
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._checked: dict[bytes, _Stamp] = {}
        self.bytes = 0
        self._told = False
        if limit_bytes > 0:
            self._scan()
            if not self._evict(0, ()):  # whatever is left to do with the disk, it is not for tiles
                self._drop(list(self._sizes), self.bytes)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._sizes

    def get(self, digest: bytes) -> bytes | None:
        """Return the blob of a hash, checked, or None; a file that holds anything else is removed.

        A file is hashed once in the life of a process, while nobody has touched it: a board without instructions for
        SHA-256 hashes as slowly as it multiplies, and each new plan reads the same files again.
        """
        if digest not in self._sizes:
            return None
        path = self._path(digest)
        try:
            with path.open("rb") as file:
                data, found = file.read(), _stamp(os.fstat(file.fileno()))
        except OSError:
            self._forget(digest)
            return None
        if self._checked.get(digest) != found and hashlib.sha256(data).digest() != digest:
            self._counters["cache_corrupt"] += 1
            self._remove(digest)
            return None
        self._touch(digest, path, found)
        return data

    def _touch(self, digest: bytes, path: Path, found: _Stamp) -> None:
        """Note that a file is in use, and what it looks like from now on."""
        now_ns = time.time_ns()
        try:
            os.utime(path, ns=(now_ns, now_ns))
        except OSError:  # somebody else's file: then it is only not known to be in use
            now_ns = found.modified_ns
        self._checked[digest] = found._replace(modified_ns=now_ns)
        self._sizes.move_to_end(digest)

    def put(self, digest: bytes, data: bytes | memoryview, keep: Collection[bytes] = ()) -> None:
        """Store a blob whose hash the caller has checked, unless only blobs in `keep` could make room for it."""
        if len(data) > self._limit or digest in self._sizes:
            return
        if not self._evict(len(data), keep):
            if len(data) > self._room():
                self._warn_not_kept("the disk is full")
            return
        path = self._path(digest)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, bytes(data))
        except OSError as error:
            self._counters["cache_errors"] += 1
            self._warn_not_kept(error.strerror or str(error))
            return
        self._sizes[digest] = len(data)
        self.bytes += len(data)

    def _warn_not_kept(self, why: str) -> None:
        """Warn once that weights are not cached."""
        if not self._told:
            _log.warning(
                "cannot cache weights in %s (%s), so every start loads them over the network; free disk space "
                "or choose another directory with --cache",
                self._directory,
                why,
            )
        self._told = True

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self._directory / name[:2] / name

    def _scan(self) -> None:
        found: list[tuple[float, bytes, int]] = []
        for path in self._directory.glob("??/*"):
            try:
                digest, stat = bytes.fromhex(path.name), path.stat()
            except ValueError:  # a temporary file that a crash left behind
                with suppress(OSError):
                    path.unlink()
                continue
            except OSError:
                continue
            found.append((stat.st_mtime, digest, stat.st_size))
        for _, digest, size in sorted(found):
            self._sizes[digest] = size
            self.bytes += size

    def _evict(self, wanted: int, keep: Collection[bytes]) -> bool:
        """Make room for `wanted` bytes, under the limit and on the disk; return whether there is room now."""
        over = max(self.bytes + wanted - self._limit, wanted - self._room())
        if over <= 0:
            return True
        loose = [digest for digest in self._sizes if digest not in keep]
        if sum(self._sizes[digest] for digest in loose) < over:
            return False
        self._drop(loose, over)
        return True

    def _drop(self, digests: Iterable[bytes], over: int) -> None:
        """Remove blobs until they were `over` bytes."""
        enough = self.bytes - over
        for digest in digests:
            if self.bytes <= enough:
                return
            self._counters["cache_evicted"] += 1
            self._remove(digest)

    def _room(self) -> int:
        try:
            return self._room_bytes(self._directory)
        except OSError:  # no directory yet, or a disk that does not tell: it will when it is written to
            return sys.maxsize

    def _remove(self, digest: bytes) -> None:
        with suppress(OSError):
            self._path(digest).unlink()
        self._forget(digest)

    def _forget(self, digest: bytes) -> None:
        self._checked.pop(digest, None)
        self.bytes -= self._sizes.pop(digest, 0)


# ----------------------------------------------------------------------------------------------------------------------
# One load: which tiles its weights are made of, which of them are missing, and what is complete.


@dataclass(slots=True)
class LoadJob:
    """A load and how far it is.

    destinations: where each tile goes. order: of the tiles in the weights; ordered_missing: those of them that are
    taken nearly in this order. on_disk, to_request, requested: where the missing ones come from. deferred: came by
    air, and wait on disk. total_bytes: of the tiles; until the manifest says them, of the weights. early_manifest:
    the manifest's bytes, come while another load was under way.
    """

    load: Load
    early_manifest: bytes | None = None
    manifest: Manifest | None = None
    buffers: dict[WeightRef, WeightBuffer | BlockBuffer] = field(default_factory=dict)
    tiles_left: dict[WeightRef, int] = field(default_factory=dict)
    destinations: dict[bytes, list[tuple[WeightRef, TileLocation]]] = field(default_factory=dict)
    pinned: set[bytes] = field(default_factory=set)
    missing: set[bytes] = field(default_factory=set)
    order: dict[bytes, int] = field(default_factory=dict)
    ordered_missing: deque[bytes] = field(default_factory=deque)
    deferred: set[bytes] = field(default_factory=set)
    on_disk: deque[bytes] = field(default_factory=deque)
    to_request: deque[bytes] = field(default_factory=deque)
    requested: dict[bytes, None] = field(default_factory=dict)
    weights: dict[WeightRef, Weight] = field(default_factory=dict)
    done_bytes: int = 0
    total_bytes: int = 0
    hash_mismatches: int = 0

    def may_accept(self, digest: bytes) -> bool:
        """Return whether a missing tile may be taken now: where order matters, if few older ones are missing."""
        while self.ordered_missing and self.ordered_missing[0] not in self.missing:
            self.ordered_missing.popleft()
        return not self.ordered_missing or self.order[digest] < self.order[self.ordered_missing[0]] + TILES_AHEAD

    def plan_tiles(self, manifest: Manifest, held: Mapping[WeightRef, Weight]) -> None:
        """Find out which tiles are missing, `held` being there already; raises ModelError for another's manifest."""
        if manifest.model != self.load.model:
            raise ModelError(
                f"the manifest is that of model {manifest.model}, not {self.load.model}; restart the planner"
            )
        self.manifest = manifest
        for ref in dict.fromkeys(self.load.matrices.values()):
            if ref in held:
                self.weights[ref] = held[ref]
                continue
            tiles = manifest.tiles(ref)
            self.buffers[ref], self.tiles_left[ref] = allocate(ref), len(tiles)
            if not tiles:
                self.weights[ref] = self.buffers.pop(ref).finish()
            for place in tiles:
                self.destinations.setdefault(place.hash, []).append((ref, place))
        self.total_bytes = sum(places[0][1].nbytes for places in self.destinations.values())
        self.missing = set(self.destinations)
        self.order = {digest: place for place, digest in enumerate(self.destinations)}
        # Only blocks in int8 are held wide until they are complete; all else takes its tiles as they come.
        self.ordered_missing = deque(self.destinations if any(loading_bytes(ref) for ref in self.buffers) else ())
        self.pinned = {self.load.manifest, *self.destinations}

    def write_tile(self, ref: WeightRef, place: TileLocation, data: bytes | memoryview) -> None:
        """Put a tile into a weight that it is part of."""
        self.buffers[ref].put(tile_array(place, data), place.row0, place.column0)
        self.tiles_left[ref] -= 1
        if not self.tiles_left[ref]:
            self.weights[ref] = self.buffers.pop(ref).finish()


# ----------------------------------------------------------------------------------------------------------------------
# The weight loader: from a manifest's tiles to packed weights, by way of the disk cache or the planner.
#
# A state machine with the time as an argument; `LoaderThread` gives it a thread. Loads run one after the other and take
# their tiles nearly in order, so that memory while loading is the weights themselves, the few tiles under way, and the
# int8 blocks of which a part is missing (`cost.memory.loading_overhead_bytes`).


WINDOW: Final = 16  # requested tiles that have not come yet; one while exchanges share the link
RETRY_S: Final = 3.0
PROGRESS_S: Final = 0.5
MAX_MISMATCHES: Final = 3
MAX_REMEMBERED: Final = 1 << 16  # hashes once asked for: a late answer to them is no damaged tile

LoadEvent = Loaded | LoadFailed | LoadProgress


class WeightLoader:
    """Makes matrices resident, of which the weights of plan versions are views; the session says which of them stay.

    emit: gets Loaded, LoadFailed, LoadProgress. request_tiles: sends a TileAsk to the planner. window: returns how many
    tiles may be requested now. counters: `tiles_asked`, `tiles_reasked`, `tiles_received`, `tile_bytes_received`,
    `tiles_cached`, `tiles_mismatched`, `tiles_unneeded`.
    """

    def __init__(
        self,
        cache: TileCache,
        emit: Callable[[LoadEvent], None],
        request_tiles: Callable[[str, tuple[bytes, ...], float], None],
        counters: Counter[str],
        window: Callable[[], int] = lambda: WINDOW,
    ) -> None:
        self._cache = cache
        self._emit = emit
        self._ask, self._window = request_tiles, window
        self._counters = counters
        self._jobs: deque[LoadJob] = deque()
        self._held: dict[Place, Weight] = {}
        self._requested_before: set[bytes] = set()
        self._last_arrival_s = 0.0
        self._last_report_s = float("-inf")

    # -- what the session wants ----------------------------------------------------------------------------------

    def load(self, load: Load, now: float) -> None:
        """Begin, or queue, a load, and say so."""
        self._keep(load.keep)
        new = {m for m in load.matrices.values() if (load.manifest, m) not in self._held}
        self._jobs.append(job := LoadJob(load, total_bytes=max(weights_bytes(new), 1)))
        if len(self._jobs) == 1:
            self._begin(now)
        if any(other is job for other in self._jobs):
            self._emit_progress(job)

    def unload(self, unload: Unload, now: float) -> None:
        """Cancel the load of a plan version, or give up what of its weights is not to be kept."""
        key = (unload.model, unload.plan_version)
        active = self._jobs[0] if self._jobs else None
        self._jobs = deque(j for j in self._jobs if (j.load.model, j.load.plan_version) != key)
        self._keep(unload.keep)
        if self._jobs and self._jobs[0] is not active:
            self._begin(now)
        return_memory()

    def _keep(self, places: Collection[Place]) -> None:
        self._held = {place: weight for place, weight in self._held.items() if place in places}

    # -- what the network says -----------------------------------------------------------------------------------

    def on_tile(self, body: bytes | memoryview, addressed_here: bool, now: float) -> None:
        """Accept a tile or a manifest; addressed_here: sent to this device alone, so it must have been requested."""
        if not self._jobs:
            self._counters["tiles_unneeded"] += 1
            return
        job, digest = self._jobs[0], tile_hash(body)
        waiting = [other for other in self._jobs if other is not job and other.load.manifest == digest]
        if digest in job.missing or (job.manifest is None and digest == job.load.manifest):
            self._last_arrival_s = now
            self._receive(digest, body, job)
            if digest in job.missing and not job.may_accept(digest):  # sent to another device: from disk, in its turn
                if digest not in job.deferred:
                    job.deferred.add(digest)
                    insort(job.on_disk, digest, key=job.order.__getitem__)
                self._report_progress(now)
                return
            self._fail_on_error(job, lambda: self._accept(job, digest, body, now), now)
        elif waiting:  # the answer took longer than a turn
            self._receive(digest, body, job)
            for other in waiting:
                other.early_manifest = bytes(body)
        elif addressed_here and digest not in self._requested_before:
            self._mismatch(job, now)
        else:
            self._counters["tiles_unneeded"] += 1

    def _receive(self, digest: bytes, body: bytes | memoryview, job: LoadJob) -> None:
        if digest not in self._cache:  # else it is on disk, and was sent to everybody for somebody else
            self._counters["tiles_received"] += 1
            self._counters["tile_bytes_received"] += len(body)
        self._cache.put(digest, body, job.pinned)

    def request_again(self, now: float) -> None:
        """Request all outstanding tiles again: the connection or the planner is back."""
        if self._jobs and self._jobs[0].requested:
            job = self._jobs[0]
            self._counters["tiles_reasked"] += len(job.requested)
            self._last_arrival_s = now
            self._ask(job.load.model, tuple(job.requested), self.share)

    # -- time ----------------------------------------------------------------------------------------------------

    def step(self, now: float) -> bool:
        """Do a piece of work that waits for nobody (one tile from disk); return whether there is more of it."""
        job = self._jobs[0] if self._jobs else None
        if job is None or not job.on_disk:
            return False
        if not job.may_accept(job.on_disk[0]):
            return False  # goes on when an older one has come by air
        digest = job.on_disk.popleft()
        if digest not in job.missing:  # it came by air meanwhile
            return True
        data = self._cache.get(digest)
        if data is None:
            job.deferred.discard(digest)
            job.to_request.appendleft(digest)
            self._ask_more(job, now)
            return True
        self._counters["tiles_cached"] += 1
        self._fail_on_error(job, lambda: self._accept(job, digest, data, now), now)
        return True

    def retry_if_due(self, now: float) -> None:
        """Ask again for tiles when none of them has come for `AGAIN_S`, or go on with the next load first."""
        deadline = self.deadline()
        if deadline is None or now < deadline:
            return
        if len(self._jobs) > 1 and self._jobs[0].manifest is None:  # perhaps nobody has it: a forged Prepare
            self._jobs.rotate(-1)
            self._begin(now)
        else:
            self.request_again(now)

    def deadline(self) -> float | None:
        """Return when `tick` has something to do, or None."""
        return self._last_arrival_s + RETRY_S if self._jobs and self._jobs[0].requested else None

    @property
    def share(self) -> float:
        """Return the share of the device that the current load may take from runs."""
        return max(self._jobs[0].load.share, BACKGROUND_SHARE) if self._jobs else BACKGROUND_SHARE

    def fail_current(self, error: HeptiError, now: float) -> None:
        """Give up the load that is under way."""
        if self._jobs:
            self._fail(self._jobs[0], error, now)

    # -- the load under way --------------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        job = self._jobs[0]
        digest = job.load.manifest
        data = job.early_manifest or self._cache.get(digest)
        if data is None:
            self._request(job, (digest,), now)
        else:
            self._fail_on_error(job, lambda: self._accept(job, digest, data, now), now)

    def _accept(self, job: LoadJob, digest: bytes, data: bytes | memoryview, now: float) -> None:
        job.requested.pop(digest, None)
        if job.manifest is None:
            self._plan(job, Manifest.decode(bytes(data)))
        else:
            job.missing.remove(digest)
            job.done_bytes += len(data)
            for ref, place in job.destinations[digest]:
                job.write_tile(ref, place, data)
        if job.missing:
            self._ask_more(job, now)
            self._report_progress(now)
        else:
            self._finish(job, now)

    def _plan(self, job: LoadJob, manifest: Manifest) -> None:
        """Find out which tiles are needed and where each of them goes."""
        own = job.load.manifest
        job.plan_tiles(manifest, {matrix: weight for (digest, matrix), weight in self._held.items() if digest == own})
        for digest in job.destinations:
            (job.on_disk if digest in self._cache else job.to_request).append(digest)

    def _ask_more(self, job: LoadJob, now: float) -> None:
        window = self._window()
        if len(job.requested) > window // 2 or not job.to_request:
            return
        new: list[bytes] = []
        while job.to_request and len(job.requested) + len(new) < window and job.may_accept(job.to_request[0]):
            digest = job.to_request.popleft()
            if digest in job.missing and digest not in job.deferred:
                new.append(digest)
        self._request(job, tuple(new), now)

    def _request(self, job: LoadJob, digests: tuple[bytes, ...], now: float) -> None:
        if digests:
            job.requested.update(dict.fromkeys(digests))
            if len(self._requested_before) > MAX_REMEMBERED:
                self._requested_before.clear()
            self._requested_before.update(digests)
            self._counters["tiles_asked"] += len(digests)
            self._last_arrival_s = now
            self._ask(job.load.model, digests, self.share)

    def _mismatch(self, job: LoadJob, now: float) -> None:
        self._counters["tiles_mismatched"] += 1
        job.hash_mismatches += 1
        if job.hash_mismatches >= MAX_MISMATCHES:
            error = WireError(
                f"{job.hash_mismatches} weight tiles of {job.load.model} arrived with a wrong SHA-256; "
                "run `hepti model verify` on the planner's machine"
            )
            self._fail(job, error, now)
        elif len(job.requested) == 1:
            self.request_again(now)

    def _finish(self, job: LoadJob, now: float) -> None:
        load = job.load
        self._held.update(((load.manifest, matrix), weight) for matrix, weight in job.weights.items())
        views = {ref: part(job.weights[matrix], matrix, ref) for ref, matrix in load.matrices.items()}
        self._emit(Loaded(load.model, load.plan_version, views))
        self._next(now)

    def _fail(self, job: LoadJob, error: HeptiError, now: float) -> None:
        self._emit(LoadFailed(job.load.model, job.load.plan_version, error))
        self._next(now)

    def _next(self, now: float) -> None:
        self._jobs.popleft()
        return_memory()
        if self._jobs:
            self._begin(now)

    def _report_progress(self, now: float) -> None:
        if now - self._last_report_s < PROGRESS_S:
            return
        self._last_report_s = now
        for job in self._jobs:  # also those that wait, or the planner would give them up
            self._emit_progress(job)

    def _emit_progress(self, job: LoadJob) -> None:
        self._emit(LoadProgress(job.load.model, job.load.plan_version, job.done_bytes, job.total_bytes))

    def _fail_on_error(self, job: LoadJob, act: Callable[[], None], now: float) -> None:
        """Run `act`; an error ends this load with a LoadFailed and leaves the others alone."""
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
# The weight loader's thread, and what is posted to it.


QUEUED_BYTES: Final = 64 << 20  # tiles that wait for the loader's thread; more than the window only if others' tiles


@dataclass(frozen=True, slots=True)
class TileIn:
    """The body of a tile frame; `addressed_here` as in `WeightLoader.tile`."""

    body: bytes | memoryview
    addressed_here: bool


@dataclass(frozen=True, slots=True)
class RequestAgain:
    """The connection or the planner is back."""


Input = Load | Unload | TileIn | RequestAgain


class LoaderThread:
    """Runs a `WeightLoader` in its own thread, tile by tile as the budget allows; `post` is safe from any thread."""

    def __init__(
        self, loader: WeightLoader, counters: Counter[str], log: logging.Logger, budget: Budget | None = None
    ) -> None:
        self._loader = loader
        self._counters = counters
        self._log = log
        self._budget = budget or Budget()
        self._arrived: deque[TileIn] = deque()
        self._has_more = False  # perhaps a tile on disk
        self._inputs: SimpleQueue[Input | Literal["stop"]] = SimpleQueue()
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self._thread = threading.Thread(target=self._run, name="hepti-loader", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._inputs.put("stop")
        if self._thread.is_alive():
            self._thread.join()

    def post(self, item: Input) -> None:
        """Hand over work; tiles beyond `QUEUED_BYTES` are dropped and counted, and asked for again later."""
        if isinstance(item, TileIn):
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
                self._has_more = True  # the next load may be on disk, and then nothing else wakes this thread

    def _next(self) -> Input | Literal["stop"] | None:
        """Return what was posted, None once there is work to go on with."""
        if self._arrived or self._has_more:
            timeout_s: float | None = self._budget.pause_s(time.perf_counter())
        else:
            deadline = self._loader.deadline()
            timeout_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        try:
            return self._inputs.get(block=timeout_s != 0, timeout=timeout_s)
        except Empty:
            return None

    def _abandon(self, cause: Exception) -> None:
        """Fail the current load; never raises, because this thread must go on."""
        try:
            self._log.exception("the weight loader failed")
            error = ModelError(f"the weight loader failed: {cause!r}; see the agent's log")
            self._loader.fail_current(error, time.monotonic())
        except Exception:
            self._log.exception("the load that failed could not be given up")

    def _turn(self, item: Input | None) -> None:
        now, begun_s = time.monotonic(), time.thread_time()
        match item:
            case Load():
                self._loader.load(item, now)
            case Unload():
                self._loader.unload(item, now)
            case TileIn():
                self._arrived.append(item)
            case RequestAgain():
                self._loader.request_again(now)
            case None:
                if not self._arrived:  # else what was asked for has come
                    self._loader.retry_if_due(now)
        self._has_more = self._has_more or item is not None
        self._budget.share = self._loader.share
        if self._budget.pause_s(time.perf_counter()) == 0:
            self._step(now)
        self._budget.spend(time.thread_time() - begun_s, time.perf_counter())

    def _step(self, now: float) -> None:
        """Take one tile, one that has come before one on disk."""
        if self._arrived:
            tile = self._arrived.popleft()
            with self._lock:
                self._queued_bytes -= len(tile.body)
            self._loader.on_tile(tile.body, tile.addressed_here, now)
        self._has_more = self._loader.step(now)
