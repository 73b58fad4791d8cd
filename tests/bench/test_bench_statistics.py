"""Intervals cover what they say, ratios cancel drift, and runs agree where they overlap."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hepti_mqtt.bench.statistics import agree, median_interval, ratio

TIMES = st.lists(st.floats(0.1, 1e4), min_size=1, max_size=40)


@given(TIMES)
def test_the_interval_holds_the_median_and_lies_in_the_data(values):
    i = median_interval(values)
    assert min(values) <= i.low <= i.median <= i.high <= max(values)
    assert i.level >= 0.95 or len(values) < 6


@pytest.mark.parametrize(
    ("n", "ranks", "level"), [(6, (1, 6), 0.96875), (10, (2, 9), 0.978515625), (20, (6, 15), 0.9586)]
)
def test_ranks_are_those_of_the_tables(n, ranks, level):
    i = median_interval(list(range(1, n + 1)))
    assert (i.low, i.high) == ranks
    assert i.level == pytest.approx(level, abs=1e-4)


@pytest.mark.parametrize("n", [3, 6, 9, 15])
def test_coverage_is_what_is_printed(n):
    rng = np.random.default_rng(5)
    found = [median_interval(list(row)) for row in rng.lognormal(0.0, 0.5, (4000, n))]
    hits = np.mean([i.low <= 1.0 <= i.high for i in found])
    assert hits == pytest.approx(found[0].level, abs=0.02)


def test_a_drift_that_hits_both_does_not_touch_the_ratio():
    rng = np.random.default_rng(1)
    drift = 1 + np.arange(12) / 4
    a = {r: 100 * d * e for r, (d, e) in enumerate(zip(drift, rng.normal(1, 0.005, 12), strict=True))}
    b = {r: 100 * d * e for r, (d, e) in enumerate(zip(drift, rng.normal(1, 0.005, 12), strict=True))}
    both = ratio(a, b)
    assert abs(both.median - 1) < 0.01
    assert both.low < 1 < both.high


def test_a_real_difference_is_seen_and_rounds_without_a_partner_are_left_out():
    both = ratio({r: 120.0 + r for r in range(8)}, {r: 100.0 + r for r in range(7)} | {99: 1.0})
    assert both.low > 1.1
    with pytest.raises(ValueError, match="at least one"):
        ratio({1: 1.0}, {2: 1.0})


def test_thousands_of_values_have_an_interval_as_a_normal_distribution_has_it():
    found = median_interval(range(5000))
    assert found.median == 2499.5
    assert found.level == pytest.approx(0.95, abs=2e-3)
    assert found.high - found.low == pytest.approx(2 * 1.96 * 0.5 * 5000**0.5, rel=0.01)


def test_runs_agree_where_their_intervals_overlap():
    one, two = {"x": median_interval([1, 2, 3]), "y": median_interval([1, 2])}, {"x": median_interval([3, 4])}
    assert agree(one, two) == {"x": True}
    assert agree(one, {"y": median_interval([5, 6])}) == {"y": False}
