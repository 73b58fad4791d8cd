"""One planner per site."""

from __future__ import annotations

import contextlib

import pytest
from site_processes import Voice

from hepti_mqtt.core.errors import ConfigError, NetworkError
from hepti_mqtt.protocol.messages import Status, decode_status, encode_status
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.service.planner import claim_site
from hepti_mqtt.transport import name_claim
from hepti_mqtt.transport.url import BrokerUrl


class Rival(Voice):
    """A planner's status; one that lives contradicts who says that it is offline."""

    def __init__(self, url, site, answers):
        self.topics, self.answers = Topics(site), answers
        super().__init__(url, self.topics.planner_status())

    def status(self, state):
        self.say(self.topics.planner_status(), encode_status(Status(state, 5)), retain=True)

    def hear(self, topic, payload):
        if self.answers and payload and decode_status(payload) == Status("offline", 0):
            self.status("online")


@pytest.fixture
def rival(url):
    with contextlib.ExitStack() as stack:
        yield lambda site, answers=True: stack.enter_context(Rival(url, site, answers))


def test_a_living_planner_is_noticed(url, rival):
    rival("taken").status("online")
    with pytest.raises(ConfigError):
        claim_site(url, "taken")


def test_a_broker_that_is_absent_is_named():
    with pytest.raises(NetworkError) as caught:
        claim_site(BrokerUrl.parse("mqtt://127.0.0.1:1"), "s")
    assert "127.0.0.1:1" in str(caught.value)


def test_a_site_without_a_living_planner_is_free(url, rival, monkeypatch):
    monkeypatch.setattr(name_claim, "CONTRADICTION_S", 0.2)
    cases = {"nobody": (None, True), "left": ("offline", True), "dead": ("online", False), "odd": (None, False)}
    for name, (state, answers) in cases.items():
        one = rival(name, answers)
        if state is not None:
            one.status(state)
        if name == "odd":
            one.say(one.topics.planner_status(), b"not a status", retain=True)
        claim_site(url, name)
