"""Clients in turn, threads that work for them, and searches that leave the processor to requests."""

import heapq
import threading
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sites import FAMILIES

from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.profiles import Cluster, Curve, DeviceProfile, Link
from hepti_mqtt.cost.simulator import TopicNames
from hepti_mqtt.models import representative_shape
from hepti_mqtt.planner import Question, decide
from hepti_mqtt.runtime.coordinator.interface import Solve
from hepti_mqtt.runtime.coordinator.search_kinds import SearchKind
from hepti_mqtt.service import threads

ROOM = 1 << 30


def play(arrivals, workers, turns=None):
    """Return when each (time, client, seconds) was begun, in the order of arrival."""
    turns = turns or threads.RoundRobin(ROOM, ROOM)
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
    turns = threads.RoundRobin(8, 100)
    refused, waiting = [], {}
    for number, (client, nbytes) in enumerate(puts):
        waiting[number] = nbytes
        for gone in turns.put(client, number, nbytes):
            refused.append(gone)
            del waiting[gone]
        assert len(waiting) <= 8
        assert sum(waiting.values()) <= 100
    taken = []
    while (turn := turns.take()) is not None:
        taken.append(turn[1])
        turns.done(turn[0])
    assert sorted(taken) == sorted(waiting)


def test_where_there_is_no_room_the_newest_of_who_has_most_goes():
    turns = threads.RoundRobin(4, ROOM)
    for number in range(4):
        assert turns.put("greedy", number, 1) == []
    assert turns.put("greedy", 4, 1) == [4]
    assert turns.put("small", 5, 1) == [3]
    assert turns.put("other", 6, 1) == [2]
    assert turns.put("greedy", 7, 1) == [7]


PATIENCE_S = 30


def at_once(act):
    act()


@pytest.fixture
def crew():
    new_crew = threads.FairExecutor("crew", 2, at_once)
    new_crew.start()
    yield new_crew
    new_crew.close()


def test_a_client_that_is_busy_holds_nobody_else_up(crew):
    release, small, ended = threading.Event(), threading.Event(), []
    for number in range(3):
        crew.submit_or_run("greedy", lambda number=number: (release.wait(PATIENCE_S), ended.append(number)))
    crew.submit_or_run("small", small.set)
    assert small.wait(PATIENCE_S)
    assert not ended
    over = threading.Event()
    crew.submit_or_run("greedy", over.set)
    release.set()
    assert over.wait(PATIENCE_S)
    assert ended == [0, 1, 2]


def test_what_there_is_no_room_for_is_refused_and_nothing_is_begun_after_the_end():
    crew, refused = threads.FairExecutor("crew", 0, at_once, limit=1), []
    crew.submit("a", lambda: None, 5, lambda: refused.append("first"))
    crew.submit("a", lambda: None, 5, lambda: refused.append("second"))
    assert refused == ["second"]
    assert [crew.step(), crew.step()] == [True, False]
    crew.submit_or_run("a", lambda: pytest.fail("begun"))
    crew.close()
    assert not crew.step(wait=True)


def test_a_small_thing_is_done_at_once_unless_others_wait_or_are_under_way():
    """Else it would come before what the same client had asked for earlier."""
    crew, done = threads.FairExecutor("crew", 0, at_once), []
    crew.submit_or_run("a", lambda: done.append("here"), at_once=True)
    assert done == ["here"]
    crew.submit_or_run("a", lambda: done.append("first"))
    crew.submit_or_run("a", lambda: done.append("second"), at_once=True)
    while crew.step():
        continue
    assert done == ["here", "first", "second"]


SPEC = FAMILIES["bert-embedding"]
DEVICES = {n: DeviceProfile(n, (Curve(32, 32, ((1, 1e-5), (32, 1e-4))),), 1e9, 1e9, 1e-5, 1e9) for n in ("a", "b")}
CLUSTER = Cluster(DEVICES, {n: Link() for n in DEVICES})
QUESTION = Question(TopicNames("home", "m"), SPEC, CLUSTER, representative_shape(SPEC, 8), PlanVersion(1, 2))


@cache
def chosen():
    return decide(QUESTION).chosen.plan


class Processor:
    """A processor of which a search gets a part; `waited` has its pauses."""

    def __init__(self):
        self.now_s = self.computed_s = 0.0
        self.waited = []
        self.in_hand_until_s = 0.0
        clocks = (lambda: self.now_s, lambda: self.computed_s)
        self.pace = threads.SearchThrottle(lambda: self.now_s < self.in_hand_until_s, *clocks, self.sleep, self.wait)

    def compute(self, seconds, part):
        self.now_s += seconds / part
        self.computed_s += seconds

    def wait(self, seconds):
        self.sleep(seconds)
        self.waited.append(seconds)

    def sleep(self, seconds):
        self.now_s += seconds


def searching(processor, **changes):
    return processor.pace.throttled(replace(Solve("m", 1, QUESTION, chosen()), **changes))


@pytest.mark.parametrize(
    ("part", "pause"), [(1.0, 0.0), (0.5, threads.AGAIN * 0.1), (0.25, threads.AGAIN * 0.3), (0.01, threads.MOST_S)]
)
def test_a_search_that_has_to_wait_for_the_processor_leaves_it_to_requests(part, pause):
    processor = Processor()
    processor.pace.set_serving(True)
    pauses = searching(processor).question.pause
    processor.compute(5.0, 0.1)  # another search, long ago
    pauses()
    for _ in range(3):
        processor.compute(0.1, part)
        pauses()
    assert processor.waited == pytest.approx([pause] * 3)


@pytest.mark.parametrize(("seconds", "pause"), [(0.0, 0.0), (0.1, 0.1), (60.0, threads.IN_HAND_S)])
def test_a_search_does_nothing_while_the_planner_has_something_in_hand(seconds, pause):
    processor = Processor()
    processor.in_hand_until_s = seconds
    searching(processor).question.pause()
    assert processor.now_s == pytest.approx(pause, abs=threads.LOOKS_S)


def test_a_search_does_nothing_while_an_event_is_dealt_with():
    processor = Processor()
    pauses = searching(processor).question.pause
    processor.pace.run_before_searches(pauses)
    with pytest.raises(ZeroDivisionError):
        processor.pace.run_before_searches(lambda: print(1 / 0))
    pauses()
    assert processor.now_s == pytest.approx(threads.IN_HAND_S, abs=threads.LOOKS_S), "the events are over"


@pytest.mark.parametrize("changes", [{"kind": SearchKind.HURRIED}, {"active": None}, None], ids=str)
def test_a_search_that_requests_wait_for_has_no_pauses(changes):
    """Nor has any search while there is nobody to leave the processor to."""
    processor = Processor()
    processor.pace.set_serving(changes is not None)
    pauses = searching(processor, **changes or {}).question.pause
    for _ in range(3):
        processor.compute(0.1, 0.25)
        pauses()
    assert processor.waited == []


def test_every_price_of_a_search_may_be_paused_at():
    paused = []
    decide(replace(QUESTION, pause=lambda: paused.append(1)))
    assert len(paused) > 5


@given(st.lists(st.tuples(st.sampled_from(["put", "take", "done", "close"]), st.sampled_from("abcd")), max_size=200))
def test_open_items_stay_within_the_windows_and_nothing_gets_lost(steps):
    """Clients a and b share a group, and so do c and d."""
    turns, group_of = (
        threads.RoundRobin(ROOM, ROOM, threads.Window(client=2, group=3)),
        {"a": "x", "b": "x", "c": "y", "d": "y"},
    )
    waiting, busy, opened, number = dict.fromkeys("abcd", 0), set(), dict.fromkeys("abcd", 0), 0
    for step, client in steps:
        if step == "put":
            turns.put(client, number, 1, group_of[client])
            waiting[client] += 1
            number += 1
        elif step == "take" and (taken := turns.take()) is not None:
            waiting[taken[0]] -= 1
            opened[taken[0]] += 1
            busy.add(taken[0])
        elif step == "done" and client in busy:
            busy.remove(client)
            turns.done(client)
        elif step == "close" and opened[client] > (client in busy):
            opened[client] -= 1
            turns.close(client)
        groups = {name: sum(opened[c] for c in opened if group_of[c] == name) for name in "xy"}
        assert max(opened.values()) <= 2
        assert max(groups.values()) <= 3
    for client in list(busy):
        turns.done(client)
    for client, count in opened.items():
        for _ in range(count):
            turns.close(client)
    while (taken := turns.take()) is not None:
        waiting[taken[0]] -= 1
        turns.done(taken[0])
        turns.close(taken[0])
    assert not any(waiting.values())
    assert turns.idle
