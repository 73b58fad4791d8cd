"""Manifests: tiles cover references exactly, and false sizes are refused."""

import hashlib

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hepti_mqtt.core.errors import WireError
from hepti_mqtt.core.program import NUMPY_DTYPE, WeightRef
from hepti_mqtt.core.storage import STORAGES
from hepti_mqtt.protocol.manifest import TILE, VECTOR_TILE, VERSION, Manifest, TensorEntry, grid, tile_array, tile_hash


def cut(name, array, transposed=False):
    """Cut a canonical array into an entry and its tiles, element by element as the module's text says."""
    stored = array.T if transposed else array.reshape(-1, array.shape[-1])
    width = VECTOR_TILE if array.ndim == 1 else TILE
    dtype = {np.dtype("f4"): "f32", np.dtype("f2"): "f16"}[array.dtype]
    tiles = [
        np.ascontiguousarray(stored[r : r + TILE, c : c + width]).tobytes()
        for r in range(0, stored.shape[0], TILE)
        for c in range(0, stored.shape[1], width)
    ]
    hashes = tuple(hashlib.sha256(t).digest() for t in tiles)
    return TensorEntry(name, array.shape, dtype, transposed, hashes), dict(zip(hashes, tiles, strict=True))


def gather(manifest, ref, tiles):
    """Put the tiles of a reference together as a device does; every element must be hit exactly once."""
    out = np.full((ref.rows[1] - ref.rows[0], ref.columns[1] - ref.columns[0]), np.nan)
    for place in manifest.tiles(ref):
        data = tiles[place.hash]
        assert tile_hash(data) == place.hash
        tile = tile_array(place, data)
        r0, c0 = max(place.row0, ref.rows[0]), max(place.column0, ref.columns[0])
        r1 = min(place.row0 + tile.shape[0], ref.rows[1])
        c1 = min(place.column0 + tile.shape[1], ref.columns[1])
        assert min(r1 - r0, c1 - c0) > 0, "the tile has no element of the reference"
        target = out[r0 - ref.rows[0] : r1 - ref.rows[0], c0 - ref.columns[0] : c1 - ref.columns[0]]
        assert np.isnan(target).all()
        target[...] = tile[r0 - place.row0 : r1 - place.row0, c0 - place.column0 : c1 - place.column0]
    assert not np.isnan(out).any()
    return out


def span(draw, limit):
    start = draw(st.integers(0, limit))
    return start, draw(st.integers(start, limit))


dims = st.sampled_from([1, 3, 255, 256, 257, 300, 512, 600])


@settings(deadline=None)
@given(st.data(), dims, dims, st.booleans(), st.sampled_from(["f4", "f2"]))
def test_tiles_of_a_reference_give_exactly_its_elements(data, rows, columns, transposed, dtype):
    array = (np.arange(rows * columns) % 2039).reshape(rows, columns).astype(dtype)
    entry, tiles = cut("w", array, transposed)
    ref = WeightRef("w", span(data.draw, rows), span(data.draw, columns))
    got = gather(Manifest("m", (entry,)), ref, tiles)
    np.testing.assert_array_equal(got, array[slice(*ref.rows), slice(*ref.columns)])


@settings(deadline=None)
@given(st.data(), st.sampled_from([1, 5, 65535, 65536, 65537, 140000]))
def test_tiles_of_a_vector_give_exactly_its_elements(data, n):
    array = (np.arange(n) % 2039).astype("f4")
    entry, tiles = cut("b", array)
    ref = WeightRef("b", (0, 1), span(data.draw, n), "plain")
    got = gather(Manifest("m", (entry,)), ref, tiles)
    np.testing.assert_array_equal(got[0], array[slice(*ref.columns)])


@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [
        ("absent", (0, 1), (0, 1)),
        *(("w", rows, columns) for rows, columns in (((0, 11), (0, 7)), ((0, 10), (0, 8)), ((-1, 10), (0, 7)))),
        *(("w", (5, 4), (0, 7)), ("b", (0, 2), (0, 3)), ("b", (0, 1), (0, 4))),
    ],
)
def test_a_reference_outside_the_model_is_refused(name, rows, columns):
    manifest = Manifest("m", (cut("w", np.zeros((10, 7), "f4"))[0], cut("b", np.zeros(3, "f4"))[0]))
    with pytest.raises(WireError):
        manifest.tiles(WeightRef(name, rows, columns))


@pytest.mark.parametrize(
    ("shape", "dtype", "share"),
    [
        ((2048, 768), "q4_0", ((0, 2048), (192, 352))),
        ((2048, 768), "q4_k", ((0, 2048), (192, 352))),
        ((768, 2048), "q4_0", ((192, 352), (0, 2048))),
        ((768, 2048), "q8_0", ((0, 32), (0, 2048))),
        ((576, 576), "q8_0", ((0, 576), (64, 128))),
    ],
)
def test_tiles_of_a_share_of_a_narrow_quantised_matrix_hold_nothing_else(shape, dtype, share):
    rows, columns = grid(shape, True, dtype)
    entry = TensorEntry("w", shape, dtype, True, tuple(bytes([i // 256, i % 256]) * 16 for i in range(rows * columns)))
    (top, bottom), (left, right) = share
    tiles = Manifest("m", (entry,)).tiles(WeightRef("w", *share))
    assert sum(tile.nbytes for tile in tiles) == (right - left) * STORAGES[dtype].row_bytes(bottom - top)
    assert [tile.nbytes for tile in entry.tiles()] == entry.tile_bytes().tolist()
    assert sum(tile.nbytes for tile in entry.tiles()) == shape[1] * STORAGES[dtype].row_bytes(shape[0])
    assert max(tile.nbytes for tile in entry.tiles()) <= TILE * TILE * 4


GOOD = ["w", [300, 10], "f32", False, b"x" * 64]

HASHES = b"x" * 64
LIES = (
    *([*GOOD[:4], hashes] for hashes in (b"x" * 63, b"x" * 96, "x" * 64)),
    *([name, *GOOD[1:]] for name in ("", "w" * 129, 7)),
    *(["w", shape, *GOOD[2:]] for shape in ([], [0, 10], [-300, 10], [300.0, 10], [2**31, 10], [3, 10, 10])),
    ["w", [2**31 - 1, 2**31 - 1], *GOOD[2:]],
    *(["w", [300, 10], dtype, False, HASHES] for dtype in ("f64", ["f32"])),
    *(["w", [300, 10], "f32", 1, HASHES], ["w", [300], "f32", True, b"x" * 32], GOOD[:4], None),
)


@pytest.mark.parametrize("tensor", LIES)
def test_a_false_size_is_a_wire_error(tensor):
    with pytest.raises(WireError):
        Manifest.decode(msgpack.packb([VERSION, TILE, "m", [tensor]]))


def test_a_true_tensor_is_accepted_and_a_repeated_one_is_not():
    assert Manifest.decode(msgpack.packb([VERSION, TILE, "m", [GOOD]])).entries[0].shape == (300, 10)
    twice, other = [VERSION, TILE, "m", [GOOD, GOOD]], [VERSION + 1, TILE, "m", []]
    for fields in (twice, other, [VERSION, 128, "m", []], [VERSION, TILE, "M/#", []]):
        with pytest.raises(WireError):
            Manifest.decode(msgpack.packb(fields))


def test_golden_manifest():
    encoded = Manifest("m", (TensorEntry("b", (3,), "f16", False, (bytes(range(32)),)),)).encode()
    assert encoded == bytes.fromhex("9402cd0100a16d9195a1629103a3663136c2c420") + bytes(range(32))


def test_a_tile_is_a_view_of_its_bytes_and_a_short_tile_a_wire_error():
    entry, tiles = cut("w", np.arange(6, dtype="f4").reshape(2, 3), transposed=True)
    place = entry.tile_at(0, 0)
    data = bytearray(tiles[place.hash])
    tile = tile_array(place, memoryview(data))
    np.frombuffer(data, NUMPY_DTYPE["f32"])[0] = 9
    assert tile[0, 0] == 9
    with pytest.raises(WireError):
        tile_array(place, bytes(data[:-1]))
