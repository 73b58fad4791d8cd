"""Gives every host of a lab its speed, and measures what it then has: printed before any result."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final, Protocol, runtime_checkable

from hepti_mqtt import __version__
from hepti_mqtt.config.state import write_atomically
from hepti_mqtt.errors import LabError
from hepti_mqtt.lab.hosts import Host, Talking
from hepti_mqtt.lab.solve import WITHIN, solve
from hepti_mqtt.lab.spec import HUB, YARDSTICKS, HostSpec, LabSpec, Yardstick, check_quotas

START_S: Final = 180.0  # kernels may have to be compiled, on a board
ANSWER_S: Final = 90.0
# Of a throttled speed, and of a link that is off at first, of which the median counts: another guest of the machine may
# disturb one.
REPEATS: Final = 3
ALIKE: Final = 0.2  # of the target: hosts of one target that are not further from it have one quota
_HEAD: Final = (
    "host",
    "target GFLOP/s",
    "quota of a core",
    "NumPy GFLOP/s",
    "kernel GFLOP/s",
    "memory GB/s",
    "rate Mbit/s",
    "up Mbit/s",
    "down Mbit/s",
    "round trip ms",
)

Report = Callable[[str], None]


@runtime_checkable
class Adjustable(Protocol):
    """A host whose CPU quota can be set."""

    def set_cpu(self, cores: float | None) -> None:
        """Set the quota as a share of one core; in force at once if the host is throttled."""
        ...


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

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Calibration:
        """Return what `to_dict` was made from; raises KeyError or TypeError for anything else."""
        hosts = tuple(HostFigures(**host) for host in data["hosts"])
        return Calibration(data["lab"], data["machine"], hosts, data["full_gflops"])

    def misses(self) -> list[str]:
        """Return every figure that is more than 5 % off its target, in words."""
        out = []
        for h in self.hosts:
            pairs = (
                ("GFLOP/s", h.gflops, h.target_gflops),
                ("Mbit/s up", h.up_mbit, h.rate_mbit),
                ("Mbit/s down", h.down_mbit, h.rate_mbit),
            )
            for unit, has, target in pairs:
                if has is not None and target is not None and _off(has, target):
                    out.append(f"{h.host} has {has:.1f} {unit} instead of {target:g} ({has / target - 1:+.1%})")
        return out


def markdown(calibration: Calibration) -> str:
    """Return the table that stands before every result."""
    lines = ["| " + " | ".join(_HEAD) + " |", "|---" + "|---:" * (len(_HEAD) - 1) + "|"]
    for h in calibration.hosts:
        cells = (
            h.host,
            _cell(h.target_gflops, "g"),
            _cell(h.cpu, ".1%"),
            _cell(h.numpy_gflops, ".1f"),
            _cell(h.kernel_gflops, ".1f"),
            _cell(h.memory_gb_per_s, ".1f"),
            _cell(h.rate_mbit, "g"),
            _cell(h.up_mbit, ".0f"),
            _cell(h.down_mbit, ".0f"),
            _cell(h.rtt_ms, ".2f"),
        )
        lines.append("| " + " | ".join(cells) + " |")
    full = calibration.full_gflops
    lines.append(f"\n{calibration.machine}" + ("" if full is None else f"; one core unthrottled: {full:.1f} GFLOP/s"))
    return "\n".join(lines)


def calibrate(spec: LabSpec, hub: Host, hosts: Mapping[str, Host], cache: Path | None, report: Report) -> Calibration:
    """Set every host's quota so that it has the speed of its spec, and return what all of them have.

    hub: the other end of the links. hosts: by the names in `spec`. cache: a directory of earlier calibrations, None to
    begin anew; one that is found is verified by a measurement per host. report: hears a line per step. All other hosts
    are to be idle. Raises LabError if a speed cannot be reached, or the quotas are more than the machine has.
    """
    key = cache_key(spec)
    known = _load(cache, key)
    full = _full_speed(spec, hosts)
    if full is not None:
        check_quotas(spec, full, os.cpu_count() or 1)
    figures: list[HostFigures] = []
    for host in spec.hosts:
        slowed = replace(host, gflops=spec.slowed(host.gflops))
        alike = next((f.cpu for f in figures if f.cpu and f.target_gflops == slowed.gflops), None)
        measured = _speeds(hosts[host.name], slowed, spec.calibrate, full, known.get(host.name), alike)
        report(f"{host.name}: {measured.gflops:.1f} GFLOP/s{_cell(measured.cpu, '.1%', ' at ', ' of a core')}")
        figures.append(measured)
    for place, h in enumerate(figures):
        if hosts[h.host] is not hub:
            rate = spec.slowed(_slower(spec.rate_of(h.host), spec.rate_of(spec.broker or HUB)))
            up, down, rtt_ms = _checked_link(hosts[h.host], hub, rate)
            figures[place] = replace(h, rate_mbit=rate, up_mbit=up, down_mbit=down, rtt_ms=rtt_ms)
            report(f"{h.host}: {up:.0f} Mbit/s up, {down:.0f} down")
    of = machine() if spec.isa is None else f"{machine()}, held to {spec.isa}"
    found = Calibration(spec.name, of, tuple(figures), full)
    if cache is not None:
        with suppress(OSError):  # then the next run begins anew
            cache.mkdir(parents=True, exist_ok=True)
            write_atomically(cache / f"{key}.json", json.dumps(found.to_dict()).encode())
    return found


def machine() -> str:
    """Return what this machine is, in a line."""
    model = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"{os.cpu_count()} x {model}, {platform.system()} {platform.release()}"


def cache_key(spec: LabSpec) -> str:
    """Return the name of a calibration: the same machine, version, hosts and speeds; rates are always measured."""
    hosts = [(h.name, spec.slowed(h.gflops), h.threads, h.ssh, h.command) for h in spec.hosts]
    text = json.dumps([machine(), __version__, spec.name, spec.kind, spec.calibrate, hosts, spec.isa])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


# -- measuring -----------------------------------------------------------------------------------------------------


def _speeds(
    host: Host, spec: HostSpec, by: Yardstick, full: float | None, before: HostFigures | None, alike: float | None
) -> HostFigures:
    """alike: the quota that was found for another host of the same target, which this one gets too if it fits."""
    target = spec.gflops
    with _prober(host, spec.threads) as ask:
        ask("warm")
        found: dict[Yardstick, float] = {}
        cpu = None
        if target is not None and isinstance(host, Adjustable):
            adjust = host.set_cpu

            def measure(cpu: float) -> float:
                adjust(cpu)
                return median(float(ask(by)["gflops_per_s"]) for _ in range(REPEATS))

            known = alike if alike is not None else None if before is None else before.cpu
            if known is not None:
                adjust(known)
                host.throttle(True)
                speed = measure(known)
                if alike is None and before is not None and not _off(speed, target):
                    by_kernel = by == "kernel"
                    return replace(before, kernel_gflops=speed) if by_kernel else replace(before, numpy_gflops=speed)
                # Equal hosts get equal quotas: what one measurement says of two of them differs by more than they do.
                if alike is not None and abs(speed / target - 1) <= ALIKE:
                    cpu, found[by] = known, speed
            if cpu is None:
                guess = known or (target / full if full else spec.threads / 2)
                adjust(guess)
                host.throttle(True)
                solution = solve(measure, target, float(spec.threads), guess)
                cpu, found[by] = solution.cpu, solution.speed
        else:
            host.throttle(True)
        for other in (other for other in YARDSTICKS if other not in found):
            found[other] = float(ask(other)["gflops_per_s"])
        return HostFigures(
            host.name, target, cpu, found["numpy"], found["kernel"], float(ask("memory")["gb_per_s"]), by=by
        )


def _full_speed(spec: LabSpec, hosts: Mapping[str, Host]) -> float | None:
    """Return GFLOP/s on one unthrottled core, by the lab's yardstick, None if no host has a quota to find."""
    for host in spec.hosts:
        if host.gflops is not None and isinstance(hosts[host.name], Adjustable):
            with _prober(hosts[host.name], 1) as ask:
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
    listener = hub.talk("probe-listen", [hub.python, "-m", "hepti_mqtt.lab.probe", "listen", hub.address])
    port = _json(listener, START_S)["port"]
    sent = host.run([host.python, "-m", "hepti_mqtt.lab.probe", "send", hub.address, str(port)], None, ANSWER_S)
    if sent.code != 0:
        raise LabError(f"the link of {host.name} to {hub.name} ({hub.address}) cannot be measured: {sent.err.strip()}")
    listener.wait(ANSWER_S)
    said = json.loads(sent.out)
    return said["up_mbit_per_s"], said["down_mbit_per_s"], said["rtt_ms"]


@contextmanager
def _prober(host: Host, threads: int) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Give a function that measures on the host, in one process that has started at full speed."""
    host.throttle(False)
    command = [host.python, "-m", "hepti_mqtt.lab.probe", "serve"]
    talk = host.talk("probe", command, {"HEPTI_PROBE_THREADS": str(threads)})
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


def _json(talk: Talking, timeout_s: float) -> dict[str, Any]:
    line = talk.receive(timeout_s)
    try:
        said = json.loads(line)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise LabError(f"{talk.name} said {line[:200]!r} instead of figures; look at its log: {talk.log()[-500:]}")
    return said


def _load(cache: Path | None, key: str) -> dict[str, HostFigures]:
    if cache is None:
        return {}
    try:
        found = Calibration.from_dict(json.loads((cache / f"{key}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {host.host: host for host in found.hosts}


def _slower(*rates: float | None) -> float | None:
    return min((rate for rate in rates if rate is not None), default=None)


def _cell(value: float | None, form: str, before: str = "", after: str = "") -> str:
    if value is None:
        return "" if before else "–"
    return f"{before}{value:{form}}{after}"
