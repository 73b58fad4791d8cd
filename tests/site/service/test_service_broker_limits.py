"""One planner per site, and whether more requests may have come at once than the broker keeps."""

from __future__ import annotations

import pytest
from site_processes import Voice

from hepti_mqtt.errors import ConfigError, NetworkError
from hepti_mqtt.protocol.messages import Status, decode_status, encode_status
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.service.planner import claim_site
from hepti_mqtt.transport import name_claim
from hepti_mqtt.transport.base import Receipt, Will
from hepti_mqtt.transport.broker_limits import DeliveryWindow
from hepti_mqtt.transport.url import BrokerUrl


class Rival(Voice):
    """A planner's status; one that lives contradicts who says that it is offline."""

    def __init__(self, broker, site, answers):
        self.topics, self.answers = Topics(site), answers
        super().__init__(str(broker.url), self.topics.planner_status())

    def status(self, state):
        self.say(self.topics.planner_status(), encode_status(Status(state, 5)), retain=True)

    def hear(self, topic, payload):
        if self.answers and payload and decode_status(payload) == Status("offline", 0):
            self.status("online")


@pytest.fixture
def rival(mosquitto, request):
    rivals = []

    def make(site, answers=True):
        rivals.append(Rival(mosquitto, site, answers))
        return rivals[-1]

    yield make
    for one in rivals:
        one.transport.close(Will(one.topics.planner_status(), b""))


def test_a_living_planner_is_noticed(mosquitto, rival):
    rival("taken").status("online")
    with pytest.raises(ConfigError):
        claim_site(BrokerUrl.parse(str(mosquitto.url)), "taken")


def test_a_broker_that_is_absent_is_named():
    with pytest.raises(NetworkError) as caught:
        claim_site(BrokerUrl.parse("mqtt://127.0.0.1:1"), "s")
    assert "127.0.0.1:1" in str(caught.value)


def through(window: DeliveryWindow, *packets: int, connection: int = 1) -> None:
    for packet in packets:
        window.opened(Receipt(connection, packet), 0.0)


def acknowledged(window: DeliveryWindow, *packets: int, connection: int = 1) -> None:
    for packet in packets:
        window.closed(Receipt(connection, packet))


def test_a_full_window_is_told_of_once_when_all_is_acknowledged():
    warnings: list[str] = []
    window = DeliveryWindow(lambda: warnings.append("spilled"))
    window.limit = 3
    through(window, 1, 2)
    acknowledged(window, 1, 2)
    assert not warnings, "all that came was handed over"
    through(window, 3, 4, 5)
    acknowledged(window, 3, 4)
    assert not warnings, "what is sent again now would meet the same window"
    acknowledged(window, 5)
    through(window, 6)
    acknowledged(window, 6)
    assert warnings == ["spilled"]


def test_a_broker_that_keeps_enough_is_not_doubted():
    warnings: list[str] = []
    window = DeliveryWindow(lambda: warnings.append("spilled"))
    through(window, *range(1000))
    acknowledged(window, *range(1000))
    assert not warnings


def test_another_connection_brings_everything_again():
    warnings: list[str] = []
    window = DeliveryWindow(lambda: warnings.append("spilled"))
    window.limit = 2
    through(window, 1)
    through(window, 1, connection=2)
    acknowledged(window, 1, connection=1)
    through(window, 2, connection=2)
    acknowledged(window, 1, 2, connection=2)
    assert warnings == ["spilled"], "two were there at once"


def test_a_site_without_a_living_planner_is_free(mosquitto, rival, monkeypatch):
    monkeypatch.setattr(name_claim, "CONTRADICTION_S", 0.2)
    cases = {"nobody": (None, True), "left": ("offline", True), "dead": ("online", False), "odd": (None, False)}
    for name, (state, answers) in cases.items():
        one = rival(name, answers)
        if state is not None:
            one.status(state)
        if name == "odd":
            one.say(one.topics.planner_status(), b"not a status", retain=True)
        claim_site(BrokerUrl.parse(str(mosquitto.url)), name)
