"""What coordinator and worker share: state tables, the story of their transitions, and the command `Publish`.

States change only by the steps of a table. The table follows h11 (`_state.py`), the story follows dask.distributed
(`worker_state_machine.py`, `story`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Generic, Literal, NamedTuple, TypeVar

MAX_TRANSITIONS: Final = 64  # in a story
NOWHERE: Final = "-"  # the state before the first one

State = TypeVar("State", bound=str)
Event = TypeVar("Event", bound=str)


class IllegalStepError(AssertionError):
    """The state of a thing has no step for an event: a bug in this program, never in a peer."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One step of one thing through a table, and the reason."""

    now: float
    subject: str
    before: str
    event: str
    after: str
    why: str = ""

    @property
    def cause(self) -> str:
        """Return the event and its reason, if it has one."""
        return f"{self.event}: {self.why}" if self.why else self.event

    def __str__(self) -> str:
        return f"{self.now:10.3f}  {self.subject}: {self.before} -> {self.after}  ({self.cause})"


class TransitionLog:
    """A story: the last `MAX_TRANSITIONS` transitions of all things that share it, oldest first."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.count = 0  #: number of all transitions, so that readers notice new ones
        self._transitions: deque[Transition] = deque(maxlen=MAX_TRANSITIONS)

    def append(self, transition: Transition) -> None:
        """Append a transition; the oldest one goes if the story is full."""
        self.count += 1
        self._transitions.append(transition)

    def last(self, count: int = MAX_TRANSITIONS) -> tuple[Transition, ...]:
        """Return the last transitions, oldest first."""
        return tuple(self._transitions)[-count:] if count > 0 else ()

    def as_text(self) -> list[str]:
        """Return the story for people, one line per transition."""
        return [str(transition) for transition in self._transitions]


@dataclass(frozen=True, slots=True)
class StateTable(Generic[State, Event]):
    """The states of a thing, and the steps between them.

    Raises ValueError if a state is missing, cannot be reached, or cannot lead to an end.
    """

    name: str  #: of the thing, for messages
    states: tuple[State, ...]
    first: tuple[Event, State]  #: first event and state
    steps: Mapping[State, Mapping[Event, State]]  #: next state by state and event; a state without steps is an end
    safe: Mapping[State, State]  #: next state after an event without a step; an end stays by default

    def __post_init__(self) -> None:
        states = set(self.states)
        if set(self.steps) != states or not {state for state, steps in self.steps.items() if steps} <= set(self.safe):
            raise ValueError(f"{self.name}: steps, and safe except for ends, must name each of {', '.join(states)}")
        follows = {state: set(steps.values()) for state, steps in self.steps.items()}
        unknown = {after for group in (*follows.values(), self.safe.values()) for after in group} - states
        if unknown:
            raise ValueError(f"{self.name}: steps lead to unknown states {sorted(unknown)}")
        reached = _closure({self.first[1]}, follows)
        if reached != states:
            raise ValueError(f"{self.name}: no step leads to {sorted(states - reached)}")
        stuck = [state for state in self.states if all(self.steps[after] for after in _closure({state}, follows))]
        if stuck:
            raise ValueError(f"{self.name}: {' or '.join(stuck)} cannot reach an end")

    def after(self, state: State, event: Event) -> State | None:
        """Return the next state, None if the table has no such step."""
        return self.steps[state].get(event)


def _closure(states: set[State], follows: Mapping[State, set[State]]) -> set[State]:
    reached: set[State] = set()
    while states:
        reached |= states
        states = {after for state in states for after in follows[state]} - reached
    return reached


class StateMachine(Generic[State, Event]):
    """Takes things through the steps of a table, and records each step in a story.

    counters: `illegal_step` counts events without a step.
    """

    strict: ClassVar[bool] = False  #: an event without a step raises IllegalStepError; tests set it for all machines

    def __init__(self, table: StateTable[State, Event], story: TransitionLog, counters: Counter[str]) -> None:
        self.table, self.story, self._counters = table, story, counters

    def begin(self, subject: str, now: float, why: str = "") -> State:
        """Return the first state of a new thing."""
        event, state = self.table.first
        self.story.append(Transition(now, subject, NOWHERE, event, state, why))
        return state

    def step(self, subject: str, state: State, event: Event, now: float, why: str = "") -> State:
        """Return the state after an event: the safe state if the table has no step."""
        after = self.table.steps[state].get(event)
        if after is not None:
            self.story.append(Transition(now, subject, state, event, after, why))
            return after
        self._counters["illegal_step"] += 1
        safe = self.table.safe.get(state, state)
        illegal = f"illegal: a {self.table.name} that is {state} has no step for it"
        self.story.append(Transition(now, subject, state, event, safe, f"{illegal}; {why}" if why else illegal))
        if self.strict:
            raise IllegalStepError(
                "\n".join([f"{self.story.title}: {subject}: {event}: {illegal}", *self.story.as_text()])
            )
        return safe


# ----------------------------------------------------------------------------------------------------------------------
# Publish: the command of both coordinator and worker.


Plane = Literal["control", "data"]  # separate MQTT connections to the broker
_NOTHING = memoryview(b"")


class Publish(NamedTuple):
    """Publish `payload` and `body` on a connection to the broker, or to subscribed peers (mesh)."""

    topic: str
    payload: bytes
    qos: int
    plane: Plane | Literal["mesh"] = "control"
    retain: bool = False
    #: View of a tensor's array, sent after `payload` without a copy; valid until the next op.
    body: memoryview = _NOTHING

    @property
    def joined_payload(self) -> bytes:
        """Return payload and body in one bytes object."""
        return b"".join((self.payload, self.body))

    @property
    def nbytes(self) -> int:
        """Return the bytes of payload and body."""
        return len(self.payload) + self.body.nbytes
