"""Models of speech: their spec, their runs (frames of sound, then tokens in a session), and their control tokens.

S rows of the encoder, of two frames each; m new tokens of the decoder, C tokens of capacity in its cache; V tokens in
the vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

from hepti_mqtt.core.errors import ModelError
from hepti_mqtt.core.spec import Activation, PlainShape, RequestShape, TaskHead, Want
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.generation import TimeTokens, TokenRules, speech_rules

ROWS_PER_S: Final = 50
LEAST_WINDOW, WINDOW_STEP = 10 * ROWS_PER_S, 2 * ROWS_PER_S
PROMPT: Final = 4  # tokens of the usual prompt: start, language, task, no timestamps
EXTENT: Final = 3  # inputs after the tokens of a run that aligns them: first and last token, rows of sound
LEAST_ALIGNED: Final = 16  # tokens of the smallest run that aligns, so that few Programs serve all texts


@dataclass(frozen=True, slots=True)
class SpeechRun:
    """A run of a session: the first one encodes sound before its tokens, the others have tokens alone."""

    #: New tokens, m.
    tokens: int
    #: Rows of sound, S; the session keeps their keys and values.
    rows: int
    #: Capacity for tokens, C.
    positions: int
    #: It is the first run.
    encodes: bool = True
    #: See `RequestShape.want`.
    want: Want = "task"
    #: In the first run: the token that starts the transcription, after earlier text; its logits measure silence.
    start: int = 0

    @property
    def size(self) -> int:
        """Return the number of computed rows, of sound and of text."""
        return self.tokens + (self.rows if self.encodes else 0)

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.size,)

    @property
    def session_rows(self) -> int:
        """Return the capacity of the session: rows of sound and of text."""
        return self.rows + self.positions

    @property
    def new_rows(self) -> int:
        return self.tokens

    @property
    def mask_positions(self) -> tuple[tuple[int, int], ...]:
        """Return the place of `start`, unless it is the first token."""
        return ((0, self.start),) if self.start else ()

    def with_want(self, want: Want) -> SpeechRun:
        return replace(self, want=want)

    def aligning(self, tokens: int) -> SpeechRun:
        """Return the run of the same session that aligns a text of some tokens with its sound."""
        room = max(1 << (tokens - 1).bit_length(), LEAST_ALIGNED)
        return replace(self.decode_step(min(room, self.positions)), want="alignment")

    def decode_step(self, rows: int, begins: bool = False, added: bool = False) -> SpeechRun:  # noqa: ARG002
        """Return the run of a number of tokens in the same session."""
        return replace(self, tokens=rows, encodes=begins, start=self.start if begins else 0)

    def answering(self, rows: int) -> SpeechRun:
        raise ValueError(f"a run of speech does not answer for {rows} rows")

    def concatenate(self, others: Sequence[SpeechRun]) -> SpeechRun:
        """Return itself; raises ValueError for several requests, because a session has one recording."""
        if others:
            raise ValueError("a request with a session runs alone")
        return self

    def slice_items(self, first: int, stop: int) -> tuple[SpeechRun, slice]:
        """Return itself and all of its inputs; raises ValueError for a part."""
        if (first, stop) != (0, 1):
            raise ValueError("a request with a session cannot be sliced")
        return self, slice(None)

    def plain(self) -> PlainShape:
        """Return the shape for the wire; a run with more rows than the session's rows of sound is a first run."""
        return PlainShape(self.sizes, self.want, tuple(row for _, row in self.mask_positions), self.session_rows)


@dataclass(frozen=True, slots=True)
class SpeechInput:
    """The input is i32 [1 + m + n]: rows in the cache, m ids, then n = 2 S bands frames in fixed point, if any.

    A run that aligns tokens has `EXTENT` numbers in place of frames: the range of tokens to align, and rows of sound.
    """

    #: Tokens of the vocabulary, V.
    vocab: int
    #: Numbers of a frame.
    bands: int
    #: Rows of the longest recording.
    longest: int
    #: Capacity for tokens, C.
    positions: int

    @property
    def upper_bound(self) -> int:
        return self.vocab

    def shape(self, size: int | None = None) -> SpeechRun:
        """Return the first run of a recording of about this size, in its window; None: the longest run."""
        if size is None:
            return SpeechRun(self.positions, self.longest, self.positions)
        tokens = min(PROMPT, self.positions)
        return SpeechRun(tokens, self.window(size - tokens), self.positions)

    def window(self, rows: int) -> int:
        """Return the rows of a recording's window: a multiple of a step, so that few Programs serve all recordings.

        It has at least 10 s, because transcriptions of shorter windows are wrong.
        """
        wanted = max(-(-rows // WINDOW_STEP) * WINDOW_STEP, LEAST_WINDOW)
        return max(min(wanted, self.longest), self.positions)

    def run(self, tokens: int, rows: int, want: Want = "task", start: int = 0) -> SpeechRun:
        """Return the first run of a recording of some rows."""
        return SpeechRun(tokens, rows, self.positions, want=want, start=start)

    def shape_of(self, plain: PlainShape) -> SpeechRun:
        """Return the shape of its plain form; raises ValueError for an impossible one."""
        rows, size = plain.session_rows - self.positions, plain.size
        tokens = size - rows if size > rows else size
        start = plain.mask_rows[0] if size > rows and plain.mask_rows else 0
        run = SpeechRun(tokens, rows, self.positions, size > rows, plain.want, start)
        fits = self.positions <= rows <= self.longest and 0 <= start < tokens <= self.positions
        fits &= plain.want != "candidates" and not (plain.want == "alignment" and run.encodes)
        if not fits or run.plain() != plain:
            raise ValueError(f"{size} rows of {plain.session_rows} are no sound of at most {self.longest} and its text")
        return run

    def program_shape(self, shape: SpeechRun) -> SpeechRun:
        return shape

    def input_layout(self, shape: RequestShape) -> tuple[tuple[int, ...], Literal["i32"]]:
        rows = shape.session_rows - self.positions
        others = EXTENT if shape.want == "alignment" else 2 * rows * self.bands if shape.size > rows else 0
        return (1 + shape.new_rows + others,), "i32"


# ----------------------------------------------------------------------------------------------------------------------
# The spec of a model: an encoder of frames, and a decoder of its text.


def answered(run: SpeechRun) -> tuple[int, ...]:
    """Return the tokens of a run that it answers for: the last one, and `start` in the first run, for silence."""
    return (run.start, run.tokens - 1) if run.encodes and run.start < run.tokens - 1 else (run.tokens - 1,)


@dataclass(frozen=True, slots=True)
class SpeechSpec:
    """The spec of a model of speech: an encoder of sound and a decoder of text."""

    family: str
    architecture: str
    #: Layers of the encoder.
    layers: int
    decoder_layers: int
    #: Columns h, heads and MLP columns, of both.
    hidden: int
    heads: int
    mlp: int
    activation: Activation
    #: Numbers of a frame.
    bands: int
    #: Rows of the longest recording.
    rows: int
    #: Tokens of the longest text.
    positions: int
    head: TaskHead
    #: (layer of the decoder, head); attention of these heads to the sound yields the times of tokens.
    alignment: tuple[tuple[int, int], ...] = ()

    @property
    def input_spec(self) -> SpeechInput:
        return SpeechInput(self.head.outputs, self.bands, self.rows, self.positions)

    def output_shape(self, shape: RequestShape) -> tuple[int, int]:
        """Return the shape of the answer: logits of the tokens of `answered`, or the encoder's states [S, h].

        Of a run that aligns tokens it is [m, 1]: the row of sound at which each token begins.
        """
        assert isinstance(shape, SpeechRun)
        if shape.want == "alignment":
            return shape.tokens, 1
        return (shape.rows, self.hidden) if shape.want == "hidden" else (len(answered(shape)), self.head.outputs)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "head": self.head.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SpeechSpec:
        """Return the spec that `to_dict` described; raises KeyError, TypeError or ValueError on other data."""
        alignment = tuple((int(layer), int(head)) for layer, head in data.get("alignment", ()))
        spec = cls(**{**data, "head": TaskHead.from_dict(data["head"]), "alignment": alignment})
        sizes = (spec.decoder_layers, spec.heads)
        if not all(0 <= at < size for pair in alignment for at, size in zip(pair, sizes, strict=True)):
            raise ValueError(f"alignment {alignment}: not heads of {spec.decoder_layers} layers of {spec.heads}")
        if spec.hidden % spec.heads or not 1 <= spec.positions <= spec.rows:
            raise ValueError(f"{spec.heads} heads of {spec.hidden} columns, {spec.positions} of {spec.rows} rows")
        return spec


# ----------------------------------------------------------------------------------------------------------------------
# Control tokens, and the prompt of a transcription.


LANGUAGE: Final = re.compile(r"<\|([a-z]{2,3})\|>")
START: Final = "<|startoftranscript|>"
BEFORE: Final = "<|startofprev|>"
PLAIN: Final = "<|notimestamps|>"  # tokens of times follow it in the vocabulary
LATEST: Final = 50  # largest first time of a text, in steps of 20 ms, the time of a row
SILENT: Final = ("<|nospeech|>", "<|nocaptions|>")
TASKS: Final = ("transcribe", "translate")
_LAST: Final = ("<|endoftext|>", START, "<|en|>", "<|de|>", *(f"<|{task}|>" for task in reversed(TASKS)))
_MULTILINGUAL: Final = 51_865  # tokens in the smallest vocabulary with several languages


def last_tokens(vocab: int, rows: int) -> tuple[str, ...]:
    """Return the control tokens at the end of a seeded model's vocabulary, in the order of real models.

    A small vocabulary has no tokens of times, because they would leave too few words.
    """
    if vocab < 4 * rows:
        return (*_LAST, SILENT[0], PLAIN)
    return (*_LAST, BEFORE, SILENT[0], PLAIN, *(f"<|{i / ROWS_PER_S:.2f}|>" for i in range(rows + 1)))


@dataclass(frozen=True, slots=True)
class SpeechTokens:
    """The control tokens of a model of speech."""

    #: Starts and ends a transcription.
    start: int
    end: int
    #: Asks for a text without times.
    plain: int
    #: Its probability is that of silence.
    silent: int
    #: Precedes earlier text in a prompt; -1: not in the vocabulary.
    before: int
    #: Number of tokens of times.
    time_count: int
    #: By code of the language; empty for a model of English alone.
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    #: See `TokenRules`.
    never: tuple[int, ...]
    first_never: tuple[int, ...]

    def begin(
        self,
        language: str | None,
        task: str,
        *,
        timed: bool = False,
        said: tuple[int, ...] = (),
        among: Collection[str] = (),
    ) -> tuple[tuple[int, ...], TokenRules]:
        """Return the prompt of a transcription, and the rules for its tokens.

        language: None for the likeliest of `among`. timed: with tokens of times. said: tokens of earlier text. among:
        codes of languages, empty for all.
        """
        times = TimeTokens(self.plain + 1, self.end, self.plain, LATEST) if timed else None
        rules = TokenRules((self.end,), self.never, self.first_never, scored=True, silent=self.silent, times=times)
        opening = (self.before, *said) if said else ()
        ending = () if timed else (self.plain,)
        if not self.languages:
            return (*opening, self.start, *ending), rules
        forced = (self.tasks[task], *ending)
        if language is not None:
            return (*opening, self.start, self.languages[language], *forced), rules
        choices = tuple(self.languages[code] for code in among or self.languages)
        return (self.start,), replace(rules, choices=choices, opening=opening, forced=forced)


def speech_tokens(
    ids: Mapping[str, int], vocab: int, config: Mapping[str, Any], extras: Mapping[str, Any]
) -> SpeechTokens:
    """Return the tokens of a model by the ids of its tokenizer; raises ModelError if one is missing.

    generation_config.json, else config.json, names the suppressed tokens, by either program's keys.
    """

    def named(*tokens: str) -> int:
        number = next((ids[token] for token in tokens if token in ids), -1)
        if not 0 <= number < vocab:
            raise ModelError(f"tokenizer.json has no token {tokens[0]} of {vocab}; copy the model's own file")
        return number

    rules = speech_rules(JsonConfig("config.json", config), extras)
    several = rules.get("is_multilingual", vocab >= _MULTILINGUAL)
    languages = {code[1]: i for token, i in ids.items() if (code := LANGUAGE.fullmatch(token)) and i < vocab}
    end = named("<|endoftext|>")
    return SpeechTokens(
        start=named(START),
        end=end,
        plain=named(PLAIN),
        silent=named(*SILENT),
        before=ids.get(BEFORE, -1),
        time_count=vocab - named(PLAIN) - 1,
        languages=languages if several else {},
        tasks={task: named(f"<|{task}|>") for task in TASKS} if several else {},
        never=_left_out(rules, vocab, "suppress_tokens", "suppress_ids"),
        first_never=_left_out(rules, vocab, "begin_suppress_tokens", "suppress_ids_begin"),
    )


def _left_out(rules: JsonConfig, vocab: int, *keys: str) -> tuple[int, ...]:
    """Return the list of tokens under the first key that the file has."""
    listed: Any = next((rules.data[key] for key in keys if rules.data.get(key) is not None), [])
    fits = isinstance(listed, list) and all(
        isinstance(i, int) and not isinstance(i, bool) and -1 <= i < vocab for i in listed
    )
    if not fits:
        raise rules.bad_value(keys[0], f"a list of tokens below {vocab}", listed)
    return tuple(i for i in listed if i >= 0)
