"""The sources of a load's tiles: each tile leaves the planner once, and bad peers cost only seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hepti_mqtt.core.ids import PLANNER
from hepti_mqtt.runtime.worker.tile_sources import (
    ANSWER_S,
    BUSY_WINDOW,
    PEER_WINDOW,
    PLANNER_ANSWER_S,
    PLANNER_WINDOW,
    TileReport,
    TileSources,
    Windows,
)

TILE_S = 0.01  # of the hub's link
REPORT_S = 0.25


def digest(position: int) -> bytes:
    return position.to_bytes(32, "big")


@dataclass
class Node:
    """One device of a simulated site; behaviour: how it answers requests."""

    name: str
    sources: TileSources
    held: set[int]
    needed: set[int]
    behaviour: str = "good"
    done_s: float | None = None
    from_peers: int = 0
    requested: Counter[str] = field(default_factory=Counter)

    @property
    def missing(self) -> set[int]:
        return self.needed - self.held


class Site:
    """Devices that load one model on a virtual clock; the hub sends one tile after another."""

    def __init__(self, total: int, needs: list[set[int]], cached: list[set[int]], behaviours: list[str]) -> None:
        names = [f"d{n}" for n in range(len(needs))]
        self.total, self.now, self.hub_free_s, self.hub_tiles = total, 0.0, 0.0, 0
        self.stalls: dict[
            str, list[tuple[float, float]]
        ] = {}  # when the process of a device, or the planner, gets no time
        self.queue: list[tuple[float, int, str, tuple[object, ...]]] = []
        self.serial = 0
        self.nodes: dict[str, Node] = {}
        for n, (name, need, held, behaviour) in enumerate(zip(names, needs, cached, behaviours, strict=True)):
            start = n * total // len(needs)
            order = sorted(need - held, key=lambda p: (p - start) % total)
            sources = TileSources(list(map(digest, order)), order, total, name, names, 0.0)
            self.nodes[name] = Node(name, sources, set(held), set(need), behaviour)
        for name in names:
            for peer in names:
                if peer != name and "unreachable" not in (self.nodes[name].behaviour, self.nodes[peer].behaviour):
                    self.at(0.02, "join", name, peer)
            self.at(0.05, "report", name)
            self.at(0.0, "turn", name)

    def at(self, delay_s: float, what: str, *arguments: object) -> None:
        self.serial += 1
        heappush(self.queue, (self.now + delay_s, self.serial, what, arguments))

    def awake_s(self, name: str, at_s: float) -> float:
        """Return the first time from `at_s` on when a process runs."""
        for start, stop in self.stalls.get(name, ()):
            if start <= at_s < stop:
                return stop
        return at_s

    def mask(self, positions: Iterable[int]) -> np.ndarray:
        mask = np.zeros(self.total, np.bool_)
        mask[list(positions)] = True
        return mask

    def run(self, until_s: float = 600.0) -> None:
        while self.queue and any(node.done_s is None for node in self.nodes.values() if node.behaviour == "good"):
            self.now, _, what, arguments = heappop(self.queue)
            if (late_s := self.awake_s(str(arguments[0]), self.now) - self.now) > 0:
                self.at(late_s + (1e-6 if what == "turn" else 0), what, *arguments)  # what has come is taken first
                continue
            assert self.now < until_s, {n.name: n.missing for n in self.nodes.values()}
            getattr(self, what)(*arguments)

    def join(self, name: str, peer: str) -> None:
        self.nodes[name].sources.add_peer(peer, self.now)

    def leave(self, name: str) -> None:
        self.nodes[name].behaviour = "gone"
        for node in self.nodes.values():
            node.sources.remove_peer(name)

    def report(self, name: str) -> None:
        node = self.nodes[name]
        if node.behaviour == "gone":
            return
        held = set(range(self.total)) if node.behaviour in ("liar", "mute", "refuser") else node.held
        report = TileReport(self.mask(held), self.mask(node.needed - node.held))
        for other in self.nodes.values():
            other.sources.report(name, report, self.now)
            self.turn(other.name)
        self.at(REPORT_S, "report", name)

    def turn(self, name: str) -> None:
        node = self.nodes[name]
        if node.behaviour == "gone":
            return
        _, again = node.sources.expire(self.now)
        requests = node.sources.requests(self.now)
        for source, digests in (
            requests | {PLANNER: [*requests.get(PLANNER, []), *([again] if again else [])]}
        ).items():
            node.requested[source] += len(digests)
            for each in digests:
                if source == PLANNER:
                    self.hub_free_s = self.awake_s(PLANNER, max(self.hub_free_s, self.now) + TILE_S)
                    self.hub_tiles += 1
                    self.at(self.hub_free_s - self.now, "arrive", name, PLANNER, each)
                else:
                    self.answer(source, name, each)
        if (deadline := node.sources.deadline()) < float("inf"):
            self.at(max(deadline - self.now, 0.0), "turn", name)

    def answer(self, source: str, name: str, each: bytes) -> None:
        delays = {"good": 0.005, "slow": 1.5, "liar": 0.005}
        match self.nodes[source].behaviour:
            case "good" | "slow" as behaviour:
                assert int.from_bytes(each, "big") in self.nodes[source].held
                ready_s = self.awake_s(source, self.now + delays[behaviour])
                self.at(ready_s - self.now, "arrive", name, source, each)
            case "liar":
                self.at(delays["liar"], "arrive", name, source, b"\xff" * 32)
            case "refuser":
                self.at(0.005, "refuse", name, source, each)

    def refuse(self, name: str, source: str, each: bytes) -> None:
        self.nodes[name].sources.refuse(source, [each])
        self.turn(name)

    def arrive(self, name: str, source: str, each: bytes) -> None:
        node = self.nodes[name]
        if node.behaviour == "gone" or (source != PLANNER and self.nodes[source].behaviour == "gone"):
            return
        answer = node.sources.receive(source, each, self.now)
        if answer == "needed":
            node.sources.take(each)
            node.held.add(int.from_bytes(each, "big"))
            node.from_peers += source != PLANNER
        if not node.missing and node.done_s is None:
            node.done_s = self.now
        self.turn(name)


def whole(total: int) -> set[int]:
    return set(range(total))


@pytest.mark.parametrize(("devices", "total"), [(2, 400), (3, 1000), (8, 400)])
def test_a_tile_leaves_the_planner_about_once_for_the_site(devices: int, total: int) -> None:
    site = Site(total, [whole(total)] * devices, [set()] * devices, ["good"] * devices)
    site.run()
    assert total <= site.hub_tiles <= 1.2 * total
    assert max(node.done_s or 0 for node in site.nodes.values()) <= 1.2 * total * TILE_S + 1


@pytest.mark.parametrize(
    ("who", "stall_s"), [("planner", 1.0), ("one", 2.5), ("each in turn", 4.0), ("all", 2.5), ("two of three", 1.0)]
)
def test_a_busy_machine_repeats_few_tiles(who: str, stall_s: float) -> None:
    total, names = 1000, ["d0", "d1", "d2"]
    site = Site(total, [whole(total)] * 3, [set()] * 3, ["good"] * 3)
    stalled = {
        "planner": [PLANNER],
        "one": ["d1"],
        "each in turn": names,
        "all": [PLANNER, *names],
        "two of three": names[:2],
    }
    for number, name in enumerate(stalled[who]):
        first_s = 1.0 + (number * stall_s if who == "each in turn" else 0.0)
        every_s = 4 * stall_s
        site.stalls[name] = [(first_s + every_s * n, first_s + every_s * n + stall_s) for n in range(8)]
    site.run()
    assert site.hub_tiles <= 1.2 * total


def test_a_device_that_has_all_tiles_brings_them_to_its_peers() -> None:
    site = Site(500, [whole(500)] * 3, [whole(500), set(), set()], ["good"] * 3)
    site.nodes["d0"].done_s = 0.0
    site.run()
    assert site.hub_tiles <= 4 * PLANNER_WINDOW, "those requested before the device has said what it has"


def test_devices_that_need_different_tiles_get_each_from_the_planner() -> None:
    site = Site(400, [set(range(0, 200)), set(range(200, 400))], [set(), set()], ["good"] * 2)
    site.run()
    assert site.hub_tiles == 400


@pytest.mark.parametrize("behaviour", ["slow", "liar", "mute", "refuser", "unreachable", "leaves"])
def test_a_bad_peer_costs_seconds(behaviour: str) -> None:
    total = 600
    leaves = behaviour == "leaves"
    site = Site(total, [whole(total)] * 3, [set()] * 3, ["good", "good" if leaves else behaviour, "good"])
    if leaves:
        site.at(2.0, "leave", "d1")
    site.run()
    ends = [node.done_s for node in site.nodes.values() if node.behaviour == "good"]
    assert all(end is not None and end <= total * TILE_S * 2 + 4 * ANSWER_S for end in ends)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_every_load_ends_and_no_tile_is_requested_twice_at_once(data: st.DataObject) -> None:
    total, devices = data.draw(st.integers(1, 80)), data.draw(st.integers(1, 5))
    subsets = st.sets(st.integers(0, total - 1))
    needs = [data.draw(subsets) for _ in range(devices)]
    cached = [data.draw(subsets) for _ in range(devices)]
    kinds = st.sampled_from(["good", "slow", "liar", "mute", "refuser", "unreachable"])
    site = Site(total, needs, cached, ["good", *(data.draw(kinds) for _ in range(devices - 1))])
    for node in site.nodes.values():
        node.done_s = None if node.missing else 0.0
    for name in data.draw(st.sets(st.sampled_from(sorted(site.nodes)))) - {"d0"}:
        site.at(data.draw(st.floats(0, 3)), "leave", name)
    site.run()
    first = site.nodes["d0"]
    assert first.held == cached[0] | needs[0]


def test_requests_are_bounded_and_overdue_ones_go_to_others() -> None:
    tiles = [digest(p) for p in range(100)]
    sources = TileSources(tiles, range(100), 100, "a", ["a", "b"], 0.0)
    sources.add_peer("b", 0.0)
    sources.report("b", TileReport(np.arange(100) < 50, np.arange(100) < 0), 0.0)
    requests = sources.requests(0.0)
    assert len(requests[PLANNER]) == PLANNER_WINDOW
    assert 0 < len(requests["b"]) <= PEER_WINDOW
    assert not sources.requests(0.1), "every window is full"
    assert sources.expire(ANSWER_S) == (len(requests["b"]), None)
    assert not sources.requests(ANSWER_S), "the peer rests and the planner's window is full"
    assert sources.expire(PLANNER_ANSWER_S) == (0, requests[PLANNER][-1])
    assert not sources.requests(PLANNER_ANSWER_S), "the planner may have a pause"


def test_tiles_that_were_lost_are_requested_again_when_a_later_one_comes() -> None:
    tiles = [digest(p) for p in range(100)]
    sources = TileSources(tiles, range(100), 100, "a", ["a"], 0.0)
    requests = sources.requests(0.0)[PLANNER]
    _, again = sources.expire(PLANNER_ANSWER_S)
    assert again == requests[-1]
    assert sources.receive(PLANNER, again, 3.5) == "needed"
    sources.take(again)
    assert set(requests[:-1]) <= set(sources.requests(3.5)[PLANNER])


def test_a_tile_is_taken_from_whoever_sends_it_first() -> None:
    sources = TileSources([digest(0)], [0], 1, "a", ["a", "b"], 0.0)
    assert sources.requests(0.0) == {PLANNER: [digest(0)]}
    assert sources.receive("b", digest(0), 0.1) == "needed"
    sources.take(digest(0))
    assert sources.receive(PLANNER, digest(0), 0.2) == "unneeded"
    assert sources.deadline() == float("inf")


def test_while_runs_share_the_link_one_tile_is_under_way_at_each_peer() -> None:
    tiles = [digest(p) for p in range(100)]
    sources = TileSources(tiles, range(100), 100, "a", ["a", "b"], 0.0)
    sources.add_peer("b", 0.0)
    sources.report("b", TileReport(np.arange(100) < 50, np.arange(100) < 0), 0.0)
    windows = Windows(BUSY_WINDOW, PLANNER_WINDOW)
    for step in range(20):
        requests = sources.requests(step / 100, windows).get("b", [])
        assert len(requests) == 1
        sources.receive("b", requests[0], step / 100)
        sources.take(requests[0])
    assert len(sources.requests(0.3)["b"]) > 1, "none is under way"
