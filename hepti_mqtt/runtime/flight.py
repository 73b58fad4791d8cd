"""Requests on their way: a user's request is a job of one or more runs, each a Program run of one packed batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.cluster import Cluster
from hepti_mqtt.ids import Epoch
from hepti_mqtt.plan import Plan, Storage, WireDtype
from hepti_mqtt.spec import RequestShape

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A packed batch that runs as one: its shape and token ids [m] i32 or pixels [B, C, S, S] u8."""

    shape: RequestShape
    inputs: Array


@dataclass(frozen=True, slots=True)
class RequestKey:
    """What makes a user's request one and the same: model, client and the client's own id."""

    model: str
    client: str
    request: str


@dataclass(frozen=True, slots=True)
class Pins:
    """What is fixed of a model's plans; what is None the planner chooses."""

    strategy: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] | None = None
    wire: WireDtype = "f32"
    storage: Storage = "f32"


@dataclass(slots=True)
class Job:
    """A user's request; `token` is the shell's own handle for writing the answer.

    pins: the request runs only under a plan that was searched under them; None is content with any plan. computes:
    False for a request that only wants a plan to be up, and its forecast. attempts: how often each chunk was lost.
    """

    key: RequestKey
    chunks: tuple[Chunk, ...]
    token: object
    deadline_s: float | None
    pins: Pins | None = None
    computes: bool = True
    outputs: dict[int, Array] = field(default_factory=dict)
    stats: list[RunStats] = field(default_factory=list)
    attempts: Counter[int] = field(default_factory=Counter)
    over: bool = False

    def output(self) -> Array:
        """Return the outputs of all chunks, one below the other."""
        return np.concatenate([self.outputs[i] for i in range(len(self.chunks))])


@dataclass(slots=True)
class RunStats:
    """One run as its devices counted it: microseconds and bytes by device, and the planner's own bytes.

    cluster: devices and links as they were when the plan was chosen.
    """

    plan: Plan
    cluster: Cluster
    shape: RequestShape
    compute_us: dict[str, int]
    wait_us: dict[str, int]
    sent_bytes: dict[str, int]
    dispatch_bytes: int


@dataclass(slots=True)
class Run:
    """One chunk of a job, dispatched under an epoch with an admission number of its own."""

    admission: int
    job: Job
    chunk: int
    plan: Plan
    cluster: Cluster
    begun_s: float
    overdue_s: float
    dispatch_bytes: int
    alone: bool  # no other run at any time
    output: Array | None = None
    done: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def epoch(self) -> Epoch:
        """Return the epoch to which the run is pinned."""
        return self.plan.epoch

    def complete(self) -> bool:
        """Return whether the output is here and every device has reported."""
        return self.output is not None and len(self.done) == len(self.plan.devices)

    def stats(self) -> RunStats:
        """Return what the devices reported."""
        return RunStats(
            self.plan,
            self.cluster,
            self.job.chunks[self.chunk].shape,
            {d: n[0] for d, n in self.done.items()},
            {d: n[1] for d, n in self.done.items()},
            {d: n[2] for d, n in self.done.items()},
            self.dispatch_bytes,
        )
