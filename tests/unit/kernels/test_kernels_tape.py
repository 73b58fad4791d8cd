"""Tapes: memory that calls share, what rows write to, where a run may stop, and errors of rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels_support import pool
from numba import float32

from hepti_mqtt.core.program import lay_out
from hepti_mqtt.kernels import jit
from hepti_mqtt.kernels.calls import Addresses, Call, Operand, scratch
from hepti_mqtt.kernels.jit import FLOAT, INT, INT_ARRAY, compile_first, fills, floats, kernel, reads
from hepti_mqtt.kernels.tape import Tape
from hepti_mqtt.kernels.threads import ranges

F4 = np.dtype("f4")


@kernel(reads(float32, 2), FLOAT, FLOAT, fills(float32, 2), INT, INT, part=2)
def _scaled(x, by, plus, out, first, stop):
    for row in range(first, stop):
        for i in range(x.shape[1]):
            out[row, i] = x[row, i] * by + plus


@kernel(INT_ARRAY, INT, fills(float32, 1))
def _total(addresses, count, out):
    for i in range(len(out)):
        out[i] = 0
    for p in range(count):
        part = floats(addresses[p], len(out))
        for i in range(len(out)):
            out[i] += part[i]


@kernel(reads(float32, 2), INT)
def _refused(_x, limit):
    if limit > 0:
        raise ValueError


@kernel(reads(float32, 2), fills(float32, 2))
def _lengths(x, out):
    out[0, 0] = len(x)


del jit.registered[-4:]  # they are for these tests alone, and compiled when a tape needs them

X, OUT = (Operand(slot, 0, (4, 3), F4) for slot in (0, 1))


@pytest.fixture
def workers():
    compile_first()
    with pool(1) as workers:
        yield workers


def scaled(x, out, by=2.0, plus=1.0):
    return Call(_scaled, (x, np.float32(by), np.float32(plus), out), ranges(4, 2))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 300)), max_size=12))
def test_arrays_that_one_call_needs_never_overlap(spans):
    uses = {i: (min(a, b), max(a, b), nbytes) for i, (a, b, nbytes) in enumerate(spans)}
    offsets, total = lay_out(uses)
    for i, (first, last, nbytes) in uses.items():
        assert offsets[i] % 64 == 0
        assert offsets[i] + nbytes <= total
        for j, (other_first, other_last, other) in uses.items():
            if i < j and first <= other_last and other_first <= last and nbytes and other:
                apart = offsets[i] + nbytes <= offsets[j] or offsets[j] + other <= offsets[i]
                assert apart, (i, j)


def test_memory_is_used_again_behind_the_last_call_that_needs_it():
    assert lay_out({"a": (0, 1, 64), "b": (1, 2, 64), "c": (2, 3, 64), "d": (3, 4, 64)})[1] == 128


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_run_in_order_over_slots_scratch_views_and_tables(threads):
    compile_first()
    inner, last = scratch((4, 3), F4), scratch((4, 3), F4)
    total = Call(_total, (Addresses((inner.rows(1, 2), last.rows(0, 1), X.rows(3, 4))), 3, OUT.rows(2, 3).reshape(-1)))
    x, out = np.arange(12, dtype=np.float32).reshape(4, 3), np.zeros((4, 3), np.float32)
    with pool(threads) as workers:
        made = Tape([[scaled(X, inner)], [scaled(inner, last, 3.0, 0.5)], [total]], workers, (0, 1))
        for _ in range(3):
            made.run([x, out])
            np.testing.assert_array_equal(out[2], (2 * x + 1)[1] + (3 * (2 * x + 1) + 0.5)[0] + x[3])
            assert not out[[0, 1, 3]].any()
            x = x + 1


@pytest.mark.parametrize("stop", range(4))
def test_a_run_goes_on_where_it_was_stopped_with_memory_of_its_own(workers, stop):
    inner, last = scratch((4, 3), F4), scratch((4, 3), F4)
    made = Tape([[scaled(X, inner)], [scaled(inner, last)], [scaled(last, OUT)]], workers, (0, 1))
    inputs = [np.full((4, 3), value, np.float32) for value in (1, 5)]
    results = [np.zeros((4, 3), np.float32) for _ in inputs]
    memory = [np.empty(made.nbytes, np.uint8) for _ in inputs]
    for x, out, own in zip(inputs, results, memory, strict=True):
        assert made.run([x, out], own, 0, stop) == stop
    for x, out, own in zip(inputs, results, memory, strict=True):
        assert made.run([x, out], own, stop) == 3
        np.testing.assert_array_equal(out, 8 * x + 7)


def test_an_interrupt_or_a_limit_stops_a_tape_before_the_next_row(workers):
    made = Tape([[scaled(X, OUT)]] * 3, workers, (0, 1))
    arrays = [np.ones((4, 3), np.float32), np.zeros((4, 3), np.float32)]
    workers.interrupt()
    assert [made.run(arrays, None, row) for row in range(3)] == [1, 2, 3]
    workers.resume()
    assert made.run(arrays) == 3
    assert made.run(arrays, limit_s=1e-9) == 1


def test_a_row_that_refuses_its_arguments_raises_the_error_of_its_call(workers):
    def refuse(x, limit):
        raise ValueError(f"{x.shape} is over {limit}")

    arrays = [np.ones((4, 3), np.float32), np.zeros((4, 3), np.float32)]
    good, bad = (Call(_refused, (X, limit), refuse=refuse) for limit in (0, 1))
    made = Tape([[good], [scaled(X, OUT)], [bad, good]], workers, (0, 1))
    with pytest.raises(ValueError, match=r"\(4, 3\) is over 1"):
        made.run(arrays)
    assert made.op_at(made.row) == 2
    np.testing.assert_array_equal(arrays[1], 3 * arrays[0])


def test_an_array_that_grows_is_as_long_for_a_kernel_as_it_is(workers):
    grows = Operand(1, 0, (100, 3), F4)
    made = Tape([[Call(_lengths, (grows, X))]], workers, (0, 1), growing=[1])
    for rows in (2, 7):
        x = np.zeros((4, 3), np.float32)
        made.run([x, np.zeros((rows, 3), np.float32)])
        assert x[0, 0] == rows
