"""A device's starts as a planner meets them: any order of restarts, hangs and losses of the broker's state."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_site import caps, heartbeat

from hepti_mqtt.core.ids import Start
from hepti_mqtt.protocol.messages import Status
from hepti_mqtt.protocol.starts import NameHolder, next_term
from hepti_mqtt.runtime.coordinator.fleet import Fleet

ANSWER_S = 10


@dataclass
class World:
    """One device's processes, the broker and the planner's fleet; a second passes with every step."""

    fleet: Fleet = field(default_factory=Fleet)
    retained: Status | None = None
    saved: Status | None = None
    alive: dict[int, NameHolder] = field(default_factory=dict)
    hung: set[int] = field(default_factory=set)
    boots: int = 0
    now: float = 100.0

    def publish(self, status: Status, caps_too: bool) -> None:
        """Publish a status, retained; everybody who is not hung hears it."""
        if caps_too:
            self.fleet.record_caps("a", caps("a", status.boot))
        self.retained = status
        self.fleet.record_status("a", status, self.now)
        for boot, holder in list(self.alive.items()):
            self.hear(boot, holder, status)

    def hear(self, boot: int, holder: NameHolder, status: Status) -> None:
        if boot in self.hung or boot not in self.alive:
            return
        verdict = holder.handle(status, self.now)
        if verdict == "taken":
            del self.alive[boot]
        elif verdict == "contradict":
            self.publish(Status("online", boot, term=holder.start.term), True)

    def start(self, number: int) -> None:
        boot = self.boots = self.boots + 1
        holder = NameHolder(Start(next_term(self.retained), boot * (-1) ** number % 997))
        self.alive[holder.start.boot] = holder
        self.publish(Status("online", holder.start.boot, term=holder.start.term), True)

    def kill(self, number: int) -> None:
        for boot in list(self.alive)[number % 3 :][:1]:
            holder = self.alive.pop(boot)
            self.hung.discard(boot)
            if number % 2:  # else the broker was away, too
                self.publish(Status("offline", boot, term=holder.start.term), False)

    def hang(self, number: int) -> None:
        self.hung.update(list(self.alive)[number % 3 :][:1])

    def resume(self, _number: int) -> None:
        """The hung go on; the broker has closed their connections, so they announce themselves again."""
        for boot in list(self.hung & self.alive.keys()):
            self.hung.discard(boot)
            holder, before = self.alive[boot], self.retained
            self.publish(Status("online", boot, term=holder.start.term), True)
            if before is not None:
                self.hear(boot, holder, before)

    def wipe(self, number: int) -> None:
        """The broker is killed, and has lost what it retained since its last save, or all."""
        self.retained = self.saved if number % 2 else None
        for boot, holder in list(self.alive.items()):
            if boot in self.alive and boot not in self.hung:
                self.publish(Status("online", boot, term=holder.start.term), True)
        if self.retained is not None:
            self.fleet.record_status("a", self.retained, self.now)

    def save(self, _number: int) -> None:
        self.saved = self.retained

    def second(self) -> None:
        self.now += 1
        for boot in list(self.alive):
            if boot not in self.hung:
                self.fleet.record_heartbeat("a", heartbeat(boot), self.now)
        self.fleet.mark_silent_offline(self.now)


STEPS = st.tuples(st.sampled_from(["start", "kill", "hang", "resume", "wipe", "save"]), st.integers(0, 5))


@settings(max_examples=300)
@given(st.lists(STEPS, max_size=25))
def test_whoever_is_there_serves_soon_and_nobody_else(steps: list[tuple[str, int]]) -> None:
    world = World()
    for what, number in steps:
        getattr(world, what)(number)
        world.second()
    world.resume(0)
    for _ in range(ANSWER_S):
        world.second()
    assert len(world.alive) <= 1, "of several one stays"
    there = {member.boot for member in world.fleet.usable().values()}
    assert there == set(world.alive)
