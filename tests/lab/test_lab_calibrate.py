"""Calibration on this machine as it is, its figures as data and as a table, and what it does with an earlier one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hepti_mqtt.errors import LabError
from hepti_mqtt.lab import calibrate as module
from hepti_mqtt.lab.calibrate import REPEATS, Calibration, HostFigures, cache_key, calibrate, machine, markdown
from hepti_mqtt.lab.local import LocalHost
from hepti_mqtt.lab.spec import HostSpec, LabSpec

FIGURES = HostFigures("a", 24.6, 0.244, 24.7, 25.1, 6.2, 240.0, 239.0, 251.0, 0.31)
numbers = st.none() | st.floats(0.01, 1e4)


MACHINE = """#!{python}
import json, pathlib, sys
quota = pathlib.Path({quota!r})
print("ready", flush=True)
for line in sys.stdin:
    cpu, full, asked = json.loads(quota.read_text())
    quota.write_text(json.dumps([cpu, full, asked + [[line.strip(), cpu]]]))
    speed = full * (1.0 if cpu is None else cpu ** 0.8)  # not in proportion
    print(json.dumps({{"gflops_per_s": speed, "gb_per_s": speed / 10}}), flush=True)
"""


class QuotaHost(LocalHost):
    """A host whose interpreter is a machine that has the speed of its quota, and remembers what it was asked."""

    def __init__(self, name: str, directory: Path) -> None:
        self.quota = directory / "quota"
        self.cpu: float | None = None
        python = directory / "machine"
        super().__init__(name, directory, python=str(python))
        python.write_text(MACHINE.format(python=sys.executable, quota=str(self.quota)))
        python.chmod(0o755)
        self.becomes(140.0)

    def becomes(self, full: float) -> None:
        self.quota.write_text(json.dumps([None, full, []]))

    def asked(self, what: str) -> list[float | None]:
        return [cpu for asked, cpu in json.loads(self.quota.read_text())[2] if asked == what]

    def set_cpu(self, cores: float | None) -> None:
        self.cpu = cores
        self._apply(cores)

    def throttle(self, on: bool) -> None:
        self._apply(self.cpu if on else None)

    def _apply(self, cores: float | None) -> None:
        _, full, asked = json.loads(self.quota.read_text())
        self.quota.write_text(json.dumps([cores, full, asked]))


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LocalHost]:
    with LocalHost("hub", tmp_path / "hub") as hub:
        yield hub


@st.composite
def figures(draw) -> HostFigures:
    speeds = [draw(st.floats(0.01, 1e4)) for _ in range(3)]
    return HostFigures("h", draw(numbers), draw(numbers), *speeds, *(draw(numbers) for _ in range(4)))


@given(st.lists(figures(), max_size=4), numbers)
def test_data_there_and_back(hosts, full):
    calibration = Calibration("lab", "machine", tuple(hosts), full)
    assert Calibration.from_dict(json.loads(json.dumps(calibration.to_dict()))) == calibration
    table = [line for line in markdown(calibration).splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(hosts)
    assert len({line.count("|") for line in table}) == 1


def test_the_table_has_targets_and_figures():
    table = markdown(Calibration("lab", "2 x CPU", (FIGURES,), 140.0))
    assert "| a | 24.6 | 24.4% | 24.7 | 25.1 | 6.2 | 240 | 239 | 251 | 0.31 |" in table
    assert table.endswith("2 x CPU; one core unthrottled: 140.0 GFLOP/s")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, []),
        ({"numpy_gflops": 26.0}, ["a has 26.0 GFLOP/s instead of 24.6 (+5.7%)"]),
        ({"up_mbit": 220.0}, ["a has 220.0 Mbit/s up instead of 240 (-8.3%)"]),
        ({"target_gflops": None, "rate_mbit": None, "numpy_gflops": 1.0, "up_mbit": 1.0}, []),
    ],
)
def test_what_is_off_by_more_than_a_twentieth_is_said(change, words):
    assert Calibration("lab", "m", (replace(FIGURES, **change),)).misses() == words


def test_hosts_as_they_are_get_figures_without_quotas(hub, tmp_path):
    spec = LabSpec("this", "local", (HostSpec("a"),))
    lines: list[str] = []
    with LocalHost("a", tmp_path / "a") as a:
        found = calibrate(spec, hub, {"a": a}, None, lines.append)
    (host,) = found.hosts
    assert (host.target_gflops, host.cpu, host.rate_mbit, found.full_gflops) == (None, None, None, None)
    assert min(host.numpy_gflops, host.kernel_gflops, host.memory_gb_per_s, host.up_mbit, host.rtt_ms) > 0
    assert found.machine == machine()
    assert len(lines) == 2
    assert found.misses() == []


def test_a_quota_is_found_verified_kept_and_found_again_when_the_machine_has_changed(tmp_path):
    spec = LabSpec("four", "emulated", (HostSpec("a", gflops=24.6),))
    with QuotaHost("a", tmp_path / "a") as a:

        def run() -> HostFigures:
            return calibrate(spec, a, {"a": a}, tmp_path / "cache", lambda line: None).hosts[0]

        first = run()
        assert first.numpy_gflops == pytest.approx(24.6, rel=0.05)
        assert first.cpu == pytest.approx((24.6 / 140) ** 1.25, rel=0.05)
        assert a.asked("numpy")[0] is None, "the core itself, unthrottled"
        assert a.asked("numpy")[-2 * REPEATS :] == [first.cpu] * 2 * REPEATS
        assert a.asked("kernel") == a.asked("memory") == [first.cpu]
        a.becomes(141.0)
        again = run()
        assert again.cpu == first.cpu
        assert again.numpy_gflops == pytest.approx(24.6 * 141 / 140, rel=0.05)
        assert len(a.asked("numpy")) == 1 + REPEATS, "one for the core, the others to verify"
        a.becomes(110.0)
        anew = run()
        assert anew.cpu > first.cpu
        assert anew.numpy_gflops == pytest.approx(24.6, rel=0.05)


def test_a_dilated_host_gets_the_quota_of_a_slower_one(tmp_path):
    spec = LabSpec("slow", "emulated", (HostSpec("a", gflops=24.6),), rate_mbit=240.0, dilation=3.0)
    with QuotaHost("a", tmp_path / "a") as a:
        found = calibrate(spec, a, {"a": a}, None, lambda line: None).hosts[0]
    assert found.target_gflops == pytest.approx(8.2)
    assert found.numpy_gflops == pytest.approx(8.2, rel=0.05)
    assert cache_key(spec) != cache_key(replace(spec, dilation=1.0))


def test_quotas_beyond_the_machine_are_refused_before_any_search(tmp_path):
    hosts = tuple(HostSpec(f"h{i}", gflops=126.0) for i in range(1 + 2 * (os.cpu_count() or 1)))
    with QuotaHost("h", tmp_path / "a") as a:
        with pytest.raises(LabError, match="of a core"):
            calibrate(LabSpec("many", "emulated", hosts), a, {h.name: a for h in hosts}, None, lambda line: None)
        assert a.asked("numpy") == [None]


@pytest.mark.parametrize(
    ("seen", "counts"),
    [
        ([(240.0, 238.0, 0.1)], (240.0, 238.0, 0.1)),
        ([(226.8, 239.0, 0.1), (239.0, 238.0, 0.3), (240.0, 240.0, 0.2)], (239.0, 239.0, 0.2)),
        ([(226.8, 239.0, 0.1), (220.0, 238.0, 0.1), (240.0, 238.0, 0.1)], (226.8, 238.0, 0.1)),
    ],
)
def test_a_link_that_is_off_is_measured_again_and_the_median_counts(hub, monkeypatch, seen, counts):
    spec = LabSpec("links", "emulated", (HostSpec("a"),), rate_mbit=480.0, dilation=2.0)
    left = list(seen)
    monkeypatch.setattr(module, "_link", lambda host, hub: left.pop(0))
    monkeypatch.setattr(module, "_speeds", lambda host, *rest: replace(FIGURES, host="a"))
    found = calibrate(spec, hub, {"a": object()}, None, lambda line: None).hosts[0]
    assert (found.rate_mbit, found.up_mbit, found.down_mbit, found.rtt_ms) == (240.0, *counts)
    assert not left


def test_a_host_that_says_something_else_is_an_error_with_its_words(hub, tmp_path):
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho ready\nread line\necho a strange word\nread line\n")
    fake.chmod(0o755)
    spec = LabSpec("this", "local", (HostSpec("a"),))
    with (
        LocalHost("a", tmp_path / "a", python=str(fake)) as a,
        pytest.raises(LabError, match="said 'a strange word' instead of figures"),
    ):
        calibrate(spec, hub, {"a": a}, None, lambda line: None)


def test_rates_do_not_change_the_key_and_speeds_do():
    spec = LabSpec("this", "emulated", (HostSpec("a", gflops=20.0),), rate_mbit=100.0)
    assert cache_key(spec) == cache_key(spec.with_rate(940.0))
    assert cache_key(spec) != cache_key(replace(spec, hosts=(HostSpec("a", gflops=21.0),)))


def test_a_quota_may_follow_the_kernel(tmp_path):
    spec = LabSpec("k", "emulated", (HostSpec("a", 24.6),), calibrate="kernel")
    with QuotaHost("a", tmp_path / "a") as host:
        found = calibrate(spec, host, {"a": host}, tmp_path, lambda _: None)
        assert len(host.asked("kernel")) >= 3  # unthrottled, found, and seen again
        assert host.asked("numpy") == [host.cpu]
        assert found.hosts[0].by == "kernel"
        host.becomes(140.0)
        assert calibrate(spec, host, {"a": host}, tmp_path, lambda _: None).hosts[0].by == "kernel"
        assert host.asked("numpy") == []
    off = replace(found, hosts=(replace(FIGURES, by="kernel", numpy_gflops=50.0), replace(FIGURES, numpy_gflops=50.0)))
    assert len(off.misses()) == 1
    assert cache_key(spec) != cache_key(replace(spec, calibrate="numpy"))
    assert cache_key(spec) != cache_key(replace(spec, isa="avx2"))
