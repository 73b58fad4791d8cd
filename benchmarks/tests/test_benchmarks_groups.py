"""Groups that are lost lose no request, and what one of them held is computed once more at most."""

from __future__ import annotations

import pytest

from benchmarks.groups import Run, Scenario, fairness, summary


@pytest.mark.parametrize("dispatch", ["turns", "fewest"])
def test_every_request_is_answered_once_though_a_third_of_the_groups_is_lost(dispatch):
    scenario = Scenario(groups=12, clients=3, lost_at_s=6.0, until_s=14.0, load=0.5, dispatch=dispatch)
    run = Run(scenario).run()
    told = summary(run)
    assert run.answers == dict.fromkeys(run.asked_s, 1)
    assert told["answered once"] == told["asked"] > 100
    assert max(run.computed.values()) == 1
    assert told["fairness between clients"] > 0.9


def test_fairness_is_jains_index():
    assert fairness([3, 3, 3]) == pytest.approx(1)
    assert fairness([1, 0, 0, 0]) == pytest.approx(0.25)
