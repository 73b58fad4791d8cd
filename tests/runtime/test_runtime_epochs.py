"""A device's epochs in their table: which steps a session takes, which are in doubt, and what goes with them."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sites import FAMILIES, plan, request, tensors

from hepti_mqtt.errors import PlanError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.kernels import Workers
from hepti_mqtt.protocol import frames, messages
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.machinery import IllegalStepError, Machine, Publish
from hepti_mqtt.runtime.worker.executor import pack
from hepti_mqtt.runtime.worker.interface import (
    Build,
    Complain,
    Doubt,
    FrameIn,
    Load,
    Loaded,
    LoadFailed,
    MessageIn,
    PlannerLost,
    Study,
    Subscribed,
    Unload,
    Unsubscribe,
)
from hepti_mqtt.runtime.worker.programs import build, study
from hepti_mqtt.runtime.worker.residents import EPOCHS, Epochs, Resident, resident_of
from hepti_mqtt.runtime.worker.session import WorkerSession

SPEC = FAMILIES["bert-embedding"]
TENSORS = tensors(SPEC)
WORKERS = Workers(1)
PLAN = plan(SPEC, ("single", {}), (1.0,))
WORK = Topics("home").work("m", "d0")
ONE, TWO, OTHER = ("m", Epoch(1, 1)), ("m", Epoch(1, 2)), ("n", Epoch(1, 3))


def prepare(key: tuple[str, Epoch]) -> messages.Prepare:
    chosen = replace(PLAN, model=key[0], epoch=key[1])
    return messages.Prepare(key[1].number, chosen.to_dict(), SPEC.to_dict(), bytes(32), 1)


WEIGHTS = pack(TENSORS, resident_of(prepare(ONE), "d0", Topics("home")).refs)


class Device:
    """A session whose every step is written down; it prepares an epoch at once, as far as a state wants it."""

    def __init__(self, memory_bytes: int = 1 << 30) -> None:
        self.session = WorkerSession("d0", "home", memory_bytes)
        self.taken: set[tuple[str, str, str]] = set()
        self.now = 0.0
        self.admission = 0

    def __call__(self, event: object) -> list[object]:
        self.now += 1.0
        out = self.session.handle(event, self.now)
        self.session.check()
        self.taken |= {(t.before, t.event, t.after) for t in self.session.epochs.story.last()}
        for order in [c for c in out if isinstance(c, Build)]:
            out += self(build(order, "d0", WORKERS))
        studies = [c for c in out if isinstance(c, Study)]
        out = [c for c in out if not isinstance(c, Study)]
        for order in studies:
            out += self(study(order, "d0", self.session.topics))
        return out

    def tell(self, message: messages.Message) -> list[object]:
        return self(MessageIn(message))

    def loaded(self, key: tuple[str, Epoch]) -> list[object]:
        return self(Loaded(*key, WEIGHTS))

    def request(self, key: tuple[str, Epoch]) -> list[object]:
        self.admission += 1
        payload = frames.encode_work(*key, self.admission, *request(SPEC, (3,)))
        return self(FrameIn(frames.decode(payload)))

    def run(self) -> None:
        """Compute what is ready."""
        while (step := self.session.next()) is not None:
            self.session.done(step, step.run(), 0.0, self.now)

    def reach(self, key: tuple[str, Epoch], state: str) -> None:
        """Bring a new epoch into a state."""
        self.tell(prepare(key))
        if state in {"loading", "ready", "active"}:
            self(Subscribed(*key))
        if state in {"subscribing", "ready", "active"}:
            self.loaded(key)
        if state == "active":
            self.tell(messages.Activate(1, *key))
        if state == "doubted":
            self(Doubt("test"))
        assert self.state(key) == state

    def state(self, key: tuple[str, Epoch]) -> str | None:
        resident = self.session.epochs.get(*key)
        return None if resident is None else resident.state


def ups(out: list[object]) -> list[messages.Message]:
    return [messages.decode(c.payload) for c in out if isinstance(c, Publish)]


ENDS = {
    "release": MessageIn(messages.Release(9, *ONE)),
    "drain": MessageIn(messages.Drain(9)),
    "failed": LoadFailed(*ONE, PlanError("no")),
    "planner lost": PlannerLost(2),
}
HERE = [s for s in EPOCHS.states if s != "released"]


def test_every_step_of_the_table_is_taken_by_some_session() -> None:
    taken: set[tuple[str, str, str]] = set()
    for state in HERE:
        for event in (*ENDS.values(), Doubt("test")):
            device = Device()
            device.reach(ONE, state)
            device(event)
            taken |= device.taken
        for event in (Loaded(*ONE, WEIGHTS), Subscribed(*ONE), MessageIn(messages.Activate(1, *ONE))):
            device = Device()
            if (state, type(event)) in {(s, Subscribed) for s in ("loading", "ready", "active")}:
                continue
            device.reach(ONE, state)
            device(event)
            taken |= device.taken
    for state in ("ready", "active"):
        for doubt in (True, False):
            device = Device()
            device.reach(ONE, state)
            if doubt:
                device(Doubt("test"))
            device.request(ONE)
            assert device.state(ONE) == "active"
            device(Doubt("again"))
            device.tell(messages.Activate(1, *ONE))
            assert device.state(ONE) == "active"
            taken |= device.taken
    taken |= outlived().taken | pushed_out().taken
    steps = {(s, e, after) for s, by_event in EPOCHS.steps.items() for e, after in by_event.items()}
    assert steps - taken == set()
    assert taken - steps == {("-", "prepare", "asked")}


@pytest.mark.parametrize("state", HERE)
@pytest.mark.parametrize("event", ENDS)
def test_an_epoch_that_ends_is_unloaded_whatever_its_state(state: str, event: str) -> None:
    device = Device()
    device.reach(ONE, state)
    out = device(ENDS[event])
    assert [c for c in out if isinstance(c, Unload)] == [Unload(*ONE, device.session.memory_bytes)]
    assert [c.works for c in out if isinstance(c, Unsubscribe)] == [(WORK,)]
    assert len(device.session.epochs) == 0
    assert ONE not in device.session.epochs


def test_a_model_is_left_with_its_last_epoch() -> None:
    device = Device()
    device.reach(ONE, "ready")
    device.reach(TWO, "ready")
    assert not [c for c in device.tell(messages.Release(9, *ONE)) if isinstance(c, Unsubscribe)]
    (left,) = (c for c in device.tell(messages.Release(9, *TWO)) if isinstance(c, Unsubscribe))
    assert left.works == (WORK,)


def test_what_runs_have_left_is_kept_for_the_next_one_and_goes_with_the_epoch() -> None:
    device = Device()
    device.reach(ONE, "active")
    device.request(ONE)
    device.run()
    assert device.session.runs.idle
    executor = device.session.runs._executor
    assert executor.held_bytes() > 0
    device.tell(messages.Release(9, *ONE))
    assert executor.held_bytes() == 0


@pytest.mark.parametrize("state", ["asked", "loading", "subscribing"])
def test_no_request_runs_before_its_epoch_is_ready(state: str) -> None:
    device = Device()
    device.reach(ONE, state)
    assert device.request(ONE) == []
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


# -- doubt ------------------------------------------------------------------------------------------------------------


def outlived() -> Device:
    device = Device()
    device.reach(ONE, "active")
    device(Doubt("the control connection was lost"))
    device.reach(TWO, "ready")
    assert device.state(ONE) == "doubted"
    out = device.tell(messages.Activate(2, *TWO))
    assert [(c.kind, c.text) for c in out if isinstance(c, Complain)] == [
        ("epochs_forgotten", "plan 1.1 of m was given up while we were away")
    ]
    assert list(device.session.epochs) == [TWO]
    return device


def pushed_out() -> Device:
    device = Device()
    device.reach(ONE, "active")
    device.session.memory_bytes = device.session.epochs.needed_bytes()
    device(Doubt("the control connection was lost"))
    out = device.tell(prepare(OTHER))
    assert [type(c) for c in out[:4]] == [Complain, Publish, Unload, Unsubscribe]
    assert [(c.model, c.epoch) for c in out if isinstance(c, Load)] == [OTHER]
    assert list(device.session.epochs) == [OTHER]
    return device


def test_an_epoch_in_doubt_goes_when_a_newer_one_of_its_model_is_activated() -> None:
    outlived()


def test_an_epoch_in_doubt_goes_when_its_memory_is_needed() -> None:
    pushed_out()


@pytest.mark.parametrize("event", ["memory", "outlived"])
def test_the_planner_hears_of_an_epoch_that_goes_in_doubt(event: str) -> None:
    device = Device()
    device.reach(ONE, "active")
    if event == "memory":
        device.session.memory_bytes = device.session.epochs.needed_bytes()
    else:
        device.reach(TWO, "ready")
    device(Doubt("test"))
    said = ups(device.tell(prepare(OTHER) if event == "memory" else messages.Activate(2, *TWO)))
    assert [(m.model, m.epoch, m.code) for m in said] == [(*ONE, "forgotten")]
    assert not ups(device.tell(messages.Release(9, *TWO))), "not of one that it was told to give up"


@pytest.mark.parametrize("proof", ["request", "activate"])
def test_what_the_planner_goes_on_with_is_in_doubt_no_more(proof: str) -> None:
    device = Device()
    device.reach(ONE, "ready")
    device.session.memory_bytes = device.session.epochs.needed_bytes()
    device(Doubt("the control connection was lost"))
    if proof == "request":
        device.request(ONE)
    else:
        device.tell(messages.Activate(1, *ONE))
    (failed,) = ups(device.tell(prepare(OTHER)))
    assert isinstance(failed, messages.Failed)
    assert failed.code == "memory"
    assert list(device.session.epochs) == [ONE]


def test_a_plan_that_was_refused_for_want_of_memory_fits_once_what_was_loading_is_released() -> None:
    device = Device()
    device.reach(ONE, "loading")
    device.session.memory_bytes = device.session.epochs.needed_bytes()
    (failed,) = ups(device.tell(prepare(OTHER)))
    assert isinstance(failed, messages.Failed)
    assert failed.code == "memory"
    device.tell(messages.Release(2, *ONE))
    again = device.tell(prepare(OTHER))
    assert [(c.model, c.epoch) for c in again if isinstance(c, Load)] == [OTHER]
    assert device.loaded(ONE) == [], "what was under way for the other one changes nothing"
    device.loaded(OTHER)
    (ready,) = ups(device(Subscribed(*OTHER)))
    assert isinstance(ready, messages.Ready)
    assert ready.epoch == OTHER[1]


def test_an_epoch_in_doubt_still_gets_ready() -> None:
    device = Device()
    device.reach(ONE, "doubted")
    assert [type(m) for m in ups(device.loaded(ONE))] == [messages.Progress], "it gets further"
    (ready,) = ups(device(Subscribed(*ONE)))
    assert isinstance(ready, messages.Ready)
    assert device.state(ONE) == "doubted"


def resident(key: tuple[str, Epoch]) -> Resident:
    return Resident(
        replace(PLAN, model=key[0], epoch=key[1]), SPEC, 1, (), 0, 1, 0, 0, (), WORK, bytes(8), deque(), deque()
    )


def filled() -> Epochs:
    epochs = Epochs("d0", Counter())
    for key in (TWO, OTHER, ONE):
        epochs.enter(resident(key), 0.0)
    return epochs


def test_nothing_is_in_doubt_before_the_connection_was_away() -> None:
    assert filled().doubted() == []


def test_doubted_epochs_come_oldest_first_by_model_and_before_an_epoch() -> None:
    epochs = filled()
    epochs.doubt(0.0, "test")
    assert epochs.doubted() == [ONE, TWO, OTHER]
    assert epochs.doubted("m") == [ONE, TWO]
    assert epochs.doubted("m", before=Epoch(1, 2)) == [ONE]
    assert epochs.doubted("m", before=Epoch(2, 0)) == [ONE, TWO]


def test_a_request_ends_the_doubt_until_the_next_time() -> None:
    epochs = filled()
    epochs.doubt(0.0, "test")
    one = epochs.get(*ONE)
    assert one is not None
    epochs.step(one, "request", 0.0)
    assert epochs.doubted("m") == [TWO]
    epochs.doubt(0.0, "test")
    assert epochs.doubted("m") == [ONE, TWO]


@given(st.lists(st.tuples(st.sampled_from(["enter", "leave", "doubt", "confirm"]), st.integers(1, 4)), max_size=40))
def test_only_what_is_here_can_be_in_doubt(operations: list[tuple[str, int]]) -> None:
    epochs, there = Epochs("d0", Counter()), set()
    for what, number in operations:
        key = ("m", Epoch(1, number))
        if what == "doubt":
            epochs.doubt(0.0, "test")
            assert epochs.doubted() == sorted(there)
        elif what == "enter" and key not in there:
            epochs.enter(resident(key), 0.0)
            there.add(key)
        elif what == "leave":
            epochs.end([key], "release", 0.0)
            assert [r.key for r in epochs.take_released()] == ([key] if key in there else [])
            there.discard(key)
        elif what == "confirm" and key in epochs.doubted():
            epochs.step(epochs.get(*key), "request", 0.0)
        assert set(epochs.doubted()) <= there == set(epochs)


# -- illegal steps ----------------------------------------------------------------------------------------------------


def test_an_illegal_step_fails_a_test() -> None:
    device = Device()
    device.reach(ONE, "ready")
    with pytest.raises(IllegalStepError, match=r"epochs of d0: m 1\.1: subscribed"):
        device(Subscribed(*ONE))


def test_in_service_an_epoch_that_took_an_illegal_step_is_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "strict", False)
    device = Device()
    device.reach(ONE, "ready")
    device.request(ONE)
    out = device(Subscribed(*ONE))
    assert [type(c) for c in out] == [Unload, Unsubscribe, Complain], "it does not say that it is ready"
    assert "illegal: a plan on a device that is active has no step for it" in out[-1].text
    assert device.session.counters["illegal_step"] == 1
    assert len(device.session.epochs) == 0
    assert device.session.next() is None, "its requests went with it"
    device.reach(ONE, "ready")  # the planner asks again


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["prepare", "loaded", "subscribed", "activate", "request", "doubt", "release", "failed"]),
            st.sampled_from([ONE, TWO, OTHER]),
        ),
        max_size=40,
    )
)
def test_no_order_of_events_leads_to_an_illegal_step(operations: list[tuple[str, tuple[str, Epoch]]]) -> None:
    """Acknowledgements come once per life of an epoch, as `Subscriptions` sees to; everything else at any time."""
    device, acknowledged = Device(), set()
    for what, key in operations:
        if what == "prepare":
            if key not in device.session.epochs:
                acknowledged.discard(key)
            device.tell(prepare(key))
        elif what == "loaded":
            device.loaded(key)
        elif what == "subscribed" and key not in acknowledged:
            acknowledged.add(key)
            device(Subscribed(*key))
        elif what == "activate":
            device.tell(messages.Activate(1, *key))
        elif what == "request":
            device.request(key)
        elif what == "doubt":
            device(Doubt("test"))
        elif what == "release":
            device.tell(messages.Release(1, *key))
        elif what == "failed":
            device(LoadFailed(*key, PlanError("no")))
