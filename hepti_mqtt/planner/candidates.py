"""What a search finds: a plan, and the candidates that it was chosen from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, permutations
from math import inf, log2
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from hepti_mqtt.cost.memory import ROWS_IN_FLIGHT, resident_bytes, weights_bytes
from hepti_mqtt.cost.profiles import LOCAL_BYTES_PER_S, Cluster, Paths, PeerLink
from hepti_mqtt.errors import ConfigError, PlanError, UnsupportedModelError
from hepti_mqtt.lowering.passes import narrow_weight
from hepti_mqtt.models import largest_shape, quantised, weight_dtypes
from hepti_mqtt.models.transformer import ModelSpec
from hepti_mqtt.plan import NARROW_WIRE_DTYPES, DevicePair, Plan, Route, WireDtype
from hepti_mqtt.plan_programs import resident_weights
from hepti_mqtt.program import WeightRef
from hepti_mqtt.shares import DeviceResources, Options
from hepti_mqtt.storage import QUANTISED, STORAGES
from hepti_mqtt.strategies import STRATEGIES, Method

if TYPE_CHECKING:
    from hepti_mqtt.planner.price import Price, Question, SimulatedRequest


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan with its price and the share weights that it came from.

    fits_beside: whether every device has room for it beside the active plan.
    """

    plan: Plan
    price: Price
    shares: tuple[float, ...]
    load_bytes: Mapping[str, int] = field(default_factory=dict)  #: weights that each device would load, if worked out
    cached_bytes: Mapping[str, int] = field(default_factory=dict)  #: the part of them that its cache has
    hub_bytes: int = 0  #: the part that no device of the plan has: it leaves the planner's machine once
    fits_beside: bool = True

    @property
    def name(self) -> str:
        """Return strategy and variant, as people write it."""
        return self.plan.method


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen plan, and the best candidate of every (strategy, variant) for comparison, best first.

    `reason` says in one sentence why the plan was chosen, `cluster` is what devices and links were when it was.
    `digest`: `plan_programs.programs_digest` of the plan. `pruned`: strategies and variants that the question did not
    compare, each by the first price that showed it to be too slow, without its memory.
    """

    chosen: Candidate
    ranking: tuple[Candidate, ...]
    reason: str
    cluster: Cluster
    digest: bytes
    pruned: tuple[Candidate, ...] = ()

    @property
    def single(self) -> Candidate | None:
        """Return the best device alone, whether chosen or not; None if no device holds the model."""
        return next((c for c in self.ranking if len(c.plan.devices) == 1 and c.price.feasible), None)

    def simulation_of(self, run: Plan) -> SimulatedRequest | None:
        """Return the search's own simulation of the chosen plan, or of one of its replicas; None if it has none."""
        devices = set(run.devices)
        return next((p for p in self.chosen.price.simulated if p.simulation.devices.keys() == devices), None)


class Recalled(NamedTuple):
    """A plan that has served, and the bytes that it needs by device; it was priced then.

    boots: of the starts of devices that have kept its weights, as far as they are known.
    """

    plan: Plan
    needs: Mapping[str, int]
    boots: Mapping[str, int] = MappingProxyType({})


# ----------------------------------------------------------------------------------------------------------------------
# What methods that solve for shares know of devices beside their speed.


def device_costs(question: Question, devices: Sequence[str]) -> list[DeviceResources]:
    """Return the lanes of devices, in their order."""
    found = []
    for device in devices:
        link, known = question.cluster.links[device], question.cluster.devices[device]
        rate = min(link.up_bytes_per_s, link.down_bytes_per_s)
        lane = DeviceResources(
            rate, link.latency_s, known.memory_bytes, known.speed(1), known.power, question.cluster.deadline_s
        )
        found.append(lane)
    return found


# ----------------------------------------------------------------------------------------------------------------------
# By which route the exchanges of a plan can go: the same division over the broker, or over mesh.


def relayed(question: Question, devices: Sequence[str]) -> tuple[DevicePair, ...]:
    """Return the (source, target) among devices that only the broker connects."""
    can = question.cluster.endpoints
    if not question.relayed_pairs and can.issuperset(devices):
        return ()
    return tuple(
        pair
        for pair in permutations(sorted(devices), 2)
        if pair in question.relayed_pairs or pair[0] not in can or pair[1] not in can
    )


def candidate_routes(question: Question, devices: Sequence[str]) -> tuple[Route, ...]:
    """Return the routes to price against each other, first the one that is faster nearly always.

    What is pinned is alone. Mesh is one of them where all devices have an endpoint and some two can connect.
    """
    if len(devices) == 1:
        return ("broker",)
    if question.route is not None:
        return (question.route,)
    pairs = len(devices) * (len(devices) - 1)
    meshed = question.cluster.endpoints.issuperset(devices) and len(relayed(question, devices)) < pairs
    return ("mesh", "broker") if meshed else ("broker",)


def with_route(question: Question, plan: Plan, route: Route) -> Plan:
    """Return a plan with its exchanges on a route; those of pairs that cannot connect stay on the broker."""
    replicas = tuple(with_route(question, replica, route) for replica in plan.replicas)
    apart = relayed(question, plan.devices) if route == "mesh" else ()
    return replace(plan, route=route, relayed_pairs=apart, replicas=replicas)


# ----------------------------------------------------------------------------------------------------------------------
# In which numbers the exchanges of a plan may go: what is pinned, or what keeps the answer within an accuracy budget.
#
# How far an answer moves depends on what is exchanged and how often: on the method, its variant and the number of
# devices, and hardly on their shares. So an error is known by these, and is measured (`planner.accuracy`) once for
# each
# that the search would choose; measuring all of them at load would take a run of the model for each, most of which no
# search ever chooses.


EXACT: Final[WireDtype] = "f32"
# Another input's answer may move further than those of the inputs that were measured. Over seeds and lengths of small
# seeded models they differ by up to 1.4 times for transformers; for three logits of a convolutional network by 9 with
# i8, and the most of eight inputs is what counts there.
MARGIN: Final = 2.0
# The methods of one model differ by up to 8 times, most of them by less than 3: a dtype that is further than this from
# the budget under one is not measured under the others.
FAR: Final = 4.0

# What an error belongs to: method with its variant, number of devices, wire.
WireErrorKey = tuple[str, int, WireDtype]


def wire_error_key(plan: Plan, wire: WireDtype | None = None) -> WireErrorKey:
    """Return what the error of a plan belongs to; wire: another one than the plan's own."""
    return plan.method, len(plan.devices), wire or plan.wire


def candidate_wires(question: Question, plan: Plan) -> tuple[WireDtype, ...]:
    """Return the dtypes to price against each other for a plan, the narrowest first; what is pinned is alone."""
    if question.accuracy is None:
        return (question.wire,)
    if len(plan.devices) == 1:
        return (EXACT,)
    return (
        *(wire for wire in NARROW_WIRE_DTYPES if _may(question.accuracy, question.errors, wire_error_key(plan, wire))),
        EXACT,
    )


def _may(accuracy: float, errors: Mapping[WireErrorKey, float], key: WireErrorKey) -> bool:
    """Return whether an error is within the budget, or may be as far as is known."""
    if key in errors:
        return errors[key] * MARGIN <= accuracy
    elsewhere = [error for (_, _, wire), error in errors.items() if wire == key[2]]
    return min(elsewhere, default=0.0) * MARGIN <= FAR * accuracy


# ----------------------------------------------------------------------------------------------------------------------
# What a search says: why a plan was chosen, and what is missing where none fits.


_WORTH_SAYING: Final = 0.05  # by how much experience differs from the simulator


def _describe(c: Candidate) -> str:
    wire = "" if c.plan.wire == "f32" else f" in {c.plan.wire}"
    return f"{c.name} on {', '.join(c.plan.devices)}{' over mesh' if c.plan.route == 'mesh' else ''}{wire}"


def _does(c: Candidate) -> str:
    """Return what a plan does by the objective that it was compared by."""
    if c.price.objective == "throughput" and c.price.load is not None:
        return f"answer {c.price.load.requests_per_s:.3g} requests/s, each in {_time(c)} alone,"
    if c.price.objective == "memory":
        return f"need {c.price.memory_share:.0%} of a device's memory at the most, and to take {_time(c)}"
    return f"take {_time(c)}"


def _time(c: Candidate) -> str:
    off = "" if abs(c.price.correction - 1) < _WORTH_SAYING else f", by experience {c.price.expected_s * 1e3:.1f} ms,"
    return f"{c.price.seconds * 1e3:.1f} ms{off}"


def explain_choice(ranking: Sequence[Candidate], chosen: Candidate, behind: Sequence[Candidate] = ()) -> str:
    """Return in one sentence why a plan was chosen; behind: what was found too slow before it was worked out."""
    tokens = chosen.plan.predicted_tokens
    parts = [f"{_describe(chosen)} is predicted to {_does(chosen)} for {tokens} token{'s' * (tokens > 1)}"]
    others = [c for c in ranking if c is not chosen]
    fitting = [c for c in others if c.price.feasible]
    if fitting:
        parts.append(f"the next best, {_describe(fitting[0])}, {_time(fitting[0])}")
    elif behind:
        parts.append(f"the next one, {_describe(behind[0])}, is far behind: {_time(behind[0])}")
    short = [c for c in others if not c.price.feasible]
    for c in short:
        where = ", ".join(f"{d} lacks {b / 2**20:.0f} MiB" for d, b in c.price.missing.items())
        parts.append(f"{c.name} does not fit ({where})")
    return "; ".join(parts)


def no_fit(question: Question, ranking: Sequence[Candidate]) -> PlanError:
    """Return the error that says what the candidate lacks that lacks least; its detail is a line for each one."""
    closest = sorted((c for c in ranking if c.price.missing), key=lambda c: sum(c.price.missing.values()))
    lines = tuple(f"{_describe(c)}: {_lacks(question, c)}" for c in closest)
    changes = [*_narrower(question, closest)]
    if largest_shape(question.spec).session_rows > ROWS_IN_FLIGHT:
        changes.append("take shorter texts (model_max_length in tokenizer_config.json)")
    changes.append(_another_device(question, closest[0]) if closest else "add devices")
    found = f"the closest is {lines[0]}" if lines else "there is no candidate for these devices"
    helpful = "; ".join(changes)
    return PlanError(
        f"no strategy fits {question.naming.model} into the devices' memory; {found}. What would help: {helpful}; or "
        f"raise --memory on the agents, or choose a smaller model (--explain lists all {len(lines)} candidates)",
        lines,
    )


def _in_blocks(spec: ModelSpec, ref: WeightRef) -> bool:
    return spec.storage_of(ref.tensor) is not None


def _narrower(question: Question, candidates: Sequence[Candidate]) -> Iterator[str]:
    """Yield the setting of the widest weights by which one of the candidates would fit, if there is one."""
    spec = question.spec
    if question.weight_dtype != "f32":
        return
    ways: list[tuple[str, float, Callable[[WeightRef], bool]]] = []
    if "w8a32" in weight_dtypes(spec):
        ways.append(("w8a32", 8.5, lambda ref: narrow_weight(ref, "w8a32") != ref))
    for how, storage in QUANTISED.items():
        with suppress(UnsupportedModelError):
            narrow, of = quantised(spec, how), STORAGES[storage]
            assert isinstance(narrow, ModelSpec)
            ways.append((how, 8 * of.block_bytes / of.block, partial(_in_blocks, narrow)))
    for name, bits, becomes_narrow in sorted(ways, key=lambda way: -way[1]):
        for c in candidates:
            refs = {device: resident_weights(spec, c.plan, device) for device in c.price.missing}
            wide = {device: weights_bytes(ref for ref in own if becomes_narrow(ref)) for device, own in refs.items()}
            if all(wide[device] * (1 - bits / 32) >= lack for device, lack in c.price.missing.items()):
                yield f"--weights {name}"
                return


def _another_device(question: Question, closest: Candidate) -> str:
    """Say how much memory another device needs: what the others lack, and what a device has beside weights."""
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
# Which devices of a site are tried together.


EXHAUSTIVE: Final = 4  # up to so many devices every subset is tried
# Up to so many devices every number of them is tried, and all but each one. The price of a set grows with the square of
# its size, and that of all sets but one with the cube.
THOROUGH: Final = 8
FRAME_BYTES: Final = 1 << 15  # by which links are compared: about what a device sends to another one in a layer
LEAST_S: Final = 1e-5  # links on which that takes less are alike


def subsets(question: Question, by_speed: Sequence[str], pinned: bool) -> Iterator[tuple[str, ...]]:
    """Yield the subsets of devices, fastest first, that are tried; of those that differ in names alone the first one.

    pinned: all devices, and no other subset.
    """
    if pinned:
        yield tuple(by_speed)
        return
    alike = interchangeable(question, by_speed)
    seen = set()
    for subset in (*_active_set(question, by_speed), *_tried(by_speed, _by_link(question, by_speed))):
        kind = tuple(alike[device] for device in subset)
        if kind not in seen:
            seen.add(kind)
            yield subset


def _active_set(question: Question, by_speed: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the devices of the active plan, which stand for others that are like them; nothing if one is gone."""
    active = () if question.active is None else question.active.devices
    return [tuple(d for d in by_speed if d in active)] if active and set(active) <= set(by_speed) else []


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
    """Yield how many of n devices are tried together: every number of few, then twelve, sixteen and so on, and all."""
    yield from range(2, min(n, THOROUGH) + 1)
    size = THOROUGH
    while size < n:
        yield from (more for more in (size * 3 // 2, size * 2) if more < n)
        size *= 2
    if n > THOROUGH:
        yield n


def _by_link(question: Question, by_speed: Sequence[str]) -> list[str]:
    """Return devices with the best links first; of links that are about as good, the fastest device."""

    def frame_s(device: str) -> float:
        link = question.cluster.links[device]
        return link.latency_s + FRAME_BYTES / min(link.up_bytes_per_s, link.down_bytes_per_s)

    return sorted(by_speed, key=lambda device: round(log2(max(frame_s(device), LEAST_S))))


def as_chain(by_speed: Sequence[str]) -> tuple[str, ...]:
    """Return devices with the fastest in the middle and the slowest at the ends, where they have one neighbour."""
    return (*by_speed[1::2][::-1], *by_speed[::2])


CLOSE: Final = 1.05  # measurements of equal devices differ by so much


def in_order(question: Question, devices: Sequence[str], by_speed: Sequence[str]) -> tuple[str, ...]:
    """Return devices in the order of a plan: that of the active plan of the same ones, else the fastest kind first.

    Devices of a kind follow each other by name, so that noise in what they measure changes no plan.
    """
    if question.active is not None and set(question.active.devices) == set(devices):
        return question.active.devices
    alike = interchangeable(question, by_speed)
    return tuple(sorted(devices, key=lambda d: (by_speed.index(alike[d]), d)))


def interchangeable(question: Question, names: Sequence[str]) -> dict[str, str]:
    """Return for each device the first one that can stand in its place."""
    known = {name: _measured(question, name) for name in names}
    found: dict[str, str] = {}
    for name in names:
        kinds = dict.fromkeys(found.values())
        alike = (k for k in kinds if _close(known[k], known[name]) and _see_the_same(question, k, name))
        found[name] = next(alike, name)
    return found


def _measured(question: Question, name: str) -> tuple[float, ...]:
    """Return what a device and its link are."""
    device, link, cluster = question.cluster.devices[name], question.cluster.links[name], question.cluster
    work = [device.speed(rows) for rows in (1, 32, 512)]
    rates = [device.attention_flops_per_s / device.slowdown, device.rowwise_bytes_per_s / device.slowdown]
    frames = [device.frame_seconds(1, nbytes, route) for nbytes in (0, FRAME_BYTES) for route in ("broker", "mesh")]
    power = (0.0, 0.0) if device.power is None else device.power
    can = float(name in cluster.endpoints), float(name in cluster.shared_medium)
    way = link.latency_s + LEAST_S, link.up_bytes_per_s, link.down_bytes_per_s
    return (*work, *rates, *frames, device.memory_bytes, *power, *can, *way)


def _close(some: Sequence[float], others: Sequence[float]) -> bool:
    return all(a == b or max(a, b) <= CLOSE * min(a, b) for a, b in zip(some, others, strict=True))


def _see_the_same(question: Question, a: str, b: str) -> bool:
    """Return whether two devices have the same ways to all others, and to each other."""
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
# Whether what a question pins exists.


_LISTED: Final = 8  # options that an error names
_CUT: Final = 80  # characters of what was given
_MANY: Final = 64  # devices, for which a method whose variants depend on their number has others than for one


def check_question(question: Question) -> None:
    """Raise ConfigError for a method or options that there are not, PlanError for devices that are not online."""
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
    """Raise ConfigError for weights in another storage than the model, or the pinned variant, can multiply by."""
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
            f"{question.weight_dtype} is asked for; leave out the option, or the weights"
        )


def _check_count(question: Question) -> None:
    """Raise ConfigError for more devices than the method that is pinned can use."""
    most = None if question.strategy is None else STRATEGIES[question.strategy].max_devices
    given = question.devices or ()
    if most is not None and len(given) > most:
        raise ConfigError(
            f"{question.strategy} runs on {most} device{'s' * (most > 1)} at the most, and {len(given)} are pinned: "
            f"{', '.join(given)}; name {most}, or leave devices out for the best choice"
        )


def _check_watts(question: Question) -> None:
    """Raise ConfigError if it is not known of every device what it draws."""
    names = question.devices or tuple(question.cluster.devices)
    dumb = ", ".join(name for name in names if question.cluster.devices[name].power is None)
    if dumb:
        raise ConfigError(
            f"the least energy of {question.strategy} needs the watts of every device, and none are known of {dumb}; "
            "give compute_watts and link_watts in a site file, for hepti simulate"
        )


def options_error(strategy: str | None, options: Options) -> str | None:
    """Return what is wrong with options that a method has on no number of devices, None if nothing is.

    strategy: None means that any method may have them.
    """
    if not options or any(m.accepts(options) for m in STRATEGIES.values() if strategy in {None, m.name}):
        return None
    given = _words([options])[:_CUT]
    if strategy is None:
        return f"no strategy has the option {given}; name the strategy too, and one of its own options"
    method = STRATEGIES[strategy]
    known = [o for o in method.all_variants().values() if o]
    more = " and so on, as the number of devices allows" if _varies(method) else ""
    return f"{strategy} has no option {given}; it has {_words(known[:_LISTED]) or 'none'}{more}"


def _check_options(question: Question) -> None:
    """Raise ConfigError for options that the method does not have, or not on so many devices."""
    method = None if question.strategy is None else STRATEGIES[question.strategy]
    if method is None or not _varies(method):
        if (error := options_error(question.strategy, question.options)) is not None:
            raise ConfigError(error)
        return
    count = len(question.devices or question.cluster.devices)
    sizes = (count,) if question.devices else range(1, count + 1)
    if not any(dict(question.options) == dict(o) for n in sizes for o in method.variants_for(n)):
        given, here = _words([question.options]), _words(method.variants_for(count)) or "none"
        raise ConfigError(f"{method.name} has no option {given} on {count} devices; there it has {here}")


def _varies(method: Method) -> bool:
    """Return whether a method's variants depend on the number of devices."""
    return method.variants_for(1) != method.variants_for(_MANY)


def _words(options: Iterable[Options]) -> str:
    return ", ".join(" ".join(f"{key}={value}" for key, value in o.items()) for o in options)


# ----------------------------------------------------------------------------------------------------------------------
# What a plan may come down to at the best, from what devices take alone and what its method took on others of them.
#
# A division takes what its devices need for the work, and more: exchanges, what is computed twice, waiting. What it
# takes
# more differs little from one set of devices to another with links as good. Refining a plan takes away a part of it.


# Devices together are no faster than the sum of their speeds alone, but for what smaller matrices gain in caches.
SPEEDUP_SLACK: Final = 0.8
# Of what a division takes more, at least so much stays on other devices with links as good; and so much when shares,
# route and wire are refined. Measured over random sites, not proved: docs/decisions/0005-search.md.
OVERHEAD_SLACK: Final = 0.6
REFINEMENT_SLACK: Final = 0.5
# The best price is not refined either, and with equal layers once, it may be a little less than that of the whole.
PRICE_SLACK: Final = 1.1


class LowerBound:
    """What plans may come down to; alone: seconds of the whole model by device, of those where that is known."""

    def __init__(self, question: Question, alone: Mapping[str, float]) -> None:
        self._question, self._alone = question, alone
        self._ways = Paths(question.cluster)
        self._seen: dict[str, list[Seen]] = {}  # by name
        self._paths: dict[tuple[Route, tuple[str, ...]], Slowest] = {}

    def ideal_s(self, devices: Sequence[str]) -> float | None:
        """Return the seconds of devices that divide all work by speed and exchange nothing; None if not known."""
        if not all(d in self._alone for d in devices):
            return None
        return 1 / sum(1 / self._alone[d] for d in devices)

    def observe(self, c: Candidate) -> None:
        """Take the price of a plan: others of its method on as many devices, or more, take no less beside the work."""
        together = self.ideal_s(c.plan.devices)
        if together is not None and len(c.plan.devices) > 1 and not c.plan.replicas:
            more = max(c.price.seconds - together, 0.0)
            seen = Seen(len(c.plan.devices), more, self._slowest_path(c.plan.devices, c.plan.route))
            self._seen.setdefault(c.name, []).append(seen)

    def is_pruned(self, plan: Plan, priced_s: float | None, best_s: float) -> bool:
        """Return whether a plan is not expected to beat another; priced_s: its price, None if it has none."""
        if priced_s is None:
            return self.bound_unpriced(plan) >= best_s
        return self.bound_refined(plan, priced_s) >= PRICE_SLACK * best_s

    def bound_unpriced(self, plan: Plan) -> float:
        """Return what a plan that is not priced is expected to take at the least, in seconds; 0 if nothing is known."""
        together = self.ideal_s(plan.devices)
        if together is None or plan.replicas:
            return 0.0
        # Where a method chooses another graph, more devices may compute less twice than few.
        fewest = 1 if STRATEGIES[plan.strategy].rewrite is None else len(plan.devices)
        seen = [s for s in self._seen.get(plan.method, ()) if fewest <= s.devices <= len(plan.devices)]
        if not seen:
            return SPEEDUP_SLACK * together * self._factor(plan)
        ways = self._paths_by_route(plan)
        nearest = max(s.devices for s in seen)
        more = min(s.more_s * _better(ways, s.path) for s in seen if s.devices == nearest)
        return (together + OVERHEAD_SLACK * more) * self._factor(plan)

    def bound_refined(self, plan: Plan, priced_s: float) -> float:
        """Return what a plan of a known price is expected to take at the least when it is refined, in seconds."""
        together = self.ideal_s(plan.devices)
        if together is None or len(plan.devices) == 1 or plan.replicas:
            return 0.0
        path = self._slowest_path(plan.devices, plan.route)
        more = (priced_s - together) * _better(self._paths_by_route(plan), path)
        return (together + REFINEMENT_SLACK * more) * self._factor(plan)

    def _paths_by_route(self, plan: Plan) -> list[Slowest]:
        """Return the way of a plan by each of its routes."""
        return [self._slowest_path(plan.devices, r) for r in candidate_routes(self._question, plan.devices)]

    def _factor(self, plan: Plan) -> float:
        """Return what runs have taught of a plan, by the route of which they have taught the best."""
        learned = self._question.learned
        if not learned.factors:
            return 1.0
        by_route = (replace(plan, route=r) for r in candidate_routes(self._question, plan.devices))
        return min(map(learned.factor, by_route))

    def _slowest_path(self, devices: tuple[str, ...], route: Route) -> Slowest:
        """Return the slowest way between devices; it looks at every two of them, once."""
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
                way = self._ways.between(source, target)
                rates = iter((way.bytes_per_s, way.up_bytes_per_s, way.down_bytes_per_s))
                after = way.latency_s
            latency, byte = max(latency, after), max(byte, 1 / min(*rates, inf))
        return Slowest(latency, byte)


class Slowest(NamedTuple):
    """The slowest way between devices: seconds, and seconds per byte."""

    latency_s: float
    byte_s: float


class Seen(NamedTuple):
    """What a plan on a number of devices took beyond their part of the work, and by what way."""

    devices: int
    more_s: float
    path: Slowest


def _better(ways: Sequence[Slowest], known: Slowest) -> float:
    """Return what exchanges may take by the best of some ways, as a part (0 to 1) of what a known way takes."""
    latency_s, byte_s = max(known.latency_s, 1e-9), max(known.byte_s, 1e-15)
    return min(1.0, *(min(way.latency_s / latency_s, way.byte_s / byte_s) for way in ways))
