"""What a device says to its peers of its tiles, and what it takes of what they say."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from device_agent_support import Model
from hypothesis import given
from hypothesis import strategies as st

from device_agent.tile_cache import TileCache
from device_agent.tile_peers import MAX_MODELS, MAX_WAITING, REPORT_S, TilePeers
from hepti_mqtt.cost.loads import TileMap

MODEL = Model(rows=1500, columns=1500)
TILES = TileMap(MODEL.manifest)
DIGEST = MODEL.manifest.digest


class Node:
    """One device's side, with the messages that it sent; reads: the peers that read them."""

    def __init__(self, directory: Path, limit_bytes: int = 1 << 30) -> None:
        self.counters: Counter[str] = Counter()
        self.cache = TileCache(directory, limit_bytes, self.counters)
        self.sent: list[tuple[str, str, bytes]] = []
        self.reads = {"b", "c"}
        self.peers = TilePeers(self.cache, self.send, self.counters)

    def send(self, peer: str, model: str, kind: str, body: bytes) -> bool:
        assert model == "m"
        if peer in self.reads:
            self.sent.append((peer, kind, body))
        return peer in self.reads

    def take(self, count: int) -> None:
        for digest in list(MODEL.tiles)[:count]:
            self.cache.put(digest, MODEL.tiles[digest])
            self.peers.note("m", digest)

    def take_sent(self) -> list[tuple[str, str, bytes]]:
        sent, self.sent = self.sent, []
        return sent


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def joined(node: Node, *names: str) -> Node:
    node.peers.begin("m", DIGEST, TILES, MODEL.tiles)
    for name in names:
        node.peers.join(name, "m")
    return node


def test_peers_hear_what_is_held_and_what_is_lacking_again_after_a_change(node: Node, tmp_path: Path) -> None:
    joined(node, "b")
    node.take(3)
    node.reads = set()
    node.peers.report_if_due(10.0 - REPORT_S)
    node.reads = {"b"}
    node.peers.report_if_due(10.0)
    ((peer, kind, body),) = node.take_sent()
    assert (peer, kind) == ("b", "held")
    other = joined(Node(tmp_path / "other"), "a")
    report = other.peers.handle_report("a", "m", body)
    assert report is not None
    assert (report.held.sum(), report.lacking.sum()) == (3, len(MODEL.tiles) - 3)
    assert not (report.held & report.lacking).any()
    node.peers.report_if_due(11.0)
    assert not node.take_sent(), "nothing has changed"
    node.take(4)
    node.peers.report_if_due(11.0)
    node.take(5)
    node.peers.report_if_due(11.0 + REPORT_S / 2)
    assert len(node.take_sent()) == 1, "not for every tile"
    node.peers.report_if_due(node.peers.deadline())
    assert len(node.take_sent()) == 1


def test_tiles_are_sent_to_each_peer_in_turn_and_the_others_refused(node: Node) -> None:
    joined(node, "b", "c")
    node.take(4)
    digests = list(MODEL.tiles)
    node.peers.handle_request("b", "m", b"".join(digests[:6]))
    node.peers.handle_request("c", "m", digests[0])
    assert node.take_sent() == [("b", "refused", b"".join(digests[4:6]))]
    while node.peers.has_requests:
        node.peers.serve()
    sent = node.take_sent()
    assert [peer for peer, _, _ in sent] == ["b", "c", "b", "b", "b"]
    assert [body for peer, _, body in sent if peer == "b"] == [MODEL.tiles[d] for d in digests[:4]]
    assert node.counters["tile_bytes_to_peers"] == sum(len(body) for _, _, body in sent)


def test_a_tile_that_has_left_the_cache_is_refused(node: Node, tmp_path: Path) -> None:
    joined(node, "b")
    node.take(1)
    (digest,) = list(MODEL.tiles)[:1]
    node.peers.handle_request("b", "m", digest)
    for path in tmp_path.glob("??/*"):
        path.unlink()
    node.peers.serve()
    assert node.take_sent() == [("b", "refused", digest)]


def test_requests_of_a_peer_are_bounded_and_go_with_it(node: Node) -> None:
    joined(node, "b")
    node.take(1)
    (digest,) = list(MODEL.tiles)[:1]
    for _ in range(3):
        node.peers.handle_request("b", "m", digest * 10 * MAX_WAITING)
    served = 0
    while node.peers.has_requests:
        node.peers.serve()
        served += 1
    assert served == MAX_WAITING
    node.peers.handle_request("b", "m", digest)
    node.peers.lose("b")
    assert not node.peers.has_requests
    node.peers.handle_request("b", "m", digest)
    assert not node.peers.has_requests, "a stranger is not served"


@given(st.binary(max_size=200), st.sampled_from(["m", "n"]), st.sampled_from(["b", "stranger"]))
def test_what_a_peer_says_is_a_report_of_this_manifest_or_nothing(body: bytes, model: str, peer: str) -> None:
    node = joined(Node(Path("/nowhere/writable"), limit_bytes=0), "b")
    assert node.peers.handle_report(peer, model, body) is None
    assert node.peers.handle_report(peer, model, DIGEST + body) is None or len(body) == 2 * -(-len(TILES.hashes) // 8)
    node.peers.handle_request(peer, model, body)
    assert not node.peers.has_requests


def test_the_last_reports_of_a_peer_are_kept_until_their_manifest_comes(node: Node) -> None:
    names = [f"m{n}" for n in range(MAX_MODELS + 1)]
    body = DIGEST + 2 * TILES.pack(np.ones(len(TILES.hashes), np.bool_))
    for name in names:
        node.peers.join("b", name)
        assert node.peers.handle_report("b", name, body) is None
    for name in names:
        node.peers.begin(name, DIGEST, TILES, ())
    reports = [node.peers.report_of("b", name) for name in names]
    assert reports[0] is None
    assert all(report is not None and report.held.all() for report in reports[1:])
