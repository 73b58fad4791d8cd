"""Tiles on their way to the devices that asked."""

import contextlib
import os
import threading

import pytest

from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.core.errors import ModelError, NetworkError, WeightsChangedError
from hepti_mqtt.protocol.frames import decode
from hepti_mqtt.protocol.manifest import Manifest, tile_hash
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.service.tiles import BACKGROUND_SHARE, TilePace, TileServer

TOPICS = Topics("home")


class Published:
    """Takes what is published; tells when `wanted` messages are there."""

    def __init__(self, wanted):
        self.wanted, self.messages, self.enough = wanted, [], threading.Event()

    def __call__(self, topic, payload):
        self.messages.append((topic, decode(payload)))
        if len(self.messages) == self.wanted:
            self.enough.set()


def unchanged(error):
    raise AssertionError(error)


def no_complaint(model, device, error):
    raise AssertionError(f"{model} for {device}: {error}")


@contextlib.contextmanager
def running(server):
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield
    finally:
        server.close()
        thread.join(20)
    assert not thread.is_alive()


@pytest.fixture
def serve(bert):
    """Ask first, then serve until so many messages are published."""

    def run(asks, wanted):
        published = Published(wanted)
        server = TileServer("home", 7, {"bert": bert}, published, no_complaint, unchanged)
        for model, device, hashes in asks:
            server.ask(model, device, hashes)
        with running(server):
            assert published.enough.wait(20)
        return server, published.messages

    return run


def hashes_of(checkpoint, count):
    return list(dict.fromkeys(h for e in checkpoint.manifest.entries for h in e.hashes))[:count]


def test_tiles_come_in_the_order_of_asking_and_are_what_their_name_says(serve, bert):
    wanted = hashes_of(bert, 5)
    _, messages = serve([("bert", "a", wanted)], 5)
    assert [tile_hash(frame.body) for _, frame in messages] == wanted
    assert {topic for topic, _ in messages} == {TOPICS.weights("a")}
    assert {(f.kind, f.model, f.plan_version.boot) for _, f in messages} == {("tile", "bert", 7)}


def test_each_device_has_one_tile_in_turn_however_many_others_have_asked_for(serve, bert):
    wanted = hashes_of(bert, 9)
    _, messages = serve([("bert", "a", wanted[:5]), ("bert", "b", wanted[5:7]), ("bert", "c", wanted[7:])], 9)
    to = [topic for topic, _ in messages]
    assert to == [TOPICS.weights(device) for device in "abcabcaaa"]
    for device in "abc":
        own = [tile_hash(frame.body) for topic, frame in messages if topic == TOPICS.weights(device)]
        assert own == [digest for digest in wanted if digest in own]


def test_the_manifest_is_served_under_its_own_hash(serve, bert):
    manifest = bert.manifest
    _, ((_, frame),) = serve([("bert", "a", [manifest.digest])], 1)
    assert Manifest.decode(bytes(frame.body)) == manifest


def test_a_tile_that_a_device_requests_again_before_it_has_gone_is_sent_once(serve, bert):
    first, second = hashes_of(bert, 2)
    server, messages = serve([("bert", "a", [first, second]), ("bert", "a", [first]), ("bert", "b", [first])], 3)
    sent = [(topic, tile_hash(frame.body)) for topic, frame in messages]
    assert sent == [(TOPICS.weights("a"), first), (TOPICS.weights("b"), first), (TOPICS.weights("a"), second)]
    assert server.counters["sent"] == 3


def test_unknown_tiles_are_counted_and_the_next_ones_served(serve, bert):
    hashes = hashes_of(bert, 1)
    server, messages = serve([("bert", "a", [bytes(32), *hashes])], 1)
    assert server.counters["unknown"] == 1
    assert tile_hash(messages[0][1].body) == hashes[0]


@pytest.mark.parametrize("fault", ["cut short", "other weights"])
def test_weights_that_cannot_be_read_are_named_to_who_waits_and_changed_ones_to_the_planner(tmp_path, fault):
    unread, changed, heard = [], [], threading.Event()

    def unreadable(model, device, error):
        unread.append((model, device, type(error)))
        if len(unread) == 2:
            heard.set()

    def other(error):
        changed.append(type(error))
        heard.set()

    path = make_model("tiny-bert", tmp_path / "model", seed=9)
    with Checkpoint.open(path, "m") as checkpoint:
        (digest,) = hashes_of(checkpoint, 1)
        if fault == "cut short":
            os.truncate(path / "model.safetensors", 100)
        else:
            another = make_model("tiny-bert", tmp_path / "other", seed=10)
            (path / "model.safetensors").write_bytes((another / "model.safetensors").read_bytes())
        server = TileServer("home", 7, {"m": checkpoint}, Published(0), unreadable, other)
        for device in "ab":
            server.ask("m", device, [digest])
        with running(server):
            assert heard.wait(20)
    if fault == "cut short":
        assert sorted(unread) == [("m", device, ModelError) for device in "ab"]
    else:
        assert {*changed} == {WeightsChangedError}


def test_close_ends_a_wait_for_a_full_queue(bert):
    tried = threading.Event()

    def never(topic, payload):
        tried.set()
        raise NetworkError("the queue is full")

    server = TileServer("home", 7, {"bert": bert}, never, no_complaint, unchanged)
    server.ask("bert", "a", hashes_of(bert, 1))
    with running(server):
        assert tried.wait(20)


def test_beside_runs_a_device_gets_a_part_of_its_rate_and_otherwise_all_of_it():
    pace = TilePace()
    pace.set_rate("a", BACKGROUND_SHARE * 1e6)
    pace.record("a", 1000, 5.0)
    assert pace.due_s("a") == 0.0
    pace.serving = True
    sent, now = 0, 5.0
    while now < 15.0:
        now = max(now, pace.due_s("a"))
        pace.record("a", 1000, now)
        sent += 1000
    assert sent == pytest.approx(BACKGROUND_SHARE * 1e6 * 10, rel=0.02)
    assert pace.due_s("b") == 0.0, "nothing was sent to it"
    pace.serving = False
    assert pace.due_s("a") == 0.0


def test_what_waits_for_its_pace_goes_out_once_no_run_is_under_way(bert):
    wanted = hashes_of(bert, 3)
    first, published = Published(1), Published(3)

    def publish(topic, payload):
        published(topic, payload)
        first(topic, payload)

    server = TileServer("home", 7, {"bert": bert}, publish, no_complaint, unchanged)
    server.set_serving(True)
    server.ask("bert", "a", wanted, bytes_per_s=1e-3)
    with running(server):
        assert first.enough.wait(20)
        server.ask("bert", "b", wanted[2:], bytes_per_s=1e9)
        assert len(published.messages) == 1
        server.set_serving(False)
        assert published.enough.wait(20)
