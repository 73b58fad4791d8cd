"""The session thread over list transports: events go in, what was published is looked at."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import sites
import swarm
from device_agent_support import ListTransport

from device_agent import meter as metering
from device_agent.complaints import Complaints
from device_agent.events import Acknowledged, FiltersRefused, LinkDown, LinkUp, OwnStatus, PlannerStatus, Stop
from device_agent.loader_thread import AskAgain
from device_agent.meter import Meter
from device_agent.network import Network
from device_agent.probe import Prober
from device_agent.shell import Shell
from hepti_mqtt import models
from hepti_mqtt.errors import ConfigError, RefusedError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.kernels import Workers
from hepti_mqtt.models.shapes import PackedTokens
from hepti_mqtt.plan_programs import program, resident_weights
from hepti_mqtt.runtime.device.building import build, study
from hepti_mqtt.runtime.device.commands import Load, Study, Unload
from hepti_mqtt.runtime.device.events import FrameIn, Loaded, MessageIn
from hepti_mqtt.runtime.device.local import pack
from hepti_mqtt.runtime.device.worker import WorkerSession
from hepti_mqtt.simulate import live_bytes, programs_bytes, weight_total
from hepti_mqtt.transport import Inbox
from hepti_mqtt.wire import described, frames, messages
from hepti_mqtt.wire.arrivals import Exchanges
from hepti_mqtt.wire.topics import Topics

TOPICS = Topics("home")
BOOT = 100
SPEC = sites.FAMILIES["bert-embedding"]
TENSORS = sites.tensors(SPEC)
PLAN = sites.plan(SPEC, ("single", {}), (1.0,))
TWO = sites.plan(SPEC, ("row", {"variant": "kv"}), (1.0, 1.0))
UP = TOPICS.up("d0")


class Finite(Inbox):
    """An inbox that ends the session thread where it would wait."""

    def get(self):
        return Stop() if self.empty() else super().get()


class ListLoader:
    def __init__(self):
        self.posted = []

    def post(self, item):
        self.posted.append(item)

    def loads(self):
        return [i for i in self.posted if isinstance(i, Load)]


class NowBuilder:
    """Builds at once what is posted."""

    def __init__(self, inbox, workers):
        self.inbox, self.workers = inbox, workers

    def post(self, order):
        if isinstance(order, Study):
            self.inbox.post(study(order, "d0", TOPICS))
        else:
            self.inbox.post(build(order, "d0", self.workers))


class Device:
    def __init__(self, memory_bytes=1 << 30, limit=None):
        log = logging.getLogger("test")
        self.inbox = Finite()
        self.planes, self.announced, self.limit = {}, [], limit
        self.complaints = Complaints(log)
        self.loader = ListLoader()
        self.network = Network(
            TOPICS, "d0", self.inbox, Prober("d0", BOOT), self.loader.post, self.complaints, self.make
        )
        self.workers = Workers(1)
        self.session = WorkerSession("d0", "home", memory_bytes)
        self.builder = NowBuilder(self.inbox, self.workers)
        self.meter = Meter(swarm.curves(1e9))
        self.shell = Shell(
            self.session,
            BOOT,
            self.inbox,
            self.network,
            self.loader,
            self.builder,
            self.meter,
            self.complaints,
            self.announce,
            log,
        )

    def make(self, plane, on_message, on_state):
        self.planes[plane] = ListTransport(on_message, on_state)
        return self.planes[plane]

    def announce(self, link):
        self.announced.append(link)
        return self.limit

    def run(self, *events):
        """Let the session thread take events and do all that follows from them."""
        for event in events:
            self.inbox.post(event)
        self.shell.run()
        self.session.check()

    def join(self):
        self.run(LinkUp("control", 5, None), LinkUp("data", 4, None))

    def ups(self, kind=None):
        sent = [messages.decode_up(p) for topic, p, _, _ in self.planes["control"].published if topic == UP]
        return [m for m in sent if kind is None or isinstance(m, kind)]

    def prepare(self, plan=PLAN, txn=1):
        message = messages.Prepare(txn, plan.to_dict(), SPEC.to_dict(), bytes(32), 2)
        self.run(MessageIn(message))

    def acknowledge(self):
        for plane, transport in self.planes.items():
            self.run(*(Acknowledged(plane, token) for token in transport.subscribed))

    def loaded(self, plan=PLAN):
        weights = pack(TENSORS, resident_weights(SPEC, plan, "d0"))
        self.run(Loaded(plan.model, plan.epoch, weights))

    def ready(self, plan=PLAN):
        self.join()
        self.prepare(plan)
        self.acknowledge()
        self.loaded(plan)


@pytest.fixture
def device():
    made = []

    def make(**options):
        made.append(Device(**options))
        return made[-1]

    yield make
    for each in made:
        each.workers.close()


def request(admission=1, plan=PLAN, length=7):
    shape, inputs = sites.request(SPEC, (length,))
    payload = frames.encode_work(plan.model, plan.epoch, admission, shape, inputs)
    return shape, inputs, FrameIn(frames.decode(payload))


def test_online_only_when_both_connections_stand(device):
    d = device()
    d.run(LinkUp("control", 5, 1000))
    assert d.announced == []
    d.run(LinkUp("data", 4, None))
    assert d.announced == [LinkUp("control", 5, 1000)]


def test_announced_again_after_the_control_connection_was_lost(device):
    d = device()
    d.join()
    d.run(LinkDown("data", "x"), LinkUp("data", 4, None))
    assert len(d.announced) == 1
    d.run(LinkDown("control", "x"), LinkUp("control", 4, None))
    assert d.announced == [LinkUp("control", 5, None), LinkUp("control", 4, None)]
    assert d.loader.posted.count(AskAgain()) == 2


def test_ready_after_weights_and_every_acknowledgement(device):
    d = device()
    d.join()
    d.prepare()
    (load,) = d.loader.loads()
    assert load.refs == resident_weights(SPEC, PLAN, "d0")
    d.loaded()
    assert [type(m) for m in d.ups()] == [messages.Progress], "it gets further"
    d.acknowledge()
    (ready,) = [m for m in d.ups() if isinstance(m, messages.Ready)]
    assert (ready.txn, ready.epoch) == (1, PLAN.epoch)


def test_filters_of_a_plan_and_its_end(device):
    d = device()
    d.ready(TWO)
    x = TOPICS.activations_from(TWO.model, "d1", "d0")
    assert set(d.planes["data"].subscribed[2]) == {(f, 0) for f in x}
    assert d.planes["control"].subscribed[2] == ((TOPICS.work(TWO.model, TWO.devices[0]), 1),)
    d.run(MessageIn(messages.Release(2, TWO.model, TWO.epoch)))
    assert set(d.planes["data"].left) == set(x)
    assert d.planes["control"].left == [TOPICS.work(TWO.model, TWO.devices[0])]
    assert d.loader.posted[-1] == Unload(TWO.model, TWO.epoch, d.session.memory_bytes)


def test_a_request_is_answered_right_and_its_matmuls_are_metered(device, monkeypatch):
    d = device()
    d.ready()
    shape, inputs, event = request()
    d.run(event)
    output, done = d.ups(frames.Frame)
    expected = models.reference(SPEC, TENSORS, inputs, shape)[1]
    np.testing.assert_allclose(output.array(), expected, atol=sites.TOLERANCE)
    assert (output.kind, done.kind, done.admission) == ("output", "done", 1)
    assert len(done.numbers) == 4
    assert done.numbers[3] == 1  # parts of the answer
    assert len(d.meter.samples) == sum(op.kernel == "linear" for op, _, _ in d.meter.samples) > SPEC.layers
    assert all(seconds > 0 for _, _, seconds in d.meter.samples)
    monkeypatch.setattr(metering, "SHORTEST_S", 0.0)
    assert 0 < d.meter.slowdown(0.0) != 1.0


def test_activations_leave_on_the_data_plane(device):
    d = device()
    d.ready(TWO)
    d.run(request(plan=TWO)[2])
    sent = d.planes["data"].published
    assert sent
    for topic, payload, qos, retain in sent:
        parsed, frame = TOPICS.parse(topic), frames.decode(payload)
        assert (parsed.source, parsed.layer, frame.source, qos, retain) == ("d0", frame.layer, "d0", 0, False)


def test_an_op_that_fails_ends_its_request_only(device):
    d = device()
    d.ready()
    shape = PackedTokens((2,))
    bad = frames.encode_work(PLAN.model, PLAN.epoch, 1, shape, np.array([1, 10**6], np.int32))
    d.run(FrameIn(frames.decode(bad)), request(2)[2])
    (failed,) = d.ups(messages.RequestFailed)
    assert (failed.admission, failed.code) == (1, "device")
    assert d.complaints.counters["op_errors"] == 1
    assert [f.admission for f in d.ups(frames.Frame)] == [2, 2]


def test_a_request_that_cannot_be_read_is_reported(device):
    d = device()
    d.ready()
    frame = frames.decode(frames.encode(frames.Frame("work", PLAN.model, PLAN.epoch, 7, shape=(64,), body=bytes(64))))
    d.run(FrameIn(frame), request(8)[2])
    (failed,) = d.ups(messages.RequestFailed)
    assert (failed.admission, failed.code, failed.epoch) == (7, "wire", PLAN.epoch)
    assert [f.admission for f in d.ups(frames.Frame)] == [8, 8]


def test_a_plan_that_cannot_be_read_is_reported_where_it_says_whose_it_is(device):
    d = device()
    d.join()
    broken = {**PLAN.to_dict(), "strategy": "of the future"}
    d.run(MessageIn(messages.Prepare(3, broken, SPEC.to_dict(), bytes(32), 1)))
    d.run(MessageIn(messages.Prepare(4, {}, {}, bytes(32), 1)))
    d.run(MessageIn(messages.Prepare(5, {"model": 7, "epoch": "x"}, {}, bytes(32), 1)))
    (failed,) = d.ups()
    assert (failed.txn, failed.model, failed.epoch, failed.code) == (3, PLAN.model, PLAN.epoch, "no_plan")
    assert d.complaints.counters["event_errors"] == 3


def test_a_mistake_in_the_session_is_survived(device, monkeypatch):
    d = device()
    d.ready()

    def mistaken(event, now):
        raise RuntimeError("a mistake")

    with monkeypatch.context() as patch:
        patch.setattr(d.session, "handle", mistaken)
        d.run(request(1)[2], MessageIn(messages.Cancel(PLAN.model, PLAN.epoch, 1)))
    assert d.complaints.counters["event_errors"] == 2
    assert [m.admission for m in d.ups(messages.RequestFailed)] == [1]
    d.run(request(2)[2])
    assert [f.admission for f in d.ups(frames.Frame)] == [2, 2]


def test_a_message_over_the_brokers_limit_ends_its_request_with_the_settings_name(device):
    d = device(limit=1100)
    d.ready()
    shape, inputs = sites.request(SPEC, (7,), "hidden")
    payload = frames.encode_work(PLAN.model, PLAN.epoch, 1, shape, inputs)
    d.run(FrameIn(frames.decode(payload)))
    (failed,) = d.ups(messages.RequestFailed)
    assert "max_packet_size" in failed.text


def test_too_little_memory_is_refused_with_what_is_missing(device):
    d = device(memory_bytes=1000)
    d.join()
    d.prepare()
    (failed,) = d.ups()
    assert failed.code == "memory"
    assert failed.missing_bytes > 0
    assert d.loader.loads() == []


def test_a_refused_subscription_fails_the_plan(device):
    d = device()
    d.join()
    d.prepare(TWO)
    d.run(FiltersRefused("data", 2, ("hepti/x",), "not authorised"))
    (failed,) = d.ups()
    assert (failed.code, failed.epoch) == ("refused", TWO.epoch)
    assert "hepti/x" in failed.text


def test_a_refused_base_subscription_ends_the_agent(device):
    d = device()
    d.inbox.post(FiltersRefused("control", 1, ("hepti/cmd",), "not authorised"))
    with pytest.raises(RefusedError, match="hepti/cmd"):
        d.shell.run()
    assert d.shell.farewell


def test_a_refused_publish_is_a_complaint(device):
    d = device()
    d.run(FiltersRefused("control", None, ("t",), "no"))
    assert d.complaints.counters["publish_refused"] == 1


def test_a_new_planner_voids_what_the_old_one_prepared(device):
    d = device()
    d.run(PlannerStatus(described.Status("online", PLAN.epoch.boot)))
    d.ready()
    asked = d.loader.posted.count(AskAgain())
    d.run(PlannerStatus(described.Status("offline", PLAN.epoch.boot)))
    d.run(PlannerStatus(described.Status("online", PLAN.epoch.boot)))
    assert not [i for i in d.loader.posted if isinstance(i, Unload)]
    assert d.loader.posted.count(AskAgain()) == asked + 1
    d.run(PlannerStatus(described.Status("online", PLAN.epoch.boot + 1)))
    assert Unload(PLAN.model, PLAN.epoch, d.session.memory_bytes) in d.loader.posted
    d.run(request()[2])
    assert d.ups(frames.Frame) == []


def unloaded(d):
    return [(i.model, i.epoch) for i in d.loader.posted if isinstance(i, Unload)]


def test_own_will_heard_is_contradicted(device):
    d = device()
    d.ready()
    d.run(OwnStatus(described.Status("online", BOOT)))
    assert len(d.announced) == 1
    d.run(OwnStatus(described.Status("offline", BOOT)))
    assert len(d.announced) == 2


NEXT = replace(PLAN, epoch=Epoch(1, 2))
AWAY = (LinkDown("control", "x"), LinkUp("control", 5, None))
WILL = (OwnStatus(described.Status("offline", BOOT)),)


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
        assert failed == []
        assert unloaded(d) == [(PLAN.model, PLAN.epoch)]
        assert [load.epoch for load in d.loader.loads()] == [PLAN.epoch, BLOCK.epoch]
    else:
        assert [m.code for m in failed] == ["memory"]
        assert unloaded(d) == []


def test_a_late_will_of_an_earlier_start_is_overwritten(device):
    d = device()
    d.run(OwnStatus(described.Status("offline", BOOT - 1)))
    assert d.announced == []
    d.ready()
    d.run(OwnStatus(described.Status("offline", BOOT - 1)))
    assert len(d.announced) == 2
    assert not [i for i in d.loader.posted if isinstance(i, Unload)]


def test_boot_counters_of_a_time_that_has_not_come_are_not_believed(device):
    d = device()
    d.ready()
    for _ in range(3):
        d.run(OwnStatus(described.Status("online", 4_000_000_000)))
    assert len(d.announced) == 4, "what was forged is overwritten"
    d.run(PlannerStatus(described.Status("online", 4_000_000_000)))
    assert unloaded(d) == [], "nobody has taken the planner's place"
    assert d.complaints.counters["implausible_boot"] == 4


def test_another_agent_of_the_same_name_wins(device):
    d = device()
    d.join()
    d.inbox.post(OwnStatus(described.Status("online", BOOT + 1)))
    with pytest.raises(ConfigError, match="--id"):
        d.shell.run()
    assert not d.shell.farewell


def test_events_of_the_network_go_before_further_ops(device):
    d = device()
    d.ready()
    _, _, event = request(1)
    cancel = MessageIn(messages.Cancel(PLAN.model, PLAN.epoch, 1))
    d.run(event, cancel)
    assert d.ups(frames.Frame) == []


def test_frames_of_dead_epochs_are_dropped(device):
    d = device()
    d.ready()
    payload = frames.encode_work(PLAN.model, Epoch(1, 99), 1, PackedTokens((1,)), np.zeros(1, np.int32))
    d.run(FrameIn(frames.decode(payload)))
    assert d.session.counters["dead_epoch"] == 1


def test_an_arrival_that_no_run_awaits_is_taken_as_its_frame_is() -> None:
    device = Device()
    device.join()
    frame = frames.Frame("tensor", "m", Epoch(1, 1), 7, 0, 3, "d1", 0, "f32", (2,), 0, (), np.zeros(2, np.float32))
    payload, known = memoryview(frames.encode(frame)), Exchanges()
    known.learn("d1", "topic", payload, frame)
    device.run(known.arrival("d1", "topic", payload), FrameIn(frames.decode(payload)))
    assert device.session.counters == {"dead_epoch": 2}
    assert not device.complaints.counters
