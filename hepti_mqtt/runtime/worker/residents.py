"""The plans on a device: how a Prepare is checked and analysed, the memory it needs, and its states.

Any client that may publish to the device's topic can send a Prepare, and the memory of its Programs is known only once
they are built. So every number that the count of ops or regions grows with is bounded first.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from math import isfinite
from typing import Final, Literal, get_args

from hepti_mqtt import __version__
from hepti_mqtt.cost.memory import (
    KEPT_PROGRAMS,
    loading_overhead_bytes,
    matrices,
    max_live_bytes,
    programs_bytes,
    session_rows,
    tile_map_bytes,
    weights_bytes,
)
from hepti_mqtt.errors import BadNameError, PlanError, WireError
from hepti_mqtt.ids import PlanVersion, check_name
from hepti_mqtt.kernels import Weight
from hepti_mqtt.models import largest_shape, spec_from_dict
from hepti_mqtt.plan import Plan, WeightDtype, WireDtype
from hepti_mqtt.plan_programs import programs_digest, resident_counts, resident_weights, sources_of
from hepti_mqtt.program import WeightRef
from hepti_mqtt.protocol.keys import UNKEYED, FrameKey
from hepti_mqtt.protocol.messages import Peer, Prepare
from hepti_mqtt.protocol.plausible import MAX_REASON, check, check_spec
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.machinery import StateMachine, StateTable, TransitionLog
from hepti_mqtt.runtime.worker.executor import BoundProgram
from hepti_mqtt.spec import PlainShape, RequestShape, Spec
from hepti_mqtt.strategies import STRATEGIES

KEPT_SHAPES: Final = 64  # most tokens of a text have the shape of the one before


def check_prepare(
    device: str, plan: Plan, spec: Spec, shapes: Iterable[PlainShape], in_flight: int
) -> list[RequestShape]:
    """Return the different shapes; raises PlanError, which names the field, for what no planner asks for."""
    check_plan(device, plan)
    try:
        check_spec(spec.to_dict())
    except ValueError as error:
        raise PlanError(f"Invalid plan: {error}") from error
    _check_number("in_flight", in_flight)
    return list(dict.fromkeys(shape_of(spec, plain) for plain in shapes))


@lru_cache(maxsize=KEPT_SHAPES)
def shape_of(spec: Spec, plain: PlainShape) -> RequestShape:
    """Return the shape of the Program that computes a request.

    Raises PlanError for a shape that is none of the family's, or larger than the plan was made for.
    """
    largest = largest_shape(spec)
    if plain.size > largest.size:
        raise _wrong("shape", plain.size, f"tokens or rows are more than the {largest.size} that a run has at the most")
    if plain.session_rows > largest.session_rows:
        raise _wrong("shape", plain.session_rows, f"rows of a cache are more than {largest.session_rows}")
    try:
        return spec.input_spec.program_shape(spec.input_spec.shape_of(plain))
    except ValueError as error:
        raise _wrong("shape", plain.size, f"is not valid for {spec.architecture}: {error}") from error


def check_plan(device: str, plan: Plan) -> None:
    """Raise PlanError, which names the field, for a plan that no planner makes for a device."""
    devices = plan.devices
    _check_number("plan.devices", len(devices))
    if len(set(devices)) < len(devices):
        raise _wrong("devices", list(devices), "are not different ones")
    try:
        for name in devices:
            check_name("device", name)
    except BadNameError as error:
        raise PlanError(f"Invalid plan: {error}") from error
    if device not in devices or plan.root not in devices:
        raise _wrong("devices", list(devices), f"are without {device if device not in devices else plan.root}")
    if plan.strategy not in STRATEGIES or not STRATEGIES[plan.strategy].accepts(plan.options):
        raise _wrong(
            "strategy", plan.strategy, f"with options {plan.options} is not known here; update agent or planner"
        )
    if STRATEGIES[plan.strategy].groups is not None or plan.replicas:
        raise _wrong("strategy", plan.strategy, "is of several plans side by side; a device is told its own alone")
    if plan.wire not in get_args(WireDtype) or plan.weight_dtype not in get_args(WeightDtype):
        raise _wrong("wire and storage", (plan.wire, plan.weight_dtype), "are not known here; update agent or planner")
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
            raise _wrong("layouts", layout, f"is none of {plan.strategy} known here; update agent or planner")
        _check_number("plan.range", rows)
    moved = (plan.wire_error or 0.0, plan.weight_error or 0.0)
    numbers = (plan.predicted_s, plan.predicted_bytes, plan.predicted_tokens, *moved)
    if not all(isinstance(number, int | float) and isfinite(number) for number in numbers):
        raise _wrong("prediction", numbers, "is not of numbers")
    if not isinstance(plan.reason, str) or len(plan.reason) > MAX_REASON:
        raise _wrong("reason", plan.reason, f"is not a text of at most {MAX_REASON} characters")


def _check_number(rule: str, value: object, name: str = "") -> None:
    try:
        check(rule, value)
    except ValueError as error:
        raise _wrong(name or rule, value, str(error)) from error


def _wrong(name: str, value: object, why: str) -> PlanError:
    return PlanError(f"Invalid plan: {name} {str(value)[:80]} {why}")


# ----------------------------------------------------------------------------------------------------------------------
# What one device keeps for one plan: read from its Prepare, and what several plans need side by side.


ResidentState = Literal["asked", "loading", "subscribing", "ready", "active", "doubted", "released"]


Place = tuple[bytes, WeightRef]  # of a resident matrix: the digest of its manifest, and its range


@dataclass(frozen=True, slots=True)
class Continuation:
    """The rest of a run of a shape that began under the plan `before`, from a block on, under the plan `after`.

    versions: of both plans.
    """

    shape: RequestShape
    before: Plan = field(compare=False)
    after: Plan = field(compare=False)
    block: int
    versions: tuple[PlanVersion, PlanVersion] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "versions", (self.before.version, self.after.version))


ProgramKey = RequestShape | Continuation  # what a device has a Program for, under a plan


@dataclass(slots=True)
class ResidentPlan:
    """A plan on a device, ready when it is `loaded` and its filters are `subscribed`.

    manifest: its digest. matrices: of each weight range the resident one of which it is a view.
    transaction_id: of the last Prepare. working_bytes: buffers and sessions of all runs in flight. loading_bytes:
    beside the weights while they load. in_flight: runs at once. programs_bytes: of the cached Programs.
    sources: devices that it hears. urgent_shapes, prebuild_shapes: shapes whose Programs are to be built;
    `prebuild_shapes` only while idle. mesh_sources: peers whose frames come directly; the filters are for the others.
    loaded: with the urgent Programs. subscribed: the filters are acknowledged and the peers were joined. programs: by
    what they are for, least recently used first. state: changed by `ResidentPlans` only. frame_key: of all frames of
    the plan.
    """

    plan: Plan
    spec: Spec
    transaction_id: int
    manifest: bytes
    refs: tuple[WeightRef, ...]
    working_bytes: int
    in_flight: int
    loading_bytes: int
    programs_bytes: int
    sources: tuple[str, ...]
    filters: tuple[str, ...]
    work_topic: str
    digest: bytes
    urgent_shapes: deque[RequestShape]
    prebuild_shapes: deque[RequestShape]
    mesh_sources: tuple[Peer, ...] = ()
    frame_key: FrameKey = UNKEYED
    matrices: Mapping[WeightRef, WeightRef] = field(default_factory=dict)
    weights: Mapping[WeightRef, Weight] | None = None
    loaded: bool = False
    filters_acknowledged: bool = False
    subscribed: bool = False
    programs: OrderedDict[ProgramKey, BoundProgram] = field(default_factory=OrderedDict)
    state: ResidentState = "asked"

    @property
    def key(self) -> tuple[str, PlanVersion]:
        """Return the model and the plan version."""
        return (self.plan.model, self.plan.version)

    @property
    def session_rows(self) -> int:
        """Return how many rows all sessions may have together."""
        return session_rows(self.spec, self.in_flight)

    @property
    def layout(self) -> bytes:
        """Return a hash of what the rows of a KV cache depend on: weights, division and this version of Hepti."""
        plan = replace(self.plan.division, route="broker", relayed_pairs=())
        parts = json.dumps([plan.to_dict(), self.spec.to_dict(), __version__], sort_keys=True).encode()
        return sha256(b"".join((self.manifest, self.digest, parts))).digest()

    @property
    def places(self) -> dict[Place, None]:
        """Return where its weights are resident."""
        return dict.fromkeys((self.manifest, matrix) for matrix in self.matrices.values())

    @property
    def ready(self) -> bool:
        """Return whether requests can run under the plan."""
        return self.loaded and self.subscribed and self.state != "released"

    def cache_program(self, shape: ProgramKey, bound: BoundProgram) -> None:
        """Keep a Program for the next request of its shape, in place of the one used longest ago."""
        self.programs[shape] = bound
        while len(self.programs) > KEPT_PROGRAMS:
            self.programs.popitem(last=False)

    def request_program(self, shape: RequestShape | None) -> None:
        """A run of this shape comes soon, so its Program is built if it is not there."""
        if shape is not None and shape not in self.programs and shape not in self.urgent_shapes:
            self.urgent_shapes.append(shape)


def plan_key(message: Prepare) -> tuple[str, PlanVersion]:
    """Return the model and the plan version of a Prepare; raises WireError for a plan that cannot be read."""
    try:
        plan, _ = Plan.from_dict(message.plan), spec_from_dict(message.spec)
    except (KeyError, TypeError, ValueError) as exc:
        raise _unreadable(message, exc) from exc
    return plan.model, plan.version


def _unreadable(message: Prepare, error: Exception) -> WireError:
    return WireError(f"prepare {message.transaction_id}: the plan cannot be read ({error!r}); update agent or planner")


def analyse_prepare(message: Prepare, device: str, topics: Topics) -> ResidentPlan:
    """Return what a device will keep for a Prepare; raises WireError, PlanError for one that cannot be."""
    try:
        plan, spec = Plan.from_dict(message.plan), spec_from_dict(message.spec)
        shapes = check_prepare(device, plan, spec, message.shapes, message.in_flight)
        refs = resident_weights(spec, plan, device)
        live = max_live_bytes(spec, plan, device, message.in_flight)
        programs = programs_bytes(spec, plan, device)
        sources, digest = tuple(sorted(sources_of(spec, plan, device))), programs_digest(spec, plan)
        filters, heard = _ways(message, plan, device, sources, topics)
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
        loading_bytes=loading_overhead_bytes(resident_counts(spec, plan, device)),
        programs_bytes=programs,
        sources=sources,
        filters=filters,
        work_topic=topics.work(plan.model, plan.devices[0]),
        digest=digest,
        urgent_shapes=deque(shapes[: message.build_first]),
        prebuild_shapes=deque(shapes[message.build_first :]),
        mesh_sources=heard,
        frame_key=FrameKey(message.key, message.checked),
    )


def renewed(ended: ResidentPlan, message: Prepare, device: str, topics: Topics) -> ResidentPlan | None:
    """Return what a device keeps for a Prepare of a plan that has ended here, None if it is of another one.

    Weights and Programs go over to it. What is wrong with the Prepare is for `analyse_prepare` to say.
    """
    try:
        plan, spec = Plan.from_dict(message.plan), spec_from_dict(message.spec)
        alike = plan.division == ended.plan.division and (spec, message.manifest) == (ended.spec, ended.manifest)
        if not alike or message.in_flight != ended.in_flight:
            return None
        shapes = check_prepare(device, plan, spec, message.shapes, message.in_flight)
        filters, heard = _ways(message, plan, device, ended.sources, topics)
    except (KeyError, TypeError, ValueError, PlanError, WireError):
        return None
    return replace(
        ended,
        plan=plan,
        transaction_id=message.transaction_id,
        filters=filters,
        mesh_sources=heard,
        frame_key=FrameKey(message.key, message.checked),
        urgent_shapes=deque(shape for shape in shapes[: message.build_first] if shape not in ended.programs),
        prebuild_shapes=deque(shape for shape in shapes[message.build_first :] if shape not in ended.programs),
        programs=OrderedDict((shape, bound.renewed()) for shape, bound in ended.programs.items()),
        loaded=False,
        filters_acknowledged=False,
        subscribed=False,
        state="asked",
    )


def _ways(
    message: Prepare, plan: Plan, device: str, sources: Iterable[str], topics: Topics
) -> tuple[tuple[str, ...], tuple[Peer, ...]]:
    """Return the filters of what comes over the broker, and the peers whose frames come directly."""
    told = {peer.device: peer for peer in message.peers if peer.token_out}
    heard = tuple(
        told[source] for source in sources if plan.route == "mesh" and (source, device) not in plan.relayed_pairs
    )
    relayed = [source for source in sources if source not in {peer.device for peer in heard}]
    return tuple(sorted(f for s in relayed for f in topics.activations_from(plan.model, s, device))), heard


def resident_bytes(residents: Iterable[ResidentPlan]) -> int:
    """Return what plans need side by side: those of one model share matrices, and run one after the other.

    Each has Programs of its own. Loads run one after the other too, beside the plans that are loaded already.
    """
    places: set[Place] = set()
    live: dict[str, int] = {}
    running: dict[str, int] = {}
    loading, programs, maps = 0, 0, dict[str, int]()
    for r in residents:
        programs += r.programs_bytes
        model = r.plan.model
        places.update(r.places)
        maps[model] = tile_map_bytes(r.spec)
        live[model] = max(live.get(model, 0), r.working_bytes)
        if r.weights is None:
            loading = max(loading, r.loading_bytes)
        else:
            running[model] = max(running.get(model, 0), r.working_bytes)
    beside = max(sum(live.values()), sum(running.values()) + loading)
    return places_bytes(places) + programs + sum(maps.values()) + beside


def places_bytes(places: Iterable[Place]) -> int:
    """Return the bytes of resident matrices."""
    return sum(weights_bytes([matrix]) for _, matrix in places)


# ----------------------------------------------------------------------------------------------------------------------
# The states of a plan on a device, from the planner's Prepare to its release.
#
#     asked -> loading or subscribing -> ready -> active -> released
#
# A plan is `loading` when only its weights or its urgent Programs are missing, `subscribing` when only its filters are.
#
# After a reconnection the device cannot know whether the planner has released its plans (it may have received this
# device's will) or still uses them. They stay `doubted` until a request or an Activate confirms them, a newer plan of
# the model is activated, or their memory is needed. The planner hears when one is dropped.


# Of a device's memory: what its plans may take together if some use parts of larger matrices, the rest of which only
# stays for them; else ranges are loaded again, so that there is room for other plans.
ROOMY: Final = 0.5
KEPT_ENDED: Final = 8  # plans that have ended of which Programs are kept

PlanKey = tuple[str, PlanVersion]
EndEvent = Literal[
    "release",
    "drain",
    "failed",  # to load or to subscribe
    "planner lost",  # another one has taken its place
    "outlived",  # in doubt, and a newer plan of the model is active
    "memory",  # in doubt, and another plan needs its memory
]
ResidentEvent = Literal["prepare", "loaded", "subscribed", "activate", "request", "doubt"] | EndEvent

_END: Final[dict[ResidentEvent, ResidentState]] = {
    "release": "released",
    "drain": "released",
    "failed": "released",
    "planner lost": "released",
}
# A load that was given up may end after all when its plan version is here again, so weights may come more than once.
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
    safe=dict.fromkeys(get_args(ResidentState), "released"),  # the planner asks again, or issues its runs again
)


class ResidentPlans:
    """The plans of every model on this device, and the only place where their states change."""

    def __init__(self, device: str, counters: Counter[str]) -> None:
        self._device = device
        self.story = TransitionLog(f"epochs of {device}")
        self._machine = StateMachine(RESIDENT_STATES, self.story, counters)
        self._residents: dict[PlanKey, ResidentPlan] = {}
        self._released: list[ResidentPlan] = []
        self._left: dict[Place, None] = {}  # resident matrices of plans that have ended, the last one used last
        self._ended: list[ResidentPlan] = []  # whose weights and Programs are still here, the last one last
        self.spare_bytes = 0  #: of memory that nothing used when `keep` was last called

    def __len__(self) -> int:
        return len(self._residents)

    def __iter__(self) -> Iterator[PlanKey]:
        return iter(self._residents)

    def __contains__(self, key: PlanKey) -> bool:
        return key in self._residents

    def get(self, model: str, plan_version: PlanVersion) -> ResidentPlan | None:
        """Return a plan that is here, None if it is not."""
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
                self._left.pop(place, None)
                self._left[place] = None
            if resident.weights is not None:
                self._ended = [*self._ended[1 - KEPT_ENDED :], resident]

    def end(self, keys: Iterable[PlanKey], event: EndEvent, now: float, why: str = "") -> None:
        """Take each of these plans that is here through one step."""
        for key in list(keys):
            if key in self._residents:
                self.step(self._residents[key], event, now, why)

    def mark_all_unconfirmed(self, now: float, why: str) -> None:
        """Doubt every plan: the planner may have released it unnoticed."""
        for resident in list(self._residents.values()):
            self.step(resident, "doubt", now, why)

    def unconfirmed(self, model: str | None = None, before: PlanVersion | None = None) -> list[PlanKey]:
        """Return the doubted plans, oldest first; only those of a model, only those before a version."""
        found = (k for k, r in self._residents.items() if r.state == "doubted" and model in (None, k[0]))
        return sorted((k for k in found if before is None or k[1] < before), key=lambda k: k[1])

    def take_released(self) -> list[ResidentPlan]:
        """Return the plans that were released since this was last called."""
        released, self._released = self._released, []
        return released

    def take_ended(self, message: Prepare, topics: Topics, memory_bytes: int) -> ResidentPlan | None:
        """Return a plan that has ended here as the one that a Prepare asks for; None if none is alike and fits."""
        for ended in reversed(self._ended):
            again = renewed(ended, message, self._device, topics)
            if again is not None and self.needed_bytes(again) <= memory_bytes:
                self._ended.remove(ended)
                return again
        return None

    def place(self, resident: ResidentPlan, memory_bytes: int) -> None:
        """Say where the weights of a plan will be: in matrices that are there already, as far as memory allows it."""
        used = self._used()
        held = [matrix for manifest, matrix in {**used, **self._left} if manifest == resident.manifest]
        own = matrices(resident.refs)
        resident.matrices = own
        alone = self.needed_bytes(resident)
        resident.matrices = matrices(resident.refs, held)
        if self.needed_bytes(resident) > ROOMY * memory_bytes and alone <= memory_bytes:
            resident.matrices = own

    def keep(self, memory_bytes: int) -> frozenset[Place]:
        """Return the matrices that stay resident: those in use, and the last used of the others that have room.

        Programs of plans that have ended go with the first of their matrices, or when they have no room themselves.
        """
        used = self._used()
        room = memory_bytes - self.needed_bytes()
        for place in [p for p in reversed(self._left) if p not in used]:
            room -= places_bytes([place])
            if room < 0:
                del self._left[place]
        kept, ended = {**used, **self._left}, list[ResidentPlan]()
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
        """Return the bytes that all plans need side by side, with these."""
        return resident_bytes([*self._residents.values(), *more])

    def residents(self) -> list[ResidentPlan]:
        """Return the plans that are here, in order of arrival."""
        return list(self._residents.values())

    def filters(self) -> set[str]:
        """Return the filters that some plan needs."""
        return {f for r in self._residents.values() for f in r.filters}

    def work_topics(self) -> set[str]:
        """Return the work topics that some plan needs."""
        return {r.work_topic for r in self._residents.values()}

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        assert not self._released
        for resident in self._residents.values():
            here = (resident.loaded, resident.subscribed)
            assert resident.state == "doubted" or here == _HERE[resident.state]


_HERE: Final[dict[ResidentState, tuple[bool, bool]]] = {
    "asked": (False, False),
    "loading": (False, True),
    "subscribing": (True, False),
    "ready": (True, True),
    "active": (True, True),
}


def _subject(resident: ResidentPlan) -> str:
    return f"{resident.plan.model} {resident.plan.version}"
