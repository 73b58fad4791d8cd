"""Probes: what they tell of a link, how rare large ones are, and when a slow one is believed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_agent.probes import (
    CONFIRMATIONS,
    FIRST_LARGE,
    KEPT_ROUND_TRIPS,
    LARGE_BYTES,
    LARGE_EVERY_S,
    MAX_PENDING,
    RECHECK_EVERY_S,
    RECHECKS,
    SMALL_BYTES,
    Prober,
)
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.protocol import frames


def answer(prober, payloads, now, latency_s, rate=None):
    for payload in payloads:
        frame = frames.decode(payload)
        extra = 0.0 if rate is None else 2 * (len(frame.body) - SMALL_BYTES) / rate
        prober.on_answer(frame, now + latency_s + extra)


def large(payloads):
    return [p for p in payloads if len(p) > 1000]


def test_large_probes_are_rare_and_never_while_busy():
    prober = Prober("d1", 7)
    times = []
    for now in range(40):
        payloads = prober.due_probes(float(now), busy=20 <= now < 30)
        assert len(payloads) == 1 + 2 * len(large(payloads)), "a small one goes before each large one too"
        assert not (large(payloads) and 20 <= now < 30)
        times += [now] * len(large(payloads))
        answer(prober, payloads, now, 0.001, 1e7)
    assert len(times) == FIRST_LARGE + 2
    assert times == [*range(1, FIRST_LARGE + 1), FIRST_LARGE + LARGE_EVERY_S, 30]


def measured(rate, latency_s=0.001):
    """Return a prober that has measured a link, and when it last did."""
    prober = Prober("d1", 7)
    for now in range(KEPT_ROUND_TRIPS):
        answer(prober, prober.due_probes(float(now), False), now, latency_s, rate)
    return prober, float(KEPT_ROUND_TRIPS)


@given(latency=st.floats(1e-4, 0.5), rate=st.floats(1e5, 2e8))
def test_round_trip_and_rate_of_one_direction(latency, rate):
    prober, first = measured(rate, latency)
    for now in range(int(first), 3 * int(first)):  # small probes wait on a full link; no large probe is sent
        answer(prober, prober.due_probes(float(now), True), now, latency + 0.011, rate)
    # A difference of two nearly equal times is only as exact as the times.
    assert prober.bandwidth_bytes_per_s() == pytest.approx(rate, rel=1e-3)
    assert measured(rate, latency)[0].round_trip_s() == pytest.approx(latency)


@pytest.mark.parametrize("rate", [None, 1e9])
def test_the_rate_is_unknown_where_it_cannot_be_measured(rate):
    prober, _ = measured(rate, 0.01)
    assert prober.round_trip_s() == pytest.approx(0.01)
    assert prober.bandwidth_bytes_per_s() is None


SLOW = (6e6,) * CONFIRMATIONS


@pytest.mark.parametrize(
    ("rate", "latency_s", "rates", "drops"),
    [
        (3e7, 0.001, SLOW[:-1], 0),
        (3e7, 0.001, SLOW, 1),
        (3e7, 0.001, (3e7, *SLOW[:-1]) * 6, 0),
        (3e7, 0.001, (2e7,) * 2 * CONFIRMATIONS, 0),
        (1.2e8, 0.006, (1.2e8,) * CONFIRMATIONS, 0),
        (3e7, 0.2, (3e7,) * 4 * CONFIRMATIONS, 0),
    ],
    ids=[
        "too few",
        "a link that fails",
        "a fast one between",
        "a little slower",
        "a busy interpreter",
        "a busy broker",
    ],
)
def test_a_fall_counts_after_slow_probes_in_a_row_that_the_small_probes_do_not_explain(rate, latency_s, rates, drops):
    prober, now = measured(rate)
    for each in rates:
        now += LARGE_EVERY_S
        answer(prober, prober.due_large_probe(now, busy=True), now, latency_s, each)
    assert prober.bandwidth_drops == drops
    assert prober.bandwidth_bytes_per_s() == pytest.approx(rates[-1] if drops else rate, rel=1e-3)
    assert prober.round_trip_s() == pytest.approx(0.001), "small probes beside large ones do not count"


def test_a_slow_probe_counts_while_idle_or_without_its_small_one():
    prober, now = measured(3e7)
    for _ in range(2 * CONFIRMATIONS):
        now += LARGE_EVERY_S
        answer(prober, prober.due_large_probe(now, busy=False), now, 0.001, 2e7)
    assert prober.bandwidth_bytes_per_s() == pytest.approx(2e7, rel=1e-3)
    prober, now = measured(3e7)
    for _ in range(CONFIRMATIONS):
        now += LARGE_EVERY_S
        answer(prober, large(prober.due_large_probe(now, busy=True)), now, 0.2, 3e7)
    assert prober.bandwidth_drops == 1


def test_to_a_broker_on_this_machine_there_is_no_link():
    prober = Prober("d1", 7)
    for now in range(3):
        answer(prober, prober.due_probes(float(now), False), now, 0.001, 1e7)
    prober.set_packet_limit(None, local=True)
    for now in range(3, 30):
        payloads = prober.due_probes(float(now), False)
        assert not large(payloads)
        answer(prober, payloads, now, 0.001, 1e7)
    assert prober.bandwidth_bytes_per_s() is None
    assert prober.round_trip_s() == pytest.approx(0.001)
    prober.set_packet_limit(None, local=False)  # it has moved to another machine
    answer(prober, prober.due_probes(30.0, False), 30.0, 0.001, 1e7)
    assert prober.bandwidth_bytes_per_s() == pytest.approx(1e7, rel=1e-3)


def test_answers_of_an_earlier_start_and_repeated_ones_are_passed_over():
    old, prober = Prober("d1", 6), Prober("d1", 7)
    answer(prober, old.due_probes(0.0, False), 0.0, 9.0)
    assert prober.round_trip_s() is None
    (payload,) = prober.due_probes(0.0, False)
    answer(prober, [payload], 0.0, 0.5)
    answer(prober, [payload], 0.0, 30.0)
    assert prober.round_trip_s() == 0.5
    assert frames.decode(payload).plan_version == PlanVersion(7, 0)


def test_unanswered_probes_are_bounded():
    prober = Prober("d1", 7)
    (first,) = prober.due_probes(0.0, True)
    for now in range(1, MAX_PENDING + 2):
        prober.due_probes(float(now), True)
    answer(prober, [first], 0.0, 50.0)
    assert prober.round_trip_s() is None


@pytest.mark.parametrize(("limit", "most"), [(None, LARGE_BYTES), (1 << 30, LARGE_BYTES), (100_000, 100_000), (500, 0)])
def test_probes_stay_below_the_brokers_limit(limit, most):
    prober = Prober("d1", 7)
    prober.set_packet_limit(limit)
    sizes = []
    for now in range(4):
        payloads = prober.due_probes(float(now), False)
        sizes += [len(p) for p in large(payloads)]
        answer(prober, payloads, now, 0.001, 1e7)
    assert bool(sizes) == (most > 0)
    assert all(LARGE_BYTES / 4 < size < most + 1000 for size in sizes)
    assert limit is None or all(size < limit for size in sizes)


def test_a_fall_is_checked_soon_and_then_the_link_is_probed_as_rarely_as_before():
    prober, now = measured(3e7)
    prober.expect_slower()
    answer(prober, prober.due_large_probe(now, busy=True), now, 0.001, 6e6)
    assert prober.bandwidth_drops == 1
    times = []
    for tenths in range(600):
        if probes := prober.due_large_probe(now + tenths / 10, busy=True):
            times.append(tenths / 10)
            answer(prober, probes, now + tenths / 10, 0.001, 6e6)
    each = (RECHECK_EVERY_S,) * RECHECKS + (LARGE_EVERY_S,) * 5
    assert times == pytest.approx([sum(each[: count + 1]) for count in range(len(each))])
    prober, now = measured(3e7)
    for rate in (*[1e7] * CONFIRMATIONS, 3e7):  # somebody else used the link: the first check takes the fall back
        now += LARGE_EVERY_S if rate < 3e7 else RECHECK_EVERY_S
        answer(prober, prober.due_large_probe(now, busy=True), now, 0.001, rate)
        believed = prober.bandwidth_bytes_per_s()
        assert believed == pytest.approx(rate if prober.bandwidth_drops else 3e7, rel=1e-3)
    assert prober.bandwidth_drops == 1
