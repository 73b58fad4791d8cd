"""The coordinator on a virtual clock: scripted devices join, load, answer, fail and leave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sites import FAMILIES, request, tensors
from swarm import Swarm

from hepti_mqtt.errors import DeadlineError, HeptiError, OverloadedError, PlanError, RemoteError
from hepti_mqtt.plan import Plan
from hepti_mqtt.planner import Candidate, Decision, Question, decide, price
from hepti_mqtt.runtime import coordination as co
from hepti_mqtt.runtime import worker
from hepti_mqtt.runtime.commands import Publish
from hepti_mqtt.runtime.coordinator import REFUSALS, RETRY_S, CoordinatorSession
from hepti_mqtt.runtime.dispatcher import ATTEMPTS, OVERDUE_S, QUEUE
from hepti_mqtt.runtime.flight import Chunk, Job, Pins, RequestKey
from hepti_mqtt.spec import ModelSpec, RequestShape, TaskHead, TextStem
from hepti_mqtt.strategies import STRATEGIES, make_plan
from hepti_mqtt.wire import messages
from hepti_mqtt.wire.frames import Frame, decode, decode_work
from hepti_mqtt.wire.messages import Caps, Heartbeat, Status

SPEC = ModelSpec(
    family="bert",
    architecture="BertModel",
    layers=2,
    hidden=32,
    heads=4,
    mlp=64,
    norm_first=False,
    activation="gelu",
    norm_eps=1e-12,
    max_tokens=64,
    head=TaskHead("embedding", "mean"),
    text=TextStem(vocab=100, positions=64, types=2),
)
CURVES = {
    "linear": [{"k": 32, "n": 32, "points": [[1, 1e-5], [32, 1e-4]]}],
    "attention_flops_per_s": 1e9,
    "rowwise_bytes_per_s": 1e9,
    "op_overhead_s": 1e-5,
    "frame_s": 1e-4,
    "copy_bytes_per_s": 1e9,
}
MANIFEST = bytes(32)
ROW = Pins(strategy="row", options={"variant": "kv"}, devices=("a", "b"))
LOST_S = 7.0  # more than the heartbeats that may be missed


def caps(device: str, boot: int, memory: int = 1 << 30) -> Caps:
    return Caps(device, boot, 1, 1, memory, 0, "plain", "0", CURVES, 0, 4)


def heartbeat(boot: int, slowdown: float = 1.0) -> Heartbeat:
    return Heartbeat(boot, 0, 0.0, 1 << 30, None, 1e-3, 1e8, slowdown, 0)


def everyone(question: Question) -> Decision:
    """Decide at once: the pinned strategy (else `row`) on the pinned devices (else all)."""
    devices = question.devices or tuple(sorted(question.cluster.devices))
    missing = set(devices) - set(question.cluster.devices)
    if missing or not devices:
        raise PlanError(f"devices {', '.join(sorted(missing)) or 'none'} are not online")
    strategy = question.strategy or "row"
    template = Plan(question.naming.model, question.epoch, strategy, devices, devices[0], wire=question.wire)
    options = question.options or STRATEGIES[strategy].options[0]
    plan = make_plan(question.spec, template, strategy, options, (1.0,) * len(devices))
    candidate = Candidate(plan, replace(price(question, plan), seconds=0.0), (1.0,) * len(devices))
    return Decision(candidate, (candidate,), "", question.cluster)


class Site:
    """A coordinator with scripted devices; `searches` = False leaves Solve commands to the test."""

    def __init__(
        self,
        *names: str,
        in_flight: int = 2,
        pins: Pins | None = None,
        searches: bool = True,
        decider: Callable[[Question], Decision] = decide,
    ) -> None:
        served = tuple(co.Served(n, SPEC, MANIFEST, 16, pins or Pins()) for n in names or ("m",))
        self.session = CoordinatorSession("home", 7, served, in_flight)
        self.now = 0.0
        self.searches, self.decider = searches, decider
        self.boots: dict[str, int] = {}
        self.seen: list[co.CoordinatorCommand] = []
        self.told: list[tuple[str, messages.Message]] = []
        self.work: dict[int, Frame] = {}
        self.answers: dict[str, co.Answer] = {}
        self.errors: dict[str, HeptiError] = {}
        self.solves: list[co.Solve] = []

    def event(self, event: co.CoordinatorEvent) -> list[co.CoordinatorCommand]:
        out = self.session.handle(event, self.now)
        self.session.check()
        for command in out:
            self._note(command)
        self.seen += out
        for command in out:
            if isinstance(command, co.Solve) and self.searches:
                self.solve(command)
        return out

    def _note(self, command: co.CoordinatorCommand) -> None:
        if isinstance(command, Publish) and "/work/" in command.topic:
            frame = decode(command.payload)
            decode_work(frame)
            self.work[frame.admission] = frame
        elif isinstance(command, Publish):
            self.told.append((command.topic.split("/")[-2], messages.decode(command.payload)))
        elif isinstance(command, co.Solve):
            self.solves.append(command)
        elif isinstance(command, co.Answer | co.Refuse):
            name = command.job.key.request
            assert name not in self.answers, f"{name} ended twice"
            assert name not in self.errors, f"{name} ended twice"
            if isinstance(command, co.Answer):
                self.answers[name] = command
            else:
                self.errors[name] = command.error

    def solve(self, command: co.Solve) -> None:
        try:
            decision = self.decider(command.question)
        except HeptiError as error:
            self.event(co.Solved(command.model, command.ticket, None, None, error))
            return
        running = command.running and price(command.question, command.running, full=True).seconds
        self.event(co.Solved(command.model, command.ticket, decision, running))

    def join(self, *devices: str, boot: int = 1, memory: int = 1 << 30) -> None:
        for device in devices:
            self.boots[device] = boot
            self.event(co.DeviceCaps(device, caps(device, boot, memory)))
            self.event(co.DeviceStatus(device, Status("online", boot)))

    def leave(self, device: str) -> None:
        boot = self.boots.pop(device)
        self.event(co.DeviceStatus(device, Status("offline", boot)))

    def tick(self, seconds: float, alive: bool = True) -> None:
        self.now += seconds
        for device, boot in self.boots.items() if alive else ():
            self.event(co.DeviceHeartbeat(device, heartbeat(boot)))
        self.event(co.Tick())

    def drift(self, slowdowns: Mapping[str, float], seconds: int) -> None:
        """Let time pass in which some devices are slow."""
        for _ in range(seconds):
            self.now += 1
            for device, boot in self.boots.items():
                self.event(co.DeviceHeartbeat(device, heartbeat(boot, slowdowns.get(device, 1.0))))
            self.event(co.Tick())

    def prepares(self) -> dict[str, messages.Prepare]:
        """Return the last Prepare of every device."""
        return {d: m for d, m in self.told if isinstance(m, messages.Prepare)}

    def ready(self, *devices: str) -> None:
        for device, message in self.prepares().items():
            if device in devices or not devices:
                plan = Plan.from_dict(message.plan)
                self.event(co.UpMessage(device, messages.Ready(message.txn, plan.model, plan.epoch, 1000)))

    def settle(self) -> Plan:
        """Let the search and the preparation after joins go through; return the active plan."""
        self.tick(1.1)
        self.ready()
        plan = self.session.plan("m")
        assert plan is not None
        return plan

    def submit(self, name: str, *lengths: int, model: str = "m", pins: Pins | None = None, within: float = 60.0) -> Job:
        chunks = tuple(Chunk(RequestShape((n,)), np.zeros(n, np.int32)) for n in lengths or (8,))
        job = Job(RequestKey(model, "c", name), chunks, None, self.now + within, pins)
        self.event(co.Submit(job))
        return job

    def answer(self, admission: int) -> None:
        """Let every device of a run report, the head with an output that names the run's length."""
        frame = self.work[admission]
        shape, _ = decode_work(frame)
        plans = [p for p in self.plans(frame.model) if p.epoch == frame.epoch]
        output = np.full((len(shape.lengths), SPEC.hidden), shape.tokens, np.float32)
        out = replace(frame, kind="output", source=plans[0].head, dtype="f32", shape=output.shape, body=output)
        self.event(co.UpFrame(plans[0].head, out))
        for device in plans[0].devices:
            done = replace(
                frame, kind="done", source=device, dtype="u8", shape=(0,), numbers=(2000, 500, 100), body=b""
            )
            self.event(co.UpFrame(device, done))

    def plans(self, model: str) -> list[Plan]:
        plans = [c.plan for c in self.seen if isinstance(c, co.Answer)]
        plans += [p for c in self.seen if isinstance(c, co.ShowPlan) and c.model == model for p in (c.active,) if p]
        return plans

    def notes(self) -> Counter[str]:
        return Counter(c.kind for c in self.seen if isinstance(c, co.Note))


def test_devices_that_join_together_get_one_plan() -> None:
    site = Site()
    site.join("a", "b")
    assert not site.solves, "it waits for others that come up at the same time"
    site.tick(1.1)
    assert len(site.solves) == 1
    assert set(site.solves[0].question.cluster.devices) == {"a", "b"}
    plan = site.prepares().popitem()[1].plan
    assert site.session.plan("m") is None, "a plan is active only when every device is ready"
    site.ready()
    active = site.session.plan("m")
    assert active is not None
    assert active.to_dict() == plan


def test_answer_carries_output_plan_and_counters() -> None:
    site = Site()
    site.join("a")
    plan = site.settle()
    site.submit("r1", 8)
    site.answer(1)
    answer = site.answers["r1"]
    assert answer.plan == plan
    assert answer.job.output().tolist() == [[8.0] * SPEC.hidden]
    (stats,) = answer.stats
    assert (stats.compute_us, stats.wait_us, stats.sent_bytes) == ({"a": 2000}, {"a": 500}, {"a": 100})
    assert stats.dispatch_bytes > len(site.work[1].body)


def test_requests_before_the_first_plan_wait_for_it() -> None:
    site = Site()
    site.join("a")
    site.submit("r1")
    assert not site.work
    site.settle()
    assert list(site.work) == [1]


def test_chunks_are_answered_together_in_order_whatever_the_order_of_arrival() -> None:
    site = Site(in_flight=3)
    site.join("a")
    site.settle()
    site.submit("r1", 3, 5, 7)
    for admission in (3, 1, 2):
        assert not site.answers
        site.answer(admission)
    assert site.answers["r1"].job.output()[:, 0].tolist() == [3, 5, 7]


def test_no_more_runs_at_once_than_devices_have_room_for() -> None:
    site = Site(in_flight=2)
    site.join("a")
    site.settle()
    for name in ("r1", "r2", "r3"):
        site.submit(name)
    assert list(site.work) == [1, 2]
    site.answer(1)
    assert list(site.work) == [1, 2, 3]


def test_a_site_without_devices_says_so() -> None:
    site = Site()
    site.submit("r1")
    site.tick(0.0)
    site.tick(1.1)
    assert isinstance(site.errors["r1"], PlanError)
    assert "no device is online" in str(site.errors["r1"])
    site.submit("r2")
    assert isinstance(site.errors["r2"], PlanError), "the next one is refused at once"
    site.join("a")
    site.submit("r3")
    site.settle()
    site.answer(1)
    assert "r3" in site.answers


def test_lost_device_in_flight_is_issued_again_once_under_a_new_plan() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    first = site.settle()
    assert set(first.devices) == {"a", "b"}
    site.submit("r1")
    site.leave("b")
    assert ("a", messages.Cancel("m", first.epoch, 1)) in site.told
    site.ready()
    assert list(site.work) == [1, 2]
    assert site.work[2].epoch > first.epoch
    site.answer(2)
    site.answer(1)  # what the survivors of the first run still send comes late
    assert site.answers["r1"].plan.devices == ("a",)
    assert site.session.counters["late"] > 0


def test_silent_device_counts_as_lost_and_comes_back_with_a_heartbeat() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    site.settle()
    site.submit("r1")
    del site.boots["b"]
    site.tick(LOST_S)
    site.ready()
    site.answer(2)
    assert site.answers["r1"].plan.devices == ("a",)
    site.boots["b"] = 1
    site.tick(0.1)
    assert site.notes()["joined"] == 3
    site.settle()
    assert set(site.session.plan("m").devices) == {"a", "b"}


def test_silence_while_the_planner_is_offline_condemns_nobody() -> None:
    site = Site()
    site.join("a")
    plan = site.settle()
    site.submit("r1")
    site.event(co.Connection(online=False))
    site.tick(100, alive=False)
    site.event(co.Connection(online=True))
    site.tick(3, alive=False)
    assert site.session.plan("m") == plan
    assert "r1" in site.errors, "but deadlines hold"
    site.tick(LOST_S, alive=False)
    assert site.session.plan("m") is None


def test_device_that_rejoins_drops_what_it_holds() -> None:
    site = Site()
    site.join("a")
    site.settle()
    site.told.clear()
    site.leave("a")
    site.join("a")
    kinds = [type(m) for d, m in site.told if d == "a"]
    assert messages.Drain in kinds
    assert messages.Prepare not in kinds[: kinds.index(messages.Drain)]


def test_restarted_agent_replaces_its_former_self_and_a_late_will_changes_nothing() -> None:
    site = Site()
    site.join("a", boot=1)
    site.settle()
    site.submit("r1")
    site.join("a", boot=2)
    site.event(co.DeviceStatus("a", Status("offline", 1)))
    site.settle()
    site.answer(max(site.work))
    assert "r1" in site.answers


def test_device_that_leaves_during_the_search_is_not_planned_with() -> None:
    site = Site(searches=False, decider=everyone)
    site.join("a", "b")
    site.tick(1.1)
    first = site.solves[0]
    site.leave("b")
    site.solve(first)
    assert not site.prepares()
    site.solve(site.solves[-1])
    assert set(site.prepares()) == {"a"}


def test_device_that_leaves_during_preparation_ends_it() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    site.tick(1.1)
    txn = site.prepares()["a"].txn
    site.leave("b")
    assert any(isinstance(m, messages.Release) for d, m in site.told if d == "a")
    assert site.prepares()["a"].txn > txn
    site.ready()
    assert site.session.plan("m").devices == ("a",)


def test_memory_refusal_swaps_plans_when_old_and_new_do_not_fit_together() -> None:
    site = Site(decider=everyone)
    site.join("a")
    old = site.settle()
    site.submit("r1")
    site.join("b")
    site.tick(1.1)
    refused = site.prepares()["a"]
    epoch = Plan.from_dict(refused.plan).epoch
    site.event(co.UpMessage("a", messages.Failed(refused.txn, "m", epoch, "memory", "too much", 1000)))
    assert site.prepares()["a"] == refused, "the run under the old plan comes first"
    site.answer(1)
    assert ("a", "m", old.epoch) in [(d, m.model, m.epoch) for d, m in site.told if isinstance(m, messages.Release)]
    assert site.prepares()["a"].txn > refused.txn
    site.ready()
    assert set(site.session.plan("m").devices) == {"a", "b"}
    assert "r1" in site.answers


def test_memory_refusal_without_another_plan_makes_the_next_question_tighter() -> None:
    site = Site()
    site.join("a", memory=1 << 24)
    site.tick(1.1)
    refused = site.prepares()["a"]
    epoch = Plan.from_dict(refused.plan).epoch
    site.event(co.UpMessage("a", messages.Failed(refused.txn, "m", epoch, "memory", "too much", 5 << 20)))
    site.tick(1.1)
    assert site.solves[-1].question.cluster.devices["a"].memory_bytes == (1 << 24) - (5 << 20)


def test_preparation_that_keeps_failing_ends_the_requests_that_wait() -> None:
    site = Site()
    site.join("a")
    site.submit("r1", within=1000)
    for _ in range(REFUSALS):
        site.tick(1.1)
        message = site.prepares()["a"]
        epoch = Plan.from_dict(message.plan).epoch
        site.event(co.UpMessage("a", messages.Failed(message.txn, "m", epoch, "wire", "corrupt tile", 0)))
    assert isinstance(site.errors["r1"], RemoteError)
    assert "corrupt tile" in str(site.errors["r1"])
    site.tick(RETRY_S + 0.1)
    site.ready()
    assert site.session.plan("m") is not None, "it tries again after a while"


def test_prepare_that_was_lost_is_sent_again_to_those_who_are_not_ready() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    site.tick(1.1)
    first = site.prepares()
    site.ready("a")
    site.told.clear()
    site.tick(3)
    assert not site.prepares()
    site.tick(3)
    assert site.prepares() == {"b": first["b"]}
    site.ready("b")
    assert site.session.plan("m") is not None


def test_preparation_without_progress_is_given_up() -> None:
    site = Site()
    site.join("a")
    site.tick(1.1)
    first = site.prepares()["a"]
    epoch = Plan.from_dict(first.plan).epoch
    for _ in range(30):
        site.tick(5)
    assert site.prepares()["a"].txn > first.txn
    second = site.prepares()["a"]
    for _ in range(30):
        site.tick(5)
        plan = Plan.from_dict(second.plan)
        site.event(co.UpMessage("a", messages.Progress(second.txn, "m", plan.epoch, 1, 2)))
    assert site.prepares()["a"] == second, "progress keeps it alive"
    site.event(co.UpMessage("a", messages.Ready(first.txn, "m", epoch, 0)))
    assert site.session.plan("m") is None, "a Ready of the one given up activates nothing"


def test_progress_of_weights_is_shown_at_most_once_a_second() -> None:
    site = Site()
    site.join("a")
    site.tick(1.1)
    prepare = site.prepares()["a"]
    epoch = Plan.from_dict(prepare.plan).epoch
    shown = []
    for part in range(10):
        out = site.event(co.UpMessage("a", messages.Progress(prepare.txn, "m", epoch, part, 10)))
        shown += [c.progress for c in out if isinstance(c, co.ShowPlan)]
        site.now += 0.25
    assert shown == [{"a": (0, 10)}, {"a": (4, 10)}, {"a": (8, 10)}]
    site.ready()
    last = [c for c in site.seen if isinstance(c, co.ShowPlan)][-1]
    assert (last.preparing, last.progress) == (None, {})


@pytest.mark.parametrize(
    ("limits", "smallest"),
    [((0, 50_000, 60_000, 4 << 20), 50_000), ((0, 4 << 20, 256 << 20), None)],
    ids=["met", "what passed on trial is no limit"],
)
def test_search_knows_the_smallest_packet_limit_that_a_device_met(
    limits: tuple[int, ...], smallest: int | None
) -> None:
    site = Site()
    for name, limit in zip("abcd", limits, strict=False):
        site.boots[name] = 1
        site.event(co.DeviceCaps(name, replace(caps(name, 1), largest_packet_bytes=limit)))
        site.event(co.DeviceStatus(name, Status("online", 1)))
    site.tick(1.1)
    assert site.solves[-1].question.packet_bytes == smallest


def test_overdue_run_is_issued_again_and_fails_after_several_attempts() -> None:
    site = Site()
    site.join("a")
    site.settle()
    site.submit("r1", within=1e6)
    for _ in range(ATTEMPTS):
        for _ in range(4):
            site.tick(2)
        site.ready()
    assert isinstance(site.errors["r1"], RemoteError)
    assert len(site.work) == ATTEMPTS


def test_plan_under_which_a_run_is_overdue_is_prepared_anew() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    first = site.settle()
    site.submit("r1", within=1e6)
    site.submit("r2", within=1e6)
    site.answer(2)
    site.told.clear()
    for _ in range(4):
        site.tick(2)
    assert set(site.prepares()) == {"a", "b"}
    assert not any(isinstance(m, messages.Release) for _, m in site.told), "the weights stay while they are needed"
    assert list(site.work) == [1, 2], "nothing more goes to a plan that lost a run"
    site.ready()
    second = site.session.plan("m")
    assert second.epoch > first.epoch
    assert ("a", first.epoch) in [(d, m.epoch) for d, m in site.told if isinstance(m, messages.Release)]
    site.answer(3)
    assert set(site.answers) == {"r1", "r2"}


def test_deadline_ends_waiting_and_running_requests() -> None:
    site = Site(in_flight=1)
    site.join("a")
    plan = site.settle()
    site.submit("r1", within=1.0)
    site.submit("r2", within=1.0)
    site.submit("r3", within=100.0)
    site.tick(1.1)
    assert isinstance(site.errors["r1"], DeadlineError)
    assert isinstance(site.errors["r2"], DeadlineError)
    assert ("a", messages.Cancel("m", plan.epoch, 1)) in site.told
    site.answer(2)
    assert "r3" in site.answers


def test_full_queue_refuses() -> None:
    site = Site(in_flight=1)
    site.join("a")
    site.settle()
    for i in range(QUEUE + 2):
        site.submit(f"r{i}")
    assert [n for n, e in site.errors.items() if isinstance(e, OverloadedError)] == [f"r{QUEUE + 1}"]
    for admission in range(1, QUEUE + 2):
        site.answer(admission)
    assert len(site.answers) == QUEUE + 1


def test_repeated_request_on_its_way_runs_once() -> None:
    site = Site(in_flight=1)
    site.join("a")
    site.settle()
    site.submit("r1")
    site.submit("r2")
    site.submit("r1")
    site.submit("r2")
    for admission in list(site.work):
        site.answer(admission)
    site.answer(2)
    assert set(site.answers) == {"r1", "r2"}
    assert len(site.work) == 2


def test_request_that_a_device_cannot_compute_fails_with_its_words() -> None:
    site = Site()
    site.join("a")
    plan = site.settle()
    site.submit("r1")
    site.event(co.UpMessage("a", messages.RequestFailed("m", plan.epoch, 1, "device", "a: linear failed: nan")))
    assert "linear failed" in str(site.errors["r1"])


def test_request_whose_frames_were_bad_is_issued_again() -> None:
    site = Site()
    site.join("a")
    plan = site.settle()
    site.submit("r1")
    site.event(co.UpMessage("a", messages.RequestFailed("m", plan.epoch, 1, "wire", "shape")))
    assert list(site.work) == [1, 2]


def test_drift_plans_again_and_keeps_a_plan_that_is_no_worse() -> None:
    site = Site()
    site.join("a", "b")
    plan = site.settle()
    site.submit("r1")
    site.answer(1)
    solves = len(site.solves)
    site.drift({plan.devices[0]: 8.0}, 40)
    assert len(site.solves) > solves
    assert site.notes()["drift"] >= 1
    site.ready()
    assert site.session.plan("m").devices != plan.devices, "another device is faster now"


def test_a_model_that_nobody_asks_is_not_planned_again_for_drift() -> None:
    site = Site()
    site.join("a", "b")
    plan = site.settle()
    solves = len(site.solves)
    site.drift({plan.devices[0]: 8.0}, 40)
    assert len(site.solves) == solves
    site.submit("r1")
    site.answer(1)
    site.drift({plan.devices[0]: 8.0}, 7)
    assert len(site.solves) == solves + 1


def test_what_is_observed_while_weights_are_loaded_starts_no_search() -> None:
    site = Site("m", "other")
    site.join("a", "b")
    site.tick(1.1)
    for device, message in [told for told in site.told if isinstance(told[1], messages.Prepare)]:
        plan = Plan.from_dict(message.plan)
        site.event(co.UpMessage(device, messages.Ready(message.txn, plan.model, plan.epoch, 1000)))
    site.submit("r1")
    site.answer(1)
    pinned = Pins(strategy="row", options={"variant": "kv"}, devices=("a", "b"))
    site.submit("r2", model="other", pins=pinned)
    site.drift(dict.fromkeys(site.boots, 8.0), 20)  # the other model's plan is on its way all the time
    assert not site.notes()["drift"]
    site.ready()
    site.drift(dict.fromkeys(site.boots, 1.0), 30)
    assert not site.notes()["drift"]


def test_drift_during_a_search_does_not_void_it() -> None:
    site = Site(searches=False, decider=everyone)
    site.join("a", "b")
    site.tick(1.1)
    site.solve(site.solves[-1])
    site.ready()
    site.submit("r1")
    site.answer(1)
    site.drift(dict.fromkeys(site.boots, 8.0), 40)
    assert len(site.solves) == 2, "one search at a time, however long it takes"
    ticket = site.solves[-1].ticket
    site.solve(site.solves[-1])
    assert site.session._models["m"].solving is None
    assert all(s.ticket == ticket for s in site.solves[1:])


def test_unreadable_caps_are_noted_and_the_device_stays_out() -> None:
    site = Site()
    bad = replace(caps("x", 1), curves={"linear": []})
    site.event(co.DeviceCaps("x", bad))
    site.event(co.DeviceStatus("x", Status("online", 1)))
    site.join("a")
    site.settle()
    assert site.notes()["refused"] == 1
    assert set(site.solves[-1].question.cluster.devices) == {"a"}


# -- pins ------------------------------------------------------------------------------------------------------------


def test_pinned_request_waits_for_its_plan_and_later_ones_share_it() -> None:
    site = Site()
    site.join("a", "b")
    first = site.settle()
    assert first.strategy == "single"
    site.submit("r1", pins=ROW)
    site.submit("r2", pins=ROW)
    assert not site.work
    site.ready()
    assert site.session.plan("m").strategy == "row"
    assert list(site.work) == [1, 2]
    site.answer(1)
    site.submit("r3")
    site.answer(2)
    site.answer(3)
    assert {a.plan.strategy for a in site.answers.values()} == {"row"}, "a pin stays until another comes"


def test_pins_take_turns_in_order() -> None:
    site = Site()
    site.join("a", "b")
    site.settle()
    wanted = {"r1": ROW, "r2": Pins("column"), "r3": ROW, "r4": Pins(devices=("b",))}
    for name, pin in wanted.items():
        site.submit(name, pins=pin)
    for admission in range(1, 5):
        site.ready()
        site.answer(admission)
    assert {n: a.plan.strategy for n, a in site.answers.items()} == {
        "r1": "row",
        "r2": "column",
        "r3": "row",
        "r4": "single",
    }
    assert site.answers["r4"].plan.devices == ("b",)


def test_pin_that_finds_no_plan_ends_its_requests_only() -> None:
    site = Site()
    site.join("a")
    plan = site.settle()
    site.submit("r1", pins=Pins(devices=("nobody",)))
    assert "nobody" in str(site.errors["r1"])
    site.submit("r2")
    site.answer(1)
    assert site.answers["r2"].plan == plan
    site.submit("r3", pins=Pins(devices=("nobody",)))
    assert isinstance(site.errors["r3"], PlanError), "the same pin is tried again, not waited for"


def test_pin_whose_device_leaves_gives_way_to_the_planners_own() -> None:
    site = Site()
    site.join("a", "b")
    site.settle()
    site.submit("r1", pins=Pins(devices=("b",)))
    site.ready()
    site.submit("r2")
    site.leave("b")
    site.ready()
    assert isinstance(site.errors["r1"], PlanError)
    site.answer(max(site.work))
    assert site.answers["r2"].plan.devices == ("a",)


def test_two_models_do_not_plan_with_the_same_memory() -> None:
    site = Site("m", "n")
    site.join("a")
    site.tick(1.1)
    first, second = site.solves
    need = next(iter(decide(first.question).chosen.price.needs.values()))
    room = (s.question.cluster.devices["a"].memory_bytes for s in (first, second))
    assert next(room) - next(room) == need


# -- any order of events ----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_request_ends_once_whatever_happens(data: st.DataObject) -> None:
    site = Site(decider=everyone)
    names = ("a", "b")
    pins = (None, ROW, Pins(devices=("b",)))
    boot = Counter[str]()
    submitted = 0
    for _ in range(data.draw(st.integers(5, 40))):
        what = data.draw(st.sampled_from(["join", "leave", "tick", "ready", "submit", "answer", "fail", "offline"]))
        name = data.draw(st.sampled_from(names))
        if what == "join":
            boot[name] += 1
            site.join(name, boot=boot[name])
        elif what == "leave" and name in site.boots:
            site.leave(name)
        elif what == "tick":
            site.tick(data.draw(st.sampled_from([0.1, 1.1, 5.0])))
        elif what == "ready":
            site.ready(name)
        elif what == "submit":
            submitted += 1
            lengths = data.draw(st.lists(st.integers(1, 64), min_size=1, max_size=3))
            site.submit(f"r{submitted}", *lengths, pins=data.draw(st.sampled_from(pins)), within=30)
        elif what == "answer" and site.work:
            site.answer(data.draw(st.sampled_from(sorted(site.work))))
        elif what == "fail" and name in site.prepares():
            message = site.prepares()[name]
            plan = Plan.from_dict(message.plan)
            code = data.draw(st.sampled_from(["memory", "wire"]))
            site.event(co.UpMessage(name, messages.Failed(message.txn, "m", plan.epoch, code, "no", 10)))
        elif what == "offline":
            site.event(co.Connection(online=data.draw(st.booleans())))
    for _ in range(8):
        site.tick(5)
    assert len(site.answers) + len(site.errors) == submitted
    for answer in site.answers.values():
        lengths = [c.shape.tokens for c in answer.job.chunks]
        assert answer.job.output()[:, 0].tolist() == lengths


def test_counters_and_foreign_frames_change_nothing() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    plan = site.settle()
    site.submit("r1")
    other = next(d for d in plan.devices if d != plan.head)
    output = np.zeros((1, SPEC.hidden), np.float32)
    stray = replace(site.work[1], kind="output", source=other, dtype="f32", shape=output.shape, body=output)
    site.event(co.UpFrame(other, stray))  # only the head may answer
    site.event(co.UpFrame("stranger", stray))
    assert site.session.counters["foreign_frame"] == 1
    assert site.session.counters["late"] == 1
    site.answer(1)
    assert site.answers["r1"].job.output()[0, 0] == 8


@pytest.mark.parametrize("shape", [(64,), (1,)])
def test_default_plan_length_is_bounded_by_the_model(shape: tuple[int]) -> None:
    site = Site()
    site.join("a")
    site.submit("r1", *shape)
    site.tick(1.1)
    assert site.solves[0].question.shape.tokens == shape[0]


# -- with real workers ------------------------------------------------------------------------------------------------


def test_a_new_planner_counts_its_requests_from_the_beginning() -> None:
    spec = FAMILIES["bert-embedding"]
    swarm = Swarm(spec, tensors(spec), {"d0": (1e9, 1 << 30)})
    shape, inputs = request(spec, (6,))
    swarm.submit("r", shape, inputs)
    swarm.run(10, until=lambda: "r" in swarm.answers)
    former = swarm.planner
    swarm.planner = CoordinatorSession("home", former.boot + 1, (co.Served("m", spec, MANIFEST, 16),))
    host = swarm.hosts["d0"]
    swarm._host_commands("d0", host, host.session.handle(worker.PlannerLost(former.boot + 1), swarm.now))
    member = former.membership.members["d0"]
    swarm.tell_planner(co.DeviceCaps("d0", member.caps))
    swarm.tell_planner(co.DeviceStatus("d0", Status("online", member.boot)))
    swarm.submit("s", shape, inputs)
    swarm.run(OVERDUE_S - 1, until=lambda: "s" in swarm.answers)
    np.testing.assert_array_equal(swarm.answers["s"][0][0], swarm.answers["r"][0][0])
