"""`hepti site forget` at a real broker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from closed_broker import Someone

from hepti_mqtt.cli import forget
from hepti_mqtt.cli.main import main
from hepti_mqtt.embedded_broker import start_broker
from hepti_mqtt.protocol.messages import Status, encode_status
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.service.home_assistant import Payloads
from hepti_mqtt.service.retained import retained_topics
from hepti_mqtt.transport.broker_connection import BrokerConnection
from hepti_mqtt.transport.codec import matches
from hepti_mqtt.transport.url import BrokerUrl

HOME, OTHER = Topics("home"), Topics("home_2")
OWN, THEIRS = Payloads(HOME, "homeassistant"), Payloads(OTHER, "homeassistant")
OF_A = {HOME.status("a"), HOME.caps("a"), HOME.use("a"), HOME.home("device", "a"), OWN.config_topic("device", "a")}
OF_M = {HOME.plan("m"), HOME.home("model", "m"), OWN.config_topic("model", "m")}
REST = {HOME.planner_status(), HOME.status("b"), HOME.home("site", "state"), OWN.config_topic("site", "state")}
FOREIGN = {OTHER.plan("m"), THEIRS.config_topic("model", "m"), "homeassistant/device/lamp/config", "lamp"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with start_broker() as broker:
        yield broker.url


def retain(url: str, topics: set[str], payload: bytes = b"x") -> None:
    someone = Someone(BrokerUrl.parse(url))
    for topic in topics:
        someone.transport.publish(topic, payload, 1, retain=True)
    someone.transport.close(timeout_s=20.0)


def retained(url: str) -> set[str]:
    """Return what is retained: a new reader gets it before the mark."""
    someone = Someone(BrokerUrl.parse(url))
    someone.read("#")
    someone.transport.publish("mark", b"", 1)
    topics = set()
    while (topic := someone.heard.get(timeout=20.0)[0]) != "mark":
        topics.add(topic)
    someone.close()
    return topics


@pytest.mark.parametrize(
    ("arguments", "gone"),
    [(["--device", "a"], OF_A), (["--model", "m"], OF_M), ([], OF_A | OF_M | REST)],
    ids=["device", "model", "site"],
)
def test_what_is_named_is_cleared_and_nothing_else(
    url: str, arguments: list[str], gone: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    filters = set[str]()

    def read(url: BrokerUrl, topics: Topics, subscribed: list[str], **more: Any) -> list[str]:
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


@pytest.mark.parametrize(("arguments", "holder"), [([], "planner"), (["--device", "a"], "a")])
def test_nothing_is_cleared_of_what_is_online(url: str, arguments: list[str], holder: str) -> None:
    topic = HOME.planner_status() if holder == "planner" else HOME.status(holder)
    said = encode_status(Status("online", 7))
    retain(url, {HOME.plan("m")})
    retain(url, {topic}, said)
    running = BrokerConnection(
        BrokerUrl.parse(url),
        "running",
        on_message=lambda _, message: running.publish(topic, said, 1, retain=True) if message != said else None,
        on_state=lambda _: None,
    )
    running.subscribe([(topic, 1)])
    running.connect(20.0)
    try:
        assert main(["site", "forget", "--broker", url, "--yes", *arguments]) == 2
    finally:
        running.close()
    assert retained(url) >= {topic, HOME.plan("m")}
