"""Users' requests: limits, parsing, tokenising, pins, and batches."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, get_args

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.errors import BadNameError, ModelError, OverloadedError, RequestError
from hepti_mqtt.ids import check_name
from hepti_mqtt.models import preprocessor, single_sequence
from hepti_mqtt.models.generation import LIKELIEST, TokenRules
from hepti_mqtt.models.sentences import TextRules
from hepti_mqtt.models.shapes import DecoderInput, ImageInput, TextInput
from hepti_mqtt.models.speech import SpeechInput
from hepti_mqtt.models.transformer import ModelSpec
from hepti_mqtt.plan import Objective, Route, WeightDtype, WireDtype
from hepti_mqtt.planner.candidates import options_error
from hepti_mqtt.runtime.coordinator.requests import Batch, Pins
from hepti_mqtt.spec import RequestShape, Want
from hepti_mqtt.strategies import STRATEGIES


def is_int(value: Any) -> bool:
    """Return whether a JSON value is an integer; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def describe(value: Any) -> str:
    """Return a short description of a JSON value."""
    if value is None or isinstance(value, bool | int | float):
        return str(value)[:40]
    words: dict[str, str] = {"str": "a string", "list": "a list", "dict": "an object"}
    name = type(value).__name__
    return words.get(name, name)


def quoted(value: Any) -> str:
    """Return the beginning of a string, or a short description of another JSON value."""
    return repr(value[:40]) if isinstance(value, str) else describe(value)


# ----------------------------------------------------------------------------------------------------------------------
# Limits of a request: each is checked before the work that it bounds. Documented in docs/reference/requests.md.


MAX_REQUEST_BYTES: Final = 16_000_000
MAX_ITEMS: Final = 500_000  # commas and opening brackets of a request's JSON, also those within texts
MAX_SEQUENCES: Final = 64
MAX_CHARACTERS: Final = 400_000  # tokenised of all texts of a request; truncated text hardly counts
MAX_PIXELS: Final = 25_000_000  # of all pictures of a request; those of WebP count twice
MAX_SCANS: Final = 64  # of a JPEG file: each covers all pixels, and may be a few bytes long
MAX_OUTPUT: Final = 8_000_000  # numbers in an answer
MAX_WAITING_BYTES: Final = 128 << 20  # ids and pixels of all unanswered requests


class CharacterBudget:
    """The characters that one request may still have tokenised."""

    def __init__(self) -> None:
        self._left = MAX_CHARACTERS

    def take(self, count: int) -> None:
        """Count characters to be tokenised; raises RequestError above the limit."""
        self._left -= count
        if self._left < 0:
            raise RequestError(
                f"the texts are too long: {MAX_CHARACTERS} characters of one request are read at the most; shorten "
                "them, or send fewer at once"
            )


class MemoryQuota:
    """Bytes that are held as long as their holders live, then released."""

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes
        self._lock = threading.RLock()  # a holder may be collected while its own thread is in here

    def take(self, nbytes: int, holder: object) -> None:
        """Hold bytes until `holder` is gone; raises OverloadedError if too few are left."""
        with self._lock:
            if nbytes > self._left:
                raise OverloadedError(
                    f"the requests that wait hold nearly {MAX_WAITING_BYTES >> 20} MB already, and this one brings "
                    f"{nbytes} bytes; try again later"
                )
            self._left -= nbytes
        weakref.finalize(holder, self._give, nbytes).atexit = False

    def _give(self, nbytes: int) -> None:
        with self._lock:
            self._left += nbytes


# ----------------------------------------------------------------------------------------------------------------------
# Texts to token ids: of a long text only as much is tokenised as the model reads.


CHARACTERS_PER_TOKEN: Final = 4  # first guess, doubled until it suffices


def encode_text(
    checkpoint: Checkpoint, reads: TextInput, name: str, value: Any, truncate: bool, characters: CharacterBudget
) -> list[int]:
    """Return the ids of a text; truncation keeps the tokens that the tokenizer adds at both ends.

    Without truncation a long text may end early, still longer than the model reads. Raises RequestError naming the
    text, ModelError for a tokenizer of another model.
    """
    if not isinstance(value, str):
        raise RequestError(f"{name} must be a string, not {describe(value)}")
    if not value.strip():
        raise RequestError(f"{name} is empty; send some words")
    if not checkpoint.has_tokenizer and not reads.masks:
        raise ModelError(
            f"{checkpoint.path / 'tokenizer.json'} is missing, so texts cannot be read; copy it, or send token ids"
        )
    texts = checkpoint.texts
    tokenizer, text = texts.tokenizer, _cleaned(checkpoint.text_rules, value)
    # Of a text whose beginning is cut off, all tokens are needed.
    longest = len(text) if truncate and texts.side == "left" else reads.longest
    encoding = _encode_prefix(tokenizer, name, text, longest, characters)
    if (control := next((i for i in encoding.ids if i in texts.controls), None)) is not None:
        raise RequestError(
            f"{name} has the model's control token {tokenizer.id_to_token(control)!r} in it, which this tokenizer "
            "cannot read as text; take it out"
        )
    room = reads.longest - tokenizer.num_special_tokens_to_add(False)
    if truncate and len(encoding) > room:
        encoding.truncate(max(room, 0), direction=texts.side)
    ids: list[int] = tokenizer.post_process(encoding).ids
    if not ids:
        raise RequestError(f"{name} has no tokens for model {checkpoint.model}; send some words")
    if max(ids) >= reads.vocab:
        raise ModelError(
            f"{checkpoint.path / 'tokenizer.json'} gives id {max(ids)}, but config.json's vocab_size is "
            f"{reads.vocab}; both must be of the same model"
        )
    return ids


def _cleaned(rules: TextRules, text: str) -> str:
    """Return a text with the prompt and lower case that sentence-transformers applies before its tokenizer."""
    text = f"{rules.prompt}{text}"
    text = text.strip() if rules.strip else text
    return text.lower() if rules.lower == "text" else text


def _encode_prefix(tokenizer: Tokenizer, name: str, text: str, longest: int, characters: CharacterBudget) -> Encoding:
    """Return all tokens of a text, or more than `longest` of its first ones."""
    window = CHARACTERS_PER_TOKEN * longest
    while window < len(text):
        characters.take(window)
        encoding = _encode(tokenizer.encode_batch, name, text[:window])
        # The last word may continue behind the window or start a special token, which changes its tokens.
        words, sure = encoding.word_ids, window - _longest_special(tokenizer)
        pairs = zip(words, encoding.offsets, strict=True)
        if words and sum(word != words[-1] and stop <= sure for word, (_, stop) in pairs) > longest:
            return encoding
        window *= 2
    characters.take(len(text))
    return _encode(tokenizer.encode_batch_fast, name, text)  # the fast variant gives no word ids


def _longest_special(tokenizer: Tokenizer) -> int:
    return max((len(token.content) for token in tokenizer.get_added_tokens_decoder().values()), default=0)


def _encode(encode: Callable[..., list[Encoding]], name: str, text: str) -> Encoding:
    """Return a text's tokens, by a batch method: only those release the interpreter lock."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is not valid Unicode ({error.reason}); send it as UTF-8") from error
    return encode([text], add_special_tokens=False)[0]


# ----------------------------------------------------------------------------------------------------------------------
# JSON requests to token ids or pixels, without I/O.


Floats = npt.NDArray[np.float32]

MAX_TOP_K: Final = 1000
DEFAULT_TOP_K: Final = 5

TEXT_INPUTS: Final = ("text", "texts", "ids")
IMAGE_INPUTS: Final = ("image", "images")
AUDIO_INPUTS: Final = ("audio",)
AUDIO_OPTIONS: Final = ("language", "task", "window")
MAX_NEW_TOKENS: Final = 4096
DEFAULT_NEW_TOKENS: Final = 16
_OPTIONS: Final = frozenset({"truncate", "empty", "want", "top_k", "max_new_tokens", *AUDIO_OPTIONS})
# Read by the envelope below.
PINS: Final = ("strategy", "options", "devices", "wire", "accuracy", "weights", "route", "objective")
_ENVELOPE: Final = frozenset({"id", "deadline_ms", "reply_to", "report", *PINS})
UNKNOWN_SHOWN: Final = 8
_KEYS: Final = frozenset({*TEXT_INPUTS, *IMAGE_INPUTS, *AUDIO_INPUTS, *_OPTIONS, *_ENVELOPE})


_INPUTS: Final[Mapping[type, tuple[str, ...]]] = {ImageInput: IMAGE_INPUTS, SpeechInput: AUDIO_INPUTS}


@dataclass(frozen=True)
class ModelInput:
    """A request's input for the devices.

    inputs: token ids int32 [m], for a decoder with a leading zero [1 + m], or pixels uint8 [B, C, S, S]. is_list: the
    user sent a list and gets a list of results. wants_result: False for want "plan", which needs no devices.
    new_tokens: number of tokens to generate, rules: for them. empty: indices of empty texts, which are not computed and
    give zeros. seconds: of a recording.
    """

    shape: RequestShape
    inputs: npt.NDArray[Any]
    is_list: bool
    top_k: int
    wants_result: bool = True
    new_tokens: int = 0
    empty: tuple[int, ...] = ()
    rules: TokenRules = LIKELIEST
    seconds: float = 0.0


def read_input(checkpoint: Checkpoint, request: Any) -> ModelInput:
    """Return the model input of `request`, an object from `json.loads`; docs/reference/requests.md has its keys.

    Raises RequestError naming what is invalid or over a limit, ModelError if the checkpoint lacks a tokenizer.
    """
    prepared = _prepared(checkpoint, request)
    rows, columns = checkpoint.spec.output_shape(prepared.shape)
    if rows * columns > MAX_OUTPUT:
        raise RequestError(
            f"the answer would have {rows} x {columns} numbers, and at most {MAX_OUTPUT} are given to one request; "
            "send less at once"
        )
    return prepared


def _prepared(checkpoint: Checkpoint, request: Any) -> ModelInput:
    if not isinstance(request, Mapping):
        raise RequestError(f'a request is a JSON object such as {{"text": "..."}}, not {describe(request)}')
    unknown = sorted(str(key) for key in request if key not in _KEYS)
    if unknown:
        some = ", ".join(repr(key[:40]) for key in unknown[:UNKNOWN_SHOWN])
        more = f" and {len(unknown) - UNKNOWN_SHOWN} more" if len(unknown) > UNKNOWN_SHOWN else ""
        raise RequestError(
            f"unknown key{'s' if len(unknown) > 1 else ''} {some}{more}; a request may have {', '.join(sorted(_KEYS))}"
        )
    reads = checkpoint.spec.input_spec
    given = [key for key in (*TEXT_INPUTS, *IMAGE_INPUTS, *AUDIO_INPUTS) if key in request]
    allowed = next((keys for kind, keys in _INPUTS.items() if isinstance(reads, kind)), TEXT_INPUTS)
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
        raise RequestError(f"top_k must be an integer from 1 to {MAX_TOP_K}, not {describe(top_k)}")
    key, several = given[0], _is_several(given[0], request[given[0]])
    if isinstance(reads, SpeechInput):
        return _speech(checkpoint, reads, request, want, computes)
    if steering := [key for key in AUDIO_OPTIONS if key in request]:
        raise RequestError(f"{' and '.join(steering)}: for speech, which model {checkpoint.model} does not read")
    if isinstance(reads, ImageInput):
        pixels = _pictures(checkpoint, reads, request, several)
        return ModelInput(reads.batch(len(pixels), want), pixels, several, top_k, computes)
    if isinstance(reads, DecoderInput):
        return _decoded(checkpoint, reads, request, key, want, top_k, computes)
    if "max_new_tokens" in request:
        raise RequestError(
            f"model {checkpoint.model} generates no tokens; leave max_new_tokens out, or ask another model"
        )
    assert isinstance(reads, TextInput)
    request, empty = _without_empty(checkpoint, request, want)
    lengths, ids = _tokens(checkpoint, reads, request, key, several)
    rows = _mask_rows(checkpoint, key, ids) if reads.masks and want == "task" else ()
    return ModelInput(reads.batch(lengths, want, rows), ids, several, top_k, computes, empty=empty)


def _without_empty(
    checkpoint: Checkpoint, request: Mapping[str, Any], want: Want
) -> tuple[Mapping[str, Any], tuple[int, ...]]:
    """Return a request without its empty texts, and their indices, if the user wants zeros for them."""
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
        return request, ()  # an error, raised later
    return {**request, "texts": [text for i, text in enumerate(texts) if i not in empty]}, empty


def _decoded(
    checkpoint: Checkpoint,
    reads: DecoderInput,
    request: Mapping[str, Any],
    key: str,
    want: Want,
    top_k: int,
    computes: bool,
) -> ModelInput:
    """Return a decoder's input: one prompt, and the number of tokens to generate."""
    if _is_several(key, request[key]):
        raise RequestError(f"model {checkpoint.model} continues one text at a time; send one in each request")
    most = request.get("max_new_tokens", DEFAULT_NEW_TOKENS)
    if not is_int(most) or not 1 <= most <= MAX_NEW_TOKENS:
        raise RequestError(f"max_new_tokens must be an integer from 1 to {MAX_NEW_TOKENS}, not {describe(most)}")
    limit, new = reads.longest, most if want == "task" else 0
    if request.get("truncate") is True and new < limit:
        reads = replace(reads, longest=limit - new)  # leave room for the new tokens
    _, ids = _tokens(checkpoint, reads, request, key, several=False)
    if len(ids) + new > limit:
        if "max_new_tokens" in request or len(ids) >= limit:
            raise RequestError(
                f"{key} has {len(ids)} tokens, and model {checkpoint.model} takes at most {limit} with those that it "
                f"generates: shorten it, or ask for fewer than {most}"
            )
        new = limit - len(ids)
    shape, inputs = single_sequence(checkpoint.spec, ids, want, len(ids) + new)
    return ModelInput(shape, inputs, False, top_k, computes, new, rules=TokenRules(checkpoint.end_tokens))


def _is_several(key: str, value: Any) -> bool:
    """Return whether the user sent several inputs; ids may be one list or a list of lists."""
    if key == "ids":
        return isinstance(value, list) and any(isinstance(item, list) for item in value)
    return key in ("texts", "images")


def _want(request: Mapping[str, Any]) -> tuple[Want, bool]:
    """Return the wanted output, and whether devices compute it."""
    want = request.get("want", "task")
    if want in ("task", "plan"):
        return "task", want == "task"
    if want == "hidden":
        return "hidden", True
    raise RequestError(f'want must be "task", "hidden" or "plan", not {quoted(want)}')


def _tokens(
    checkpoint: Checkpoint, reads: TextInput, request: Mapping[str, Any], key: str, several: bool
) -> tuple[tuple[int, ...], npt.NDArray[np.int32]]:
    """Return the length of each sequence, and all ids packed [m]."""
    truncate = request.get("truncate", False)
    if not isinstance(truncate, bool):
        raise RequestError(f"truncate must be true or false, not {describe(truncate)}")
    limit = reads.longest
    sequences: list[list[int]] = []
    characters = CharacterBudget()
    for name, item in _items(key, request[key], several):
        ids = (
            _checked_ids(checkpoint, reads, name, item)
            if key == "ids"
            else encode_text(checkpoint, reads, name, item, truncate, characters)
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
    """Return each input with its name in errors."""
    if not several:
        return [(key, value)]
    if not isinstance(value, list) or not value:
        raise RequestError(f"{key} must be a list with at least one element, not {describe(value)}")
    if len(value) > MAX_SEQUENCES:
        raise RequestError(f"{key} has {len(value)} elements; send at most {MAX_SEQUENCES} in one request")
    return [(f"{key}[{i}]", item) for i, item in enumerate(value)]


def _checked_ids(checkpoint: Checkpoint, reads: TextInput, name: str, value: Any) -> list[int]:
    if not isinstance(value, list):
        raise RequestError(f"{name} must be a list of integers, not {describe(value)}")
    if not value:
        raise RequestError(f"{name} is empty; send at least one token id")
    for place, token in enumerate(value):
        if not is_int(token):
            raise RequestError(f"{name}[{place}] must be an integer, not {quoted(token)}")
        if not 0 <= token < reads.vocab:
            raise RequestError(f"{name} has the id {token}; model {checkpoint.model} knows 0 to {reads.vocab - 1}")
    _check_single(checkpoint, name, value)
    return value


def _check_single(checkpoint: Checkpoint, name: str, ids: Sequence[int]) -> None:
    """Raise RequestError for ids of which a model makes something else than one text."""
    spec = checkpoint.spec
    stem = spec.text if isinstance(spec, ModelSpec) else None
    if stem is None:
        return
    if stem.position_offset and stem.position_offset - 1 in ids:
        raise RequestError(f"{name} has the padding id {stem.position_offset - 1}; send ids without padding")
    separator = checkpoint.texts.separator if stem.types > 1 and checkpoint.has_tokenizer else None
    if separator is not None and separator in ids[:-1]:
        raise RequestError(
            f"{name} has the separator {separator} before its end: it is a pair of texts, or has padding, which model "
            f"{checkpoint.model} would read as one text; send one text without padding"
        )


def _pictures(
    checkpoint: Checkpoint, reads: ImageInput, request: Mapping[str, Any], several: bool
) -> npt.NDArray[np.uint8]:
    """Return all pixels [B, C, S, S]."""
    if "truncate" in request:
        raise RequestError("truncate is for texts; leave it out with pictures")
    from hepti_mqtt.service.pictures import decode  # here: most planners read no pictures

    key = "images" if several else "image"
    resample = preprocessor(checkpoint.config, checkpoint.extras).resample
    return decode(_items(key, request[key], several), reads, resample)


def _speech(
    checkpoint: Checkpoint, reads: SpeechInput, request: Mapping[str, Any], want: Want, computes: bool
) -> ModelInput:
    """Return a recording as frames behind the tokens that its text begins with."""
    from hepti_mqtt.service.speech import read_speech  # here: most planners read no sound

    if wrong := [key for key in ("truncate", "empty", "top_k") if key in request]:
        raise RequestError(f"{' and '.join(wrong)}: not for speech; leave it out")
    heard = read_speech(checkpoint, reads, request)
    room = reads.positions - len(heard.prompt) - heard.rules.before_text
    most = request.get("max_new_tokens", reads.positions // 2)
    if not is_int(most) or not 1 <= most <= room:
        raise RequestError(f"max_new_tokens must be an integer from 1 to {room}, not {describe(most)}")
    shape = reads.run(len(heard.prompt), len(heard.frames) // (2 * reads.bands), want)
    inputs = np.concatenate([np.array([0, *heard.prompt], np.int32), heard.frames])
    new = most + heard.rules.before_text if want == "task" else 0
    return ModelInput(shape, inputs, False, DEFAULT_TOP_K, computes, new, rules=heard.rules, seconds=heard.seconds)


# ----------------------------------------------------------------------------------------------------------------------
# The envelope of a request: id, deadline, reply topic, pins.


MAX_DEADLINE_MS: Final = 86_400_000
AUTO: Final = "auto"
WIRES: Final[tuple[WireDtype, ...]] = get_args(WireDtype)
WEIGHT_DTYPES: Final[tuple[WeightDtype, ...]] = get_args(WeightDtype)
ROUTES: Final[tuple[Route, ...]] = get_args(Route)
OBJECTIVES: Final[tuple[Objective, ...]] = get_args(Objective)
_GLIMPSED: Final = 1024  # bytes at either end of a request in which an id is looked for unparsed
_ID: Final = re.compile(rb'(?<!\\)"id"\s*:\s*"([^"\\]*)"')
_SHORT: Final = 1024  # characters
_DELIVERY_KEYS: Final = ("id", "deadline_ms", "reply_to", "report")


@dataclass(frozen=True, slots=True)
class RequestEnvelope:
    """The planner's part of a request; `body` is the model's part, for `read_input`."""

    id: str | None
    deadline_s: float | None
    reply_to: str | None
    pins: Pins | None
    body: Mapping[str, Any]
    report: bool = False


def parse(payload: bytes) -> Mapping[str, Any]:
    """Return the JSON object of a request; raises RequestError for anything else."""
    if len(payload) > MAX_REQUEST_BYTES:
        raise RequestError(f"a request of {len(payload)} bytes is over the limit of {MAX_REQUEST_BYTES}; send less")
    items = sum(map(payload.count, (b",", b"[", b"{"))) if len(payload) > MAX_ITEMS else 0
    if items > MAX_ITEMS:
        raise RequestError(
            f"the request has {items} commas and brackets, which is over the limit of {MAX_ITEMS}; send less at once, "
            "or only the part of a text that you need"
        )
    try:
        data = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f'The request is not valid JSON ({error}). Send an object such as {{"text": "..."}}{_json_advice(payload)}.'
        ) from error
    if not isinstance(data, dict):
        raise RequestError('A request is a JSON object such as {"text": "..."}.')
    return data


def _json_advice(payload: bytes) -> str:
    """Return what to do about a template that writes its own quotes, as in Home Assistant."""
    single = re.match(rb"\s*\{\s*'", payload) is not None
    if single or (payload[:_GLIMPSED].lstrip().startswith(b"{") and b'"' in payload):
        quotes = "keys and texts in double quotes" if single else "quotes and line breaks within a text escaped"
        return f", with {quotes}; a template does that by `{{{{ {{'text': text}} | to_json }}}}`"
    return ""


def request_id(data: Mapping[str, Any]) -> str | None:
    """Return the client's own id of a request, None without one; raises RequestError if it cannot stand in a topic."""
    value = data.get("id")
    if value is None:
        return None
    try:
        return check_name("request", value)
    except BadNameError as error:
        raise RequestError(f"id: {error}") from error


def peek_id(payload: bytes) -> str | None:
    """Return the id of an unparsed request, None if it is not near its beginning or end."""
    for part in (payload[:_GLIMPSED], payload[-_GLIMPSED:]):
        if found := _ID.search(part):
            with suppress(BadNameError, UnicodeDecodeError):
                return check_name("request", found[1].decode())
    return None


def digest(data: Mapping[str, Any]) -> bytes:
    """Return a hash of what a request asks, not of how it is delivered; raises RequestError if nested too deeply."""
    question = {k: v for k, v in data.items() if k not in _DELIVERY_KEYS}
    # Pictures and long texts are hashed directly: encoding them as JSON takes longer than the hash.
    long = {k: v for k, v in sorted(question.items()) if isinstance(v, str) and len(v) > _SHORT}
    question.update((k, len(v)) for k, v in long.items())
    try:
        text = json.dumps(question, sort_keys=True, separators=(",", ":"))
    except RecursionError as error:
        raise RequestError("the request is nested too deeply; send lists of lists at the most") from error
    found = hashlib.sha256(text.encode())
    for value in long.values():
        found.update(value.encode("utf-8", "surrogatepass"))
    return found.digest()


def split_envelope(data: Mapping[str, Any], own: Pins) -> RequestEnvelope:
    """Split a request into envelope and body; raises RequestError naming what is invalid.

    own: the operator's pins, the default for the request's.
    """
    deadline = data.get("deadline_ms")
    if deadline is not None:
        number = isinstance(deadline, int | float) and not isinstance(deadline, bool)
        if not number or not 0 < deadline <= MAX_DEADLINE_MS:
            raise RequestError(f"deadline_ms must be a number above 0, at most {MAX_DEADLINE_MS}")
    reply_to = data.get("reply_to")
    if reply_to is not None and not isinstance(reply_to, str):
        raise RequestError("reply_to must be a topic")
    report = data.get("report", False)
    if not isinstance(report, bool):
        raise RequestError("report must be true or false: whether the answer waits for what the devices counted")
    return RequestEnvelope(
        id=request_id(data),
        deadline_s=None if deadline is None else deadline / 1e3,
        reply_to=reply_to,
        pins=_pins(data, own) if any(data.get(key) is not None for key in PINS) else None,
        body={k: v for k, v in data.items() if k not in (*PINS, *_DELIVERY_KEYS)},
        report=report,
    )


def validate_pins(
    strategy: Any, options: Any, devices: Any, wire: Any, weights: Any, route: Any = None, accuracy: Any = None
) -> Pins:
    """Return validated pins: devices sorted, `auto` as None.

    Raises RequestError for an unknown strategy, variant, wire dtype, weight dtype or route, or an invalid device name.
    """
    if strategy is not None and strategy not in (choices := (AUTO, *STRATEGIES)):
        raise RequestError(f"Unknown strategy {str(strategy)[:40]!r}. Choose one of {', '.join(choices)}.")
    chosen = None if strategy == AUTO else strategy
    if not isinstance(options, Mapping):
        raise RequestError('options must be an object such as {"variant": "kv"}')
    if (error := options_error(chosen, options)) is not None:
        raise RequestError(f"options: {error}")
    if wire not in WIRES:
        raise RequestError(f"wire must be one of {', '.join(WIRES)}")
    if weights not in WEIGHT_DTYPES:
        raise RequestError(f"weights must be one of {', '.join(WEIGHT_DTYPES)}")
    way = None if route == AUTO else route
    if way not in (None, *ROUTES):
        raise RequestError(f"route must be one of {', '.join((AUTO, *ROUTES))}")
    budget = _budget(accuracy)
    if devices is None:
        return Pins(chosen, dict(options), None, wire, weights, way, accuracy=budget)
    if not isinstance(devices, list | tuple) or not devices:
        raise RequestError("devices must be a list of at least one name")
    try:
        names = {check_name("device", name) for name in devices}
    except BadNameError as error:
        raise RequestError(f"devices: {error}") from error
    return Pins(chosen, dict(options), tuple(sorted(names)), wire, weights, way, accuracy=budget)


def _budget(accuracy: Any) -> float | None:
    if accuracy is None:
        return None
    if not isinstance(accuracy, int | float) or isinstance(accuracy, bool) or not 0 < accuracy <= 1:
        raise RequestError("accuracy must be in (0, 1]: the largest relative error that a narrow wire dtype may cause")
    return float(accuracy)


def _pins(data: Mapping[str, Any], own: Pins) -> Pins:
    strategy = data.get("strategy")
    options = data.get("options")
    devices = data.get("devices")
    wire, accuracy = data.get("wire"), data.get("accuracy")
    if wire is not None and accuracy is not None:
        raise RequestError(
            "wire and accuracy exclude each other: accuracy lets the planner choose wire. Send one of them."
        )
    objective = own.objective if data.get("objective") is None else data["objective"]
    if objective not in OBJECTIVES:
        raise RequestError(f"objective must be one of {', '.join(OBJECTIVES)}")
    pins = validate_pins(
        own.strategy if strategy is None else strategy,
        (own.options if strategy is None else {}) if options is None else options,
        own.devices if devices is None else devices,
        (own.wire if accuracy is None else "f32") if wire is None else wire,
        own.weight_dtype if data.get("weights") is None else data["weights"],
        own.route if data.get("route") is None else data["route"],
        (own.accuracy if wire is None else None) if accuracy is None else accuracy,
    )
    return replace(pins, objective=objective)


# ----------------------------------------------------------------------------------------------------------------------
# Split a request into batches of whole items that fit a Program.


def split_into_batches(prepared: ModelInput, most: int) -> tuple[Batch, ...]:
    """Return the batches of a request, each of at most the size `most`; their outputs concatenate to the whole output.

    Raises ValueError if one item is larger.
    """
    shape, starts, size = prepared.shape, [0], 0
    for place, more in enumerate(shape.sizes):
        if more > most:
            raise ValueError(f"item {place} has size {more}, a run holds {most}")
        if size + more > most:
            starts.append(place)
            size = 0
        size += more
    slices = [shape.slice_items(*ends) for ends in pairwise([*starts, len(shape.sizes)])]
    return tuple(Batch(part, prepared.inputs[where]) for part, where in slices)
