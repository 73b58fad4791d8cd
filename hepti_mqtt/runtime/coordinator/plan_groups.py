"""Plan groups: each holds the plans, requests and runs of one model under one set of pins."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from hepti_mqtt.core.errors import HeptiError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.profiles import Cluster
from hepti_mqtt.core.recent import Recent
from hepti_mqtt.core.spec import RequestShape
from hepti_mqtt.planner import SiteEstimates
from hepti_mqtt.runtime.coordinator.durations import RunDurations
from hepti_mqtt.runtime.coordinator.fair_queue import FairQueue
from hepti_mqtt.runtime.coordinator.fleet import CrashBackoff
from hepti_mqtt.runtime.coordinator.history import FormerPlans, Judgement, SearchHistory
from hepti_mqtt.runtime.coordinator.moves import RequestPace, SearchPace
from hepti_mqtt.runtime.coordinator.plans import PlanLifecycle, PlanReport, ServedModel
from hepti_mqtt.runtime.coordinator.requests import Pins, Request
from hepti_mqtt.runtime.coordinator.runs import MAX_UNREPORTED_RUNS, Run
from hepti_mqtt.runtime.machinery import TransitionLog

MAX_PREBUILT_SHAPES: Final = 8  # shapes for which devices build Programs ahead


@dataclass(slots=True)
class RecentRequests:
    """The lengths of recent requests, and the shapes of recent runs."""

    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=16))
    shapes: Recent[RequestShape, None] = field(default_factory=lambda: Recent(MAX_PREBUILT_SHAPES))

    def typical_length(self, default: int) -> int:
        """Return the median length of recent requests, for which plans are optimised."""
        lengths = sorted(self.lengths) or [default]
        return lengths[len(lengths) // 2]


@dataclass(slots=True)
class PlanGroup:
    """One model under one set of pins."""

    served: ServedModel  #: the model
    plans: PlanLifecycle  #: from the wanted search to the release
    durations: RunDurations  #: of its runs
    pinned: bool = False  #: the pins come from requests, not from the operator
    evicted: bool = False  #: its plan gave way to another group's; its next search waits for its turn
    search_history: SearchHistory = field(default_factory=SearchHistory)
    judgement: Judgement = field(default_factory=Judgement)
    former_plans: FormerPlans = field(default_factory=FormerPlans)
    pace: RequestPace = field(default_factory=RequestPace)  #: of its requests
    recent: RecentRequests = field(default_factory=RecentRequests)
    queue: FairQueue = field(default_factory=FairQueue)  #: of its requests
    runs: dict[int, Run] = field(default_factory=dict)  #: active runs by run id
    error: HeptiError | None = None  #: why there is no plan
    failed_preparations: int = 0  #: in a row
    missing_bytes: dict[str, int] = field(default_factory=dict)  #: memory that devices lacked for refused plans
    crash_backoff: CrashBackoff = field(default_factory=CrashBackoff)
    published_transitions: int = 0  #: number of transitions when the record was last published

    @property
    def active(self) -> Plan | None:
        """Return the plan that requests are dispatched under."""
        record = self.plans.active
        return None if record is None else record.plan

    @property
    def last_plan(self) -> Plan | None:
        """Return the plan that serves or last served; it may have lost devices."""
        serving = self.plans.serving
        return serving[0].plan if serving else next(iter(self.former_plans.released), None)

    @property
    def usable_executables(self) -> tuple[Plan, ...]:
        """Return the plans for new runs: the active one, or its replicas that are not suspect."""
        record = self.plans.active
        if record is None:
            return ()
        return tuple(run for run in record.plan.executables if run.version not in record.suspect_versions)

    @property
    def session_plans(self) -> tuple[Plan, ...]:
        """Return the plans that sessions may use: those for new runs, and retiring ones."""
        return (*self.usable_executables, *(run for record in self.plans.retiring for run in record.plan.executables))

    @property
    def has_suspect_replica(self) -> bool:
        """Return whether a replica of the active plan must be prepared again."""
        record = self.plans.active
        return record is not None and bool(record.suspect_versions)

    @property
    def active_devices(self) -> tuple[str, ...]:
        """Return the devices of the active plan."""
        return () if self.active is None else self.active.devices

    @property
    def name(self) -> str:
        """Return the model's name."""
        return self.served.name

    @property
    def idle(self) -> bool:
        """Return whether no request is queued or running."""
        return not self.queue and not self.runs

    @property
    def unserved(self) -> bool:
        """Return whether requests are queued and no plan serves them."""
        return bool(self.queue) and self.plans.in_use is None

    def requests(self) -> list[Request]:
        """Return the queued and running requests; a request occurs once for each of its batches."""
        return [i.request for i in self.queue] + [r for run in self.runs.values() for r in run.waiting_requests]

    def held(self) -> tuple[Plan, ...]:
        """Return the plans that devices may hold weights of: plans in use and recently released ones."""
        coming = self.plans.preparing
        return (*(record.plan for record in self.plans.records() if record is not coming), *self.former_plans.released)

    def cluster(self) -> Cluster:
        """Return the measurements for which the active plan was chosen."""
        record = self.plans.active
        assert record is not None
        return record.decision.cluster

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        self.plans.check()
        live = {plan_version for record in self.plans.serving for plan_version in record.versions}
        assert all(run.plan_version in live for run in self.runs.values())
        for run in self.runs.values():
            run.check()
        items = [(id(item.request), item.index) for run in self.runs.values() if run.is_computing for item in run.items]
        assert len(set(items)) == len(items), "a batch runs twice"
        assert not self.queue or self.plans.may_serve(), "requests wait for nothing"
        assert not self.evicted or self.plans.wanted is not None


# ----------------------------------------------------------------------------------------------------------------------
# All groups: the default group of each model, and groups for the pins of requests.
#
# A group has its own plans, requests and runs, so the pins of one request do not affect other requests. The default
# group of a model always exists. Pinned groups begin with a request and end when others need their place or memory;
# the one with the oldest last request ends first.
#
# If the plans of two groups do not fit on a device together, they take turns in the order of their requests: an evicted
# group (`evicted`) gets its next plan when no group with a plan has older requests. The default group's plan returns
# without a request, `RESTORE_AFTER_S` after the last request for the pins in its place.


MAX_PINNED_GROUPS: Final = 4  # per model
RESTORE_AFTER_S: Final = 5.0  # without requests for the pins that replaced it, the default group's plan returns


class PlanGroups:
    """All groups, default groups first; counters: illegal steps; background: cost of searches."""

    def __init__(self, served: Iterable[ServedModel], counters: Counter[str], site: SiteEstimates) -> None:
        self._counters = counters
        self._defaults = dict[str, PlanGroup]()
        for model in served:
            plans = PlanLifecycle(model.name, model.pins, counters, TransitionLog(f"plans of {model.name}"))
            self._defaults[model.name] = PlanGroup(model, plans, RunDurations(model, plans, site))
        self.background = SearchPace()
        self._pinned: list[PlanGroup] = []
        self._of_model = {name: [group] for name, group in self._defaults.items()}
        self._illegal = 0  # illegal steps that were reported

    def __iter__(self) -> Iterator[PlanGroup]:
        return iter([*self._defaults.values(), *self._pinned])

    def __contains__(self, model: str) -> bool:
        return model in self._defaults

    def defaults(self) -> list[PlanGroup]:
        """Return the default group of every model."""
        return list(self._defaults.values())

    def default(self, model: str) -> PlanGroup:
        """Return the default group of a model; raises KeyError if the model is not served."""
        return self._defaults[model]

    def of_model(self, model: str) -> list[PlanGroup]:
        """Return all groups of a model, the default group first; none if the model is not served."""
        return self._of_model.get(model, [])

    def pinned(self, model: str | None = None) -> list[PlanGroup]:
        """Return the pinned groups of one model or of all, ordered by their last request."""
        return sorted((s for s in self._pinned if model in (None, s.name)), key=lambda group: group.pace.last_s)

    def find(self, model: str, pins: Pins | None) -> PlanGroup | None:
        """Return the group of a model under these pins, None if it does not exist yet."""
        own = self._defaults[model]
        if pins is None or pins == own.plans.pins:
            return own
        return next((group for group in self._pinned if group.name == model and group.plans.pins == pins), None)

    def add(self, model: str, pins: Pins) -> PlanGroup:
        """Add a group for pins."""
        own = self._defaults[model]
        plans = PlanLifecycle(model, pins, self._counters, own.plans.story, f"{model} ({pins})")
        durations = RunDurations(own.served, plans, own.durations.site, own.durations.methods)
        group = PlanGroup(own.served, plans, durations, pinned=True)
        self._pinned.append(group)
        self._of_model[model].append(group)
        return group

    def drop(self, group: PlanGroup) -> None:
        """Remove a pinned group without plans, requests and runs."""
        self._pinned.remove(group)
        self._of_model[group.name].remove(group)

    # -- owners of searches, preparations and runs ----------------------------------------------------------------

    def group_of_search(self, model: str, ticket: int) -> PlanGroup | None:
        """Return the group of a search."""
        searches = ((group, group.plans.searching) for group in self.of_model(model))
        return next((group for group, search in searches if search and search.ticket == ticket), None)

    def group_of_preparation(self, model: str, transaction_id: int) -> PlanGroup | None:
        """Return the group of a preparation."""
        coming = ((group, group.plans.preparing) for group in self.of_model(model))
        return next((g for g, record in coming if record and record.transaction_id == transaction_id), None)

    def concerns_others(self, device: str, report: PlanReport) -> bool:
        """Return whether a device reports on a plan, or on its preparation, without being a device of it."""
        records = (record for group in self.of_model(report.model) for record in group.plans.records())
        return any(
            report.plan_version in record.versions or report.transaction_id == record.transaction_id
            for record in records
            if not record.takes_part(device, report.plan_version)
        )

    def models_in_use(self) -> frozenset[str]:
        """Return the models with runs under way."""
        return frozenset(name for name, groups in self._of_model.items() if any(group.runs for group in groups))

    def runs(self) -> Iterator[Run]:
        """Yield all runs under way."""
        return (run for group in self for run in group.runs.values())

    def plan_versions(self) -> set[PlanVersion]:
        """Return the plan versions that devices may hold."""
        return {plan_version for group in self for plan_version in group.plans.versions()}

    def new_illegal_steps(self) -> str | None:
        """Return an error line if there were illegal steps since the last call."""
        count = self._counters["illegal_step"]
        if count == self._illegal:
            return None
        self._illegal = count
        return f"Internal planner error: {count} illegal plan transitions so far. See `hepti plan --story`."

    # -- eviction -------------------------------------------------------------------------------------------------

    def groups_to_evict(self, group: PlanGroup, device: str) -> list[PlanGroup]:
        """Return the groups to evict so that a plan of `group` fits on a device.

        Idle pinned groups go first. A default group evicts other pinned groups before its own old plan; a pinned
        group evicts its own old plan before other groups of its model.
        """
        others = [s for s in self if s is not group and s.plans.uses_device(device)]
        pins = [s for s in others if s.pinned]
        own = [group] if group.plans.serving else []
        if group.pinned:
            stages = [[s for s in pins if s.idle], own, [s for s in others if s.name == group.name]]
        else:
            stages = [[s for s in pins if s.idle], pins, own]
        return next((stage for stage in stages if stage), [])

    def check(self, in_flight: int) -> None:
        """Raise AssertionError if an invariant is broken, or a limit of pinned groups or concurrent runs exceeded."""
        for group in self:
            group.check()
        for group in self.defaults():
            assert len(self.pinned(group.name)) <= MAX_PINNED_GROUPS
            runs = [run for each in self.of_model(group.name) for run in each.runs.values()]
            computing = [run for run in runs if run.is_computing]
            for counted, limit in ((computing, in_flight), (runs, in_flight + MAX_UNREPORTED_RUNS)):
                by_device = Counter(device for run in counted for device in run.plan.devices)
                assert max(by_device.values(), default=0) <= limit
            for run in runs:
                if run.task_queue is not None:
                    run.task_queue.assert_invariants()

    def may_search(self, group: PlanGroup, now: float) -> bool:
        """Return whether a group may search now, beside the other groups of its model."""
        others = [s for s in self.of_model(group.name) if s is not group]
        one_by_one = not any(s.plans.searching or s.plans.preparing for s in others)
        if group.pinned and not (one_by_one and self.may_run(group)):
            return False  # default groups do not wait
        if not group.evicted:
            return True
        return all(self._yields_to(s, group, now) for s in others if s.plans.in_use or s.plans.preparing)

    def may_run(self, group: PlanGroup) -> bool:
        """Return whether the first request of a group is older than all requests of evicted groups."""
        waiting = [s for s in self.of_model(group.name) if s is not group and s.evicted]
        return all(group.queue.oldest_sequence() < s.queue.oldest_sequence() for s in waiting if s.queue)

    @staticmethod
    def _yields_to(holder: PlanGroup, group: PlanGroup, now: float) -> bool:
        """Return whether a group with a plan gives way to an evicted one."""
        if group.queue:
            return group.queue.oldest_sequence() < holder.queue.oldest_sequence()
        return holder.idle and now - holder.pace.last_s > RESTORE_AFTER_S
