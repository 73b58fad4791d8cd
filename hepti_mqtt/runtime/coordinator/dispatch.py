"""The start of runs: which queued requests run next, under which plan or replica, and when."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final, NamedTuple

from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.schedule import route_to_replicas
from hepti_mqtt.core.spec import RequestShape
from hepti_mqtt.models import is_planned_for
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.frames import Continued, DecoderSession
from hepti_mqtt.protocol.topics import publish_bytes
from hepti_mqtt.runtime.coordinator.ahead import StepsAhead
from hepti_mqtt.runtime.coordinator.batches import MICRO_BATCH_TOKENS, Batch, concatenate, pack_steps
from hepti_mqtt.runtime.coordinator.fair_queue import FairQueue
from hepti_mqtt.runtime.coordinator.fleet import Fleet
from hepti_mqtt.runtime.coordinator.interface import AnswerRequest, CoordinatorCommand
from hepti_mqtt.runtime.coordinator.kv_caches import KvCaches
from hepti_mqtt.runtime.coordinator.next_batch import next_batch
from hepti_mqtt.runtime.coordinator.orders import Orders
from hepti_mqtt.runtime.coordinator.plan_groups import PlanGroup, PlanGroups
from hepti_mqtt.runtime.coordinator.plans import Ids
from hepti_mqtt.runtime.coordinator.requests import Request, RunStats, WorkItem
from hepti_mqtt.runtime.coordinator.runs import (
    MAX_UNREPORTED_RUNS,
    DeviceAnswers,
    OtherWork,
    Run,
    RunEvent,
    RunKind,
    RunState,
    RunTimes,
)
from hepti_mqtt.runtime.coordinator.texts import Generation
from hepti_mqtt.runtime.machinery import StateMachine
from hepti_mqtt.strategies.plan_programs import task_count
from hepti_mqtt.strategies.task_queue import TaskQueue

MIN_RUN_S: Final = 1e-6
PROBE_FACTOR: Final = 6.0  # expected durations of a run until its devices are probed
PROBE_MIN_S: Final = 0.5
PROBE_MAX_S: Final = 30.0
OVERDUE_S: Final = 3.0
OVERDUE_FACTOR: Final = 20.0
MAX_KINDS: Final = 256  # remembered kinds of runs
OVERDUE_MAX_S: Final = 300.0  # limit of the timeout, because predictions may be wrong by any factor


class ReplicaLoad(NamedTuple):
    """The load of a replica."""

    plan: Plan  #: of the replica
    busy_s: float  #: predicted end of its runs
    token_s: float  #: predicted seconds per token
    has_room: bool  #: for another run


class Assignment(NamedTuple):
    """Where the next run goes."""

    plan: Plan
    max_items: int | None = None  #: limit of its items, None for no limit


def next_assignment(now: float, loads: Sequence[ReplicaLoad], queue: FairQueue) -> Assignment | None:
    """Return the next assignment to a replica with room; None if every queued item would finish sooner on a busy one.

    Each request goes to the replica that finishes it first, given the requests before it.
    """
    sizes = (float(max(item.tokens, _min_tokens(loads[0].plan))) for item in queue.in_turn())
    targets = list(route_to_replicas(now, [(load.busy_s, load.token_s) for load in loads], sizes))
    first = next((i for i in targets if loads[i].has_room), None)
    return None if first is None else Assignment(loads[first].plan, targets.count(first))


def token_s(plan: Plan) -> float:
    """Return the predicted seconds per token; above 0, otherwise one replica would get everything."""
    return max(plan.predicted_s, MIN_RUN_S) / max(plan.predicted_tokens, 1)


def estimate_run_s(plan: Plan, tokens: int) -> float:
    """Return the predicted seconds of a run of this many tokens."""
    return token_s(plan) * max(tokens, _min_tokens(plan))


def _min_tokens(plan: Plan) -> int:
    """Return the number of tokens below which a run is not faster."""
    return min(MICRO_BATCH_TOKENS, max(plan.predicted_tokens, 1))


class Dispatcher:
    """Begins runs; in_flight: concurrent runs of a model on a device, over all pins."""

    def __init__(
        self,
        groups: PlanGroups,
        fleet: Fleet,
        ids: Ids,
        orders: Orders,
        ahead: StepsAhead,
        caches: KvCaches,
        machine: StateMachine[RunState, RunEvent],
        in_flight: int,
    ) -> None:
        self._groups, self._fleet, self._ids, self._orders = groups, fleet, ids, orders
        self._ahead, self._caches, self._in_flight = ahead, caches, in_flight
        self._machine = machine
        self._delayed: dict[str, float] = {}  #: due time of the delayed batch of each model
        self._kinds: dict[tuple[PlanVersion, RequestShape], RunKind] = {}

    @property
    def due_s(self) -> float:
        """Return when the next delayed batch is due; infinity if there is none."""
        return min(self._delayed.values(), default=inf)

    def dispatch_ready(self, name: str, now: float) -> list[CoordinatorCommand]:
        """Dispatch queued requests of a model while a plan is active and the limit of concurrent runs allows."""
        groups, out = self._groups.of_model(name), list[CoordinatorCommand]()
        delayed: dict[int, float] = {}  # due times of groups with a delayed batch, infinity without room
        for group in groups:
            if group.queue:
                group.queue.discard_finished()
        while True:
            waiting = (g for g in groups if id(g) not in delayed and g.queue and g.active is not None)
            ready = [group for group in waiting if self._groups.may_run(group)]
            if not ready:
                break
            group = min(ready, key=lambda group: group.queue.oldest_sequence())
            if room_rows := self._caches.room_rows(group):
                out += self._caches.suspend(group, room_rows)
            assigned = self._next_assignment(group, now)
            if assigned is None:
                delayed[id(group)] = inf
                continue
            items, due_s = next_batch(group, assigned.max_items, room_rows)
            if now < due_s:
                delayed[id(group)] = due_s
                continue
            plan, text = assigned.plan, items[0].request.generation
            if text is not None:
                plan = next((p for p in group.session_plans if p.version == text.session.plan_version), plan)
                if self._must_wait(group, items[0]) or not self._has_room(group, plan):
                    delayed[id(group)] = inf
                    continue
            if text is not None and text.session.plan_version != plan.version:  # the first run of a session runs alone
                items = items[:1]
            group.queue.remove(items)
            if items[0].request.wants_result:
                out += self._dispatch(group, plan, items, now)
            else:
                out += self._answer_forecast(group, items[0].request)
        self._delayed[name] = min(delayed.values(), default=inf)
        return out

    def continue_text(self, group: PlanGroup, run: Run, now: float) -> list[CoordinatorCommand] | None:
        """Start the next step of an answered run's text immediately; None if another run may be next.

        No other run comes first if the queues are empty, nothing else runs on the devices, and the plan stays active.
        """
        if len(run.items) > 1 or any(other.queue for other in self._groups.of_model(group.name)):
            return None
        request, plan = run.items[0].request, run.plan
        text = request.generation
        if text is None or not text.is_step or text.session.plan_version != plan.version:
            return None
        if plan not in group.usable_executables or self._concurrent_runs(group.name, plan):
            return None
        group.queue.count_step(request.key.client)
        return self._dispatch(group, plan, run.items, now)

    def _concurrent_runs(self, name: str, plan: Plan) -> list[Run]:
        """Return the runs of a model, over all pins, that share devices with a plan.

        Runs that lack only reports occupy no device: `MAX_UNREPORTED_RUNS` of them do not count.
        """
        runs = [run for group in self._groups.of_model(name) for run in group.runs.values()]
        sharing = [run for run in runs if not set(run.plan.devices).isdisjoint(plan.devices)]
        unreported = [run for run in sharing if not run.is_computing]
        return [run for run in sharing if run.is_computing] + unreported[MAX_UNREPORTED_RUNS:]

    def _has_room(self, group: PlanGroup, plan: Plan) -> bool:
        return len(self._concurrent_runs(group.name, plan)) < self._in_flight

    @staticmethod
    def _must_wait(group: PlanGroup, item: WorkItem) -> bool:
        """Return whether a prompt waits for the running text of a client with fewer tokens served.

        Otherwise the steps of that text would wait for all rows of the prompt.
        """
        if item.tokens == 1:
            return False
        client = item.request.key.client
        running = [i.request for run in group.runs.values() if run.is_computing for i in run.items]
        others = {r.key.client for r in running if r.generation is not None and not r.finished} - {client}
        return any(group.queue.served(other) < group.queue.served(client) for other in others)

    def _next_assignment(self, group: PlanGroup, now: float) -> Assignment | None:
        """Return the next assignment to the active plan or its fastest replica; None without room."""
        plans = group.usable_executables
        if len(plans) > 1:
            return next_assignment(now, self._replica_loads(group, plans, now), group.queue)
        return Assignment(plans[0]) if plans and self._has_room(group, plans[0]) else None

    def _replica_loads(self, group: PlanGroup, replicas: Sequence[Plan], now: float) -> list[ReplicaLoad]:
        """Return the loads of the replicas of the active plan."""
        assert group.active is not None
        factor, out = group.durations.expected(group.active).mean, list[ReplicaLoad]()
        for plan in replicas:
            runs = self._concurrent_runs(group.name, plan)
            # A replica with an overdue run counts as busier than an idle one.
            busy_s = max([now, *(run.times.expected_end_s for run in runs)]) + len(runs) * MIN_RUN_S
            out.append(ReplicaLoad(plan, busy_s, token_s(plan) * factor, self._has_room(group, plan)))
        return out

    def hand_over(self, group: PlanGroup, run: Run, plan: Plan, block: int, now: float) -> list[CoordinatorCommand]:
        """Stop a run before a block, and dispatch the rest under another plan."""
        del group.runs[run.run_id]
        run.state = self._machine.step(f"run {run.run_id}", run.state, "continue", now)
        out = self._dispatch(group, plan, run.items, now, (run, block))
        heir = next(reversed(group.runs))
        message = messages.HandOver(run.plan.model, run.plan_version, run.run_id, block, heir, plan.to_dict())
        leaving = (device for device in run.plan.devices if device not in plan.devices)
        return [*out, *(self._orders.command(device, message) for device in leaving)]

    def _dispatch(
        self,
        group: PlanGroup,
        plan: Plan,
        items: tuple[WorkItem, ...],
        now: float,
        continued: tuple[Run, int] | None = None,
    ) -> list[CoordinatorCommand]:
        """Dispatch items under a plan; continued: a run and the block from which this run continues it."""
        out, begun = list[CoordinatorCommand](), self._ahead.take_begun(plan, items)
        items = begun[0].items if begun else items
        before = None if continued is None else Continued(continued[0].run_id, continued[1])
        generations = [item.request.generation for item in items if item.request.generation is not None]
        for generation in generations:
            if generation.session.plan_version != plan.version:
                out += self._caches.begin(group, plan, generation)
        is_step = bool(generations) and all(g.joins for g in generations)
        part, sessions = self._next_part(group, plan, items, generations, bool(begun))
        group.recent.shapes[part.shape] = None
        kind = self._kind_of(group, plan, part.shape)
        step = begun[0] if begun and begun[0].is_run(part, sessions) else None
        if step is not None:
            run_id, sent = step.run_id, step.nbytes
            self._ahead.make_run(begun)
        else:
            run_id = self._ids.next_run()
            order = self._orders.work(plan, run_id, part, sessions, continued=before)
            sent, out = publish_bytes(order.topic, order.nbytes, 1), [*out, *self._ahead.cancel(begun), order]
        if generations and not group.queue and not any(run.is_computing for run in group.runs.values()):
            out += self._ahead.order(group.served.spec, plan, run_id, items)
        concurrent = self._concurrent_runs(group.name, plan)
        expectation = group.durations.expected(plan)
        run_s = plan.predicted_s * group.durations.length_factor(plan, part.shape.size)
        expected_s = run_s * expectation.mean * max(len(concurrent), 1)
        alone_s = run_s if generations else estimate_run_s(plan, part.shape.size)
        end_s = max([now, *(run.times.expected_end_s for run in concurrent)]) + expectation.mean * alone_s
        probe_at_s = now + min(max(PROBE_FACTOR * expected_s, PROBE_MIN_S), PROBE_MAX_S)
        # Doubled after each failed attempt, so that a merely busy machine does not lose the request again.
        attempts = max(item.request.failed_attempts[item.index] for item in items)
        patience_s = OVERDUE_S * 2**attempts + OVERDUE_FACTOR * expected_s
        deadline_s = now + min(patience_s, OVERDUE_MAX_S)
        others = [run for run in self._groups.runs() if run.is_computing]
        for run in others:
            run.other_work.alone = False
        searches = any(other.plans.searching is not None for other in self._groups)
        ids = () if step is None else tuple(part.inputs[len(sessions) : 2 * len(sessions)].tolist())
        group.runs[run_id] = Run(
            run_id,
            items,
            part.shape,
            plan,
            group.cluster(),
            RunTimes(now, expected_s, end_s, probe_at_s, deadline_s, expectation),
            sent,
            OtherWork(not others and before is None, only_search=searches),
            kind,
            self._machine.begin(f"run {run_id}", now),
            DeviceAnswers(ids=ids),
            task_queue=TaskQueue(kind.tasks, plan.devices, now) if kind.tasks else None,
            before=None if continued is None else continued[0],
            is_step=is_step,
        )
        return out

    def _kind_of(self, group: PlanGroup, plan: Plan, shape: RequestShape) -> RunKind:
        """Return the common properties of runs of a shape under a plan, from a cache."""
        key, spec = (plan.version, shape), group.served.spec
        if (kind := self._kinds.get(key)) is None:
            if len(self._kinds) >= MAX_KINDS:
                self._kinds.clear()
            output_shape, is_planned = spec.output_shape(shape), is_planned_for(spec, shape)
            kind = RunKind(output_shape, is_planned, task_count(spec, plan), self._fleet.frame_key(plan))
            self._kinds[key] = kind
        return kind

    @staticmethod
    def _next_part(
        group: PlanGroup, plan: Plan, items: tuple[WorkItem, ...], generations: Sequence[Generation], begun: bool
    ) -> tuple[Batch, tuple[DecoderSession, ...]]:
        """Return the batch of some items, and their sessions; begun: devices have begun its step ahead."""
        if not generations:
            return concatenate([item.batch for item in items]), ()
        pace = group.durations.step_pace(plan) if len(generations) == 1 else None
        return pack_steps([generation.next_batch(pace, begun) for generation in generations])

    @staticmethod
    def _answer_forecast(group: PlanGroup, request: Request) -> list[CoordinatorCommand]:
        """Answer a request for the plan only, with empty run statistics."""
        plan, request.finished = group.active, True
        assert plan is not None
        expected, cluster = group.durations.expected(plan), group.cluster()
        runs = (RunStats(plan, cluster, shape, {}, {}, {}, 0, expectation=expected) for shape in request.run_shapes())
        return [AnswerRequest(request, plan, tuple(runs))]
