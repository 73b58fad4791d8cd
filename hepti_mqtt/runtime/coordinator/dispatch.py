"""Dispatch: which queued requests run next, under which plan or replica of it, and when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import Final, NamedTuple

from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import task_count
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.frames import Continued, DecoderSession
from hepti_mqtt.protocol.topics import publish_bytes
from hepti_mqtt.runtime.coordinator.ahead import StepsAhead
from hepti_mqtt.runtime.coordinator.batches import MICRO_BATCH_TOKENS, Batch, concatenate, pack_steps
from hepti_mqtt.runtime.coordinator.fair_queue import FairQueue
from hepti_mqtt.runtime.coordinator.fleet import Fleet
from hepti_mqtt.runtime.coordinator.interface import AnswerRequest, CoordinatorCommand
from hepti_mqtt.runtime.coordinator.kv_caches import KvCaches
from hepti_mqtt.runtime.coordinator.models import PlanGroup, PlanGroups
from hepti_mqtt.runtime.coordinator.next_batch import next_batch
from hepti_mqtt.runtime.coordinator.orders import Orders
from hepti_mqtt.runtime.coordinator.plans import Ids
from hepti_mqtt.runtime.coordinator.requests import Request, RunStats, WorkItem
from hepti_mqtt.runtime.coordinator.runs import (
    MAX_UNREPORTED_RUNS,
    BesideRun,
    DeviceAnswers,
    Run,
    RunEvent,
    RunState,
    RunTimes,
)
from hepti_mqtt.runtime.coordinator.texts import Generation
from hepti_mqtt.runtime.machinery import StateMachine
from hepti_mqtt.schedule import route_to_replicas
from hepti_mqtt.task_queue import TaskQueue

MIN_RUN_S: Final = 1e-6
PROBE_FACTOR: Final = 6.0  # times the expected duration of a run: then its devices are probed
PROBE_MIN_S: Final = 0.5
PROBE_MAX_S: Final = 30.0
OVERDUE_S: Final = 3.0
OVERDUE_FACTOR: Final = 20.0
OVERDUE_MAX_S: Final = 300.0  # whatever the prediction: published measurements may be wrong by any factor


class ReplicaLoad(NamedTuple):
    """A replica: the predicted time until which it is busy, its seconds per token, and whether a run fits."""

    plan: Plan
    busy_s: float
    token_s: float
    has_room: bool


class Assignment(NamedTuple):
    """The plan of the next run and how many queued items it may have at most; None: as many as run together."""

    plan: Plan
    max_items: int | None = None


def next_assignment(now: float, lanes: Sequence[ReplicaLoad], queue: FairQueue) -> Assignment | None:
    """Return the next assignment to a replica with room; None if busy replicas answer all queued items sooner.

    Each request goes to the replica that finishes it first, given the requests ahead of it.
    """
    if len(lanes) < 2:
        return Assignment(lanes[0].plan) if lanes and lanes[0].has_room else None
    sizes = (float(max(item.tokens, _min_tokens(lanes[0].plan))) for item in queue.in_turn())
    dealt = list(route_to_replicas(now, [(lane.busy_s, lane.token_s) for lane in lanes], sizes))
    first = next((i for i in dealt if lanes[i].has_room), None)
    return None if first is None else Assignment(lanes[first].plan, dealt.count(first))


def token_s(plan: Plan) -> float:
    """Return the predicted seconds per token; above 0, or one replica would get everything."""
    return max(plan.predicted_s, MIN_RUN_S) / max(plan.predicted_tokens, 1)


def estimate_run_s(plan: Plan, tokens: int) -> float:
    """Return the predicted seconds of a run of this many tokens."""
    return token_s(plan) * max(tokens, _min_tokens(plan))


def _min_tokens(plan: Plan) -> int:
    """Return the number of tokens below which a run gets no faster."""
    return min(MICRO_BATCH_TOKENS, max(plan.predicted_tokens, 1))


class Dispatcher:
    """Begins runs. in_flight: runs of a model at once on a device, whatever their pins."""

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
        self._held: dict[str, float] = {}  #: by model: when its delayed batch is due

    @property
    def due_s(self) -> float:
        """Return when the next delayed batch is due; infinity if there is none."""
        return min(self._held.values(), default=inf)

    def _runs(self) -> Iterator[Run]:
        return (run for group in self._groups for run in group.runs.values())

    def dispatch_ready(self, name: str, now: float) -> list[CoordinatorCommand]:
        """Dispatch queued requests of a model while a plan is active and the limit of concurrent runs allows."""
        for group in self._groups.of_model(name):
            group.queue.discard_finished()
        out: list[CoordinatorCommand] = []
        held: dict[int, float] = {}  # groups whose requests wait for others, and until when
        while True:
            groups = (g for g in self._groups.of_model(name) if g.active and g.queue and self._groups.may_run(g))
            able = [group for group in groups if id(group) not in held]
            if not able:
                break
            group = min(able, key=lambda group: group.queue.oldest_sequence())
            out += self._caches.suspend(group)
            assigned = next_assignment(now, self._replica_loads(group, now), group.queue)
            if assigned is None:
                held[id(group)] = inf
                continue
            items, due_s = next_batch(group, assigned.max_items, self._caches.room_rows(group))
            if now < due_s:
                held[id(group)] = due_s
                continue
            plan = self._plan_of_session(group, items[0].request.generation) or assigned.plan
            if not self._has_room(group, plan) or self._is_ahead(group, items[0]):
                held[id(group)] = inf
                continue
            assert group.active is not None
            made = items[0].request.generation
            if (
                made is not None and made.session.plan_version != plan.version
            ):  # its session begins with a run of its own
                items = items[:1]
            group.queue.remove(items)
            if items[0].request.wants_result:
                out += self._dispatch(group, plan, items, now)
            else:
                out += self._answer_forecast(group, group.active, items[0].request)
        self._held[name] = min(held.values(), default=inf)
        return out

    def _concurrent_runs(self, name: str, plan: Plan) -> list[Run]:
        """Return the runs of a model, whatever their pins, that would share devices with a run under a plan.

        Runs that only lack reports occupy no device; those beyond a few count, so that their number is bounded.
        """
        runs = [run for group in self._groups.of_model(name) for run in group.runs.values()]
        here = [run for run in runs if not set(run.plan.devices).isdisjoint(plan.devices)]
        unreported = [run for run in here if not run.is_computing]
        return [run for run in here if run.is_computing] + unreported[MAX_UNREPORTED_RUNS:]

    def _has_room(self, group: PlanGroup, plan: Plan) -> bool:
        return len(self._concurrent_runs(group.name, plan)) < self._in_flight

    @staticmethod
    def _is_ahead(group: PlanGroup, item: WorkItem) -> bool:
        """Return whether a prompt waits for texts under way: their steps would wait for all of its rows.

        It does while one of them is of a user who has had fewer tokens than its own.
        """
        if item.request.generation is None or item.tokens == 1:
            return False
        client = item.request.key.client
        beside = [i.request for run in group.runs.values() if run.is_computing for i in run.items]
        clients = {r.key.client for r in beside if r.generation is not None and not r.finished} - {client}
        return any(group.queue.served(other) < group.queue.served(client) for other in clients)

    def _replica_loads(self, group: PlanGroup, now: float) -> list[ReplicaLoad]:
        """Return the replicas of the active plan, or the plan itself."""
        assert group.active is not None
        learned, out = group.expected(group.active).mean, list[ReplicaLoad]()
        for plan in group.usable_executables:
            beside = self._concurrent_runs(group.name, plan)
            # What runs longer than predicted still keeps it busier than one where nothing runs.
            busy_s = max([now, *(run.times.expected_end_s for run in beside)]) + len(beside) * MIN_RUN_S
            out.append(ReplicaLoad(plan, busy_s, token_s(plan) * learned, self._has_room(group, plan)))
        return out

    @staticmethod
    def _plan_of_session(group: PlanGroup, generation: Generation | None) -> Plan | None:
        """Return the plan, or the replica of one, that has a session's cache, None if none has."""
        if generation is None:
            return None
        return next((p for p in group.session_plans if p.version == generation.session.plan_version), None)

    def go_on(self, group: PlanGroup, run: Run, plan: Plan, block: int, now: float) -> list[CoordinatorCommand]:
        """Let a run go on under another plan from a block on: its devices end it there, and begin with the rest."""
        del group.runs[run.run_id]
        run.state = self._machine.step(f"run {run.run_id}", run.state, "continue", now)
        out = self._dispatch(group, plan, run.items, now, (run, block))
        heir = next(reversed(group.runs))
        left = messages.HandOver(run.plan.model, run.plan_version, run.run_id, block, heir, plan.to_dict())
        return [
            *out,
            *(self._orders.command(device, left) for device in run.plan.devices if device not in plan.devices),
        ]

    def _searches(self) -> bool:
        return any(group.plans.searching is not None for group in self._groups)

    def _dispatch(
        self,
        group: PlanGroup,
        plan: Plan,
        items: tuple[WorkItem, ...],
        now: float,
        continued: tuple[Run, int] | None = None,
    ) -> list[CoordinatorCommand]:
        """Dispatch items under a plan; continued: as the rest of a run, from a block on."""
        out, begun = list[CoordinatorCommand](), self._ahead.take_begun(plan, items)
        items = begun[0].items if begun else items
        before = None if continued is None else Continued(continued[0].run_id, continued[1])
        generations = [item.request.generation for item in items if item.request.generation is not None]
        for generation in generations:
            if generation.session.plan_version != plan.version:
                out += self._caches.begin(group, plan, generation)
        steps = bool(generations) and all(g.joins for g in generations)
        part, sessions = self._next_part(group, plan, items, generations, bool(begun))
        group.recent.record_shape(part.shape)
        tasks = task_count(group.served.spec, plan)
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
        beside = self._concurrent_runs(group.name, plan)
        expectation = group.expected(plan)
        learned = expectation.mean
        run_s = plan.predicted_s * group.length_factor(plan, part.shape.size)
        expected_s = run_s * learned * max(len(beside), 1)
        alone_s = run_s if generations else estimate_run_s(plan, part.shape.size)
        until_s = max([now, *(run.times.expected_end_s for run in beside)]) + learned * alone_s
        doubt = now + min(max(PROBE_FACTOR * expected_s, PROBE_MIN_S), PROBE_MAX_S)
        # Twice as long after each loss: a machine that is merely busy must not lose a request by being asked again.
        patience_s = OVERDUE_S * 2 ** max(i.request.losses[i.index] for i in items) + OVERDUE_FACTOR * expected_s
        overdue = now + min(patience_s, OVERDUE_MAX_S)
        others = [run for run in self._runs() if run.is_computing]
        for run in others:
            run.beside.alone = False
        ids = () if step is None else tuple(part.inputs[len(sessions) : 2 * len(sessions)].tolist())
        group.runs[run_id] = Run(
            run_id,
            items,
            part.shape,
            plan,
            group.cluster(),
            RunTimes(now, expected_s, until_s, doubt, overdue, expectation),
            sent,
            BesideRun(not others and before is None, only_search=self._searches()),
            self._machine.begin(f"run {run_id}", now),
            DeviceAnswers(ids=ids),
            task_queue=TaskQueue(tasks, plan.devices, now) if tasks else None,
            frame_key=self._fleet.frame_key(plan),
            before=None if continued is None else continued[0],
            steps=steps,
        )
        return out

    @staticmethod
    def _next_part(
        group: PlanGroup, plan: Plan, items: tuple[WorkItem, ...], generations: Sequence[Generation], begun: bool
    ) -> tuple[Batch, tuple[DecoderSession, ...]]:
        """Return what items run together, and their sessions; begun: devices have begun with it by themselves."""
        if not generations:
            return concatenate([item.batch for item in items]), ()
        pace = group.step_pace(plan) if len(generations) == 1 else None
        return pack_steps([generation.next_batch(pace, begun) for generation in generations])

    def _answer_forecast(self, group: PlanGroup, plan: Plan, request: Request) -> list[CoordinatorCommand]:
        """Answer a request that only wants the plan: with runs that took nothing."""
        request.finished = True
        expected, cluster = group.expected(plan), group.cluster()
        runs = (RunStats(plan, cluster, shape, {}, {}, {}, 0, expectation=expected) for shape in request.run_shapes())
        return [AnswerRequest(request, plan, tuple(runs))]
