"""A device measures itself: at its start, again when runs contradict it, and within what a quota really gives."""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from device_agent import background
from device_agent import measure as measuring
from device_agent.background import MISMATCH_RATIO, MISMATCH_S, REMEASURE_S, BackgroundTuning, RemeasurePolicy
from device_agent.budget import Budget
from device_agent.machine import UNKNOWN_BYTES, last_level_cache_bytes
from device_agent.measure import load_or_measure, measure, monotone
from hepti_mqtt.core.errors import HeptiError
from hepti_mqtt.core.program import Compute, SlotSpec, WeightRef, Work
from hepti_mqtt.cost.reported import profile_from_caps
from hepti_mqtt.kernels import Workers, warm_up, works
from hepti_mqtt.protocol.messages import Caps, decode_caps, encode_caps
from hepti_mqtt.transport.sockets import mesh_possible


@pytest.fixture(scope="module")
def workers():
    warm_up()
    pool = Workers(1)
    yield pool
    pool.close()


def hasten(patch):
    """Let a measurement take every number once, with weights beyond a small cache."""
    patch.setattr(measuring, "REPEATS", 1)
    patch.setattr(measuring, "WINDOW_S", 0.002)
    patch.setattr(measuring, "last_level_cache_bytes", lambda: 1 << 20)


@pytest.fixture
def hasty(monkeypatch):
    hasten(monkeypatch)


@pytest.fixture(scope="module")
def curves(workers):
    with pytest.MonkeyPatch.context() as patch:
        hasten(patch)
        return measure(workers, 1 << 30)


def test_the_planner_can_read_it_after_the_wire(curves):
    caps = Caps("d1", 1, 1, 1, 1, 1, "x", "0", curves, 0, 5)
    profile = profile_from_caps("d1", decode_caps(encode_caps(caps)).curves, 1e9, 1.0)
    assert len(profile.linear) >= 1
    for curve in profile.linear:
        assert [rows for rows, _ in curve.points] == list(measuring.ROWS)
        assert all(seconds > 0 for _, seconds in curve.points)
    assert profile.speed(128) > 1e6
    assert profile.seconds(Work("attention", flops=1e9)) > 0
    assert profile.seconds(Work("rowwise", nbytes=1e6)) > 0
    assert 0 < profile.op_overhead_s < 0.1
    assert profile.frame_s > 0
    assert profile.copy_bytes_per_s > 0
    assert {"mesh_frame_s", "mesh_copy_bytes_per_s"} <= set(curves) or not mesh_possible()
    assert 0 < profile.mesh_frame_s <= profile.frame_s < 0.1
    assert profile.mesh_copy_bytes_per_s > 0


@pytest.mark.usefixtures("hasty")
def test_little_memory_or_time_leaves_large_shapes_out(workers, monkeypatch):
    def shapes(memory_bytes):
        shapes = defaultdict(list)
        for curve in measure(workers, memory_bytes)["linear"]:
            shapes[curve.get("storage", "f32")].append((curve["k"], curve["n"]))
        return shapes

    some = shapes(10 << 20)
    assert some["f32"] == [(384, 384), (384, 1536)]
    assert some["w8a8"] == [(384, 1536)], "narrower weights in one of the shapes that fit"
    assert some["q6_k"] == [(256, 1536)] * 2, "of whole blocks, by activations in f32 and in int8"
    assert shapes(1)["f32"] == [(384, 384)]
    monkeypatch.setattr(measuring, "BUDGET_S", 0.0)
    assert {shape for some in shapes(10 << 20).values() for shape in some} == {(384, 384), (256, 384)}


@pytest.mark.usefixtures("hasty")
def test_products_of_blocks_are_priced_by_what_their_activations_are(workers):
    """Prompts by activations in int8 were priced as those in f32, at 2.4 times what they took."""
    measured, times = measure(workers, 10 << 20), dict[str, float]()
    for number, curve in enumerate(measured["linear"], 1):
        curve["points"] = [[rows, float(number * rows)] for rows, _ in curve["points"]]
        if curve.get("storage") == "q6_k":
            times[curve.get("x", "f32")] = 128.0 * number
    profile = profile_from_caps("d1", measured, 1e9, 1.0)
    weight, slots = WeightRef("w", (0, 256), (0, 1536), "packed", "q6_k"), (SlotSpec((128, 256)), SlotSpec((128, 1536)))
    for x, seconds in times.items():
        op = Compute("linear", (0,), (1,), (weight,), {"bias": False, "activation": None, "residual": False, "x": x})
        assert profile.seconds(*works(op, slots)) == pytest.approx(seconds, rel=1e-3)
    assert len(times) == 2


def test_weights_are_read_from_memory_not_from_a_cache(workers, monkeypatch):
    monkeypatch.setattr(measuring, "last_level_cache_bytes", lambda: 1 << 20)
    used, real = [], measuring.KERNELS["linear"]

    class Seen:
        def bind(self, op, slots, weights, pool):
            run = real.bind(op, slots, weights, pool)
            return lambda reads, writes: used.append(id(weights)) or run(reads, writes)

    monkeypatch.setattr(measuring, "KERNELS", {"linear": Seen()})
    run = measuring._ColdMatmul(384, 384, 1 << 30).run(1, workers)
    for _ in range(7):
        run()
    assert len(set(used)) * 4 * 384 * 384 > 3 << 19, "half more than the cache holds, at least"
    assert used[:3] == used[3:6]


def test_the_largest_cache_is_told(tmp_path):
    for i, size in enumerate(("32K", "1024K", "8M", "?")):
        (tmp_path / f"index{i}").mkdir()
        (tmp_path / f"index{i}" / "size").write_text(size + "\n")
    assert last_level_cache_bytes(tmp_path) == 8 << 20
    assert last_level_cache_bytes(tmp_path / "none") == UNKNOWN_BYTES
    assert last_level_cache_bytes() > 0


class Cached:
    """`load_or_measure` in a directory, with a quick matmul that takes what the test says."""

    def __init__(self, directory, workers, curves, monkeypatch):
        self.file, self.workers, self.patch, self.measured = directory / "m.json", workers, monkeypatch, 0
        self.curves = curves
        monkeypatch.setattr(measuring, "measure", self.measure)
        self.quick(1.0)

    def measure(self, *_):
        self.measured += 1
        return self.curves

    def quick(self, factor):
        before = self.curves["linear"][0]["points"][2][1]
        self.patch.setattr(measuring, "_seconds", lambda act, *_: act() or factor * before)

    def __call__(self, **options):
        return load_or_measure(self.file, self.workers, 1 << 30, **options)


@pytest.fixture
def cached(tmp_path, workers, curves, monkeypatch):
    return Cached(tmp_path, workers, curves, monkeypatch)


def test_a_restart_takes_what_was_measured_while_the_machine_is_as_fast(cached, curves):
    assert cached() == (curves, False)
    assert cached() == (json.loads(json.dumps(curves)), True)
    for factor in (1.5, 0.6):
        cached.quick(factor)
        assert cached()[1] is False
    assert cached.measured == 3


def test_what_a_neighbour_has_just_measured_counts_without_a_look(cached):
    start = time.time() - 60
    cached()
    cached.quick(9.0)  # beside others that start, the look would fail
    assert cached(trusted_since_s=start) == (json.loads(json.dumps(cached.curves)), True)
    assert cached.measured == 1
    assert cached(trusted_since_s=time.time() + 60)[1] is False, "at the next start it is an old one"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("usable_cores", lambda: 0.4),
        ("core_capacities", lambda: [446]),
        ("cpu_model", lambda: "another"),
        ("isa", lambda: "another"),
        ("__version__", "9"),
        ("threads", 2),
    ],
)
def test_another_machine_share_version_or_number_of_threads_is_measured_again(cached, monkeypatch, name, value):
    cached()
    if name == "threads":
        cached.workers = Workers(value)
    else:
        monkeypatch.setattr(measuring, name, value)
    assert cached(trusted_since_s=0.0)[1] is False
    assert cached()[1] is True
    assert cached.measured == 2
    if name == "threads":
        cached.workers.close()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"key": {}, "curves": {"linear": []}}', "\xff", None])
def test_a_broken_file_or_place_is_measured_again(cached, content):
    if content is None:
        cached.file.mkdir()
    else:
        cached.file.write_text(content, encoding="latin-1")
    assert cached()[1] is False
    assert cached()[1] is (content is not None)


def test_what_others_did_while_a_curve_was_measured_is_taken_out():
    assert monotone([[1, 3.0], [2, 1.0], [4, 9.0], [8, 2.0]]) == [[1, 1.0], [2, 1.0], [4, 2.0], [8, 2.0]]
    assert monotone([]) == []


@pytest.mark.parametrize(
    ("cores", "threads", "seconds"), [(1.0, 1, 0.03), (0.25, 1, 0.04), (2.0, 1, 0.03), (0.5, 4, 0.02)]
)
def test_under_a_quota_time_is_processor_time_over_the_share(monkeypatch, cores, threads, seconds):
    """A run of 10 ms of processor time that takes 30 ms by the clock on the wall, whatever stood still meanwhile."""
    now = {"wall": 0.0, "cpu": 0.0}

    class Clocks:
        perf_counter = staticmethod(lambda: now["wall"])
        process_time = staticmethod(lambda: now["cpu"])

    def act():
        now["wall"] += 0.03
        now["cpu"] += 0.01

    def before():
        now["wall"] += 1.0
        now["cpu"] += 1.0

    monkeypatch.setattr(measuring, "time", Clocks)
    monkeypatch.setattr(measuring, "usable_cores", lambda: cores)
    assert measuring._seconds(act, threads, before) == pytest.approx(seconds)


@pytest.mark.parametrize(("share", "op_s"), [(0.9, 9e-4), (0.35, 5e-6), (0.35, 3e-3), (0.2, 2e-4)])
def test_an_op_that_fits_into_a_slice_of_a_hidden_quota_is_as_slow_as_the_quota_makes_it(monkeypatch, share, op_s):
    """A quota of 1 ms per period that the process cannot see: most short ops run at full speed, some stand still."""
    spent = [0.0]  # of processor time

    def wall():
        return spent[0] + int(spent[0] / 1e-3) * (1e-3 / share - 1e-3)

    def act():
        spent[0] += op_s

    monkeypatch.setattr(measuring.time, "perf_counter", wall)
    monkeypatch.setattr(measuring, "usable_cores", lambda: 1.0)
    assert measuring._seconds(act) == pytest.approx(op_s / share, rel=0.1)


@pytest.mark.parametrize("which", ["_frames", "_mesh_frames"])
def test_a_small_frame_that_was_held_up_is_measured_again(monkeypatch, which):
    if which == "_mesh_frames" and not mesh_possible():
        pytest.skip("no mesh here")
    told = iter([0.4, 3e-3, 1e-4, 3e-3])
    monkeypatch.setattr(measuring, "_seconds", lambda *_, **__: next(told))
    monkeypatch.setattr(measuring, "PEERS", 1)
    (_, frame_s), (_, rate) = getattr(measuring, which)(lambda: None).items()
    assert frame_s == pytest.approx(0.5e-4)
    assert 1e7 < rate < 1e9
    monkeypatch.setattr(measuring, "_seconds", lambda *_, **__: 1e-3)
    assert next(iter(getattr(measuring, which)(lambda: None).values())) == pytest.approx(5e-4), "and not forever"


class Disturbed(InterruptedError):
    """A run needs the device."""


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("points", [0, 5, 11])
def test_a_run_ends_a_measurement_which_goes_on_with_the_next_storage_later(points, workers, tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "_still_accurate", lambda *_: True)
    file, left = tmp_path / "m.json", iter(range(points))
    first, _ = load_or_measure(file, workers, 10 << 20, with_narrow_weights=False)

    def check() -> None:
        if next(left, None) is None:
            raise Disturbed

    assert not measuring.has_narrow_curves(first)
    with pytest.raises(Disturbed):
        load_or_measure(file, workers, 10 << 20, check=check, force=points == 0)
    kept, cached = load_or_measure(file, workers, 10 << 20, with_narrow_weights=False)
    added = [curve["storage"] for curve in kept["linear"][len(first["linear"]) :]]
    assert cached
    assert added == ["f16", "w8a8"][: points // 5], "four points and one write each; a part of a storage is dropped"
    whole, _ = load_or_measure(file, workers, 10 << 20)
    assert whole["linear"][: len(kept["linear"])] == kept["linear"]
    assert measuring.has_narrow_curves(whole)
    assert load_or_measure(file, workers, 10 << 20) == (whole, True)


@pytest.mark.usefixtures("hasty")
def test_narrow_weights_are_measured_one_storage_at_a_time_where_others_wait(workers, tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "_still_accurate", lambda *_: True)
    file = tmp_path / "m.json"
    load_or_measure(file, workers, 10 << 20, with_narrow_weights=False)
    one, _ = load_or_measure(file, workers, 10 << 20, most_storages=1)
    two, _ = load_or_measure(file, workers, 10 << 20, most_storages=1)
    storages = [[c["storage"] for c in curves["linear"] if c.get("storage", "f32") != "f32"] for curves in (one, two)]
    assert [len(set(names)) for names in storages] == [1, 2]


@pytest.mark.usefixtures("hasty")
def test_what_no_device_can_be_is_measured_once_more_and_then_an_error(workers, monkeypatch):
    told = iter([3.0, 1e-5, 3.0, 3.0])
    monkeypatch.setattr(measuring, "_op_overhead", lambda *_: next(told))
    assert measure(workers, 1, narrow=False)["op_overhead_s"] == 1e-5
    with pytest.raises(HeptiError):
        measure(workers, 1, narrow=False)


# -- again ------------------------------------------------------------------------------------------------------------


def looks(doubts, slowdown, start, seconds):
    """Look every second; return the times at which the device is to be measured again."""
    return [now for now in range(start, start + seconds) if doubts.should_remeasure(slowdown, now)]


@pytest.mark.parametrize(
    ("parts", "first"),
    [
        ([(MISMATCH_RATIO * 1.1, 60)], MISMATCH_S),
        ([(1 / MISMATCH_RATIO / 1.1, 60)], MISMATCH_S),
        ([(MISMATCH_RATIO * 0.9, 200)], None),
        ([(2.0, MISMATCH_S - 5), (1.1, 1), (2.0, MISMATCH_S - 5)], None),
        ([(2.0, 20), (1.0, 100), (2.0, 20)], 120 + MISMATCH_S - 20),
    ],
    ids=["slower", "faster", "nearly right", "short", "a pause without runs"],
)
def test_runs_that_contradict_the_measurement_for_long_are_believed(parts, first):
    doubts, now, times = RemeasurePolicy(), 0, []
    for slowdown, seconds in parts:
        times += looks(doubts, slowdown, now, int(seconds))
        now += int(seconds)
    assert times[:1] == ([] if first is None else [pytest.approx(first, abs=2)])


@pytest.mark.parametrize(
    ("then", "pauses"),
    [
        (lambda d, now: d.record_measurement(now), [REMEASURE_S, 2 * REMEASURE_S]),
        (lambda d, _: d.postpone(), [MISMATCH_S]),
    ],
    ids=["measured", "ended by a run"],
)
def test_what_stays_wrong_is_measured_more_rarely_and_a_measurement_that_a_run_ended_soon(then, pauses):
    doubts, times = RemeasurePolicy(), []
    for now in range(4000):
        if doubts.should_remeasure(2.0, now):
            then(doubts, now)
            times.append(now)
    found = [b - a for a, b in pairwise(times)]
    assert len(found) >= len(pauses)
    assert found == pauses * (len(found) // len(pauses))


@pytest.mark.parametrize(("free", "takes"), [(200, 100), (30, 30)])
def test_measuring_again_takes_what_is_free_beside_the_weights_and_gives_it_back(monkeypatch, free, takes):
    told, curves = [], {"linear": []}
    monkeypatch.setattr(background, "free_memory", lambda: free)
    monkeypatch.setattr(background, "return_memory", lambda: told.append("given back"))
    monkeypatch.setattr(background, "cache_directory", lambda: None)

    def measured(file, workers, memory_bytes, **_):
        told.append(memory_bytes)
        return curves, False

    monkeypatch.setattr(background, "load_or_measure", measured)
    meter = SimpleNamespace(set_curves=lambda new: told.append(new is curves))
    log = logging.getLogger("test")
    after = BackgroundTuning(Path("m.json"), 1, 100, meter, Budget(), lambda: told.append("told"), log=log)
    after._measure(force=True)
    assert told == [takes, "given back", True, "told"]
