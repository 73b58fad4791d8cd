"""A device's session: plans analysed, loaded, doubted and released; Programs built ahead or late; early frames."""

from __future__ import annotations

import copy
import random
import tracemalloc
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sites import EVERY_FAMILY, FAMILIES, plan, tensors

from hepti_mqtt import models
from hepti_mqtt.checkpoint import KINDS, spec_of_kind
from hepti_mqtt.core.errors import PlanError, WireError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.core.spec import PlainShape, Spec
from hepti_mqtt.cost.memory import KEPT_PROGRAMS, matrices, programs_bytes, weights_bytes
from hepti_mqtt.kernels import Workers
from hepti_mqtt.models import largest_shape, spec_from_config
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.protocol import frames, messages, plausible
from hepti_mqtt.protocol.frames import BUFFER_GRANULARITY, Frame
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.machinery import Publish, StateMachine
from hepti_mqtt.runtime.worker import runs
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
from hepti_mqtt.strategies.plan_programs import device_program, resident_weights

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
    """A session that analyses plans immediately; Programs are built immediately, or by `build`."""

    def __init__(self, memory_bytes: int = 1 << 30, spec: Spec = SPEC, builds: bool = True) -> None:
        self.session = WorkerSession("d0", "home", memory_bytes)
        self.spec, self.builds = spec, builds
        self.taken: set[tuple[str, str, str]] = set()
        self.orders: list[BuildProgram] = []
        self.sent: list[messages.Message | frames.Frame] = []
        self.troubles: list[LogTrouble] = []
        self.now = 0.0
        self.run_id = 0

    def __call__(self, event: WorkerEvent) -> list[Command]:
        """Return the session's commands after an event, except analyses and builds."""
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
                self.sent.append(messages.decode_sealed_report(command.payload)[0])
            elif isinstance(command, LogTrouble):
                self.troubles.append(command)
        while self.builds and self.orders:
            out += self(build(self.orders.pop(0), "d0", WORKERS))
        return out

    def tell(self, message: messages.Message) -> list[Command]:
        return self(MessageIn(message))

    def loaded(self, key: tuple[str, PlanVersion]) -> list[Command]:
        return self(Loaded(*key, WEIGHTS))

    def build(self, *, most: int = 100) -> list[TokenBatch]:
        """Build ordered Programs, and return their shapes."""
        built = []
        while self.orders and len(built) < most:
            built.append(self.orders[0].shape)
            self(build(self.orders.pop(0), "d0", WORKERS))
        return built

    def ask(self, wanted: TokenBatch, session=None, seed: int = 0, key=ONE, inputs: np.ndarray | None = None) -> int:
        """Let a work frame arrive, and return its run id."""
        self.run_id += 1
        if inputs is None:
            inputs = models.random_inputs(self.spec, wanted, np.random.default_rng(seed))
        payload = frames.encode_work(*key, self.run_id, wanted, inputs, () if session is None else (session,))
        self.last = self(FrameIn(frames.decode(payload)))
        return self.run_id

    def run(self) -> None:
        """Run steps until none is ready."""
        while (step := self.session.next_step()) is not None:
            self.follow(self.session.finish_step(step, step.run(), 1e-6, self.now))

    def run_to_end(self, key: tuple[str, PlanVersion], wanted: TokenBatch) -> None:
        """Let a work frame arrive, and compute the run."""
        number = self.ask(wanted, key=key)
        self.run()
        assert self.done()[-1:] == [number]
        assert {frame.plan_version for frame in self.messages_of(frames.Frame) if frame.run_id == number} == {key[1]}

    def messages_of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]

    def done(self) -> list[int]:
        return [frame.run_id for frame in self.messages_of(frames.Frame) if frame.kind == "done"]

    def ready(self) -> bool:
        return bool(self.messages_of(messages.Ready))

    def count(self, when: str) -> int:
        return self.session.counters[f"programs_built_{when}"]

    def reach(self, key: tuple[str, PlanVersion], state: str) -> None:
        """Bring a new plan version into a state."""
        self.tell(prepare(key))
        if state in {"loading", "ready", "active"}:
            self(Subscribed(*key))
        if state in {"subscribing", "ready", "active"}:
            self.loaded(key)
        if state == "active":
            self.tell(messages.Activate(1, *key))
        if state == "doubted":
            self(MayHaveMissedCommands("test"))
        renewed = {"asked": "subscribing", "loading": "ready"}  # if the same plan has ended before
        assert self.state(key) in {state, renewed.get(state)}

    def state(self, key: tuple[str, PlanVersion]) -> str | None:
        resident = self.session.plans.get(*key)
        return None if resident is None else resident.state


def ups(out: list[Command]) -> list[messages.Message]:
    return [messages.decode(c.payload) for c in out if isinstance(c, Publish)]


def prepared(*shapes: TokenBatch, needed: int | None = None, spec: Spec = SPEC) -> Device:
    """Return a device with a loaded plan of one device, which builds Programs only by `build`."""
    device = Device(spec=spec, builds=False)
    chosen = plan(spec, ("single", {}), (1.0,))
    count = len(shapes) if needed is None else needed
    device.tell(prepare(ONE, chosen, shapes=shapes, needed=count, spec=spec))
    device(Subscribed(*ONE))
    device(Loaded(*ONE, pack(tensors(spec), resident_weights(spec, chosen, "d0"))))
    return device


# -- states of plans --------------------------------------------------------------------------------------------------

ENDS = {
    "release": MessageIn(messages.Release(9, *ONE)),
    "drain": MessageIn(messages.ReleaseAll(9)),
    "failed": LoadFailed(*ONE, PlanError("no")),
    "planner lost": PlannerLost(2),
}
RESIDENT = [s for s in RESIDENT_STATES.states if s != "released"]
ACTS = ("prepare", "reach", "reach", "reach", "loaded", "subscribed", "activate", "activate", "request", "doubt")
ACTS += ("release", "failed", "drain", "planner lost", "memory")


def walk(seed: int) -> set[tuple[str, str, str]]:
    """Apply random events, with one acknowledgement per plan version; return the steps that were taken."""
    rng = random.Random(seed)
    device, acknowledged = Device(), set()
    for _ in range(rng.randrange(40)):
        what, key = rng.choice(ACTS), rng.choice((ONE, TWO, OTHER))
        if what in {"prepare", "reach", "memory"} and key not in device.session.plans:
            acknowledged.discard(key)
            if what == "reach":
                device.reach(key, state := rng.choice(RESIDENT))
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


def test_random_events_take_every_step_of_the_table_and_no_illegal_one() -> None:
    """An illegal step raises, because tests set `StateMachine.strict`."""
    taken = set().union(*map(walk, range(120)))
    steps = {(s, e, after) for s, by_event in RESIDENT_STATES.steps.items() for e, after in by_event.items()}
    assert steps - taken == set()
    assert taken - steps == {("-", "prepare", "asked")}


@pytest.mark.parametrize("state", RESIDENT)
@pytest.mark.parametrize("event", ENDS)
def test_an_ended_plan_is_unloaded_from_every_state(state: str, event: str) -> None:
    device = Device()
    device.reach(ONE, state)
    out = device(ENDS[event])
    has_weights = state in {"subscribing", "ready", "active"}
    kept = frozenset((bytes(32), ref) for ref in matrices(WEIGHTS).values()) if has_weights else frozenset()
    assert [c for c in out if isinstance(c, Unload)] == [Unload(*ONE, kept)]
    assert [c.work_topics for c in out if isinstance(c, Unsubscribe)] == [(WORK,)]
    assert not [*device.session.plans]
    assert ONE not in device.session.plans


def test_the_work_topic_of_a_model_is_left_with_its_last_plan() -> None:
    device = Device()
    device.reach(ONE, "ready")
    device.reach(TWO, "ready")
    assert not [c for c in device.tell(messages.Release(9, *ONE)) if isinstance(c, Unsubscribe)]
    (left,) = (c for c in device.tell(messages.Release(9, *TWO)) if isinstance(c, Unsubscribe))
    assert left.work_topics == (WORK,)


@pytest.mark.parametrize("state", ["asked", "loading", "subscribing"])
def test_no_run_starts_before_its_plan_is_ready(state: str) -> None:
    device = Device()
    device.reach(ONE, state)
    device.ask(shape(3))
    assert device.last == []
    device.tell(messages.Activate(1, *ONE))
    assert device.session.counters["dead_plan"] == 1
    assert device.state(ONE) == state


def test_the_late_end_of_an_abandoned_load_is_harmless() -> None:
    device = Device()
    device.reach(ONE, "asked")
    device.tell(messages.Release(9, *ONE))
    device.reach(ONE, "asked")
    for _ in range(2):
        device.loaded(ONE)
        assert device.state(ONE) == "subscribing"
    assert [type(m) for m in ups(device(Subscribed(*ONE)))] == [messages.Ready]


DOUBT, WORK_FRAME = MayHaveMissedCommands("the control connection was lost"), "a work frame"


@pytest.mark.parametrize(
    ("acts", "gives_way"),
    [
        ((DOUBT,), True),
        ((DOUBT, WORK_FRAME), False),
        ((DOUBT, MessageIn(messages.Activate(1, *ONE))), False),
        ((MessageIn(messages.Release(2, *ONE)),), True),
    ],
    ids=["doubted", "confirmed by a run", "confirmed by an activation", "released"],
)
def test_a_doubted_or_released_plan_makes_room_for_another_one(acts, gives_way: bool) -> None:
    device = Device()
    device.reach(ONE, "ready")
    device.session.memory_bytes = device.session.plans.needed_bytes()
    (failed,) = ups(device.tell(prepare(OTHER)))
    assert failed.code == "memory"
    for act in acts:
        device.ask(shape(3)) if act is WORK_FRAME else device(act)
    out = device.tell(prepare(OTHER))
    assert [(c.model, c.plan_version) for c in out if isinstance(c, Load)] == [OTHER] * gives_way
    assert [m.code for m in ups(out) if isinstance(m, messages.PrepareFailed)] == (
        ["forgotten"] if acts == (DOUBT,) else [] if gives_way else ["memory"]
    )
    assert list(device.session.plans) == [OTHER if gives_way else ONE]


def test_a_doubted_plan_still_becomes_ready() -> None:
    device = Device()
    device.reach(ONE, "doubted")
    assert [type(m) for m in ups(device.loaded(ONE))] == [messages.PrepareProgress]
    (ready,) = ups(device(Subscribed(*ONE)))
    assert isinstance(ready, messages.Ready)
    assert device.state(ONE) == "doubted"


def test_an_illegal_step_unloads_the_plan_in_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateMachine, "strict", False)
    device = Device()
    device.reach(ONE, "ready")
    device.ask(shape(3))
    out = device(Subscribed(*ONE))
    assert [type(c) for c in out] == [Unload, Unsubscribe, LogTrouble]
    assert device.session.counters["illegal_step"] == 1
    assert not [*device.session.plans]
    assert device.session.next_step() is None, "its runs ended with it"
    device.reach(ONE, "ready")  # the planner repeats the Prepare


# -- analysis of plans ------------------------------------------------------------------------------------------------


def received(message: messages.Prepare) -> tuple[WorkerSession, AnalysePrepare]:
    """Return a session that received a Prepare, and its order to analyse it."""
    device = WorkerSession("d0", "home", 1 << 30)
    (order,) = device.handle(MessageIn(message), 0.0)
    return device, order


def finish_analysis(device: WorkerSession, order: AnalysePrepare) -> list[Command]:
    return device.handle(analyse(order, device.device, device.topics), 0.0)


def answer(message: messages.Prepare) -> list[Command]:
    return finish_analysis(*received(message))


def of(kind: type, out: list[Command]) -> Any:
    return next(command for command in out if isinstance(command, kind))


def test_a_device_subscribes_exactly_to_the_peers_of_its_programs() -> None:
    four = plan(SPEC, ("row", {"variant": "kv"}), (1.0, 0.0, 1.0, 1.0))
    filters = of(Subscribe, answer(prepare(fixed=four))).filters
    assert {f.split("/")[-2] for f in filters} == {"d2", "d3"}
    assert {f.split("/")[-1] for f in filters} == {"d0", "all"}
    assert of(Subscribe, answer(prepare())).filters == ()


def test_a_device_loads_exactly_the_weights_of_the_last_prepare() -> None:
    device, order = received(prepare())
    right = plan(SPEC, ("block", {}), (1.0, 3.0))
    device.handle(MessageIn(prepare(fixed=right)), 0.0)
    (again,) = finish_analysis(device, order)
    assert tuple(of(Load, finish_analysis(device, again)).matrices) == resident_weights(SPEC, right, "d0")


def places(load: Load) -> set[tuple[bytes, WeightRef]]:
    return {(load.manifest, matrix) for matrix in load.matrices.values()}


@pytest.mark.parametrize("variant", ["kv", "heads", "mlp"])
def test_other_shares_of_rows_and_heads_need_no_weights_and_no_filters(variant: str) -> None:
    device = Device(spec=WIDE)
    first, second = (plan(WIDE, ("row", {"variant": variant}), shares) for shares in ((1.0, 1.0), (2.0, 1.0)))
    begun = device.tell(prepare(ONE, first, spec=WIDE))
    device(Loaded(*ONE, dict.fromkeys(of(Load, begun).matrices)))  # type: ignore[arg-type]
    moved = device.tell(prepare(TWO, second, spec=WIDE))
    assert places(of(Load, moved)) <= places(of(Load, begun))
    assert of(Subscribe, moved).filters == of(Subscribe, begun).filters
    assert of(Subscribe, moved).work_topic == of(Subscribe, begun).work_topic


def test_weights_of_a_released_plan_stay_until_another_plan_needs_their_memory() -> None:
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
    assert not any(isinstance(c, Load) for c in other)
    half = analyse_prepare(prepare(OTHER, HALVES), "d0", Topics("home"))
    half.matrices = matrices(half.refs)
    device.session.memory_bytes = device.session.plans.needed_bytes(half)
    load = of(Load, device.tell(prepare(OTHER, HALVES)))
    assert load.keep == places(load), "unused weights are dropped"


@pytest.mark.parametrize("end", ["planner lost", "release", "drain"])
def test_an_ended_plan_is_renewed_with_its_weights_and_programs(end: str) -> None:
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
    assert [m.transaction_id for m in device.messages_of(messages.Ready)] == [1]
    assert {order.shape for order in device.orders} <= {shape(5)}
    device.run_to_end(again, shape(3))
    device.tell(prepare(OTHER, shapes=(shape(3),)))
    assert device.state(OTHER) == "asked", "another model has no weights"


CHANGES = {
    "in flight": lambda message: replace(message, in_flight=3),
    "manifest": lambda message: replace(message, manifest=bytes(31) + b"1"),
    "spec": lambda message: replace(message, spec=replace(SPEC, norm_eps=0.5).to_dict()),
    "plan": lambda _: prepare(TWO, HALVES),
    "no memory for Programs of an ended plan": lambda message: message,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_different_plan_is_not_renewed_but_loaded(change: str) -> None:
    device = Device()
    device.tell(prepare(ONE, shapes=(shape(3),)))
    device(Subscribed(*ONE))
    device.loaded(ONE)
    if "memory" in change:
        programs = device.session.plans.residents()[0].programs_bytes
        device.session.memory_bytes = device.session.plans.needed_bytes() - programs
    device(ENDS["release"])
    device.session.memory_bytes = 1 << 30
    assert [c for c in device.tell(CHANGES[change](prepare(TWO))) if isinstance(c, Load)]


def test_a_part_of_a_larger_matrix_is_a_view_only_if_there_is_much_room() -> None:
    """The whole matrix stays for the view, but the planner counts only the part."""
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


def test_plans_of_one_model_share_weights_and_plans_of_two_models_do_not() -> None:
    weights = weights_bytes(resident_weights(SPEC, HALVES, "d0"))
    programs = 2 * programs_bytes(SPEC, HALVES, "d0")
    device = Device()
    device.tell(prepare(ONE, HALVES))
    device.session.memory_bytes = tight = int(1.9 * weights) + programs
    assert any(isinstance(c, Load) for c in device.tell(prepare(TWO, HALVES)))
    device.tell(prepare(OTHER, HALVES))
    (other,) = device.messages_of(messages.PrepareFailed)
    assert other.code == "memory"
    assert other.missing_bytes > 2 * weights + programs - tight - 1


def test_a_repeated_prepare_is_analysed_once() -> None:
    device, order = received(prepare(fixed=HALVES))
    (progress,) = device.handle(MessageIn(replace(prepare(fixed=HALVES), transaction_id=7)), 0.0)
    assert messages.decode(progress.payload) == messages.PrepareProgress(7, *ONE, 0, 0)
    assert [type(c) for c in finish_analysis(device, order)] == [Subscribe, Load]
    assert finish_analysis(device, order) == []
    assert device.plans.get(*ONE).transaction_id == 7


@pytest.mark.parametrize("again", [False, True])
def test_a_plan_is_doubted_if_commands_were_missed_during_its_analysis_unless_the_prepare_is_repeated(again) -> None:
    device, order = received(prepare(fixed=HALVES))
    assert device.handle(MayHaveMissedCommands("away"), 0.0) == []
    if again:
        device.handle(MessageIn(prepare(fixed=HALVES)), 0.0)
    assert [type(c) for c in finish_analysis(device, order)] == [Subscribe, Load]
    assert device.plans.unconfirmed() == ([] if again else [ONE])


@pytest.mark.parametrize("event", [e for name, e in ENDS.items() if name != "failed"])
def test_a_plan_that_is_released_during_its_analysis_is_dropped(event: WorkerEvent) -> None:
    device, order = received(prepare(fixed=HALVES))
    assert device.handle(event, 0.0) == []
    assert finish_analysis(device, order) == []
    assert not [*device.plans]


def test_plans_that_cannot_be_read_or_lowered_are_refused() -> None:
    with pytest.raises(WireError):
        received(messages.Prepare(1, {"version": [1, 1]}, SPEC.to_dict(), bytes(32), 1))
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


def analysed(plan_data=None, spec=None, shapes=(), in_flight=1):
    message = messages.Prepare(1, plan_data or HALVES.to_dict(), spec or SPEC.to_dict(), bytes(32), in_flight, shapes)
    return analyse(AnalysePrepare(messages.decode(messages.encode(message))), "d0", Topics("home")).result


@pytest.mark.parametrize("name", [*EVERY_FAMILY, "wide convolution"])
def test_plans_of_every_family_are_accepted(name):
    kind = KINDS["tiny-hf-mobilenet"]  # as many groups as channels
    wide = spec_from_config({**kind.config, "depth_multiplier": 1.4, "expand_ratio": 6.0}, kind.extras)
    spec = {**EVERY_FAMILY, "wide convolution": wide}[name]
    check_prepare("d0", plan(spec, ("single", {}), (1.0,)), spec, [largest_shape(spec).plain()], 2)


@pytest.fixture
def nothing_built(monkeypatch):
    names = ("resident_weights", "memory.max_live_bytes", "memory.programs_bytes", "sources_of", "programs_digest")
    for name in names:
        path = f"hepti_mqtt.runtime.worker.residents.{name}"
        monkeypatch.setattr(path, lambda *_, name=name: pytest.fail(f"{name} was computed"))


ABSURD_SPECS = {
    "layers": (10_000, 2**53, -1), "hidden": (2**31,), "heads": (2**31,), "mlp": (2**53,), "max_tokens": (2**20, 41),
    "text.vocab": (2**53,), "text.width": (-5,), "text.positions": (2**40,), "head.outputs": (2**31,),
    "family": ("x" * 5000,),
    "image.size": (1_000_000,), "image.channels": (2**53,), "image.registers": (10_000,), "block.side": (2**20,),
}  # fmt: skip
MAX_DEVICES = int(plausible.number("plan.devices").high)
ABSURD_PLANS = {
    "devices": ([f"d{i}" for i in range(MAX_DEVICES + 1)], ["d0", "d0"], ["d1", "d2"], ["d0", "../#"]),
    "root": ("d7",),
    "strategy": ("none-such",),
    "options": ({"variant": "none-such"},),
    "wire": ("f64",),
    "weights.rows": ([1e308, 1e308], [1.0] * 9, [-1.0, 2.0]),
    "ranges": ({"parts": [[0, 2**31], [0, 2**31]]}, {"parts": [[0, 1]] * 5000}),
    "layouts": ({"row": 1}, {"none-such": 1}),
    "predicted_s": ("soon",),
    "reason": ("x" * 60_000,),
}


ABSURD = [(path, value) for table in (ABSURD_SPECS, ABSURD_PLANS) for path in table for value in table[path]]


@pytest.mark.parametrize(("path", "value"), ABSURD, ids=[path for path, _ in ABSURD])
def test_absurd_specs_and_plans_are_refused_before_anything_is_built(nothing_built, path, value):
    spec = FAMILIES["vit-classifier" if path.startswith("image") else "bert-embedding"]
    spec_data, plan_data = spec.to_dict(), plan(spec, ("row", {"variant": "kv"}), (1.0, 1.0)).to_dict()
    if path in ABSURD_SPECS:
        assert isinstance(analysed(plan_data, changed(spec_data, path, value)), PlanError | WireError)
    else:
        error = analysed(changed({**plan_data, "layouts": {}}, path, value), spec_data)
        assert isinstance(error, PlanError)
        assert len(str(error)) < 300


def test_shares_of_a_plan_may_be_large_speeds():
    """In tiny layers most time is overhead, so balancing makes a device look many times faster."""
    assert not isinstance(analysed(changed(HALVES.to_dict(), "weights.rows", [2.6e10, 1.3e12])), Exception)


def test_absurd_shapes_and_numbers_of_runs_are_refused(nothing_built):
    assert isinstance(analysed(shapes=(PlainShape((2**20,)),)), PlanError)
    assert isinstance(analysed(in_flight=2**40), PlanError)
    with pytest.raises(PlanError):
        shape_of(EVERY_FAMILY["tiny-gpt2"], PlainShape((1,), session_rows=2**20))


def test_the_number_of_analyses_is_limited():
    device = WorkerSession("d0", "home", 1 << 30)
    for number in range(MAX_BEING_ANALYSED + 1):
        plan_data = replace(HALVES, version=PlanVersion(1, number + 1)).to_dict()
        (out,) = device.handle(MessageIn(messages.Prepare(number, plan_data, SPEC.to_dict(), bytes(32), 1)), 0.0)
        assert isinstance(out, AnalysePrepare) is (number < MAX_BEING_ANALYSED)
    assert isinstance(messages.decode(out.payload), messages.PrepareFailed)


# -- Programs ---------------------------------------------------------------------------------------------------------


def test_a_plan_is_ready_after_its_predicted_programs_and_each_is_progress() -> None:
    """A slow device may take longer for several Programs than the planner waits for progress."""
    device = prepared(shape(3), shape(5, 2), shape(4))
    for more in (1, 1, 1, 0):
        (message,) = device.sent
        assert isinstance(message, messages.PrepareProgress) is bool(more)
        assert device.ready() or message.done_bytes == message.total_bytes > 0, "0 of 0 means no progress"
        device.sent.clear()
        device.build(most=more)
    run_id = device.ask(shape(5, 2))
    device.run()
    assert device.done() == [run_id]
    assert (device.count("ahead"), device.count("late")) == (3, 0)


def test_nothing_is_built_before_the_weights_are_resident() -> None:
    device = prepared()
    device.tell(prepare(TWO, shapes=(shape(3),)))
    assert not device.orders


def test_a_run_that_waits_for_its_program_does_not_delay_others() -> None:
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
    assert not device.orders, "the Program is cached"


def test_programs_that_runs_or_plans_wait_for_come_first_and_predicted_ones_while_idle() -> None:
    device = prepared(shape(3), shape(4), shape(5), shape(6), needed=1)
    assert [order.awaited for order in device.orders] == [True], "the plan waits"
    assert device.build(most=1) == [shape(3)]
    assert device.ready()
    assert [(order.shape, order.awaited) for order in device.orders] == [(shape(4), False)]
    device.ask(shape(3))
    device.ask(shape(7))
    assert device.build(most=1) == [shape(4)]
    assert [(order.shape, order.awaited) for order in device.orders] == [(shape(7), True)]
    assert device.build() == [shape(7)], "runs are active"
    (analysis,) = (c for c in device.session.handle(MessageIn(prepare(TWO)), 99.0) if isinstance(c, AnalysePrepare))
    assert not analysis.awaited, "runs are active"
    device.run()
    assert device.build() == [shape(5), shape(6)]


def test_the_steps_of_a_session_are_predicted() -> None:
    prompt, step = TokenBatch((7,), cache=64), GPT2.input_spec.program_shape(TokenBatch((1,), cache=64))
    device = prepared(prompt, spec=GPT2)
    device.build()
    device.ask(prompt, frames.DecoderSession(1))
    assert device.build() == [step], "while the prompt runs"
    device.ask(prompt, frames.DecoderSession(2, final=True))
    assert (device.count("ahead"), device.count("late")) == (2, 0)


def test_a_cancel_after_the_work_frame_of_the_next_run_costs_no_rows() -> None:
    device = prepared(spec=GPT2)

    def ask(at: int, *ids: int) -> int:
        inputs = np.array([at, *ids], np.int32)
        run_id = device.ask(TokenBatch((len(ids),), cache=64), frames.DecoderSession(1), inputs=inputs)
        device.build()
        return run_id

    ask(0, 5, 6, 7)
    device.run()
    lost, again = ask(3, 8), ask(3, 8)
    device.tell(messages.Cancel(*ONE, lost))
    device.run()
    ask(4, 9)
    device.run()
    assert device.done() == [1, again, again + 1]
    assert not device.session.counters["session_lost"]


@pytest.mark.parametrize("how", ["cancel", "release"])
def test_a_run_that_ends_while_it_waits_for_its_program_is_dropped(how: str) -> None:
    device = prepared()
    run_id = device.ask(shape(4))
    device.tell(messages.Cancel(*ONE, run_id) if how == "cancel" else messages.Release(2, *ONE))
    device.build()
    device.run()
    assert device.done() == []
    assert device.session.runs.idle


def test_cancels_of_unknown_runs_do_not_block_later_runs() -> None:
    device = prepared()
    for run_id in range(200):
        device.tell(messages.Cancel(*ONE, run_id))
    run_id = device.ask(shape(4))
    device.build()
    device.run()
    assert device.done() == [run_id]


def test_a_repeated_work_frame_runs_once() -> None:
    device = prepared()
    run_id = device.ask(shape(4))
    device.run_id -= 1
    assert device.ask(shape(4)) == run_id
    assert device.session.counters["duplicate"] == 1
    device.build()
    device.run()
    assert device.done() == [run_id]


@pytest.mark.parametrize("built", [False, True])
def test_two_different_work_frames_with_one_run_id_fail_the_run(built: bool) -> None:
    """One of them is forged; the planner retries under another run id."""
    device = prepared()
    device.ask(shape(4), seed=0)
    if built:
        device.build()
    device.run_id -= 1
    run_id = device.ask(shape(4), seed=1)
    (failed,) = device.messages_of(messages.RunFailed)
    assert (failed.run_id, failed.code) == (run_id, "wire")
    device.build()
    device.run()
    assert device.done() == []
    assert device.session.counters["contradicted"] == 1
    other = device.ask(shape(4))
    device.run()
    assert device.done() == [other]


def test_a_program_that_cannot_be_built_fails_only_the_runs_that_wait_for_it() -> None:
    device = prepared(shape(3), shape(4))
    device(ProgramBuilt(device.orders.pop().number, ValueError("no")))
    assert device.build() == [shape(4)]
    assert device.ready()
    assert [c.kind for c in device.troubles] == ["programs_failed"]
    waiting, other = device.ask(shape(3)), device.ask(shape(4))
    device(ProgramBuilt(device.orders.pop().number, ValueError("no")))
    (failed,) = device.messages_of(messages.RunFailed)
    assert (failed.run_id, failed.code) == (waiting, "device")
    device.run()
    assert device.done() == [other]


def test_the_number_of_cached_programs_is_limited() -> None:
    device = prepared()
    for length in range(1, KEPT_PROGRAMS + 3):
        device.ask(shape(length))
        device.build()
        device.run()
    resident = device.session.plans.get(*ONE)
    assert list(resident.programs) == [shape(n) for n in range(3, KEPT_PROGRAMS + 3)]


@pytest.mark.parametrize(
    ("kind", "storage"), [("tiny-minilm", "w8a8"), ("tiny-gpt2", "f32"), ("tiny-qwen3-moe", "f32")]
)
def test_programs_bytes_is_a_bound_of_their_memory(kind: str, storage: str) -> None:
    spec = spec_of_kind(kind)
    single = replace(plan(spec, ("single", {}), (1.0,)), weight_dtype=storage)
    weights = pack(tensors(spec), resident_weights(spec, single, "d0"))
    shapes = [replace(models.representative_shape(spec, 30), lengths=(n,)) for n in range(3, 4 + KEPT_PROGRAMS)]
    programs = [device_program(spec, single, each, "d0") for each in shapes]
    bind(programs[0], weights, WORKERS)  # allocates shared memory
    tracemalloc.start()
    try:
        kept = [bind(each, weights, WORKERS) for each in programs[1:]]
        nbytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(kept) == KEPT_PROGRAMS
    account = programs_bytes(spec, single, "d0")
    assert 0.2 * account < nbytes < account


# -- early frames -----------------------------------------------------------------------------------------------------


def frame(run_id: int, nbytes: int = 4, part: int = 0) -> Frame:
    return Frame("tensor", "m", PlanVersion(1, 1), run_id, 0, 1, "d1", part, "u8", (nbytes,), 0, (), bytes(nbytes))


def test_early_frames_are_taken_once_in_their_order_and_old_ones_are_counted() -> None:
    kept = EarlyFrames()
    kept.store(frame(1, part=0), 0.0)
    kept.store(frame(2), 0.0)
    for part in (1, 2):
        kept.store(frame(1, part=part), 5.0)
    frames, stale = kept.take(1, EARLY_S + 1)
    assert ([f.part for f in frames], stale) == ([1, 2], 1)
    assert kept.take(1, EARLY_S + 1) == ([], 0)
    assert kept.store(frame(3), EARLY_S + 1) == 1
    assert [len(kept.take(n, EARLY_S + 1)[0]) for n in (2, 3)] == [0, 1]
    assert kept.nbytes == 0


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2 * BUFFER_GRANULARITY), st.booleans()), max_size=60))
def test_bytes_are_bounded_and_every_frame_is_kept_or_counted(steps: list[tuple[int, int, bool]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "EARLY_BYTES", 5 * BUFFER_GRANULARITY)
        kept, inside = EarlyFrames(), 0
        for run_id, nbytes, take in steps:
            inside += 1 - kept.store(frame(run_id, nbytes), 0.0)
            kept.check()
            if take:
                inside -= kept.drop(run_id)
        assert inside == sum(kept.drop(run_id) for run_id in range(1, 6))
        kept.clear()
        kept.check()
