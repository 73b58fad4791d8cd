"""Requests from their arrival to their answer: queued, dispatched under a plan, and run again when a run is lost."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Final, NamedTuple

import numpy as np

from hepti_mqtt.cost.memory import session_rows
from hepti_mqtt.errors import (
    CancelledRequestError,
    DeadlineError,
    HeptiError,
    IdInUseError,
    OverloadedError,
    RemoteError,
)
from hepti_mqtt.ids import PlanVersion
from hepti_mqtt.models import is_planned_for
from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import root_begins, task_count
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.frames import MAX_SESSION, Continued, DecoderSession, Followed, Frame, encode_work
from hepti_mqtt.protocol.topics import Topics, publish_bytes
from hepti_mqtt.runtime.coordinator.fleet import Fleet
from hepti_mqtt.runtime.coordinator.interface import (
    AnswerRequest,
    CoordinatorCommand,
    DeviceFrame,
    LogEvent,
    RefuseRequest,
    TokenReady,
)
from hepti_mqtt.runtime.coordinator.models import PlanGroup, PlanGroups
from hepti_mqtt.runtime.coordinator.plans import Ids
from hepti_mqtt.runtime.coordinator.prefixes import HeldSessions
from hepti_mqtt.runtime.coordinator.requests import (
    MAX_UNREPORTED_RUNS,
    MICRO_BATCH_TOKENS,
    Array,
    Batch,
    FairQueue,
    FollowingStep,
    Generation,
    Progress,
    Request,
    RequestKey,
    Run,
    RunStats,
    WorkItem,
    concatenate,
    pack_steps,
    split_into_micro_batches,
    split_output,
)
from hepti_mqtt.runtime.machinery import Publish
from hepti_mqtt.schedule import route_to_replicas
from hepti_mqtt.spec import Draw
from hepti_mqtt.task_queue import TaskQueue

MIN_RUN_S: Final = 1e-6

RunMessage = Frame | messages.RunFailed | messages.TaskDone | messages.RunProgress


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


MAX_QUEUED_PER_CLIENT: Final = 64  # requests of one client that wait, per model
MAX_QUEUED: Final = 256  # and of all clients
MAX_IN_BURST: Final = 512  # after a pause: as many as a broker hands over
BURST_S: Final = 10.0  # so long clients and broker may take to hand over what they have kept
MAX_QUEUED_BYTES: Final = 256 << 20  # of what all of them bring
TAKEN_BACK_S: Final = 600.0  # so long a broker may keep a request that is taken back: others fill what it delivers
MAX_TAKEN_BACK: Final = 1024  # such words that are remembered
MAX_ATTEMPTS: Final = 4
STEPS_AHEAD: Final = 2  # that devices begin by themselves: what the planner says to one has as long as a step takes
LINK_LOSS_WINDOW_S: Final = 5.0  # one lost connection between two devices may cost a request four runs
PROBE_FACTOR: Final = 6.0  # times the expected duration of a run: then its devices are probed
PROBE_MIN_S: Final = 0.5
PROBE_MAX_S: Final = 30.0
OVERDUE_S: Final = 3.0
OVERDUE_FACTOR: Final = 20.0
OVERDUE_MAX_S: Final = 300.0  # whatever the prediction: published measurements may be wrong by any factor


class Scheduler:
    """Queues, runs and answers of every plan group; the session decides which plan is active.

    in_flight: runs of a model at once on a device, whatever their pins. counters: frames and messages that were not
    understood or came too late, by name.
    """

    def __init__(
        self, topics: Topics, groups: PlanGroups, fleet: Fleet, ids: Ids, in_flight: int, counters: Counter[str]
    ) -> None:
        self._topics, self._groups, self._fleet, self._ids, self._in_flight = topics, groups, fleet, ids, in_flight
        self._counters = counters
        self._held: dict[str, float] = {}  # until when requests for a model wait for others
        self._number = 0
        self._burst_until_s = -inf
        self._session = 0
        self._sessions = HeldSessions()
        self._taken_back = OrderedDict[RequestKey, float]()  # what has not come yet, and until when it is expected

    @property
    def due_s(self) -> float:
        """Return when the next delayed batch or overdue lease is due; infinity if there is none."""
        queues = (run.task_queue for run in self._runs() if run.plan.root not in run.reports)
        return min(
            [*self._held.values(), *(queue.next_takeover_s for queue in queues if queue is not None)], default=inf
        )

    def _runs(self) -> Iterator[Run]:
        return (run for group in self._groups for run in group.runs.values())

    def _run_of(self, device: str, message: RunMessage) -> tuple[PlanGroup, Run] | None:
        """Return the run that a device's message is about; None if it is over, or the device has no part in it."""
        group = self._groups.group_of_run(message.model, message.run_id)
        run = None if group is None else group.runs[message.run_id]
        if group is None or run is None:
            return None
        plans = (each.plan for each in (run, run.before) if each is not None)
        known = any(plan.version == message.plan_version and device in plan.devices for plan in plans)
        return (group, run) if known else None

    def expect_burst(self, now: float) -> None:
        """The broker is back: what it and clients have kept meanwhile comes at once, and is no overload."""
        self._burst_until_s = now + BURST_S

    def refuse_or_none(self, request: Request, now: float) -> list[CoordinatorCommand] | None:
        """Return the commands that refuse or ignore a request; None if it may be queued."""
        name = request.key.model
        same = next((j for j in self._groups.requests(name) if j.key == request.key), None)
        if same is not None and same.digest != request.digest:
            return [RefuseRequest(request, IdInUseError.of(request.key.id))]
        if same is not None:
            self._counters["repeated_request"] += 1
            return []
        if self._taken_back.pop(request.key, -inf) > now:
            return [RefuseRequest(request, _taken_back())]
        waiting = list(
            {id(item.request): item.request for group in self._groups.of_model(name) for item in group.queue}.values()
        )
        is_burst = now < self._burst_until_s
        most_of_client, most = (MAX_IN_BURST, MAX_IN_BURST) if is_burst else (MAX_QUEUED_PER_CLIENT, MAX_QUEUED)
        if (of_client := sum(j.key.client == request.key.client for j in waiting)) >= most_of_client:
            text = f"{of_client} requests of {request.key.client} wait for {name} already; wait for some answers"
            return self.refuse_overloaded(request, text)
        nbytes = sum(j.nbytes for j in waiting)
        if len(waiting) >= most or (waiting and nbytes + request.nbytes > MAX_QUEUED_BYTES):
            text = f"{len(waiting)} requests of {nbytes} bytes wait for {name} already; try again later, or add devices"
            return self.refuse_overloaded(request, text)
        return None

    @staticmethod
    def refuse_overloaded(request: Request, text: str) -> list[CoordinatorCommand]:
        """Refuse a request that there is no room for."""
        return [LogEvent("overloaded", text), RefuseRequest(request, OverloadedError(text))]

    def enqueue(self, group: PlanGroup, request: Request, now: float) -> list[CoordinatorCommand]:
        """Queue a request in its group, or refuse it if there is no plan and none to come."""
        group.pace.record_request(now)
        if group.error is not None and not group.plans.may_serve():
            return [RefuseRequest(request, group.error)]
        self._number += 1
        request.sequence, request.arrived_s = self._number, now
        longest = max(c.shape.size for c in request.batches)
        generation = request.generation
        grows = generation is not None and not generation.carried.size  # else what it carries is what takes the time
        if not grows:
            group.recent_lengths.append(longest)
        if group.active is not None and group.active.replicas and request.wants_result and request.generation is None:
            request.batches = split_into_micro_batches(request.batches)  # each goes to the replica that is free first
        group.queue.append(WorkItem(request, i) for i in range(len(request.batches) if request.wants_result else 1))
        return []

    def dispatch_ready(self, name: str, now: float) -> list[CoordinatorCommand]:
        """Dispatch the queued requests of a model as far as there are plans for them and room beside other runs."""
        out: list[CoordinatorCommand] = []
        held: dict[int, float] = {}  # groups whose requests wait for others, and until when
        while True:
            groups = (g for g in self._groups.of_model(name) if g.active and g.queue and self._groups.may_run(g))
            able = [group for group in groups if id(group) not in held]
            if not able:
                break
            group = min(able, key=lambda group: group.queue.oldest_sequence())
            out += self._suspend_sessions(group)
            assigned = next_assignment(now, self._replica_loads(group, now), group.queue)
            if assigned is None:
                held[id(group)] = inf
                continue
            items, due_s = group.next_batch(assigned.max_items, self._room_rows(group))
            if now < due_s:
                held[id(group)] = due_s
                continue
            plan = self._plan_of_session(group, items[0].request.generation) or assigned.plan
            if not self._has_room(group, plan) or self._is_ahead(group, items[0]):
                held[id(group)] = inf
                continue
            assert group.active is not None
            made = items[0].request.generation
            if made is not None and made.plan_version != plan.version:  # its session begins with a run of its own
                items = items[:1]
            group.queue.remove(items)
            if items[0].request.wants_result:
                out += self._dispatch(group, plan, items, now)
            else:
                out += self._answer_forecast(group, group.active, items[0].request)
        self._held[name] = min(held.values(), default=inf)
        return [*out, *(c for group in self._groups.of_model(name) for c in self._stop_begun(group))]

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
            busy_s = max([now, *(run.expected_end_s for run in beside)]) + len(beside) * MIN_RUN_S
            out.append(ReplicaLoad(plan, busy_s, token_s(plan) * learned, self._has_room(group, plan)))
        return out

    @staticmethod
    def _plan_of_session(group: PlanGroup, generation: Generation | None) -> Plan | None:
        """Return the plan, or the replica of one, that has a session's cache, None if none has."""
        if generation is None:
            return None
        return next((p for p in group.session_plans if p.version == generation.plan_version), None)

    def handle_frame(self, event: DeviceFrame, now: float) -> list[CoordinatorCommand]:
        """Take a part of the output, or a device's report of its run; the last one of a request answers it."""
        frame = event.frame
        if (found := self._run_of(event.device, frame)) is None:
            self._counters["late"] += not (frame.kind == "done" and self._is_early(event.device, frame))
            return []
        group, run = found
        out: list[CoordinatorCommand] = []
        if not frame.has_tag(run.frame_key):
            self._counters["forged"] += 1
            return []
        if run.contradicts(event.device, frame):  # one of both is forged
            self._counters["contradicted"] += 1
            return self._retry_or_fail(group, run, RemoteError(f"two answers of {event.device} differ"), MAX_ATTEMPTS)
        if frame.kind == "output":
            run.parts[event.device, frame.node, frame.part] = (frame.row_start, frame.array())
        elif frame.kind == "done" and len(frame.numbers) == 4:
            run.reports[event.device] = frame.numbers
            if run.task_queue is not None and event.device == run.plan.root:
                # Only now: results that are lost with their device on the way are leased again until then.
                others = (d for d in run.plan.devices if d != run.plan.root and d not in run.lost_devices)
                out = [self._lease(run, device, ()) for device in others]
        else:
            self._counters["foreign_frame"] += 1
        if run.complete():
            return [*out, *self._complete(group, run, now)]
        is_whole = run.early_stats is None and run.has_whole_output(group.served.spec.output_shape(run.shape))
        return [*out, *self._deliver(group, run, now, reported=False)] if is_whole else out

    def handle_failure(self, device: str, message: messages.RunFailed, now: float) -> list[CoordinatorCommand]:
        """Retry a run that was lost on the wire, and once a run that a device could not compute."""
        if (found := self._run_of(device, message)) is None:
            self._counters["late"] += not self._is_early(device, message)
            return []
        group, run = found
        out: list[CoordinatorCommand] = [LogEvent("request_failed", f"{device}: {message.text}")]
        if message.code in ("wire", "session", "link", "passed"):
            same_loss = message.code == "link" and self._is_same_link_loss(run, now)
            lost = run.items_of(message.sessions)
            reused = message.code == "session" and self._forget_reused(run, lost)
            return out + self.retry(group, run, same_loss or message.code == "passed" or reused, lost)
        # What reached the device may have been forged, as this may be, or its memory short.
        return out + self._retry_or_fail(group, run, RemoteError(message.text), 2)

    def _retry_or_fail(self, group: PlanGroup, run: Run, error: RemoteError, tries: int) -> list[CoordinatorCommand]:
        """Run a failed request again, by itself; it ends with the error after this many tries."""
        if not run.is_computing:
            return self._rewind(group, run, error, tries)
        tried = 1 + max((item.request.losses[item.index] for item in run.open_items), default=0)
        if len(run.items) == 1 and tried < tries:
            return self.retry(group, run)
        if len(run.items) == 1:
            out = self._cancel(group, run)
            return out + (self.fail_request(group, run.items[0].request, error) if run.open_items else [])
        for item in run.open_items:  # what is cached may follow from what was forged
            if item.request.generation is not None:
                item.request.generation.leave_session()
        return self._part(group, run)

    def _part(self, group: PlanGroup, run: Run) -> list[CoordinatorCommand]:
        """Take a run of several items back: whose fault it was shows when each runs by itself."""
        out = self._cancel(group, run)
        for item in run.open_items:
            item.request.unbatchable.add(item.index)
        group.queue.prepend(run.open_items)
        return out

    def _forget_reused(self, run: Run, items: Sequence[WorkItem]) -> bool:
        """Forget the sessions of ended requests that items went on with; return whether there were any."""
        made = [item.request.generation for item in items if item.request.generation is not None]
        prefixes = [generation.prefix for generation in made if generation.prefix is not None]
        for prefix in prefixes:
            self._sessions.forget((run.plan_version, prefix.session))
        return bool(prefixes)

    @staticmethod
    def _is_same_link_loss(run: Run, now: float) -> bool:
        """Take it that a connection between devices cost a run; return whether that belongs to an earlier loss."""
        before = max(item.request.last_link_loss_s for item in run.items)
        if now - before < LINK_LOSS_WINDOW_S:
            return True
        for item in run.items:
            item.request.last_link_loss_s = now
        return False

    def retry(
        self, group: PlanGroup, run: Run, blameless: bool = False, failed: Sequence[WorkItem] = ()
    ) -> list[CoordinatorCommand]:
        """Take a run back and queue it first; its job fails after too many attempts.

        blameless: no device had a part in the loss, so it is no attempt. failed: the items that begin again, while the
        others go on as they are; all of them if none is named.
        """
        out = self._cancel(group, run)
        back: list[WorkItem] = []
        whole = [item for item in run.open_items if failed and item not in failed]
        for item in run.open_items:
            request, lost = item.request, item.request.losses
            if request.finished or item in whole:
                continue
            lost[item.index] += not blameless
            if lost[item.index] >= MAX_ATTEMPTS:
                text = (
                    f"Giving up after {lost[item.index]} attempts: devices left, or tensors were lost (a broker drops "
                )
                text += (
                    "messages above max_queued_messages). See `hepti devices`, `hepti doctor` and the planner's log."
                )
                out += self.fail_request(group, request, RemoteError(text))
            elif group.error is not None and not group.plans.may_serve():
                out += self.fail_request(group, request, group.error)
            else:
                back.append(item)
        for item in back:
            if item.request.generation is not None:  # start a new session: devices may have cached different rows
                item.request.generation.leave_session()
            if item.request.losses[item.index] > 1:  # it may be what brings runs to nothing
                item.request.unbatchable.add(item.index)
        group.queue.prepend([*whole, *back])
        return out

    def handle_lost_device(self, group: PlanGroup, run: Run, device: str, now: float) -> list[CoordinatorCommand]:
        """Let others take over the tasks of a lost device, or retry the run: without a queue, or without its root."""
        if run.task_queue is None or device == run.plan.root:
            return self.retry(group, run)
        run.lost_devices.add(device)
        run.reports.pop(device, None)
        run.task_queue.remove_device(device)
        out = self._lease_tasks(run, now)
        return [*out, *self._complete(group, run, now)] if run.complete() else out

    def mark_broker_lost(self) -> None:
        """The broker was lost, and with it whatever was on its way."""
        for run in self._runs():
            run.broker_was_lost = True

    def retry_after_broker_loss(self) -> list[CoordinatorCommand]:
        """Retry the runs that the loss of the broker cut short, as soon as all of their devices are back."""
        cut = [(group, run) for group in self._groups for run in group.runs.values() if run.broker_was_lost]
        back = [(group, run) for group, run in cut if self._fleet.all_back(run.plan.devices)]
        return [command for group, run in back for command in self.retry(group, run, blameless=True)]

    def fail_request(self, group: PlanGroup, request: Request, error: HeptiError) -> list[CoordinatorCommand]:
        """Refuse a request unless it has ended, and cancel the runs that no other request waits for."""
        if request.finished:
            return []
        request.finished = True
        out: list[CoordinatorCommand] = []
        for run in [r for r in group.runs.values() if not r.waiting_requests and r.early_stats is None]:
            out += self._cancel(group, run)
        return [*out, *self._end_session_of(group, request), RefuseRequest(request, error)]

    def take_back(self, key: RequestKey, now: float) -> list[CoordinatorCommand]:
        """End a request that its client takes back; one that has not come yet, when it does."""
        for group in self._groups.of_model(key.model):
            found = next((request for request in group.requests() if request.key == key), None)
            if found is not None:
                out = self.fail_request(group, found, _taken_back())
                group.queue.discard_finished()
                return out
        self._taken_back[key] = now + TAKEN_BACK_S
        if len(self._taken_back) > MAX_TAKEN_BACK:
            self._taken_back.popitem(last=False)
        return []

    def refuse_expired(self, group: PlanGroup, now: float) -> list[CoordinatorCommand]:
        """Refuse the requests whose deadline has passed."""
        late = {id(r): r for r in group.requests() if r.deadline_s is not None and now > r.deadline_s}
        out: list[CoordinatorCommand] = []
        for request in late.values():
            out += self.fail_request(group, request, DeadlineError("the deadline passed before the answer was ready"))
        group.queue.discard_finished()
        return out

    def record_progress(self, device: str, message: messages.RunProgress, now: float) -> Run | None:
        """Take how far a device is with a run; return the run, None if it is over."""
        found = self._run_of(device, message)
        run = None if found is None else found[1]
        if run is not None and (run.progress is None or message.block > run.progress.block):
            run.progress = Progress(message.block, now)
        return run

    def go_on(self, group: PlanGroup, run: Run, plan: Plan, block: int, now: float) -> list[CoordinatorCommand]:
        """Let a run go on under another plan from a block on: its devices end it there, and begin with the rest."""
        del group.runs[run.run_id]
        out = self._dispatch(group, plan, run.items, now, (run, block))
        heir = next(reversed(group.runs))
        left = messages.HandOver(run.plan.model, run.plan_version, run.run_id, block, heir, plan.to_dict())
        return [*out, *(self._command(device, left) for device in run.plan.devices if device not in plan.devices)]

    def _dispatch(
        self,
        group: PlanGroup,
        plan: Plan,
        items: tuple[WorkItem, ...],
        now: float,
        continued: tuple[Run, int] | None = None,
    ) -> list[CoordinatorCommand]:
        """Dispatch items under a plan; continued: as the rest of a run, from a block on."""
        out, begun = list[CoordinatorCommand](), self._take_begun(group, plan, items)
        items = begun[0].items if begun else items
        before = None if continued is None else Continued(continued[0].run_id, continued[1])
        generations = [item.request.generation for item in items if item.request.generation is not None]
        for generation in generations:
            if generation.plan_version != plan.version:
                out += self._begin_session(group, plan, generation)
        steps = bool(generations) and all(g.joins for g in generations)
        part, sessions = self._next_part(group, plan, items, generations, bool(begun))
        group.record_shape(part.shape)
        tasks = task_count(group.served.spec, plan)
        step = begun[0] if begun and begun[0].is_run(part, sessions) else None
        if step is not None:
            run_id, sent, begun = step.run_id, step.nbytes, begun[1:]
        else:
            run_id = self._ids.next_run()
            order = self._order(plan, run_id, part, sessions, continued=before)
            sent, out = publish_bytes(order.topic, order.nbytes, 1), [*out, *self._cancel_runs(plan, begun), order]
            begun = ()
        following, orders = self._add_following(group, plan, run_id, items, begun)
        out += orders
        beside = self._concurrent_runs(group.name, plan)
        expectation = group.expected(plan)
        learned = expectation.mean
        run_s = plan.predicted_s * group.length_factor(plan, part.shape.size)
        expected_s = run_s * learned * max(len(beside), 1)
        alone_s = run_s if generations else estimate_run_s(plan, part.shape.size)
        until_s = max([now, *(run.expected_end_s for run in beside)]) + learned * alone_s
        doubt = now + min(max(PROBE_FACTOR * expected_s, PROBE_MIN_S), PROBE_MAX_S)
        # Twice as long after each loss: a machine that is merely busy must not lose a request by being asked again.
        patience_s = OVERDUE_S * 2 ** max(i.request.losses[i.index] for i in items) + OVERDUE_FACTOR * expected_s
        overdue = now + min(patience_s, OVERDUE_MAX_S)
        others = [run for run in self._runs() if run.is_computing]
        for run in others:
            run.ran_alone = False
        group.runs[run_id] = Run(
            run_id,
            items,
            part.shape,
            plan,
            group.cluster(),
            now,
            overdue,
            sent,
            ran_alone=not others and before is None,
            expectation=expectation,
            expected_s=expected_s,
            probe_at_s=doubt,
            expected_end_s=until_s,
            task_queue=TaskQueue(tasks, plan.devices, now) if tasks else None,
            frame_key=self._fleet.frame_key(plan),
            before=None if continued is None else continued[0],
            steps=steps,
            following=following,
            ids=() if step is None else tuple(part.inputs[len(sessions) : 2 * len(sessions)].tolist()),
        )
        return out if step is None else [*out, *self._take_reports(step.reports, now)]

    @staticmethod
    def _next_part(
        group: PlanGroup, plan: Plan, items: tuple[WorkItem, ...], generations: Sequence[Generation], begun: bool
    ) -> tuple[Batch, tuple[DecoderSession, ...]]:
        """Return what items run together, and their sessions; begun: devices have begun with it by themselves."""
        if not generations:
            return concatenate([item.batch for item in items]), ()
        pace = group.step_pace(plan) if len(generations) == 1 else None
        return pack_steps([generation.next_batch(pace, begun) for generation in generations])

    def _order(
        self,
        plan: Plan,
        run_id: int,
        part: Batch,
        sessions: tuple[DecoderSession, ...],
        continued: Continued | None = None,
        follows: Followed | None = None,
    ) -> Publish:
        """Return what hands a run to the devices of a plan."""
        key = self._fleet.frame_key(plan)
        payload = encode_work(
            plan.model, plan.version, run_id, part.shape, part.inputs, sessions, key, continued, follows
        )
        return Publish(self._topics.work(plan.model, plan.devices[0]), payload, 1)

    # -- steps that devices begin by themselves --------------------------------------------------------------------
    #
    # With a run that a token follows from, devices get the steps that follow: all but their tokens, and how each is
    # drawn from the candidates that the root device answers the step before with. So a text grows without waiting for
    # the planner, which sees the same answers and asks for the same steps, or stops them: at the end of a text, or
    # where others join.
    # Their answers carry the tokens that they began with, which the planner compares with its own.

    def _add_following(
        self, group: PlanGroup, plan: Plan, run_id: int, items: tuple[WorkItem, ...], known: tuple[FollowingStep, ...]
    ) -> tuple[tuple[FollowingStep, ...], list[CoordinatorCommand]]:
        """Return the steps behind a run, and the orders of those that are new; none that may be another one."""
        steps, out = list(known), list[CoordinatorCommand]()
        if group.queue or any(run.is_computing for run in group.runs.values()):
            return known, out
        while len(steps) < STEPS_AHEAD:
            made = [item.request.generation for item in items]
            found = [g.following_step(len(steps)) for g in made if g is not None]
            parts, draws = [step[:2] for step in found if step is not None], [step[2] for step in found if step]
            if len(parts) < len(items) or not root_begins(group.served.spec, plan, parts[0][0].shape):
                break
            part, sessions = pack_steps(parts)
            draws += [Draw()] * (len(sessions) - len(draws))
            number, before = self._ids.next_run(), steps[-1].run_id if steps else run_id
            order = self._order(plan, number, part, sessions, follows=Followed(before, tuple(draws)))
            nbytes = publish_bytes(order.topic, order.nbytes, 1)
            steps.append(FollowingStep(number, plan.version, items, part.shape, part.inputs, sessions, nbytes, {}))
            out.append(order)
        return tuple(steps), out

    def _is_early(self, device: str, report: Frame | messages.RunFailed) -> bool:
        """Keep what a device says of a step before the answer has come that it follows; False if it is of no step.

        The answer is another device's, so it may come later.
        """
        runs = (run for group in self._groups.of_model(report.model) for run in group.runs.values())
        step = next((step for run in runs for step in run.following if step.run_id == report.run_id), None)
        if step is not None:
            step.reports.setdefault(device, report)
        return step is not None

    def _take_reports(self, reports: Mapping[str, Frame | messages.RunFailed], now: float) -> list[CoordinatorCommand]:
        """Take what devices have said of a step before its turn came."""
        out = list[CoordinatorCommand]()
        for device, report in reports.items():
            if isinstance(report, Frame):
                out += self.handle_frame(DeviceFrame(device, report), now)
            else:
                out += self.handle_failure(device, report, now)
        return out

    @staticmethod
    def _take_begun(group: PlanGroup, plan: Plan, items: tuple[WorkItem, ...]) -> tuple[FollowingStep, ...]:
        """Return the steps of these items that devices have begun under a plan."""
        for steps in group.begun:
            if steps[0].plan_version == plan.version and set(steps[0].items) == set(items):
                group.begun.remove(steps)
                return steps
        return ()

    def _stop_begun(self, group: PlanGroup) -> list[CoordinatorCommand]:
        """Stop the steps that nobody has asked for."""
        begun, group.begun = [step for steps in group.begun for step in steps], []
        plans = {plan.version: plan for record in group.plans.records() for plan in record.plan.executables}
        return [c for s in begun if s.plan_version in plans for c in self._cancel_runs(plans[s.plan_version], (s,))]

    def _cancel_runs(self, plan: Plan, steps: Sequence[FollowingStep]) -> list[CoordinatorCommand]:
        orders = [messages.Cancel(plan.model, plan.version, step.run_id) for step in steps]
        return [self._command(device, order) for order in orders for device in plan.devices]

    def _begin_session(self, group: PlanGroup, plan: Plan, generation: Generation) -> list[CoordinatorCommand]:
        """Begin a session under a plan: with rows of one whose text begins alike, if devices hold any.

        It has a number of its own also if it takes such a session over: steps that were ordered ahead for the request
        before may still be on their way to devices, and must not write to it.
        """
        self._session = self._session % MAX_SESSION + 1
        ids = () if generation.carried.size or generation.wants_states else (*generation.prompt, *generation.tokens)
        version, ended = plan.version, [session for under, session in generation.left if under == plan.version]
        prefix = self._sessions.find(version, ids, group.held_texts())
        if prefix is not None and prefix.moves:
            self._sessions.forget((version, prefix.session))
        generation.start_session(version, self._session, prefix)
        generation.left.clear()
        room_rows = self._room_rows(group) - group.reserved_rows(version) - generation.reserved_rows
        ended += self._sessions.make_room(version, room_rows, 0 if prefix is None else prefix.session)
        return self._end_sessions(group, version, ended)

    def _suspend_sessions(self, group: PlanGroup) -> list[CoordinatorCommand]:
        """Take the sessions of the latest requests back while those that are open have grown beyond their room.

        Never that of the earliest one: it ends, and makes room.
        """
        out, room_rows = list[CoordinatorCommand](), self._room_rows(group)
        for version in {plan.version for plan in group.session_plans} if room_rows else ():
            while group.reserved_rows(version) > room_rows:
                earliest = min(r.sequence for r in group.requests() if r.generation and not r.finished)
                waiting = (item.request for item in group.queue if item.request.sequence > earliest)
                last = max(
                    (r for r in waiting if r.generation and r.generation.plan_version == version),
                    key=lambda r: r.sequence,
                    default=None,
                )
                if last is None or last.generation is None:
                    break
                out += self._end_sessions(group, version, [last.generation.session])
                last.generation.leave_session()
        return out

    def _room_rows(self, group: PlanGroup) -> int:
        return session_rows(group.served.spec, self._in_flight)

    def _end_sessions(
        self, group: PlanGroup, version: PlanVersion, sessions: Sequence[int]
    ) -> list[CoordinatorCommand]:
        """Let devices forget sessions; those of a plan that is gone have gone with it."""
        plans = (run for record in group.plans.records() for run in record.plan.executables)
        plan = next((run for run in plans if run.version == version), None)
        if plan is None or not sessions:
            return []
        message = messages.EndSessions(plan.model, version, tuple(sessions))
        return [self._command(device, message) for device in plan.devices]

    def _end_session_of(self, group: PlanGroup, request: Request) -> list[CoordinatorCommand]:
        """Let devices forget the sessions of a request that has failed, once no run with it is under way."""
        made = request.generation
        if made is None or not request.finished or made.done:
            return []
        if any(run.is_computing and any(i.request is request for i in run.items) for run in group.runs.values()):
            return []
        made.leave_session()
        left, made.left = made.left, []
        return [c for version, session in left for c in self._end_sessions(group, version, [session])]

    def _answer_forecast(self, group: PlanGroup, plan: Plan, request: Request) -> list[CoordinatorCommand]:
        """Answer a request that only wants the plan: with runs that took nothing."""
        request.finished = True
        expected, cluster = group.expected(plan), group.cluster()
        runs = (RunStats(plan, cluster, shape, {}, {}, {}, 0, expectation=expected) for shape in request.run_shapes())
        return [AnswerRequest(request, plan, tuple(runs))]

    def _complete(self, group: PlanGroup, run: Run, now: float) -> list[CoordinatorCommand]:
        del group.runs[run.run_id]
        self._counters["foreign_frame"] += run.count_unannounced()
        group.record_reports(run, now)
        if run.only_beside_search and not run.beside_loads and run.ran_alone and run.expected_s > 0:
            self._groups.background.record_run((now - run.dispatched_s) / run.expected_s)
        if (
            run.ran_alone
            and not run.beside_loads
            and len(run.items) == 1
            and is_planned_for(group.served.spec, run.shape)
        ):
            group.record_run(run.plan, run.shape.size, now - run.dispatched_s, now, doubtful=run.beside_search)
        if not run.has_whole_output(group.served.spec.output_shape(run.shape)):  # of other versions, or forged
            text = "The devices' partial outputs do not form a whole answer. Install one version on all devices."
            return self._retry_or_fail(group, run, RemoteError(text), MAX_ATTEMPTS)
        return self._deliver(group, run, now, reported=True)

    def _deliver(self, group: PlanGroup, run: Run, now: float, *, reported: bool) -> list[CoordinatorCommand]:
        """Give the whole output of a run to its requests; before all devices have reported, to those that do not wait.

        Such a run stays until all devices have reported; if they do not, it is overdue.
        """
        if run.items[0].request.generation is not None:
            return self._continue_generation(group, run, now, reported)
        takers = [item for item in run.items if reported or not item.request.wants_report]
        if not takers:
            return []
        early, stats, out = run.early_stats, run.stats(), list[CoordinatorCommand]()
        run.early_stats = stats
        outputs = split_output(group.served.spec, [item.batch for item in run.items], run.output())
        for item, output in zip(run.items, outputs, strict=True):
            if early is not None and not item.request.wants_report:  # it has the output: only the reports are new
                item.request.stats = [stats if known is early else known for known in item.request.stats]
            elif item in takers:
                out += self._deliver_output(group, run, item, stats, output)
        return out

    @staticmethod
    def _deliver_output(
        group: PlanGroup, run: Run, item: WorkItem, stats: RunStats, output: Array
    ) -> list[CoordinatorCommand]:
        """Give a request the output of one of its items; the last one answers it."""
        request = item.request
        if request.finished:
            return []
        request.stats.append(stats)
        request.outputs[item.index] = output
        if len(request.outputs) < len(request.batches):
            return []
        request.finished = True
        return [AnswerRequest(request, group.plans.parent_of(run.plan), tuple(request.stats))]

    def _cancel(self, group: PlanGroup, run: Run) -> list[CoordinatorCommand]:
        group.runs.pop(run.run_id, None)
        out: list[CoordinatorCommand] = []
        for each in (run,) if run.before is None else (run.before, run):
            cancel = messages.Cancel(each.plan.model, each.plan_version, each.run_id)
            out += [self._command(device, cancel) for device in (run.before or run).plan.devices]
        out += self._cancel_runs(run.plan, run.following)
        for item in run.items:  # which may have waited for its reports alone
            out += self._answer_generation(group, item) + self._end_session_of(group, item.request)
        return out

    # -- leased tasks ---------------------------------------------------------------------------------------------

    def complete_task(self, device: str, message: messages.TaskDone, now: float) -> list[CoordinatorCommand]:
        """Record a task that a device has computed; lease it the next one, or say that none is left."""
        found = self._run_of(device, message)
        if found is None or found[1].task_queue is None:
            return []
        run, queue = found[1], found[1].task_queue
        if run.plan.root in run.reports:  # it began after the others heard that none is left
            return [self._lease(run, device, ())]
        queue.complete_task(device, message.task, now)
        return self._lease_tasks(run, now)

    def lease_overdue(self, now: float) -> list[CoordinatorCommand]:
        """Lease overdue tasks again."""
        return [command for run in self._runs() for command in self._lease_tasks(run, now)]

    def _lease_tasks(self, run: Run, now: float) -> list[CoordinatorCommand]:
        """Lease queued and overdue tasks to the free devices of a run."""
        if run.task_queue is None or run.plan.root in run.reports:
            return []
        return [self._lease(run, d, (task,)) for d, task in run.task_queue.lease_tasks(now)]

    def _lease(self, run: Run, device: str, tasks: tuple[int, ...]) -> CoordinatorCommand:
        return self._command(device, messages.LeaseTasks(run.plan.model, run.plan_version, run.run_id, tasks))

    def _command(self, device: str, message: messages.Message) -> CoordinatorCommand:
        return Publish(self._topics.command(device), self._fleet.seal(device, message), 1)

    # -- generation -----------------------------------------------------------------------------------------------
    #
    # A whole output needs every op of every device (a test of all methods shows it), so the devices have cached their
    # rows and the next run starts at once; reports are counted as they come. A published token cannot be taken back:
    # if its run was forged it is computed again, and a different token is an error.

    def _continue_generation(self, group: PlanGroup, run: Run, now: float, reported: bool) -> list[CoordinatorCommand]:
        """Take the tokens of a run's output, and its reports once all are in."""
        stats, taken = run.stats(), [*zip(run.items, run.outputs_of_steps(), strict=True)]
        out: list[CoordinatorCommand] = []
        if not run.is_computing:
            seen = [(item, made, place) for (item, made), place in zip(taken, run.places, strict=True)]
            known = [
                (i.request, i, made, place) for i, made, place in seen if place is not None and not i.request.finished
            ]
            for request, _, made, place in known:
                assert request.generation is not None
                if not request.generation.follows(request.generation.steps[place], made):  # a part was forged
                    error = RemoteError("parts of an answer are not those that devices have sent")
                    return self._rewind(group, run, error, MAX_ATTEMPTS)
            for request, item, _, place in known:
                request.stats[place] = stats
                out += self._answer_generation(group, item)
            return out
        generations = [item.request.generation for item in run.items]
        states = any(g.wants_states for g in generations if g)
        if not reported and (states or not run.waiting_requests or not _usable(run.output())):
            return []
        run.early_stats = None if reported else stats
        if run.following:
            group.begun.append(run.following)
            run.following = ()
        if run.ran_alone:
            group.step_pace(run.plan).record(run.shape.size, now - run.dispatched_s)
        places = [
            len(g.steps) if g and not i.request.finished else None for i, g in zip(run.items, generations, strict=True)
        ]
        run.places = tuple(places)
        for item, output in taken:
            if item.request.finished:
                out += self._end_session_of(group, item.request)
            else:
                out += self._take_tokens(group, item, output, stats)
        return out

    def _take_tokens(
        self, group: PlanGroup, item: WorkItem, logits: Array, stats: RunStats
    ) -> list[CoordinatorCommand]:
        """Take what follows, and queue the next run of its session."""
        request, generation = item.request, item.request.generation
        assert generation is not None
        if not generation.wants_states and not _usable(logits):
            error = RemoteError(f"the devices answered with {list(logits.shape)} numbers that no token follows from")
            return self.fail_request(group, request, error)
        request.unbatchable.discard(item.index)
        published = generation.published_tokens
        try:
            step = generation.append_tokens(logits)
        except HeptiError as error:  # the rules allow no token
            return self.fail_request(group, request, error)
        request.stats.append(stats)
        out: list[CoordinatorCommand] = []
        for place, token in enumerate(step.taken, step.place):
            if place >= len(published):
                so_far = tuple(step.tokens[: place + 1])
                out.append(TokenReady(request, place, so_far, step.attempt, step.likely[place]))
            elif place >= 0 and token != published[place]:
                text = f"Token {place} was published as {published[place]}, but recomputing it gave {token}. Repeat "
                text += "the request; a device may be faulty (see `hepti devices`)."
                return self.fail_request(group, request, RemoteError(text))
            if not 0 <= place < len(published):
                request.losses.clear()
        if not generation.done:
            group.queue.resume(item)
        return out + self._answer_generation(group, item)

    def _answer_generation(self, group: PlanGroup, item: WorkItem) -> list[CoordinatorCommand]:
        """Answer a request that generates if all tokens are there, and the reports that it waits for."""
        request = item.request
        if request.finished or request.generation is None or not request.generation.done:
            return []
        if request.wants_report and any(request is i.request for run in group.runs.values() for i in run.items):
            return []
        if not request.generation.carried.size:  # most texts end long before they are as long as they may be
            group.recent_lengths.append(len(request.generation.prompt) + len(request.generation.tokens))
        request.finished = True
        out: list[CoordinatorCommand] = [
            AnswerRequest(request, group.plans.parent_of(request.stats[-1].plan), tuple(request.stats))
        ]
        if (text := request.generation.held(group.longest_rows)) is not None:
            version = text.session[0]
            self._sessions.keep(text)
            room_rows = self._room_rows(group) - group.reserved_rows(version)
            out += self._end_sessions(group, version, self._sessions.make_room(version, room_rows))
        return out

    def _rewind(self, group: PlanGroup, run: Run, error: HeptiError, tries: int) -> list[CoordinatorCommand]:
        """Take back the tokens since a run whose output may be forged, and compute them again; fail after `tries`."""
        back = [(i, place) for i, place in zip(run.items, run.places, strict=True) if not i.request.finished]
        items, out = [item for item, place in back if place is not None], list[CoordinatorCommand]()
        if not items:
            return self._cancel(group, run)
        for item, place in back:
            if place is not None and item.request.generation is not None:
                item.request.generation.rewind(place)
                del item.request.stats[place:]
                item.request.losses[item.index] += 1
        for later in [r for r in group.runs.values() if r.run_id >= run.run_id and any(i in items for i in r.items)]:
            out += self._cancel(group, later)
            group.queue.prepend(item for item in later.open_items if item not in items)
        group.queue.remove([item for item in group.queue if item in items])
        for item in items:
            if item.request.losses[item.index] >= tries:
                out += self.fail_request(group, item.request, error)
            else:
                group.queue.prepend([item])
        return out


def _taken_back() -> CancelledRequestError:
    return CancelledRequestError("the client has taken the request back")


def _usable(logits: Array) -> bool:
    return logits.ndim == 2 and len(logits) > 0 and bool(np.isfinite(logits).all())
