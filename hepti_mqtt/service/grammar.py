"""Texts that follow a JSON schema: which tokens may come next; needs the extra `grammar`."""

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
from hepti_mqtt.errors import ModelError, RequestError
from hepti_mqtt.models.generation import TokenRules
from hepti_mqtt.service.texts import describe, quoted

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

MAX_SCHEMA: Final = 100_000  # characters
FORMATS: Final = ("text", "json_object", "json_schema")
# Small models would write spaces for ever.
_OPTIONS: Final[JsonCompileOptions] = {"whitespace_pattern": r"[ \n]{0,16}"}
_ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}
_NO_ARGUMENTS: Final[Mapping[str, Any]] = {"type": "object", "additionalProperties": False}
_making = threading.Lock()


class JsonGrammar:
    """What may follow a text so far, so that the whole text is JSON by a schema.

    Raises RequestError for an invalid schema, or one of which a part is not supported.
    """

    def __init__(self, checkpoint: Checkpoint, schema: Mapping[str, Any], vocab: int) -> None:
        """vocab: of the logits."""
        self._vocab = vocab
        self._matcher = _matcher(checkpoint, json.dumps(schema))
        self._read = list[int]()

    def allowed(self, tokens: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Return which tokens may follow those of a text so far [V]; raises ModelError where that is too complex."""
        self._read_to(tokens)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        found = np.zeros(self._vocab, np.bool_)
        unpacked = np.unpackbits(bits, bitorder="little", count=min(8 * len(bits), self._vocab))
        found[: len(unpacked)] = unpacked
        if self._matcher.is_error() or not found.any():
            raise ModelError(f"no token may follow by the schema ({_reason(self._matcher)}); simplify it")
        return found

    def is_whole(self, tokens: Sequence[int]) -> bool:
        """Return whether nothing may follow."""
        self._read_to(tokens)
        return self._matcher.is_stopped()

    def _read_to(self, tokens: Sequence[int]) -> None:
        known = len(self._read)
        if list(tokens[:known]) != self._read:
            self._matcher.reset()
            self._read, known = [], 0
        new = list(tokens[known:])
        self._matcher.consume_tokens(new)
        self._read += new


def read_format(value: Any) -> Mapping[str, Any] | None:
    """Return the schema that a request's response_format wants of the text, None without one; raises RequestError."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind not in FORMATS:
        raise RequestError(
            f"response_format must be an object whose type is one of {', '.join(FORMATS)}", "response_format"
        )
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
    """Return of which functions one must be called, none where the model may choose; raises RequestError."""
    functions = [tool["function"] for tool in tools or ()]
    if value in (None, "auto"):
        return []
    if not functions:
        raise RequestError("tool_choice goes with tools; leave it out", "tool_choice")
    if value == "required":
        return functions
    named = value.get("function") if isinstance(value, Mapping) and value.get("type") == "function" else None
    name = named.get("name") if isinstance(named, Mapping) else None
    found = [function for function in functions if function["name"] == name]
    if not found:
        known = ", ".join(str(function["name"])[:40] for function in functions)
        raise RequestError(
            'tool_choice must be "auto", "required" or {"type": "function", "function": {"name": ...}} with one of '
            f"{known}, not {quoted(name if name is not None else value)}",
            "tool_choice",
        )
    return found


def call_schema(functions: Sequence[Mapping[str, Any]], arguments: str) -> Mapping[str, Any]:
    """Return the schema of a call of one of some functions; arguments: the key of what it is called with."""
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
    """Return the rules of a text that follows a schema; vocab: of the logits. Raises as `JsonGrammar` does."""
    grammar, stops = JsonGrammar(checkpoint, schema, vocab), rules.stops

    def ends(tokens: Sequence[int]) -> bool:
        return grammar.is_whole(tokens) or (stops is not None and stops(tokens))

    return replace(rules, allowed=grammar.allowed, stops=ends)


def _matcher(checkpoint: Checkpoint, schema: str) -> LLMatcher:
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise RequestError(
            "a text by a schema needs llguidance where the planner runs: pip install '.[grammar]' in the checkout, "
            "or leave response_format and tool_choice out"
        ) from None
    if len(schema) > MAX_SCHEMA:
        raise RequestError(f"the schema has {len(schema)} characters; at most {MAX_SCHEMA} are read")
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_OPTIONS)
        made = LLMatcher(_tokenizer(checkpoint), grammar)
        made.compute_bitmask()  # a schema that is made of nothing but itself is found here
        why = _reason(made)
    except ValueError as error:
        why = str(error)
    if why:
        raise RequestError(f"the JSON schema cannot be followed ({' '.join(why.split())[:300]}); change it")
    return made


def _reason(matcher: LLMatcher) -> str:
    """Return what is wrong, without the state of the library that stands behind it."""
    return matcher.get_error().partition("\n")[0][:200]


def _tokenizer(checkpoint: Checkpoint) -> LLTokenizer:
    if not checkpoint.has_tokenizer:
        raise RequestError(f"model {checkpoint.model} has no tokenizer, so it writes no text by a schema")
    if not checkpoint.end_tokens:
        raise RequestError(
            f"model {checkpoint.model} has no end token (eos_token_id), so it writes no text by a schema"
        )
    with _making:  # of a large vocabulary it takes a second
        return _made(checkpoint.tokenizer, checkpoint.end_tokens)


@lru_cache(maxsize=4)
def _made(tokenizer: Tokenizer, ends: tuple[int, ...]) -> LLTokenizer:
    from llguidance import LLTokenizer

    try:
        return LLTokenizer(tokenizer.to_str(), eos_token=list(ends))
    except ValueError as error:
        raise RequestError(f"this model's tokenizer writes no text by a schema ({str(error)[:200]})") from error
