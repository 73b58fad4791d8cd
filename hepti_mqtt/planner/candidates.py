"""Candidates and decisions; which routes, wires and sets of devices to try; checks, explanations and lower bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, permutations
from math import inf, log2
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from hepti_mqtt.core.errors import ConfigError, PlanError, UnsupportedModelError
from hepti_mqtt.core.plan import NARROW_WIRE_DTYPES, DevicePair, Plan, Route, WireDtype
from hepti_mqtt.core.profiles import LOCAL_BYTES_PER_S, Cluster, Paths, PeerLink
from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.core.storage import QUANTISED, STORAGES
from hepti_mqtt.cost.memory import ROWS_IN_FLIGHT, resident_bytes, weights_bytes
from hepti_mqtt.lowering.passes import narrow_weight
from hepti_mqtt.models import largest_shape, quantised, weight_dtypes
from hepti_mqtt.models.transformer import ModelSpec
from hepti_mqtt.shares import DeviceResources, Options
from hepti_mqtt.strategies import STRATEGIES, Method
from hepti_mqtt.strategies.plan_programs import resident_weights

if TYPE_CHECKING:
    from hepti_mqtt.planner.price import Price, Question, RequestSimulation


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan with its price."""

    plan: Plan
    price: Price
    shares: tuple[float, ...]  #: share weights: a relative number per device, from which `make_shares` derives shares
    #: Bytes of weights that each device would load; empty until `with_loads` has computed them.
    load_bytes: Mapping[str, int] = field(default_factory=dict)
    cached_bytes: Mapping[str, int] = field(default_factory=dict)  #: part of load_bytes from the device's own cache
    hub_bytes: int = 0  #: bytes that no device of the plan has: the planner's machine sends them once
    fits_next_to_others: bool = True  #: every device has room for the plan next to the active plan

    @property
    def name(self) -> str:
        """Return strategy and variant, e.g. voltage/uneven."""
        return self.plan.method


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen plan and its alternatives."""

    chosen: Candidate
    ranking: tuple[Candidate, ...]  #: the best candidate of every strategy and variant, the best first
    reason: str  #: one sentence on the choice
    cluster: Cluster  #: devices and links at the time of the choice
    digest: bytes  #: `plan_programs.programs_digest` of the plan
    #: The first candidate of each strategy and variant that is too slow; their prices have no memory needs.
    pruned: tuple[Candidate, ...] = ()

    def simulation_of(self, run: Plan) -> RequestSimulation | None:
        """Return the simulation of the chosen plan, or of one of its replicas; None without a full simulation."""
        devices = set(run.devices)
        return next((p for p in self.chosen.price.simulated if p.simulation.devices.keys() == devices), None)


class EarlierPlan(NamedTuple):
    """A plan from an earlier start of the planner."""

    plan: Plan
    needs: Mapping[str, int]  #: bytes that the plan needs by device
    #: Boot number by device with the plan's weights; unknown devices are missing.
    boots: Mapping[str, int] = MappingProxyType({})


# ----------------------------------------------------------------------------------------------------------------------
# Resources of devices besides speed, for methods that solve for shares.


def device_costs(question: Question, devices: Sequence[str]) -> list[DeviceResources]:
    """Return the resources of devices, in their order."""
    resources = []
    for device in devices:
        link, profile = question.cluster.links[device], question.cluster.devices[device]
        rate = min(link.up_bytes_per_s, link.down_bytes_per_s)
        resource = DeviceResources(
            rate, link.latency_s, profile.memory_bytes, profile.speed(1), profile.power, question.cluster.deadline_s
        )
        resources.append(resource)
    return resources


# ----------------------------------------------------------------------------------------------------------------------
# The route of a plan's exchanges: over the broker or over mesh.


def relayed(question: Question, devices: Sequence[str]) -> tuple[DevicePair, ...]:
    """Return the pairs (source, target) of devices that only the broker connects."""
    endpoints = question.cluster.endpoints
    if not question.relayed_pairs and endpoints.issuperset(devices):
        return ()
    return tuple(
        pair
        for pair in permutations(sorted(devices), 2)
        if pair in question.relayed_pairs or pair[0] not in endpoints or pair[1] not in endpoints
    )


def candidate_routes(question: Question, devices: Sequence[str]) -> tuple[Route, ...]:
    """Return the routes to compare, or the pinned route alone; the first is nearly always the fastest.

    Mesh is possible if all devices have an endpoint and at least one pair can connect.
    """
    if len(devices) == 1:
        return ("broker",)
    if question.route is not None:
        return (question.route,)
    pairs = len(devices) * (len(devices) - 1)
    meshed = question.cluster.endpoints.issuperset(devices) and len(relayed(question, devices)) < pairs
    return ("mesh", "broker") if meshed else ("broker",)


def with_route(question: Question, plan: Plan, route: Route) -> Plan:
    """Return a plan on a route; pairs that cannot connect exchange over the broker."""
    replicas = tuple(with_route(question, replica, route) for replica in plan.replicas)
    apart = relayed(question, plan.devices) if route == "mesh" else ()
    return replace(plan, route=route, relayed_pairs=apart, replicas=replicas)


# ----------------------------------------------------------------------------------------------------------------------
# The wire dtype of a plan's exchanges: the pinned one, or any that keeps the answer within the accuracy budget.
#
# The error of an answer depends on the method, its variant and the number of devices, and hardly on their shares. It is
# measured (`planner.accuracy`) once for each combination that the search would choose. Measuring all combinations would
# need a run of the model for each, and most are never chosen.


EXACT: Final[WireDtype] = "f32"
#: Factor on measured errors, because other inputs may have larger ones. Over seeds and lengths of small seeded models
#: they differ by up to 1.4 times for transformers; for three logits of a convolutional network by 9 times with i8, but
#: there the maximum of eight inputs counts.
MARGIN: Final = 2.0
#: A wire with an error beyond this factor of the budget under one method is not measured under other methods. The
#: methods of one model differ by up to 8 times, most of them by less than 3.
FAR: Final = 4.0

WireErrorKey = tuple[str, int, WireDtype]  #: method with its variant, number of devices, wire


def wire_error_key(plan: Plan, wire: WireDtype | None = None) -> WireErrorKey:
    """Return the key of a plan's error; wire: instead of the plan's own."""
    return plan.method, len(plan.devices), wire or plan.wire


def candidate_wires(question: Question, plan: Plan) -> tuple[WireDtype, ...]:
    """Return the wire dtypes to compare for a plan, the narrowest first, or the pinned one alone."""
    if question.accuracy is None:
        return (question.wire,)
    if len(plan.devices) == 1:
        return (EXACT,)
    return (
        *(wire for wire in NARROW_WIRE_DTYPES if _may(question.accuracy, question.errors, wire_error_key(plan, wire))),
        EXACT,
    )


def _may(accuracy: float, errors: Mapping[WireErrorKey, float], key: WireErrorKey) -> bool:
    """Return whether an error is within the budget, or may be if it is not measured."""
    if key in errors:
        return errors[key] * MARGIN <= accuracy
    elsewhere = [error for (_, _, wire), error in errors.items() if wire == key[2]]
    return min(elsewhere, default=0.0) * MARGIN <= FAR * accuracy


# ----------------------------------------------------------------------------------------------------------------------
# Explanations: the reason of a choice, and the missing memory if no plan fits.


_WORTH_SAYING: Final = 0.05  # least difference between correction and simulator that is mentioned


def _describe(c: Candidate) -> str:
    wire = "" if c.plan.wire == "f32" else f" in {c.plan.wire}"
    return f"{c.name} on {', '.join(c.plan.devices)}{' over mesh' if c.plan.route == 'mesh' else ''}{wire}"


def _does(c: Candidate) -> str:
    """Return the predictions of a plan for the objective of its price."""
    if c.price.objective == "throughput" and c.price.load is not None:
        return f"answer {c.price.load.requests_per_s:.3g} requests/s, each in {_time(c)} alone,"
    if c.price.objective == "memory":
        return f"need {c.price.memory_share:.0%} of a device's memory at the most, and to take {_time(c)}"
    return f"take {_time(c)}"


def _time(c: Candidate) -> str:
    off = "" if abs(c.price.correction - 1) < _WORTH_SAYING else f", by experience {c.price.expected_s * 1e3:.1f} ms,"
    return f"{c.price.seconds * 1e3:.1f} ms{off}"


def explain_choice(ranking: Sequence[Candidate], chosen: Candidate, pruned: Sequence[Candidate] = ()) -> str:
    """Return the reason of a choice as one sentence; pruned: candidates that were too slow to refine."""
    tokens = chosen.plan.predicted_tokens
    parts = [f"{_describe(chosen)} is predicted to {_does(chosen)} for {tokens} token{'s' * (tokens > 1)}"]
    others = [c for c in ranking if c is not chosen]
    fitting = [c for c in others if c.price.feasible]
    if fitting:
        parts.append(f"the next best, {_describe(fitting[0])}, {_time(fitting[0])}")
    elif pruned:
        parts.append(f"the next one, {_describe(pruned[0])}, is far behind: {_time(pruned[0])}")
    short = [c for c in others if not c.price.feasible]
    for c in short:
        where = ", ".join(f"{d} lacks {b / 2**20:.0f} MiB" for d, b in c.price.missing.items())
        parts.append(f"{c.name} does not fit ({where})")
    return "; ".join(parts)


def no_fit(question: Question, ranking: Sequence[Candidate]) -> PlanError:
    """Return the error with the missing memory of the closest candidate; its detail has a line for each candidate."""
    closest = sorted((c for c in ranking if c.price.missing), key=lambda c: sum(c.price.missing.values()))
    lines = tuple(f"{_describe(c)}: {_lacks(question, c)}" for c in closest)
    changes = [*_narrower(question, closest)]
    if largest_shape(question.spec).session_rows > ROWS_IN_FLIGHT:
        changes.append("take shorter texts (model_max_length in tokenizer_config.json)")
    changes.append(_another_device(question, closest[0]) if closest else "add devices")
    nearest = f"the closest is {lines[0]}" if lines else "there is no candidate for these devices"
    helpful = "; ".join(changes)
    return PlanError(
        f"no strategy fits {question.naming.model} into the devices' memory; {nearest}. What would help: {helpful}; or "
        f"raise --memory on the agents, or choose a smaller model (--explain lists all {len(lines)} candidates)",
        lines,
    )


def _in_blocks(spec: ModelSpec, ref: WeightRef) -> bool:
    return spec.storage_of(ref.tensor) is not None


def _narrower(question: Question, candidates: Sequence[Candidate]) -> Iterator[str]:
    """Yield the option for the widest weights with which a candidate would fit, if there are any."""
    spec = question.spec
    if question.weight_dtype != "f32":
        return
    options: list[tuple[str, float, Callable[[WeightRef], bool]]] = []
    if "w8a32" in weight_dtypes(spec):
        options.append(("w8a32", 8.5, lambda ref: narrow_weight(ref, "w8a32") != ref))
    for how, storage in QUANTISED.items():
        with suppress(UnsupportedModelError):
            narrow, of = quantised(spec, how), STORAGES[storage]
            assert isinstance(narrow, ModelSpec)
            options.append((how, 8 * of.block_bytes / of.block, partial(_in_blocks, narrow)))
    for name, bits, becomes_narrow in sorted(options, key=lambda option: -option[1]):
        for c in candidates:
            refs = {device: resident_weights(spec, c.plan, device) for device in c.price.missing}
            wide = {device: weights_bytes(ref for ref in own if becomes_narrow(ref)) for device, own in refs.items()}
            if all(wide[device] * (1 - bits / 32) >= lack for device, lack in c.price.missing.items()):
                yield f"--weights {name}"
                return


def _another_device(question: Question, closest: Candidate) -> str:
    """Return the memory of another device that would help: the missing bytes, and its bytes besides weights."""
    price, plan = closest.price, closest.plan
    rest = min(price.needs[d] - resident_bytes(question.spec, plan, d) for d in price.missing)
    return f"add a device with {(sum(price.missing.values()) + rest) / 2**20:.0f} MiB"


def _lacks(question: Question, c: Candidate) -> str:
    return ", ".join(
        f"{device} needs {c.price.needs[device] / 2**20:.1f} MiB and has "
        f"{question.cluster.devices[device].memory_bytes / 2**20:.1f} MiB ({missing / 2**20:.1f} MiB missing)"
        for device, missing in c.price.missing.items()
    )


# ----------------------------------------------------------------------------------------------------------------------
# The sets of devices to try.


EXHAUSTIVE: Final = 4  #: largest number of devices with a search over all subsets
#: Largest number of devices with a search over every number of them, and over every set without one device. The price
#: of a set takes time in proportion to the square of its size; for all sets without one device it is the cube.
THOROUGH: Final = 8
FRAME_BYTES: Final = 1 << 15  #: frame by which links are compared: about one exchange of a layer
LEAST_S: Final = 1e-5  #: links with a shorter time for that frame count as equal


def subsets(question: Question, by_speed: Sequence[str], pinned: bool) -> Iterator[tuple[str, ...]]:
    """Yield the sets of devices to try, fastest first, one of several sets with interchangeable devices.

    The active plan's devices come first if all are online. pinned: only the set of all devices.
    """
    if pinned:
        yield tuple(by_speed)
        return
    alike = interchangeable(question, by_speed)
    active = () if question.active is None else question.active.devices
    first = [tuple(d for d in by_speed if d in active)] if active and set(active) <= set(by_speed) else []
    kinds = set()
    for subset in (*first, *_tried(by_speed, _by_link(question, by_speed))):
        kind = tuple(alike[device] for device in subset)
        if kind not in kinds:
            kinds.add(kind)
            yield subset


def _tried(by_speed: Sequence[str], by_link: Sequence[str]) -> Iterator[tuple[str, ...]]:
    n = len(by_speed)
    if n <= EXHAUSTIVE:
        for size in range(1, n + 1):
            yield from combinations(by_speed, size)
        return
    yield from ((name,) for name in by_speed)
    for order in (by_speed, by_link):
        for size in _sizes(n):
            first = frozenset(order[:size])
            yield tuple(d for d in by_speed if d in first)
    for left_out in by_speed[:-1] if n <= THOROUGH else ():
        yield tuple(d for d in by_speed if d != left_out)


def _sizes(n: int) -> Iterator[int]:
    """Yield the sizes of sets to try among n devices: 2 to 8, then 12, 16, 24, 32 and so on, and n."""
    yield from range(2, min(n, THOROUGH) + 1)
    size = THOROUGH
    while size < n:
        yield from (more for more in (size * 3 // 2, size * 2) if more < n)
        size *= 2
    if n > THOROUGH:
        yield n


def _by_link(question: Question, by_speed: Sequence[str]) -> list[str]:
    """Return devices with the best links first; among similar links, the fastest device first."""

    def frame_s(device: str) -> float:
        link = question.cluster.links[device]
        return link.latency_s + FRAME_BYTES / min(link.up_bytes_per_s, link.down_bytes_per_s)

    return sorted(by_speed, key=lambda device: round(log2(max(frame_s(device), LEAST_S))))


def as_chain(by_speed: Sequence[str]) -> tuple[str, ...]:
    """Return devices with the fastest in the middle; the slowest are at the ends, with one neighbour."""
    return (*by_speed[1::2][::-1], *by_speed[::2])


CLOSE: Final = 1.05  #: largest ratio between measurements of equal devices


def in_order(question: Question, devices: Sequence[str], by_speed: Sequence[str]) -> tuple[str, ...]:
    """Return devices in a plan's order: that of the active plan on the same devices, else the fastest kind first.

    Devices of one kind are ordered by name, so noise in their measurements does not change the plan.
    """
    if question.active is not None and set(question.active.devices) == set(devices):
        return question.active.devices
    alike = interchangeable(question, by_speed)
    return tuple(sorted(devices, key=lambda d: (by_speed.index(alike[d]), d)))


def interchangeable(question: Question, names: Sequence[str]) -> dict[str, str]:
    """Return for each device the first device that is interchangeable with it."""
    measured = {name: _measured(question, name) for name in names}
    first: dict[str, str] = {}
    for name in names:
        kinds = dict.fromkeys(first.values())
        alike = (k for k in kinds if _close(measured[k], measured[name]) and _has_same_links(question, k, name))
        first[name] = next(alike, name)
    return first


def _measured(question: Question, name: str) -> tuple[float, ...]:
    """Return the measurements of a device and its link."""
    device, link, cluster = question.cluster.devices[name], question.cluster.links[name], question.cluster
    work = [device.speed(rows) for rows in (1, 32, 512)]
    rates = [device.attention_flops_per_s / device.slowdown, device.rowwise_bytes_per_s / device.slowdown]
    frames = [device.frame_seconds(1, nbytes, route) for nbytes in (0, FRAME_BYTES) for route in ("broker", "mesh")]
    power = (0.0, 0.0) if device.power is None else device.power
    can = float(name in cluster.endpoints), float(name in cluster.shared_medium)
    link_costs = link.latency_s + LEAST_S, link.up_bytes_per_s, link.down_bytes_per_s
    return (*work, *rates, *frames, device.memory_bytes, *power, *can, *link_costs)


def _close(some: Sequence[float], others: Sequence[float]) -> bool:
    return all(a == b or max(a, b) <= CLOSE * min(a, b) for a, b in zip(some, others, strict=True))


def _has_same_links(question: Question, a: str, b: str) -> bool:
    """Return whether two devices have similar links to all others, and in both directions between them."""
    links, apart = question.cluster.peer_links, question.relayed_pairs
    if not links and not apart:
        return True
    others = [name for name in question.cluster.devices if name not in (a, b)]
    pairs = [((a, b), (b, a)), *(pair for n in others for pair in (((a, n), (b, n)), ((n, a), (n, b))))]
    return all(
        (one in apart) == (other in apart) and _alike_links(links.get(one), links.get(other)) for one, other in pairs
    )


def _alike_links(a: PeerLink | None, b: PeerLink | None) -> bool:
    if a is None or b is None:
        return a is b
    rates = (a.bytes_per_s or inf, b.bytes_per_s or inf)
    return _close((a.latency_s + LEAST_S, rates[0]), (b.latency_s + LEAST_S, rates[1]))


# ----------------------------------------------------------------------------------------------------------------------
# Checks of a question's pinned values.


_LISTED: Final = 8  # most options in an error
_CUT: Final = 80  # most characters of a quoted option
_MANY: Final = 64  # a number of devices for comparing variants with those for one device


def check_question(question: Question) -> None:
    """Raise ConfigError for an unknown method or options, PlanError for devices that are not online."""
    if question.strategy is not None and question.strategy not in STRATEGIES:
        raise ConfigError(f"unknown strategy {question.strategy!r}; there are: {', '.join(STRATEGIES)}")
    if question.options:
        _check_options(question)
    _check_storage(question)
    _check_count(question)
    unknown = set(question.devices or ()) - set(question.cluster.devices)
    if unknown:
        online = ", ".join(question.cluster.devices) or "none"
        raise PlanError(f"devices {', '.join(sorted(unknown))} are not online; online: {online}")
    if not question.cluster.devices:
        raise PlanError("no device is online; start one with: hepti agent --broker URL --id NAME")
    if question.strategy is not None and STRATEGIES[question.strategy].chooses_devices(question.options):
        _check_watts(question)


def _check_storage(question: Question) -> None:
    """Raise ConfigError if the model or the pinned variant does not support the weight dtype."""
    able = weight_dtypes(question.spec)
    if question.weight_dtype not in able:
        raise ConfigError(
            f"{question.spec.architecture} has weights in {' or '.join(able)} only, not in {question.weight_dtype}; "
            f"leave out the weights, or ask for {able[0]}"
        )
    if question.strategy is None or not question.options:
        return
    able = STRATEGIES[question.strategy].weight_dtypes(question.options)
    if question.weight_dtype not in able:
        raise ConfigError(
            f"{question.strategy} with {_words([question.options])} needs weights in {' or '.join(able)}, and "
            f"{question.weight_dtype} is pinned; leave out the option, or the weights"
        )


def _check_count(question: Question) -> None:
    """Raise ConfigError for more devices than the pinned method can use."""
    most = None if question.strategy is None else STRATEGIES[question.strategy].max_devices
    given = question.devices or ()
    if most is not None and len(given) > most:
        raise ConfigError(
            f"{question.strategy} runs on {most} device{'s' * (most > 1)} at the most, and {len(given)} are pinned: "
            f"{', '.join(given)}; name {most}, or leave devices out for the best choice"
        )


def _check_watts(question: Question) -> None:
    """Raise ConfigError if the power of a device is unknown."""
    names = question.devices or tuple(question.cluster.devices)
    dumb = ", ".join(name for name in names if question.cluster.devices[name].power is None)
    if dumb:
        raise ConfigError(
            f"the least energy of {question.strategy} needs the watts of every device, and {dumb} has none; "
            "give compute_watts and link_watts in a site file, for hepti simulate"
        )


def options_error(strategy: str | None, options: Options) -> str | None:
    """Return the error of options that a method has for no number of devices, None if they are valid.

    strategy: None: the options of any method are valid.
    """
    if not options or any(m.accepts(options) for m in STRATEGIES.values() if strategy in {None, m.name}):
        return None
    given = _words([options])[:_CUT]
    if strategy is None:
        return f"no strategy has the option {given}; name the strategy too, and one of its own options"
    method = STRATEGIES[strategy]
    valid = [o for o in method.all_variants().values() if o]
    more = " and so on, as the number of devices allows" if _varies(method) else ""
    return f"{strategy} has no option {given}; it has {_words(valid[:_LISTED]) or 'none'}{more}"


def _check_options(question: Question) -> None:
    """Raise ConfigError for options that the method does not have on the given number of devices."""
    method = None if question.strategy is None else STRATEGIES[question.strategy]
    if method is None or not _varies(method):
        if (error := options_error(question.strategy, question.options)) is not None:
            raise ConfigError(error)
        return
    count = len(question.devices or question.cluster.devices)
    sizes = (count,) if question.devices else range(1, count + 1)
    if not any(dict(question.options) == dict(o) for n in sizes for o in method.variants_for(n)):
        given, available = _words([question.options]), _words(method.variants_for(count)) or "none"
        raise ConfigError(f"{method.name} has no option {given} on {count} devices; there it has {available}")


def _varies(method: Method) -> bool:
    """Return whether a method's variants depend on the number of devices."""
    return method.variants_for(1) != method.variants_for(_MANY)


def _words(options: Iterable[Options]) -> str:
    return ", ".join(" ".join(f"{key}={value}" for key, value in o.items()) for o in options)


# ----------------------------------------------------------------------------------------------------------------------
# Lower bounds of a plan's seconds, from its devices' times alone and its method's overhead on other devices.
#
# A division takes the ideal time of its devices plus an overhead: exchanges, repeated work, waiting. The overhead
# differs little between sets of devices with similar links. A refinement saves a part of it.


#: Least time of several devices relative to the ideal, i.e. to the sum of their speeds: smaller matrices fit caches.
SPEEDUP_SLACK: Final = 0.8
#: Least part of the overhead on other devices with similar links. Measured over random sites, not proved:
#: docs/decisions/0005-search.md.
OVERHEAD_SLACK: Final = 0.6
#: Least part of the overhead after a refinement of shares, route and wire; measured likewise.
REFINEMENT_SLACK: Final = 0.5
#: Factor on the best price: it is not refined either, and may be slightly low because equal layers are simulated once.
PRICE_SLACK: Final = 1.1


class LowerBound:
    """Lower bounds of plans' seconds; alone: seconds of the whole model on one device, unknown devices are missing."""

    def __init__(self, question: Question, alone: Mapping[str, float]) -> None:
        self._question, self._alone = question, alone
        self._links = Paths(question.cluster)
        self._overheads: dict[str, list[Overhead]] = {}  # by name
        self._paths: dict[tuple[Route, tuple[str, ...]], Slowest] = {}

    def ideal_s(self, devices: Sequence[str]) -> float | None:
        """Return the seconds of devices that divide all work by speed without exchanges; None if unknown."""
        if not all(d in self._alone for d in devices):
            return None
        return 1 / sum(1 / self._alone[d] for d in devices)

    def observe(self, c: Candidate) -> None:
        """Learn the overhead of a priced plan: it bounds plans of its method on at least as many devices."""
        ideal_s = self.ideal_s(c.plan.devices)
        if ideal_s is not None and len(c.plan.devices) > 1 and not c.plan.replicas:
            more = max(c.price.seconds - ideal_s, 0.0)
            overhead = Overhead(len(c.plan.devices), more, self._slowest_path(c.plan.devices, c.plan.route))
            self._overheads.setdefault(c.name, []).append(overhead)

    def is_pruned(self, plan: Plan, priced_s: float | None, best_s: float) -> bool:
        """Return whether a plan cannot be expected to beat the best; priced_s: its price, None without a price."""
        if priced_s is None:
            return self.bound_unpriced(plan) >= best_s
        return self.bound_refined(plan, priced_s) >= PRICE_SLACK * best_s

    def bound_unpriced(self, plan: Plan) -> float:
        """Return the lower bound of an unpriced plan in seconds; 0 without evidence."""
        ideal_s = self.ideal_s(plan.devices)
        if ideal_s is None or plan.replicas:
            return 0.0
        # If a method rewrites the graph, more devices may repeat less work than few.
        fewest = 1 if STRATEGIES[plan.strategy].rewrite is None else len(plan.devices)
        overheads = [s for s in self._overheads.get(plan.method, ()) if fewest <= s.devices <= len(plan.devices)]
        if not overheads:
            return SPEEDUP_SLACK * ideal_s * self._factor(plan)
        paths = self._paths_by_route(plan)
        nearest = max(s.devices for s in overheads)
        more = min(s.more_s * _better(paths, s.path) for s in overheads if s.devices == nearest)
        return (ideal_s + OVERHEAD_SLACK * more) * self._factor(plan)

    def bound_refined(self, plan: Plan, priced_s: float) -> float:
        """Return the lower bound of a priced plan after refinement, in seconds."""
        ideal_s = self.ideal_s(plan.devices)
        if ideal_s is None or len(plan.devices) == 1 or plan.replicas:
            return 0.0
        path = self._slowest_path(plan.devices, plan.route)
        more = (priced_s - ideal_s) * _better(self._paths_by_route(plan), path)
        return (ideal_s + REFINEMENT_SLACK * more) * self._factor(plan)

    def _paths_by_route(self, plan: Plan) -> list[Slowest]:
        """Return the slowest path of a plan for each of its routes."""
        return [self._slowest_path(plan.devices, r) for r in candidate_routes(self._question, plan.devices)]

    def _factor(self, plan: Plan) -> float:
        """Return the smallest correction of a plan over its routes."""
        learned = self._question.learned
        if not learned.factors:
            return 1.0
        by_route = (replace(plan, route=r) for r in candidate_routes(self._question, plan.devices))
        return min(map(learned.factor, by_route))

    def _slowest_path(self, devices: tuple[str, ...], route: Route) -> Slowest:
        """Return the slowest path between devices; every set of devices is computed once."""
        if (route, devices) not in self._paths:
            self._paths[route, devices] = self._work_out(devices, route)
        return self._paths[route, devices]

    def _work_out(self, devices: tuple[str, ...], route: Route) -> Slowest:
        links, cluster = self._question.cluster.links, self._question.cluster
        apart = set(relayed(self._question, devices)) if route == "mesh" else set()
        each = [rate for d in devices for rate in (links[d].up_bytes_per_s, links[d].down_bytes_per_s)]
        if route == "broker" or not (apart or cluster.peer_links or max(each) >= LOCAL_BYTES_PER_S):
            return Slowest(sum(sorted(links[d].latency_s for d in devices)[-2:]), 1 / min(each))
        latency = byte = 0.0
        for source, target in permutations(devices, 2):
            rates = iter((links[source].up_bytes_per_s, links[target].down_bytes_per_s))
            after = links[source].latency_s + links[target].latency_s
            if (source, target) not in apart:
                path = self._links.between(source, target)
                rates = iter((path.bytes_per_s, path.up_bytes_per_s, path.down_bytes_per_s))
                after = path.latency_s
            latency, byte = max(latency, after), max(byte, 1 / min(*rates, inf))
        return Slowest(latency, byte)


class Slowest(NamedTuple):
    """The slowest path between devices: seconds, and seconds per byte."""

    latency_s: float
    byte_s: float


class Overhead(NamedTuple):
    """The overhead of a priced plan."""

    devices: int  #: number of devices
    more_s: float  #: beyond the ideal time
    path: Slowest  #: the slowest path between the devices


def _better(paths: Sequence[Slowest], other: Slowest) -> float:
    """Return the time of exchanges on the best of some paths, as a part (0 to 1) of the time on another path."""
    latency_s, byte_s = max(other.latency_s, 1e-9), max(other.byte_s, 1e-15)
    return min(1.0, *(min(path.latency_s / latency_s, path.byte_s / byte_s) for path in paths))
