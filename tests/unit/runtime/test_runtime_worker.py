"""A device's session: plans studied, loaded, in doubt and given up; Programs built ahead or late; early frames."""

from __future__ import annotations

import copy
import random
import tracemalloc
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sites import EVERY_FAMILY, FAMILIES, plan, tensors

from hepti_mqtt import models
from hepti_mqtt.checkpoint import KINDS, spec_of_kind
from hepti_mqtt.cost.memory import KEPT_PROGRAMS, matrices, programs_bytes, weights_bytes
from hepti_mqtt.errors import PlanError, WireError
from hepti_mqtt.ids import PlanVersion
from hepti_mqtt.kernels import Workers
from hepti_mqtt.models import largest_shape, spec_from_config
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import device_program, resident_weights
from hepti_mqtt.program import WeightRef
from hepti_mqtt.protocol import frames, messages, plausible
from hepti_mqtt.protocol.frames import BUFFER_GRANULARITY, Frame
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.machinery import IllegalStepError, Publish, StateMachine
from hepti_mqtt.runtime.worker import residents, runs
from hepti_mqtt.runtime.worker.executor import bind, pack
from hepti_mqtt.runtime.worker.interface import (
    AnalysePrepare,
    BuildProgram,
    Command,
    FrameIn,
    Load,
    Loaded,
    LoadFailed,
    LogTrouble,
    MayHaveMissedCommands,
    MessageIn,
    PlannerLost,
    ProgramBuilt,
    Subscribe,
    Subscribed,
    Unload,
    Unsubscribe,
    WorkerEvent,
)
from hepti_mqtt.runtime.worker.programs import analyse, build
from hepti_mqtt.runtime.worker.residents import RESIDENT_STATES, analyse_prepare, check_prepare, shape_of
from hepti_mqtt.runtime.worker.runs import EARLY_S, EarlyFrames
from hepti_mqtt.runtime.worker.session import MAX_BEING_ANALYSED, WorkerSession
from hepti_mqtt.spec import PlainShape, Spec

SPEC = FAMILIES["bert-embedding"]
TENSORS = tensors(SPEC)
GPT2 = spec_of_kind("tiny-gpt2")
WIDE = spec_of_kind("minilm")
WORKERS = Workers(1)
SINGLE, HALVES = plan(SPEC, ("single", {}), (1.0,)), plan(SPEC, ("row", {"variant": "kv"}), (1.0, 1.0))
WORK = Topics("home").work("m", "d0")
ONE, TWO, OTHER = ("m", PlanVersion(1, 1)), ("m", PlanVersion(1, 2)), ("n", PlanVersion(1, 3))


def prepare(key: tuple[str, PlanVersion] = ONE, fixed: Plan = SINGLE, **more: object) -> messages.Prepare:
    chosen = replace(fixed, model=key[0], version=key[1])
    shapes = tuple(shape.plain() for shape in more.pop("shapes", ()))
    needed = more.pop("needed", len(shapes))
    spec = more.pop("spec", SPEC)
    return messages.Prepare(key[1].number, chosen.to_dict(), spec.to_dict(), bytes(32), 2, shapes, needed, **more)


WEIGHTS = pack(TENSORS, analyse_prepare(prepare(), "d0", Topics("home")).refs)


def shape(*lengths: int) -> TokenBatch:
    return TokenBatch(lengths)


class Device:
    """A session whose plans are studied at once; Programs are built at once too, or when the test says so."""

    def __init__(self, memory_bytes: int = 1 << 30, spec: Spec = SPEC, builds: bool = True) -> None:
        self.session = WorkerSession("d0", "home", memory_bytes)
        self.spec, self.builds = spec, builds
        self.taken: set[tuple[str, str, str]] = set()
        self.orders: list[BuildProgram] = []
        self.sent: list[messages.Message | frames.Frame] = []
        self.complaints: list[LogTrouble] = []
        self.now = 0.0
        self.admission = 0

    def __call__(self, event: WorkerEvent) -> list[Command]:
        """Return what the session wants because of an event, but for studies and Programs."""
        self.now += 1.0
        out = self.follow(self.session.handle(event, self.now))
        self.taken |= {(t.before, t.event, t.after) for t in self.session.plans.story.last()}
        return out

    def follow(self, commands: Iterable[Command]) -> list[Command]:
        self.session.check()
        out: list[Command] = []
        for command in commands:
            if isinstance(command, AnalysePrepare):
                out += self(analyse(command, "d0", self.session.topics))
            elif isinstance(command, BuildProgram):
                self.orders.append(command)
            else:
                out.append(command)
            if isinstance(command, Publish):
                self.sent.append(messages.decode_report(command.payload))
            elif isinstance(command, LogTrouble):
                self.complaints.append(command)
        while self.builds and self.orders:
            out += self(build(self.orders.pop(0), "d0", WORKERS))
        return out

    def tell(self, message: messages.Message) -> list[Command]:
        return self(MessageIn(message))

    def loaded(self, key: tuple[str, PlanVersion]) -> list[Command]:
        return self(Loaded(*key, WEIGHTS))

    def build(self, *, most: int = 100) -> list[TokenBatch]:
        """Carry out orders, and return their shapes."""
        built = []
        while self.orders and len(built) < most:
            built.append(self.orders[0].shape)
            self(build(self.orders.pop(0), "d0", WORKERS))
        return built

    def ask(self, wanted: TokenBatch, session: frames.DecoderSession | None = None, seed: int = 0, key=ONE) -> int:
        """Let a request come, and return its number."""
        self.admission += 1
        inputs = models.random_inputs(self.spec, wanted, np.random.default_rng(seed))
        payload = frames.encode_work(*key, self.admission, wanted, inputs, () if session is None else (session,))
        self.last = self(FrameIn(frames.decode(payload)))
        return self.admission

    def run(self) -> None:
        """Run ops, until nothing is ready."""
        while (step := self.session.next_step()) is not None:
            self.follow(self.session.finish_step(step, step.run(), 1e-6, self.now))

    def run_to_end(self, key: tuple[str, PlanVersion], wanted: TokenBatch) -> None:
        """Let a request come, and compute it."""
        number = self.ask(wanted, key=key)
        self.run()
        assert self.done()[-1:] == [number]
        assert {frame.plan_version for frame in self.said(frames.Frame) if frame.run_id == number} == {key[1]}

    def said(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]

    def done(self) -> list[int]:
        return [frame.run_id for frame in self.said(frames.Frame) if frame.kind == "done"]

    def ready(self) -> bool:
        return bool(self.said(messages.Ready))

    def count(self, when: str) -> int:
        return self.session.counters[f"programs_built_{when}"]

    def reach(self, key: tuple[str, PlanVersion], state: str) -> None:
        """Bring a new epoch into a state."""
        self.tell(prepare(key))
        if state in {"loading", "ready", "active"}:
            self(Subscribed(*key))
        if state in {"subscribing", "ready", "active"}:
            self.loaded(key)
        if state == "active":
            self.tell(messages.Activate(1, *key))
        if state == "doubted":
            self(MayHaveMissedCommands("test"))
        here = {"asked": "subscribing", "loading": "ready"}  # where one like it has ended before
        assert self.state(key) in {state, here.get(state)}

    def state(self, key: tuple[str, PlanVersion]) -> str | None:
        resident = self.session.plans.get(*key)
        return None if resident is None else resident.state


def ups(out: list[Command]) -> list[messages.Message]:
    return [messages.decode(c.payload) for c in out if isinstance(c, Publish)]


def prepared(*shapes: TokenBatch, needed: int | None = None, spec: Spec = SPEC) -> Device:
    """Return a device whose plan for it alone is loaded, and that builds Programs when it is told to."""
    device = Device(spec=spec, builds=False)
    chosen = plan(spec, ("single", {}), (1.0,))
    count = len(shapes) if needed is None else needed
    device.tell(prepare(ONE, chosen, shapes=shapes, needed=count, spec=spec))
    device(Subscribed(*ONE))
    device(Loaded(*ONE, pack(tensors(spec), resident_weights(spec, chosen, "d0"))))
    return device


# -- epochs in their table --------------------------------------------------------------------------------------------

ENDS = {
    "release": MessageIn(messages.Release(9, *ONE)),
    "drain": MessageIn(messages.ReleaseAll(9)),
    "failed": LoadFailed(*ONE, PlanError("no")),
    "planner lost": PlannerLost(2),
}
HERE = [s for s in RESIDENT_STATES.states if s != "released"]
ACTS = ("prepare", "reach", "reach", "reach", "loaded", "subscribed", "activate", "activate", "request", "doubt")
ACTS += ("release", "failed", "drain", "planner lost", "memory")


def walk(seed: int) -> set[tuple[str, str, str]]:
    """Let anything come in any order, acknowledgements once per life of an epoch; return the steps that were taken."""
    rng = random.Random(seed)
    device, acknowledged = Device(), set()
    for _ in range(rng.randrange(40)):
        what, key = rng.choice(ACTS), rng.choice((ONE, TWO, OTHER))
        if what in {"prepare", "reach", "memory"} and key not in device.session.plans:
            acknowledged.discard(key)
            if what == "reach":
                device.reach(key, state := rng.choice(HERE))
                acknowledged |= {key} if state in {"loading", "ready", "active"} else set()
            if what == "memory":
                device.session.memory_bytes = max(device.session.plans.needed_bytes(), 1)
            device.tell(prepare(key))
            device.session.memory_bytes = 1 << 30
        elif what == "loaded":
            device.loaded(key)
        elif what == "subscribed" and key not in acknowledged:
            acknowledged.add(key)
            device(Subscribed(*key))
        elif what == "request":
            device.ask(shape(3), key=key)
        elif what == "failed":
            device(LoadFailed(*key, PlanError("no")))
        elif what == "doubt":
            device(MayHaveMissedCommands("test"))
            assert device.session.plans.unconfirmed() == sorted(device.session.plans)
        elif what in {"activate", "release", "drain"}:
            kinds = {"activate": messages.Activate, "release": messages.Release}
            device.tell(kinds[what](1, *key) if what in kinds else messages.ReleaseAll(9))
        elif what == "planner lost" and rng.random() < 0.3:
            device(PlannerLost(2))
    return device.taken


def test_no_order_of_events_leads_to_an_illegal_step_and_every_step_of_the_table_is_taken_by_some() -> None:
    """An illegal step raises here (`Machine.strict`)."""
    taken = set().union(*map(walk, range(200)))
    steps = {(s, e, after) for s, by_event in RESIDENT_STATES.steps.items() for e, after in by_event.items()}
    assert steps - taken == set()
    assert taken - steps == {("-", "prepare", "asked")}


@pytest.mark.parametrize("state", HERE)
@pytest.mark.parametrize("event", ENDS)
def test_an_epoch_that_ends_is_unloaded_whatever_its_state(state: str, event: str) -> None:
    device = Device()
    device.reach(ONE, state)
    out = device(ENDS[event])
    there = state in {"subscribing", "ready", "active"}
    kept = frozenset((bytes(32), ref) for ref in matrices(WEIGHTS).values()) if there else frozenset()
    assert [c for c in out if isinstance(c, Unload)] == [Unload(*ONE, kept)]
    assert [c.work_topics for c in out if isinstance(c, Unsubscribe)] == [(WORK,)]
    assert len(device.session.plans) == 0
    assert ONE not in device.session.plans


def test_a_model_is_left_with_its_last_epoch() -> None:
    device = Device()
    device.reach(ONE, "ready")
    device.reach(TWO, "ready")
    assert not [c for c in device.tell(messages.Release(9, *ONE)) if isinstance(c, Unsubscribe)]
    (left,) = (c for c in device.tell(messages.Release(9, *TWO)) if isinstance(c, Unsubscribe))
    assert left.work_topics == (WORK,)


def test_what_runs_have_left_is_kept_for_the_next_one_and_goes_with_the_epoch() -> None:
    device = Device()
    device.reach(ONE, "active")
    device.ask(shape(3))
    device.run()
    assert device.session.runs.idle
    held = device.session.runs._executor.cached_bytes
    assert held() > 0
    device.tell(messages.Release(9, *ONE))
    assert held() == 0


@pytest.mark.parametrize("state", ["asked", "loading", "subscribing"])
def test_no_request_runs_before_its_epoch_is_ready(state: str) -> None:
    device = Device()
    device.reach(ONE, state)
    device.ask(shape(3))
    assert device.last == []
    device.tell(messages.Activate(1, *ONE))
    assert device.session.counters["dead_epoch"] == 1
    assert device.state(ONE) == state


def test_a_load_that_was_given_up_and_ends_after_all_does_no_harm() -> None:
    device = Device()
    device.reach(ONE, "asked")
    device.tell(messages.Release(9, *ONE))
    device.reach(ONE, "asked")
    for _ in range(2):
        device.loaded(ONE)
        assert device.state(ONE) == "subscribing"
    assert [type(m) for m in ups(device(Subscribed(*ONE)))] == [messages.Ready]


@pytest.mark.parametrize("why", ["memory", "outlived"])
def test_an_epoch_in_doubt_goes_when_its_memory_is_needed_or_a_newer_one_is_activated_and_the_planner_hears_it(
    why: str,
) -> None:
    device = Device()
    device.reach(ONE, "active")
    if why == "memory":
        device.session.memory_bytes = device.session.plans.needed_bytes()
    device(MayHaveMissedCommands("the control connection was lost"))
    if why == "outlived":
        device.reach(TWO, "ready")
    assert device.state(ONE) == "doubted"
    out = device.tell(prepare(OTHER) if why == "memory" else messages.Activate(2, *TWO))
    assert [type(c) for c in out[:4]] == [LogTrouble, Publish, Unload, Unsubscribe][: 3 if why == "outlived" else 4]
    assert [(m.model, m.plan_version, m.code) for m in ups(out)][:1] == [(*ONE, "forgotten")]
    assert [(c.model, c.plan_version) for c in out if isinstance(c, Load)] == ([OTHER] if why == "memory" else [])
    assert list(device.session.plans) == [OTHER if why == "memory" else TWO]
    assert not ups(device.tell(messages.Release(9, *TWO))), "not of one that it was told to give up"


@pytest.mark.parametrize("proof", ["request", "activate"])
def test_what_the_planner_goes_on_with_is_in_doubt_no_more(proof: str) -> None:
    device = Device()
    device.reach(ONE, "ready")
    device.session.memory_bytes = device.session.plans.needed_bytes()
    device(MayHaveMissedCommands("the control connection was lost"))
    device.ask(shape(3)) if proof == "request" else device.tell(messages.Activate(1, *ONE))
    (failed,) = ups(device.tell(prepare(OTHER)))
    assert failed.code == "memory"
    assert list(device.session.plans) == [ONE]


def test_a_plan_that_was_refused_for_want_of_memory_fits_once_what_was_loading_is_released() -> None:
    device = Device()
    device.reach(ONE, "loading")
    device.session.memory_bytes = device.session.plans.needed_bytes()
    (failed,) = ups(device.tell(prepare(OTHER)))
    assert isinstance(failed, messages.PrepareFailed)
    assert failed.code == "memory"
    device.tell(messages.Release(2, *ONE))
    again = device.tell(prepare(OTHER))
    assert [(c.model, c.plan_version) for c in again if isinstance(c, Load)] == [OTHER]
    assert device.loaded(ONE) == [], "what was under way for the other one changes nothing"
    device.loaded(OTHER)
    (ready,) = ups(device(Subscribed(*OTHER)))
    assert isinstance(ready, messages.Ready)
    assert ready.plan_version == OTHER[1]


def test_an_epoch_in_doubt_still_gets_ready() -> None:
    device = Device()
    device.reach(ONE, "doubted")
    assert [type(m) for m in ups(device.loaded(ONE))] == [messages.PrepareProgress], "it gets further"
    (ready,) = ups(device(Subscribed(*ONE)))
    assert isinstance(ready, messages.Ready)
    assert device.state(ONE) == "doubted"


def test_an_illegal_step_fails_a_test_and_in_service_its_epoch_is_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    device.reach(ONE, "ready")
    with pytest.raises(IllegalStepError):
        device(Subscribed(*ONE))
    monkeypatch.setattr(StateMachine, "strict", False)
    device = Device()
    device.reach(ONE, "ready")
    device.ask(shape(3))
    out = device(Subscribed(*ONE))
    assert [type(c) for c in out] == [Unload, Unsubscribe, LogTrouble], "it does not say that it is ready"
    assert device.session.counters["illegal_step"] == 1
    assert len(device.session.plans) == 0
    assert device.session.next_step() is None, "its requests went with it"
    device.reach(ONE, "ready")  # the planner asks again


# -- plans that are studied -------------------------------------------------------------------------------------------


def asked(message: messages.Prepare, memory: int = 1 << 30) -> tuple[WorkerSession, AnalysePrepare]:
    """Return a session that was asked to prepare a plan, and what is to be studied."""
    device = WorkerSession("d0", "home", memory)
    (order,) = device.handle(MessageIn(message), 0.0)
    return device, order


def studied(device: WorkerSession, order: AnalysePrepare) -> list[Command]:
    return device.handle(analyse(order, device.device, device.topics), 0.0)


def answer(message: messages.Prepare, memory: int = 1 << 30) -> list[Command]:
    return studied(*asked(message, memory))


def of(kind: type, out: list[Command]) -> Any:
    return next(command for command in out if isinstance(command, kind))


def test_subscribes_to_the_peers_that_its_programs_hear_and_no_others() -> None:
    four = plan(SPEC, ("row", {"variant": "kv"}), (1.0, 0.0, 1.0, 1.0))
    filters = of(Subscribe, answer(prepare(fixed=four))).filters
    assert {f.split("/")[-2] for f in filters} == {"d2", "d3"}
    assert {f.split("/")[-1] for f in filters} == {"d0", "all"}
    assert of(Subscribe, answer(prepare())).filters == ()


def test_asks_for_exactly_the_weights_of_the_plan_that_was_asked_for_last() -> None:
    device, order = asked(prepare())
    right = plan(SPEC, ("block", {}), (1.0, 3.0))
    device.handle(MessageIn(prepare(fixed=right)), 0.0)
    (again,) = studied(device, order)
    assert tuple(of(Load, studied(device, again)).matrices) == resident_weights(SPEC, right, "d0")


def places(load: Load) -> set[tuple[bytes, WeightRef]]:
    return {(load.manifest, matrix) for matrix in load.matrices.values()}


@pytest.mark.parametrize("variant", ["kv", "heads", "mlp"])
def test_rows_and_heads_that_move_bring_no_weight_and_no_filter(variant: str) -> None:
    device = Device(spec=WIDE)
    first, second = (plan(WIDE, ("row", {"variant": variant}), shares) for shares in ((1.0, 1.0), (2.0, 1.0)))
    here = device.tell(prepare(ONE, first, spec=WIDE))
    device(Loaded(*ONE, dict.fromkeys(of(Load, here).matrices)))  # type: ignore[arg-type]
    moved = device.tell(prepare(TWO, second, spec=WIDE))
    assert places(of(Load, moved)) <= places(of(Load, here))
    assert of(Subscribe, moved).filters == of(Subscribe, here).filters
    assert of(Subscribe, moved).work_topic == of(Subscribe, here).work_topic


def test_weights_of_a_plan_that_is_left_stay_until_another_needs_the_room() -> None:
    device = Device()
    load = of(Load, device.tell(prepare(ONE)))
    device.loaded(ONE)
    (unload,) = (c for c in device.tell(messages.Release(9, *ONE)) if isinstance(c, Unload))
    assert unload.keep == places(load)
    back = of(Load, device.tell(replace(prepare(TWO), in_flight=3)))
    assert places(back) == unload.keep
    device.tell(messages.Release(9, *TWO))
    device.session.memory_bytes = device.session.plans.needed_bytes()
    other = device.tell(prepare(OTHER, HALVES))
    assert not any(isinstance(c, Load) for c in other), "it has no room at all"
    half = analyse_prepare(prepare(OTHER, HALVES), "d0", Topics("home"))
    half.matrices = matrices(half.refs)
    device.session.memory_bytes = device.session.plans.needed_bytes(half)
    load = of(Load, device.tell(prepare(OTHER, HALVES)))
    assert load.keep == places(load), "what was left gave way"


@pytest.mark.parametrize("end", ["planner lost", "release", "drain"])
def test_a_plan_that_has_ended_comes_again_with_its_weights_and_programs(end: str) -> None:
    device = Device()
    device.tell(prepare(ONE, shapes=(shape(3), shape(4))))
    device(Subscribed(*ONE))
    device.loaded(ONE)
    device.run_to_end(ONE, shape(3))
    device(ENDS[end])
    again = ("m", PlanVersion(2, 1))
    device.sent.clear()
    out = device.tell(prepare(again, shapes=(shape(3), shape(5)), needed=1))
    assert not [c for c in out if isinstance(c, Load)]
    device.builds = False
    device(Subscribed(*again))
    assert [m.transaction_id for m in device.said(messages.Ready)] == [1]
    assert {order.shape for order in device.orders} <= {shape(5)}
    device.run_to_end(again, shape(3))
    device.tell(prepare(OTHER, shapes=(shape(3),)))
    assert device.state(OTHER) == "asked", "of another model nothing is here"


@pytest.mark.parametrize("change", ["in flight", "manifest", "spec", "plan", "memory"])
def test_what_is_another_plan_or_has_no_room_is_studied_and_loaded(change: str) -> None:
    device = Device()
    device.tell(prepare(ONE, shapes=(shape(3),)))
    device(Subscribed(*ONE))
    device.loaded(ONE)
    needed_bytes = device.session.plans.needed_bytes()
    if change == "memory":  # for the weights, and none for Programs of a plan that has ended
        device.session.memory_bytes = needed_bytes - device.session.plans.residents()[0].programs_bytes
    device(ENDS["release"])
    device.session.memory_bytes = 1 << 30
    asked = prepare(TWO, HALVES if change == "plan" else SINGLE)
    if change == "spec":
        asked = replace(asked, spec=replace(SPEC, norm_eps=0.5).to_dict())
    if change == "manifest":
        asked = replace(asked, manifest=bytes(31) + b"1")
    if change == "in flight":
        asked = replace(asked, in_flight=3)
    assert [c for c in device.tell(asked) if isinstance(c, Load)]


def test_a_part_of_a_larger_matrix_is_a_view_of_it_only_where_there_is_much_room() -> None:
    """The rest of the matrix stays for it, and the planner reckons with the part alone."""
    whole, half = plan(WIDE, ("single", {}), (1.0,)), plan(WIDE, ("block", {}), (1.0, 1.0))
    own = set(matrices(resident_weights(WIDE, half, "d0")).values())
    for factor, is_view in ((3.0, True), (1.2, False)):
        device = Device(spec=WIDE)
        load = of(Load, device.tell(prepare(ONE, whole, spec=WIDE)))
        device(Loaded(*ONE, dict.fromkeys(load.matrices)))  # type: ignore[arg-type]
        device.tell(messages.Release(9, *ONE))
        resident = analyse_prepare(prepare(TWO, half, spec=WIDE), "d0", Topics("home"))
        resident.matrices = matrices(resident.refs, load.matrices.values())
        device.session.memory_bytes = int(factor * device.session.plans.needed_bytes(resident))
        wanted = set(of(Load, device.tell(prepare(TWO, half, spec=WIDE))).matrices.values())
        assert (wanted == own) is not is_view
        assert device.session.plans.needed_bytes() <= device.session.memory_bytes


def test_two_epochs_of_one_model_share_weights_two_models_do_not() -> None:
    weights = weights_bytes(resident_weights(SPEC, HALVES, "d0"))
    beside = 2 * programs_bytes(SPEC, HALVES, "d0")
    device = Device()
    device.tell(prepare(ONE, HALVES))
    device.session.memory_bytes = tight = int(1.9 * weights) + beside
    assert any(isinstance(c, Load) for c in device.tell(prepare(TWO, HALVES)))
    device.tell(prepare(OTHER, HALVES))
    (other,) = device.said(messages.PrepareFailed)
    assert other.code == "memory"
    assert other.missing_bytes > 2 * weights + beside - tight - 1


def test_refuses_what_does_not_fit_with_the_missing_bytes() -> None:
    (failed,) = ups(answer(prepare(), memory=1000))
    assert failed.code == "memory"
    assert failed.missing_bytes > 0


def test_a_plan_is_studied_once_however_often_it_is_asked_for() -> None:
    device, order = asked(prepare(fixed=HALVES))
    (said,) = device.handle(MessageIn(replace(prepare(fixed=HALVES), transaction_id=7)), 0.0)
    assert messages.decode(said.payload) == messages.PrepareProgress(7, *ONE, 0, 0), "it is at it"
    assert [type(c) for c in studied(device, order)] == [Subscribe, Load]
    assert studied(device, order) == []
    assert device.plans.get(*ONE).transaction_id == 7


@pytest.mark.parametrize("again", [False, True])
def test_a_plan_that_is_studied_while_commands_may_be_missed_is_in_doubt_until_it_is_asked_for_again(again) -> None:
    device, order = asked(prepare(fixed=HALVES))
    assert device.handle(MayHaveMissedCommands("away"), 0.0) == []
    if again:
        device.handle(MessageIn(prepare(fixed=HALVES)), 0.0)
    assert [type(c) for c in studied(device, order)] == [Subscribe, Load]
    assert device.plans.unconfirmed() == ([] if again else [ONE])


@pytest.mark.parametrize("event", [e for name, e in ENDS.items() if name != "failed"])
def test_a_plan_that_is_given_up_while_it_is_studied_does_not_come(event: WorkerEvent) -> None:
    device, order = asked(prepare(fixed=HALVES))
    assert device.handle(event, 0.0) == []
    assert studied(device, order) == []
    assert len(device.plans) == 0


def test_plans_that_cannot_be_read_or_lowered_are_refused() -> None:
    with pytest.raises(WireError):
        asked(messages.Prepare(1, {"epoch": [1, 1]}, SPEC.to_dict(), bytes(32), 1))
    odd = prepare(fixed=HALVES)
    (failed,) = ups(answer(replace(odd, plan={**odd.plan, "strategy": "magic"})))
    assert (failed.transaction_id, failed.code) == (1, "no_plan")


def changed(data, path, value):
    data = copy.deepcopy(data)
    *outer, last = path.split(".")
    inner = data
    for key in outer:
        inner = inner[key]
    assert last in inner
    inner[last] = value
    return data


def found(made=None, spec=None, shapes=(), in_flight=1):
    message = messages.Prepare(1, made or HALVES.to_dict(), spec or SPEC.to_dict(), bytes(32), in_flight, shapes)
    return analyse(AnalysePrepare(messages.decode(messages.encode(message))), "d0", Topics("home")).result


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_plans_of_every_family_are_believed(name):
    spec = EVERY_FAMILY[name]
    check_prepare("d0", plan(spec, ("single", {}), (1.0,)), spec, [largest_shape(spec).plain()], 2)


def test_a_convolution_may_have_as_many_groups_as_channels():
    kind = KINDS["tiny-hf-mobilenet"]
    config = {**kind.config, "depth_multiplier": 1.4, "expand_ratio": 6.0}
    spec = spec_from_config(config, kind.extras)
    assert max(getattr(node, "groups", 1) for node in spec.nodes) == 1344
    assert not isinstance(found(plan(spec, ("single", {}), (1.0,)).to_dict(), spec.to_dict()), Exception)


@pytest.fixture
def nothing_built(monkeypatch):
    for name in ("resident_weights", "max_live_bytes", "programs_bytes", "sources_of", "programs_digest"):
        monkeypatch.setattr(residents, name, lambda *_, name=name: pytest.fail(f"{name} was worked out"))


ABSURD_SPECS = {
    "layers": (10_000, 2**53, -1), "hidden": (2**31,), "heads": (2**31,), "mlp": (2**53,), "max_tokens": (2**20, 41),
    "text.vocab": (2**53,), "text.width": (-5,), "text.positions": (2**40,), "head.outputs": (2**31,),
    "family": ("x" * 5000,),
    "image.size": (1_000_000,), "image.channels": (2**53,), "image.registers": (10_000,), "block.side": (2**20,),
}  # fmt: skip
MAX_DEVICES = int(plausible.number("plan.devices").high)
ABSURD_PLANS = {
    "devices": (
        [f"d{i}" for i in range(MAX_DEVICES + 1)],
        ["d0", "d0"],
        ["d1", "d2"],
        ["d0", "../#"],
    ),
    "head": ("d7",),
    "strategy": ("none-such",),
    "options": ({"variant": "none-such"},),
    "wire": ("f64",),
    "weights.rows": ([1e308, 1e308], [1.0] * 9, [-1.0, 2.0]),
    "ranges": ({"parts": [[0, 2**31], [0, 2**31]]}, {"parts": [[0, 1]] * 5000}),
    "layouts": ({"row": 1}, {"none-such": 1}),
    "predicted_s": ("soon",),
    "reason": ("x" * 60_000,),
}


def each(table: dict[str, tuple]) -> list[tuple[str, object]]:
    return [(path, value) for path, values in table.items() for value in values]


@pytest.mark.parametrize(("path", "value"), each(ABSURD_SPECS))
def test_an_absurd_spec_is_refused_before_anything_is_built(nothing_built, path, value):
    spec = FAMILIES["vit-classifier" if path.startswith("image") else "bert-embedding"]
    made = plan(spec, ("row", {"variant": "kv"}), (1.0, 1.0)).to_dict()
    assert isinstance(found(made, changed(spec.to_dict(), path, value)), PlanError | WireError)


@pytest.mark.parametrize(("path", "value"), each(ABSURD_PLANS))
def test_an_absurd_plan_is_refused_before_anything_is_built(nothing_built, path, value):
    error = found(changed({**HALVES.to_dict(), "layouts": {}}, path, value))
    assert isinstance(error, PlanError)
    assert len(str(error)) < 300


def test_weights_of_a_plan_may_be_speeds_that_balancing_has_doubled():
    """Of tiny layers most time is no work: a device that is busy with nothing looks many times as fast as it is."""
    assert not isinstance(found(changed(HALVES.to_dict(), "weights.rows", [2.6e10, 1.3e12])), Exception)


def test_so_are_shapes_and_numbers_of_runs_that_no_plan_was_made_for(nothing_built):
    assert isinstance(found(shapes=(PlainShape((2**20,)),)), PlanError)
    assert isinstance(found(in_flight=2**40), PlanError)
    with pytest.raises(PlanError):
        shape_of(EVERY_FAMILY["tiny-gpt2"], PlainShape((1,), session_rows=2**20))


def test_plans_wait_to_be_studied_in_a_bounded_number():
    device = WorkerSession("d0", "home", 1 << 30)
    for number in range(MAX_BEING_ANALYSED + 1):
        made = replace(HALVES, version=PlanVersion(1, number + 1)).to_dict()
        (out,) = device.handle(MessageIn(messages.Prepare(number, made, SPEC.to_dict(), bytes(32), 1)), 0.0)
        assert isinstance(out, AnalysePrepare) is (number < MAX_BEING_ANALYSED)
    assert isinstance(messages.decode(out.payload), messages.PrepareFailed)


# -- Programs ---------------------------------------------------------------------------------------------------------


def test_a_request_that_was_foreseen_finds_its_program() -> None:
    device = prepared(shape(3), shape(5, 2))
    assert not device.ready()
    assert device.build(most=1) == [shape(3)]
    assert not device.ready(), "one of them is missing"
    assert device.build() == [shape(5, 2)]
    assert device.ready()
    for wanted in (shape(5, 2), shape(3)):
        admission = device.ask(wanted)
        device.run()
        assert admission in device.done()
    assert not device.orders
    assert (device.count("ahead"), device.count("late")) == (2, 0)


def test_each_program_that_a_plan_waits_for_is_progress() -> None:
    """To build several may take a slow device longer than the planner waits for a device that gets no further."""
    device = prepared(*(shape(n) for n in (3, 4, 5)))
    for more in (1, 1, 1, 0):
        (told,) = device.sent
        assert isinstance(told, messages.PrepareProgress) is bool(more)
        assert device.ready() or told.done_bytes == told.total_bytes > 0, "0 of 0 would say that nothing moves"
        device.sent.clear()
        device.build(most=more)


def test_nothing_is_built_before_the_weights_are_there() -> None:
    device = prepared()
    device.tell(prepare(TWO, shapes=(shape(3),)))
    assert not device.orders


def test_a_request_that_was_not_foreseen_holds_no_other_up() -> None:
    device = prepared(shape(3))
    device.build()
    late, foreseen = device.ask(shape(4)), device.ask(shape(3))
    device.run()
    assert device.done() == [foreseen]
    assert device.build() == [shape(4)]
    device.run()
    assert device.done() == [foreseen, late]
    assert (device.count("ahead"), device.count("late")) == (1, 1)
    device.ask(shape(4))
    assert not device.orders, "it is kept"


def test_what_is_awaited_gives_way_to_nobody() -> None:
    device = Device(builds=False)
    (study,) = (c for c in device.session.handle(MessageIn(prepare(TWO)), 0.0) if isinstance(c, AnalysePrepare))
    assert study.awaited, "nothing runs that it could hold up"
    device = prepared(shape(3), shape(4), needed=1)
    assert [order.awaited for order in device.orders] == [True], "the plan waits for it"
    device.build(most=1)
    assert [order.awaited for order in device.orders] == [False], "it is for later"
    device.build()
    device.ask(shape(3))
    device.ask(shape(5))
    assert [order.awaited for order in device.orders] == [True], "a run waits"
    (study,) = (c for c in device.session.handle(MessageIn(prepare(TWO)), 99.0) if isinstance(c, AnalysePrepare))
    assert not study.awaited, "runs are under way"


def test_what_need_not_be_there_at_once_is_built_while_no_request_runs() -> None:
    device = prepared(shape(3), shape(4), shape(5), needed=1)
    assert device.build(most=1) == [shape(3)]
    assert device.ready()
    assert [order.shape for order in device.orders] == [shape(4)]
    device.ask(shape(3))
    assert device.build() == [shape(4)], "a request runs now"
    device.run()
    assert device.build() == [shape(5)]


def test_what_a_request_waits_for_is_built_first() -> None:
    device = prepared(shape(3), shape(4), shape(5), needed=0)
    device.ask(shape(7))
    assert device.build() == [shape(3), shape(7)], "a request runs now"
    device.run()
    assert device.build() == [shape(4), shape(5)]


def test_the_steps_of_a_session_are_foreseen() -> None:
    prompt, step = TokenBatch((7,), cache=64), GPT2.input_spec.program_shape(TokenBatch((1,), cache=64))
    device = prepared(prompt, spec=GPT2)
    device.build()
    device.ask(prompt, frames.DecoderSession(1))
    assert device.build() == [step], "while the prompt runs"
    device.ask(prompt, frames.DecoderSession(2, final=True))
    assert (device.count("ahead"), device.count("late")) == (2, 0)


def test_a_run_that_is_taken_back_behind_the_next_one_costs_that_no_row() -> None:
    device = prepared(spec=GPT2)

    def ask(at: int, *ids: int) -> int:
        device.admission += 1
        wanted = TokenBatch((len(ids),), cache=64)
        inputs, session = np.array([at, *ids], np.int32), frames.DecoderSession(1)
        device(FrameIn(frames.decode(frames.encode_work(*ONE, device.admission, wanted, inputs, (session,)))))
        device.build()
        return device.admission

    ask(0, 5, 6, 7)
    device.run()
    lost, again = ask(3, 8), ask(3, 8)  # with others, and by itself
    device.tell(messages.Cancel(*ONE, lost))
    device.run()
    ask(4, 9)
    device.run()
    assert device.done() == [1, again, again + 1]
    assert not device.session.counters["session_lost"]


@pytest.mark.parametrize("how", ["cancel", "release"])
def test_a_request_that_ends_while_it_waits_is_forgotten(how: str) -> None:
    device = prepared()
    admission = device.ask(shape(4))
    device.tell(messages.Cancel(*ONE, admission) if how == "cancel" else messages.Release(2, *ONE))
    device.build()
    device.run()
    assert device.done() == []
    assert device.session.runs.idle


def test_cancels_of_runs_that_are_not_here_keep_no_later_run_out() -> None:
    device = prepared()
    for run_id in range(200):
        device.tell(messages.Cancel(*ONE, run_id))
    admission = device.ask(shape(4))
    device.build()
    device.run()
    assert device.done() == [admission]


def test_a_request_that_comes_twice_while_it_waits_runs_once() -> None:
    device = prepared()
    admission = device.ask(shape(4))
    device.admission -= 1
    assert device.ask(shape(4)) == admission
    assert device.session.counters["duplicate"] == 1
    device.build()
    device.run()
    assert device.done() == [admission]


@pytest.mark.parametrize("built", [False, True])
def test_of_two_requests_that_claim_one_number_neither_is_answered(built: bool) -> None:
    """One of them is forged, and it may have come first; the planner asks again under another number."""
    device = prepared()
    device.ask(shape(4), seed=0)
    if built:
        device.build()
    device.admission -= 1
    admission = device.ask(shape(4), seed=1)
    (failed,) = device.said(messages.RunFailed)
    assert (failed.run_id, failed.code) == (admission, "wire")
    device.build()
    device.run()
    assert device.done() == []
    assert device.session.counters["contradicted"] == 1
    other = device.ask(shape(4))
    device.run()
    assert device.done() == [other]


def test_what_was_built_for_an_epoch_that_is_gone_is_dropped() -> None:
    device = prepared(shape(3), needed=0)
    device.tell(messages.Release(2, *ONE))
    (order,) = device.orders
    device(build(order, "d0", WORKERS))
    assert device.count("ahead") == 0


def test_a_program_that_cannot_be_built_ends_what_waits_for_it_and_nothing_else() -> None:
    device = prepared(shape(3), shape(4))
    device(ProgramBuilt(device.orders.pop().number, ValueError("no")))
    assert device.build() == [shape(4)]
    assert device.ready(), "the plan serves other requests"
    assert [c.kind for c in device.complaints] == ["programs_failed"]
    waiting, other = device.ask(shape(3)), device.ask(shape(4))
    device(ProgramBuilt(device.orders.pop().number, ValueError("no")))
    (failed,) = device.said(messages.RunFailed)
    assert (failed.run_id, failed.code) == (waiting, "device")
    device.run()
    assert device.done() == [other]


def test_no_more_programs_are_kept_than_the_account_says() -> None:
    device = prepared()
    for length in range(1, KEPT_PROGRAMS + 3):
        device.ask(shape(length))
        device.build()
        device.run()
    resident = device.session.plans.get(*ONE)
    assert resident is not None
    assert list(resident.programs) == [shape(n) for n in range(3, KEPT_PROGRAMS + 3)]


@pytest.mark.parametrize(
    ("kind", "storage"),
    [*product(("tiny-minilm", "tiny-gpt2"), ("f32", "w8a8")), ("tiny-qwen3-moe", "f32")],
)
def test_the_account_of_programs_is_a_bound(kind: str, storage: str) -> None:
    spec = spec_of_kind(kind)
    single = replace(plan(spec, ("single", {}), (1.0,)), weight_dtype=storage)
    weights = pack(tensors(spec), resident_weights(spec, single, "d0"))
    shapes = [replace(models.representative_shape(spec, 30), lengths=(n,)) for n in range(3, 4 + KEPT_PROGRAMS)]
    made = [device_program(spec, single, each, "d0") for each in shapes]
    bind(made[0], weights, WORKERS)  # what is shared is there
    tracemalloc.start()
    try:
        kept = [bind(each, weights, WORKERS) for each in made[1:]]
        nbytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(kept) == KEPT_PROGRAMS
    account = programs_bytes(spec, single, "d0")
    assert 0.2 * account < nbytes < account


# -- frames that come early -------------------------------------------------------------------------------------------


def frame(admission: int, nbytes: int = 4, part: int = 0) -> Frame:
    return Frame("tensor", "m", PlanVersion(1, 1), admission, 0, 1, "d1", part, "u8", (nbytes,), 0, (), bytes(nbytes))


def test_frames_of_a_request_come_out_in_their_order_and_once() -> None:
    kept = EarlyFrames()
    for part, admission in enumerate((7, 8, 7)):
        assert kept.store(frame(admission, part=part), 0.0) == 0
    assert [f.part for f in kept.take(7, 0.0)[0]] == [0, 2]
    assert kept.take(7, 0.0) == ([], 0)
    assert [f.part for f in kept.take(8, 0.0)[0]] == [1]
    assert kept.nbytes == 0


def test_what_has_waited_too_long_goes() -> None:
    kept = EarlyFrames()
    kept.store(frame(1), 0.0)
    kept.store(frame(2), EARLY_S)
    assert kept.store(frame(3), EARLY_S + 1) == 1
    assert [len(kept.take(n, EARLY_S + 1)[0]) for n in (1, 2, 3)] == [0, 1, 1]


def test_what_has_waited_too_long_is_not_delivered_even_if_nothing_came_after_it() -> None:
    kept = EarlyFrames()
    kept.store(frame(1, part=0), 0.0)
    kept.store(frame(1, part=1), 5.0)
    frames, stale = kept.take(1, EARLY_S + 1)
    assert ([f.part for f in frames], stale) == ([1], 1)
    kept.check()


def test_empty_frames_are_bounded_by_the_buffers_that_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "EARLY_BYTES", 10 * BUFFER_GRANULARITY)
    kept = EarlyFrames()
    dropped = sum(kept.store(frame(admission, 0), 0.0) for admission in range(100))
    assert dropped == 90
    assert kept.nbytes == 10 * BUFFER_GRANULARITY


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2 * BUFFER_GRANULARITY), st.booleans()), max_size=60))
def test_bytes_are_bounded_and_every_frame_is_kept_or_counted(steps: list[tuple[int, int, bool]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "EARLY_BYTES", 5 * BUFFER_GRANULARITY)
        kept, inside = EarlyFrames(), 0
        for admission, nbytes, take in steps:
            inside += 1 - kept.store(frame(admission, nbytes), 0.0)
            kept.check()
            if take:
                inside -= kept.drop(admission)
        assert inside == sum(kept.drop(admission) for admission in range(1, 6))
        kept.clear()
        kept.check()
