"""What the session thread does of statuses: the planner's, its own as the site is told, and those of others."""

from dataclasses import replace

import pytest
import sites
from shell_support import BOOT, PLAN, SPEC, devices, request, unloaded

from device_agent.loader import AskAgain
from device_agent.network import LinkDown, LinkUp, OwnStatus, PlannerStatus
from hepti_mqtt import models
from hepti_mqtt.cost.memory import live_bytes, programs_bytes, weight_total
from hepti_mqtt.errors import ConfigError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.plan_programs import program, resident_weights
from hepti_mqtt.protocol import frames, messages
from hepti_mqtt.protocol import messages as protocol_messages
from hepti_mqtt.runtime.worker.interface import MessageIn, Unload


@pytest.fixture
def device():
    yield from devices()


def test_a_new_planner_voids_what_the_old_one_prepared(device):
    d = device()
    d.run(PlannerStatus(protocol_messages.Status("online", PLAN.epoch.boot)))
    d.ready()
    asked = d.loader.posted.count(AskAgain())
    d.run(PlannerStatus(protocol_messages.Status("offline", PLAN.epoch.boot)))
    d.run(PlannerStatus(protocol_messages.Status("online", PLAN.epoch.boot)))
    assert not [i for i in d.loader.posted if isinstance(i, Unload)]
    assert d.loader.posted.count(AskAgain()) == asked + 1
    d.run(PlannerStatus(protocol_messages.Status("online", PLAN.epoch.boot + 1)))
    assert Unload(PLAN.model, PLAN.epoch, d.session.memory_bytes) in d.loader.posted
    d.run(request()[2])
    assert d.ups(frames.Frame) == []


def test_a_planner_of_an_earlier_start_that_a_broker_still_retains_voids_nothing(device):
    d = device()
    d.run(PlannerStatus(protocol_messages.Status("online", PLAN.epoch.boot)))
    d.ready()
    d.run(PlannerStatus(protocol_messages.Status("online", PLAN.epoch.boot - 1)))
    assert unloaded(d) == []
    d.run(request()[2])
    assert [f.admission for f in d.ups(frames.Frame)] == [1, 1]


def test_own_will_heard_is_contradicted(device):
    d = device()
    d.ready()
    d.run(OwnStatus(protocol_messages.Status("online", BOOT)))
    assert len(d.announced) == 1
    d.run(OwnStatus(protocol_messages.Status("offline", BOOT)))
    assert len(d.announced) == 2


NEXT = replace(PLAN, epoch=Epoch(1, 2))
AWAY = (LinkDown("control", "x"), LinkUp("control", 5, None))
WILL = (OwnStatus(protocol_messages.Status("offline", BOOT)),)


@pytest.mark.parametrize("away", [AWAY, WILL])
def test_plans_from_before_a_reconnection_serve_on_if_the_planner_goes_on(device, away):
    d = device()
    d.ready()
    d.run(*away)
    d.run(request(1)[2])
    assert len(d.ups(frames.Frame)) == 2
    d.prepare(NEXT)
    d.run(MessageIn(messages.Activate(2, NEXT.model, NEXT.epoch)))
    assert unloaded(d) == []


@pytest.mark.parametrize("away", [AWAY, WILL])
def test_plans_from_before_a_reconnection_go_when_a_newer_one_is_activated(device, away):
    d = device()
    d.ready()
    d.run(*away)
    d.prepare(NEXT)
    assert unloaded(d) == []
    d.run(MessageIn(messages.Activate(2, NEXT.model, NEXT.epoch)))
    assert unloaded(d) == [(PLAN.model, PLAN.epoch)]
    assert d.complaints.counters["epochs_forgotten"] == 1


BLOCK = replace(sites.plan(SPEC, ("block", {}), (1.0, 1.0)), epoch=Epoch(1, 2))


def needs(*plans):
    refs = {ref for plan in plans for ref in resident_weights(SPEC, plan, "d0")}
    live = 2 * live_bytes(program(SPEC, plans[-1], models.largest_shape(SPEC), "d0"))
    return weight_total(refs) + live + sum(programs_bytes(SPEC, plan, "d0") for plan in plans)


@pytest.mark.parametrize("doubted", [True, False])
def test_plans_from_before_a_reconnection_go_when_memory_is_needed(device, doubted):
    budget = max(needs(PLAN), needs(BLOCK))
    assert needs(PLAN, BLOCK) > budget
    d = device(memory_bytes=budget)
    d.ready()
    d.run(*AWAY)
    if not doubted:
        d.run(request(1)[2])
    d.prepare(BLOCK)
    failed = d.ups(messages.Failed)
    if doubted:
        assert [(m.epoch, m.code) for m in failed] == [(PLAN.epoch, "forgotten")]
        assert unloaded(d) == [(PLAN.model, PLAN.epoch)]
        assert [load.epoch for load in d.loader.loads()] == [PLAN.epoch, BLOCK.epoch]
    else:
        assert [m.code for m in failed] == ["memory"]
        assert unloaded(d) == []


def test_a_late_will_of_an_earlier_start_is_overwritten(device):
    d = device()
    d.run(OwnStatus(protocol_messages.Status("offline", BOOT - 1)))
    assert d.announced == []
    d.ready()
    d.run(OwnStatus(protocol_messages.Status("offline", BOOT - 1)))
    assert len(d.announced) == 2
    assert not [i for i in d.loader.posted if isinstance(i, Unload)]


def test_boot_counters_of_a_time_that_has_not_come_are_not_believed(device):
    d = device()
    d.ready()
    for _ in range(3):
        d.run(OwnStatus(protocol_messages.Status("online", 4_000_000_000)))
    assert len(d.announced) == 4, "what was forged is overwritten"
    d.run(PlannerStatus(protocol_messages.Status("online", 4_000_000_000)))
    assert unloaded(d) == [], "nobody has taken the planner's place"
    assert d.complaints.counters["implausible_boot"] == 4


def test_another_agent_of_the_same_name_wins(device):
    d = device()
    d.join()
    d.inbox.post(OwnStatus(protocol_messages.Status("online", BOOT + 1)))
    with pytest.raises(ConfigError, match="--id"):
        d.shell.run()
    assert not d.shell.farewell
