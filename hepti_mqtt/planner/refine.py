"""A plan made better: shares that memory allows, moved to where devices finish together; routes, wires and units."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import accumulate, count, pairwise, permutations
from typing import Final

from hepti_mqtt.cost.memory import resident_bytes
from hepti_mqtt.cost.profiles import LOCAL_BYTES_PER_S
from hepti_mqtt.errors import ConfigError
from hepti_mqtt.models import largest_shape, representative_shape
from hepti_mqtt.plan import Plan, Range, Route, WeightDtype
from hepti_mqtt.plan_programs import make_plan
from hepti_mqtt.planner.candidates import Candidate, candidate_routes, candidate_wires, device_costs, with_route
from hepti_mqtt.planner.price import Memory, Question, fits_packet_limit, memory_needs, needed_bytes, plan_alone, price
from hepti_mqtt.spec import Spec
from hepti_mqtt.strategies import STRATEGIES
from hepti_mqtt.strategies.method import EMBEDDINGS, ROWS, WORDS

MEMORY_ROUNDS: Final = 8
SLIGHT: Final = 1e-3  # of a device's weight: as little as a division may give it


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan with share weights that has no price yet; memory: what it needs, where that is known.

    is_divided: False as long as the plan has no shares: of many guesses most are never priced.
    """

    plan: Plan
    shares: tuple[float, ...]
    memory: Memory | None = None
    is_divided: bool = True

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


def divided(question: Question, draft: Draft) -> Draft:
    """Return a draft whose plan has shares; raises ValueError if its method cannot divide the model so."""
    if draft.is_divided:
        return draft
    return replace(draft, plan=with_shares(question, draft.plan, draft.shares), is_divided=True)


def price_draft(question: Question, draft: Draft) -> Candidate:
    """Return a draft with its price."""
    draft = divided(question, draft)
    # Memory takes as long to work out as a price: it comes later, unless plans are compared by it.
    memory = draft.memory or (None if question.objective == "memory" else NOT_ASKED)
    return Candidate(draft.plan, price(question, draft.plan, memory=memory), draft.shares)


Move = tuple[Plan, tuple[float, ...]]  # a plan, and the share weights that it came from
NOT_ASKED: Final = Memory({}, {})
ROOMY: Final = 1.3  # where devices have this many times the memory that a plan needs, others like it fit nearly always


def climb(
    question: Question, c: Candidate, moves: Callable[[Candidate], Iterable[Move]], rounds: int | None = None
) -> Candidate:
    """Return the best of a candidate and the first move that beats it, again and again; rounds: at most.

    A move counts if it costs less and memory and broker take it too. That takes as long to find out as the price, so
    where there is room it is asked of the last one alone.
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
        if (found := fitting(question, best)) is not None:
            return found
    return c


def _is_roomy(c: Candidate) -> bool:
    needs, room = c.price.needs, c.price.memory_bytes
    return bool(needs) and all(ROOMY * n <= room[d] for d, n in needs.items()) and c.price.objective != "memory"


def _if_better(
    question: Question, best: Candidate, plan: Plan, weights: tuple[float, ...], is_roomy: bool
) -> Candidate | None:
    if question.budget.is_spent:
        return None
    found = price_draft(question, Draft(plan, weights))
    if found.price.cost >= best.price.cost:
        return None
    return found if is_roomy else fitting(question, found)


def fitting(question: Question, c: Candidate) -> Candidate | None:
    """Return a candidate with what memory it needs, None if devices lack some, or its packets do not get through."""
    if not fits_packet_limit(question, c.plan):
        return None
    memory = memory_needs(question, c.plan)
    return None if memory.missing else replace(c, price=replace(c.price, needs=memory.needs, missing={}))


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


# ----------------------------------------------------------------------------------------------------------------------
# Shares that memory allows.


@lru_cache(maxsize=8)
def whole_bytes(spec: Spec, storage: WeightDtype) -> int:
    """Return the bytes of all weights: devices that divide them hold no less together."""
    return resident_bytes(spec, plan_alone(storage), "")


def with_memory(question: Question, guess: Draft | Candidate) -> Draft:
    """Return the draft of a plan, with the next fastest device as its head if only the head's memory is short."""
    made = []
    speeds = dict(zip(guess.plan.devices, guess.shares, strict=False))  # replicas have devices of their own
    for head in sorted(guess.plan.devices, key=lambda d: (d != guess.plan.root, -speeds.get(d, 0.0)))[:2]:
        plan = replace(guess.plan, root=head)
        made.append(Draft(plan, guess.shares, memory_needs(question, plan)))
        if head not in made[-1].missing:
            break
    return min(made, key=lambda d: d.missing_bytes)


def fit_memory(question: Question, draft: Draft) -> Draft:
    """Return the draft with shares that fit if there are any, if need be with a table of words that is divided too."""
    fitted = _fit_shares(question, draft)
    if not fitted.missing or (plan := _with_divided_embeddings(question, draft.plan, draft.shares)) is None:
        return fitted
    other = _fit_shares(question, with_memory(question, Draft(plan, draft.shares)))
    return min(fitted, other, key=lambda d: d.missing_bytes)


def divide_embeddings(question: Question, c: Candidate) -> Candidate:
    """Return a candidate whose devices each have the embeddings of their own words, where that costs nothing."""
    if (plan := _with_divided_embeddings(question, c.plan, c.shares)) is None:
        return c
    other = fitting(question, price_draft(question, Draft(plan, c.shares)))
    return c if other is None or other.price.cost > c.price.cost else other


def _with_divided_embeddings(question: Question, plan: Plan, weights: Sequence[float]) -> Plan | None:
    """Return a plan that divides the table of words too, None if it does so already or cannot."""
    if EMBEDDINGS.kind in plan.ranges or WORDS.kind not in plan.ranges:
        return None
    lanes = device_costs(question, plan.devices)
    return make_plan(question.spec, plan, plan.strategy, plan.options, weights, lanes, divides_embeddings=True)


def _fit_shares(question: Question, draft: Draft) -> Draft:
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
# Shares moved to where devices finish together, by a route and in a wire.


SEARCH_ROUNDS: Final = 4  # steps of balancing
STEPS: Final = (1.3, 1.15, 1.07)  # of one device's share, where a map has few rows to share out


def best_route_and_wire(question: Question, c: Candidate) -> Candidate:
    """Return a candidate by the best route and wire; for all of them the search would take several times as long."""
    if c.plan.replicas:
        return c  # each has its own
    ways = [
        replace(with_route(question, c.plan, r), wire=w)
        for r in _routes(question, c)
        for w in candidate_wires(question, c.plan)
    ]
    others = [plan for plan in ways if (plan.route, plan.wire) != (c.plan.route, c.plan.wire)]
    through = (p for p in others if fits_packet_limit(question, p))
    priced = (replace(c, plan=p, price=price(question, p, memory=_memory_as(question, c, p))) for p in through)
    return min((c, *(p for p in priced if p.price.feasible)), key=lambda found: found.price.cost)


def _routes(question: Question, c: Candidate) -> Sequence[Route]:
    """Return the routes of a plan that may be faster: the broker's link carries each copy that mesh does not."""
    routes, links = candidate_routes(question, c.plan.devices), question.cluster.links
    sent = sum(use.sent_bytes for use in c.price.use.values())
    is_remote = all(links[d].down_bytes_per_s < LOCAL_BYTES_PER_S for d in c.plan.devices)
    if c.plan.route == "mesh" and is_remote and sent / question.cluster.broker_bytes_per_s > c.price.seconds:
        return ("mesh",)
    return routes


def _memory_as(question: Question, c: Candidate, plan: Plan) -> Memory:
    """Return the memory of a candidate's plan on another route, which changes nothing of it, or wire, which may."""
    return c.price.memory if plan.wire == c.plan.wire else memory_needs(question, plan)


LEAST_MOVE: Final = 2 / 128  # of all rows: of a plan with fewer in other places predictions cannot tell


def rows_moved(question: Question, c: Candidate) -> Iterator[Candidate]:
    """Yield a plan with its rows where devices finish together, and half of the way: no device loads a weight."""
    method = STRATEGIES[c.plan.strategy]
    if len(c.plan.devices) == 1 or c.plan.replicas or method.fixed_shares or method.equal_shares:
        return
    far = climb(question, c, partial(_balanced, question, with_rows), SEARCH_ROUNDS)
    if _distance(far.shares, c.shares) >= LEAST_MOVE:
        yield far
        if _distance(far.shares, c.shares) >= 2 * LEAST_MOVE:
            half = tuple(a / sum(c.shares) + b / sum(far.shares) for a, b in zip(c.shares, far.shares, strict=True))
            plan = with_rows(question, c.plan, half)
            if (found := fitting(question, price_draft(question, Draft(plan, half)))) is not None:
                yield found


def _distance(some: Sequence[float], others: Sequence[float]) -> float:
    return max(abs(a / sum(some) - b / sum(others)) for a, b in zip(some, others, strict=True))


def with_rows(question: Question, plan: Plan, weights: Sequence[float]) -> Plan:
    """Return a plan with other shares of what takes no weights."""
    moved, is_free = with_shares(question, plan, weights), STRATEGIES[plan.strategy].is_free_of_weights
    ranges = {kind: moved.ranges[kind] if is_free(kind) else ranges for kind, ranges in plan.ranges.items()}
    return replace(moved, ranges=ranges, layouts=plan.layouts)


def balance_shares(question: Question, c: Candidate) -> Candidate:
    """Return a plan with shares shifted from devices that compute long to those that wait, as long as that helps."""
    method = STRATEGIES[c.plan.strategy]
    if method.chooses_devices(c.plan.options):
        return meet_deadline(question, c)
    if len(c.plan.devices) == 1 or c.plan.replicas or method.fixed_shares:
        return c

    return climb(question, c, partial(_balanced, question, with_shares), SEARCH_ROUNDS)


def _balanced(question: Question, divide: Callable[..., Plan], best: Candidate) -> Iterator[Move]:
    """Yield a plan with less for devices that are busier than others."""
    now, devices = best.price, best.plan.devices
    of_memory = question.objective == "memory"
    busy = [now.needs[d] / max(now.memory_bytes[d], 1) if of_memory else now.use[d].compute_s for d in devices]
    mean = sum(busy) / len(busy)
    factors = [min(max((mean / t) ** 0.7 if t > 0 else 1.5, 0.5), 2.0) for t in busy]
    weights = tuple(w * factor for w, factor in zip(best.shares, factors, strict=True))
    yield divide(question, best.plan, weights), weights


def step_by_step(question: Question, c: Candidate) -> Candidate:
    """Give busy devices less and others more, one after the other by smaller and smaller steps, where that helps."""

    def stepped(i: int, step: float, best: Candidate) -> Iterator[Move]:
        busy = [best.price.use[device].compute_s for device in best.plan.devices]
        factor = 1 / step if busy[i] * len(busy) > sum(busy) else step  # the other way hardly ever helps
        weights = tuple(w * factor if j == i else w for j, w in enumerate(best.shares))
        yield with_shares(question, best.plan, weights), weights

    for step in STEPS if STRATEGIES[c.plan.strategy].coarse else ():
        for i in range(len(c.plan.devices)):
            c = climb(question, c, partial(stepped, i, step), rounds=1)
    return c


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

    From those busier than the mean to others, the most different first; nobody who had some is left without. busy:
    seconds of each device, in all.
    """
    counts = [stop - start for start, stop in ranges]
    by, mean = -(-sum(counts) // MOVES), sum(busy) / len(busy)
    pairs = sorted(permutations(range(len(counts)), 2), key=lambda pair: busy[pair[1]] - busy[pair[0]])
    for source, target in pairs:
        if counts[source] > by and busy[source] > mean >= busy[target]:
            moved = [n + by * ((i == target) - (i == source)) for i, n in enumerate(counts)]
            yield tuple(pairwise(accumulate(moved, initial=0)))


# ----------------------------------------------------------------------------------------------------------------------
# Runs of many rows, which some methods divide in other layouts than those of few.


# How many times as fast the longest run must be for weights that nothing else reads: they have to be loaded, too.
WORTH_WEIGHTS: Final = 1.05


def settle_layouts(question: Question, c: Candidate) -> Candidate:
    """Return a candidate whose plan says in which layout runs of how many rows are, which it does not change any more.

    Each layout for more rows is taken from where it is faster than those for fewer, if devices have room for it.
    """
    if not c.price.feasible or (plan := _with_layouts(question, c.plan)) == c.plan:
        return c
    return replace(c, plan=plan, price=replace(c.price, needs=memory_needs(question, plan, exactly=True).needs))


def _with_layouts(question: Question, plan: Plan) -> Plan:
    plan = replace(plan, replicas=tuple(_with_layouts(question, replica) for replica in plan.replicas))
    layouts = STRATEGIES[plan.strategy].layouts
    if not layouts or plan.layouts or len(plan.devices) == 1:
        return plan
    if (known := _layouts_that_stand(question, plan)) is not None:
        return known
    longest = largest_shape(question.spec).size
    shape = representative_shape(question.spec, max(longest, question.shape.session_rows))
    asked = replace(question, objective="latency")
    sizes = [1 << n for n in range(1, longest.bit_length())]  # that runs have
    rows = {"": plan.shares[ROWS.kind]}  # of each layout, where devices finish together

    @cache
    def seconds(layout: str, size: int) -> float:
        run = replace(asked, shape=shape.decode_step(size))
        return price(run, _in_layout(plan, layout, rows[layout]), memory=NOT_ASKED).seconds

    def gain(new: str, others: Sequence[str], size: int) -> float:
        return min(seconds(old, size) for old in others) / seconds(new, size)

    def first_size(new: str, others: Sequence[str]) -> int:
        return bisect_left(sizes, True, key=lambda size: gain(new, others, size) > 1)

    found = dict[str, int]()
    for layout in layouts:
        run = replace(asked, shape=shape.decode_step(longest))
        rows[layout] = _balanced_rows(run, _in_layout(plan, layout, rows[""]))
        others = ("", *found)
        first = first_size(layout, others)
        before, after = (replace(plan, layouts=names) for names in (found, {**found, layout: 0}))
        if first < len(sizes) and _is_worth_it(question, before, after, gain(layout, others, longest)):
            found = {name: most for name, most in found.items() if most < 1 << first} | {layout: 1 << first}
    last = next(reversed(found), "")
    return replace(_in_layout(plan, last, rows[last]), layouts=found or {layouts[0]: longest})


def _layouts_that_stand(question: Question, plan: Plan) -> Plan | None:
    """Return a plan of devices of the active one with its layouts and rows, if there is room for them.

    To price all layouts again takes several times as long as a search that finds nothing new.
    """
    active = question.active
    if active is None or not active.layouts or active.method != plan.method:
        return None
    of = dict(zip(active.devices, active.shares[ROWS.kind], strict=True))
    rows = tuple(of.get(device, 0.0) for device in plan.devices)
    found = replace(plan, layouts=active.layouts, shares={**plan.shares, ROWS.kind: rows})
    able = of.keys() >= set(plan.devices) and any(rows)
    return found if able and not memory_needs(question, found, exactly=True).missing else None


def _in_layout(plan: Plan, layout: str, rows: tuple[float, ...]) -> Plan:
    """Return a plan of which all runs are in one layout; rows: the shares of own ones."""
    return replace(plan, shares={**plan.shares, ROWS.kind: rows}, layouts={layout: 0} if layout else {})


def _balanced_rows(question: Question, plan: Plan) -> tuple[float, ...]:
    """Return the shares of rows for which devices finish together: no weights and no cache depend on them."""

    def divide(_: Question, before: Plan, rows: tuple[float, ...]) -> Plan:
        return replace(before, shares={**before.shares, ROWS.kind: rows})

    best = price_draft(question, Draft(plan, plan.shares[ROWS.kind], NOT_ASKED))
    for _ in range(SEARCH_ROUNDS):
        ((moved, rows),) = _balanced(question, divide, best)
        if _distance(rows, best.shares) < LEAST_MOVE:
            break
        found = price_draft(question, Draft(moved, rows, NOT_ASKED))
        if found.price.cost >= best.price.cost:
            break
        best = found
    return best.shares


def _is_worth_it(question: Question, before: Plan, after: Plan, gain: float) -> bool:
    """Return whether devices have room for one more layout, and plenty of it for weights that it alone reads.

    gain: how many times as fast the longest run is.
    """
    held = [[resident_bytes(question.spec, p, d) for d in p.devices] for p in (before, after)]
    if held[1] > held[0] and gain < WORTH_WEIGHTS:
        return False
    needs, times = memory_needs(question, after, exactly=True).needs, ROOMY if held[1] > held[0] else 1.0
    return all(times * need <= question.cluster.devices[device].memory_bytes for device, need in needs.items())


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
