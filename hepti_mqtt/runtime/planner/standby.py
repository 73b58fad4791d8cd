"""Weights loaded ahead on a second device, where the plan in use has all of them on one.

If that one is lost nobody else has anything of the model, and requests would wait for all of it to be loaded. So a
second device is asked to prepare the plan that would follow, and to release it again: a device keeps the weights that
it has released as long as there is room for them, so nothing makes room for these. No request ever runs under such a
plan. The search after a loss, for requests that wait, is asked for that device alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from hepti_mqtt.ids import Epoch
from hepti_mqtt.plan import Plan
from hepti_mqtt.planner import Question
from hepti_mqtt.runtime.planner.commands import CoordinatorCommand, Solve
from hepti_mqtt.runtime.planner.events import CoordinatorEvent, Solved, Tick, UpMessage
from hepti_mqtt.runtime.planner.membership import Membership
from hepti_mqtt.runtime.planner.model_state import ModelState
from hepti_mqtt.runtime.planner.plans import PlanRecord
from hepti_mqtt.runtime.planner.rollout import Rollout
from hepti_mqtt.runtime.planner.slots import Slots
from hepti_mqtt.wire.messages import Failed, Message, Ready

CALM_S: Final = 3.0  # a plan is in use for so long before the next device loads
LOADS_S: Final = 10.0  # a load that would fill the device's link for longer is not worth it
ENDS_S: Final = 60.0  # then a preparation is given up, or a refused one tried again


@dataclass(slots=True)
class _Ahead:
    """What is ahead of one plan in use, of this epoch; next_s: when the next step is due.

    ticket: of the search, 0 if there was none yet. plan: that was found; boot: of its device. held: the device has it.
    needed_bytes: of memory.
    """

    epoch: Epoch
    next_s: float
    needed_bytes: int
    ticket: int = 0
    plan: Plan | None = None
    boot: int = 0
    held: bool = False

    @property
    def loading(self) -> bool:
        return self.plan is not None and not self.held


class Standby:
    """Sees what happens after the coordinator has dealt with it. ask: returns the question for a slot's next plan."""

    def __init__(
        self, slots: Slots, membership: Membership, rollout: Rollout, ask: Callable[[ModelState, float], Question]
    ) -> None:
        self._slots, self._membership, self._rollout, self._question = slots, membership, rollout, ask
        self._ahead: dict[str, _Ahead] = {}

    @property
    def loading(self) -> bool:
        """Return whether a device loads ahead."""
        return any(ahead.loading for ahead in self._ahead.values())

    def question(self, model: ModelState, hurried: bool, now: float) -> Question:
        """Return the question for a slot's next plan; hurried: of the device that has the weights, if one does."""
        question, ahead = self._question(model, now), self._ahead.get(model.name)
        if not hurried or model.pinned or ahead is None or ahead.plan is None or not self._there(ahead):
            return question
        able = _able(question, {ahead.plan.head}, ahead.needed_bytes)
        return _among(question, able) if able else question

    def handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorCommand]:
        """Take an event and return the commands that follow from it."""
        if isinstance(event, Tick):
            return [command for model in self._slots.models() for command in self._tick(model, now)]
        if isinstance(event, Solved):
            return self._solved(event)
        if isinstance(event, UpMessage) and isinstance(event.message, Ready | Failed):
            return self._prepared(event.message, now)
        return []

    def make_way(
        self, record: PlanRecord | None, device: str, message: Message, now: float
    ) -> list[CoordinatorCommand]:
        """Release what a device loads ahead if a plan is refused there for want of memory, which is then asked again.

        Weights loaded ahead serve nobody yet; without this the device would be taken for smaller than it is.
        """
        if record is None or not isinstance(message, Failed) or message.code != "memory":
            return []
        ahead = [ahead for ahead in self._loads() if ahead.plan is not None and device in ahead.plan.devices]
        if ahead:
            record.asked_s = -inf
        return [command for load in ahead for command in self._give_up(load, now)]

    def _tick(self, model: ModelState, now: float) -> list[CoordinatorCommand]:
        ahead, record = self._ahead.get(model.name), model.plans.active
        if ahead is not None and ahead.loading and self._there(ahead):
            return self._give_up(ahead, now) if now > ahead.next_s else []
        if record is None or len(record.plan.devices) > 1 or not model.plans.pins.free or not model.in_use(now):
            return []
        if ahead is None or ahead.epoch != record.epoch or (ahead.plan is not None and not self._there(ahead)):
            needed_bytes = record.decision.chosen.price.needs[record.plan.head]
            self._ahead[model.name] = _Ahead(record.epoch, now + CALM_S, needed_bytes)
            return []
        if ahead.held or now < ahead.next_s or model.plans.busy():
            return []
        ahead.next_s = now + ENDS_S
        usable = self._membership.usable()
        quick = {n for n, m in usable.items() if ahead.needed_bytes <= LOADS_S * m.link().up_bytes_per_s}
        question = self._question(model, now)
        # A hurried search of those that cannot would become a whole one, and others wait for it.
        able = _able(question, quick - set(record.plan.devices), ahead.needed_bytes)
        if not able:
            return []
        ahead.ticket = self._rollout.next_txn()
        return [Solve(model.name, ahead.ticket, _among(question, able), None, hurried=True)]

    def _solved(self, event: Solved) -> list[CoordinatorCommand]:
        ahead, model = self._ahead.get(event.model), next(iter(self._slots.of(event.model)), None)
        if ahead is None or model is None or event.ticket != ahead.ticket or event.decision is None:
            return []
        chosen = event.decision.chosen
        member = self._membership.usable().get(chosen.plan.head)
        if member is None or len(chosen.plan.devices) > 1 or model.plans.busy():
            return []
        ahead.plan, ahead.boot, ahead.needed_bytes = chosen.plan, member.boot, chosen.price.needs[member.name]
        return [*self._rollout.probe(model, chosen.plan, [member.name])]

    def _prepared(self, message: Ready | Failed, now: float) -> list[CoordinatorCommand]:
        for ahead in self._loads():
            assert ahead.plan is not None
            if (ahead.plan.model, ahead.plan.epoch) != (message.model, message.epoch):
                continue
            if isinstance(message, Failed):
                return self._give_up(ahead, now)
            ahead.held = True
            return self._rollout.release(ahead.plan)
        return []

    def _give_up(self, ahead: _Ahead, now: float) -> list[CoordinatorCommand]:
        plan, ahead.plan, ahead.next_s = ahead.plan, None, now + ENDS_S
        return [] if plan is None else self._rollout.release(plan)

    def _loads(self) -> Iterator[_Ahead]:
        return (ahead for ahead in self._ahead.values() if ahead.loading)

    def _there(self, ahead: _Ahead) -> bool:
        member = None if ahead.plan is None else self._membership.usable().get(ahead.plan.head)
        return member is not None and member.boot == ahead.boot


def _able(question: Question, devices: set[str], needed_bytes: int) -> set[str]:
    """Return which of these devices have the memory."""
    there = ((name, question.cluster.devices.get(name)) for name in devices)
    return {name for name, profile in there if profile is not None and profile.memory_bytes >= needed_bytes}


def _among(question: Question, devices: set[str]) -> Question:
    """Return a question for some of its devices."""
    left = {name: profile for name, profile in question.cluster.devices.items() if name in devices}
    return replace(question, cluster=replace(question.cluster, devices=left))
