"""The planner's metrics for Prometheus; imported only with `--metrics`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric

from hepti_mqtt.protocol.messages import Heartbeat
from hepti_mqtt.runtime.coordinator.requests import RunStats
from hepti_mqtt.runtime.coordinator.session import CoordinatorSession
from hepti_mqtt.transport.metrics import Collected, MetricsServer, device_metrics

BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
OTHER: Final = "other"  # label of models that the planner does not serve, because clients can invent names
EVERY_S: Final = 1.0


AnyMetric = TypeVar("AnyMetric", Counter, Gauge, Histogram)


class PlannerMetrics:
    """The planner's metrics; any thread may read them.

    models: served models. dropped: returns the counters of dropped messages and internal faults.
    """

    def __init__(self, models: Iterable[str], dropped: Callable[[], Mapping[str, int]]) -> None:
        self.registry = registry = CollectorRegistry()
        self._models, self._dropped = frozenset(models), dropped

        def metric(kind: type[AnyMetric], name: str, about: str, *labels: str, **options: Any) -> AnyMetric:
            return kind(f"hepti_planner_{name}", about, labels, registry=registry, **options)

        about = "Time from a request's arrival to its answer; outcome: ok, or the error's code"
        self._seconds = metric(Histogram, "request_seconds", about, "model", "outcome", buckets=BUCKETS_S)
        self._waiting = metric(Gauge, "waiting_requests", "Requests that wait to run", "model")
        self._running = metric(Gauge, "running_runs", "Runs under way", "model")
        about = "Requests without acknowledgement; the broker delivers no others while they fill its window"
        self._unacknowledged = metric(Gauge, "unacknowledged_requests", about)
        self._serving = metric(Gauge, "plan_active", "1 while a plan serves", "model")
        self._devices = metric(Gauge, "devices", "Devices; usable: plans may use them", "state")
        self._steps = metric(Counter, "plan_steps", "Steps of plans by their cause", "model", "cause")
        about, by_device = "Time in kernels, of runs that devices reported", ("model", "device")
        self._compute = metric(Counter, "compute_seconds", about, *by_device)
        self._wait = metric(Counter, "wait_seconds", "Time in which a device waited for others", *by_device)
        self._sent = metric(Counter, "sent_bytes", "Bytes that a device sent in runs", *by_device)
        registry.register(Collected(self._collect))
        self._heartbeats: Mapping[str, Heartbeat] = {}
        self._counted = dict.fromkeys(self._models, 0)  # counted steps of each model's story
        self._looked_s = 0.0

    def serve(self, address: tuple[str, int]) -> MetricsServer:
        """Return the server of these metrics; raises NetworkError."""
        return MetricsServer(address, self.registry, "hepti_planner")

    def record_answer(self, model: str, outcome: str, seconds: float, stats: Iterable[RunStats] = ()) -> None:
        """Count an answer; callable on any thread."""
        label = model if model in self._models else OTHER
        self._seconds.labels(label, outcome).observe(seconds)
        for run in (run for run in stats if run.reported):
            for device in run.compute_us:
                self._compute.labels(label, device).inc(run.compute_us[device] / 1e6)
                self._wait.labels(label, device).inc(run.wait_us[device] / 1e6)
                self._sent.labels(label, device).inc(run.sent_bytes[device])

    def look(self, session: CoordinatorSession, unacknowledged: int, now: float) -> None:
        """Update the metrics of the session and the broker once a second; called on the session thread."""
        if now - self._looked_s < EVERY_S:
            return
        self._looked_s = now
        self._unacknowledged.set(unacknowledged)
        members = session.fleet.members
        self._devices.labels("online").set(sum(m.online for m in members.values()))
        self._devices.labels("usable").set(sum(m.usable for m in members.values()))
        self._heartbeats = {m.name: m.heartbeat for m in members.values() if m.online and m.heartbeat is not None}
        for group in session.groups.defaults():
            name, story = group.name, group.plans.story
            own = session.groups.of_model(name)
            running = sum(len(g.runs) for g in own)
            self._waiting.labels(name).set(sum(len(g.queue) for g in own))
            self._running.labels(name).set(running)
            self._serving.labels(name).set(group.active is not None)
            for step in story.last(story.count - self._counted[name]):
                self._steps.labels(name, step.event).inc()
            self._counted[name] = story.count

    def _collect(self) -> Iterator[Metric]:
        dropped = CounterMetricFamily(
            "hepti_planner_dropped", "Dropped messages and internal faults, by reason", labels=("reason",)
        )
        for reason, count in self._dropped().items():
            dropped.add_metric((reason,), count)
        yield dropped
        yield from device_metrics(self._heartbeats)
