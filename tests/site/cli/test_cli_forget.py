"""`hepti site forget` at a real broker."""

from __future__ import annotations

import pytest
from site_processes import Voice, retain

from hepti_mqtt.cli import forget
from hepti_mqtt.cli.main import main
from hepti_mqtt.embedded_broker import start_broker
from hepti_mqtt.protocol.messages import Status, encode_status
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.service.home_assistant import Payloads
from hepti_mqtt.service.retained import retained_topics
from hepti_mqtt.transport.codec import matches

HOME, OTHER = Topics("home"), Topics("home_2")
OWN, THEIRS = Payloads(HOME, "homeassistant"), Payloads(OTHER, "homeassistant")
OF_A = {HOME.status("a"), HOME.caps("a"), HOME.use("a"), HOME.home("device", "a"), OWN.config_topic("device", "a")}
OF_M = {HOME.plan("m"), HOME.home("model", "m"), OWN.config_topic("model", "m")}
REST = {HOME.planner_status(), HOME.status("b"), HOME.home("site", "state"), OWN.config_topic("site", "state")}
FOREIGN = {OTHER.plan("m"), THEIRS.config_topic("model", "m"), "homeassistant/device/lamp/config", "lamp"}


@pytest.fixture(scope="module")
def url():
    with start_broker() as broker:
        yield broker.url


def retained(url):
    """Return what is retained: a new reader gets it before the mark."""
    with Voice(url, "#") as voice:
        voice.say("mark", b"")
        return {topic for topic, _ in iter(voice.next, ("mark", b""))}


@pytest.mark.parametrize(
    ("arguments", "gone"),
    [(["--device", "a"], OF_A), (["--model", "m"], OF_M), ([], OF_A | OF_M | REST)],
    ids=["device", "model", "site"],
)
def test_what_is_named_is_cleared_and_nothing_else(url, arguments, gone, monkeypatch):
    filters = set[str]()

    def read(url, topics, subscribed, **more):
        filters.update(subscribed)
        return retained_topics(url, topics, subscribed, **more)

    monkeypatch.setattr(forget, "retained_topics", read)
    everything = OF_A | OF_M | REST | FOREIGN
    retain(url, everything)
    command = ["site", "forget", "--broker", url, *arguments]
    assert main(command) == 2, "nobody is asked here, so nothing is cleared"
    assert retained(url) == everything
    assert main([*command, "--yes"]) == 0
    assert retained(url) == everything - gone
    assert not any(matches(each, HOME.response("m", "alice", "1")) for each in filters), "its answers have a reader"


class Running(Voice):
    """Says its status again whenever it is something else."""

    status = None

    def hear(self, topic, payload):
        if self.status and payload != self.status:
            self.say(topic, self.status, retain=True)


@pytest.mark.parametrize(("arguments", "holder"), [([], "planner"), (["--device", "a"], "a")])
def test_nothing_is_cleared_of_what_is_online(url, arguments, holder):
    topic = HOME.planner_status() if holder == "planner" else HOME.status(holder)
    said = encode_status(Status("online", 7))
    retain(url, {HOME.plan("m")})
    retain(url, {topic}, said)
    with Running(url, topic) as running:
        running.status = said
        assert main(["site", "forget", "--broker", url, "--yes", *arguments]) == 2
    assert retained(url) >= {topic, HOME.plan("m")}
