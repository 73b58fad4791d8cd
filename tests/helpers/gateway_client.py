"""A client of no site: what the gateway asks is answered at once; and HTTP to a gateway over such a client."""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from starlette.testclient import TestClient

from hepti_mqtt.client import Answer
from hepti_mqtt.client.connection import AnswerStream
from hepti_mqtt.core.errors import HeptiError, NetworkError, RequestError
from hepti_mqtt.gateway.app import OPERATIONS, create_app
from hepti_mqtt.gateway.operations import JSON
from hepti_mqtt.gateway.site import Site

ROWS = np.random.default_rng(1).standard_normal((200, 5)).astype(np.float32)


def number(text: str) -> int:
    """Return the number that a text is, or its length."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 9 else len(text)


SPOKEN = {
    "text": "Light on.", "language": "en", "seconds": 1.5, "no_speech": 0.1, "score": -0.2, "compression": 0.9,
    "doubtful": False, "ids": [7, 8], "temperature": 0.0,
    "segments": [{"start": 0.0, "end": 1.5, "text": "Light on.", "ids": [7, 8]}],
}  # fmt: skip

WRITTEN = Answer(
    {"result": {"embedding": ROWS[0].tolist(), "ids": [7], "text": "Light on.", "finish": "stop"}, "tokens": 1}, 1.0
)


class Client:
    """Answers at once: text number n gets row n. A model reads what its name says; `any` reads everything."""

    def __init__(self, error: HeptiError | None = None) -> None:
        self.asked: list[dict[str, Any]] = []
        self._error = error

    site = "home"

    def devices(self, wait_s: float = 1.5) -> list[dict[str, Any]]:
        raise NetworkError("no planner")

    def unused(self) -> dict[str, str]:
        return {}

    def answers(self) -> list[dict[str, Any]]:
        return []

    def plan(self, model: str, timeout: float = 5.0) -> dict[str, Any]:
        raise NetworkError("no planner")

    def models(self, timeout: float = 5.0) -> list[str]:
        return ["m", "labels", "ranker", "any"]

    def stream(self, model: str, request: Any, put: Any) -> AnswerStream:
        self.asked.append({"model": model, **request})
        stream = AnswerStream(put)
        put({"index": 0, "token": 7, "text": "Light on."})
        stream.set_result(WRITTEN)
        return stream

    def submit(self, model: str, **request: Any) -> Future[Answer]:
        self.asked.append({"model": model, **request})
        future: Future[Answer] = Future()
        try:
            future.set_result(self.answer(model, request))
        except HeptiError as error:
            future.set_exception(error)
        return future

    def answer(self, model: str, request: dict[str, Any]) -> Answer:
        """Return the answer to a request; raises the error that ends it."""
        if self._error is not None:
            raise self._error
        if "audio" in request:
            return Answer({"result": SPOKEN, "tokens": 1}, 1.0)
        if model != "any" and (model == "ranker") != ("documents" in request):
            raise RequestError("another model reads this")
        if "documents" in request:
            scores = sorted(((float(number(text)), i) for i, text in enumerate(request["documents"])), reverse=True)
            ranking = [{"index": i, "score": score} for score, i in scores]
            return Answer({"result": {"ranking": ranking}, "tokens": 7}, 1.0)
        if model != "any" and (request.get("dimensions") or 0) > ROWS.shape[1]:
            raise RequestError("dimensions")
        if request.get("want") == "hidden":
            states = ROWS[: 1 + len(request["text"]) % 9]
            packed = {"shape": states.shape, "base64": base64.b64encode(states.tobytes()).decode()}
            return Answer({"result": packed, "tokens": len(states)}, 1.0)
        if {"text", "image", "messages"} & request.keys():
            return WRITTEN
        inputs = request.get("texts") or [str(pair) for pair in request.get("pairs") or ()] or request["images"]
        labels = {"labels": [{"label": "a", "score": 0.75}, {"label": "b", "score": 0.25}]}
        vectors = [ROWS[number(text) % len(ROWS)][: request.get("dimensions")].tolist() for text in inputs]
        parts = [
            (labels if model in ("labels", "any") else {}) | ({} if model == "labels" else {"embedding": vector})
            for vector in vectors
        ]
        return Answer({"result": {"results": parts}, "tokens": 3 * len(inputs)}, 1.0)


class Unfinished(Client):
    """Gives its streams to the test: each has a first text, if there is one, and fails if there is an error."""

    def __init__(self, first: str = "", error: Exception | None = None) -> None:
        super().__init__()
        self.first, self.error, self.streams = first, error, list[AnswerStream]()

    def stream(self, model: str, request: Any, put: Any) -> AnswerStream:
        self.asked.append(request)
        stream = AnswerStream(put)
        if self.first:
            put({"index": 0, "token": 7, "text": self.first})
        if self.error is not None:
            stream.set_exception(self.error)
        self.streams.append(stream)
        return stream


CARD = {
    "task": "generation", "architecture": "llama", "context": 2048, "parameters": 135_000_000, "bytes": 270_000_000,
    "dtype": "q8_0", "digest": "ab" * 32, "modified": 1.7e9, "chat": True, "tools": True, "thinking": False,
}  # fmt: skip


class Described(Client):
    """The same, with a planner that says what its models are."""

    def __init__(self, error: HeptiError | None = None, **card: Any) -> None:
        super().__init__(error)
        self.card = {**CARD, **card}

    def plan(self, model: str, timeout: float = 5.0) -> dict[str, Any]:
        return {"active": {"id": "1.1"}, "card": self.card}


HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "open", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "open", "arguments": {"door": 1}}</tool_call>'
CHAT, TEXT, EMBED, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"
OLLAMA, GENERATE = "/api/chat", "/api/generate"
NEEDED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    TEXT: {"prompt": "hello"},
    EMBED: {"input": "1"},
    RESPONSES: {"input": "hello"},
    OLLAMA: {"messages": HELLO, "stream": False},
    GENERATE: {"prompt": "hello", "stream": False},
}


def likely(text: str) -> dict[str, Any]:
    """Return a token with its probability, as an answer has it."""
    other = {"id": 7, "token": "\ufffd", "bytes": [0xE2], "logprob": -2.0}
    return {"id": 3, "token": text, "logprob": -0.5, "top": [{"id": 3, "token": text, "logprob": -0.5}, other]}


class Writer(Described):
    """Writes thoughts and a text, token by token; token number `lost` does not arrive."""

    def __init__(
        self, *tokens: str, thinking: str = "", lost: int | None = None, error: HeptiError | None = None
    ) -> None:
        super().__init__(error, thinking=bool(thinking))
        self.tokens, self.thinking, self.lost = tokens or ("we", "ll"), thinking, lost

    def _written(self, request: dict[str, Any]) -> Answer:
        ids = list(range(len(self.tokens) + bool(self.thinking)))
        result: dict[str, Any] = {"ids": ids, "text": "".join(self.tokens), "finish": "stop"}
        result |= {"thinking": self.thinking} if self.thinking else {}
        result |= {} if request.get("logprobs") is None else {"logprobs": [likely(text) for text in self.tokens]}
        return Answer({"result": result, "tokens": 5, "cached_tokens": 3}, 1.0)

    def answer(self, model: str, request: dict[str, Any]) -> Answer:
        is_written = self._error is None and {"text", "messages"} & request.keys()
        return self._written(request) if is_written else super().answer(model, request)

    def stream(self, model: str, request: Any, put: Any) -> AnswerStream:
        self.asked.append({"model": model, **request})
        stream = AnswerStream(put)
        if self._error is not None:
            stream.set_exception(self._error)
            return stream
        thoughts = [{"text": "", "thinking": self.thinking}] if self.thinking else []
        likelihoods = request.get("logprobs") is not None
        texts = [{"text": text} | ({"logprobs": likely(text)} if likelihoods else {}) for text in self.tokens]
        for index, part in enumerate([*thoughts, *texts]):
            if index != self.lost:
                put({"index": index, "token": index, **part})
        stream.set_result(self._written(request))
        return stream


@functools.cache
def _documented_type(method: str, path: str, reads: str, kind: str) -> Any:
    several = [one for one in OPERATIONS if (one.method, one.path) == (method, path)]
    one = next((one for one in several if one.reads == reads), several[0] if several else None)
    return one and TypeAdapter(one.answers[kind])


def documented(answer: Any) -> None:
    """Check that an answer has the shape that the gateway's document says."""
    if answer.status_code != 200 or answer.request.method == "OPTIONS":
        return
    answer.read()
    reads, kind = (one.headers.get("content-type", "").partition(";")[0] for one in (answer.request, answer))
    if (shape := _documented_type(answer.request.method, answer.url.path, reads, kind)) is not None:
        shape.validate_python(answer.json() if kind == JSON else answer.text)


def http_of(client: Any, keys: Sequence[str] = (), model: str | None = "m", **options: Any) -> TestClient:
    """Return HTTP to a gateway whose document is checked with each answer."""
    http = TestClient(create_app(Site(client, 5.0, model), keys, **options), base_url="http://localhost")
    http.event_hooks = {"response": [documented]}
    return http


def post(path: str, client: Any, **body: Any) -> Any:
    """Send a body with what its path needs."""
    content = json.dumps({"model": "m", **NEEDED.get(path, {}), **body})
    return http_of(client).post(path, content=content, headers={"Content-Type": JSON})


def events(answer: Any) -> list[Any]:
    """Return the objects of a stream, of lines or of server-sent events."""
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.endswith("}")]
