"""Refinement of plans: shares that fit into memory, balanced shares, routes, wires, units, layouts, deadlines."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import accumulate, count, pairwise, permutations
from typing import Final

from hepti_mqtt.core.errors import ConfigError
from hepti_mqtt.core.plan import Plan, Range, Route, WeightDtype
from hepti_mqtt.core.profiles import LOCAL_BYTES_PER_S
from hepti_mqtt.core.spec import Spec
from hepti_mqtt.cost.memory import resident_bytes
from hepti_mqtt.models import largest_shape, representative_shape
from hepti_mqtt.planner.candidates import Candidate, candidate_routes, candidate_wires, device_costs, with_route
from hepti_mqtt.planner.price import Memory, Question, fits_packet_limit, memory_needs, needed_bytes, plan_alone, price
from hepti_mqtt.strategies import STRATEGIES
from hepti_mqtt.strategies.method import EMBEDDINGS, ROWS, WORDS
from hepti_mqtt.strategies.plan_programs import make_plan

MEMORY_ROUNDS: Final = 8
SLIGHT: Final = 1e-3  #: factor on a device's weight for its smallest possible share


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan without a price."""

    plan: Plan
    shares: tuple[float, ...]  #: share weights: a relative number per device, from which `make_shares` derives shares
    memory: Memory | None = None  #: None: not computed yet
    is_divided: bool = True  #: False: the plan has no shares yet, because most guesses are never priced

    @property
    def name(self) -> str:
        """Return strategy and variant, e.g. voltage/uneven."""
        return self.plan.method

    @property
    def missing(self) -> Mapping[str, int]:
        """Return the bytes that each device lacks; empty before the memory is computed."""
        return {} if self.memory is None else self.memory.missing

    @property
    def missing_bytes(self) -> int:
        """Return the missing bytes of all devices."""
        return sum(self.missing.values())


@contextmanager
def dividing(question: Question, strategy: str) -> Iterator[None]:
    """Skip a plan if its method cannot divide the model; raise ConfigError if the method is pinned."""
    try:
        yield
    except ValueError as error:
        if question.strategy == strategy:
            raise ConfigError(f"{strategy} cannot divide {question.naming.model}: {error}") from error


def divided(question: Question, draft: Draft) -> Draft:
    """Return a draft with shares; raises ValueError if its method cannot divide the model."""
    if draft.is_divided:
        return draft
    return replace(draft, plan=with_shares(question, draft.plan, draft.shares), is_divided=True)


def price_draft(question: Question, draft: Draft) -> Candidate:
    """Return a draft with its price."""
    draft = divided(question, draft)
    # Memory takes as long to compute as a price, so it comes later, unless plans are compared by it.
    memory = draft.memory or (None if question.objective == "memory" else NOT_COMPUTED)
    return Candidate(draft.plan, price(question, draft.plan, memory=memory), draft.shares)


Move = tuple[Plan, tuple[float, ...]]  #: a plan and its share weights
NOT_COMPUTED: Final = Memory({}, {})  #: memory of a price without memory needs
ROOMY: Final = 1.3  #: memory over need beyond which similar plans nearly always fit


def climb(
    question: Question, c: Candidate, moves: Callable[[Candidate], Iterable[Move]], rounds: int | None = None
) -> Candidate:
    """Return the result of a first-improvement hill climb from a candidate; rounds: at most, None: until no move helps.

    A move counts if it costs less and fits memory and packet limits. That check takes as long as a price, so with
    plenty of memory only the result is checked.
    """
    trail, is_roomy = [c], _is_roomy(c)
    for _ in count() if rounds is None else range(rounds):
        better = next(
            filter(None, (_if_better(question, trail[-1], *move, is_roomy) for move in moves(trail[-1]))), None
        )
        if better is None or question.budget.is_spent:
            break
        trail.append(better)
    while len(trail) > 1:
        best = trail.pop()
        if not is_roomy:
            return best
        if (fitted := fitting(question, best)) is not None:
            return fitted
    return c


def _is_roomy(c: Candidate) -> bool:
    needs, room = c.price.needs, c.price.memory_bytes
    return bool(needs) and all(ROOMY * n <= room[d] for d, n in needs.items()) and c.price.objective != "memory"


def _if_better(
    question: Question, best: Candidate, plan: Plan, weights: tuple[float, ...], is_roomy: bool
) -> Candidate | None:
    if question.budget.is_spent:
        return None
    candidate = price_draft(question, Draft(plan, weights))
    if candidate.price.cost >= best.price.cost:
        return None
    return candidate if is_roomy else fitting(question, candidate)


def fitting(question: Question, c: Candidate) -> Candidate | None:
    """Return a candidate with its memory needs, None if memory is missing or a packet is beyond the limit."""
    if not fits_packet_limit(question, c.plan):
        return None
    memory = memory_needs(question, c.plan)
    return None if memory.missing else replace(c, price=replace(c.price, needs=memory.needs, missing={}))


def plan_shares(plan: Plan) -> tuple[float, ...]:
    """Return the share weights of a plan; with several kinds of shares, of the first kind."""
    for weights in plan.shares.values():
        return tuple(weights)
    for ranges in plan.ranges.values():
        return tuple(float(stop - start) for start, stop in ranges)
    return (1.0,) * len(plan.devices)


def with_shares(question: Question, plan: Plan, weights: Sequence[float]) -> Plan:
    """Return a plan with other shares."""
    return make_plan(question.spec, plan, plan.strategy, plan.options, weights, device_costs(question, plan.devices))


# ----------------------------------------------------------------------------------------------------------------------
# Shares that fit into memory.


@lru_cache(maxsize=8)
def whole_bytes(spec: Spec, storage: WeightDtype) -> int:
    """Return the bytes of all weights: devices that divide them hold at least as much together."""
    return resident_bytes(spec, plan_alone(storage), "")


def with_memory(question: Question, guess: Draft | Candidate) -> Draft:
    """Return the draft of a plan; the next fastest device becomes root if the root lacks memory."""
    drafts = []
    speeds = dict(zip(guess.plan.devices, guess.shares, strict=False))  # replicas have devices of their own
    for root in sorted(guess.plan.devices, key=lambda d: (d != guess.plan.root, -speeds.get(d, 0.0)))[:2]:
        plan = replace(guess.plan, root=root)
        drafts.append(Draft(plan, guess.shares, memory_needs(question, plan)))
        if root not in drafts[-1].missing:
            break
    return min(drafts, key=lambda d: d.missing_bytes)


def fit_memory(question: Question, draft: Draft) -> Draft:
    """Return the draft with shares that fit if there are any, with divided embeddings if necessary."""
    fitted = _fit_shares(question, draft)
    if not fitted.missing or (plan := _with_divided_embeddings(question, draft.plan, draft.shares)) is None:
        return fitted
    other = _fit_shares(question, with_memory(question, Draft(plan, draft.shares)))
    return min(fitted, other, key=lambda d: d.missing_bytes)


def divide_embeddings(question: Question, c: Candidate) -> Candidate:
    """Return a candidate with embeddings divided by words, if that costs nothing."""
    if (plan := _with_divided_embeddings(question, c.plan, c.shares)) is None:
        return c
    other = fitting(question, price_draft(question, Draft(plan, c.shares)))
    return c if other is None or other.price.cost > c.price.cost else other


def _with_divided_embeddings(question: Question, plan: Plan, weights: Sequence[float]) -> Plan | None:
    """Return a plan that divides the embeddings too, None if it already does or cannot."""
    if EMBEDDINGS.kind in plan.ranges or WORDS.kind not in plan.ranges:
        return None
    resources = device_costs(question, plan.devices)
    return make_plan(question.spec, plan, plan.strategy, plan.options, weights, resources, divides_embeddings=True)


def _fit_shares(question: Question, draft: Draft) -> Draft:
    """Return the draft with shares that fit if there are any, starting from shares by speed, else by memory."""
    if draft.plan.replicas or _never_fits(question, draft):
        return draft  # each replica fits already
    fitted = _shift(question, draft)
    if not fitted.missing or len(draft.plan.devices) == 1:
        return fitted
    by_memory = _with_weights(question, draft, [_room(question, device) for device in draft.plan.devices])
    return min(fitted, _shift(question, by_memory), key=lambda d: d.missing_bytes)


def _never_fits(question: Question, draft: Draft) -> bool:
    """Return whether a device lacks memory even for its smallest possible share."""
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


def _with_weights(question: Question, draft: Draft, weights: Sequence[float]) -> Draft:
    plan = with_shares(question, draft.plan, weights)
    return Draft(plan, tuple(weights), memory_needs(question, plan))


def _shift(question: Question, draft: Draft) -> Draft:
    """Move shares away from devices that lack memory, until the plan fits or no move helps."""
    best = draft
    for _ in range(MEMORY_ROUNDS):
        if best.memory is None or not best.missing or len(best.plan.devices) == 1:
            break
        weights = list(best.shares)
        for i, device in enumerate(best.plan.devices):
            if device in best.missing:
                weights[i] *= max(min(_room(question, device) / best.memory.needs[device], 0.95), 0.05) ** 1.5
        moved = _with_weights(question, best, weights)
        if moved.missing_bytes >= best.missing_bytes:
            break
        best = moved
    return best


# ----------------------------------------------------------------------------------------------------------------------
# Balanced shares, the route and the wire.


SEARCH_ROUNDS: Final = 4  #: steps of balancing
STEPS: Final = (1.3, 1.15, 1.07)  #: factors on one device's share, for maps with few rows


def best_route_and_wire(question: Question, c: Candidate) -> Candidate:
    """Return a candidate with its best route and wire; doing so for all candidates would take several times as long."""
    if c.plan.replicas:
        return c  # each replica has its own route and wire
    variants = [
        replace(with_route(question, c.plan, r), wire=w)
        for r in _routes(question, c)
        for w in candidate_wires(question, c.plan)
    ]
    others = [plan for plan in variants if (plan.route, plan.wire) != (c.plan.route, c.plan.wire)]
    allowed = (p for p in others if fits_packet_limit(question, p))
    priced = (replace(c, plan=p, price=price(question, p, memory=_memory_as(question, c, p))) for p in allowed)
    return min((c, *(p for p in priced if p.price.feasible)), key=lambda candidate: candidate.price.cost)


def _routes(question: Question, c: Candidate) -> Sequence[Route]:
    """Return the routes of a plan that may be fast: the broker's link must carry every copy."""
    routes, links = candidate_routes(question, c.plan.devices), question.cluster.links
    sent = sum(use.sent_bytes for use in c.price.use.values())
    is_remote = all(links[d].down_bytes_per_s < LOCAL_BYTES_PER_S for d in c.plan.devices)
    if c.plan.route == "mesh" and is_remote and sent / question.cluster.broker_bytes_per_s > c.price.seconds:
        return ("mesh",)
    return routes


def _memory_as(question: Question, c: Candidate, plan: Plan) -> Memory:
    """Return the memory of a candidate's plan with another route or wire; only the wire may change it."""
    return c.price.memory if plan.wire == c.plan.wire else memory_needs(question, plan)


LEAST_MOVE: Final = 2 / 128  #: smallest difference of row shares that predictions can resolve


def rows_moved(question: Question, c: Candidate) -> Iterator[Candidate]:
    """Yield a plan with balanced rows, and with rows halfway to them: no device loads a weight."""
    method = STRATEGIES[c.plan.strategy]
    if len(c.plan.devices) == 1 or c.plan.replicas or method.fixed_shares or method.equal_shares:
        return
    far = climb(question, c, partial(_balanced, question, with_rows), SEARCH_ROUNDS)
    if _distance(far.shares, c.shares) >= LEAST_MOVE:
        yield far
        if _distance(far.shares, c.shares) >= 2 * LEAST_MOVE:
            half = tuple(a / sum(c.shares) + b / sum(far.shares) for a, b in zip(c.shares, far.shares, strict=True))
            plan = with_rows(question, c.plan, half)
            if (candidate := fitting(question, price_draft(question, Draft(plan, half)))) is not None:
                yield candidate


def _distance(some: Sequence[float], others: Sequence[float]) -> float:
    return max(abs(a / sum(some) - b / sum(others)) for a, b in zip(some, others, strict=True))


def with_rows(question: Question, plan: Plan, weights: Sequence[float]) -> Plan:
    """Return a plan with other shares of the kinds without weights."""
    moved, is_free = with_shares(question, plan, weights), STRATEGIES[plan.strategy].is_free_of_weights
    ranges = {kind: moved.ranges[kind] if is_free(kind) else ranges for kind, ranges in plan.ranges.items()}
    return replace(moved, ranges=ranges, layouts=plan.layouts)


def balance_shares(question: Question, c: Candidate) -> Candidate:
    """Return a plan with shares shifted from busy devices to waiting devices while that helps."""
    method = STRATEGIES[c.plan.strategy]
    if method.chooses_devices(c.plan.options):
        return meet_deadline(question, c)
    if len(c.plan.devices) == 1 or c.plan.replicas or method.fixed_shares:
        return c

    return climb(question, c, partial(_balanced, question, with_shares), SEARCH_ROUNDS)


def _balanced(question: Question, divide: Callable[..., Plan], best: Candidate) -> Iterator[Move]:
    """Yield a plan with smaller shares for busier devices."""
    now, devices = best.price, best.plan.devices
    of_memory = question.objective == "memory"
    busy = [now.needs[d] / max(now.memory_bytes[d], 1) if of_memory else now.use[d].compute_s for d in devices]
    mean = sum(busy) / len(busy)
    factors = [min(max((mean / t) ** 0.7 if t > 0 else 1.5, 0.5), 2.0) for t in busy]
    weights = tuple(w * factor for w, factor in zip(best.shares, factors, strict=True))
    yield divide(question, best.plan, weights), weights


def step_by_step(question: Question, c: Candidate) -> Candidate:
    """Change the share of one device at a time, by smaller and smaller steps, if that helps."""

    def stepped(i: int, step: float, best: Candidate) -> Iterator[Move]:
        busy = [best.price.use[device].compute_s for device in best.plan.devices]
        factor = 1 / step if busy[i] * len(busy) > sum(busy) else step  # the other direction hardly ever helps
        weights = tuple(w * factor if j == i else w for j, w in enumerate(best.shares))
        yield with_shares(question, best.plan, weights), weights

    for step in STEPS if STRATEGIES[c.plan.strategy].coarse else ():
        for i in range(len(c.plan.devices)):
            c = climb(question, c, partial(stepped, i, step), rounds=1)
    return c


# ----------------------------------------------------------------------------------------------------------------------
# Shares of few units, changed one unit at a time: share weights would change all kinds together.


MOST: Final = 256  #: most units of a range: share weights divide more units finely enough
ROUNDS: Final = 2  #: over all kinds, the fewest units first: finer kinds then compensate
MOVES: Final = 56  #: moves of one kind: with more units, a move takes several


def hill_climb(question: Question, c: Candidate) -> Candidate:
    """Move single units of a plan's ranges between devices while that makes it faster."""
    if not STRATEGIES[c.plan.strategy].coarse:
        return c
    few = sorted((parts[-1][1], kind) for kind, parts in c.plan.ranges.items() if parts[-1][1] <= MOST)
    climbed: dict[str, Candidate] = {}
    for _, kind in few * ROUNDS:
        if climbed.get(kind) is not c:  # otherwise the candidate has not changed since
            climbed[kind] = c = climb(question, c, partial(_unit_moves, kind))
    return c


def _unit_moves(kind: str, c: Candidate) -> Iterator[Move]:
    busy = [c.price.use[device].compute_s for device in c.plan.devices]
    for ranges in _moved(c.plan.ranges[kind], busy):
        yield replace(c.plan, ranges={**c.plan.ranges, kind: ranges}), c.shares


def _moved(ranges: Sequence[Range], busy: Sequence[float]) -> Iterator[tuple[Range, ...]]:
    """Yield ranges with a unit, or a few, moved from one device to a less busy device.

    Moves go from devices busier than the mean to the others, the largest difference first; no device loses its last
    unit. busy: computing seconds of each device.
    """
    counts = [stop - start for start, stop in ranges]
    by, mean = -(-sum(counts) // MOVES), sum(busy) / len(busy)
    pairs = sorted(permutations(range(len(counts)), 2), key=lambda pair: busy[pair[1]] - busy[pair[0]])
    for source, target in pairs:
        if counts[source] > by and busy[source] > mean >= busy[target]:
            moved = [n + by * ((i == target) - (i == source)) for i, n in enumerate(counts)]
            yield tuple(pairwise(accumulate(moved, initial=0)))


# ----------------------------------------------------------------------------------------------------------------------
# Layouts of some methods: runs of many rows are divided differently from runs of few rows.


WORTH_WEIGHTS: Final = 1.05  #: least gain of the longest run from a layout that needs weights of its own


def settle_layouts(question: Question, c: Candidate) -> Candidate:
    """Return a candidate with the final layouts of its plan, by rows of a run.

    Each layout is used from the number of rows at which it beats the layouts for fewer rows, if devices have room.
    """
    if not c.price.feasible or (plan := _with_layouts(question, c.plan)) == c.plan:
        return c
    return replace(c, plan=plan, price=replace(c.price, needs=memory_needs(question, plan, exactly=True).needs))


def _with_layouts(question: Question, plan: Plan) -> Plan:
    plan = replace(plan, replicas=tuple(_with_layouts(question, replica) for replica in plan.replicas))
    layouts = STRATEGIES[plan.strategy].layouts
    if not layouts or plan.layouts or len(plan.devices) == 1:
        return plan
    if (standing := _standing_layouts(question, plan)) is not None:
        return standing
    longest = largest_shape(question.spec).size
    shape = representative_shape(question.spec, max(longest, question.shape.session_rows))
    latency_question = replace(question, objective="latency")
    sizes = [1 << n for n in range(1, longest.bit_length())]  # rows of runs
    rows = {"": plan.shares[ROWS.kind]}  # balanced shares of rows by layout

    @cache
    def seconds(layout: str, size: int) -> float:
        run = replace(latency_question, shape=shape.decode_step(size))
        return price(run, _in_layout(plan, layout, rows[layout]), memory=NOT_COMPUTED).seconds

    def gain(new: str, others: Sequence[str], size: int) -> float:
        return min(seconds(old, size) for old in others) / seconds(new, size)

    def first_size(new: str, others: Sequence[str]) -> int:
        return bisect_left(sizes, True, key=lambda size: gain(new, others, size) > 1)

    first_rows = dict[str, int]()
    for layout in layouts:
        run = replace(latency_question, shape=shape.decode_step(longest))
        rows[layout] = _balanced_rows(run, _in_layout(plan, layout, rows[""]))
        others = ("", *first_rows)
        first = first_size(layout, others)
        before, after = (replace(plan, layouts=names) for names in (first_rows, {**first_rows, layout: 0}))
        if first < len(sizes) and _is_worth_it(question, before, after, gain(layout, others, longest)):
            first_rows = {name: most for name, most in first_rows.items() if most < 1 << first} | {layout: 1 << first}
    last = next(reversed(first_rows), "")
    return replace(_in_layout(plan, last, rows[last]), layouts=first_rows or {layouts[0]: longest})


def _standing_layouts(question: Question, plan: Plan) -> Plan | None:
    """Return a plan on devices of the active plan with that plan's layouts and rows, None if they do not fit.

    Pricing all layouts again takes several times as long as a search without a new result.
    """
    active = question.active
    if active is None or not active.layouts or active.method != plan.method:
        return None
    of = dict(zip(active.devices, active.shares[ROWS.kind], strict=True))
    rows = tuple(of.get(device, 0.0) for device in plan.devices)
    candidate = replace(plan, layouts=active.layouts, shares={**plan.shares, ROWS.kind: rows})
    able = of.keys() >= set(plan.devices) and any(rows)
    return candidate if able and not memory_needs(question, candidate, exactly=True).missing else None


def _in_layout(plan: Plan, layout: str, rows: tuple[float, ...]) -> Plan:
    """Return a plan with all runs in one layout; rows: shares of each device's own rows."""
    return replace(plan, shares={**plan.shares, ROWS.kind: rows}, layouts={layout: 0} if layout else {})


def _balanced_rows(question: Question, plan: Plan) -> tuple[float, ...]:
    """Return balanced shares of rows: no weights and no cache depend on them."""

    def divide(_: Question, before: Plan, rows: tuple[float, ...]) -> Plan:
        return replace(before, shares={**before.shares, ROWS.kind: rows})

    best = price_draft(question, Draft(plan, plan.shares[ROWS.kind], NOT_COMPUTED))
    for _ in range(SEARCH_ROUNDS):
        ((moved, rows),) = _balanced(question, divide, best)
        if _distance(rows, best.shares) < LEAST_MOVE:
            break
        candidate = price_draft(question, Draft(moved, rows, NOT_COMPUTED))
        if candidate.price.cost >= best.price.cost:
            break
        best = candidate
    return best.shares


def _is_worth_it(question: Question, before: Plan, after: Plan, gain: float) -> bool:
    """Return whether devices have room for another layout, and plenty of room if it needs weights of its own.

    gain: speed of the longest run relative to the other layouts.
    """
    resident = [[resident_bytes(question.spec, p, d) for d in p.devices] for p in (before, after)]
    if resident[1] > resident[0] and gain < WORTH_WEIGHTS:
        return False
    needs, times = memory_needs(question, after, exactly=True).needs, ROOMY if resident[1] > resident[0] else 1.0
    return all(times * need <= question.cluster.devices[device].memory_bytes for device, need in needs.items())


# ----------------------------------------------------------------------------------------------------------------------
# Methods that choose shares for a deadline by an estimate: make the simulator confirm the deadline.


DEADLINE_ROUNDS: Final = 6
MARGIN: Final = 0.98  #: factor on the next deadline, since shares are whole rows


def meet_deadline(question: Question, c: Candidate) -> Candidate:
    """Return a candidate that is solved again for an earlier deadline while the simulated time is late.

    If no solution is in time, the fastest is returned: users see both times.
    """
    deadline_s, best = question.cluster.deadline_s, c
    target_s = deadline_s
    for _ in range(DEADLINE_ROUNDS):
        if best.price.seconds <= deadline_s:
            break
        target_s *= MARGIN * deadline_s / best.price.seconds
        sooner = replace(question, cluster=replace(question.cluster, deadline_s=target_s))
        with suppress(ValueError):
            resources = device_costs(sooner, c.plan.devices)
            plan = make_plan(question.spec, best.plan, c.plan.strategy, c.plan.options, c.shares, resources)
            candidate = replace(best, plan=plan, price=price(question, plan, memory=memory_needs(question, plan)))
            faster = not candidate.price.missing and candidate.price.seconds < best.price.seconds
            if faster and fits_packet_limit(question, plan):
                best = candidate
    return best
