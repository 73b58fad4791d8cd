"""A planner that has agreed on secrets with its devices: what it takes of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np
from scripted_site import SPEC, Site, caps

from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import programs_digest
from hepti_mqtt.protocol import frames, keys, messages
from hepti_mqtt.protocol.frames import Frame, decode_work
from hepti_mqtt.protocol.keys import UNKEYED, Channel, FrameKey
from hepti_mqtt.protocol.messages import Status
from hepti_mqtt.runtime.coordinator import interface

SECRET, OWN, FORGER = b"1" * 32, b"2" * 32, b"3" * 32


class Keyed(Site):
    """A site of one device, which has a key."""

    def __init__(self) -> None:
        super().__init__(secret=SECRET)
        self.channel = Channel(keys.agree(OWN, keys.public_key(SECRET)), count(1), at_planner=False)
        self.boots["a"] = 1
        self.describe(OWN)
        self.event(interface.DeviceStatus("a", Status("online", 1)))
        self.tick(1.1)

    def describe(self, private: bytes) -> None:
        self.event(interface.DeviceCaps("a", replace(caps("a", 1), public_key=keys.public_key(private))))

    def ready_message(self) -> messages.Ready:
        asked = self.prepares()["a"]
        plan = Plan.from_dict(asked.plan)
        return messages.Ready(asked.transaction_id, plan.model, plan.version, 1000, programs_digest(SPEC, plan))

    def say(self, message: messages.Message, channel: Channel | None) -> None:
        payload = messages.encode(message) if channel is None else channel.seal(messages.encode(message))
        self.event(interface.DeviceMessage("a", *messages.decode_sealed(payload)))

    @property
    def frame_key(self) -> FrameKey:
        """Of the last plan, as the device knows it."""
        asked = self.prepares()["a"]
        plan = Plan.from_dict(asked.plan)
        return FrameKey(self.channel.wrapped(asked.key, plan.model, plan.version), asked.checked)

    def give_answer(self, run_id: int, key: FrameKey, value: float) -> None:
        work = self.work[run_id]
        shape, _ = decode_work(work)
        body = np.full((len(shape.sizes), SPEC.hidden), value, np.float32)
        out = Frame(
            "output", work.model, work.plan_version, run_id, source="a", dtype="f32", shape=body.shape, body=body
        )
        done = Frame("done", work.model, work.plan_version, run_id, source="a", numbers=(2000, 500, 100, 1))
        for frame in (out, done):
            self.event(interface.DeviceFrame("a", frames.decode(frames.encode(frame, key))))


def test_a_report_that_the_device_has_not_sealed_counts_for_nothing() -> None:
    site = Keyed()
    stranger = Channel(keys.agree(FORGER, keys.public_key(SECRET)), count(1), at_planner=False)
    for channel in (None, stranger):
        site.say(site.ready_message(), channel)
    assert site.plan is None
    assert site.session.counters["forged"] == 2
    site.say(site.ready_message(), site.channel)
    assert site.plan is not None


def test_outputs_without_the_tag_of_the_plan_are_no_answer() -> None:
    site = Keyed()
    site.say(site.ready_message(), site.channel)
    site.submit("r1")
    (run_id,) = site.work
    assert site.work[run_id].has_tag(site.frame_key)
    for key in (UNKEYED, FrameKey(FORGER)):
        site.give_answer(run_id, key, 7.0)
    assert not site.answers
    site.give_answer(run_id, site.frame_key, 1.0)
    assert site.answers["r1"].request.outputs[0].max() == 1.0


def test_caps_with_another_key_are_not_believed_once_the_device_has_shown_its_own() -> None:
    site = Keyed()
    site.describe(FORGER)
    site.describe(OWN)
    site.say(site.ready_message(), site.channel)
    assert site.plan is not None, "what was forged before is put right"
    for private in (FORGER, OWN):
        site.describe(private)
    assert "a" in site.session.fleet.usable()
    site.submit("r1")
    site.give_answer(next(iter(site.work)), site.frame_key, 1.0)
    assert "r1" in site.answers


def test_a_plan_with_a_device_that_has_no_key_has_none() -> None:
    site = Keyed()
    site.join("b")
    fleet = site.session.fleet
    plan = Plan.from_dict(site.prepares()["a"].plan)
    assert fleet.frame_key(plan).key
    assert fleet.frame_key(replace(plan, devices=("a", "b"))) == UNKEYED
