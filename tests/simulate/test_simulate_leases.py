"""Bags on the virtual clock: tasks go to whoever is free, however many requests share the devices."""

from __future__ import annotations

import pytest
from sites import plan, request
from small_cnns import cnn, conv, pool, relu

from hepti_mqtt import plan_programs
from hepti_mqtt.checkpoint import KINDS, spec_of_kind
from hepti_mqtt.cost.explain import places_taken, tasks_of, timeline_svg, timeline_text
from hepti_mqtt.cost.profiles import Cluster, Curve, DeviceProfile, Link
from hepti_mqtt.cost.simulator import Naming, Request, Slows, play, simulate
from hepti_mqtt.models.cnn.nodes import CnnSpec

NAMING = Naming("home", "m")
SMALL = [k for k in KINDS if k.startswith("tiny-") and isinstance(spec_of_kind(k), CnnSpec)]
SLOW = (1.0, 0.02, 0.5, 0.9)  # speeds, of which the second is much behind
LEASED = ("fused_tiles", {"cut": "none", "owners": "leased"})


def site(speeds, latency_s=2e-4):
    """Return devices d0, d1, ... of given speeds."""
    profiles = {
        f"d{i}": DeviceProfile(f"d{i}", (Curve(32, 32, ((1, 1e-5 / s), (64, 6e-4 / s))),), 1e8 * s, 1e8 * s)
        for i, s in enumerate(speeds)
    }
    return Cluster(profiles, dict.fromkeys(profiles, Link(latency_s, 1e7, 1e7)))


def played(kind, speeds, requests, in_flight, method=LEASED, gap_s=None):
    spec = spec_of_kind(kind) if isinstance(kind, str) else kind
    shape = request(spec, (1,))[0]
    made = plan_programs.programs(spec, plan(spec, method, (1.0,) * len(speeds)), shape)
    asked = [Request(shape, made, None if gap_s is None else n * gap_s) for n in range(requests)]
    return play(NAMING, spec, asked, site(speeds), in_flight, record=True)


def bag_of(kind):
    return plan_programs.tasks(spec_of_kind(kind), plan(spec_of_kind(kind), LEASED, (1.0,)))


def tasks(outcome, device=None):
    """Return the labels of the tasks that were computed to their ends."""
    return [e.label for e in outcome.events if e.lane == "task" and device in (None, e.device) and "(" not in e.label]


@pytest.mark.parametrize("kind", SMALL)
def test_requests_that_share_devices_are_all_answered(kind):
    for speeds, in_flight in ((SLOW, 3), ((0.02, 1.0, 1.0), 2), ((1.0,) * 10, 4)):
        found = played(kind, speeds, 4 * in_flight, in_flight)
        assert len(found.runs) == 4 * in_flight
        for task in range(bag_of(kind)):
            assert tasks(found).count(f"task {task}") >= 4 * in_flight


@pytest.mark.parametrize("gap_ms", range(1, 12, 2))
def test_the_word_that_none_is_left_ends_a_run_whatever_the_device_does_just_then(gap_ms):
    for speeds in (SLOW, (0.02, 1.0), (1.0, 1.0, 1.0, 0.01, 0.01)):
        found = played("tiny-convnet", speeds, 6, 3, gap_s=gap_ms * 1e-3)
        assert all(run.answered_s > run.asked_s for run in found.runs)


def test_a_slow_device_computes_fewer_tasks_and_gives_up_what_others_have_taken_over():
    found = played("tiny-convnet", SLOW, 1, 1)
    counts = {device: len(tasks(found, device)) for device in found.devices}
    assert sum(counts.values()) == bag_of("tiny-convnet") == 8
    assert (counts["d1"], counts["d2"]) == (0, 2)
    assert [e.label for e in found.events if e.lane == "task" and "(" in e.label] == ["task 1 (given up)"]
    owned = played("tiny-convnet", SLOW, 1, 1, ("fused_tiles", {"cut": "none"}))
    assert found.runs[0].answered_s < 0.6 * owned.runs[0].answered_s
    assert not tasks(owned)


def test_a_map_with_fewer_places_than_tiles_has_a_smaller_bag():
    assert {kind: bag_of(kind) for kind in ("tiny-vgg", "tiny-yolo")} == {"tiny-vgg": 4, "tiny-yolo": 8}


@pytest.mark.parametrize(("window", "bag"), [((1, 12), 4), ((1, 11), 8), ((11, 12), 2)], ids=str)
def test_a_narrow_map_has_no_tasks_without_work(window, bag):
    spec = cnn(12, conv(), relu(), pool(*window))
    assert plan_programs.tasks(spec, plan(spec, LEASED, (1.0,))) == bag
    found = played(spec, SLOW, 1, 1)
    assert {f"task {n}" for n in range(bag)} == set(tasks(found))


def test_a_narrow_map_is_shared_out_by_the_weights_of_its_owners():
    spec = cnn(12, conv(), relu(), pool(1, 12))
    fixed = plan(spec, ("fused_tiles", {"cut": "none"}), (1.0, 1.0))
    made = plan_programs.lowered(spec, fixed, request(spec, (1,))[0])
    assert [tile.device for tile in made.tiles["n2"]] == [0, 0, 1, 1]


def test_tasks_that_would_read_what_the_head_device_computes_are_refused_in_words():
    """A map of one row stays there."""
    spec = cnn(12, conv(), relu(), pool(12, 1), conv(4, 2))
    leased = plan(spec, LEASED, (1.0, 1.0))
    with pytest.raises(ValueError, match=r"the head device sends to task 0.*: tasks of a bag exchange nothing"):
        plan_programs.program(spec, leased, request(spec, (1,))[0], "d0")
    with pytest.raises(ValueError, match="task 0 hears the head device: tasks of a bag exchange nothing"):
        plan_programs.program(spec, leased, request(spec, (1,))[0], "d1")


def test_explained_are_the_devices_that_took_each_task():
    found = played("tiny-convnet", SLOW, 1, 1)
    assert tasks_of(found.events, "d1") == "task 1 (given up)"
    done = [e for e in found.events if e.lane == "task" and "(" not in e.label]
    places = [f"task {n}" for n in range(8)]
    taken = places_taken(found.events, [*places, "head"], "d0")
    assert taken == (
        *(f"{n}: {next(e.device for e in done if e.label == place)}" for n, place in enumerate(places)),
        "head: d0",
    )
    seconds = found.runs[0].answered_s
    lines = [line for line in timeline_text(found.events, tuple(found.devices), seconds) if " task " in line]
    assert set("".join(line.split("|")[1] for line in lines)) - {" "} == set("01234567")
    picture = timeline_svg(found.events, tuple(found.devices), seconds, "x")
    assert "<title>task 1 (given up)" in picture
    assert picture.count(">task</text>") == len(SLOW)


def test_ops_of_a_device_that_becomes_slower_take_longer_from_then_on():
    spec = spec_of_kind("tiny-convnet")
    shape = request(spec, (1,))[0]
    parts = plan_programs.programs(spec, plan(spec, ("single", {}), (1.0,)), shape)
    cluster = site((1.0,))

    def ends(**slows):
        found = simulate(NAMING, spec, shape, parts, cluster, record=True, slows=slows)
        return [e.stop - e.start for e in found.events if e.lane == "compute"], found

    times, steady = ends()
    since = next(e.start for e in steady.events if e.lane == "compute" and e.start > 0.5 * steady.seconds)
    slower, found = ends(d0=Slows(since, 3.0))
    many = [round(b / a, 6) for a, b in zip(times, slower, strict=True)]
    assert set(many) == {1.0, 3.0}
    assert many == sorted(many)
    assert found.devices["d0"].compute_s == pytest.approx(sum(slower))
