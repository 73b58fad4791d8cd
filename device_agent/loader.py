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
from typing import Final, NamedTuple

from hepti_mqtt.config.state import write_atomically
from hepti_mqtt.cost.memory import weight_total
from hepti_mqtt.errors import HeptiError, ModelError, PlanError, WireError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.kernels import Weight, WeightBuffer, allocate, loading_bytes
from hepti_mqtt.kernels.machine.release import return_memory
from hepti_mqtt.program import WeightRef
from hepti_mqtt.protocol.manifest import TILES_AHEAD, Manifest, TilePlace, tile_array, tile_hash
from hepti_mqtt.runtime.worker.interface import Load, Loaded, LoadFailed, LoadProgress, Unload

RESERVE_BYTES: Final = 64 << 20  # of the disk, or a twentieth of a small one: left to whatever else must be written
_SMALL: Final = 20
_log: Final = logging.getLogger("hepti.agent")


def room_bytes(directory: Path) -> int:
    """Return how much tiles may still take on a directory's disk; below 0 they take too much already."""
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
    can be had again, and nothing else of a device can. room_bytes: as the function of that name. counters:
    `cache_corrupt` files whose bytes were not those of their name, `cache_evicted`, `cache_errors` of the file system.
    Not thread safe.
    """

    def __init__(
        self,
        directory: Path,
        limit_bytes: int,
        counters: Counter[str],
        room_bytes: Callable[[Path], int] = room_bytes,
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
        self._used(digest, path, found)
        return data

    def _used(self, digest: bytes, path: Path, found: _Stamp) -> None:
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
                self._full("the disk is full")
            return
        path = self._path(digest)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, bytes(data))
        except OSError as error:
            self._counters["cache_errors"] += 1
            self._full(error.strerror or str(error))
            return
        self._sizes[digest] = len(data)
        self.bytes += len(data)

    def _full(self, why: str) -> None:
        """Say once that weights are not kept, which nobody would notice before the next start."""
        if not self._told:
            _log.warning(
                "weights are not kept in %s (%s): each start loads them anew; make room there, or choose another "
                "place with --cache",
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
class Job:
    """A load and how far it is.

    places: where each tile goes. order: of the tiles in the weights; in_order: those of them that are taken nearly in
    this order. on_disk, to_ask, asked: where the missing ones come from. set_aside: came by air, and wait on disk.
    total_bytes: of the tiles; until the manifest says them, of the weights. early: the manifest's bytes, come while
    another load was under way.
    """

    load: Load
    early: bytes | None = None
    manifest: Manifest | None = None
    buffers: dict[WeightRef, WeightBuffer] = field(default_factory=dict)
    left: dict[WeightRef, int] = field(default_factory=dict)
    places: dict[bytes, list[tuple[WeightRef, TilePlace]]] = field(default_factory=dict)
    keep: set[bytes] = field(default_factory=set)
    missing: set[bytes] = field(default_factory=set)
    order: dict[bytes, int] = field(default_factory=dict)
    in_order: deque[bytes] = field(default_factory=deque)
    set_aside: set[bytes] = field(default_factory=set)
    on_disk: deque[bytes] = field(default_factory=deque)
    to_ask: deque[bytes] = field(default_factory=deque)
    asked: dict[bytes, None] = field(default_factory=dict)
    weights: dict[WeightRef, Weight] = field(default_factory=dict)
    done_bytes: int = 0
    total_bytes: int = 0
    mismatches: int = 0

    def may_take(self, digest: bytes) -> bool:
        """Return whether a missing tile may be taken now: where order matters, if few older ones are missing."""
        while self.in_order and self.in_order[0] not in self.missing:
            self.in_order.popleft()
        return not self.in_order or self.order[digest] < self.order[self.in_order[0]] + TILES_AHEAD

    def plan(self, manifest: Manifest, held: Mapping[WeightRef, Weight]) -> None:
        """Find out which tiles are missing, `held` being there already; raises ModelError for another's manifest."""
        if manifest.model != self.load.model:
            raise ModelError(
                f"the manifest is that of model {manifest.model}, not {self.load.model}; restart the planner"
            )
        self.manifest = manifest
        for ref in self.load.refs:
            if ref in held:
                self.weights[ref] = held[ref]
                continue
            tiles = manifest.tiles(ref)
            self.buffers[ref], self.left[ref] = allocate(ref), len(tiles)
            if not tiles:
                self.weights[ref] = self.buffers.pop(ref).finish()
            for place in tiles:
                self.places.setdefault(place.hash, []).append((ref, place))
        self.total_bytes = sum(places[0][1].nbytes for places in self.places.values())
        self.missing = set(self.places)
        self.order = {digest: place for place, digest in enumerate(self.places)}
        # Only blocks in int8 are held wide until they are complete; all else takes its tiles as they come.
        self.in_order = deque(self.places if any(loading_bytes(ref) for ref in self.buffers) else ())
        self.keep = {self.load.manifest, *self.places}

    def put(self, ref: WeightRef, place: TilePlace, data: bytes | memoryview) -> None:
        """Put a tile into a weight that it is part of."""
        self.buffers[ref].put(tile_array(place, data), place.row0, place.column0)
        self.left[ref] -= 1
        if not self.left[ref]:
            self.weights[ref] = self.buffers.pop(ref).finish()


# ----------------------------------------------------------------------------------------------------------------------
# The weight loader: from a manifest's tiles to packed weights, by way of the disk cache or the planner.
#
# It is a state machine with the time as an argument; `loader_thread` gives it a thread. Loads run one after the other
# and
# take their tiles nearly in order, so that memory while loading is the weights themselves, the few tiles under way,
# and
# the int8 blocks of which a part is missing (`simulate.loading_total`).


WINDOW: Final = 16  # tiles asked for and not yet there
AGAIN_S: Final = 3.0
PROGRESS_S: Final = 0.5
MISMATCHES: Final = 3
REMEMBERED: Final = 1 << 16  # hashes once asked for: a late answer to them is no damaged tile

Event = Loaded | LoadFailed | LoadProgress


@dataclass(slots=True)
class _Held:
    weight: Weight
    nbytes: int
    users: set[tuple[str, Epoch]]


class WeightLoader:
    """Makes weights resident and shares them between epochs.

    Those that no epoch uses any more stay as long as there is room, so that a plan that comes back is there at once.

    emit: gets Loaded, LoadFailed, LoadProgress. ask: sends a TileAsk to the planner. counters: `tiles_asked`,
    `tiles_reasked`, `tiles_received`, `tile_bytes_received`, `tiles_cached`, `tiles_mismatched`, `tiles_unneeded`.
    """

    def __init__(
        self,
        cache: TileCache,
        emit: Callable[[Event], None],
        ask: Callable[[str, tuple[bytes, ...]], None],
        counters: Counter[str],
    ) -> None:
        self._cache = cache
        self._emit = emit
        self._ask = ask
        self._counters = counters
        self._jobs: deque[Job] = deque()
        self._held: dict[tuple[bytes, WeightRef], _Held] = {}  # last used, last in order
        self._ever_asked: set[bytes] = set()
        self._moved_s = 0.0
        self._told_s = float("-inf")

    # -- what the session wants ----------------------------------------------------------------------------------

    def load(self, load: Load, now: float) -> None:
        """Begin, or queue, a load, and say so."""
        self._jobs.append(job := Job(load, total_bytes=max(weight_total(load.refs), 1)))
        wanted = {(load.manifest, ref) for ref in load.refs}
        self._make_room(load.spare_bytes, wanted)
        if len(self._jobs) == 1:
            self._begin(now)
        if any(other is job for other in self._jobs):
            self._say(job)

    def unload(self, unload: Unload, now: float) -> None:
        """Cancel the load of an epoch, or give up its weights where no other epoch uses them."""
        key = (unload.model, unload.epoch)
        active = self._jobs[0] if self._jobs else None
        self._jobs = deque(j for j in self._jobs if (j.load.model, j.load.epoch) != key)
        for held in self._held.values():
            held.users.discard(key)
        self._make_room(unload.spare_bytes)
        if self._jobs and self._jobs[0] is not active:
            self._begin(now)
        return_memory()

    def _make_room(self, spare_bytes: float, wanted: Collection[tuple[bytes, WeightRef]] = ()) -> None:
        """Give up weights that nobody uses or wants, oldest first, until the others take at most `spare_bytes`."""
        spare = [ref for ref, held in self._held.items() if not held.users and ref not in wanted]
        left = sum(self._held[ref].nbytes for ref in spare)
        for ref in spare:
            if left <= spare_bytes:
                break
            left -= self._held.pop(ref).nbytes

    # -- what the network says -----------------------------------------------------------------------------------

    def tile(self, body: bytes | memoryview, mine: bool, now: float) -> None:
        """Take the bytes of a tile or a manifest; `mine`: it came to this device alone, so it must be one asked for."""
        if not self._jobs:
            self._counters["tiles_unneeded"] += 1
            return
        job, digest = self._jobs[0], tile_hash(body)
        waiting = [other for other in self._jobs if other is not job and other.load.manifest == digest]
        if digest in job.missing or (job.manifest is None and digest == job.load.manifest):
            self._moved_s = now
            self._receive(digest, body, job)
            if digest in job.missing and not job.may_take(digest):  # sent to another device: from disk, in its turn
                if digest not in job.set_aside:
                    job.set_aside.add(digest)
                    insort(job.on_disk, digest, key=job.order.__getitem__)
                self._tell(now)
                return
            self._guarded(job, lambda: self._take(job, digest, body, now), now)
        elif waiting:  # the answer took longer than a turn
            self._receive(digest, body, job)
            for other in waiting:
                other.early = bytes(body)
        elif mine and digest not in self._ever_asked:
            self._mismatch(job, now)
        else:
            self._counters["tiles_unneeded"] += 1

    def _receive(self, digest: bytes, body: bytes | memoryview, job: Job) -> None:
        if digest not in self._cache:  # else it is on disk, and was sent to everybody for somebody else
            self._counters["tiles_received"] += 1
            self._counters["tile_bytes_received"] += len(body)
        self._cache.put(digest, body, job.keep)

    def again(self, now: float) -> None:
        """Ask anew for everything that is outstanding: the connection or the planner is back."""
        if self._jobs and self._jobs[0].asked:
            job = self._jobs[0]
            self._counters["tiles_reasked"] += len(job.asked)
            self._moved_s = now
            self._ask(job.load.model, tuple(job.asked))

    # -- time ----------------------------------------------------------------------------------------------------

    def step(self, now: float) -> bool:
        """Do a piece of work that waits for nobody (one tile from disk); return whether there is more of it."""
        job = self._jobs[0] if self._jobs else None
        if job is None or not job.on_disk:
            return False
        if not job.may_take(job.on_disk[0]):
            return False  # goes on when an older one has come by air
        digest = job.on_disk.popleft()
        if digest not in job.missing:  # it came by air meanwhile
            return True
        data = self._cache.get(digest)
        if data is None:
            job.set_aside.discard(digest)
            job.to_ask.appendleft(digest)
            self._ask_more(job, now)
            return True
        self._counters["tiles_cached"] += 1
        self._guarded(job, lambda: self._take(job, digest, data, now), now)
        return True

    def tick(self, now: float) -> None:
        """Ask again for tiles when none of them has come for `AGAIN_S`, or go on with the next load first."""
        deadline = self.deadline()
        if deadline is None or now < deadline:
            return
        if len(self._jobs) > 1 and self._jobs[0].manifest is None:  # perhaps nobody has it: a forged Prepare
            self._jobs.rotate(-1)
            self._begin(now)
        else:
            self.again(now)

    def deadline(self) -> float | None:
        """Return when `tick` has something to do, or None."""
        return self._moved_s + AGAIN_S if self._jobs and self._jobs[0].asked else None

    def abandon(self, error: HeptiError, now: float) -> None:
        """Give up the load that is under way."""
        if self._jobs:
            self._fail(self._jobs[0], error, now)

    # -- the load under way --------------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        job = self._jobs[0]
        digest = job.load.manifest
        data = job.early or self._cache.get(digest)
        if data is None:
            self._ask_for(job, (digest,), now)
        else:
            self._guarded(job, lambda: self._take(job, digest, data, now), now)

    def _take(self, job: Job, digest: bytes, data: bytes | memoryview, now: float) -> None:
        job.asked.pop(digest, None)
        if job.manifest is None:
            self._plan(job, Manifest.decode(bytes(data)))
        else:
            job.missing.remove(digest)
            job.done_bytes += len(data)
            for ref, place in job.places[digest]:
                job.put(ref, place, data)
        if job.missing:
            self._ask_more(job, now)
            self._tell(now)
        else:
            self._finish(job, now)

    def _plan(self, job: Job, manifest: Manifest) -> None:
        """Find out which tiles are needed and where each of them goes."""
        held = ((ref, self._held.get((job.load.manifest, ref))) for ref in job.load.refs)
        job.plan(manifest, {ref: there.weight for ref, there in held if there is not None})
        for digest in job.places:
            (job.on_disk if digest in self._cache else job.to_ask).append(digest)

    def _ask_more(self, job: Job, now: float) -> None:
        if len(job.asked) > WINDOW // 2 or not job.to_ask:
            return
        new: list[bytes] = []
        while job.to_ask and len(job.asked) + len(new) < WINDOW and job.may_take(job.to_ask[0]):
            digest = job.to_ask.popleft()
            if digest in job.missing and digest not in job.set_aside:
                new.append(digest)
        self._ask_for(job, tuple(new), now)

    def _ask_for(self, job: Job, digests: tuple[bytes, ...], now: float) -> None:
        if digests:
            job.asked.update(dict.fromkeys(digests))
            if len(self._ever_asked) > REMEMBERED:
                self._ever_asked.clear()
            self._ever_asked.update(digests)
            self._counters["tiles_asked"] += len(digests)
            self._moved_s = now
            self._ask(job.load.model, digests)

    def _mismatch(self, job: Job, now: float) -> None:
        self._counters["tiles_mismatched"] += 1
        job.mismatches += 1
        if job.mismatches >= MISMATCHES:
            error = WireError(
                f"{job.mismatches} weight tiles of {job.load.model} arrived with another SHA-256 than was asked for; "
                "run `hepti model verify` on the planner's machine"
            )
            self._fail(job, error, now)
        elif len(job.asked) == 1:
            self.again(now)

    def _finish(self, job: Job, now: float) -> None:
        load = job.load
        for ref, weight in job.weights.items():
            place = (load.manifest, ref)
            held = self._held.pop(place, None) or _Held(weight, weight_total([ref]), set())
            held.users.add((load.model, load.epoch))
            self._held[place] = held
        self._emit(Loaded(load.model, load.epoch, job.weights))
        self._next(now)

    def _fail(self, job: Job, error: HeptiError, now: float) -> None:
        self._emit(LoadFailed(job.load.model, job.load.epoch, error))
        self._next(now)

    def _next(self, now: float) -> None:
        self._jobs.popleft()
        return_memory()
        if self._jobs:
            self._begin(now)

    def _tell(self, now: float) -> None:
        if now - self._told_s < PROGRESS_S:
            return
        self._told_s = now
        for job in self._jobs:  # also those that wait, or the planner would give them up
            self._say(job)

    def _say(self, job: Job) -> None:
        self._emit(LoadProgress(job.load.model, job.load.epoch, job.done_bytes, job.total_bytes))

    def _guarded(self, job: Job, act: Callable[[], None], now: float) -> None:
        """Run `act`; what goes wrong with one load ends that load, with the reason."""
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
    """The body of a tile frame; `mine` as in `WeightLoader.tile`."""

    body: bytes | memoryview
    mine: bool


@dataclass(frozen=True, slots=True)
class AskAgain:
    """The connection or the planner is back."""


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


Input = Load | Unload | TileIn | AskAgain | _Stop


class LoaderThread:
    """Runs a `WeightLoader` in a thread of its own; `post` is safe from any thread."""

    def __init__(self, loader: WeightLoader, counters: Counter[str], log: logging.Logger) -> None:
        self._loader = loader
        self._counters = counters
        self._log = log
        self._inputs: SimpleQueue[Input] = SimpleQueue()
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self._thread = threading.Thread(target=self._run, name="hepti-loader", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._inputs.put(_Stop())
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
        busy = False
        while True:
            deadline = self._loader.deadline()
            timeout = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            try:
                item = self._inputs.get(block=not busy, timeout=timeout)
            except Empty:
                item = None
            if isinstance(item, _Stop):
                return
            try:
                busy = self._turn(item)
            except Exception as exc:
                self._abandon(exc)
                busy = True  # the next load may be on disk, and then nothing else wakes this thread

    def _abandon(self, cause: Exception) -> None:
        """Give up the load that is under way, whatever comes of that: this thread must not end."""
        try:
            self._log.exception("the weight loader failed")
            error = ModelError(f"the weight loader failed: {cause!r}; see the agent's log")
            self._loader.abandon(error, time.monotonic())
        except Exception:
            self._log.exception("the load that failed could not be given up")

    def _turn(self, item: Load | Unload | TileIn | AskAgain | None) -> bool:
        now = time.monotonic()
        match item:
            case Load():
                self._loader.load(item, now)
            case Unload():
                self._loader.unload(item, now)
            case TileIn(body, mine):
                with self._lock:
                    self._queued_bytes -= len(body)
                self._loader.tile(body, mine, now)
            case AskAgain():
                self._loader.again(now)
            case None:
                self._loader.tick(now)
        return self._loader.step(now)
