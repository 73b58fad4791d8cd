"""What the coordinator knows of one model under one set of pins: its plans and its requests."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from typing import Final, Literal

from hepti_mqtt.cost.profiles import Cluster
from hepti_mqtt.errors import HeptiError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.models import largest_shape, shape_for
from hepti_mqtt.plan import Plan
from hepti_mqtt.planner import (
    KNOWN,
    Candidate,
    Decision,
    DriftRule,
    Experience,
    Learned,
    Question,
    fits_beside,
    hopeful,
    worth_trying,
)
from hepti_mqtt.planner.estimates import Way, way
from hepti_mqtt.runtime.coordinator.fleet import Falls
from hepti_mqtt.runtime.coordinator.interface import WORTH
from hepti_mqtt.runtime.coordinator.plans import Plans, Search, Served, same_division
from hepti_mqtt.runtime.coordinator.requests import UNREPORTED, Item, Job, Pins, Run, Waiting, choose, packed
from hepti_mqtt.runtime.machinery import Story
from hepti_mqtt.spec import RequestShape

FORESEEN: Final = 8  # shapes of which devices build the Programs ahead
URGENT: Final = 2  # shapes, of what runs first, whose Programs a plan must have before it serves
FORESEEN_NUMBERS: Final = 1024  # sizes and marks of such a shape; larger ones would fill the Prepare
IN_USE_S: Final = 60.0  # a model that was not asked for so long is not planned again for what has drifted
CLOSE: Final = 1.05  # a plan whose runs take longer by less is not held against the next best
UNNOTICED_S: Final = 20.0  # so long a link or a processor may have been another before it is seen


@dataclass(slots=True)
class ModelState:
    """A slot: one model under one set of pins, as the coordinator keeps it.

    pinned: the pins are those of requests, not the planner's own. displaced: its plan made room for another slot's,
    and it has not begun to search for the next one.
    """

    served: Served
    plans: Plans
    pinned: bool = False
    displaced: bool = False
    drift: DriftRule = field(default_factory=DriftRule)
    experience: Experience = field(default_factory=Experience)
    proposed: tuple[Epoch | None, frozenset[Way]] = (None, frozenset())  # what was to be tried in place of which plan
    wish: tuple[Way, float] | None = None  # what may be tried next, and since when
    trial: Candidate | None = None  # what was to be tried last
    outdated: Epoch | None = None  # of the plan whose prediction is by links or speeds that are others now
    latest: Decision | None = None  # of the last search that found the plan in use, or on its way
    asked_with: tuple[Mapping[str, float], Learned] = ({}, Learned())  # of the last search: what was measured and known
    queue: Waiting = field(default_factory=Waiting)
    runs: dict[int, Run] = field(default_factory=dict)
    error: HeptiError | None = None
    refusals: int = 0  # preparations in a row that failed
    spare: dict[str, int] = field(default_factory=dict)  # bytes by which a device refused a plan
    falls: Falls = field(default_factory=Falls)
    asked_s: float = float("-inf")  # when a request last came
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=16))
    late: OrderedDict[RequestShape, None] = field(default_factory=OrderedDict)  # shapes of late, the last one last
    shown: int = 0  # how much of the plans' story the published record has; of the planner's own slot

    @property
    def active(self) -> Plan | None:
        """Return the plan that requests are dispatched under."""
        record = self.plans.active
        return None if record is None else record.plan

    @property
    def last(self) -> Plan | None:
        """Return the plan that was found last; it may have lost devices."""
        return None if self.latest is None else self.latest.chosen.plan

    @property
    def able(self) -> tuple[Plan, ...]:
        """Return the plans that a run may be under now: the active one, or its replicas that are not in doubt."""
        record = self.plans.active
        return () if record is None else tuple(run for run in record.plan.runs if run.epoch not in record.doubted)

    @property
    def doubtful(self) -> bool:
        """Return whether a part of the active plan is to be prepared anew, whatever a search finds."""
        record = self.plans.active
        return record is not None and bool(record.doubted)

    @property
    def used(self) -> tuple[str, ...]:
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
        return bool(self.queue) and self.plans.standing is None

    def ran(self, plan: Plan, tokens: int, seconds: float, now: float) -> None:
        """Learn from a run that had the devices to itself; nothing where its prediction is known to be wrong.

        A link that failed is no fault of the method: what is taught of it then would count for every other one too.
        """
        whole = self.plans.whole(plan)
        if whole.epoch != self.outdated:
            self.experience.ran(plan, tokens, seconds, now, whole)

    def drifted(self, measured: Mapping[str, float], now: float) -> str | None:
        """Return what has drifted from what the active plan was made for, in words, or None.

        A model that nobody asks has no time to gain, and moving its weights would slow the others down.
        """
        if self.active is None or not self.in_use(now):
            return None
        found = self.drift.observe(measured, now)
        if found is None:
            return self.drift.observe(_times(self.experience.learned(now), self.active), now, self._ahead())
        self.outdated = self.active.epoch
        self.experience.forget(now - UNNOTICED_S)
        return found

    def _ahead(self) -> float:
        """Return how many times its predicted time the active plan may take until the next best one may be faster."""
        record = self.plans.active
        if record is None or record.decision.chosen.price.objective != "latency":
            return self.drift.factor
        chosen, ranking = record.decision.chosen, record.decision.ranking
        others = (c.price.expected_s for c in ranking if c.name != chosen.name and c.price.feasible)
        return min(max(min(others, default=inf) / max(chosen.price.expected_s, 1e-9), CLOSE), self.drift.factor)

    def look_again(self, measured: Mapping[str, float], now: float) -> tuple[Literal["drift", "trial"], str] | None:
        """Return why another plan should be looked for, in words: what has drifted, or what is to be tried."""
        drifted = self.drifted(measured, now)
        if self.plans.busy():
            return None
        if drifted is not None:
            return "drift", drifted
        tried = self._to_try(now)
        return None if tried is None else ("trial", tried)

    def _to_try(self, now: float) -> str | None:
        """Return in words what to try in place of the active plan, or None; each way once for each plan that runs.

        Pins that name a method leave nothing to try; a plan is let run for a while first, and a load pass.
        """
        record = self.plans.active
        free = self.plans.pins.strategy is None and not self.doubtful
        if record is None or not free or not self.in_use(now) or self.drift.rests(record.begun_s, now):
            return None
        before = self.proposed[1] if self.proposed[0] == record.epoch else frozenset[Way]()
        learned = self.experience.learned(now)
        found = worth_trying(record.decision, learned, before)
        if found is None or self.wish is None or self.wish[0] != way(found.plan):
            self.wish = None if found is None else (way(found.plan), now)
            return None
        if now - self.wish[1] < self.drift.hold_s:
            return None
        self.proposed, self.trial = (record.epoch, before | {way(found.plan)}), found
        if not fits_beside(self.served.spec, record.decision, found):
            return None
        why = "by earlier runs it is faster" if learned.knows(found.plan) else "it was not tried yet and may be faster"
        return f"{found.name} on {', '.join(found.plan.devices)}: {why} than {record.plan.method}"

    def tries(self, question: Question) -> Question:
        """Return the question for a trial: for that one way on its devices, not for all that there are."""
        assert self.trial is not None
        tried = self.trial.plan
        asked = replace(question, learned=hopeful(question.learned), strategy=tried.strategy, options=tried.options)
        return replace(asked, devices=tried.devices)

    def worth(self, chosen: Plan, now: float) -> float:
        """Return what part of the active plan's cost another may have: where runs tell it, less of a gain is enough."""
        running = self.active
        known = running is not None and self.experience.learned(now).knows(running)
        return KNOWN if known and running is not None and way(chosen) != way(running) else WORTH

    def in_use(self, now: float) -> bool:
        """Return whether somebody asked of late."""
        return now - self.asked_s < IN_USE_S

    def jobs(self) -> list[Job]:
        """Return the requests that wait or run; one of several runs comes several times."""
        return [item.job for item in self.queue] + [job for run in self.runs.values() for job in run.jobs]

    def tokens(self) -> int:
        """Return the request length to plan for: the median of late ones, or the served default."""
        return sorted(self.recent)[len(self.recent) // 2] if self.recent else self.served.tokens

    def dispatched(self, shape: RequestShape) -> None:
        """Remember the shape of a run."""
        self.late[shape] = None
        self.late.move_to_end(shape)
        if len(self.late) > FORESEEN:
            self.late.popitem(last=False)

    def next(self, share: int | None = None) -> tuple[tuple[Item, ...], float]:
        """Return what runs next of what waits, and when: at once unless others may come to run with it.

        share: no more than so many, where others run on other replicas.
        """
        return self._next(self.queue, share)

    def _next(self, queue: Waiting, share: int | None = None) -> tuple[tuple[Item, ...], float]:
        return choose(queue.turns(), self.served.batching, largest_shape(self.served.spec).size, share)

    def _waiting(self) -> Iterator[RequestShape]:
        """Yield the shapes of the runs that what waits leads to, as if it was dispatched now; the first ones."""
        queue = self.queue.copy()
        queue.forget_over()
        for _ in range(FORESEEN):
            if not queue:
                return
            items, _ = self._next(queue)
            queue.take(items)
            if len(items) > 1:
                yield packed([item.part for item in items]).shape
            elif items[0].job.computes:
                yield from items[0].job.next_shapes(items[0].chunk)

    def learned(self, now: float, run: Plan) -> float:
        """Return how many times as long as predicted runs take under a plan, or under that of which it is a replica."""
        return self.experience.learned(now).factor(self.plans.whole(run))

    def search_begun(self, observed: Mapping[str, float], now: float) -> None:
        """A search begins, with what is measured and learned now."""
        self.displaced, self.asked_with = False, (observed, self.experience.learned(now))

    def plan_made(self, chosen: Plan, now: float) -> None:
        """A search has chosen a plan. What has changed since it began is no part of what that was made for."""
        observed, learned = self.asked_with
        self.drift.plan_made({**observed, **_times(learned, self.active, chosen)}, now)

    def foreseen(self) -> tuple[tuple[RequestShape, ...], int]:
        """Return the shapes of requests to come under a new plan, and for how many of the first it should wait.

        First those that wait already, then those of late, the last one first; then the one that plans are made for. If
        requests wait and no plan serves them, no other shape than those of the first ones holds them up.
        """
        waiting = dict.fromkeys(self._waiting())
        shapes = dict.fromkeys((*waiting, *reversed(self.late), shape_for(self.served.spec, self.tokens())))
        first = [s for s in shapes if len(s.sizes) + len(s.plain().marks) <= FORESEEN_NUMBERS][:FORESEEN]
        if not waiting or self.plans.standing is not None:
            return tuple(first), len(first)
        urgent = set(islice(waiting, URGENT))
        return tuple(first), max(sum(s in urgent for s in first), 1)

    def keeps(self, decision: Decision, is_better: bool) -> Epoch | None:
        """Return the epoch of the active plan if it stays: what a search has found is the same, or no better.

        The same plan has its price from now on, by the measurements of now.
        """
        record = None if self.doubtful else self.plans.active
        same = record is not None and same_division(record.plan, decision.chosen.plan)
        if record is not None:
            self.outdated = None
            if not same and not is_better:
                return record.epoch
        self.latest = decision
        if record is None or not same:
            return None
        record.price_anew(decision)
        return record.epoch

    def stands(self, search: Search) -> Decision | None:
        """Return the decision for the active plan if that may stay: in a search for measurements, or for a trial."""
        record = self.plans.active
        may_stay = search.cause != "change" and not (search.forced or self.doubtful)
        return record.decision if record and may_stay else None

    def held(self) -> Decision | None:
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
        live = {epoch for record in self.plans.serving for epoch in record.epochs}
        assert all(run.epoch in live and (run.jobs or run.early) for run in self.runs.values())
        items = [(id(item.job), item.chunk) for run in self.runs.values() if run.computes for item in run.items]
        assert len(set(items)) == len(items), "a chunk runs twice"
        assert not self.queue or self.plans.hopeful(), "requests wait for nothing"
        assert not self.displaced or self.plans.wanted is not None


def _times(learned: Learned, *plans: Plan | None) -> dict[str, float]:
    """Return how far off the predictions of plans were."""
    return {f"the time of {p.method} on {len(p.devices)}": learned.factor(p) for p in plans if p is not None}


# ----------------------------------------------------------------------------------------------------------------------
# Slots: each model as the planner's user wants it, and beside that as requests have pinned it.
#
# A slot has plans, requests and runs of its own, so what one request pins changes nobody else's answers. The planner's
# own slot of a model is always there. Those of pins come with a request and go when others need their place or their
# memory: of `PINNED` for each model, the one that was asked for longest ago.
#
# Where the plans of two slots do not fit on a device side by side, they take turns in the order of their requests: a
# slot
# that had to make room (`displaced`) has its next plan when nobody who has one has older requests to serve. The
# planner's own comes back without any request, once the pins that took its place have not been asked for.


PINNED: Final = 4  # slots of pins, for each model
COMES_BACK_S: Final = 5.0  # without a request for the pins in its place, the planner's own plan comes back


class Slots:
    """All slots: the planner's own ones first, then those of pins. counters: of steps that no table has."""

    def __init__(self, served: Iterable[Served], counters: Counter[str]) -> None:
        self._counters = counters
        self._own: Mapping[str, ModelState] = {
            s.name: ModelState(s, Plans(s.name, s.pins, counters, Story(f"plans of {s.name}"))) for s in served
        }
        self._pinned: list[ModelState] = []
        self._illegal = 0  # steps of which somebody was told

    def __iter__(self) -> Iterator[ModelState]:
        return iter([*self._own.values(), *self._pinned])

    def __contains__(self, model: str) -> bool:
        return model in self._own

    def models(self) -> list[ModelState]:
        """Return the planner's own slot of every model."""
        return list(self._own.values())

    def own(self, model: str) -> ModelState:
        """Return the planner's own slot of a model; raises KeyError for one that is not served."""
        return self._own[model]

    def of(self, model: str) -> list[ModelState]:
        """Return all slots of a model, the planner's own first; none of one that is not served."""
        return [slot for slot in self if slot.name == model]

    def pinned(self, model: str | None = None) -> list[ModelState]:
        """Return the slots of pins, of one model or of all, those asked for longest ago first."""
        return sorted((s for s in self._pinned if model in (None, s.name)), key=lambda slot: slot.asked_s)

    def find(self, model: str, pins: Pins | None) -> ModelState | None:
        """Return the slot of a request with these pins, None if there is none yet."""
        own = self._own[model]
        if pins is None or pins == own.plans.pins:
            return own
        return next((slot for slot in self._pinned if slot.name == model and slot.plans.pins == pins), None)

    def add(self, model: str, pins: Pins) -> ModelState:
        """Return a new slot for pins."""
        own = self._own[model]
        plans = Plans(model, pins, self._counters, own.plans.story, f"{model} ({pins})")
        slot = ModelState(own.served, plans, experience=own.experience, pinned=True)
        self._pinned.append(slot)
        return slot

    def drop(self, slot: ModelState) -> None:
        """Forget a slot of pins, of which nothing is left."""
        self._pinned.remove(slot)

    # -- whose something is ---------------------------------------------------------------------------------------

    def running(self, model: str, admission: int) -> ModelState | None:
        """Return the slot of a run."""
        return next((slot for slot in self.of(model) if admission in slot.runs), None)

    def searching(self, model: str, ticket: int) -> ModelState | None:
        """Return the slot of a search."""
        return next((s for s in self.of(model) if (found := s.plans.searching) and found.ticket == ticket), None)

    def preparing(self, model: str, txn: int) -> ModelState | None:
        """Return the slot of a preparation."""
        return next((s for s in self.of(model) if (found := s.plans.preparing) and found.txn == txn), None)

    def computing(self) -> frozenset[str]:
        """Return the models of which runs are under way."""
        return frozenset(slot.name for slot in self if slot.runs)

    def jobs(self, model: str) -> list[Job]:
        """Return all requests for a model that wait or run; one of several runs comes several times."""
        return [job for slot in self.of(model) for job in slot.jobs()]

    def epochs(self) -> set[Epoch]:
        """Return the epochs of all plans that devices may hold."""
        return {epoch for slot in self for epoch in slot.plans.epochs()}

    def illegal(self) -> str | None:
        """Return what there is to tell of illegal steps, if there are more than when it was asked last."""
        count = self._counters["illegal_step"]
        if count == self._illegal:
            return None
        self._illegal = count
        return f"plans took {count} illegal steps so far: a mistake in the planner; see `hepti plan --story`"

    # -- who makes room for whom ----------------------------------------------------------------------------------

    def who_makes_room(self, slot: ModelState, device: str) -> list[ModelState]:
        """Return the slots whose plans must go, for a plan of `slot` that does not fit on a device.

        First pins that nobody waits for. Then the planner's own plan has the right of way before pins of any model;
        and a plan in its old one's place goes before one that takes somebody else's.
        """
        others = [s for s in self if s is not slot and s.plans.on(device)]
        pins = [s for s in others if s.pinned]
        own = [slot] if slot.plans.serving else []
        if slot.pinned:
            stages = [[s for s in pins if s.idle], own, [s for s in others if s.name == slot.name]]
        else:
            stages = [[s for s in pins if s.idle], pins, own]
        return next((stage for stage in stages if stage), [])

    def check(self, in_flight: int) -> None:
        """Raise AssertionError if a slot is broken, or there are more of pins, or more runs at once, than may be."""
        for slot in self:
            slot.check()
        for model in self.models():
            assert len(self.pinned(model.name)) <= PINNED
            runs = [run for slot in self.of(model.name) for run in slot.runs.values()]
            for taken, most in (([r for r in runs if r.computes], in_flight), (runs, in_flight + UNREPORTED)):
                each = Counter(device for run in taken for device in run.plan.devices)
                assert max(each.values(), default=0) <= most
            for run in runs:
                if run.bag is not None:
                    run.bag.check()

    def may_search(self, slot: ModelState, now: float) -> bool:
        """Return whether a slot may have its next plan now, with regard to the other slots of its model."""
        others = [s for s in self.of(slot.name) if s is not slot]
        one_by_one = not any(s.plans.searching or s.plans.preparing for s in others)
        if slot.pinned and not (one_by_one and self.may_run(slot)):
            return False  # the planner's own waits for nobody
        if not slot.displaced:
            return True
        return all(self._lets(s, slot, now) for s in others if s.plans.standing or s.plans.preparing)

    def may_run(self, slot: ModelState) -> bool:
        """Return whether the first request of a slot comes before all those of slots that made room."""
        waiting = [s for s in self.of(slot.name) if s is not slot and s.displaced]
        return all(slot.queue.first() < s.queue.first() for s in waiting if s.queue)

    @staticmethod
    def _lets(holder: ModelState, slot: ModelState, now: float) -> bool:
        """Return whether a slot that has a plan lets one that made room have the next."""
        if slot.queue:
            return slot.queue.first() < holder.queue.first()
        return holder.idle and now - holder.asked_s > COMES_BACK_S
