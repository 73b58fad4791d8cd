"""Large probes in the pauses between runs: a device that serves without a rest has no second in which it is idle.

Without them a link that fails while requests follow each other is never seen to have failed. One large probe at a time,
so that it has this device's links to itself, and each way no more often than when the device is idle.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from device_agent.mesh_links import MeshLinks
from device_agent.network import Network
from device_agent.probe import Prober

APART_S: Final = 0.3  # at least between two probes
BROKER: Final = ""


class Pauses:
    """Probes the broker's way and those to peers, in turn; for the session thread. links: None without mesh."""

    def __init__(self, network: Network, links: MeshLinks | None) -> None:
        self._network, self._links = network, links
        self._next_s = float("-inf")
        self._turn = self._falls = 0

    def take(self, now: float) -> None:
        """Take it that no request is under way here; the time is that of time.perf_counter()."""
        if now < self._next_s:
            return
        probers = {BROKER: self._network.prober, **({} if self._links is None else self._links.probes.probers())}
        self._spread_doubt(probers)
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

    def _spread_doubt(self, probers: Mapping[str, Prober]) -> None:
        """Measure all ways again once one of them has fallen: they share this device's link."""
        falls = sum(prober.falls for prober in probers.values())
        if falls > self._falls:
            for prober in probers.values():
                prober.doubt()
        self._falls = falls
