"""The best broker that can be had here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from hepti_mqtt.embedded_broker.process import HOST, EmbeddedBroker
from hepti_mqtt.embedded_broker.sources import (
    BrokerKind,
    Source,
    Unavailable,
    amqtt_broker,
    mosquitto_on_path,
    unpacked_mosquitto,
)
from hepti_mqtt.errors import ConfigError, NetworkError

_SOURCES: Final[Mapping[BrokerKind, Callable[[], Source]]] = {
    "mosquitto": mosquitto_on_path,
    "unpacked": unpacked_mosquitto,
    "amqtt": amqtt_broker,
}
KINDS: Final[tuple[BrokerKind, ...]] = tuple(_SOURCES)


def start_broker(
    only: str | None = None,
    *,
    users: Mapping[str, str] | None = None,
    max_packet_bytes: int | None = None,
    address: str = HOST,
    port: int = 0,
    closed: Path | None = None,
    stored: Path | None = None,
) -> EmbeddedBroker:
    """Start the best broker that can be had, or the `only` kind that is wanted, and return it when it answers.

    Tried in this order: Mosquitto on PATH, Mosquitto unpacked from Debian packages (fetched, without root), amqtt
    (fetched with pip if it is not installed). users: user -> password; None lets everyone in
    who reaches `address`. max_packet_bytes: Mosquitto's max_packet_size instead of 32 MiB; amqtt knows no limit.
    port: 0 for a free one. closed: the directory of a closed site's broker, instead of users; amqtt knows no access
    lists and is not tried. stored: the directory of what Mosquitto keeps over its restarts; None for one that ends with
    this process. Raises `ConfigError` for an `only` that is unknown or cannot do this, or a port that is
    taken, and `NetworkError` with every reason if none can be had.
    """
    if only is not None and only not in KINDS:
        raise ConfigError(f"there is no broker {only!r} to start; choose one of {', '.join(KINDS)}")
    able = [kind for kind in KINDS if closed is None or kind != "amqtt"]
    if only is not None and only not in able:
        raise ConfigError(
            f"{only} knows no access lists, which a closed site's broker needs; choose one of {', '.join(able)}"
        )
    reasons: list[str] = []
    for kind in [kind for kind in able if only in (None, kind)]:
        broker: EmbeddedBroker | None = None
        try:
            source = _SOURCES[kind]()
            broker = EmbeddedBroker(
                source,
                "",
                users=users,
                max_packet_bytes=max_packet_bytes,
                address=address,
                closed=closed,
                stored=stored,
            )
            broker.port = port
            broker.start()
        except (Unavailable, NetworkError) as error:
            if broker is not None:
                broker.close()
            reasons.append(f"{kind}: {error}")
            continue
        except BaseException:
            if broker is not None:
                broker.close()
            raise
        chosen = f"{kind} {source.version}".strip() + f" ({source.program[0]})"
        broker.reason = "; ".join([chosen, *(f"not {reason}" for reason in reasons)])
        return broker
    raise NetworkError(
        "no broker can be started: " + "; ".join(reasons) + ". Install mosquitto, or name a broker with --broker or "
        "HEPTI_BROKER"
    )
