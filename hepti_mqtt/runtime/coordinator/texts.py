"""Texts that grow token by token: tokens from the output of a run, and the inputs of the next run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.spec import Draw, RequestShape, Want
from hepti_mqtt.models.generation import LIKELIEST, Candidates, Likely, TokenRules
from hepti_mqtt.models.shapes import next_rows
from hepti_mqtt.protocol.frames import DecoderSession
from hepti_mqtt.runtime.coordinator.batches import Array, Batch
from hepti_mqtt.runtime.coordinator.guesses import Guesses, StepPace
from hepti_mqtt.runtime.coordinator.pictured import PicturedPrompt
from hepti_mqtt.runtime.coordinator.prefixes import Prefix

MOST_UNDECIDED: Final = 0.25  # if candidates leave a larger share of tokens open, runs answer with all logits


@dataclass(slots=True)
class TextSession:
    """The KV cache of a text on the devices of a plan."""

    number: int = 0  #: 0 before the first session
    plan_version: PlanVersion | None = None  #: None without a session
    rows: int = 0  #: number of cached rows
    prefix: Prefix | None = None  #: rows of another session that it began with
    left: list[tuple[PlanVersion, int]] = field(default_factory=list)  #: abandoned sessions
    reused_rows: int = 0  #: rows of the prompt that the first session reused
    judged_for: PlanVersion | None = None  #: active plan version when the rule last judged its handover

    def start(self, plan_version: PlanVersion, number: int, prefix: Prefix | None = None) -> None:
        """Begin under a plan version: the next runs compute all tokens so far except the prefix."""
        self.plan_version, self.number, self.prefix = plan_version, number, prefix
        self.rows = 0 if prefix is None else prefix.rows

    def leave(self) -> None:
        """Abandon the session: cached rows may be wrong or incomplete, so another session begins."""
        if self.plan_version is not None:
            # If the cache of the prefix was to move into this session, a device may not have moved it yet.
            source = [self.prefix.session] if self.prefix and self.prefix.moves else []
            self.left += [(self.plan_version, session) for session in (self.number, *source)]
        self.plan_version = None


@dataclass(slots=True)
class TextSoFar:
    """The tokens of a growing text."""

    tokens: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)  #: log probabilities, if they are wanted
    likely: list[tuple[Likely, ...]] = field(default_factory=list)  #: likeliest tokens at each place, if wanted
    attempt: int = 0  #: its number among the texts of a request
    temperature: float = 0.0  #: sampling temperature

    def append(self, token: int, score: float, likely: tuple[Likely, ...]) -> None:
        """Add a token."""
        self.tokens.append(token)
        self.scores.append(score)
        self.likely.append(likely)

    def cut(self, place: int) -> None:
        """Remove the tokens from a place on."""
        del self.tokens[place:], self.scores[place:], self.likely[place:]


class GeneratedTokens(NamedTuple):
    """The tokens accepted from a run."""

    text: TextSoFar
    place: int  #: place of the first token in the text, -1 for a token that completes the prompt
    taken: tuple[int, ...]  #: none if rows were only cached, several after right guesses


def next_token(
    row: Array, rules: TokenRules, before: Sequence[int], temperature: float, vocab: int | None
) -> tuple[int, float, tuple[Likely, ...]] | None:
    """Return the next token, its score and the likeliest tokens; None if the candidates do not decide it.

    row: candidates or logits. before: tokens so far. vocab: V if the row has candidates, None if it has all logits.
    """
    if vocab is None:
        token, score = rules.choose(row[None], before, temperature)
        return token, score, rules.likely_with(row, token)
    candidates = Candidates.read(row, vocab)
    if (place := rules.pick(candidates, before, temperature)) is None:
        return None
    return int(candidates.ids[place]), 0.0, () if rules.likely < 0 else candidates.likely(place, rules.likely)


@dataclass(slots=True)
class Generation:
    """A text that grows from a prompt, or with want "hidden" only the states of the prompt."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    shape: RequestShape  #: shape of the prompt's run
    rules: TokenRules = LIKELIEST
    #: i32 [n], inputs of a session's first run other than tokens.
    carried: Array = field(default_factory=lambda: np.empty(0, np.int32))
    pictured: PicturedPrompt | None = None  #: None: the prompt has no rows of pictures
    text: TextSoFar = field(default_factory=TextSoFar)
    session: TextSession = field(default_factory=TextSession)
    published_tokens: tuple[int, ...] = ()  #: tokens to compare after a rewind: the user already has them
    steps: list[GeneratedTokens] = field(default_factory=list)  #: tokens accepted after each run
    guesses: Guesses | None = None  #: None: no speculative decoding
    guessed: tuple[int, ...] = ()  #: guesses in the current run, after the last token
    foresees: bool = False  #: guesses were proposed for the current run; devices that began it ahead left them out
    vocab: int = 0  #: V, if candidates are wanted
    undecided: int = 0  #: number of tokens that candidates did not decide
    open: bool = False  #: candidates did not decide the next token
    wants_states: bool = field(init=False)  #: the answer is the final hidden states of the prompt
    states: list[Array] = field(default_factory=list)  #: hidden states of all rows, if they are wanted

    def __post_init__(self) -> None:
        self.wants_states = self.shape.want == "hidden"
        self.text.temperature = self.rules.temperatures[0]

    @property
    def done(self) -> bool:
        """Return whether the text, or the states, are complete."""
        return self.session.rows == len(self.prompt) if self.wants_states else self.text_ended

    @property
    def text_ended(self) -> bool:
        """Return whether the text is complete."""
        tokens = self.text.tokens
        return len(tokens) >= self.max_new_tokens or self.rules.ends(tokens)

    @property
    def ends_session(self) -> bool:
        """Return whether devices drop the session after the next run; otherwise other texts may reuse it."""
        return bool(self.carried.size) and len(self.text.tokens) + 1 >= self.max_new_tokens

    @property
    def is_step(self) -> bool:
        """Return whether its next run is a decoding step: only the last token is not cached."""
        left = len(self.prompt) + len(self.text.tokens) - self.session.rows
        return left == 1 and self.session.plan_version is not None

    @property
    def joins(self) -> bool:
        """Return whether its next run is a decoding step that may share a run with other texts."""
        return not self.carried.size and not self.wants_states and self.is_step

    @property
    def identity(self) -> Sequence[int]:
        """Return prompt and tokens so far, with marks for rows of pictures, to compare texts."""
        prompt = self.prompt if self.pictured is None else self.pictured.marked(self.prompt)
        return (*prompt, *self.text.tokens)

    def next_batch(self, pace: StepPace | None, begun: bool = False) -> tuple[Batch, DecoderSession]:
        """Return the next run, of uncached tokens, and its session.

        A decoding step may add guesses. pace: durations of runs with guesses, None without guesses. begun: devices have
        begun the run ahead, without guesses.
        """
        tokens, start = self.text.tokens, len(self.prompt)
        total = start + len(tokens)
        first, stop = self._next_rows(self.session.rows, total)
        self.guessed, self.foresees = (), False
        guesses = None if self.open else self.guesses
        if guesses is not None and tokens and total - self.session.rows == 1:
            proposed = guesses.propose(self.prompt, tokens, self.max_new_tokens - len(tokens) - 1, pace)
            self.foresees, self.guessed = bool(proposed), () if begun else proposed
        ids = (*self.prompt[first:stop], *tokens[max(first - start, 0) : max(stop - start, 0)], *self.guessed)
        inputs, begins = np.array([first, *ids], np.int32), not self.session.rows
        if begins and self.carried.size:
            inputs = np.concatenate([inputs, self.carried])
        session = DecoderSession(self.session.number, self.ends_session)
        prefix = self.session.prefix
        if prefix is not None and self.session.rows == prefix.rows and (first or prefix.moves):
            session = session._replace(source=prefix.session, takes_over=prefix.moves)
        shape = self._run_shape(first, first + len(ids), begins)
        shape = shape.answering(len(ids)) if self.guessed else shape
        if (want := self.next_want) != shape.want:
            shape = shape.with_want(want)
        if want == "candidates":
            heat = np.full(len(self.guessed) + 1, self.text.temperature, np.float32)
            inputs = np.concatenate([inputs, heat.view(np.int32)])
        if self.pictured is not None and self.pictured.is_within(first, stop):
            inputs = np.concatenate([inputs, self.pictured.added(first, stop)])
        return Batch(shape, inputs), session

    def _run_shape(self, first: int, stop: int, begins: bool) -> RequestShape:
        added = self.pictured is not None and self.pictured.is_within(first, stop)
        return self.shape.decode_step(stop - first, begins, added)

    def following_step(self, place: int) -> tuple[Batch, DecoderSession, Draw] | None:
        """Return a step after the run of `next_batch`, with token -1, and how devices draw the token.

        place: 0 for the first step. None if the token depends on more than candidates, or if no step follows.
        """
        count = len(self.text.tokens)
        total, want = len(self.prompt) + count, self.next_want
        if self.foresees or want != "candidates" or self.carried.size or count + place + 2 > self.max_new_tokens:
            return None
        _, stop = self._next_rows(self.session.rows, total)
        draw = self.rules.draw(count + place, self.text.temperature)
        if draw is None or stop < total:
            return None
        heat = int(np.float32(self.text.temperature).view(np.int32))
        batch = Batch(self.shape.decode_step(1).with_want(want), np.array([total + place, -1, heat], np.int32))
        return batch, DecoderSession(self.session.number), draw

    @property
    def next_want(self) -> Want:
        """Return the output of its next run: all logits if candidates do not decide the token, or often fail to."""
        often = self.undecided > 2 + MOST_UNDECIDED * len(self.text.tokens)
        return "task" if self.open or often else self.shape.want

    @property
    def next_size(self) -> int:
        """Return the size of the next run."""
        first, stop = self._next_rows(self.session.rows, len(self.prompt) + len(self.text.tokens))
        return self._run_shape(first, stop, begins=not self.session.rows).size

    def shapes_to(self, total: int) -> list[RequestShape]:
        """Return the shapes of all runs that cache this number of rows."""
        shapes, cached = list[RequestShape](), 0
        while cached < total:
            first, stop = self._next_rows(cached, total)
            shapes.append(self._run_shape(first, stop, begins=not cached))
            cached = stop
        return shapes

    def _next_rows(self, cached: int, total: int) -> tuple[int, int]:
        """Return the rows of the next run; a run with carried inputs computes the whole prompt."""
        if self.pictured is not None:
            return self.pictured.next_rows(cached, total)
        return (0, len(self.prompt)) if self.carried.size and not cached else next_rows(cached, total)

    def append_tokens(self, logits: Array) -> GeneratedTokens:
        """Take the output of the run of `next_batch`, logits or candidates; return the accepted tokens.

        No tokens if more rows must be cached first; several if guesses were right.
        """
        total, cached = len(self.prompt) + len(self.text.tokens), self.session.rows
        first, self.session.rows = self._next_rows(cached, total)
        if self.wants_states:
            self.states.append(logits[cached - first :])
        if self.wants_states or self.session.rows < total:
            step = GeneratedTokens(self.text, len(self.text.tokens), ())
        else:
            step = self._take(logits)
        self.steps.append(step)
        return step

    def _take(self, logits: Array) -> GeneratedTokens:
        """Accept tokens while the guesses are right, and the next one; stop if candidates do not decide a token."""
        text, place = self.text, len(self.text.tokens)
        vocab = None if self.next_want == "task" else self.vocab
        self.open = False
        for guess, row in zip((*self.guessed, None), logits[len(logits) - len(self.guessed) - 1 :], strict=True):
            if (chosen := next_token(row, self.rules, text.tokens, text.temperature, vocab)) is None:
                self.open, self.undecided = True, self.undecided + 1
                break
            token, score, likely = chosen
            text.append(token, score, likely)
            if token != guess or self.done:
                break
        taken = tuple(text.tokens[place:])
        self.session.rows += len(taken) - 1
        if self.guesses is not None:
            self.guesses.record(taken)
        return GeneratedTokens(text, place, taken)

    def rewind(self, run: int) -> None:
        """Remove the tokens since a run, and abandon the session: its cached rows may be wrong."""
        step = self.steps[run]
        del self.steps[run:]
        self.session.leave()
        self.published_tokens = max(self.published_tokens, tuple(step.text.tokens), key=len)
        self.text.cut(max(step.place, 0))
