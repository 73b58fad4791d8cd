"""The search for a plan: candidates from the active plan to every set of devices, promising ones first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import chain, islice
from math import inf
from typing import Final

from hepti_mqtt.core.errors import ConfigError, PacketLimitError, PlanError
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.cost.moves import bytes_to_load
from hepti_mqtt.lowering.graph import Graph
from hepti_mqtt.models import graph, largest_shape
from hepti_mqtt.planner.candidates import (
    EXACT,
    THOROUGH,
    Candidate,
    Decision,
    EarlierPlan,
    LowerBound,
    as_chain,
    candidate_routes,
    candidate_wires,
    check_question,
    explain_choice,
    in_order,
    interchangeable,
    no_fit,
    subsets,
    wire_error_key,
    with_route,
)
from hepti_mqtt.planner.price import (
    SINGLE,
    Budget,
    Price,
    Question,
    fits_packet_limit,
    memory_needs,
    packet_limit,
    plan_packet,
    price,
    tile_packet,
)
from hepti_mqtt.planner.refine import (
    Draft,
    balance_shares,
    best_route_and_wire,
    divide_embeddings,
    divided,
    dividing,
    fit_memory,
    fitting,
    hill_climb,
    plan_shares,
    price_draft,
    rows_moved,
    settle_layouts,
    step_by_step,
    whole_bytes,
    with_memory,
)
from hepti_mqtt.planner.replicas import replica_plans
from hepti_mqtt.shares import Options
from hepti_mqtt.shares.maps import pixels
from hepti_mqtt.strategies import STRATEGIES, Method
from hepti_mqtt.strategies.plan_programs import programs_digest

REFINED: Final = 3  #: candidates to refine
COMPARED: Final = 6  #: candidates to fit into memory, at least the fastest of each method in an exhaustive search
STEPPED: Final = 2  #: candidates to refine by steps of single shares
FASTER: Final = 1.1  #: least speed of another root device relative to the present one: less may be noise
MIN_SPEEDUP: Final = 1.04  #: least speed-up of several devices: predictions are not more exact
#: Largest ratio of similar throughputs. The end of a short load is uneven, and waiting devices lose more on a busy
#: machine than in the simulator. Of similar plans, the plan with the fewest sent bytes is chosen.
ALIKE: Final = 1.05
_BROKER: Final = "the site's broker"

# (cost or its lower bound, number, plan, whether it fits into memory for certain)
_Step = tuple[tuple[float, float], int, Draft | Candidate, bool]


class Search:
    """One search and its results so far."""

    def __init__(self, question: Question) -> None:
        check_question(question)
        self.question = question
        self.feasible: list[Candidate] = []  #: feasible candidates
        #: Feasible standing plans: the active plan and its variants, plans with loaded weights, one device alone.
        self.standing: list[Candidate] = []
        self.oversized: list[Draft] = []  #: drafts that do not fit into memory
        self.pruned: list[Candidate] = []  #: candidates that are too slow to refine; their prices have no memory needs
        self._number = 0  # of guesses so far
        self._kept_out: list[Plan] = []  # plans with packets beyond a limit
        self._larger: dict[str, list[Draft]] = {}  # by name: drafts that wait for the price of half as many devices
        self._least: dict[tuple[str, int], float] = {}  # the best price by name and number of devices

    def candidates(self) -> Iterator[Candidate]:
        """Yield feasible plans until the budget is spent, the cheapest to price first and the best of them first.

        First the standing plans: the active plan at present prices, the same with moved rows, plans with loaded
        weights, the best device alone. Then all others by price, in the order of their lower bounds. Then refinements
        of the best. The standing plans, and one feasible plan, are yielded even without a budget. Raises as `decide`
        does, except PlanError: if no plan fits, nothing is yielded.
        """
        guesses, without_room = _by_room(self.question, list(_initial_plans(self.question)))
        if not self.question.is_exhaustive:
            guesses, self._larger = _by_size(guesses)
        queue, floor = self._queue(guesses)
        for c in self._stand(queue, floor):
            self.standing.append(c)
            self.feasible.append(c)
            yield c
        for stage in (self._by_bound(queue, floor), self._refined(floor)):
            for c in stage:
                self.feasible.append(c)
                yield c
        self._explain(without_room)

    @property
    def is_over(self) -> bool:
        """Return whether there is a plan and the budget is spent."""
        return bool(self.feasible) and self.question.budget.is_spent

    @property
    def _best_s(self) -> float:
        return min((c.price.expected_s for c in self.feasible), default=inf)

    # -- standing plans -------------------------------------------------------------------------------------------

    def _stand(self, queue: Sequence[_Step], floor: LowerBound) -> Iterator[Candidate]:
        question, active = self.question, self.question.active
        alone = sorted(step for step in queue if isinstance(step[2], Candidate))
        for plan in self.usable_plans():
            for c in self._priced(plan, plan_shares(plan)):
                yield c
                if active is not None and (plan.devices, plan.method) == (active.devices, active.method):
                    yield from rows_moved(question, c)
        fits = (fitting(question, step[2]) for step in alone if isinstance(step[2], Candidate))
        yield from islice(filter(None, fits), 1)
        if active is not None:
            best = self._best_s
            for draft in self._with_other_devices(active):
                able = draft.plan.root != active.root or self._has_weights(draft.plan)  # a new root lacks its weights
                if not self.feasible or (floor.bound_unpriced(draft.plan) < best and able):
                    yield from self._priced(draft.plan, draft.shares)

    def usable_plans(self) -> Iterator[Plan]:
        """Yield the active plan, the loading plan and plans with loaded weights, if the question allows them."""
        question, keys = self.question, set[tuple[object, ...]]()
        for plan in (question.active, question.coming, *question.residents):
            if plan is None or plan.replicas or not set(plan.devices) <= set(question.cluster.devices):
                continue
            pinned = question.devices is None or set(plan.devices) == set(question.devices)
            method = question.strategy is None or (plan.strategy, {**plan.options}) == (
                question.strategy,
                {**(question.options or plan.options)},
            )
            able = plan.wire in candidate_wires(question, plan) and plan.weight_dtype == question.weight_dtype
            if not (pinned and method and able and plan.route in candidate_routes(question, plan.devices)):
                continue
            plan = replace(with_route(question, plan, plan.route), version=question.plan_version)
            key = (
                plan.method,
                plan.devices,
                plan.root,
                str(plan.shares),
                str(plan.ranges),
                str(plan.layouts),
                plan.wire,
                plan.route,
            )
            if key not in keys:
                keys.add(key)
                yield plan

    def _with_other_devices(self, active: Plan) -> Iterator[Draft]:
        """Yield the active plan's method on its devices that are online, or without one of them if all are online."""
        question, profiles = self.question, self.question.cluster.devices
        online = tuple(d for d in active.devices if d in profiles)
        sets = [online] if len(online) < len(active.devices) else [tuple(e for e in online if e != d) for d in online]
        if active.replicas or question.devices is not None or len(online) > THOROUGH:
            return
        for devices in sets:
            if len(devices) > 1 and active.method in _variant_names(active.strategy, len(devices)):
                rows = max(_most_rows(question) // len(devices), 1)
                speeds = tuple(profiles[d].speed(rows) for d in devices)
                root = active.root if active.root in devices else devices[speeds.index(max(speeds))]
                draft = _template(question, active.strategy, active.options, devices, root, speeds)
                if active.route in candidate_routes(question, devices):
                    draft = replace(draft, plan=with_route(question, draft.plan, active.route))
                with dividing(question, active.strategy):
                    yield divided(question, draft)

    def _priced(self, plan: Plan, shares: tuple[float, ...]) -> Iterator[Candidate]:
        """Yield a plan with its price if it still fits and its method can still divide the model."""
        with dividing(self.question, plan.strategy):
            if (candidate := fitting(self.question, price_draft(self.question, Draft(plan, shares)))) is not None:
                yield candidate

    def _has_weights(self, plan: Plan) -> bool:
        """Return whether the devices of a plan have all of its weights."""
        spec, stand = self.question.spec, (self.question.active, *self.question.residents)
        held = [other for other in stand if other is not None]
        return not any(bytes_to_load(spec, plan, device, held) for device in plan.devices)

    # -- by lower bound -------------------------------------------------------------------------------------------

    def _queue(self, guesses: Sequence[Draft]) -> tuple[list[_Step], LowerBound]:
        """Return a heap of guesses by lower bound, and the bounds, which follow from the prices of single devices."""
        question = self.question
        later = chain.from_iterable(self._larger.values())
        names = list(dict.fromkeys(d for g in (*guesses, *later) for d in g.plan.devices))
        queue: list[_Step] = []
        alone: dict[str, float] = {}
        if question.objective == "latency":
            for n, guess in enumerate(guesses):
                if len(guess.plan.devices) == 1:
                    with dividing(question, guess.plan.strategy):
                        c = price_draft(question, guess)
                        queue.append((c.price.cost, n, c, False))
                        alone[c.plan.root] = c.price.seconds
        self._number = len(guesses)
        priced = {number for _, number, _, _ in queue}
        like = interchangeable(question, list(dict.fromkeys((*alone, *names))))
        floor = LowerBound(question, {device: alone[kind] for device, kind in like.items() if kind in alone})
        first = set() if question.is_exhaustive else _smallest(guesses)
        for n, guess in enumerate(guesses):
            if n not in priced:
                least = -1.0 if n in first else floor.bound_unpriced(guess.plan)
                queue.append(((least, least), n, guess, False))
        heapify(queue)
        return queue, floor

    def _by_bound(self, queue: list[_Step], floor: LowerBound) -> Iterator[Candidate]:
        """Yield the fastest candidates that fit, the fastest first; note oversized and pruned ones.

        In an exhaustive search every strategy and variant has a place among them, so the comparison is fair. Each step
        is taken only when the candidate is first in the queue: lower bound, then price, then memory needs.
        """
        question, taken = self.question, list[Candidate]()
        while queue:
            if self.is_over:
                yield from self._best_priced(queue)
                return
            cost, n, c, fits = heappop(queue)
            # A pruned candidate takes a place too, unless memory is short: then it might not fit.
            places = [*taken, *([] if self.oversized else self.pruned)]
            if len(places) >= COMPARED and c.name in {other.name for other in places}:
                continue
            if isinstance(c, Candidate) and fits:
                taken.append(c)
                yield c
                continue
            if self._is_behind(c, floor):
                self._grow(queue, c, floor)
                continue
            least = floor.bound_unpriced(c.plan) if isinstance(c, Draft) and not question.is_exhaustive else 0.0
            if least > cost[0] >= 0:  # the bound has risen since the push
                heappush(queue, ((least, least), n, c, False))
                continue
            with dividing(question, c.plan.strategy):
                if isinstance(c, Draft):
                    c = price_draft(question, c)
                    floor.observe(c)
                    heappush(queue, (c.price.cost, n, c, False))
                    self._grow(queue, c, floor)
                elif (fitted := self._fitted(c)) is not None:
                    heappush(queue, (fitted.price.cost, n, fitted, True))

    def _best_priced(self, queue: Sequence[_Step]) -> Iterator[Candidate]:
        """Yield the best priced plan in the queue that is better than all feasible candidates."""
        best_s = min(c.price.cost for c in self.feasible)
        for cost, _, c, fits in sorted(step for step in queue if isinstance(step[2], Candidate)):
            if cost >= best_s or not isinstance(c, Candidate):
                return
            with dividing(self.question, c.plan.strategy):
                if (fitted := c if fits else self._fitted(c)) is not None:
                    yield fitted
                    return

    def _grow(self, queue: list[_Step], c: Draft | Candidate, floor: LowerBound) -> None:
        """Add a method's next larger sets of devices to the queue, unless the present set is slower than a smaller one.

        The overhead of each device grows with their number, so larger sets would be slower still.
        """
        waiting, devices = self._larger.get(c.name, []), len(c.plan.devices)
        ready = bool(waiting) and devices >= min(THOROUGH, len(waiting[0].plan.devices) // 2)
        if isinstance(c, Draft) and ready and min(floor.bound_unpriced(w.plan) for w in waiting) < self._best_s:
            c = price_draft(self.question, c)  # much cheaper to price than a larger set, and a good bound for it
            floor.observe(c)
        if isinstance(c, Candidate):
            least = self._least.get((c.name, devices), inf)
            self._least[c.name, devices] = min(least, c.price.seconds)
            fewer = min((s for (name, n), s in self._least.items() if name == c.name and n < devices), default=inf)
            if c.price.seconds > fewer:
                return
        if not ready:
            return
        size = len(waiting[0].plan.devices)
        while waiting and len(waiting[0].plan.devices) == size:
            guess = waiting.pop(0)
            bound = floor.bound_unpriced(guess.plan)
            self._number += 1
            heappush(queue, ((bound, bound), self._number, guess, False))

    def _is_behind(self, c: Draft | Candidate, floor: LowerBound) -> bool:
        """Return whether a plan cannot be expected to beat the best one; note it as pruned if it has a price."""
        if self.question.is_exhaustive or c.name == SINGLE or not self.feasible:
            return False
        best = min(self.feasible, key=lambda other: other.price.expected_s)
        if isinstance(c, Draft) and c.name == best.name and len(c.plan.devices) > THOROUGH:
            return False  # few sizes of many devices are tried, and balanced shares may change their order
        priced_s = c.price.seconds if isinstance(c, Candidate) else None
        if not floor.is_pruned(c.plan, priced_s, best.price.expected_s):
            return False
        if isinstance(c, Candidate):
            self.pruned.append(c)
        return True

    def _fitted(self, c: Candidate) -> Candidate | None:
        """Return a candidate with shares that fit into memory; None if there are none, with a note of the reason."""
        question = self.question
        draft = fit_memory(question, with_memory(question, c))
        if draft.missing:
            self.oversized.append(draft)
            return None
        if not fits_packet_limit(question, draft.plan):
            self._kept_out.append(draft.plan)
            return None
        assert draft.memory is not None
        if draft.plan == c.plan:
            return replace(c, price=replace(c.price, needs=draft.memory.needs, missing={}))
        return price_draft(question, draft)

    # -- refinement -----------------------------------------------------------------------------------------------

    def _refined(self, floor: LowerBound) -> Iterator[Candidate]:
        """Yield refinements of the best candidates: route and wire, balanced shares, single units."""
        question, done = self.question, list[Candidate]()
        for c in self._best(None if question.is_exhaustive else REFINED):
            best_s = min((d.price.expected_s for d in done), default=inf)
            if self.is_over or (not question.is_exhaustive and floor.bound_refined(c.plan, c.price.seconds) >= best_s):
                continue
            with dividing(question, c.plan.strategy):
                done.append(balance_shares(question, best_route_and_wire(question, c)))
                if done[-1] is not c:
                    yield done[-1]
        for most, refine in (
            (1, self._with_other_head),
            (STEPPED, step_by_step),
            (1, hill_climb),
            (1, divide_embeddings),
        ):
            done.sort(key=_order)
            for n, c in enumerate(done[:most]):
                done[n] = c if self.is_over else refine(question, c)
                if done[n] is not c:
                    yield done[n]

    def _best(self, most: int | None) -> list[Candidate]:
        """Return the candidates to refine, the best first: the best of each method and set of devices."""
        best: dict[tuple[str, frozenset[str]], Candidate] = {}
        for c in sorted(self.feasible, key=_order):
            best.setdefault((c.name, frozenset(c.plan.devices)), c)
        return list(best.values())[:most]

    @staticmethod
    def _with_other_head(question: Question, c: Candidate) -> Candidate:
        """Return a plan on the active plan's devices with the fastest device as root, if that is cheaper."""
        if question.active is None or set(question.active.devices) != set(c.plan.devices) or c.plan.replicas:
            return c
        rows = max(_most_rows(question) // len(c.plan.devices), 1)
        speeds = {d: question.cluster.devices[d].speed(rows) for d in c.plan.devices}
        fastest = max(speeds, key=speeds.__getitem__)
        if speeds[fastest] < FASTER * speeds[c.plan.root]:
            return c
        other = fitting(question, price_draft(question, Draft(replace(c.plan, root=fastest), c.shares)))
        return other if other is not None and other.price.cost < c.price.cost else c

    # -- result ---------------------------------------------------------------------------------------------------

    def _explain(self, without_room: Mapping[str, Draft]) -> None:
        """Note the methods without a fitting plan; raise PacketLimitError if only packet limits exclude all plans."""
        if not self.feasible and self._kept_out and not self.oversized:
            raise _packet_error(self.question, self._kept_out)
        explained = {c.name for c in self.feasible} | {draft.name for draft in self.oversized}
        for name, guess in without_room.items():
            if name not in explained:
                with dividing(self.question, guess.plan.strategy):
                    self.oversized.append(with_memory(self.question, divided(self.question, guess)))
        listed = {c.name for c in self.feasible} | {draft.name for draft in self.oversized}
        first = {c.name: c for c in reversed(self.pruned) if c.name not in listed}
        self.pruned = list(first.values())

    def decision(self, *, chosen_only: bool = False) -> Decision:
        """Return the best plan, simulated in full; raises PlanError if there is none.

        chosen_only: settle the layouts of the chosen plan alone; the others' memory needs are then a lower bound.
        """
        question, best = self.question, dict[object, Candidate]()
        standing = {id(c) for c in self.standing}
        for c in sorted(self.feasible, key=_order):
            # Plans of one method differ in their loads too: standing plans are kept next to the best plan.
            best.setdefault((c.name, str(c.plan)) if id(c) in standing and c.name in best else c.name, c)
        for draft in sorted(self.oversized, key=lambda d: d.missing_bytes):
            best.setdefault(draft.name, price_draft(question, draft))
        top = _prefer_single(question, _simulate_in_full(question, list(best.values())))
        if not top or not top[0].price.feasible:
            raise no_fit(question, top)
        settled = 1 if chosen_only else len(top)
        top = [settle_layouts(question, c) if place < settled else c for place, c in enumerate(top)]
        return _decision(question, top, self.pruned)


def decide(question: Question, *, chosen_only: bool = False) -> Decision:
    """Return the best feasible plan; chosen_only: as in `Search.decision`.

    Raises ConfigError for an unknown strategy or device, PlanError with the missing memory of each device if no plan
    is feasible, PacketLimitError if every plan, or the weights, need packets beyond the broker's limit.
    """
    search = Search(question)
    for _ in search.candidates():
        pass
    return search.decision(chosen_only=chosen_only)


def decide_hurried(question: Question) -> Decision:
    """Return the best standing plan, or else the first feasible plan, for requests that wait without a plan.

    The active plan may have lost devices. A finite budget of the question is used. Errors of narrow wires are not
    measured.
    """
    budget = question.budget if question.budget.seconds < inf else Budget(0.0)
    return decide(replace(question, accuracy=None, budget=budget))


def decide_recalled(question: Question, recalled: EarlierPlan) -> Decision:
    """Return a plan from an earlier start of the planner at its former price, without a simulation.

    Raises PlanError if the question does not allow it, and any exception if it is malformed or of another model.
    """
    former = replace(recalled.plan, reason="it has served before")
    plan = next(Search(replace(question, active=None, residents=(former,))).usable_plans(), None)
    measured = (
        question.accuracy is None or former.wire == EXACT or wire_error_key(former, former.wire) in question.errors
    )
    parts = (*former.shares.values(), *former.ranges.values())
    if plan is None or not measured or any(len(part) != len(plan.devices) for part in parts):
        raise PlanError(f"the plan that served before, {former.method}, is not allowed any more")
    room = {device: question.cluster.devices[device].memory_bytes for device in plan.devices}
    price = Price(
        plan.predicted_s, plan.predicted_bytes, recalled.needs, {}, {}, memory_bytes=room, objective=question.objective
    )
    chosen = Candidate(plan, price, plan_shares(plan))
    return Decision(chosen, (chosen,), plan.reason, question.cluster, programs_digest(question.spec, plan))


def simulate_plan(question: Question, plan: Plan) -> Candidate:
    """Return a given plan with its price, all layers simulated."""
    return _simulate_draft(question, Draft(plan, plan_shares(plan)))


def price_plans(question: Question, plans: Sequence[Plan]) -> Decision:
    """Return the decision between given plans, priced under the question's plan version.

    Raises PlanError if none is feasible.
    """
    priced = (simulate_plan(question, replace(plan, version=question.plan_version)) for plan in plans)
    ranking = sorted(priced, key=_order)
    if not ranking[0].price.feasible:
        raise no_fit(question, ranking)
    return _decision(question, ranking)


def _decision(question: Question, top: Sequence[Candidate], pruned: Sequence[Candidate] = ()) -> Decision:
    chosen, pruned = top[0], sorted(pruned, key=_order)
    reason = explain_choice(sorted(top, key=_order), chosen, pruned)
    plan = replace(chosen.plan, reason=reason)
    return Decision(
        replace(chosen, plan=plan),
        tuple(top),
        reason,
        question.cluster,
        programs_digest(question.spec, plan),
        tuple(pruned),
    )


def _order(c: Candidate) -> tuple[bool, float, tuple[float, float]]:
    # Infeasible candidates last, with the fewest missing bytes first.
    missing = float(sum(c.price.missing.values()))
    return (missing > 0, missing, c.price.cost)


# ----------------------------------------------------------------------------------------------------------------------
# Guesses: every strategy and variant on sets of devices, with shares by speed.


def _by_room(question: Question, guesses: Sequence[Draft]) -> tuple[list[Draft], dict[str, Draft]]:
    """Return the guesses with memory for all weights, and by name the largest guess of the others."""
    whole = whole_bytes(question.spec, question.weight_dtype)
    room = {name: profile.memory_bytes for name, profile in question.cluster.devices.items()}
    able: list[Draft] = []
    without_room: dict[str, tuple[float, Draft]] = {}
    for guess in guesses:
        nbytes = sum(room[d] for d in guess.plan.devices)
        if guess.plan.replicas or nbytes >= whole:
            able.append(guess)
        elif guess.name not in without_room or nbytes > without_room[guess.name][0]:
            without_room[guess.name] = (nbytes, guess)
    return able, {name: guess for name, (_, guess) in without_room.items()}


def _by_size(guesses: Sequence[Draft]) -> tuple[list[Draft], dict[str, list[Draft]]]:
    """Return the guesses on few devices, and by name the guesses on more devices, the fewest devices first."""
    few, more = list[Draft](), dict[str, list[Draft]]()
    for guess in guesses:
        if len(guess.plan.devices) <= THOROUGH or guess.plan.replicas:
            few.append(guess)
        else:
            more.setdefault(guess.name, []).append(guess)
    names = {guess.name for guess in few}
    for name in more.keys() - names:  # no smaller set gives a bound
        few += more.pop(name)
    return few, {name: sorted(larger, key=lambda g: len(g.plan.devices)) for name, larger in more.items()}


def _smallest(guesses: Sequence[Draft]) -> set[int]:
    """Return the index of each method's first guess on the fewest devices: its price bounds the others."""
    best: dict[str, int] = {}
    for n, guess in enumerate(guesses):
        devices = len(guess.plan.devices)
        if devices > 1 and (guess.name not in best or devices < len(guesses[best[guess.name]].plan.devices)):
            best[guess.name] = n
    return set(best.values())


def _most_rows(question: Question) -> int:
    return max(question.shape.size, pixels(_graph(question)))


def _initial_plans(question: Question) -> Iterator[Draft]:
    """Yield every candidate with shares proportional to measured speed, not divided yet."""
    names, profiles = question.devices or tuple(question.cluster.devices), question.cluster.devices
    most = _most_rows(question)
    rows = max(most // max(len(names), 1), 1)
    by_speed = sorted(names, key=lambda n: (-profiles[n].speed(rows), n))
    sets = {p: tuple(subsets(question, by_speed, pinned=p)) for p in {False, question.devices is not None}}
    ordered = {s: in_order(question, s, by_speed) for some in sets.values() for s in some}
    for method in _methods(question):
        if method.groups is not None:
            for plan in replica_plans(question, method, by_speed, decide):
                yield Draft(plan, ())
            continue
        for subset in sets[question.devices is not None and method.max_devices is None]:
            if method.max_devices is not None and len(subset) > method.max_devices:
                continue
            alone = len(subset) == 1 and method.max_devices is None
            if alone and (len(names) > 1 or question.strategy is None):
                continue  # `single` is the method for one device
            share_rows = max(most // len(subset), 1)
            speeds = {d: profiles[d].speed(share_rows) for d in ordered[subset]}
            for options in _variants(question, method, len(subset)):
                if method.chooses_devices(options) and len(subset) < len(names):
                    continue  # the method itself leaves out devices
                yield _guess(question, method, options, speeds)


def _variants(question: Question, method: Method, devices: int) -> list[Options]:
    """Return the variants of a method to try on a number of devices."""
    if question.options:
        return [o for o in method.variants_for(devices) if dict(question.options) == dict(o)]
    return list(method.variants_for(devices, _graph(question)))


def _variant_names(strategy: str, devices: int) -> set[str]:
    """Return the names of all variants of a method on a number of devices."""
    return {"/".join([strategy, *o.values()]) for o in STRATEGIES[strategy].variants_for(devices)}


def _graph(question: Question) -> Graph:
    return graph(question.spec, largest_shape(question.spec))


def _methods(question: Question) -> Iterator[Method]:
    """Yield the methods to try; raises ConfigError if the pinned method cannot divide this model."""
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
    """Return a draft with the first, fastest device as root, or the active plan's root on the same devices."""
    active, names = question.active, tuple(speeds)
    stays = active is not None and set(active.devices) == set(names)
    devices = as_chain(names) if method.order_matters and not stays else names
    root = active.root if active is not None and stays else names[0]
    return _template(question, method.name, options, devices, root, tuple(speeds[d] for d in devices))


def _template(
    question: Question, strategy: str, options: Options, devices: tuple[str, ...], root: str, weights: tuple[float, ...]
) -> Draft:
    """Return an undivided draft, with the route and the wire that are nearly always the fastest."""
    model, version, dtype = question.naming.model, question.plan_version, question.weight_dtype
    plan = Plan(model, version, strategy, devices, root, options, wire=question.wire, weight_dtype=dtype)
    plan = replace(plan, wire=candidate_wires(question, plan)[0])
    return Draft(with_route(question, plan, candidate_routes(question, devices)[0]), weights, is_divided=False)


def _packet_error(question: Question, plans: Sequence[Plan]) -> PacketLimitError:
    """Return the error with the smallest packet, of weights or plans, that is beyond the limit."""
    limit = max(packet_limit(question, plan) or 0 for plan in plans)
    if (tiles := tile_packet(question)) > limit:
        what = f"bringing the weights of {question.naming.model}"
        return PacketLimitError.of(what, tiles, _BROKER, limit, narrows=False)
    smallest = min(plan_packet(question, plan) for plan in plans)
    return PacketLimitError.of(f"every plan of {question.naming.model}", smallest, _BROKER, limit)


# ----------------------------------------------------------------------------------------------------------------------
# The choice among the candidates.


def _simulate_in_full(question: Question, priced: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates, the best first, with full simulations of all of them or of the best.

    For throughput several requests are simulated. That takes long, so candidates that cannot be the best are left out.
    """
    if not question.is_exhaustive and question.objective != "throughput":
        return _simulate_best(question, sorted(priced, key=_order))
    out: list[Candidate] = []
    for c in sorted(priced, key=_order):
        most = question.objective == "throughput" and not question.requests
        best = min((done.price.cost for done in out if done.price.feasible), default=None)
        hopeless = most and best is not None and c.price.cost[0] >= ALIKE * best[0]
        out.append(_final(replace(question, objective="latency") if hopeless else question, c))
    out = [replace(c, price=replace(c.price, objective=question.objective)) for c in out]
    return _least_sent(question, sorted(out, key=_order))


def _simulate_best(question: Question, ranking: list[Candidate]) -> list[Candidate]:
    """Return a ranking with a full simulation of the chosen plan, unless that takes too long."""
    top = _prefer_single(question, ranking)
    if top and len(top[0].plan.devices) <= THOROUGH:
        top[0] = _final(question, top[0])
    elif top and top[0].price.feasible:
        needs, missing = memory_needs(question, top[0].plan, exactly=True)
        top[0] = replace(top[0], price=replace(top[0].price, needs=needs, missing=missing))
        if missing and len(top) > 1:
            return _simulate_best(question, top[1:])
    return [replace(c, plan=_predicted(question, c)) for c in top]


def _least_sent(question: Question, ranking: list[Candidate]) -> list[Candidate]:
    """Return the ranking; for throughput, the first plan is the similar one with the fewest sent bytes."""
    if question.objective != "throughput" or not ranking or not ranking[0].price.feasible:
        return ranking
    enough = ALIKE * ranking[0].price.cost[0]
    alike = [c for c in ranking if c.price.feasible and c.price.load is not None and c.price.cost[0] <= enough]
    first = min(alike, key=lambda c: sum(use.sent_bytes for use in c.price.use.values()), default=ranking[0])
    return [first, *(c for c in ranking if c is not first)]


def _prefer_single(question: Question, ranking: list[Candidate]) -> list[Candidate]:
    """Move one device alone to the front if more devices gain next to nothing: each exchange is a risk."""
    alone = next((c for c in ranking if c.name == SINGLE and c.price.feasible), None)
    if question.objective != "latency" or alone is None:
        return ranking
    is_worth_it = alone.price.cost[0] > MIN_SPEEDUP * ranking[0].price.cost[0]
    return ranking if is_worth_it else [alone, *(c for c in ranking if c is not alone)]


def _final(question: Question, c: Candidate) -> Candidate:
    return _simulate_draft(question, Draft(c.plan, c.shares, c.price.memory))


def _simulate_draft(question: Question, draft: Draft) -> Candidate:
    full = price(question, draft.plan, full=True, memory=draft.memory)
    candidate = Candidate(draft.plan, full, draft.shares)
    return replace(candidate, plan=_predicted(question, candidate))


def _predicted(question: Question, c: Candidate) -> Plan:
    """Return a candidate's plan with its predictions."""
    keys = [wire_error_key(run) for run in c.plan.executables]
    return replace(
        c.plan,
        predicted_s=c.price.seconds,
        predicted_bytes=c.price.nbytes,
        predicted_tokens=question.shape.size,
        wire_error=max((question.errors[key] for key in keys if key in question.errors), default=None),
        weight_error=question.weight_error,
    )
