"""A site and its broker, found and announced by mDNS (DNS-SD); needs the extra `discovery`.

A planner and a gateway announce `_hepti._tcp` with the site's name and the broker's URL, which holds no password. Other
programs announce brokers as `_mqtt._tcp`. Nothing is believed but a URL to try: a broker that wants a password or
another certificate refuses us there.
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
from hepti_mqtt.errors import ConfigError
from hepti_mqtt.ids import check_name
from hepti_mqtt.transport.broker_limits import is_loopback
from hepti_mqtt.transport.url import BrokerUrl

SITES: Final = "_hepti._tcp.local."
SPEECH: Final = "_wyoming._tcp.local."  # where Home Assistant looks for speech-to-text
BROKERS: Final = "_mqtt._tcp.local."
LOOK_S: Final = 3.0  # answers come within a second; a lost one is asked for again
RESOLVE_MS: Final = 1500
GIVE: Final = "give --broker mqtt://HOST:1883 or a login file, or set HEPTI_BROKER"
CLOSE_S: Final = 2.0
FOLLOW_S: Final = 5.0  # between two looks at this machine's addresses
INTERFACES: Final = Path("/sys/class/net")
SHOWN: Final = 8
EVERYWHERE: Final = ("0.0.0.0", "::")
_NO_PORT: Final = 0  # a planner listens nowhere

Addresses = tuple[str, ...]  # of one interface


@dataclass(frozen=True, slots=True, order=True)
class Found:
    """A broker that somebody announces; site: whose, "" for a broker alone."""

    broker: str
    site: str = ""

    def __str__(self) -> str:
        return f"{self.broker} (site {self.site})" if self.site else self.broker


def read_announcement(
    kind: str, addresses: Sequence[str], port: int, texts: Mapping[bytes, bytes | None]
) -> Found | None:
    """Return what an announcement says, None for one that cannot be used: anybody in the network can send one."""
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
    """Return the broker to take: a site's before one that is announced alone. site: wanted, None for any.

    Raises ConfigError where there is none, or none that is alone.
    """
    brokers = sorted(set(found))
    sites = [one for one in brokers if one.site and site in (None, one.site)]
    known = {one.broker for one in brokers if one.site}
    fitting = sites or [one for one in brokers if not one.site and one.broker not in known]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        raise ConfigError(f"no broker: mDNS found none; {GIVE}")
    names = ", ".join(map(str, fitting[:SHOWN]))
    raise ConfigError(f"mDNS found several brokers: {names}. Choose one with --broker, or a site with --site")


def look(seconds: float = LOOK_S, interfaces: Sequence[str] | None = None) -> list[Found]:
    """Return what is announced in the network, after some seconds; raises ConfigError without the extra.

    interfaces: addresses to look at, None for all.
    """
    with requires_extra("discovery", f"{GIVE}; looking for a broker"):
        from zeroconf import DNSQuestionType, InterfaceChoice, ServiceBrowser, ServiceStateChange, Zeroconf
    names: set[tuple[str, str]] = set()

    def heard(**event: Any) -> None:  # it is called by keywords
        gone = event["state_change"] is ServiceStateChange.Removed
        (names.discard if gone else names.add)((event["service_type"], event["name"]))

    # Answers by multicast: of several programs on port 5353 of a machine only one gets a unicast answer. So the first
    # question was in vain beside Avahi, Home Assistant or another Hepti, and the second one is asked a second later.
    asks = DNSQuestionType.QM
    try:
        with Zeroconf(interfaces=list(interfaces) if interfaces else InterfaceChoice.All) as network:
            browser = ServiceBrowser(network, [SITES, BROKERS], handlers=[heard], question_type=asks)
            time.sleep(seconds)
            told = [(kind, network.get_service_info(kind, name, RESOLVE_MS, asks)) for kind, name in sorted(names)]
            browser.cancel()
    except OSError:  # a network without multicast
        return []
    usable: dict[tuple[str, str, int], Found] = {}
    for kind, info in told:
        if info is None:
            continue
        read = read_announcement(kind, info.parsed_scoped_addresses(), info.port or 0, info.properties)
        if read is not None:  # a broker on two interfaces of one network is announced twice
            host = info.server if kind == BROKERS else read.broker
            usable.setdefault((read.site, host or read.broker, info.port or 0), read)
    return sorted(set(usable.values()))


class Announcement:
    """Announces a site from a thread until it is closed: registering takes a second.

    who: planner or gateway; port: where it listens, on this machine's `address`.
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
        """Take it back; it is forgotten in any case after two minutes."""
        self._closing.set()
        self._thread.join(CLOSE_S)


@contextlib.contextmanager
def announced(
    who: str, site: str, broker: BrokerUrl, port: int = _NO_PORT, interfaces: Sequence[str] | None = None
) -> Iterator[bool]:
    """Announce a site while the block runs; yield whether that works.

    Nothing is announced without the extra, in a network without multicast, and of a broker on this machine's loopback.
    """
    if is_loopback(broker.host) and (interfaces is None or not all(map(is_loopback, interfaces))):
        yield False
        return
    told = {"site": site, "broker": broker.address, "role": who}
    with registered(SITES, f"Hepti {site} {who}", port, told, interfaces) as works:
        yield works


@contextlib.contextmanager
def announced_broker(address: str, port: int) -> Iterator[bool]:
    """Announce a broker without TLS while the block runs; yield whether that works: not on this machine's loopback.

    address: on which it listens, 0.0.0.0 or :: for all.
    """
    if is_loopback(address):
        yield False
        return
    interfaces = None if address in EVERYWHERE else (address,)
    with registered(BROKERS, "Hepti broker", port, {}, interfaces) as works:
        yield works


@contextlib.contextmanager
def registered(
    kind: str, name: str, port: int, told: Mapping[str, str], interfaces: Sequence[str] | None = None
) -> Iterator[bool]:
    """Announce a service while the block runs; yield whether that works: not without the extra, or multicast.

    name: of the service, to which this machine's is added. interfaces: addresses to announce, each on its own network;
    None for those of all networks of this machine, also when they change.
    """
    announcer = _Announcer(kind, f"{name} on {socket.gethostname()}"[:63] + f".{kind}", port, told, interfaces)
    try:
        yield announcer.is_announced
    finally:
        announcer.close()


class _Announcer:
    """Announces one service on each network, with the addresses that this machine has there."""

    def __init__(
        self, kind: str, name: str, port: int, told: Mapping[str, str], interfaces: Sequence[str] | None
    ) -> None:
        self._kind, self._name, self._port, self._told = kind, name, port, told
        self._open: dict[Addresses, Any] = {}  # a Zeroconf for each network
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
        """Take the announcements back."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self._announce(set())

    def _follow(self) -> None:
        while not self._closing.wait(FOLLOW_S):
            self._announce(own_addresses())

    def _announce(self, networks: AbstractSet[Addresses]) -> None:
        """Announce the service on these networks alone."""
        for addresses in self._open.keys() - networks:
            self._open.pop(addresses).close()
        for addresses in networks - self._open.keys():
            network = self._register(addresses)
            if network is not None:
                self._open[addresses] = network

    def _register(self, addresses: Addresses) -> Any:
        """Return the Zeroconf that announces the service at some addresses; None if that does not work."""
        try:
            from zeroconf import Error, ServiceInfo, Zeroconf

            network = Zeroconf(interfaces=list(addresses))
        except (ImportError, OSError):
            return None
        info = ServiceInfo(
            self._kind,
            self._name,
            port=self._port,
            properties=dict(self._told),
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
    """Return this machine's IPv4 addresses by interface, without those of bridges between containers.

    interfaces: Linux's directory of network interfaces. A machine that has no others, as a container, has all.
    """
    import psutil

    found = {
        name: tuple(a.address for a in addresses if a.family == socket.AF_INET and not is_loopback(a.address))
        for name, addresses in psutil.net_if_addrs().items()
    }
    own = {name: addresses for name, addresses in found.items() if addresses}
    reaching = {addresses for name, addresses in own.items() if reaches_devices(interfaces / name)}
    return reaching or set(own.values())


def reaches_devices(interface: Path) -> bool:
    """Return whether an interface is, or stands for, hardware: a port, or a bridge, bond or VLAN over one."""
    below = [*interface.glob("lower_*"), *interface.glob("brif/*")]
    return (interface / "device").exists() or any((each / "device").exists() for each in below)


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
