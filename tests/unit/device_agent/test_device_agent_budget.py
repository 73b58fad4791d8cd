"""What background work may take: all that runs leave, and a small part of what they take. Time is virtual."""

from __future__ import annotations

from pathlib import Path

import pytest

from device_agent.budget import BACKGROUND_SHARE, IN_USE_S, KEPT_S, MAX_PAUSE_S, Budget
from device_agent.machine import has_cpu_quota

STEP_S = 0.002  # of one tile


class Device:
    """Runs of 1 s, one every `period_s`, of which the device computes the first part and waits in the rest."""

    def __init__(self, period_s: float, computes: float, quota_cores: float | None = None) -> None:
        self.budget = Budget(quota_cores)
        self.period_s, self.computes = period_s, computes
        self.taken = {"computing": 0.0, "waiting": 0.0, "between": 0.0}

    def serve(self, requests: int, begin_s: float = 100.0) -> float:
        """Take as many steps as the budget allows, and return when the last request has ended."""
        for number in range(requests):
            start_s = begin_s + number * self.period_s
            self.phase("computing", True, False, start_s, start_s + self.computes)
            self.phase("waiting", True, True, start_s + self.computes, start_s + 1)
            self.phase("between", False, True, start_s + 1, start_s + self.period_s)
        return begin_s + requests * self.period_s

    def phase(self, name: str, running: bool, waiting: bool, now: float, stop_s: float) -> None:
        if now < stop_s:
            self.budget.note(running, waiting, now)
        while now < stop_s:
            pause_s = self.budget.pause_s(now)
            assert pause_s <= MAX_PAUSE_S
            if pause_s == 0:
                self.taken[name] += STEP_S
                self.budget.spend(STEP_S, now + STEP_S)
            now += pause_s or STEP_S


def test_a_device_without_runs_loads_at_full_speed() -> None:
    for quota_cores in (None, 0.25):
        device = Device(1.0, 1.0, quota_cores)
        device.phase("between", False, True, 0.0, 10.0)
        assert device.taken["between"] == pytest.approx(10.0, rel=0.01)


def test_what_runs_leave_is_free_and_is_taken_off_nothing() -> None:
    device = Device(2.0, 0.6)
    device.serve(60)
    assert device.taken["waiting"] == pytest.approx(0.4 * 60, rel=0.02)
    assert device.taken["between"] == pytest.approx(60, rel=0.02)
    assert device.taken["computing"] == pytest.approx(BACKGROUND_SHARE * 60, rel=0.15)
    busy = Device(1.0, 1.0)
    busy.serve(60)
    assert busy.taken["computing"] == pytest.approx(BACKGROUND_SHARE * 60, rel=0.1)
    assert busy.taken["computing"] <= BACKGROUND_SHARE * 60 + KEPT_S + STEP_S


@pytest.mark.parametrize("quota_cores", [0.25, 1.0, 2.0])
def test_under_a_quota_neither_waits_nor_the_time_between_requests_are_free(quota_cores: float) -> None:
    device = Device(2.0, 0.6, quota_cores)
    end_s = device.serve(60)
    runs_lose_s = sum(device.taken.values()) / min(quota_cores, 1.0)  # processor seconds take longer under a quota
    assert runs_lose_s <= BACKGROUND_SHARE * 120 + KEPT_S + STEP_S / min(quota_cores, 1.0)
    assert runs_lose_s >= BACKGROUND_SHARE * 100
    before = device.taken["between"]
    device.phase("between", False, True, end_s, end_s + 10)
    assert device.taken["between"] - before >= 8, "no run came when one was expected: requests may wait for this load"


def test_long_work_is_paid_for_afterwards_and_little_is_saved_up() -> None:
    """A Program that is built, or a kernel that is compiled, cannot be interrupted."""
    budget = Budget()
    budget.note(True, False, 100.0)
    budget.spend(1.0, 101.0)
    assert budget.pause_s(110.0) > 0
    assert budget.pause_s(101.0 + 1.0 / BACKGROUND_SHARE) == 0
    budget.spend(1.0, 122.0)
    budget.note(False, True, 123.0)
    assert budget.pause_s(123.0) == 0, "what is there now is nobody's"
    budget = Budget()
    budget.note(True, False, 0.0)
    assert budget.pause_s(3600.0) == 0
    budget.spend(KEPT_S, 3600.0)
    assert budget.pause_s(3600.0) > 0


def test_a_device_is_unused_when_no_run_is_expected_soon() -> None:
    budget = Budget()
    assert budget.is_unused(0.0)
    budget.note(True, False, 1.0)
    assert not budget.is_unused(1.0 + 2 * IN_USE_S)
    budget.note(False, True, 20.0)
    assert budget.last_run_s(30.0) == 20.0
    assert not budget.is_unused(20.0 + IN_USE_S)
    assert budget.is_unused(20.1 + IN_USE_S)


def test_under_a_quota_a_new_plan_has_the_device_until_no_run_comes() -> None:
    device = Device(1.0, 1.0, 0.25)
    device.phase("between", False, True, 0.0, 10.0)
    device.budget.expect_run(10.0)
    before = device.taken["between"]
    device.phase("between", False, True, 10.0, 10.0 + IN_USE_S)
    assert 0 < device.taken["between"] - before <= BACKGROUND_SHARE * IN_USE_S
    device.phase("between", False, True, 10.0 + IN_USE_S, 20.0 + IN_USE_S)
    assert device.taken["between"] - before >= 9.0


@pytest.mark.parametrize(("written", "is_limited"), [("max 100000", False), ("25000 100000", True)])
def test_a_quota_of_the_control_group_is_seen(tmp_path: Path, written: str, is_limited: bool) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/agent\n")
    (tmp_path / "sys/fs/cgroup/agent").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/agent/cpu.max").write_text(written)
    assert has_cpu_quota(tmp_path) is is_limited
