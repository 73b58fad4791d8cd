"""Sessions of ended requests: the longest common prefix, and the room of devices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scripted_site import ROW, Site, settled

from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.messages import EndSessions, KeptSession, KeptSessions
from hepti_mqtt.runtime.coordinator.interface import DeviceMessage, Publish
from hepti_mqtt.runtime.coordinator.prefixes import LEAST_ROWS, MAX_HELD, MAX_KEPT, HeldSessions, HeldText

ONE, TWO = PlanVersion(1, 1), PlanVersion(1, 2)
TEXT = tuple(range(100))


def held(number: int, *ids: int, version: PlanVersion = ONE) -> HeldText:
    return HeldText((version, number), np.array(ids, np.int32), 1024, "m")


def test_a_text_goes_on_with_the_session_that_begins_like_it():
    sessions = HeldSessions()
    sessions.keep(held(1, *TEXT[:50]))
    running = [held(2, *TEXT[:70])]
    assert sessions.find(ONE, TEXT, ()) == (1, 50, True)
    assert sessions.find(ONE, TEXT, running) == (2, 70, False), "a running session is copied"
    assert sessions.find(ONE, (*TEXT[:30], 7, 8), ()) == (1, 30, True)
    assert sessions.find(ONE, (*TEXT[:20], 7, 8), ()) == (1, 20, False), "its later rows are worth more than the prefix"
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


EARLIER = PlanVersion(9, 4)


def reported(site: Site, device: str, *sessions: tuple[int, int]) -> list[int]:
    """Let a device report (number, rows) of sessions of an earlier plan; return the sessions that it must drop."""
    plan = site.session.groups.default("m").active
    kept = tuple(KeptSession(EARLIER, number, rows) for number, rows in sessions)
    out = site.event(DeviceMessage(device, KeptSessions("m", plan.version, kept)))
    sent = [messages.decode(command.payload) for command in out if isinstance(command, Publish)]
    return sorted({n for message in sent if isinstance(message, EndSessions) for n in message.sessions})


def test_a_text_of_an_earlier_plan_goes_on_when_all_devices_of_a_plan_have_its_rows():
    site = settled("a", "b", pins=ROW)
    now = site.session.groups.default("m").active.version
    foreign = replace(held(8, *TEXT, version=EARLIER), model="other")
    site.session.kv_caches.recall([held(7, *TEXT, version=EARLIER), foreign])
    assert reported(site, "a", (7, 60), (8, 60), (9, 60)) == [8, 9], "nobody knows their texts"
    assert [text.session for text in site.session.kv_caches.texts()] == [(EARLIER, 7), (EARLIER, 8)]
    assert reported(site, "c", (7, 60)) == [], "a device without a part in the plan"
    assert reported(site, "b", (7, 50)) == []
    [_, text] = site.session.kv_caches.texts()
    assert (text.session, text.ids.tolist()) == ((now, 7), list(TEXT[:50])), "the rows that both of them have"
    site = settled("a", "b", pins=ROW)
    site.session.kv_caches.recall([held(7, *TEXT, version=EARLIER), held(8, *TEXT, version=EARLIER)])
    reported(site, "a", (7, 60))
    reported(site, "b", (8, 60))
    assert [text.session for text in site.session.kv_caches.texts()] == [(EARLIER, 7), (EARLIER, 8)], "one device each"


def test_texts_of_ended_plans_are_bounded():
    sessions = HeldSessions()
    for number in range(2 * MAX_HELD):
        sessions.keep(held(number, *TEXT[:20], version=PlanVersion(1, number)))
    assert len([*sessions]) == MAX_HELD
