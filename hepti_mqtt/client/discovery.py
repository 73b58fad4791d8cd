"""Discovery and announcement of sites and brokers by mDNS (DNS-SD); needs the extra `discovery`.

A planner and a gateway announce `_hepti._tcp` with the site's name and the broker's URL without a password. Other
programs announce brokers as `_mqtt._tcp`. An announcement is only a URL to try: passwords and certificates still
protect the broker.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hepti_mqtt.config.process import requires_extra
from hepti_mqtt.core.errors import ConfigError
from hepti_mqtt.core.ids import check_name
from hepti_mqtt.transport.broker_limits import is_loopback
from hepti_mqtt.transport.url import BrokerUrl

SITES: Final = "_hepti._tcp.local."
SPEECH: Final = "_wyoming._tcp.local."  # Home Assistant's service for speech-to-text
BROKERS: Final = "_mqtt._tcp.local."
BROWSE_S: Final = 3.0  # answers arrive within a second; the rest is for a repeated question
RESOLVE_MS: Final = 1500
GIVE: Final = "give --broker mqtt://HOST:1883 or a login file, or set HEPTI_BROKER"
CLOSE_S: Final = 2.0
FOLLOW_S: Final = 5.0  # between checks of this machine's addresses
INTERFACES: Final = Path("/sys/class/net")
SHOWN: Final = 8
EVERYWHERE: Final = ("0.0.0.0", "::")
_NO_PORT: Final = 0  # a planner does not listen

Addresses = tuple[str, ...]  # of one interface


@dataclass(frozen=True, slots=True, order=True)
class Found:
    """An announced broker."""

    broker: str  #: URL
    site: str = ""  #: "" for a broker without a site

    def __str__(self) -> str:
        return f"{self.broker} (site {self.site})" if self.site else self.broker


def read_announcement(
    kind: str, addresses: Sequence[str], port: int, texts: Mapping[bytes, bytes | None]
) -> Found | None:
    """Return the broker of an announcement; None if it is invalid, because anybody on the network can send one."""
    try:
        if kind == SITES:
            broker = (texts.get(b"broker") or b"").decode()
            url = BrokerUrl.parse(broker) if "://" in broker else None
            if url is None or url.user is not None or url.ca:
                return None
            return Found(url.address, check_name("site", (texts.get(b"site") or b"").decode()))
        usable = sorted((a for a in addresses if "%" not in a), key=lambda address: (":" in address, address))
        return Found(f"mqtt://{_host(usable[0])}:{port}") if usable and port else None
    except (ConfigError, UnicodeDecodeError):
        return None


def choose(found: Iterable[Found], site: str | None) -> Found:
    """Return the only broker of a site or, without sites, the only broker. site: wanted name, None for any.

    Raises ConfigError for none or several.
    """
    brokers = sorted(set(found))
    of_sites = {announced.broker for announced in brokers if announced.site}
    matching = [announced for announced in brokers if announced.site and site in (None, announced.site)]
    matching = matching or [other for other in brokers if not other.site and other.broker not in of_sites]
    if len(matching) == 1:
        return matching[0]
    if not matching:
        raise ConfigError(f"no broker: mDNS found none; {GIVE}")
    names = ", ".join(map(str, matching[:SHOWN]))
    raise ConfigError(f"mDNS found several brokers: {names}. Choose one with --broker, or a site with --site")


def look(seconds: float = BROWSE_S, interfaces: Sequence[str] | None = None) -> list[Found]:
    """Return the brokers announced on the network within some seconds. Raises ConfigError without the extra.

    interfaces: addresses of the networks to search, None for all.
    """
    with requires_extra("discovery", f"{GIVE}; looking for a broker"):
        from zeroconf import DNSQuestionType, InterfaceChoice, ServiceBrowser, ServiceStateChange, Zeroconf
    names: set[tuple[str, str]] = set()

    def on_change(**event: Any) -> None:  # zeroconf passes keywords
        is_removed = event["state_change"] is ServiceStateChange.Removed
        (names.discard if is_removed else names.add)((event["service_type"], event["name"]))

    # Multicast answers (QM): only one of several programs on port 5353 of a machine gets a unicast answer. With Avahi,
    # Home Assistant or another Hepti the first, unicast question is lost, and zeroconf repeats it after a second.
    question_type = DNSQuestionType.QM
    try:
        with Zeroconf(interfaces=list(interfaces) if interfaces else InterfaceChoice.All) as network:
            browser = ServiceBrowser(network, [SITES, BROKERS], handlers=[on_change], question_type=question_type)
            time.sleep(seconds)
            infos = [
                (kind, network.get_service_info(kind, name, RESOLVE_MS, question_type)) for kind, name in sorted(names)
            ]
            browser.cancel()
    except OSError:  # a network without multicast
        return []
    brokers: dict[tuple[str, str, int], Found] = {}
    for kind, info in infos:
        if info is None:
            continue
        announced = read_announcement(kind, info.parsed_scoped_addresses(), info.port or 0, info.properties)
        if announced is not None:  # a broker on two interfaces of one network is announced twice
            host = info.server if kind == BROKERS else announced.broker
            brokers.setdefault((announced.site, host or announced.broker, info.port or 0), announced)
    return sorted(set(brokers.values()))


class Announcement:
    """Announces a site until `close`, on a thread because registration takes a second.

    who: planner or gateway. port, address: of its listener.
    """

    def __init__(
        self, who: str, site: str, broker: BrokerUrl, port: int = _NO_PORT, address: str = EVERYWHERE[0]
    ) -> None:
        self._closing = threading.Event()
        everywhere = address in EVERYWHERE or is_loopback(address)
        self._announced = announced(who, site, broker, port, None if everywhere else (address,))
        self._thread = threading.Thread(target=self._run, name="announce", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._announced:
            self._closing.wait()

    def close(self) -> None:
        """Withdraw the announcement; it expires after two minutes in any case."""
        self._closing.set()
        self._thread.join(CLOSE_S)


@contextlib.contextmanager
def announced(
    who: str, site: str, broker: BrokerUrl, port: int = _NO_PORT, interfaces: Sequence[str] | None = None
) -> Iterator[bool]:
    """Announce a site while the block runs; yield whether it is announced.

    False without the extra, without multicast, and for a broker on this machine's loopback.
    """
    if is_loopback(broker.host) and (interfaces is None or not all(map(is_loopback, interfaces))):
        yield False
        return
    properties = {"site": site, "broker": broker.address, "role": who}
    with registered(SITES, f"Hepti {site} {who}", port, properties, interfaces) as is_announced:
        yield is_announced


@contextlib.contextmanager
def announced_broker(address: str, port: int) -> Iterator[bool]:
    """Announce a broker without TLS while the block runs; yield whether it is announced (not on loopback).

    address: of its listener, 0.0.0.0 or :: for all.
    """
    if is_loopback(address):
        yield False
        return
    interfaces = None if address in EVERYWHERE else (address,)
    with registered(BROKERS, "Hepti broker", port, {}, interfaces) as is_announced:
        yield is_announced


@contextlib.contextmanager
def registered(
    kind: str, name: str, port: int, properties: Mapping[str, str], interfaces: Sequence[str] | None = None
) -> Iterator[bool]:
    """Announce a service while the block runs; yield whether it is announced (not without the extra or multicast).

    name: of the service; the machine's name is appended. interfaces: addresses to announce, each on its own network;
    None for this machine's current addresses.
    """
    announcer = _Announcer(kind, f"{name} on {socket.gethostname()}"[:63] + f".{kind}", port, properties, interfaces)
    try:
        yield announcer.is_announced
    finally:
        announcer.close()


class _Announcer:
    """Announces one service on each network with this machine's addresses there."""

    def __init__(
        self, kind: str, name: str, port: int, properties: Mapping[str, str], interfaces: Sequence[str] | None
    ) -> None:
        self._kind, self._name, self._port, self._properties = kind, name, port, properties
        self._open: dict[Addresses, Any] = {}  # Zeroconf by the addresses of a network
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="mdns", daemon=True)
        self._announce(own_addresses() if interfaces is None else {(address,) for address in interfaces})
        if interfaces is None:
            self._thread.start()

    @property
    def is_announced(self) -> bool:
        """Return whether the service is announced on any network."""
        return bool(self._open)

    def close(self) -> None:
        """Withdraw the announcements."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self._announce(set())

    def _follow(self) -> None:
        while not self._closing.wait(FOLLOW_S):
            self._announce(own_addresses())

    def _announce(self, networks: AbstractSet[Addresses]) -> None:
        """Announce the service on exactly these networks."""
        for addresses in self._open.keys() - networks:
            self._open.pop(addresses).close()
        for addresses in networks - self._open.keys():
            network = self._register(addresses)
            if network is not None:
                self._open[addresses] = network

    def _register(self, addresses: Addresses) -> Any:
        """Return a Zeroconf that announces the service at some addresses, None after an error."""
        try:
            from zeroconf import Error, ServiceInfo, Zeroconf

            network = Zeroconf(interfaces=list(addresses))
        except (ImportError, OSError):
            return None
        info = ServiceInfo(
            self._kind,
            self._name,
            port=self._port,
            properties=dict(self._properties),
            server=f"{socket.gethostname().partition('.')[0]}.local.",
            parsed_addresses=list(addresses),
        )
        try:
            network.register_service(info, allow_name_change=True)
        except (Error, OSError):
            network.close()
            return None
        return network


def own_addresses(interfaces: Path = INTERFACES) -> set[Addresses]:
    """Return the IPv4 addresses of each hardware interface; of all interfaces if there is none, as in a container.

    interfaces: Linux's directory of network interfaces.
    """
    import psutil

    by_interface = {
        name: tuple(a.address for a in addresses if a.family == socket.AF_INET and not is_loopback(a.address))
        for name, addresses in psutil.net_if_addrs().items()
    }
    own = {name: addresses for name, addresses in by_interface.items() if addresses}
    reaching = {addresses for name, addresses in own.items() if reaches_devices(interfaces / name)}
    return reaching or set(own.values())


def reaches_devices(interface: Path) -> bool:
    """Return whether an interface uses hardware: a port, or a bridge, bond or VLAN over a port."""
    below = [*interface.glob("lower_*"), *interface.glob("brif/*")]
    return (interface / "device").exists() or any((each / "device").exists() for each in below)


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
