"""A program: hostile messages to a real site while requests go on, and what became of it, as JSON.

Captured messages of every topic are mutated and published again, N of them from a seed; then come the messages that
once stopped a site, each by name. Arguments: N, and optionally the seed.
"""

from __future__ import annotations

import json
import os
import queue
import random
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgpack
import numpy as np
import psutil
from mutations import MUTATIONS
from site_processes import PATIENCE_S, SITE, Site, poll

from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.client import Hepti
from hepti_mqtt.embedded_broker import start_broker
from hepti_mqtt.errors import HeptiError, NetworkError, PacketLimitError, WireError
from hepti_mqtt.ids import Start
from hepti_mqtt.protocol import keys, messages
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.service.requests import read_input
from hepti_mqtt.transport.base import State, Subscribed
from hepti_mqtt.transport.broker_connection import BrokerConnection
from hepti_mqtt.transport.url import BrokerUrl

TEXTS = ("the sensor is warm", "door", "a window of the cold room, and a light", "letter " * 12)
TOLERANCE = 5e-5
CAPTURED = 40  # messages kept of each kind of topic
AT_ONCE = 20  # hostile messages between two looks at the clock
INVENTED = 40_000
OUTLASTS_S = 5.0  # for so long after the last message requests may fail
KINDS = {
    "status", "caps", "heartbeat", "up", "command", "request", "response", "planner_status", "plan", "work", "weights",
    "activation", "event",
}  # fmt: skip
TOPICS = Topics(SITE)
NOBODY = Start(0, 0)


@dataclass
class Counts:
    """What became of the requests that went on meanwhile."""

    outcomes: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    longest_trouble_s: float = 0.0  # from the first of several failures on end to the next right answer
    last_failure_s: float = 0.0  # when the last request was sent that failed, by time.monotonic()
    failures: list[str] = field(default_factory=list)  # when, by the clock of the logs, and in whose words
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self, url: str, expected: dict[str, np.ndarray], client: str) -> None:
        """Ask one thing after the other until the end."""
        with Hepti.connect(url, site=SITE, client_id=client) as hepti:
            trouble_since: float | None = None
            for number in range(1 << 30):
                if self.stop.is_set():
                    return
                text = TEXTS[number % len(TEXTS)]
                begun = time.monotonic()
                try:
                    embedding = hepti.infer("tiny", text=text, timeout_s=PATIENCE_S).embedding
                except HeptiError as error:
                    outcome = "no end" if isinstance(error, TimeoutError) else f"error {error.code}"
                    took_s = time.monotonic() - begun
                    self.failures.append(f"{time.strftime('%H:%M:%S')} {client} after {took_s:.1f} s: {error}")
                    self.last_failure_s = max(self.last_failure_s, begun)
                else:
                    right = np.allclose(embedding, expected[text], atol=TOLERANCE)
                    outcome = "right" if right else "wrong"
                self.outcomes[outcome] += 1
                now = time.monotonic()
                self.longest_s = max(self.longest_s, now - begun)
                if outcome != "right":
                    trouble_since = now if trouble_since is None else trouble_since
                elif trouble_since is not None:
                    self.longest_trouble_s = max(self.longest_trouble_s, now - trouble_since)
                    trouble_since = None


class Attacker:
    """Someone who may publish and read everything: an open broker, or a login that was stolen."""

    def __init__(self, url: str, random_: random.Random) -> None:
        self.random = random_
        self.capturing, self.pause = True, threading.Event()
        self.captured: dict[str, list[tuple[str, bytes]]] = {}
        self.answers: Counter[str] = Counter()
        self.waiting: set[str] = set()  # ids of our own requests, valid ones, that have no answer
        self.sent: Counter[str] = Counter()
        self.last_sent_s = 0.0
        self.transport = self._connection(url, "says", self._heard, "hepti/v1/" + SITE + "/#", 0)
        # What answers us must not be dropped behind our own echo.
        self.answered = self._connection(url, "hears", self._counted, TOPICS.responses("attacker"), 1)

    def _connection(
        self, url: str, name: str, heard: Callable[[str, bytes], None], topic: str, qos: int
    ) -> BrokerConnection:
        states: queue.SimpleQueue[State] = queue.SimpleQueue()
        transport = BrokerConnection(
            BrokerUrl.parse(url),
            f"attacker-{name}-{uuid.uuid4().hex[:8]}",
            on_message=heard,
            on_state=states.put,
            max_queued_bytes=256 << 20,
        )
        transport.subscribe([(topic, qos)])
        transport.connect(PATIENCE_S)
        while not isinstance(states.get(timeout=PATIENCE_S), Subscribed):
            pass
        return transport

    def close(self) -> None:
        self.transport.close()
        self.answered.close()

    def _counted(self, topic: str, payload: bytes) -> None:
        data, request = json.loads(payload), topic.rpartition("/")[2]
        self.waiting.discard(request)
        self.answers["answered" if data["ok"] else f"refused: {data['error']['code']}"] += 1

    def _heard(self, topic: str, payload: bytes) -> None:
        try:
            parsed = TOPICS.parse(topic)
        except WireError:
            return
        if parsed.kind == "response" and parsed.client == "attacker":
            return
        if payload and self.capturing:
            kept = self.captured.setdefault(parsed.kind, [])
            if len(kept) < CAPTURED:
                kept.append((topic, payload))

    def say(self, kind: str, topic: str, payload: bytes, retain: bool = False) -> None:
        """Publish, and wait while too much waits to be sent."""
        self.sent[kind] += 1
        self.last_sent_s = time.monotonic()
        while True:
            try:
                self.transport.publish(topic, payload, 1, retain)
            except PacketLimitError:
                self.answers["over the broker's limit"] += 1
            except NetworkError:
                self.pause.wait(0.02)
                continue
            return

    def takes_over(self, topic: str, payload: bytes) -> bool:
        """Return whether a message says that there is a newer planner or agent: by design the one before ends then."""
        own = [start_of(t, p) for said in self.captured.values() for t, p in said if t == topic]
        return start_of(topic, payload) > max(own, default=NOBODY)

    def mutated(self) -> tuple[str, str, bytes]:
        """Return kind, topic and payload of a captured message that was changed."""
        pick = self.random
        kind = pick.choice(sorted(self.captured))
        topic, payload = pick.choice(self.captured[kind])
        if kind == "request":
            topic = TOPICS.request("tiny", "attacker")
        if pick.random() < 0.1:  # another topic's payload
            payload = pick.choice(self.captured[pick.choice(sorted(self.captured))])[1]
        return kind, topic, pick.choice(MUTATIONS)(bytearray(payload), pick)


def start_of(topic: str, payload: bytes) -> Start:
    """Return the start that a status names, the least for what is none."""
    try:
        return messages.decode_status(payload).start if "status" in TOPICS.parse(topic).kind else NOBODY
    except WireError:
        return NOBODY


def named(attacker: Attacker) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the messages that stopped a site once."""
    request, say = TOPICS.request("tiny", "attacker"), attacker.say

    def ask(name: str, **data: object) -> None:
        own = uuid.uuid4().hex
        attacker.waiting.add(own)
        say(name, request, json.dumps({"id": own, **data}).encode())

    yield "text of 32 MB, cut", lambda: ask("text of 32 MB, cut", text="warm " * 6_000_000, truncate=True)
    yield "text of 15 MB, cut", lambda: ask("text of 15 MB, cut", text="warm " * 3_000_000, truncate=True)
    yield "list of 8 million", lambda: say("list of 8 million", request, b'{"text": [' + b"0," * 7_900_000 + b"0]}")
    yield "nested lists", lambda: say("nested lists", request, b"[" * 1_000_000)
    forged = json.dumps({"state": "online", "boot": 2**62}).encode()
    yield "boot 2^62 of the planner", lambda: say("boot 2^62", TOPICS.planner_status(), forged, retain=True)
    yield "boot 2^62 of an agent", lambda: say("boot 2^62", TOPICS.status("a"), forged, retain=True)
    for field_, value in (("layers", 10**9), ("max_tokens", 2**40), ("hidden", 2**31)):
        name = f"Prepare with {field_} {value:.0e}"
        yield name, lambda name=name, field_=field_, value=value: _prepare(attacker, name, field_, value)
    yield "40,000 devices", lambda: _invent(attacker)
    yield "500 requests at once", lambda: _flood(ask)


def _flood(ask: Callable[..., None]) -> None:
    for number in range(500):  # valid, and of different lengths: what fits into no queue is refused for that alone
        ask("500 requests at once", text="warm " * (20 + number % 500), truncate=True)


def _prepare(attacker: Attacker, name: str, field_: str, value: int) -> None:
    commands = [(topic, msgpack.unpackb(keys.split(payload)[0])) for topic, payload in attacker.captured["command"]]
    topic, values = next(command for command in commands if command[1][0] == 1)
    values[2]["epoch"] = [values[2]["epoch"][0], 1_000_000 + attacker.random.randrange(1_000_000)]
    values[3][field_] = value
    attacker.say(name, topic, msgpack.packb(values))


def _invent(attacker: Attacker) -> None:
    online = json.dumps({"state": "online", "boot": 1}).encode()
    for number in range(INVENTED):
        attacker.say("40,000 devices", TOPICS.status(f"invented-{number}"), online)


def memory_mb(site: Site) -> dict[str, int]:
    """Return what each process has in memory."""
    return {name: psutil.Process(p.pid).memory_info().rss >> 20 for name, p in site.running.items()}


def attack(site: Site, attacker: Attacker, count: int, expected: dict[str, np.ndarray]) -> dict[str, object]:
    """Send everything; return what was sent, how it was answered, and how the site did."""
    counts = Counts()
    clients = [threading.Thread(target=counts.run, args=(site.url, expected, name)) for name in ("one", "two")]
    try:
        for thread in clients:
            thread.start()
        poll(lambda: not KINDS - set(attacker.captured), f"a message of each kind, besides {set(attacker.captured)},")
        attacker.capturing = False  # from now on much of what is heard is our own
        before = memory_mb(site)
        _mutations(attacker, count)
        mutated_until_s = attacker.last_sent_s
        attacker.pause.wait(2 * OUTLASTS_S)
        outlasting = counts.last_failure_s > mutated_until_s + OUTLASTS_S
        after_mutations, steps, unanswered = memory_mb(site), {}, Counter[str]()
        for name, act in named(attacker):
            act()
            until = time.monotonic() + PATIENCE_S
            while attacker.waiting and time.monotonic() < until:
                attacker.pause.wait(0.05)
            if attacker.waiting:
                unanswered[name] = len(attacker.waiting)
            attacker.waiting.clear()
            _answers(site, expected)
            steps[name] = memory_mb(site)
    finally:
        counts.stop.set()
        for thread in clients:
            thread.join(2 * PATIENCE_S)
    return {
        "sent": dict(sorted(attacker.sent.items())),
        "mutated": count,
        "answers": dict(sorted(attacker.answers.items())),
        "unanswered": dict(unanswered),
        "requests": dict(counts.outcomes),
        "failures": counts.failures,
        "longest_s": round(counts.longest_s, 2),
        "longest_trouble_s": round(counts.longest_trouble_s, 2),
        "outlasting": outlasting,
        "memory_mb": {"before": before, "after mutations": after_mutations, **steps},
        "ended": [name for name, process in site.running.items() if process.poll() is not None],
        "log_lines": {name: site.log(name).count("\n") for name in site.running},
        "tracebacks": sum(site.log(name).count("Traceback") for name in site.running),
    }


def _mutations(attacker: Attacker, count: int) -> None:
    left = count
    while left:
        kind, topic, payload = attacker.mutated()
        if attacker.takes_over(topic, payload):
            continue
        attacker.say(kind, topic, payload)
        left -= 1
        if left % AT_ONCE == 0:
            attacker.pause.wait(0.02)


def _answers(site: Site, expected: dict[str, np.ndarray]) -> None:
    """Return when the site answers rightly again; raises if it does not."""
    with Hepti.connect(site.url, site=SITE) as hepti:
        embedding = hepti.infer("tiny", text=TEXTS[0], timeout_s=2 * PATIENCE_S).embedding
    assert np.allclose(embedding, expected[TEXTS[0]], atol=TOLERANCE), "a wrong answer"


def main(count: int, seed: int) -> dict[str, object]:
    """Build a site, attack it, and return what became of it."""
    directory = Path(tempfile.mkdtemp(prefix="hepti-hostile-"))
    try:
        path = make_model("tiny-bert", directory / "tiny", seed=3)
        with Checkpoint.open(path, "tiny") as checkpoint:
            expected = {}
            for text in TEXTS:
                prepared = read_input(checkpoint, {"text": text})
                expected[text] = models.reference(
                    checkpoint.spec, checkpoint.tensors(), prepared.inputs, prepared.shape
                )[1][0]
        with start_broker() as broker:
            site = Site(directory, broker, {"tiny": path})
            attacker = Attacker(broker.url, random.Random(seed))  # before the plans are told
            try:
                site.planner("--strategy", "row", "--devices", "a,b", "--route", "broker")
                for name in ("a", "b"):
                    site.agent(name, "100MiB")
                with Hepti.connect(site.url, site=SITE) as hepti:
                    hepti.wait_ready(
                        "tiny", PATIENCE_S, lambda r: set((r["active"] or {}).get("devices", ())) == {"a", "b"}
                    )
                return {"broker": broker.kind, "seed": seed, **attack(site, attacker, count, expected)}
            finally:
                site.close()
                attacker.close()
                if (kept := os.environ.get("HEPTI_HOSTILE_LOGS")) is not None:
                    for log in directory.glob("*.log"):
                        shutil.copy(log, kept)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0), indent=2))
