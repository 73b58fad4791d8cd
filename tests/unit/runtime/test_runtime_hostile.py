"""Mutated messages of devices while requests go on, on a virtual clock: no request notices."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from mutations import MUTATIONS
from scripted_site import KeyedSite, caps, everyone, heartbeat, private_of

from hepti_mqtt.core.ids import PlanVersion, Start
from hepti_mqtt.protocol import keys, messages
from hepti_mqtt.protocol.frames import Frame, encode
from hepti_mqtt.protocol.messages import Status
from hepti_mqtt.runtime.coordinator.fleet import DEBOUNCE_S, LastWillDebounce
from hepti_mqtt.runtime.coordinator.interface import CoordinatorCommand, CoordinatorEvent, DeviceStatus, Tick
from hepti_mqtt.service.decoder import MessageDecoder, PlannerStatus, RawRequest, RetainedPlan

DEVICES = ("a", "b")
MUTATED = 600


class HostileSite:
    """A keyed site behind its decoder and the debounce of wills; devices correct forged messages immediately."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.site = KeyedSite(*DEVICES, decider=everyone)
        self.site.ready()
        assert self.site.plan is not None
        self.decoder = MessageDecoder("home")
        self.debounce = LastWillDebounce(self)  # type: ignore[arg-type]
        topics, self.own = self.decoder.topics, dict[str, bytes]()
        for name in DEVICES:
            described = replace(caps(name, 1), public_key=keys.public_key(private_of(name)))
            self.own[topics.caps(name)] = messages.encode_caps(described)
            self.own[topics.status(name)] = messages.encode_status(Status("online", 1))
        self.captured = dict(self.own)
        for name in DEVICES:
            self.captured[topics.heartbeat(name)] = messages.encode_heartbeat(heartbeat(1))
            self.captured[topics.reports(name)] = self._report(name)

    def _report(self, name: str) -> bytes:
        work = next(iter(self.site.work.values()), None)
        version = PlanVersion(7, 1)
        if work is None or self.random.random() < 0.5:
            failed = messages.RunFailed("m", version, 1, "device", "no")
            return self.site.channels[name].seal(messages.encode(failed))
        return encode(Frame("done", "m", work.plan_version, work.run_id, source=name, numbers=(1, 1, 1, 1)))

    def hear(self, topic: str, payload: bytes) -> None:
        arrival = self.decoder.decode(topic, payload)
        strange = PlannerStatus | RawRequest | RetainedPlan
        if arrival is not None and not isinstance(arrival, strange):
            takes_over = isinstance(arrival, DeviceStatus) and arrival.status.start > Start(0, 1)  # by design
            if not takes_over:
                self.debounce.handle(arrival, self.site.now)

    def handle(self, event: CoordinatorEvent, _now: float) -> list[CoordinatorCommand]:
        """Take what the debounce hands on."""
        return self.site.event(event)

    def attack(self) -> None:
        """Let one mutated message come, and then what its device says again."""
        topic = self.random.choice(sorted(self.captured))
        payload = self.captured[self.random.choice(sorted(self.captured))]
        payload = self.captured[topic] if self.random.random() < 0.9 else payload
        self.hear(topic, self.random.choice(MUTATIONS)(bytearray(payload), self.random))
        if topic in self.own:
            self.hear(topic, self.own[topic])


@pytest.mark.parametrize("seed", range(3))
def test_mutated_messages_cost_no_request_its_answer(seed: int) -> None:
    hostile = HostileSite(seed)
    site = hostile.site
    for number in range(MUTATED):
        hostile.attack()
        if number % 10 == 0:
            site.tick(DEBOUNCE_S)
            hostile.debounce.handle(Tick(), site.now)
            site.submit(f"r{number}")
            run_id = max(site.work)
            hostile.attack()
            site.give_answer(run_id, site.frame_key(site.plan.root), 1.0)
            assert f"r{number}" in site.answers
    assert not site.errors
    assert set(site.session.fleet.usable()) == set(DEVICES)
    assert not site.notes()["left"]
