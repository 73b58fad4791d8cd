"""The links of a site on the virtual clock: each way of each is a queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from hepti_mqtt.cluster import BROKER_IN, BROKER_OUT, FAST_BYTES_PER_S, Cluster, Link, Ways
from hepti_mqtt.cluster.ways import Queue
from hepti_mqtt.ids import PLANNER

Note = Callable[[str, str, str, float, float], None]  # device, lane, label, start, stop


class Links:
    """When packets arrive that are sent over them; `note` is told how long each link is taken."""

    def __init__(self, cluster: Cluster, note: Note) -> None:
        self._cluster, self._note = cluster, note
        self._ways = Ways(cluster)
        self._free: dict[Queue, float] = {}  # from when on

    def transmit(self, now: float, source: str, targets: Sequence[str], size: int, label: str) -> dict[str, float]:
        """Return when each target has the packet: the source's uplink, the broker, each target's downlink, all FIFO.

        The broker's own link carries a packet while the other end's does, and each target gets a copy.
        """
        free, up, queue = self._free, self._link(source), self._ways.queue(source, "up")
        start = max(now, free.get(queue, 0.0))
        stop = max(start + size / up.up_bytes_per_s, self._pass_broker(start, BROKER_IN, up.up_bytes_per_s, size))
        free[queue] = stop
        self._note(source, "up", label, start, stop)
        at_broker = stop + up.latency_s
        arrivals = {}
        for target in targets:
            down, queue = self._link(target), self._ways.queue(target, "down")
            through = self._pass_broker(at_broker, BROKER_OUT, down.down_bytes_per_s, size)
            begin = max(at_broker, free.get(queue, 0.0))
            end = max(begin + size / down.down_bytes_per_s, through)
            free[queue] = end
            self._note(target, "down", label, begin, end)
            arrivals[target] = end + down.latency_s
        return arrivals

    def direct(self, now: float, source: str, target: str, size: int, label: str) -> float:
        """Return when a device has what a peer sends it over mesh: a copy of its own on both ends' links at once.

        Copies leave in their order. Connections share a link that several of them need, so a packet has its place on
        the receiver's from now on, wherever its sender's backlog ends, and the later of the two ends counts.
        """
        free, way = self._free, self._ways.way(source, target)
        start = max(now, free.get(way.up, 0.0))
        sent = free[way.up] = start + size / way.up_bytes_per_s
        down_s = size / way.down_bytes_per_s
        heard = free[way.down] = max(now, free.get(way.down, 0.0)) + down_s
        stop = max(sent, heard, start + size / way.bytes_per_s)
        self._note(source, "up", label, start, sent)
        self._note(target, "down", label, stop - down_s, stop)
        return stop + way.latency_s

    def _link(self, device: str) -> Link:
        return self._cluster.planner_link if device == PLANNER else self._cluster.links[device]

    def _pass_broker(self, start: float, queue: Queue, rate: float, size: int) -> float:
        """Return when a packet from or to a link of this rate is through the broker's own, at once if not over it."""
        broker = self._cluster.broker_bytes_per_s
        if rate >= FAST_BYTES_PER_S or broker == inf:
            return start
        self._free[queue] = through = max(start, self._free.get(queue, 0.0)) + size / broker
        return through
