"""A device and a planner of another version: refused by name, and everyone else goes on."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from site_processes import PATIENCE_S, SITE, Voice, client_of, poll, retain, site_of

from hepti_mqtt import __version__
from hepti_mqtt.core.errors import HeptiError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.frames import MAGIC
from hepti_mqtt.protocol.plausible import PROGRAMS_BYTES
from hepti_mqtt.protocol.topics import Topics

TOPICS = Topics(SITE)
OLDER = "0.0.1"
IDS = [5, 6, 7, 8]


site = site_of({"tiny": "tiny-bert"}, {"a": "200MiB"})
hepti = client_of()


def next_prepare(voice):
    """Return the next message with which a planner prepares a plan."""
    while not isinstance(messages.decode(payload := voice.next(TOPICS.command("a"))[1]), messages.Prepare):
        pass
    return payload


def test_an_older_agent_is_refused_with_both_versions_and_the_others_serve(site, hepti):
    with Voice(site.url, TOPICS.caps("a")) as voice:
        caps = messages.decode_caps(voice.next()[1])
    boot = int(time.time())
    caps = replace(caps, device="old", boot=boot, version=OLDER, endpoint=None)
    retain(site.url, [TOPICS.caps("old")], messages.encode_caps(caps))
    retain(site.url, [TOPICS.status("old")], json.dumps({"state": "online", "boot": boot}).encode())
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


def test_an_agent_refuses_an_older_planner_with_both_versions_and_serves_the_next_one(site, hepti):
    older = Voice(site.url, TOPICS.command("a"), TOPICS.reports("a"))
    hepti.infer("tiny", ids=IDS, weights="w8a32", timeout_s=PATIENCE_S)  # another plan is prepared
    prepare = messages.decode(next_prepare(older))
    assert isinstance(prepare, messages.Prepare)
    site.stop("planner")
    boot = prepare.plan["version"][0] + 1
    status = json.dumps({"state": "online", "boot": boot}).encode()  # as planners wrote it before 0.2.0
    older.say(TOPICS.planner_status(), status, retain=True)
    transaction = prepare.transaction_id + 1000
    newer = replace(prepare, transaction_id=transaction, plan={**prepare.plan, "version": [boot, 999]})
    older.say(TOPICS.command("a"), messages.encode(newer))
    reports = (payload for topic, payload in iter(older.next, None) if topic == TOPICS.reports("a"))
    answers = (messages.decode(payload) for payload in reports if payload[:4] != MAGIC)
    answer = next(one for one in answers if getattr(one, "transaction_id", 0) == transaction)
    assert answer == messages.Ready(transaction, "tiny", PlanVersion(boot, 999), 0, bytes(PROGRAMS_BYTES))
    poll(lambda: "before 0.2.0" in site.log("a"), "the agent's word of it")
    assert __version__ in next(line for line in site.log("a").splitlines() if "before 0.2.0" in line)
    site.planner()
    hepti.wait_ready("tiny", PATIENCE_S)
    assert len(hepti.infer("tiny", ids=IDS, timeout_s=PATIENCE_S).embedding) == 32
    older.close()
