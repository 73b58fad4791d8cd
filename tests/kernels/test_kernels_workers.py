from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels_support import pool

from hepti_mqtt.kernels import Workers
from hepti_mqtt.kernels.jit import JIT
from hepti_mqtt.kernels.workers import ranges


@given(threads=st.integers(1, 4), parts=st.integers(1, 20))
def test_every_part_runs_once(threads, parts):
    seen = []
    with pool(threads) as workers:
        workers.each(lambda label, part: seen.append((label, part)), ("x",), [(i,) for i in range(parts)])
    assert sorted(seen) == [("x", i) for i in range(parts)]


def test_parts_run_on_several_threads_at_once():
    barrier = threading.Barrier(3)  # breaks the test if fewer than three threads come
    with pool(3) as workers:
        workers.each(lambda part: barrier.wait(timeout=30), (), [(0,), (1,), (2,)])


@pytest.mark.parametrize("bad", [0, 1, 2, 5])
def test_an_error_in_a_part_is_raised_after_all_have_ended(bad):
    ended = []

    def work(part):
        if part == bad:
            raise ValueError(f"part {part}")
        ended.append(part)

    with pool(3) as workers:
        with pytest.raises(ValueError, match=f"part {bad}"):
            workers.each(work, (), [(i,) for i in range(6)])
        assert set(ended) >= {i for i in range(6) if i % 3 != bad % 3}
        workers.each(ended.append, (), [(9,)])
    assert 9 in ended


def test_a_closed_pool_runs_everything_on_the_calling_thread():
    workers = Workers(3)
    workers.close()
    workers.close()
    seen = []
    workers.each(lambda part: seen.append(threading.current_thread()), (), [(0,), (1,), (2,)])
    assert seen == [threading.current_thread()] * 3


def test_no_threads_are_refused():
    with pytest.raises(ValueError, match="at least one thread"):
        Workers(0)


@given(count=st.integers(0, 50), parts=st.integers(1, 60))
def test_ranges_cover_without_overlap(count, parts):
    found = ranges(count, parts)
    assert [i for a, b in found for i in range(a, b)] == list(range(count))
    assert len(found) == min(count, parts)
    sizes = [b - a for a, b in found]
    assert not sizes or max(sizes) - min(sizes) <= 1


def test_tasks_arrive_whether_the_threads_poll_or_sleep():
    seen = []
    with pool(2) as workers:
        for polls in (0, 1, 100, 1 << 20 if JIT else 1000):
            workers._polls = polls
            for i in range(50):
                workers.each(lambda i, part: seen.append((i, part)), ((polls, i),), [(0,), (1,), (2,)])
    assert len(seen) == len(set(seen)) == 4 * 50 * 3


def test_two_pools_on_two_threads_do_not_wait_for_each_other():
    counts = [0, 0]

    def model(place):
        def part(_part):
            with lock:
                counts[place] += 1

        with pool(3) as workers:
            for _ in range(200):
                workers.each(part, (), [(0,), (1,), (2,)])

    lock = threading.Lock()
    models = [threading.Thread(target=model, args=(i,)) for i in range(2)]
    for thread in models:
        thread.start()
    for thread in models:
        thread.join(timeout=60)
    assert counts == [600, 600]
