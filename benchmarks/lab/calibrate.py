"""Gives every host of a lab its speed, and measures what it then has: printed before any result."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final

from benchmarks.errors import LabError
from benchmarks.lab.hosts import Host, Process
from benchmarks.lab.lab import Lab
from benchmarks.lab.spec import YARDSTICKS, HostSpec, LabSpec, Yardstick, check_quotas
from benchmarks.provenance import machine
from benchmarks.tables import table

START_S: Final = 600.0  # kernels may have to be compiled
ANSWER_S: Final = 90.0
# Of a throttled speed, and of a link that is off at first, of which the median counts: another guest of the machine may
# disturb one.
REPEATS: Final = 3
ALIKE: Final = 0.2  # of the target: hosts of one target that are not further from it have one quota
WITHIN: Final = 0.05  # of the target: what a last, independent measurement must show
AIM: Final = 0.02  # of the target: what the search looks for before that
MEASUREMENTS: Final = 24
LEAST: Final = 0.005  # of one core
PROBE: Final = "benchmarks.lab.probe"

Report = Callable[[str], None]
Ask = Callable[[str], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class HostFigures:
    """What one host was to have, and has.

    cpu: quota as a share of one core, None where there is none. Speeds in GFLOP/s of [256, 1024] x [1024, 1024] and
    GB/s, throttled; links in Mbit/s from and to the host, and ms, to the hub, with both ends unthrottled. by: whose
    speed the target is.
    """

    host: str
    target_gflops: float | None
    cpu: float | None
    numpy_gflops: float
    kernel_gflops: float
    memory_gb_per_s: float
    rate_mbit: float | None = None
    up_mbit: float | None = None
    down_mbit: float | None = None
    rtt_ms: float | None = None
    by: Yardstick = "numpy"

    @property
    def gflops(self) -> float:
        """Return the speed that the target is compared with."""
        return self.kernel_gflops if self.by == "kernel" else self.numpy_gflops


@dataclass(frozen=True, slots=True)
class Calibration:
    """The figures of all hosts of a lab. full_gflops: an unthrottled core, None without emulated hosts."""

    lab: str
    machine: str
    hosts: tuple[HostFigures, ...]
    full_gflops: float | None = None

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Calibration:
        """Return what `asdict` was made from; raises KeyError or TypeError for anything else."""
        hosts = tuple(HostFigures(**host) for host in data["hosts"])
        return Calibration(data["lab"], data["machine"], hosts, data["full_gflops"])

    def misses(self) -> list[str]:
        """Return every figure that is more than 5 % off its target, in words."""
        out = []
        for h in self.hosts:
            for unit, has, target in (
                ("GFLOP/s", h.gflops, h.target_gflops),
                ("Mbit/s up", h.up_mbit, h.rate_mbit),
                ("Mbit/s down", h.down_mbit, h.rate_mbit),
            ):
                if has is not None and target is not None and _off(has, target):
                    out.append(f"{h.host} has {has:.1f} {unit} instead of {target:g} ({has / target - 1:+.1%})")
        return out

    def lines(self) -> list[str]:
        """Return the table that stands before every result, and what is off its target."""
        names = ("host", "target GFLOP/s", "% of a core", "NumPy GFLOP/s", "kernel GFLOP/s", "memory GB/s", "Mbit/s")
        rows = [
            (
                *(h.host, h.target_gflops, None if h.cpu is None else round(100 * h.cpu, 1), round(h.numpy_gflops, 1)),
                *(round(h.kernel_gflops, 1), round(h.memory_gb_per_s, 1), h.rate_mbit),
                *(None if v is None else round(v, n) for v, n in ((h.up_mbit, 0), (h.down_mbit, 0), (h.rtt_ms, 2))),
            )
            for h in self.hosts
        ]
        full = "" if self.full_gflops is None else f"; one core unthrottled: {self.full_gflops:.1f} GFLOP/s"
        off = [f"- off target: {miss}" for miss in self.misses()]
        return [*table((*names, "up", "down", "round trip ms"), rows), "", f"{self.machine}{full}", *off, ""]


def calibrate(lab: Lab, spec: LabSpec, report: Report) -> Calibration:
    """Set every host's quota so that it has the speed of its spec, and return what all of them have.

    spec: the lab's own, or with other speeds and rates. report: hears a line per step. All hosts are to be idle. Raises
    LabError if a speed cannot be reached, or the quotas are more than the machine has.
    """
    full = _full_speed(lab, spec)
    if full is not None:
        check_quotas(spec, full, os.cpu_count() or 1)
    figures: list[HostFigures] = []
    for own in spec.hosts:
        slowed, host = replace(own, gflops=spec.slowed(own.gflops)), lab.hosts[own.name]
        alike = next((f.cpu for f in figures if f.cpu and f.target_gflops == slowed.gflops), None)
        made = _speeds(host, slowed, spec.calibrate, full, alike)
        rate = spec.rate_of(own.name)
        up, down, rtt_ms = _checked_link(host, lab.hub, rate)
        figures.append(replace(made, rate_mbit=rate, up_mbit=up, down_mbit=down, rtt_ms=rtt_ms))
        report(f"{own.name}: {made.gflops:.1f} GFLOP/s, {up:.0f} Mbit/s up, {down:.0f} down")
    of = machine() if spec.isa is None else f"{machine()}, held to {spec.isa}"
    return Calibration(spec.name, of, tuple(figures), full)


def _speeds(host: Host, spec: HostSpec, by: Yardstick, full: float | None, alike: float | None) -> HostFigures:
    """alike: the quota that was found for another host of the same target, which this one gets too if it fits."""
    target = spec.gflops
    with _prober(host, spec.threads) as ask:
        ask("warm")
        found: dict[Yardstick, float] = {}
        cpu = None

        def measure(cores: float) -> float:
            host.set_cpu(cores)
            host.throttle(True)
            return median(float(ask(by)["gflops_per_s"]) for _ in range(REPEATS))

        if target is not None and host.adjustable:
            if alike is not None:
                speed = measure(alike)
                # Equal hosts get equal quotas: what one measurement says of two of them differs by more than they do.
                if abs(speed / target - 1) <= ALIKE:
                    cpu, found[by] = alike, speed
            if cpu is None:
                guess = alike or (target / full if full else spec.threads / 2)
                cpu, found[by] = solve(measure, target, float(spec.threads), guess)
        else:
            host.throttle(True)
        for other in (other for other in YARDSTICKS if other not in found):
            found[other] = float(ask(other)["gflops_per_s"])
        speeds = found["numpy"], found["kernel"], float(ask("memory")["gb_per_s"])
        return HostFigures(host.name, target, cpu, *speeds, by=by)


def solve(measure: Callable[[float], float], target: float, most: float, start: float) -> tuple[float, float]:
    """Return a quota at which `measure(quota)` is the target within 5 %, seen again by a measurement of its own.

    Throttled speed is not share times full speed: a group that is refilled many times a second finds its caches warm,
    its clock higher and its overdraft forgiven, each by an amount that differs from machine to machine. most: the
    largest quota, in cores. start: where to look first. Raises LabError with the figures if the target lies out of
    reach or the measurements contradict one another for too long.
    """
    cpu = min(max(start, LEAST), most)
    below: tuple[float, float] | None = None  # the largest quota seen too slow, and its speed
    above: tuple[float, float] | None = None  # the smallest quota seen too fast
    seen: list[str] = []
    looking = True
    while len(seen) < MEASUREMENTS:
        speed = measure(cpu)
        seen.append(f"{cpu:.3f}: {speed:.3g}")
        off = speed / target - 1
        if abs(off) <= (AIM if looking else WITHIN):
            if not looking:
                return cpu, speed
            looking = False  # the same again: what was searched for is found too easily in noise
            continue
        looking = True
        if (off < 0 and cpu >= most) or (off > 0 and cpu <= LEAST):
            raise LabError(
                f"{target:g} GFLOP/s is out of reach: with {cpu:.3g} of a core this host has {speed:.3g}; change "
                "`gflops:` in the lab file"
            )
        if off < 0:
            below, above = (cpu, speed), above if above is not None and above[0] > cpu else None
        else:
            above, below = (cpu, speed), below if below is not None and below[0] < cpu else None
        if below is not None and above is not None and above[0] - below[0] < AIM * above[0]:
            below = above = None  # so near to each other they contradict: one was disturbed, and would hold for ever
        cpu = min(max(_next(cpu, speed, target, below, above), LEAST), most)
    raise LabError(
        f"no quota was found for {target:g} GFLOP/s (of a core: GFLOP/s): {', '.join(seen)}; the machine is too busy "
        "or its clock too restless: stop what else runs and try again"
    )


def _next(
    cpu: float, speed: float, target: float, below: tuple[float, float] | None, above: tuple[float, float] | None
) -> float:
    """Return the next quota: on the line between both sides where there are two, else in proportion."""
    if below is None or above is None:
        # At most fourfold at once: a quota of a few microseconds measures nothing but its own granularity.
        return cpu * min(max(target / max(speed, 1e-12), 0.25), 4.0)
    (low, slow), (high, fast) = below, above
    # Not closer to an end than a tenth: noise there would keep the other end where it is for ever.
    return low + (high - low) * min(max((target - slow) / (fast - slow), 0.1), 0.9)


def _full_speed(lab: Lab, spec: LabSpec) -> float | None:
    """Return GFLOP/s on one unthrottled core, by the lab's yardstick, None if no host has a quota to find."""
    for own in spec.hosts:
        if own.gflops is not None and lab.hosts[own.name].adjustable:
            with _prober(lab.hosts[own.name], 1) as ask:
                ask("warm")
                return float(ask(spec.calibrate)["gflops_per_s"])
    return None


def _checked_link(host: Host, hub: Host, rate: float | None) -> tuple[float, float, float]:
    """Return what `_link` does; where that is off the rate, the median of it and more."""
    seen = [_link(host, hub)]
    if rate is not None and any(_off(has, rate) for has in seen[0][:2]):
        seen += [_link(host, hub) for _ in range(REPEATS - 1)]
    up, down, rtt_ms = (median(figures) for figures in zip(*seen, strict=True))
    return up, down, rtt_ms


def _off(has: float, target: float) -> bool:
    return abs(has / target - 1) > WITHIN


def _link(host: Host, hub: Host) -> tuple[float, float, float]:
    """Return Mbit/s from the host and to it, and the round trip in ms."""
    host.throttle(False)
    hub.throttle(False)
    listener = hub.talk("probe-listen", PROBE, "listen", hub.address)
    port = _json(listener, START_S)["port"]
    sent = host.run([host.python, "-m", PROBE, "send", hub.address, str(port)], None, ANSWER_S)
    if sent.code != 0:
        raise LabError(f"the link of {host.name} to the hub ({hub.address}) cannot be measured: {sent.err.strip()}")
    listener.wait(ANSWER_S)
    said = json.loads(sent.out)
    return said["up_mbit_per_s"], said["down_mbit_per_s"], said["rtt_ms"]


@contextmanager
def _prober(host: Host, threads: int) -> Iterator[Ask]:
    """Give a function that measures on the host, in one process that has started at full speed."""
    host.throttle(False)
    talk = host.talk("probe", PROBE, "serve", environment={"HEPTI_PROBE_THREADS": str(threads)})
    try:
        talk.receive(START_S)

        def ask(what: str) -> dict[str, Any]:
            talk.send(what)
            return _json(talk, START_S if what == "warm" else ANSWER_S)

        yield ask
    finally:
        host.throttle(False)
        talk.signal(9)
        talk.wait(ANSWER_S)


def _json(talk: Process, timeout_s: float) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(talk.receive(timeout_s))
    return found
