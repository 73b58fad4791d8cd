"""Whether a broker lets everyone in, and a loud word about it."""

from __future__ import annotations

import ipaddress
import socket
import uuid
from contextlib import suppress
from dataclasses import replace
from typing import Final

from hepti_mqtt.errors import HeptiError
from hepti_mqtt.transport.control import PahoTransport
from hepti_mqtt.transport.url import BrokerUrl

ANSWER_S: Final = 3.0


def open_broker_warning(url: BrokerUrl) -> str | None:
    """Return one loud line if others than this machine reach the broker and it lets everyone in, None otherwise.

    It tries, without user and password; whatever goes wrong with that says nothing of the broker.
    """
    return None if is_loopback(url.host) or not _lets_everyone_in(url) else open_line(url.place)


def open_line(place: str) -> str:
    """Return the line about an open broker at host:port."""
    return (
        f"OPEN BROKER: {place} lets everyone in without a password: whoever reaches it can read requests, answer them "
        "and command devices; close it with `hepti site init` (broker/README.md)"
    )


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address stands for this machine alone."""
    with suppress(OSError, UnicodeError, ValueError):
        found = {str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(host, None)}
        return bool(found) and all(ipaddress.ip_address(address).is_loopback for address in found)
    return False


def _lets_everyone_in(url: BrokerUrl) -> bool:
    nobody = replace(url, user=None, password=None)
    name = f"hepti-open-{uuid.uuid4().hex[:12]}"
    transport = PahoTransport(nobody, name, on_message=lambda *_: None, on_state=lambda _: None, name="open-check")
    try:
        transport.connect(ANSWER_S)
    except HeptiError:
        return False
    finally:
        transport.close(timeout_s=0.5)
    return True
