"""What frames to and from peers cost, as devices say it, is what plans are made with."""

from dataclasses import asdict, replace

import pytest
from scripted_site import Site, caps, heartbeat

from hepti_mqtt.client.described import cluster_described
from hepti_mqtt.cluster import Cluster
from hepti_mqtt.cluster.profiles import UNSEEN_FRAMES
from hepti_mqtt.runtime.planner import events
from hepti_mqtt.runtime.planner.membership import Membership
from hepti_mqtt.wire.described import Status
from hepti_mqtt.wire.peers import Endpoint

HERE, THERE = Endpoint("127.0.0.1", 1), Endpoint("192.0.2.7", 2)


def as_the_planner_sees(endpoint: Endpoint | None, **told: tuple[float | None, float]) -> Cluster:
    """Return the cluster of devices that told a frame_slowdown and a slowdown."""
    members = Membership(mesh=True)
    for name, (frames, slowdown) in told.items():
        members.caps(name, replace(caps(name, 1), endpoint=endpoint))
        members.status(name, Status("online", 1), 0.0)
        members.heartbeat(name, replace(heartbeat(1, slowdown), frame_slowdown=frames), 0.0)
    return members.cluster({})


def as_a_client_sees(endpoint: Endpoint | None, **told: tuple[float | None, float]) -> Cluster:
    found = [
        {
            "device": name,
            "curves": caps(name, 1).curves,
            "memory_budget_bytes": 1,
            "endpoint": endpoint and asdict(endpoint),
            "heartbeat": {"slowdown": slowdown, "frame_slowdown": frames},
        }
        for name, (frames, slowdown) in told.items()
    ]
    return cluster_described(found, [*told])


@pytest.mark.parametrize("see", [as_the_planner_sees, as_a_client_sees])
@pytest.mark.parametrize(
    ("endpoint", "told", "counts"),
    [
        (THERE, {"a": (None, 1.0), "b": (None, 3.0)}, {"a": UNSEEN_FRAMES, "b": 3 * UNSEEN_FRAMES}),
        (HERE, {"a": (None, 1.0), "b": (None, 3.0)}, {"a": 1.0, "b": 3.0}),
        (None, {"a": (None, 1.0)}, {"a": 1.0}),
        (THERE, {"a": (None, 1.0), "b": (2.5, 1.0), "c": (3.5, 1.0), "d": (9.0, 3.0)}, {"a": 3.0, "b": 2.5, "d": 9.0}),
    ],
    ids=["nobody has met tensors", "on loopback", "no endpoint", "as others of the site have met them"],
)
def test_before_a_device_has_met_tensors_its_frames_are_priced_as_they_are_off_loopback(
    see, endpoint: Endpoint | None, told: dict, counts: dict
) -> None:
    devices = see(endpoint, **told).devices
    bare = {name: replace(device, slowdown=1.0, frame_slowdown=None) for name, device in devices.items()}
    for name, factor in counts.items():
        measured = bare[name].frame_seconds(2, 1 << 20, "mesh")
        assert devices[name].frame_seconds(2, 1 << 20, "mesh") == pytest.approx(factor * measured)


@pytest.mark.parametrize(("told", "factor"), [(3.0, 3.0), (None, 1.0), (1e12, 1.0)], ids=str)
def test_a_plan_prices_frames_as_the_device_has_seen_them(told: float | None, factor: float) -> None:
    site = Site()
    site.join("a")
    site.settle()
    member = site.session.membership.members["a"]
    measured = member.profile(0).frame_seconds(2, 1 << 20, "mesh")
    site.event(events.DeviceHeartbeat("a", replace(heartbeat(1), frame_slowdown=told)))
    assert member.profile(0).frame_seconds(2, 1 << 20, "mesh") == pytest.approx(factor * measured)
    assert member.profile(0).frame_seconds(2, 1 << 20, "broker") == member.profile(0).frame_seconds(2, 1 << 20)
