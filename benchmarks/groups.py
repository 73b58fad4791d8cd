"""Many groups behind one request topic, on a virtual clock: `python -m benchmarks.groups`.

Clients are `ClientSession`s; the broker and the groups are played. A group computes one request after the other. A
third of the groups is lost in the middle; the broker notices some time later, and until then gives them their share.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, Literal

import numpy as np

from hepti_mqtt.client.session import CheckLater, ClientSession, RequestEnded, RequestPublish
from hepti_mqtt.protocol.messages import ACCEPTED_BY, ANSWER, ANSWER_PLAN, Status, encode_status
from hepti_mqtt.protocol.topics import Topics

MODEL: Final = "m"
WAY_S: Final = 0.001  # of a message through the broker
T: Final = Topics("cluster")
Dispatch = Literal["turns", "fewest"]


@dataclass(frozen=True)
class Scenario:
    """groups compute a request in service_s, give or take spread; load: of all groups before the loss of `lost`."""

    groups: int = 250
    service_s: float = 0.4
    spread: float = 0.2
    load: float = 0.6
    lost: float = 1 / 3
    lost_at_s: float = 30.0
    noticed_s: float = 1.0
    until_s: float = 90.0
    clients: int = 20
    dispatch: Dispatch = "turns"
    seed: int = 1


@dataclass
class Group:
    """A group: what waits there, the first of it being computed."""

    name: str
    service_s: float
    held: deque[tuple[int, dict[str, Any]]] = field(default_factory=deque)
    given: int = 0
    alive: bool = True


class Run:
    """One run of a scenario; asked_s, latency_s: by request, computed: how often."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.random = scenario, random.Random(scenario.seed)
        low, high = 1 - scenario.spread, 1 + scenario.spread
        self.groups = [
            Group(f"g{i}", scenario.service_s * self.random.uniform(low, high)) for i in range(scenario.groups)
        ]
        self.members, self.turn = list(self.groups), 0
        self.clients = [ClientSession("cluster", f"c{i}") for i in range(scenario.clients)]
        self.asked_s: dict[str, float] = {}
        self.latency_s: dict[str, float] = {}
        self.computed: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self.now, self._order = 0.0, count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def run(self) -> Run:
        """Run until every request is answered, or nothing more happens."""
        for client in range(len(self.clients)):
            for group in self.groups:
                self._status(client, group, "online")
        self._later(0.0, self._ask)
        self._later(self.scenario.lost_at_s, self._lose)
        while self._due:
            self.now, _, action = heapq.heappop(self._due)
            action()
        return self

    def _later(self, after_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + after_s, next(self._order), action))

    # -- clients -----------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        name, client = f"q{len(self.asked_s)}", self.random.randrange(len(self.clients))
        self.asked_s[name] = self.now
        self._publish(client, self.clients[client].add_request(MODEL, name, {}, name, self.now))
        rate = self.scenario.load * sum(1 / group.service_s for group in self.groups)
        if self.now < self.scenario.until_s:
            self._later(self.random.expovariate(rate), self._ask)

    def _hear(self, client: int, topic: str, payload: bytes) -> None:
        for event in self.clients[client].handle_message(topic, payload, self.now):
            if isinstance(event, RequestPublish):
                self._publish(client, event)
            elif isinstance(event, CheckLater):
                self._later(event.after_s, lambda: self._look_again(client))
            elif isinstance(event, RequestEnded):
                name = str(event.handle)
                self.answers[name] += 1
                self.latency_s[name] = self.now - self.asked_s[name]

    def _look_again(self, client: int) -> None:
        for publication in self.clients[client].resend_unaccepted(self.now):
            self._publish(client, publication)

    def _status(self, client: int, group: Group, state: Literal["online", "offline"]) -> None:
        self._hear(client, T.planner_status(group.name), encode_status(Status(state, 1)))

    # -- the broker --------------------------------------------------------------------------------------------------

    def _publish(self, client: int, publication: RequestPublish) -> None:
        data = json.loads(publication.payload)
        self._later(WAY_S, lambda: self._give(client, data))

    def _give(self, client: int, data: dict[str, Any]) -> None:
        if self.scenario.dispatch == "fewest":
            group = min(self.members, key=lambda member: len(member.held))
        else:
            group = self.members[self.turn % len(self.members)]
            self.turn += 1
        group.given += 1
        if not group.alive:
            group.held.append((client, data))  # as far as the broker knows
            return
        self._reply(client, data["id"], {ACCEPTED_BY: group.name, "final": False})
        group.held.append((client, data))
        if len(group.held) == 1:
            self._later(group.service_s, lambda: self._computed(group))

    def _reply(self, client: int, request: str, told: dict[str, Any]) -> None:
        topic, payload = T.response(MODEL, f"c{client}", request), json.dumps({"id": request, **told}).encode()
        self._later(WAY_S, lambda: self._hear(client, topic, payload))

    def _lose(self) -> None:
        gone = self.random.sample(self.groups, round(self.scenario.lost * len(self.groups)))
        for group in gone:
            group.alive = False
            group.held.clear()

        def notice() -> None:
            self.members = [member for member in self.members if member.alive]
            for group in gone:
                for client in range(len(self.clients)):
                    self._status(client, group, "offline")

        self._later(self.scenario.noticed_s, notice)

    # -- groups ------------------------------------------------------------------------------------------------------

    def _computed(self, group: Group) -> None:
        if not group.alive:
            return
        client, data = group.held.popleft()
        self.computed[data["id"]] += 1
        plan = dict.fromkeys(ANSWER_PLAN)
        self._reply(client, data["id"], {**dict.fromkeys(ANSWER), "ok": True, "id": data["id"], "plan": plan})
        if group.held:
            self._later(group.service_s, lambda: self._computed(group))


def fairness(numbers: Sequence[float]) -> float:
    """Return Jain's index of what each got: 1 where all got the same, 1/n where one got all."""
    total = sum(numbers)
    return total**2 / (len(numbers) * sum(n * n for n in numbers)) if total else 1.0


def summary(run: Run) -> dict[str, float]:
    """Return the figures of a run."""
    s = run.scenario
    settled = s.lost_at_s + s.noticed_s + 10 * s.service_s
    parts = {
        "before": [n for n, at in run.asked_s.items() if at < s.lost_at_s],
        "at the loss": [n for n, at in run.asked_s.items() if s.lost_at_s - s.service_s <= at < settled],
        "after": [n for n, at in run.asked_s.items() if settled <= at],
    }
    by_client = Counter(int(name[1:]) % s.clients for name in run.answers)
    told: dict[str, float] = {
        "asked": len(run.asked_s),
        "answered once": sum(times == 1 for times in run.answers.values()),
        "computed twice": sum(times > 1 for times in run.computed.values()),
        "fairness between groups": fairness([group.given for group in run.groups if group.alive]),
        "fairness between clients": fairness(list(by_client.values())),
    }
    for part, names in parts.items():
        ms = np.array([1e3 * run.latency_s.get(name, np.inf) for name in names])
        told |= {f"{part}: median ms": float(np.median(ms)), f"{part}: p99 ms": float(np.quantile(ms, 0.99))}
    answered_s = [run.asked_s[name] + took for name, took in run.latency_s.items()]
    told["before: answers/s"] = sum(5 <= at < s.lost_at_s for at in answered_s) / (s.lost_at_s - 5)
    told["after: answers/s"] = sum(settled <= at < s.until_s for at in answered_s) / (s.until_s - settled)
    return told


def main() -> None:
    """Print a table of both ways to dispatch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=Scenario.groups)
    parser.add_argument("--load", type=float, default=Scenario.load)
    parser.add_argument("--spread", type=float, default=Scenario.spread)
    args = parser.parse_args()
    ways: tuple[Dispatch, ...] = ("turns", "fewest")
    runs = [summary(Run(Scenario(args.groups, load=args.load, spread=args.spread, dispatch=way)).run()) for way in ways]
    print(f"| | {' | '.join(ways)} |\n|---|{'---|' * len(ways)}")
    for key in runs[0]:
        print(f"| {key} | {' | '.join(f'{run[key]:.4g}' if run[key] < 1e4 else f'{run[key]:.0f}' for run in runs)} |")


if __name__ == "__main__":
    main()
