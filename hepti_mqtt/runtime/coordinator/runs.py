"""Runs: packed batches that devices of a plan compute, and what the devices have answered so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf
from typing import Final, NamedTuple

import numpy as np

from hepti_mqtt.cost.profiles import Cluster
from hepti_mqtt.ids import PlanVersion
from hepti_mqtt.plan import Plan
from hepti_mqtt.protocol.frames import Frame
from hepti_mqtt.protocol.keys import UNKEYED, FrameKey
from hepti_mqtt.runtime.coordinator.batches import (
    Array,
)
from hepti_mqtt.runtime.coordinator.requests import (
    AS_PREDICTED,
    Expectation,
    Request,
    RunStats,
    WorkItem,
)
from hepti_mqtt.spec import RequestShape
from hepti_mqtt.task_queue import TaskQueue

MAX_UNREPORTED_RUNS: Final = 4  # runs on a device whose reports alone are missing, and that take no room of others


class Progress(NamedTuple):
    """The farthest block of the graph that a device was in, and when the planner heard of it."""

    block: int
    heard_s: float


@dataclass(slots=True)
class Run:
    """A packed batch of one or more requests, dispatched under a plan version and a run id.

    parts: of the output, by device, node and part, with their first row. expected_s: predicted duration;
    expected_end_s: predicted end, after earlier runs on its devices. probe_at_s: when its devices are probed; probed_s:
    when they were. deadline_s: when it is retried. broker_was_lost: during the run. early_stats: at the time of an
    output before all reports. places: of this run among those of each item's request, once its tokens were taken, None
    of a request that had ended. steps: of sessions. task_queue: of leased tasks. lost_devices: devices without which it
    continues. beside_loads: a device of the site loaded weights meanwhile, or prepared a plan. beside_search: the
    planner's machine searched; only_beside_search: all the time. frame_key: of its frames. progress: how far it is, as
    far as devices have said. before: the run that it goes
    on with under another plan. asked: the plan and the progress that the rule was last asked about. is_late: it is not
    as far as it should be; was_searched_for: a brief search for a plan that it may go on under was made. following: the
    steps that devices begin by themselves when it has ended. ids: of its items where devices have begun it so.
    """

    run_id: int
    items: tuple[WorkItem, ...]
    shape: RequestShape
    plan: Plan
    cluster: Cluster
    dispatched_s: float
    deadline_s: float
    dispatch_bytes: int
    ran_alone: bool  # no other run at any time
    parts: dict[tuple[str, int, int], tuple[int, Array]] = field(default_factory=dict)
    reports: dict[str, tuple[int, ...]] = field(default_factory=dict)
    expectation: Expectation = AS_PREDICTED
    expected_s: float = 0.0
    probe_at_s: float = inf
    probed_s: float | None = None
    expected_end_s: float = 0.0
    broker_was_lost: bool = False
    early_stats: RunStats | None = None
    places: tuple[int | None, ...] = ()
    steps: bool = False
    task_queue: TaskQueue | None = None
    lost_devices: set[str] = field(default_factory=set)
    beside_loads: bool = False
    beside_search: bool = False
    only_beside_search: bool = True
    frame_key: FrameKey = UNKEYED
    progress: Progress | None = None
    before: Run | None = None
    asked: tuple[PlanVersion, Progress | None] | None = None
    is_late: bool = False
    was_searched_for: bool = False
    ids: tuple[int, ...] = ()

    @property
    def plan_version(self) -> PlanVersion:
        """Return the plan version of the run."""
        return self.plan.version

    @property
    def waiting_requests(self) -> list[Request]:
        """Return the requests that still wait for it."""
        return [item.request for item in self.items if not item.request.finished]

    @property
    def is_computing(self) -> bool:
        """Return whether devices may still compute for it; False once its tokens were taken."""
        return not self.places

    def needs(self, plan_version: PlanVersion) -> bool:
        """Return whether devices of a plan are needed for it; once it is seen to go on, none of the plan before."""
        before = None if self.before is None or self.progress is not None else self.before.plan_version
        return plan_version in (self.plan_version, before)

    @property
    def may_go_on(self) -> bool:
        """Return whether it may go on under another plan: it is somewhere between its blocks, as begun by a request."""
        fresh = self.before is None and self.task_queue is None and not self.shape.session_rows
        return fresh and self.progress is not None and not self.parts and not self.reports and self.is_computing

    def items_of(self, sessions: Collection[int]) -> list[WorkItem]:
        """Return the items of some sessions; all items if none is among these."""
        made = [(item, item.request.generation) for item in self.items]
        return [item for item, of in made if of is not None and of.session in sessions] or list(self.items)

    @property
    def open_items(self) -> list[WorkItem]:
        """Return the items whose output was not delivered."""
        if not self.is_computing:
            return []
        return [item for item in self.items if not item.request.finished and item.index not in item.request.outputs]

    def contradicts(self, device: str, frame: Frame) -> bool:
        """Return whether a frame differs from an earlier one of the device for the same part or report."""
        if frame.kind == "output":
            first, array = self.parts.get((device, frame.node, frame.part), (frame.row_start, None))
            differs = array is not None and (first != frame.row_start or not _same(array, frame.array()))
            return differs or (bool(self.ids) and frame.numbers != self.ids)
        if frame.kind == "done" and len(frame.numbers) == 4:
            return self.reports.get(device, frame.numbers)[3] != frame.numbers[3]
        return False

    def _sent_parts(self) -> list[tuple[int, Array]]:
        """Return first row and values of each part, in order, without devices that reported none."""
        said = {device: numbers[3] > 0 for device, numbers in self.reports.items()}
        mine = [part for (device, _, _), part in self.parts.items() if said.get(device, True)]
        return sorted(mine, key=lambda part: part[0])

    def has_whole_output(self, shape: tuple[int, int]) -> bool:
        """Return whether the parts form an output of this shape, each row once."""
        end, mine = 0, self._sent_parts()
        for first, array in mine:
            if first != end or array.shape[1:] != shape[1:] or array.ndim != len(shape):
                return False
            end += len(array)
        return bool(mine) and end == shape[0]

    def complete(self) -> bool:
        """Return whether every device has reported, and every part that one reported is here."""
        heard = self.reports.keys() | self.lost_devices
        if heard < set(self.plan.devices) or not any(n[3] for n in self.reports.values()):
            return False
        here = Counter(device for device, _, _ in self.parts)
        return all(here[device] >= numbers[3] for device, numbers in self.reports.items())

    def count_unannounced(self) -> int:
        """Return the number of parts from devices that reported none."""
        return sum(not self.reports[device][3] for device, _, _ in self.parts)

    def output(self) -> Array:
        """Return the parts of the output, one below the other."""
        mine = [array for _, array in self._sent_parts()]
        return mine[0] if len(mine) == 1 else np.concatenate(mine)

    def outputs_of_steps(self) -> list[Array]:
        """Return of a run of sessions what answers each item: of several a row each, else all."""
        output = self.output()
        return [output] if len(self.items) == 1 else [output[i : i + 1] for i in range(len(self.items))]

    def stats(self) -> RunStats:
        """Return what the devices reported."""
        return RunStats(
            self.plan,
            self.cluster,
            self.shape,
            {d: n[0] for d, n in self.reports.items()},
            {d: n[1] for d, n in self.reports.items()},
            {d: n[2] for d, n in self.reports.items()},
            self.dispatch_bytes,
            len(self.items),
            reported=self.reports.keys() | self.lost_devices >= set(self.plan.devices),
            dispatched_s=(self.before or self).dispatched_s,
            expectation=self.expectation,
        )


def _same(one: Array, other: Array) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()
