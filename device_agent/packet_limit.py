"""The largest packet that passes the broker: as it announces, or by trying."""

from __future__ import annotations

from typing import Final

from device_agent.complaints import Complaints
from device_agent.events import LinkUp
from hepti_mqtt.errors import HeptiError
from hepti_mqtt.transport import BrokerUrl, largest_packet
from hepti_mqtt.wire.limits import low_limit
from hepti_mqtt.wire.topics import MAX_PACKET_BYTES, Topics

WANTED_BYTES: Final = 4 << 20  # a packet that large is tried where the broker says nothing of its limit
DOUBTED_BYTES: Final = 1 << 20  # and that large where it says (MQTT 5) that it takes it


class PacketLimit:
    """What a device knows of its broker's limit; what was tried once is not tried again."""

    def __init__(self, url: BrokerUrl, site: str, device: str, complaints: Complaints) -> None:
        self._url, self._client, self._complaints = url, f"hepti-{site}-{device}-size", complaints
        self._topic = Topics(site).probe(device)
        self._largest: int | None = None

    def largest(self, link: LinkUp) -> tuple[int | None, int | None]:
        """Return the largest packet known to pass and the limit, if any: as announced, or (3.1.1) by trying."""
        said = link.largest_packet_bytes
        # Mosquitto drops what is over its message_size_limit without a word, and does not announce it.
        wanted = WANTED_BYTES if link.protocol != 5 else min(said or DOUBTED_BYTES, DOUBTED_BYTES)
        if self._largest is None:
            try:
                self._largest = largest_packet(
                    self._url, client_id=self._client, topic=self._topic, wanted_bytes=wanted
                )
            except HeptiError as exc:
                self._complaints.add("packet_size_unknown", f"cannot find the broker's largest packet: {exc}")
                return said, said
            if self._largest < wanted:
                self._complaints.add("packet_limit", low_limit(self._largest, self._url.place))
        if self._largest < wanted:
            return self._largest, self._largest
        if link.protocol == 5:
            return (MAX_PACKET_BYTES, None) if said is None else (said, said)
        return self._largest, None
