"""A device and a planner of another version: refused by name, and everyone else goes on."""

from __future__ import annotations

import json
import queue
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
from site_processes import PATIENCE_S, SITE, Site, poll, running_site

from hepti_mqtt import __version__
from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.client import Hepti
from hepti_mqtt.errors import HeptiError, WireError
from hepti_mqtt.ids import PlanVersion
from hepti_mqtt.protocol import keys, messages
from hepti_mqtt.protocol.frames import MAGIC
from hepti_mqtt.protocol.plausible import PROGRAMS_BYTES
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.transport import BrokerUrl, PahoTransport, Subscribed

TOPICS = Topics(SITE)
OLDER = "0.0.1"
IDS = [5, 6, 7, 8]


class Voice:
    """A raw MQTT client that speaks for a program of another version."""

    def __init__(self, site: Site, *topics: str) -> None:
        self.heard: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        states: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.transport = PahoTransport(
            BrokerUrl.parse(site.url),
            f"voice-{uuid.uuid4().hex[:8]}",
            on_message=lambda topic, payload: self.heard.put((topic, bytes(payload))),
            on_state=states.put,
        )
        self.transport.subscribe([(topic, 1) for topic in topics])
        self.transport.connect(PATIENCE_S)
        while not isinstance(states.get(timeout=PATIENCE_S), Subscribed):
            pass

    def say(self, topic: str, payload: bytes, retain: bool = False) -> None:
        self.transport.publish(topic, payload, 1, retain)

    def next(self, topic: str) -> bytes:
        """Return the next message on a topic."""
        while (found := self.heard.get(timeout=PATIENCE_S))[0] != topic:
            pass
        return found[1]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    model = make_model("tiny-bert", tmp_path / "model", seed=3)
    yield from running_site(tmp_path, {"tiny": model}, {"a": "200MiB"})


@pytest.fixture
def hepti(site: Site) -> Iterator[Hepti]:
    with Hepti.connect(site.url, site=SITE, client_id="tester") as found:
        found.wait_ready("tiny", PATIENCE_S)
        yield found


def test_an_older_agent_is_refused_with_both_versions_and_the_others_serve(site: Site, hepti: Hepti) -> None:
    voice = Voice(site, TOPICS.caps("a"), TOPICS.command("old"))
    caps = messages.decode_caps(voice.next(TOPICS.caps("a")))
    boot = int(time.time())
    voice.say(
        TOPICS.caps("old"),
        messages.encode_caps(replace(caps, device="old", boot=boot, version=OLDER, endpoint=None)),
        retain=True,
    )
    voice.say(TOPICS.status("old"), json.dumps({"state": "online", "boot": boot}).encode(), retain=True)
    poll(lambda: "old" in {d["device"] for d in hepti.devices(wait_s=0.5)}, "the older agent")
    with pytest.raises(HeptiError) as refused:
        hepti.infer("tiny", ids=IDS, strategy="row", devices=["a", "old"], timeout_s=PATIENCE_S)
    assert OLDER in str(refused.value)
    line = next(line for line in site.log("planner").splitlines() if OLDER in line)
    assert __version__ in line
    hepti.infer("tiny", ids=IDS, weights="f16", timeout_s=PATIENCE_S)  # a new record is published
    poll(lambda: OLDER in hepti.plan("tiny", PATIENCE_S)["unused"].get("old", ""), "the record's reason")
    assert __version__ in hepti.plan("tiny", PATIENCE_S)["unused"]["old"]
    assert len(hepti.infer("tiny", ids=IDS, timeout_s=PATIENCE_S).embedding) == 32
    voice.transport.close()


def test_an_agent_refuses_an_older_planner_with_both_versions_and_serves_the_next_one(site: Site, hepti: Hepti) -> None:
    older = Voice(site, TOPICS.command("a"), TOPICS.reports("a"))
    hepti.infer("tiny", ids=IDS, weights="f16", timeout_s=PATIENCE_S)
    prepare = messages.decode(older.next(TOPICS.command("a")))
    while not isinstance(prepare, messages.Prepare):
        prepare = messages.decode(older.next(TOPICS.command("a")))
    site.stop("planner")
    boot = prepare.plan["epoch"][0] + 1
    status = json.dumps({"state": "online", "boot": boot}).encode()  # as planners wrote it before 0.2.0
    older.say(TOPICS.planner_status(), status, retain=True)
    asked = replace(prepare, transaction_id=prepare.transaction_id + 1000, plan={**prepare.plan, "epoch": [boot, 999]})
    older.say(TOPICS.command("a"), messages.encode(asked))
    while True:
        payload = older.next(TOPICS.reports("a"))
        if payload[:4] == MAGIC:
            continue
        answer = messages.decode(payload)
        if getattr(answer, "transaction_id", 0) == asked.transaction_id:
            break
    assert answer == messages.Ready(asked.transaction_id, "tiny", PlanVersion(boot, 999), 0, bytes(PROGRAMS_BYTES))
    poll(lambda: "before 0.2.0" in site.log("a"), "the agent's word of it")
    assert __version__ in next(line for line in site.log("a").splitlines() if "before 0.2.0" in line)
    site.planner()
    hepti.wait_ready("tiny", PATIENCE_S)
    assert len(hepti.infer("tiny", ids=IDS, timeout_s=PATIENCE_S).embedding) == 32
    older.transport.close()


def test_what_a_planner_of_another_version_says_wedges_no_agent(site: Site, hepti: Hepti) -> None:
    asked = Voice(site, TOPICS.command("a"))
    hepti.infer("tiny", ids=IDS, weights="f16", timeout_s=PATIENCE_S)  # another plan is prepared
    payload, _ = keys.split(asked.next(TOPICS.command("a")))
    site.stop("planner")
    values = msgpack.unpackb(payload)
    for other in (msgpack.packb(values[:-2]), msgpack.packb([*values, 1]), msgpack.packb([250, *values[1:]])):
        with pytest.raises(WireError, match="update the older program"):
            messages.decode(other)
        asked.say(TOPICS.command("a"), other)
    poll(lambda: site.log("a").count("dropped") >= 1, "the agent's word of it")
    site.planner()
    hepti.wait_ready("tiny", PATIENCE_S)
    assert len(hepti.infer("tiny", ids=IDS, timeout_s=PATIENCE_S).embedding) == 32
    asked.transport.close()
