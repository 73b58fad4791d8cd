"""Probes: what they tell of a link, how rare large ones are, and when a slow one is believed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_agent.probes import (
    AGAIN_S,
    CHECK_S,
    CHECKS,
    FIRST_LARGE,
    IN_DOUBT,
    KEPT,
    LARGE_BYTES,
    LARGE_EVERY_S,
    SMALL_BYTES,
    WAITING,
    Prober,
)
from hepti_mqtt.ids import Epoch
from hepti_mqtt.protocol import frames


def answer(prober, payloads, now, latency_s, rate=None):
    for payload in payloads:
        frame = frames.decode(payload)
        extra = 0.0 if rate is None else 2 * (len(frame.body) - SMALL_BYTES) / rate
        prober.received(frame, now + latency_s + extra)


def large(payloads):
    return [p for p in payloads if len(p) > 1000]


@given(latency=st.floats(1e-4, 0.5), rate=st.floats(1e5, 2e8))
def test_round_trip_and_rate_of_one_direction(latency, rate):
    prober = Prober("d1", 7)
    for now in range(KEPT):
        answer(prober, prober.due(float(now), False), now, latency, rate)
    assert prober.round_trip_s() == pytest.approx(latency)
    # What is left of two nearly equal times is only as exact as they are.
    assert prober.bandwidth_bytes_per_s() == pytest.approx(rate, rel=1e-3)


def test_large_probes_are_rare_and_never_while_busy():
    prober = Prober("d1", 7)
    times = []
    for now in range(40):
        payloads = prober.due(float(now), busy=20 <= now < 30)
        assert len(payloads) == 1 + 2 * len(large(payloads)), "a small one goes before each large one too"
        assert not (large(payloads) and 20 <= now < 30)
        times += [now] * len(large(payloads))
        answer(prober, payloads, now, 0.001, 1e7)
    assert len(times) == FIRST_LARGE + 2
    assert times == [1, 2, 3, 4, 4 + LARGE_EVERY_S, 30]


def test_a_link_that_is_full_now_does_not_look_fast():
    prober = Prober("d1", 7)
    for now in range(KEPT):
        answer(prober, prober.due(float(now), False), now, 0.001, 3e7)
    for now in range(KEPT, 3 * KEPT):  # small probes wait behind what fills it; no large one is sent
        answer(prober, prober.due(float(now), True), now, 0.012, 3e7)
    assert prober.bandwidth_bytes_per_s() == pytest.approx(3e7, rel=1e-3)


@pytest.mark.parametrize("rate", [None, 1e9])
def test_the_rate_is_unknown_where_it_cannot_be_measured(rate):
    prober = Prober("d1", 7)
    for now in range(KEPT):
        answer(prober, prober.due(float(now), False), now, 0.01, rate)
    assert prober.round_trip_s() == pytest.approx(0.01)
    assert prober.bandwidth_bytes_per_s() is None


def test_to_a_broker_on_this_machine_there_is_no_link():
    prober = Prober("d1", 7)
    for now in range(3):
        answer(prober, prober.due(float(now), False), now, 0.001, 1e7)
    prober.limit(None, local=True)
    for now in range(3, 30):
        payloads = prober.due(float(now), False)
        assert not large(payloads)
        answer(prober, payloads, now, 0.001, 1e7)
    assert prober.bandwidth_bytes_per_s() is None
    assert prober.round_trip_s() == pytest.approx(0.001)
    prober.limit(None, local=False)  # it has moved to another machine
    answer(prober, prober.due(30.0, False), 30.0, 0.001, 1e7)
    assert prober.bandwidth_bytes_per_s() == pytest.approx(1e7, rel=1e-3)


def test_answers_of_an_earlier_start_and_repeated_ones_are_passed_over():
    old, prober = Prober("d1", 6), Prober("d1", 7)
    answer(prober, old.due(0.0, False), 0.0, 9.0)
    assert prober.round_trip_s() is None
    (payload,) = prober.due(0.0, False)
    answer(prober, [payload], 0.0, 0.5)
    answer(prober, [payload], 0.0, 30.0)
    assert prober.round_trip_s() == 0.5
    assert frames.decode(payload).epoch == Epoch(7, 0)


def test_unanswered_probes_are_bounded():
    prober = Prober("d1", 7)
    (first,) = prober.due(0.0, True)
    for now in range(1, WAITING + 2):
        prober.due(float(now), True)
    answer(prober, [first], 0.0, 50.0)
    assert prober.round_trip_s() is None


@pytest.mark.parametrize(("limit", "most"), [(None, LARGE_BYTES), (1 << 30, LARGE_BYTES), (100_000, 100_000), (500, 0)])
def test_probes_stay_below_the_brokers_limit(limit, most):
    prober = Prober("d1", 7)
    prober.limit(limit)
    sizes = []
    for now in range(4):
        payloads = prober.due(float(now), False)
        sizes += [len(p) for p in large(payloads)]
        answer(prober, payloads, now, 0.001, 1e7)
    assert bool(sizes) == (most > 0)
    assert all(LARGE_BYTES / 4 < size < most + 1000 for size in sizes)
    assert limit is None or all(size < limit for size in sizes)


def measured(rate):
    """Return a prober that has measured a link, and when it last did."""
    prober = Prober("d1", 7)
    for now in range(KEPT):
        answer(prober, prober.due(float(now), False), now, 0.001, rate)
    return prober, float(KEPT)


def test_a_link_that_fails_is_believed_after_a_few_slow_probes_in_a_row():
    prober, now = measured(3e7)
    now += LARGE_EVERY_S
    for count in range(IN_DOUBT):
        assert prober.bandwidth_bytes_per_s() == pytest.approx(3e7, rel=1e-3), f"after {count} slow ones"
        answer(prober, prober.large_due(now, busy=True), now, 0.001, 6e6)
        now += AGAIN_S
    assert prober.bandwidth_bytes_per_s() == pytest.approx(6e6, rel=1e-3)
    assert prober.falls == 1


def test_a_fall_is_checked_soon_and_then_the_link_is_probed_as_rarely_as_before():
    prober, now = measured(3e7)
    prober.doubt()
    answer(prober, prober.large_due(now, busy=True), now, 0.001, 6e6)
    assert prober.falls == 1
    times = []
    for tenths in range(600):
        if probes := prober.large_due(now + tenths / 10, busy=True):
            times.append(tenths / 10)
            answer(prober, probes, now + tenths / 10, 0.001, 6e6)
    each = (CHECK_S,) * CHECKS + (LARGE_EVERY_S,) * 5
    assert times == pytest.approx([sum(each[: count + 1]) for count in range(len(each))])


def test_a_fall_that_was_none_is_taken_back_by_the_first_check():
    prober, now = measured(3e7)
    for _ in range(IN_DOUBT):  # somebody else uses the link
        now += LARGE_EVERY_S
        answer(prober, prober.large_due(now, busy=True), now, 0.001, 1e7)
    assert prober.bandwidth_bytes_per_s() == pytest.approx(1e7, rel=1e-3)
    now += CHECK_S
    answer(prober, prober.large_due(now, busy=True), now, 0.001, 3e7)
    assert prober.bandwidth_bytes_per_s() == pytest.approx(3e7, rel=1e-3)


def test_slow_probes_with_a_fast_one_between_them_are_accidents():
    prober, now = measured(3e7)
    for count in range(6 * IN_DOUBT):
        now += LARGE_EVERY_S
        answer(prober, prober.large_due(now, busy=True), now, 0.001, 3e7 if count % IN_DOUBT == 0 else 6e6)
    assert prober.bandwidth_bytes_per_s() == pytest.approx(3e7, rel=1e-3)
    assert prober.falls == 0


def test_between_runs_a_probe_that_takes_a_little_longer_says_nothing():
    prober, now = measured(3e7)
    for _ in range(2 * IN_DOUBT):
        now += LARGE_EVERY_S
        answer(prober, prober.large_due(now, busy=True), now, 0.001, 2e7)
    assert prober.bandwidth_bytes_per_s() == pytest.approx(3e7, rel=1e-3)
    for _ in range(2 * IN_DOUBT):
        now += LARGE_EVERY_S
        answer(prober, prober.large_due(now, busy=False), now, 0.001, 2e7)
    assert prober.bandwidth_bytes_per_s() == pytest.approx(2e7, rel=1e-3)


def test_answers_of_a_busy_device_do_not_slow_down_a_fast_link():
    prober, now = measured(1.2e8)
    before = prober.bandwidth_bytes_per_s()
    for _ in range(IN_DOUBT):
        now += LARGE_EVERY_S
        answer(
            prober, prober.large_due(now, busy=True), now, 0.001 + 0.005, 1.2e8
        )  # the interpreter of a busy one takes so long
    assert prober.falls == 0
    assert prober.bandwidth_bytes_per_s() == pytest.approx(before)


def test_a_link_is_not_slow_where_a_small_probe_was_held_up_as_long():
    """The broker's machine searches for a plan, say: its answers to both come late."""
    prober, now = measured(3e7)
    before = prober.bandwidth_bytes_per_s()
    for _ in range(4 * IN_DOUBT):
        now += LARGE_EVERY_S
        answer(prober, prober.large_due(now, busy=True), now, 0.2, 3e7)
    assert prober.falls == 0
    assert prober.bandwidth_bytes_per_s() == pytest.approx(before)
    assert prober.round_trip_s() == pytest.approx(0.001), "what goes beside a large probe finds threads awake"


def test_a_slow_probe_counts_where_the_small_one_before_it_is_lost():
    prober, now = measured(3e7)
    for _ in range(IN_DOUBT):
        now += LARGE_EVERY_S
        answer(prober, large(prober.large_due(now, busy=True)), now, 0.2, 3e7)
    assert prober.falls == 1
