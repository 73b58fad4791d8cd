"""A short run of the schedule: nothing lost, nothing wrong, no repetition without a word."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from faults_run import Run, model_directory, run, silences
from faults_site import KINDS, Fault, schedule


@pytest.mark.wide
@pytest.mark.processes
@pytest.mark.broker
def test_whatever_is_lost_meanwhile_every_request_has_one_right_answer(tmp_path: Path) -> None:
    report = run(Run(75.0, seed=3, every_s=(9.0, 12.0)), tmp_path, model_directory(tmp_path, "tiny"))
    assert len(report.faults) >= len(KINDS)
    assert report.good, str(report)
    for tally in report.tallies.values():
        assert tally.right > 0
        assert set(tally.errors) <= {"overloaded"}, str(report)


def test_a_schedule_is_known_by_its_seed_and_has_every_kind_in_turn() -> None:
    first, again, other = (list(schedule(seed, 200.0, (5.0, 9.0))) for seed in (1, 1, 2))
    assert first == again != other
    for start in range(0, len(first) - len(KINDS) + 1, len(KINDS)):
        assert {fault.kind for fault in first[start : start + len(KINDS)]} == set(KINDS)


def test_the_longest_silence_after_a_fault_is_its_own() -> None:
    faults = [Fault(0.0, "planner killed", "planner"), Fault(5.0, "broker killed", "broker")]
    answered = [*np.arange(0.0, 1.0, 0.1), *np.arange(3.0, 5.0, 0.1), *np.arange(6.0, 9.0, 0.1)]
    found = silences(faults, [1.0, 5.0], answered)
    assert found["planner killed"] == [pytest.approx(2.0)]
    assert found["broker killed"] == [pytest.approx(1.0)]
