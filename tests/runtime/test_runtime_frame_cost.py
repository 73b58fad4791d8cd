"""What frames to and from peers cost, as devices say it, is what plans are made with."""

from dataclasses import asdict, replace

import pytest
from scripted_site import Site, caps, everyone, heartbeat

from hepti_mqtt.client.described import cluster_described
from hepti_mqtt.cost.profiles import Cluster, unseen
from hepti_mqtt.protocol.messages import Endpoint, Status
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.fleet import Membership

HERE, THERE = Endpoint("127.0.0.1", 1), Endpoint("192.0.2.7", 2)
MUCH = 1 << 20

Told = tuple[float | None, float | None]


def as_the_planner_sees(endpoint: Endpoint | None, told: dict[str, tuple[Told, float]]) -> Cluster:
    """Return the cluster of devices that told what frames and bytes cost, and a slowdown."""
    members = Membership(mesh=True)
    for name, ((frame_s, byte_s), slowdown) in told.items():
        members.caps(name, replace(caps(name, 1), endpoint=endpoint))
        members.status(name, Status("online", 1), 0.0)
        members.heartbeat(name, replace(heartbeat(1, slowdown), peer_frame_s=frame_s, peer_byte_s=byte_s), 0.0)
    return members.cluster({})


def as_a_client_sees(endpoint: Endpoint | None, told: dict[str, tuple[Told, float]]) -> Cluster:
    found = [
        {
            "device": name,
            "curves": caps(name, 1).curves,
            "memory_budget_bytes": 1,
            "endpoint": endpoint and asdict(endpoint),
            "heartbeat": {"slowdown": slowdown, "peer_frame_s": frame_s, "peer_byte_s": byte_s},
        }
        for name, ((frame_s, byte_s), slowdown) in told.items()
    ]
    return cluster_described(found, [*told])


NONE = (None, None)
SEE = pytest.mark.parametrize("see", [as_the_planner_sees, as_a_client_sees])


@SEE
@pytest.mark.parametrize("endpoint", [HERE, None], ids=["on loopback", "no endpoint"])
def test_frames_on_loopback_cost_what_was_measured_there(see, endpoint: Endpoint | None) -> None:
    for device in see(endpoint, {"a": (NONE, 1.0), "b": (NONE, 3.0)}).devices.values():
        cost = 2 * device.mesh_frame_s + MUCH / device.mesh_copy_bytes_per_s
        assert device.frame_seconds(2, MUCH, "mesh") == pytest.approx(device.slowdown * cost)


@SEE
def test_before_anybody_has_met_tensors_bytes_cost_packets_off_loopback(see) -> None:
    for device in see(THERE, {"a": (NONE, 1.0), "b": (NONE, 3.0)}).devices.values():
        frame_s, byte_s = unseen(device)
        assert device.frame_seconds(2, 0, "mesh") == pytest.approx(2 * device.slowdown * frame_s)
        assert device.frame_seconds(0, MUCH, "mesh") == pytest.approx(device.slowdown * MUCH * byte_s)
        assert byte_s > 1.5 / device.mesh_copy_bytes_per_s


@SEE
def test_who_has_met_none_is_priced_as_others_of_the_site_have_met_them(see) -> None:
    told = {"a": (NONE, 3.0), "b": ((2e-4, 1e-8), 1.0), "c": ((4e-4, 3e-8), 1.0)}
    devices = see(THERE, told).devices
    assert devices["b"].frame_seconds(2, MUCH, "mesh") == pytest.approx(2 * 2e-4 + MUCH * 1e-8)
    assert devices["a"].frame_seconds(2, MUCH, "mesh") == pytest.approx(3 * (2 * 3e-4 + MUCH * 2e-8))


@pytest.mark.parametrize(
    "told", [(1e12, 1e-8), (1e-4, 1.0), (None, 1e-8), (1e-4, None), (None, None), (-1.0, 1e-8)], ids=str
)
def test_half_a_word_and_an_implausible_one_count_as_none(told: Told) -> None:
    site = Site()
    site.join("a")
    site.settle()
    member = site.session.membership.members["a"]
    measured = member.profile(0).frame_seconds(2, MUCH, "mesh")
    site.event(interface.DeviceHeartbeat("a", replace(heartbeat(1), peer_frame_s=told[0], peer_byte_s=told[1])))
    assert member.profile(0).frame_seconds(2, MUCH, "mesh") == measured


def test_a_plan_prices_frames_over_mesh_as_the_device_has_seen_them() -> None:
    site = Site()
    site.join("a")
    site.settle()
    member = site.session.membership.members["a"]
    broker = member.profile(0).frame_seconds(2, MUCH)
    site.event(interface.DeviceHeartbeat("a", replace(heartbeat(1), peer_frame_s=1e-3, peer_byte_s=2e-8)))
    assert member.profile(0).frame_seconds(2, MUCH, "mesh") == pytest.approx(2e-3 + MUCH * 2e-8)
    assert member.profile(0).frame_seconds(2, MUCH) == broker


@pytest.mark.parametrize(
    ("endpoint", "factor", "again"),
    [(THERE, 4.0, True), (THERE, 1.0, False), (HERE, 4.0, False)],
    ids=["others than foreseen", "as foreseen", "on loopback"],
)
def test_plans_are_made_again_when_frames_cost_other_than_was_foreseen(endpoint, factor: float, again: bool) -> None:
    site = Site(decider=everyone)
    for name in "ab":
        site.boots[name] = 1
        site.event(interface.DeviceCaps(name, replace(caps(name, 1), endpoint=endpoint)))
        site.event(interface.DeviceHeartbeat(name, heartbeat(1)))
        site.event(interface.DeviceStatus(name, Status("online", 1)))
    site.settle()
    site.submit("r1")
    site.answer(1)
    cost = unseen(site.session.membership.members["a"].profile(0))
    told = {"peer_frame_s": factor * cost.frame_s, "peer_byte_s": factor * cost.byte_s}
    for _ in range(40):
        site.now += 1
        for name in "ab":
            site.event(interface.DeviceHeartbeat(name, replace(heartbeat(1), **told)))
        site.event(interface.Tick())
    assert bool(site.notes()["drift"]) is again
