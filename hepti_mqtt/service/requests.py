"""Convert JSON requests to model inputs within the limits, and split inputs into batches."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.core.errors import ContextLengthError, ModelError, OverloadedError, RequestError
from hepti_mqtt.core.spec import RequestShape, Want
from hepti_mqtt.models import preprocessor, single_sequence
from hepti_mqtt.models.generation import LIKELIEST, TokenRules
from hepti_mqtt.models.sentences import DOCUMENT_PROMPTS, MODULES, QUERY_PROMPTS
from hepti_mqtt.models.shapes import DecoderInput, ImageInput, TextInput
from hepti_mqtt.models.speech import SpeechInput
from hepti_mqtt.runtime.coordinator.batches import Batch
from hepti_mqtt.runtime.coordinator.pictured import PicturedPrompt
from hepti_mqtt.service import sampling
from hepti_mqtt.service.grammar import call_schema, read_choice, read_format, with_schema
from hepti_mqtt.service.messages import read_messages, read_tools
from hepti_mqtt.service.options import MAX_NEW_TOKENS, OPTIONS, checked, naming
from hepti_mqtt.service.picture_prompts import KEYS, PromptPictures, read_pictures
from hepti_mqtt.service.task_outputs import (
    Entities,
    Extraction,
    Matched,
    OwnLabels,
    Question,
    Ranking,
    Source,
    entailment,
    scoring,
)
from hepti_mqtt.service.texts import TextReader, Tokens, describe, quoted
from hepti_mqtt.service.thinking import OPEN

# ----------------------------------------------------------------------------------------------------------------------
# Limits of a request, each checked before the work that it limits. Documented in docs/reference/requests.md.


MAX_REQUEST_BYTES: Final = 16_000_000
MAX_ITEMS: Final = 500_000  # commas and opening brackets in a request's JSON, including those in texts
MAX_SEQUENCES: Final = 64
MAX_PIXELS: Final = 25_000_000  # of all pictures of a request; WebP pixels count twice
MAX_SCANS: Final = 64  # of a JPEG file: a scan covers all pixels and may be a few bytes long
MAX_OUTPUT: Final = 8_000_000  # numbers in an answer
MAX_WAITING_BYTES: Final = 128 << 20  # ids and pixels of all unanswered requests


class MemoryQuota:
    """A memory limit; bytes stay reserved until their holder is garbage-collected."""

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes
        self._lock = threading.RLock()  # garbage collection may call `_give` while this thread holds the lock

    def take(self, nbytes: int, holder: object) -> None:
        """Reserve bytes until `holder` is garbage-collected; raises OverloadedError if too few are left."""
        with self._lock:
            if nbytes > self._left:
                raise OverloadedError(
                    f"unanswered requests already hold nearly {MAX_WAITING_BYTES >> 20} MB, and this request needs "
                    f"{nbytes} bytes; try again later"
                )
            self._left -= nbytes
        weakref.finalize(holder, self._give, nbytes).atexit = False

    def _give(self, nbytes: int) -> None:
        with self._lock:
            self._left += nbytes


# ----------------------------------------------------------------------------------------------------------------------
# JSON requests to token ids or pixels, without I/O.


DEFAULT_TOP_K: Final = 5
DEFAULT_NEW_TOKENS: Final = 16
LAST_TOKENS: Final = 8  # of a prompt, searched for the start of a thought
TEMPLATE: Final = "This example is {}."
PICTURE_TEMPLATE: Final = "This is a photo of {}."
# Tokens of a window (question and part of the context), as in transformers' extractive question answering.
WINDOW: Final = 384
OVERLAP: Final = 128
MAX_ANSWER_TOKENS: Final = 15

IMAGE_FORMS: Final = (("image",), ("images",))
AUDIO_FORMS: Final = (("audio",),)
PAIR_FORMS: Final = (("text", "text_pair"), ("pairs",))
RANKING_FORM: Final = ("query", "documents")
LABEL_FORMS: Final = (("text", "candidate_labels"), ("texts", "candidate_labels"))
MATCHED_FORMS: Final = (("image", "candidate_labels"), ("images", "candidate_labels"))
ANSWER_FORM: Final = ("question", "context")
MESSAGES_FORM: Final = ("messages",)
SEEN_FORMS: Final = tuple((text, key) for text in ("text", "messages") for key in KEYS)
_FORMS: Final = (
    ("text",), ("texts",), ("ids",), *PAIR_FORMS, RANKING_FORM, *LABEL_FORMS, ANSWER_FORM, *IMAGE_FORMS,
    *AUDIO_FORMS, MESSAGES_FORM, *SEEN_FORMS,
)  # fmt: skip
_INPUTS: Final = tuple(dict.fromkeys(key for form in _FORMS for key in form))
_MATCHED_KEYS: Final = ("image", "images", "candidate_labels", "hypothesis_template", "top_k", "truncate")
# Read by `envelope.py`.
PINS: Final = ("strategy", "options", "devices", "wire", "accuracy", "weights", "route", "objective")
_ENVELOPE: Final = frozenset({"id", "deadline_ms", "reply_to", "report", *PINS})
UNKNOWN_SHOWN: Final = 8
REQUEST_KEYS: Final = frozenset({*_INPUTS, *OPTIONS, *_ENVELOPE})


@dataclass(frozen=True)
class ModelInput:
    """A request's input for the devices."""

    shape: RequestShape
    inputs: npt.NDArray[Any]  #: token ids int32 [m], of a decoder [1 + m] after a zero, or pixels uint8 [B, C, S, S]
    is_list: bool  #: the user sent a list and receives a list of results
    top_k: int
    wants_result: bool = True  #: False for want "plan", which needs no run
    new_tokens: int = 0  #: maximum number of generated tokens
    empty: tuple[int, ...] = ()  #: indices of empty texts, answered by zeros without a run
    dimensions: int = 0  #: of an embedding, 0 for all
    raw_scores: bool = False  #: answer logits instead of scores
    question: Question | None = None  #: conversion of the outputs; None: the model's task, one answer per input
    rules: TokenRules = LIKELIEST  #: for generated tokens
    stop: tuple[str, ...] = ()  #: texts that end the generation
    guesses: bool = False  #: allow speculative decoding
    seconds: float = 0.0  #: length of a recording
    thoughts: bool | None = None  #: whether the text starts inside a thought; None: do not separate thoughts
    silent: bool = False  #: a recording without speech: its text is empty
    sound_rows: int = 0  #: rows of sound in a recording, if the request wants times of words, else 0
    pictured: PicturedPrompt | None = None  #: picture rows of the prompt, None without pictures


def read_input(
    checkpoint: Checkpoint,
    request: Any,
    other_models: Sequence[Checkpoint] = (),
    pictures: PromptPictures | None = None,
) -> ModelInput:
    """Return the model input of `request`, an object from `json.loads`; docs/reference/requests.md has its keys.

    other_models: the other models of the same public name, listed in errors. pictures: of a prompt; their keys are
    not in `request`. Raises RequestError for invalid or too large values, ModelError without tokenizer.
    """
    prepared = _prepared(checkpoint, request, other_models, pictures)
    rows, columns = checkpoint.spec.output_shape(prepared.shape)
    if rows * columns > MAX_OUTPUT:
        raise RequestError(
            f"the answer would have {rows} x {columns} numbers, and the limit is {MAX_OUTPUT}; send fewer or shorter "
            "inputs in one request"
        )
    return prepared


def reader_of(models: Sequence[Checkpoint], request: Mapping[str, Any]) -> int:
    """Return the index of the model that reads a request; 0 if no model of the name reads its keys."""
    given = {key for key in _INPUTS if key in request}
    return next((i for i, one in enumerate(models) if any({*form} == given for form in forms(one))), 0)


def read_seen(words: Checkpoint, eyes: Checkpoint, request: Mapping[str, Any]) -> tuple[ModelInput, ModelInput]:
    """Return the inputs of a prompt with pictures: the vision tower's input, then the text model's input.

    Raises as `read_input` does.
    """
    if request.get("want", "task") == "hidden":
        raise RequestError("want hidden is for texts without pictures; leave the pictures out", "want")
    pictures = read_pictures(words, eyes, request)
    text = read_input(words, {key: value for key, value in request.items() if key not in KEYS}, (eyes,), pictures)
    input_spec = eyes.spec.input_spec
    assert isinstance(input_spec, ImageInput)
    return ModelInput(input_spec.batch(len(pictures.pixels)), pictures.pixels, True, DEFAULT_TOP_K), text


def _prepared(
    checkpoint: Checkpoint,
    request: Any,
    other_models: Sequence[Checkpoint] = (),
    pictures: PromptPictures | None = None,
) -> ModelInput:
    if not isinstance(request, Mapping):
        raise RequestError(f'a request is a JSON object such as {{"text": "..."}}, not {describe(request)}')
    unknown = sorted(str(key) for key in request if key not in REQUEST_KEYS)
    if unknown:
        some = ", ".join(repr(key[:40]) for key in unknown[:UNKNOWN_SHOWN])
        more = f" and {len(unknown) - UNKNOWN_SHOWN} more" if len(unknown) > UNKNOWN_SHOWN else ""
        raise RequestError(
            f"unknown key{'s' if len(unknown) > 1 else ''} {some}{more}; a request may have "
            f"{', '.join(sorted(REQUEST_KEYS))}"
        )
    reads, request = checkpoint.spec.input_spec, checked(request)
    form = _form(checkpoint, request, other_models)
    want: Want = "hidden" if request.get("want") == "hidden" else "task"
    computes = request.get("want") != "plan"
    top_k = request.get("top_k", DEFAULT_TOP_K)
    if not top_k and not isinstance(reads, DecoderInput):  # a decoder accepts 0, which overrides its files
        raise RequestError("top_k must be at least 1", "top_k")
    several = _is_several(form, request)
    if isinstance(reads, SpeechInput):
        from hepti_mqtt.service.speech import read_speech  # it imports this file

        return read_speech(checkpoint, reads, request, want, computes)
    if isinstance(reads, ImageInput):
        pixels = _pictures(checkpoint, reads, request, several)
        return ModelInput(reads.batch(len(pixels), want), pixels, several, top_k, computes)
    assert isinstance(reads, TextInput)
    truncate = "truncate" in request
    if isinstance(reads, DecoderInput):
        return _decoded(checkpoint, reads, request, form[0], want, top_k, computes, pictures)
    request, empty = _without_empty(checkpoint, request, want)
    task = checkpoint.spec.head.task
    places = want == "task" and task in ("token_classification", "question_answering")
    reader = TextReader(checkpoint, reads, truncate, offsets=places)
    sequences, question = _READ.get(form, _read_inputs)(checkpoint, reader, request, form, several)
    lengths = tuple(len(one.ids) for one in sequences)
    ids = np.array([token for one in sequences for token in one.ids], np.int32)
    rows = _mask_rows(checkpoint, reads, form[0], ids) if reads.masks and want == "task" else ()
    return ModelInput(
        reads.batch(lengths, want, rows),
        ids,
        several,
        top_k,
        computes,
        empty=empty,
        dimensions=_dimensions(request, checkpoint.spec.output_shape(reads.shape(1))[1]),
        raw_scores="raw_scores" in request,
        question=question,
    )


def _dimensions(request: Mapping[str, Any], most: int) -> int:
    dimensions: int = request.get("dimensions", 0)
    if dimensions > most:
        raise RequestError(f"dimensions must be an integer from 1 to {most}, not {dimensions}", "dimensions")
    return dimensions


Form = tuple[str, ...]


def forms(checkpoint: Checkpoint) -> tuple[Form, ...]:
    """Return the combinations of input keys that a model reads."""
    reads, head = checkpoint.spec.input_spec, checkpoint.spec.head
    if isinstance(reads, ImageInput):
        return () if head.square else IMAGE_FORMS
    if isinstance(reads, SpeechInput):
        return AUDIO_FORMS
    if isinstance(reads, DecoderInput):
        return (("text",), ("ids",), MESSAGES_FORM, *(SEEN_FORMS if checkpoint.sees else ()))
    assert isinstance(reads, TextInput)
    texts: tuple[Form, ...] = (("text",), ("texts",))
    if head.task == "question_answering":
        return (ANSWER_FORM, ("ids",))
    if head.task == "classification":
        texts = PAIR_FORMS if scoring(checkpoint).declared else (*texts, *PAIR_FORMS)
        ranks = (RANKING_FORM,) if head.outputs == 1 else ()
        entails = LABEL_FORMS if entailment(head.labels)[0] >= 0 else ()
        return (*texts, ("ids",), *ranks, *entails)
    if head.task == "embedding":
        one_text = MODULES in checkpoint.extras or reads.end is not None or reads.padded
        pairs = () if one_text else PAIR_FORMS
        return (*texts, ("ids",), *pairs, RANKING_FORM)
    return (*texts, ("ids",), *(PAIR_FORMS if head.task == "masked_token" else ()))


def _form(checkpoint: Checkpoint, request: Mapping[str, Any], other_models: Sequence[Checkpoint] = ()) -> Form:
    """Return the input keys of a request; raises RequestError if the model does not read this combination."""
    keys = tuple(key for key in _INPUTS if key in request)
    allowed = forms(checkpoint)
    matched = next((form for form in allowed if {*form} == {*keys}), None)
    if matched is None:
        every = [*allowed, *(form for other in other_models for form in forms(other))]
        every += MATCHED_FORMS if other_models and checkpoint.similarity is not None else ()
        reads = "; ".join(" and ".join(form) for form in every)
        raise RequestError(
            f"model {checkpoint.model} reads one of: {reads}. This request has "
            f"{' and '.join(keys) or 'none'}{_why_not(checkpoint, keys)}; send one of these, or use another model"
        )
    for name, option in OPTIONS.items():
        if name not in request:
            continue
        if option.inputs and not {*option.inputs} & {*keys}:
            raise RequestError(f"{name} goes with {' or '.join(option.inputs)}; leave it out", name)
        if option.tasks and checkpoint.spec.head.task not in option.tasks:
            words = " and ".join(option.tasks).replace("_", " ")
            raise RequestError(f"{name} is for {words}, which model {checkpoint.model} does not do; leave it out", name)
    return matched


def _why_not(checkpoint: Checkpoint, given: Sequence[str]) -> str:
    """Return why a classifier does not read a request, as the end of a sentence."""
    head = checkpoint.spec.head
    if head.task != "classification":
        return ""
    if "documents" in given and head.outputs > 1:
        return f", and only models with one label rank documents: this model has {head.outputs}"
    if "candidate_labels" in given and entailment(head.labels)[0] < 0:
        return ", and only models with a label that begins with 'entail' accept your own labels"
    return ", and its files say that it scores pairs of texts" if scoring(checkpoint).declared else ""


def _without_empty(
    checkpoint: Checkpoint, request: Mapping[str, Any], want: Want
) -> tuple[Mapping[str, Any], tuple[int, ...]]:
    """Return a request without its empty texts, and their indices, if the user wants zeros for them."""
    choice, texts = request.get("empty", "error"), request.get("texts")
    if choice == "error" or not isinstance(texts, list):
        return request, ()
    if want != "task" or checkpoint.spec.head.task != "embedding":
        raise RequestError('"empty": "zero" applies only to embeddings, and this request wants none; leave it out')
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
    pictures: PromptPictures | None = None,
) -> ModelInput:
    """Return a decoder's input: one prompt, and the number of tokens to generate."""
    if _is_several((key,), request):
        raise RequestError(f"model {checkpoint.model} continues one text at a time; send one in each request")
    # A chat model ends its answer with an end token.
    usual = MAX_NEW_TOKENS if key == "messages" else DEFAULT_NEW_TOKENS
    most, is_bound = request.get("max_new_tokens", usual), "fit" in request or "max_new_tokens" not in request
    if most > MAX_NEW_TOKENS and not is_bound:
        raise RequestError(
            f"max_new_tokens must be an integer from 1 to {MAX_NEW_TOKENS}, not {most}", "max_new_tokens"
        )
    limit, new = reads.longest, min(most, MAX_NEW_TOKENS) if want == "task" else 0
    truncate = "truncate" in request
    if truncate and new < limit:
        reads = replace(reads, longest=limit - new)  # leave room for the new tokens
    reader, schema = TextReader(checkpoint, reads, truncate), read_format(request.get("response_format"))
    thoughts: bool | None = None
    if key == "messages":
        tokens, schema, thoughts = _conversation(checkpoint, request, schema, pictures)
    elif pictures is not None:
        tokens = Tokens(pictures.tokens(request[key]))
    else:
        tokens = reader.ids(key, request[key]) if key == "ids" else reader.text(key, request[key])
    ids = np.array(tokens.ids, np.int32)
    if len(ids) + new > limit:
        if not is_bound or len(ids) >= limit:
            ask = f"lower max_new_tokens to {limit - len(ids)}, or " if new and len(ids) < limit else ""
            raise ContextLengthError(
                f"{key} has {len(ids)} tokens, and model {checkpoint.model} has a context length of {limit}, including "
                f"generated tokens: {ask}shorten it",
                key,
            )
        new = limit - len(ids)
    shape, inputs = single_sequence(checkpoint.spec, ids, want, len(ids) + new)
    pictured = None if pictures is None else pictures.prompt(tokens.ids)
    rules, stop = sampling.read_sampling(
        checkpoint, request, TokenRules(checkpoint.end_tokens), ids.tolist(), reads.vocab
    )
    if schema is not None:
        rules = with_schema(checkpoint, rules, schema, reads.vocab)
    if (most := sampling.MAX_LIKELY_IN_ALL // (rules.likely + 1 or 1)) < new and rules.likely >= 0:
        if not is_bound:
            raise RequestError(f"logprobs {rules.likely} is possible for {most} tokens: lower it or max_new_tokens")
        new = most
    guesses = "speculate" not in request
    return ModelInput(
        shape, inputs, False, top_k, computes, new, rules=rules, stop=stop, guesses=guesses, thoughts=thoughts,
        pictured=pictured,
    )  # fmt: skip


class _Conversation(NamedTuple):
    """Messages as tokens, with the form of their answer."""

    tokens: Tokens
    schema: Mapping[str, Any] | None  #: JSON schema of the answer
    thoughts: bool | None  #: whether the answer starts inside a thought; None without thoughts


def _conversation(
    checkpoint: Checkpoint,
    request: Mapping[str, Any],
    schema: Mapping[str, Any] | None,
    pictures: PromptPictures | None,
) -> _Conversation:
    """Read messages; if tool_choice demands a call, the answer follows the call's schema."""
    with naming("messages"):
        messages = read_messages(request["messages"], [] if checkpoint.sees else None)
    marks = None
    if pictures is not None and pictures.messages is not None:
        messages, marks = pictures.messages, (pictures.mark, pictures.written)
    with naming("tools"):
        tools = read_tools(request.get("tools"))
    demanded = read_choice(request.get("tool_choice"), tools)
    if demanded and schema is not None:
        raise RequestError("response_format and a tool_choice that demands a call exclude each other; send one of them")
    if not checkpoint.has_tokenizer or (chat := checkpoint.chat) is None:
        raise RequestError(
            f"model {checkpoint.model} has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json), so it reads no messages; send text"
        )
    follows_schema = bool(demanded) or schema is not None
    thinking = request.get("thinking", False if follows_schema else None)
    if thinking and not chat.thinks:
        raise RequestError(f"model {checkpoint.model} has no thoughts: leave thinking out", "thinking")
    if thinking and follows_schema:
        raise RequestError("a text by a schema has no thoughts: leave thinking out", "thinking")
    ids = chat.ids(messages, tools, thinking, marks)
    if tools and ids == chat.ids(messages, None, thinking, marks):
        raise RequestError(
            f"model {checkpoint.model} supports no tools: its chat template ignores them; leave them out", "tools"
        )
    thoughts = None
    if chat.thinks and not follows_schema:
        end = checkpoint.tokenizer.decode(ids[-LAST_TOKENS:], skip_special_tokens=False)
        thoughts = end.rstrip().endswith(OPEN)
    if demanded:
        ids, schema = [*ids, *chat.call_start], call_schema(demanded, chat.call_arguments)
    if not ids:
        raise RequestError("messages contain no tokens; send some text")
    reads = checkpoint.spec.input_spec
    assert isinstance(reads, DecoderInput)
    if max(ids) >= reads.vocab:
        raise ModelError(
            f"{checkpoint.path}: its tokenizer gives id {max(ids)}, and config.json's vocab_size is {reads.vocab}; "
            "both must belong to the same model"
        )
    return _Conversation(Tokens(ids), schema, thoughts)


def _is_several(form: Form, request: Mapping[str, Any]) -> bool:
    """Return whether the user sent several inputs; ids may be one list or a list of lists."""
    if form == ("ids",):
        value = request["ids"]
        return isinstance(value, list) and any(isinstance(item, list) for item in value)
    return bool({"texts", "pairs", "images"} & {*form})


def _mask_rows(checkpoint: Checkpoint, reads: TextInput, key: str, ids: npt.NDArray[np.int32]) -> tuple[int, ...]:
    rows = tuple(np.flatnonzero(ids % reads.vocab == checkpoint.mask_id).tolist())
    if not rows:
        mask = checkpoint.tokenizer.id_to_token(checkpoint.mask_id)
        raise RequestError(
            f"{key} has no {mask} for model {checkpoint.model} to fill in; put {mask} in the place of the wanted token"
        )
    return rows


def _items(key: str, value: Any, several: bool = True) -> list[tuple[str, Any]]:
    """Return the inputs, each with its name for errors."""
    if not several:
        return [(key, value)]
    if not isinstance(value, list) or not value:
        raise RequestError(f"{key} must be a list with at least one element, not {describe(value)}")
    if len(value) > MAX_SEQUENCES:
        raise RequestError(f"{key} has {len(value)} elements; send at most {MAX_SEQUENCES} in one request")
    return [(f"{key}[{i}]", item) for i, item in enumerate(value)]


# ----------------------------------------------------------------------------------------------------------------------
# Convert each form of a request to token sequences, and to the question that their outputs answer.


Read = tuple[list[Tokens], Question | None]


def _read_inputs(
    checkpoint: Checkpoint, reader: TextReader, request: Mapping[str, Any], form: Form, several: bool
) -> Read:
    """Read texts or token ids; each has its own answer."""
    (key,) = form
    task = checkpoint.spec.head.task
    if key == "ids":
        items = _items(key, request[key], several)
        types = request.get("token_types", [None] * len(items) if several else None)
        if several and (not isinstance(types, list) or len(types) != len(items)):
            raise RequestError(f"token_types must have one list for each of the {len(items)} lists of ids")
        by_item = types if several else [types]
        read = [reader.ids(name, item, kinds) for (name, item), kinds in zip(items, by_item, strict=True)]
    else:
        prompt = _prompt(checkpoint, request)
        read = [reader.text(name, item, prompt) for name, item in _items(key, request[key], several)]
    if task == "token_classification" and request.get("want") != "hidden":
        return read, _entities(checkpoint, request, read, [text for _, text in _items(key, request[key], several)])
    if task == "question_answering":
        return read, Extraction(request.get("max_answer_tokens", MAX_ANSWER_TOKENS))
    return read, None


def _prompt(checkpoint: Checkpoint, request: Mapping[str, Any]) -> str | None:
    """Return the prompt that a request names, None for the model's default prompt."""
    if "prompt" not in request:
        return None
    rules, name = checkpoint.text_rules, request["prompt"]
    if not isinstance(name, str) or name not in rules.prompts:
        names = ", ".join(map(repr, rules.prompts)) or "none"
        raise RequestError(f"model {checkpoint.model} has no prompt {quoted(name)}; its prompts are: {names}", "prompt")
    return _pooled(checkpoint, rules.prompts[name])


def _pooled(checkpoint: Checkpoint, prompt: str) -> str:
    """Return the prompt; raises RequestError if the model excludes prompts from pooling."""
    if prompt and not checkpoint.text_rules.pools_prompt:
        raise RequestError(
            f"model {checkpoint.model} excludes its prompts from pooling, which is not supported; send texts "
            "without a prompt, or use another model"
        )
    return prompt


def _entities(
    checkpoint: Checkpoint, request: Mapping[str, Any], read: Sequence[Tokens], items: Sequence[Any]
) -> Entities:
    aggregation = request.get("aggregation", "simple")
    encodings = [tokens.encoding for tokens in read if tokens.encoding is not None]
    if encodings:
        return Entities(aggregation == "simple", tuple(items), tuple(map(Source.of, encodings)))
    own = checkpoint.texts.controls if checkpoint.has_tokenizer else frozenset()
    return Entities(aggregation == "simple", own=tuple(np.array([i in own for i in one.ids], bool) for one in read))


def _read_pairs(
    _checkpoint: Checkpoint, reader: TextReader, request: Mapping[str, Any], form: Form, several: bool
) -> Read:
    """Read pairs of texts; each has its own answer."""
    if not several:
        return [reader.pair(("text", "text_pair"), (request["text"], request["text_pair"]))], None
    read = []
    for name, pair in _items(form[0], request[form[0]]):
        if not isinstance(pair, list) or len(pair) != 2:
            has = f"a list of {len(pair)}" if isinstance(pair, list) else describe(pair)
            raise RequestError(f"{name} must be a list of two texts, not {has}")
        read.append(reader.pair((f"{name}[0]", f"{name}[1]"), (pair[0], pair[1])))
    return read, None


def _read_ranking(
    checkpoint: Checkpoint, reader: TextReader, request: Mapping[str, Any], _form: Form, _several: bool
) -> Read:
    """Read a query and documents: as pairs for a cross-encoder, else as texts to compare."""
    query, documents = request["query"], _items("documents", request["documents"])
    top_k = request.get("top_k")
    returned = tuple(text for _, text in documents) if "return_documents" in request else None
    ranking = Ranking(top_k, "raw_scores" in request, returned)
    if checkpoint.spec.head.task != "embedding":
        return [reader.pair(("query", name), (query, text)) for name, text in documents], ranking
    rules = checkpoint.text_rules
    first, others = (_pooled(checkpoint, rules.prompt_for(names)) for names in (QUERY_PROMPTS, DOCUMENT_PROMPTS))
    return [reader.text("query", query, first), *(reader.text(name, text, others) for name, text in documents)], ranking


def _read_labels(
    _checkpoint: Checkpoint, reader: TextReader, request: Mapping[str, Any], form: Form, several: bool
) -> Read:
    """Read texts and a user's own labels: pair each text with a sentence per label."""
    labels = _own_labels(request, TEMPLATE)
    items = _items(form[0], request[form[0]], several)
    if len(items) * len(labels) > MAX_SEQUENCES:
        raise RequestError(
            f"{len(items)} texts with {len(labels)} labels are {len(items) * len(labels)} pairs; send at most "
            f"{MAX_SEQUENCES} in one request"
        )
    read = [
        reader.pair((name, "candidate_labels"), (text, sentence), first_only=True)
        for name, text in items
        for sentence in labels.values()
    ]
    return read, OwnLabels(tuple(labels), "multi_label" in request, request.get("top_k"))


def _own_labels(request: Mapping[str, Any], usual: str) -> dict[str, str]:
    """Return the sentence of each of a user's own labels; usual: the default template."""
    labels = [label for _, label in _items("candidate_labels", request["candidate_labels"])]
    if not all(isinstance(label, str) and label.strip() for label in labels) or len({*labels}) < len(labels):
        raise RequestError("candidate_labels must be different texts, none of them empty")
    template = request.get("hypothesis_template", usual)
    if not isinstance(template, str) or template.count("{}") != 1:
        raise RequestError(f"hypothesis_template must be a text with one {{}} for the label, not {quoted(template)}")
    return {label: template.replace("{}", label) for label in labels}


def read_matched(words: Checkpoint, pictures: Checkpoint, request: Mapping[str, Any]) -> tuple[ModelInput, ModelInput]:
    """Return the inputs of pictures with a user's own labels: a sentence per label, and the pictures.

    The question of the pictures' input compares the vectors of both. Raises as `read_input` does.
    """
    if wrong := sorted(str(key)[:40] for key in request if key not in (*_MATCHED_KEYS, *_ENVELOPE)):
        raise RequestError(
            f"labels of pictures go with {', '.join(_MATCHED_KEYS)}, and this request has {', '.join(wrong)}; leave it "
            "out"
        )
    request = checked(request)
    labels, top_k = _own_labels(request, PICTURE_TEMPLATE), request.get("top_k")
    sentences = read_input(words, {"texts": [*labels.values()], "truncate": "truncate" in request})
    images = read_input(pictures, {key: request[key] for key in ("image", "images") if key in request})
    assert words.similarity is not None
    return sentences, replace(images, question=Matched(tuple(labels), words.similarity, top_k))


def _read_question(
    _checkpoint: Checkpoint, reader: TextReader, request: Mapping[str, Any], _form: Form, _several: bool
) -> Read:
    """Read a question and a context; split a long context into windows."""
    values = (request["question"], request["context"])
    read = reader.windows(("question", "context"), values, WINDOW, OVERLAP, MAX_SEQUENCES)
    most = request.get("max_answer_tokens", MAX_ANSWER_TOKENS)
    sources = tuple(Source.of(tokens.encoding) for tokens in read if tokens.encoding is not None)
    return read, Extraction(most, "no_answer" in request, request["context"], sources)


_READ: Final[Mapping[Form, Callable[[Checkpoint, TextReader, Mapping[str, Any], Form, bool], Read]]] = {
    **dict.fromkeys(PAIR_FORMS, _read_pairs),
    RANKING_FORM: _read_ranking,
    **dict.fromkeys(LABEL_FORMS, _read_labels),
    ANSWER_FORM: _read_question,
}


def _pictures(
    checkpoint: Checkpoint, reads: ImageInput, request: Mapping[str, Any], several: bool
) -> npt.NDArray[np.uint8]:
    """Return all pixels [B, C, S, S]."""
    if "truncate" in request:
        raise RequestError("truncate is for texts; leave it out with pictures")
    from hepti_mqtt.service.pictures import decode  # imported late: most planners read no pictures

    key = "images" if several else "image"
    resample = preprocessor(checkpoint.config, checkpoint.extras).resample
    return decode(_items(key, request[key], several), reads, resample)


# ----------------------------------------------------------------------------------------------------------------------
# Split a request into batches of whole items within the largest shape of a Program.


def split_into_batches(prepared: ModelInput, most: int) -> tuple[Batch, ...]:
    """Return the batches of a request, each of at most size `most`; their outputs concatenate to the whole output.

    Raises ValueError if an item is larger.
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
