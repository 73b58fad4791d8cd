"""A device and a planner of another version: refused by name, and everyone else goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
from site_processes import PATIENCE_S, SITE, Site, Voice, poll, running_site

from hepti_mqtt import __version__
from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.client import Hepti
from hepti_mqtt.errors import HeptiError, WireError
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.messages import Status
from hepti_mqtt.protocol.plausible import PROGRAMS_BYTES
from hepti_mqtt.protocol.topics import Topics

pytestmark = [pytest.mark.processes, pytest.mark.broker]

TOPICS = Topics(SITE)
OLDER = "0.0.1"
IDS = [5, 6, 7, 8]


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
    voice = Voice(site.url, TOPICS.caps("a"), TOPICS.command("old"))
    told = messages.decode_caps(voice.next(TOPICS.caps("a"))[1])
    boot = int(time.time())
    voice.say(
        TOPICS.caps("old"),
        messages.encode_caps(replace(told, device="old", boot=boot, version=OLDER, endpoint=None)),
        retain=True,
    )
    voice.say(TOPICS.status("old"), messages.encode_status(Status("online", boot)), retain=True)
    poll(lambda: "old" in {d["device"] for d in hepti.devices(wait_s=0.5)}, "the older agent")
    asked = hepti.submit("tiny", ids=IDS, strategy="row", devices=["a", "old"])
    while not isinstance(prepare := messages.decode(voice.next(TOPICS.command("old"))[1]), messages.Prepare):
        pass
    epoch = prepare.plan["epoch"]
    ready = messages.Ready(prepare.transaction_id, "tiny", tuple(epoch), 0, bytes(PROGRAMS_BYTES))
    voice.say(TOPICS.reports("old"), messages.encode(ready))
    with pytest.raises(HeptiError) as refused:
        asked.result(PATIENCE_S)
    assert OLDER in str(refused.value)
    line = next(line for line in site.log("planner").splitlines() if OLDER in line)
    assert __version__ in line
    assert len(hepti.infer("tiny", ids=IDS, timeout_s=PATIENCE_S).embedding) == 32
    voice.close()


def test_what_a_planner_of_another_version_says_wedges_no_agent(site: Site, hepti: Hepti) -> None:
    asked = Voice(site.url, TOPICS.command("a"))
    hepti.infer("tiny", ids=IDS, weights="f16", timeout_s=PATIENCE_S)  # another plan is prepared
    payload = asked.next(TOPICS.command("a"))[1]
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
    asked.close()
