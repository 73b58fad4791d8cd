"""Generated texts that follow a JSON schema: masks of valid next tokens; needs the extra `grammar`."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.core.errors import ModelError, RequestError
from hepti_mqtt.models.generation import TokenRules
from hepti_mqtt.service.texts import describe, quoted

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

MAX_SCHEMA: Final = 100_000  # characters
FORMATS: Final = ("text", "json_object", "json_schema")
# Small models would generate whitespace without end.
_OPTIONS: Final[JsonCompileOptions] = {"whitespace_pattern": r"[ \n]{0,16}"}
_ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}
_NO_ARGUMENTS: Final[Mapping[str, Any]] = {"type": "object", "additionalProperties": False}
_tokenizer_lock = threading.Lock()


class JsonGrammar:
    """Valid next tokens of a text that follows a JSON schema.

    Raises RequestError for an invalid or unsupported schema.
    """

    def __init__(self, checkpoint: Checkpoint, schema: Mapping[str, Any], vocab: int) -> None:
        """vocab: size of the logits."""
        self._vocab = vocab
        self._matcher = _matcher(checkpoint, json.dumps(schema))
        self._consumed = list[int]()

    def allowed(self, tokens: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Return the mask of valid next tokens [V]; raises ModelError if the grammar is too complex."""
        self._consume(tokens)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        mask = np.zeros(self._vocab, np.bool_)
        unpacked = np.unpackbits(bits, bitorder="little", count=min(8 * len(bits), self._vocab))
        mask[: len(unpacked)] = unpacked
        if self._matcher.is_error() or not mask.any():
            raise ModelError(f"the schema allows no next token ({_reason(self._matcher)}); simplify it")
        return mask

    def is_whole(self, tokens: Sequence[int]) -> bool:
        """Return whether the text is complete."""
        self._consume(tokens)
        return self._matcher.is_stopped()

    def _consume(self, tokens: Sequence[int]) -> None:
        consumed = len(self._consumed)
        if list(tokens[:consumed]) != self._consumed:
            self._matcher.reset()
            self._consumed, consumed = [], 0
        new = list(tokens[consumed:])
        self._matcher.consume_tokens(new)
        self._consumed += new


def read_format(value: Any) -> Mapping[str, Any] | None:
    """Return the JSON schema of a response_format, or None; raises RequestError."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind not in FORMATS:
        raise RequestError(f"response_format must be an object with a type of {', '.join(FORMATS)}", "response_format")
    if kind == "text":
        return None
    if kind == "json_object":
        return _ANY_OBJECT
    named = value.get("json_schema")
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, Mapping):
        raise RequestError(
            f"response_format.json_schema.schema must be a JSON schema, not {describe(schema)}", "response_format"
        )
    return schema


def read_choice(value: Any, tools: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]]:
    """Return the functions to call one from, [] if the model may choose; raises RequestError."""
    functions = [tool["function"] for tool in tools or ()]
    if value in (None, "auto"):
        return []
    if not functions:
        raise RequestError("tool_choice goes with tools; leave it out", "tool_choice")
    if value == "required":
        return functions
    named = value.get("function") if isinstance(value, Mapping) and value.get("type") == "function" else None
    name = named.get("name") if isinstance(named, Mapping) else None
    chosen = [function for function in functions if function["name"] == name]
    if not chosen:
        names = ", ".join(str(function["name"])[:40] for function in functions)
        raise RequestError(
            'tool_choice must be "auto", "required" or {"type": "function", "function": {"name": ...}} with one of '
            f"{names}, not {quoted(name if name is not None else value)}",
            "tool_choice",
        )
    return chosen


def call_schema(functions: Sequence[Mapping[str, Any]], arguments: str) -> Mapping[str, Any]:
    """Return the schema of a call of one of several functions; arguments: key of the call's arguments."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": one["name"]}, arguments: one.get("parameters") or _NO_ARGUMENTS},
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for one in functions
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def with_schema(checkpoint: Checkpoint, rules: TokenRules, schema: Mapping[str, Any], vocab: int) -> TokenRules:
    """Return the rules of a text that follows a schema; vocab: size of the logits. Raises as `JsonGrammar` does."""
    grammar, stops = JsonGrammar(checkpoint, schema, vocab), rules.stops

    def ends(tokens: Sequence[int]) -> bool:
        return grammar.is_whole(tokens) or (stops is not None and stops(tokens))

    return replace(rules, allowed=grammar.allowed, stops=ends)


def _matcher(checkpoint: Checkpoint, schema: str) -> LLMatcher:
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise RequestError(
            "a text by a schema needs llguidance in the planner's environment: pip install '.[grammar]' in the "
            "checkout, or leave response_format and tool_choice out"
        ) from None
    if len(schema) > MAX_SCHEMA:
        raise RequestError(f"the schema has {len(schema)} characters; the limit is {MAX_SCHEMA}")
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_OPTIONS)
        matcher = LLMatcher(_tokenizer(checkpoint), grammar)
        matcher.compute_bitmask()  # raises for a schema that refers only to itself
        why = _reason(matcher)
    except ValueError as error:
        why = str(error)
    if why:
        raise RequestError(f"the JSON schema cannot be followed ({' '.join(why.split())[:300]}); change it")
    return matcher


def _reason(matcher: LLMatcher) -> str:
    """Return the first line of the error; the rest is the library's state."""
    return matcher.get_error().partition("\n")[0][:200]


def _tokenizer(checkpoint: Checkpoint) -> LLTokenizer:
    if not checkpoint.has_tokenizer:
        raise RequestError(f"model {checkpoint.model} has no tokenizer, so it writes no text by a schema")
    if not checkpoint.end_tokens:
        raise RequestError(
            f"model {checkpoint.model} has no end token (eos_token_id), so it writes no text by a schema"
        )
    with _tokenizer_lock:  # takes a second for a large vocabulary
        return _make_tokenizer(checkpoint.tokenizer, checkpoint.end_tokens)


@lru_cache(maxsize=4)
def _make_tokenizer(tokenizer: Tokenizer, ends: tuple[int, ...]) -> LLTokenizer:
    from llguidance import LLTokenizer

    try:
        return LLTokenizer(tokenizer.to_str(), eos_token=list(ends))
    except ValueError as error:
        raise RequestError(f"this model's tokenizer writes no text by a schema ({str(error)[:200]})") from error
