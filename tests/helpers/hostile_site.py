"""A program: hostile messages to a real site while requests go on; prints the results as JSON.

`messages N SEED`: captured messages of every topic are mutated and published again, N of them from a seed; then come
messages that once stopped a site, each by name. `roles short|whole`: the login of each role of a closed site publishes
on every topic.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgpack
import psutil
from closed_broker import ClosedSite, closed_broker
from mutations import MUTATIONS
from scripted_site import caps, heartbeat
from site_load import RIGHT, LibraryClient, Question, counts, encoded, texts
from site_processes import PATIENCE_S, SITE, Site, User, Voice, poll, wait_for_plans

from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.client import Hepti
from hepti_mqtt.core.errors import NetworkError, PacketLimitError, WireError
from hepti_mqtt.core.ids import Start
from hepti_mqtt.embedded_broker import start_broker
from hepti_mqtt.protocol import keys, messages
from hepti_mqtt.protocol.messages import Status
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.transport.url import BrokerUrl

TEXTS = ("the sensor is warm", "door", "a window of the cold room, and a light", "letter " * 12)
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


class Flood(Voice):
    """A connection that publishes as much as it can."""

    def __init__(self, url: str | BrokerUrl, *topics: str) -> None:
        self.sent, self.refused, self.last_sent_s = Counter[str](), 0, 0.0
        super().__init__(url, *topics, max_queued_bytes=256 << 20)

    def flood(self, kind: str, topic: str, payload: bytes, retain: bool = False) -> None:
        """Publish, and wait while too much waits to be sent."""
        self.sent[kind] += 1
        self.last_sent_s = time.monotonic()
        while True:
            try:
                self.say(topic, payload, retain)
            except PacketLimitError:
                self.refused += 1
            except NetworkError:
                time.sleep(0.02)
                continue
            return


class Attacker(Flood):
    """Someone who may publish and read everything: an open broker, or a login that was stolen."""

    def __init__(self, url: str, random_: random.Random) -> None:
        self.random = random_
        self.capturing = True
        self.captured: dict[str, list[tuple[str, bytes]]] = {}
        self.answers: Counter[str] = Counter()
        self.waiting: set[str] = set()  # ids of our own valid requests without an answer
        super().__init__(url, f"hepti/v1/{SITE}/#")
        self.user = User(url, "attacker")  # a connection of its own: answers must not be dropped behind our own echo

    def close(self, timeout_s: float = 2.0) -> None:
        super().close(timeout_s)
        self.user.close()

    def count_answers(self) -> None:
        """Count the answers that have come."""
        while not self.user.answers.empty():
            topic, data = self.user.answers.get()
            self.waiting.discard(topic.rpartition("/")[2])
            self.answers["answered" if data["ok"] else f"refused: {data['error']['code']}"] += 1

    def hear(self, topic: str, payload: bytes) -> None:
        try:
            parsed = TOPICS.parse(topic)
        except WireError:
            return
        if parsed.kind == "response" and parsed.client == "attacker":
            return
        if payload and self.capturing:
            kept = self.captured.setdefault(parsed.kind, [])
            if len(kept) < CAPTURED:
                kept.append((topic, bytes(payload)))

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
    request, say = TOPICS.request("tiny", "attacker"), attacker.flood

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
    values[2]["version"] = [values[2]["version"][0], 1_000_000 + attacker.random.randrange(1_000_000)]
    values[3][field_] = value
    attacker.flood(name, topic, msgpack.packb(values))


def _invent(attacker: Attacker) -> None:
    online = json.dumps({"state": "online", "boot": 1}).encode()
    for number in range(INVENTED):
        attacker.flood("40,000 devices", TOPICS.status(f"invented-{number}"), online)


def memory_mb(site: Site) -> dict[str, int]:
    """Return what each process has in memory."""
    return {name: psutil.Process(p.pid).memory_info().rss >> 20 for name, p in site.running.items()}


@contextmanager
def attacked(site: Site, url: str, questions: Sequence[Question], *names: str) -> Iterator[dict[str, object]]:
    """Let clients ask while the body attacks; afterwards the report has their requests and the processes' state."""
    clients = [LibraryClient(url, name, questions, pause_s=0.01) for name in names]
    report: dict[str, object] = {"memory_mb": {"before": memory_mb(site)}, "clients": clients}
    for client in clients:
        client.start()
    try:
        yield report
    finally:
        for client in clients:
            client.close()
    del report["clients"]
    ends = counts(clients)
    report |= {
        "requests": {code or "right": n for code, n in ends.items()},
        "failures": texts(clients, *(ends.keys() - {RIGHT}))[:50],
        "longest_s": round(max(o.ended_s - o.begun_s for c in clients for o in c.outcomes), 2),
        "longest_trouble_s": round(max(client.trouble() for client in clients), 2),
        "ended": [name for name, process in site.running.items() if process.poll() is not None],
        "tracebacks": sum(site.log(name).count("Traceback") for name in site.running),
        "log": site.log("planner")[-4000:],
    }


@contextmanager
def served_model() -> Iterator[tuple[Path, Path, list[Question]]]:
    """Yield a directory, a model in it, and requests with their answers."""
    with tempfile.TemporaryDirectory(prefix="hepti-hostile-") as name:
        path = make_model("tiny-bert", Path(name) / "tiny", seed=3)
        yield Path(name), path, encoded(path, [{"text": text} for text in TEXTS], "tiny")


def start(site: Site, url: str, *planner: str) -> None:
    """Start a planner and two agents, and wait until plans have both."""
    site.planner(*planner)
    for name in ("a", "b"):
        site.agent(name, "100MiB")
    with Hepti.connect(url, site=SITE) as hepti:
        wait_for_plans(hepti, ["tiny"], "ab")


def answers_again(url: str, question: Question) -> None:
    """Return when the site answers rightly again; raises if it does not."""
    with Hepti.connect(url, site=SITE) as hepti:
        assert question.is_right(hepti.infer("tiny", **question.body, timeout_s=PATIENCE_S)), "a wrong answer"


def attack_by_messages(count: int, seed: int = 0) -> dict[str, object]:
    """Attack an open site with mutated messages and those that stopped a site once; return the results."""
    with served_model() as (directory, path, questions), start_broker() as broker:
        site = Site(directory, broker, {"tiny": path})
        attacker = Attacker(broker.url, random.Random(seed))  # before plans are published
        try:
            start(site, site.url, "--strategy", "row", "--devices", "a,b", "--route", "broker")
            with attacked(site, site.url, questions, "one", "two") as report:
                poll(lambda: not KINDS - set(attacker.captured), f"each kind besides {set(attacker.captured)}")
                attacker.capturing = False  # from now on much of what is heard is our own
                memory: dict[str, object] = report["memory_mb"]
                _mutations(attacker, count)
                mutated_until_s = attacker.last_sent_s
                time.sleep(2 * OUTLASTS_S)
                failed = [o.begun_s for c in report["clients"] for o in c.outcomes if o.code]
                report["outlasting"] = max(failed, default=0.0) > mutated_until_s + OUTLASTS_S
                memory["after mutations"], unanswered = memory_mb(site), Counter[str]()
                for name, act in named(attacker):
                    act()
                    until = time.monotonic() + PATIENCE_S
                    while attacker.waiting and time.monotonic() < until:
                        attacker.count_answers()
                        time.sleep(0.05)
                    unanswered[name] += len(attacker.waiting)
                    attacker.waiting.clear()
                    answers_again(site.url, questions[0])
                    memory[name] = memory_mb(site)
                report["unanswered"] = {name: n for name, n in unanswered.items() if n}
            attacker.count_answers()
            sent = {"sent": dict(sorted(attacker.sent.items())), "answers": dict(sorted(attacker.answers.items()))}
            return {"broker": broker.kind, "seed": seed, "over the limit": attacker.refused, **sent, **report}
        finally:
            site.close()
            attacker.close()


def _mutations(attacker: Attacker, count: int) -> None:
    left = count
    while left:
        kind, topic, payload = attacker.mutated()
        if attacker.takes_over(topic, payload):
            continue
        attacker.flood(kind, topic, payload)
        left -= 1
        if left % AT_ONCE == 0:
            time.sleep(0.02)
            attacker.count_answers()


# ----------------------------------------------------------------------------------------------------------------------
# A closed site, attacked by its own logins.

USERS = {"a": "device", "b": "device", "idle": "device", "alice": "client", "mallory": "client", "hall": "viewer"}
ATTACKERS = ("idle", "b", "mallory", "hall")  # b: the login of a device that serves


@dataclass(frozen=True)
class Load:
    """The sizes of messages, and how often each is repeated."""

    sizes: tuple[int, ...]
    rates: tuple[int, ...]


LOADS = {
    "short": Load((0, 1, 70_000), (1, 5)),
    "whole": Load((0, 1, 1000, 70_000, 2_000_000, 30_000_000), (1, 20, 500)),
}
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


def harmful(me: str) -> Iterator[tuple[str, bytes]]:
    """Yield what is valid and may do harm: a device that takes part and does nothing, or says what cannot be."""
    boot, status, own = int(time.time()), TOPICS.status(me), caps(me, 0)
    for packet_bytes in (1, 5000, 0):
        said = replace(own, boot=boot, largest_packet_bytes=packet_bytes)
        yield TOPICS.caps(me), messages.encode_caps(said)
        yield status, messages.encode_status(Status("online", boot))
        yield TOPICS.heartbeat(me), messages.encode_heartbeat(heartbeat(boot))
    for state in ("offline", "online", "starting") * 5:
        yield status, messages.encode_status(Status(state, boot))


def attack_with(login: str, user: str, load: Load, rng: random.Random) -> Counter[str]:
    """Publish everything with one login; return the number of messages by kind."""
    flood = Flood(BrokerUrl.parse(login))
    try:
        for topic in topics_of(user):
            for size in load.sizes:
                payload = rng.randbytes(size)
                repeats = sum(min(rate, max(MOST_BYTES // max(size, 1), 1)) for rate in load.rates)
                for retain in (False, True):
                    for _ in range(repeats):
                        flood.flood("retained" if retain else "not retained", topic, payload, retain)
        if user != "b":  # a newer device of its name ends a device, by design
            for topic, payload in harmful(user):
                flood.flood("harmful", topic, payload, retain=True)
                time.sleep(0.05)
        if user == "mallory":
            for number in range(200):
                body = json.dumps({"id": f"m{number}", "text": "warm"}).encode()
                flood.flood("requests", TOPICS.request("tiny", user), body)
    finally:
        flood.close(PATIENCE_S)
    return flood.sent


def attack_by_roles(load: str, users: tuple[str, ...] = ATTACKERS, seed: int = 0) -> dict[str, object]:
    """Let each login of a closed site attack it; return the results of another client's requests."""
    with served_model() as (directory, path, questions), closed_broker(directory / "site", USERS, SITE) as closed:
        folder, broker = closed
        site = ClosedSite(directory, broker, {"tiny": path}, folder)
        rng, alice = random.Random(seed), folder.login("alice")
        try:
            start(site, str(alice))
            with attacked(site, str(alice), questions, "alice") as report:
                memory: dict[str, object] = report["memory_mb"]
                for user in users:
                    report[user] = dict(attack_with(str(folder.login(user)), user, LOADS[load], rng))
                    memory[user] = memory_mb(site)
                answers_again(str(alice), questions[0])
            return {"seed": seed, **report}
        finally:
            site.close()


if __name__ == "__main__":
    way, argument, *seeds = sys.argv[1:]
    seed = int(seeds[0]) if seeds else 0
    results = attack_by_messages(int(argument), seed) if way == "messages" else attack_by_roles(argument, seed=seed)
    print(json.dumps(results, indent=2))
