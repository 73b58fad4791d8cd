"""The weight loader: from a manifest's tiles to packed weights, by way of the disk cache or the planner.

It is a state machine with the time as an argument; `loader_thread` gives it a thread. Loads run one after the other and
take their tiles nearly in order, so that memory while loading is the weights themselves, the few tiles under way, and
the int8 blocks of which a part is missing (`simulate.loading_total`).
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from device_agent.load_job import Job
from device_agent.tiles import TileCache
from hepti_mqtt.errors import HeptiError, ModelError, PlanError, WireError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.kernels import Weight
from hepti_mqtt.kernels.machine.release import return_memory
from hepti_mqtt.program import WeightRef
from hepti_mqtt.runtime.device.commands import Load, Unload
from hepti_mqtt.runtime.device.events import Loaded, LoadFailed, LoadProgress
from hepti_mqtt.simulate import weight_total
from hepti_mqtt.wire.manifest import Manifest, tile_hash

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
