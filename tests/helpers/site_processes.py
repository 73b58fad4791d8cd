"""The fake site for everything else: a real broker, planner and agents as processes, with directories of their own.

`site_load` adds clients, `faults_site` faults and `closed_broker` logins. Behaviour that needs no process is tested on
the other fake site, `swarm`, where time is virtual.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import forked
import numpy as np
import pytest
from broker_kinds import broker_of
from programs import PATIENCE_S, ROOT

from device_agent.measure import measurement_file
from hepti_mqtt import models as families
from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.client import Answer, Hepti
from hepti_mqtt.embedded_broker import EmbeddedBroker
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.service.forecast import PAUSE_S
from hepti_mqtt.service.requests import read_input
from hepti_mqtt.transport.base import Connected, State, Subscribed
from hepti_mqtt.transport.broker_connection import BrokerConnection
from hepti_mqtt.transport.url import BrokerUrl

SITE = "test"


def poll(holds: Callable[[], Any], what: str, timeout: float = PATIENCE_S, every: float = 0.02) -> Any:
    """Return what `holds` gives as soon as it is true; for what cannot be waited for otherwise."""
    until = time.monotonic() + timeout
    while not (value := holds()):
        assert time.monotonic() < until, f"{what} did not come true within {timeout} s"
        time.sleep(every)
    return value


def trust_measurement(threads: int = 1) -> None:
    """Let an agent that starts within a minute take the machine's measurement without a check.

    Beside other tests the check would often fail, and then each agent measures for seconds. `make kernels` deletes the
    measurement, so that none is older than the run.
    """
    then = time.time() + 60.0
    with suppress(OSError):  # nothing is measured yet
        os.utime(measurement_file(Path(), threads), (then, then))


def foretold(ask: Callable[[], Answer]) -> Answer:
    """Return an answer with an exact forecast: none waits for its own, but one after a pause includes it."""

    def simulated() -> Answer | None:
        answer = ask()
        return answer if answer.raw["forecast"] == "simulated" else None

    answer_with_forecast: Answer = poll(simulated, "an answer with its forecast", every=1.5 * PAUSE_S)
    return answer_with_forecast


def wait_for_plans(hepti: Hepti, models: Iterable[str], devices: Collection[str]) -> None:
    """Wait until the planner has searched a plan of each model with exactly these devices."""

    def knows_all(record: Any) -> bool:
        return {d for c in record["candidates"] for d in c["devices"]} == set(devices)

    for model in models:
        hepti.wait_ready(model, PATIENCE_S, knows_all)


def wait_online(hepti: Hepti, devices: Collection[str], timeout: float = PATIENCE_S) -> None:
    """Wait until exactly these devices are online."""

    def online() -> set[str]:
        return {d["device"] for d in hepti.devices(wait_s=0.2) if d["status"] == "online"}

    poll(lambda: online() == set(devices), "all devices online", timeout)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that nobody listens on."""
    with socket.create_server((host, 0)) as listener:
        return int(listener.getsockname()[1])


def ask_http(
    port: int, path: str, body: Any = None, headers: Mapping[str, str] | None = None, method: str = ""
) -> tuple[int, bytes]:
    """Return status and body of an HTTP request; body: bytes, or an object for JSON; None: GET."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request(
            method or ("GET" if body is None else "POST"), path, data, headers or {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def listens(port: int) -> bool:
    with socket.socket() as knock:
        return knock.connect_ex(("127.0.0.1", port)) == 0


def start_hepti(arguments: Sequence[str], **how: Any) -> subprocess.Popen[bytes]:
    """Start `hepti ARGUMENTS`; how: as for `Popen`. Long runs begin as a user does: some measure memory."""
    if forked.POSSIBLE and "tests/site/" in os.environ.get("PYTEST_CURRENT_TEST", ""):
        return forked.Forked(list(arguments), **how)
    return subprocess.Popen([sys.executable, "-m", "hepti_mqtt.cli", *arguments], **how)


def continued(
    checkpoint: Checkpoint, tensors: Mapping[str, Any], prompt: Sequence[int], most: int, ends: Collection[int | None]
) -> list[int]:
    """Return the likeliest tokens after a prompt, at most so many, by whole passes of the reference."""
    ids = list(prompt)
    while len(ids) < len(prompt) + most and (len(ids) == len(prompt) or ids[-1] not in ends):
        shape, inputs = families.single_sequence(checkpoint.spec, np.array(ids, np.int32))
        ids.append(int(families.reference(checkpoint.spec, tensors, inputs, shape)[1][-1].argmax()))
    return ids[len(prompt) :]


class Site:
    """Processes by name; their output goes to files of that name. name: of the site, where several share a broker."""

    def __init__(self, directory: Path, broker: EmbeddedBroker, models: Mapping[str, Path], name: str = SITE) -> None:
        self.directory, self.broker, self.models, self.name, self.url = directory, broker, models, name, broker.url
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def environment(self) -> dict[str, str]:
        """Of every process: the broker (its password is no argument), and directories of the test's own."""
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HEPTI_BROKER": self.url,
            "HEPTI_SITE": self.name,
            "XDG_STATE_HOME": str(self.directory / "state"),
            "XDG_CACHE_HOME": str(self.directory / "cache"),
        }

    def planner(self, *arguments: str, name: str = "planner") -> subprocess.Popen[bytes]:
        models = [a for n, d in self.models.items() for a in ("--model", f"{n}={d}")]
        return self.start(name, "planner", *models, *arguments)

    def agent(self, name: str, memory: str = "600MiB", *arguments: str, program: Sequence[str] = ()) -> None:
        trust_measurement()
        place = ("--memory", memory, "--cache", str(self.directory / f"device-{name}"))
        self.start(name, "agent", "--id", name, "--threads", "1", *place, *arguments, program=program)

    def start(self, name: str, *arguments: str, program: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """Start `hepti ARGUMENTS`; program: a command that is run in its place."""
        how = {"stdin": subprocess.DEVNULL, "env": self.environment, "cwd": self.directory}
        with (self.directory / f"{name}.log").open("ab") as log:
            if program:
                process = subprocess.Popen([*program, *arguments], stdout=log, stderr=log, **how)
            else:
                process = start_hepti(arguments, stdout=log, stderr=log, **how)
        self.running[name] = process
        return process

    def serve(self, command: str, *arguments: str, name: str = "") -> int:
        """Start a service with a port of its own; return the port when it listens."""
        port = free_port()
        self.start(name or command, command, "--port", str(port), *arguments)
        poll(lambda: listens(port), f"the start of {command}")
        return port

    def reference(self, model: str, part: str = "", **request: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the hidden states and the output of a request by the reference; part: of a model of several."""
        with Checkpoint.open(self.models[model], model, part or None) as checkpoint:
            read = read_input(checkpoint, request)
            return families.reference(checkpoint.spec, checkpoint.tensors(), read.inputs, read.shape)

    def continued(self, model: str, prompt: Sequence[int], most: int) -> list[int]:
        """Return the likeliest tokens after a prompt, up to the model's end, by whole passes of the reference."""
        with Checkpoint.open(self.models[model], model) as checkpoint:
            return continued(checkpoint, checkpoint.tensors(), prompt, most, {checkpoint.config.get("eos_token_id")})

    def kill(self, name: str) -> None:
        """Pull the plug: no farewell."""
        process = self.running.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE_S)

    def stop(self, name: str, within_s: float = PATIENCE_S) -> int:
        """End a process politely; return its exit code."""
        process = self.running[name]
        process.terminate()
        code = process.wait(within_s)
        del self.running[name]
        return code

    def tiles(self, name: str) -> dict[str, Path]:
        """Return the files of a device's tile cache, by SHA-256."""
        files = (self.directory / f"device-{name}").rglob("tiles/??/*")
        return {file.name: file for file in files if len(file.name) == 64}

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def close(self) -> None:
        for name in list(self.running):
            self.kill(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def running_site(
    directory: Path,
    models: Mapping[str, Path],
    agents: Mapping[str, str],
    *,
    kind: str | None = None,
    planner: tuple[str, ...] = (),
    **how: Any,
) -> Iterator[Site]:
    """Yield a site with a planner and agents (memory by name).

    kind: of the broker, skipped where it cannot be had. planner: further arguments of it. how: options of the broker.
    """
    with broker_of(kind, **how) as broker, Site(directory, broker, models) as site:
        site.planner(*planner)
        for name, memory in agents.items():
            site.agent(name, memory)
        yield site


def site_of(kinds: Mapping[str, str | tuple[str, int]], agents: Mapping[str, str], seed: int = 3, **how: Any) -> Any:
    """Return a fixture: a running site of seeded models (by name their kind, or kind and layers); how: its options."""

    @pytest.fixture(scope="module")
    def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
        directory, models = tmp_path_factory.mktemp("site"), {}
        for name, kind in kinds.items():
            kind, layers = (kind, None) if isinstance(kind, str) else kind
            models[name] = make_model(kind, directory / f"model-{name}", seed, layers)
        yield from running_site(directory, models, agents, **how)
        for path in models.values():
            shutil.rmtree(path, ignore_errors=True)

    return site


def client_of(*models: str, online: bool = False) -> Any:
    """Return a fixture: a client of the fixture `site`, which has searched plans of models (all) on all its agents.

    online: the agents are online, whatever plans have been searched. Of three agents no plan may have all.
    """

    @pytest.fixture(scope="module")
    def hepti(site: Site) -> Iterator[Hepti]:
        with Hepti.connect(site.url, site=site.name, client_id="tester") as client:
            agents = site.running.keys() - {"planner"}
            wait_online(client, agents) if online else wait_for_plans(client, models or site.models, agents)
            yield client

    return hepti


class Voice:
    """A raw MQTT client: keeps the messages and states that it hears, and publishes; raises the broker's refusal.

    raw: with the client id as it is. make: the class of the connection, to which `options` go.
    """

    def __init__(
        self,
        url: str | BrokerUrl,
        *topics: str,
        client_id: str = "",
        raw: bool = False,
        connect: bool = True,
        make: Callable[..., Any] = BrokerConnection,
        **options: Any,
    ) -> None:
        self.heard: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self.states: queue.SimpleQueue[State] = queue.SimpleQueue()
        self.url = url if isinstance(url, BrokerUrl) else BrokerUrl.parse(url)
        name = client_id or f"test-{uuid.uuid4().hex[:12]}"
        self.transport = make(self.url, name, on_message=self.hear, on_state=self.states.put, **options)
        if raw:
            self.transport.client_id = client_id
        if not connect:
            return
        try:
            self.transport.connect(PATIENCE_S)
            self.connected = self.state_of(Connected)
            if topics:
                self.read(*topics)
        except BaseException:
            self.close(0.2)
            raise

    def hear(self, topic: str, payload: bytes) -> None:
        self.heard.put((topic, bytes(payload)))

    def say(self, topic: str, payload: bytes, retain: bool = False) -> None:
        self.transport.publish(topic, payload, 1, retain)

    def next(self, topic: str | None = None) -> tuple[str, bytes]:
        """Return the next message, of one topic or of any."""
        while (message := self.heard.get(timeout=PATIENCE_S))[0] != topic and topic is not None:
            pass
        return message

    def state_of(self, kind: type[Any]) -> Any:
        """Return the next state of a kind."""
        while not isinstance(state := self.states.get(timeout=PATIENCE_S), kind):
            pass
        return state

    def read(self, *filters: str, qos: int = 1) -> Subscribed:
        """Subscribe, and return when that is acknowledged."""
        self.transport.subscribe([(name, qos) for name in filters])
        return self.state_of(Subscribed)

    def close(self, timeout_s: float = 2.0) -> None:
        self.transport.close(timeout_s=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def retain(url: str | BrokerUrl, topics: Iterable[str], payload: bytes = b"x") -> None:
    """Publish retained messages; return when the broker has acknowledged them."""
    with Voice(url) as voice:
        for topic in topics:
            voice.say(topic, payload, retain=True)
        voice.close(PATIENCE_S)


class User(Voice):
    """Someone with an MQTT client and no library of ours."""

    def __init__(self, url: str, name: str = "someone", site: str = SITE) -> None:
        self.name, self.topics = name, Topics(site)
        self.answers: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        super().__init__(url, self.topics.responses(name).removesuffix("+") + "#")

    def hear(self, topic: str, payload: bytes) -> None:
        self.answers.put((topic, json.loads(payload)))

    def send(self, model: str, payload: bytes | Mapping[str, Any], **how: Any) -> None:
        raw = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        self.transport.publish(self.topics.request(model, self.name), raw, 1, **how)

    def is_read(self, model: str, payload: Mapping[str, Any]) -> bool:
        """Send a request; return whether the broker has a reader for it."""
        taken = queue.SimpleQueue[bool]()
        self.send(model, payload, taken=taken.put)
        return taken.get(timeout=PATIENCE_S)

    def ask(self, model: str, payload: bytes | Mapping[str, Any]) -> tuple[str, Any]:
        """Send a request; return topic and JSON of the next answer."""
        self.send(model, payload)
        return self.answers.get(timeout=PATIENCE_S)
