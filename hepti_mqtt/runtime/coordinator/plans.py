"""The states of a model's plans, from the request for a search to the release of the plan it found.

    wanted -> searching -> preparing -> active -> retiring -> gone

A plan that does not fit beside the old one is `swapping` until that one is gone. A plan under which a run never ended
is `suspect`: it gets no more requests, but its weights stay until another plan replaces it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count
from typing import Final, Literal, get_args

from hepti_mqtt.cost.loads import TileMap
from hepti_mqtt.cost.profiles import Cluster
from hepti_mqtt.ids import PlanVersion
from hepti_mqtt.models import graph
from hepti_mqtt.plan import Plan
from hepti_mqtt.planner import Assessment, Candidate, Decision, SimulatedRequest
from hepti_mqtt.planner.decisions import RULE
from hepti_mqtt.protocol.messages import Ready
from hepti_mqtt.runtime.coordinator.fair_queue import Batching
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.runtime.coordinator.search_kinds import SEARCHES, SearchKind, SearchRules
from hepti_mqtt.runtime.machinery import StateMachine, StateTable, Transition, TransitionLog
from hepti_mqtt.spec import RequestShape, Spec

PlanState = Literal["wanted", "searching", "preparing", "swapping", "active", "suspect", "retiring", "gone"]
PlanEvent = Literal[
    "want",  # a device joined or left, a measurement drifted, a user pinned a plan, ...
    "search",
    "found",
    "kept",  # what runs is as good
    "no plan",
    "outdated",  # something changed while the search ran
    "ready",  # on every device
    "lacks memory",  # beside the old plan
    "room",  # the old plan is gone
    "refused",
    "silent",
    "lost",  # one of its devices
    "overdue",
    "replaced",
    "make room",  # for a plan that does not fit beside it
    "idle",  # its last run has ended
    "unused",  # nobody asks for its pins, and others need the place
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
        "preparing": "retiring",  # devices may hold something of it, so it is released
        "swapping": "retiring",
        "active": "retiring",
        "suspect": "retiring",
        "retiring": "retiring",
        "gone": "gone",
    },
)


MAX_POSTPONED_S: Final = 5.0  # by which devices that join and leave put off a search together
GUESS_BITS: Final = 24  # of a run id below 2^63


class Ids:
    """The numbers that a planner gives out: plan versions under its boot, transaction ids and run ids.

    secret: makes run ids that nobody can guess; without it they are 1, 2, 3, ...
    """

    def __init__(self, boot: int, secret: bytes | None = None) -> None:
        self._boot, self._secret = boot, secret
        self._plans, self._transactions, self._runs = count(1), count(1), count(1)

    def next_version(self) -> PlanVersion:
        """Return a plan version that no plan has had."""
        return PlanVersion(self._boot, next(self._plans))

    def next_transaction(self) -> int:
        """Return the id of a new transaction."""
        return next(self._transactions)

    def next_run(self) -> int:
        """Return a run id above all before it: devices run the ops of the oldest run first."""
        number = next(self._runs)
        if self._secret is None:
            return number
        guess = blake2b(number.to_bytes(8, "little"), key=self._secret, digest_size=GUESS_BITS // 8, person=b"run id")
        return number << GUESS_BITS | int.from_bytes(guess.digest(), "little")


# ----------------------------------------------------------------------------------------------------------------------
# Served models, and plans as values for other threads.


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that the planner serves."""

    name: str
    spec: Spec
    manifest: bytes  #: hash of the manifest of its weights
    default_length: int = 128  #: that plans are optimised for at first
    pins: Pins = field(default_factory=Pins)  #: of the planner's user; those of a request hold for that request alone
    batching: Batching = field(default_factory=Batching)  #: which requests run together
    tiles: TileMap | None = None  #: of its weights, None if nobody loads them

    def block_count(self, shape: RequestShape) -> int:
        """Return how many blocks the graph of a request has."""
        return len(graph(self.spec, shape).blocks)


@dataclass(frozen=True, slots=True)
class PlanSnapshot:
    """A plan that is active or being prepared."""

    plan: Plan
    cluster: Cluster  #: measurements that it was chosen by
    simulated: SimulatedRequest | None = None  #: of this plan by these measurements, None if the search has none


# ----------------------------------------------------------------------------------------------------------------------
# When two plans divide a model in the same way.


def is_same_division(a: Plan, b: Plan) -> bool:
    """Return whether two plans divide the work alike; weights may differ by rounding."""
    if len(a.replicas) != len(b.replicas) or not all(map(is_same_division, a.replicas, b.replicas)):
        return False
    if replace(a.division, shares={}, replicas=()) != replace(b.division, shares={}, replicas=()):
        return False
    for kind, weights in a.shares.items():
        whole_a, whole_b = sum(weights), sum(b.shares[kind])
        if any(abs(x / whole_a - y / whole_b) > 0.02 for x, y in zip(weights, b.shares[kind], strict=True)):
            return False
    return True


def with_price_of(plan: Plan, other: Plan) -> Plan:
    """Return a plan with the predictions of another one of the same division; its own ranges may differ by rounding."""
    replicas = tuple(map(with_price_of, plan.replicas, other.replicas))
    told = ("predicted_s", "predicted_bytes", "predicted_tokens", "reason")
    return replace(plan, **{name: getattr(other, name) for name in told}, replicas=replicas)


# ----------------------------------------------------------------------------------------------------------------------
# The plans of one group; their states change here only, by the table above.


@dataclass(slots=True, eq=False)
class Search:
    """A search that is wanted or runs."""

    due_s: float  #: it may begin ...
    soon_s: float  #: ... or then, while requests wait without a plan
    forced: bool  #: its plan replaces the active one even if it is no better
    state: PlanState
    kind: SearchKind = SearchKind.WHOLE  #: at its start the situation decides
    origin: SearchKind = SearchKind.WHOLE  #: the kind of the search that named its plans, or failed before it
    plans: tuple[Plan, ...] = ()  #: named plans to price
    refused: tuple[Plan, ...] = ()  #: plans whose price has just failed: no candidates
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
    """A plan from its preparation on."""

    plan: Plan
    decision: Decision
    transaction_id: int  #: of its Prepare
    progress_s: float  #: when a device last answered
    state: PlanState
    unready_devices: set[str] = field(default_factory=set)
    prepare_sent_s: float = float("-inf")  #: when a Prepare was last sent
    progress_bytes: dict[str, tuple[int, int]] = field(default_factory=dict)  #: (loaded, all) weights by device
    published_s: float = float("-inf")  #: when the progress was last published
    waits_for: frozenset[PlanVersion] = frozenset()  #: plans that make room while it is swapping
    begun_s: float = 0.0  #: start of its preparation
    device_progress_s: dict[str, float] = field(default_factory=dict)  #: last progress by device
    suspect_versions: set[PlanVersion] = field(default_factory=set)  #: replicas whose runs do not end: they get no more
    run_count: int = 0  #: runs that were alone on their devices
    move: Assessment | None = None  #: by which the rule chose it; None: it served before

    @property
    def version(self) -> PlanVersion:
        """Return the plan version under which its requests run."""
        return self.plan.version

    @property
    def versions(self) -> set[PlanVersion]:
        """Return the plans that devices may hold of it."""
        return {self.plan.version, *(run.version for run in self.plan.executables)}

    def needed_bytes(self, device: str) -> int:
        """Return the memory that it needs on a device, as far as it was priced."""
        return self.decision.chosen.price.needs.get(device, 0)

    @property
    def share(self) -> float:
        """Return the share of devices that serve, and of their links, that its load takes from runs."""
        return RULE.most_share if self.move is None else min(self.move.share, RULE.most_share)

    @property
    def is_priced(self) -> bool:
        """Return whether a search of this planner has priced it, so that it can be compared."""
        return bool(self.decision.chosen.price.use)

    def last_exchange_s(self) -> float:
        """Return when there was last an exchange with the devices."""
        return max(self.prepare_sent_s, self.progress_s)

    def snapshots(self) -> Iterator[PlanSnapshot]:
        """Yield what its requests run under, by replica."""
        return (
            PlanSnapshot(run, self.decision.cluster, self.decision.simulation_of(run)) for run in self.plan.executables
        )

    def reprice(self, found: Candidate, cluster: Cluster) -> None:
        """Take the price of this plan by other measurements, if it is this plan's."""
        if not is_same_division(self.plan, found.plan):
            return
        self.plan = with_price_of(self.plan, found.plan)
        chosen = replace(found, plan=self.plan)
        self.decision = replace(self.decision, chosen=chosen, cluster=cluster)

    def has_same_programs(self, device: str, ready: Ready) -> bool:
        """Return whether a device that is ready for this plan derives the same Programs from it as the planner."""
        asked = self.state == "preparing" and ready.transaction_id == self.transaction_id
        digests, runs = self.decision.digest, self.plan.executables
        if not asked or self.plan.for_device(device) not in runs:
            return True
        each, place = len(digests) // len(runs), runs.index(self.plan.for_device(device))
        return ready.digest == digests[place * each : (place + 1) * each]


class PlanLifecycle:
    """All plans of one model under one set of pins, and the only place where their states change.

    story: of all plans of the model; label: the name of these there, by default the model. At most one plan each is
    wanted, searching, on its way (preparing or swapping), and in use (active or suspect).
    """

    def __init__(self, model: str, pins: Pins, counters: Counter[str], story: TransitionLog, label: str = "") -> None:
        self.model, self.pins, self._label = model, pins, label or model
        self.story = story
        self._machine = StateMachine(PLANS, self.story, counters)
        self._searches: list[Search] = []
        self._records: list[PlanRecord] = []

    # -- what there is --------------------------------------------------------------------------------------------

    @property
    def wanted(self) -> Search | None:
        """Return the search that has not begun."""
        return next((s for s in self._searches if s.state == "wanted"), None)

    @property
    def searching(self) -> Search | None:
        """Return the search that runs."""
        return next((s for s in self._searches if s.state == "searching"), None)

    @property
    def preparing(self) -> PlanRecord | None:
        """Return the plan on its way, also one that waits until the old plan is gone."""
        return self._record_in("preparing", "swapping")

    @property
    def active(self) -> PlanRecord | None:
        """Return the plan that requests are dispatched under."""
        return self._record_in("active")

    @property
    def in_use(self) -> PlanRecord | None:
        """Return the plan that the next one takes the place of: active or suspect."""
        return self._record_in("active", "suspect")

    @property
    def retiring(self) -> list[PlanRecord]:
        """Return the plans that end with their last run, in the order of their plan versions."""
        return [r for r in self._records if r.state == "retiring"]

    @property
    def serving(self) -> list[PlanRecord]:
        """Return the plans that may have runs: the standing one, then those that end with their last run."""
        standing = self.in_use
        return [*([] if standing is None else [standing]), *self.retiring]

    def records(self) -> tuple[PlanRecord, ...]:
        """Return the plans that were found and are not gone."""
        return tuple(self._records)

    def versions(self) -> set[PlanVersion]:
        """Return the plans of all plans that were found and are not gone."""
        return {plan_version for record in self._records for plan_version in record.versions}

    def parent_of(self, run: Plan) -> Plan:
        """Return the plan of which a run's own is a replica, or that itself."""
        return next((r.plan for r in self._records if run.version in r.versions), run)

    def uses_device(self, device: str) -> bool:
        """Return whether a device holds, or is to hold, something of a plan."""
        return any(device in record.plan.devices for record in self._records)

    def in_transition(self) -> bool:
        """Return whether a plan is wanted, searched for or on its way."""
        return bool(self._searches) or self.preparing is not None

    def may_serve(self) -> bool:
        """Return whether there is a plan, or will be an answer whether there is one."""
        return self.in_transition() or self.active is not None

    # -- searches -------------------------------------------------------------------------------------------------

    def pin(self, pins: Pins, now: float) -> None:
        """Take other pins, under which the next plan is to be."""
        self.pins = pins
        self.request_search(now, now, "the planner's user has pinned it", forced=True)

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
        """Want a search from a time on; one that runs already is outdated by it.

        soon_s: the time if requests wait without a plan, now or later. plans: to price, if there is no other reason to
        search; origin: the kind of the search that led to this one. refused: plans that are no candidates.
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
            # Whatever comes meanwhile, it begins: a device that comes and goes all the time must not keep plans away.
            due_s = min(due_s, max(wanted.due_s, wanted.wanted_s + MAX_POSTPONED_S))
            soon_s = min(soon_s, max(wanted.soon_s, wanted.wanted_s + MAX_POSTPONED_S))
        wanted.due_s, wanted.soon_s, wanted.forced = due_s, soon_s, wanted.forced or forced
        wanted.refused += refused

    def start_search(self, kind: SearchKind, ticket: int, plan_version: PlanVersion, now: float) -> Search:
        """Start the wanted search, for a plan of this plan version."""
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
        """A search has found a plan, which is to be prepared under this transaction."""
        plan = decision.chosen.plan
        self.step(search, "found", now, plan.reason)
        if search.state != "preparing":
            return
        self._searches.remove(search)
        waiting = set(plan.devices)
        record = PlanRecord(plan, decision, transaction_id, now, search.state, waiting, begun_s=now, move=move)
        self._records.append(record)

    # -- plans ----------------------------------------------------------------------------------------------------

    def activate(self, record: PlanRecord, now: float) -> None:
        """Every device is ready: the plan becomes active and takes the place of the one before."""
        old = self.in_use
        self.step(record, "ready", now)
        if old is not None and record.state == "active":
            self.step(old, "replaced", now, f"by {record.version}")

    def wait_for_memory(self, record: PlanRecord, plan: Plan, transaction_id: int, now: float, why: str) -> None:
        """A plan does not fit beside others; it is prepared again, under a new version, when those are gone."""
        self.step(record, "lacks memory", now, f"{why}; it comes again as {plan.version}")
        if record.state != "swapping":
            return
        record.plan, record.transaction_id, record.unready_devices, record.progress_s = (
            plan,
            transaction_id,
            set(plan.devices),
            now,
        )
        record.progress_bytes, record.prepare_sent_s = {}, float("-inf")

    def make_room(self, now: float, why: str) -> None:
        """The plan in use ends with its last run, for one that does not fit beside it."""
        if (old := self.in_use) is not None:
            self.step(old, "make room", now, why)

    def abandon_pending(self, event: Literal["make room", "unused"], now: float, why: str) -> PlanRecord | None:
        """A search that runs and a plan on its way are given up; return that plan."""
        if (search := self.searching) is not None:
            self.step(search, event, now, why)
        if (record := self.preparing) is not None:
            self.step(record, event, now, why)
        return record

    def retire_all(self, now: float, why: str) -> None:
        """All of them end, the plan in use with its last run."""
        if (wanted := self.wanted) is not None:
            self.step(wanted, "unused", now, why)
        if (standing := self.in_use) is not None:
            self.step(standing, "unused", now, why)

    def resume_preparation(self, record: PlanRecord, now: float) -> None:
        """Those that made room are gone, so a plan that was swapping may be prepared."""
        self.step(record, "room", now)
        record.waits_for = frozenset()
        record.progress_s = record.begun_s = now
        record.device_progress_s = {}

    def retire(self, record: PlanRecord, event: Literal["lost", "no plan"], now: float, why: str) -> None:
        """A plan ends as soon as its runs have; one that is retiring already goes on with that."""
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

    def tell(self, before: PlanVersion, after: PlanVersion, why: str, now: float) -> None:
        """Tell the story what was decided about a run: under which plan it ends."""
        self.story.append(Transition(now, self._label, str(before), "run", str(after), why))

    def step(self, thing: Search | PlanRecord, event: PlanEvent, now: float, why: str = "") -> None:
        """Take a search or a plan through one step of the table; an illegal one leads to a new search."""
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
