"""How the machine is doing: CPU that others use, memory, temperature."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import Any, Final, NamedTuple

import psutil

from device_agent.limits import free_memory
from hepti_mqtt.transport import BrokerUrl

BROKERS: Final = ("mosquitto", "amqtt", "nanomq", "rmqttd", "vernemq", "emqx")
SEARCH_S: Final = 30.0  # at most so often all processes are looked through, which takes a small computer 0.1 s
WINDOW_S: Final = 0.5  # the system counts CPU time in steps of 10 ms, so that a shorter look says nothing
TEMPERATURE_EVERY: Final = 5  # looks
THERMAL: Final = ("cpu_thermal", "cpu-thermal", "soc_thermal", "coretemp", "k10temp", "zenpower", "acpitz")
_BUSY: Final = ("user", "nice", "system", "irq", "softirq", "steal")


class CpuTimes(NamedTuple):
    """Seconds since some start: the clock, all cores' busy time, and of that our own and a local broker's."""

    clock_s: float
    busy_s: float
    own_s: float
    broker_s: float


class Health(NamedTuple):
    """One look at the machine; cpu_other is 0..1 of all cores, without this process and a local broker."""

    cpu_other: float
    free_bytes: int
    temperature_c: float | None
    rss_bytes: int


def cpu_other(before: CpuTimes, after: CpuTimes, cores: int) -> float:
    """Return the part of all cores, 0..1, that others used between two looks."""
    window_s = (after.clock_s - before.clock_s) * cores
    if window_s <= 0:
        return 0.0
    ours = after.own_s - before.own_s
    # A broker that has restarted has less time than before: then it counts as nothing for once.
    broker = max(after.broker_s - before.broker_s, 0.0)
    return min(max((after.busy_s - before.busy_s - ours - broker) / window_s, 0.0), 1.0)


class HealthMonitor:
    """Looks at the machine whenever `look` is called; not thread safe."""

    def __init__(self, url: BrokerUrl) -> None:
        self._process = psutil.Process()
        self._cores = psutil.cpu_count() or 1
        self._broker_is_local = is_local(url.host)
        self._brokers = local_brokers() if self._broker_is_local else []
        self._searched_s = time.monotonic()
        self._before = self._times()
        self._share = 0.0
        self._looks = 0
        self._temperature_c: float | None = None

    def look(self) -> Health:
        """Return what is now; cpu_other since the last look, or the look before where that was just now."""
        after = self._times()
        if after.clock_s - self._before.clock_s >= WINDOW_S:
            self._share = cpu_other(self._before, after, self._cores)
            self._before = after
        if self._looks % TEMPERATURE_EVERY == 0:
            self._temperature_c = temperature_c()
        self._looks += 1
        return Health(self._share, free_memory(), self._temperature_c, int(self._process.memory_info().rss))

    def _times(self) -> CpuTimes:
        now = time.monotonic()
        gone = any(not broker.is_running() for broker in self._brokers)
        if gone and now - self._searched_s > SEARCH_S:
            self._searched_s = now
            self._brokers = local_brokers()
        whole = psutil.cpu_times()
        busy = sum(getattr(whole, name, 0.0) for name in _BUSY)
        return CpuTimes(now, busy, _spent(self._process), sum(_spent(p) for p in self._brokers))


def is_local(host: str) -> bool:
    """Return whether a broker's host is this machine."""
    with suppress(OSError, UnicodeError):
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
        own = {a.address.split("%")[0] for found in psutil.net_if_addrs().values() for a in found}
        return bool(addresses & own) or any(a.startswith("127.") or a == "::1" for a in addresses)
    return False


def local_brokers() -> list[psutil.Process]:
    """Return the processes of this machine that look like an MQTT broker."""
    found = []
    for process in psutil.process_iter(["name", "cmdline"]):
        info: dict[str, Any] = process.info
        words = [info["name"] or "", *(info["cmdline"] or [])[1:3]]  # a broker in Python is `python -m its.module`
        if any(word.rsplit("/", 1)[-1].startswith(BROKERS) or "embedded_broker.child" in word for word in words):
            found.append(process)
    return found


def temperature_c() -> float | None:
    """Return the CPU's temperature, or None where the system does not tell."""
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
