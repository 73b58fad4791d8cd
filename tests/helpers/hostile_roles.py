"""A closed site attacked from inside: each role's own login says everything, everywhere, while others ask."""

from __future__ import annotations

import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from closed_broker import ClosedSite, Someone, closed_broker
from hostile_site import TEXTS, Counts, memory_mb
from scripted_site import caps, heartbeat
from site_processes import PATIENCE_S, SITE

from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.client import Hepti
from hepti_mqtt.errors import NetworkError
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.messages import Status
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.service.requests import read_input
from hepti_mqtt.transport.url import BrokerUrl

USERS = {"a": "device", "b": "device", "idle": "device", "alice": "client", "mallory": "client", "hall": "viewer"}
ATTACKERS = ("idle", "b", "mallory", "hall")  # b: the login of a device that serves
TOPICS = Topics(SITE)


@dataclass(frozen=True)
class Load:
    """How much is said: the sizes of messages, and how often each is repeated."""

    sizes: tuple[int, ...]
    rates: tuple[int, ...]


SHORT = Load((0, 1, 70_000), (1, 5))
WHOLE = Load((0, 1, 1000, 70_000, 2_000_000, 30_000_000), (1, 20, 500))
MOST_BYTES = 4 << 20  # of one topic, size and rate together


def topics_of(me: str) -> list[str]:
    """Return every topic of the protocol, with this name and with another's wherever a name stands."""
    t = TOPICS
    topics = [t.planner_status(), t.plan("tiny"), t.event("left")]
    for name in (me, "a"):
        topics += [t.status(name), t.caps(name), t.heartbeat(name), t.reports(name), t.command(name), t.probe(name)]
        topics += [t.work("tiny", name), t.weights(name)]
        topics += [t.use(name), t.text("tiny", name)]
        topics += [t.request("tiny", name), t.responses(name, "tiny").replace("+", "q1")]
        topics += [t.activation("tiny", 1, name, to) for to in ("a", "b", "all")]
    return topics


def named(me: str) -> Iterator[tuple[str, bytes]]:
    """Yield what is valid and may do harm: a device that takes part and does nothing, or says what cannot be."""
    boot, status, own = int(time.time()), TOPICS.status(me), caps(me, 0)
    for packet_bytes in (1, 5000, 0):
        said = replace(own, boot=boot, largest_packet_bytes=packet_bytes)
        yield TOPICS.caps(me), messages.encode_caps(said)
        yield status, messages.encode_status(Status("online", boot))
        yield TOPICS.heartbeat(me), messages.encode_heartbeat(heartbeat(boot))
    for state in ("offline", "online", "starting") * 5:
        yield status, messages.encode_status(Status(state, boot))


def attack(site: ClosedSite, user: str, load: Load, rng: random.Random) -> Counter[str]:
    """Say everything with one login; return how many messages of each kind were said."""
    someone = Someone(BrokerUrl.parse(str(site.folder.login(user))), max_queued_bytes=64 << 20)
    said = Counter[str]()

    def say(topic: str, payload: bytes, retain: bool) -> None:
        said["retained" if retain else "not retained"] += 1
        for _ in range(500):
            try:
                someone.transport.publish(topic, payload, 1, retain)
            except NetworkError:  # too much waits
                time.sleep(0.02)
                continue
            return

    try:
        for topic in topics_of(user):
            for size in load.sizes:
                payload = rng.randbytes(size)
                for retain in (False, True):
                    for rate in load.rates:
                        for _ in range(min(rate, max(MOST_BYTES // max(size, 1), 1))):
                            say(topic, payload, retain)
        if user != "b":  # what says that there is a newer one of its name ends a device, by design
            for topic, payload in named(user):
                say(topic, payload, retain=True)
                time.sleep(0.05)
        if user == "mallory":
            for number in range(200):
                say(TOPICS.request("tiny", user), json.dumps({"id": f"m{number}", "text": "warm"}).encode(), False)
        someone.transport.close(timeout_s=PATIENCE_S)
    finally:
        someone.close()
    return said


def main(load: Load, seed: int = 0, users: tuple[str, ...] = ATTACKERS) -> dict[str, object]:
    """Build a closed site, let each user attack it, and return what became of the requests of another client."""
    directory, counts = Path(tempfile.mkdtemp(prefix="hepti-roles-")), Counts()
    path = make_model("tiny-bert", directory / "tiny", seed=3)
    with Checkpoint.open(path, "tiny") as checkpoint:
        expected = {}
        for text in TEXTS:
            prepared = read_input(checkpoint, {"text": text})
            expected[text] = models.reference(checkpoint.spec, checkpoint.tensors(), prepared.inputs, prepared.shape)[
                1
            ][0]
    with closed_broker(directory / "site", USERS, SITE) as (folder, broker):
        site = ClosedSite(directory, broker, {"tiny": path}, folder)
        try:
            site.planner()
            for name in ("a", "b"):
                site.agent(name, "100MiB")
            with Hepti.connect(str(folder.login("alice")), site=SITE) as hepti:
                hepti.wait_ready(
                    "tiny", PATIENCE_S, lambda r: {d for c in r["candidates"] for d in c["devices"]} == {"a", "b"}
                )
            return {"seed": seed, **_attacked(site, counts, expected, load, random.Random(seed), users)}
        finally:
            site.close()


def _attacked(
    site: ClosedSite,
    counts: Counts,
    expected: dict[str, np.ndarray],
    load: Load,
    rng: random.Random,
    users: tuple[str, ...],
) -> dict[str, object]:
    alice = str(site.folder.login("alice"))
    thread = threading.Thread(target=counts.run, args=(alice, expected, "alice"))
    memory, said = {"before": memory_mb(site)}, {}
    thread.start()
    try:
        for user in users:
            said[user] = dict(attack(site, user, load, rng))
            memory[user] = memory_mb(site)
        with Hepti.connect(alice, site=SITE) as hepti:
            hepti.infer("tiny", text=TEXTS[0], timeout_s=2 * PATIENCE_S)
            unused = hepti.unused()
    finally:
        counts.stop.set()
        thread.join(2 * PATIENCE_S)
    return {
        "said": said,
        "requests": dict(counts.outcomes),
        "failures": counts.failures,
        "longest_s": round(counts.longest_s, 2),
        "memory_mb": memory,
        "unused": unused,
        "ended": [name for name, process in site.running.items() if process.poll() is not None],
        "tracebacks": sum(site.log(name).count("Traceback") for name in site.running),
        "log": site.log("planner")[-4000:],
    }


if __name__ == "__main__":
    loads = {"short": SHORT, "whole": WHOLE}
    print(json.dumps(main(loads[sys.argv[1]], int(sys.argv[2]) if len(sys.argv) > 2 else 0), indent=2))
