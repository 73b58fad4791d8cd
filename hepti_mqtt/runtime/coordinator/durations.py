"""Durations of runs: a plan's price, corrected by measured runs and reports of devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from math import hypot, log
from typing import Final

import numpy as np

from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.models import is_planned_for
from hepti_mqtt.planner import MethodEstimates, SiteEstimates, run_seconds
from hepti_mqtt.planner.estimates import SURPRISED
from hepti_mqtt.planner.surface import Outlook, interval
from hepti_mqtt.runtime.coordinator.guesses import StepPace
from hepti_mqtt.runtime.coordinator.plans import PlanLifecycle, PlanRecord, ServedModel
from hepti_mqtt.runtime.coordinator.requests import Expectation
from hepti_mqtt.runtime.coordinator.runs import Run

LEAST_COMPUTE_S: Final = 1e-3  # shorter compute times are too noisy to learn from
PLAUSIBLE_SLOWDOWN: Final = 64.0  # larger slowdowns, and smaller ones than its inverse, are ignored


@dataclass(slots=True)
class RunDurations:
    """Expected and measured durations of runs under one group's plans."""

    served: ServedModel
    plans: PlanLifecycle
    site: SiteEstimates  #: estimates of devices and links, shared by all groups
    methods: MethodEstimates = field(default_factory=MethodEstimates)  #: shared by all groups of the model
    run_s: float = 0.0  #: expected duration of a request under the active plan
    price_now: tuple[float, float] = (0.0, 0.0)  #: the active plan's price at the last judgement, and its relative sd
    learned_runs: int = 0  #: number of runs in the estimates
    expectation: tuple[PlanVersion, Expectation] | None = None  #: the active plan's at the last judgement
    expectations: dict[PlanVersion, Expectation] = field(default_factory=dict)  #: cache, cleared by each new run
    pace: tuple[PlanVersion, StepPace] | None = None  #: the pace of the plan that last ran a step

    def expect(self, record: PlanRecord, view: Outlook) -> None:
        """Take the outlook on runs under the active plan."""
        whole = record.plan
        self.run_s, self.price_now = view.mean_s, (view.now_s, view.spread)
        predicted_s = max(record.decision.chosen.price.seconds, 1e-9)
        between = interval(view.seconds / predicted_s, self.methods.run_sd(whole))
        self.expectation = (record.version, Expectation(view.mean_s / predicted_s, *between))
        self.expectations.clear()

    def step_pace(self, plan: Plan) -> StepPace:
        """Return the durations of generation steps under a plan."""
        if self.pace is None or self.pace[0] != plan.version:
            decision = next(r.decision for r in self.plans.records() if plan.version in r.versions)
            seconds = partial(run_seconds, self.served.spec, plan, decision.chosen.price, decision.cluster)
            self.pace = plan.version, StepPace(seconds)
        return self.pace[1]

    def length_factor(self, plan: Plan, rows: int) -> float:
        """Return the factor on a plan's predicted time for a run of this many rows, at least 1."""
        pace = self.step_pace(plan)
        return max(pace.cost(rows) / pace.cost(max(plan.predicted_tokens, 1)), 1.0)

    def expected(self, run: Plan) -> Expectation:
        """Return the expected duration of runs under a plan or replica as factors on its prediction."""
        if (expectation := self.expectations.get(run.version)) is not None:
            return expectation
        whole = self.plans.parent_of(run)
        if self.expectation is not None and self.expectation[0] == whole.version:
            expectation = self.expectation[1]
        else:
            factor, doubt = self.methods.factor(whole), hypot(self.methods.sd(whole), self.methods.run_sd(whole))
            expectation = Expectation(factor, *interval(np.array([factor]), doubt))
        self.expectations[run.version] = expectation
        return expectation

    def record_run(
        self, plan: Plan, tokens: int, seconds: float, now: float, judged_s: float, *, doubtful: bool = False
    ) -> None:
        """Learn from a run that ran alone on its devices.

        judged_s: last judgement of the group's plans. doubtful: a search ran on the planner's machine.
        """
        whole = self.plans.parent_of(plan)
        record = self.plans.active
        if record is not None and whole.version == record.version:
            record.run_count += 1
        # Remove changes of devices and links since the price, because they do not belong to the method.
        price_s = (plan if plan.version == whole.version else whole).predicted_s  # the record may have a newer price
        is_priced = self.expectation is not None and self.expectation[0] == whole.version and price_s > 0
        shift, spread = (self.price_now[0] / price_s, self.price_now[1]) if is_priced else (1.0, 0.0)
        changed = self.site.last_change_s > judged_s or self.site.in_doubt(plan.devices, judged_s)
        weight = SURPRISED if changed or doubtful else 1.0
        self.methods.record_run(plan, tokens, seconds / shift, now, spread, weight, whole)
        self.learned_runs += 1
        self.expectations.clear()

    def record_reports(self, run: Run, now: float) -> None:
        """Learn the slowdown of devices from their compute times, unless weights were loaded during the run."""
        record = next((r for r in self.plans.serving if run.plan_version in r.versions), None)
        plan, shape = run.plan, run.shape
        if record is None or run.before or run.other_work.loads or run.task_queue is not None or len(run.items) > 1:
            return
        length = shape.size / max(plan.predicted_tokens, 1)
        if not 0.8 < length < 1.25 or not is_planned_for(self.served.spec, shape):
            return
        for device, report in run.answers.reports.items():
            use, profile = record.decision.chosen.price.use.get(device), record.decision.cluster.devices.get(device)
            if use is None or profile is None or min(use.compute_s, 1e-6 * report[0]) < LEAST_COMPUTE_S:
                continue
            slowdown = 1e-6 * report[0] / (use.compute_s * length) * profile.slowdown
            if 1 / PLAUSIBLE_SLOWDOWN < slowdown < PLAUSIBLE_SLOWDOWN:
                self.site.record_compute(device, log(slowdown), now)
