"""What a user asks: JSON requests to token ids or pixels.

Nothing here waits or sends; texts go through the checkpoint's tokenizer, pictures through Pillow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.errors import RequestError
from hepti_mqtt.models import packed
from hepti_mqtt.models.reads import Decoding, Pictures, Text
from hepti_mqtt.service.limits import MAX_OUTPUT, MAX_SEQUENCES, Characters
from hepti_mqtt.service.texts import encoded
from hepti_mqtt.service.values import is_int, kind, quoted
from hepti_mqtt.spec import RequestShape, Want

Floats = npt.NDArray[np.float32]

MAX_TOP_K: Final = 1000
DEFAULT_TOP_K: Final = 5

TEXT_INPUTS: Final = ("text", "texts", "ids")
IMAGE_INPUTS: Final = ("image", "images")
MAX_NEW_TOKENS: Final = 4096
DEFAULT_NEW_TOKENS: Final = 16
_OPTIONS: Final = frozenset({"truncate", "empty", "want", "top_k", "max_new_tokens"})
# The service's own part of a request; it has read these before.
PINS: Final = ("strategy", "options", "devices", "wire", "accuracy", "weights", "route", "objective")
_ENVELOPE: Final = frozenset({"id", "deadline_ms", "reply_to", "report", *PINS})
UNKNOWN_SHOWN: Final = 8
_KEYS: Final = frozenset({*TEXT_INPUTS, *IMAGE_INPUTS, *_OPTIONS, *_ENVELOPE})


@dataclass(frozen=True)
class Prepared:
    """A request as the devices take it.

    inputs: token ids int32 [m], those of a decoder behind a zero [1 + m], or pixels uint8 [B, C, S, S]. several: the
    user sent a list and gets a list of results. computes: False for want "plan", which is answered without the devices.
    new_tokens: how many tokens to generate. empty: places of empty texts among those of the user, which the devices do
    not see and whose results are zeros.
    """

    shape: RequestShape
    inputs: npt.NDArray[Any]
    several: bool
    top_k: int
    computes: bool = True
    new_tokens: int = 0
    empty: tuple[int, ...] = ()


def prepare(checkpoint: Checkpoint, request: Any) -> Prepared:
    """Return what the devices need to answer `request`, an object as `json.loads` gives it.

    Exactly one of text, texts, ids (a list, or a list of lists), image, images (base64); optional truncate (cut what
    is longer than the model takes), want ("task", "hidden", or "plan" for a forecast of "task"), top_k, max_new_tokens
    (of a decoder). Raises RequestError that names what is wrong, or more than limits.py allows; ModelError where the
    checkpoint has no tokenizer.
    """
    prepared = _prepared(checkpoint, request)
    rows, columns = checkpoint.spec.output_shape(prepared.shape)
    if rows * columns > MAX_OUTPUT:
        raise RequestError(
            f"the answer would have {rows} x {columns} numbers, and at most {MAX_OUTPUT} are given to one request; "
            "send less at once"
        )
    return prepared


def _prepared(checkpoint: Checkpoint, request: Any) -> Prepared:
    if not isinstance(request, Mapping):
        raise RequestError(f'a request is a JSON object such as {{"text": "..."}}, not {kind(request)}')
    unknown = sorted(str(key) for key in request if key not in _KEYS)
    if unknown:
        some = ", ".join(repr(key[:40]) for key in unknown[:UNKNOWN_SHOWN])
        more = f" and {len(unknown) - UNKNOWN_SHOWN} more" if len(unknown) > UNKNOWN_SHOWN else ""
        raise RequestError(
            f"unknown key{'s' if len(unknown) > 1 else ''} {some}{more}; a request may have {', '.join(sorted(_KEYS))}"
        )
    reads = checkpoint.spec.reads
    given = [key for key in (*TEXT_INPUTS, *IMAGE_INPUTS) if key in request]
    allowed = IMAGE_INPUTS if isinstance(reads, Pictures) else TEXT_INPUTS
    if len(given) != 1:
        has = f"this one has {' and '.join(given)}" if given else "this one has none"
        raise RequestError(f"a request has exactly one of {', '.join(allowed)}; {has}")
    if given[0] not in allowed:
        raise RequestError(
            f"model {checkpoint.model} cannot read {given[0]!r}; send one of {', '.join(allowed)}, or ask another model"
        )
    want, computes = _want(request)
    top_k = request.get("top_k", DEFAULT_TOP_K)
    if not is_int(top_k) or not 1 <= top_k <= MAX_TOP_K:
        raise RequestError(f"top_k must be an integer from 1 to {MAX_TOP_K}, not {kind(top_k)}")
    key, several = given[0], _is_several(given[0], request[given[0]])
    if isinstance(reads, Pictures):
        pixels = _pictures(checkpoint, reads, request, several)
        return Prepared(reads.batch(len(pixels), want), pixels, several, top_k, computes)
    if isinstance(reads, Decoding):
        return _decoded(checkpoint, reads, request, key, want, top_k, computes)
    if "max_new_tokens" in request:
        raise RequestError(
            f"model {checkpoint.model} generates no tokens; leave max_new_tokens out, or ask another model"
        )
    assert isinstance(reads, Text)
    request, empty = _without_empty(checkpoint, request, want)
    lengths, ids = _tokens(checkpoint, reads, request, key, several)
    rows = _mask_rows(checkpoint, key, ids) if reads.masks and want == "task" else ()
    return Prepared(reads.batch(lengths, want, rows), ids, several, top_k, computes, empty=empty)


def _without_empty(
    checkpoint: Checkpoint, request: Mapping[str, Any], want: Want
) -> tuple[Mapping[str, Any], tuple[int, ...]]:
    """Return a request without the empty ones of its texts, and their places, where the user wants zeros for them."""
    choice = request.get("empty", "error")
    if choice not in ("error", "zero"):
        raise RequestError(f'empty must be "error" or "zero", not {quoted(choice)}')
    texts = request.get("texts")
    if choice == "error" or not isinstance(texts, list):
        return request, ()
    if want != "task" or checkpoint.spec.head.task != "embedding":
        raise RequestError(
            f'"empty": "zero" is for embeddings, which model {checkpoint.model} is not asked for here; leave it out'
        )
    empty = tuple(i for i, text in enumerate(texts) if isinstance(text, str) and not text.strip())
    if len(texts) > MAX_SEQUENCES or len(empty) == len(texts):
        return request, ()  # which is an error that others tell
    return {**request, "texts": [text for i, text in enumerate(texts) if i not in empty]}, empty


def _decoded(
    checkpoint: Checkpoint,
    reads: Decoding,
    request: Mapping[str, Any],
    key: str,
    want: Want,
    top_k: int,
    computes: bool,
) -> Prepared:
    """Return a decoder's request: one prompt, and how many tokens to generate behind it."""
    if _is_several(key, request[key]):
        raise RequestError(f"model {checkpoint.model} continues one text at a time; send one in each request")
    most = request.get("max_new_tokens", DEFAULT_NEW_TOKENS)
    if not is_int(most) or not 1 <= most <= MAX_NEW_TOKENS:
        raise RequestError(f"max_new_tokens must be an integer from 1 to {MAX_NEW_TOKENS}, not {kind(most)}")
    limit, new = reads.longest, most if want == "task" else 0
    if request.get("truncate") is True and new < limit:
        reads = replace(reads, longest=limit - new)  # a prompt cut to all that the model takes leaves no room behind it
    _, ids = _tokens(checkpoint, reads, request, key, several=False)
    if len(ids) + new > limit:
        if "max_new_tokens" in request or len(ids) >= limit:
            raise RequestError(
                f"{key} has {len(ids)} tokens, and model {checkpoint.model} takes at most {limit} with those that it "
                f"generates: shorten it, or ask for fewer than {most}"
            )
        new = limit - len(ids)
    shape, inputs = packed(checkpoint.spec, ids, want, len(ids) + new)
    return Prepared(shape, inputs, several=False, top_k=top_k, computes=computes, new_tokens=new)


def end_token(checkpoint: Checkpoint) -> int | None:
    """Return the token after which a decoder has no more to say, by its config; None if it names none."""
    end = checkpoint.config.get("eos_token_id")
    return end if is_int(end) else None


def _is_several(key: str, value: Any) -> bool:
    """Return whether the user sent a list of inputs; ids may be one list or a list of them."""
    if key == "ids":
        return isinstance(value, list) and any(isinstance(item, list) for item in value)
    return key in ("texts", "images")


def _want(request: Mapping[str, Any]) -> tuple[Want, bool]:
    """Return what the devices are to give, and whether they are asked at all."""
    want = request.get("want", "task")
    if want in ("task", "plan"):
        return "task", want == "task"
    if want == "hidden":
        return "hidden", True
    raise RequestError(f'want must be "task", "hidden" or "plan", not {quoted(want)}')


def _tokens(
    checkpoint: Checkpoint, reads: Text, request: Mapping[str, Any], key: str, several: bool
) -> tuple[tuple[int, ...], npt.NDArray[np.int32]]:
    """Return the length of each sequence, and all ids packed [m]."""
    truncate = request.get("truncate", False)
    if not isinstance(truncate, bool):
        raise RequestError(f"truncate must be true or false, not {kind(truncate)}")
    limit = reads.longest
    sequences: list[list[int]] = []
    characters = Characters()
    for name, item in _items(key, request[key], several):
        ids = (
            _checked_ids(checkpoint, reads, name, item)
            if key == "ids"
            else encoded(checkpoint, reads, name, item, truncate, characters)
        )
        if len(ids) > limit and not truncate:
            raise RequestError(
                f"{name} has more than {limit} tokens, which is what model {checkpoint.model} takes at most: "
                'shorten it, or send "truncate": true'
            )
        sequences.append(ids[:limit])
    packed = np.array([token for ids in sequences for token in ids], np.int32)
    return tuple(map(len, sequences)), packed


def _mask_rows(checkpoint: Checkpoint, key: str, ids: npt.NDArray[np.int32]) -> tuple[int, ...]:
    rows = tuple(np.flatnonzero(ids == checkpoint.mask_id).tolist())
    if not rows:
        mask = checkpoint.tokenizer.id_to_token(checkpoint.mask_id)
        raise RequestError(
            f"{key} has no {mask} for model {checkpoint.model} to fill in; put {mask} where a token is wanted"
        )
    return rows


def _items(key: str, value: Any, several: bool) -> list[tuple[str, Any]]:
    """Return each input with the name under which errors speak of it."""
    if not several:
        return [(key, value)]
    if not isinstance(value, list) or not value:
        raise RequestError(f"{key} must be a list with at least one element, not {kind(value)}")
    if len(value) > MAX_SEQUENCES:
        raise RequestError(f"{key} has {len(value)} elements; send at most {MAX_SEQUENCES} in one request")
    return [(f"{key}[{i}]", item) for i, item in enumerate(value)]


def _checked_ids(checkpoint: Checkpoint, reads: Text, name: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not all(is_int(v) for v in value):
        raise RequestError(f"{name} must be a list of integers, not {kind(value)}")
    if not value:
        raise RequestError(f"{name} is empty; send at least one token id")
    for token in value:
        if not 0 <= token < reads.vocab:
            raise RequestError(f"{name} has the id {token}; model {checkpoint.model} knows 0 to {reads.vocab - 1}")
    return value


def _pictures(
    checkpoint: Checkpoint, reads: Pictures, request: Mapping[str, Any], several: bool
) -> npt.NDArray[np.uint8]:
    """Return all pixels [B, C, S, S]."""
    if "truncate" in request:
        raise RequestError("truncate is for texts; leave it out with pictures")
    from hepti_mqtt.service.pictures import decode, resampling  # here: most planners read no pictures

    key = "images" if several else "image"
    resample = resampling(checkpoint.extras.get("preprocessor_config.json", {}))
    return decode(_items(key, request[key], several), reads, resample)
