"""What the coordinator knows of one model: its plans, its searches, its requests."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, Final

from hepti_mqtt.cluster import Cluster
from hepti_mqtt.errors import HeptiError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.plan import Plan
from hepti_mqtt.planner import Decision, DriftRule, Experience
from hepti_mqtt.runtime.coordination import Served
from hepti_mqtt.runtime.flight import Job, Pins, Run


@dataclass(slots=True)
class Preparing:
    """A plan on its way: the devices that are not ready yet, and when they were last heard."""

    decision: Decision
    plan: Plan
    pins: Pins
    txn: int
    waiting: set[str]
    progress_s: float
    asked_s: float = 0.0  # when Prepare was sent last
    swap: bool = False  # the old plan must go before this one fits
    sent: bool = False
    progress: dict[str, tuple[int, int]] = field(default_factory=dict)
    shown_s: float = float("-inf")  # when progress was last published

    def heard_s(self) -> float:
        """Return when there was last an exchange with the devices."""
        return max(self.asked_s, self.progress_s)


@dataclass(slots=True)
class ModelState:
    """One model as the coordinator keeps it."""

    served: Served
    pins: Pins  # plans are searched under it
    drift: DriftRule = field(default_factory=DriftRule)
    experience: Experience = field(default_factory=Experience)
    latest: Decision | None = None  # of the last search that found a plan
    decision: Decision | None = None  # that the active plan came from
    active: Plan | None = None
    active_pins: Pins | None = None  # those under which the active plan was searched
    suspect: Plan | None = None  # was active until a run was overdue; kept until another plan takes its place
    preparing: Preparing | None = None
    retiring: dict[Epoch, Plan] = field(default_factory=dict)
    queue: deque[tuple[Job, int]] = field(default_factory=deque)
    runs: dict[int, Run] = field(default_factory=dict)
    solve_at: float | None = None
    solving: int | None = None
    forced: bool = False  # take the next decision even if it is no faster
    error: HeptiError | None = None
    refusals: int = 0  # preparations in a row that failed
    spare: dict[str, int] = field(default_factory=dict)  # bytes by which a device refused a plan
    asked_s: float = float("-inf")  # when a request last came
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=16))

    def tokens(self) -> int:
        """Return the request length to plan for: the median of late ones, or the served default."""
        return sorted(self.recent)[len(self.recent) // 2] if self.recent else self.served.tokens

    def follow_pins(self, now: float) -> None:
        """Search under the pins of the first request that waits, if it has others.

        Requests are served in their order, so that two users with different pins both get their turn.
        """
        while self.queue and self.queue[0][0].over:
            self.queue.popleft()
        pins = self.queue[0][0].pins if self.queue else None
        if pins is not None and pins != self.pins:
            self.pins, self.solve_at, self.forced = pins, now, True

    def cluster(self) -> Cluster:
        """Return the measurements that the active plan was chosen by."""
        assert self.decision is not None
        return self.decision.cluster

    def hopeful(self) -> bool:
        """Return whether there is a plan, or will be an answer whether there is one."""
        return any(x is not None for x in (self.active, self.preparing, self.solving, self.solve_at))


_VARYING: Final[dict[str, Any]] = {
    "epoch": Epoch(0, 0),
    "weights": {},
    "predicted_s": 0.0,
    "predicted_bytes": 0,
    "predicted_tokens": 0,
    "reason": "",
}


def same_division(a: Plan, b: Plan) -> bool:
    """Return whether two plans divide the work alike; weights may differ by rounding."""
    if replace(a, **_VARYING) != replace(b, **_VARYING):
        return False
    for kind, weights in a.weights.items():
        whole_a, whole_b = sum(weights), sum(b.weights[kind])
        if any(abs(x / whole_a - y / whole_b) > 0.02 for x, y in zip(weights, b.weights[kind], strict=True)):
            return False
    return True
