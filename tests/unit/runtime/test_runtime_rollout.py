"""A plan on its way to devices: what they load, refuse or build ahead, and weights loaded ahead of a loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from scripted_site import SPEC, Site, caps, everyone, settled
from sites import FAMILIES, request, tensors
from sites import everyone as divided
from swarm import Swarm, plan_of

from hepti_mqtt import __version__
from hepti_mqtt.errors import ModelError, PlanError, RemoteError
from hepti_mqtt.ids import PlanVersion
from hepti_mqtt.models import spec_from_dict
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import programs_digest
from hepti_mqtt.planner import Decision, Question, decide, price_plans
from hepti_mqtt.protocol import messages
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.fair_queue import Batching
from hepti_mqtt.runtime.coordinator.models import MAX_PREBUILT_SHAPES
from hepti_mqtt.runtime.coordinator.next_batch import MAX_SHAPE_NUMBERS, MAX_URGENT_SHAPES, shapes_to_build
from hepti_mqtt.runtime.coordinator.plans import Search
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.runtime.coordinator.rollout import (
    ENDS_S,
    MAX_FAILED_PREPARATIONS,
    PREPARE_TIMEOUT_S,
    REPEAT_PREPARE_S,
    RETRY_S,
)
from hepti_mqtt.runtime.coordinator.search_kinds import SearchKind
from hepti_mqtt.runtime.machinery import Publish


def asked(site: Site, device: str = "a") -> tuple[messages.Prepare, PlanVersion]:
    """Return what a device was asked to prepare last, and its epoch."""
    prepare = site.prepares()[device]
    return prepare, Plan.from_dict(prepare.plan).version


def test_device_that_leaves_during_preparation_ends_it() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    site.tick(1.1)
    txn = site.prepares()["a"].transaction_id
    site.leave("b")
    assert any(isinstance(m, messages.Release) for d, m in site.told if d == "a")
    assert site.prepares()["a"].transaction_id > txn
    site.ready()
    assert site.plan.devices == ("a",)


def test_memory_refusal_swaps_plans_when_old_and_new_do_not_fit_together() -> None:
    site = settled("a", decider=everyone)
    old = site.plan
    site.submit("r1")
    site.join("b")
    site.tick(1.1)
    refused = site.failed("a")
    assert site.prepares()["a"] == refused, "the run under the old plan comes first"
    site.answer(1)
    assert ("a", old.version) in site.released()
    assert site.prepares()["a"].transaction_id > refused.transaction_id
    site.ready()
    assert set(site.plan.devices) == {"a", "b"}
    assert "r1" in site.answers


def test_memory_refusal_without_another_plan_makes_the_next_question_tighter() -> None:
    site = Site()
    site.join("a", memory=1 << 24)
    site.tick(1.1)
    site.failed("a", missing=5 << 20)
    site.tick(1.1)
    assert site.solves[-1].question.cluster.devices["a"].memory_bytes == (1 << 24) - (5 << 20)


def test_preparation_that_keeps_failing_ends_the_requests_that_wait() -> None:
    site = Site()
    site.join("a")
    site.submit("r1", within=1000)
    for _ in range(MAX_FAILED_PREPARATIONS):
        site.tick(1.1)
        site.failed("a", "wire")
    assert isinstance(site.errors["r1"], RemoteError)
    site.tick(RETRY_S + 0.1)
    site.ready()
    assert site.plan is not None, "it tries again after a while"


def test_weights_that_cannot_be_read_end_the_requests_that_wait_at_once() -> None:
    site = Site()
    site.join("a")
    site.submit("r1", within=1000)
    site.tick(1.1)
    assert site.prepares()
    cut = ModelError("the file ends early")
    site.event(interface.WeightsUnreadable("m", "b", cut))
    assert "r1" not in site.errors, "the plan is not for that device"
    site.event(interface.WeightsUnreadable("m", "a", cut))
    assert site.errors["r1"] is cut
    site.tick(RETRY_S + 0.1)
    site.ready()
    assert site.plan is not None, "the file may be whole again"


def test_prepare_that_was_lost_is_sent_again_to_those_who_are_not_ready() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    site.tick(1.1)
    first = site.prepares()
    site.ready("a")
    site.told.clear()
    site.tick(REPEAT_PREPARE_S - 0.5)
    assert not site.prepares()
    site.tick(1)
    assert site.prepares() == {"b": first["b"]}
    site.ready("b")
    assert site.plan is not None


def test_preparation_without_progress_is_given_up() -> None:
    site = Site()
    site.join("a")
    site.tick(1.1)
    first, epoch = asked(site)
    site.pass_by(30, 5)
    second, second_epoch = asked(site)
    assert second.transaction_id > first.transaction_id
    for _ in range(30):
        site.tick(5)
        site.event(
            interface.DeviceMessage("a", messages.PrepareProgress(second.transaction_id, "m", second_epoch, 1, 2))
        )
    assert site.prepares()["a"] == second, "progress keeps it alive"
    site.event(interface.DeviceMessage("a", messages.Ready(first.transaction_id, "m", epoch, 0, bytes(8))))
    assert site.plan is None, "a Ready of the one given up activates nothing"


def test_progress_of_weights_is_shown_at_most_once_a_second() -> None:
    site = Site()
    site.join("a")
    site.tick(1.1)
    prepare, epoch = asked(site)
    shown = []
    for part in range(10):
        out = site.event(
            interface.DeviceMessage("a", messages.PrepareProgress(prepare.transaction_id, "m", epoch, part, 10))
        )
        shown += [c.progress for c in out if isinstance(c, interface.PublishPlan)]
        site.now += 0.25
    assert shown == [{"a": (0, 10)}, {"a": (4, 10)}, {"a": (8, 10)}]
    site.ready()
    last = [c for c in site.seen if isinstance(c, interface.PublishPlan)][-1]
    assert (last.preparing, last.progress) == (None, {})


def told_until_lost(site: Site, device: str, *told: messages.Message, seconds: float = 60.0) -> float:
    """Let a device say the same again and again while all others are ready; return how long plans use it."""
    begun = site.now
    while site.now - begun < seconds and device in site.session.fleet.usable():
        site.tick(0.5)
        for other in sorted(set(site.boots) - {device}):
            site.ready(other)
        for message in told:
            site.event(interface.DeviceMessage(device, message))
    return site.now - begun


@pytest.mark.parametrize("speaks", [True, False])
def test_a_device_that_prepares_without_progress_holds_nobody_up(speaks: bool) -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    site.tick(1.1)
    prepare, epoch = asked(site, "b")
    site.submit("r1")
    word = (messages.PrepareProgress(prepare.transaction_id, "m", epoch, 0, 0),) if speaks else ()
    assert told_until_lost(site, "b", *word, seconds=30.0) < (25 if speaks else 8)
    site.ready("a")
    assert site.plan.devices == ("a",)


LOADS = pytest.mark.parametrize("there_bytes", [100, 0], ids=["it loads", "it hangs"])


@LOADS
def test_a_device_that_loads_for_another_plan_first_is_not_taken_for_one_that_hangs(there_bytes: int) -> None:
    """Loads run one after the other there, so that of the second plan does not move."""
    site = Site(decider=everyone)
    site.join("a", "b")
    site.submit("pinned", pins=Pins(strategy="column"), within=1000)
    first, first_epoch = asked(site, "b")
    site.ready("a")
    site.tick(1.1)
    second, second_epoch = asked(site, "b")
    assert first_epoch != second_epoch
    moves = messages.PrepareProgress(first.transaction_id, "m", first_epoch, there_bytes, 10 * there_bytes)
    lasts = told_until_lost(site, "b", moves, messages.PrepareProgress(second.transaction_id, "m", second_epoch, 0, 0))
    assert lasts >= 60 if there_bytes else lasts < 25


@LOADS
def test_what_a_device_still_loads_for_a_plan_that_was_given_up_is_progress(there_bytes: int) -> None:
    site = Site(decider=everyone)
    site.join("a", "b", "c")
    site.tick(1.1)
    given_up, epoch = asked(site, "b")
    site.leave("a")
    assert site.prepares()["b"].transaction_id > given_up.transaction_id
    lasts = told_until_lost(
        site, "b", messages.PrepareProgress(given_up.transaction_id, "m", epoch, there_bytes, 10 * there_bytes)
    )
    assert lasts >= 60 if there_bytes else lasts < 25


def test_what_was_ready_before_is_only_a_word() -> None:
    """A device that runs under another plan says so whenever it is asked, whether it loads or not."""
    site = settled("a", "b", decider=everyone)
    plan = site.plan
    active = site.prepares()["b"]
    site.join("c")
    site.tick(1.1)
    assert site.prepares()["b"].transaction_id > active.transaction_id
    ready = messages.Ready(active.transaction_id, "m", plan.version, 1000, programs_digest(SPEC, plan))
    assert told_until_lost(site, "b", ready) < 25


def test_a_plan_is_not_given_up_while_its_devices_load_for_others() -> None:
    """There may be many, and each may take long."""
    site = Site()
    site.join("a")
    site.tick(1.1)
    prepare = site.prepares()["a"]
    told_until_lost(
        site,
        "a",
        messages.PrepareProgress(prepare.transaction_id - 1, "m", PlanVersion(7, 9), 1, 2),
        seconds=2 * PREPARE_TIMEOUT_S,
    )
    assert site.prepares()["a"].transaction_id == prepare.transaction_id
    told_until_lost(site, "a", seconds=PREPARE_TIMEOUT_S + 10)
    assert site.prepares()["a"].transaction_id > prepare.transaction_id


# -- weights loaded ahead ---------------------------------------------------------------------------------------------


def alone(question: Question) -> Decision:
    """Decide for the first device alone."""
    return decide(replace(question, strategy="single"))


def serving(*devices: str, asked: bool = True, **options: Any) -> tuple[Site, str, str]:
    """Return a model in use on one of some devices, that device, and another one."""
    site = settled(*devices, **{"decider": alone, **options})
    if asked:
        site.submit("r")
        site.answer(max(site.work))
    return site, site.plan.root, min(set(devices) - set(site.plan.devices))


def calm(made: Site, seconds: float = 3.0) -> None:
    made.pass_by(int(seconds) + 2, 1.0)


def sought(made: Site) -> list[interface.Solve]:
    """Return the searches for who would serve next."""
    return [solve for solve in made.solves if solve.kind is SearchKind.HURRIED and solve.active is None]


def test_who_would_serve_next_has_the_weights_and_no_plan_before_the_device_is_lost() -> None:
    made, head, _ = serving("a", "b", "c")
    first = made.plan
    calm(made)
    (released,) = [(device, m) for device, m in made.told if isinstance(m, messages.Release)]
    device = released[0]
    sent = [c for c in made.seen if isinstance(c, Publish) and c.topic.endswith(f"/{device}/cmd")]
    ahead = [m for m in map(messages.decode, (c.payload for c in sent)) if isinstance(m, messages.Prepare)]
    assert ahead[-1].build_first == len(ahead[-1].shapes) > 0, "with the Programs of the last requests"
    assert device != head
    assert made.plan.version == first.version, "nobody is to notice"
    made.leave(first.root)
    made.submit("next")
    made.tick(0.1)
    made.ready()
    assert made.plan.devices == (device,), "not the one that would have to load first"
    made.answer(max(made.work))
    assert "next" in made.answers


def test_a_plan_in_a_hurry_is_one_that_need_not_load_if_that_serves_sooner() -> None:
    site = settled("a", "b", "c", decider=everyone)
    site.searches = False
    site.submit("r1")
    site.leave("c")
    (search,) = site.solves[1:]
    assert search.kind is SearchKind.HURRIED
    row = everyone(search.question)
    heavy = replace(row.chosen, load_bytes={"a": 1 << 33, "b": 1 << 33})
    light = replace(alone(search.question).chosen, load_bytes={"a": 0})
    found = replace(row, chosen=heavy, ranking=(heavy, light))
    site.event(interface.Solved("m", search.ticket, found))
    priced = site.solves[-1]
    assert [plan.strategy for plan in priced.plans] == ["single"]
    site.event(interface.Solved("m", priced.ticket, price_plans(priced.question, priced.plans)))
    site.ready()
    assert site.plan is not None
    assert site.plan.strategy == "single"
    site.answer(max(site.work))
    site.pass_by(3)
    whole = site.solves[-1]
    assert (whole.kind, whole.plans) == (SearchKind.WHOLE, ()), "the whole search follows"


def test_what_other_plans_load_is_worked_out_once_more_when_a_plan_has_brought_weights() -> None:
    def decider(question: Question) -> Decision:
        row = everyone(question)
        other = alone(question).chosen
        other = replace(other, load_bytes=dict.fromkeys(other.plan.devices, 1 << 20))
        return replace(row, ranking=(row.chosen, other))

    site = settled("a", "b", decider=decider)
    site.pass_by(3)
    assert [[plan.strategy for plan in solve.plans] for solve in site.solves if solve.plans] == [["single"]]


@pytest.mark.parametrize("kind", SearchKind)
def test_a_search_of_few_plans_leaves_others_known(kind: SearchKind) -> None:
    site = settled("a", "b", decider=everyone)
    group, record = site.session.groups.default("m"), site.session.groups.default("m").plans.active
    assert record is not None
    row = record.decision
    both = replace(row, ranking=(row.chosen, alone(site.solves[-1].question).chosen))
    whole = Search(0.0, 0.0, False, "searching")
    group.search_history.learn(both, whole)
    group.search_history.learn(row, replace(whole, kind=kind))
    known = ["row", "single"] if kind in ("brief", "named") else ["row"]
    assert [k.candidate.plan.strategy for k in group.search_history.candidates] == known


def test_it_is_done_once_for_a_plan_and_again_when_that_device_has_started_anew() -> None:
    made, _, other = serving("a", "b")
    calm(made, 9.0)
    assert len(sought(made)) == 1
    made.leave(other)
    made.join(other, boot=2)
    calm(made, 9.0)
    assert [device for device, _ in made.released()].count(other) > 1


@pytest.mark.parametrize("options", [{"asked": False}, {"pins": Pins(devices=("a",))}], ids=["nobody asks", "pinned"])
def test_nothing_is_loaded_ahead_where_it_helps_nobody(options: dict) -> None:
    made, _, _ = serving("a", "b", **options)
    calm(made)
    assert not sought(made)


@pytest.mark.parametrize("refuses", [True, False])
def test_a_device_that_refuses_or_says_nothing_is_tried_again_much_later(refuses: bool) -> None:
    made, head, other = serving("a", "b")
    made.mute = {other}
    calm(made)
    assert len(sought(made)) == 1
    if refuses:
        failed = messages.PrepareFailed(0, "m", sought(made)[0].question.plan_version, "memory", "no room", 1)
        made.event(interface.DeviceMessage(other, failed))
    calm(made, ENDS_S / 2)
    assert len(sought(made)) == 1
    made.mute = set()
    for n in range(int(2 * ENDS_S)):
        made.tick(1.0)
        if n % 20 == 0:
            made.submit(f"{n}", within=1e6)
            made.answer(max(made.work))
    assert len(sought(made)) > 1
    assert made.released()[-1] == (other, sought(made)[-1].question.plan_version), (
        "it has loaded, and keeps the weights"
    )
    assert made.plan.root == head
    made.leave(head)
    made.submit("next")
    made.tick(0.1)
    made.ready()
    assert made.plan.devices == (other,)


@pytest.mark.parametrize("again", [False, True])
def test_what_is_loaded_ahead_gives_way_to_a_plan_that_lacks_its_memory(again: bool) -> None:
    made, _, other = serving("a", "b")
    made.mute = {other}
    calm(made)
    made.submit("pinned", pins=Pins(strategy="single", devices=(other,)), within=1e6)
    made.tick(0.1)
    before = len(made.told)
    refused = made.failed(other, missing=1 << 30)
    release, asked_again = (m for device, m in made.told[before:] if device == other)
    assert isinstance(release, messages.Release)
    assert release.plan_version == sought(made)[0].question.plan_version, (
        "first, so that there is room when the plan comes again"
    )
    assert asked_again.plan == refused.plan, "the device is not thought to be smaller than it is"
    if again:  # though nothing is loaded ahead any more
        made.failed(other, missing=1 << 30)
        calm(made, 2.0)
        assert isinstance(made.errors["pinned"], PlanError)
    else:
        made.ready(other)
        made.answer(max(made.work))
        assert "pinned" in made.answers


# -- what devices build ahead -----------------------------------------------------------------------------------------


def shapes(*lengths: int) -> tuple[TokenBatch, ...]:
    return tuple(TokenBatch((n,)) for n in lengths)


def foreseen(site: Site, device: str = "a") -> tuple[tuple[TokenBatch, ...], int]:
    prepare = site.prepares()[device]
    reads = spec_from_dict(prepare.spec).input_spec
    return tuple(reads.shape_of(plain) for plain in prepare.shapes), prepare.build_first


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
    for number in range(1, MAX_PREBUILT_SHAPES + 4):
        site.submit(f"r{number}", number)
        site.answer(number)
    model = site.session.groups.default("m")
    model.recent.record_shape(TokenBatch((1,) * (MAX_SHAPE_NUMBERS + 1)))
    found, needed = shapes_to_build(model)
    assert found[: MAX_PREBUILT_SHAPES - 1] == shapes(*range(MAX_PREBUILT_SHAPES + 3, 4, -1))
    assert needed == len(found) == MAX_PREBUILT_SHAPES - 1, "the large one would fill the message"


def test_of_many_requests_that_wait_the_first_are_foreseen() -> None:
    site = site_of("a")
    for number in range(1, MAX_PREBUILT_SHAPES + 4):
        site.submit(f"r{number}", number)
    site.tick(1.1)
    assert foreseen(site) == (shapes(*range(1, MAX_PREBUILT_SHAPES + 1)), MAX_URGENT_SHAPES), (
        "the others need not hold these up"
    )


def built(swarm: Swarm) -> Mapping[str, tuple[int, int]]:
    counters = {name: host.session.counters for name, host in swarm.hosts.items()}
    return {n: (c["programs_built_ahead"], c["programs_built_late"]) for n, c in counters.items()}


def test_requests_of_late_lengths_find_their_programs_under_the_next_plan() -> None:
    spec = FAMILIES["bert-embedding"]
    devices = {f"d{i}": (1e9, 1 << 30) for i in range(2)}
    swarm = Swarm(spec, tensors(spec), devices, decider=divided(("row", {"variant": "kv"})), jitter_s=0.002)
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


def test_devices_build_the_programs_of_the_runs_that_wait() -> None:
    site = Site(in_flight=1, batching=Batching(16), decider=everyone)
    for i in range(21):
        site.submit(f"r{i}", 4)
    site.join("a")
    site.tick(1.1)
    (prepare,) = site.prepares().values()
    assert [len(shape.sizes) for shape in prepare.shapes[:3]] == [16, 4, 1]
    assert prepare.build_first == MAX_URGENT_SHAPES, "the last one need not hold up the first"


# -- of another version -----------------------------------------------------------------------------------------------


def other_version(site: Site, device: str) -> None:
    prepare, epoch = asked(site, device)
    site.event(interface.DeviceMessage(device, messages.Ready(prepare.transaction_id, "m", epoch, 5, b"otherone")))


def test_a_device_that_derives_other_programs_is_refused_until_it_starts_anew_and_the_others_serve() -> None:
    site = site_of("a", "b")
    site.tick(1.1)
    other_version(site, "b")
    site.tick(1.1)
    site.ready("a")
    active = site.plan
    assert active.devices == ("a",)
    (note,) = [c.text for c in site.seen if isinstance(c, interface.LogEvent) and c.kind == "refused"]
    assert caps("b", 1).version in note
    assert __version__ in note
    site.tick(1.0)
    assert site.plan is active, "its heartbeats change nothing"
    site.join("b", boot=2)
    assert site.settle().devices == ("a", "b")


def test_without_another_device_requests_end() -> None:
    site = site_of("b")
    site.submit("r")
    site.tick(1.1)
    other_version(site, "b")
    site.tick(10.0)
    assert isinstance(site.errors["r"], PlanError)


def test_a_load_is_told_at_its_begin_and_at_its_end_with_the_time_that_is_left() -> None:
    def decider(question: Question) -> Decision:
        row = everyone(question)
        heavy = replace(row.chosen, load_bytes=dict.fromkeys(row.chosen.plan.devices, 1_300_000_000))
        return replace(row, chosen=heavy, ranking=(heavy,))

    site = Site(decider=decider)
    site.join("a", "b")
    site.tick(1.1)
    for done in (300, 600, 900):
        site.tick(10.0)
        for device, asked in site.prepares().items():
            version = Plan.from_dict(asked.plan).version
            progress = messages.PrepareProgress(asked.transaction_id, "m", version, done * 10**6, 1300 * 10**6)
            site.event(interface.DeviceMessage(device, progress))
    shown = [c.loading for c in site.seen if isinstance(c, interface.PublishPlan)]
    assert all(text in shown[-1] for text in (" of 1.3 GB on ", "2 devices", " s left"))
    assert (site.notes()["loading"], site.notes()["loaded"]) == (1, 0)
    site.ready()
    assert site.plan is not None
    assert (site.notes()["loading"], site.notes()["loaded"]) == (1, 1)
