"""Steps ahead: devices receive the next decoding steps of a text together with the current run.

A step ahead has no token yet: the root device draws it from the candidates of the step before. So a text grows without
a round trip to the planner, which draws the same tokens. A step that equals the planner's next run becomes that run;
other steps are cancelled. Answers carry the drawn tokens, and the planner compares them with its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.spec import Draw, RequestShape, Spec
from hepti_mqtt.protocol.frames import DecoderSession, Followed, Frame
from hepti_mqtt.protocol.messages import RunFailed
from hepti_mqtt.protocol.topics import publish_bytes
from hepti_mqtt.runtime.coordinator.batches import Array, Batch, pack_steps
from hepti_mqtt.runtime.coordinator.interface import CoordinatorCommand
from hepti_mqtt.runtime.coordinator.orders import Orders
from hepti_mqtt.runtime.coordinator.plans import Ids
from hepti_mqtt.runtime.coordinator.requests import WorkItem
from hepti_mqtt.strategies.plan_programs import root_begins

STEPS_AHEAD: Final = 2  # so that a message to a device may take as long as a step

Report = Frame | RunFailed


class FollowingStep(NamedTuple):
    """A step that a device begins at the end of the run before it."""

    run_id: int
    plan: Plan
    items: tuple[WorkItem, ...]
    shape: RequestShape
    inputs: Array  #: -1 for each token that is not drawn yet
    sessions: tuple[DecoderSession, ...]
    nbytes: int  #: bytes of its work message
    reports: dict[str, Report]  #: reports that arrived before the step became a run

    def is_run(self, part: Batch, sessions: tuple[DecoderSession, ...]) -> bool:
        """Return whether the step equals a run, apart from undrawn tokens."""
        alike = (part.shape, sessions) == (self.shape, self.sessions) and part.inputs.shape == self.inputs.shape
        return alike and bool(((part.inputs == self.inputs) | (self.inputs == -1)).all())


Steps = tuple[FollowingStep, ...]


class StepsAhead:
    """The steps that devices have and that are not runs yet."""

    def __init__(self, orders: Orders, ids: Ids) -> None:
        self._orders, self._ids = orders, ids
        self._after: dict[int, Steps] = {}  #: steps after an unanswered run, by its run id
        self._begun: list[Steps] = []  #: steps after answered runs
        self._early: list[tuple[str, Report]] = []  #: early reports of steps that have become runs

    def order(self, spec: Spec, plan: Plan, run_id: int, items: tuple[WorkItem, ...]) -> list[CoordinatorCommand]:
        """Order up to `STEPS_AHEAD` steps after a run, if all of its texts can continue without the planner."""
        steps, out = list(self._after.get(run_id, ())), list[CoordinatorCommand]()
        while len(steps) < STEPS_AHEAD:
            texts = [item.request.generation for item in items]
            following = [text.following_step(len(steps)) for text in texts if text is not None]
            parts, draws = [step[:2] for step in following if step is not None], [step[2] for step in following if step]
            if len(parts) < len(items) or not root_begins(spec, plan, parts[0][0].shape):
                break
            part, sessions = pack_steps(parts)
            draws += [Draw()] * (len(sessions) - len(draws))
            number, before = self._ids.next_run(), steps[-1].run_id if steps else run_id
            order = self._orders.work(plan, number, part, sessions, follows=Followed(before, tuple(draws)))
            nbytes = publish_bytes(order.topic, order.nbytes, 1)
            steps.append(FollowingStep(number, plan, items, part.shape, part.inputs, sessions, nbytes, {}))
            out.append(order)
        if steps:
            self._after[run_id] = tuple(steps)
        return out

    def keep_report(self, device: str, report: Report) -> bool:
        """Buffer a report for a step after an unanswered run; return False if the step is unknown.

        The answer comes from another device, so it may be later than the report.
        """
        step = next((s for steps in self._after.values() for s in steps if s.run_id == report.run_id), None)
        if step is not None:
            step.reports.setdefault(device, report)
        return step is not None

    def note_answered(self, run_id: int) -> None:
        """Note that a run is answered: the first step after it may become a run now."""
        if steps := self._after.pop(run_id, ()):
            self._begun.append(steps)

    def take_begun(self, plan: Plan, items: Sequence[WorkItem]) -> Steps:
        """Remove and return the steps of these items under a plan."""
        for steps in self._begun:
            if steps[0].plan.version == plan.version and set(steps[0].items) == set(items):
                self._begun.remove(steps)
                return steps
        return ()

    def make_run(self, steps: Steps) -> None:
        """Turn the first step into a run: the others wait for it, and its early reports are handled next."""
        step, *others = steps
        if others:
            self._after[step.run_id] = tuple(others)
        self._early += step.reports.items()

    def take_reports(self) -> list[tuple[str, Report]]:
        """Remove and return the early reports of steps that have become runs."""
        reports, self._early = self._early, []
        return reports

    def cancel(self, steps: Steps) -> list[CoordinatorCommand]:
        """Cancel steps on their devices."""
        return [command for step in steps for command in self._orders.cancel(step.plan, [step.run_id])]

    def cancel_after(self, run_id: int) -> list[CoordinatorCommand]:
        """Cancel the steps after a run."""
        return self.cancel(self._after.pop(run_id, ()))

    def take_unused(self, model: str) -> list[Steps]:
        """Remove and return the steps of a model that did not become runs."""
        unused = [steps for steps in self._begun if steps[0].plan.model == model]
        self._begun = [steps for steps in self._begun if steps[0].plan.model != model]
        return unused

    def check(self, run_ids: frozenset[int]) -> None:
        """Raise AssertionError unless the steps follow unfinished runs."""
        assert self._after.keys() <= run_ids
        assert not self._early
