"""Requests to a model: their keys, pins, batches or text, and the statistics of their runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from math import inf
from typing import Any, Final, NamedTuple

import numpy as np

from hepti_mqtt.core.ids import PlanVersion, whole_model
from hepti_mqtt.core.plan import Objective, Plan, Route, WeightDtype, WireDtype
from hepti_mqtt.core.profiles import Cluster
from hepti_mqtt.core.spec import RequestShape, Spec
from hepti_mqtt.cost.simulator import TopicNames
from hepti_mqtt.planner.price import Question
from hepti_mqtt.runtime.coordinator.batches import Array, Batch
from hepti_mqtt.runtime.coordinator.texts import Generation


@dataclass(frozen=True, slots=True)
class RequestKey:
    """The identity of a request: model, client and the client's own id."""

    model: str
    client: str
    id: str

    @property
    def client_request(self) -> RequestKey:
        """Return the key of the client's request, over all models that answer it."""
        return replace(self, model=whole_model(self.model))


@dataclass(frozen=True, slots=True)
class Pins:
    """The fixed properties of a model's plans; the planner chooses a field that is None."""

    strategy: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] | None = None
    wire: WireDtype = "f32"
    weight_dtype: WeightDtype = "f32"
    route: Route | None = None
    objective: Objective = "latency"
    accuracy: float | None = None  #: largest relative error of a narrow wire dtype, which the planner then chooses

    @property
    def is_unpinned(self) -> bool:
        """Return whether strategy, variant and devices are the planner's choice."""
        return self.strategy is None and not self.options and self.devices is None

    def question(
        self,
        naming: TopicNames,
        spec: Spec,
        cluster: Cluster,
        shape: RequestShape,
        plan_version: PlanVersion,
        **more: Any,
    ) -> Question:
        """Return the question for a plan with these pins; more: other fields of `Question`."""
        pins = {f.name: getattr(self, f.name) for f in fields(self)}
        return Question(naming, spec, cluster, shape, plan_version, **pins, **more)

    def __str__(self) -> str:
        words = [self.strategy, *self.options.values(), self.devices and "on " + " ".join(self.devices)]
        words += [f"wire {self.wire}" if self.wire != "f32" else ""]
        words += [self.weight_dtype if self.weight_dtype != "f32" else "", f"route {self.route}" if self.route else ""]
        words += [f"for {self.objective}" if self.objective != "latency" else ""]
        words += [f"accuracy {self.accuracy:g}" if self.accuracy is not None else ""]
        return ", ".join(word for word in words if word) or "auto"


LEAST_TOKEN_S: Final = 1e-6


@dataclass(slots=True)
class Request:
    """A user's request to one model."""

    key: RequestKey
    batches: tuple[Batch, ...]  #: the prompt alone if it generates tokens
    reply_context: object  #: opaque handle of the shell for the answer
    deadline_s: float | None
    pins: Pins | None = None  #: pins of its plan; None: the model's default plan
    wants_result: bool = True  #: False: the plan and its forecast are the answer
    outputs: dict[int, Array] = field(default_factory=dict)  #: by batch
    stats: list[RunStats] = field(default_factory=list)
    failed_attempts: Counter[int] = field(default_factory=Counter)  #: by batch; see `RunTracker.retry`
    finished: bool = False
    generation: Generation | None = None  #: None unless it generates tokens
    sequence: int = 0  #: order of arrival
    arrived_s: float = 0.0
    wants_report: bool = True  #: the answer waits for the devices' reports
    last_link_loss_s: float = -inf  #: when a lost connection between devices last counted as an attempt
    unbatchable: set[int] = field(default_factory=set)  #: batches that run alone after a failed run

    @property
    def nbytes(self) -> int:
        """Return the bytes of its inputs."""
        return sum(batch.inputs.nbytes for batch in self.batches)

    def run_shapes(self) -> list[RequestShape]:
        """Return the shape of every run of the request, assuming one run per generated token."""
        text = self.generation
        if text is None:
            return [batch.shape for batch in self.batches]
        return text.shapes_to(len(text.prompt)) + [text.shape.decode_step(1)] * (text.max_new_tokens - 1)

    def upcoming_shapes(self, batch: int) -> list[RequestShape]:
        """Return the shapes of the runs of a queued batch under another plan."""
        text = self.generation
        if text is None:
            return [self.batches[batch].shape]
        shapes = text.shapes_to(len(text.prompt) + len(text.text.tokens))
        return list(dict.fromkeys((*shapes, text.shape.decode_step(1))))

    def measured_s(self, now: float) -> tuple[int, float, float]:
        """Return the rows and seconds of the largest run of a text, and the seconds of its fastest run."""
        starts = [*(run.dispatched_s or 0.0 for run in self.stats), now]
        seconds = [stop - start for start, stop in pairwise(starts)]
        sizes = (max(run.shape.sizes) for run in self.stats)
        rows, largest_s = max(zip(sizes, seconds, strict=True), key=lambda run: run[0], default=(1, 0.0))
        return rows, max(largest_s, LEAST_TOKEN_S), max(min(seconds, default=0.0), LEAST_TOKEN_S)

    def output(self) -> Array:
        """Return the outputs of all batches as rows, or the generated tokens [n] i32."""
        if self.generation is not None and self.generation.wants_states:
            return np.concatenate(self.generation.states)
        if self.generation is not None:
            return np.array(self.generation.text.tokens, np.int32)
        return np.concatenate([self.outputs[i] for i in range(len(self.batches))])


@dataclass(frozen=True, slots=True, eq=False)
class WorkItem:
    """One batch of a request, queued or running."""

    request: Request
    index: int

    @property
    def batch(self) -> Batch:
        """Return its batch; for a generation, the prompt."""
        return self.request.batches[self.index]

    @property
    def tokens(self) -> int:
        """Return the tokens of its batch; for a generation, of its next run."""
        text = self.request.generation
        return self.batch.shape.size if text is None else text.next_size

    @property
    def turn(self) -> int:
        """Return the tokens that count for its client's turn; those of a prompt count half."""
        return self.tokens if self.request.generation is None else (self.tokens + 1) // 2

    @property
    def batchable(self) -> bool:
        """Return whether it may share a run."""
        request, text = self.request, self.request.generation
        joins = text is None or text.joins
        return request.wants_result and joins and self.index not in request.unbatchable

    def joins(self, other: WorkItem) -> bool:
        """Return whether two batchable items may share a run: sessions need the same plan version."""
        a, b = self.request.generation, other.request.generation
        if a is None or b is None:
            return a is b and self.batch.shape.want == other.batch.shape.want
        return (a.session.plan_version, a.next_want) == (b.session.plan_version, b.next_want)


class Expectation(NamedTuple):
    """The expected duration of a run as factors on its prediction: mean, 10th and 90th percentile."""

    mean: float = 1.0
    p10: float = 1.0
    p90: float = 1.0


AS_PREDICTED: Final = Expectation()


@dataclass(slots=True)
class RunStats:
    """The statistics of a run: measured by its devices, or a forecast."""

    plan: Plan
    cluster: Cluster  #: measurements when the plan was chosen
    shape: RequestShape
    compute_us: dict[str, int]  #: by device
    wait_us: dict[str, int]  #: by device
    sent_bytes: dict[str, int]  #: by device
    dispatch_bytes: int  #: sent by the planner
    requests: int = 1  #: number of its items
    reported: bool = True  #: every device has reported
    dispatched_s: float | None = None  #: None for a forecast
    expectation: Expectation = AS_PREDICTED  #: expected duration at its dispatch
