"""What a site's broker and planner do under a burst, behind a broker that hangs, and beside a flood of heartbeats.

`python -m benchmarks broker_load scenario=burst client=raw broker=ours`; scenario: burst, frozen or heartbeats. client:
of the burst, `raw` (plain MQTT) or `hepti` (the library). broker: `ours` (Hepti's settings) or `delivered`
(Mosquitto's). Another client asks every `every` seconds meanwhile. Everything runs on this machine, against 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import queue
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

from benchmarks.errors import BenchError
from benchmarks.tables import table
from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.cli.shared import child_processes
from hepti_mqtt.client import AsyncHepti, Hepti
from hepti_mqtt.core.errors import HeptiError
from hepti_mqtt.embedded_broker.broker import find_mosquitto, start_broker
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.transport.base import Connected
from hepti_mqtt.transport.broker_connection import BrokerConnection
from hepti_mqtt.transport.codec import Connect, encode, publish_head
from hepti_mqtt.transport.url import BrokerUrl

SITE: Final = "load"
TEXT: Final = "a warm room"
READY_S: Final = 120.0
OWN_QUEUE: Final = 5000  # messages of a plain client that wait for their acknowledgement


def main(
    scenario: str = "burst",
    client: str = "raw",
    broker: str = "ours",
    requests: int = 10_000,
    seconds: float = 90.0,
    rate: float = 3000.0,
    every: float = 1.0,
    model: str = "tiny-bert",
) -> None:
    """Run a scenario and print its figures."""
    with TemporaryDirectory(prefix="hepti-load-") as scratch, _broker(broker, Path(scratch)) as (url, process):
        directory = make_model(model, Path(scratch) / "model")
        log = Path(scratch) / "log"
        with child_processes(log) as children:
            environment = {"HEPTI_BROKER": url, "HEPTI_SITE": SITE, "HEPTI_STATE": str(Path(scratch) / "state")}
            children.start("planner", ["planner", "--model", f"m={directory}", "--no-announce"], environment)
            own = ["--id", "a", "--threads", "1", "--cache", str(Path(scratch) / "cache")]
            children.start("a", ["agent", *own], environment)
            with Hepti.connect(url, site=SITE, client_id="watch") as hepti:
                hepti.wait_ready("m", READY_S)
            other = _Other(url, every)
            other.start()
            try:
                if scenario == "burst":
                    rows = _burst(url, client, requests)
                elif scenario == "frozen":
                    rows = _frozen(url, process, seconds)
                elif scenario == "heartbeats":
                    rows = _heartbeats(url, rate, seconds)
                else:
                    raise BenchError(f"unknown scenario {scenario!r}; choose burst, frozen or heartbeats")
            finally:
                other.end()
        rows.append((f"other client, every {every:g} s", *other.figures()))
        print(f"{scenario}, {client} client, broker as {broker}\n")
        print("\n".join(table(("who", "sent", "answered", "errors", "lost", "median s", "worst s"), rows)))
        said = [line for line in log.read_text(errors="replace").splitlines() if "dropped" in line]
        print("\n".join(["", *said[-3:]]))


@contextmanager
def _broker(kind: str, scratch: Path) -> Iterator[tuple[str, int]]:
    """Give a Mosquitto with Hepti's settings, or as it is delivered: its URL and process id."""
    if kind == "ours":
        with start_broker("mosquitto") as ours:
            yield ours.url, _mosquitto_of(ours.port)
        return
    port = random.randrange(16_384, 32_768)
    conf = scratch / "delivered.conf"
    conf.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\n")
    program = find_mosquitto()
    if program is None:
        raise BenchError("mosquitto is not installed")
    process = subprocess.Popen([program, "-c", str(conf)], stderr=subprocess.DEVNULL)
    try:
        yield f"mqtt://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait()


def _mosquitto_of(port: int) -> int:
    """Return the process id of the Mosquitto that listens on a port."""
    import psutil

    for one in psutil.process_iter(["name"]):
        if one.info["name"] == "mosquitto":
            with suppress(psutil.Error):
                if any(c.laddr.port == port for c in one.net_connections("tcp") if c.status == "LISTEN"):
                    return int(one.pid)
    raise BenchError(f"no mosquitto listens on port {port}")


class _Other(threading.Thread):
    """A client of the library that asks regularly and notes how long each answer took."""

    def __init__(self, url: str, every_s: float) -> None:
        super().__init__(daemon=True)
        self._url, self._every_s, self._ending = url, every_s, threading.Event()
        self.took_s: list[float] = []
        self.errors: list[str] = []
        self.sent = 0

    def run(self) -> None:
        """Ask until `end`, each request on a thread of its own."""
        with Hepti.connect(self._url, site=SITE, client_id="other") as hepti:
            asking = []
            while not self._ending.wait(self._every_s):
                self.sent += 1
                asking.append(threading.Thread(target=self._ask, args=(hepti,)))
                asking[-1].start()
            for thread in asking:
                thread.join()

    def _ask(self, hepti: Hepti) -> None:
        begun = time.monotonic()
        try:
            hepti.infer("m", text=TEXT, timeout_s=300.0)
            self.took_s.append(time.monotonic() - begun)
        except HeptiError as error:
            self.errors.append(str(error))

    def end(self) -> None:
        """Wait for the answers."""
        self._ending.set()
        self.join()

    def figures(self) -> tuple[object, ...]:
        """Return sent, answered, errors, lost, median and worst seconds."""
        return _figures(self.sent, self.took_s, self.errors)


def _figures(sent: int, took_s: list[float], errors: list[str]) -> tuple[object, ...]:
    lost = sent - len(took_s) - len(errors)
    times = (f"{median(took_s):.3f}", f"{max(took_s):.3f}") if took_s else ("", "")
    for text in sorted(set(errors))[:3]:
        print("error:", text[:150])
    return sent, len(took_s), len(errors), lost, *times


class _Raw:
    """A plain MQTT client: publishes requests, and notes PUBACKs and answers."""

    def __init__(self, url: str, name: str) -> None:
        self.topics, self.name = Topics(SITE), name
        self.sent_at: dict[str, float] = {}
        self.acknowledged: set[str] = set()
        self.took_s: dict[str, float] = {}
        self.errors: dict[str, str] = {}
        up = threading.Event()
        self.transport = BrokerConnection(
            BrokerUrl.parse(url),
            f"raw-{name}",
            on_message=self._answered,
            on_state=lambda state: up.set() if isinstance(state, Connected) else None,
        )
        self.transport.subscribe([(self.topics.responses(name), 1)])
        self.transport.connect()
        up.wait(10.0)

    def ask(self, request: str) -> None:
        """Publish one request at QoS 1."""
        self.sent_at[request] = time.monotonic()
        payload = json.dumps({"id": request, "text": TEXT}).encode()
        while len(self.sent_at) - len(self.acknowledged) > OWN_QUEUE:
            time.sleep(0.01)
        self.transport.publish(
            self.topics.request("m", self.name), payload, 1, taken=lambda _: self.acknowledged.add(request)
        )

    def _answered(self, _topic: str, payload: bytes) -> None:
        said: dict[str, Any] = json.loads(payload)
        request = said["id"]
        if said.get("ok"):
            self.took_s[request] = time.monotonic() - self.sent_at[request]
        else:
            self.errors[request] = said["error"]["message"]

    def wait(self, quiet_s: float) -> None:
        """Wait until all acknowledged requests are answered, or nothing has come for so long."""
        last, since = -1, time.monotonic()
        while time.monotonic() - since < quiet_s:
            done = len(self.took_s) + len(self.errors)
            if done == len(self.sent_at):
                return
            if done != last:
                last, since = done, time.monotonic()
            time.sleep(0.2)

    def figures(self) -> tuple[object, ...]:
        """Return sent, answered, errors, lost, median and worst seconds."""
        return _figures(len(self.sent_at), list(self.took_s.values()), list(self.errors.values()))


def _burst(url: str, client: str, requests: int) -> list[tuple[object, ...]]:
    time.sleep(3.0)
    if client == "hepti":
        took, errors = asyncio.run(_library_burst(url, requests))
        rows: list[tuple[object, ...]] = [("burst of the library", *_figures(requests, took, errors))]
    else:
        raw = _Raw(url, "burst")
        for number in range(requests):
            raw.ask(f"r{number}")
        raw.wait(30.0)
        print(f"acknowledged: {len(raw.acknowledged)}")
        rows = [("burst of plain MQTT", *raw.figures())]
        raw.transport.close()
    time.sleep(3.0)
    return rows


async def _library_burst(url: str, requests: int) -> tuple[list[float], list[str]]:
    took: list[float] = []
    errors: list[str] = []
    async with AsyncHepti.connect(url, site=SITE, client_id="burst") as hepti:

        async def ask() -> None:
            begun = time.monotonic()
            try:
                await hepti.infer("m", text=TEXT, timeout_s=300.0)
                took.append(time.monotonic() - begun)
            except HeptiError as error:
                errors.append(str(error))

        await asyncio.gather(*(ask() for _ in range(requests)))
    return took, errors


def _frozen(url: str, process: int, seconds: float) -> list[tuple[object, ...]]:
    """Freeze the broker while a plain client asks four times a second."""
    raw = _Raw(url, "steady")
    os.kill(process, signal.SIGSTOP)
    try:
        until, number = time.monotonic() + seconds, 0
        while time.monotonic() < until:
            raw.ask(f"f{number}")
            number += 1
            time.sleep(0.25)
    finally:
        os.kill(process, signal.SIGCONT)
    raw.wait(60.0)
    rows: list[tuple[object, ...]] = [("four a second, broker frozen", *raw.figures())]
    raw.transport.close()
    return rows


def _heartbeats(url: str, rate: float, seconds: float) -> list[tuple[object, ...]]:
    """Repeat the heartbeat of the device `rate` times a second, from a process of its own."""
    spawned, topic = multiprocessing.get_context("spawn"), Topics(SITE).heartbeat("a")
    heartbeats: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    listener = BrokerConnection(
        BrokerUrl.parse(url), "listener", on_message=lambda _, p: heartbeats.put(bytes(p)), on_state=lambda _: None
    )
    listener.subscribe([(topic, 0)])
    listener.connect()
    payload = heartbeats.get(timeout=READY_S)
    listener.close()
    started, sent = spawned.Event(), spawned.Value("q")
    flood = spawned.Process(target=_flood, args=(url, topic, payload, rate, seconds, started, sent))
    flood.start()
    started.wait(READY_S)
    flood.join()
    return [(f"heartbeats, {sent.value / seconds:.0f} a second", sent.value, "", "", "", "", "")]


def _flood(url: str, topic: str, payload: bytes, rate: float, seconds: float, started: Event, sent: Any) -> None:
    broker, packet = BrokerUrl.parse(url), publish_head(topic, len(payload), 4) + payload
    with socket.create_connection((broker.host, broker.port)) as connection:
        connection.sendall(encode(Connect(4, "flood")))
        started.set()
        begun = time.monotonic()
        while (now := time.monotonic()) - begun < seconds:
            due = int(rate * (now - begun)) - sent.value
            connection.sendall(packet * due)
            sent.value += due
            time.sleep(0.005)
