"""The fastest plans that memory allows: guesses in the order of their price, made to fit by moving shares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from hepti_mqtt.errors import ConfigError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.plan import Plan, Storage
from hepti_mqtt.plan_programs import make_plan, resident_weights
from hepti_mqtt.planner.behind import Floor
from hepti_mqtt.planner.decision import Candidate
from hepti_mqtt.planner.lanes import lanes_of
from hepti_mqtt.planner.price import Question, gets_through, memory, needed_bytes, price
from hepti_mqtt.planner.subsets import kinds
from hepti_mqtt.simulate import weight_total
from hepti_mqtt.spec import Spec
from hepti_mqtt.strategies import STRATEGIES

ALONE: Final = next(method.name for method in STRATEGIES.values() if method.most_devices == 1)
REFINED: Final = 6  # candidates whose shares are balanced
MEMORY_ROUNDS: Final = 8
SLIGHT: Final = 1e-3  # of a device's weight: as little as a division may give it


@dataclass(frozen=True, slots=True)
class Guess:
    """A plan with shares by speed, of which neither time nor memory is known."""

    plan: Plan
    weights: tuple[float, ...]

    @property
    def name(self) -> str:
        """Return strategy and variant, as people write it."""
        return self.plan.method


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan whose memory is known and whose time is not."""

    plan: Plan
    weights: tuple[float, ...]
    needs: Mapping[str, int]
    missing: Mapping[str, int]

    @property
    def name(self) -> str:
        """Return strategy and variant, as people write it."""
        return self.plan.method

    @property
    def lacks(self) -> int:
        """Return the bytes that are missing, of all devices."""
        return sum(self.missing.values())


@contextmanager
def dividing(question: Question, strategy: str) -> Iterator[None]:
    """Leave a plan out if its method cannot divide the model so: the others go on.

    Raises ConfigError if it is the method that was asked for.
    """
    try:
        yield
    except ValueError as error:
        if question.strategy == strategy:
            raise ConfigError(f"{strategy} cannot divide {question.naming.model}: {error}") from error


def guessed(question: Question, guess: Guess) -> Candidate:
    """Return a guess with its price."""
    # What memory a plan needs costs as much to work out as its price: it comes later, unless plans are compared by it.
    known: tuple[dict[str, int], dict[str, int]] | None = None if question.objective == "memory" else ({}, {})
    return Candidate(guess.plan, price(question, guess.plan, known=known), guess.weights)


def priced(question: Question, draft: Draft) -> Candidate:
    """Return a draft with its price."""
    return Candidate(draft.plan, price(question, draft.plan, known=(draft.needs, draft.missing)), draft.weights)


def improved(question: Question, best: Candidate, plan: Plan, weights: Sequence[float]) -> Candidate | None:
    """Return a plan with shares moved if it costs less than the best yet, and memory and broker take it too."""
    found = guessed(question, Guess(plan, tuple(weights)))
    if found.price.cost >= best.price.cost or not gets_through(question, plan):
        return None
    needs, missing = memory(question, plan)
    return None if missing else replace(found, price=replace(found.price, needs=needs))


def reweighted(question: Question, plan: Plan, weights: Sequence[float]) -> Plan:
    """Return a plan with other shares."""
    return make_plan(question.spec, plan, plan.strategy, plan.options, weights, lanes_of(question, plan.devices))


# -- in the order of time ---------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """Candidates to balance; drafts found on the way that do not fit; of other methods the best price that is known."""

    able: list[Candidate]
    short: list[Draft]
    behind: list[Candidate]


def fitting(question: Question, guesses: Sequence[Guess]) -> Found:
    """Return the fastest candidates, those that do not fit, and those that are too far behind to be looked at.

    Where the question compares, the fastest of every other strategy and variant is among the first, so that the
    comparison is fair. What a plan costs is worked out no earlier than its turn comes: first what it cannot be faster
    than, then its price, then the memory that it needs.
    """
    able, hopeless = _by_room(question, guesses)
    queue, floor = _queue(question, able)
    found: list[Candidate] = []
    short: list[Draft] = []
    behind: list[Candidate] = []
    while queue:
        cost, n, c, fits = heappop(queue)
        # Who is behind takes a place too, unless memory is short, where it might not fit: so others get none for it.
        taken = [*found, *([] if short else behind)]
        if len(taken) >= REFINED and c.name in {other.name for other in taken}:
            continue
        if isinstance(c, Candidate) and fits:
            found.append(c)
            continue
        if not question.compare and c.name != ALONE:
            priced_s = c.price.seconds if isinstance(c, Candidate) else None
            if found and floor.behind(c.plan, priced_s, found[0].price.expected_s):
                if isinstance(c, Candidate):
                    behind.append(c)
                continue
            if isinstance(c, Guess) and (least := floor.least(c.plan)) > cost[0] >= 0:
                heappush(queue, ((least, least), n, c, False))
                continue
        with dividing(question, c.plan.strategy):
            if isinstance(c, Guess):
                c = guessed(question, c)
                floor.saw(c)
                heappush(queue, (c.price.cost, n, c, False))
                continue
            draft = _fit_memory(question, _draft(question, c))
            if draft.missing:
                short.append(draft)
            elif gets_through(question, draft.plan):
                known = replace(c.price, needs=draft.needs, missing={}) if draft.plan == c.plan else None
                c = priced(question, draft) if known is None else replace(c, price=known)
                heappush(queue, (c.price.cost, n, c, True))
    explained = {c.name for c in found} | {draft.name for draft in short}
    short += [_draft(question, guess) for name, guess in hopeless.items() if name not in explained]
    first = {c.name: c for c in reversed(behind) if c.name not in explained}
    return Found(found, short, list(first.values()))


# (cost or its bound, number, plan, whether it is known to fit)
_Step = tuple[tuple[float, float], int, Guess | Candidate, bool]


def _queue(question: Question, guesses: Sequence[Guess]) -> tuple[list[_Step], Floor]:
    """Return a heap of the guesses by what they cost at the least: it follows from the prices of devices alone."""
    queue: list[_Step] = []
    alone: dict[str, float] = {}
    if question.objective == "latency":
        for n, guess in enumerate(guesses):
            if len(guess.plan.devices) == 1:
                with dividing(question, guess.plan.strategy):
                    c = guessed(question, guess)
                    queue.append((c.price.cost, n, c, False))
                    alone[c.plan.head] = c.price.seconds
    known = {number for _, number, _, _ in queue}
    like = kinds(question, list(dict.fromkeys((*alone, *(d for g in guesses for d in g.plan.devices)))))
    floor = Floor(question, {device: alone[kind] for device, kind in like.items() if kind in alone})
    first = set() if question.compare else _smallest(guesses)
    for n, guess in enumerate(guesses):
        if n not in known:
            least = -1.0 if n in first else floor.least(guess.plan)
            queue.append(((least, least), n, guess, False))
    heapify(queue)
    return queue, floor


def _smallest(guesses: Sequence[Guess]) -> set[int]:
    """Return the number of each method's first guess of the fewest devices: the soonest priced, it tells of others."""
    best: dict[str, int] = {}
    for n, guess in enumerate(guesses):
        devices = len(guess.plan.devices)
        if devices > 1 and (guess.name not in best or devices < len(guesses[best[guess.name]].plan.devices)):
            best[guess.name] = n
    return set(best.values())


# -- by memory --------------------------------------------------------------------------------------------------------


def _by_room(question: Question, guesses: Sequence[Guess]) -> tuple[list[Guess], dict[str, Guess]]:
    """Return the guesses whose devices have room for the weights together, and by name the others with the most."""
    whole = _whole_bytes(question.spec, question.storage)
    room = {name: profile.memory_bytes for name, profile in question.cluster.devices.items()}
    able: list[Guess] = []
    hopeless: dict[str, tuple[float, Guess]] = {}
    for guess in guesses:
        has = sum(room[d] for d in guess.plan.devices)
        if guess.plan.replicas or has >= whole:
            able.append(guess)
        elif guess.name not in hopeless or has > hopeless[guess.name][0]:
            hopeless[guess.name] = (has, guess)
    return able, {name: guess for name, (_, guess) in hopeless.items()}


@lru_cache(maxsize=8)
def _whole_bytes(spec: Spec, storage: Storage) -> int:
    """Return the bytes of all weights: devices that divide them hold no less together."""
    plan = Plan("", Epoch(0, 0), ALONE, ("",), "", storage=storage)
    return weight_total(resident_weights(spec, plan, ""))


def _draft(question: Question, guess: Guess | Candidate) -> Draft:
    """Return the draft of a plan, with the next fastest device as its head if only the head's memory is short."""
    made = []
    speeds = dict(zip(guess.plan.devices, guess.weights, strict=False))  # replicas have devices of their own
    for head in sorted(guess.plan.devices, key=lambda d: (d != guess.plan.head, -speeds.get(d, 0.0)))[:2]:
        plan = replace(guess.plan, head=head)
        made.append(Draft(plan, guess.weights, *memory(question, plan)))
        if head not in made[-1].missing:
            break
    return min(made, key=lambda d: d.lacks)


def _fit_memory(question: Question, draft: Draft) -> Draft:
    """Return the draft with shares that fit if there are any: from those by speed, else from those by memory."""
    if draft.plan.replicas or _never_fits(question, draft):
        return draft  # each replica was made to fit
    fitted = _shift(question, draft)
    if not fitted.missing or len(draft.plan.devices) == 1:
        return fitted
    by_memory = _redrafted(question, draft, [_room(question, device) for device in draft.plan.devices])
    return min(fitted, _shift(question, by_memory), key=lambda d: d.lacks)


def _never_fits(question: Question, draft: Draft) -> bool:
    """Return whether a device lacks memory even for as little as a division may give it."""
    devices = draft.plan.devices
    if len(devices) == 1:
        return bool(draft.missing)
    for i, device in enumerate(devices):
        if device in draft.missing:
            slight = [w * SLIGHT if i == n else w for n, w in enumerate(draft.weights)]
            if needed_bytes(question, reweighted(question, draft.plan, slight), device) > _room(question, device):
                return True
    return False


def _room(question: Question, device: str) -> float:
    return max(min(question.cluster.devices[device].memory_bytes, 1e15), 1.0)


def _redrafted(question: Question, draft: Draft, weights: Sequence[float]) -> Draft:
    plan = reweighted(question, draft.plan, weights)
    return Draft(plan, tuple(weights), *memory(question, plan))


def _shift(question: Question, draft: Draft) -> Draft:
    """Move shares away from devices whose memory is short, until the plan fits or nothing moves any more."""
    best = draft
    for _ in range(MEMORY_ROUNDS):
        if not best.missing or len(best.plan.devices) == 1:
            break
        weights = list(best.weights)
        for i, device in enumerate(best.plan.devices):
            if device in best.missing:
                weights[i] *= max(min(_room(question, device) / best.needs[device], 0.95), 0.05) ** 1.5
        moved = _redrafted(question, best, weights)
        if moved.lacks >= best.lacks:
            break
        best = moved
    return best
