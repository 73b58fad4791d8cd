"""The plans on a device: checks and analysis of a Prepare, its memory, and the states of plans.

Any client with access to the device's topic can send a Prepare, and the memory of its Programs is known only after
they are built. So all numbers that determine the count of ops or regions are limited first.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from math import isfinite
from typing import Final, Literal, get_args

from hepti_mqtt import __version__
from hepti_mqtt.core.errors import BadNameError, PlanError, WireError
from hepti_mqtt.core.ids import PlanVersion, check_name
from hepti_mqtt.core.plan import Plan, WeightDtype, WireDtype
from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.core.recent import Recent
from hepti_mqtt.core.spec import PlainShape, RequestShape, Spec
from hepti_mqtt.cost import memory
from hepti_mqtt.kernels import Weight
from hepti_mqtt.models import largest_shape, spec_from_dict
from hepti_mqtt.protocol.keys import UNKEYED, FrameKey
from hepti_mqtt.protocol.messages import Peer, Prepare
from hepti_mqtt.protocol.plausible import MAX_REASON, check, check_spec
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.machinery import StateMachine, StateTable, TransitionLog
from hepti_mqtt.runtime.worker.executor import BoundProgram
from hepti_mqtt.strategies import STRATEGIES
from hepti_mqtt.strategies.plan_programs import programs_digest, resident_counts, resident_weights, sources_of

KEPT_SHAPES: Final = 64  # cached shapes: most decoding steps have the same shape


def check_prepare(
    device: str, plan: Plan, spec: Spec, shapes: Iterable[PlainShape], in_flight: int
) -> list[RequestShape]:
    """Return the distinct shapes; raises PlanError, with the field's name, if no planner would send this Prepare."""
    check_plan(device, plan)
    try:
        check_spec(spec.to_dict())
    except ValueError as error:
        raise PlanError(f"Invalid plan: {error}") from error
    _check_number("in_flight", in_flight)
    return list(dict.fromkeys(shape_of(spec, plain) for plain in shapes))


@lru_cache(maxsize=KEPT_SHAPES)
def shape_of(spec: Spec, plain: PlainShape) -> RequestShape:
    """Return the shape of the Program for a request.

    Raises PlanError if the family has no such shape, or it is larger than the largest run.
    """
    largest = largest_shape(spec)
    if plain.size > largest.size:
        raise _wrong("shape", plain.size, f"tokens or rows exceed the limit of {largest.size} in a run")
    if plain.session_rows > largest.session_rows:
        raise _wrong("shape", plain.session_rows, f"rows of a cache exceed the limit of {largest.session_rows}")
    try:
        return spec.input_spec.program_shape(spec.input_spec.shape_of(plain))
    except ValueError as error:
        raise _wrong("shape", plain.size, f"is not valid for {spec.architecture}: {error}") from error


def check_plan(device: str, plan: Plan) -> None:
    """Raise PlanError, with the field's name, if no planner would send this plan to a device."""
    devices = plan.devices
    _check_number("plan.devices", len(devices))
    if len(set(devices)) < len(devices):
        raise _wrong("devices", list(devices), "are not distinct")
    try:
        for name in devices:
            check_name("device", name)
    except BadNameError as error:
        raise PlanError(f"Invalid plan: {error}") from error
    if device not in devices or plan.root not in devices:
        raise _wrong("devices", list(devices), f"do not include {device if device not in devices else plan.root}")
    if plan.strategy not in STRATEGIES or not STRATEGIES[plan.strategy].accepts(plan.options):
        raise _wrong("strategy", plan.strategy, f"with options {plan.options} is unknown; update agent or planner")
    if STRATEGIES[plan.strategy].groups is not None or plan.replicas:
        raise _wrong("strategy", plan.strategy, "has replicas; a device receives only its own replica")
    if plan.wire not in get_args(WireDtype) or plan.weight_dtype not in get_args(WeightDtype):
        raise _wrong("wire and storage", (plan.wire, plan.weight_dtype), "are unknown; update agent or planner")
    for kind, weights in plan.shares.items():
        if len(weights) != len(devices):
            raise _wrong(f"weights {kind}", weights, "are not one for each device")
        for weight in weights:
            _check_number("plan.share", weight)
    for kind, ranges in plan.ranges.items():
        if len(ranges) != len(devices) or any(start > stop for start, stop in ranges):
            raise _wrong(f"ranges {kind}", ranges, "are not one for each device")
        for end in (end for both in ranges for end in both):
            _check_number("plan.range", end)
    for layout, rows in plan.layouts.items():
        if layout not in STRATEGIES[plan.strategy].layouts:
            raise _wrong("layouts", layout, f"is unknown for {plan.strategy}; update agent or planner")
        _check_number("plan.range", rows)
    errors = (plan.wire_error or 0.0, plan.weight_error or 0.0)
    numbers = (plan.predicted_s, plan.predicted_bytes, plan.predicted_tokens, *errors)
    if not all(isinstance(number, int | float) and isfinite(number) for number in numbers):
        raise _wrong("prediction", numbers, "contains a value that is not a finite number")
    if not isinstance(plan.reason, str) or len(plan.reason) > MAX_REASON:
        raise _wrong("reason", plan.reason, f"is not a text of at most {MAX_REASON} characters")


def _check_number(rule: str, value: object) -> None:
    try:
        check(rule, value)
    except ValueError as error:
        raise _wrong(rule, value, str(error)) from error


def _wrong(name: str, value: object, why: str) -> PlanError:
    return PlanError(f"Invalid plan: {name} {str(value)[:80]} {why}")


# ----------------------------------------------------------------------------------------------------------------------
# The resident plan of a Prepare, and the memory of several plans.


ResidentState = Literal["asked", "loading", "subscribing", "ready", "active", "doubted", "released"]
Place = tuple[bytes, WeightRef]  # of a resident matrix: the digest of its manifest, and its range


@dataclass(frozen=True, slots=True)
class Continuation:
    """The rest of a run that began under the plan `before`, from a block on, under the plan `after`."""

    shape: RequestShape
    before: Plan = field(compare=False)
    after: Plan = field(compare=False)
    block: int
    versions: tuple[PlanVersion, PlanVersion] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "versions", (self.before.version, self.after.version))


ProgramKey = RequestShape | Continuation  # identifies a Program under a plan


@dataclass(slots=True)
class ResidentPlan:
    """A plan on a device, ready when it is `loaded` and `subscribed`."""

    plan: Plan
    spec: Spec
    transaction_id: int  #: of the last Prepare
    manifest: bytes  #: digest of the manifest
    refs: tuple[WeightRef, ...]
    working_bytes: int  #: buffers and sessions of all concurrent runs
    in_flight: int  #: limit of concurrent runs
    loading_bytes: int  #: additional memory while the weights load
    programs_bytes: int  #: memory of the cached Programs
    sources: tuple[str, ...]  #: devices that send frames to this one
    filters: tuple[str, ...]  #: filters of frames that the broker relays
    work_topic: str
    digest: bytes
    urgent_shapes: deque[RequestShape]  #: shapes to build next
    prebuild_shapes: deque[RequestShape]  #: shapes to build while idle
    mesh_sources: tuple[Peer, ...] = ()  #: peers that send frames directly
    frame_key: FrameKey = UNKEYED  #: key of all frames of the plan
    #: Resident range that each range is a view of.
    matrices: Mapping[WeightRef, WeightRef] = field(default_factory=dict)
    weights: Mapping[WeightRef, Weight] | None = None
    loaded: bool = False  #: weights and urgent Programs are resident
    filters_acknowledged: bool = False
    subscribed: bool = False  #: filters are acknowledged, and peers are joined
    programs: Recent[ProgramKey, BoundProgram] = field(default_factory=lambda: Recent(memory.KEPT_PROGRAMS))
    state: ResidentState = "asked"  #: changed only by `ResidentPlans`

    @property
    def key(self) -> tuple[str, PlanVersion]:
        """Return the model and the plan version."""
        return (self.plan.model, self.plan.version)

    @property
    def session_rows(self) -> int:
        """Return the room of all sessions, in rows."""
        return memory.session_rows(self.spec, self.in_flight)

    @property
    def layout(self) -> bytes:
        """Return a hash of everything that KV caches depend on: weights, division and the version of Hepti."""
        plan = replace(self.plan.division, route="broker", relayed_pairs=())
        parts = json.dumps([plan.to_dict(), self.spec.to_dict(), __version__], sort_keys=True).encode()
        return sha256(b"".join((self.manifest, self.digest, parts))).digest()

    @property
    def places(self) -> dict[Place, None]:
        """Return the places of its weights."""
        return dict.fromkeys((self.manifest, matrix) for matrix in self.matrices.values())

    @property
    def ready(self) -> bool:
        """Return whether runs can start under the plan."""
        return self.loaded and self.subscribed and self.state != "released"

    def request_program(self, shape: RequestShape | None) -> None:
        """Queue the Program of a shape that a run needs soon, unless it is cached."""
        if shape is not None and shape not in self.programs and shape not in self.urgent_shapes:
            self.urgent_shapes.append(shape)


def plan_key(message: Prepare) -> tuple[str, PlanVersion]:
    """Return the model and the plan version of a Prepare; raises WireError if the plan is invalid."""
    try:
        plan, _ = Plan.from_dict(message.plan), spec_from_dict(message.spec)
    except (KeyError, TypeError, ValueError) as exc:
        raise _unreadable(message, exc) from exc
    return plan.model, plan.version


def _unreadable(message: Prepare, error: Exception) -> WireError:
    return WireError(f"prepare {message.transaction_id}: the plan cannot be read ({error!r}); update agent or planner")


def analyse_prepare(message: Prepare, device: str, topics: Topics) -> ResidentPlan:
    """Return the resident plan of a Prepare; raises WireError or PlanError if it is invalid."""
    try:
        plan, spec = Plan.from_dict(message.plan), spec_from_dict(message.spec)
        shapes = check_prepare(device, plan, spec, message.shapes, message.in_flight)
        refs = resident_weights(spec, plan, device)
        live = memory.max_live_bytes(spec, plan, device, message.in_flight)
        programs = memory.programs_bytes(spec, plan, device)
        sources, digest = tuple(sorted(sources_of(spec, plan, device))), programs_digest(spec, plan)
        filters, peers = _routes(message, plan, device, sources, topics)
    except (KeyError, TypeError, ValueError) as exc:
        raise _unreadable(message, exc) from exc
    return ResidentPlan(
        plan=plan,
        spec=spec,
        transaction_id=message.transaction_id,
        manifest=message.manifest,
        refs=refs,
        working_bytes=live,
        in_flight=message.in_flight,
        loading_bytes=memory.loading_overhead_bytes(resident_counts(spec, plan, device)),
        programs_bytes=programs,
        sources=sources,
        filters=filters,
        work_topic=topics.work(plan.model, plan.devices[0]),
        digest=digest,
        urgent_shapes=deque(shapes[: message.build_first]),
        prebuild_shapes=deque(shapes[message.build_first :]),
        mesh_sources=peers,
        frame_key=FrameKey(message.key, message.checked),
    )


def renewed(ended: ResidentPlan, message: Prepare, device: str, topics: Topics) -> ResidentPlan | None:
    """Return the resident plan of a Prepare with weights and Programs of an ended plan; None if the plans differ.

    None also for an invalid Prepare, which `analyse_prepare` reports.
    """
    try:
        plan, spec = Plan.from_dict(message.plan), spec_from_dict(message.spec)
        is_same = plan.division == ended.plan.division and (spec, message.manifest) == (ended.spec, ended.manifest)
        if not is_same or message.in_flight != ended.in_flight:
            return None
        shapes = check_prepare(device, plan, spec, message.shapes, message.in_flight)
        filters, peers = _routes(message, plan, device, ended.sources, topics)
    except (KeyError, TypeError, ValueError, PlanError, WireError):
        return None
    programs = Recent[ProgramKey, BoundProgram](memory.KEPT_PROGRAMS)
    programs.update((shape, bound.renewed()) for shape, bound in ended.programs.items())
    return replace(
        ended,
        plan=plan,
        transaction_id=message.transaction_id,
        filters=filters,
        mesh_sources=peers,
        frame_key=FrameKey(message.key, message.checked),
        urgent_shapes=deque(shape for shape in shapes[: message.build_first] if shape not in ended.programs),
        prebuild_shapes=deque(shape for shape in shapes[message.build_first :] if shape not in ended.programs),
        programs=programs,
        loaded=False,
        filters_acknowledged=False,
        subscribed=False,
        state="asked",
    )


def _routes(
    message: Prepare, plan: Plan, device: str, sources: Iterable[str], topics: Topics
) -> tuple[tuple[str, ...], tuple[Peer, ...]]:
    """Return the filters of frames that the broker relays, and the peers that send frames directly."""
    peers = {peer.device: peer for peer in message.peers if peer.token_out}
    direct = [source for source in sources if plan.route == "mesh" and (source, device) not in plan.relayed_pairs]
    relayed = [source for source in sources if source not in direct]
    filters = sorted(f for source in relayed for f in topics.activations_from(plan.model, source, device))
    return tuple(filters), tuple(peers[source] for source in direct)


def resident_bytes(residents: Iterable[ResidentPlan]) -> int:
    """Return the memory of several plans: plans of one model share matrices, and run one after another.

    Each plan has its own Programs. Loads run one after another, next to runs of the loaded plans.
    """
    places: set[Place] = set()
    live: dict[str, int] = {}
    running: dict[str, int] = {}
    loading, programs, maps = 0, 0, dict[str, int]()
    for r in residents:
        programs += r.programs_bytes
        model = r.plan.model
        places.update(r.places)
        maps[model] = memory.tile_map_bytes(r.spec)
        live[model] = max(live.get(model, 0), r.working_bytes)
        if r.weights is None:
            loading = max(loading, r.loading_bytes)
        else:
            running[model] = max(running.get(model, 0), r.working_bytes)
    working = max(sum(live.values()), sum(running.values()) + loading)
    return places_bytes(places) + programs + sum(maps.values()) + working


def places_bytes(places: Iterable[Place]) -> int:
    """Return the bytes of resident matrices."""
    return sum(memory.weights_bytes([matrix]) for _, matrix in places)


# ----------------------------------------------------------------------------------------------------------------------
# The states of a plan on a device, from the planner's Prepare to its release.
#
#     asked -> loading or subscribing -> ready -> active -> released
#
# A plan is `loading` if only weights or urgent Programs are missing, `subscribing` if only filters are missing.
#
# After a reconnection the device cannot know whether the planner released its plans (it may have received this
# device's will) or still uses them. They stay `doubted` until a run or an Activate confirms them, a newer plan of the
# model is activated, or their memory is needed. The device reports the release of a doubted plan.


# Share of a device's memory below which a plan may use parts of larger resident matrices. Above it, the plan loads its
# own ranges, so that the larger matrices can go and other plans have room.
ROOMY: Final = 0.5
KEPT_ENDED: Final = 8  # ended plans with kept Programs

PlanKey = tuple[str, PlanVersion]
EndEvent = Literal[
    "release",
    "drain",
    "failed",  # to load or to subscribe
    "planner lost",  # another planner has replaced it
    "outlived",  # doubted, and a newer plan of the model is active
    "memory",  # doubted, and another plan needs its memory
]
ResidentEvent = Literal["prepare", "loaded", "subscribed", "activate", "request", "doubt"] | EndEvent

_END: Final[dict[ResidentEvent, ResidentState]] = {
    "release": "released",
    "drain": "released",
    "failed": "released",
    "planner lost": "released",
}
# An abandoned load may end when its plan version is resident again, so weights may be loaded more than once.
RESIDENT_STATES: Final[StateTable[ResidentState, ResidentEvent]] = StateTable(
    name="plan on a device",
    states=get_args(ResidentState),
    first=("prepare", "asked"),
    steps={
        "asked": {"loaded": "subscribing", "subscribed": "loading", "doubt": "doubted", **_END},
        "loading": {"loaded": "ready", "doubt": "doubted", **_END},
        "subscribing": {"subscribed": "ready", "loaded": "subscribing", "doubt": "doubted", **_END},
        "ready": {"activate": "active", "request": "active", "loaded": "ready", "doubt": "doubted", **_END},
        "active": {"activate": "active", "loaded": "active", "doubt": "doubted", **_END},
        "doubted": {
            "loaded": "doubted",
            "subscribed": "doubted",
            "doubt": "doubted",
            "activate": "active",
            "request": "active",
            "outlived": "released",
            "memory": "released",
            **_END,
        },
        "released": {},
    },
    safe=dict.fromkeys(get_args(ResidentState), "released"),  # the planner repeats the Prepare, or retries runs
)


class ResidentPlans:
    """The plans of every model on this device, and the only writer of their states."""

    def __init__(self, device: str, counters: Counter[str]) -> None:
        self._device = device
        self.story = TransitionLog(f"plans of {device}")
        self._machine = StateMachine(RESIDENT_STATES, self.story, counters)
        self._residents: dict[PlanKey, ResidentPlan] = {}
        self._released: list[ResidentPlan] = []
        self._unused: dict[Place, None] = {}  # resident matrices of ended plans, least recently used first
        self._ended: list[ResidentPlan] = []  # ended plans with resident weights and Programs, oldest first
        self.spare_bytes = 0  #: unused memory at the last call of `keep`

    def __iter__(self) -> Iterator[PlanKey]:
        return iter(self._residents)

    def __contains__(self, key: PlanKey) -> bool:
        return key in self._residents

    def get(self, model: str, plan_version: PlanVersion) -> ResidentPlan | None:
        """Return a resident plan, None if it is not resident."""
        return self._residents.get((model, plan_version))

    def add(self, resident: ResidentPlan, now: float) -> None:
        """Add a plan in its first state."""
        resident.state = self._machine.begin(_subject(resident), now)
        self._residents[resident.key] = resident

    def step(self, resident: ResidentPlan, event: ResidentEvent, now: float, why: str = "") -> None:
        """Take a plan through one step of the table."""
        resident.state = self._machine.step(_subject(resident), resident.state, event, now, why)
        if resident.state == "released" and self._residents.pop(resident.key, None) is not None:
            self._released.append(resident)
            for place in resident.places if resident.weights is not None else ():
                self._unused.pop(place, None)
                self._unused[place] = None
            if resident.weights is not None:
                self._ended = [*self._ended[1 - KEPT_ENDED :], resident]

    def step_all(self, keys: Iterable[PlanKey], event: ResidentEvent, now: float, why: str = "") -> None:
        """Take each of these plans, if resident, through one step."""
        for key in list(keys):
            if key in self._residents:
                self.step(self._residents[key], event, now, why)

    def unconfirmed(self, model: str | None = None, before: PlanVersion | None = None) -> list[PlanKey]:
        """Return the doubted plans, oldest first; optionally of one model, and before a version."""
        doubted = (k for k, r in self._residents.items() if r.state == "doubted" and model in (None, k[0]))
        return sorted((k for k in doubted if before is None or k[1] < before), key=lambda k: k[1])

    def take_released(self) -> list[ResidentPlan]:
        """Return the plans that were released since the last call."""
        released, self._released = self._released, []
        return released

    def take_ended(self, message: Prepare, topics: Topics, memory_bytes: int) -> ResidentPlan | None:
        """Return the plan of a Prepare, renewed from an ended plan; None if no ended plan is the same and fits."""
        for ended in reversed(self._ended):
            resident = renewed(ended, message, self._device, topics)
            if resident is not None and self.needed_bytes(resident) <= memory_bytes:
                self._ended.remove(ended)
                return resident
        return None

    def place(self, resident: ResidentPlan, memory_bytes: int) -> None:
        """Assign the weights of a plan to resident matrices, or to its own ones if memory is short."""
        held = [matrix for manifest, matrix in {**self._used(), **self._unused} if manifest == resident.manifest]
        own = memory.matrices(resident.refs)
        resident.matrices = own
        own_bytes = self.needed_bytes(resident)
        resident.matrices = memory.matrices(resident.refs, held)
        if self.needed_bytes(resident) > ROOMY * memory_bytes and own_bytes <= memory_bytes:
            resident.matrices = own

    def keep(self, memory_bytes: int) -> frozenset[Place]:
        """Return the matrices that stay resident: used ones, and recently used ones that fit.

        Programs of ended plans go with the first of their matrices, or if they do not fit.
        """
        used = self._used()
        room = memory_bytes - self.needed_bytes()
        for place in [p for p in reversed(self._unused) if p not in used]:
            room -= places_bytes([place])
            if room < 0:
                del self._unused[place]
        kept, ended = {**used, **self._unused}, list[ResidentPlan]()
        for resident in reversed(self._ended):
            if room >= resident.programs_bytes and resident.places.keys() <= kept.keys():
                room -= resident.programs_bytes
                ended.insert(0, resident)
        self._ended = ended
        self.spare_bytes = max(room, 0)
        return frozenset(kept)

    def _used(self) -> dict[Place, None]:
        return {place: None for r in self._residents.values() for place in r.places}

    def needed_bytes(self, *more: ResidentPlan) -> int:
        """Return the memory of all resident plans and these."""
        return resident_bytes([*self._residents.values(), *more])

    def residents(self) -> list[ResidentPlan]:
        """Return the resident plans in order of arrival."""
        return list(self._residents.values())

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        assert not self._released
        for resident in self._residents.values():
            flags = (resident.loaded, resident.subscribed)
            assert resident.state == "doubted" or flags == _FLAGS[resident.state]


_FLAGS: Final[dict[ResidentState, tuple[bool, bool]]] = {
    "asked": (False, False),
    "loading": (False, True),
    "subscribing": (True, False),
    "ready": (True, True),
    "active": (True, True),
}


def _subject(resident: ResidentPlan) -> str:
    return f"{resident.plan.model} {resident.plan.version}"
