"""Prompts with pictures: views for the vision tower, and a text in which its rows replace picture tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.core.errors import ModelError, RequestError, UnsupportedModelError
from hepti_mqtt.models.shapes import ImageInput, fixed_point
from hepti_mqtt.models.transformer import ModelSpec
from hepti_mqtt.models.views import expanded
from hepti_mqtt.runtime.coordinator.pictured import PicturedPrompt
from hepti_mqtt.service.messages import GivenPicture, read_messages
from hepti_mqtt.service.texts import MAX_CHARACTERS, describe

KEYS: Final = ("image", "images")
_LARGEST: Final = 2047.0  # of fixed point
_BITS: Final = 0x7FFF_FFFF


class PromptPictures(NamedTuple):
    """The pictures of a prompt."""

    words: Checkpoint  #: the text model
    pixels: npt.NDArray[np.uint8]  #: uint8 [V, C, S, S], all views of all pictures
    mark: str  #: placeholder of a picture in the user's text
    written: tuple[str, ...]  #: the model's text in place of each picture's mark
    row: str  #: token of a row
    rows: int  #: of a view
    messages: list[dict[str, Any]] | None  #: with a part for each picture; None for a text

    def tokens(self, text: Any) -> list[int]:
        """Return the ids of a text with pictures; the pictures precede a text without marks."""
        if not isinstance(text, str):
            raise RequestError(f"text must be a string, not {describe(text)}", "text")
        if len(text) > MAX_CHARACTERS:
            raise RequestError(f"text has more than {MAX_CHARACTERS} characters; shorten it", "text")
        marked = text if self.mark in text else self.mark * len(self.written) + text
        tokenizer = self.words.marked
        special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        if control := next(
            (content for content in special if content and content != self.mark and content in text), None
        ):
            raise RequestError(f"text contains the model's control token {control!r}; remove it", "text")
        whole = expanded(marked, self.mark, self.written)
        if whole is None:
            raise RequestError(
                f"text has {text.count(self.mark)} marks {self.mark} for {len(self.written)} pictures; send as many, "
                "or none to place the pictures before the text",
                "text",
            )
        return list(tokenizer.encode(whole).ids)

    def prompt(self, ids: Sequence[int]) -> PicturedPrompt:
        """Return the places of picture rows in a prompt's ids; raises ModelError if tokenizer and tower disagree."""
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
    """Return a negative number for each row of a view, from the hash of its pixels."""
    data = np.frombuffer(hashlib.shake_128(view.tobytes()).digest(4 * rows), np.uint32)
    return -1 - (data & _BITS).astype(np.int32)


def _runs(places: npt.NDArray[np.int32]) -> tuple[tuple[int, int], ...]:
    """Return start and stop of each run of consecutive places."""
    cuts = [0, *(np.flatnonzero(np.diff(places) > 1) + 1).tolist(), len(places)]
    return tuple((int(places[a]), int(places[z - 1]) + 1) for a, z in pairwise(cuts))


def row_token(words: Checkpoint) -> int:
    """Return the token that picture rows replace; raises UnsupportedModelError if it is outside the vocabulary."""
    token, spec = words.config.get("image_token_id"), words.spec
    if not isinstance(token, int) or not isinstance(spec, ModelSpec) or not 0 <= token < spec.head.outputs:
        raise UnsupportedModelError(f"config.json: image_token_id {token!r} is no token of the vocabulary")
    return token


def has_pictures(request: Mapping[str, Any]) -> bool:
    """Return whether a request contains pictures for its text or messages."""
    messages = request.get("messages")
    objects = [one for one in messages if isinstance(one, Mapping)] if isinstance(messages, list) else []
    contents = [one.get("content") for one in objects]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    kinds = {part.get("type") for part in parts if isinstance(part, Mapping) and isinstance(part.get("type"), str)}
    return any(request.get(key) not in (None, []) for key in KEYS) or bool({"image", "image_url"} & kinds)


def read_pictures(words: Checkpoint, eyes: Checkpoint, request: Mapping[str, Any]) -> PromptPictures:
    """Return the pictures of a request, with their places in its messages; raises RequestError."""
    from hepti_mqtt.service.pictures import decode_views  # imported late: most planners read no pictures

    if request.get("truncate"):
        raise RequestError("truncate does not apply to a text with pictures; leave it out", "truncate")
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
    return PromptPictures(words, pixels, views.mark, tuple(map(views.written, cuts)), views.row, rows, messages)


def _named(request: Mapping[str, Any]) -> list[GivenPicture]:
    """Return the pictures of the keys image and images."""
    if request.get("image") is not None and request.get("images"):
        raise RequestError("image and images exclude each other; send one of them", "images")
    if (one := request.get("image")) is not None:
        return [GivenPicture("image", one)]
    several = request.get("images") or []
    if not isinstance(several, list):
        raise RequestError(f"images must be a list, not {describe(several)}", "images")
    return [GivenPicture(f"images[{i}]", one) for i, one in enumerate(several)]


def _placed(
    messages: list[dict[str, Any]], inline: Sequence[GivenPicture], separate: Sequence[GivenPicture]
) -> list[GivenPicture]:
    """Return all pictures in their order in the messages.

    Separate pictures fill the parts without data. If there are none, they come first in the last message of a user.
    """
    waiting = [one for one in inline if one.value is None]
    if waiting and len(waiting) != len(separate):
        raise RequestError(
            f"messages have {len(waiting)} picture parts without data, and {len(separate)} separate pictures; send as "
            "many",
            "messages",
        )
    if waiting:
        rest = iter(separate)
        return [next(rest) if one.value is None else one for one in inline]
    if not separate:
        return list(inline)
    last = next((i for i in reversed(range(len(messages))) if messages[i]["role"] == "user"), None)
    if last is None:
        raise RequestError("pictures belong to a message of a user, and there is none; send one", "messages")
    before = sum(part["type"] == "image" for message in messages[:last] for part in message["content"])
    messages[last]["content"] = [{"type": "image"}] * len(separate) + messages[last]["content"]
    return [*inline[:before], *separate, *inline[before:]]


def rows_of(words: Checkpoint, tower_rows: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
    """Return the difference between a tower's rows and the embedding of the picture token [n, h]; fixed point.

    Raises ModelError for numbers that are not finite, or too large.
    """
    added = tower_rows - words.embedding(row_token(words))
    if not np.isfinite(added).all() or np.abs(added).max(initial=0.0) > _LARGEST:
        raise ModelError(
            f"model {words.model}: rows of a picture are not finite, or larger than {_LARGEST:g}; check the "
            "checkpoint: hepti model verify DIR"
        )
    return fixed_point(added).reshape(added.shape)
