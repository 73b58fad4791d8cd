"""Where this device's own MQTT endpoint listens, and what address it tells its peers."""

from __future__ import annotations

import socket
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from hepti_mqtt.errors import ConfigError
from hepti_mqtt.transport import BrokerUrl

_KEY: Final = "PRIVATE KEY-----"


def own_address(url: BrokerUrl) -> str | None:
    """Return this machine's address on the way to the broker, None where there is no way; nothing is sent."""
    with suppress(OSError, UnicodeError):
        for family, _, _, _, place in socket.getaddrinfo(url.host, url.port, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as way:
                way.connect(place)
                return str(way.getsockname()[0]).partition("%")[0]
    return None


def own_certificate(url: BrokerUrl) -> Path | None:
    """Return the login file if it has this device's own certificate and key, as `hepti site add device` writes it."""
    with suppress(OSError, UnicodeError):
        if url.tls and url.ca and _KEY in Path(url.ca).read_text(encoding="utf-8"):
            return Path(url.ca)
    return None


def listening_address(told: str) -> str:
    """Return where to listen so that peers reach the address they are told; on loopback nobody else can."""
    address = ip_address(told)
    if address.is_loopback:
        return told
    return "::" if address.version == 6 else "0.0.0.0"


def checked_address(text: str) -> str:
    """Return the address of `--mesh-host`; raises ConfigError for anything else, as peers look no names up."""
    try:
        return str(ip_address(text))
    except ValueError:
        raise ConfigError(f"--mesh-host takes an address such as 192.168.1.7, not {text!r}") from None
