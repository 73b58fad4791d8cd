"""States as explicit tables, and the story of the last steps through them.

A table says which event takes a thing from which state to which; there is no other way for a state to change. The idea
of the table is that of h11 (`_state.py`), the story is dask.distributed's (`worker_state_machine.py`, `story`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Generic, Literal, NamedTuple, TypeVar

MAX_TRANSITIONS: Final = 64  # transitions that a story remembers
NOWHERE: Final = "-"  # where a thing was before it began

State = TypeVar("State", bound=str)
Event = TypeVar("Event", bound=str)


class IllegalStepError(AssertionError):
    """A thing met an event that its state has no step for: a mistake in this program, never a peer's."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One step of one thing: when, which, from where, by what event, to where, and in words why."""

    now: float
    subject: str
    before: str
    event: str
    after: str
    why: str = ""

    @property
    def cause(self) -> str:
        """Return the event, with the words where there are any."""
        return f"{self.event}: {self.why}" if self.why else self.event

    def __str__(self) -> str:
        return f"{self.now:10.3f}  {self.subject}: {self.before} -> {self.after}  ({self.cause})"


class TransitionLog:
    """The last `KEPT` transitions of the things that one owner keeps, oldest first.

    title: whose story it is. count: how many transitions there were in all, so that a reader sees whether there are new
    ones.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.count = 0
        self._transitions: deque[Transition] = deque(maxlen=MAX_TRANSITIONS)

    def append(self, transition: Transition) -> None:
        """Remember a transition; the oldest one makes room for it."""
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
    """Which event takes a thing from which state to which.

    name: of such a thing, for messages. states: all of them. first: where a thing begins, by which event. steps: for
    each state the state that follows, by event; things are over in a state without steps. safe: where a thing goes
    that meets an event its state has no step for. Raises ValueError if a state is missing, cannot be reached, or
    cannot be left for a state in which things are over.
    """

    name: str
    states: tuple[State, ...]
    first: tuple[Event, State]
    steps: Mapping[State, Mapping[Event, State]]
    safe: Mapping[State, State]

    def __post_init__(self) -> None:
        known = set(self.states)
        if set(self.steps) != known or set(self.safe) != known:
            raise ValueError(f"{self.name}: steps and safe must name each of {', '.join(self.states)}, and no others")
        follows = {state: set(steps.values()) for state, steps in self.steps.items()}
        strangers = {after for states in (*follows.values(), self.safe.values()) for after in states} - known
        if strangers:
            raise ValueError(f"{self.name}: steps lead to {sorted(strangers)}, which are no states")
        reached = _closure({self.first[1]}, follows)
        if reached != known:
            raise ValueError(f"{self.name}: no step leads to {sorted(known - reached)}")
        stuck = [state for state in self.states if all(self.steps[after] for after in _closure({state}, follows))]
        if stuck:
            raise ValueError(f"{self.name}: what is {' or '.join(stuck)} never ends")

    def after(self, state: State, event: Event) -> State | None:
        """Return the state that follows, None where the table has no such step."""
        return self.steps[state].get(event)


def _closure(states: set[State], follows: Mapping[State, set[State]]) -> set[State]:
    reached: set[State] = set()
    while states:
        reached |= states
        states = {after for state in states for after in follows[state]} - reached
    return reached


class StateMachine(Generic[State, Event]):
    """Takes things through the steps of a table and tells each step to a story.

    counters: `illegal_step` counts events that a state has no step for. strict: such an event raises IllegalStepError
    too; tests turn it on for all machines.
    """

    strict: ClassVar[bool] = False

    def __init__(self, table: StateTable[State, Event], story: TransitionLog, counters: Counter[str]) -> None:
        self.table, self.story, self._counters = table, story, counters

    def begin(self, subject: str, now: float, why: str = "") -> State:
        """Return the first state of a new thing."""
        event, state = self.table.first
        self.story.append(Transition(now, subject, NOWHERE, event, state, why))
        return state

    def step(self, subject: str, state: State, event: Event, now: float, why: str = "") -> State:
        """Return the state after an event; a thing whose state has no step for it goes to its safe state."""
        after = self.table.steps[state].get(event)
        if after is not None:
            self.story.append(Transition(now, subject, state, event, after, why))
            return after
        self._counters["illegal_step"] += 1
        safe = self.table.safe[state]
        illegal = f"illegal: a {self.table.name} that is {state} has no step for it"
        self.story.append(Transition(now, subject, state, event, safe, f"{illegal}; {why}" if why else illegal))
        if self.strict:
            raise IllegalStepError(
                "\n".join([f"{self.story.title}: {subject}: {event}: {illegal}", *self.story.as_text()])
            )
        return safe


# ----------------------------------------------------------------------------------------------------------------------
# The command that both halves have: publish.


Plane = Literal["control", "data"]  # separate MQTT connections to the broker
_NOTHING = memoryview(b"")


class Publish(NamedTuple):
    """Publish `payload`, and `body` behind it, on a connection to the broker or to the peers that read from us (mesh).

    body: of a tensor alone: a view of its array, so that no copy joins it with its header, and valid until the next op.
    """

    topic: str
    payload: bytes
    qos: int
    plane: Plane | Literal["mesh"] = "control"
    retain: bool = False
    body: memoryview = _NOTHING

    @property
    def joined_payload(self) -> bytes:
        """Return payload and body as one."""
        return b"".join((self.payload, self.body))

    @property
    def nbytes(self) -> int:
        """Return the bytes of payload and body."""
        return len(self.payload) + self.body.nbytes
