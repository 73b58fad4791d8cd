"""The states of a model's plans, from the wanted search to the plan's release.

    wanted -> searching -> preparing -> active -> retiring -> gone

A plan that does not fit next to the old one is `swapping` until the old one is gone. A plan with a run that never ended
is `suspect`: it gets no more runs, but its weights stay until another plan replaces it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count
from typing import Final, Literal, get_args

from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.profiles import Cluster
from hepti_mqtt.core.spec import RequestShape, Spec
from hepti_mqtt.cost.loads import TileMap
from hepti_mqtt.models import graph
from hepti_mqtt.planner import Assessment, Candidate, Decision, RequestSimulation
from hepti_mqtt.planner.decisions import RULE
from hepti_mqtt.protocol.messages import PrepareFailed, PrepareProgress, Ready
from hepti_mqtt.runtime.coordinator.fair_queue import Batching
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.runtime.coordinator.search_kinds import SEARCHES, SearchKind, SearchRules
from hepti_mqtt.runtime.machinery import StateMachine, StateTable, Transition, TransitionLog

PlanReport = Ready | PrepareFailed | PrepareProgress
PlanState = Literal["wanted", "searching", "preparing", "swapping", "active", "suspect", "retiring", "gone"]
PlanEvent = Literal[
    "want",  # a device joined or left, a measurement drifted, a user pinned a plan, ...
    "search",
    "found",
    "kept",  # the search has no better plan than the active one
    "no plan",
    "outdated",  # something changed during the search
    "ready",  # every device has prepared it
    "lacks memory",  # a device cannot hold it next to the old plan
    "room",  # the old plan is gone
    "refused",
    "silent",
    "lost",  # one of its devices is lost
    "overdue",
    "replaced",
    "make room",  # another plan does not fit next to it
    "idle",  # its last run has ended
    "unused",  # no request has its pins, and others need the place
]

PLANS: Final[StateTable[PlanState, PlanEvent]] = StateTable(
    name="plan",
    states=get_args(PlanState),
    first=("want", "wanted"),
    steps={
        "wanted": {"want": "wanted", "search": "searching", "unused": "gone"},
        "searching": {
            "found": "preparing",
            "kept": "gone",
            "no plan": "gone",
            "outdated": "gone",
            "make room": "gone",
            "unused": "gone",
        },
        "preparing": {
            "ready": "active",
            "lacks memory": "swapping",
            "refused": "gone",
            "silent": "gone",
            "lost": "gone",
            "outdated": "gone",
            "make room": "gone",
            "unused": "gone",
        },
        "swapping": {"room": "preparing", "lost": "gone", "make room": "gone", "unused": "gone"},
        "active": {
            "overdue": "suspect",
            "replaced": "retiring",
            "make room": "retiring",
            "lost": "retiring",
            "unused": "retiring",
        },
        "suspect": {
            "no plan": "retiring",
            "replaced": "retiring",
            "make room": "retiring",
            "lost": "retiring",
            "unused": "retiring",
        },
        "retiring": {"idle": "gone"},
        "gone": {},
    },
    safe={
        "wanted": "gone",
        "searching": "gone",
        "preparing": "retiring",  # devices may hold parts of it, so it is released
        "swapping": "retiring",
        "active": "retiring",
        "suspect": "retiring",
        "retiring": "retiring",
    },
)


MAX_POSTPONED_S: Final = 5.0  # longest delay of a search by devices that join and leave
GUESS_BITS: Final = 24  # secret bits of a run id below 2^63


class Ids:
    """Issues plan versions of a planner's boot, transaction ids and run ids.

    secret: makes run ids unpredictable; without it they are 1, 2, 3, ...
    """

    def __init__(self, boot: int, secret: bytes | None = None) -> None:
        self._boot, self._secret = boot, secret
        self._plans, self._transactions, self._runs = count(1), count(1), count(1)

    def next_version(self) -> PlanVersion:
        """Return a new plan version."""
        return PlanVersion(self._boot, next(self._plans))

    def next_transaction(self) -> int:
        """Return a new transaction id."""
        return next(self._transactions)

    def next_run(self) -> int:
        """Return a new run id; ids ascend, because devices run the ops of the oldest run first."""
        number = next(self._runs)
        if self._secret is None:
            return number
        code = blake2b(number.to_bytes(8, "little"), key=self._secret, digest_size=GUESS_BITS // 8, person=b"run id")
        return number << GUESS_BITS | int.from_bytes(code.digest(), "little")


# ----------------------------------------------------------------------------------------------------------------------
# Served models, and snapshots of plans for other threads.


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that the planner serves."""

    name: str
    spec: Spec
    manifest: bytes  #: hash of the manifest of its weights
    default_length: int = 128  #: request length for which plans are optimised at first
    pins: Pins = field(default_factory=Pins)  #: of the operator; requests may have others
    batching: Batching = field(default_factory=Batching)  #: which requests run together
    tiles: TileMap | None = None  #: tiles of its weights, None if devices do not load them

    def block_count(self, shape: RequestShape) -> int:
        """Return the number of blocks in the graph of a request."""
        return len(graph(self.spec, shape).blocks)


@dataclass(frozen=True, slots=True)
class PlanSnapshot:
    """A plan that is active or being prepared."""

    plan: Plan
    cluster: Cluster  #: measurements for which it was chosen
    simulated: RequestSimulation | None = None  #: its simulation with these measurements, if the search kept one


# ----------------------------------------------------------------------------------------------------------------------
# Comparison of plans by their division of a model.


def is_same_division(a: Plan, b: Plan) -> bool:
    """Return whether two plans divide the work alike; shares may differ by rounding."""
    if len(a.replicas) != len(b.replicas) or not all(map(is_same_division, a.replicas, b.replicas)):
        return False
    if replace(a.division, shares={}, replicas=()) != replace(b.division, shares={}, replicas=()):
        return False
    for kind, weights in a.shares.items():
        total_a, total_b = sum(weights), sum(b.shares[kind])
        if any(abs(x / total_a - y / total_b) > 0.02 for x, y in zip(weights, b.shares[kind], strict=True)):
            return False
    return True


def with_price_of(plan: Plan, other: Plan) -> Plan:
    """Return a plan with the predictions of another plan of the same division."""
    replicas = tuple(map(with_price_of, plan.replicas, other.replicas))
    names = ("predicted_s", "predicted_bytes", "predicted_tokens", "reason")
    return replace(plan, **{name: getattr(other, name) for name in names}, replicas=replicas)


# ----------------------------------------------------------------------------------------------------------------------
# The plans of one group. Their states change only here, by the table above.


@dataclass(slots=True, eq=False)
class Search:
    """A wanted or running search."""

    due_s: float  #: earliest start
    soon_s: float  #: earliest start while requests wait without a plan
    forced: bool  #: its plan replaces the active one even if it is no better
    state: PlanState
    kind: SearchKind = SearchKind.WHOLE  #: decided at its start
    origin: SearchKind = SearchKind.WHOLE  #: kind of the search that named its plans, or failed before it
    plans: tuple[Plan, ...] = ()  #: named plans to price
    refused: tuple[Plan, ...] = ()  #: plans that could not be priced, so they are no candidates
    ticket: int = 0
    plan_version: PlanVersion | None = None
    wanted_s: float = 0.0
    begun_s: float = 0.0

    @property
    def rules(self) -> SearchRules:
        """Return the rules of its kind."""
        return SEARCHES[self.kind]


@dataclass(slots=True, eq=False)
class PlanRecord:
    """A plan from its preparation to its release."""

    plan: Plan
    decision: Decision
    transaction_id: int  #: of its Prepare
    progress_s: float  #: when a device last answered
    state: PlanState
    unready_devices: set[str] = field(default_factory=set)
    prepare_sent_s: float = float("-inf")  #: when a Prepare was last sent
    progress_bytes: dict[str, tuple[int, int]] = field(default_factory=dict)  #: (loaded, total) weights by device
    published_s: float = float("-inf")  #: when the progress was last published
    waits_for: frozenset[PlanVersion] = frozenset()  #: plans that make room while it is swapping
    begun_s: float = 0.0  #: start of its preparation
    device_progress_s: dict[str, float] = field(default_factory=dict)  #: last progress by device
    suspect_versions: set[PlanVersion] = field(default_factory=set)  #: replicas without new runs: a run never ended
    run_count: int = 0  #: runs that ran alone on their devices
    move: Assessment | None = None  #: the rule's reason to choose it; None: it served before

    @property
    def version(self) -> PlanVersion:
        """Return the plan version under which its requests run."""
        return self.plan.version

    @property
    def versions(self) -> set[PlanVersion]:
        """Return the plan versions that devices may hold of it."""
        return {self.plan.version, *(run.version for run in self.plan.executables)}

    def takes_part(self, device: str, plan_version: PlanVersion) -> bool:
        """Return whether a device is to hold one of its executables under this plan version."""
        return any(run.version == plan_version and device in run.devices for run in self.plan.executables)

    def needed_bytes(self, device: str) -> int:
        """Return the memory that it needs on a device; 0 if it was not priced."""
        return self.decision.chosen.price.needs.get(device, 0)

    @property
    def share(self) -> float:
        """Return the share of serving devices and their links that its load may take from runs."""
        return RULE.most_share if self.move is None else min(self.move.share, RULE.most_share)

    @property
    def is_priced(self) -> bool:
        """Return whether this planner has priced it, so that it can be compared."""
        return bool(self.decision.chosen.price.use)

    def last_exchange_s(self) -> float:
        """Return the time of the last exchange with its devices."""
        return max(self.prepare_sent_s, self.progress_s)

    def snapshots(self) -> Iterator[PlanSnapshot]:
        """Yield a snapshot of each executable."""
        return (
            PlanSnapshot(run, self.decision.cluster, self.decision.simulation_of(run)) for run in self.plan.executables
        )

    def reprice(self, candidate: Candidate, cluster: Cluster) -> None:
        """Take a price by other measurements if the candidate is of the same division."""
        if not is_same_division(self.plan, candidate.plan):
            return
        self.plan = with_price_of(self.plan, candidate.plan)
        chosen = replace(candidate, plan=self.plan)
        self.decision = replace(self.decision, chosen=chosen, cluster=cluster)

    def has_same_programs(self, device: str, ready: Ready) -> bool:
        """Return whether a ready device derives the same Programs from this plan as the planner."""
        is_current = self.state == "preparing" and ready.transaction_id == self.transaction_id
        digests, runs = self.decision.digest, self.plan.executables
        if not is_current or self.plan.for_device(device) not in runs:
            return True
        size, place = len(digests) // len(runs), runs.index(self.plan.for_device(device))
        return ready.digest == digests[place * size : (place + 1) * size]


class PlanLifecycle:
    """All plans of one model under one set of pins, and the only writer of their states.

    story: transitions of all plans of the model; label: name of these plans there, by default the model. At most one
    plan is wanted, one searching, one preparing or swapping, and one active or suspect.
    """

    def __init__(self, model: str, pins: Pins, counters: Counter[str], story: TransitionLog, label: str = "") -> None:
        self.pins, self._label = pins, label or model
        self.story = story
        self._machine = StateMachine(PLANS, self.story, counters)
        self._searches: list[Search] = []
        self._records: list[PlanRecord] = []

    # -- plans by state -------------------------------------------------------------------------------------------

    @property
    def wanted(self) -> Search | None:
        """Return the search that has not begun."""
        return next((s for s in self._searches if s.state == "wanted"), None)

    @property
    def searching(self) -> Search | None:
        """Return the running search."""
        return next((s for s in self._searches if s.state == "searching"), None)

    @property
    def preparing(self) -> PlanRecord | None:
        """Return the plan being prepared, also while it waits for the old plan's release."""
        return self._record_in("preparing", "swapping")

    @property
    def active(self) -> PlanRecord | None:
        """Return the plan that runs are dispatched under."""
        return self._record_in("active")

    @property
    def in_use(self) -> PlanRecord | None:
        """Return the plan that the next one replaces: active or suspect."""
        return self._record_in("active", "suspect")

    @property
    def retiring(self) -> list[PlanRecord]:
        """Return the retiring plans in the order of their plan versions."""
        return [r for r in self._records if r.state == "retiring"]

    @property
    def serving(self) -> list[PlanRecord]:
        """Return the plans that may have runs: the one in use, then the retiring ones."""
        in_use = self.in_use
        return [*([] if in_use is None else [in_use]), *self.retiring]

    def records(self) -> tuple[PlanRecord, ...]:
        """Return all plans from preparation to release."""
        return tuple(self._records)

    def versions(self) -> set[PlanVersion]:
        """Return the plan versions of all plans from preparation to release."""
        return {plan_version for record in self._records for plan_version in record.versions}

    def parent_of(self, run: Plan) -> Plan:
        """Return the plan that a run's plan is a replica of, or the run's plan itself."""
        return next((r.plan for r in self._records if run.version in r.versions), run)

    def uses_device(self, device: str) -> bool:
        """Return whether a plan uses a device."""
        return any(device in record.plan.devices for record in self._records)

    def in_transition(self) -> bool:
        """Return whether a plan is wanted, searched for or prepared."""
        return bool(self._searches) or self.preparing is not None

    def may_serve(self) -> bool:
        """Return whether a plan is active, or a search or preparation is yet to end."""
        return self.in_transition() or self.active is not None

    # -- searches -------------------------------------------------------------------------------------------------

    def request_search(
        self,
        due_s: float,
        now: float,
        why: str,
        *,
        forced: bool = False,
        soon_s: float | None = None,
        kind: SearchKind = SearchKind.WHOLE,
        plans: tuple[Plan, ...] = (),
        origin: SearchKind = SearchKind.WHOLE,
        refused: tuple[Plan, ...] = (),
    ) -> None:
        """Want a search at a time, which makes a running search outdated.

        soon_s: time while requests wait without a plan. plans: plans to price, if no other search is wanted or runs.
        origin: kind of the search that led to this one. refused: plans that are no candidates.
        """
        soon_s = due_s if soon_s is None else soon_s
        wanted, running = self.wanted, self.searching
        if wanted is None:
            wanted = Search(due_s, soon_s, False, self._machine.begin(self._label, now, why), kind, wanted_s=now)
            wanted.forced = running is not None and running.forced
            if plans and running is None:
                wanted.kind, wanted.plans = SearchKind.NAMED, plans
            wanted.origin = origin
            self._searches.append(wanted)
        else:
            self.step(wanted, "want", now, why)
            wanted.kind, wanted.plans = kind if kind is wanted.kind and not plans else SearchKind.WHOLE, ()
            # The delay has a limit: a device that joins and leaves all the time must not prevent plans.
            due_s = min(due_s, max(wanted.due_s, wanted.wanted_s + MAX_POSTPONED_S))
            soon_s = min(soon_s, max(wanted.soon_s, wanted.wanted_s + MAX_POSTPONED_S))
        wanted.due_s, wanted.soon_s, wanted.forced = due_s, soon_s, wanted.forced or forced
        wanted.refused += refused

    def start_search(self, kind: SearchKind, ticket: int, plan_version: PlanVersion, now: float) -> Search:
        """Start the wanted search for a plan with this plan version."""
        search = self.wanted
        assert search is not None
        if kind is not SearchKind.NAMED:
            search.plans, search.origin = (), kind
        search.kind, search.ticket, search.plan_version, search.begun_s = kind, ticket, plan_version, now
        self.step(search, "search", now, "")
        return search

    def prepare_found(
        self, search: Search, decision: Decision, transaction_id: int, now: float, move: Assessment | None = None
    ) -> None:
        """Begin the preparation of the chosen plan of a search."""
        plan = decision.chosen.plan
        self.step(search, "found", now, plan.reason)
        if search.state != "preparing":
            return
        self._searches.remove(search)
        unready = set(plan.devices)
        record = PlanRecord(plan, decision, transaction_id, now, search.state, unready, begun_s=now, move=move)
        self._records.append(record)

    # -- plans ----------------------------------------------------------------------------------------------------

    def activate(self, record: PlanRecord, now: float) -> None:
        """Activate a plan that is ready on every device, in place of the plan in use."""
        old = self.in_use
        self.step(record, "ready", now)
        if old is not None and record.state == "active":
            self.step(old, "replaced", now, f"by {record.version}")

    def wait_for_memory(self, record: PlanRecord, plan: Plan, transaction_id: int, now: float, why: str) -> None:
        """Let a plan that does not fit next to others wait for their release, under a new version."""
        self.step(record, "lacks memory", now, f"{why}; it is prepared again as {plan.version}")
        if record.state != "swapping":
            return
        record.plan, record.transaction_id, record.unready_devices = plan, transaction_id, set(plan.devices)
        record.progress_s, record.progress_bytes, record.prepare_sent_s = now, {}, float("-inf")

    def make_room(self, now: float, why: str) -> None:
        """Retire the plan in use for a plan that does not fit next to it."""
        if (old := self.in_use) is not None:
            self.step(old, "make room", now, why)

    def abandon_pending(self, event: Literal["make room", "unused"], now: float, why: str) -> PlanRecord | None:
        """Abandon the running search and the plan being prepared; return the plan."""
        if (search := self.searching) is not None:
            self.step(search, event, now, why)
        if (record := self.preparing) is not None:
            self.step(record, event, now, why)
        return record

    def retire_all(self, now: float, why: str) -> None:
        """Drop the wanted search, and retire the plan in use."""
        for thing in (self.wanted, self.in_use):
            if thing is not None:
                self.step(thing, "unused", now, why)

    def resume_preparation(self, record: PlanRecord, now: float) -> None:
        """Prepare a swapping plan now that the plans that it waited for are gone."""
        self.step(record, "room", now)
        record.waits_for = frozenset()
        record.progress_s = record.begun_s = now
        record.device_progress_s = {}

    def retire(self, record: PlanRecord, event: Literal["lost", "no plan"], now: float, why: str) -> None:
        """Let a plan end with its last run, unless it is retiring already."""
        if record.state != "retiring":
            self.step(record, event, now, why)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        states = Counter[str](s.state for s in self._searches) + Counter[str](r.state for r in self._records)
        assert states["wanted"] <= 1
        assert states["searching"] <= 1
        assert states["preparing"] + states["swapping"] <= 1
        assert states["active"] + states["suspect"] <= 1
        assert not states["gone"]
        assert len({r.version for r in self._records}) == len(self._records)
        assert all(r.state != "preparing" or r.unready_devices for r in self._records)

    def _record_in(self, *states: PlanState) -> PlanRecord | None:
        return next((r for r in self._records if r.state in states), None)

    def record_handover(self, before: PlanVersion, after: PlanVersion, why: str, now: float) -> None:
        """Record in the story under which plan a run ends."""
        self.story.append(Transition(now, self._label, str(before), "run", str(after), why))

    def step(self, thing: Search | PlanRecord, event: PlanEvent, now: float, why: str = "") -> None:
        """Take a search or a plan through one step of the table; an illegal step leads to a new search."""
        version = thing.plan_version if isinstance(thing, Search) else thing.version
        subject = self._label if version is None else f"{self._label} {version}"
        legal = PLANS.after(thing.state, event) is not None
        thing.state = self._machine.step(subject, thing.state, event, now, why)
        if thing.state == "gone" and isinstance(thing, Search):
            self._searches.remove(thing)
        elif thing.state == "gone" and isinstance(thing, PlanRecord):
            self._records.remove(thing)
        if not legal:  # it may have removed the only plan
            self.request_search(now, now, "after an illegal step", forced=True)
