"""A run goes on under another plan from a block on: sessions of planner and devices on a virtual clock."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sites import FAMILIES, TOLERANCE, always, plan, request, tensors
from swarm import MODEL, Swarm, plan_of

from hepti_mqtt import models
from hepti_mqtt.planner import decisions
from hepti_mqtt.protocol import frames
from hepti_mqtt.runtime.coordinator import interface, moves
from hepti_mqtt.runtime.coordinator.requests import Pins, RequestKey

SPEC = replace(FAMILIES["bert-embedding"], layers=6)
TENSORS = tensors(SPEC)
METHOD, ALONE = ("row", {"variant": "kv"}), ("single", {})
EQUAL, UNEVEN, THREE, SINGLE = (
    replace(plan(SPEC, method, shares), predicted_s=5.0, predicted_tokens=13)
    for method, shares in ((METHOD, (1.0, 1.0)), (METHOD, (5.0, 1.0)), (METHOD, (1.0, 2.0, 1.0)), (ALONE, (1.0,)))
)
SHAPE, INPUTS = request(SPEC, (13,))
EXPECTED = models.reference(SPEC, TENSORS, INPUTS, SHAPE)[1]
FLOPS_PER_S, SLOW = 3e5, 1e4  # a layer takes about a second, as the planner expects it
BLOCKS = len(models.graph(SPEC, SHAPE).blocks)


class Changing(Swarm):
    """A site with a change of plan during a run."""

    def __init__(self, seed: int = 0, first=EQUAL, after=UNEVEN, duplicates: float = 0.0) -> None:
        self.next_plan = after
        hosts = dict.fromkeys({**dict.fromkeys(first.devices), **dict.fromkeys(after.devices)}, (FLOPS_PER_S, 1 << 30))
        super().__init__(SPEC, TENSORS, hosts, seed=seed, decider=always(first), duplicates=duplicates, jitter_s=0.01)
        self.run(20, until=lambda: plan_of(self) is not None)
        for host in self.hosts.values():
            host.slowness = SLOW
        self.submit("x", SHAPE, INPUTS)

    @property
    def progress(self) -> int:
        """Return the block that the planner knows a run to be in."""
        running = self.planner.groups.default(MODEL).runs.values()
        return max((run.progress.block for run in running if run.progress is not None), default=-1)

    def change(self, block: int = 1) -> None:
        """Change the plan after the run has reported a block."""
        self.run(60, until=lambda: self.progress >= block)
        self.decider = always(self.next_plan)
        self.pin(Pins(strategy=self.next_plan.strategy))

    def switched(self) -> bool:
        """Return whether the run continues under another plan."""
        return any(frames.decode_continued(work) is not None for work in self.work)

    def finish(self) -> None:
        """Let the request be answered, with the right answer, once, and nothing be left of it."""
        self.run(300, until=lambda: bool(self.answers or self.errors))
        self.run(5)
        assert not self.errors
        ((output, _),) = self.answers["x"]
        assert np.abs(output - EXPECTED).max() < TOLERANCE
        assert not self.planner.groups.default(MODEL).runs
        assert all(host.session.runs.idle for host in self.hosts.values() if host.alive)


@pytest.fixture(autouse=True)
def _worth_it(monkeypatch):
    """Both plans cost nothing here, so let the rule say what it says of plans that differ."""
    monkeypatch.setattr(moves, "weigh_handover", lambda a, b, border: goes(border))


def goes(border):
    return decisions.HandoverVerdict(border, 10.0, 5.0, 1.0, border.start < border.steps - 1)


MESH = [replace(each, route="mesh") for each in (THREE, UNEVEN)]


@pytest.mark.parametrize(("first", "after"), [(EQUAL, UNEVEN), (THREE, UNEVEN), (UNEVEN, SINGLE), MESH])
def test_a_run_goes_on_under_the_next_plan_and_the_answer_is_the_same(first, after):
    """The next plan may leave devices out: they end the run, and send what they have of it."""
    site = Changing(len(first.devices), first, after, duplicates=0.2)
    site.change()
    site.finish()
    assert [frames.decode_continued(work) is not None for work in site.work] == [False, True]
    assert site.work[1].plan_version == plan_of(site).version
    story = [t for t in site.planner.stories()[0].last() if t.event == "run"]
    assert [t.after for t in story] == [str(plan_of(site).version)]


def test_a_device_that_is_past_the_border_says_so_and_the_run_begins_again(monkeypatch):
    monkeypatch.setattr(moves, "weigh_handover", lambda a, b, border: goes(replace(border, start=1)))
    site = Changing()
    site.change(block=3)
    site.finish()
    assert [frames.decode_continued(work) is not None for work in site.work] == [False, True, False]


@pytest.mark.parametrize("lost", ["d1", "d2", "a connection"])
def test_a_loss_in_the_middle_of_it_costs_a_run(lost):
    """Under the next plan, d2 has no part: it only hands over."""
    site = Changing(first=THREE if lost == "d2" else EQUAL)
    if lost == "a connection":
        site.next_plan = replace(UNEVEN, route="mesh")
    site.change()
    site.run(60, until=site.switched)
    if lost == "a connection":
        site.run(0.3)
        site.cut("d0", "d1")
    else:
        site.kill(lost)
    if lost == "d1":
        site.decider = always(SINGLE)
    site.finish()


def test_a_request_that_ends_early_leaves_nothing():
    site = Changing()
    site.change()
    site.run(60, until=site.switched)
    site.tell_planner(interface.RequestCancelled(RequestKey(MODEL, "user", "x")))
    site.run(20)
    assert not site.planner.groups.default(MODEL).runs
    assert all(host.session.runs.idle for host in site.hosts.values())
    assert len(site.errors["x"]) == 1


def test_a_plan_of_other_devices_leaves_runs_alone():
    site = Changing(after=THREE)
    site.change()
    site.finish()
    assert len(site.work) == 1
