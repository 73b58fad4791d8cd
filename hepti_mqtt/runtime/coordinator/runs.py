"""Runs: packed batches that the devices of a plan compute, and the answers so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf
from typing import Final, Literal, NamedTuple, get_args

import numpy as np

from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.profiles import Cluster
from hepti_mqtt.core.spec import RequestShape
from hepti_mqtt.protocol.frames import Frame
from hepti_mqtt.protocol.keys import UNKEYED, FrameKey
from hepti_mqtt.runtime.coordinator.batches import Array
from hepti_mqtt.runtime.coordinator.requests import AS_PREDICTED, Expectation, Request, RunStats, WorkItem
from hepti_mqtt.runtime.machinery import StateTable
from hepti_mqtt.strategies.task_queue import TaskQueue

MAX_UNREPORTED_RUNS: Final = 4  # runs of a device that lack only reports, and do not count as concurrent


class Progress(NamedTuple):
    """The farthest block that a device reported, and when the planner received the report."""

    block: int
    heard_s: float


RunState = Literal["dispatched", "answered", "reported", "retried", "cancelled", "continued"]
RunEvent = Literal["dispatch", "answer", "report", "retry", "cancel", "continue"]

RUN_STATES: Final[StateTable[RunState, RunEvent]] = StateTable(
    name="run",
    states=get_args(RunState),
    first=("dispatch", "dispatched"),
    steps={
        "dispatched": {
            "answer": "answered",  # the output is complete, reports are missing
            "report": "reported",
            "retry": "retried",
            "cancel": "cancelled",
            "continue": "continued",  # under another plan, as another run
        },
        "answered": {"report": "reported", "retry": "retried", "cancel": "cancelled"},
        "reported": {},
        "retried": {},
        "cancelled": {},
        "continued": {},
    },
    safe={"dispatched": "cancelled", "answered": "cancelled"},
)


@dataclass(slots=True)
class DeviceAnswers:
    """The parts of the output, and the reports, of a run's devices."""

    #: Parts of the output with their first row, by device, node and part.
    parts: dict[tuple[str, int, int], tuple[int, Array]] = field(default_factory=dict)
    #: Microseconds of compute and wait, bytes and parts sent, by device.
    reports: dict[str, tuple[int, ...]] = field(default_factory=dict)
    lost_devices: set[str] = field(default_factory=set)  #: devices that the run continues without
    ids: tuple[int, ...] = ()  #: tokens of a step that devices began ahead; outputs must carry the same

    def contradicts(self, device: str, frame: Frame) -> bool:
        """Return whether a frame differs from an earlier one of the device for the same part or report."""
        if frame.kind == "output":
            first, array = self.parts.get((device, frame.node, frame.part), (frame.row_start, None))
            differs = array is not None and (first != frame.row_start or not _same(array, frame.array()))
            return differs or (bool(self.ids) and frame.numbers != self.ids)
        if frame.kind == "done" and len(frame.numbers) == 4:
            return self.reports.get(device, frame.numbers)[3] != frame.numbers[3]
        return False

    def whole_output(self, shape: tuple[int, int]) -> Array | None:
        """Return the output if the parts form this shape, each row once; None if rows are missing or repeated.

        Parts of devices that reported no parts do not count.
        """
        has_parts = {device: numbers[3] > 0 for device, numbers in self.reports.items()}
        parts = [part for (device, _, _), part in self.parts.items() if has_parts.get(device, True)]
        parts.sort(key=lambda part: part[0])
        end = 0
        for first, array in parts:
            if first != end or array.shape[1:] != shape[1:] or array.ndim != len(shape):
                return None
            end += len(array)
        if not parts or end != shape[0]:
            return None
        return parts[0][1] if len(parts) == 1 else np.concatenate([array for _, array in parts])

    def is_complete(self, devices: Collection[str]) -> bool:
        """Return whether every device has reported, and every reported part has arrived."""
        reported = self.reports.keys() | self.lost_devices
        if reported < set(devices) or not any(n[3] for n in self.reports.values()):
            return False
        arrived = Counter(device for device, _, _ in self.parts)
        return all(arrived[device] >= numbers[3] for device, numbers in self.reports.items())


@dataclass(frozen=True, slots=True)
class RunTimes:
    """Times of a run, measured and expected."""

    dispatched_s: float
    expected_s: float = 0.0  #: expected duration
    expected_end_s: float = 0.0  #: expected end, after earlier runs on its devices
    probe_at_s: float = inf  #: when its devices are probed
    deadline_s: float = inf  #: when it is retried
    expectation: Expectation = AS_PREDICTED  #: of its duration, as factors on the prediction


class RunKind(NamedTuple):
    """The common properties of runs of one shape under one plan."""

    output_shape: tuple[int, int]
    is_planned: bool = True  #: plans are optimised for runs of this shape
    tasks: int = 0  #: number of leased tasks, 0 without a task queue
    frame_key: FrameKey = UNKEYED


@dataclass(slots=True)
class OtherWork:
    """Other work during a run; the session updates it at each event."""

    alone: bool  #: no other run at any time
    loads: bool = False  #: a device of the site loaded weights, or prepared a plan
    search: bool = False  #: the planner's machine searched
    only_search: bool = True  #: it searched all the time


@dataclass(slots=True)
class Lateness:
    """What the session did about a late run, or about a run that may continue under another plan."""

    is_late: bool = False
    was_searched_for: bool = False  #: a brief search looked for a plan to continue it
    judged: tuple[PlanVersion, Progress | None] | None = None  #: plan and progress of the rule's last judgement


@dataclass(slots=True)
class Run:
    """A packed batch of one or more requests, dispatched under a plan version and a run id."""

    run_id: int
    items: tuple[WorkItem, ...]
    shape: RequestShape
    plan: Plan
    cluster: Cluster
    times: RunTimes
    dispatch_bytes: int
    other_work: OtherWork
    kind: RunKind
    state: RunState = "dispatched"  #: changed by the run tracker and, at a handover, by the dispatcher
    answers: DeviceAnswers = field(default_factory=DeviceAnswers)
    lateness: Lateness = field(default_factory=Lateness)
    probed_s: float | None = None  #: when its devices were probed
    broker_was_lost: bool = False  #: since its dispatch
    output: Array | None = None  #: the output that was delivered before all devices had reported
    early_stats: RunStats | None = None  #: the statistics that were delivered with that output
    #: Index in `Generation.steps`, by item; None if the request had ended. Empty before the tokens are taken.
    step_indices: tuple[int | None, ...] = ()
    is_step: bool = False  #: all items are decoding steps
    task_queue: TaskQueue | None = None  #: leased tasks
    progress: Progress | None = None  #: reported by devices
    before: Run | None = None  #: the run that this one continues under another plan

    @property
    def plan_version(self) -> PlanVersion:
        """Return the plan version of the run."""
        return self.plan.version

    @property
    def waiting_requests(self) -> list[Request]:
        """Return the unfinished requests of the run."""
        return [item.request for item in self.items if not item.request.finished]

    @property
    def is_computing(self) -> bool:
        """Return whether devices may still compute it: until all reports, or for texts until their tokens are taken."""
        return self.state == "dispatched" or not self.step_indices

    def needs(self, plan_version: PlanVersion) -> bool:
        """Return whether it still needs a plan version; after its first progress not the version that it left."""
        before = None if self.before is None or self.progress is not None else self.before.plan_version
        return plan_version in (self.plan_version, before)

    @property
    def may_be_handed_over(self) -> bool:
        """Return whether another plan may continue the run: once, between two blocks, before any part of the output."""
        is_eligible = self.before is None and self.task_queue is None and not self.shape.session_rows
        has_answers = bool(self.answers.parts or self.answers.reports)
        return is_eligible and self.progress is not None and not has_answers and self.is_computing

    def items_of(self, sessions: Collection[int]) -> list[WorkItem]:
        """Return the items of some sessions; all items if no item has one of them."""
        texts = [(item, item.request.generation) for item in self.items]
        return [i for i, text in texts if text is not None and text.session.number in sessions] or list(self.items)

    def check(self) -> None:
        """Raise AssertionError if its fields contradict its state."""
        assert self.state in ("dispatched", "answered"), "ended runs are removed"
        assert (self.state == "answered") == (self.early_stats is not None)
        assert self.state == "answered" or not self.step_indices
        assert self.waiting_requests or self.early_stats, "no request waits for the run"
        assert len(self.step_indices) in (0, len(self.items))

    @property
    def open_items(self) -> list[WorkItem]:
        """Return the items whose output was not delivered."""
        if not self.is_computing:
            return []
        return [item for item in self.items if not item.request.finished and item.index not in item.request.outputs]

    def stats(self) -> RunStats:
        """Return the statistics from the devices' reports."""
        reports = self.answers.reports
        return RunStats(
            self.plan,
            self.cluster,
            self.shape,
            {device: numbers[0] for device, numbers in reports.items()},
            {device: numbers[1] for device, numbers in reports.items()},
            {device: numbers[2] for device, numbers in reports.items()},
            self.dispatch_bytes,
            len(self.items),
            reported=reports.keys() | self.answers.lost_devices >= set(self.plan.devices),
            dispatched_s=(self.before or self).times.dispatched_s,
            expectation=self.times.expectation,
        )


def _same(one: Array, other: Array) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()
