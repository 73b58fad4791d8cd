"""Heartbeats that wait for the session: the latest of each device, bounded, each in its turn."""

import pytest

from hepti_mqtt.protocol.messages import MAX_SELF_BYTES
from hepti_mqtt.service.heartbeats import TAKEN, TOPICS, HeartbeatInbox
from hepti_mqtt.transport.url import BrokerUrl


@pytest.fixture
def inbox():
    new_inbox = HeartbeatInbox(BrokerUrl.parse("mqtt://127.0.0.1:1"), "beats", "dev/+/hb", lambda _state: None)
    yield new_inbox
    new_inbox.close()


def test_a_flood_of_one_device_leaves_one_heartbeat(inbox):
    for number in range(5000):
        inbox.put("loud", b"%d" % number)
    inbox.put("quiet", b"here")
    assert inbox.take() == [("loud", b"4999"), ("quiet", b"here")]
    assert inbox.take() == []


def test_a_flood_of_invented_devices_leaves_the_others_their_turn(inbox):
    taken = []
    inbox.put("quiet", b"1")
    for number in range(TOPICS + 50):
        inbox.put(f"invented {number}", b"x")
    inbox.put("quiet", b"2")
    while more := inbox.take():
        assert len(more) <= TAKEN
        taken += more
    assert taken[0] == ("quiet", b"2")
    assert len(taken) == TOPICS


def test_a_payload_is_a_copy_and_bounded(inbox):
    memory = bytearray(b"here")
    inbox.put("a", memoryview(memory))
    inbox.put("large", bytes(MAX_SELF_BYTES + 1))
    memory[:] = b"gone"
    assert inbox.take() == [("a", b"here")]
