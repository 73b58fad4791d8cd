"""How large a packet may be, found out at real brokers with a limit."""

from __future__ import annotations

import pytest
from broker_kinds import needs_mosquitto

from hepti_mqtt.embedded_broker import start_broker
from hepti_mqtt.errors import NetworkError
from hepti_mqtt.protocol.topics import publish_bytes
from hepti_mqtt.transport import BrokerUrl, largest_packet
from hepti_mqtt.transport.limits import _payload_bytes

TOPIC = "hepti/v1/home/dev/pi/probe"


@needs_mosquitto
@pytest.mark.broker
@pytest.mark.parametrize("protocol", [4, 5])
def test_the_limit_of_a_broker_is_found(protocol):
    with start_broker(max_packet_bytes=100_000) as limited:
        found = largest_packet(
            BrokerUrl.parse(limited.url), client_id="pi", topic=TOPIC, wanted_bytes=4_000_000, protocol=protocol
        )
    assert 100_000 * 15 / 16 <= found <= 100_000


@pytest.mark.broker
def test_what_is_wanted_is_enough(broker):
    url = BrokerUrl.parse(broker.url)
    assert largest_packet(url, client_id="pi", topic=TOPIC, wanted_bytes=3_000_000) == 3_000_000


@pytest.mark.broker
def test_without_a_broker_there_is_no_limit_to_find():
    with pytest.raises(NetworkError):
        largest_packet(BrokerUrl("host.invalid", 1), client_id="pi", topic=TOPIC, wanted_bytes=1)


@pytest.mark.parametrize("size", [1024, 16_384 + 3, 16_384 + 4, 2_097_152 + 4, 2_097_152 + 5, 5_000_000])
def test_a_probe_has_the_size_that_it_should(size):
    assert size - 1 <= publish_bytes(TOPIC, _payload_bytes(TOPIC, size), 0) <= size
