"""Cost forecasts of requests, computed on their own thread so that answers do not wait for them.

The search has already simulated its plan for one length. Other forecasts take as long as building every device's
Program, so they are computed in a pause of the model: for each new request, and for recent lengths under a new plan. An
answer that is ready before its forecast contains an estimate.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import Final, NamedTuple

from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.profiles import Cluster, rows_factor
from hepti_mqtt.core.recent import Recent
from hepti_mqtt.core.spec import RequestShape, Spec
from hepti_mqtt.cost.simulator import TopicNames, simulate
from hepti_mqtt.models import usual_product
from hepti_mqtt.planner import RequestSimulation
from hepti_mqtt.planner.price import TimeParts
from hepti_mqtt.runtime.coordinator.plans import PlanSnapshot
from hepti_mqtt.runtime.coordinator.requests import RunStats
from hepti_mqtt.strategies.method import EMBEDDINGS
from hepti_mqtt.strategies.plan_programs import device_programs

KEPT: Final = 1024
MAX_PENDING: Final = 64  # pending forecasts; above this number, the least urgent are dropped
RECENT_SHAPES: Final = 4  # per model, forecast for a new plan
PAUSE_S: Final = 0.25  # since the model's last run or request
UNPAUSED_S: Final = 30.0  # without a pause, after which a forecast is computed during runs

WHOLE: Final = TimeParts()

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Forecast:
    """The predicted cost of a run."""

    tokens: int
    seconds: float  #: from dispatch to output
    nbytes: float  #: of all PUBLISH packets
    flops: Mapping[str, float]  #: by device
    simulated: bool = True  #: False if scaled from another length; then only proportions of `flops` are valid
    parts: TimeParts = WHOLE  #: of the time

    @classmethod
    def of(cls, played: RequestSimulation) -> Forecast:
        """Return the forecast of a simulation."""
        simulation = played.simulation
        flops = {name: use.flops for name, use in simulation.devices.items()}
        parts = TimeParts.of(simulation.devices, simulation.seconds)
        return cls(played.shape.size, simulation.seconds, simulation.nbytes, flops, parts=parts)


class _ForecastJob(NamedTuple):
    plan: Plan
    cluster: Cluster
    shape: RequestShape

    @property
    def key(self) -> tuple[PlanVersion, RequestShape]:
        return self.plan.version, self.shape


class Forecasts:
    """The forecasts of a site. `step` and `run` are slow; the other methods are callable on any thread.

    clock: seconds, as `time.monotonic`.
    """

    def __init__(self, site: str, specs: Mapping[str, Spec], clock: Callable[[], float] = time.monotonic) -> None:
        self._site, self._specs, self._clock = site, specs, clock
        self._changed = threading.Condition()  # guards the following fields
        self._standing: tuple[PlanSnapshot, ...] = ()
        self._recent_shapes = {name: Recent[RequestShape, None](RECENT_SHAPES) for name in specs}
        self._pending: OrderedDict[tuple[PlanVersion, RequestShape], _ForecastJob] = OrderedDict()  # most urgent first
        self._urgent_calls: deque[tuple[list[_ForecastJob], Callable[[], None]]] = deque()
        self._forecasts = Recent[tuple[PlanVersion, RequestShape], Forecast](KEPT)
        self._batched_runs = Recent[RequestShape, RunStats](KEPT)
        self._computing: frozenset[str] = frozenset()
        self._used_s = dict.fromkeys(specs, -inf)  # last request or end of a run, by model
        self._waits_s: dict[str, float] = {}  # start of the wait for a pause, by model
        self._closed = False

    def set_plans(self, standing: tuple[PlanSnapshot, ...]) -> None:
        """Set the current plans, and queue forecasts of recent shapes for the new ones.

        A repriced plan counts as new. The search's own simulation is used directly.
        """
        with self._changed:
            before = {s.plan.version: s.cluster for s in self._standing}
            self._standing, stands = standing, {s.plan.version for s in standing}
            for key in [key for key in self._pending if key[0] not in stands]:
                del self._pending[key]
            for new in (s for s in standing if before.get(s.plan.version) is not s.cluster):
                for key in [key for key in self._forecasts if key[0] == new.plan.version]:
                    del self._forecasts[key]
                if new.simulated is not None:
                    self._forecasts[new.plan.version, new.simulated.shape] = Forecast.of(new.simulated)
                for shape in self._recent_shapes[new.plan.model]:
                    self._add(_ForecastJob(new.plan, new.cluster, shape), urgent=False)
            self._changed.notify()

    def request(self, model: str, shapes: Iterable[RequestShape]) -> None:
        """Queue forecasts of a request under every plan of its model, the newest request first."""
        with self._changed:
            recent, self._used_s[model] = self._recent_shapes[model], self._clock()
            for shape in shapes:
                recent[shape] = None
                for snapshot in self._standing:
                    if snapshot.plan.model == model:
                        self._add(_ForecastJob(snapshot.plan, snapshot.cluster, shape), urgent=True)
            self._changed.notify()

    def set_busy_models(self, models: frozenset[str]) -> None:
        """Set the models with active runs; their forecasts wait."""
        if models == self._computing:
            return
        with self._changed:
            now = self._clock()
            self._used_s.update((model, now) for model in self._computing - models)
            self._computing = models
            if self._pending:
                self._changed.notify()

    def record_batched_run(self, run: RunStats) -> None:
        """Record the shape of a batched run; if the shape repeats, queue its forecast as the least urgent.

        The same run may be recorded several times.
        """
        with self._changed:
            before = self._batched_runs[run.shape] = self._batched_runs.get(run.shape, run)
            if before is not run:
                self._add(_ForecastJob(run.plan, run.cluster, run.shape), urgent=False)
                self._changed.notify()

    def call_when_ready(self, runs: Iterable[RunStats], act: Callable[[], None]) -> None:
        """Compute the forecasts of `runs` before all others, then call `act` on the forecasts' thread."""
        with self._changed:
            self._urgent_calls.append(([_ForecastJob(r.plan, r.cluster, r.shape) for r in runs], act))
            self._changed.notify()

    def lookup(self, plan: Plan, shape: RequestShape) -> Forecast:
        """Return the forecast of a run without waiting, or an estimate from the plan's nearest length."""
        with self._changed:
            key = plan.version, shape
            forecast = self._forecasts.get(key)
            if forecast is not None:
                self._forecasts.move_to_end(key)
                return forecast
            others = [f for (plan_version, _), f in self._forecasts.items() if plan_version == plan.version]
            cluster = next((s.cluster for s in self._standing if s.plan.version == plan.version), Cluster({}, {}))
        nearest = min(others, key=lambda f: abs(f.tokens - shape.size), default=_of_plan(plan))
        product = usual_product(self._specs[plan.model], plan.weight_dtype)
        rows = shape.size, max(nearest.tokens, 1)
        factors = [rows_factor(cluster, plan.devices, product, each) for each in rows]
        factor = nearest.parts.length_factor(factors[0] / factors[1], *rows)
        nbytes = nearest.nbytes * rows[0] / rows[1]
        return Forecast(shape.size, nearest.seconds * factor, nbytes, nearest.flops, simulated=False)

    def run(self) -> None:
        """Compute forecasts until `close`; the body of a thread."""
        while self.step(wait=True):
            continue

    def step(self, wait: bool = False) -> bool:
        """Compute the most urgent forecast; return False if none is due, with `wait` only after `close`."""
        with self._changed:
            works, act, due_s = self._next()
            while wait and not works and act is None and not self._closed:
                self._changed.wait(None if due_s == inf else max(due_s - self._clock(), 0.0))
                works, act, due_s = self._next()
            if self._closed or not (works or act):
                return False
        for work in works:
            self._forecast(work)
        if act is not None:
            act()
        return True

    def close(self) -> None:
        """End `run`."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _next(self) -> tuple[list[_ForecastJob], Callable[[], None] | None, float]:
        """Return the forecasts to compute now and the callback; else the next due time, infinity until a change."""
        if self._urgent_calls:
            return *self._urgent_calls.popleft(), 0.0
        now, due_s = self._clock(), inf
        for work in self._pending.values():
            model = work.plan.model
            pause_s = inf if model in self._computing else self._used_s[model] + PAUSE_S
            may_s = min(pause_s, self._waits_s[model] + UNPAUSED_S)
            if now >= may_s:
                del self._pending[work.key]
                self._waits_s[model] = now
                return [work], None, 0.0
            due_s = min(due_s, may_s)
        return [], None, due_s

    def _add(self, work: _ForecastJob, urgent: bool) -> None:
        if work.key in self._forecasts:
            return
        model = work.plan.model
        if all(waits.plan.model != model for waits in self._pending.values()):
            self._waits_s[model] = self._clock()
        self._pending[work.key] = work
        self._pending.move_to_end(work.key, last=not urgent)
        while len(self._pending) > MAX_PENDING:
            self._pending.popitem()

    def _forecast(self, work: _ForecastJob) -> None:
        with self._changed:
            if work.key in self._forecasts:
                self._forecasts.move_to_end(work.key)
                return
        try:
            forecast = self._simulated(work)
        except Exception:  # the answer contains an estimate instead
            _log.exception("Cannot forecast a run of %d tokens under plan %s", work.shape.size, work.plan.version)
            return
        with self._changed:
            self._forecasts[work.key] = forecast

    def _simulated(self, work: _ForecastJob) -> Forecast:
        plan, cluster, shape = work
        spec = self._specs[plan.model]
        naming, parts = TopicNames(self._site, plan.model), device_programs(spec, plan, shape)
        return Forecast.of(RequestSimulation(shape, simulate(naming, spec, shape, parts, cluster)))


def _of_plan(plan: Plan) -> Forecast:
    """Return the forecast that a plan contains."""
    parts: list[list[float]] = [list(weights) for weights in plan.shares.values()]
    divided = (ranges for kind, ranges in plan.ranges.items() if kind != EMBEDDINGS.kind)
    parts += [[float(stop - start) for start, stop in ranges] for ranges in divided]
    whole = [[x / (sum(part) or 1.0) for x in part] for part in parts] or [[1.0] * len(plan.devices)]
    flops = dict(zip(plan.devices, map(fmean, zip(*whole, strict=True)), strict=True))
    return Forecast(plan.predicted_tokens, plan.predicted_s, plan.predicted_bytes, flops)


def shares(forecasts: Iterable[Forecast]) -> dict[str, float]:
    """Return each device's fraction of the FLOPs of several runs; estimated runs count by their tokens."""
    runs = list(forecasts)
    exact = all(f.simulated for f in runs)
    flops: dict[str, float] = {}
    for run in runs:
        unit = 1.0 if exact else run.tokens / (sum(run.flops.values()) or 1.0)
        for device, count in run.flops.items():
            flops[device] = flops.get(device, 0.0) + count * unit
    whole = sum(flops.values()) or 1.0
    return {device: count / whole for device, count in flops.items()}
