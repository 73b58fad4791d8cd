"""Bags at a site on a virtual clock: tasks go to whoever is free, and a lost device's to the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from sites import everyone, request, tensors
from swarm import Swarm, plan_of

from hepti_mqtt import models
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.runtime.worker import interface
from hepti_mqtt.runtime.worker.runs import EARLY_LEASES, WorkerRuns

METHOD = ("fused_tiles", {"cut": "1", "owners": "leased"})
WHOLE = ("fused_tiles", {"cut": "none", "owners": "leased"})
ROUTES = ("broker", "mesh")


class ObservedSite:
    """A site that records computed tasks, run ids and packets."""

    def __init__(
        self,
        route: str,
        seed: int = 0,
        slow: str = "",
        kind: str = "tiny-convnet",
        devices: int = 3,
        method: tuple[str, dict[str, str]] = METHOD,
    ) -> None:
        spec = spec_of_kind(kind)
        weights, hosts = tensors(spec), {f"d{i}": (1e9, 1 << 30) for i in range(devices)}
        decider = everyone(method)
        self.swarm = Swarm(spec, weights, hosts, decider=decider, pins=Pins(route=route), seed=seed, jitter_s=1e-5)
        self.swarm.run(30, until=lambda: plan_of(self.swarm) is not None)
        assert plan_of(self.swarm) is not None, [n.text for n in self.swarm.notes]
        if slow:
            self.swarm.hosts[slow].slowness = 1e3
        self.packets = 0
        self.victim, self.moment, self.in_bag = "", -1, False  # in_bag: tasks were left when the plug was pulled
        self.swarm.lost_filter = self._packet
        self.shape, self.inputs = request(spec, (1,))
        self.want = models.reference(spec, weights, self.inputs, self.shape)[1]
        self.by = Counter[str]()
        self.run_ids: set[int] = set()

    def _packet(self, topic: str, target: str) -> bool:
        self.packets += 1
        hosts = self.swarm.hosts
        if self.packets == self.moment and hosts[self.victim].alive:
            self.in_bag = any(
                r.task_queue and len(r.task_queue.completed_by) < r.task_queue.tasks
                for slot in self.swarm.planner.groups
                for r in slot.runs.values()
            )
            self.swarm.kill(self.victim)
        return bool(self.victim) and not hosts[self.victim].alive and target == self.victim

    def answer(self) -> np.ndarray:
        """Ask, and return the answer, which comes once and is right."""
        self.swarm.submit("r", self.shape, self.inputs)

        def over() -> bool:
            for run in (r for slot in self.swarm.planner.groups for r in slot.runs.values()):
                self.run_ids.add(run.run_id)
                if run.task_queue is not None:
                    self.by = Counter(run.task_queue.completed_by.values())
            return "r" in self.swarm.answers or "r" in self.swarm.errors

        self.swarm.run(60, until=over)
        self.swarm.run(3)
        assert "r" not in self.swarm.errors, self.swarm.errors
        ((got, _),) = self.swarm.answers["r"]
        np.testing.assert_allclose(got, self.want, atol=5e-5)
        assert all(host.session.runs.idle for host in self.swarm.hosts.values() if host.alive)
        return got


@pytest.mark.parametrize("route", ROUTES)
def test_a_slow_device_computes_fewer_tasks_and_the_bits_stay_the_same(route: str) -> None:
    even, uneven = ObservedSite(route), ObservedSite(route, slow="d2")
    assert even.answer().tobytes() == uneven.answer().tobytes()
    assert len(uneven.run_ids) == 1
    assert uneven.by["d2"] <= 1 < even.by["d2"]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("moment", [3, 7, 11, 15])
def test_a_device_lost_in_mid_bag_costs_no_answer_and_no_second_run(route: str, moment: int) -> None:
    site = ObservedSite(route, seed=moment)
    site.victim, site.moment = "d1", site.packets + moment
    site.answer()
    assert not site.swarm.hosts["d1"].alive
    assert site.in_bag
    assert len(site.run_ids) == 1


def test_without_the_head_device_a_request_runs_again() -> None:
    site = ObservedSite("broker")
    site.victim, site.moment = "d0", site.packets + 12
    site.answer()
    assert len(site.run_ids) == 2


def test_a_lease_that_comes_again_or_too_late_changes_nothing() -> None:
    site = ObservedSite("broker")
    site.answer()
    (run_id,) = site.run_ids
    plan, host = plan_of(site.swarm), site.swarm.hosts["d1"]
    late = messages.LeaseTasks(plan.model, plan.version, run_id, (1,))
    assert host.session.handle(interface.MessageIn(late), site.swarm.now) == []
    assert host.session.counters["late"] >= 1


@pytest.mark.parametrize(("route", "moment"), [("broker", 3), ("mesh", 11)])
def test_a_small_bag_has_no_tasks_that_nobody_can_compute(route: str, moment: int) -> None:
    site = ObservedSite(route, kind="tiny-vgg", method=WHOLE)  # its last map has four places, so four tiles
    site.victim, site.moment = "d1", site.packets + moment
    site.answer()
    assert site.in_bag
    assert len(site.run_ids) == 1
    assert sum(site.by.values()) == 4


def test_the_word_that_no_task_is_left_may_come_before_the_request() -> None:
    site = ObservedSite(
        "broker", devices=9
    )  # one more than there are tasks: only that word ends the run of the last one
    carry, delayed = site.swarm.carry, []

    def late(topic: str, target: str, qos: int, deliver: Callable[[], None]) -> None:
        if target == "d8" and topic in site.swarm.hosts["d8"].works:
            delayed.append(topic)
            site.swarm.after(1.0, deliver)
        else:
            carry(topic, target, qos, deliver)

    site.swarm.carry = late
    site.answer()
    assert delayed
    assert len(site.run_ids) == 1


def test_leases_before_their_runs_are_bounded() -> None:
    counters = Counter[str]()
    runs = WorkerRuns("a", Topics("home"), counters)
    for n in range(EARLY_LEASES + 3):
        assert runs.handle_lease(messages.LeaseTasks("m", PlanVersion(1, 1), n, (n,)), 0.0) == []
    assert counters == {"early_dropped": 3}
