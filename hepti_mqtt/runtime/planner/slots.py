"""Slots: each model as the planner's user wants it, and beside that as requests have pinned it.

A slot has plans, requests and runs of its own, so what one request pins changes nobody else's answers. The planner's
own slot of a model is always there. Those of pins come with a request and go when others need their place or their
memory: of `PINNED` for each model, the one that was asked for longest ago.

Where the plans of two slots do not fit on a device side by side, they take turns in the order of their requests: a slot
that had to make room (`displaced`) has its next plan when nobody who has one has older requests to serve. The
planner's own comes back without any request, once the pins that took its place have not been asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from hepti_mqtt.ids import Epoch
from hepti_mqtt.runtime.planner.flight import Job, Pins
from hepti_mqtt.runtime.planner.generating import UNREPORTED
from hepti_mqtt.runtime.planner.model_state import ModelState
from hepti_mqtt.runtime.planner.plans import Plans
from hepti_mqtt.runtime.planner.served import Served
from hepti_mqtt.runtime.states import Story

PINNED: Final = 4  # slots of pins, for each model
COMES_BACK_S: Final = 5.0  # without a request for the pins in its place, the planner's own plan comes back


class Slots:
    """All slots: the planner's own ones first, then those of pins. counters: of steps that no table has."""

    def __init__(self, served: Iterable[Served], counters: Counter[str]) -> None:
        self._counters = counters
        self._own: Mapping[str, ModelState] = {
            s.name: ModelState(s, Plans(s.name, s.pins, counters, Story(f"plans of {s.name}"))) for s in served
        }
        self._pinned: list[ModelState] = []
        self._illegal = 0  # steps of which somebody was told

    def __iter__(self) -> Iterator[ModelState]:
        return iter([*self._own.values(), *self._pinned])

    def __contains__(self, model: str) -> bool:
        return model in self._own

    def models(self) -> list[ModelState]:
        """Return the planner's own slot of every model."""
        return list(self._own.values())

    def own(self, model: str) -> ModelState:
        """Return the planner's own slot of a model; raises KeyError for one that is not served."""
        return self._own[model]

    def of(self, model: str) -> list[ModelState]:
        """Return all slots of a model, the planner's own first; none of one that is not served."""
        return [slot for slot in self if slot.name == model]

    def pinned(self, model: str | None = None) -> list[ModelState]:
        """Return the slots of pins, of one model or of all, those asked for longest ago first."""
        return sorted((s for s in self._pinned if model in (None, s.name)), key=lambda slot: slot.asked_s)

    def find(self, model: str, pins: Pins | None) -> ModelState | None:
        """Return the slot of a request with these pins, None if there is none yet."""
        own = self._own[model]
        if pins is None or pins == own.plans.pins:
            return own
        return next((slot for slot in self._pinned if slot.name == model and slot.plans.pins == pins), None)

    def add(self, model: str, pins: Pins) -> ModelState:
        """Return a new slot for pins."""
        own = self._own[model]
        plans = Plans(model, pins, self._counters, own.plans.story, f"{model} ({pins})")
        slot = ModelState(own.served, plans, experience=own.experience, pinned=True)
        self._pinned.append(slot)
        return slot

    def drop(self, slot: ModelState) -> None:
        """Forget a slot of pins, of which nothing is left."""
        self._pinned.remove(slot)

    # -- whose something is ---------------------------------------------------------------------------------------

    def running(self, model: str, admission: int) -> ModelState | None:
        """Return the slot of a run."""
        return next((slot for slot in self.of(model) if admission in slot.runs), None)

    def searching(self, model: str, ticket: int) -> ModelState | None:
        """Return the slot of a search."""
        return next((s for s in self.of(model) if (found := s.plans.searching) and found.ticket == ticket), None)

    def preparing(self, model: str, txn: int) -> ModelState | None:
        """Return the slot of a preparation."""
        return next((s for s in self.of(model) if (found := s.plans.preparing) and found.txn == txn), None)

    def computing(self) -> frozenset[str]:
        """Return the models of which runs are under way."""
        return frozenset(slot.name for slot in self if slot.runs)

    def jobs(self, model: str) -> list[Job]:
        """Return all requests for a model that wait or run; one of several runs comes several times."""
        return [job for slot in self.of(model) for job in slot.jobs()]

    def epochs(self) -> set[Epoch]:
        """Return the epochs of all plans that devices may hold."""
        return {epoch for slot in self for epoch in slot.plans.epochs()}

    def illegal(self) -> str | None:
        """Return what there is to tell of illegal steps, if there are more than when it was asked last."""
        count = self._counters["illegal_step"]
        if count == self._illegal:
            return None
        self._illegal = count
        return f"plans took {count} illegal steps so far: a mistake in the planner; see `hepti plan --story`"

    # -- who makes room for whom ----------------------------------------------------------------------------------

    def who_makes_room(self, slot: ModelState, device: str) -> list[ModelState]:
        """Return the slots whose plans must go, for a plan of `slot` that does not fit on a device.

        First pins that nobody waits for. Then the planner's own plan has the right of way before pins of any model;
        and a plan in its old one's place goes before one that takes somebody else's.
        """
        others = [s for s in self if s is not slot and s.plans.on(device)]
        pins = [s for s in others if s.pinned]
        own = [slot] if slot.plans.serving else []
        if slot.pinned:
            stages = [[s for s in pins if s.idle], own, [s for s in others if s.name == slot.name]]
        else:
            stages = [[s for s in pins if s.idle], pins, own]
        return next((stage for stage in stages if stage), [])

    def check(self, in_flight: int) -> None:
        """Raise AssertionError if a slot is broken, or there are more of pins, or more runs at once, than may be."""
        for slot in self:
            slot.check()
        for model in self.models():
            assert len(self.pinned(model.name)) <= PINNED
            runs = [run for slot in self.of(model.name) for run in slot.runs.values()]
            for taken, most in (([r for r in runs if r.computes], in_flight), (runs, in_flight + UNREPORTED)):
                each = Counter(device for run in taken for device in run.plan.devices)
                assert max(each.values(), default=0) <= most
            for run in runs:
                if run.bag is not None:
                    run.bag.check()

    def may_search(self, slot: ModelState, now: float) -> bool:
        """Return whether a slot may have its next plan now, with regard to the other slots of its model."""
        others = [s for s in self.of(slot.name) if s is not slot]
        one_by_one = not any(s.plans.searching or s.plans.preparing for s in others)
        if slot.pinned and not (one_by_one and self.may_run(slot)):
            return False  # the planner's own waits for nobody
        if not slot.displaced:
            return True
        return all(self._lets(s, slot, now) for s in others if s.plans.standing or s.plans.preparing)

    def may_run(self, slot: ModelState) -> bool:
        """Return whether the first request of a slot comes before all those of slots that made room."""
        waiting = [s for s in self.of(slot.name) if s is not slot and s.displaced]
        return all(slot.queue.first() < s.queue.first() for s in waiting if s.queue)

    @staticmethod
    def _lets(holder: ModelState, slot: ModelState, now: float) -> bool:
        """Return whether a slot that has a plan lets one that made room have the next."""
        if slot.queue:
            return slot.queue.first() < holder.queue.first()
        return holder.idle and now - holder.asked_s > COMES_BACK_S
