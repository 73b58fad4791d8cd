"""The search: every strategy and variant, over subsets of devices, with shares balanced on the simulator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from hepti_mqtt.errors import ConfigError, PlanError
from hepti_mqtt.lowering import Graph
from hepti_mqtt.models import graph, largest_shape
from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import make_plan, programs_digest, resident_weights
from hepti_mqtt.planner.asked import check_pins
from hepti_mqtt.planner.deadline import in_time
from hepti_mqtt.planner.decision import Candidate, Decision
from hepti_mqtt.planner.fitting import ALONE, REFINED, Draft, Guess, dividing, fitting, improved, priced, reweighted
from hepti_mqtt.planner.lanes import lanes_of
from hepti_mqtt.planner.price import Question, gets_through, memory, plan_packet, price, tile_packet
from hepti_mqtt.planner.routes import on_route, routes
from hepti_mqtt.planner.side_by_side import side_by_side
from hepti_mqtt.planner.subsets import in_line, subsets
from hepti_mqtt.planner.unit_by_unit import unit_by_unit
from hepti_mqtt.planner.wires import EXACT, narrowed, wires
from hepti_mqtt.planner.words import nothing_fits, reason_of
from hepti_mqtt.shares import Options
from hepti_mqtt.shares.units import pixels
from hepti_mqtt.strategies import STRATEGIES, Method
from hepti_mqtt.wire.limits import packet_limit_error

ROUNDS: Final = 4  # steps of balancing
STEPPED: Final = 2  # candidates whose shares are tried step by step
STEPS: Final = (1.3, 1.15, 1.07)  # of one device's share, where a map has few rows to share out
# One device is taken if the fastest plan of several is not so many times as fast: less than predictions are off by.
WORTH: Final = 1.04
# Throughputs that differ by less are alike: a short load ends where it ends, and devices that wait for each other lose
# more on a busy machine than the simulator says. Of such plans the one that sends least is taken.
ALIKE: Final = 1.05
_BROKER: Final = "the site's broker"


def decide(question: Question) -> Decision:
    """Return the best feasible plan.

    Raises ConfigError for an unknown strategy or device, PlanError if nothing is feasible: the text says how much
    memory is missing where; PacketLimitError if the broker takes no packet that any plan, or the weights, need.
    """
    check_pins(question)
    able, short, behind = fitting(question, _through_the_broker(question, list(_initial(question))))
    best: dict[str, Candidate] = {}
    able[:REFINED] = (_by_the_better_way(question, c) for c in able[:REFINED])
    refined = sorted((balanced(question, c) for c in able), key=_order)
    refined[:STEPPED] = sorted((_step_by_step(question, c) for c in refined[:STEPPED]), key=_order)
    refined[:1] = (unit_by_unit(question, c) for c in refined[:1])
    for c in sorted(refined, key=_order):
        best.setdefault(c.name, c)
    for draft in sorted(short, key=lambda d: d.lacks):
        best.setdefault(draft.name, priced(question, draft))
    top = _worth_dividing(question, _finals(question, best.values()))
    if not top or not top[0].price.feasible:
        raise PlanError(nothing_fits(question, top))
    return _decision(question, top, behind)


def _decision(question: Question, top: Sequence[Candidate], behind: Sequence[Candidate] = ()) -> Decision:
    chosen = top[0]
    reason = reason_of(top, chosen, behind)
    plan = replace(chosen.plan, reason=reason)
    return Decision(
        replace(chosen, plan=plan),
        tuple(top),
        reason,
        question.cluster,
        programs_digest(question.spec, plan),
        tuple(sorted(behind, key=_order)),
    )


def decide_soon(question: Question, last: Plan | None = None) -> Decision:
    """Return a plan in a fraction of the time of `decide`: for requests that wait and have none.

    The best device alone, or the last plan's method on those of its devices that are left: if that is faster and they
    have all the weights already, or if none can do it alone. Raises as `decide` does, if neither can be.
    """
    try:
        alone = decide(replace(question, strategy=ALONE, options={}))
    except PlanError:
        left = None if last is None else _on_those_left(question, last, may_load=True)
        if left is None:
            raise
        return _decision(question, [left])
    left = None if last is None else _on_those_left(question, last, may_load=False)
    if left is None:
        return alone
    return _decision(question, _worth_dividing(question, sorted((left, alone.chosen), key=_order)))


def _on_those_left(question: Question, last: Plan, *, may_load: bool) -> Candidate | None:
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
        if last.route in routes(question, plan.devices):
            plan = on_route(question, plan, last.route)
        if may_load or _has_weights(question, last, plan):
            needs, missing = memory(question, plan)
            if not missing and gets_through(question, plan):
                return _in_full(question, Draft(plan, guess.weights, needs, missing))
    return None


def _has_weights(question: Question, last: Plan, plan: Plan) -> bool:
    """Return whether the devices of a plan have loaded all of its weights for the last one."""
    spec = question.spec
    return all({*resident_weights(spec, last, d)} >= {*resident_weights(spec, plan, d)} for d in plan.devices)


def _through_the_broker(question: Question, guesses: Sequence[Guess]) -> Sequence[Guess]:
    """Return the guesses whose largest packets get through; raises PacketLimitError if not even one does."""
    limit = question.packet_bytes
    if limit is None or not guesses:
        return guesses
    tiles = tile_packet(question)
    if tiles > limit:
        what = f"bringing the weights of {question.naming.model}"
        raise packet_limit_error(limit, tiles, what, _BROKER, narrows=False)
    sizes = [plan_packet(question, g.plan) for g in guesses]
    if min(sizes) > limit:
        raise packet_limit_error(limit, min(sizes), f"every plan of {question.naming.model}", _BROKER)
    return [g for g, size in zip(guesses, sizes, strict=True) if size <= limit]


def _order(c: Candidate) -> tuple[bool, float, tuple[float, float]]:
    # Infeasible ones last, the least missing first.
    missing = float(sum(c.price.missing.values()))
    return (missing > 0, missing, c.price.cost)


def _initial(question: Question) -> Iterator[Guess]:
    """Yield every candidate with shares proportional to measured speed."""
    names = question.devices or tuple(question.cluster.devices)
    most = max(question.shape.size, pixels(_graph(question)))
    rows = max(most // max(len(names), 1), 1)
    profiles = question.cluster.devices
    by_speed = sorted(names, key=lambda n: (-profiles[n].speed(rows), n))
    for method in _methods(question):
        if method.groups is not None:
            for plan in side_by_side(question, method, by_speed, decide):
                yield Guess(plan, ())
            continue
        for subset in subsets(question, by_speed, pinned=question.devices is not None and method.most_devices is None):
            if method.most_devices is not None and len(subset) > method.most_devices:
                continue
            alone = len(subset) == 1 and method.most_devices is None
            if alone and (len(names) > 1 or question.strategy is None):
                continue  # one device is what `single` is for
            share_rows = max(most // len(subset), 1)
            weights = tuple(profiles[d].speed(share_rows) for d in subset)
            for options in method.choices(len(subset), None if question.options else _graph(question)):
                if question.options and dict(question.options) != dict(options):
                    continue
                if method.settles(options) and len(subset) < len(names):
                    continue  # it leaves out devices by itself
                with dividing(question, method.name):
                    yield _guess(question, method, options, dict(zip(subset, weights, strict=True)))


def _graph(question: Question) -> Graph:
    return graph(question.spec, largest_shape(question.spec))


def _methods(question: Question) -> Iterator[Method]:
    """Yield the methods to try; raises ConfigError if the one that is pinned cannot divide this model."""
    most = question.objective == "throughput"
    for name, method in STRATEGIES.items():
        if question.strategy is None and not (method.offered or (method.throughput and most)):
            continue
        if question.strategy not in {None, name}:
            continue
        reason = method.unsupported(_graph(question))
        if reason is None:
            yield method
        elif question.strategy == name:
            able = [m.name for m in STRATEGIES.values() if m.unsupported(_graph(question)) is None]
            raise ConfigError(f"{reason}; {question.naming.model} can be divided by: {', '.join(able)}")


def _guess(question: Question, method: Method, options: Options, speeds: Mapping[str, float]) -> Guess:
    """Return a plan whose head is the first device, the fastest; raises ValueError if the model cannot be divided."""
    head, *_ = names = tuple(speeds)
    devices = in_line(names) if method.in_line else names
    weights = tuple(speeds[device] for device in devices)
    template = Plan(
        question.naming.model, question.epoch, method.name, devices, head, wire=question.wire, storage=question.storage
    )
    plan = make_plan(question.spec, template, method.name, options, weights, lanes_of(question, devices))
    plan = replace(plan, wire=wires(question, plan)[0])
    return Guess(on_route(question, plan, routes(question, devices)[0]), weights)


def _by_the_better_way(question: Question, c: Candidate) -> Candidate:
    """Return a candidate by the best route and wire; for all of them the search would take several times as long."""
    if c.plan.replicas:
        return c  # each has its own
    ways = [
        replace(on_route(question, c.plan, r), wire=w)
        for r in routes(question, c.plan.devices)
        for w in wires(question, c.plan)
    ]
    others = [plan for plan in ways if (plan.route, plan.wire) != (c.plan.route, c.plan.wire)]
    through = (p for p in others if gets_through(question, p))
    priced = (replace(c, plan=p, price=price(question, p, known=_memory_as(question, c, p))) for p in through)
    return min((c, *(p for p in priced if p.price.feasible)), key=lambda found: found.price.cost)


def _memory_as(question: Question, c: Candidate, plan: Plan) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Return the memory of a candidate's plan in another way: the route changes nothing of it, the wire may."""
    return (c.price.needs, c.price.missing) if plan.wire == c.plan.wire else memory(question, plan)


def balanced(question: Question, c: Candidate) -> Candidate:
    """Return a plan with shares shifted from devices that compute long to those that wait, as long as that helps."""
    best, weights = c, c.weights
    method = STRATEGIES[c.plan.strategy]
    if method.settles(c.plan.options):
        return in_time(question, c)
    if len(c.plan.devices) == 1 or c.plan.replicas or method.settled:
        return c
    for _ in range(ROUNDS):
        price_now = best.price
        of_memory = question.objective == "memory"
        busy = [
            price_now.needs[d] / max(price_now.room[d], 1) if of_memory else price_now.use[d].compute_s
            for d in c.plan.devices
        ]
        mean = sum(busy) / len(busy)
        weights = tuple(
            w * min(max((mean / t) ** 0.7 if t > 0 else 1.5, 0.5), 2.0) for w, t in zip(best.weights, busy, strict=True)
        )
        moved = improved(question, best, reweighted(question, best.plan, weights), weights)
        if moved is None:
            break
        best = moved
    return best


def _step_by_step(question: Question, c: Candidate) -> Candidate:
    """Give one device after the other more or less, by smaller and smaller steps, as long as that helps."""
    best = c
    for step in STEPS if STRATEGIES[c.plan.strategy].few else ():
        for i in range(len(c.plan.devices)):
            for factor in (step, 1 / step):
                weights = tuple(w * factor if j == i else w for j, w in enumerate(best.weights))
                moved = improved(question, best, reweighted(question, best.plan, weights), weights)
                if moved is not None:
                    best = moved
                    break
    return best


def _finals(question: Question, found: Iterable[Candidate]) -> list[Candidate]:
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


def _worth_dividing(question: Question, found: list[Candidate]) -> list[Candidate]:
    """Put one device first where others beside it are predicted to gain next to nothing: each exchange is a risk."""
    alone = next((c for c in found if c.name == ALONE and c.price.feasible), None)
    if question.objective != "latency" or alone is None:
        return found
    is_worth_it = alone.price.cost[0] > WORTH * found[0].price.cost[0]
    return found if is_worth_it else [alone, *(c for c in found if c is not alone)]


def _final(question: Question, c: Candidate) -> Candidate:
    return _in_full(question, Draft(c.plan, c.weights, c.price.needs, c.price.missing))


def _in_full(question: Question, draft: Draft) -> Candidate:
    full = price(question, draft.plan, full=True, known=(draft.needs, draft.missing))
    errors = [question.errors[key] for run in draft.plan.runs if (key := narrowed(run)) in question.errors]
    plan = replace(
        draft.plan,
        predicted_s=full.seconds,
        predicted_bytes=full.nbytes,
        predicted_tokens=question.shape.size,
        wire_error=max(errors, default=None),
    )
    return Candidate(plan, full, draft.weights)
