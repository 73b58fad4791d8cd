"""Twenty sites of half an hour in each kind of weather, with the bars of a calm planner; devices that lie."""

from __future__ import annotations

from statistics import fmean, median

import pytest

from benchmarks.weather import make_truth, play
from benchmarks.weather.__main__ import longest_worse_than_alone, rows, run_site, site_of
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.service.solver import solve

SITES, MINUTES = 20, 30


@pytest.fixture(scope="module", params=["still", "stalls", "walk", "changes"])
def verdicts(request):
    return [run_site(request.param, seed, MINUTES) for seed in range(SITES)]


@pytest.mark.xfail(strict=True, reason="measurements are compared point against point")
def test_a_planner_is_calm_and_right(verdicts):
    table, kind = "\n".join(rows(verdicts)), verdicts[0].kind
    assert not any(verdict.refused for verdict in verdicts), table
    if kind == "still":
        assert fmean(v.changes_per_hour for v in verdicts) <= 1, table
        assert fmean(v.regret for v in verdicts) <= 0.02, table
    elif kind != "changes":
        assert fmean(v.loads_per_hour for v in verdicts) <= 3, table
        assert fmean(v.regret for v in verdicts) <= 0.04, table
    else:
        phases = [phase for v in verdicts for phase in v.phases]
        assert fmean(phase.regret <= 0.1 for phase in phases) >= 0.9, table
        assert median(phase.right_s or MINUTES * 60.0 for phase in phases) <= 5 + 4, table  # a slow run is evidence


@pytest.mark.parametrize("kind", ["liar", "restless", "sprinter"])
@pytest.mark.parametrize("seed", range(3))
def test_requests_are_not_worse_than_on_one_device_for_long(kind, seed):
    file = site_of(seed)
    history = play(file, spec_of_kind("bert-base"), make_truth(kind, file, 6, seed), solve, resident=True)
    assert not history.refused
    assert longest_worse_than_alone(history) <= 10
