"""What a planner in service leaves out of a search is never what it would have chosen, and is told by name."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from sites import FAMILIES
from swarm import profile_curve

from hepti_mqtt.cost.profiles import Cluster, DeviceProfile, Link
from hepti_mqtt.cost.simulator import Naming
from hepti_mqtt.ids import Epoch
from hepti_mqtt.models import largest_shape
from hepti_mqtt.planner import Decision, Question, decide
from hepti_mqtt.planner.candidates import reason_of

SPEC = FAMILIES["bert-embedding"]


def question(gflops: list[float], mbit: float, endpoints: bool, latency_s: float = 0.2e-3) -> Question:
    devices = {
        f"d{i}": DeviceProfile(f"d{i}", profile_curve(g * 1e9), g * 1e8, 4e9, memory_bytes=8e9)
        for i, g in enumerate(gflops)
    }
    links = {name: Link(latency_s, mbit * 125e3, mbit * 125e3) for name in devices}
    site = Cluster(devices, links, endpoints=frozenset(devices) if endpoints else frozenset())
    return Question(Naming("home", "m"), SPEC, site, largest_shape(SPEC), Epoch(1, 1))


def both(asked: Question) -> tuple[Decision, Decision]:
    """Return what is found with and without comparing every method."""
    return decide(asked), decide(replace(asked, compare=False))


def site_of(seed: int) -> Question:
    rng = Random(seed)
    # From sites where one device alone is best by far to such where all of them together are.
    speeds = [10 ** rng.uniform(-3, 0)] * rng.choice((3, 4))
    if rng.random() < 0.6:
        speeds = [s * 10 ** rng.uniform(-0.8, 0) for s in speeds]
    return question(speeds, 10 ** rng.uniform(1, 3), rng.random() < 0.7, 10 ** rng.uniform(-4, -3))


@pytest.mark.no_cover
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.wide) for seed in range(2, 20))])
def test_the_same_plan_is_chosen_without_comparing_every_method(seed):
    whole, quick = both(site_of(seed))
    assert replace(quick.chosen.plan, reason="") == replace(whole.chosen.plan, reason="")
    assert quick.digest == whole.digest


def test_methods_that_are_too_slow_are_told_by_name_and_why_is_said():
    whole, quick = both(question([30.0, 20.0], 10, endpoints=True))
    assert quick.chosen.plan.strategy == "single"
    assert {c.name for c in quick.behind} >= {"row/kv", "block", "galaxy/ring"}
    assert {c.name for c in quick.ranking} | {c.name for c in quick.behind} == {c.name for c in whole.ranking}
    assert min(c.price.seconds for c in quick.behind) > quick.chosen.price.seconds
    said = reason_of([quick.chosen], quick.chosen, quick.behind)
    assert f"the next one, {quick.behind[0].name} on d0, d1 over mesh, is far behind" in said
    assert not whole.behind
