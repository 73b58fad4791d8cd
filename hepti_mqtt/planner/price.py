"""The price of one candidate plan: predicted time and bytes by simulation, memory by the Programs' own accounting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import inf, prod
from typing import Final, NamedTuple

from hepti_mqtt.cost.loads import Mask, TileMap
from hepti_mqtt.cost.memory import (
    loading_overhead_bytes,
    max_live_bytes,
    programs_bytes,
    resident_bytes,
    tile_map_bytes,
)
from hepti_mqtt.cost.profiles import Cluster, rows_factor
from hepti_mqtt.cost.simulator import (
    ROUNDS,
    DeviceUse,
    Simulation,
    Throughput,
    TopicNames,
    largest_packet_bytes,
    simulate,
    simulate_throughput,
    simulated_request,
)
from hepti_mqtt.ids import PlanVersion
from hepti_mqtt.models import largest_shape, tensor_sources, usual_product
from hepti_mqtt.plan import DevicePair, Objective, Plan, Route, WeightDtype, WireDtype
from hepti_mqtt.plan_programs import compact_programs, device_program, lower_plan, resident_counts, searched_program
from hepti_mqtt.planner.candidates import THOROUGH, WireErrorKey
from hepti_mqtt.planner.estimates import Corrections
from hepti_mqtt.program import DTYPE_BYTES
from hepti_mqtt.protocol.frames import frame_bytes
from hepti_mqtt.protocol.manifest import TILE, VECTOR_TILE
from hepti_mqtt.protocol.topics import Topics, publish_bytes
from hepti_mqtt.spec import RequestShape, Spec
from hepti_mqtt.strategies import STRATEGIES

# Up to this number of rows takes about as long to exchange as one: a frame costs more than its bytes.
_FEW_ROWS: Final = 8


def _no_pause() -> None:
    """Pause not at all."""


class Budget:
    """What a search may take, in seconds of its processor from when it first asks; clock: says how many it has had.

    What is worth knowing first is worked out whatever the budget says.
    """

    def __init__(self, seconds: float = inf, clock: Callable[[], float] = float) -> None:
        self.seconds, self._clock = seconds, clock
        self._began_s: float | None = None

    @property
    def is_spent(self) -> bool:
        """Return whether nothing is left."""
        if self._began_s is None:
            self._began_s = self._clock()
        return self._clock() - self._began_s >= self.seconds


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be planned.

    shape: the request to optimise for. in_flight: requests that run at once. strategy, devices, wire, storage, route:
    what the user pinned. relayed_pairs: (source, target) that have endpoints, but no way except over the broker.
    packet_bytes: of the largest packet that gets through to a device, by device; those that met no limit are missing.
    learned: from earlier runs.
    requests: so many are played for the throughput of the best candidates; 0: none, unless that is the objective.
    accuracy: how far narrow numbers on the wire may move the answer, relative to f32; the wire is the search's choice
    then. errors: how far they do; weight_error: how far narrow weights do. is_exhaustive: work out the best of every
    strategy and variant, also where it cannot be chosen any more. active: the plan that serves now: its order of
    devices and its head stay where the devices do. residents: other plans of which devices still hold the weights, the
    last one first. budget: of the search. pause: called some ten times for each price: a search can leave the processor
    to others there.
    """

    naming: TopicNames
    spec: Spec
    cluster: Cluster
    shape: RequestShape
    plan_version: PlanVersion
    in_flight: int = 1
    strategy: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] | None = None
    wire: WireDtype = "f32"
    weight_dtype: WeightDtype = "f32"
    route: Route | None = None
    relayed_pairs: frozenset[DevicePair] = frozenset()
    packet_bytes: Mapping[str, int] = field(default_factory=dict)
    learned: Corrections = field(default_factory=Corrections)
    requests: int = 0
    objective: Objective = "latency"
    accuracy: float | None = None
    errors: Mapping[WireErrorKey, float] = field(default_factory=dict)
    weight_error: float | None = None
    is_exhaustive: bool = True
    active: Plan | None = None
    residents: tuple[Plan, ...] = ()
    coming: Plan | None = None  #: the plan whose load is under way
    budget: Budget = field(default_factory=Budget, compare=False)
    tiles: TileMap | None = field(default=None, compare=False)  #: of the model's weights, if its manifest is known
    cached: Mapping[str, Mask] = field(default_factory=dict, compare=False)  #: tiles in the caches of devices
    pause: Callable[[], None] = field(default=_no_pause, compare=False)

    @property
    def load_requests(self) -> int:
        """Return how many requests are played for the throughput of a plan that is simulated in full."""
        return self.requests or (ROUNDS * self.in_flight if self.objective == "throughput" else 0)


class SimulatedRequest(NamedTuple):
    """One request under a plan without replicas, all its layers simulated."""

    shape: RequestShape
    simulation: Simulation


class Memory(NamedTuple):
    """Bytes that a plan needs on each device, and those that are missing there."""

    needs: Mapping[str, int]
    missing: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Price:
    """What a plan costs: seconds and bytes of one request, bytes needed and missing per device, use of each device.

    correction: how many times as long it took in earlier runs than the simulator says. load: what it does with several
    requests, where that was asked. period_s: at least so long from one answer to the next when several requests wait,
    for what devices compute and send. memory_bytes: bytes that each device has. objective: what plans are compared by.
    simulated: the request under each replica, where all of its layers were simulated.
    """

    seconds: float
    nbytes: int
    needs: Mapping[str, int]
    missing: Mapping[str, int]
    use: Mapping[str, DeviceUse]
    correction: float = 1.0
    load: Throughput | None = None
    period_s: float = 0.0
    memory_bytes: Mapping[str, float] = field(default_factory=dict)
    objective: Objective = "latency"
    simulated: tuple[SimulatedRequest, ...] = ()

    @property
    def memory(self) -> Memory:
        """Return needs and missing bytes."""
        return Memory(self.needs, self.missing)

    @property
    def expected_s(self) -> float:
        """Return the seconds of one request by simulation and experience."""
        return self.seconds * self.correction

    @property
    def cost(self) -> tuple[float, float]:
        """Return what plans are compared by, the less the better: that of the objective, then the expected seconds."""
        costs = {
            "latency": self.expected_s,
            "throughput": self.expected_period_s,
            "memory": self.memory_share,
        }
        return costs[self.objective], self.expected_s

    @property
    def expected_period_s(self) -> float:
        """Return the expected seconds from one answer to the next; at least so many, if no requests were played."""
        return self.correction * (1 / self.load.requests_per_s if self.load else self.period_s)

    @property
    def memory_share(self) -> float:
        """Return the largest share of a device's memory that is needed, 0 where nothing is known."""
        return max((n / max(self.memory_bytes[d], 1) for d, n in self.needs.items()), default=0.0)

    def joules(self, cluster: Cluster) -> float | None:
        """Return what devices draw for one request, computing and sending; None if that is not known of all."""
        total = 0.0
        for device, use in self.use.items():
            if (power := cluster.devices[device].power) is None:
                return None
            total += power.compute_w * use.compute_s
            total += power.link_w * use.sent_bytes / cluster.links[device].up_bytes_per_s
        return total

    @property
    def parts(self) -> TimeParts:
        """Return what its seconds are made of."""
        return TimeParts.of(self.use, self.seconds)

    @property
    def feasible(self) -> bool:
        """Return whether every device has room for its part."""
        return not self.missing


def run_seconds(spec: Spec, plan: Plan, price: Price, cluster: Cluster, rows: int) -> float:
    """Return the predicted seconds of a run of some rows under a plan that was priced for others."""
    product, known = usual_product(spec, plan.weight_dtype), max(plan.predicted_tokens, 1)
    factor = partial(rows_factor, cluster, plan.devices, product)
    return max(plan.predicted_s, 1e-9) * price.parts.length_factor(factor(rows) / factor(known), rows, known)


class TimeParts(NamedTuple):
    """Parts of the seconds of a run: products with weights, what ops cost beside their work, and other work of theirs.

    The rest is exchanges.
    """

    products: float = 1.0
    overhead: float = 0.0
    others: float = 0.0

    @classmethod
    def of(cls, use: Mapping[str, DeviceUse], seconds: float) -> TimeParts:
        """Return the parts of a run, whose devices compute in turn or side by side; use: by device."""
        computed_s = sum(one.compute_s for one in use.values())
        if not computed_s:
            return cls()
        alone = {device: min(one.alone_s, one.compute_s) for device, one in use.items()}
        busy_s = sum(alone.values()) + max(one.compute_s - alone[name] for name, one in use.items())
        part = min(busy_s / max(seconds, 1e-12), 1.0) / computed_s
        products, overhead = (part * sum(getattr(o, k) for o in use.values()) for k in ("product_s", "overhead_s"))
        return cls(products, overhead, part * computed_s - products - overhead)

    def length_factor(self, products: float, rows: int, known: int) -> float:
        """Return how many times as long as a run of `known` rows one of other rows takes.

        products: how many times as long those take, of few rows nearly as long as of one. Exchanges of few rows take as
        long as of one.
        """
        exchanges = 1 - sum(self)
        work = self.products * products + self.overhead + self.others * rows / known
        return work + exchanges * max(rows, _FEW_ROWS) / max(known, _FEW_ROWS)


def needed_bytes(question: Question, plan: Plan, device: str) -> int:
    """Return the resident bytes of a device under a plan, for the requests in flight of a question."""
    return peak_bytes(question.spec, plan, device, question.in_flight)


def peak_bytes(spec: Spec, plan: Plan, device: str, in_flight: int) -> int:
    """Return the resident bytes of a device under a plan: weights, Programs, slots and sessions of requests in flight.

    While the weights are loaded nothing runs yet, but blocks that are not complete may take more than the slots.
    """
    live = max_live_bytes(spec, plan, device, in_flight)
    kept = resident_bytes(spec, plan, device) + programs_bytes(spec, plan, device) + tile_map_bytes(spec)
    return kept + max(live, loading_overhead_bytes(resident_counts(spec, plan, device)))


SINGLE: Final = next(method.name for method in STRATEGIES.values() if method.max_devices == 1)
PLENTY: Final = 2  # a device with room for its part of any plan this many times has room for two plans
# Its part needs at most so much more than all of the model on it alone: what it receives, and larger Programs.
MORE: Final = 1.25
MORE_BYTES: Final = 64 << 20


def memory_needs(question: Question, plan: Plan, *, exactly: bool = False) -> Memory:
    """Return what memory a plan needs and lacks, by device.

    Not exactly: of a plan of many devices that all have plenty, a search takes a bound.
    """
    many = len(plan.devices) > THOROUGH and not question.is_exhaustive and question.objective != "memory"
    if many and not exactly:
        whole, rest = _most_bytes(question.spec, question.weight_dtype, question.in_flight)
        memory = [question.cluster.devices[device].memory_bytes for device in plan.devices]
        bounds = dict.fromkeys(plan.devices, whole + rest)
        if min(memory) < PLENTY * (whole + rest):  # the weights of a part tell more, and take longer
            bounds = {d: resident_bytes(question.spec, plan, d) + rest for d in plan.devices}
        if all(most >= PLENTY * need for most, need in zip(memory, bounds.values(), strict=True)):
            return Memory(bounds, {})
    needs = {}
    for device in plan.devices:
        question.pause()
        needs[device] = needed_bytes(question, plan, device)
    room = {d: question.cluster.devices[d].memory_bytes for d in plan.devices}
    return Memory(needs, {d: int(n - room[d]) for d, n in needs.items() if n > room[d]})


@lru_cache(maxsize=8)
def _most_bytes(spec: Spec, storage: WeightDtype, in_flight: int) -> tuple[int, int]:
    """Return bounds of what a device's part of any plan needs: its weights, and all else."""
    alone = plan_alone(storage)
    weights = resident_bytes(spec, alone, "")
    rest = peak_bytes(spec, alone, "", in_flight) - weights
    return int(MORE * weights), int(MORE * rest) + MORE_BYTES


def plan_alone(storage: WeightDtype) -> Plan:
    """Return the plan of one device, whatever its name and the model's."""
    return Plan("", PlanVersion(0, 0), SINGLE, ("",), "", weight_dtype=storage)


def plan_packet(question: Question, plan: Plan) -> int:
    """Return the bytes of the largest packet to or from the broker that a request of one sequence may need.

    The output of a batch, or of want="hidden", may be larger: the head device refuses such a request by itself.
    """
    shape = largest_shape(question.spec)
    parts = (compact_programs(question.spec, run, shape) for run in plan.executables)  # inner layers are alike
    return max(largest_packet_bytes(question.naming, question.spec, shape, p) for p in parts)


def packet_limit(question: Question, plan: Plan) -> int | None:
    """Return the largest packet that gets through to every device of a plan, None if any does."""
    return min((question.packet_bytes[d] for d in plan.devices if d in question.packet_bytes), default=None)


def fits_packet_limit(question: Question, plan: Plan) -> bool:
    """Return whether the weights, and every packet that a request of one sequence may need, get through."""
    limit = packet_limit(question, plan)
    return limit is None or max(tile_packet(question), plan_packet(question, plan)) <= limit


def tile_packet(question: Question) -> int:
    """Return the bytes of the largest packet that brings weights to a device."""
    most = max(_tile_items(source.shape) for source in tensor_sources(question.spec))
    topics, nbytes = Topics(question.naming.site), frame_bytes(most * DTYPE_BYTES["f32"])
    return max(publish_bytes(topics.weights(device), nbytes, 1) for device in question.cluster.devices)


def _tile_items(shape: tuple[int, ...]) -> int:
    return min(shape[0], VECTOR_TILE) if len(shape) == 1 else prod(min(side, TILE) for side in shape)


def price(question: Question, plan: Plan, full: bool = False, memory: Memory | None = None) -> Price:
    """Return the price of `plan`; memory: what it needs, where that is known already.

    Not full: of equal layers one is simulated, and the others are taken to take as long; the search uses that. Full:
    all layers are simulated, and so are several requests if the question asks for their throughput.
    """
    needs, missing = memory or memory_needs(question, plan)
    runs = [_simulate_one(question, run, full) for run in plan.executables]
    load = None
    if full and question.load_requests:
        naming, spec, cluster = question.naming, question.spec, question.cluster
        request = simulated_request(naming, spec, plan, question.shape, cluster)
        load = simulate_throughput(naming, spec, request, cluster, question.in_flight, question.load_requests)
    first, use = runs[0], {device: used for run in runs for device, used in run.devices.items()}
    return Price(
        first.seconds,
        first.nbytes,
        needs,
        missing,
        use,
        question.learned.factor(plan),
        load,
        1 / sum(1 / max(_period(question.cluster, run.devices), 1e-9) for run in runs),
        {device: question.cluster.devices[device].memory_bytes for device in plan.devices},
        question.objective,
        tuple(SimulatedRequest(question.shape, run) for run in runs) if full else (),
    )


def _simulate_one(question: Question, plan: Plan, full: bool) -> Simulation:
    """Return one request under a plan without replicas; not full: with equal layers once."""
    spec, shape = question.spec, question.shape
    repeated = None if full else lower_plan(spec, plan, shape).repeated_layer
    made = device_program if full else searched_program
    parts = {}
    for device in plan.devices:
        question.pause()
        parts[device] = made(spec, plan, shape, device)
    question.pause()
    return simulate(question.naming, spec, shape, parts, question.cluster, repeated=repeated)


def _period(cluster: Cluster, use: Mapping[str, DeviceUse]) -> float:
    """Return how long the busiest device, or its link, has to do with one request."""
    return max(max(u.compute_s, u.sent_bytes / cluster.links[d].up_bytes_per_s) for d, u in use.items())
