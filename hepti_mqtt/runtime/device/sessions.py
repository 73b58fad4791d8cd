"""Sessions on one device: the arrays that a request keeps from run to run, a decoder's keys and values."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hepti_mqtt.ids import Epoch
from hepti_mqtt.program import NUMPY_DTYPE, Program
from hepti_mqtt.runtime.device.executor import Array

SessionKey = tuple[str, Epoch, int]  # model, epoch, number


class SessionLostError(Exception):
    """A run goes on where its session is not: it was given up here, or rows of it never came."""


@dataclass(slots=True)
class _Session:
    arrays: dict[str, Array]
    rows: int = 0  # that have been asked for so far


class Sessions:
    """The open sessions, those used last at the end. counters: sessions given up for others, and runs without one."""

    def __init__(self, counters: Counter[str]) -> None:
        self._open: OrderedDict[SessionKey, _Session] = OrderedDict()
        self._counters = counters

    def __len__(self) -> int:
        return len(self._open)

    def arrays(
        self,
        key: SessionKey,
        program: Program,
        at: int,
        stop: int,
        most: int,
        busy: frozenset[SessionKey] = frozenset(),
    ) -> Mapping[str, Array]:
        """Return the arrays of a session for a run that adds rows at..stop; at 0 the session begins.

        most: sessions kept of one model and epoch; of more, the one used longest ago and not `busy` is given up. Number
        0 is a run without a session: its arrays are its own. Raises SessionLostError if rows before `at` are missing.
        """
        states = program.states()
        if not states:
            return {}
        number = key[2]
        known = self._open.get(key)
        if at > (known.rows if known else 0):
            self._counters["session_lost"] += 1
            raise SessionLostError(f"session {number} has no rows before {at} here")
        if known is None:
            known = _Session({name: np.empty(spec.shape, NUMPY_DTYPE[spec.dtype]) for name, spec in states.items()})
            if number:
                self._open[key] = known
                self._give_up(key, most, busy)
        if any(known.arrays[name].shape != spec.shape for name, spec in states.items()):
            self._counters["session_lost"] += 1
            raise SessionLostError(f"session {number} was begun with another cache")
        if number:
            self._open.move_to_end(key)
        known.rows = max(known.rows, stop)
        return known.arrays

    def end(self, key: SessionKey) -> None:
        """Forget a session."""
        self._open.pop(key, None)

    def forget(self, model: str, epoch: Epoch) -> None:
        """Forget the sessions of an epoch."""
        for key in [k for k in self._open if k[:2] == (model, epoch)]:
            del self._open[key]

    def _give_up(self, newest: SessionKey, most: int, busy: frozenset[SessionKey]) -> None:
        alike = [k for k in self._open if k[:2] == newest[:2]]
        idle = [k for k in alike if k != newest and k not in busy]
        for key in idle[: max(len(alike) - most, 0)]:
            del self._open[key]
            self._counters["session_given_up"] += 1
