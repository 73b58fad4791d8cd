"""What to say where a broker takes too little: in one packet, or of what waits."""

from __future__ import annotations

from typing import Final

from hepti_mqtt.errors import PacketLimitError

BROKER_SETTINGS: Final = (
    "raise max_packet_size in mosquitto.conf (2,000,000 by default since 2.1; message_size_limit must be 0), "
    "mqtt.max_packet_size of EMQX or max_payload_size of rumqttd"
)


LOW_QUEUE: Final = 100  # messages beyond those in flight; broker/mosquitto.conf has 256


def low_queue_warning(in_flight: int, queued: int, place: str) -> str:
    """Return what to say of a broker that drops more than `queued` messages beyond those in flight to one client."""
    return (
        f"the broker at {place} keeps only {queued} messages that wait for a client, beyond {in_flight} on their way, "
        "and drops what is more without a word: requests, exchanges and weights alike; raise max_queued_messages in "
        "mosquitto.conf (256, see broker/mosquitto.conf)"
    )


def low_packet_limit_warning(largest_bytes: int, place: str) -> str:
    """Return what to say of a broker that takes only small packets; larger ones it may drop without a word."""
    return f"the broker at {place} lets no packet through over about {largest_bytes} bytes; {BROKER_SETTINGS}"


def packet_limit_error(
    largest_bytes: int, needed_bytes: int, what: str, broker: str, *, narrows: bool = True
) -> PacketLimitError:
    """Return the error that names the setting; what: who needs the packets, broker: which one takes no more.

    narrows: a smaller wire dtype makes them smaller; it does not those of weights.
    """
    instead = ", or choose a smaller wire dtype (--wire f16)" if narrows else ""
    return PacketLimitError(
        f"{what} needs packets of {needed_bytes} bytes, but {broker} takes at most about {largest_bytes}; "
        f"{BROKER_SETTINGS}{instead}"
    )
