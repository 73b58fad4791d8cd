"""What devices and the planner tell of themselves: their state, what they can do, how they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hepti_mqtt.wire.checks import Plain
from hepti_mqtt.wire.peers import Edge, Endpoint, LinkReport


@dataclass(frozen=True, slots=True)
class Status:
    """Retained word of a device or the planner about itself; boot tells a late will from a new start.

    A device that is starting says what it is doing, and how much of it is done, in steps; of other states they are
    empty.
    """

    state: Literal["online", "offline", "starting"]
    boot: int
    doing: str = ""
    done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Caps:
    """What a device can do, retained.

    curves: measured time curves, opaque here. largest_packet_bytes: 0 if not yet measured. mqtt: protocol of its
    connection, 4 (3.1.1) or 5. endpoint: where peers read from it directly, None where they cannot. tile: the register
    tile of its products, for people.
    """

    device: str
    boot: int
    cores: int
    threads: int
    memory_budget_bytes: int
    rss_idle_bytes: int
    isa: str
    version: str
    curves: Plain
    largest_packet_bytes: int
    mqtt: int
    endpoint: Endpoint | None = None
    tile: str = ""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What changes on a device from second to second.

    cpu_other: 0..1 of all cores, without the agent and a local broker. slowdown: observed over predicted op time, 1 is
    as measured. counters: bytes, packets, drops, ... since the boot. peers: the ways to peers, as measured; edges: what
    went there and came from them. peer_frame_s, peer_byte_s: what a frame from or to a peer costs the device, and each
    byte of it, None until there were some.
    """

    boot: int
    seq: int
    cpu_other: float
    free_bytes: int
    temperature_c: float | None
    round_trip_s: float | None
    bandwidth_bytes_per_s: float | None
    slowdown: float
    rss_bytes: int
    counters: Mapping[str, int] = field(default_factory=dict)
    peers: Mapping[str, LinkReport] = field(default_factory=dict)
    edges: Mapping[str, Edge] = field(default_factory=dict)
    peer_frame_s: float | None = None
    peer_byte_s: float | None = None
