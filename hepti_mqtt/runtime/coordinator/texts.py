"""Texts that grow token by token: what follows from a run, and what the next run computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from hepti_mqtt.ids import PlanVersion
from hepti_mqtt.models.generation import LIKELIEST, Candidates, Likely, TokenRules, Verdict
from hepti_mqtt.models.shapes import cache_rows, next_rows
from hepti_mqtt.protocol.frames import DecoderSession
from hepti_mqtt.runtime.coordinator.batches import (
    Array,
    Batch,
)
from hepti_mqtt.runtime.coordinator.guesses import Guesses, StepPace
from hepti_mqtt.runtime.coordinator.prefixes import HeldText, Prefix
from hepti_mqtt.spec import Draw, RequestShape, Want


class GeneratedTokens(NamedTuple):
    """What followed from a run: tokens of a text so far, or with place -1 the one that ends the prompt.

    tokens: the text's own list, which grows. place: of the first one in it. taken: those that followed, none from a run
    whose rows were cached and no more; one or more of a run that had guesses. attempt: the text's number. rows: for
    which the run answered. whole: with all logits. likely: see
    `Generation`.
    """

    tokens: list[int]
    place: int
    taken: tuple[int, ...]
    attempt: int
    temperature: float
    rows: int = 1
    whole: bool = True
    likely: Sequence[tuple[Likely, ...]] = ()


class Attempt(NamedTuple):
    """A text that was tried, and what it is worth."""

    tokens: list[int]
    scores: list[float]
    temperature: float
    verdict: Verdict


MOST_UNDECIDED: Final = 0.25  # share of tokens that candidates leave open, from which on all logits are asked for
ROWS_AHEAD: Final = 256  # for which a session must have room beside those that it has: most answers are no longer


@dataclass(slots=True)
class Generation:
    """The generation of tokens: the prompt, the tokens so far, and the session that caches them.

    shape: of the prompt's run. rules: for the tokens. carried: i32 [n], what the first run of a session reads beside
    tokens. scores: logarithms of the probabilities of the tokens; likely: each token with the likeliest at its place,
    where they are wanted; silence: the probability that there is nothing to
    write, None where it is not known. session: its number, 0 before it begins; plan_version: under which it began.
    published_tokens: tokens that the user has seen and that are computed again. tried: texts before this one; the best
    of them is the answer. prefix: of another session, that its own begins with; left: sessions that it had before.
    steps: what followed from each run. guesses: of what follows, None without; guessed: what the run under way has
    behind the last token; foresees: it had, or would have if it had not begun by itself. vocab: V, where candidates are
    wanted. undecided: how many tokens candidates left open; open: the next one is among them. states: of all rows,
    where they are wanted instead of tokens.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    shape: RequestShape
    rules: TokenRules = LIKELIEST
    carried: Array = field(default_factory=lambda: np.empty(0, np.int32))
    tokens: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    likely: list[tuple[Likely, ...]] = field(default_factory=list)
    silence: float | None = None
    session: int = 0
    plan_version: PlanVersion | None = None
    cached_rows: int = 0
    prefix: Prefix | None = None
    left: list[tuple[PlanVersion, int]] = field(default_factory=list)
    published_tokens: tuple[int, ...] = ()
    tried: list[Attempt] = field(default_factory=list)
    steps: list[GeneratedTokens] = field(default_factory=list)
    guesses: Guesses | None = None
    guessed: tuple[int, ...] = ()
    foresees: bool = False
    judged_for: PlanVersion | None = None  # the plan under which it might go on, when the rule was asked first
    vocab: int = 0
    undecided: int = 0
    open: bool = False
    asked: tuple[int, ...] = ()  # the prompt before a token of the model's choice ended it
    states: list[Array] = field(default_factory=list)
    #: rows of the prompt that another text's session held already
    reused_rows: int = 0

    @property
    def wants_states(self) -> bool:
        """Return whether the final hidden states of the prompt are wanted instead of tokens."""
        return self.shape.want == "hidden"

    @property
    def done(self) -> bool:
        """Return whether the last token, or the last state, is there."""
        if self.wants_states:
            return self.cached_rows == len(self.prompt)
        return len(self.tokens) >= self.max_new_tokens or self.rules.ends(self.tokens)

    @property
    def temperature(self) -> float:
        """Return the temperature of the text."""
        found = next((one.temperature for one in self.tried if one.tokens is self.tokens), None)
        return self.rules.temperatures[len(self.tried)] if found is None else found

    @property
    def verdict(self) -> Verdict | None:
        """Return what the text is worth, None unless it is whole and judged."""
        return next((one.verdict for one in self.tried if one.tokens is self.tokens), None)

    def start_session(self, plan_version: PlanVersion, session: int, prefix: Prefix | None = None) -> None:
        """Start over under a plan version: the next runs compute the prompt and all tokens so far, but the prefix."""
        self.plan_version, self.session, self.prefix = plan_version, session, prefix
        self.cached_rows = 0 if prefix is None else prefix.rows
        if not self.tokens:
            self.reused_rows = min(self.cached_rows, len(self.prompt))
        self.states.clear()

    def leave_session(self) -> None:
        """Give its session up: what is cached may be wrong or incomplete, so another one begins."""
        if self.plan_version is not None:
            taken = [self.prefix.session] if self.prefix and self.prefix.moves else []  # devices may still have it
            self.left += [(self.plan_version, session) for session in (self.session, *taken)]
        self.plan_version = None

    @property
    def joins(self) -> bool:
        """Return whether its next run is a step of its session, which may be made beside those of others."""
        step = self.plan_version is not None and len(self.prompt) + len(self.tokens) - self.cached_rows == 1
        return step and not self.carried.size and not self.wants_states

    def held(self, longest: int) -> HeldText | None:
        """Return the text that the session holds; None without a session that another text may begin with."""
        if self.plan_version is None or self.carried.size or not longest:
            return None
        return HeldText((self.plan_version, self.session), np.array(self._ids(0, self.cached_rows), np.int32), longest)

    def next_batch(self, pace: StepPace | None, begun: bool = False) -> tuple[Batch, DecoderSession]:
        """Return the next run, of tokens that are not cached, and whether it is the session's last.

        Where the last token alone is not cached, guesses of what follows it may come behind it; pace: of runs with
        them, None where they are not wanted. begun: devices have begun with it by themselves, without guesses.
        """
        total = len(self.prompt) + len(self.tokens)
        first, stop = self._rows_behind(self.cached_rows, total)
        self.guessed, self.foresees = (), False
        guesses = None if self.open else self.guesses
        if guesses is not None and self.tokens and total - self.cached_rows == 1:
            most = self.max_new_tokens - len(self.tokens) - 1
            found = guesses.propose(self.prompt, self.tokens, most, pace)
            self.foresees, self.guessed = bool(found), () if begun else found
        ids = (*self._ids(first, stop), *self.guessed)
        inputs, begins = np.array([first, *ids], np.int32), not self.cached_rows
        if begins and self.carried.size:
            inputs = np.concatenate([inputs, self.carried])
        is_last = len(self.tokens) + 1 >= self.max_new_tokens and len(self.tried) + 1 >= len(self.rules.temperatures)
        final = is_last and bool(self.carried.size) and not self._lacks_choice  # else other texts may begin like it
        session = DecoderSession(self.session, final)
        if self.prefix is not None and self.cached_rows == self.prefix.rows and (first or self.prefix.moves):
            session = session._replace(source=self.prefix.session, takes_over=self.prefix.moves)
        shape = self.shape.decode_step(len(ids), begins)
        shape = shape.answering(len(ids)) if self.guessed else shape
        shape = shape.with_want(self.next_want)
        if shape.want == "candidates":
            inputs = np.concatenate([inputs, self._heat(len(self.guessed) + 1)])
        return Batch(shape, inputs), session

    def _heat(self, rows: int) -> Array:
        return np.full(rows, self.temperature, np.float32).view(np.int32)

    def following_step(self, place: int) -> tuple[Batch, DecoderSession, Draw] | None:
        """Return a step behind the run that `next_batch` gave, and how its token, -1, is drawn from the one before.

        place: 0 for the first. None where it takes more than candidates to know the step, or where none is wanted.
        """
        total = len(self.prompt) + len(self.tokens)
        _, stop = self._rows_behind(self.cached_rows, total)
        draw = self.rules.draw(len(self.tokens) + place, self.temperature)
        answers = self.next_want == "candidates" and stop == total and not self.carried.size
        if draw is None or self.foresees or not answers or len(self.tokens) + place + 2 > self.max_new_tokens:
            return None
        shape = self.shape.decode_step(1).with_want(self.next_want)
        return Batch(shape, np.array([total + place, -1, *self._heat(1)], np.int32)), DecoderSession(self.session), draw

    @property
    def next_want(self) -> Want:
        """Return what its next run answers with: all logits where candidates leave a token open, or do so too often."""
        often = self.undecided > 2 + MOST_UNDECIDED * len(self.tokens)
        return "task" if self.open or often else self.shape.want

    @property
    def reserved_rows(self) -> int:
        """Return for how many rows its session must have room: for the tokens so far, and some more."""
        if self.carried.size:
            return self.shape.session_rows
        return cache_rows(len(self.prompt) + len(self.tokens) + ROWS_AHEAD, self.shape.session_rows)

    @property
    def next_size(self) -> int:
        """Return the size of the next run."""
        first, stop = self._rows_behind(self.cached_rows, len(self.prompt) + len(self.tokens))
        return self.shape.decode_step(stop - first, begins=not self.cached_rows).size

    def shapes_to(self, total: int) -> list[RequestShape]:
        """Return the shapes of the runs that cache a number of rows, from the first one on."""
        shapes, cached = list[RequestShape](), 0
        while cached < total:
            first, stop = self._rows_behind(cached, total)
            shapes.append(self.shape.decode_step(stop - first, begins=not cached))
            cached = stop
        return shapes

    def _rows_behind(self, cached: int, total: int) -> tuple[int, int]:
        """Return the rows of the next run; what it carries is beside the whole prompt."""
        return (0, len(self.prompt)) if self.carried.size and not cached else next_rows(cached, total)

    def _ids(self, first: int, stop: int) -> Sequence[int]:
        behind = len(self.prompt)
        return (*self.prompt[first:stop], *self.tokens[max(first - behind, 0) : max(stop - behind, 0)])

    @property
    def _lacks_choice(self) -> bool:
        return bool(self.rules.choices) and not self.asked

    def append_tokens(self, logits: Array) -> GeneratedTokens:
        """Take the answer of the run that `next_batch` gave, logits or candidates; return the tokens that follow.

        None, where more rows are to be cached first; several, where what was guessed is what follows. A text that is
        whole may be followed by another one.
        """
        total, cached = len(self.prompt) + len(self.tokens), self.cached_rows
        first, self.cached_rows = self._rows_behind(cached, total)
        if self.wants_states:
            self.states.append(logits[cached - first :])
        elif not cached and self.silence is None:
            self.silence = self.rules.silence(logits)
        if self.wants_states or self.cached_rows < total:
            step = GeneratedTokens(self.tokens, len(self.tokens), (), len(self.tried), 0.0)
        elif self._lacks_choice:
            step = GeneratedTokens(self.tokens, -1, (self.rules.choose_prompt(logits),), 0, 0.0)
            self._end_prompt(step.taken[0])
        else:
            step = self._take(logits)
        self.steps.append(step)
        if self.rules.judge is not None and not self.wants_states and self.done:
            self._conclude(self.rules.judge(self.tokens, self.scores, self.silence or 0.0))
        return step

    def _take(self, logits: Array) -> GeneratedTokens:
        """Take tokens as long as the guesses are right, and the one behind them; none that candidates leave open."""
        place, temperature, rows = len(self.tokens), self.temperature, len(self.guessed) + 1
        whole, self.open = self.next_want == "task", False
        for guess, row in zip((*self.guessed, None), logits[len(logits) - rows :], strict=True):
            if (chosen := self._choose(row, self.tokens, temperature, whole)) is None:
                self.open, self.undecided = True, self.undecided + 1
                break
            token, score, likely = chosen
            self.tokens.append(token)
            self.scores.append(score)
            self.likely.append(likely)
            if token != guess or self.done:
                break
        taken = tuple(self.tokens[place:])
        self.cached_rows += len(taken) - 1
        if self.guesses is not None:
            self.guesses.record(taken)
        return GeneratedTokens(self.tokens, place, taken, len(self.tried), temperature, rows, whole, self.likely)

    def _choose(
        self, row: Array, before: Sequence[int], temperature: float, whole: bool
    ) -> tuple[int, float, tuple[Likely, ...]] | None:
        """Return the token by a row of an answer, its score and the likeliest; None where candidates leave it open."""
        rules = self.rules
        if whole:
            token, score = rules.choose(row[None], before, temperature)
            return token, score, rules.likely_with(row, token)
        found = Candidates.read(row, self.vocab)
        if (place := rules.pick(found, before, temperature)) is None:
            return None
        return int(found.ids[place]), 0.0, () if rules.likely < 0 else found.likely(place, rules.likely)

    def follows(self, step: GeneratedTokens, logits: Array) -> bool:
        """Return whether a step follows from the answer of its run."""
        if step.place < 0:
            return self.rules.choose_prompt(logits) == step.taken[0]
        for i, (token, row) in enumerate(zip(step.taken, logits[len(logits) - step.rows :], strict=False)):
            before = step.tokens[: step.place + i]
            chosen = self._choose(row, before, step.temperature, step.whole)
            if chosen is None or chosen[0] != token:
                return False
        return True

    def _end_prompt(self, token: int) -> None:
        self.asked = self.prompt
        self.prompt = (*self.rules.opening, *self.prompt, token, *self.rules.forced)
        if self.rules.opening:  # then the rows that are cached stand at other places
            self.leave_session()

    def _conclude(self, verdict: Verdict) -> None:
        """Begin another text if this one is not good enough, else take the best one."""
        self.tried.append(Attempt(self.tokens, self.scores, self.temperature, verdict))
        if verdict.again and len(self.tried) < len(self.rules.temperatures):
            self.tokens, self.scores, self.likely, self.published_tokens = [], [], [], ()
            self.cached_rows = len(self.prompt) - 1  # what the prompt's last token gives is computed again
        elif verdict.again:
            best = max(self.tried, key=lambda one: one.verdict.worth)
            self.tokens, self.scores = best.tokens, best.scores

    def rewind(self, run: int) -> None:
        """Take back what has followed since a run; what is cached may be wrong, so a new session begins."""
        step = self.steps[run]
        if any(later.place < 0 for later in self.steps[run:]):
            self.prompt, self.asked = self.asked, ()
        del self.steps[run:]
        self.leave_session()
        published = self.published_tokens if step.tokens is self.tokens else ()
        self.published_tokens = max(published, tuple(step.tokens), key=len)
        self.scores = self.tried[step.attempt].scores if step.attempt < len(self.tried) else self.scores
        self.tokens = step.tokens
        place = max(step.place, 0)
        del self.tokens[place:], self.scores[place:], self.likely[place:], self.tried[step.attempt :]
