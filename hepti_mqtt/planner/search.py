"""The fastest plans that memory allows: guesses in the order of their price, made to fit by moving shares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from heapq import heapify, heappop, heappush
from itertools import accumulate, count, pairwise, permutations
from typing import Final, NamedTuple

from hepti_mqtt.cost.memory import weights_bytes
from hepti_mqtt.errors import ConfigError, PacketLimitError, PlanError
from hepti_mqtt.ids import PlanVersion
from hepti_mqtt.lowering import Graph
from hepti_mqtt.models import graph, largest_shape
from hepti_mqtt.plan import NARROW_WIRE_DTYPES, Plan, Range, WeightDtype
from hepti_mqtt.plan_programs import make_plan, programs_digest, resident_weights
from hepti_mqtt.planner.candidates import (
    EXACT,
    Candidate,
    Decision,
    LowerBound,
    as_chain,
    candidate_routes,
    candidate_wires,
    check_question,
    device_costs,
    explain_choice,
    explain_no_fit,
    interchangeable,
    subsets,
    wire_error_key,
    with_route,
)
from hepti_mqtt.planner.price import (
    Memory,
    Question,
    fits_packet_limit,
    memory_needs,
    needed_bytes,
    plan_packet,
    price,
    tile_packet,
)
from hepti_mqtt.shares import Options
from hepti_mqtt.shares.maps import pixels
from hepti_mqtt.spec import Spec
from hepti_mqtt.strategies import STRATEGIES, Method

SINGLE: Final = next(method.name for method in STRATEGIES.values() if method.max_devices == 1)
REFINED: Final = 6  # candidates whose shares are balanced
MEMORY_ROUNDS: Final = 8
SLIGHT: Final = 1e-3  # of a device's weight: as little as a division may give it


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan with share weights that has no price yet; memory: what it needs, where that is known."""

    plan: Plan
    shares: tuple[float, ...]
    memory: Memory | None = None

    @property
    def name(self) -> str:
        """Return strategy and variant, as people write it."""
        return self.plan.method

    @property
    def missing(self) -> Mapping[str, int]:
        """Return the bytes that each device lacks, as far as is known."""
        return {} if self.memory is None else self.memory.missing

    @property
    def missing_bytes(self) -> int:
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


def price_draft(question: Question, draft: Draft) -> Candidate:
    """Return a draft with its price."""
    # Memory takes as long to work out as a price: it comes later, unless plans are compared by it.
    memory = draft.memory or (None if question.objective == "memory" else Memory({}, {}))
    return Candidate(draft.plan, price(question, draft.plan, memory=memory), draft.shares)


Move = tuple[Plan, tuple[float, ...]]  # a plan, and the share weights that it came from


def climb(
    question: Question, c: Candidate, moves: Callable[[Candidate], Iterable[Move]], rounds: int | None = None
) -> Candidate:
    """Return the best of a candidate and the first move that beats it, again and again; rounds: at most.

    A move counts if it costs less and memory and broker take it too.
    """
    for _ in count() if rounds is None else range(rounds):
        better = next(filter(None, (_if_better(question, c, *move) for move in moves(c))), None)
        if better is None:
            break
        c = better
    return c


def _if_better(question: Question, best: Candidate, plan: Plan, weights: tuple[float, ...]) -> Candidate | None:
    found = price_draft(question, Draft(plan, weights))
    if found.price.cost >= best.price.cost or not fits_packet_limit(question, plan):
        return None
    memory = memory_needs(question, plan)
    return None if memory.missing else replace(found, price=replace(found.price, needs=memory.needs))


def plan_shares(plan: Plan) -> tuple[float, ...]:
    """Return share weights that a plan of one kind of shares comes from; of several kinds, of the first."""
    for weights in plan.shares.values():
        return tuple(weights)
    for ranges in plan.ranges.values():
        return tuple(float(stop - start) for start, stop in ranges)
    return (1.0,) * len(plan.devices)


def with_shares(question: Question, plan: Plan, weights: Sequence[float]) -> Plan:
    """Return a plan with other shares."""
    return make_plan(question.spec, plan, plan.strategy, plan.options, weights, device_costs(question, plan.devices))


# -- in the order of time ---------------------------------------------------------------------------------------------


class FittingResult(NamedTuple):
    """Candidates to balance; drafts found on the way that do not fit; of other methods the best price that is known."""

    candidates: list[Candidate]
    oversized: list[Draft]
    pruned: list[Candidate]


def best_fitting(question: Question, guesses: Sequence[Draft]) -> FittingResult:
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
        if not question.is_exhaustive and c.name != SINGLE:
            priced_s = c.price.seconds if isinstance(c, Candidate) else None
            if found and floor.is_pruned(c.plan, priced_s, found[0].price.expected_s):
                if isinstance(c, Candidate):
                    behind.append(c)
                continue
            if isinstance(c, Draft) and (least := floor.bound_unpriced(c.plan)) > cost[0] >= 0:
                heappush(queue, ((least, least), n, c, False))
                continue
        with dividing(question, c.plan.strategy):
            if isinstance(c, Draft):
                c = price_draft(question, c)
                floor.observe(c)
                heappush(queue, (c.price.cost, n, c, False))
                continue
            draft = _fit_memory(question, _draft(question, c))
            if draft.missing:
                short.append(draft)
            elif fits_packet_limit(question, draft.plan):
                assert draft.memory is not None
                known = replace(c.price, needs=draft.memory.needs, missing={}) if draft.plan == c.plan else None
                c = price_draft(question, draft) if known is None else replace(c, price=known)
                heappush(queue, (c.price.cost, n, c, True))
    explained = {c.name for c in found} | {draft.name for draft in short}
    short += [_draft(question, guess) for name, guess in hopeless.items() if name not in explained]
    first = {c.name: c for c in reversed(behind) if c.name not in explained}
    return FittingResult(found, short, list(first.values()))


# (cost or its bound, number, plan, whether it is known to fit)
_Step = tuple[tuple[float, float], int, Draft | Candidate, bool]


def _queue(question: Question, guesses: Sequence[Draft]) -> tuple[list[_Step], LowerBound]:
    """Return a heap of the guesses by what they cost at the least: it follows from the prices of devices alone."""
    queue: list[_Step] = []
    alone: dict[str, float] = {}
    if question.objective == "latency":
        for n, guess in enumerate(guesses):
            if len(guess.plan.devices) == 1:
                with dividing(question, guess.plan.strategy):
                    c = price_draft(question, guess)
                    queue.append((c.price.cost, n, c, False))
                    alone[c.plan.root] = c.price.seconds
    known = {number for _, number, _, _ in queue}
    like = interchangeable(question, list(dict.fromkeys((*alone, *(d for g in guesses for d in g.plan.devices)))))
    floor = LowerBound(question, {device: alone[kind] for device, kind in like.items() if kind in alone})
    first = set() if question.is_exhaustive else _smallest(guesses)
    for n, guess in enumerate(guesses):
        if n not in known:
            least = -1.0 if n in first else floor.bound_unpriced(guess.plan)
            queue.append(((least, least), n, guess, False))
    heapify(queue)
    return queue, floor


def _smallest(guesses: Sequence[Draft]) -> set[int]:
    """Return the number of each method's first guess of the fewest devices: priced first, it bounds others."""
    best: dict[str, int] = {}
    for n, guess in enumerate(guesses):
        devices = len(guess.plan.devices)
        if devices > 1 and (guess.name not in best or devices < len(guesses[best[guess.name]].plan.devices)):
            best[guess.name] = n
    return set(best.values())


# -- by memory --------------------------------------------------------------------------------------------------------


def _by_room(question: Question, guesses: Sequence[Draft]) -> tuple[list[Draft], dict[str, Draft]]:
    """Return the guesses whose devices have room for the weights together, and by name the others with the most."""
    whole = _whole_bytes(question.spec, question.weight_dtype)
    room = {name: profile.memory_bytes for name, profile in question.cluster.devices.items()}
    able: list[Draft] = []
    hopeless: dict[str, tuple[float, Draft]] = {}
    for guess in guesses:
        has = sum(room[d] for d in guess.plan.devices)
        if guess.plan.replicas or has >= whole:
            able.append(guess)
        elif guess.name not in hopeless or has > hopeless[guess.name][0]:
            hopeless[guess.name] = (has, guess)
    return able, {name: guess for name, (_, guess) in hopeless.items()}


@lru_cache(maxsize=8)
def _whole_bytes(spec: Spec, storage: WeightDtype) -> int:
    """Return the bytes of all weights: devices that divide them hold no less together."""
    plan = Plan("", PlanVersion(0, 0), SINGLE, ("",), "", weight_dtype=storage)
    return weights_bytes(resident_weights(spec, plan, ""))


def _draft(question: Question, guess: Draft | Candidate) -> Draft:
    """Return the draft of a plan, with the next fastest device as its head if only the head's memory is short."""
    made = []
    speeds = dict(zip(guess.plan.devices, guess.shares, strict=False))  # replicas have devices of their own
    for head in sorted(guess.plan.devices, key=lambda d: (d != guess.plan.root, -speeds.get(d, 0.0)))[:2]:
        plan = replace(guess.plan, root=head)
        made.append(Draft(plan, guess.shares, memory_needs(question, plan)))
        if head not in made[-1].missing:
            break
    return min(made, key=lambda d: d.missing_bytes)


def _fit_memory(question: Question, draft: Draft) -> Draft:
    """Return the draft with shares that fit if there are any: from those by speed, else from those by memory."""
    if draft.plan.replicas or _never_fits(question, draft):
        return draft  # each replica was made to fit
    fitted = _shift(question, draft)
    if not fitted.missing or len(draft.plan.devices) == 1:
        return fitted
    by_memory = _redrafted(question, draft, [_room(question, device) for device in draft.plan.devices])
    return min(fitted, _shift(question, by_memory), key=lambda d: d.missing_bytes)


def _never_fits(question: Question, draft: Draft) -> bool:
    """Return whether a device lacks memory even for as little as a division may give it."""
    devices = draft.plan.devices
    if len(devices) == 1:
        return bool(draft.missing)
    for i, device in enumerate(devices):
        if device in draft.missing:
            slight = [w * SLIGHT if i == n else w for n, w in enumerate(draft.shares)]
            if needed_bytes(question, with_shares(question, draft.plan, slight), device) > _room(question, device):
                return True
    return False


def _room(question: Question, device: str) -> float:
    return max(min(question.cluster.devices[device].memory_bytes, 1e15), 1.0)


def _redrafted(question: Question, draft: Draft, weights: Sequence[float]) -> Draft:
    plan = with_shares(question, draft.plan, weights)
    return Draft(plan, tuple(weights), memory_needs(question, plan))


def _shift(question: Question, draft: Draft) -> Draft:
    """Move shares away from devices whose memory is short, until the plan fits or nothing moves any more."""
    best = draft
    for _ in range(MEMORY_ROUNDS):
        if best.memory is None or not best.missing or len(best.plan.devices) == 1:
            break
        weights = list(best.shares)
        for i, device in enumerate(best.plan.devices):
            if device in best.missing:
                weights[i] *= max(min(_room(question, device) / best.memory.needs[device], 0.95), 0.05) ** 1.5
        moved = _redrafted(question, best, weights)
        if moved.missing_bytes >= best.missing_bytes:
            break
        best = moved
    return best


# ----------------------------------------------------------------------------------------------------------------------
# Shares of few units, tried one unit at a time: weights change those of all sizes at once.


MOST: Final = 256  # units of a share; more are divided as finely as weights say
ROUNDS: Final = 2  # over all shares, those of the fewest units first: the others then make up for them
MOVES: Final = 56  # of one share: of more units, several move at once


def hill_climb(question: Question, c: Candidate) -> Candidate:
    """Move single units of a plan's ranges from device to device, as long as that makes it faster."""
    if not STRATEGIES[c.plan.strategy].coarse:
        return c
    few = sorted((parts[-1][1], kind) for kind, parts in c.plan.ranges.items() if parts[-1][1] <= MOST)
    looked: dict[str, Candidate] = {}
    for _, kind in few * ROUNDS:
        if looked.get(kind) is not c:  # else nothing has moved since
            looked[kind] = c = climb(question, c, partial(_unit_moves, kind))
    return c


def _unit_moves(kind: str, c: Candidate) -> Iterator[Move]:
    busy = [c.price.use[device].compute_s for device in c.plan.devices]
    for ranges in _moved(c.plan.ranges[kind], busy):
        yield replace(c.plan, ranges={**c.plan.ranges, kind: ranges}), c.shares


def _moved(ranges: Sequence[Range], busy: Sequence[float]) -> Iterator[tuple[Range, ...]]:
    """Yield ranges with a unit, or a few, moved from one device to a less busy one.

    Devices that differ most come first; nobody who had some is left without. busy: seconds of each device, in all.
    """
    counts = [stop - start for start, stop in ranges]
    by = -(-sum(counts) // MOVES)
    pairs = sorted(permutations(range(len(counts)), 2), key=lambda pair: busy[pair[1]] - busy[pair[0]])
    for source, target in pairs:
        if counts[source] > by and busy[source] > busy[target]:
            moved = [n + by * ((i == target) - (i == source)) for i, n in enumerate(counts)]
            yield tuple(pairwise(accumulate(moved, initial=0)))


# ----------------------------------------------------------------------------------------------------------------------
# Plans that settle shares by an estimate, so that they keep the site's deadline by the simulator too.


DEADLINE_ROUNDS: Final = 6
MARGIN: Final = 0.98  # beyond what was missed, since shares are whole rows


def meet_deadline(question: Question, c: Candidate) -> Candidate:
    """Return a candidate that is solved again for an earlier deadline as long as the simulator says that it is late.

    What is late all the same is returned as it is best: the reader sees both times.
    """
    wanted, best = question.cluster.deadline_s, c
    asked = wanted
    for _ in range(DEADLINE_ROUNDS):
        if best.price.seconds <= wanted:
            break
        asked *= MARGIN * wanted / best.price.seconds
        sooner = replace(question, cluster=replace(question.cluster, deadline_s=asked))
        with suppress(ValueError):
            lanes = device_costs(sooner, c.plan.devices)
            plan = make_plan(question.spec, best.plan, c.plan.strategy, c.plan.options, c.shares, lanes)
            found = replace(best, plan=plan, price=price(question, plan, memory=memory_needs(question, plan)))
            faster = not found.price.missing and found.price.seconds < best.price.seconds
            if faster and fits_packet_limit(question, plan):
                best = found
    return best


# ----------------------------------------------------------------------------------------------------------------------
# Replicas to price: which devices make up each, and which plan each has inside, from a search of its own.


FEW: Final = 4  # of more devices only two groups and half as many as devices are tried, unless they are pinned


def replica_plans(
    question: Question, method: Method, by_speed: Sequence[str], decide: Callable[[Question], Decision]
) -> Iterator[Plan]:
    """Yield the plans of replicas for devices, fastest first; decide: searches the plan of one of them.

    Where devices are not pinned, groups are left out that have no room for a replica. If none has, the plan of all of
    them says what is missing. Raises ConfigError for groups that are asked for, where no method divides the model over
    one of them.
    """
    rows = max(question.shape.size, 1)
    speeds = [question.cluster.devices[d].speed(rows) for d in by_speed]
    known: dict[tuple[str, ...], Plan | None] = {}

    def inside(group: tuple[str, ...]) -> Plan | None:
        if group not in known:
            known[group] = _inside(question, group, decide)
        return known[group]

    for options in _choices(question, method, len(by_speed)):
        assert method.groups is not None
        groups = [tuple(by_speed[i] for i in group) for group in method.groups(options, speeds)]
        parts = [part for group in groups if (part := inside(group)) is not None]
        if not parts or (question.devices is not None and len(parts) < len(groups)):
            if (plan := _of_all(question, method, options, dict(zip(by_speed, speeds, strict=True)))) is not None:
                yield plan
        elif len(parts) > 1 or question.strategy == method.name:
            yield _joined(question, method, options, parts)


def _choices(question: Question, method: Method, devices: int) -> list[Options]:
    if question.options:
        return [question.options]
    tried = (devices, 2, devices // 2) if devices > FEW else range(devices + 1)
    return [o for o in method.variants_for(devices) if int(o.get("groups", devices)) in tried]


def _inside(question: Question, group: tuple[str, ...], decide: Callable[[Question], Decision]) -> Plan | None:
    """Return the fastest plan that uses a whole group, None if none fits."""
    asked = replace(question, strategy=None, options={}, devices=group, objective="latency", requests=0)
    try:
        ranking = decide(asked).ranking
    except PlanError:
        return None
    able = (c.plan for c in ranking if c.price.feasible and len(c.plan.devices) == len(group))
    return next(able, None)


def _of_all(question: Question, method: Method, options: Options, speeds: Mapping[str, float]) -> Plan | None:
    """Return the plan of all devices, whether it fits or not; None if no other method divides the model so.

    Raises ConfigError instead, if it is what was asked for.
    """
    devices = tuple(speeds)
    template = Plan(question.naming.model, question.plan_version, method.name, devices, devices[0])
    template = replace(template, wire=question.wire, weight_dtype=question.weight_dtype)
    try:
        return make_plan(question.spec, template, method.name, options, tuple(speeds.values()))
    except ValueError as error:
        if question.strategy == method.name and question.options:
            raise ConfigError(
                f"{question.naming.model} cannot have such {method.name}: {error}; leave out the groups, and each "
                "device is one by itself"
            ) from error
        return None


def _joined(question: Question, method: Method, options: Options, parts: Sequence[Plan]) -> Plan:
    """Return one plan of several side by side, the fastest first; its wire is the narrowest of theirs."""
    first = question.plan_version
    replicas = tuple(
        replace(part, version=PlanVersion(first.boot, first.number + number))
        for number, part in enumerate(sorted(parts, key=lambda part: part.predicted_s), 1)
    )
    return replace(
        replicas[0],
        version=first,
        strategy=method.name,
        options=options,
        devices=tuple(device for part in replicas for device in part.devices),
        wire=next((wire for wire in NARROW_WIRE_DTYPES if any(part.wire == wire for part in replicas)), EXACT),
        shares={},
        ranges={},
        relayed_pairs=(),
        replicas=replicas,
    )


# ----------------------------------------------------------------------------------------------------------------------
# The search: every strategy and variant, over subsets of devices, with shares balanced on the simulator.


SEARCH_ROUNDS: Final = 4  # steps of balancing
STEPPED: Final = 2  # candidates whose shares are tried step by step
STEPS: Final = (1.3, 1.15, 1.07)  # of one device's share, where a map has few rows to share out
# The least speed-up for which several devices are taken: below it, predictions are too inexact.
MIN_SPEEDUP: Final = 1.04
# Throughputs that differ by less are alike: a short load ends where it ends, and devices that wait for each other lose
# more on a busy machine than the simulator says. Of such plans the one that sends least is taken.
ALIKE: Final = 1.05
_BROKER: Final = "the site's broker"


def decide(question: Question) -> Decision:
    """Return the best feasible plan.

    Raises ConfigError for an unknown strategy or device, PlanError if nothing is feasible: the text says how much
    memory is missing where; PacketLimitError if the broker takes no packet that any plan, or the weights, need.
    """
    check_question(question)
    able, short, behind = best_fitting(question, _within_packet_limit(question, list(_initial_plans(question))))
    best: dict[str, Candidate] = {}
    able[:REFINED] = (_best_route_and_wire(question, c) for c in able[:REFINED])
    refined = sorted((balance_shares(question, c) for c in able), key=_order)
    refined[:STEPPED] = sorted((_step_by_step(question, c) for c in refined[:STEPPED]), key=_order)
    refined[:1] = (hill_climb(question, c) for c in refined[:1])
    for c in sorted(refined, key=_order):
        best.setdefault(c.name, c)
    for draft in sorted(short, key=lambda d: d.missing_bytes):
        best.setdefault(draft.name, price_draft(question, draft))
    top = _prefer_single(question, _simulate_in_full(question, best.values()))
    if not top or not top[0].price.feasible:
        raise PlanError(explain_no_fit(question, top))
    return _decision(question, top, behind)


def _decision(question: Question, top: Sequence[Candidate], behind: Sequence[Candidate] = ()) -> Decision:
    chosen = top[0]
    reason = explain_choice(top, chosen, behind)
    plan = replace(chosen.plan, reason=reason)
    return Decision(
        replace(chosen, plan=plan),
        tuple(top),
        reason,
        question.cluster,
        programs_digest(question.spec, plan),
        tuple(sorted(behind, key=_order)),
    )


def decide_hurried(question: Question, last: Plan | None = None) -> Decision:
    """Return a plan in a fraction of the time of `decide`: for requests that wait and have none.

    The best device alone, or the last plan's method on those of its devices that are left: if that is faster and they
    have all the weights already, or if none can do it alone. Raises as `decide` does, if neither can be.
    """
    try:
        alone = decide(replace(question, strategy=SINGLE, options={}))
    except PlanError:
        left = None if last is None else _on_remaining_devices(question, last, may_load=True)
        if left is None:
            raise
        return _decision(question, [left])
    left = None if last is None else _on_remaining_devices(question, last, may_load=False)
    if left is None:
        return alone
    return _decision(question, _prefer_single(question, sorted((left, alone.chosen), key=_order)))


def simulate_plan(question: Question, plan: Plan) -> Candidate:
    """Return a plan that is known with its price by the question, all layers simulated."""
    return _simulate_draft(question, Draft(plan, plan_shares(plan)))


def price_plans(question: Question, plans: Sequence[Plan]) -> Decision:
    """Return the decision between plans that are known, with prices by the question and under its plan version.

    Raises PlanError if none is feasible.
    """
    found = (simulate_plan(question, replace(plan, version=question.plan_version)) for plan in plans)
    ranking = sorted(found, key=_order)
    if not ranking[0].price.feasible:
        raise PlanError(explain_no_fit(question, ranking))
    return _decision(question, ranking)


def _on_remaining_devices(question: Question, last: Plan, *, may_load: bool) -> Candidate | None:
    """Return the method of a plan on several of its devices, with shares by speed; None if it cannot be.

    may_load: weights that they have not loaded for the last plan.
    """
    profiles = question.cluster.devices
    names = [device for device in last.devices if device in profiles]
    if len(names) < 2 or last.replicas:
        return None
    rows = max(question.shape.size // len(names), 1)
    speeds = {name: profiles[name].speed(rows) for name in sorted(names, key=lambda n: (-profiles[n].speed(rows), n))}
    with dividing(question, last.strategy):
        guess = _guess(question, STRATEGIES[last.strategy], last.options, speeds)
        # How far a narrow wire moves answers is not worked out here.
        plan = replace(guess.plan, wire=question.wire if question.accuracy is None else EXACT)
        if last.route in candidate_routes(question, plan.devices):
            plan = with_route(question, plan, last.route)
        if may_load or _has_weights(question, last, plan):
            memory = memory_needs(question, plan)
            if not memory.missing and fits_packet_limit(question, plan):
                return _simulate_draft(question, Draft(plan, guess.shares, memory))
    return None


def _has_weights(question: Question, last: Plan, plan: Plan) -> bool:
    """Return whether the devices of a plan have loaded all of its weights for the last one."""
    spec = question.spec
    return all({*resident_weights(spec, last, d)} >= {*resident_weights(spec, plan, d)} for d in plan.devices)


def _within_packet_limit(question: Question, guesses: Sequence[Draft]) -> Sequence[Draft]:
    """Return the guesses whose largest packets get through; raises PacketLimitError if not even one does."""
    limit = question.packet_bytes
    if limit is None or not guesses:
        return guesses
    tiles = tile_packet(question)
    if tiles > limit:
        what = f"bringing the weights of {question.naming.model}"
        raise PacketLimitError.of(what, tiles, _BROKER, limit, narrows=False)
    sizes = [plan_packet(question, g.plan) for g in guesses]
    if min(sizes) > limit:
        raise PacketLimitError.of(f"every plan of {question.naming.model}", min(sizes), _BROKER, limit)
    return [g for g, size in zip(guesses, sizes, strict=True) if size <= limit]


def _order(c: Candidate) -> tuple[bool, float, tuple[float, float]]:
    # Infeasible ones last, the least missing first.
    missing = float(sum(c.price.missing.values()))
    return (missing > 0, missing, c.price.cost)


def _initial_plans(question: Question) -> Iterator[Draft]:
    """Yield every candidate with shares proportional to measured speed."""
    names = question.devices or tuple(question.cluster.devices)
    most = max(question.shape.size, pixels(_graph(question)))
    rows = max(most // max(len(names), 1), 1)
    profiles = question.cluster.devices
    by_speed = sorted(names, key=lambda n: (-profiles[n].speed(rows), n))
    for method in _methods(question):
        if method.groups is not None:
            for plan in replica_plans(question, method, by_speed, decide):
                yield Draft(plan, ())
            continue
        for subset in subsets(question, by_speed, pinned=question.devices is not None and method.max_devices is None):
            if method.max_devices is not None and len(subset) > method.max_devices:
                continue
            alone = len(subset) == 1 and method.max_devices is None
            if alone and (len(names) > 1 or question.strategy is None):
                continue  # one device is what `single` is for
            share_rows = max(most // len(subset), 1)
            weights = tuple(profiles[d].speed(share_rows) for d in subset)
            for options in method.variants_for(len(subset), None if question.options else _graph(question)):
                if question.options and dict(question.options) != dict(options):
                    continue
                if method.chooses_devices(options) and len(subset) < len(names):
                    continue  # it leaves out devices by itself
                with dividing(question, method.name):
                    yield _guess(question, method, options, dict(zip(subset, weights, strict=True)))


def _graph(question: Question) -> Graph:
    return graph(question.spec, largest_shape(question.spec))


def _methods(question: Question) -> Iterator[Method]:
    """Yield the methods to try; raises ConfigError if the one that is pinned cannot divide this model."""
    most = question.objective == "throughput"
    for name, method in STRATEGIES.items():
        if question.strategy is None and not (method.automatic or (method.for_throughput and most)):
            continue
        if question.strategy not in {None, name}:
            continue
        reason = method.why_unsupported(_graph(question))
        if reason is None:
            yield method
        elif question.strategy == name:
            able = [m.name for m in STRATEGIES.values() if m.why_unsupported(_graph(question)) is None]
            raise ConfigError(f"{reason}; {question.naming.model} can be divided by: {', '.join(able)}")


def _guess(question: Question, method: Method, options: Options, speeds: Mapping[str, float]) -> Draft:
    """Return a plan whose head is the first device, the fastest; raises ValueError if the model cannot be divided."""
    head, *_ = names = tuple(speeds)
    devices = as_chain(names) if method.order_matters else names
    weights = tuple(speeds[device] for device in devices)
    template = Plan(
        question.naming.model,
        question.plan_version,
        method.name,
        devices,
        head,
        wire=question.wire,
        weight_dtype=question.weight_dtype,
    )
    plan = make_plan(question.spec, template, method.name, options, weights, device_costs(question, devices))
    plan = replace(plan, wire=candidate_wires(question, plan)[0])
    return Draft(with_route(question, plan, candidate_routes(question, devices)[0]), weights)


def _best_route_and_wire(question: Question, c: Candidate) -> Candidate:
    """Return a candidate by the best route and wire; for all of them the search would take several times as long."""
    if c.plan.replicas:
        return c  # each has its own
    ways = [
        replace(with_route(question, c.plan, r), wire=w)
        for r in candidate_routes(question, c.plan.devices)
        for w in candidate_wires(question, c.plan)
    ]
    others = [plan for plan in ways if (plan.route, plan.wire) != (c.plan.route, c.plan.wire)]
    through = (p for p in others if fits_packet_limit(question, p))
    priced = (replace(c, plan=p, price=price(question, p, memory=_memory_as(question, c, p))) for p in through)
    return min((c, *(p for p in priced if p.price.feasible)), key=lambda found: found.price.cost)


def _memory_as(question: Question, c: Candidate, plan: Plan) -> Memory:
    """Return the memory of a candidate's plan on another route, which changes nothing of it, or wire, which may."""
    return c.price.memory if plan.wire == c.plan.wire else memory_needs(question, plan)


def balance_shares(question: Question, c: Candidate) -> Candidate:
    """Return a plan with shares shifted from devices that compute long to those that wait, as long as that helps."""
    method = STRATEGIES[c.plan.strategy]
    if method.chooses_devices(c.plan.options):
        return meet_deadline(question, c)
    if len(c.plan.devices) == 1 or c.plan.replicas or method.fixed_shares:
        return c

    def balanced(best: Candidate) -> Iterator[Move]:
        now, of_memory = best.price, question.objective == "memory"
        busy = [
            now.needs[d] / max(now.memory_bytes[d], 1) if of_memory else now.use[d].compute_s for d in c.plan.devices
        ]
        mean = sum(busy) / len(busy)
        factors = [min(max((mean / t) ** 0.7 if t > 0 else 1.5, 0.5), 2.0) for t in busy]
        weights = tuple(w * factor for w, factor in zip(best.shares, factors, strict=True))
        yield with_shares(question, best.plan, weights), weights

    return climb(question, c, balanced, SEARCH_ROUNDS)


def _step_by_step(question: Question, c: Candidate) -> Candidate:
    """Give one device after the other more or less, by smaller and smaller steps, as long as that helps."""

    def stepped(i: int, step: float, best: Candidate) -> Iterator[Move]:
        for factor in (step, 1 / step):
            weights = tuple(w * factor if j == i else w for j, w in enumerate(best.shares))
            yield with_shares(question, best.plan, weights), weights

    for step in STEPS if STRATEGIES[c.plan.strategy].coarse else ():
        for i in range(len(c.plan.devices)):
            c = climb(question, c, partial(stepped, i, step), rounds=1)
    return c


def _simulate_in_full(question: Question, found: Iterable[Candidate]) -> list[Candidate]:
    """Return candidates simulated in full, the best first.

    For throughput several requests are played, which takes long: only for those that may be better than the best yet.
    """
    out: list[Candidate] = []
    for c in sorted(found, key=_order):
        most = question.objective == "throughput" and not question.requests
        best = min((done.price.cost for done in out if done.price.feasible), default=None)
        hopeless = most and best is not None and c.price.cost[0] >= ALIKE * best[0]
        out.append(_final(replace(question, objective="latency") if hopeless else question, c))
    out = [replace(c, price=replace(c.price, objective=question.objective)) for c in out]
    return _least_sent(question, sorted(out, key=_order))


def _least_sent(question: Question, ranking: list[Candidate]) -> list[Candidate]:
    """Return the ranking; for throughput, what sends least of those that are about as good as the best comes first."""
    if question.objective != "throughput" or not ranking or not ranking[0].price.feasible:
        return ranking
    enough = ALIKE * ranking[0].price.cost[0]
    alike = [c for c in ranking if c.price.feasible and c.price.load is not None and c.price.cost[0] <= enough]
    first = min(alike, key=lambda c: sum(use.sent_bytes for use in c.price.use.values()), default=ranking[0])
    return [first, *(c for c in ranking if c is not first)]


def _prefer_single(question: Question, found: list[Candidate]) -> list[Candidate]:
    """Put one device first where others beside it are predicted to gain next to nothing: each exchange is a risk."""
    alone = next((c for c in found if c.name == SINGLE and c.price.feasible), None)
    if question.objective != "latency" or alone is None:
        return found
    is_worth_it = alone.price.cost[0] > MIN_SPEEDUP * found[0].price.cost[0]
    return found if is_worth_it else [alone, *(c for c in found if c is not alone)]


def _final(question: Question, c: Candidate) -> Candidate:
    return _simulate_draft(question, Draft(c.plan, c.shares, c.price.memory))


def _simulate_draft(question: Question, draft: Draft) -> Candidate:
    full = price(question, draft.plan, full=True, memory=draft.memory)
    errors = [question.errors[key] for run in draft.plan.executables if (key := wire_error_key(run)) in question.errors]
    plan = replace(
        draft.plan,
        predicted_s=full.seconds,
        predicted_bytes=full.nbytes,
        predicted_tokens=question.shape.size,
        wire_error=max(errors, default=None),
    )
    return Candidate(plan, full, draft.shares)
