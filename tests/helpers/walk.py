"""Which functions of the planner a request passes, from its MQTT message to its answer, and a token of a chat.

`python tests/helpers/walk.py` prints them; `--all` with their names, by file.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

from swarm import Swarm

import hepti_mqtt
from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.config.options import PlannerOptions
from hepti_mqtt.ids import Start
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.runtime.machinery import Publish
from hepti_mqtt.service import planner
from hepti_mqtt.service.handler import OpenModel
from hepti_mqtt.service.setup import PlannerConfig
from hepti_mqtt.transport.base import Delivery, Receipt
from hepti_mqtt.transport.url import BrokerUrl

PACKAGE = str(Path(hepti_mqtt.__file__).parent)
MODEL = "m"


class Walk:
    """The functions that ran, by file; a comprehension counts with the function that it is in."""

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the functions of the package that run on this thread."""

        def note(frame: FrameType, event: str, _argument: object) -> None:
            code = frame.f_code
            if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
                self.calls[code] += 1

        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)

    @property
    def functions(self) -> dict[str, list[str]]:
        """Return the names of the functions by file."""
        by_file: dict[str, list[str]] = {}
        for code in self.calls:
            by_file.setdefault(code.co_filename.removeprefix(PACKAGE + "/"), []).append(code.co_qualname)
        return {file: sorted(names) for file, names in sorted(by_file.items())}

    @property
    def size(self) -> tuple[int, int]:
        """Return how many functions and files there are."""
        return len(self.calls), len(self.functions)


class Inline:
    """An executor that runs each task at once."""

    idle = True

    def submit(self, _client: str, act: Callable[[], None], *_limits: object) -> None:
        act()

    def submit_or_run(self, _client: str, act: Callable[[], None], _here: bool = False) -> None:
        act()

    def close_task(self, _client: str) -> None:
        """Do nothing: no task stays open."""


class WalkedSite(Swarm):
    """A planner process without connections, with devices of the swarm; it records MQTT messages for it."""

    def __init__(self, directory: Path, kind: str) -> None:
        path = make_model(kind, directory / MODEL, seed=1)
        self.checkpoint = Checkpoint.open(path, MODEL)
        config = PlannerConfig(
            BrokerUrl("127.0.0.1", 1),
            "home",
            PlannerOptions({MODEL: path}, home_assistant=None),
            state_dir=directory / "state",
        )
        self.process = planner._Planner(config, Start(1, 7), {MODEL: OpenModel(MODEL, self.checkpoint, Pins())})
        for name in ("reading", "answering", "refusing", "searching", "hurried"):
            setattr(self.process, name, Inline())
        self.process.control.publish = self._published
        self.process.channel._requests.acknowledge = lambda _receipt: None
        self.replies: list[dict[str, Any]] = []
        self.recorder: Walk | None = None
        spec, self.now = self.checkpoint.spec, 0.0
        planner.time = SimpleNamespace(monotonic=lambda: self.now, time=time.time)  # type: ignore[attr-defined]
        super().__init__(spec, dict(self.checkpoint.tensors()), {"a": (1e9, 1 << 30)})
        self.run(30, until=lambda: self.process.session.active_plan(MODEL) is not None)

    def _published(self, topic: str, payload: bytes, qos: int = 1, retain: bool = False, taken: Any = None) -> None:
        if "/res/" in topic:
            self.replies.append(json.loads(payload))
        elif "/work/" in topic or topic.endswith("/cmd"):
            self.after(0.0, lambda: Swarm._planner_command(self, Publish(topic, payload, qos)))
        if taken is not None:
            taken(True)

    def tell_planner(self, event: interface.CoordinatorEvent) -> None:
        self.planner = self.process.session
        self.process._handle(event)
        self._drain()

    def _drain(self) -> None:
        while not self.process.inbox.empty():
            item = self.process.inbox.get()
            self.process._run_guarded(item) if callable(item) else self.process._handle(item)

    def _host_publish(self, name: str, publish: Publish) -> None:
        payload = publish.joined_payload
        self.after(1e-4, lambda: self._received(lambda: self.process._handle_message(publish.topic, payload)))

    def _received(self, receive: Callable[[], None]) -> None:
        if self.recorder is None:
            receive()
            self._drain()
            return
        with self.recorder.recorded():
            receive()
            self._drain()

    def ask(self, body: dict[str, Any]) -> None:
        """Let a request come by MQTT."""
        topic = self.process.topics.request(MODEL, "me")
        delivery = Delivery(topic, json.dumps(body).encode(), Receipt(1, len(self.replies) + 1), repeated=False)
        self._received(lambda: self.process.channel.handle_delivery(delivery))

    def answer(self) -> dict[str, Any]:
        """Let the site work until the answer is there."""
        self.run(60, until=lambda: bool(self.replies) and "ok" in self.replies[-1])
        return self.replies.pop()

    def close(self) -> None:
        planner.time = time  # type: ignore[attr-defined]
        self.process.control.close()
        self.process.channel.close()
        self.process.bulk.close()
        self.checkpoint.close()


def request_walk(directory: Path) -> Walk:
    """Return the walk of a request for an embedding, after one like it."""
    site = WalkedSite(directory, "tiny-minilm")
    try:
        for walk in (None, Walk()):
            site.recorder = walk
            site.ask({"ids": [5, 6, 7]})
            assert site.answer()["ok"], site.replies
        assert walk is not None
        return walk
    finally:
        site.close()


def token_walk(directory: Path, most: int = 12) -> Walk:
    """Return the walk of one token in the middle of a chat: from the device's frame to the token's message."""
    site = WalkedSite(directory, "tiny-llama")
    try:
        site.ask({"ids": [5, 6, 7], "max_new_tokens": most})
        site.run(60, until=lambda: len(site.replies) >= most // 2)
        walk = site.recorder = Walk()
        count = len(site.replies)
        site.run(60, until=lambda: len(site.replies) > count)
        site.recorder = None
        assert site.answer()["ok"], site.replies
        return walk
    finally:
        site.close()


def main() -> None:
    for name, walked in (("request", request_walk), ("token", token_walk)):
        with tempfile.TemporaryDirectory(prefix="hepti-walk-") as directory:
            walk = walked(Path(directory))
        print(f"{name}: {walk.size[0]} functions in {walk.size[1]} files")
        if "--all" in sys.argv:
            for file, names in walk.functions.items():
                print(f"  {file}: {', '.join(names)}")


if __name__ == "__main__":
    main()
