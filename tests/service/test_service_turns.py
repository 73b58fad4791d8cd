"""Clients in turn, on virtual workers and a virtual clock."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hepti_mqtt.service.threads import Turns

ROOM = 1 << 30


def play(arrivals, workers, turns=None):
    """Return when each (time, client, seconds) was begun, in the order of arrival."""
    turns = turns or Turns(ROOM, ROOM)
    begun, running, free, now = {}, [], workers, 0.0
    waiting = sorted(range(len(arrivals)), key=lambda i: arrivals[i][0])
    while waiting or running:
        now = min([arrivals[i][0] for i in waiting[:1]] + [end for end, _ in running[:1]])
        while running and running[0][0] <= now:
            turns.done(heapq.heappop(running)[1])
            free += 1
        while waiting and arrivals[waiting[0]][0] <= now:
            place = waiting.pop(0)
            assert not turns.put(arrivals[place][1], place, 1)
        while free and (taken := turns.take()) is not None:
            client, place = taken
            begun[place] = now
            heapq.heappush(running, (now + arrivals[place][2], client))
            free -= 1
    return [begun[i] for i in range(len(arrivals))]


def test_a_client_with_much_to_do_leaves_a_worker_to_others():
    load = [(0.0, "greedy", 1.0)] * 100
    *_, begun = play([*load, (0.5, "small", 0.001)], workers=2)
    assert begun == 0.5


def test_clients_with_one_worker_have_one_thing_done_in_turn():
    load = [(0.0, name, 1.0) for name in ("a", "b", "c") for _ in range(50)]
    *_, begun = play([*load, (0.5, "small", 0.001)], workers=1)
    assert begun == 3.0  # what runs, then one of each other


def test_what_one_client_asks_is_done_in_its_order_one_at_a_time():
    assert play([(0.0, "a", 2.0), (0.0, "a", 1.0), (0.0, "a", 1.0)], workers=3) == [0.0, 2.0, 3.0]


@given(
    st.lists(st.tuples(st.floats(0, 9), st.sampled_from("abcde"), st.floats(0.01, 1)), max_size=60),
    st.integers(1, 3),
    st.floats(0, 9),
)
def test_nobody_waits_longer_than_one_turn_of_each_other(load, workers, at):
    *_, begun = play([*load, (at, "small", 0.01)], workers)
    others = len({client for _, client, _ in load})
    longest = max((seconds for *_, seconds in load), default=0.0)
    assert begun - at <= -(-others // workers) * longest + 1e-9


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40)), max_size=40))
def test_what_waits_is_bounded_and_nothing_gets_lost(puts):
    turns = Turns(8, 100)
    refused, waiting = [], {}
    for number, (client, nbytes) in enumerate(puts):
        waiting[number] = nbytes
        for gone in turns.put(client, number, nbytes):
            refused.append(gone)
            del waiting[gone]
        assert len(waiting) <= 8
        assert sum(waiting.values()) <= 100
    taken = []
    while (found := turns.take()) is not None:
        taken.append(found[1])
        turns.done(found[0])
    assert sorted(taken) == sorted(waiting)


def test_where_there_is_no_room_the_newest_of_who_has_most_goes():
    turns = Turns(4, ROOM)
    for number in range(4):
        assert turns.put("greedy", number, 1) == []
    assert turns.put("greedy", 4, 1) == [4]
    assert turns.put("small", 5, 1) == [3]
    assert turns.put("other", 6, 1) == [2]
    assert turns.put("greedy", 7, 1) == [7]


@pytest.mark.parametrize("taken", [False, True])
def test_a_client_of_whom_everything_was_dropped_is_forgotten(taken):
    turns = Turns(1, 10)
    assert turns.put("a", 1, 5) == []
    if taken:
        assert turns.take() == ("a", 1)
    assert turns.put("a", 2, 11) == [2]
    if taken:
        turns.done("a")
    else:
        assert turns.take() == ("a", 1)
        turns.done("a")
    assert turns.take() is None
    assert not turns._lines
