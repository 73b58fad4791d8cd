"""Clients of a home: chats by MQTT and by HTTP, and speech; each compares its answers with the right ones.

A client sends one request after the other. It notes the longest time without a token, an answer or an error.
"""

from __future__ import annotations

import http.client
import io
import json
import random
import threading
import time
import wave
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from faults_clients import Tally
from site_processes import PATIENCE_S, SITE, Site, free_port, poll

from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.client import Hepti
from hepti_mqtt.errors import HeptiError

CHAT, SPEECH = "chat", "speech"
KINDS = {CHAT: "tiny-llama", SPEECH: "tiny-whisper"}
CHATS = 12  # different prompts
NEW_TOKENS = 24
WORDS = ("the", "a", "room", "door", "light", "warm", "cold", "camera", "in", "is")
SILENT_S = 10.0  # the longest silence that is allowed while the broker is there
BROKER_S = 5.0  # after a fault of the broker, in which a silence is the broker's
LOST_S = 120.0  # a request without an end by then is lost
RATE = 16_000


@dataclass(frozen=True)
class Chat:
    """A prompt, its ids, the tokens that the reference continues it with, and their text."""

    prompt: str
    ids: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Right:
    """The right answers. transcript: of `RECORDING`, from an undisturbed request."""

    chats: Sequence[Chat]
    transcript: str


def _recording() -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(np.random.default_rng(3).integers(-9000, 9000, 4000, np.int16).tobytes())
    return out.getvalue()


RECORDING = _recording()


def mixed_models(directory: Path) -> dict[str, Path]:
    """Write the checkpoints that the clients talk to; return their directories by name."""
    return {name: make_model(kind, directory / name, seed=3) for name, kind in KINDS.items()}


def right_answers(hepti: Hepti, places: Mapping[str, Path]) -> Right:
    """Return what the clients must get; raises AssertionError if the undisturbed site differs from the reference."""
    rng, chats = random.Random(5), []
    with Checkpoint.open(places[CHAT], CHAT) as checkpoint:
        spec, tensors, end = checkpoint.spec, dict(checkpoint.tensors()), checkpoint.config.get("eos_token_id")
        for _ in range(CHATS):
            words = " ".join(rng.choices(WORDS, k=rng.randint(4, 20)))
            prompt = list(checkpoint.tokenizer.encode(words).ids)
            ids = list(prompt)
            while len(ids) < len(prompt) + NEW_TOKENS and (len(ids) == len(prompt) or ids[-1] != end):
                shape, inputs = models.single_sequence(spec, np.array(ids, np.int32))
                ids.append(int(models.reference(spec, tensors, inputs, shape)[1][-1].argmax()))
            result = hepti.infer(CHAT, ids=prompt, max_new_tokens=NEW_TOKENS, timeout_s=LOST_S).result
            assert result["ids"] == ids[len(prompt) :], (prompt, result["ids"], ids[len(prompt) :])
            chats.append(Chat(words, tuple(prompt), tuple(result["ids"]), result["text"]))
    speech = hepti.infer(SPEECH, audio=RECORDING, language="en", temperature=0, timeout_s=LOST_S)
    return Right(chats, speech.result["text"])


def start_gateway(site: Site) -> int:
    """Start the site's HTTP gateway; return its port."""
    port = free_port()
    site.start("gateway", "gateway", "--port", str(port))
    poll(lambda: "listening" in site.log("gateway"), "the gateway's start", PATIENCE_S)
    return port


class WrongAnswer(Exception):
    """An answer, or a part of one, differs from the right one."""


class Refused(Exception):
    """A request ended with an error that says what failed."""


class MixedClient(threading.Thread):
    """Sends one request after the other until it is stopped; `pause` returns after the request under way.

    tally: shared with others of the kind. silences: (start, end) by time.monotonic() of times without an event.
    failures: (start, end, what) of the requests that ended with an error.
    """

    kind = ""

    #: seconds between two requests, on average
    pause_s = 0.1

    def __init__(self, name: str, right: Right, tally: Tally) -> None:
        super().__init__(name=name, daemon=True)
        self.right, self.tally, self.silences = right, tally, list[tuple[float, float]]()
        self.failures = list[tuple[float, float, str]]()
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
            self._one()

    def pause(self) -> None:
        """Send nothing more, and return when no request is under way."""
        self.running.clear()
        assert self.idle.wait(2 * LOST_S), f"{self.name} is stuck"

    def resume(self) -> None:
        self.running.set()

    def close(self) -> None:
        """Stop after the request under way."""
        self.stopping.set()
        self.running.set()
        self.join()

    def longest(self, broken_s: Sequence[float]) -> tuple[float, bool]:
        """Return the seconds of the longest silence, and whether the broker failed shortly before it or in it."""
        spans = [(end - start, any(start - BROKER_S < at < end for at in broken_s)) for start, end in self.silences]
        return max(spans, key=lambda span: (span[0] > SILENT_S and not span[1], span[0]), default=(0.0, False))

    def events(self) -> Iterator[None]:
        """Send a request; yield at each token. Raises Refused, HeptiError, OSError, WrongAnswer."""
        raise NotImplementedError

    def _one(self) -> None:
        begun = last = time.monotonic()
        with self.tally.lock:
            self.tally.sent += 1
        code = ""
        try:
            for _ in self.events():
                last = self._event(last)
        except WrongAnswer as error:
            print(f"WRONG: {self.name}: {error}", flush=True)
            with self.tally.lock:
                self.tally.wrong += 1
            return
        except Refused as error:
            code = str(error)
        except HeptiError as error:
            code = error.code
        except (OSError, http.client.HTTPException) as error:
            code = type(error).__name__
        now = self._event(last)
        if code:
            self.tally.failed(code)
            self.failures.append((begun, now, code))
            if now - begun >= LOST_S:
                self.tally.lost.append(f"{self.name}: {code} after {now - begun:.0f} s")
            return
        with self.tally.lock:
            self.tally.right += 1
            self.tally.answered_s[self.kind].append(now)

    def _event(self, last: float) -> float:
        now = time.monotonic()
        self.silences.append((last, now))
        return now


class MqttChats(MixedClient):
    """Tokens by MQTT, through the Python client."""

    kind = "chats by MQTT"

    def __init__(self, url: str, name: str, right: Right, tally: Tally) -> None:
        super().__init__(name, right, tally)
        self.hepti = Hepti.connect(url, site=SITE, client_id=name)

    def events(self) -> Iterator[None]:
        chat, tokens = self.random.choice(self.right.chats), list[int]()
        parts = self.hepti.generate(CHAT, ids=list(chat.ids), max_new_tokens=NEW_TOKENS, timeout_s=LOST_S)
        for part in parts:
            tokens.append(part["token"])
            if chat.tokens[: len(tokens)] != tuple(tokens):
                raise WrongAnswer(f"{chat.ids}: {tokens} instead of {chat.tokens}")
            yield
        if len(tokens) != len(chat.tokens):
            raise WrongAnswer(f"{chat.ids}: ended after {tokens} instead of {chat.tokens}")

    def close(self) -> None:
        super().close()
        self.hepti.close()


class HttpClient(MixedClient):
    """Requests by HTTP, each over a connection of its own."""

    def __init__(self, port: int, name: str, right: Right, tally: Tally) -> None:
        super().__init__(name, right, tally)
        self.port = port

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


class Listener(HttpClient):
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


def mixed_clients(url: str, port: int, right: Right) -> list[MixedClient]:
    """Return two chats by MQTT, two by HTTP and one speaker, not started."""
    tallies = {kind: Tally() for kind in (MqttChats, HttpChats, Listener)}
    return [
        *(MqttChats(url, f"mqtt-chat-{n}", right, tallies[MqttChats]) for n in range(2)),
        *(HttpChats(port, f"http-chat-{n}", right, tallies[HttpChats]) for n in range(2)),
        Listener(port, "listener", right, tallies[Listener]),
    ]
