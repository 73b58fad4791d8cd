"""Load for a site of real processes: clients send requests all the time and compare the answers with the reference.

By MQTT with and without Hepti's library, streamed by MQTT and by HTTP, and speech. A client notes the end of each
request, and the times without a token, an answer or an error.
"""

from __future__ import annotations

import http.client
import io
import json
import random
import threading
import time
import uuid
import wave
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paho.mqtt.client as paho
from numpy.typing import NDArray
from site_processes import SITE, continued

from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint, make, make_model
from hepti_mqtt.client import Answer, Hepti
from hepti_mqtt.core.errors import HeptiError
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.service.requests import read_input
from hepti_mqtt.transport.url import BrokerUrl

CHAT, SPEECH = "chat", "speech"
CHATS = 12  # different prompts
CONVERSATIONS, TURNS = 40, 4
NEW_TOKENS = 24
VOCAB, LONGEST = 211, 256  # of the chat model
ENDS = 20  # tokens that end a text: most turns end before NEW_TOKENS, with steps ordered ahead
DEVICES = ("a", "b", "c")
PINNED = {"bert": ("tiny-bert", None), "words": ("minilm", 2), "gpt": ("tiny-gpt2", None)}  # with so many layers
LENGTHS = {"bert": (4, 30), "words": (4, 120), "gpt": (4, 30)}
TOLERANCE = {"f32": 5e-4, "f16": 2e-2, "i8": 0.3}
ROW = {"strategy": "row", "options": {"variant": "kv"}, "route": "mesh"}
PINS: Sequence[tuple[str, Mapping[str, Any]]] = (
    *(("bert", {**ROW, "devices": list(DEVICES), "wire": wire}) for wire in TOLERANCE),
    ("bert", {"strategy": "megatron", "devices": ["b", "c"], "route": "mesh"}),
    ("words", {**ROW, "devices": ["a", "c"]}),
    ("words", {"strategy": "single", "devices": ["b"]}),  # so that all hold its weights before a plan moves
    ("words", {}),
    ("gpt", {"strategy": "decoder", "devices": ["a", "b"], "route": "mesh"}),
)
WORDS = ("the", "a", "room", "door", "light", "warm", "cold", "camera", "in", "is")
SILENT_S = 10.0  # the longest silence that is allowed while the broker is there
BROKER_S = 5.0  # after a fault of the broker, in which a silence is the broker's
LOST_S = 120.0  # a request without an end by then is lost
RECONNECT_S = (0.1, 0.5)
RATE = 16_000
RIGHT, WRONG, LOST = "", "wrong", "lost"


# ----------------------------------------------------------------------------------------------------------------------
# Requests, and their answers by the reference.


@dataclass(frozen=True)
class Question:
    """A request and its right answer: hidden states, an embedding, or tokens."""

    model: str
    body: Mapping[str, Any]
    answer: NDArray[Any]
    atol: float = 5e-4

    def is_right(self, answer: Answer) -> bool:
        """Return whether an answer is the right one."""
        if "max_new_tokens" in self.body:
            return list(answer.result["ids"]) == self.answer.tolist()
        array = answer.hidden if self.body.get("want") == "hidden" else answer.embedding
        return array.shape == self.answer.shape and bool(np.allclose(array, self.answer, atol=self.atol))


@dataclass(frozen=True)
class Chat:
    """The ids of a prompt, the tokens that the reference continues it with, and both as text."""

    ids: tuple[int, ...]
    tokens: tuple[int, ...]
    prompt: str = ""
    text: str = ""


@dataclass(frozen=True)
class Right:
    """The right answers. transcript: of `RECORDING`, from an undisturbed request."""

    conversations: Sequence[Sequence[Chat]]
    chats: Sequence[Chat]
    transcript: str


def encoded(path: Path, bodies: Iterable[Mapping[str, Any]], model: str) -> list[Question]:
    """Return requests to an encoder with the answers of the reference."""
    out = []
    with Checkpoint.open(path, model) as checkpoint:
        tensors = dict(checkpoint.tensors())
        for body in bodies:
            prepared = read_input(checkpoint, dict(body))
            hidden, output = models.reference(checkpoint.spec, tensors, prepared.inputs, prepared.shape)
            out.append(Question(model, body, hidden if body.get("want") == "hidden" else output[0]))
    return out


SAMPLES = np.random.default_rng(3).integers(-9000, 9000, 4000, np.int16)


def _recording() -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(SAMPLES.tobytes())
    return out.getvalue()


RECORDING = _recording()


def mixed_models(directory: Path, seed: int = 3) -> dict[str, Path]:
    """Write the checkpoints that the mixed clients talk to; return their directories by name."""
    kind = make.KINDS["tiny-llama"]
    config = {**kind.config, "max_position_embeddings": LONGEST, "rope_scaling": None}
    make.KINDS[CHAT] = replace(kind, config=config)
    try:
        path = make_model(CHAT, directory / CHAT, seed)
    finally:
        del make.KINDS[CHAT]
    ends = random.Random(seed).sample(range(VOCAB), ENDS)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return {CHAT: path, SPEECH: make_model("tiny-whisper", directory / SPEECH, seed)}


def right_answers(hepti: Hepti, places: Mapping[str, Path], seed: int = 5) -> Right:
    """Return the mixed clients' answers; raises AssertionError if the undisturbed site differs from the reference."""
    rng, chats, talks = random.Random(seed), [], []
    ends = set(json.loads((places[CHAT] / "generation_config.json").read_text())["eos_token_id"])
    with Checkpoint.open(places[CHAT], CHAT) as checkpoint:
        tensors = dict(checkpoint.tensors())
        for _ in range(CHATS):
            words = " ".join(rng.choices(WORDS, k=rng.randint(4, 20)))
            prompt = tuple(checkpoint.tokenizer.encode(words).ids)
            tokens = tuple(continued(checkpoint, tensors, prompt, NEW_TOKENS, ends))
            result = hepti.infer(CHAT, ids=list(prompt), max_new_tokens=NEW_TOKENS, timeout_s=LOST_S).result
            assert tuple(result["ids"]) == tokens, (prompt, result["ids"], tokens)
            chats.append(Chat(prompt, tokens, words, result["text"]))
        for _ in range(CONVERSATIONS):
            talks.append(list[Chat]())
            ids = [rng.randrange(VOCAB) for _ in range(rng.randint(18, 40))]
            for _ in range(TURNS):
                tokens = tuple(continued(checkpoint, tensors, ids, NEW_TOKENS, ends))
                talks[-1].append(Chat(tuple(ids), tokens))
                ids = [*ids, *tokens[: rng.randint(0, len(tokens))]]
                ids += [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
    speech = hepti.infer(SPEECH, audio=RECORDING, language="en", temperature=0, timeout_s=LOST_S)
    return Right(talks, chats, speech.result["text"])


def pinned_models(directory: Path) -> dict[str, Path]:
    """Write the checkpoints of pinned requests; return their directories by name."""
    return {name: make_model(kind, directory / name, 3, layers) for name, (kind, layers) in PINNED.items()}


def pinned_questions(places: Mapping[str, Path], seed: int, each: int = 3) -> list[Question]:
    """Return requests of several lengths under every kind of pins, and their answers by the reference."""
    rng, out = np.random.default_rng(seed), list[Question]()
    for name in PINNED:
        prompts = [rng.integers(5, 50, n).tolist() for n in rng.integers(*LENGTHS[name], each).tolist()]
        if name == "gpt":
            with Checkpoint.open(places[name], name) as checkpoint:
                tensors, ends = dict(checkpoint.tensors()), {checkpoint.config.get("eos_token_id")}
                answers = [np.array(continued(checkpoint, tensors, ids, 6, ends)) for ids in prompts]
            bodies = [{"ids": ids, "max_new_tokens": 6} for ids in prompts]
            plain = [Question(name, body, answer) for body, answer in zip(bodies, answers, strict=True)]
        else:
            want = "hidden" if name == "bert" else "task"
            plain = encoded(places[name], [{"ids": ids, "want": want} for ids in prompts], name)
        for pins in (pins for model, pins in PINS if model == name):
            atol = TOLERANCE[pins.get("wire", "f32")]
            out += [replace(q, body={**q.body, **pins}, atol=atol) for q in plain]
    return out


# ----------------------------------------------------------------------------------------------------------------------
# Clients.


class WrongAnswer(Exception):
    """An answer, or a part of one, differs from the right one."""


class Refused(Exception):
    """A request ended with an error that says what failed."""


class Outcome(NamedTuple):
    """The end of a request; code: RIGHT, WRONG, LOST, or of an error. By time.monotonic()."""

    begun_s: float
    ended_s: float
    code: str
    model: str = ""
    text: str = ""


def counts(clients: Iterable[Client]) -> Counter[str]:
    """Return the number of requests by their ends."""
    return Counter(outcome.code for client in clients for outcome in client.outcomes)


def texts(clients: Iterable[Client], *codes: str) -> list[str]:
    """Return what clients noted of requests with these ends."""
    return [f"{c.name}: {o.text}" for c in clients for o in c.outcomes if o.code in codes]


class Client(threading.Thread):
    """Sends one request after the other until it is closed; `pause` returns after the request under way.

    silences: (start, end) by time.monotonic() of times without an event.
    """

    kind = ""

    def __init__(self, name: str, pause_s: float = 0.1) -> None:
        super().__init__(name=name, daemon=True)
        self.pause_s, self.model = pause_s, ""
        self.outcomes, self.silences = list[Outcome](), list[tuple[float, float]]()
        self.random = random.Random(name)
        self.stopping, self.running, self.idle = threading.Event(), threading.Event(), threading.Event()
        self.running.set()

    def run(self) -> None:
        while not self.stopping.wait(self.pause_s * self.random.uniform(0.5, 1.5)):
            if not self.running.is_set():
                self.idle.set()
                self.running.wait()
                self.idle.clear()
                continue
            self.send()

    def pause(self) -> None:
        """Send nothing more, and return when no request is under way."""
        self.running.clear()
        assert self.idle.wait(2 * LOST_S), f"{self.name} is stuck"

    def stop(self) -> None:
        """Stop after the request under way."""
        self.stopping.set()
        self.running.set()
        if self.is_alive():
            self.join()

    def close(self) -> None:
        """Stop, and leave the site."""
        self.stop()

    def longest(self, broken_s: Sequence[float]) -> tuple[float, bool]:
        """Return the seconds of the longest silence, and whether the broker failed shortly before it or in it."""
        spans = [(end - start, any(start - BROKER_S < at < end for at in broken_s)) for start, end in self.silences]
        return max(spans, key=lambda span: (span[0] > SILENT_S and not span[1], span[0]), default=(0.0, False))

    def trouble(self) -> float:
        """Return the longest time from the first of several failures to the next right answer."""
        longest, since = 0.0, None
        for outcome in self.outcomes:
            if outcome.code != RIGHT:
                since = outcome.ended_s if since is None else since
            elif since is not None:
                longest, since = max(longest, outcome.ended_s - since), None
        return longest

    def events(self) -> Iterator[None]:
        """Send a request; yield at each token. Raises Refused, HeptiError, OSError, WrongAnswer."""
        raise NotImplementedError

    def send(self) -> None:
        """Send a request and note its events and its end."""
        begun = last = time.monotonic()
        code, text = RIGHT, ""
        try:
            for _ in self.events():
                last = self._event(last)
        except WrongAnswer as error:
            code, text = WRONG, str(error)
        except HeptiError as error:
            code, text = error.code, str(error)
        except (Refused, OSError, http.client.HTTPException) as error:
            code, text = type(error).__name__, str(error)
        now = self._event(last)
        if code not in (RIGHT, WRONG) and now - begun >= LOST_S:
            code, text = LOST, f"{code} after {now - begun:.0f} s"
        self.outcomes.append(Outcome(begun, now, code, self.model, text))

    def _event(self, last: float) -> float:
        now = time.monotonic()
        self.silences.append((last, now))
        return now


class LibraryClient(Client):
    """Requests through the Python client."""

    kind = "library"

    def __init__(self, url: str, name: str, questions: Sequence[Question] = (), pause_s: float = 0.1) -> None:
        super().__init__(name, pause_s)
        self.questions = questions
        self.hepti = Hepti.connect(url, site=SITE, client_id=name)

    def events(self) -> Iterator[None]:
        question = self.random.choice(self.questions)
        self.model = question.model
        yield from self.ask(question)

    def ask(self, question: Question) -> Iterator[None]:
        """Send one request."""
        answer = self.hepti.infer(question.model, **question.body, timeout_s=LOST_S)
        if not question.is_right(answer):
            raise WrongAnswer(f"{question.model} {question.body}")
        yield

    def close(self) -> None:
        super().close()
        self.hepti.close()


class PinnedClient(LibraryClient):
    """Requests for certain methods and devices: they wait or fail while one of the devices is away."""

    kind = "pinned"


class Submitter(Client):
    """Sends a request now and then, and does not wait for answers."""

    def __init__(self, name: str, questions: Sequence[Question], pause_s: float) -> None:
        super().__init__(name, pause_s)
        self.questions = questions
        self.repeated = self.unmarked = 0
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[Question, float]] = {}

    def send(self) -> None:
        name, question = uuid.uuid4().hex, self.random.choice(self.questions)
        with self._lock:
            self._waiting[name] = question, time.monotonic()
        self.submit(name, question)

    def submit(self, name: str, question: Question) -> None:
        """Send a request under this id."""
        raise NotImplementedError

    def ended(self, name: str, answer: Answer | None, code: str = "", is_marked: bool = False) -> None:
        """Note an answer or the code of an error; is_marked: as a repetition."""
        with self._lock:
            request = self._waiting.pop(name, None)
            if request is None:
                self.repeated += is_marked
                self.unmarked += not is_marked
                return
        question, begun = request
        if answer is not None:
            code = RIGHT if question.is_right(answer) else WRONG
        self.outcomes.append(Outcome(begun, time.monotonic(), code, question.model, f"{question.body}"))

    @property
    def outstanding(self) -> bool:
        """Whether a request has no end."""
        return bool(self._waiting)

    def give_up(self, start_s: float) -> None:
        """Note requests without an end as lost; start_s: of the run."""
        for name, (question, sent_s) in self._waiting.items():
            text = f"{name}, sent at {sent_s - start_s:.1f} s"
            self.outcomes.append(Outcome(sent_s, time.monotonic(), LOST, question.model, text))
        self._waiting.clear()


class RawSubmitter(Submitter):
    """Plain MQTT at QoS 1 with a session that outlives its connection: no library of Hepti's, no request sent twice."""

    kind = "raw MQTT"

    def __init__(self, url: str, name: str, questions: Sequence[Question], pause_s: float) -> None:
        super().__init__(name, questions, pause_s)
        self.topics, place = Topics(SITE), BrokerUrl.parse(url)
        self.client = paho.Client(paho.CallbackAPIVersion.VERSION2, f"raw-{name}", clean_session=False)
        self.client.reconnect_delay_set(*RECONNECT_S)
        self.client.max_queued_messages_set(0)
        self.client.on_connect = lambda client, *_: client.subscribe(self.topics.responses(name), 1)
        self.client.on_message = self._heard
        self.client.connect(place.host, place.port, keepalive=10)
        self.client.loop_start()

    def submit(self, name: str, question: Question) -> None:
        body = json.dumps({"id": name, **question.body})
        self.client.publish(self.topics.request(question.model, self.name), body, 1)

    def close(self) -> None:
        super().close()
        self.client.disconnect()
        self.client.loop_stop()

    def _heard(self, _client: paho.Client, _data: Any, message: paho.MQTTMessage) -> None:
        answer = json.loads(message.payload)
        is_marked = message.dup or answer.get("repeated", False)
        if answer["ok"]:
            self.ended(answer["id"], Answer(answer, 0.0), is_marked=is_marked)
        else:
            self.ended(answer["id"], None, answer["error"]["code"], is_marked)


class LibrarySubmitter(Submitter):
    """The Python client, which sends again what it has no answer to."""

    kind = "library"

    def __init__(self, url: str, name: str, questions: Sequence[Question], pause_s: float) -> None:
        super().__init__(name, questions, pause_s)
        self.hepti = Hepti.connect(url, site=SITE, client_id=name)

    def submit(self, name: str, question: Question) -> None:
        future = self.hepti.submit(question.model, request_id=name, **question.body)
        future.add_done_callback(lambda done: self._done(name, done))

    def close(self) -> None:
        super().close()
        self.hepti.close()

    def _done(self, name: str, future: Any) -> None:
        error = future.exception()
        if error is None:
            self.ended(name, future.result())
        elif name in self._waiting:
            self.ended(name, None, getattr(error, "code", type(error).__name__))


class MqttChats(LibraryClient):
    """Streamed turns of conversations through the Python client, a third cancelled midway.

    Each turn begins like the one before and takes its KV cache over. ways: pins, of which a conversation has one.
    """

    kind = "chats by MQTT"

    def __init__(
        self, url: str, name: str, right: Right, ways: Sequence[Mapping[str, Any]] = ({},), pause_s: float = 0.1
    ) -> None:
        super().__init__(url, name, pause_s=pause_s)
        self.conversations, self.ways, self.model = right.conversations, ways, CHAT
        self.cancelled = 0
        self.turns: Iterator[Chat] = iter(())
        self.pins: Mapping[str, Any] = {}

    def events(self) -> Iterator[None]:
        if (chat := next(self.turns, None)) is None:
            self.turns, self.pins = iter(self.random.choice(self.conversations)), self.random.choice(self.ways)
            chat = next(self.turns)
        stop = self.random.randint(1, len(chat.tokens)) if self.random.random() < 0.3 else None
        tokens = list[int]()
        options = {"max_new_tokens": NEW_TOKENS, "timeout_s": LOST_S, **self.pins}
        stream = self.hepti.generate(CHAT, ids=list(chat.ids), **options)
        try:
            for part in stream:
                tokens.append(part["token"])
                if chat.tokens[: len(tokens)] != tuple(tokens):
                    raise WrongAnswer(f"{self.pins} {chat.ids}: {tokens} instead of {chat.tokens}")
                yield
                if len(tokens) == stop:
                    self.cancelled += 1
                    return
        finally:
            stream.close()
        if len(tokens) != len(chat.tokens):
            raise WrongAnswer(f"{self.pins} {chat.ids}: ended after {tokens} instead of {chat.tokens}")


class HttpClient(Client):
    """Requests by HTTP, each over a connection of its own."""

    def __init__(self, port: int, name: str, right: Right) -> None:
        super().__init__(name)
        self.port, self.right = port, right

    def ask(self, path: str, body: bytes, kind: str) -> http.client.HTTPResponse:
        """Return the answer to a POST; raises Refused with the status."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LOST_S)
        connection.request("POST", path, body, {"Content-Type": kind, "Connection": "close"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise Refused(f"HTTP {answer.status}: {answer.read().decode(errors='replace')[:200]}")
        return answer


class HttpChats(HttpClient):
    """Tokens by server-sent events of OpenAI's completions."""

    kind = "chats by HTTP"

    def events(self) -> Iterator[None]:
        chat, text = self.random.choice(self.right.chats), ""
        body = {"model": CHAT, "prompt": chat.prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "stream": True}
        done = False
        with self.ask("/v1/completions", json.dumps(body).encode(), "application/json") as answer:
            for line in answer:
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    done = True
                    break
                event = json.loads(line[6:])
                if "error" in event:
                    raise Refused(f"in the stream: {event['error'].get('code')}")
                text += "".join(choice["text"] for choice in event["choices"])
                if not chat.text.startswith(text):
                    raise WrongAnswer(f"{chat.ids}: {text!r} instead of {chat.text!r}")
                yield
        if not done or text != chat.text:
            raise WrongAnswer(f"{chat.ids}: ended after {text!r} instead of {chat.text!r}, DONE {done}")


class Speaker(HttpClient):
    """Transcriptions by HTTP."""

    kind = "speech"

    def events(self) -> Iterator[None]:
        fields: dict[str, Any] = {"model": SPEECH, "language": "en", "temperature": "0"}
        parts = [
            f'--x\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n'.encode() for k, v in fields.items()
        ]
        head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
        body = b"".join([*parts, head, RECORDING, b"\r\n--x--\r\n"])
        with self.ask("/v1/audio/transcriptions", body, "multipart/form-data; boundary=x") as answer:
            text = json.loads(answer.read())["text"]
        if text != self.right.transcript:
            raise WrongAnswer(f"{text!r} instead of {self.right.transcript!r}")
        yield


def mixed_clients(url: str, port: int, right: Right) -> list[Client]:
    """Return two chats by MQTT, two by HTTP and one speaker, not started."""
    return [
        *(MqttChats(url, f"mqtt-chat-{n}", right) for n in range(2)),
        *(HttpChats(port, f"http-chat-{n}", right) for n in range(2)),
        Speaker(port, "speaker", right),
    ]
