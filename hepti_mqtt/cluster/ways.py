"""The ways between devices that connect to each other directly, from what was measured of pairs and of devices."""

from __future__ import annotations

from math import inf
from typing import Final, NamedTuple

from hepti_mqtt.cluster.profiles import FAST_BYTES_PER_S, Cluster
from hepti_mqtt.plan import Pair

Queue = tuple[str, str]  # of a link: whose it is ("": the site's), and which way
BROKER_IN: Final = ("", "in")
BROKER_OUT: Final = ("", "out")
AIR: Final = ("", "air")


class Way(NamedTuple):
    """What a packet takes from one device to another: two links that carry it at once, unless they are one medium.

    bytes_per_s: of this pair alone, which may be less than what each link carries for several.
    """

    latency_s: float
    up: Queue
    up_bytes_per_s: float
    down: Queue
    down_bytes_per_s: float
    bytes_per_s: float


class Ways:
    """The way of each pair of a cluster.

    What was not measured of a pair follows from its two links to the broker. A link carries what it does there, or
    more, if that was measured to any peer. Who sits on the broker's machine has that one's link to all others.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._ways: dict[Pair, Way] = {}
        self._most: dict[Queue, float] = {}  # measured to any peer
        for (source, target), link in cluster.peer_links.items():
            if link.bytes_per_s is not None and link.bytes_per_s < FAST_BYTES_PER_S:
                for end in ((source, "up"), (target, "down")):
                    self._most[end] = max(self._most.get(end, 0.0), link.bytes_per_s)

    def way(self, source: str, target: str) -> Way:
        """Return the way from one device to another."""
        found = self._ways.get((source, target))
        if found is None:
            found = self._ways[source, target] = self._work_out(source, target)
        return found

    def queue(self, device: str, which: str) -> Queue:
        """Return the queue of a device's own link; which: "up" or "down"."""
        return AIR if device in self._cluster.shared else (device, which)

    def _work_out(self, source: str, target: str) -> Way:
        links, told = self._cluster.links, self._cluster.peer_links.get((source, target))
        up, down = links[source].up_bytes_per_s, links[target].down_bytes_per_s
        latency_s = links[source].latency_s + links[target].latency_s if told is None else told.latency_s
        rate = min(up, down) if told is None or told.bytes_per_s is None else told.bytes_per_s
        if rate >= FAST_BYTES_PER_S:  # one machine: no link is between them
            return Way(latency_s, (source, "beside"), rate, (target, "beside"), rate, rate)
        from_link = self._end(source, "up", up, BROKER_OUT)
        to_link = self._end(target, "down", down, BROKER_IN)
        return Way(latency_s, *from_link, *to_link, inf if told is None else rate)

    def _end(self, device: str, which: str, rate: float, brokers: Queue) -> tuple[Queue, float]:
        """Return the queue and the rate of one end; rate: what it has to the broker."""
        broker = self._cluster.broker_bytes_per_s
        if rate >= FAST_BYTES_PER_S and broker < inf:
            return brokers, broker
        return self.queue(device, which), max(rate, self._most.get((device, which), 0.0))
