"""The options of a request in a table, the source of MQTT checks, gateway bodies and the reference page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from hepti_mqtt.core.errors import RequestError
from hepti_mqtt.service.texts import is_int, is_number, quoted

MAX_TOP_K: Final = 1000
MAX_SEED: Final = 2**32 - 1
MAX_LIKELY: Final = 20
MAX_NEW_TOKENS: Final = 4096
MAX_STOPS: Final = 16
_LINK: Final = re.compile(r"\[([^]]*)\]\([^)]*\)")
_JSON_TYPES: Final = {"integer": "integer", "number": "number", "flag": "boolean", "text": "string"}


class Option(NamedTuple):
    """A key of a request other than its inputs."""

    name: str
    kind: str  #: integer, number, flag, text, or any; the reader of the option checks "any"
    sentence: str  #: for the reference page, in Markdown
    tasks: tuple[str, ...] = ()  #: of models with this option, () for all
    inputs: tuple[str, ...] = ()  #: the option requires one of these input keys, () for none
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    neutral: tuple[Any, ...] = ()  #: values without effect, in addition to null
    takes_list: bool = False  #: MQTT also takes a list, which the reader of the option checks

    def check(self, value: Any, key: str = "") -> None:
        """Raise RequestError for a value of another type or out of range; key: the client's name of the option."""
        fits = {
            "integer": is_int(value),
            "number": is_number(value),
            "flag": isinstance(value, bool),
            "text": isinstance(value, str),
            "any": True,
        }[self.kind]
        if fits and self.kind in ("integer", "number"):
            fits = (self.low is None or value >= self.low) and (self.high is None or value <= self.high)
        if not fits or (self.choices and value not in self.choices):
            raise RequestError(f"{key or self.name} must be {self.wanted}, not {quoted(value)}", param=key or self.name)

    @property
    def wanted(self) -> str:
        """Return the valid values in words."""
        if self.choices:
            return " or ".join(f'"{choice}"' for choice in self.choices)
        words = {"integer": "an integer", "number": "a number", "flag": "true or false", "text": "a text"}
        low, high = self.low, self.high
        if low is not None and high is not None:
            return f"{words[self.kind]} from {low:.10g} to {high:.10g}"
        return f"{words[self.kind]}{'' if low is None else f' of at least {low:g}'}"

    def schema(self) -> dict[str, Any]:
        """Return the option's JSON schema."""
        bounds = {"minimum": self.low, "maximum": self.high, "enum": list(self.choices) or None}
        kind = {"type": [_JSON_TYPES[self.kind], "null"]} if self.kind in _JSON_TYPES and not self.choices else {}
        limits = {key: value for key, value in bounds.items() if value is not None}
        return {**kind, **limits, "description": _LINK.sub(r"\1", self.sentence)}


_TEXT_INPUTS: Final = ("text", "ids", "messages")
_WRITES: Final[dict[str, Any]] = {"tasks": ("generation",), "inputs": _TEXT_INPUTS}
_SPEAKS: Final[dict[str, Any]] = {"inputs": ("audio",)}
_BOTH: Final[dict[str, Any]] = {"tasks": ("generation", "transcription"), "inputs": ("audio", *_TEXT_INPUTS)}
_LABELS: Final[dict[str, Any]] = {"inputs": ("candidate_labels",)}
_TABLE: Final = (
    Option("truncate", "flag", "`true` truncates texts that are too long for the model (for a decoder: "
           "including the generated tokens), of a pair the longer one first; without it, a long text is an "
           "error", neutral=(False,)),
    Option("prompt", "any", "the name of one of the model's prompts (`prompts` in config_sentence_transformers.json), "
           "such as `query` or `document`, instead of its default one; of speech, the text before it",
           ("embedding", "transcription"), ("text", "texts", "audio")),
    Option("dimensions", "integer", "of an embedding, how many of its first numbers to return (for Matryoshka models), "
           "normalized again where the model's embeddings are", ("embedding",), low=1),
    Option("raw_scores", "flag", "`true`: logits instead of scores, of labels and of rankings", ("classification",),
           neutral=(False,)),
    Option("return_documents", "flag", "`true`: each entry of a ranking has its `document`", (), ("documents",),
           neutral=(False,)),
    Option("multi_label", "flag", "`true`: each of your own labels has its own score", **_LABELS, neutral=(False,)),
    Option("hypothesis_template", "any", "the sentence about each of your own labels, with one `{}`", **_LABELS),
    Option("no_answer", "flag", "`true`: the answer is empty if the model finds that more likely", (), ("context",),
           neutral=(False,)),
    Option("max_answer_tokens", "integer", "of an answer in a text: 15 by default, at most 384",
           ("question_answering",), ("context", "ids"), 1, 384),
    Option("aggregation", "text", "of entities: `simple` (default) makes one of neighbours with the same label, `none` "
           "names each token", ("token_classification",), ("text", "texts", "ids"), choices=("simple", "none")),
    Option("empty", "text", "for embeddings: `error` (default), which names the empty text, or `zero`: an empty one of "
           "`texts` gets a vector of zeros", choices=("error", "zero")),
    Option("token_types", "any", "of `ids`, of the same lengths: makes pairs of them", (), ("ids",)),
    Option("want", "text", "`task` (default); `hidden`: the final hidden states of all tokens as base64 (for "
           "[CNNs](../guide/models.md#pictures): what the last dense layer reads); `plan`: nothing is computed, the "
           "answer comes when the plan's weights are loaded, with `result` null and the prediction for this request",
           choices=("task", "hidden", "plan")),
    Option("top_k", "integer", "how many labels or tokens to name: 5 by default, at most 1000; of "
           "rankings and your own labels all by default. Decoders: sample from the `top_k` likeliest tokens "
           "(0: from all)", low=0,
           high=MAX_TOP_K),
    Option("temperature", "number", "decoders: 0 to 2, applied before `top_k`, `top_p` and `min_p`, as in "
           "transformers; 0 takes the likeliest token. Default: that of the model's `generation_config.json`, "
           "else 0. Of [speech](../guide/speech.md#ask): from 0 to 1, or a list", **_BOTH,
           low=0, high=2, takes_list=True),
    Option("top_p", "number", "decoders: sample from the likeliest tokens whose probabilities sum to "
           "`top_p`",
           **_WRITES, low=0, high=1),
    Option("min_p", "number", "decoders: tokens below this fraction of the highest probability are "
           "excluded", **_WRITES, low=0, high=1),
    Option("seed", "integer", "the same seed gives the same text, under any plan", **_BOTH, low=0, high=MAX_SEED),
    Option("repetition_penalty", "number", "decoders: divides the logits of earlier tokens, also those of the "
           "prompt", **_WRITES, low=0.1, high=10),
    Option("presence_penalty", "number", "decoders: subtracted once from the logit of each earlier token", **_WRITES,
           low=-2, high=2),
    Option("frequency_penalty", "number", "decoders: subtracted for each earlier occurrence", **_WRITES,
           low=-2, high=2),
    Option("logit_bias", "any", "decoders: numbers from -100 to 100 by token id, added to the logits", **_WRITES,
           neutral=({},)),
    Option("stop", "any", "decoders: one text or up to 16; the first one that appears ends the answer", **_WRITES,
           neutral=([],)),
    Option("logprobs", "integer", "decoders: each token has the logarithm of its probability, and those "
           "of that many likeliest tokens ([form](#generated-text)); at most 24,000 in an answer",
           **_WRITES, low=0, high=MAX_LIKELY),
    Option("response_format", "any", "decoders: `{\"type\": \"json_object\"}`, or `{\"type\": \"json_schema\", "
           "\"json_schema\": {\"schema\": {...}}}`: the text is JSON by the schema, unless `max_new_tokens` ends "
           "it. An invalid schema, or a schema that llguidance does not support, is refused. The planner needs "
           "the extra `grammar`", **_WRITES),
    Option("tools", "any", "of `messages`: functions that the model may call, as in OpenAI's "
           "interface; refused if the chat template does not support them", (), ("messages",), neutral=([],)),
    Option("tool_choice", "any", "with `tools`: `required`, or `{\"type\": \"function\", \"function\": {\"name\": "
           "\"...\"}}`: the text is a call of one of the tools, or of that one, as JSON with `name` and `arguments` "
           "(of Llama 3 `parameters`), by the tool's schema; `auto` (default): the model chooses. It needs the same "
           "extra",
           (), ("messages",), neutral=("auto",)),
    Option("thinking", "flag", "of `messages`, for models that think before they answer: `false` asks "
           "the template for an answer without thoughts, `true` for thoughts. Thoughts are in `thinking`, not "
           "in `text`",
           ("generation",), ("messages",)),
    Option("speculate", "flag", "`false` turns off speculative decoding by prompt lookup. The text is "
           "the same with and without (except for near ties)", **_WRITES, neutral=(True,)),
    Option("max_new_tokens", "integer", "how many tokens a decoder generates: by default 16, of speech 224, and "
           "for `messages` as many as the context allows, at most 4096; it stops earlier at the model's end "
           "token",
           ("generation", "transcription"), low=1),
    Option("fit", "flag", "`true`: `max_new_tokens` is an upper limit; without it, too little "
           "context is an error", ("generation",), _TEXT_INPUTS, neutral=(False,)),
    Option("language", "any", "of speech: a code such as `en`, or a list of them "
           "([speech](../guide/speech.md#ask))", **_SPEAKS),
    Option("task", "any", "of speech: `transcribe` (default) or `translate`", **_SPEAKS),
    Option("window", "any", "of speech: the encoder's window in seconds", **_SPEAKS),
    Option("timestamps", "any", "of speech: `true` for times of segments, `word` also for times of "
           "words", **_SPEAKS,
           neutral=(False,)),
)  # fmt: skip
OPTIONS: Final[Mapping[str, Option]] = {option.name: option for option in _TABLE}


def checked(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request without options that change nothing; raises RequestError for a value of another type."""
    kept = {}
    for key, value in request.items():
        option = OPTIONS.get(key)
        if option is not None:
            if value is None or any(value == one and type(value) is type(one) for one in option.neutral):
                continue
            if not (option.takes_list and isinstance(value, list)):
                option.check(value)
        kept[key] = value
    return kept


@contextmanager
def naming(key: str) -> Iterator[None]:
    """Name a key in refusals of the block that name none."""
    try:
        yield
    except RequestError as error:
        error.param = error.param or key
        raise
