"""Which replica of a plan runs what waits: each request goes where it is answered first, behind those before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from math import inf
from typing import Final, NamedTuple

import numpy as np

from hepti_mqtt.errors import DeadlineError, HeptiError, IdInUseError, OverloadedError, RemoteError
from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import task_count
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.frames import MAX_SESSION, DecoderSession, encode_work
from hepti_mqtt.protocol.topics import Topics, publish_bytes
from hepti_mqtt.runtime.coordinator.interface import (
    AnswerRequest,
    CoordinatorCommand,
    DeviceFrame,
    LogEvent,
    RefuseRequest,
    TokenReady,
)
from hepti_mqtt.runtime.coordinator.models import PlanGroup, PlanGroups
from hepti_mqtt.runtime.coordinator.requests import (
    MAX_UNREPORTED_RUNS,
    MICRO_BATCH_TOKENS,
    Array,
    FairQueue,
    Generation,
    Request,
    Run,
    RunStats,
    WorkItem,
    argmax_token,
    concatenate,
    length_factor,
    split_into_micro_batches,
    split_output,
)
from hepti_mqtt.runtime.machinery import Publish
from hepti_mqtt.schedule import route_to_replicas
from hepti_mqtt.task_queue import TaskQueue

MIN_RUN_S: Final = 1e-6  # of a run


class ReplicaLoad(NamedTuple):
    """A replica: until when it is busy by prediction, the seconds of a token there, whether it has room for a run."""

    plan: Plan
    busy_s: float
    token_s: float
    has_room: bool


class Assignment(NamedTuple):
    """What goes next: under which plan, and of what waits how many at the most, None for as many as run together."""

    plan: Plan
    max_items: int | None = None


def next_assignment(now: float, lanes: Sequence[ReplicaLoad], queue: FairQueue) -> Assignment | None:
    """Return what goes next to a replica that has room; None if all that waits is answered sooner by busy ones."""
    if len(lanes) < 2:
        return Assignment(lanes[0].plan) if lanes and lanes[0].has_room else None
    sizes = (float(max(item.tokens, _min_tokens(lanes[0].plan))) for item in queue.in_turn())
    dealt = list(route_to_replicas(now, [(lane.busy_s, lane.token_s) for lane in lanes], sizes))
    first = next((i for i in dealt if lanes[i].has_room), None)
    return None if first is None else Assignment(lanes[first].plan, dealt.count(first))


def token_s(plan: Plan) -> float:
    """Return the seconds of a token, by what the plan was made for; never none, or one replica would get all."""
    return max(plan.predicted_s, MIN_RUN_S) / max(plan.predicted_tokens, 1)


def estimate_run_s(plan: Plan, tokens: int) -> float:
    """Return the seconds that a run of so many tokens likely takes."""
    return token_s(plan) * max(tokens, _min_tokens(plan))


def _min_tokens(plan: Plan) -> int:
    """Return for how many tokens a run of fewer takes as long."""
    return min(MICRO_BATCH_TOKENS, max(plan.predicted_tokens, 1))


# ----------------------------------------------------------------------------------------------------------------------
# The bags of runs: tasks are leased to devices that are free, and again where one is lost or slow.


class TaskLeases:
    """Leases of all runs that have a bag."""

    def __init__(self, topics: Topics, slots: PlanGroups) -> None:
        self._topics, self._slots = topics, slots

    @property
    def due_s(self) -> float:
        """Return when a free device would take over a lease, infinity if none would."""
        bags = (run.task_queue for run in self._runs() if run.plan.root not in run.reports)
        return min((task_queue.next_takeover_s for task_queue in bags if task_queue is not None), default=inf)

    def complete_task(self, device: str, message: messages.TaskDone, now: float) -> list[CoordinatorCommand]:
        """A device has computed a task: lease it the next one, or say that none is left."""
        group = self._slots.group_of_run(message.model, message.run_id)
        run = None if group is None else group.runs[message.run_id]
        if run is None or run.task_queue is None or run.plan_version != message.plan_version:
            return []
        if run.plan.root in run.reports:  # it began when all others were told that none is left
            return [self._lease(run, device, ())]
        run.task_queue.complete_task(device, message.task, now)
        return self.lease(run, now)

    def end_leases(self, run: Run) -> list[CoordinatorCommand]:
        """The head device has all tasks and is done, so nothing is left for the others.

        Not before: what a device has computed may be lost with it on its way, and is leased anew then.
        """
        return [self._lease(run, d, ()) for d in run.plan.devices if d != run.plan.root and d not in run.lost_devices]

    def lease(self, run: Run, now: float) -> list[CoordinatorCommand]:
        """Lease what waits, or is late, to the devices of a run that are free."""
        if run.task_queue is None or run.plan.root in run.reports:
            return []
        return [self._lease(run, d, (task,)) for d, task in run.task_queue.lease_tasks(now)]

    def tick(self, now: float) -> list[CoordinatorCommand]:
        """Lease anew what has become late."""
        return [command for run in self._runs() for command in self.lease(run, now)]

    def continue_without(self, run: Run, device: str, now: float) -> list[CoordinatorCommand] | None:
        """Go on without a device; None where a run cannot: without its bag, or without the head device."""
        if run.task_queue is None or device == run.plan.root:
            return None
        run.lost_devices.add(device)
        run.reports.pop(device, None)
        run.task_queue.remove_device(device)
        return self.lease(run, now)

    def _runs(self) -> Iterable[Run]:
        return (run for group in self._slots for run in group.runs.values())

    def _lease(self, run: Run, device: str, tasks: tuple[int, ...]) -> CoordinatorCommand:
        lease = messages.LeaseTasks(run.plan.model, run.plan_version, run.run_id, tasks)
        return Publish(self._topics.command(device), messages.encode(lease), 1)


# ----------------------------------------------------------------------------------------------------------------------
# Requests that generate: a token as soon as a run's output is there, the next run at once, the reports as they come.
#
# An output needs every op of every device of its run (a test of all methods says so). So whoever has it knows that all
# of
# them have cached their rows, and the next run finds them; what is still on its way are reports. They are counted when
# they come. A token that was told cannot be taken back: if its run turns out to have been forged it is computed again,
# and another one in its place is an error.


class TokenGenerator:
    """The steps of requests that generate. cancel: takes a run back; end: refuses a request."""

    def __init__(
        self,
        cancel: Callable[[PlanGroup, Run], list[CoordinatorCommand]],
        end: Callable[[PlanGroup, Request, HeptiError], list[CoordinatorCommand]],
    ) -> None:
        self._cancel, self._end = cancel, end

    def handle_early_output(self, group: PlanGroup, run: Run) -> list[CoordinatorCommand]:
        """Go on with the output of a run some of whose reports are missing; no token follows from some outputs."""
        if not run.waiting_requests or not _usable(run.output()):
            return []
        generation = run.items[0].request.generation
        assert generation is not None
        run.early_stats, run.token_index = run.stats(), len(generation.tokens)
        return self._append_token(group, run, run.early_stats)

    def handle_reports(self, group: PlanGroup, run: Run, stats: RunStats, tries: int) -> list[CoordinatorCommand]:
        """Take the reports of a run that is over, and its output if nothing went on with it before."""
        request = run.items[0].request
        generation = request.generation
        assert generation is not None
        if request.finished:
            return []
        if run.token_index is None:
            return self._append_token(group, run, stats)
        if (
            argmax_token(run.output()) != generation.tokens[run.token_index]
        ):  # the reports say that a part of it was forged
            return self.rewind(
                group, run, RemoteError("parts of an answer are not those that devices have sent"), tries
            )
        request.stats[run.token_index] = stats
        return self.answer_if_complete(group, run)

    def answer_if_complete(self, group: PlanGroup, run: Run) -> list[CoordinatorCommand]:
        """Answer the request of a run if all tokens are there, and nothing that it waits for."""
        request = run.items[0].request
        if request.finished or request.generation is None or not request.generation.done:
            return []
        if request.wants_report and any(other.items[0].request is request for other in group.runs.values()):
            return []
        request.finished = True
        return [AnswerRequest(request, group.plans.parent_of(request.stats[-1].plan), tuple(request.stats))]

    def rewind(self, group: PlanGroup, run: Run, error: HeptiError, tries: int) -> list[CoordinatorCommand]:
        """Take back what followed from a run's output, which may be forged, and compute it again.

        The request ends with the error after so many tries.
        """
        item = run.items[0]
        request, place = item.request, run.token_index
        assert request.generation is not None
        assert place is not None
        if request.finished:
            return self._cancel(group, run)
        request.generation.rewind(place)
        del request.stats[place:]
        out: list[CoordinatorCommand] = []
        for later in [r for r in group.runs.values() if r.items[0] is item and r.run_id >= run.run_id]:
            out += self._cancel(group, later)
        if any(waiting is item for waiting in group.queue):
            group.queue.remove([item])
        request.losses[item.index] += 1
        if request.losses[item.index] >= tries:
            return out + self._end(group, request, error)
        group.queue.prepend([item])
        return out

    def _append_token(self, group: PlanGroup, run: Run, stats: RunStats) -> list[CoordinatorCommand]:
        """Take a token; queue the next run of its session before all others, so that few sessions are open at once."""
        item, logits = run.items[0], run.output()
        request, generation = item.request, item.request.generation
        assert generation is not None
        if not _usable(logits):
            error = RemoteError(f"the devices answered with {list(logits.shape)} numbers that no token follows from")
            return self._end(group, request, error)
        place, told = len(generation.tokens), generation.published_tokens
        token = generation.append_token(logits)
        request.stats.append(stats)
        out: list[CoordinatorCommand] = []
        if place >= len(told):
            request.losses.clear()
            out.append(TokenReady(request, place, tuple(generation.tokens)))
        elif token != told[place]:
            text = f"token {place} was told as {told[place]} and is {token} by a second answer; ask again"
            return self._end(group, request, RemoteError(f"{text}, and see `hepti devices` for devices that lie"))
        if not generation.done:
            group.queue.prepend([item])
        return out + self.answer_if_complete(group, run)


def occupying_runs(runs: list[Run], plan: Plan) -> list[Run]:
    """Return those of a model's runs that take room on devices of a plan: that compute, or lack reports beyond a few.

    What lacks reports alone takes no room on devices any more; but it is remembered here, so there is a bound.
    """
    here = [run for run in runs if not set(run.plan.devices).isdisjoint(plan.devices)]
    return [run for run in here if run.is_computing] + [run for run in here if not run.is_computing][
        MAX_UNREPORTED_RUNS:
    ]


def _usable(logits: Array) -> bool:
    return logits.ndim == 2 and len(logits) == 1 and bool(np.isfinite(logits).all())


# ----------------------------------------------------------------------------------------------------------------------
# Requests on their way: taken in, run under a plan, answered or refused, and run again when a run is lost.


MAX_QUEUED_PER_CLIENT: Final = 64  # requests of one client that wait, per model
MAX_QUEUED: Final = 256  # and of all clients
MAX_QUEUED_BYTES: Final = 256 << 20  # of what all of them bring
MAX_ATTEMPTS: Final = 4
LINK_LOSS_WINDOW_S: Final = (
    5.0  # one connection between two devices that is lost and comes back may cost a request four runs
)
PROBE_FACTOR: Final = 6.0  # times what a run should take: then its devices are asked for a word
PROBE_MIN_S: Final = 0.5
PROBE_MAX_S: Final = 30.0
OVERDUE_S: Final = 3.0
OVERDUE_FACTOR: Final = 20.0
OVERDUE_MAX_S: Final = 300.0  # whatever is predicted: what devices tell of themselves may be wrong by any factor


class Scheduler:
    """Queues, runs and answers of every slot; which plan is active is the coordinator's.

    in_flight: runs of a model at once on a device, whatever their pins: devices count on no more. counters: what was
    not understood or came too late, by name.
    """

    def __init__(self, topics: Topics, slots: PlanGroups, in_flight: int, counters: Counter[str]) -> None:
        self._topics, self._slots, self._in_flight, self._counters = topics, slots, in_flight, counters
        self._held: dict[str, float] = {}  # until when requests for a model wait for others
        self._number = 0
        self._admission = 0
        self._session = 0
        self._generator = TokenGenerator(self._cancel, self.fail_request)
        self.leases = TaskLeases(topics, slots)

    @property
    def due_s(self) -> float:
        """Return when the first request is due that waits for others to run with, or a lease; infinity if none is."""
        return min([*self._held.values(), self.leases.due_s])

    def refuse_or_none(self, request: Request) -> list[CoordinatorCommand] | None:
        """Return what follows from a request that no queue takes; None if one does."""
        name = request.key.model
        same = next((j for j in self._slots.requests(name) if j.key == request.key), None)
        if same is not None and same.digest != request.digest:
            return [RefuseRequest(request, IdInUseError.of(request.key.id))]
        if same is not None:
            self._counters["repeated_request"] += 1
            return []
        waiting = list(
            {id(item.request): item.request for group in self._slots.of_model(name) for item in group.queue}.values()
        )
        if (of_client := sum(j.key.client == request.key.client for j in waiting)) >= MAX_QUEUED_PER_CLIENT:
            text = f"{of_client} requests of {request.key.client} wait for {name} already; wait for some answers"
            return self.refuse_overloaded(request, text)
        nbytes = sum(j.nbytes for j in waiting)
        if len(waiting) >= MAX_QUEUED or (waiting and nbytes + request.nbytes > MAX_QUEUED_BYTES):
            text = f"{len(waiting)} requests of {nbytes} bytes wait for {name} already; try again later, or add devices"
            return self.refuse_overloaded(request, text)
        return None

    @staticmethod
    def refuse_overloaded(request: Request, text: str) -> list[CoordinatorCommand]:
        """Refuse a request that there is no room for."""
        return [LogEvent("overloaded", text), RefuseRequest(request, OverloadedError(text))]

    def enqueue(self, group: PlanGroup, request: Request, now: float) -> list[CoordinatorCommand]:
        """Take a request into the queue of its slot, or refuse it if there is no plan and none to come."""
        group.last_request_s = now
        if group.error is not None and not group.plans.may_serve():
            return [RefuseRequest(request, group.error)]
        self._number += 1
        request.sequence, request.arrived_s = self._number, now
        longest = max(c.shape.size for c in request.batches)
        group.recent_lengths.append(longest + (request.generation.max_new_tokens if request.generation else 0))
        if group.active is not None and group.active.replicas and request.wants_result and request.generation is None:
            request.batches = split_into_micro_batches(request.batches)  # each goes to the replica that is free first
        group.queue.append(WorkItem(request, i) for i in range(len(request.batches) if request.wants_result else 1))
        return []

    def dispatch_ready(self, name: str, now: float) -> list[CoordinatorCommand]:
        """Dispatch what waits for a model, as far as there are plans for it and room beside what runs."""
        out: list[CoordinatorCommand] = []
        held: dict[int, float] = {}  # slots whose requests wait for others, and until when
        while True:
            slots = (s for s in self._slots.of_model(name) if s.active and s.queue and self._slots.may_run(s))
            able = [slot for slot in slots if id(slot) not in held]
            if not able:
                break
            group = min(able, key=lambda slot: slot.queue.oldest_sequence())
            hand = next_assignment(now, self._replica_loads(group, now), group.queue)
            if hand is None:
                held[id(group)] = inf
                continue
            items, due_s = group.next_batch(hand.max_items)
            if now < due_s:
                held[id(group)] = due_s
                continue
            plan = self._replica_with_cache(group, items[0].request.generation) or hand.plan
            if not self._has_room(group, plan):
                held[id(group)] = inf
                continue
            assert group.active is not None
            group.queue.remove(items)
            if items[0].request.wants_result:
                out += self._dispatch(group, plan, items, now)
            else:
                out += self._answer_forecast(group, group.active, items[0].request, now)
        self._held[name] = min(held.values(), default=inf)
        return out

    def _concurrent_runs(self, name: str, plan: Plan) -> list[Run]:
        """Return the runs of a model, whatever their pins, that a run under a plan would share its devices with."""
        return occupying_runs([run for group in self._slots.of_model(name) for run in group.runs.values()], plan)

    def _has_room(self, group: PlanGroup, plan: Plan) -> bool:
        return len(self._concurrent_runs(group.name, plan)) < self._in_flight

    def _replica_loads(self, group: PlanGroup, now: float) -> list[ReplicaLoad]:
        """Return the replicas of the active plan, or the plan itself."""
        assert group.active is not None
        learned, out = group.correction(now, group.active), list[ReplicaLoad]()
        for plan in group.usable_executables:
            beside = self._concurrent_runs(group.name, plan)
            # What runs longer than predicted still keeps it busier than one where nothing runs.
            busy_s = max([now, *(run.expected_end_s for run in beside)]) + len(beside) * MIN_RUN_S
            out.append(ReplicaLoad(plan, busy_s, token_s(plan) * learned, self._has_room(group, plan)))
        return out

    @staticmethod
    def _replica_with_cache(group: PlanGroup, generation: Generation | None) -> Plan | None:
        """Return the replica that has a session's cache, None if none has."""
        return (
            None
            if generation is None
            else next((p for p in group.usable_executables if p.version == generation.plan_version), None)
        )

    def handle_frame(self, event: DeviceFrame, now: float) -> list[CoordinatorCommand]:
        """Take an output, or what a device counted of a run; the last one of a job's answers it."""
        frame = event.frame
        group = self._slots.group_of_run(frame.model, frame.run_id)
        run = None if group is None else group.runs[frame.run_id]
        if (
            group is None
            or run is None
            or run.plan_version != frame.plan_version
            or event.device not in run.plan.devices
        ):
            self._counters["late"] += 1
            return []
        out: list[CoordinatorCommand] = []
        if run.contradicts(event.device, frame):  # one of both is forged
            self._counters["contradicted"] += 1
            return self._retry_or_fail(group, run, RemoteError(f"two answers of {event.device} differ"), MAX_ATTEMPTS)
        if frame.kind == "output":
            run.parts[event.device, frame.node, frame.part] = (frame.row_start, frame.array())
        elif frame.kind == "done" and len(frame.numbers) == 4:
            run.reports[event.device] = frame.numbers
            if run.task_queue is not None and event.device == run.plan.root:
                out = self.leases.end_leases(run)
        else:
            self._counters["foreign_frame"] += 1
        if run.complete():
            return [*out, *self._complete(group, run, now)]
        return [*out, *self._deliver_early(group, run)] if run.early_stats is None else out

    def handle_failure(self, device: str, message: messages.RunFailed, now: float) -> list[CoordinatorCommand]:
        """Run again what was lost on the wire, and once what a device could not compute; other failures are answers."""
        group = self._slots.group_of_run(message.model, message.run_id)
        run = None if group is None else group.runs[message.run_id]
        if group is None or run is None or run.plan_version != message.plan_version or device not in run.plan.devices:
            self._counters["late"] += 1
            return []
        out: list[CoordinatorCommand] = [LogEvent("request_failed", f"{device}: {message.text}")]
        if message.code in ("wire", "session", "link"):
            return out + self.retry(group, run, blameless=message.code == "link" and self._is_same_link_loss(run, now))
        # What reached the device may have been forged, as this may be, or its memory short.
        return out + self._retry_or_fail(group, run, RemoteError(message.text), 2)

    def _retry_or_fail(self, group: PlanGroup, run: Run, error: RemoteError, tries: int) -> list[CoordinatorCommand]:
        """Run a request again that has failed, with no other; it ends with the error after so many tries."""
        if not run.is_computing:
            return self._generator.rewind(group, run, error, tries)
        tried = 1 + max((item.request.losses[item.index] for item in run.open_items), default=0)
        if len(run.items) == 1 and tried < tries:
            return self.retry(group, run)
        out = self._cancel(group, run)
        if len(run.items) == 1 and run.open_items:
            return out + self.fail_request(group, run.items[0].request, error)
        for item in run.open_items:  # whose fault it was shows when each runs by itself
            item.request.unbatchable.add(item.index)
        group.queue.prepend(run.open_items)
        return out

    @staticmethod
    def _is_same_link_loss(run: Run, now: float) -> bool:
        """Take it that a connection between devices cost a run; return whether that belongs to an earlier loss."""
        before = max(item.request.last_link_loss_s for item in run.items)
        if now - before < LINK_LOSS_WINDOW_S:
            return True
        for item in run.items:
            item.request.last_link_loss_s = now
        return False

    def retry(self, group: PlanGroup, run: Run, blameless: bool = False) -> list[CoordinatorCommand]:
        """Take a run back and queue it first; its job fails after too many attempts.

        blameless: no device had a part in the loss, so it is no attempt.
        """
        out = self._cancel(group, run)
        back: list[WorkItem] = []
        for item in run.open_items:
            request, lost = item.request, item.request.losses
            if request.finished:
                continue
            lost[item.index] += not blameless
            if lost[item.index] >= MAX_ATTEMPTS:
                error: HeptiError = RemoteError(
                    f"the request was lost {lost[item.index]} times (devices left, or exchanges never arrived: "
                    "a broker drops what is over its max_queued_messages); see `hepti devices`, `hepti doctor` and "
                    "the planner's log"
                )
                out += self.fail_request(group, request, error)
            elif group.error is not None and not group.plans.may_serve():
                out += self.fail_request(group, request, group.error)
            else:
                back.append(item)
        for item in back:
            if item.request.generation is not None:
                item.request.generation.plan_version = (
                    None  # some device may have cached less than others: it begins anew
                )
            if item.request.losses[item.index] > 1:  # it may be what brings runs to nothing
                item.request.unbatchable.add(item.index)
        group.queue.prepend(back)
        return out

    def handle_lost_device(self, group: PlanGroup, run: Run, device: str, now: float) -> list[CoordinatorCommand]:
        """A device of a run is gone: others take over its tasks, or the run is issued again."""
        left = self.leases.continue_without(run, device, now)
        if left is None:
            return self.retry(group, run)
        return [*left, *self._complete(group, run, now)] if run.complete() else left

    def mark_broker_lost(self) -> None:
        """The broker was lost, and with it whatever was on its way."""
        for run in [run for group in self._slots for run in group.runs.values()]:
            run.broker_was_lost = True

    def retry_after_broker_loss(self, back: Callable[[Collection[str]], bool]) -> list[CoordinatorCommand]:
        """Issue again what was cut short, as soon as all of its devices are back."""
        cut = [(group, run) for group in self._slots for run in group.runs.values() if run.broker_was_lost]
        again = [self.retry(group, run, blameless=True) for group, run in cut if back(run.plan.devices)]
        return [command for commands in again for command in commands]

    def fail_request(self, group: PlanGroup, request: Request, error: HeptiError) -> list[CoordinatorCommand]:
        """Refuse a job and cancel the runs that nobody else waits for; one that is over already is left alone."""
        if request.finished:
            return []
        request.finished = True
        out: list[CoordinatorCommand] = []
        for run in [r for r in group.runs.values() if not r.waiting_requests and r.early_stats is None]:
            out += self._cancel(group, run)
        return [*out, RefuseRequest(request, error)]

    def refuse_expired(self, group: PlanGroup, now: float) -> list[CoordinatorCommand]:
        """Refuse the jobs whose deadline has passed."""
        late = {id(j): j for j in group.requests() if j.deadline_s is not None and now > j.deadline_s}
        out: list[CoordinatorCommand] = []
        for request in late.values():
            out += self.fail_request(group, request, DeadlineError("the deadline passed before the answer was ready"))
        group.queue.discard_finished()
        return out

    def _dispatch(
        self, group: PlanGroup, plan: Plan, items: tuple[WorkItem, ...], now: float
    ) -> list[CoordinatorCommand]:
        self._admission += 1
        part, session = concatenate([item.batch for item in items]), DecoderSession()
        generation = items[0].request.generation
        if generation is not None:
            if generation.plan_version != plan.version:
                self._session = self._session % MAX_SESSION + 1
                generation.start_session(plan.version, self._session)
            part, session = generation.next_batch()
        group.record_shape(part.shape)
        bag = task_count(group.served.spec, plan)
        payload = encode_work(plan.model, plan.version, self._admission, part.shape, part.inputs, session)
        topic = self._topics.work(plan.model, plan.devices[0])
        beside = self._concurrent_runs(group.name, plan)
        learned = group.correction(now, plan)
        expected_s = plan.predicted_s * learned * length_factor(plan, part.shape.size) * max(len(beside), 1)
        until_s = max([now, *(run.expected_end_s for run in beside)]) + learned * estimate_run_s(plan, part.shape.size)
        doubt = now + min(max(PROBE_FACTOR * expected_s, PROBE_MIN_S), PROBE_MAX_S)
        # Twice as long after each loss: a machine that is merely busy must not lose a request by being asked again.
        patience_s = OVERDUE_S * 2 ** max(i.request.losses[i.index] for i in items) + OVERDUE_FACTOR * expected_s
        overdue = now + min(patience_s, OVERDUE_MAX_S)
        sent = publish_bytes(topic, len(payload), 1)
        others = [run for slot in self._slots for run in slot.runs.values() if run.is_computing]
        for run in others:
            run.ran_alone = False
        group.runs[self._admission] = Run(
            self._admission,
            items,
            part.shape,
            plan,
            group.cluster(),
            now,
            overdue,
            sent,
            ran_alone=not others,
            correction=learned,
            expected_s=expected_s,
            probe_at_s=doubt,
            expected_end_s=until_s,
            task_queue=TaskQueue(bag, plan.devices, now) if bag else None,
        )
        return [Publish(topic, payload, 1)]

    def _answer_forecast(self, group: PlanGroup, plan: Plan, request: Request, now: float) -> list[CoordinatorCommand]:
        """Answer a request that only wants the plan: as if its runs had taken nothing."""
        request.finished = True
        learned, cluster = group.correction(now, plan), group.cluster()
        runs = (RunStats(plan, cluster, shape, {}, {}, {}, 0, correction=learned) for shape in request.run_shapes())
        return [AnswerRequest(request, plan, tuple(runs))]

    def _complete(self, group: PlanGroup, run: Run, now: float) -> list[CoordinatorCommand]:
        del group.runs[run.run_id]
        self._counters["foreign_frame"] += run.count_unannounced()
        # Of a decoder plans are made for its steps, of others for a request that runs by itself.
        if run.ran_alone and len(run.items) == 1 and (not run.shape.session_rows or run.shape.size == 1):
            group.record_run(run.plan, run.shape.size, now - run.dispatched_s, now)
        if not run.has_whole_output(
            group.served.spec.output_shape(run.shape)
        ):  # other versions' parts, or one that is forged
            error = RemoteError("the devices' outputs do not fit together; use one version")
            return self._retry_or_fail(group, run, error, MAX_ATTEMPTS)
        stats = run.stats()
        if run.items[0].request.generation is not None:
            return self._generator.handle_reports(group, run, stats, MAX_ATTEMPTS)
        out: list[CoordinatorCommand] = []
        outputs = split_output(group.served.spec, [item.batch for item in run.items], run.output())
        for item, output in zip(run.items, outputs, strict=True):
            if run.early_stats is None or item.request.wants_report:
                out += self._deliver_output(group, run, item, stats, output)
            else:  # it has the output, and perhaps waits for that of other runs
                item.request.stats = [stats if known is run.early_stats else known for known in item.request.stats]
        return out

    def _deliver_early(self, group: PlanGroup, run: Run) -> list[CoordinatorCommand]:
        """Give its output to whoever waits for nothing else, once it is there.

        The run goes on until all devices have reported, as if nothing had happened; if they do not, it is overdue.
        """
        generates = run.items[0].request.generation is not None
        takers = [item for item in run.items if generates or not item.request.wants_report]
        if not takers or not run.has_whole_output(group.served.spec.output_shape(run.shape)):
            return []
        if generates:
            return self._generator.handle_early_output(group, run)
        run.early_stats, out = run.stats(), []
        outputs = split_output(group.served.spec, [item.batch for item in run.items], run.output())
        for item, output in zip(run.items, outputs, strict=True):
            out += self._deliver_output(group, run, item, run.early_stats, output) if item in takers else []
        return out

    @staticmethod
    def _deliver_output(
        group: PlanGroup, run: Run, item: WorkItem, stats: RunStats, output: Array
    ) -> list[CoordinatorCommand]:
        """Give a job the output of one of its chunks; the last one is the answer."""
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
        payload = messages.encode(messages.Cancel(run.plan.model, run.plan_version, run.run_id))
        out: list[CoordinatorCommand] = [Publish(self._topics.command(d), payload, 1) for d in run.plan.devices]
        return out + self._generator.answer_if_complete(group, run)  # which may have waited for its reports alone
