"""What the planner foresees: shapes that it names when it prepares a plan, and devices whose Programs would differ."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from scripted_site import Site, everyone
from sites import FAMILIES, request, tensors
from sites import everyone as divide
from swarm import Swarm, plan_of

from hepti_mqtt import __version__
from hepti_mqtt.errors import PlanError
from hepti_mqtt.models import spec_from_dict
from hepti_mqtt.models.shapes import PackedTokens
from hepti_mqtt.plan import Plan
from hepti_mqtt.protocol import messages
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.models import FORESEEN, FORESEEN_NUMBERS, URGENT


def shapes(*lengths: int) -> tuple[PackedTokens, ...]:
    return tuple(PackedTokens((n,)) for n in lengths)


def foreseen(site: Site, device: str = "a") -> tuple[tuple[PackedTokens, ...], int]:
    prepare = site.prepares()[device]
    reads = spec_from_dict(prepare.spec).reads
    return tuple(reads.shape_of(plain) for plain in prepare.shapes), prepare.needed


def site_of(*devices: str) -> Site:
    site = Site(decider=everyone)
    site.join(*devices)
    return site


def test_the_first_plan_names_the_shape_that_it_is_made_for() -> None:
    site = site_of("a", "b")
    site.tick(1.1)
    assert foreseen(site) == (shapes(16), 1)
    assert foreseen(site) == foreseen(site, "b")


def test_requests_that_wait_come_first_and_for_no_others() -> None:
    site = site_of("a")
    site.submit("r1", 5, 9)
    site.submit("r2", 5)
    site.tick(1.1)
    assert foreseen(site) == (shapes(5, 9), 2)


def test_of_those_that_want_only_a_plan_nothing_is_foreseen() -> None:
    site = site_of("a")
    site.submit("r1", 5, computes=False)
    site.submit("r2", 7)
    site.tick(1.1)
    assert foreseen(site)[0][:1] == shapes(7)


def test_while_a_plan_serves_the_next_one_waits_for_all_shapes_of_late() -> None:
    site = site_of("a")
    site.settle()
    for number, length in enumerate([3, 4, 3], 1):
        site.submit(f"r{number}", length)
        site.answer(number)
    site.join("b")
    site.tick(1.1)
    assert foreseen(site, "b") == (shapes(3, 4), 2)


def test_after_a_loss_shapes_of_late_hold_no_request_up() -> None:
    site = site_of("a", "b")
    site.settle()
    site.submit("r1", 3)
    site.answer(1)
    site.submit("r2", 4)
    site.leave("b")
    site.tick(1.1)
    assert foreseen(site) == (shapes(4, 3), 1)


def test_no_more_is_foreseen_than_fits() -> None:
    site = site_of("a")
    site.settle()
    for number in range(1, FORESEEN + 4):
        site.submit(f"r{number}", number)
        site.answer(number)
    model = site.session.slots.own("m")
    model.dispatched(PackedTokens((1,) * (FORESEEN_NUMBERS + 1)))
    found, needed = model.foreseen()
    assert found[: FORESEEN - 1] == shapes(*range(FORESEEN + 3, 4, -1))
    assert needed == len(found) == FORESEEN - 1, "the large one would fill the message"


def test_of_many_requests_that_wait_the_first_are_foreseen() -> None:
    site = site_of("a")
    for number in range(1, FORESEEN + 4):
        site.submit(f"r{number}", number)
    site.tick(1.1)
    assert foreseen(site) == (shapes(*range(1, FORESEEN + 1)), URGENT), "the others need not hold these up"


# -- with real workers ------------------------------------------------------------------------------------------------


def built(swarm: Swarm) -> Mapping[str, tuple[int, int]]:
    counters = {name: host.session.counters for name, host in swarm.hosts.items()}
    return {n: (c["programs_built_ahead"], c["programs_built_late"]) for n, c in counters.items()}


def test_requests_of_late_lengths_find_their_programs_under_the_next_plan() -> None:
    spec = FAMILIES["bert-embedding"]
    devices = {f"d{i}": (1e9, 1 << 30) for i in range(2)}
    swarm = Swarm(spec, tensors(spec), devices, decider=divide(("row", {"variant": "kv"})), jitter_s=0.002)
    swarm.run(30, until=lambda: plan_of(swarm) is not None)

    def ask(name: str) -> None:
        for length in (5, 11):
            swarm.submit(f"{name}{length}", *request(spec, (length,)))
        swarm.run(30, until=lambda: {f"{name}5", f"{name}11"} <= set(swarm.answers))
        assert not swarm.errors

    assert built(swarm) == {"d0": (1, 0), "d1": (1, 0)}
    ask("first")
    assert built(swarm) == {"d0": (1, 2), "d1": (1, 2)}, "nobody knew of them"
    swarm.join("d2", 1e9, 1 << 30)
    swarm.run(30, until=lambda: len(plan_of(swarm).devices) == 3)
    before = built(swarm)
    ask("second")
    after = built(swarm)
    assert after == before, "ahead of the requests"
    assert after["d2"][1] == 0


# -- of another version -----------------------------------------------------------------------------------------------


def other_version(site: Site, device: str) -> None:
    prepare = site.prepares()[device]
    plan = Plan.from_dict(prepare.plan)
    site.event(interface.UpMessage(device, messages.Ready(prepare.txn, plan.model, plan.epoch, 5, b"otherone")))


def test_a_device_that_derives_other_programs_is_refused_and_the_others_serve() -> None:
    site = site_of("a", "b")
    site.tick(1.1)
    other_version(site, "b")
    site.tick(1.1)
    site.ready("a")
    active = site.session.plan("m")
    assert active is not None
    assert active.devices == ("a",)
    (note,) = [c.text for c in site.seen if isinstance(c, interface.Note) and c.kind == "refused"]
    assert "b derives other Programs from a plan; it runs version 0" in note
    assert f"the planner {__version__}" in note
    site.tick(1.0)
    assert site.session.plan("m") is active, "its heartbeats change nothing"


def test_without_another_device_requests_hear_why() -> None:
    site = site_of("b")
    site.submit("r")
    site.tick(1.1)
    other_version(site, "b")
    site.tick(10.0)
    with pytest.raises(PlanError, match="b derives other Programs"):
        raise site.errors["r"]


def test_a_refused_device_that_starts_anew_is_tried_again() -> None:
    site = site_of("a", "b")
    site.tick(1.1)
    other_version(site, "b")
    site.settle()
    site.join("b", boot=2)
    plan = site.settle()
    assert plan.devices == ("a", "b")
