"""Weights: tiles asked for, kept on disk and put together, on the loader's own thread, within memory."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from itertools import pairwise
from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
import pytest
from device_agent_support import LOG, Device, Model, check_weights, sha
from hypothesis import given
from hypothesis import strategies as st

from device_agent.budget import Budget
from device_agent.loader import (
    CACHED_S,
    MAX_MISMATCHES,
    PROGRESS_S,
    RATE_BYTES,
    LoaderThread,
    Rate,
    RequestAgain,
    TileIn,
    WeightLoader,
)
from device_agent.tile_cache import TileCache
from hepti_mqtt.core.errors import ModelError, PlanError, WireError
from hepti_mqtt.core.ids import PLANNER, PlanVersion
from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.cost.loads import TileMap
from hepti_mqtt.cost.memory import loading_overhead_bytes
from hepti_mqtt.kernels import arrays_of, loading_bytes
from hepti_mqtt.kernels.weights import NR
from hepti_mqtt.protocol.manifest import Manifest, tile_hash
from hepti_mqtt.runtime.worker.interface import Loaded, LoadFailed, LoadProgress, Unload
from hepti_mqtt.runtime.worker.tile_sources import PLANNER_ANSWER_S

MODEL = Model()
BIG = Model(seed=3, rows=1500, columns=1500)
WIDE = Model(seed=4, rows=4000, columns=3000)


@pytest.fixture
def device(tmp_path):
    return Device(tmp_path / "tiles")


def load(device, *args, **how):
    """Load the model and send all requested tiles; return the device."""
    device.loader.load(MODEL.load(*args, **how), device.now)
    device.serve(MODEL)
    return device


def test_weights_come_from_the_planner_at_first_and_from_disk_later(tmp_path):
    first = load(Device(tmp_path))
    (loaded,) = first.of(Loaded)
    assert (loaded.model, loaded.plan_version) == ("m", PlanVersion(1, 1))
    check_weights(MODEL, loaded.weights)
    assert first.counters["tiles_asked"] == 1 + len(MODEL.needed())
    again = load(Device(tmp_path))
    check_weights(MODEL, again.of(Loaded)[0].weights)
    assert (again.counters["tiles_asked"], again.counters["tile_bytes_received"]) == (0, 0)


def arrays(weights):
    return {ref: [array.copy() for array in arrays_of(weight)] for ref, weight in weights.items()}


def assert_equal(these, others):
    assert these.keys() == others.keys()
    for ref, found in these.items():
        for one, other in zip(found, others[ref], strict=True):
            np.testing.assert_array_equal(one, other)


STORED = [
    *(WeightRef("up", (10, 300), (0, 600), "packed", dtype) for dtype in ("f32", "w8a8")),
    WeightRef("up", (0, 299), (1, 598), "plain"),
]


@pytest.mark.parametrize("ref", STORED, ids=lambda ref: f"{ref.layout}-{ref.weight_dtype}")
def test_a_start_reads_packed_copies_instead_of_tiles(tmp_path, ref):
    first = load(Device(tmp_path), refs=(ref,))
    first.save()
    again = load(Device(tmp_path), refs=(ref,))
    assert_equal(arrays(again.of(Loaded)[0].weights), arrays(first.of(Loaded)[0].weights))
    assert (again.counters["tiles_cached"], again.counters["packed_cached"]) == (0, 1)
    assert not again.loader.has_unsaved
    other = load(Device(tmp_path), refs=(ref._replace(columns=(0, 300)),))
    assert other.counters["packed_cached"] == 0, "another range is packed from tiles"


@pytest.mark.parametrize(
    "damage", [lambda old: old[:-9], lambda old: old[:50] + b"!" + old[51:], lambda _: b"", lambda old: bytes(len(old))]
)
def test_a_damaged_packed_copy_is_made_again_from_tiles(tmp_path, damage):
    refs = (*STORED[:2], *MODEL.refs[1:])
    first = load(Device(tmp_path), refs=refs)
    first.save()
    for path in tmp_path.glob("??/*"):
        if len(path.name) > 64:
            path.write_bytes(damage(path.read_bytes()))
    again = load(Device(tmp_path), refs=refs)
    assert_equal(arrays(again.of(Loaded)[0].weights), arrays(first.of(Loaded)[0].weights))
    assert again.counters["cache_corrupt"] > 0
    assert again.counters["tiles_asked"] == 0


def test_a_packed_copy_in_use_is_not_evicted_and_its_weight_outlives_the_file(tmp_path):
    ref = STORED[0]
    first = load(Device(tmp_path), refs=(ref,))
    first.save()
    again = load(Device(tmp_path, first.cache.bytes), refs=(ref,))
    (packed,) = (path for path in tmp_path.glob("??/*") if len(path.name) > 64)
    large = bytes(first.cache.bytes)
    again.cache.put(sha(large), large)
    assert packed.exists()
    assert sha(large) not in again.cache
    packed.unlink()
    assert_equal(arrays(again.of(Loaded)[0].weights), arrays(first.of(Loaded)[0].weights))


def test_packed_copies_take_no_room_from_tiles_of_other_loads(tmp_path):
    blobs = {**MODEL.blobs, **BIG.blobs}
    needed = [*MODEL.needed(), *BIG.needed()]
    manifests = [MODEL.manifest.digest, BIG.manifest.digest]
    device = Device(tmp_path, sum(len(blobs[digest]) for digest in (*needed, *manifests)) + 1000)
    for number, model in enumerate((MODEL, BIG)):
        device.loader.load(replace(model.load(), plan_version=PlanVersion(1, 1 + number)), device.now)
    device.serve(SimpleNamespace(blobs=blobs))
    device.save()
    assert len(device.of(Loaded)) == 2
    assert all(digest in device.cache for digest in needed)
    assert device.counters["cache_evicted"] == 0
    assert not device.cache.trouble


def test_only_needed_tiles_are_asked_and_each_once(device):
    ref = WeightRef("up", (0, 20), (300, 310))
    twice = WeightRef("up", (5, 30), (290, 320))
    empty = (WeightRef("up", (0, 0), (0, 5)), WeightRef("bias", (0, 1), (3, 3), "plain"))
    load(device, refs=(ref, twice, *empty))
    check_weights(MODEL, device.of(Loaded)[0].weights, (ref, twice, *empty))
    assert device.counters["tiles_asked"] == 2  # manifest and one tile


def test_epochs_share_weights_as_long_as_they_are_kept(device):
    load(device, 1)
    asked = device.counters["tiles_asked"]
    more = (*MODEL.refs, WeightRef("up", (0, 300), (590, 600)))
    load(device, 2, more)
    first, second = device.of(Loaded)
    assert all(first.weights[ref] is second.weights[ref] for ref in MODEL.refs)
    assert device.counters["tiles_asked"] <= asked + 2
    device.loader.unload(Unload("m", PlanVersion(1, 1), MODEL.places(more)), device.now)
    device.loader.load(MODEL.load(3), device.now)
    assert device.of(Loaded)[2].weights[MODEL.refs[0]] is first.weights[MODEL.refs[0]]
    device.loader.unload(Unload("m", PlanVersion(1, 2), MODEL.places()), device.now)
    device.loader.unload(Unload("m", PlanVersion(1, 3)), device.now)
    load(device, 4)
    assert device.of(Loaded)[3].weights[MODEL.refs[0]] is not first.weights[MODEL.refs[0]]


def test_another_part_of_a_matrix_that_is_there_needs_no_tile(device):
    """Parts that touch are loaded as one matrix, in which any other parts are."""
    cuts = (0, 2 * NR, 5 * NR, 600)
    parts = tuple(WeightRef("up", (0, 300), ends) for ends in pairwise(cuts))
    biases = tuple(WeightRef("bias", (0, 1), ends, "plain") for ends in pairwise(cuts))
    load(device, 1, (*parts, *biases))
    check_weights(MODEL, device.of(Loaded)[0].weights, (*parts, *biases))
    asked, whole = (
        device.counters["tiles_asked"],
        (WeightRef("up", (0, 300), (0, 600)), biases[0]._replace(columns=(0, 600))),
    )
    other = (WeightRef("up", (0, 300), (NR, 3 * NR)), WeightRef("bias", (0, 1), (7, 9), "plain"))
    device.loader.load(MODEL.load(2, other, held=whole), device.now)
    assert device.counters["tiles_asked"] == asked
    check_weights(MODEL, device.of(Loaded)[1].weights, other)


def test_release_while_loading_cancels_and_the_next_load_begins(device):
    device.loader.load(MODEL.load(1), device.now)
    device.loader.load(MODEL.load(2), device.now)
    device.serve(MODEL, most=2)
    device.loader.unload(Unload("m", PlanVersion(1, 1)), device.now)
    device.serve(MODEL)
    (loaded,) = device.of(Loaded)
    assert loaded.plan_version == PlanVersion(1, 2)
    check_weights(MODEL, loaded.weights)


def test_damaged_tiles_are_asked_again_and_in_the_end_give_the_load_up(device):
    device.loader.load(MODEL.load(), device.now)
    for attempt in range(1, MAX_MISMATCHES):
        device.asks.clear()
        device.loader.on_tile(b"damaged", PLANNER, device.now)
        assert list(device.asks) == [MODEL.manifest.digest]
        assert device.counters["tiles_mismatched"] == attempt
    device.loader.on_tile(b"damaged", PLANNER, device.now)
    (failed,) = device.of(LoadFailed)
    assert isinstance(failed.error, WireError)
    assert device.loader.deadline() == float("inf")


def test_requested_tiles_are_requested_again_on_reconnection(device):
    device.loader.load(MODEL.load(), device.now)
    device.serve(MODEL, most=1)
    requested = set(device.asks)
    device.asks.clear()
    device.loader.request_again(device.now)
    assert set(device.asks) == requested
    assert device.counters["tiles_reasked"] == len(requested)


def test_a_load_that_nobody_has_holds_no_other_up(device):
    forged = replace(MODEL.load(9), manifest=b"\1" * 32)
    for load in (forged, MODEL.load(1)):
        device.loader.load(load, device.now)
    device.asks.clear()
    device.loader.retry_if_due(device.loader.deadline())
    device.serve(MODEL, most=1 + len(MODEL.needed()))
    (loaded,) = device.of(Loaded)
    assert loaded.plan_version == PlanVersion(1, 1)
    check_weights(MODEL, loaded.weights)
    assert set(device.asks) == {forged.manifest}, "it is asked for once more"


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_two_loads_end_where_every_answer_takes_longer_than_a_turn(tmp_path, limit):
    device, other = Device(tmp_path, limit), Model(seed=1)
    blobs = {**MODEL.blobs, **other.blobs}
    for number, model in ((1, MODEL), (2, other)):
        device.loader.load(model.load(number), device.now)
    for _ in range(20):
        late = list(device.asks)
        device.asks.clear()
        device.now = device.loader.deadline() or device.now
        device.loader.retry_if_due(device.now)
        for digest in late:
            device.loader.on_tile(blobs[digest], PLANNER, device.now)
        device.settle()
        if len(device.of(Loaded)) == 2:
            break
    for loaded in device.of(Loaded):
        check_weights(MODEL if loaded.plan_version == PlanVersion(1, 1) else other, loaded.weights)
    assert len(device.of(Loaded)) == 2
    assert not device.of(LoadFailed)


def test_progress_is_told_now_and_then_for_all_loads(device):
    refs = (WeightRef("up", (0, 1500), (0, 1500)),)
    device.loader.load(BIG.load(1, refs), device.now)
    device.loader.load(MODEL.load(2), device.now)
    for _ in range(10):
        device.serve(BIG, most=1)
        device.now += PROGRESS_S / 2
    told = [e for e in device.of(LoadProgress) if e.plan_version == PlanVersion(1, 1)]
    assert len(told) in (5, 6), "at once, and every PROGRESS_S"
    assert [e.done_bytes for e in told] == sorted(e.done_bytes for e in told)
    for _ in range(10):
        device.now += PLANNER_ANSWER_S
        device.loader.retry_if_due(device.now)
    assert len([e for e in device.of(LoadProgress) if e.plan_version == PlanVersion(1, 1)]) == len(told), "it stands"
    assert told[-1].total_bytes == sum(t.nbytes for t in BIG.manifest.tiles(refs[0]))
    waits = [e for e in device.of(LoadProgress) if e.plan_version == PlanVersion(1, 2)]
    assert len(waits) == len(told)
    assert all(e.done_bytes == 0 < e.total_bytes for e in waits), "0 of 0 would say that nothing moves"


def test_a_damaged_cache_is_made_good(tmp_path):
    load(Device(tmp_path))
    files = sorted(tmp_path.glob("??/*"))
    files[0].unlink()
    for number, path in enumerate(files[1:]):
        data = path.read_bytes()
        path.write_bytes(data[:-1] if number % 2 else bytes([data[0] ^ 1]) + data[1:])
    again = load(Device(tmp_path))
    check_weights(MODEL, again.of(Loaded)[0].weights)
    assert again.counters["cache_corrupt"] == len(files) - 1 > 1
    third = load(Device(tmp_path))
    check_weights(MODEL, third.of(Loaded)[0].weights)
    assert third.counters["tiles_asked"] == 0


@pytest.mark.parametrize(
    ("blob", "error"),
    [
        (b"no msgpack at all", WireError),
        (Manifest("other", ()).encode(), ModelError),
        (Manifest("m", ()).encode(), WireError),
    ],
)
def test_a_manifest_that_cannot_be_used_ends_the_load(device, blob, error):
    device.loader.load(replace(MODEL.load(), manifest=tile_hash(blob)), device.now)
    device.loader.load(MODEL.load(2), device.now)
    device.loader.on_tile(blob, PLANNER, device.now)
    (failed,) = device.of(LoadFailed)
    assert type(failed.error) is error
    device.asks.popleft()
    device.serve(MODEL)
    assert [e.plan_version for e in device.of(Loaded)] == [PlanVersion(1, 2)]


@given(data=st.data())
def test_any_order_with_losses_repeats_and_foreign_tiles_ends_with_the_right_weights(tmp_path_factory, data):
    device = Device(tmp_path_factory.mktemp("any"), data.draw(st.sampled_from([0, 300_000, 1 << 30])))
    device.loader.load(MODEL.load(), device.now)
    under_way, damaged = deque(), 0
    for _ in range(400):
        device.settle()
        under_way.extend(device.asks)
        device.asks.clear()
        if device.of(Loaded):
            break
        if not under_way:
            device.now = device.loader.deadline()
            device.loader.retry_if_due(device.now)
            continue
        what = data.draw(st.sampled_from(["answer", "answer", "answer", "late", "lose", "repeat", "damage"]))
        if what == "late":
            under_way.rotate(-1)
        elif what == "lose":
            under_way.popleft()
        elif what == "damage" and damaged < MAX_MISMATCHES - 1:
            damaged += 1
            device.loader.on_tile(b"?" + MODEL.blobs[under_way.popleft()][1:], PLANNER, device.now)
        else:
            digest = under_way[0] if what == "repeat" else under_way.popleft()
            device.loader.on_tile(MODEL.blobs[digest], PLANNER, device.now)
    check_weights(MODEL, device.of(Loaded)[0].weights)
    assert not device.of(LoadFailed)
    assert device.counters["tiles_mismatched"] == damaged


def test_int8_weights_hold_no_more_in_f32_than_is_reckoned_with(device):
    # Ranges that no block and no panel begins with: every tile leaves blocks of which a part is missing.
    ref = WeightRef("up", (10, 3990), (5, 2985), "packed", "w8a8")
    bound = loading_overhead_bytes({ref: 1})
    assert bound < 0.4 * loading_bytes(ref)
    digests = [tile.hash for tile in WIDE.manifest.tiles(ref)]
    for digest in digests[::2]:
        device.cache.put(digest, WIDE.blobs[digest], set(digests))
    device.loader.load(WIDE.load(refs=(ref,)), device.now)
    device.loader.on_tile(WIDE.blobs[device.asks.popleft()], PLANNER, device.now)
    held = []

    def look():
        buffers = device.loader._jobs[0].buffers.values() if device.loader._jobs else ()
        held.append(sum(block.nbytes for buffer in buffers for block in buffer._staged.values()))

    while device.loader.step(device.now):
        look()
    while device.asks:
        device.loader.on_tile(WIDE.blobs[device.asks.popleft()], PLANNER, device.now)
        look()
        while device.loader.step(device.now):
            look()
    assert 0 < max(held) <= bound


def test_a_lack_of_memory_ends_the_load_with_a_reason(device, monkeypatch):
    def none_left(ref):
        raise MemoryError

    monkeypatch.setattr("device_agent.loader.allocate", none_left)
    load(device)
    (failed,) = device.of(LoadFailed)
    assert isinstance(failed.error, PlanError)


class Served:
    """A loader thread with a planner that answers at once."""

    def __init__(self, directory, model, budget=None):
        self.events, self.ends = [], SimpleQueue()
        self.counters = Counter()
        loader = WeightLoader(TileCache(directory, 1 << 30, self.counters), self.emit, self.ask, self.counters)
        self.thread = LoaderThread(loader, self.counters, LOG, budget)
        self.model = model
        self.thread.start()

    def emit(self, event):
        self.events.append(event)
        if not isinstance(event, LoadProgress):
            self.ends.put(event)

    def ask(self, _, hashes, share):
        for digest in hashes:
            self.answer(digest)

    def answer(self, digest):
        self.thread.post(TileIn(self.model.blobs[digest]))

    def wait(self):
        return self.ends.get(timeout=30)


def test_the_thread_loads_and_ends(tmp_path):
    served = Served(tmp_path, MODEL)
    served.thread.post(RequestAgain())
    served.thread.post(MODEL.load())
    served.wait()
    served.thread.post(Unload("m", PlanVersion(1, 1)))
    served.thread.post(MODEL.load(2))
    served.wait()
    served.thread.close()
    assert [type(e) for e in served.events if not isinstance(e, LoadProgress)] == [Loaded, Loaded]
    check_weights(MODEL, served.events[-1].weights)
    assert served.counters["tiles_asked"] == 1 + len(MODEL.needed())


def test_after_a_mistake_the_next_load_comes_from_disk_without_a_further_word(tmp_path, monkeypatch):
    other = Model(seed=1)
    before = Served(tmp_path, other)
    before.thread.post(other.load())
    before.wait()
    before.thread.close()
    served, asked = Served(tmp_path, MODEL), SimpleQueue()
    served.answer = asked.put
    served.thread.post(MODEL.load(1))
    served.thread.post(other.load(2))
    served.thread.post(TileIn(MODEL.blobs[asked.get(timeout=30)]))
    tile = MODEL.blobs[asked.get(timeout=30)]

    def broken(*_):
        raise RuntimeError("a mistake")

    monkeypatch.setattr(TileCache, "put", broken)
    served.thread.post(TileIn(tile))
    assert isinstance(served.wait(), LoadFailed)
    check_weights(other, served.wait().weights)
    served.thread.close()


def test_a_load_that_cannot_be_given_up_does_not_end_the_thread(tmp_path, monkeypatch):
    served = Served(tmp_path, MODEL)
    tried = SimpleQueue()

    def broken(*what):
        tried.put(what)
        raise RuntimeError("a mistake")

    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "decode", broken)
        patch.setattr(WeightLoader, "fail_current", broken)
        served.thread.post(MODEL.load(1))
        for _ in range(2):
            tried.get(timeout=30)
    served.thread.post(Unload("m", PlanVersion(1, 1)))
    served.thread.post(MODEL.load(2))
    check_weights(MODEL, served.wait().weights)
    served.thread.close()


class Gate(Budget):
    """A budget that allows nothing before it is opened."""

    def __init__(self):
        super().__init__()
        self.asked, self.is_open = SimpleQueue(), False

    def pause_s(self, now):
        self.asked.put(now)
        return 0.0 if self.is_open else 0.001


def test_no_tile_is_taken_from_the_planner_before_the_budget_allows_it_and_cached_ones_at_once(tmp_path):
    load(Device(tmp_path), refs=MODEL.refs[:2])
    gate = Gate()
    served = Served(tmp_path, MODEL, gate)
    served.thread.post(MODEL.load())
    cached = len(MODEL.needed(MODEL.refs[:2]))
    while served.counters["tiles_cached"] < cached:
        gate.asked.get(timeout=30)
    for _ in range(50):
        gate.asked.get(timeout=30)
    assert served.ends.empty()
    assert served.counters["tiles_received"] == 0
    gate.is_open = True
    check_weights(MODEL, served.wait().weights)
    served.thread.close()


def test_a_flood_of_tiles_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("device_agent.loader.QUEUED_BYTES", 1000)
    counters = Counter()
    cache = TileCache(tmp_path, 0, counters)
    thread = LoaderThread(WeightLoader(cache, lambda e: None, lambda m, h, s: None, counters), counters, LOG)
    for _ in range(5):
        thread.post(TileIn(bytes(400)))
    assert counters["tiles_overflowed"] == 3
    thread.start()
    thread.close()
    assert counters["tiles_unneeded"] == 2


def test_the_planner_is_told_what_is_cached_after_a_load_and_after_a_start(tmp_path):
    reports = []
    first = Device(tmp_path, report=reports.append)
    first.loader.load(MODEL.load(refs=MODEL.refs[:1]), first.now)
    first.serve(MODEL)
    again = Device(tmp_path, report=reports.append)
    thread = LoaderThread(again.loader, again.counters, LOG)
    thread.start()
    thread.close()
    after_load, after_start = reports
    assert after_load == after_start
    assert (after_load.model, after_load.manifest) == ("m", MODEL.manifest.digest)
    tiles = TileMap(MODEL.manifest)
    mask = tiles.unpack(after_load.tiles)
    assert {h for h, held in zip(tiles.hashes, mask, strict=True) if held} == MODEL.needed(MODEL.refs[:1])


def test_a_device_reports_its_cache_while_it_loads(tmp_path):
    reports = []
    device = Device(tmp_path, report=reports.append)
    device.loader.load(MODEL.load(), device.now)
    device.serve(MODEL, most=2)
    assert not reports
    device.now += CACHED_S
    device.serve(MODEL, most=1)
    (report,) = reports
    assert TileMap(MODEL.manifest).unpack(report.tiles).sum() >= 2


def test_a_rate_is_that_of_the_last_megabytes():
    rate = Rate(0.0)
    rate.record(RATE_BYTES - 1, 1.0)
    assert rate.per_s == 0.0
    for _ in range(20):
        rate.record(RATE_BYTES, 2.0)
    assert rate.per_s == pytest.approx(RATE_BYTES / 2.0, rel=0.01)
