"""Namespaces, links and their rates: one star per lab, wholly inside namespaces of its own.

A bridge in `hepti-LAB-switch` joins one veth pair per host; nothing is made in the machine's own network, so the
addresses cannot clash with it or with another lab, and the lab reaches nothing outside.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

from benchmarks.errors import LabError
from benchmarks.lab.spec import SWITCH

PREFIX: Final = "hepti-"
INTERFACE: Final = "eth0"
_SUBNET: Final = "10.77.0"
_COMMAND_S: Final = 30.0
# tbf counts Ethernet frames, a rate is meant as what TCP delivers: 1448 of every 1514 bytes.
_FRAME_PER_GOODPUT: Final = 1514 / 1448
# A large bucket lets a whole layer pass for free; a small one cannot be refilled in time by the kernel's clock.
_BUCKET_BYTES: Final = 18_000
_BUCKET_S: Final = 0.5e-3
# Segments larger than the bucket would be cut up by tbf, on the sender's share of the CPU. Up to it they are as large
# as those that a network card takes: what cards cut up by themselves costs a host nothing.
_GSO_BYTES: Final = 65_536
_GSO_ROOM: Final = 2_048
_QUEUE_BYTES: Final = 1_000_000  # what a small switch buffers


def namespace(lab: str, host: str) -> str:
    """Return the name of a host's namespace."""
    return f"{PREFIX}{lab}-{host}"


def bucket_bytes(rate_mbit: float) -> int:
    """Return the size of the token bucket for a rate."""
    return max(_BUCKET_BYTES, int(rate_mbit * 1e6 / 8 * _BUCKET_S))


def segment_bytes(rate_mbit: float | None) -> int:
    """Return the largest segment that is handed to a link of this rate."""
    return _GSO_BYTES if rate_mbit is None else min(_GSO_BYTES, bucket_bytes(rate_mbit) - _GSO_ROOM)


def shaping(rate_mbit: float) -> list[str]:
    """Return tc's words for a link that delivers `rate_mbit` Mbit/s to TCP."""
    bits = int(rate_mbit * 1e6 * _FRAME_PER_GOODPUT)
    bucket = bucket_bytes(rate_mbit)
    return ["tbf", "rate", f"{bits}bit", "burst", str(bucket), "limit", str(_QUEUE_BYTES + bucket)]


def command(words: Sequence[str]) -> str:
    """Run ip or tc and return what it prints; raises LabError with its own words."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabError(f"{' '.join(words)}: {error}") from error
    if done.returncode != 0:
        raise LabError(f"{' '.join(words)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def missing_tools() -> list[str]:
    """Return the programs that emulated hosts need and this machine has not."""
    return [name for name in ("ip", "tc", "sh") if shutil.which(name) is None]


def namespaces() -> list[str]:
    """Return the machine's named namespaces."""
    return [line.split()[0] for line in command(["ip", "netns", "list"]).splitlines() if line.strip()]


def processes(name: str) -> list[int]:
    """Return the processes in a namespace, none where it does not exist."""
    return [int(pid) for pid in command(["ip", "netns", "pids", name]).split()] if name in namespaces() else []


def remove(names: Sequence[str]) -> None:
    """Remove namespaces, with the links in them; those that do not exist are no error."""
    there = set(namespaces())
    for name in names:
        if name in there:
            command(["ip", "netns", "del", name])


class Network:
    """The star of one lab. hosts: names in the order of their addresses, with the rate of each link in Mbit/s."""

    def __init__(self, lab: str, hosts: Mapping[str, float | None]) -> None:
        self._lab = lab
        self._rates = dict(hosts)
        self._port = {name: f"p{i}" for i, name in enumerate(hosts, start=1)}
        self.addresses = {name: f"{_SUBNET}.{i}" for i, name in enumerate(hosts, start=1)}
        self._switch = namespace(lab, SWITCH)
        self.namespaces = [self._switch, *(namespace(lab, name) for name in hosts)]

    def make(self) -> None:
        """Make namespaces, bridge and links; raises LabError."""
        for name in self.namespaces:
            command(["ip", "netns", "add", name])
            self._ip(name, "link", "set", "lo", "up")
        self._ip(self._switch, "link", "add", "br0", "type", "bridge")
        self._ip(self._switch, "link", "set", "br0", "up")
        largest = min(segment_bytes(rate) for rate in self._rates.values())
        for host, port in self._port.items():
            own = namespace(self._lab, host)
            peer = ["peer", "name", INTERFACE, "netns", own]
            self._ip(self._switch, "link", "add", port, "type", "veth", *peer)
            self._ip(own, "addr", "add", f"{self.addresses[host]}/24", "dev", INTERFACE)
            for where, device in ((self._switch, port), (own, INTERFACE)):
                self._ip(where, "link", "set", device, "gso_max_size", str(largest))
                self._ip(where, "link", "set", device, "up")
            self._ip(self._switch, "link", "set", port, "master", "br0")
            rate = self._rates[host]
            if rate is not None:
                self._shape("add", host, rate)

    def set_rate(self, host: str, rate_mbit: float) -> None:
        """Change the goodput of a host's link, both ways; what waits in its queues stays there."""
        self._shape("add" if self._rates[host] is None else "change", host, rate_mbit)
        self._rates[host] = rate_mbit

    def plug(self, host: str, how: str) -> None:
        """Unplug a host's cable ("down"), or plug it in again ("up")."""
        self._ip(self._switch, "link", "set", self._port[host], how)

    def _shape(self, verb: str, host: str, rate_mbit: float) -> None:
        """Shape uplink (at the host) and downlink (at the switch)."""
        for where, device in ((namespace(self._lab, host), INTERFACE), (self._switch, self._port[host])):
            command(["tc", "-n", where, "qdisc", verb, "dev", device, "root", *shaping(rate_mbit)])

    def _ip(self, where: str, *words: str) -> None:
        command(["ip", "-n", where, *words])
