"""The links of a site on the virtual clock: each way of each is a queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from hepti_mqtt.cluster import FAST_BYTES_PER_S, Cluster, Link
from hepti_mqtt.ids import PLANNER

Note = Callable[[str, str, str, float, float], None]  # device, lane, label, start, stop


class Links:
    """When packets arrive that are sent over them; `note` is told how long each link is taken."""

    def __init__(self, cluster: Cluster, note: Note) -> None:
        self._cluster, self._note = cluster, note
        self._free: dict[tuple[str, str], float] = {}  # from when on

    def transmit(self, now: float, source: str, targets: Sequence[str], size: int, label: str) -> dict[str, float]:
        """Return when each target has the packet: the source's uplink, the broker, each target's downlink, all FIFO.

        The broker's own link carries a packet while the other end's does, and each target gets a copy.
        """
        free, up = self._free, self._link(source)
        start = max(now, free.get((source, "up"), 0.0))
        stop = max(start + size / up.up_bytes_per_s, self._pass_broker(start, "in", up.up_bytes_per_s, size))
        free[source, "up"] = stop
        self._note(source, "up", label, start, stop)
        at_broker = stop + up.latency_s
        arrivals = {}
        for target in targets:
            down = self._link(target)
            through = self._pass_broker(at_broker, "out", down.down_bytes_per_s, size)
            begin = max(at_broker, free.get((target, "down"), 0.0))
            end = max(begin + size / down.down_bytes_per_s, through)
            free[target, "down"] = end
            self._note(target, "down", label, begin, end)
            arrivals[target] = end + down.latency_s
        return arrivals

    def _link(self, device: str) -> Link:
        return self._cluster.planner_link if device == PLANNER else self._cluster.links[device]

    def _pass_broker(self, start: float, way: str, rate: float, size: int) -> float:
        """Return when a packet from or to a link of this rate is through the broker's own, at once if not over it."""
        broker = self._cluster.broker_bytes_per_s
        if rate >= FAST_BYTES_PER_S or broker == inf:
            return start
        self._free["", way] = through = max(start, self._free.get(("", way), 0.0)) + size / broker
        return through
