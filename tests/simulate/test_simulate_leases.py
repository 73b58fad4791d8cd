"""Bags on the virtual clock: tasks go to whoever is free, however many requests share the devices."""

from __future__ import annotations

import pytest
from sites import plan, request

from hepti_mqtt import plan_programs
from hepti_mqtt.checkpoint import KINDS, spec_of_kind
from hepti_mqtt.cluster import Cluster, Curve, DeviceProfile, Link
from hepti_mqtt.models.cnn.spec import CnnSpec
from hepti_mqtt.simulate import Naming, Request, play

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
    spec = spec_of_kind(kind)
    shape = request(spec, (1,))[0]
    made = plan_programs.programs(spec, plan(spec, method, (1.0,) * len(speeds)), shape)
    asked = [Request(shape, made, None if gap_s is None else n * gap_s) for n in range(requests)]
    return play(NAMING, spec, asked, site(speeds), in_flight, record=True)


def bag_of(kind):
    return plan_programs.tasks(spec_of_kind(kind), plan(spec_of_kind(kind), LEASED, (1.0,)))


def tasks(outcome, device=None):
    """Return the labels of the tasks that were computed to their ends."""
    return [e.label for e in outcome.events if e.lane == "task" and device in (None, e.device) and "," not in e.label]


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
    assert [e.label for e in found.events if e.lane == "task" and "," in e.label] == ["task 1, given up"]
    owned = played("tiny-convnet", SLOW, 1, 1, ("fused_tiles", {"cut": "none"}))
    assert found.runs[0].answered_s < 0.6 * owned.runs[0].answered_s
    assert not tasks(owned)


def test_a_map_with_fewer_places_than_tiles_has_a_smaller_bag():
    assert {kind: bag_of(kind) for kind in ("tiny-vgg", "tiny-yolo")} == {"tiny-vgg": 4, "tiny-yolo": 8}
