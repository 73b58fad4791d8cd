"""What devices are told of each other's endpoints, and what they tell of the links between them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from ipaddress import ip_address
from typing import Any, Final, NamedTuple

from hepti_mqtt.ids import check_name
from hepti_mqtt.wire import checks

MAX_PEERS: Final = 64
MAX_TOKEN: Final = 128
MAX_TROUBLE: Final = 200
FINGERPRINT_DIGITS: Final = 64


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a device is an MQTT endpoint for what it publishes itself: an address, never a name, and a port.

    fingerprint: SHA-256 of its certificate in hex, "" without TLS.
    """

    host: str
    port: int
    fingerprint: str = ""

    @property
    def loopback(self) -> bool:
        """Return whether only processes of its own machine reach it."""
        return ip_address(self.host).is_loopback


@dataclass(frozen=True, slots=True)
class Peer:
    """A device that another one has a mesh route to or from, under one epoch.

    token_out: with which it comes to the other's endpoint; token_in: with which the other one comes to it. Each is ""
    where the broker carries what travels that way.
    """

    device: str
    endpoint: Endpoint
    token_out: str
    token_in: str


class LinkReport(NamedTuple):
    """The way to a peer as measured: round trip, and the rate where it could be told."""

    round_trip_s: float
    bytes_per_s: float | None


class Edge(NamedTuple):
    """What went between a device and one of its peers, since the boot.

    frames and bytes, in and out; queued_bytes: that wait now, because the peer is slow to take them; dropped: messages
    for which there was no room; reconnections: to its endpoint. joined: 1 if this device hears the peer now; trouble:
    why it does not, in words.
    """

    frames_in: int
    bytes_in: int
    frames_out: int
    bytes_out: int
    queued_bytes: int
    dropped: int
    reconnections: int
    joined: int
    trouble: str = ""


def plain(value: object) -> Any:
    """Return an Endpoint or a Peer as plain data."""
    if isinstance(value, Peer):
        return [value.device, value.endpoint.host, value.endpoint.port, value.endpoint.fingerprint, *_tokens(value)]
    if isinstance(value, Endpoint):
        return asdict(value)
    return value


def endpoint(value: Any) -> Endpoint | None:
    """Return an endpoint from its plain form, or None."""
    if value is None:
        return None
    told = plain(value)
    if not isinstance(told, dict) or not {"host", "port", "fingerprint"} <= told.keys():
        raise ValueError("not an endpoint with host, port and fingerprint")
    return _endpoint(told["host"], told["port"], told["fingerprint"])


def peers(value: Any) -> tuple[Peer, ...]:
    """Return a bounded tuple of peers, from their plain form or as they are."""
    if type(value) not in (list, tuple) or len(value) > MAX_PEERS:
        raise ValueError(f"not a list of at most {MAX_PEERS} peers")
    return tuple(_peer(plain(entry)) for entry in value)


def names(value: Any) -> tuple[str, ...]:
    """Return a bounded tuple of devices; raises `BadNameError` too."""
    if type(value) not in (list, tuple) or len(value) > MAX_PEERS:
        raise ValueError(f"not a list of at most {MAX_PEERS} devices")
    return tuple(checks.device_name(entry) for entry in value)


def reports(value: Any) -> dict[str, LinkReport]:
    """Return the measured links of a heartbeat by peer; raises `BadNameError` too."""
    found = {}
    for name, entry in _by_peer(value, 2).items():
        rate = entry[1]
        found[name] = LinkReport(checks.positive(entry[0]), None if rate is None else checks.positive(rate))
    return found


def edges(value: Any) -> dict[str, Edge]:
    """Return the counts of a heartbeat by peer; raises `BadNameError` too."""
    found = {}
    for name, (*counts, trouble) in _by_peer(value, len(Edge._fields)).items():
        found[name] = Edge._make((*map(checks.count, counts), checks.text(trouble)[:MAX_TROUBLE]))
    return found


def _by_peer(value: Any, fields: int) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > MAX_PEERS:
        raise ValueError(f"not a map of at most {MAX_PEERS} peers")
    if not all(isinstance(entry, list | tuple) and len(entry) == fields for entry in value.values()):
        raise ValueError(f"not {fields} numbers for each peer")
    return {check_name("device", name): entry for name, entry in value.items()}


def _peer(value: Any) -> Peer:
    if type(value) not in (list, tuple) or len(value) != 6:
        raise ValueError("not a peer [device, host, port, fingerprint, token, token]")
    device, host, port, fingerprint, token_out, token_in = value
    return Peer(checks.device_name(device), _endpoint(host, port, fingerprint), _token(token_out), _token(token_in))


def _endpoint(host: Any, port: Any, fingerprint: Any) -> Endpoint:
    if type(host) is not str or type(port) is not int or not 0 < port < 65_536:
        raise ValueError("not a host and a port")
    ip_address(checks.whole(host))  # a name would be looked up by whoever connects, which may take seconds
    if type(fingerprint) is not str or (fingerprint and not _hex(fingerprint)):
        raise ValueError("not the fingerprint of a certificate")
    return Endpoint(host, port, fingerprint)


def _hex(text: str) -> bool:
    return len(text) == FINGERPRINT_DIGITS and set(text) <= set("0123456789abcdef")


def _token(value: Any) -> str:
    if type(value) is not str or len(value) > MAX_TOKEN or not value.isascii():
        raise ValueError(f"not a token of at most {MAX_TOKEN} characters")
    return value


def _tokens(peer: Peer) -> tuple[str, str]:
    return peer.token_out, peer.token_in
