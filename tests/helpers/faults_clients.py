"""Clients that ask all the time and write down what becomes of each request."""

from __future__ import annotations

import json
import random
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paho.mqtt.client as paho
from numpy.typing import NDArray
from site_processes import SITE

from hepti_mqtt.client import Answer, Hepti
from hepti_mqtt.errors import HeptiError
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.transport.url import BrokerUrl

MODEL = "model"
TOLERANCE = 5e-4
RECONNECT_S = (0.1, 0.5)


@dataclass(frozen=True)
class Question:
    """Token ids, and a model's right answer to them."""

    ids: tuple[int, ...]
    embedding: NDArray[np.float32]
    model: str = MODEL

    def right(self, embedding: Any) -> bool:
        """Return whether an embedding is the right one."""
        return np.allclose(np.asarray(embedding, np.float32), self.embedding, atol=TOLERANCE)


@dataclass
class Tally:
    """What became of the requests of one kind of clients; times of right answers by model, by time.monotonic()."""

    sent: int = 0
    right: int = 0
    wrong: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    repeated: int = 0
    unmarked: int = 0
    answered_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    lost: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, question: Question, embedding: Any) -> None:
        """Count a first answer."""
        now = time.monotonic()
        with self.lock:
            if question.right(embedding):
                self.right += 1
                self.answered_s[question.model].append(now)
            else:
                self.wrong += 1

    def failed(self, code: str) -> None:
        """Count an error."""
        with self.lock:
            self.errors[code] = self.errors.get(code, 0) + 1


class Asker(threading.Thread):
    """Sends a question now and then, until stopped."""

    def __init__(self, name: str, questions: Sequence[Question], every_s: float, tally: Tally) -> None:
        super().__init__(name=name, daemon=True)
        self.questions, self.every_s, self.tally = questions, every_s, tally
        self.random = random.Random(name)
        self.stopping = threading.Event()

    def run(self) -> None:
        while not self.stopping.wait(self.every_s * self.random.uniform(0.5, 1.5)):
            self.ask(self.random.choice(self.questions))
            with self.tally.lock:
                self.tally.sent += 1

    def ask(self, question: Question) -> None:
        raise NotImplementedError

    def outstanding(self) -> dict[str, float]:
        """Return the requests without an end, and when they were sent by time.monotonic()."""
        raise NotImplementedError


class RawClient(Asker):
    """Plain MQTT at QoS 1 with a session that outlives its connection: no library of Hepti's, no request sent twice."""

    def __init__(self, url: str, name: str, questions: Sequence[Question], every_s: float, tally: Tally) -> None:
        super().__init__(name, questions, every_s, tally)
        self.topics = Topics(SITE)
        self.waiting: dict[str, tuple[Question, float]] = {}
        place = BrokerUrl.parse(url)
        self.client = paho.Client(paho.CallbackAPIVersion.VERSION2, f"raw-{name}", clean_session=False)
        self.client.reconnect_delay_set(*RECONNECT_S)
        self.client.max_queued_messages_set(0)
        self.client.on_connect = self._connected
        self.client.on_message = self._heard
        self.client.connect(place.host, place.port, keepalive=10)
        self.client.loop_start()

    def ask(self, question: Question) -> None:
        name = uuid.uuid4().hex
        with self.tally.lock:
            self.waiting[name] = question, time.monotonic()
        body = json.dumps({"id": name, "ids": question.ids})
        self.client.publish(self.topics.request(question.model, self.name), body, 1)

    def outstanding(self) -> dict[str, float]:
        with self.tally.lock:
            return {name: asked_s for name, (_, asked_s) in self.waiting.items()}

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()

    def _connected(self, client: paho.Client, *_: Any) -> None:
        client.subscribe(self.topics.responses(self.name), 1)

    def _heard(self, _client: paho.Client, _data: Any, message: paho.MQTTMessage) -> None:
        answer = json.loads(message.payload)
        with self.tally.lock:
            request = self.waiting.pop(answer["id"], None)
            if request is None:
                marked = message.dup or answer.get("repeated", False)
                self.tally.repeated += marked
                self.tally.unmarked += not marked
                return
            question, _ = request
        if answer["ok"]:
            self.tally.take(question, answer["result"]["embedding"])
        else:
            self.tally.failed(answer["error"]["code"])


class LibraryClient(Asker):
    """The Python client, which sends again what it has no answer to."""

    def __init__(self, url: str, name: str, questions: Sequence[Question], every_s: float, tally: Tally) -> None:
        super().__init__(name, questions, every_s, tally)
        self.hepti = Hepti.connect(url, site=SITE, client_id=name)
        self.waiting: dict[str, float] = {}

    def ask(self, question: Question) -> None:
        name = uuid.uuid4().hex
        with self.tally.lock:
            self.waiting[name] = time.monotonic()
        future = self.hepti.submit(question.model, request_id=name, ids=list(question.ids))
        future.add_done_callback(lambda done: self._done(name, question, done))

    def outstanding(self) -> dict[str, float]:
        with self.tally.lock:
            return dict(self.waiting)

    def close(self) -> None:
        self.hepti.close()

    def _done(self, name: str, question: Question, future: Any) -> None:
        with self.tally.lock:
            if name not in self.waiting:
                return
            del self.waiting[name]
        error = future.exception()
        if error is None:
            answer: Answer = future.result()
            self.tally.take(question, answer.embedding)
        else:
            self.tally.failed(error.code if isinstance(error, HeptiError) else type(error).__name__)
