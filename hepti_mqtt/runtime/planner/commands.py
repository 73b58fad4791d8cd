"""What the coordinator asks its shell to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from hepti_mqtt.errors import HeptiError
from hepti_mqtt.plan import Plan
from hepti_mqtt.planner import Decision, Question
from hepti_mqtt.runtime.planner.flight import Job, RunStats
from hepti_mqtt.runtime.publish import Publish
from hepti_mqtt.runtime.states import Transition

SMALL_BYTES: Final = 8192  # of an output: some two thousand numbers


@dataclass(frozen=True, slots=True)
class Solve:
    """Search for a plan, and price the running one under the same measurements; report `Solved`.

    hurried: requests wait and no plan serves them, so that the first one that will do is better than the best.
    last: the one that was found before; it may have lost devices. kept: the decision for the running plan, which stands
    unless its prices of now tell of a better one: nothing but measurements has changed. trial: the question is for one
    way that is to be tried, and `kept` what that is compared with afterwards.
    """

    model: str
    ticket: int
    question: Question
    running: Plan | None
    hurried: bool = False
    last: Plan | None = None
    kept: Decision | None = None
    trial: bool = False


@dataclass(frozen=True, slots=True)
class SendTiles:
    """Publish the asked tiles to the device."""

    model: str
    device: str
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer a user's request."""

    job: Job
    plan: Plan
    stats: tuple[RunStats, ...]

    @property
    def small(self) -> bool:
        """Return whether its JSON takes no longer to write than another thread takes to wake."""
        return sum(output.nbytes for output in self.job.outputs.values()) <= SMALL_BYTES


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a job that generates: its place among `tokens`, all that there are so far."""

    job: Job
    index: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refuse:
    """End a user's request with an error."""

    job: Job
    error: HeptiError


@dataclass(frozen=True, slots=True)
class ShowPlan:
    """Publish the retained record of a model's plans.

    active, preparing: the planner's own. decision: of the last search for these, also if it changed nothing. progress:
    (bytes there, bytes in all) of the weights that devices load for `preparing`. story: the last transitions of the
    model's plans. pinned: the active plans of what requests have pinned; pinned_preparing: those on their way there.
    in_flight: runs at once.
    """

    model: str
    active: Plan | None
    preparing: Plan | None
    decision: Decision | None
    error: HeptiError | None = None
    progress: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    story: tuple[Transition, ...] = ()
    pinned: tuple[Plan, ...] = ()
    pinned_preparing: tuple[Plan, ...] = ()
    in_flight: int = 1


@dataclass(frozen=True, slots=True)
class Note:
    """Publish and log that something happened: joined, left, re-planned, overloaded ..."""

    kind: str
    text: str


CoordinatorCommand = Publish | Solve | SendTiles | Answer | Token | Refuse | ShowPlan | Note


def users_last(commands: Sequence[CoordinatorCommand]) -> list[CoordinatorCommand]:
    """Return commands with what users are told behind all else, in the same order otherwise.

    Devices wait for their next run, and writing an answer takes longer than to send it to them.
    """
    return sorted(commands, key=lambda command: isinstance(command, Answer | Token | Refuse))
