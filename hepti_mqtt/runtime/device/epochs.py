"""The epochs on a device: one table of states, from the planner's Prepare to their release.

    asked -> loading or subscribing -> ready -> active -> released

An epoch is `loading` when only its weights are missing or the Programs that are built with them before the first
request, `subscribing` when only acknowledgements of its filters are.

While the control connection is away the planner may hear our will and release our epochs, which we then never hear; or
it may hear nothing (a broker that was killed, a switch that was turned off and on) and go on with them. So an epoch
from before a reconnection stays, `doubted`, until a request or its activation says that it lives, or a newer plan of
its model is activated, or its memory is needed. The planner is told of one that goes so, since it may count on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final, Literal, get_args

from hepti_mqtt.ids import Epoch
from hepti_mqtt.runtime.device.resident import EpochState, Resident, resident_bytes
from hepti_mqtt.runtime.states import Machine, Story, Table

Key = tuple[str, Epoch]
EndEvent = Literal[
    "release",
    "drain",
    "failed",  # to load or to subscribe
    "planner lost",  # another one has taken its place
    "outlived",  # in doubt, and a newer plan of the model is active
    "memory",  # in doubt, and another plan needs its memory
]
EpochEvent = Literal["prepare", "loaded", "subscribed", "activate", "request", "doubt"] | EndEvent

_END: Final[dict[EpochEvent, EpochState]] = {
    "release": "released",
    "drain": "released",
    "failed": "released",
    "planner lost": "released",
}
# A load that was given up may end after all when its epoch is here again, so weights may come more than once.
EPOCHS: Final[Table[EpochState, EpochEvent]] = Table(
    name="plan on a device",
    states=get_args(EpochState),
    first=("prepare", "asked"),
    steps={
        "asked": {"loaded": "subscribing", "subscribed": "loading", "doubt": "doubted", **_END},
        "loading": {"loaded": "ready", "doubt": "doubted", **_END},
        "subscribing": {"subscribed": "ready", "loaded": "subscribing", "doubt": "doubted", **_END},
        "ready": {"activate": "active", "request": "active", "loaded": "ready", "doubt": "doubted", **_END},
        "active": {"activate": "active", "loaded": "active", "doubt": "doubted", **_END},
        "doubted": {
            "loaded": "doubted",
            "subscribed": "doubted",
            "doubt": "doubted",
            "activate": "active",
            "request": "active",
            "outlived": "released",
            "memory": "released",
            **_END,
        },
        "released": {},
    },
    safe=dict.fromkeys(get_args(EpochState), "released"),  # the planner asks again, or issues its runs again
)


class Epochs:
    """The epochs of every model on this device, and the only place where their states change."""

    def __init__(self, device: str, counters: Counter[str]) -> None:
        self.story = Story(f"epochs of {device}")
        self._machine = Machine(EPOCHS, self.story, counters)
        self._residents: dict[Key, Resident] = {}
        self._released: list[Resident] = []

    def __len__(self) -> int:
        return len(self._residents)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._residents)

    def __contains__(self, key: Key) -> bool:
        return key in self._residents

    def get(self, model: str, epoch: Epoch) -> Resident | None:
        """Return an epoch that is here."""
        return self._residents.get((model, epoch))

    def enter(self, resident: Resident, now: float) -> None:
        """An epoch is here from now on."""
        resident.state = self._machine.begin(_subject(resident), now)
        self._residents[resident.key] = resident

    def step(self, resident: Resident, event: EpochEvent, now: float, why: str = "") -> None:
        """Something has happened to an epoch."""
        resident.state = self._machine.step(_subject(resident), resident.state, event, now, why)
        if resident.state == "released" and self._residents.pop(resident.key, None) is not None:
            self._released.append(resident)

    def end(self, keys: Iterable[Key], event: EndEvent, now: float, why: str = "") -> None:
        """Give up those of these epochs that are here."""
        for key in list(keys):
            if key in self._residents:
                self.step(self._residents[key], event, now, why)

    def doubt(self, now: float, why: str) -> None:
        """The planner may have given up any epoch without our hearing it."""
        for resident in list(self._residents.values()):
            self.step(resident, "doubt", now, why)

    def doubted(self, model: str | None = None, before: Epoch | None = None) -> list[Key]:
        """Return the epochs in doubt, oldest first; only those of a model, only those before an epoch."""
        found = (k for k, r in self._residents.items() if r.state == "doubted" and model in (None, k[0]))
        return sorted((k for k in found if before is None or k[1] < before), key=lambda k: k[1])

    def take_released(self) -> list[Resident]:
        """Return the epochs that were given up since this was last called."""
        released, self._released = self._released, []
        return released

    def needed_bytes(self, *more: Resident) -> int:
        """Return what all epochs need side by side, and these with them."""
        return resident_bytes([*self._residents.values(), *more])

    def residents(self) -> list[Resident]:
        """Return the epochs that are here, in the order in which they came."""
        return list(self._residents.values())

    def filters(self) -> set[str]:
        """Return the filters that some epoch needs."""
        return {f for r in self._residents.values() for f in r.filters}

    def works(self) -> set[str]:
        """Return the topics of requests that some epoch needs."""
        return {r.work for r in self._residents.values()}

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        assert not self._released
        for resident in self._residents.values():
            here = (resident.loaded, resident.subscribed)
            assert resident.state == "doubted" or here == _HERE[resident.state]


_HERE: Final[dict[EpochState, tuple[bool, bool]]] = {
    "asked": (False, False),
    "loading": (False, True),
    "subscribing": (True, False),
    "ready": (True, True),
    "active": (True, True),
}


def _subject(resident: Resident) -> str:
    return f"{resident.plan.model} {resident.plan.epoch}"
