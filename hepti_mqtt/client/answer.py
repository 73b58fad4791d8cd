"""What a user gets: the planner's JSON with the parts that programs want as arrays, and errors as exceptions."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.errors import HeptiError, RemoteError, RequestError, WireError

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Answer:
    """The answer to one request.

    raw: the planner's JSON as it came. latency_ms: from publish to answer, measured here.
    """

    raw: Mapping[str, Any]
    latency_ms: float

    @property
    def id(self) -> str:
        """Return the request's id."""
        return str(self.raw["id"])

    @property
    def model(self) -> str:
        """Return the model that answered."""
        return str(self.raw["model"])

    @property
    def result(self) -> Any:
        """Return what the model said, as JSON gives it: embedding, labels, masks, hidden states; None if not asked."""
        return self.raw["result"]

    @property
    def plan(self) -> Mapping[str, Any]:
        """Return the plan: id, epoch, strategy, options, wire, weights, route, devices (shares), predicted_ms."""
        found: Mapping[str, Any] = self.raw["plan"]
        return found

    @property
    def tokens(self) -> int:
        """Return how many tokens were computed."""
        return int(self.raw["tokens"])

    @property
    def embedding(self) -> Floats:
        """Return the sentence embedding [h] of a request with one text."""
        rows = self.embeddings
        if len(rows) != 1:
            raise RequestError(f"the answer has {len(rows)} embeddings; use .embeddings")
        row: Floats = rows[0]
        return row

    @property
    def embeddings(self) -> Floats:
        """Return the embeddings [B, h]; raises RequestError if the model gives none."""
        return np.array(self._parts("embedding"), np.float32)

    @property
    def labels(self) -> list[Any]:
        """Return [{label, score}] best first; for a request with a list, one such list for each."""
        parts = self._parts("labels")
        return parts if self._several else list(parts[0])

    @property
    def masks(self) -> list[Any]:
        """Return [{position, tokens: [{token, id, score}]}]; for a request with a list, one such list for each."""
        parts = self._parts("masks")
        return parts if self._several else list(parts[0])

    @property
    def generated(self) -> str:
        """Return the text that a decoder has generated; raises RequestError if the model generates none."""
        return str(self._parts("text")[0])

    @property
    def hidden(self) -> Floats:
        """Return the final hidden states [m, h] of a request with want="hidden"."""
        result = self.result
        if not isinstance(result, Mapping) or "base64" not in result:
            raise RequestError('the answer has no hidden states; ask with want="hidden"')
        data = base64.b64decode(result["base64"])
        return np.frombuffer(data, "<f4").reshape(result["shape"])

    @property
    def _several(self) -> bool:
        return isinstance(self.result, Mapping) and "results" in self.result

    def _parts(self, what: str) -> list[Any]:
        parts = self.result["results"] if self._several else [self.result]
        if self.result is None:
            raise RequestError(f'the answer has no {what}: want="plan" computes nothing')
        if any(what not in part for part in parts):
            raise RequestError(f"the answer has no {what}; it has {', '.join(sorted(parts[0]))}")
        return [part[what] for part in parts]


def _tree(cls: type[HeptiError]) -> dict[str, type[HeptiError]]:
    found: dict[str, type[HeptiError]] = {}
    for child in cls.__subclasses__():
        if child.__module__ == HeptiError.__module__:  # others borrow their code from those
            found.update(_tree(child))
    return {**found, cls.code: cls}  # a subclass without a code of its own is not what the code means


_BY_CODE = _tree(HeptiError)


def error_from(data: Mapping[str, Any]) -> HeptiError:
    """Return the exception of an error answer; a code that this version does not know becomes RemoteError.

    Raises WireError if `data` is no error answer.
    """
    error = data.get("error")
    if not isinstance(error, Mapping) or not isinstance(error.get("message"), str):
        raise WireError("an answer is neither a result nor an error; update client or planner")
    return _BY_CODE.get(str(error.get("code")), RemoteError)(error["message"])
