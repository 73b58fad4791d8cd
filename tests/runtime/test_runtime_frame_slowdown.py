"""What frames to and from peers cost, as devices say it, is what plans are made with."""

from dataclasses import replace

import pytest
from scripted_site import Site, heartbeat

from hepti_mqtt.runtime.planner import events


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
