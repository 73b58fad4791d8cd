from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels_support import pool

from hepti_mqtt.kernels import Workers, jit
from hepti_mqtt.kernels import threads as handover
from hepti_mqtt.kernels.jit import INT, INT_ARRAY, JIT
from hepti_mqtt.kernels.tape import share
from hepti_mqtt.kernels.threads import Parts, panel_parts, ranges

compiled_only = pytest.mark.skipif(not JIT, reason="about compiled code")


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


def _count(counts, turns, _bad, part, _stop):
    """Take the longer, the higher the part: the calling thread is done first and must wait."""
    address = counts.ctypes.data + 8 * part
    for _ in range(turns * part):
        handover._put(address, handover._get(address))
    counts[part] += 1


def _meet(counts, turns, _bad, part, _stop):
    """Come, and wait for the others for so many turns."""
    address = counts.ctypes.data
    handover._put(address + 8 * part, 1)
    for other in range(len(counts)):
        for _ in range(turns):
            if handover._get(address + 8 * other):
                break
            handover._pass_on()


def _come_late(counts, lanes, _bad, part, _stop):
    """Let the second thread's parts run while the first is in its first part, which counts if nothing is left then."""
    if part == 0:
        handover._run(lanes, 1)
        counts[0] += handover._get(lanes + 8 * handover.BEGUN) >= len(counts) // 2
    else:
        counts[part] += 1


def _fail(counts, _turns, bad, part, _stop):
    if part == bad:
        raise MemoryError
    counts[part] += 1


@pytest.fixture(scope="module")
def compiled():
    """Return what makes a kernel of (counts, turns, bad, part) that pools share."""
    made = {}

    def make(function):
        if function not in made:
            made[function] = jit.kernel(INT_ARRAY, *[INT] * 4, part=2)(function)
            jit.registered.pop()
        return made[function]

    yield make
    for dispatcher in made.values():
        del jit.divided[dispatcher]


def numbered(parts):
    return Parts([(i, i + 1) for i in range(parts)])


@compiled_only
def test_every_part_of_a_kernel_runs_once(compiled):
    for threads in (2, 3, 5):
        with pool(threads) as workers:
            for parts in (1, 2, 3, 8, 13):
                counts = np.zeros(parts, np.int64)
                for _ in range(20):
                    share(workers, compiled(_count), (counts, 1000, -1), numbered(parts), workers.threads)
                assert counts.tolist() == [20] * parts


@compiled_only
def test_a_closed_pool_runs_everything_on_the_calling_thread(compiled):
    workers, counts = Workers(3), np.zeros(3, np.int64)
    workers.close()
    workers.close()
    assert not workers.is_open
    share(workers, compiled(_count), (counts, 0, -1), numbered(3), workers.threads)
    assert counts.tolist() == [1, 0, 0]  # all parts are one


@compiled_only
def test_a_thread_that_is_late_takes_fewer_parts(compiled):
    counts = np.zeros(64, np.int64)
    with pool(2) as workers:
        lanes = workers.memory.__array_interface__["data"][0]
        share(workers, compiled(_come_late), (counts, lanes, -1), numbered(64), workers.threads)
    assert counts.tolist() == [1] * 64


@compiled_only
def test_parts_of_a_kernel_run_on_several_threads_at_once(compiled):
    counts = np.zeros(3, np.int64)
    with pool(3) as workers:
        share(workers, compiled(_meet), (counts, 1 << 24, -1), numbered(3), workers.threads)
    assert counts.tolist() == [1, 1, 1]


@compiled_only
@pytest.mark.parametrize("bad", [0, 1, 2, 5])
def test_a_kernel_without_memory_is_an_error_after_all_parts_have_ended(compiled, bad):
    counts = np.zeros(6, np.int64)
    with pool(3) as workers:
        with pytest.raises(MemoryError, match="could not get the memory"):
            share(workers, compiled(_fail), (counts, 0, bad), numbered(6), workers.threads)
        assert counts.tolist() == [int(i != bad) for i in range(6)]
        share(workers, compiled(_fail), (counts, 0, -1), numbered(6), workers.threads)
    assert counts.sum() == 5 + 6


@compiled_only
def test_two_pools_share_kernels_without_waiting_for_each_other(compiled):
    counts = np.zeros((2, 3), np.int64)

    def model(place):
        with pool(3) as workers:
            for _ in range(200):
                share(workers, compiled(_count), (counts[place], 0, -1), numbered(3), workers.threads)

    compiled(_count)
    models = [threading.Thread(target=partial(model, i)) for i in range(2)]
    for thread in models:
        thread.start()
    for thread in models:
        thread.join(timeout=60)
    assert counts.tolist() == [[200] * 3] * 2


@given(
    panels=st.integers(1, 70),
    ragged=st.booleans(),
    rows=st.integers(1, 400),
    threads=st.integers(1, 5),
    least_panels=st.integers(1, 4),
    least_rows=st.integers(1, 12),
)
def test_panels_and_rows_are_divided_without_gap_or_overlap(panels, ragged, rows, threads, least_panels, least_rows):
    parts = panel_parts(panels, ragged, rows, threads, least_panels, least_rows)
    seen = np.zeros((panels, rows), np.int64)
    for a, b, first, stop in parts:
        seen[a:b, first:stop] += 1
    assert (seen == 1).all()
    assert parts.threads <= threads
    cost = np.array([2] * (panels - ragged) + [1] * ragged)  # a ragged panel costs half as much here
    shares = [sum(cost[a:b].sum() * (stop - first) for a, b, first, stop in parts[t::threads]) for t in range(threads)]
    if rows >= threads * least_rows:  # no thread has more than a row of each panel that is cut
        assert max(shares) - min(shares) <= 2 * (panels % threads + threads * ragged)
    else:
        assert max(shares) - min(shares) <= 2 * rows


@given(panels=st.integers(8, 64), rows=st.integers(24, 400), threads=st.integers(2, 4))
def test_no_part_is_so_large_that_others_wait_long_for_a_slower_thread(panels, rows, threads):
    parts = panel_parts(panels, False, rows, threads, 1, 6)
    largest = max((b - a) * (stop - first) for a, b, first, stop in parts)
    assert largest <= rows * max(1, -(-panels // threads // 2) + 1)
