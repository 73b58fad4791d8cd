"""The search for a quota, against machines that are not proportional, not quiet, or not able."""

from __future__ import annotations

import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hepti_mqtt.errors import LabError
from hepti_mqtt.lab.solve import AIM, MEASUREMENTS, WITHIN, solve


class Machine:
    """Speed = full x share ^ bend, cut into steps of the quota, with some noise."""

    def __init__(self, full: float, bend: float, noise: float, seed: int, offset: float = 0.0) -> None:
        self.full, self.bend, self.noise, self.offset = full, bend, noise, offset
        self.random = random.Random(seed)
        self.asked: list[float] = []

    def true(self, cpu: float) -> float:
        return max(self.full * (cpu + self.offset) ** self.bend, 1e-9)

    def __call__(self, cpu: float) -> float:
        self.asked.append(cpu)
        return self.true(cpu) * (1 + self.random.uniform(-self.noise, self.noise))


@given(
    full=st.floats(20, 300),
    bend=st.floats(0.7, 1.4),
    part=st.floats(0.05, 0.95),
    noise=st.floats(0, 0.015),
    offset=st.floats(0, 0.03),
    seed=st.integers(0, 10**6),
    start=st.none() | st.floats(0.01, 1.0),
)
def test_the_quota_found_has_the_speed_whatever_the_curve(full, bend, part, noise, offset, seed, start):
    machine = Machine(full, bend, noise, seed, offset)
    target = part * machine.true(1.0)
    assume(target >= 1.1 * machine.true(0.005))  # below lies what the least quota gives
    found = solve(machine, target, 1.0, start)
    assert abs(found.speed / target - 1) <= WITHIN
    assert abs(machine.true(found.cpu) / target - 1) <= AIM + 2 * noise + 1e-9
    assert found.measurements == len(machine.asked) <= MEASUREMENTS
    assert machine.asked[-1] == machine.asked[-2] == found.cpu, "the last one is a measurement of its own"


def test_a_machine_whose_speed_changes_meanwhile_is_followed():
    machine = Machine(140, 1.0, 0.005, 1)

    def measure(cpu: float) -> float:
        if len(machine.asked) == 4:
            machine.full = 100  # after the search has brackets of the faster machine
        return machine(cpu)

    found = solve(measure, 24.6, 1.0, 0.5)
    assert abs(machine.true(found.cpu) / 24.6 - 1) <= 0.03


@pytest.mark.parametrize(("target", "word"), [(150.0, "1 of a core"), (0.001, "0.005 of a core")])
def test_out_of_reach_says_so_with_the_figures(target, word):
    with pytest.raises(LabError, match=f"out of reach: with {word}"):
        solve(Machine(100, 1.0, 0.0, 0), target, 1.0)


def test_a_machine_that_is_never_the_same_twice_is_refused_with_what_was_seen():
    turns = iter(range(10**6))
    with pytest.raises(LabError, match=r"no quota was found .* too busy"):
        solve(lambda cpu: 140 * cpu * (1.4 if next(turns) % 2 else 0.7), 24.6, 1.0, 0.2)


def test_one_disturbed_measurement_does_not_hold_the_search_for_ever():
    """A neighbour took the core for the third measurement: too slow there, though the quota is more than enough."""
    count = 0

    def measure(cpu):
        nonlocal count
        count += 1
        return 110.0 * cpu * {1: 0.9, 2: 0.9, 3: 0.6}.get(count, 1.0)

    found = solve(measure, 24.6, 1.0, 0.212)
    assert found.speed == pytest.approx(24.6, rel=0.05)
    assert found.cpu == pytest.approx(24.6 / 110, rel=0.05)


def test_a_machine_that_drifts_during_the_search_is_followed():
    calls = 0

    def measure(cpu: float) -> float:
        nonlocal calls
        calls += 1
        return cpu * (200.0 if calls < 8 else 225.0) * (1 + 0.08 * (-1) ** calls * (calls < 8))

    found = solve(measure, 24.6, 1.0)
    assert found.cpu == pytest.approx(24.6 / 225, rel=0.05)
