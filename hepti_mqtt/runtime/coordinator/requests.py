"""Requests, their runs and the fair queue: a request has one or more batches, a run computes one or more of them."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import chain, islice, pairwise
from math import inf
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.cost.profiles import Cluster
from hepti_mqtt.cost.simulator import TopicNames
from hepti_mqtt.errors import RemoteError
from hepti_mqtt.ids import PlanVersion
from hepti_mqtt.models.generation import LIKELIEST, Candidates, Likely, TokenRules, Verdict
from hepti_mqtt.models.shapes import cache_rows, next_rows
from hepti_mqtt.plan import Objective, Plan, Route, WeightDtype, WireDtype
from hepti_mqtt.planner.price import Question
from hepti_mqtt.protocol.frames import MAX_TOGETHER, DecoderSession, Frame
from hepti_mqtt.protocol.keys import UNKEYED, FrameKey
from hepti_mqtt.protocol.messages import RunFailed
from hepti_mqtt.runtime.coordinator.guesses import Guesses, StepPace
from hepti_mqtt.runtime.coordinator.prefixes import HeldText, Prefix
from hepti_mqtt.spec import Draw, RequestShape, Spec, Want
from hepti_mqtt.task_queue import TaskQueue

Array = NDArray[Any]
MAX_UNREPORTED_RUNS: Final = 4  # runs on a device whose reports alone are missing, and that take no room of others


@dataclass(frozen=True, slots=True)
class Batch:
    """A packed batch that runs as one: its shape and token ids [m] i32 or pixels [B, C, S, S] u8."""

    shape: RequestShape
    inputs: Array


@dataclass(frozen=True, slots=True)
class RequestKey:
    """The identity of a request: model, client and the client's own id."""

    model: str
    client: str
    id: str


@dataclass(frozen=True, slots=True)
class Pins:
    """What is fixed of a model's plans; the planner chooses where a field is None.

    accuracy: the largest relative error that a narrow wire dtype may cause; the planner chooses the wire then.
    """

    strategy: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] | None = None
    wire: WireDtype = "f32"
    weight_dtype: WeightDtype = "f32"
    route: Route | None = None
    objective: Objective = "latency"
    accuracy: float | None = None

    @property
    def is_unpinned(self) -> bool:
        """Return whether strategy, variant and devices are the planner's choice."""
        return self.strategy is None and not self.options and self.devices is None

    def question(
        self,
        naming: TopicNames,
        spec: Spec,
        cluster: Cluster,
        shape: RequestShape,
        plan_version: PlanVersion,
        **more: Any,
    ) -> Question:
        """Return what a search for a plan with these pins is asked; more: other fields of `Question`."""
        pins = {f.name: getattr(self, f.name) for f in fields(self)}
        return Question(naming, spec, cluster, shape, plan_version, **pins, **more)

    def __str__(self) -> str:
        words = [self.strategy, *self.options.values(), self.devices and "on " + " ".join(self.devices)]
        words += [f"wire {self.wire}" if self.wire != "f32" else ""]
        words += [self.weight_dtype if self.weight_dtype != "f32" else "", f"route {self.route}" if self.route else ""]
        words += [f"for {self.objective}" if self.objective != "latency" else ""]
        words += [f"accuracy {self.accuracy:g}" if self.accuracy is not None else ""]
        return ", ".join(word for word in words if word) or "auto"


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


LEAST_TOKEN_S: Final = 1e-6
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


@dataclass(slots=True)
class Request:
    """A user's request; `reply_context` is the shell's own handle for writing the answer.

    pins: of the plan it runs under; None: the planner's own. wants_result: False if it only wants a plan and its
    forecast. losses: by batch. generation: of a request that generates tokens; its batch is the prompt. digest: of the
    content, to tell a repetition from another request under the same id. sequence: order of arrival. wants_report: the
    answer waits for the devices' reports. last_link_loss_s: when a lost connection between devices last counted as an
    attempt. unbatchable: batches that run alone, because a run with them has failed.
    """

    key: RequestKey
    batches: tuple[Batch, ...]
    reply_context: object
    deadline_s: float | None
    pins: Pins | None = None
    wants_result: bool = True
    outputs: dict[int, Array] = field(default_factory=dict)
    stats: list[RunStats] = field(default_factory=list)
    losses: Counter[int] = field(default_factory=Counter)
    finished: bool = False
    generation: Generation | None = None
    digest: bytes = b""
    sequence: int = 0
    arrived_s: float = 0.0
    wants_report: bool = True
    last_link_loss_s: float = -inf
    unbatchable: set[int] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        """Return the bytes of what the request brings."""
        return sum(chunk.inputs.nbytes for chunk in self.batches)

    def run_shapes(self) -> list[RequestShape]:
        """Return the shape of every run that the request may take, with one per generated token."""
        made = self.generation
        if made is None:
            return [chunk.shape for chunk in self.batches]
        return made.shapes_to(len(made.prompt)) + [made.shape.decode_step(1)] * (made.max_new_tokens - 1)

    def upcoming_shapes(self, chunk: int) -> list[RequestShape]:
        """Return the shapes of the runs that a waiting chunk leads to, should the plan change before the first."""
        made = self.generation
        if made is None:
            return [self.batches[chunk].shape]
        shapes = made.shapes_to(len(made.prompt) + len(made.tokens))
        return list(dict.fromkeys((*shapes, made.shape.decode_step(1))))

    def measured_s(self, now: float) -> tuple[int, float, float]:
        """Return the rows of the largest run of a text and what it took, and what the fastest one took."""
        began = [*(run.dispatched_s or 0.0 for run in self.stats), now]
        took = [
            (max(run.shape.sizes), stop - start) for run, (start, stop) in zip(self.stats, pairwise(began), strict=True)
        ]
        rows, seconds = max(took, key=lambda run: run[0], default=(1, 0.0))
        return rows, max(seconds, LEAST_TOKEN_S), max(min((s for _, s in took), default=0.0), LEAST_TOKEN_S)

    def output(self) -> Array:
        """Return the outputs of all batches as rows, or the generated tokens [n] i32."""
        if self.generation is not None and self.generation.wants_states:
            return np.concatenate(self.generation.states)
        if self.generation is not None:
            return np.array(self.generation.tokens, np.int32)
        return np.concatenate([self.outputs[i] for i in range(len(self.batches))])


@dataclass(frozen=True, slots=True, eq=False)
class WorkItem:
    """One batch of a request, queued or running."""

    request: Request
    index: int

    @property
    def batch(self) -> Batch:
        """Return its own batch; the prompt of a request that generates."""
        return self.request.batches[self.index]

    @property
    def tokens(self) -> int:
        """Return the tokens of its own batch, or of its next run."""
        made = self.request.generation
        return self.batch.shape.size if made is None else made.next_size

    @property
    def turn(self) -> int:
        """Return the tokens that it counts for in its client's turn: of a prompt half, as its user has nothing yet."""
        return self.tokens if self.request.generation is None else (self.tokens + 1) // 2

    @property
    def batchable(self) -> bool:
        """Return whether it may run together with others."""
        request, made = self.request, self.request.generation
        joins = made is None or made.joins
        return request.wants_result and joins and self.index not in request.unbatchable

    def joins(self, other: WorkItem) -> bool:
        """Return whether it may run together with another one, if both are batchable: with a session, in one plan."""
        mine, theirs = self.request.generation, other.request.generation
        if mine is None or theirs is None:
            return mine is theirs and self.batch.shape.want == other.batch.shape.want
        return (mine.plan_version, mine.next_want) == (theirs.plan_version, theirs.next_want)


class Expectation(NamedTuple):
    """What a run is expected to take, as factors on its prediction: on average, and 10 and 90 of 100 such runs."""

    mean: float = 1.0
    p10: float = 1.0
    p90: float = 1.0


AS_PREDICTED: Final = Expectation()


@dataclass(slots=True)
class RunStats:
    """One run as its devices reported it: microseconds and bytes by device, and the planner's own bytes.

    cluster: as it was when the plan was chosen. requests: that it computed. reported: by every device. dispatched_s:
    None if it never was. expectation: of its time, when it was dispatched.
    """

    plan: Plan
    cluster: Cluster
    shape: RequestShape
    compute_us: dict[str, int]
    wait_us: dict[str, int]
    sent_bytes: dict[str, int]
    dispatch_bytes: int
    requests: int = 1
    reported: bool = True
    dispatched_s: float | None = None
    expectation: Expectation = AS_PREDICTED


class FollowingStep(NamedTuple):
    """A step that devices begin by themselves when the run before it has ended, as far as it is known before that.

    nbytes: of the message that says so. reports: of devices that have ended it, or failed, before its turn has come.
    """

    run_id: int
    plan_version: PlanVersion
    items: tuple[WorkItem, ...]
    shape: RequestShape
    inputs: Array
    sessions: tuple[DecoderSession, ...]
    nbytes: int
    reports: dict[str, Frame | RunFailed]

    def is_run(self, part: Batch, sessions: tuple[DecoderSession, ...]) -> bool:
        """Return whether it is a run, of which all tokens are known."""
        alike = (part.shape, sessions) == (self.shape, self.sessions) and part.inputs.shape == self.inputs.shape
        return alike and bool(((part.inputs == self.inputs) | (self.inputs == -1)).all())


class Progress(NamedTuple):
    """The farthest block of the graph that a device was in, and when the planner heard of it."""

    block: int
    heard_s: float


@dataclass(slots=True)
class Run:
    """A packed batch of one or more requests, dispatched under a plan version and a run id.

    parts: of the output, by device, node and part, with their first row. expected_s: predicted duration;
    expected_end_s: predicted end, after earlier runs on its devices. probe_at_s: when its devices are probed; probed_s:
    when they were. deadline_s: when it is retried. broker_was_lost: during the run. early_stats: at the time of an
    output before all reports. places: of this run among those of each item's request, once its tokens were taken, None
    of a request that had ended. steps: of sessions. task_queue: of leased tasks. lost_devices: devices without which it
    continues. beside_loads: a device of the site loaded weights meanwhile, or prepared a plan. beside_search: the
    planner's machine searched; only_beside_search: all the time. frame_key: of its frames. progress: how far it is, as
    far as devices have said. before: the run that it goes
    on with under another plan. asked: the plan and the progress that the rule was last asked about. is_late: it is not
    as far as it should be; was_searched_for: a brief search for a plan that it may go on under was made. following: the
    steps that devices begin by themselves when it has ended. ids: of its items where devices have begun it so.
    """

    run_id: int
    items: tuple[WorkItem, ...]
    shape: RequestShape
    plan: Plan
    cluster: Cluster
    dispatched_s: float
    deadline_s: float
    dispatch_bytes: int
    ran_alone: bool  # no other run at any time
    parts: dict[tuple[str, int, int], tuple[int, Array]] = field(default_factory=dict)
    reports: dict[str, tuple[int, ...]] = field(default_factory=dict)
    expectation: Expectation = AS_PREDICTED
    expected_s: float = 0.0
    probe_at_s: float = inf
    probed_s: float | None = None
    expected_end_s: float = 0.0
    broker_was_lost: bool = False
    early_stats: RunStats | None = None
    places: tuple[int | None, ...] = ()
    steps: bool = False
    task_queue: TaskQueue | None = None
    lost_devices: set[str] = field(default_factory=set)
    beside_loads: bool = False
    beside_search: bool = False
    only_beside_search: bool = True
    frame_key: FrameKey = UNKEYED
    progress: Progress | None = None
    before: Run | None = None
    asked: tuple[PlanVersion, Progress | None] | None = None
    is_late: bool = False
    was_searched_for: bool = False
    following: tuple[FollowingStep, ...] = ()
    ids: tuple[int, ...] = ()

    @property
    def plan_version(self) -> PlanVersion:
        """Return the plan version of the run."""
        return self.plan.version

    @property
    def waiting_requests(self) -> list[Request]:
        """Return the requests that still wait for it."""
        return [item.request for item in self.items if not item.request.finished]

    @property
    def is_computing(self) -> bool:
        """Return whether devices may still compute for it; False once its tokens were taken."""
        return not self.places

    def needs(self, plan_version: PlanVersion) -> bool:
        """Return whether devices of a plan are needed for it; once it is seen to go on, none of the plan before."""
        before = None if self.before is None or self.progress is not None else self.before.plan_version
        return plan_version in (self.plan_version, before)

    @property
    def may_go_on(self) -> bool:
        """Return whether it may go on under another plan: it is somewhere between its blocks, as begun by a request."""
        fresh = self.before is None and self.task_queue is None and not self.shape.session_rows
        return fresh and self.progress is not None and not self.parts and not self.reports and self.is_computing

    def items_of(self, sessions: Collection[int]) -> list[WorkItem]:
        """Return the items of some sessions; all items if none is among these."""
        made = [(item, item.request.generation) for item in self.items]
        return [item for item, of in made if of is not None and of.session in sessions] or list(self.items)

    @property
    def open_items(self) -> list[WorkItem]:
        """Return the items whose output was not delivered."""
        if not self.is_computing:
            return []
        return [item for item in self.items if not item.request.finished and item.index not in item.request.outputs]

    def contradicts(self, device: str, frame: Frame) -> bool:
        """Return whether a frame differs from an earlier one of the device for the same part or report."""
        if frame.kind == "output":
            first, array = self.parts.get((device, frame.node, frame.part), (frame.row_start, None))
            differs = array is not None and (first != frame.row_start or not _same(array, frame.array()))
            return differs or (bool(self.ids) and frame.numbers != self.ids)
        if frame.kind == "done" and len(frame.numbers) == 4:
            return self.reports.get(device, frame.numbers)[3] != frame.numbers[3]
        return False

    def _sent_parts(self) -> list[tuple[int, Array]]:
        """Return first row and values of each part, in order, without devices that reported none."""
        said = {device: numbers[3] > 0 for device, numbers in self.reports.items()}
        mine = [part for (device, _, _), part in self.parts.items() if said.get(device, True)]
        return sorted(mine, key=lambda part: part[0])

    def has_whole_output(self, shape: tuple[int, int]) -> bool:
        """Return whether the parts form an output of this shape, each row once."""
        end, mine = 0, self._sent_parts()
        for first, array in mine:
            if first != end or array.shape[1:] != shape[1:] or array.ndim != len(shape):
                return False
            end += len(array)
        return bool(mine) and end == shape[0]

    def complete(self) -> bool:
        """Return whether every device has reported, and every part that one reported is here."""
        heard = self.reports.keys() | self.lost_devices
        if heard < set(self.plan.devices) or not any(n[3] for n in self.reports.values()):
            return False
        here = Counter(device for device, _, _ in self.parts)
        return all(here[device] >= numbers[3] for device, numbers in self.reports.items())

    def count_unannounced(self) -> int:
        """Return the number of parts from devices that reported none."""
        return sum(not self.reports[device][3] for device, _, _ in self.parts)

    def output(self) -> Array:
        """Return the parts of the output, one below the other."""
        mine = [array for _, array in self._sent_parts()]
        return mine[0] if len(mine) == 1 else np.concatenate(mine)

    def outputs_of_steps(self) -> list[Array]:
        """Return of a run of sessions what answers each item: of several a row each, else all."""
        output = self.output()
        return [output] if len(self.items) == 1 else [output[i : i + 1] for i in range(len(self.items))]

    def stats(self) -> RunStats:
        """Return what the devices reported."""
        return RunStats(
            self.plan,
            self.cluster,
            self.shape,
            {d: n[0] for d, n in self.reports.items()},
            {d: n[1] for d, n in self.reports.items()},
            {d: n[2] for d, n in self.reports.items()},
            self.dispatch_bytes,
            len(self.items),
            reported=self.reports.keys() | self.lost_devices >= set(self.plan.devices),
            dispatched_s=(self.before or self).dispatched_s,
            expectation=self.expectation,
        )


def _same(one: Array, other: Array) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


# ----------------------------------------------------------------------------------------------------------------------
# Runs of several requests: which items run together, their packed batch, and the output of each.


MICRO_BATCH_TOKENS: Final = 64  # tokens: with fewer rows kernels stream weights instead of computing


@dataclass(frozen=True, slots=True)
class Batching:
    """How many requests run together at most; delay_s: how long one waits for others."""

    max_requests: int = 16
    delay_s: float = 0.0


def select_batch(
    turns: Iterator[WorkItem], batching: Batching, max_tokens: int, max_items: int | None = None
) -> tuple[tuple[WorkItem, ...], float]:
    """Return the items of the next run, from all queued ones in their order, and when it is due.

    It is the first item with others that may run with it: a power of two, sorted by length, so that shapes repeat.
    Batches of one request run apart, as its forecast said. Steps of sessions wait for no others. A batch with room for
    more is due when its first item has waited for the delay; a full one, and one that was lost before, at once.
    max_items: the others run elsewhere.
    """
    first = next(turns)
    if first.request.generation is not None:
        return _select_steps(first, turns, min(batching.max_requests, MAX_TOGETHER)), -inf
    chosen, jobs, tokens = [first], {id(first.request)}, first.tokens
    full = not first.batchable or first.request.losses[first.index] > 0
    for item in turns if first.batchable else ():
        if len(chosen) == batching.max_requests:
            break
        if not (item.batchable and first.joins(item)) or id(item.request) in jobs:
            continue
        if tokens + item.tokens > max_tokens:
            full = True
            continue
        chosen.append(item)
        jobs.add(id(item.request))
        tokens += item.tokens
    full = full or len(chosen) == batching.max_requests or tokens == max_tokens
    due_s = -inf if full else min(map(partial(_waits_until, batching.delay_s), chosen))
    size = 1 << (min(len(chosen), max_items or len(chosen)).bit_length() - 1)
    return tuple(sorted(chosen[:size], key=lambda item: item.batch.shape.sizes)), due_s


def _select_steps(first: WorkItem, turns: Iterator[WorkItem], most: int) -> tuple[WorkItem, ...]:
    """Return the next run of a session, where that is a step with the steps that may be made beside it."""
    others = (item for item in turns if item.batchable and first.joins(item))
    return (first, *(islice(others, most - 1) if first.batchable else ()))


def pack_steps(runs: Sequence[tuple[Batch, DecoderSession]]) -> tuple[Batch, tuple[DecoderSession, ...]]:
    """Return runs of sessions as one, of a power of two of items, so that there are few Programs.

    Those behind are of no session, and nobody reads what follows from them.
    """
    filler = Batch(runs[0][0].shape.decode_step(1), np.zeros_like(runs[0][0].inputs)), DecoderSession()
    size = 1 << (len(runs) - 1).bit_length()
    batches, sessions = zip(*runs, *[filler] * (size - len(runs)), strict=True)
    return concatenate(batches), sessions


def _waits_until(delay_s: float, item: WorkItem) -> float:
    """Return until when a request may wait for others: the delay, or as long before its deadline."""
    deadline_s = inf if item.request.deadline_s is None else item.request.deadline_s
    return min(item.request.arrived_s + delay_s, deadline_s - delay_s)


def concatenate(chunks: Sequence[Batch]) -> Batch:
    """Return one batch of several with the same `want`, in their order.

    Places of sessions stand before all ids, and temperatures behind them.
    """
    if len(chunks) == 1:
        return chunks[0]
    first, *others = (chunk.shape for chunk in chunks)
    if not first.session_rows:
        return Batch(first.concatenate(others), np.concatenate([chunk.inputs for chunk in chunks]))
    cuts = ((len(c.shape.sizes), len(c.shape.sizes) + c.shape.size) for c in chunks)
    parts = zip(*(np.split(c.inputs, cut) for c, cut in zip(chunks, cuts, strict=True)), strict=True)
    return Batch(first.concatenate(others), np.concatenate([*chain.from_iterable(parts)]))


def split_into_micro_batches(chunks: Sequence[Batch]) -> tuple[Batch, ...]:
    """Return batches split into smaller ones of consecutive items, of about `MICRO_BATCH_TOKENS` tokens."""
    return tuple(part for chunk in chunks for part in _split(chunk))


def _split(chunk: Batch) -> Iterator[Batch]:
    shape = chunk.shape
    first, taken, left = 0, 0, shape.size
    for stop, size in enumerate(shape.sizes, 1):
        taken, left = taken + size, left - size
        if left and (taken < MICRO_BATCH_TOKENS or left < MICRO_BATCH_TOKENS):
            continue
        part, where = shape.slice_items(first, stop)
        yield Batch(part, chunk.inputs[where])
        first, taken = stop, 0


def split_output(spec: Spec, chunks: Sequence[Batch], output: Array) -> list[Array]:
    """Return the rows of each batch in the output of their run; raises RemoteError if they do not add up."""
    if len(chunks) == 1:
        return [output]
    rows = [spec.output_shape(chunk.shape)[0] for chunk in chunks]
    if len(output) != sum(rows):
        raise RemoteError(f"the devices answered with {len(output)} rows instead of {sum(rows)}; use one version")
    return np.split(output, np.cumsum(rows[:-1]).tolist())


# ----------------------------------------------------------------------------------------------------------------------
# A fair queue: the client with the fewest tokens served so far is next.


MAX_REMEMBERED_CLIENTS: Final = 1024


class FairQueue:
    """The queue of a plan group: one line per client, and one before all for items that were lost.

    A new client starts even with the next one in turn, so that idle clients save up no turns. A generation waits in its
    client's line before each of its runs, so that all users' texts grow side by side.
    """

    def __init__(self) -> None:
        self._front: deque[WorkItem] = deque()
        self._lines: dict[str, deque[WorkItem]] = {}
        self._tokens_served: dict[str, int] = {}  # tokens of clients that wait
        self._last_served_tokens = 0  # tokens that the last client in turn had had
        self._served_before: OrderedDict[str, int] = OrderedDict()  # tokens of clients of whom nothing waits now

    def copy(self) -> FairQueue:
        """Return a queue of its own with the same items."""
        made = FairQueue()
        made._front, made._tokens_served = deque(self._front), dict(self._tokens_served)
        made._last_served_tokens = self._last_served_tokens
        made._served_before = self._served_before.copy()
        made._lines = {client: deque(line) for client, line in self._lines.items()}
        return made

    def __len__(self) -> int:
        return len(self._front) + sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[WorkItem]:
        """Yield all that waits, client by client."""
        return chain(self._front, *self._lines.values())

    def in_turn(self) -> Iterator[WorkItem]:
        """Yield the items in the order in which they would be taken one by one."""
        yield from self._front
        # Even clients: the earlier request first, then the one that queued first.
        turns = [
            (self._tokens_served[c], line[0].request.sequence, i, c) for i, (c, line) in enumerate(self._lines.items())
        ]
        heapify(turns)
        places = dict.fromkeys(self._lines, 0)
        while turns:
            had, _, i, client = heappop(turns)
            line, place = self._lines[client], places[client]
            yield line[place]
            places[client] = place + 1
            if place + 1 < len(line):
                heappush(turns, (had + line[place].turn, line[place + 1].request.sequence, i, client))

    def served(self, client: str) -> int:
        """Return the tokens that a client has had so far."""
        return self._tokens_served.get(client, self._served_before.get(client, 0))

    def oldest_sequence(self) -> float:
        """Return the number of the request that came first, infinity if none waits."""
        heads = [item.request.sequence for item in self._front]
        return min([*heads, *(line[0].request.sequence for line in self._lines.values())], default=inf)

    def append(self, items: Iterable[WorkItem]) -> None:
        """Add items to the ends of their clients' lines."""
        for item in items:
            self._line(item.request.key.client).append(item)

    def prepend(self, items: Iterable[WorkItem]) -> None:
        """Add items before all others, in their order; they cost their clients no turn."""
        self._front.extendleft(reversed(list(items)))

    def resume(self, item: WorkItem) -> None:
        """Add an item that continues before all others of its client."""
        self._line(item.request.key.client).appendleft(item)

    def _line(self, client: str) -> deque[WorkItem]:
        if client not in self._lines:
            before = self._served_before.pop(client, 0)
            self._lines[client], self._tokens_served[client] = deque(), max(before, self._last_served_tokens)
        return self._lines[client]

    def remove(self, items: Iterable[WorkItem]) -> None:
        """Remove items; each counts as a turn of its client."""
        for item in items:
            if item in self._front:
                self._front.remove(item)
                continue
            client = item.request.key.client
            self._lines[client].remove(item)
            self._last_served_tokens = max(self._last_served_tokens, self._tokens_served[client])
            self._tokens_served[client] += item.turn
            self._forget(client)

    def discard_finished(self) -> None:
        """Remove the items of requests that have ended."""
        if not any(item.request.finished for item in self):
            return
        self._front = deque(item for item in self._front if not item.request.finished)
        for client in list(self._lines):
            self._lines[client] = deque(item for item in self._lines[client] if not item.request.finished)
            self._forget(client)

    def _forget(self, client: str) -> None:
        """End the line of a client of whom nothing waits."""
        if self._lines[client]:
            return
        del self._lines[client]
        self._served_before[client] = self._tokens_served.pop(client)
        if len(self._served_before) > MAX_REMEMBERED_CLIENTS:
            self._served_before.popitem(last=False)
