"""KV caches of sessions on a device: one may be taken over by another session, and then no other run writes to it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.program import SlotSpec
from hepti_mqtt.runtime.worker.kv_caches import DecoderSessions, SessionKey, SessionLostError, SessionRun

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


LAYOUT = b"layout"
LATER = ("m", PlanVersion(2, 5))


def ended(*numbers: int, busy: frozenset[SessionKey] = frozenset()) -> DecoderSessions:
    """Return sessions of a plan that has ended, each with 20 rows of its number."""
    sessions = DecoderSessions(Counter())
    for number in numbers:
        begin(sessions, number, SessionRun(0, 20, 64))[:20] = number
    sessions.keep(*PLAN, LAYOUT, busy)
    assert not len(sessions)
    return sessions


def test_a_later_plan_of_the_same_layout_continues_the_caches_of_an_ended_one() -> None:
    sessions = ended(1, 2)
    assert sessions.restore(*LATER, b"another", 4096) == ()
    assert {s.number: (s.origin, s.rows) for s in sessions.restore(*LATER, LAYOUT, 4096)} == {
        1: (PLAN[1], 20),
        2: (PLAN[1], 20),
    }
    run = SessionRun(12, 28, 64, source=2, takes_over=True)
    rows = sessions.arrays((*LATER, 3), STATES, run, 4096, frozenset())["k"]
    assert (rows[:12] == 2.0).all()
    assert sessions.restore(*LATER, LAYOUT, 4096) == (), "each is continued once"


def test_a_cache_that_a_run_was_writing_to_or_that_its_request_carries_is_not_kept() -> None:
    sessions = ended(1, 2, busy=frozenset({(*PLAN, 1)}))
    assert [s.number for s in sessions.restore(*LATER, LAYOUT, 4096)] == [2]
    sessions, carried = DecoderSessions(Counter()), {"k": STATES["k"], "seen": SlotSpec((9, 4), "f32")}
    sessions.arrays((*PLAN, 1), carried, SessionRun(0, 20, 64), 4096, frozenset())
    sessions.keep(*PLAN, LAYOUT, frozenset())
    assert sessions.take_kept() == ()


def test_the_newest_caches_are_kept_where_there_is_no_room_for_all() -> None:
    sessions = ended(1, 2, 3)
    [*_, last] = (cache.arrays["k"] for cache in ended(3).take_kept())
    sessions.limit_kept(2 * last.nbytes)
    assert [cache.number for cache in sessions.take_kept()] == [2, 3]
    assert [s.number for s in ended(1, 2, 3).restore(*LATER, LAYOUT, len(last))] == [3]


def test_a_session_that_has_begun_is_not_replaced_by_a_kept_cache() -> None:
    sessions = ended(1)
    sessions.arrays((*LATER, 1), STATES, SessionRun(0, 4, 64), 4096, frozenset())["k"][:4] = 9.0
    assert sessions.restore(*LATER, LAYOUT, 4096) == ()
    assert (sessions.arrays((*LATER, 1), STATES, SessionRun(4, 5, 64), 4096, frozenset())["k"][:4] == 9.0).all()
