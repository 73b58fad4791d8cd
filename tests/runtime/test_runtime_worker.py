"""A device's memory and subscriptions, as its session works them out from Programs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sites import FAMILIES, plan

from hepti_mqtt.cost.memory import programs_bytes, weight_total
from hepti_mqtt.errors import WireError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.plan_programs import resident_weights
from hepti_mqtt.protocol import messages
from hepti_mqtt.runtime.worker.interface import Doubt, Load, MessageIn, PlannerLost, Subscribe
from hepti_mqtt.runtime.worker.programs import study
from hepti_mqtt.runtime.worker.session import WorkerSession

SPEC = FAMILIES["bert-embedding"]


def prepare(fixed, number=1, model="m", in_flight=1):
    chosen = replace(fixed, epoch=Epoch(1, number), model=model)
    return MessageIn(messages.Prepare(number, chosen.to_dict(), SPEC.to_dict(), bytes(32), in_flight))


def session(memory=1 << 30, device="d0"):
    return WorkerSession(device, "home", memory)


def tell(device, event):
    """Return the commands that follow from an event, once its plan has been studied."""
    (order,) = device.handle(event, 0.0)
    return device.handle(study(order, device.device, device.topics), 0.0)


def refusal(out):
    return messages.decode(out[-1].payload)


def test_subscribes_to_the_peers_that_its_programs_hear_and_no_others():
    four = plan(SPEC, ("row", {"variant": "kv"}), (1.0, 0.0, 1.0, 1.0))
    out = tell(session(), prepare(four))
    filters = next(c for c in out if isinstance(c, Subscribe)).filters
    assert {f.split("/")[-2] for f in filters} == {"d2", "d3"}
    assert {f.split("/")[-1] for f in filters} == {"d0", "all"}
    alone = tell(session(), prepare(plan(SPEC, ("single", {}), (1.0,))))
    assert next(c for c in alone if isinstance(c, Subscribe)).filters == ()


def test_a_plan_that_is_another_one_when_it_is_asked_for_again_is_studied_as_it_was_asked_for_last():
    device = session()
    forged, right = plan(SPEC, ("single", {}), (1.0,)), plan(SPEC, ("row", {"variant": "kv"}), (1.0, 1.0))
    (order,) = device.handle(prepare(forged), 0.0)
    device.handle(prepare(right), 0.0)
    (again,) = device.handle(study(order, "d0", device.topics), 0.0)
    load = next(c for c in device.handle(study(again, "d0", device.topics), 0.0) if isinstance(c, Load))
    assert load.refs == resident_weights(SPEC, right, "d0")


def test_asks_for_exactly_the_weights_of_its_programs():
    halves = plan(SPEC, ("block", {}), (1.0, 3.0))
    load = next(c for c in tell(session(), prepare(halves)) if isinstance(c, Load))
    assert load.refs == resident_weights(SPEC, halves, "d0")


def test_two_epochs_of_one_model_share_weights_two_models_do_not():
    whole = plan(SPEC, ("row", {"variant": "kv"}), (1.0, 1.0))
    weights = weight_total(resident_weights(SPEC, whole, "d0"))
    beside = 2 * programs_bytes(SPEC, whole, "d0")
    roomy = session()
    tell(roomy, prepare(whole))
    tight = int(1.9 * weights) + beside
    roomy.memory_bytes = tight
    same = tell(roomy, prepare(whole, 2))
    assert any(isinstance(c, Load) for c in same)
    other = refusal(tell(roomy, prepare(whole, 3, model="other")))
    assert isinstance(other, messages.Failed)
    assert other.code == "memory"
    assert other.missing_bytes > 2 * weights + beside - tight - 1


def test_refuses_what_does_not_fit_with_the_missing_bytes():
    out = tell(session(memory=1000), prepare(plan(SPEC, ("single", {}), (1.0,))))
    failed = refusal(out)
    assert failed.missing_bytes > 0
    assert "d0 needs" in failed.text
    assert "budget is 0.0 MiB" in failed.text


def test_a_plan_that_cannot_be_read_is_said_to_be_so():
    with pytest.raises(WireError, match="update agent or planner"):
        session().handle(MessageIn(messages.Prepare(1, {"epoch": [1, 1]}, SPEC.to_dict(), bytes(32), 1)), 0.0)


TWO = plan(SPEC, ("row", {"variant": "kv"}), (1.0, 1.0))


def studied(device, order):
    return device.handle(study(order, device.device, device.topics), 0.0)


def test_a_plan_is_studied_once_however_often_it_is_asked_for():
    device = session()
    (order,) = device.handle(prepare(TWO), 0.0)
    again = replace(prepare(TWO).message, txn=7)
    (said,) = device.handle(MessageIn(again), 0.0)
    assert messages.decode(said.payload) == messages.Progress(7, "m", Epoch(1, 1), 0, 0), "it is at it"
    assert [type(c) for c in studied(device, order)] == [Subscribe, Load]
    assert studied(device, order) == []
    assert device.epochs.get("m", Epoch(1, 1)).txn == 7


@pytest.mark.parametrize(
    "event",
    [
        MessageIn(messages.Release(2, "m", Epoch(1, 1))),
        MessageIn(messages.Drain(2)),
        PlannerLost(2),
        Doubt("the connection was away"),
    ],
    ids=["release", "drain", "planner lost", "doubt"],
)
def test_a_plan_that_is_given_up_while_it_is_studied_does_not_come(event):
    device = session()
    (order,) = device.handle(prepare(TWO), 0.0)
    assert device.handle(event, 0.0) == []
    assert studied(device, order) == []
    assert len(device.epochs) == 0


def test_a_plan_that_fits_no_table_is_refused_with_the_reason():
    device = session()
    odd = MessageIn(messages.Prepare(1, {**TWO.to_dict(), "strategy": "magic"}, SPEC.to_dict(), bytes(32), 1))
    (order,) = device.handle(odd, 0.0)
    failed = refusal(studied(device, order))
    assert (failed.txn, failed.code) == (1, "no_plan")
    assert "magic" in failed.text
