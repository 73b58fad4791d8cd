"""KV caches that texts have on devices: begun with rows of another text, suspended for lack of room, kept, dropped."""

from __future__ import annotations

from collections.abc import Sequence

from hepti_mqtt.cost.memory import session_rows
from hepti_mqtt.ids import PlanVersion
from hepti_mqtt.plan import Plan
from hepti_mqtt.protocol.frames import MAX_SESSION
from hepti_mqtt.runtime.coordinator.interface import CoordinatorCommand
from hepti_mqtt.runtime.coordinator.models import PlanGroup
from hepti_mqtt.runtime.coordinator.orders import Orders
from hepti_mqtt.runtime.coordinator.prefixes import HeldSessions
from hepti_mqtt.runtime.coordinator.requests import Request, WorkItem
from hepti_mqtt.runtime.coordinator.texts import Generation


class KvCaches:
    """The sessions of running texts, and those of ended texts that devices still have room for."""

    def __init__(self, orders: Orders, in_flight: int) -> None:
        self._orders, self._in_flight = orders, in_flight
        self._held = HeldSessions()
        self._number = 0  #: of the last session

    def room_rows(self, group: PlanGroup) -> int:
        """Return the rows that all sessions under a plan have room for, 0 for a model without sessions."""
        return session_rows(group.served.spec, self._in_flight)

    def begin(self, group: PlanGroup, plan: Plan, generation: Generation) -> list[CoordinatorCommand]:
        """Begin a session under a plan: with rows of one whose text begins alike, if devices hold any.

        It has a number of its own also if it takes such a session over: steps that were ordered ahead for the request
        before may still be on their way to devices, and must not write to it.
        """
        self._number = self._number % MAX_SESSION + 1
        ids = () if generation.carried.size or generation.wants_states else (*generation.prompt, *generation.tokens)
        version, ended = plan.version, [session for under, session in generation.left if under == plan.version]
        prefix = self._held.find(version, ids, group.held_texts())
        if prefix is not None and prefix.moves:
            self._held.forget((version, prefix.session))
        generation.start_session(version, self._number, prefix)
        generation.left.clear()
        room_rows = self.room_rows(group) - group.reserved_rows(version) - generation.reserved_rows
        ended += self._held.make_room(version, room_rows, 0 if prefix is None else prefix.session)
        return self.end(group, version, ended)

    def suspend(self, group: PlanGroup) -> list[CoordinatorCommand]:
        """Take the sessions of the latest requests back while those that are open have grown beyond their room.

        Never that of the earliest one: it ends, and makes room.
        """
        out, room_rows = list[CoordinatorCommand](), self.room_rows(group)
        for version in {plan.version for plan in group.session_plans} if room_rows else ():
            while group.reserved_rows(version) > room_rows:
                earliest = min(r.sequence for r in group.requests() if r.generation and not r.finished)
                waiting = (item.request for item in group.queue if item.request.sequence > earliest)
                last = max(
                    (r for r in waiting if r.generation and r.generation.plan_version == version),
                    key=lambda r: r.sequence,
                    default=None,
                )
                if last is None or last.generation is None:
                    break
                out += self.end(group, version, [last.generation.session])
                last.generation.leave_session()
        return out

    def keep(self, group: PlanGroup, generation: Generation) -> list[CoordinatorCommand]:
        """Keep the cache of a text that has ended, for texts that begin alike, while devices have room."""
        if (text := generation.held(group.longest_rows)) is None:
            return []
        version = text.session[0]
        self._held.keep(text)
        room_rows = self.room_rows(group) - group.reserved_rows(version)
        return self.end(group, version, self._held.make_room(version, room_rows))

    def forget_prefixes(self, version: PlanVersion, items: Sequence[WorkItem]) -> bool:
        """Forget the caches whose rows texts began with, because a device lost them; return whether there were any."""
        made = [item.request.generation for item in items if item.request.generation is not None]
        prefixes = [generation.prefix for generation in made if generation.prefix is not None]
        for prefix in prefixes:
            self._held.forget((version, prefix.session))
        return bool(prefixes)

    def end_of(self, group: PlanGroup, request: Request) -> list[CoordinatorCommand]:
        """Let devices drop the caches of a request that has failed, once no run with it is under way."""
        made = request.generation
        if made is None or not request.finished or made.done:
            return []
        if any(run.is_computing and any(i.request is request for i in run.items) for run in group.runs.values()):
            return []
        made.leave_session()
        left, made.left = made.left, []
        return [c for version, session in left for c in self.end(group, version, [session])]

    def end(self, group: PlanGroup, version: PlanVersion, sessions: Sequence[int]) -> list[CoordinatorCommand]:
        """Let devices drop sessions; those of a plan that is gone have gone with it."""
        plans = (run for record in group.plans.records() for run in record.plan.executables)
        plan = next((run for run in plans if run.version == version), None)
        return [] if plan is None else [*self._orders.end_sessions(plan, sessions)]
