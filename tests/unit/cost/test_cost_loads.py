"""The price of a load: cached tiles at the disk's rate, the others once over the hub's link and from peers."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.cost.loads import LoadRates, TileMap, load_seconds, site_load
from hepti_mqtt.protocol.manifest import Manifest, TensorEntry, grid

SHAPES = {"embeddings": ((300, 512), False), "query": ((512, 600), True), "bias": ((600,), False)}


def entry(name: str) -> TensorEntry:
    shape, transposed = SHAPES[name]
    rows, columns = grid(shape, transposed)
    hashes = tuple(sha256(f"{name} {i}".encode()).digest() for i in range(rows * columns))
    return TensorEntry(name, shape, "f32", transposed, hashes)


MANIFEST = Manifest("tiny", tuple(map(entry, SHAPES)))
TILES = TileMap(MANIFEST)
WHOLE = [WeightRef(name, (0, (1, *shape)[-2]), (0, shape[-1])) for name, (shape, _) in SHAPES.items()]
MODEL_BYTES = 4 * (300 * 512 + 512 * 600 + 600)
RATES = LoadRates(read_bytes_per_s=400e3, receive_bytes_per_s=100e3)


@st.composite
def ranges(draw: st.DrawFn) -> WeightRef:
    ref = draw(st.sampled_from(WHOLE))
    (top, bottom), (left, right) = (
        sorted(draw(st.tuples(st.integers(*limits), st.integers(*limits)))) for limits in (ref.rows, ref.columns)
    )
    return ref._replace(rows=(top, bottom), columns=(left, right))


@given(st.lists(ranges(), max_size=4))
def test_a_mask_holds_the_tiles_of_its_ranges_and_no_others(refs: list[WeightRef]) -> None:
    tiles = {tile.hash: tile.nbytes for ref in refs for tile in MANIFEST.tiles(ref)}
    mask = TILES.mask(refs)
    assert {h for h, needed in zip(TILES.hashes, mask, strict=True) if needed} == set(tiles)
    assert TILES.nbytes(mask) == sum(tiles.values())
    unpacked = TILES.unpack(TILES.pack(mask))
    assert unpacked is not None
    assert np.array_equal(unpacked, mask)


@pytest.mark.parametrize("bits", [b"", bytes(100)])
def test_bits_of_another_manifest_are_no_mask(bits: bytes) -> None:
    assert TILES.unpack(bits) is None


ALL, NONE = TILES.mask(WHOLE), TILES.mask([])
FIRST = TILES.mask(WHOLE[:1])
FIRST_BYTES = TILES.nbytes(FIRST)


@pytest.mark.parametrize(
    ("cached", "shared", "hub_bytes", "fetched_bytes"),
    [
        ({}, True, MODEL_BYTES, 3 * MODEL_BYTES),  # once for the site
        ({}, False, 3 * MODEL_BYTES, 3 * MODEL_BYTES),
        ({"a": ALL}, True, 0, 2 * MODEL_BYTES),  # from peers alone
        ({"a": ALL}, False, 2 * MODEL_BYTES, 2 * MODEL_BYTES),
        ({"a": FIRST, "b": FIRST}, True, MODEL_BYTES - FIRST_BYTES, 3 * MODEL_BYTES - 2 * FIRST_BYTES),
        (dict.fromkeys("abc", ALL), True, 0, 0),
    ],
)
def test_a_tile_that_no_device_has_leaves_the_hub_once(
    cached: dict[str, np.ndarray], shared: bool, hub_bytes: int, fetched_bytes: int
) -> None:
    load = site_load(TILES, dict.fromkeys("abc", WHOLE), cached, shared=shared)
    assert load.hub_bytes == hub_bytes
    assert sum(each.fetched_bytes for each in load.devices.values()) == fetched_bytes
    assert all(sum(each) == MODEL_BYTES for each in load.devices.values())


@pytest.mark.parametrize(
    ("cached", "link", "hub", "seconds"),
    [
        (ALL, 1.0, 1.0, MODEL_BYTES / 400e3),  # cached tiles wait for no link
        (NONE, 1e9, 1e9, MODEL_BYTES / 100e3),  # the processor
        (NONE, 50e3, 1e9, MODEL_BYTES / 50e3),  # the device's link
        (NONE, 1e9, 20e3, MODEL_BYTES / 20e3),  # the hub's link
    ],
)
def test_a_load_takes_as_long_as_its_slowest_part(cached: np.ndarray, link: float, hub: float, seconds: float) -> None:
    load = site_load(TILES, dict.fromkeys("ab", WHOLE), dict.fromkeys("ab", cached))
    times = load_seconds(load, dict.fromkeys("ab", RATES), dict.fromkeys("ab", link), hub)
    assert times == pytest.approx(dict.fromkeys("ab", seconds))


def test_a_device_that_needs_nothing_takes_no_time() -> None:
    load = site_load(TILES, {"a": WHOLE, "b": []}, {})
    assert load_seconds(load, {}, {"a": 1e6, "b": 1e6}, 1e3)["b"] == 0


def test_before_it_has_reported_rates_a_faster_device_loads_faster_and_a_slow_one_as_the_slowest() -> None:
    slow, fast, faster = (LoadRates.expected(flops_per_s) for flops_per_s in (1e9, 25e9, 100e9))
    assert slow == LoadRates()
    assert all(a < b < c for a, b, c in zip(slow, fast, faster, strict=True))
