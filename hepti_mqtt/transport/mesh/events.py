"""What a mesh tells whoever drives it, and what it counts."""

from __future__ import annotations

import ipaddress
from collections.abc import Hashable
from dataclasses import dataclass

from hepti_mqtt.errors import WireError


@dataclass(frozen=True, slots=True)
class Place:
    """Where an endpoint listens: an IP address, and the SHA-256 of its certificate in hex, "" without TLS.

    Raises WireError for what is no such place: a peer has told it.
    """

    host: str
    port: int
    fingerprint: str = ""

    def __post_init__(self) -> None:
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            # A name would have to be looked up, which blocks.
            raise WireError(f"a peer's endpoint is said to be at {self.host!r}, which is no IP address") from None
        if not 0 < self.port < 65_536:
            raise WireError(f"a peer's endpoint is said to be on port {self.port}")


@dataclass(frozen=True, slots=True)
class Joined:
    """Every filter of this key is granted at this peer's endpoint, on a connection that stands."""

    peer: str
    key: Hashable


@dataclass(frozen=True, slots=True)
class Refused:
    """A peer's endpoint said no, once per connection; it is asked again."""

    peer: str
    key: Hashable
    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection to a peer's endpoint is gone, and with it what was half received; it is made again."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """Messages for this subscriber were dropped whole: its queue was full, or it was sent away with what waited."""

    peer: str
    nbytes: int


MeshEvent = Joined | Refused | Lost | Dropped


@dataclass(slots=True)
class Edge:
    """What went between this device and one peer since the mesh began; bytes are those of payloads.

    queued_bytes: what waits for the peer now. dropped: messages that it did not get. unwanted:
    messages from it that no filter here takes in (any more). reconnections: how often the
    connection to its endpoint was made again. joined: whether everything that was joined there is granted. trouble: why
    not, in words.
    """

    frames_in: int = 0
    bytes_in: int = 0
    frames_out: int = 0
    bytes_out: int = 0
    queued_bytes: int = 0
    dropped: int = 0
    unwanted: int = 0
    reconnections: int = 0
    joined: bool = False
    trouble: str = ""
