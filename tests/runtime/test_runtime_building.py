"""Programs built beside the session: ahead of foreseen requests, and late without holding others up."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import sites
from sites import FAMILIES, plan, tensors

from hepti_mqtt import models
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.cost.memory import PROGRAMS, programs_bytes
from hepti_mqtt.ids import Epoch
from hepti_mqtt.kernels import Workers
from hepti_mqtt.models.shapes import PackedTokens
from hepti_mqtt.plan_programs import program, resident_weights
from hepti_mqtt.protocol import frames, messages
from hepti_mqtt.runtime.machinery import Publish
from hepti_mqtt.runtime.worker.executor import bind, pack
from hepti_mqtt.runtime.worker.interface import (
    Build,
    Built,
    Command,
    Complain,
    FrameIn,
    Loaded,
    MessageIn,
    Study,
    Subscribed,
    WorkerEvent,
)
from hepti_mqtt.runtime.worker.programs import build, study
from hepti_mqtt.runtime.worker.session import WorkerSession

SPEC = FAMILIES["bert-embedding"]
GPT2 = spec_of_kind("tiny-gpt2")
KEY = ("m", Epoch(1, 1))
WORKERS = Workers(1)


def shape(*lengths: int) -> PackedTokens:
    return PackedTokens(lengths)


class Device:
    """A session under a plan for one device, whose orders are carried out when the test says so."""

    def __init__(self, shapes: Iterable[PackedTokens] = (), needed: int | None = None, spec=SPEC) -> None:
        shapes = tuple(shape.plain() for shape in shapes)
        self.spec = spec
        self.session = WorkerSession("d0", "home", 1 << 30)
        self.orders: list[Build] = []
        self.sent: list[messages.Message | frames.Frame] = []
        self.complaints: list[Complain] = []
        self.now = 0.0
        self.admission = 0
        chosen = replace(plan(spec, ("single", {}), (1.0,)), model="m", epoch=KEY[1])
        count = len(shapes) if needed is None else needed
        self.tell(messages.Prepare(1, chosen.to_dict(), spec.to_dict(), bytes(32), 2, shapes, count))
        self(Subscribed(*KEY))
        self(Loaded(*KEY, pack(tensors(spec), resident_weights(spec, chosen, "d0"))))

    def __call__(self, event: WorkerEvent) -> None:
        self.now += 1.0
        self._take(self.session.handle(event, self.now))

    def _take(self, commands: Iterable[Command]) -> None:
        self.session.check()
        for command in commands:
            if isinstance(command, Study):
                self(study(command, "d0", self.session.topics))
            elif isinstance(command, Build):
                self.orders.append(command)
            elif isinstance(command, Publish):
                self.sent.append(messages.decode_up(command.payload))
            elif isinstance(command, Complain):
                self.complaints.append(command)

    def tell(self, message: messages.Message) -> None:
        self(MessageIn(message))

    def build(self, *, most: int = 100) -> list[PackedTokens]:
        """Carry out orders, and return their shapes."""
        built = []
        while self.orders and len(built) < most:
            order = self.orders.pop(0)
            built.append(order.shape)
            self(build(order, "d0", WORKERS))
        return built

    def request(self, wanted: PackedTokens, session: frames.Session | None = None, seed: int = 0) -> int:
        self.admission += 1
        inputs = models.random_inputs(self.spec, wanted, np.random.default_rng(seed))
        payload = frames.encode_work(*KEY, self.admission, wanted, inputs, session or frames.Session())
        self(FrameIn(frames.decode(payload)))
        return self.admission

    def run(self, most: int = 10_000) -> None:
        """Run ops, until nothing is ready."""
        while most and (step := self.session.next()) is not None:
            most -= 1
            self._take(self.session.done(step, step.run(), 1e-6, self.now))

    def done(self) -> list[int]:
        return [m.admission for m in self.sent if isinstance(m, frames.Frame) and m.kind == "done"]

    def ready(self) -> bool:
        return any(isinstance(m, messages.Ready) for m in self.sent)

    def count(self, when: str) -> int:
        return self.session.counters[f"programs_built_{when}"]


def test_a_request_that_was_foreseen_finds_its_program() -> None:
    device = Device([shape(3), shape(5, 2)])
    assert not device.ready()
    assert device.build(most=1) == [shape(3)]
    assert not device.ready(), "one of them is missing"
    assert device.build() == [shape(5, 2)]
    assert device.ready()
    for wanted in (shape(5, 2), shape(3)):
        admission = device.request(wanted)
        device.run()
        assert admission in device.done()
    assert not device.orders
    assert (device.count("ahead"), device.count("late")) == (2, 0)


def test_each_program_that_a_plan_waits_for_is_progress() -> None:
    """To build several may take a slow device longer than the planner waits for a device that gets no further."""
    device = Device([shape(n) for n in (3, 4, 5)])
    for more in (1, 1, 1, 0):
        (told,) = device.sent
        assert isinstance(told, messages.Progress) is bool(more)
        assert device.ready() or told.done_bytes == told.total_bytes > 0, "0 of 0 would say that nothing moves"
        device.sent.clear()
        device.build(most=more)


def test_nothing_is_built_before_the_weights_are_there() -> None:
    device = Device()
    second = replace(plan(SPEC, ("single", {}), (1.0,)), model="m", epoch=Epoch(1, 2))
    device.tell(messages.Prepare(2, second.to_dict(), SPEC.to_dict(), bytes(32), 2, (shape(3).plain(),), 1))
    assert not device.orders


def test_a_request_that_was_not_foreseen_holds_no_other_up() -> None:
    device = Device([shape(3)])
    device.build()
    late, foreseen = device.request(shape(4)), device.request(shape(3))
    device.run()
    assert device.done() == [foreseen]
    assert device.build() == [shape(4)]
    device.run()
    assert device.done() == [foreseen, late]
    assert (device.count("ahead"), device.count("late")) == (1, 1)
    device.request(shape(4))
    assert not device.orders, "it is kept"


def test_what_need_not_be_there_at_once_is_built_while_no_request_runs() -> None:
    device = Device([shape(3), shape(4), shape(5)], needed=1)
    assert device.build(most=1) == [shape(3)]
    assert device.ready()
    assert [order.shape for order in device.orders] == [shape(4)]
    device.request(shape(3))
    assert device.build() == [shape(4)], "a request runs now"
    device.run()
    assert device.build() == [shape(5)]


def test_what_a_request_waits_for_is_built_first() -> None:
    device = Device([shape(3), shape(4), shape(5)], needed=0)
    device.request(shape(7))
    assert device.build() == [shape(3), shape(7)], "a request runs now"
    device.run()
    assert device.build() == [shape(4), shape(5)]


def test_the_steps_of_a_session_are_foreseen() -> None:
    prompt, step = PackedTokens((7,), cache=64), PackedTokens((1,), cache=64)
    device = Device([prompt], spec=GPT2)
    device.build()
    device.request(prompt, frames.Session(1))
    assert device.build() == [step], "while the prompt runs"
    device.request(prompt, frames.Session(2, final=True))
    assert (device.count("ahead"), device.count("late")) == (2, 0)


@pytest.mark.parametrize("how", ["cancel", "release"])
def test_a_request_that_ends_while_it_waits_is_forgotten(how: str) -> None:
    device = Device()
    admission = device.request(shape(4))
    device.tell(messages.Cancel(*KEY, admission) if how == "cancel" else messages.Release(2, *KEY))
    device.build()
    device.run()
    assert device.done() == []
    assert device.session.runs.idle


def test_a_request_that_comes_twice_while_it_waits_runs_once() -> None:
    device = Device()
    admission = device.request(shape(4))
    device.admission -= 1
    assert device.request(shape(4)) == admission
    assert device.session.counters["duplicate"] == 1
    device.build()
    device.run()
    assert device.done() == [admission]


@pytest.mark.parametrize("built", [False, True])
def test_of_two_requests_that_claim_one_number_neither_is_answered(built: bool) -> None:
    """One of them is forged, and it may have come first; the planner asks again under another number."""
    device = Device()
    device.request(shape(4), seed=0)
    if built:
        device.build()
    device.admission -= 1
    admission = device.request(shape(4), seed=1)
    (failed,) = [m for m in device.sent if isinstance(m, messages.RequestFailed)]
    assert (failed.admission, failed.code) == (admission, "wire")
    device.build()
    device.run()
    assert device.done() == []
    assert device.session.counters["contradicted"] == 1
    other = device.request(shape(4))
    device.run()
    assert device.done() == [other]


def test_what_was_built_for_an_epoch_that_is_gone_is_dropped() -> None:
    device = Device([shape(3)], needed=0)
    device.tell(messages.Release(2, *KEY))
    (order,) = device.orders
    device(build(order, "d0", WORKERS))
    assert device.count("ahead") == 0


def test_a_program_that_cannot_be_built_ends_what_waits_for_it_and_nothing_else() -> None:
    device = Device([shape(3), shape(4)])
    device(Built(device.orders.pop().number, ValueError("no")))
    assert device.build() == [shape(4)]
    assert device.ready(), "the plan serves other requests"
    assert [c.kind for c in device.complaints] == ["programs_failed"]
    waiting, other = device.request(shape(3)), device.request(shape(4))
    device(Built(device.orders.pop().number, ValueError("no")))
    (failed,) = [m for m in device.sent if isinstance(m, messages.RequestFailed)]
    assert (failed.admission, failed.code) == (waiting, "device")
    assert "d0 cannot build the Program" in failed.text
    device.run()
    assert device.done() == [other]


def test_no_more_programs_are_kept_than_the_account_says() -> None:
    device = Device()
    for length in range(1, PROGRAMS + 3):
        device.request(shape(length))
        device.build()
        device.run()
    resident = device.session.epochs.get(*KEY)
    assert resident is not None
    assert list(resident.bound) == [shape(n) for n in range(3, PROGRAMS + 3)]


@pytest.mark.parametrize("storage", ["f32", "w8a8"])
@pytest.mark.parametrize("kind", ["tiny-minilm", "tiny-gpt2"])
def test_the_account_of_programs_is_a_bound(kind: str, storage: str) -> None:
    spec = spec_of_kind(kind)
    single = replace(sites.plan(spec, ("single", {}), (1.0,)), storage=storage)
    weights = pack(tensors(spec), resident_weights(spec, single, "d0"))
    shapes = [replace(models.shape_for(spec, 30), lengths=(n,)) for n in range(3, 4 + PROGRAMS)]
    made = [program(spec, single, each, "d0") for each in shapes]
    bind(made[0], weights, WORKERS)  # what is shared is there
    tracemalloc.start()
    try:
        kept = [bind(each, weights, WORKERS) for each in made[1:]]
        nbytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(kept) == PROGRAMS
    account = programs_bytes(spec, single, "d0")
    assert 0.2 * account < nbytes < account
