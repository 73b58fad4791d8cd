"""Mixed load over the mesh for a long time, with a peer that is stopped for a while: what every process holds of it.

Embeddings and texts by MQTT, chats streamed by MQTT and HTTP, speech by HTTP. `make test-soak MINUTES=60` prints
tables; the exit code is 1 if memory, descriptors or threads of a process are not flat, if the ends of a connection
between two devices count differently, or if a request was lost or answered wrongly.
"""

from __future__ import annotations

import argparse
import logging
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from mixed_clients import MixedClient, mixed_clients, mixed_models, right_answers, start_gateway
from numpy.typing import NDArray
from site_processes import SITE, Site, poll
from soak_site import MIB, Flat, Held, edges_of, frames, missing, table, unequal, watch

from device_agent.measure import measurement_file
from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.client import Hepti
from hepti_mqtt.embedded_broker import EmbeddedBroker, start_broker
from hepti_mqtt.errors import HeptiError

DEVICES = ("a", "b", "c")
MEMORY_MIB = 300
START_S = 300.0
ANSWER_S = 120.0  # a request without an end by then is lost
STOP_AT = 0.4  # part of the run after which a peer is stopped
TELLS_S = 30.0  # in which heartbeats tell of the last frames
SETTLE_S = 45.0  # after a stop, for requests and plans that it met
KINDS = {"bert": ("tiny-bert", None), "words": ("minilm", 2), "gpt": ("tiny-gpt2", None)}  # with so many layers
LENGTHS = {"bert": (4, 30), "words": (4, 120), "gpt": (4, 30)}
TOLERANCE = {"f32": 5e-4, "f16": 2e-2, "i8": 0.3}
ROW = {"strategy": "row", "options": {"variant": "kv"}, "route": "mesh"}
PINS: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("bert", {**ROW, "devices": list(DEVICES)}),
    ("bert", {**ROW, "devices": list(DEVICES), "wire": "f16"}),
    ("bert", {**ROW, "devices": list(DEVICES), "wire": "i8"}),
    ("bert", {"strategy": "megatron", "devices": ["b", "c"], "route": "mesh"}),
    ("words", {**ROW, "devices": ["a", "c"]}),
    ("words", {"strategy": "single", "devices": ["b"]}),  # so that all hold its weights before a plan moves
    ("words", {}),
    ("gpt", {"strategy": "decoder", "devices": ["a", "b"], "route": "mesh"}),
)


@dataclass(frozen=True)
class Soak:
    """What a run is; stopped_s: how long a peer is. asks_s: between the requests of one client. flat: the rule."""

    seconds: float
    seed: int = 1
    stopped_s: float = 30.0
    asks_s: float = 0.1
    clients: int = 2
    every_s: float = 1.0  # between samples
    flat: Flat = field(default_factory=Flat)


@dataclass(frozen=True)
class Question:
    """A request, and its right answer: hidden states, an embedding, or tokens."""

    model: str
    body: Mapping[str, Any]
    answer: NDArray[Any]
    atol: float

    def right(self, answer: Any) -> bool:
        if self.model == "gpt":
            return list(answer.result["ids"]) == self.answer.tolist()
        array = answer.hidden if self.model == "bert" else answer.embedding
        return array.shape == self.answer.shape and bool(np.allclose(array, self.answer, atol=self.atol))


@dataclass
class Tallied:
    """What became of the requests. errors: by code, of those that were under way while a peer was stopped or mended."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    unexplained: Counter[str] = field(default_factory=Counter)
    lost: int = 0


@dataclass
class Report:
    """What came of a run. frames: that came over mesh. lost: with connections that a stop broke, by way."""

    counts: Tallied
    held: Mapping[str, Held]
    frames: int
    lost: Mapping[tuple[str, str], int]
    wrong: list[str]

    def __str__(self) -> str:
        counts = self.counts
        gone = ", ".join(f"{a} to {b} {n}" for (a, b), n in self.lost.items() if n) or "none"
        return "\n".join(
            [
                table(self.held),
                f"answers: {counts.right} right, {len(counts.wrong)} wrong, {counts.lost} lost; "
                f"errors around the stop: {dict(counts.errors)}, others: {dict(counts.unexplained)}",
                f"frames over mesh: {self.frames}; lost with connections that the stop broke: {gone}",
                *(f"WRONG: {what}" for what in self.wrong),
            ]
        )


class Load:
    """Clients that send one request after the other; `pause` lets the requests under way end."""

    def __init__(self, url: str, what: Soak, questions: Sequence[Question], mixed: Sequence[MixedClient]) -> None:
        self.counts, self._lock = Tallied(), threading.Lock()
        self.mixed = mixed
        self._what, self._questions = what, questions
        self._ending, self._going = threading.Event(), threading.Event()
        self._idle = [threading.Event() for _ in range(what.clients)]
        self.disturbed: list[tuple[float, float]] = []
        self._clients = [Hepti.connect(url, site=SITE, client_id=f"soak-{n}") for n in range(what.clients)]
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(what.clients)]
        for client in mixed:
            client.pause_s = what.asks_s
            client.running.clear()
        for thread in (*self._threads, *mixed):
            thread.start()

    def warm(self) -> None:
        """Ask everything once, and what one device can hold of each: plans come to want all weights everywhere."""
        alone = [q for q in self._questions if q.body.get("strategy") == "single"]
        everywhere = [replace(q, body={**q.body, "devices": [name]}) for q in alone for name in DEVICES]
        for question in [*self._questions, *everywhere]:
            self._ask(self._clients[0], question)

    def go(self) -> None:
        self._going.set()
        for client in self.mixed:
            client.resume()

    def pause(self) -> None:
        """Send nothing more, and return when nothing is under way."""
        self._going.clear()
        for client in self.mixed:
            client.pause()
        for idle in self._idle:
            assert idle.wait(2 * ANSWER_S), "a client is stuck"

    def close(self) -> None:
        self._ending.set()
        self._going.set()
        for mixed in self.mixed:
            mixed.close()
        for client in self._clients:
            client.close()  # ends what still waits
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        rng = random.Random(f"{self._what.seed} {number}")
        while not self._ending.wait(self._what.asks_s * rng.uniform(0.5, 1.5)):
            if not self._going.is_set():
                self._idle[number].set()
                self._going.wait()
                self._idle[number].clear()
                continue
            self._ask(self._clients[number], rng.choice(self._questions))

    def _ask(self, hepti: Hepti, question: Question) -> None:
        begun, error = time.monotonic(), None
        try:
            answer = hepti.infer(question.model, **question.body, timeout_s=ANSWER_S)
        except HeptiError as exc:
            error = exc
        if self._ending.is_set():
            return
        ended = time.monotonic()
        with self._lock:
            if error is None:
                if question.right(answer):
                    self.counts.right += 1
                else:
                    self.counts.wrong.append(f"{question.model} {question.body}")
            elif ended - begun >= ANSWER_S:
                self.counts.lost += 1
            else:
                self._count(begun, ended, error.code)

    def _count(self, begun: float, ended: float, code: str) -> None:
        near = any(begun < end and ended > start for start, end in self.disturbed)
        (self.counts.errors if near else self.counts.unexplained)[code] += 1

    def count_mixed(self) -> None:
        """Add what the mixed clients noted; they are stopped."""
        for tally in {id(client.tally): client.tally for client in self.mixed}.values():
            self.counts.right += tally.right
            self.counts.lost += len(tally.lost)
            self.counts.wrong += [f"{tally.wrong} of the mixed clients"] if tally.wrong else []
        for client in self.mixed:
            for failure in client.failures:
                self._count(*failure)


def questions(places: Mapping[str, Path], seed: int, each: int = 3) -> list[Question]:
    """Return requests of several lengths under every kind of pins, and their answers by the reference."""
    rng = np.random.default_rng(seed)
    out = []
    for name, place in places.items():
        with Checkpoint.open(place, name) as checkpoint:
            spec, tensors, end = checkpoint.spec, dict(checkpoint.tensors()), checkpoint.config.get("eos_token_id")
            for length in rng.integers(*LENGTHS[name], each).tolist():
                ids = rng.integers(5, 50, length).tolist()
                body: dict[str, Any] = {"ids": ids}
                if name == "gpt":
                    body["max_new_tokens"], answer = 6, np.array(_tokens(spec, tensors, ids, 6, end))
                else:
                    body["want"] = "hidden" if name == "bert" else "task"
                    shape, inputs = models.single_sequence(spec, np.array(ids, np.int32), body["want"])
                    hidden, task = models.reference(spec, tensors, inputs, shape)
                    answer = hidden if name == "bert" else task[0]
                for model, pins in PINS:
                    if model == name:
                        out.append(Question(name, {**body, **pins}, answer, TOLERANCE[pins.get("wire", "f32")]))
    return out


def _tokens(spec: Any, tensors: Any, prompt: Sequence[int], most: int, end: int | None) -> list[int]:
    ids = list(prompt)
    while len(ids) < len(prompt) + most and (len(ids) == len(prompt) or ids[-1] != end):
        shape, inputs = models.single_sequence(spec, np.array(ids, np.int32))
        ids.append(int(models.reference(spec, tensors, inputs, shape)[1].argmax()))
    return ids[len(prompt) :]


def run(what: Soak, directory: Path, say: bool = True) -> Report:
    """Run it; raises AssertionError if a process ends unexpectedly."""
    places = {name: make_model(kind, directory / name, 3, layers) for name, (kind, layers) in KINDS.items()}
    with start_broker() as broker:
        site = Site(directory, broker, places | mixed_models(directory))
        try:
            site.planner()
            with Hepti.connect(broker.url, site=SITE, client_id="watcher") as hepti:
                for name in DEVICES:
                    _start_agent(site, hepti, name)
                right = right_answers(hepti, site.models)
                mixed = mixed_clients(broker.url, start_gateway(site), right)
                load = Load(broker.url, what, questions(places, what.seed), mixed)
                try:
                    return _soak(what, site, broker, hepti, load, say)
                finally:
                    load.close()
        finally:
            site.close()


def _start_agent(site: Site, hepti: Hepti, name: str) -> None:
    """Start one that measures itself, as one that does so only later loads what measuring needs later."""
    measurement_file(site.directory, 1).unlink(missing_ok=True)
    site.agent(name, f"{MEMORY_MIB}MiB")
    poll(lambda: name in edges_of(_online(hepti)), f"{name} online", START_S)


def _online(hepti: Hepti) -> list[dict[str, Any]]:
    return [d for d in hepti.devices(wait_s=1.5) if d["status"] == "online"]


def _processes(site: Site, broker: EmbeddedBroker, hepti: Hepti) -> dict[str, Held]:
    """Return the processes of a site; an agent may hold what its budget is beside what it held when idle."""
    keeper = broker._process
    assert keeper is not None
    idle = {d["device"]: d["rss_idle_bytes"] for d in _online(hepti)}
    budget = {name: nbytes + MEMORY_MIB * MIB for name, nbytes in idle.items()}
    below = psutil.Process(keeper.pid).children()
    processes = {"broker": Held(below[0].pid if below else keeper.pid)}
    for name, process in site.running.items():
        processes[name] = Held(process.pid, budget.get(name, float("inf")))
    return processes


def _soak(what: Soak, site: Site, broker: EmbeddedBroker, hepti: Hepti, load: Load, say: bool) -> Report:
    held, lost = _processes(site, broker, hepti), dict[tuple[str, str], int]()
    rng = random.Random(what.seed)
    load.warm()
    load.go()
    _work(what.seconds * STOP_AT, what, site, held)
    wrong = _compare(hepti, load, {}, "before the stop")
    victim = rng.choice(DEVICES)
    load.disturbed.append((time.monotonic(), time.monotonic() + what.stopped_s + SETTLE_S))
    load.go()
    site.running[victim].send_signal(signal.SIGSTOP)
    if say:
        print(f"{victim} is stopped for {what.stopped_s:g} s", flush=True)
    try:
        _work(what.stopped_s, what, site, held)
    finally:
        site.running[victim].send_signal(signal.SIGCONT)
    _work(min(SETTLE_S, what.seconds * STOP_AT / 2), what, site, held)
    load.pause()
    edges = poll(lambda: _settled(hepti), "heartbeats after the stop", TELLS_S)
    for source in DEVICES:  # what was in the sockets of a connection that broke
        for target in {*DEVICES} - {source}:
            if victim in (source, target):
                lost[source, target] = max(missing(edges, source, target), 0)
    load.go()
    _work(what.seconds * (1 - STOP_AT), what, site, held)
    wrong += _compare(hepti, load, lost, "at the end")
    load.count_mixed()
    total = frames(edges_of(_online(hepti)))
    wrong += [line for name, each in held.items() for line in each.wrong(name, what.flat)]
    counts = load.counts
    wrong += [f"{counts.lost} requests were lost"] if counts.lost else []
    wrong += [f"{len(counts.wrong)} requests were answered wrongly: {counts.wrong[:3]}"] if counts.wrong else []
    wrong += [] if counts.right else ["no request was answered"]
    wrong += [f"{n} requests ended with {code} though nothing happened" for code, n in counts.unexplained.items()]
    return Report(counts, held, total, lost, wrong)


def _work(seconds: float, what: Soak, site: Site, held: Mapping[str, Held]) -> None:
    """Let the site work, and look at its processes."""
    until = time.monotonic() + seconds
    while (now := time.monotonic()) < until:
        for name, process in site.running.items():
            assert process.poll() is None, f"{name} has ended by itself: {site.log(name)[-2000:]}"
        watch(held)
        time.sleep(min(what.every_s, max(until - now, 0.0)))


def _settled(hepti: Hepti) -> Any:
    """Return the peer counters of all devices, once two heartbeats agree except for probes."""
    first, again = edges_of(_online(hepti)), edges_of(_online(hepti))
    if set(first) != set(DEVICES) or set(again) != set(DEVICES):
        return None
    return again if frames(again) - frames(first) <= 4 * len(DEVICES) else None


def _compare(hepti: Hepti, load: Load, lost: Mapping[tuple[str, str], int], when: str) -> list[str]:
    """Return the edges with different frame counts at both ends when no frame is under way."""
    load.pause()

    def equal() -> Any:
        edges = edges_of(_online(hepti))
        return len(edges) == len(DEVICES) and not unequal(edges, lost)

    try:
        poll(equal, "equal counts", TELLS_S)
    except AssertionError:
        return [f"{when}, ends count differently: {unequal(edges_of(_online(hepti)), lost)}"]
    return []


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stopped", type=float, default=Soak.stopped_s, metavar="S", help="how long a peer is stopped")
    parser.add_argument("--pause", type=float, default=Soak.asks_s, metavar="S", help="between a client's requests")
    parser.add_argument("--keep", type=Path, help="a directory for the processes' logs")
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="hepti-soak-") as temporary:
        directory = args.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        report = run(Soak(args.minutes * 60, args.seed, args.stopped, args.pause), directory)
    print(f"\nseed {args.seed}, {args.minutes:g} minutes\n{report}")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
