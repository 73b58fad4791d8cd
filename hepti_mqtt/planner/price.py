"""The price of a plan: predicted time and bytes by simulation, memory needs from its Programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import inf, prod
from typing import Final, NamedTuple

from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import DevicePair, Objective, Plan, Route, WeightDtype, WireDtype
from hepti_mqtt.core.profiles import Cluster, rows_factor
from hepti_mqtt.core.program import DTYPE_BYTES
from hepti_mqtt.core.spec import RequestShape, Spec
from hepti_mqtt.cost import simulator
from hepti_mqtt.cost.loads import Mask, TileMap
from hepti_mqtt.cost.memory import (
    loading_overhead_bytes,
    max_live_bytes,
    programs_bytes,
    resident_bytes,
    tile_map_bytes,
)
from hepti_mqtt.models import largest_shape, tensor_sources, usual_product
from hepti_mqtt.planner.candidates import THOROUGH, WireErrorKey
from hepti_mqtt.planner.estimates import Corrections
from hepti_mqtt.protocol.frames import frame_bytes
from hepti_mqtt.protocol.manifest import TILE, VECTOR_TILE
from hepti_mqtt.protocol.topics import Topics, publish_bytes
from hepti_mqtt.strategies import STRATEGIES
from hepti_mqtt.strategies.plan_programs import (
    compact_programs,
    device_program,
    lower_plan,
    resident_counts,
    searched_program,
)

#: Up to this number of rows an exchange takes as long as for one row: the frame costs more than its bytes.
_FEW_ROWS: Final = 8


class Budget:
    """A limit on the processor seconds of a search, from its first check; clock: the processor seconds so far.

    The first steps of a search ignore it.
    """

    def __init__(self, seconds: float = inf, clock: Callable[[], float] = float) -> None:
        self.seconds, self._clock = seconds, clock
        self._began_s: float | None = None

    @property
    def is_spent(self) -> bool:
        """Return whether the limit is reached."""
        if self._began_s is None:
            self._began_s = self._clock()
        return self._clock() - self._began_s >= self.seconds


@dataclass(frozen=True, slots=True)
class Question:
    """The input of a search for a plan."""

    naming: simulator.TopicNames
    spec: Spec
    cluster: Cluster
    shape: RequestShape  #: the request to optimise for
    plan_version: PlanVersion
    in_flight: int = 1  #: number of concurrent requests
    strategy: str | None = None  #: pinned method, None: any
    options: Mapping[str, str] = field(default_factory=dict)  #: pinned options of the method
    devices: tuple[str, ...] | None = None  #: pinned devices, None: any
    wire: WireDtype = "f32"  #: pinned; with an accuracy budget the search chooses
    weight_dtype: WeightDtype = "f32"  #: pinned
    route: Route | None = None  #: pinned, None: any
    #: (source, target) with endpoints that cannot connect: their exchanges pass the broker.
    relayed_pairs: frozenset[DevicePair] = frozenset()
    #: Size limit of packets by device; devices without a limit are missing.
    packet_bytes: Mapping[str, int] = field(default_factory=dict)
    learned: Corrections = field(default_factory=Corrections)  #: from earlier runs
    #: Requests to simulate for the throughput of the best candidates; 0: none, unless that is the objective.
    requests: int = 0
    objective: Objective = "latency"
    #: Largest error of the answer by narrow wires, relative to f32; None: the wire is pinned.
    accuracy: float | None = None
    errors: Mapping[WireErrorKey, float] = field(default_factory=dict)  #: measured errors of the answer by narrow wires
    weight_error: float | None = None  #: measured error of the answer by narrow weights
    #: Compare the best candidate of every strategy and variant, even if it cannot be the best plan.
    is_exhaustive: bool = True
    active: Plan | None = None  #: the active plan: plans on the same devices keep its order and its root
    residents: tuple[Plan, ...] = ()  #: other plans with weights still on devices, the latest first
    coming: Plan | None = None  #: the loading plan
    budget: Budget = field(default_factory=Budget, compare=False)
    tiles: TileMap | None = field(default=None, compare=False)  #: tiles of the model's weights, None without a manifest
    cached: Mapping[str, Mask] = field(default_factory=dict, compare=False)  #: tiles in the caches of devices
    #: Called some ten times per price: a search can yield the processor there.
    pause: Callable[[], None] = field(default=lambda: None, compare=False)

    @property
    def load_requests(self) -> int:
        """Return the number of requests in a full simulation of a plan's throughput."""
        return self.requests or (simulator.ROUNDS * self.in_flight if self.objective == "throughput" else 0)


class RequestSimulation(NamedTuple):
    """One request under a plan without replicas, all its layers simulated."""

    shape: RequestShape
    simulation: simulator.Simulation


class Memory(NamedTuple):
    """Bytes that a plan needs, and bytes that are missing, by device."""

    needs: Mapping[str, int]
    missing: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Price:
    """The predicted time, bytes and memory needs of a plan."""

    seconds: float  #: of one request, by simulation
    nbytes: int  #: sent bytes of one request
    needs: Mapping[str, int]  #: memory bytes by device
    missing: Mapping[str, int]  #: memory bytes that devices lack, by device
    use: Mapping[str, simulator.DeviceUse]  #: work of one request by device
    correction: float = 1.0  #: measured over predicted time in earlier runs
    load: simulator.Throughput | None = None  #: simulated throughput, None if it was not simulated
    period_s: float = 0.0  #: least time between answers if requests are waiting, for the busiest device or link
    memory_bytes: Mapping[str, float] = field(default_factory=dict)  #: memory of each device
    objective: Objective = "latency"  #: the objective by which plans are compared
    simulated: tuple[RequestSimulation, ...] = ()  #: the request under each replica, if all layers were simulated

    @property
    def memory(self) -> Memory:
        """Return needs and missing bytes."""
        return Memory(self.needs, self.missing)

    @property
    def expected_s(self) -> float:
        """Return the simulated seconds of one request with the correction."""
        return self.seconds * self.correction

    @property
    def cost(self) -> tuple[float, float]:
        """Return the cost for comparisons, smaller is better: that of the objective, then the expected seconds."""
        costs = {"latency": self.expected_s, "throughput": self.expected_period_s, "memory": self.memory_share}
        return costs[self.objective], self.expected_s

    @property
    def expected_period_s(self) -> float:
        """Return the expected seconds between answers; a lower bound if throughput was not simulated."""
        return self.correction * (1 / self.load.requests_per_s if self.load else self.period_s)

    @property
    def memory_share(self) -> float:
        """Return the largest needed share of a device's memory, 0 without memory needs."""
        return max((n / max(self.memory_bytes[d], 1) for d, n in self.needs.items()), default=0.0)

    def joules(self, cluster: Cluster) -> float | None:
        """Return the energy of one request in joules, computing and sending; None if a device's power is unknown."""
        total = 0.0
        for device, use in self.use.items():
            if (power := cluster.devices[device].power) is None:
                return None
            total += power.compute_w * use.compute_s
            total += power.link_w * use.sent_bytes / cluster.links[device].up_bytes_per_s
        return total

    @property
    def feasible(self) -> bool:
        """Return whether every device has room for its part."""
        return not self.missing


def run_seconds(spec: Spec, plan: Plan, price: Price, cluster: Cluster, rows: int) -> float:
    """Return the predicted seconds of a run, from a price for another number of rows."""
    product, priced_rows = usual_product(spec, plan.weight_dtype), max(plan.predicted_tokens, 1)
    factor = partial(rows_factor, cluster, plan.devices, product)
    parts = TimeParts.of(price.use, price.seconds)
    return max(plan.predicted_s, 1e-9) * parts.length_factor(factor(rows) / factor(priced_rows), rows, priced_rows)


class TimeParts(NamedTuple):
    """Parts of a run's seconds, 0 to 1; the rest is exchanges."""

    products: float = 1.0  #: products with weights
    overhead: float = 0.0  #: fixed overhead of ops
    others: float = 0.0  #: other work of ops

    @classmethod
    def of(cls, use: Mapping[str, simulator.DeviceUse], seconds: float) -> TimeParts:
        """Return the parts of a run; its devices compute in turn or in parallel; use: by device."""
        computed_s = sum(one.compute_s for one in use.values())
        if not computed_s:
            return cls()
        alone = {device: min(one.alone_s, one.compute_s) for device, one in use.items()}
        busy_s = sum(alone.values()) + max(one.compute_s - alone[name] for name, one in use.items())
        part = min(busy_s / max(seconds, 1e-12), 1.0) / computed_s
        products, overhead = (part * sum(getattr(o, k) for o in use.values()) for k in ("product_s", "overhead_s"))
        return cls(products, overhead, part * computed_s - products - overhead)

    def length_factor(self, products: float, rows: int, priced_rows: int) -> float:
        """Return the factor on a run's time if it has `rows` instead of `priced_rows` rows.

        products: the factor on products, which take nearly as long for few rows as for one. Exchanges of few rows take
        as long as of one.
        """
        exchanges = 1 - sum(self)
        work = self.products * products + self.overhead + self.others * rows / priced_rows
        return work + exchanges * max(rows, _FEW_ROWS) / max(priced_rows, _FEW_ROWS)


def needed_bytes(question: Question, plan: Plan, device: str) -> int:
    """Return the resident bytes of a device under a plan, for the requests in flight of a question."""
    return peak_bytes(question.spec, plan, device, question.in_flight)


def peak_bytes(spec: Spec, plan: Plan, device: str, in_flight: int) -> int:
    """Return the peak bytes of a device under a plan: weights, Programs, slots and sessions of requests in flight.

    During the load no request runs, but incomplete blocks may take more memory than the slots.
    """
    live = max_live_bytes(spec, plan, device, in_flight)
    kept = resident_bytes(spec, plan, device) + programs_bytes(spec, plan, device) + tile_map_bytes(spec)
    return kept + max(live, loading_overhead_bytes(resident_counts(spec, plan, device)))


SINGLE: Final = next(method.name for method in STRATEGIES.values() if method.max_devices == 1)
PLENTY: Final = 2  #: memory over the bound of any plan's part with which a device has room for two plans
#: Bound of a device's part of any plan, relative to the whole model on it: received tensors and larger Programs.
MORE: Final = 1.25
MORE_BYTES: Final = 64 << 20  #: added to that bound


def memory_needs(question: Question, plan: Plan, *, exactly: bool = False) -> Memory:
    """Return the memory that a plan needs and lacks, by device.

    exactly: False: a search uses a bound for plans on many devices with plenty of memory.
    """
    many = len(plan.devices) > THOROUGH and not question.is_exhaustive and question.objective != "memory"
    if many and not exactly:
        whole, rest = _most_bytes(question.spec, question.weight_dtype, question.in_flight)
        memory = [question.cluster.devices[device].memory_bytes for device in plan.devices]
        bounds = dict.fromkeys(plan.devices, whole + rest)
        if min(memory) < PLENTY * (whole + rest):  # the weights of each part give a closer bound and take longer
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
    """Return bounds of the bytes of a device's part of any plan: weights, and everything else."""
    alone = plan_alone(storage)
    weights = resident_bytes(spec, alone, "")
    rest = peak_bytes(spec, alone, "", in_flight) - weights
    return int(MORE * weights), int(MORE * rest) + MORE_BYTES


def plan_alone(storage: WeightDtype) -> Plan:
    """Return a plan of one device, with empty names of device and model."""
    return Plan("", PlanVersion(0, 0), SINGLE, ("",), "", weight_dtype=storage)


def plan_packet(question: Question, plan: Plan) -> int:
    """Return the bytes of the largest packet to or from the broker for a request of one sequence.

    The output of a batch, or of want="hidden", may be larger: the root device refuses such a request.
    """
    shape = largest_shape(question.spec)
    parts = (compact_programs(question.spec, run, shape) for run in plan.executables)  # inner layers are alike
    return max(simulator.largest_packet_bytes(question.naming, question.spec, shape, p) for p in parts)


def packet_limit(question: Question, plan: Plan) -> int | None:
    """Return the smallest packet limit of a plan's devices, None without a limit."""
    return min((question.packet_bytes[d] for d in plan.devices if d in question.packet_bytes), default=None)


def fits_packet_limit(question: Question, plan: Plan) -> bool:
    """Return whether weights and requests of one sequence fit the packet limit."""
    limit = packet_limit(question, plan)
    return limit is None or max(tile_packet(question), plan_packet(question, plan)) <= limit


def tile_packet(question: Question) -> int:
    """Return the bytes of the largest packet with weights to a device."""
    shapes = [source.shape for source in tensor_sources(question.spec)]
    most = max(min(s[0], VECTOR_TILE) if len(s) == 1 else prod(min(side, TILE) for side in s) for s in shapes)
    topics, nbytes = Topics(question.naming.site), frame_bytes(most * DTYPE_BYTES["f32"])
    return max(publish_bytes(topics.weights(device), nbytes, 1) for device in question.cluster.devices)


def price(question: Question, plan: Plan, full: bool = False, memory: Memory | None = None) -> Price:
    """Return the price of a plan; memory: its memory, if it is already computed.

    full: simulate all layers, and several requests if the question needs throughput. Otherwise one of several equal
    layers is simulated and stands for all; the search uses that.
    """
    needs, missing = memory or memory_needs(question, plan)
    runs = [_simulate_one(question, run, full) for run in plan.executables]
    load = None
    if full and question.load_requests:
        naming, spec, cluster = question.naming, question.spec, question.cluster
        request = simulator.simulated_request(naming, spec, plan, question.shape, cluster)
        load = simulator.simulate_throughput(naming, spec, request, cluster, question.in_flight, question.load_requests)
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
        tuple(RequestSimulation(question.shape, run) for run in runs) if full else (),
    )


def _simulate_one(question: Question, plan: Plan, full: bool) -> simulator.Simulation:
    """Simulate one request under a plan without replicas; full: all layers, otherwise one of several equal layers."""
    spec, shape = question.spec, question.shape
    repeated = None if full else lower_plan(spec, plan, shape).repeated_layer
    build = device_program if full else searched_program
    parts = {}
    for device in plan.devices:
        question.pause()
        parts[device] = build(spec, plan, shape, device)
    question.pause()
    return simulator.simulate(question.naming, spec, shape, parts, question.cluster, repeated=repeated)


def _period(cluster: Cluster, use: Mapping[str, simulator.DeviceUse]) -> float:
    """Return the seconds of work of the busiest device or link for one request."""
    return max(max(u.compute_s, u.sent_bytes / cluster.links[d].up_bytes_per_s) for d, u in use.items())
