"""One planner per site."""

from __future__ import annotations

import threading

import pytest

from hepti_mqtt.errors import ConfigError, NetworkError
from hepti_mqtt.protocol.messages import Status, decode_status, encode_status
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.service import broker_checks
from hepti_mqtt.transport import BrokerUrl, Connected, PahoTransport, Will

pytestmark = pytest.mark.broker


class Rival:
    """A planner's status; one that lives contradicts who says that it is offline."""

    def __init__(self, broker, site, answers):
        self.topics, self.answers = Topics(site), answers
        connected = threading.Event()
        self.transport = PahoTransport(
            BrokerUrl.parse(str(broker.url)),
            f"rival-{site}",
            on_message=self.heard,
            on_state=lambda state: connected.set() if isinstance(state, Connected) else None,
        )
        self.transport.subscribe([(self.topics.planner_status(), 1)])
        self.transport.connect(20)
        assert connected.wait(20)

    def status(self, state):
        self.transport.publish(self.topics.planner_status(), encode_status(Status(state, 5)), 1, retain=True)

    def heard(self, topic, payload):
        if self.answers and payload and decode_status(payload) == Status("offline", 0):
            self.status("online")


@pytest.fixture
def rival(mosquitto, request):
    made = []

    def make(site, answers=True):
        made.append(Rival(mosquitto, site, answers))
        return made[-1]

    yield make
    for one in made:
        one.transport.close(Will(one.topics.planner_status(), b""))


def test_a_site_without_a_planner_is_free(mosquitto):
    broker_checks.require_alone(BrokerUrl.parse(str(mosquitto.url)), "nobody")


def test_a_living_planner_is_noticed(mosquitto, rival):
    rival("taken").status("online")
    with pytest.raises(ConfigError, match="boot 5"):
        broker_checks.require_alone(BrokerUrl.parse(str(mosquitto.url)), "taken")


def test_a_planner_that_said_goodbye_is_not(mosquitto, rival):
    rival("left").status("offline")
    broker_checks.require_alone(BrokerUrl.parse(str(mosquitto.url)), "left")


def test_a_status_that_a_dead_planner_left_behind_is_not(mosquitto, rival, monkeypatch):
    monkeypatch.setattr(broker_checks, "ANSWER_S", 0.2)
    rival("dead", answers=False).status("online")
    broker_checks.require_alone(BrokerUrl.parse(str(mosquitto.url)), "dead")


def test_what_is_no_status_counts_as_none(mosquitto, rival):
    one = rival("odd", answers=False)
    one.transport.publish(one.topics.planner_status(), b"not a status", 1, retain=True)
    broker_checks.require_alone(BrokerUrl.parse(str(mosquitto.url)), "odd")


def test_a_broker_that_is_absent_is_named():
    with pytest.raises(NetworkError, match=r"127\.0\.0\.1:1"):
        broker_checks.require_alone(BrokerUrl.parse("mqtt://127.0.0.1:1"), "s")
