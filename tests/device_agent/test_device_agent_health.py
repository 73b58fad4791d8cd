import os
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_agent import machine as monitoring
from device_agent.machine import WINDOW_S, CpuTimes, HealthMonitor, cpu_other, is_local, local_brokers
from hepti_mqtt.embedded_broker import start_broker
from hepti_mqtt.transport import BrokerUrl

seconds = st.floats(0, 100)


def test_others_are_what_is_busy_without_us_and_a_local_broker():
    before = CpuTimes(10.0, 100.0, 50.0, 5.0)
    after = CpuTimes(12.0, 103.0, 51.5, 5.5)
    assert cpu_other(before, after, 4) == pytest.approx((3.0 - 1.5 - 0.5) / (2 * 4))


@given(st.builds(CpuTimes, seconds, seconds, seconds, seconds), st.builds(CpuTimes, seconds, seconds, seconds, seconds))
def test_a_share_is_a_share(before, after):
    assert 0.0 <= cpu_other(before, after, 4) <= 1.0


def test_a_restarted_broker_counts_as_nothing_once():
    before, after = CpuTimes(0.0, 0.0, 0.0, 50.0), CpuTimes(1.0, 0.5, 0.0, 0.1)
    assert cpu_other(before, after, 1) == 0.5


class Clock:
    """The system's counters, as the test sets them."""

    def __init__(self, monkeypatch):
        self.now, self.busy = 100.0, 0.0
        times = lambda: SimpleNamespace(user=self.busy, nice=0.0, system=0.0)  # noqa: E731
        monkeypatch.setattr(monitoring.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(monitoring.psutil, "cpu_times", times)
        monkeypatch.setattr(monitoring.psutil, "cpu_count", lambda: 2)
        monkeypatch.setattr(monitoring, "_spent", lambda process: 0.0)

    def pass_by(self, seconds, cores):
        self.now += seconds
        self.busy += seconds * cores


def test_a_look_just_after_another_repeats_it(monkeypatch):
    clock = Clock(monkeypatch)
    monitor = HealthMonitor(BrokerUrl.parse("mqtt://192.0.2.1"))
    clock.pass_by(WINDOW_S / 10, 2)
    assert monitor.look().cpu_other == 0.0
    clock.pass_by(1.0, 1)
    share = monitor.look().cpu_other
    assert 0.5 <= share < 0.6
    clock.pass_by(WINDOW_S / 10, 2)
    assert monitor.look().cpu_other == share
    clock.pass_by(1.0, 0)
    assert monitor.look().cpu_other < 0.1


def test_a_look_at_this_machine():
    monitor = HealthMonitor(BrokerUrl.parse("mqtt://127.0.0.1"))
    health = monitor.look()
    assert 0.0 <= health.cpu_other <= 1.0
    assert health.free_bytes > 0
    assert health.rss_bytes > 1 << 20
    assert health.temperature_c is None or -50 < health.temperature_c < 150


@pytest.mark.parametrize(
    ("host", "local"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("192.0.2.1", False)]
)
def test_where_a_broker_is(host, local):
    assert is_local(host) is local


def test_an_unknown_host_is_not_here():
    assert is_local("no such host") is False


@pytest.mark.broker
def test_a_broker_of_this_machine_is_found():
    before = {p.pid for p in local_brokers()}
    with start_broker():
        found = {p.pid for p in local_brokers()} - before
    assert found
    assert os.getpid() not in found
