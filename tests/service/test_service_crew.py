"""Threads that work for clients in turn."""

from __future__ import annotations

import threading

import pytest

from hepti_mqtt.service.threads import Crew

PATIENCE_S = 30


def at_once(act):
    act()


@pytest.fixture
def crew():
    made = Crew("crew", 2, at_once)
    made.start()
    yield made
    made.close()


def test_a_client_that_is_busy_holds_nobody_else_up(crew):
    release, small, ended = threading.Event(), threading.Event(), []
    for number in range(3):
        crew.post("greedy", lambda number=number: (release.wait(PATIENCE_S), ended.append(number)))
    crew.post("small", small.set)
    assert small.wait(PATIENCE_S)
    assert not ended
    over = threading.Event()
    crew.post("greedy", over.set)
    release.set()
    assert over.wait(PATIENCE_S)
    assert ended == [0, 1, 2]


def test_what_there_is_no_room_for_is_refused():
    crew, refused = Crew("crew", 0, at_once, limit=1), []
    crew.offer("a", lambda: None, 5, lambda: refused.append("first"))
    crew.offer("a", lambda: None, 5, lambda: refused.append("second"))
    assert refused == ["second"]
    assert crew.step()
    assert not crew.step()


def test_after_the_end_nothing_is_begun():
    crew = Crew("crew", 0, at_once)
    crew.post("a", lambda: pytest.fail("begun"))
    crew.close()
    assert not crew.step(wait=True)


def test_a_small_thing_is_done_at_once_unless_others_wait_or_are_under_way():
    """Else it would come before what the same client had asked for earlier."""
    crew, done = Crew("crew", 0, at_once), []
    crew.post("a", lambda: done.append("here"), here=True)
    assert done == ["here"]
    crew.post("a", lambda: done.append("first"))
    crew.post("a", lambda: done.append("second"), here=True)
    assert done == ["here"]
    while crew.step():
        continue
    assert done == ["here", "first", "second"]
    crew.post("b", lambda: (crew.post("b", lambda: done.append("within"), here=True), done.append("last")))
    assert crew.step()
    assert done[3:] == ["last"]
    assert crew.step()
    assert done[4:] == ["within"]
