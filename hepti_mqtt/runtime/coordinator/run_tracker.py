"""Runs after their dispatch: outputs and reports of devices, retries, and the answers or errors of requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from typing import Final

import numpy as np

from hepti_mqtt.core.errors import CancelledRequestError, DeadlineError, HeptiError, RemoteError
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.frames import Frame
from hepti_mqtt.runtime.coordinator.admission import CANCELLED, Admission
from hepti_mqtt.runtime.coordinator.ahead import StepsAhead
from hepti_mqtt.runtime.coordinator.batches import Array, split_output
from hepti_mqtt.runtime.coordinator.dispatch import Dispatcher
from hepti_mqtt.runtime.coordinator.fleet import Fleet
from hepti_mqtt.runtime.coordinator.interface import (
    AnswerRequest,
    CoordinatorCommand,
    DeviceFrame,
    LogEvent,
    RefuseRequest,
    RequestCancelled,
    TokenReady,
)
from hepti_mqtt.runtime.coordinator.kv_caches import KvCaches, check_texts
from hepti_mqtt.runtime.coordinator.orders import Orders
from hepti_mqtt.runtime.coordinator.plan_groups import PlanGroup, PlanGroups
from hepti_mqtt.runtime.coordinator.plans import Ids
from hepti_mqtt.runtime.coordinator.requests import Request, RunStats, WorkItem
from hepti_mqtt.runtime.coordinator.runs import RUN_STATES, Progress, Run, RunEvent
from hepti_mqtt.runtime.machinery import StateMachine, TransitionLog

MAX_ATTEMPTS: Final = 4
LINK_LOSS_WINDOW_S: Final = 5.0  # one lost connection may cost a request several runs, but counts as one attempt

RunMessage = Frame | messages.RunFailed | messages.TaskDone | messages.RunProgress


class RunTracker:
    """Follows the runs of all plan groups to their end; the dispatcher begins them.

    in_flight: concurrent runs of a model on a device, over all pins. counters: invalid and late frames and messages.
    """

    def __init__(
        self, orders: Orders, groups: PlanGroups, fleet: Fleet, ids: Ids, in_flight: int, counters: Counter[str]
    ) -> None:
        self._orders, self._groups, self._fleet, self._counters = orders, groups, fleet, counters
        self._ahead = StepsAhead(self._orders, ids)
        self.caches = KvCaches(self._orders, in_flight)
        self._machine = StateMachine(RUN_STATES, TransitionLog("runs"), counters)
        #: Ended runs with their end times, until `estimate_updates` yields them.
        self._ended: list[tuple[PlanGroup, Run, float]] = []
        self.dispatcher = Dispatcher(
            groups, fleet, ids, self._orders, self._ahead, self.caches, self._machine, in_flight
        )
        self.admission = Admission(groups)

    @property
    def due_s(self) -> float:
        """Return when the next delayed batch or lease takeover is due; infinity if there is none."""
        queues = (run.task_queue for run in self._groups.runs() if run.plan.root not in run.answers.reports)
        takeovers = (queue.next_takeover_s for queue in queues if queue is not None)
        return min([self.dispatcher.due_s, *takeovers], default=inf)

    def dispatch_ready(self, name: str, now: float) -> list[CoordinatorCommand]:
        """Dispatch the runs of a model that may begin now, and cancel steps ahead that were not used."""
        out = self.dispatcher.dispatch_ready(name, now)
        while reports := self._ahead.take_reports():  # they may end runs, so that other runs begin
            for device, report in reports:
                if isinstance(report, Frame):
                    out += self.handle_frame(DeviceFrame(device, report), now)
                else:
                    out += self.handle_failure(device, report, now)
            out += self.dispatcher.dispatch_ready(name, now)
        if unused := self._ahead.take_unused(name):
            live = {version for group in self._groups.of_model(name) for version in group.plans.versions()}
            for steps in unused:  # devices dropped the steps of other plan versions
                out += self._ahead.cancel(steps) if steps[0].plan.version in live else []
        return out

    def _run_of(self, device: str, message: RunMessage) -> tuple[PlanGroup, Run] | None:
        """Return the run of a device's message; None if it has ended, or the device has no part in it."""
        for group in self._groups.of_model(message.model):
            if (run := group.runs.get(message.run_id)) is not None:
                plans = (each.plan for each in (run, run.before) if each is not None)
                takes_part = any(plan.version == message.plan_version and device in plan.devices for plan in plans)
                return (group, run) if takes_part else None
        return None

    def handle_frame(self, event: DeviceFrame, now: float) -> list[CoordinatorCommand]:
        """Record a part of a run's output, or a device's report; deliver the output as soon as it is whole."""
        frame = event.frame
        if (target := self._run_of(event.device, frame)) is None:
            self._counters["late"] += not (frame.kind == "done" and self._ahead.keep_report(event.device, frame))
            return []
        group, run = target
        out: list[CoordinatorCommand] = []
        if not frame.has_tag(run.kind.frame_key):
            self._counters["forged"] += 1
            return []
        if run.answers.contradicts(event.device, frame):  # one of the two frames is forged
            self._counters["contradicted"] += 1
            return self._retry_or_fail(
                group, run, RemoteError(f"two answers of {event.device} differ"), MAX_ATTEMPTS, now
            )
        if frame.kind == "output":
            run.answers.parts[event.device, frame.node, frame.part] = (frame.row_start, frame.array())
        elif frame.kind == "done" and len(frame.numbers) == 4:
            run.answers.reports[event.device] = frame.numbers
            if run.task_queue is not None and event.device == run.plan.root:
                # End the leases only now: until the root has ended, the tasks of a lost device are leased again.
                others = (d for d in run.plan.devices if d != event.device and d not in run.answers.lost_devices)
                out += [self._orders.lease(run.plan, run.run_id, device, ()) for device in others]
        else:
            self._counters["foreign_frame"] += 1
        if run.answers.is_complete(run.plan.devices):
            return [*out, *self._complete(group, run, now)]
        output = run.answers.whole_output(run.kind.output_shape) if run.state == "dispatched" else None
        return out if output is None else [*out, *self._deliver(group, run, output, now, reported=False)]

    def handle_failure(self, device: str, message: messages.RunFailed, now: float) -> list[CoordinatorCommand]:
        """Retry a run after a loss (`RunFailed.code`); after another error of a device, retry it once."""
        if (target := self._run_of(device, message)) is None:
            self._counters["late"] += not self._ahead.keep_report(device, message)
            return []
        group, run = target
        out: list[CoordinatorCommand] = [LogEvent("request_failed", f"{device}: {message.text}")]
        if message.code in ("wire", "session", "link", "passed"):
            same_loss = message.code == "link" and self._is_same_link_loss(run, now)
            lost = run.items_of(message.sessions)
            reused = message.code == "session" and self.caches.forget_prefixes(run.plan_version, lost)
            return out + self.retry(group, run, now, same_loss or message.code == "passed" or reused, lost)
        # A second attempt may succeed: the input or this message may be forged, or the device may lack memory now.
        return out + self._retry_or_fail(group, run, RemoteError(message.text), 2, now)

    def _retry_or_fail(
        self, group: PlanGroup, run: Run, error: RemoteError, limit: int, now: float
    ) -> list[CoordinatorCommand]:
        """Run each item of a failed run again alone; fail a single item after `limit` attempts; rewind taken tokens."""
        if not run.is_computing:
            return self._rewind(group, run, error, limit, now)
        items = run.open_items
        attempts = 1 + max((item.request.failed_attempts[item.index] for item in items), default=0)
        if len(run.items) == 1 and attempts < limit:
            return self.retry(group, run, now)
        if len(run.items) == 1:
            out = self._cancel(group, run, "cancel", now)
            return out + (self.fail_request(group, run.items[0].request, error, now) if items else [])
        for item in items:  # its cached rows may come from forged frames
            if item.request.generation is not None:
                item.request.generation.session.leave()
        out = self._cancel(group, run, "retry", now)
        for item in items:
            item.request.unbatchable.add(item.index)
        group.queue.prepend(items)
        return out

    @staticmethod
    def _is_same_link_loss(run: Run, now: float) -> bool:
        """Record the loss of a connection between devices; return whether it belongs to an earlier loss."""
        before = max(item.request.last_link_loss_s for item in run.items)
        if now - before < LINK_LOSS_WINDOW_S:
            return True
        for item in run.items:
            item.request.last_link_loss_s = now
        return False

    def retry(
        self, group: PlanGroup, run: Run, now: float, blameless: bool = False, failed: Sequence[WorkItem] = ()
    ) -> list[CoordinatorCommand]:
        """Cancel a run and queue its items first; a request fails after too many attempts.

        blameless: the attempt does not count as failed. failed: items whose KV caches are lost restart, the others
        continue; if empty, all items restart.
        """
        items = run.open_items
        out = self._cancel(group, run, "retry", now)
        restarted: list[WorkItem] = []
        continued = [item for item in items if failed and item not in failed]
        for item in items:
            request, attempts = item.request, item.request.failed_attempts
            if request.finished or item in continued:
                continue
            attempts[item.index] += not blameless
            if attempts[item.index] >= MAX_ATTEMPTS:
                text = f"Giving up after {attempts[item.index]} attempts: devices left, or tensors were lost (a broker "
                text += "drops messages above max_queued_messages). See `hepti devices`, `hepti doctor` and the "
                text += "planner's log."
                out += self.fail_request(group, request, RemoteError(text), now)
            elif group.error is not None and not group.plans.may_serve():
                out += self.fail_request(group, request, group.error, now)
            else:
                restarted.append(item)
        for item in restarted:
            if item.request.generation is not None:  # devices may have cached different rows
                item.request.generation.session.leave()
            if item.request.failed_attempts[item.index] > 1:  # the item may be the cause
                item.request.unbatchable.add(item.index)
        group.queue.prepend([*continued, *restarted])
        return out

    def handle_lost_device(self, group: PlanGroup, run: Run, device: str, now: float) -> list[CoordinatorCommand]:
        """Lease the tasks of a lost device to others; retry a run without tasks, or a run that lost its root."""
        if run.task_queue is None or device == run.plan.root:
            return self.retry(group, run, now)
        run.answers.lost_devices.add(device)
        run.answers.reports.pop(device, None)
        run.task_queue.remove_device(device)
        out = self._lease(run, now)
        return [*out, *self._complete(group, run, now)] if run.answers.is_complete(run.plan.devices) else out

    def retry_after_broker_loss(self, now: float) -> list[CoordinatorCommand]:
        """Retry the runs during which the broker was lost, after all of their devices are back."""
        marked = [(group, run) for group in self._groups for run in group.runs.values() if run.broker_was_lost]
        back = [(group, run) for group, run in marked if self._fleet.all_back(run.plan.devices)]
        return [command for group, run in back for command in self.retry(group, run, now, blameless=True)]

    def fail_request(
        self, group: PlanGroup, request: Request, error: HeptiError, now: float
    ) -> list[CoordinatorCommand]:
        """Refuse a request unless it has ended, and cancel the runs that no request waits for."""
        if request.finished:
            return []
        request.finished = True
        out: list[CoordinatorCommand] = []
        for run in [r for r in group.runs.values() if not r.waiting_requests and r.state == "dispatched"]:
            out += self._cancel(group, run, "cancel", now)
        return [*out, *self.caches.end_of(group, request), RefuseRequest(request, error)]

    def record_progress(self, device: str, message: messages.RunProgress, now: float) -> Run | None:
        """Record a device's progress with a run; return the run, None if it has ended."""
        target = self._run_of(device, message)
        run = None if target is None else target[1]
        if run is not None and (run.progress is None or message.block > run.progress.block):
            run.progress = Progress(message.block, now)
        return run

    def cancel(self, event: RequestCancelled, now: float) -> list[CoordinatorCommand]:
        """End a request that its client cancels, or refuse it on arrival."""
        out: list[CoordinatorCommand] = []
        for group, request in self.admission.find_cancelled(event.key, now):
            out += self.fail_request(group, request, CancelledRequestError(CANCELLED), now)
            group.queue.discard_finished()
        return out

    def refuse_expired(self, group: PlanGroup, now: float) -> list[CoordinatorCommand]:
        """Refuse the requests whose deadline has passed."""
        out: list[CoordinatorCommand] = []
        for request in self.admission.expired(group, now):
            late = DeadlineError("the deadline passed before the answer was ready")
            out += self.fail_request(group, request, late, now)
        group.queue.discard_finished()
        return out

    def _complete(self, group: PlanGroup, run: Run, now: float) -> list[CoordinatorCommand]:
        """Deliver a run with all reports; `estimate_updates` yields its update of estimates."""
        del group.runs[run.run_id]
        parts, reports = run.answers.parts, run.answers.reports
        self._counters["foreign_frame"] += sum(not reports[device][3] for device, _, _ in parts)
        self._ended.append((group, run, now))
        if (output := run.answers.whole_output(run.kind.output_shape)) is None:  # other versions, or forged
            text = "The devices' partial outputs do not form a whole answer. Install one version on all devices."
            return self._retry_or_fail(group, run, RemoteError(text), MAX_ATTEMPTS, now)
        out = self._deliver(group, run, output, now, reported=True)
        self._step(run, "report", now)
        return out

    def estimate_updates(self) -> Iterator[Callable[[], None]]:
        """Yield a function that updates estimates for each newly ended run, in order."""
        ended, self._ended = self._ended, []
        return (partial(self._learn, group, run, end_s) for group, run, end_s in ended)

    def _learn(self, group: PlanGroup, run: Run, end_s: float) -> None:
        """Update estimates by a run: slowdown of devices, cost of searches, and duration of the plan's method."""
        group.durations.record_reports(run, end_s)
        seconds, other = end_s - run.times.dispatched_s, run.other_work
        if not other.alone or other.loads:
            return
        if other.only_search and run.times.expected_s > 0:
            self._groups.background.record_run(seconds / run.times.expected_s)
        if len(run.items) == 1 and run.kind.is_planned:
            judged_s = group.judgement.judged_s
            group.durations.record_run(run.plan, run.shape.size, seconds, end_s, judged_s, doubtful=other.search)

    def _step(self, run: Run, event: RunEvent, now: float) -> None:
        run.state = self._machine.step(f"run {run.run_id}", run.state, event, now)

    def _deliver(
        self, group: PlanGroup, run: Run, output: Array, now: float, *, reported: bool
    ) -> list[CoordinatorCommand]:
        """Deliver the whole output of a run to its requests; those with `wants_report` wait for all reports.

        The run ends with the last report, or when it is overdue.
        """
        if run.items[0].request.generation is not None:
            return self._continue_generation(group, run, output, now, reported)
        takers = [item for item in run.items if reported or not item.request.wants_report]
        if not takers:
            return []
        early, stats, out = run.early_stats, run.stats(), list[CoordinatorCommand]()
        run.early_stats = stats
        if not reported:
            self._step(run, "answer", now)
        outputs = split_output(group.served.spec, [item.batch for item in run.items], output)
        for item, own in zip(run.items, outputs, strict=True):
            if early is not None and not item.request.wants_report:  # it has the output, only the reports are new
                item.request.stats = [stats if each is early else each for each in item.request.stats]
            elif item in takers:
                out += self._deliver_output(group, run, item, stats, own)
        return out

    @staticmethod
    def _deliver_output(
        group: PlanGroup, run: Run, item: WorkItem, stats: RunStats, output: Array
    ) -> list[CoordinatorCommand]:
        """Deliver the output of one of a request's items; the last one answers the request."""
        request = item.request
        if request.finished:
            return []
        request.stats.append(stats)
        request.outputs[item.index] = output
        if len(request.outputs) < len(request.batches):
            return []
        request.finished = True
        return [AnswerRequest(request, group.plans.parent_of(run.plan), tuple(request.stats))]

    def _cancel(self, group: PlanGroup, run: Run, event: RunEvent, now: float) -> list[CoordinatorCommand]:
        group.runs.pop(run.run_id, None)
        self._step(run, event, now)
        devices = (run.before or run).plan.devices
        out: list[CoordinatorCommand] = []
        for each in (run,) if run.before is None else (run.before, run):
            out += self._orders.cancel(each.plan, [each.run_id], devices)
        out += self._ahead.cancel_after(run.run_id)
        for item in run.items:  # the item may have waited only for reports
            out += self._answer_generation(group, item) + self.caches.end_of(group, item.request)
        return out

    # -- leased tasks ---------------------------------------------------------------------------------------------

    def complete_task(self, device: str, message: messages.TaskDone, now: float) -> list[CoordinatorCommand]:
        """Record a computed task, and lease the device another one, or say that none is left."""
        target = self._run_of(device, message)
        if target is None or (run := target[1]).task_queue is None:
            return []
        if run.plan.root in run.answers.reports:  # the task began after the end of the root's run
            return [self._orders.lease(run.plan, run.run_id, device, ())]
        run.task_queue.complete_task(device, message.task, now)
        return self._lease(run, now)

    def lease_overdue(self, now: float) -> list[CoordinatorCommand]:
        """Lease overdue tasks again."""
        return [command for run in self._groups.runs() for command in self._lease(run, now)]

    def _lease(self, run: Run, now: float) -> list[CoordinatorCommand]:
        """Lease queued and overdue tasks to the free devices of a run."""
        if run.task_queue is None or run.plan.root in run.answers.reports:
            return []
        leases = run.task_queue.lease_tasks(now)
        return [self._orders.lease(run.plan, run.run_id, device, (task,)) for device, task in leases]

    # -- generation -----------------------------------------------------------------------------------------------
    #
    # A whole output needs every op of every device (tested for all methods), so the devices have cached their rows and
    # the next run starts before the reports arrive. A published token is final: if its run was forged, it is computed
    # again, and a different token is an error.

    def _continue_generation(
        self, group: PlanGroup, run: Run, output: Array, now: float, reported: bool
    ) -> list[CoordinatorCommand]:
        """Take the tokens of a run's output, then its reports when all have arrived."""
        stats, out = run.stats(), list[CoordinatorCommand]()
        if not run.is_computing:
            return self._take_reports(group, run, output, stats, now)
        generations = [item.request.generation for item in run.items]
        states = any(g.wants_states for g in generations if g)
        if not reported and (states or not run.waiting_requests or not _usable(output)):
            return []
        if not reported:
            run.output, run.early_stats = output, stats
            self._step(run, "answer", now)
        self._ahead.note_answered(run.run_id)
        if run.other_work.alone:
            group.durations.step_pace(run.plan).record(run.shape.size, now - run.times.dispatched_s)
        run.step_indices = tuple(
            len(g.steps) if g and not i.request.finished else None for i, g in zip(run.items, generations, strict=True)
        )
        for place, item in enumerate(run.items):
            if item.request.finished:
                out += self.caches.end_of(group, item.request)
            else:  # in a run of several sessions, each has one row
                own = output if len(run.items) == 1 else output[place : place + 1]
                out += self._take_tokens(group, run, item, own, stats, now)
        return out

    def _take_reports(
        self, group: PlanGroup, run: Run, output: Array, stats: RunStats, now: float
    ) -> list[CoordinatorCommand]:
        """Take the reports of a run after its tokens; a different output means that a part was forged."""
        open_items = [
            (item, index)
            for item, index in zip(run.items, run.step_indices, strict=True)
            if index is not None and not item.request.finished
        ]
        if open_items and run.output is not None and not np.array_equal(run.output, output):
            error = RemoteError("parts of an answer were not sent by the devices")
            return self._rewind(group, run, error, MAX_ATTEMPTS, now)
        out: list[CoordinatorCommand] = []
        for item, index in open_items:
            item.request.stats[index] = stats
            out += self._answer_generation(group, item)
        return out

    def _take_tokens(
        self, group: PlanGroup, run: Run, item: WorkItem, logits: Array, stats: RunStats, now: float
    ) -> list[CoordinatorCommand]:
        """Append the tokens of a run, publish new ones, and dispatch or queue the next run."""
        request, generation = item.request, item.request.generation
        assert generation is not None
        if not generation.wants_states and not _usable(logits):
            error = RemoteError(f"the devices answered with invalid logits of shape {list(logits.shape)}")
            return self.fail_request(group, request, error, now)
        request.unbatchable.discard(item.index)
        published = generation.published_tokens
        try:
            step = generation.append_tokens(logits)
        except HeptiError as error:  # the rules allow no token
            return self.fail_request(group, request, error, now)
        except Exception as error:
            return self._end_with_fault(group, request, error, now)
        request.stats.append(stats)
        out: list[CoordinatorCommand] = []
        for place, token in enumerate(step.taken, step.place):
            if place >= len(published):
                so_far = tuple(step.text.tokens[: place + 1])
                out.append(TokenReady(request, place, so_far, step.text.attempt, step.text.likely[place]))
            elif place >= 0 and token != published[place]:
                text = f"Token {place} was published as {published[place]}, but recomputing it gave {token}. Repeat "
                text += "the request; a device may be faulty (see `hepti devices`)."
                return self.fail_request(group, request, RemoteError(text), now)
            if not 0 <= place < len(published):
                request.failed_attempts.clear()
        if generation.done:
            return out + self._answer_generation(group, item)
        try:
            following = self.dispatcher.continue_text(group, run, now)
        except Exception as error:
            return out + self._end_with_fault(group, request, error, now)
        if following is None:
            group.queue.resume(item)
        return out + (following or [])

    def _end_with_fault(
        self, group: PlanGroup, request: Request, error: Exception, now: float
    ) -> list[CoordinatorCommand]:
        """Fail a text after a fault of the planner; otherwise it would never end."""
        fault = RemoteError(f"the planner cannot continue this text ({error!r}); report it with the planner's log")
        return [LogEvent("internal_error", str(fault)), *self.fail_request(group, request, fault, now)]

    def _answer_generation(self, group: PlanGroup, item: WorkItem) -> list[CoordinatorCommand]:
        """Answer a generation that has all tokens and, with `wants_report`, all reports."""
        request = item.request
        if request.finished or request.generation is None or not request.generation.done:
            return []
        if request.wants_report and any(request is i.request for run in group.runs.values() for i in run.items):
            return []
        if not request.generation.carried.size:  # record the actual length: most texts end long before their limit
            group.recent.lengths.append(len(request.generation.prompt) + len(request.generation.text.tokens))
        request.finished = True
        out: list[CoordinatorCommand] = [
            AnswerRequest(request, group.plans.parent_of(request.stats[-1].plan), tuple(request.stats))
        ]
        return [*out, *self.caches.keep(group, request.generation)]

    def _rewind(
        self, group: PlanGroup, run: Run, error: HeptiError, limit: int, now: float
    ) -> list[CoordinatorCommand]:
        """Discard the tokens since a run with a contradicted output, and retry; fail after `limit` attempts."""
        rewound = [(i, index) for i, index in zip(run.items, run.step_indices, strict=True) if not i.request.finished]
        items, out = [item for item, index in rewound if index is not None], list[CoordinatorCommand]()
        if not items:
            return self._cancel(group, run, "cancel", now)
        for item, index in rewound:
            if index is not None and item.request.generation is not None:
                item.request.generation.rewind(index)
                del item.request.stats[index:]
                item.request.failed_attempts[item.index] += 1
        for later in [r for r in group.runs.values() if r.run_id >= run.run_id and any(i in items for i in r.items)]:
            others = [item for item in later.open_items if item not in items]
            out += self._cancel(group, later, "retry", now)
            group.queue.prepend(others)
        group.queue.remove([item for item in group.queue if item in items])
        for item in items:
            if item.request.failed_attempts[item.index] >= limit:
                out += self.fail_request(group, item.request, error, now)
            else:
                group.queue.prepend([item])
        return out

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        self._ahead.check(frozenset(run.run_id for run in self._groups.runs()))
        for group in self._groups:
            check_texts(group)


def _usable(logits: Array) -> bool:
    return logits.ndim == 2 and len(logits) > 0 and bool(np.isfinite(logits).all())
