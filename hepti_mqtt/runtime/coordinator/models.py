"""Plan groups: the plans, requests and measurements of one model under one set of pins."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from math import hypot, inf, log
from typing import Final

import numpy as np

from hepti_mqtt.cost.profiles import Cluster
from hepti_mqtt.errors import HeptiError
from hepti_mqtt.ids import PlanVersion
from hepti_mqtt.models import is_planned_for
from hepti_mqtt.plan import Plan
from hepti_mqtt.planner import Candidate, Decision, MethodEstimates, Recalled, SiteEstimates, Verdict, run_seconds
from hepti_mqtt.planner.estimates import SURPRISED, Means, StrategyKey
from hepti_mqtt.planner.surface import Outlook, Priced, interval
from hepti_mqtt.runtime.coordinator.fair_queue import FairQueue
from hepti_mqtt.runtime.coordinator.fleet import CrashBackoff
from hepti_mqtt.runtime.coordinator.guesses import StepPace
from hepti_mqtt.runtime.coordinator.moves import RequestPace, SearchPace
from hepti_mqtt.runtime.coordinator.plans import PlanLifecycle, PlanRecord, Search, ServedModel, is_same_division
from hepti_mqtt.runtime.coordinator.requests import Expectation, Pins, Request
from hepti_mqtt.runtime.coordinator.runs import MAX_UNREPORTED_RUNS, Run
from hepti_mqtt.runtime.coordinator.search_kinds import SearchKind
from hepti_mqtt.runtime.machinery import TransitionLog
from hepti_mqtt.spec import RequestShape

MAX_PREBUILT_SHAPES: Final = 8  # shapes of which devices build the Programs ahead
LEAST_COMPUTE_S: Final = 1e-3  # shorter compute times of runs say little of a device
PLAUSIBLE_SLOWDOWN: Final = 64.0  # what reports say beyond it, or below its inverse, is not believed
MAX_LEFT: Final = 3  # plans that were left whose weights are looked for


@dataclass(slots=True)
class RecentRequests:
    """The lengths of the last requests, and the shapes of the last runs."""

    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=16))
    shapes: OrderedDict[RequestShape, None] = field(default_factory=OrderedDict)  #: the last one last

    def typical_length(self, default: int) -> int:
        """Return the request length to plan for: the median of the last ones."""
        lengths = sorted(self.lengths) or [default]
        return lengths[len(lengths) // 2]

    def record_shape(self, shape: RequestShape) -> None:
        """Remember the shape of a run."""
        self.shapes[shape] = None
        self.shapes.move_to_end(shape)
        if len(self.shapes) > MAX_PREBUILT_SHAPES:
            self.shapes.popitem(last=False)


@dataclass(slots=True)
class PlanGroup:
    """One model under one set of pins.

    pinned: by requests rather than by the planner's user. made_room: its plan made room for another group's, and its
    next search has not begun. site: what is believed of devices and links; methods: of what runs take. last_decision:
    of the last search. known: the plans that the last searches found, each as it was priced. made_with: what was
    believed when the last search began that has ended; search_inputs: the same of the last one that began. verdict: the
    rule's last word, of judged_s; is_fresh: whether there is evidence since then. tried: when methods were tried.
    run_s: what a request takes; expectation: of runs under a version. price_now: seconds of the active plan by what
    devices and links are now, and the doubt in that; may_gain: the part of its time that a search may win. left: plans
    that were left, whose weights devices may have. recalled: the plan that served last, of this planner
    or the one before, while none does; recall_by_s: until then a search waits for it, and for its devices.
    failed_preparations: in a row. missing_bytes: by which devices refused a plan. published_transitions: of the story,
    in the published record.
    """

    served: ServedModel
    plans: PlanLifecycle
    pinned: bool = False
    made_room: bool = False
    site: SiteEstimates = field(default_factory=SiteEstimates)
    methods: MethodEstimates = field(default_factory=MethodEstimates)
    last_decision: Decision | None = None
    searched_s: float = -inf  #: begin of the last search ...
    searched_site: frozenset[object] = frozenset()  #: ... and the devices and plans of the site then
    known: tuple[Priced, ...] = ()
    made_with: Means = field(default_factory=dict)
    search_inputs: Means = field(default_factory=dict)
    verdict: Verdict = field(default_factory=lambda: Verdict(None))
    judged_s: float = -inf
    is_fresh: bool = False
    tried: dict[StrategyKey, float] = field(default_factory=dict)
    run_s: float = 0.0
    price_now: tuple[float, float] = (0.0, 0.0)
    may_gain: float = inf
    expectation: tuple[PlanVersion, Expectation] | None = None
    #: The same by plan version of runs, until a run teaches more.
    expectations: dict[PlanVersion, Expectation] = field(default_factory=dict)
    left: tuple[Plan, ...] = ()
    recalled: Recalled | None = None
    recall_by_s: float = -inf
    pace: RequestPace = field(default_factory=RequestPace)
    queue: FairQueue = field(default_factory=FairQueue)
    runs: dict[int, Run] = field(default_factory=dict)
    error: HeptiError | None = None
    failed_preparations: int = 0
    missing_bytes: dict[str, int] = field(default_factory=dict)
    crash_backoff: CrashBackoff = field(default_factory=CrashBackoff)
    paced: tuple[PlanVersion, StepPace] | None = None
    recent: RecentRequests = field(default_factory=RecentRequests)
    published_transitions: int = 0

    @property
    def active(self) -> Plan | None:
        """Return the plan that requests are dispatched under."""
        record = self.plans.active
        return None if record is None else record.plan

    @property
    def last_plan(self) -> Plan | None:
        """Return the plan that serves or served last; it may have lost devices."""
        serving = self.plans.serving
        return serving[0].plan if serving else next(iter(self.left), None)

    @property
    def usable_executables(self) -> tuple[Plan, ...]:
        """Return the plans that a run may be under now: the active one, or its replicas that are not in doubt."""
        record = self.plans.active
        if record is None:
            return ()
        return tuple(run for run in record.plan.executables if run.version not in record.suspect_versions)

    @property
    def session_plans(self) -> tuple[Plan, ...]:
        """Return the plans that sessions may be under: those of the next runs, and those that texts stay with."""
        return (*self.usable_executables, *(run for record in self.plans.retiring for run in record.plan.executables))

    @property
    def has_suspect_replica(self) -> bool:
        """Return whether a part of the active plan is to be prepared again, whatever a search finds."""
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
        """Return whether no request waits or runs."""
        return not self.queue and not self.runs

    @property
    def unserved(self) -> bool:
        """Return whether requests wait and no plan serves them."""
        return bool(self.queue) and self.plans.in_use is None

    @property
    def last_request_s(self) -> float:
        """Return when a request came last."""
        return self.pace.last_s

    def in_use(self, now: float) -> bool:
        """Return whether somebody asked recently."""
        return self.pace.is_in_use(now)

    def requests(self) -> list[Request]:
        """Return the requests that wait or run; one of several runs comes several times."""
        return [i.request for i in self.queue] + [r for run in self.runs.values() for r in run.waiting_requests]

    # -- what is known of plans -----------------------------------------------------------------------------------

    def expect(self, record: PlanRecord, seen: Outlook) -> None:
        """Take what runs under the active plan are expected to take."""
        whole = record.plan
        self.run_s, self.price_now = seen.mean_s, (seen.now_s, seen.spread)
        predicted_s = max(record.decision.chosen.price.seconds, 1e-9)
        between = interval(seen.seconds / predicted_s, self.methods.run_sd(whole))
        self.expectation = (record.version, Expectation(seen.mean_s / predicted_s, *between))
        self.expectations.clear()

    def step_pace(self, plan: Plan) -> StepPace:
        """Return how long steps of generations take under a plan, as far as it is known."""
        if self.paced is None or self.paced[0] != plan.version:
            made = next(r.decision for r in self.plans.records() if plan.version in r.versions)
            seconds = partial(run_seconds, self.served.spec, plan, made.chosen.price, made.cluster)
            self.paced = plan.version, StepPace(seconds)
        return self.paced[1]

    def length_factor(self, plan: Plan, rows: int) -> float:
        """Return the factor on a plan's predicted time for a run of this many rows, at least 1."""
        pace = self.step_pace(plan)
        return max(pace.cost(rows) / pace.cost(max(plan.predicted_tokens, 1)), 1.0)

    def expected(self, run: Plan) -> Expectation:
        """Return what runs under a plan take over its prediction, or under that of which it is a replica."""
        if (known := self.expectations.get(run.version)) is not None:
            return known
        whole = self.plans.parent_of(run)
        if self.expectation is not None and self.expectation[0] == whole.version:
            expectation = self.expectation[1]
        else:
            factor, doubt = self.methods.factor(whole), hypot(self.methods.sd(whole), self.methods.run_sd(whole))
            expectation = Expectation(factor, *interval(np.array([factor]), doubt))
        self.expectations[run.version] = expectation
        return expectation

    def record_run(self, plan: Plan, tokens: int, seconds: float, now: float, *, doubtful: bool = False) -> None:
        """Learn from a run that was alone on its devices; doubtful: but not on the planner's machine."""
        whole = self.plans.parent_of(plan)
        record = self.plans.active
        if record is not None and whole.version == record.version:
            record.run_count += 1
        # What devices and links have become since the price is no property of the method.
        then_s = (plan if plan.version == whole.version else whole).predicted_s  # it may have been priced again since
        known = self.expectation is not None and self.expectation[0] == whole.version and then_s > 0
        shift, spread = (self.price_now[0] / then_s, self.price_now[1]) if known else (1.0, 0.0)
        changed = self.site.last_change_s > self.judged_s or self.site.in_doubt(plan.devices, self.judged_s)
        weight = SURPRISED if changed or doubtful else 1.0
        self.methods.record_run(plan, tokens, seconds / shift, now, spread, weight, whole)
        self.is_fresh = True
        self.expectations.clear()

    def record_reports(self, run: Run, now: float) -> None:
        """Learn how slow devices are from what they computed in a run; not from one beside loads."""
        record = next((r for r in self.plans.serving if run.plan_version in r.versions), None)
        plan, shape = run.plan, run.shape
        if record is None or run.before or run.beside.loads or run.task_queue is not None or len(run.items) > 1:
            return
        length = shape.size / max(plan.predicted_tokens, 1)
        if not 0.8 < length < 1.25 or not is_planned_for(self.served.spec, shape):
            return
        for device, report in run.answers.reports.items():
            use, profile = record.decision.chosen.price.use.get(device), record.decision.cluster.devices.get(device)
            if use is None or profile is None or min(use.compute_s, 1e-6 * report[0]) < LEAST_COMPUTE_S:
                continue
            slowdown = 1e-6 * report[0] / (use.compute_s * length) * profile.slowdown
            if 1 / PLAUSIBLE_SLOWDOWN < slowdown < PLAUSIBLE_SLOWDOWN:
                self.site.record_compute(device, log(slowdown), now)

    def learn_search(self, decision: Decision, active: Candidate | None, search: Search) -> Decision:
        """Take the plans of a search, and the active one's new price; return the decision with all known plans."""

        def is_among(candidate: Candidate, plans: Iterable[Plan]) -> bool:
            return any(is_same_division(candidate.plan, plan) for plan in plans)

        others = [c for c in decision.ranking[1:] if c.price.feasible and not is_among(c, search.refused)]
        fresh = [Priced(c, decision.cluster) for c in (decision.chosen, *others)]
        known: list[Priced] = []
        if search.rules.keeps_known:
            plans = [k.candidate.plan for k in fresh]
            known = [k for k in self.known if not is_among(k.candidate, (*plans, *search.refused))]
            decision = replace(decision, ranking=(*decision.ranking, *(k.candidate for k in known)))
        if search.kind is not SearchKind.NAMED:  # changes since the search began are no part of it
            self.made_with = self.search_inputs
        self.known, self.last_decision = (*fresh, *known), decision
        record = self.plans.active
        if record is not None and active is not None and is_same_division(record.plan, active.plan):
            record.reprice(active, decision.cluster)
        return decision

    def plans_to_load(self, most: int) -> tuple[Plan, ...]:
        """Return the first known plans beside the active one whose devices lacked weights when they were priced."""
        record = self.plans.active
        lacking = (k.candidate.plan for k in self.known if any(k.candidate.load_bytes.values()))
        others = (p for p in lacking if record is None or not is_same_division(record.plan, p))
        return tuple(islice(others, most))

    def held(self) -> tuple[Plan, ...]:
        """Return the plans whose weights devices may have: of those in use, and left last."""
        coming = self.plans.preparing
        return (*(record.plan for record in self.plans.records() if record is not coming), *self.left)

    def note_left(self, plan: Plan) -> None:
        """Remember a plan that was released: devices keep its weights while they have room."""
        self.left = (plan, *(p for p in self.left if not is_same_division(p, plan)))[:MAX_LEFT]

    def resident_decision(self) -> Decision | None:
        """Return the decision whose bytes the devices hold or will hold: of the plan on its way, else of the active."""
        record = self.plans.preparing or self.plans.active
        return None if record is None else record.decision

    def cluster(self) -> Cluster:
        """Return the measurements that the active plan was chosen by."""
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
        assert len(set(items)) == len(items), "a chunk runs twice"
        assert not self.queue or self.plans.may_serve(), "requests wait for nothing"
        assert not self.made_room or self.plans.wanted is not None


# ----------------------------------------------------------------------------------------------------------------------
# All groups: each model as the planner's user wants it, and beside that as requests have pinned it.
#
# A group has its own plans, requests and runs, so the pins of one request do not affect other requests. The default
# group of a model always exists. Pinned ones come with a request and go when others need their place or their memory,
# the one with the oldest last request first.
#
# Plans of two groups that do not fit on a device side by side take turns in the order of their requests: a group that
# made room (`made_room`) gets its next plan when no group with a plan has older requests. The default group's plan
# returns without a request, once the pins in its place have been unused for a while.


MAX_PINNED_GROUPS: Final = 4  # per model
RESTORE_AFTER_S: Final = 5.0  # without requests for the pins in its place, the default group's plan comes back


class PlanGroups:
    """All groups: the planner's own ones first, then those of pins.

    counters: of steps that no table has. site: what is believed of devices and links. background: what
    loads and searches take.
    """

    def __init__(self, served: Iterable[ServedModel], counters: Counter[str], site: SiteEstimates) -> None:
        self._counters = counters
        self._own: Mapping[str, PlanGroup] = {
            s.name: PlanGroup(
                s, PlanLifecycle(s.name, s.pins, counters, TransitionLog(f"plans of {s.name}")), site=site
            )
            for s in served
        }
        self.background = SearchPace()
        self._pinned: list[PlanGroup] = []
        self._of_model = {name: [group] for name, group in self._own.items()}
        self._illegal = 0  # illegal steps already reported

    def __iter__(self) -> Iterator[PlanGroup]:
        return iter([*self._own.values(), *self._pinned])

    def __contains__(self, model: str) -> bool:
        return model in self._own

    def defaults(self) -> list[PlanGroup]:
        """Return the default group of every model."""
        return list(self._own.values())

    def default(self, model: str) -> PlanGroup:
        """Return the default group of a model; raises KeyError for one that is not served."""
        return self._own[model]

    def of_model(self, model: str) -> list[PlanGroup]:
        """Return all groups of a model, the planner's own first; none of one that is not served."""
        return self._of_model.get(model, [])

    def pinned(self, model: str | None = None) -> list[PlanGroup]:
        """Return the pinned groups, of one model or of all, those asked for longest ago first."""
        return sorted((s for s in self._pinned if model in (None, s.name)), key=lambda group: group.last_request_s)

    def find(self, model: str, pins: Pins | None) -> PlanGroup | None:
        """Return the group of a request with these pins, None if there is none yet."""
        own = self._own[model]
        if pins is None or pins == own.plans.pins:
            return own
        return next((group for group in self._pinned if group.name == model and group.plans.pins == pins), None)

    def add(self, model: str, pins: Pins) -> PlanGroup:
        """Return a new group for pins."""
        own = self._own[model]
        plans = PlanLifecycle(model, pins, self._counters, own.plans.story, f"{model} ({pins})")
        group = PlanGroup(own.served, plans, site=own.site, methods=own.methods, pinned=True)
        self._pinned.append(group)
        self._of_model[model].append(group)
        return group

    def drop(self, group: PlanGroup) -> None:
        """Forget a pinned group, of which nothing is left."""
        self._pinned.remove(group)
        self._of_model[group.name].remove(group)

    # -- whose something is ---------------------------------------------------------------------------------------

    def group_of_search(self, model: str, ticket: int) -> PlanGroup | None:
        """Return the group of a search."""
        return next((s for s in self.of_model(model) if (found := s.plans.searching) and found.ticket == ticket), None)

    def group_of_preparation(self, model: str, transaction_id: int) -> PlanGroup | None:
        """Return the group of a preparation."""
        coming = ((group, group.plans.preparing) for group in self.of_model(model))
        return next((g for g, record in coming if record and record.transaction_id == transaction_id), None)

    def models_in_use(self) -> frozenset[str]:
        """Return the models of which runs are under way."""
        return frozenset(name for name, groups in self._of_model.items() if any(group.runs for group in groups))

    def requests(self, model: str) -> list[Request]:
        """Return all requests for a model that wait or run; one of several runs comes several times."""
        return [request for group in self.of_model(model) for request in group.requests()]

    def plan_versions(self) -> set[PlanVersion]:
        """Return the plans of all plans that devices may hold."""
        return {plan_version for group in self for plan_version in group.plans.versions()}

    def new_illegal_steps(self) -> str | None:
        """Return what there is to tell of illegal steps, if there are more than when it was asked last."""
        count = self._counters["illegal_step"]
        if count == self._illegal:
            return None
        self._illegal = count
        return f"Internal planner error: {count} illegal plan transitions so far. See `hepti plan --story`."

    # -- who makes room for whom ----------------------------------------------------------------------------------

    def groups_to_evict(self, group: PlanGroup, device: str) -> list[PlanGroup]:
        """Return the groups whose plans must go, for a plan of `group` that does not fit on a device.

        Idle pins go first; then default groups come before pins, and a group's own old plan goes before another's.
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
        """Raise AssertionError if a group is broken, or there are more of pins, or more runs at once, than may be."""
        for slot in self:
            slot.check()
        for group in self.defaults():
            assert len(self.pinned(group.name)) <= MAX_PINNED_GROUPS
            runs = [run for slot in self.of_model(group.name) for run in slot.runs.values()]
            for taken, most in (
                ([r for r in runs if r.is_computing], in_flight),
                (runs, in_flight + MAX_UNREPORTED_RUNS),
            ):
                each = Counter(device for run in taken for device in run.plan.devices)
                assert max(each.values(), default=0) <= most
            for run in runs:
                if run.task_queue is not None:
                    run.task_queue.assert_invariants()

    def may_search(self, group: PlanGroup, now: float) -> bool:
        """Return whether a group may have its next plan now, with regard to the other groups of its model."""
        others = [s for s in self.of_model(group.name) if s is not group]
        one_by_one = not any(s.plans.searching or s.plans.preparing for s in others)
        if group.pinned and not (one_by_one and self.may_run(group)):
            return False  # the planner's own waits for nobody
        if not group.made_room:
            return True
        return all(self._yields_to(s, group, now) for s in others if s.plans.in_use or s.plans.preparing)

    def may_run(self, group: PlanGroup) -> bool:
        """Return whether the first request of a group comes before all those of groups that made room."""
        waiting = [s for s in self.of_model(group.name) if s is not group and s.made_room]
        return all(group.queue.oldest_sequence() < s.queue.oldest_sequence() for s in waiting if s.queue)

    @staticmethod
    def _yields_to(holder: PlanGroup, group: PlanGroup, now: float) -> bool:
        """Return whether a group that has a plan lets one that made room have the next."""
        if group.queue:
            return group.queue.oldest_sequence() < holder.queue.oldest_sequence()
        return holder.idle and now - holder.last_request_s > RESTORE_AFTER_S
