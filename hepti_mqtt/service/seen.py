"""Prompts with pictures: the views that a tower computes, then a text in which its rows stand for tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.errors import ModelError, RequestError, UnsupportedModelError
from hepti_mqtt.models.shapes import ImageInput, fixed_point
from hepti_mqtt.models.transformer import ModelSpec
from hepti_mqtt.models.views import expanded
from hepti_mqtt.runtime.coordinator.pictured import PicturedPrompt
from hepti_mqtt.service.messages import GivenPicture, read_messages
from hepti_mqtt.service.texts import MAX_CHARACTERS, describe

KEYS: Final = ("image", "images")
_LARGEST: Final = 2047.0  # that fixed point holds
_BITS: Final = 0x7FFF_FFFF


class Seen(NamedTuple):
    """The pictures of a request, and the text around them."""

    #: the model that continues the text
    words: Checkpoint
    #: uint8 [V, C, S, S], all views of all pictures
    pixels: npt.NDArray[np.uint8]
    #: what stands for a picture in a text, and what the model reads instead, for each picture
    mark: str
    written: tuple[str, ...]
    #: the token of a row, and the rows of a view
    row: str
    rows: int
    #: messages in which each picture has its place; None for a text
    messages: list[dict[str, Any]] | None

    def tokens(self, text: Any) -> list[int]:
        """Return the ids of a text with pictures; without marks they come before it."""
        if not isinstance(text, str):
            raise RequestError(f"text must be a string, not {describe(text)}", "text")
        if len(text) > MAX_CHARACTERS:
            raise RequestError(f"text has more than {MAX_CHARACTERS} characters; shorten it", "text")
        marked = text if self.mark in text else self.mark * len(self.written) + text
        tokenizer = self.words.marked
        special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        if spelt := next((one for one in special if one and one != self.mark and one in text), None):
            raise RequestError(f"text has the model's control token {spelt!r} in it; take it out", "text")
        whole = expanded(marked, self.mark, self.written)
        if whole is None:
            raise RequestError(
                f"text has {text.count(self.mark)} times {self.mark} for {len(self.written)} pictures; send as many, "
                "or none to have the pictures before the text",
                "text",
            )
        return list(tokenizer.encode(whole).ids)

    def prompt(self, ids: Sequence[int]) -> PicturedPrompt:
        """Return where rows of pictures stand among the ids of a prompt; raises ModelError for other files."""
        token, spec = row_token(self.words), self.words.spec
        assert isinstance(spec, ModelSpec)
        places = np.flatnonzero(np.asarray(ids) == token).astype(np.int32)
        if len(places) != len(self.pixels) * self.rows or self.words.tokenizer.token_to_id(self.row) != token:
            raise ModelError(
                f"{self.words.path}: tokenizer.json writes {len(places)} tokens for pictures that have "
                f"{len(self.pixels) * self.rows} rows; copy the model's own file"
            )
        marks = np.concatenate([_marks(view, self.rows) for view in self.pixels])
        wholes = _runs(places) if spec.block.picture_rows else ()
        return PicturedPrompt(places, marks, np.zeros((0, spec.hidden), np.int32), wholes)


def _marks(view: npt.NDArray[np.uint8], rows: int) -> npt.NDArray[np.int32]:
    """Return a negative number for each row of a view, by what the view shows."""
    data = np.frombuffer(hashlib.shake_128(view.tobytes()).digest(4 * rows), np.uint32)
    return -1 - (data & _BITS).astype(np.int32)


def _runs(places: npt.NDArray[np.int32]) -> tuple[tuple[int, int], ...]:
    """Return start and stop of each run of consecutive places."""
    cuts = [0, *(np.flatnonzero(np.diff(places) > 1) + 1).tolist(), len(places)]
    return tuple((int(places[a]), int(places[z - 1]) + 1) for a, z in pairwise(cuts))


def row_token(words: Checkpoint) -> int:
    """Return the token in whose place rows of pictures stand; raises UnsupportedModelError for none that has a row."""
    token, spec = words.config.get("image_token_id"), words.spec
    if not isinstance(token, int) or not isinstance(spec, ModelSpec) or not 0 <= token < spec.head.outputs:
        raise UnsupportedModelError(f"config.json: image_token_id {token!r} is no token of the vocabulary")
    return token


def has_pictures(request: Mapping[str, Any]) -> bool:
    """Return whether a request brings pictures beside a text."""
    messages = request.get("messages")
    known = [one for one in messages if isinstance(one, Mapping)] if isinstance(messages, list) else []
    contents = [one.get("content") for one in known]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    kinds = {part.get("type") for part in parts if isinstance(part, Mapping) and isinstance(part.get("type"), str)}
    return any(request.get(key) not in (None, []) for key in KEYS) or bool({"image", "image_url"} & kinds)


def read_pictures(words: Checkpoint, eyes: Checkpoint, request: Mapping[str, Any]) -> Seen:
    """Return the pictures of a request and the places that they have in its messages; raises RequestError."""
    from hepti_mqtt.service.pictures import decode_views  # here: most planners read no pictures

    if request.get("truncate"):
        raise RequestError("a text with pictures is not truncated; leave truncate out", "truncate")
    given, messages = _named(request), None
    if "messages" in request:
        inline: list[GivenPicture] = []
        messages = read_messages(request["messages"], inline)
        given = _placed(messages, inline, given)
    reads = eyes.spec.input_spec
    assert isinstance(reads, ImageInput)
    views, whole = eyes.views, [i for i, one in enumerate(given) if one.whole]
    pixels, cuts = decode_views([(one.name, one.value) for one in given], reads, views, whole)
    rows = eyes.spec.output_shape(reads.batch(1))[0]
    return Seen(words, pixels, views.mark, tuple(map(views.written, cuts)), views.row, rows, messages)


def _named(request: Mapping[str, Any]) -> list[GivenPicture]:
    """Return the pictures that stand beside a text."""
    if request.get("image") is not None and request.get("images"):
        raise RequestError("image and images exclude each other; send one of them", "images")
    if (one := request.get("image")) is not None:
        return [GivenPicture("image", one)]
    several = request.get("images") or []
    if not isinstance(several, list):
        raise RequestError(f"images must be a list, not {describe(several)}", "images")
    return [GivenPicture(f"images[{i}]", one) for i, one in enumerate(several)]


def _placed(
    messages: list[dict[str, Any]], inline: Sequence[GivenPicture], beside: Sequence[GivenPicture]
) -> list[GivenPicture]:
    """Return all pictures in their order in the messages.

    Those beside the messages are for parts without a picture of their own, or come first in the last message of a user.
    """
    waiting = [one for one in inline if one.value is None]
    if waiting and len(waiting) != len(beside):
        raise RequestError(
            f"messages have {len(waiting)} parts for pictures, and {len(beside)} are sent beside them; send as many",
            "messages",
        )
    if waiting:
        rest = iter(beside)
        return [next(rest) if one.value is None else one for one in inline]
    if not beside:
        return list(inline)
    last = next((i for i in reversed(range(len(messages))) if messages[i]["role"] == "user"), None)
    if last is None:
        raise RequestError("pictures belong to a message of a user, and there is none; send one", "messages")
    before = sum(part["type"] == "image" for message in messages[:last] for part in message["content"])
    messages[last]["content"] = [{"type": "image"}] * len(beside) + messages[last]["content"]
    return [*inline[:before], *beside, *inline[before:]]


def rows_of(words: Checkpoint, seen: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
    """Return what is added to the embedding of the pictures' token to have rows of a tower [n, h]; fixed point.

    Raises ModelError for numbers that are not finite, or too large.
    """
    added = seen - words.embedding(row_token(words))
    if not np.isfinite(added).all() or np.abs(added).max(initial=0.0) > _LARGEST:
        raise ModelError(
            f"model {words.model}: rows of a picture are not finite, or larger than {_LARGEST:g}; check the "
            "checkpoint: hepti model verify DIR"
        )
    return fixed_point(added).reshape(added.shape)
