"""KV caches of sessions on a device: one may be taken over by another session, and then no other run writes to it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from hepti_mqtt.ids import PlanVersion
from hepti_mqtt.program import SlotSpec
from hepti_mqtt.runtime.worker.runs import DecoderSessions, SessionLostError, SessionRun

PLAN = ("m", PlanVersion(1, 1))
STATES = {"k": SlotSpec((64, 4), "f32")}


def begin(sessions: DecoderSessions, number: int, run: SessionRun, *busy: int) -> np.ndarray:
    """Return the array of a session for a run of it; busy: sessions of runs under way."""
    keys = frozenset((*PLAN, each) for each in (number, *busy))
    return sessions.arrays((*PLAN, number), STATES, run, 4096, keys)["k"]


@pytest.mark.parametrize("busy", [(), (1,)], ids=["idle", "a step under way"])
def test_a_step_of_a_session_that_was_taken_over_writes_to_no_other(busy: tuple[int, ...]) -> None:
    sessions = DecoderSessions(Counter())
    first = begin(sessions, 1, SessionRun(0, 20, 64))
    first[:20] = 1.0
    second = begin(sessions, 2, SessionRun(12, 28, 64, source=1, takes_over=True), *busy)
    assert np.shares_memory(first, second) == (not busy), "rows are copied only if another run writes to them"
    assert (second[:12] == 1.0).all()
    assert len(sessions) == 1
    with pytest.raises(SessionLostError):
        begin(sessions, 1, SessionRun(20, 21, 64))


def test_a_session_that_is_copied_stays() -> None:
    sessions = DecoderSessions(Counter())
    first = begin(sessions, 1, SessionRun(0, 20, 64))
    first[:20] = 1.0
    second = begin(sessions, 2, SessionRun(12, 28, 64, source=1))
    assert not np.shares_memory(first, second)
    assert begin(sessions, 1, SessionRun(20, 21, 64)) is first
