"""This machine: the size of its caches, the memory and cores that this process may use, and its health."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil

from hepti_mqtt.core.errors import ConfigError
from hepti_mqtt.transport.url import BrokerUrl

UNKNOWN_BYTES: Final = 4 << 20  # if the system does not say; boards have less
_CPU: Final = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def last_level_cache_bytes(directory: Path = _CPU) -> int:
    """Return the bytes of the first core's largest cache, as Linux reports it."""
    sizes = [UNKNOWN_BYTES] if not directory.is_dir() else []
    for path in directory.glob("index*/size"):
        try:
            text = path.read_text(encoding="ascii").strip()
            sizes.append(int(text.rstrip("KMG")) * _UNITS.get(text[-1:], 1))
        except (OSError, ValueError):
            continue
    return max(sizes, default=UNKNOWN_BYTES)


# ----------------------------------------------------------------------------------------------------------------------
# The memory and cores that this process's control groups allow, not those of the machine.


SYSTEM: Final = Path("/")
FREE_MEMORY_FRACTION: Final = 0.8
LOADING_BYTES: Final = 8 << 20  # tiles under way while weights are loaded


def free_memory(root: Path = SYSTEM) -> int:
    """Return the bytes free for this process: the least of the machine's and of each of its control groups."""
    return min([int(psutil.virtual_memory().available), *(max(free, 0) for free in _free_in_groups(root))])


def memory_budget(memory_bytes: int | None, free_bytes: int) -> int:
    """Return the bytes for weights and live slots together; the idle agent's memory is not part of them.

    At most the free bytes, less the tiles in flight during a load. Raises ConfigError if nothing is left.
    """
    whole = int(FREE_MEMORY_FRACTION * free_bytes) if memory_bytes is None else min(memory_bytes, free_bytes)
    if whole <= LOADING_BYTES:
        raise ConfigError(
            f"A budget of {whole / 2**20:.0f} MiB leaves nothing for weights: "
            f"loading alone needs {LOADING_BYTES / 2**20:.0f} MiB. "
            "Raise --memory or the container's limit."
        )
    return whole - LOADING_BYTES


def usable_cores(root: Path = SYSTEM) -> float:
    """Return how many cores the affinity and the quotas of the control groups leave this process."""
    return min([_allowed_cores(), *_quotas(root)])


def has_cpu_quota(root: Path = SYSTEM) -> bool:
    """Return whether a quota of the control groups can stop this process before it has used all of its cores."""
    return usable_cores(root) < _allowed_cores()


def _allowed_cores() -> float:
    return float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _quotas(root: Path) -> list[float]:
    return [quota for group in _groups(root, "cpu") if (quota := _quota(group)) is not None]


def core_capacities(root: Path = SYSTEM) -> list[int]:
    """Return the kernel's capacity ratings of the usable cores (heterogeneous CPUs), sorted."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    rated = (_number(root / f"sys/devices/system/cpu/cpu{core}/cpu_capacity") for core in allowed)
    return sorted(rate for rate in rated if rate is not None)


def _free_in_groups(root: Path) -> Iterator[int]:
    """Yield the free bytes of each control group: its limit less its use, without reclaimable file pages.

    memory.high counts as a limit: beyond it the kernel slows a process down until it gives memory back.
    """
    names = (
        ("memory.max", "memory.current"),
        ("memory.high", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    )
    for group in _groups(root, "memory"):
        for limit_file, used_file in names:  # version 2 twice, version 1
            limit, used = _number(group / limit_file), _number(group / used_file)
            if limit is not None and used is not None:
                yield limit - used + _inactive_files(group / "memory.stat")


def _inactive_files(stat: Path) -> int:
    values = dict.fromkeys(("inactive_file", "total_inactive_file"), 0)
    with suppress(OSError, ValueError):
        for line in stat.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in values:
                values[name] = int(value)
    return max(values.values())


def _quota(group: Path) -> float | None:
    with suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    quota_us, period_us = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    if quota_us is None or not period_us or quota_us <= 0:
        return None
    return quota_us / period_us


def _groups(root: Path, controller: str) -> list[Path]:
    """Return the directories of this process's control groups, from the innermost to the outermost."""
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    out: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # A system with both versions mounts version 2 as `unified`, next to the hierarchies of version 1.
        names = (controllers, controller) if controllers else ("unified",)
        top = next((mount / name for name in names if (mount / name).is_dir()), mount)
        inner = top / path.lstrip("/")
        # In a container the path may be the host's; its own group is then the mount's root.
        out += [d for d in (inner, *inner.parents) if d.is_relative_to(top) and d.is_dir()]
    return out


def _number(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return None


# ----------------------------------------------------------------------------------------------------------------------
# The machine's health: CPU time of other processes, memory, temperature.


BROKERS: Final = ("mosquitto", "amqtt", "nanomq", "rmqttd", "vernemq", "emqx")
SEARCH_S: Final = 30.0  # between two searches through all processes; one takes a small computer 0.1 s
WINDOW_S: Final = 0.5  # the system counts CPU time in steps of 10 ms: shorter windows are noise
TEMPERATURE_EVERY: Final = 5  # samples
THERMAL: Final = ("cpu_thermal", "cpu-thermal", "soc_thermal", "coretemp", "k10temp", "zenpower", "acpitz")
_BUSY: Final = ("user", "nice", "system", "irq", "softirq", "steal")


class CpuTimes(NamedTuple):
    """Seconds: a monotonic clock, all cores' busy time, and this process's and a local broker's parts of it."""

    clock_s: float
    busy_s: float
    own_s: float
    broker_s: float


class HealthSample(NamedTuple):
    """A sample of the machine's health; cpu_other: 0..1 of all cores, without this process and a local broker."""

    cpu_other: float
    free_bytes: int
    temperature_c: float | None
    rss_bytes: int


def cpu_other(before: CpuTimes, after: CpuTimes, cores: int) -> float:
    """Return the part of all cores, 0..1, that other processes used between two samples."""
    window_s = (after.clock_s - before.clock_s) * cores
    if window_s <= 0:
        return 0.0
    ours = after.own_s - before.own_s
    # A restarted broker has less time than before; it then counts as 0.
    broker = max(after.broker_s - before.broker_s, 0.0)
    return min(max((after.busy_s - before.busy_s - ours - broker) / window_s, 0.0), 1.0)


class HealthMonitor:
    """Samples the machine's health; not thread safe."""

    def __init__(self, url: BrokerUrl) -> None:
        self._process = psutil.Process()
        self._cores = psutil.cpu_count() or 1
        self._broker_is_local = is_this_machine(url.host)
        self._brokers = local_brokers() if self._broker_is_local else []
        self._searched_s = time.monotonic()
        self._before = self._times()
        self._share = 0.0
        self._looks = 0
        self._temperature_c: float | None = None

    def sample(self) -> HealthSample:
        """Return a new sample; cpu_other is that of a window of at least WINDOW_S."""
        after = self._times()
        if after.clock_s - self._before.clock_s >= WINDOW_S:
            self._share = cpu_other(self._before, after, self._cores)
            self._before = after
        if self._looks % TEMPERATURE_EVERY == 0:
            self._temperature_c = temperature_c()
        self._looks += 1
        return HealthSample(self._share, free_memory(), self._temperature_c, int(self._process.memory_info().rss))

    def _times(self) -> CpuTimes:
        now = time.monotonic()
        gone = any(not broker.is_running() for broker in self._brokers)
        if gone and now - self._searched_s > SEARCH_S:
            self._searched_s = now
            self._brokers = local_brokers()
        whole = psutil.cpu_times()
        busy = sum(getattr(whole, name, 0.0) for name in _BUSY)
        return CpuTimes(now, busy, _spent(self._process), sum(_spent(p) for p in self._brokers))


def is_this_machine(host: str) -> bool:
    """Return whether a broker's host is this machine."""
    with suppress(OSError, UnicodeError):
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
        own = {a.address.split("%")[0] for interface in psutil.net_if_addrs().values() for a in interface}
        return bool(addresses & own) or any(a.startswith("127.") or a == "::1" for a in addresses)
    return False


def local_brokers() -> list[psutil.Process]:
    """Return the processes of this machine that look like an MQTT broker."""
    brokers = []
    for process in psutil.process_iter(["name", "cmdline"]):
        info: dict[str, Any] = process.info
        words = [info["name"] or "", *(info["cmdline"] or [])[1:3]]  # a broker in Python is `python -m its.module`
        if any(word.rsplit("/", 1)[-1].startswith(BROKERS) or "embedded_broker.child" in word for word in words):
            brokers.append(process)
    return brokers


def temperature_c() -> float | None:
    """Return the CPU's temperature, or None if the system does not report it."""
    try:
        sensors = psutil.sensors_temperatures()
    except (AttributeError, OSError, RuntimeError):
        return None
    for name in THERMAL:
        values = [s.current for s in sensors.get(name, []) if s.current is not None]
        if values:
            return float(max(values))
    return None


def _spent(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
