"""Sessions of ended requests: the longest common beginning is found, and the account is that of the devices."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hepti_mqtt.ids import PlanVersion
from hepti_mqtt.runtime.coordinator.prefixes import LEAST_ROWS, MAX_KEPT, HeldSessions, HeldText

ONE, TWO = PlanVersion(1, 1), PlanVersion(1, 2)
TEXT = tuple(range(100))


def held(number: int, *ids: int, version: PlanVersion = ONE) -> HeldText:
    return HeldText((version, number), np.array(ids, np.int32), 1024)


def test_a_text_goes_on_with_the_session_that_begins_like_it():
    sessions = HeldSessions()
    sessions.keep(held(1, *TEXT[:50]))
    running = [held(2, *TEXT[:70])]
    assert sessions.find(ONE, TEXT, ()) == (1, 50, True)
    assert sessions.find(ONE, TEXT, running) == (2, 70, False), "of one that runs there is a copy"
    assert sessions.find(ONE, (*TEXT[:30], 7, 8), ()) == (1, 30, True)
    assert sessions.find(ONE, (*TEXT[:20], 7, 8), ()) == (1, 20, False), "more is behind it than it gains"
    assert sessions.find(ONE, TEXT[:50], ()) == (1, 49, True), "the last token is to be computed"
    assert sessions.find(ONE, TEXT[:LEAST_ROWS], ()) is None
    assert sessions.find(TWO, TEXT, running) is None
    sessions.forget((ONE, 1))
    assert sessions.find(ONE, TEXT, ()) is None


@given(st.lists(st.integers(1, 1024), max_size=100), st.integers(0, 4096), st.integers(0, 100))
def test_the_sessions_used_longest_ago_make_room(lengths, room_rows, source):
    sessions = HeldSessions()
    sessions.keep(held(1, *TEXT, version=TWO))
    for number, length in enumerate(lengths, 1):
        sessions.keep(held(number, *range(length)))
    dropped = sessions.make_room(ONE, room_rows, source)
    kept = {text.session[1]: text.capacity for text in sessions if text.session[0] == ONE}
    assert sorted((*dropped, *kept)) == list(range(1, len(lengths) + 1))
    assert source not in dropped
    kept.pop(source, None)
    assert sum(kept.values()) <= room_rows
    assert len(kept) <= MAX_KEPT
    assert not dropped or not kept or max(dropped) < min(kept)
    assert sum(text.session[0] == TWO for text in sessions) == 1, "other plans have rooms of their own"
