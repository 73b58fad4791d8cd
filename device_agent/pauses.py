"""Large probes in the pauses between runs: a device that serves without a rest has no second in which it is idle.

Without them a link that fails while requests follow each other is never seen to have failed. One large probe at a time,
so that it has this device's links to itself, and each way no more often than when the device is idle: at once only
where runs wait for others much longer than they did, or where another way has fallen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Final

from device_agent.mesh_links import MeshLinks
from device_agent.network import Network
from device_agent.probe import Prober

APART_S: Final = 0.3  # at least between two probes
BROKER: Final = ""
RUNS: Final = 8  # of late, by whose waits one is long
LONGER: Final = 1.5
LONGER_S: Final = 0.02  # and by so much at least: what is shorter comes and goes
LONG_ONES: Final = 2  # in a row


class Pauses:
    """Probes the broker's way and those to peers, in turn; for the session thread. links: None without mesh."""

    def __init__(self, network: Network, links: MeshLinks | None) -> None:
        self._network, self._links = network, links
        self._next_s = float("-inf")
        self._turn = self._falls = self._long = 0
        self._waits: deque[float] = deque(maxlen=RUNS)

    def take(self, now: float, waited_s: float | None) -> None:
        """Take it that no run is under way here, and how long this device waited in the one that ended, if one did.

        now: by time.perf_counter().
        """
        probers = {BROKER: self._network.prober, **({} if self._links is None else self._links.probes.probers())}
        if (waited_s is not None and self._waits_longer(waited_s)) or self._fell(probers):
            for prober in probers.values():
                prober.doubt()
        if now < self._next_s:
            return
        ways = sorted(probers)
        for offset in range(len(ways)):
            place = (self._turn + offset) % len(ways)
            if self._probe(ways[place], now):
                self._turn = place + 1
                self._next_s = now + APART_S
                return

    def _probe(self, way: str, now: float) -> bool:
        if way == BROKER or self._links is None:
            return self._network.probe_large(now)
        return self._links.probe_large(way, now)

    def _waits_longer(self, waited_s: float) -> bool:
        """Return whether runs have begun to wait much longer than those of late."""
        known = len(self._waits) == RUNS
        self._long = self._long + 1 if known and waited_s > LONGER * median(self._waits) + LONGER_S else 0
        if self._long < LONG_ONES:
            if not self._long:
                self._waits.append(waited_s)
            return False
        self._waits.clear()
        self._long = 0
        return True

    def _fell(self, probers: Mapping[str, Prober]) -> bool:
        """Return whether a way has fallen since the last look: all of them share this device's link."""
        before, self._falls = self._falls, sum(prober.falls for prober in probers.values())
        return self._falls > before
