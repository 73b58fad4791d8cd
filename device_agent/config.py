"""An agent's configuration from its options, and the address at which peers reach it."""

from __future__ import annotations

import argparse
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from device_agent.loader import LoadEvent
from hepti_mqtt.config.options import host_name, settings_from_args
from hepti_mqtt.config.settings import parse_size
from hepti_mqtt.core.errors import ConfigError
from hepti_mqtt.core.ids import check_name
from hepti_mqtt.transport.url import BrokerUrl

_KEY: Final = "PRIVATE KEY-----"


def _threads(wanted: int | None) -> int:
    """Return the number of computing threads: at most one per core."""
    cores = os.cpu_count() or 1
    if wanted is not None and wanted > cores:
        logging.getLogger("hepti.agent").warning("--threads %d: this machine has %d cores, so %d", wanted, cores, cores)
    return min(wanted or cores, cores)


def local_address_toward(url: BrokerUrl) -> str | None:
    """Return the local address used to reach the broker; sends nothing.

    None without a route, and for a link-local IPv6 address: another device cannot know through which of its links.
    """
    with suppress(OSError, UnicodeError):
        for family, _, _, _, place in socket.getaddrinfo(url.host, url.port, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as way:
                way.connect(place)
                address = ip_address(str(way.getsockname()[0]).partition("%")[0])
                return None if address.version == 6 and address.is_link_local else str(address)
    return None


def mesh_address(config: AgentConfig) -> str | None:
    """Return the address at which peers reach a device, None without a route to the broker."""
    return config.mesh_host or local_address_toward(config.url)


def login_certificate(url: BrokerUrl) -> Path | None:
    """Return the login file if it has this device's own certificate and key, as `hepti site add device` writes it."""
    with suppress(OSError, UnicodeError):
        if url.tls and url.ca and _KEY in Path(url.ca).read_text(encoding="utf-8"):
            return Path(url.ca)
    return None


def listen_address(advertised: str) -> str:
    """Return the address to bind for an advertised one: all interfaces, unless it is loopback."""
    address = ip_address(advertised)
    if address.is_loopback:
        return advertised
    return "::" if address.version == 6 else "0.0.0.0"


def parse_mesh_host(text: str) -> str:
    """Return the address of `--mesh-host`; raises ConfigError for a host name, since peers resolve none."""
    try:
        return str(ip_address(text))
    except ValueError:
        raise ConfigError(f"--mesh-host takes an address such as 192.168.1.7, not {text!r}") from None


CACHE_BYTES: Final = 4 << 30


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """An agent's configuration."""

    url: BrokerUrl
    site: str
    device_id: str
    threads: int = field(default_factory=lambda: os.cpu_count() or 1)
    #: budget for weights and live slots, without the idle agent's memory; None for 80 % of the free memory
    memory_bytes: int | None = None
    cache_dir: Path | None = None  #: directory of all files of the device; None for the user's own directories
    cache_bytes: int = CACHE_BYTES  #: limit of the tile cache; 0 for none
    log: logging.Logger = field(default_factory=lambda: logging.getLogger("hepti.agent"))
    retry: bool = True  #: wait forever for an absent broker
    #: called on the loader's thread with the progress of loads
    on_load_event: Callable[[LoadEvent], None] | None = None
    mesh: bool = True  #: whether peers read this device's tensors at an endpoint of its own
    mesh_host: str | None = None  #: the endpoint's address; None for the local one on the route to the broker
    mesh_port: int = 0  #: 0 for any free port
    #: certificate and key (PEM); without it there is no endpoint if the broker's connection is encrypted
    mesh_tls: Path | None = None
    metrics: tuple[str, int] | None = None  #: address for Prometheus; None for none

    @classmethod
    def from_args(
        cls, args: argparse.Namespace, on_load_event: Callable[[LoadEvent], None] | None = None
    ) -> AgentConfig:
        """Return the configuration of the arguments of `add_site_arguments` and `add_agent_arguments`.

        Raises ConfigError for a missing broker, a bad URL, name or size.
        """
        settings = settings_from_args(args)
        return cls(
            url=BrokerUrl.parse(settings.require_broker()),
            site=check_name("site", settings.site),
            device_id=check_name("device", args.device or host_name()),
            threads=_threads(args.threads),
            memory_bytes=None if args.memory is None else parse_size(args.memory),
            cache_dir=args.cache,
            cache_bytes=CACHE_BYTES if args.cache_size is None else parse_size(args.cache_size),
            retry=args.retry,
            on_load_event=on_load_event,
            mesh=args.mesh,
            mesh_host=None if args.mesh_host is None else parse_mesh_host(args.mesh_host),
            mesh_port=args.mesh_port or 0,
            mesh_tls=args.mesh_tls,
            metrics=args.metrics,
        )
