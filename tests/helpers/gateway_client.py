"""A client of no site: what the gateway asks is answered at once."""

from __future__ import annotations

import base64
from concurrent.futures import Future
from typing import Any

import numpy as np

from hepti_mqtt.client import Answer
from hepti_mqtt.client.connection import AnswerStream
from hepti_mqtt.core.errors import HeptiError, NetworkError, RequestError

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
        if self._error is not None:
            future.set_exception(self._error)
            return future
        if "audio" in request:
            future.set_result(Answer({"result": SPOKEN, "tokens": 1}, 1.0))
            return future
        if model != "any" and (model == "ranker") != ("documents" in request):
            future.set_exception(RequestError("another model reads this"))
            return future
        if "documents" in request:
            scores = sorted(((float(number(text)), i) for i, text in enumerate(request["documents"])), reverse=True)
            ranking = [{"index": i, "score": score} for score, i in scores]
            future.set_result(Answer({"result": {"ranking": ranking}, "tokens": 7}, 1.0))
            return future
        if model != "any" and (request.get("dimensions") or 0) > ROWS.shape[1]:
            future.set_exception(RequestError("dimensions"))
            return future
        if request.get("want") == "hidden":
            states = ROWS[: 1 + len(request["text"]) % 9]
            packed = {"shape": states.shape, "base64": base64.b64encode(states.tobytes()).decode()}
            future.set_result(Answer({"result": packed, "tokens": len(states)}, 1.0))
            return future
        if {"text", "image", "messages"} & request.keys():
            future.set_result(WRITTEN)
            return future
        inputs = request.get("texts") or [str(pair) for pair in request.get("pairs") or ()] or request["images"]
        labels = {"labels": [{"label": "a", "score": 0.75}, {"label": "b", "score": 0.25}]}
        vectors = [ROWS[number(text) % len(ROWS)][: request.get("dimensions")].tolist() for text in inputs]
        parts = [
            (labels if model in ("labels", "any") else {}) | ({} if model == "labels" else {"embedding": vector})
            for vector in vectors
        ]
        future.set_result(Answer({"result": {"results": parts}, "tokens": 3 * len(inputs)}, 1.0))
        return future


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
