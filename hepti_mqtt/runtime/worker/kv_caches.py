"""KV caches on a device: the keys and values of texts, from run to run and from plan version to plan version.

A cache belongs to a session of a plan version. When the version ends, its caches are kept while memory allows: a later
version with the same layout continues them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.program import NUMPY_DTYPE, SlotSpec
from hepti_mqtt.models.shapes import cache_rows
from hepti_mqtt.protocol.messages import KeptSession

Array = npt.NDArray[Any]
SessionKey = tuple[str, PlanVersion, int]  # model, plan version, number


class SessionLostError(Exception):
    """A run continues sessions that this device has dropped, or holds incompletely."""

    def __init__(self, text: str, sessions: tuple[int, ...]) -> None:
        super().__init__(text)
        self.sessions = sessions


@dataclass(slots=True)
class _Session:
    """The arrays of a session, by name."""

    arrays: Mapping[str, Array]
    rows: int = 0  #: cached rows
    capacity: int = 0  #: rows that it counts for in the room of its plan
    is_text: bool = True  #: each array has one row per token


class SessionRun(NamedTuple):
    """A run of a session: it writes rows `at` to `stop`."""

    at: int
    stop: int
    longest: int  #: most rows of a session
    begins: bool = True  #: it may be the first run of the session
    source: int = 0  #: number of the session that holds the rows before `at`, 0 for none
    takes_over: bool = False  #: the source ends: reuse its arrays, or copy them if a run still writes to them


class KeptCache(NamedTuple):
    """A KV cache that no plan version uses."""

    layout: bytes  #: layout of the plans that can use it, see `ResidentPlan.layout`
    origin: PlanVersion  #: the last plan version that used it
    number: int  #: number of its session under that version
    rows: int
    arrays: Mapping[str, Array]  #: each with at least `rows` rows


class DecoderSessions:
    """The open sessions, least recently used first, and the caches of ended plan versions, oldest first.

    Sessions of a plan stay after the end of their requests while there is room for their rows, because another text may
    have the same prefix. counters: dropped sessions, and runs without their session.
    """

    def __init__(self, counters: Counter[str]) -> None:
        self._open: OrderedDict[SessionKey, _Session] = OrderedDict()
        self._kept: list[KeptCache] = []
        self._counters = counters

    def __len__(self) -> int:
        return len(self._open)

    @property
    def rows(self) -> int:
        """Return the allocated rows of all sessions."""
        return sum(session.capacity for session in self._open.values())

    def arrays(
        self,
        key: SessionKey,
        states: Mapping[str, SlotSpec],
        run: SessionRun,
        room_rows: int,
        busy: frozenset[SessionKey],
    ) -> Mapping[str, Array]:
        """Return the arrays of a session for a run, allocated or enlarged if necessary.

        states: specs of the arrays. room_rows: room of all sessions of the plan, for which the least recently used
        sessions are dropped. busy: sessions that active runs write to, which are not dropped. Number 0: a run without a
        session gets new arrays. Raises SessionLostError if rows before `run.at` are missing.
        """
        if not states:
            return {}
        number = key[2]
        source = (*key[:2], run.source) if run.source else key
        session = self._open.get(source)
        if run.at > (session.rows if session else 0) or not (session or run.begins):
            self._counters["session_lost"] += 1
            raise SessionLostError(f"session {source[2]} has no rows before {run.at} here", (number,))
        # Arrays with one row per token grow; others hold a request's carried inputs, complete from the first run.
        is_text = all(spec.shape[0] == run.longest for spec in states.values())
        capacity = cache_rows(run.stop, run.longest) if is_text else run.longest
        if run.takes_over:
            self._open.pop(source, None)
        copies = bool(run.source) and (not run.takes_over or source in busy)
        if session is None or copies or session.capacity < capacity:
            if number:
                self._make_room(key, capacity, room_rows, busy | {source})
            before = {} if session is None else session.arrays
            arrays = {name: _grown(spec, capacity, before.get(name), run.at) for name, spec in states.items()}
            session = _Session(arrays, capacity=capacity, is_text=is_text)
        if number:
            self._open[key] = session
            self._open.move_to_end(key)
        session.rows = run.stop
        return session.arrays

    def end(self, key: SessionKey) -> None:
        """Drop a session."""
        self._open.pop(key, None)

    def keep(self, model: str, version: PlanVersion, layout: bytes, busy: frozenset[SessionKey]) -> None:
        """Keep the caches of an ending plan version, except those that a run was writing to."""
        for key in [k for k in self._open if k[:2] == (model, version)]:
            session = self._open.pop(key)
            if session.is_text and session.rows and key not in busy:
                self._kept.append(KeptCache(layout, version, key[2], session.rows, session.arrays))

    def restore(self, model: str, version: PlanVersion, layout: bytes, room_rows: int) -> tuple[KeptSession, ...]:
        """Let a plan version continue the kept caches of its layout, newest first, while its sessions have room."""
        fitting = [cache for cache in self._kept if cache.layout == layout]
        self._kept = [cache for cache in self._kept if cache.layout != layout]
        used = sum(session.capacity for key, session in self._open.items() if key[:2] == (model, version))
        out = list[KeptSession]()
        for cache in reversed(fitting):
            key = (model, version, cache.number)
            capacity = min(len(array) for array in cache.arrays.values())
            if key in self._open or used + capacity > room_rows:
                self._counters["session_given_up"] += 1
                continue
            used += capacity
            self._open[key] = _Session(cache.arrays, cache.rows, capacity)
            self._open.move_to_end(key, last=False)
            out.append(KeptSession(cache.origin, cache.number, cache.rows))
        return tuple(out)

    def add_kept(self, caches: Sequence[KeptCache]) -> None:
        """Add caches that an earlier process of this device saved, oldest first."""
        self._kept = [*caches, *self._kept]

    def limit_kept(self, nbytes: int) -> None:
        """Drop the oldest kept caches until the rest fits into `nbytes`."""
        total = sum(_nbytes(cache) for cache in self._kept)
        while self._kept and total > nbytes:
            total -= _nbytes(self._kept.pop(0))
            self._counters["session_given_up"] += 1

    def take_kept(self) -> tuple[KeptCache, ...]:
        """Remove and return all kept caches, oldest first."""
        kept, self._kept = self._kept, []
        return tuple(kept)

    def _make_room(self, newest: SessionKey, rows: int, room_rows: int, busy: frozenset[SessionKey]) -> None:
        """Drop idle sessions of the same plan until the newest one has room."""
        others = [key for key in self._open if key[:2] == newest[:2] and key != newest]
        rows += sum(self._open[key].capacity for key in others)
        for key in others:
            if rows <= room_rows:
                return
            if key not in busy:
                rows -= self._open.pop(key).capacity
                self._counters["session_given_up"] += 1


def _nbytes(cache: KeptCache) -> int:
    return sum(array.nbytes for array in cache.arrays.values())


def _grown(spec: SlotSpec, capacity: int, held: Array | None, rows: int) -> Array:
    """Return an array with room for `capacity` rows; the first `rows` are copied from the held array."""
    array = np.empty((min(capacity, spec.shape[0]), *spec.shape[1:]), NUMPY_DTYPE[spec.dtype])
    if held is not None:
        array[:rows] = held[:rows]
    return array
