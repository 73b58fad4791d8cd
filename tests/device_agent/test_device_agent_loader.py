from collections import deque
from dataclasses import replace

import pytest
from device_agent_support import Device, Model, check_weights
from hypothesis import given
from hypothesis import strategies as st

from device_agent.loader import (
    AGAIN_S,
    MISMATCHES,
    PROGRESS_S,
    WINDOW,
)
from hepti_mqtt.cost.memory import weight_total
from hepti_mqtt.errors import ModelError, WireError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.program import WeightRef
from hepti_mqtt.protocol.manifest import Manifest
from hepti_mqtt.runtime.worker.interface import Load, Loaded, LoadFailed, LoadProgress, Unload

MODEL = Model()
BIG = Model(seed=3, rows=1500, columns=1500)
WIDE = Model(seed=4, rows=4000, columns=3000)


@pytest.fixture
def device(tmp_path):
    return Device(tmp_path / "tiles")


def test_weights_come_from_the_planner_at_first_and_from_disk_later(tmp_path):
    first = Device(tmp_path)
    first.loader.load(MODEL.load(), first.now)
    first.serve(MODEL)
    (loaded,) = first.of(Loaded)
    assert (loaded.model, loaded.epoch) == ("m", Epoch(1, 1))
    check_weights(MODEL, loaded.weights)
    assert first.counters["tiles_asked"] == 1 + len(MODEL.needed())
    again = Device(tmp_path)
    again.loader.load(MODEL.load(), again.now)
    again.serve(MODEL)
    check_weights(MODEL, again.of(Loaded)[0].weights)
    assert (again.counters["tiles_asked"], again.counters["tile_bytes_received"]) == (0, 0)


def test_only_needed_tiles_are_asked_and_each_once(device):
    ref = WeightRef("up", (0, 20), (300, 310))
    twice = WeightRef("up", (5, 30), (290, 320))
    device.loader.load(MODEL.load(refs=(ref, twice)), device.now)
    device.serve(MODEL)
    check_weights(MODEL, device.of(Loaded)[0].weights, (ref, twice))
    assert device.counters["tiles_asked"] == 2  # manifest and one tile


def test_at_most_a_window_of_tiles_is_outstanding(device):
    refs = (WeightRef("up", (0, 1500), (0, 1500)),)
    device.loader.load(BIG.load(refs=refs), device.now)
    outstanding, most = len(device.asks), 0
    while device.asks:
        device.settle()
        outstanding = len(device.asks)
        most = max(most, outstanding)
        device.loader.tile(BIG.blobs[device.asks.popleft()], True, device.now)
    assert most == WINDOW
    check_weights(BIG, device.of(Loaded)[0].weights, refs)


def test_an_empty_range_needs_no_tile(device):
    refs = (WeightRef("up", (0, 0), (0, 5)), WeightRef("bias", (0, 1), (3, 3), "plain"))
    device.loader.load(MODEL.load(refs=refs), device.now)
    device.serve(MODEL)
    assert device.of(Loaded)[0].weights[refs[1]].shape == (0,)


def test_epochs_share_weights_and_keep_them_until_the_last_is_gone(device):
    device.loader.load(MODEL.load(1), device.now)
    device.serve(MODEL)
    asked = device.counters["tiles_asked"]
    more = (*MODEL.refs, WeightRef("up", (0, 300), (590, 600)))
    device.loader.load(MODEL.load(2, more), device.now)
    device.serve(MODEL)
    first, second = device.of(Loaded)
    assert all(first.weights[ref] is second.weights[ref] for ref in MODEL.refs)
    assert device.counters["tiles_asked"] <= asked + 2
    device.loader.unload(Unload("m", Epoch(1, 1)), device.now)
    device.loader.load(MODEL.load(3), device.now)
    assert device.of(Loaded)[2].weights[MODEL.refs[0]] is first.weights[MODEL.refs[0]]
    for number in (2, 3):
        device.loader.unload(Unload("m", Epoch(1, number)), device.now)
    device.loader.load(MODEL.load(4), device.now)
    device.serve(MODEL)
    assert device.of(Loaded)[3].weights[MODEL.refs[0]] is not first.weights[MODEL.refs[0]]


def test_weights_that_nobody_uses_stay_while_there_is_room_the_last_used_longest(device):
    old, new = (MODEL.load(number, refs) for number, refs in ((1, MODEL.refs[:1]), (2, MODEL.refs[1:2])))
    for load in (old, new):
        device.loader.load(load, device.now)
        device.serve(MODEL)
        device.loader.unload(Unload("m", load.epoch, spare_bytes=1 << 30), device.now)
    first, second = (loaded.weights for loaded in device.of(Loaded))
    room = weight_total(new.refs)
    device.loader.load(replace(MODEL.load(3, ()), spare_bytes=room), device.now)
    device.loader.unload(Unload("m", Epoch(1, 3), spare_bytes=room), device.now)
    device.loader.load(MODEL.load(4, (*old.refs, *new.refs)), device.now)
    device.serve(MODEL)
    last = device.of(Loaded)[-1].weights
    assert last[new.refs[0]] is second[new.refs[0]]
    assert last[old.refs[0]] is not first[old.refs[0]]
    check_weights(MODEL, last, (*old.refs, *new.refs))


def test_what_a_load_wants_is_not_given_up_for_it(device):
    device.loader.load(MODEL.load(1), device.now)
    device.serve(MODEL)
    device.loader.unload(Unload("m", Epoch(1, 1), spare_bytes=1 << 30), device.now)
    asked = device.counters["tiles_asked"]
    device.loader.load(replace(MODEL.load(2), spare_bytes=0), device.now)
    device.serve(MODEL)
    first, second = device.of(Loaded)
    assert all(first.weights[ref] is second.weights[ref] for ref in MODEL.refs)
    assert device.counters["tiles_asked"] == asked


def test_another_manifest_shares_nothing(device):
    other = Model(seed=1)
    for number, model in ((1, MODEL), (2, other)):
        device.loader.load(model.load(number), device.now)
        device.serve(model)
        check_weights(model, device.of(Loaded)[-1].weights)


def test_release_while_loading_cancels_and_the_next_load_begins(device):
    device.loader.load(MODEL.load(1), device.now)
    device.loader.load(MODEL.load(2), device.now)
    device.serve(MODEL, most=2)
    device.loader.unload(Unload("m", Epoch(1, 1)), device.now)
    device.serve(MODEL)
    (loaded,) = device.of(Loaded)
    assert loaded.epoch == Epoch(1, 2)
    check_weights(MODEL, loaded.weights)


def test_release_of_a_waiting_load_takes_it_out(device):
    device.loader.load(MODEL.load(1), device.now)
    device.loader.load(MODEL.load(2), device.now)
    device.loader.unload(Unload("m", Epoch(1, 2)), device.now)
    device.serve(MODEL)
    assert [e.epoch for e in device.of(Loaded)] == [Epoch(1, 1)]


def test_a_tile_on_disk_that_comes_by_air_for_somebody_else_has_not_travelled_again(tmp_path):
    model = Model()
    first = Device(tmp_path)
    first.loader.load(model.load(), first.now)
    first.serve(model)
    again = Device(tmp_path)
    again.loader.load(model.load(), again.now)
    for digest in sorted(model.needed()):  # before it has read them
        again.loader.tile(model.blobs[digest], False, again.now)
    again.settle()
    assert (again.counters["tiles_received"], again.counters["tile_bytes_received"]) == (0, 0)
    check_weights(model, again.of(Loaded)[0].weights)


def test_tiles_of_others_are_used_or_passed_over(device):
    device.loader.load(MODEL.load(), device.now)
    device.serve(MODEL, most=1)  # the manifest
    device.loader.tile(BIG.blobs[next(iter(BIG.tiles))], False, device.now)
    for digest in MODEL.needed():
        device.loader.tile(MODEL.blobs[digest], False, device.now)
    check_weights(MODEL, device.of(Loaded)[0].weights)
    assert device.counters["tiles_unneeded"] == 1
    assert device.counters["tiles_mismatched"] == 0


def test_a_late_tile_of_a_cancelled_load_is_no_damage(device):
    device.loader.load(BIG.load(1, (WeightRef("up", (0, 256), (0, 1500)),)), device.now)
    device.serve(BIG, most=1)
    late = list(device.asks)
    device.asks.clear()
    device.loader.unload(Unload("m", Epoch(1, 1)), device.now)
    device.loader.tile(BIG.blobs[late[0]], True, device.now)
    device.loader.load(MODEL.load(2), device.now)
    for digest in late:
        device.loader.tile(BIG.blobs[digest], True, device.now)
    device.serve(MODEL)
    check_weights(MODEL, device.of(Loaded)[0].weights)
    assert device.counters["tiles_mismatched"] == 0


def test_damaged_tiles_are_asked_again_and_in_the_end_give_the_load_up(device):
    device.loader.load(MODEL.load(), device.now)
    for attempt in range(1, MISMATCHES):
        device.asks.clear()
        device.loader.tile(b"damaged", True, device.now)
        assert list(device.asks) == [MODEL.manifest.digest]
        assert device.counters["tiles_mismatched"] == attempt
    device.loader.tile(b"damaged", True, device.now)
    (failed,) = device.of(LoadFailed)
    assert isinstance(failed.error, WireError)
    assert "SHA-256" in str(failed.error)
    assert device.loader.deadline() is None


def test_one_damaged_tile_does_no_harm(device):
    device.loader.load(MODEL.load(), device.now)
    device.serve(MODEL, most=2)
    digest = device.asks.popleft()
    device.loader.tile(b"?" + MODEL.blobs[digest][1:], True, device.now)
    device.serve(MODEL)
    assert not device.of(Loaded)
    device.now += AGAIN_S
    device.loader.tick(device.now)
    device.serve(MODEL)
    check_weights(MODEL, device.of(Loaded)[0].weights)


def test_unanswered_asks_are_repeated_after_a_while_and_on_reconnection(device):
    device.loader.load(MODEL.load(), device.now)
    device.serve(MODEL, most=1)
    asked = set(device.asks)
    device.asks.clear()
    device.loader.tick(device.loader.deadline() - 0.001)
    assert not device.asks
    device.loader.tick(device.loader.deadline())
    assert set(device.asks) == asked
    device.asks.clear()
    device.loader.again(device.now)
    assert set(device.asks) == asked
    assert device.counters["tiles_reasked"] == 2 * len(asked)


def test_a_load_that_nobody_has_holds_no_other_up(device):
    forged = replace(MODEL.load(9), manifest=b"\1" * 32)
    for load in (forged, MODEL.load(1)):
        device.loader.load(load, device.now)
    device.asks.clear()
    device.loader.tick(device.loader.deadline())
    device.serve(MODEL, most=1 + len(MODEL.needed()))
    (loaded,) = device.of(Loaded)
    assert loaded.epoch == Epoch(1, 1)
    check_weights(MODEL, loaded.weights)
    assert set(device.asks) == {forged.manifest}, "it is asked for once more"


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_two_loads_end_where_every_answer_takes_longer_than_a_turn(tmp_path, limit):
    device, other = Device(tmp_path, limit), Model(seed=1)
    blobs = {**MODEL.blobs, **other.blobs}
    for number, model in ((1, MODEL), (2, other)):
        device.loader.load(model.load(number), device.now)
    for _ in range(20):
        late = list(device.asks)
        device.asks.clear()
        device.now = device.loader.deadline() or device.now
        device.loader.tick(device.now)
        for digest in late:
            device.loader.tile(blobs[digest], True, device.now)
        device.settle()
        if len(device.of(Loaded)) == 2:
            break
    for loaded in device.of(Loaded):
        check_weights(MODEL if loaded.epoch == Epoch(1, 1) else other, loaded.weights)
    assert len(device.of(Loaded)) == 2
    assert not device.of(LoadFailed)


def test_while_tiles_come_nothing_is_repeated(device):
    refs = (WeightRef("up", (0, 1500), (0, 1500)),)
    device.loader.load(BIG.load(refs=refs), device.now)
    while device.asks:
        device.now += 0.9 * AGAIN_S  # a slow link: the window takes much longer than one wait
        device.loader.tick(device.now)
        device.serve(BIG, most=1)
    check_weights(BIG, device.of(Loaded)[0].weights, refs)
    assert device.counters["tiles_reasked"] == 0


def test_progress_is_told_now_and_then_for_all_loads(device):
    refs = (WeightRef("up", (0, 1500), (0, 1500)),)
    device.loader.load(BIG.load(1, refs), device.now)
    device.loader.load(MODEL.load(2), device.now)
    for _ in range(10):
        device.serve(BIG, most=1)
        device.now += PROGRESS_S / 2
    told = [e for e in device.of(LoadProgress) if e.epoch == Epoch(1, 1)]
    assert len(told) in (5, 6), "at once, and every PROGRESS_S"
    assert [e.done_bytes for e in told] == sorted(e.done_bytes for e in told)
    assert told[-1].total_bytes == sum(t.nbytes for t in BIG.manifest.tiles(refs[0]))
    waits = [e for e in device.of(LoadProgress) if e.epoch == Epoch(1, 2)]
    assert len(waits) == len(told)
    assert all(e.done_bytes == 0 < e.total_bytes for e in waits), "0 of 0 would say that nothing moves"


def test_a_load_that_does_not_move_tells_nothing_more(device):
    device.loader.load(BIG.load(1), device.now)
    device.loader.load(MODEL.load(2), device.now)
    told = len(device.of(LoadProgress))
    for _ in range(10):
        device.now += AGAIN_S
        device.loader.tick(device.now)
    assert len(device.of(LoadProgress)) == told


def test_tiles_that_wait_on_disk_for_older_ones_are_progress(device):
    ref = WeightRef("up", (0, 4000), (0, 3000), storage="w8a8")
    device.loader.load(WIDE.load(refs=(ref,)), device.now)
    device.loader.tile(WIDE.blobs[WIDE.manifest.digest], True, device.now)
    late = [tile.hash for tile in WIDE.manifest.tiles(ref)][::-1]
    told = []
    for digest in late[:10]:
        device.now += PROGRESS_S
        told.append(len(device.of(LoadProgress)))
        device.loader.tile(WIDE.blobs[digest], False, device.now)
    assert told == list(range(told[0], told[0] + 10)), "sent to another device, and of use here too"


@pytest.mark.parametrize("damage", ["corrupt", "truncated", "removed"])
def test_a_damaged_cache_is_made_good(tmp_path, damage):
    first = Device(tmp_path)
    first.loader.load(MODEL.load(), first.now)
    first.serve(MODEL)
    files = sorted(tmp_path.glob("??/*"))
    for path in files:
        data = path.read_bytes()
        if damage == "removed":
            path.unlink()
        else:
            path.write_bytes(data[:-1] if damage == "truncated" else bytes([data[0] ^ 1]) + data[1:])
    again = Device(tmp_path)
    again.loader.load(MODEL.load(), again.now)
    again.serve(MODEL)
    check_weights(MODEL, again.of(Loaded)[0].weights)
    assert again.counters["cache_corrupt"] == (0 if damage == "removed" else len(files))
    third = Device(tmp_path)
    third.loader.load(MODEL.load(), third.now)
    third.serve(MODEL)
    assert third.counters["tiles_asked"] == 0


@pytest.mark.parametrize("limit", [0, 1, 200_000, 400_000])
def test_a_cache_too_small_for_the_model_only_costs_asking(tmp_path, limit):
    for _ in range(2):
        device = Device(tmp_path, limit)
        device.loader.load(MODEL.load(), device.now)
        device.serve(MODEL)
        check_weights(MODEL, device.of(Loaded)[0].weights)
        assert sum(p.stat().st_size for p in tmp_path.glob("??/*")) <= limit


@pytest.mark.parametrize(
    ("blob", "error"),
    [
        (b"no msgpack at all", WireError),
        (Manifest("other", ()).encode(), ModelError),
        (Manifest("m", ()).encode(), WireError),
    ],
)
def test_a_manifest_that_cannot_be_used_ends_the_load(device, blob, error):
    from hepti_mqtt.protocol.manifest import tile_hash

    device.loader.load(Load(1, "m", Epoch(1, 1), tile_hash(blob), MODEL.refs), device.now)
    device.loader.load(MODEL.load(2), device.now)
    device.loader.tile(blob, True, device.now)
    (failed,) = device.of(LoadFailed)
    assert type(failed.error) is error
    device.asks.popleft()
    device.serve(MODEL)
    assert [e.epoch for e in device.of(Loaded)] == [Epoch(1, 2)]


@given(data=st.data())
def test_any_order_with_losses_repeats_and_foreign_tiles_ends_with_the_right_weights(tmp_path_factory, data):
    device = Device(tmp_path_factory.mktemp("any"), data.draw(st.sampled_from([0, 300_000, 1 << 30])))
    device.loader.load(MODEL.load(), device.now)
    under_way, everything = deque(), list(MODEL.blobs.values())
    for _ in range(400):
        device.settle()
        under_way.extend(device.asks)
        device.asks.clear()
        if device.of(Loaded):
            break
        if not under_way:
            device.now = device.loader.deadline()
            device.loader.tick(device.now)
            continue
        what = data.draw(st.sampled_from(["answer", "answer", "answer", "late", "lose", "repeat", "overhear"]))
        if what == "late":
            under_way.rotate(-1)
        elif what == "lose":
            under_way.popleft()
        elif what == "overhear":
            device.loader.tile(data.draw(st.sampled_from(everything)), False, device.now)
        else:
            digest = under_way[0] if what == "repeat" else under_way.popleft()
            device.loader.tile(MODEL.blobs[digest], True, device.now)
    check_weights(MODEL, device.of(Loaded)[0].weights)
    assert not device.of(LoadFailed)
    assert device.counters["tiles_mismatched"] == 0
