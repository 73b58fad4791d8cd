"""Steps ahead: with a run that a token follows from, devices get the next steps of its texts.

They have all but their tokens, and how each token is drawn from the candidates that the root device answers the step
before with. So a text grows without waiting for the planner, which gets the same answers and asks for the same steps,
or stops them: at the end of a text, or if other requests join. Their answers carry the tokens that they began with,
which the planner compares with its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import root_begins
from hepti_mqtt.protocol.frames import DecoderSession, Followed, Frame
from hepti_mqtt.protocol.messages import RunFailed
from hepti_mqtt.protocol.topics import publish_bytes
from hepti_mqtt.runtime.coordinator.batches import Array, Batch, pack_steps
from hepti_mqtt.runtime.coordinator.interface import CoordinatorCommand
from hepti_mqtt.runtime.coordinator.orders import Orders
from hepti_mqtt.runtime.coordinator.plans import Ids
from hepti_mqtt.runtime.coordinator.requests import WorkItem
from hepti_mqtt.spec import Draw, RequestShape, Spec

STEPS_AHEAD: Final = 2  # a message to a device has as long as a step takes

Report = Frame | RunFailed


class FollowingStep(NamedTuple):
    """A step that devices begin when the run before it has ended there."""

    run_id: int
    plan: Plan
    items: tuple[WorkItem, ...]
    shape: RequestShape
    inputs: Array  #: -1 for each token that is not known yet
    sessions: tuple[DecoderSession, ...]
    nbytes: int  #: of its work message
    reports: dict[str, Report]  #: of devices that ended it before the planner asked for it

    def is_run(self, part: Batch, sessions: tuple[DecoderSession, ...]) -> bool:
        """Return whether it is this run, whose tokens are all known."""
        alike = (part.shape, sessions) == (self.shape, self.sessions) and part.inputs.shape == self.inputs.shape
        return alike and bool(((part.inputs == self.inputs) | (self.inputs == -1)).all())


Steps = tuple[FollowingStep, ...]


class StepsAhead:
    """The steps that devices have and the planner has not asked for."""

    def __init__(self, orders: Orders, ids: Ids) -> None:
        self._orders, self._ids = orders, ids
        self._behind: dict[int, Steps] = {}  #: by the run that is under way
        self._begun: list[Steps] = []  #: behind runs that were answered
        self._early: list[tuple[str, Report]] = []  #: reports of steps that have become runs

    def order(self, spec: Spec, plan: Plan, run_id: int, items: tuple[WorkItem, ...]) -> list[CoordinatorCommand]:
        """Order steps behind a run, up to `STEPS_AHEAD`; none that may turn out to be another step."""
        steps, out = list(self._behind.get(run_id, ())), list[CoordinatorCommand]()
        while len(steps) < STEPS_AHEAD:
            texts = [item.request.generation for item in items]
            coming = [text.following_step(len(steps)) for text in texts if text is not None]
            parts, draws = [step[:2] for step in coming if step is not None], [step[2] for step in coming if step]
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
            self._behind[run_id] = tuple(steps)
        return out

    def keep_report(self, device: str, report: Report) -> bool:
        """Buffer a report for a step whose predecessor is unanswered; return False if the step is unknown.

        The answer is another device's, so it may come later.
        """
        step = next((s for steps in self._behind.values() for s in steps if s.run_id == report.run_id), None)
        if step is not None:
            step.reports.setdefault(device, report)
        return step is not None

    def note_answered(self, run_id: int) -> None:
        """Note that a run was answered: the planner may ask for the steps behind it now."""
        if steps := self._behind.pop(run_id, ()):
            self._begun.append(steps)

    def take_begun(self, plan: Plan, items: Sequence[WorkItem]) -> Steps:
        """Return the steps of these items that devices have begun under a plan."""
        for steps in self._begun:
            if steps[0].plan.version == plan.version and set(steps[0].items) == set(items):
                self._begun.remove(steps)
                return steps
        return ()

    def make_run(self, steps: Steps) -> None:
        """Let the first of some steps be a run; the others follow it, and its reports are due."""
        step, *others = steps
        if others:
            self._behind[step.run_id] = tuple(others)
        self._early += step.reports.items()

    def take_reports(self) -> list[tuple[str, Report]]:
        """Return the reports that came before their steps became runs."""
        reports, self._early = self._early, []
        return reports

    def cancel(self, steps: Steps) -> list[CoordinatorCommand]:
        """Cancel steps on the devices that have them."""
        return [command for step in steps for command in self._orders.cancel(step.plan, [step.run_id])]

    def cancel_behind(self, run_id: int) -> list[CoordinatorCommand]:
        """Cancel the steps behind a run."""
        return self.cancel(self._behind.pop(run_id, ()))

    def take_unasked(self, model: str) -> list[Steps]:
        """Return the steps of a model that the planner did not ask for, and forget them."""
        unasked = [steps for steps in self._begun if steps[0].plan.model == model]
        self._begun = [steps for steps in self._begun if steps[0].plan.model != model]
        return unasked

    def check(self, run_ids: frozenset[int]) -> None:
        """Raise AssertionError unless the steps follow runs that are under way."""
        assert self._behind.keys() <= run_ids
        assert not self._early
