"""Who hangs: devices that are asked for a word when something is overdue, and put aside if none comes.

A device may send heartbeats and compute nothing, or be stopped and send nothing for a while: neither is a reason to
wait for it where somebody else can serve. What it says itself about a run or a plan comes from the thread that
computes, so silence there is what counts. A lost exchange leaves everybody talking; such a run is issued again later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from hepti_mqtt.plan import Plan
from hepti_mqtt.runtime.planner.commands import CoordinatorCommand, Note
from hepti_mqtt.runtime.planner.flight import Run
from hepti_mqtt.runtime.planner.membership import Membership
from hepti_mqtt.runtime.planner.model_state import ModelState
from hepti_mqtt.runtime.planner.plans import PlanRecord
from hepti_mqtt.runtime.planner.slots import Slots

WORD_S: Final = 0.5  # for an answer to a probe, or as long as the run was to take
WORD_MOST_S: Final = 5.0
PREPARES_S: Final = 6.0  # without a word, though asked for it twice
PROGRESS_S: Final = 20.0  # with words, and without progress
STALLED_S: Final = 0.5  # a tick that comes so late says that this process was held up, not others

Probe = Callable[[ModelState, Plan, list[str]], list[CoordinatorCommand]]


class Silent(NamedTuple):
    """A device to be put aside, and what it did not do; mute: it says nothing, so that a word brings it back."""

    device: str
    how: str
    mute: bool = True


class Suspicion:
    """Watches the runs and preparations of all slots. probe: returns what makes devices say that they have a plan."""

    def __init__(self, slots: Slots, membership: Membership, probe: Probe) -> None:
        self._slots, self._membership, self._probe = slots, membership, probe
        self._ticked_s = float("inf")

    def tick(self, now: float) -> tuple[list[CoordinatorCommand], list[Silent]]:
        """Return what asks devices for a word, and those that have not said one though somebody else can serve."""
        stalled, self._ticked_s = now - self._ticked_s > STALLED_S, now
        out: list[CoordinatorCommand] = []
        silent: dict[str, Silent] = {}
        for model in self._slots:
            late: dict[str, Silent] = {}
            for run in model.runs.values():
                if now <= run.doubt_s:
                    continue
                if run.probed_s is None or stalled:
                    out += self._ask(model, run, now)
                elif now > run.probed_s + min(max(run.expected_s, WORD_S), WORD_MOST_S):
                    how = "does not answer while a run is overdue"
                    late |= {device: Silent(device, how) for device in self._mute(run)}
            record = model.plans.preparing
            if record is not None and record.state == "preparing":
                late |= self._unprepared(record, now)
            # Nobody else can serve where pins name the devices.
            named = model.plans.pins.devices or ()
            silent |= {device: word for device, word in late.items() if device not in named}
        can_serve = set(self._membership.usable()) - set(silent)
        return out, list(silent.values()) if can_serve else []

    def _ask(self, model: ModelState, run: Run, now: float) -> list[CoordinatorCommand]:
        run.probed_s = now
        late = [d for d in run.plan.devices if d not in run.done]
        text = f"a run of {run.plan.model} takes longer than predicted; asking {', '.join(late)}"
        return [Note("doubt", text), *self._probe(model, run.plan, late)]

    def _mute(self, run: Run) -> list[str]:
        assert run.probed_s is not None
        usable = self._membership.usable()
        late = [usable[d] for d in run.plan.devices if d not in run.done and d in usable]
        return [m.name for m in late if m.spoke_s < run.probed_s]

    def _unprepared(self, record: PlanRecord, now: float) -> dict[str, Silent]:
        usable = self._membership.usable()
        late = {}
        for device in record.waiting & set(usable):
            begun_s = record.moved_s.get(device, record.begun_s)
            if now - max(usable[device].spoke_s, record.begun_s) > PREPARES_S:
                late[device] = Silent(device, "does not answer while it prepares a plan")
            elif now - begun_s > PROGRESS_S:
                late[device] = Silent(device, "prepares a plan without progress", mute=False)
        return late
