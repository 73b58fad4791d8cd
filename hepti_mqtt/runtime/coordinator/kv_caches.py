"""KV caches of texts on devices: begin with a prefix, suspend for lack of room, keep, restore, drop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.cost.memory import session_rows
from hepti_mqtt.models import largest_shape
from hepti_mqtt.models.shapes import cache_rows
from hepti_mqtt.protocol.frames import MAX_SESSION
from hepti_mqtt.protocol.messages import KeptSession
from hepti_mqtt.runtime.coordinator.interface import CoordinatorCommand, LogEvent
from hepti_mqtt.runtime.coordinator.orders import Orders
from hepti_mqtt.runtime.coordinator.plan_groups import PlanGroup
from hepti_mqtt.runtime.coordinator.plans import PlanRecord
from hepti_mqtt.runtime.coordinator.prefixes import HeldSessions, HeldText, SessionId
from hepti_mqtt.runtime.coordinator.requests import Request, WorkItem
from hepti_mqtt.runtime.coordinator.texts import Generation

ROWS_AHEAD: Final = 256  # reserved rows beyond the text so far: most answers are no longer


def _open_texts(group: PlanGroup) -> list[Generation]:
    """Return the texts of unfinished requests."""
    texts = {id(r): r.generation for r in group.requests() if not r.finished}
    return [text for text in texts.values() if text is not None]


def reserved_rows(group: PlanGroup, version: PlanVersion) -> int:
    """Return the rows that open sessions under a plan reserve."""
    return sum(rows_of_text(text) for text in _open_texts(group) if text.session.plan_version == version)


def rows_of_text(text: Generation) -> int:
    """Return the rows that a text's session reserves: tokens so far plus `ROWS_AHEAD`."""
    if text.carried.size:
        return text.shape.session_rows
    return cache_rows(len(text.prompt) + len(text.text.tokens) + ROWS_AHEAD, text.shape.session_rows)


def _held_text(group: PlanGroup, generation: Generation) -> HeldText | None:
    """Return the text in a session; None if no other text can reuse it."""
    session, longest = generation.session, largest_shape(group.served.spec).session_rows
    if session.plan_version is None or generation.carried.size or not longest:
        return None
    ids = np.array(generation.identity[: session.rows], np.int32)
    return HeldText((session.plan_version, session.number), ids, longest, group.name)


def waiting_texts(group: PlanGroup, record: PlanRecord) -> list[Generation]:
    """Return the queued texts with sessions under a plan."""
    texts = (item.request.generation for item in group.queue)
    return [text for text in texts if text is not None and text.session.plan_version in record.versions]


def check_texts(group: PlanGroup) -> None:
    """Raise AssertionError if sessions and runs of open texts contradict each other."""
    texts = [text for text in _open_texts(group) if text.session.plan_version is not None]
    sessions = {(text.session.plan_version, text.session.number) for text in texts}
    assert len(sessions) == len(texts), "two texts write to one session"
    assert all(text.session.rows <= len(text.prompt) + len(text.text.tokens) for text in texts)
    for run in group.runs.values():
        running = [item.request.generation for item in run.open_items if run.state == "dispatched"]
        versions = {text.session.plan_version for text in running if text is not None}
        assert versions <= {run.plan_version}, "a run of an abandoned session"


class KvCaches:
    """The sessions of running texts, and of ended texts while devices have room for them."""

    def __init__(self, orders: Orders, in_flight: int) -> None:
        self._orders, self._in_flight = orders, in_flight
        self._held = HeldSessions()
        self._number = 0  #: number of the last session
        #: Kept rows of earlier sessions, by the plan version that may continue them, device and session.
        self._reported: dict[PlanVersion, dict[str, dict[SessionId, int]]] = {}

    def room_rows(self, group: PlanGroup) -> int:
        """Return the room of all sessions under a plan, in rows; 0 for a model without sessions."""
        return session_rows(group.served.spec, self._in_flight)

    def begin(self, group: PlanGroup, plan: Plan, generation: Generation) -> list[CoordinatorCommand]:
        """Begin a session under a plan, with the longest prefix that devices hold.

        A session that takes over another one gets a new number, so that late steps ahead of the other request do not
        write to it.
        """
        self._number = self._number % MAX_SESSION + 1
        ids = () if generation.carried.size or generation.wants_states else generation.identity
        version, ended = plan.version, [session for under, session in generation.session.left if under == plan.version]
        open_texts = (_held_text(group, text) for text in _open_texts(group))
        prefix = self._held.find(version, ids, [text for text in open_texts if text is not None and len(text.ids)])
        if prefix is not None and prefix.moves:
            self._held.forget((version, prefix.session))
        generation.session.start(version, self._number, prefix)
        generation.session.left.clear()
        generation.states.clear()
        if not generation.text.tokens:
            generation.session.reused_rows = min(generation.session.rows, len(generation.prompt))
        room_rows = self.room_rows(group) - reserved_rows(group, version) - rows_of_text(generation)
        ended += self._held.make_room(version, room_rows, 0 if prefix is None else prefix.session)
        return self.end(group, version, ended)

    def suspend(self, group: PlanGroup, room_rows: int) -> list[CoordinatorCommand]:
        """Suspend the sessions of the latest queued requests until all open sessions fit.

        The earliest request keeps its session, so that it ends and frees its rows.
        """
        out: list[CoordinatorCommand] = []
        for version in {plan.version for plan in group.session_plans}:
            while reserved_rows(group, version) > room_rows:
                earliest = min(r.sequence for r in group.requests() if r.generation and not r.finished)
                waiting = (item.request for item in group.queue if item.request.sequence > earliest)
                last = max(
                    (r for r in waiting if r.generation and r.generation.session.plan_version == version),
                    key=lambda r: r.sequence,
                    default=None,
                )
                if last is None or last.generation is None:
                    break
                out += self.end(group, version, [last.generation.session.number])
                last.generation.session.leave()
        return out

    def keep(self, group: PlanGroup, generation: Generation) -> list[CoordinatorCommand]:
        """Keep the cache of an ended text for texts with the same prefix, while devices have room."""
        if (text := _held_text(group, generation)) is None:
            return []
        version = text.session[0]
        self._held.keep(text)
        room_rows = self.room_rows(group) - reserved_rows(group, version)
        return self.end(group, version, self._held.make_room(version, room_rows))

    def texts(self) -> list[HeldText]:
        """Return the texts that devices hold for ended requests, oldest first."""
        return list(self._held)

    def recall(self, texts: Iterable[HeldText]) -> None:
        """Take the texts of an earlier planner, oldest first: devices may have kept their rows."""
        for text in texts:
            self._held.keep(text)
            self._number = max(self._number, text.session[1])

    def restore(
        self, group: PlanGroup, plan: Plan, device: str, sessions: Sequence[KeptSession]
    ) -> list[CoordinatorCommand]:
        """Continue texts under a plan if all of its devices have kept their rows; drop sessions of unknown texts."""
        alive = group.plans.versions()
        self._reported = {v: rows for v, rows in self._reported.items() if v in alive}
        reported = self._reported.setdefault(plan.version, {})
        reported.setdefault(device, {}).update({(s.origin, s.number): s.rows for s in sessions})
        unknown = [s.number for s in sessions if self._text(group, (s.origin, s.number)) is None]
        out: list[CoordinatorCommand] = [*self.end(group, plan.version, unknown)]
        if reported.keys() < {*plan.devices}:
            return out
        restored = 0
        for session in set.intersection(*({*rows} for rows in reported.values())):
            if self._text(group, session) is not None:
                self._held.restore(session, plan.version, min(rows[session] for rows in reported.values()))
                restored += 1
        text = f"plan {plan.version} of {group.name} continues {restored} KV caches of earlier plans"
        return [*out, LogEvent("restored", text)] if restored else out

    def _text(self, group: PlanGroup, session: SessionId) -> HeldText | None:
        """Return the text in a session if it is of this model."""
        text = self._held.get(session)
        return text if text is not None and text.model == group.name else None

    def forget_prefixes(self, version: PlanVersion, items: Sequence[WorkItem]) -> bool:
        """Forget the prefixes of items whose sessions a device has lost; return whether there were any."""
        texts = [item.request.generation for item in items if item.request.generation is not None]
        prefixes = [text.session.prefix for text in texts if text.session.prefix is not None]
        for prefix in prefixes:
            self._held.forget((version, prefix.session))
        return bool(prefixes)

    def end_of(self, group: PlanGroup, request: Request) -> list[CoordinatorCommand]:
        """Let devices drop the caches of a failed request after its last run."""
        text = request.generation
        if text is None or not request.finished or text.done:
            return []
        if any(run.is_computing and any(i.request is request for i in run.items) for run in group.runs.values()):
            return []
        text.session.leave()
        left, text.session.left = text.session.left, []
        return [c for version, session in left for c in self.end(group, version, [session])]

    def end(self, group: PlanGroup, version: PlanVersion, sessions: Sequence[int]) -> list[CoordinatorCommand]:
        """Let devices drop sessions of a plan; if the plan is gone, so are its sessions."""
        plans = (run for record in group.plans.records() for run in record.plan.executables)
        plan = next((run for run in plans if run.version == version), None)
        return [] if plan is None else [*self._orders.end_sessions(plan, sessions)]
