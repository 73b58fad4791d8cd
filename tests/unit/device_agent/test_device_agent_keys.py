"""A device that has agreed on a secret with the planner: what it takes, and what it seals."""

from __future__ import annotations

from itertools import count

import pytest
import shell_support
from shell_support import PLAN, SPEC, UP, unloaded

from device_agent.network import PlannerStatus
from hepti_mqtt import __version__
from hepti_mqtt.protocol import frames, keys, messages
from hepti_mqtt.protocol.keys import Channel, FrameKey
from hepti_mqtt.protocol.messages import Status

device = pytest.fixture(shell_support.devices)
OWN, THEIRS, FORGER = b"1" * 32, b"2" * 32, b"3" * 32
KEY = FrameKey(b"k" * 32)


class Keyed:
    """A device that has met a planner, and the planner's end of their channel."""

    def __init__(self, make):
        self.device = make(private_key=OWN)
        self.channel = Channel(keys.agree(THEIRS, keys.public_key(OWN)), count(1), at_planner=True)
        self.meet(THEIRS)
        self.device.join()

    def meet(self, private):
        said = Status("online", PLAN.version.boot, version=__version__, public_key=keys.public_key(private))
        self.device.run(PlannerStatus(said))

    def tell(self, payload):
        self.device.planes["control"].hear(shell_support.TOPICS.command("d0"), payload)
        self.device.run()

    def seal(self, message):
        return self.channel.seal(messages.encode(message))

    def ready(self):
        wrapped = self.channel.wrapped(KEY.key, PLAN.model, PLAN.version)
        self.tell(self.seal(messages.Prepare(1, PLAN.to_dict(), SPEC.to_dict(), bytes(32), 2, key=wrapped)))
        self.device.acknowledge()
        self.device.loaded()

    def reports(self):
        return [payload for topic, payload, *_ in self.device.planes["control"].published if topic == UP]


@pytest.fixture
def keyed(device):
    return Keyed(device)


def test_what_the_planner_has_not_sealed_is_dropped_and_counted(keyed):
    keyed.ready()
    stranger = Channel(keys.agree(FORGER, keys.public_key(OWN)), count(100), at_planner=True)
    drain = messages.encode(messages.ReleaseAll(1))
    sealed = keyed.channel.seal(drain)
    for forged in (drain, stranger.seal(drain), sealed[:-1] + bytes([sealed[-1] ^ 1])):
        keyed.tell(forged)
    assert unloaded(keyed.device) == []
    assert keyed.device.complaints.counters["forged"] == 3
    keyed.tell(sealed)
    assert unloaded(keyed.device) == [(PLAN.model, PLAN.version)]


def test_a_command_that_was_recorded_does_nothing_later(keyed):
    drain = keyed.seal(messages.ReleaseAll(1))
    keyed.tell(drain)
    keyed.ready()
    keyed.tell(drain)
    assert unloaded(keyed.device) == []


def test_work_without_the_plans_tag_is_dropped_and_answers_have_it(keyed):
    keyed.ready()
    shape, inputs, _ = shell_support.request()
    for run_id, key in ((1, keys.UNKEYED), (2, KEY._replace(key=b"l" * 32)), (3, KEY)):
        payload = frames.encode_work(PLAN.model, PLAN.version, run_id, shape, inputs, key=key)
        keyed.device.planes["control"].hear(shell_support.TOPICS.work("m", "d0"), payload)
        keyed.device.run()
    assert keyed.device.session.counters["forged"] == 2
    sent = [frames.decode(payload) for payload in keyed.reports() if payload[:4] == frames.MAGIC]
    assert [frame.run_id for frame in sent] == [3, 3]
    assert all(frame.has_tag(KEY) for frame in sent)


def test_the_planner_reads_its_reports_and_nobody_else_can_write_them(keyed):
    keyed.ready()
    said = [messages.decode_sealed(payload) for payload in keyed.reports()]
    assert messages.Ready in {type(message) for message, _ in said}
    assert all(keyed.channel.accepts(seal) for _, seal in said)


def test_a_key_that_was_used_is_not_replaced_by_one_of_the_same_start(keyed):
    keyed.meet(FORGER)
    keyed.meet(THEIRS)
    keyed.ready()
    assert unloaded(keyed.device) == []
    keyed.meet(FORGER)
    keyed.tell(keyed.seal(messages.ReleaseAll(9)))
    assert unloaded(keyed.device) == [(PLAN.model, PLAN.version)]


def test_a_planner_without_keys_is_served_as_before(device):
    plain = device(private_key=OWN)
    plain.run(PlannerStatus(Status("online", PLAN.version.boot, version=__version__)))
    plain.ready()
    assert messages.Ready in {type(up) for up in plain.ups()}
