"""A model's weights as content-addressed tiles, independent of plans.

A tensor in its stored layout ([out, in] for matmul weights) is cut into tiles of at most 256 x 256 elements, a vector
into tiles of 65536. A quantised tensor (`storage`) is cut between blocks. Tiles of narrow quantised matrices, e.g. of
experts, are one block wide: devices divide these matrices, and a square tile would belong to two or three shares.
A tile's name is the SHA-256 of its contiguous little-endian bytes. Devices request tiles by name, verify and cache
them; the weights of all strategies are views of the same tiles.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from hepti_mqtt.core.errors import HeptiError, WireError
from hepti_mqtt.core.ids import check_model
from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.core.storage import BLOCK, STORAGES, StoredRows

TILE: Final = 256
VECTOR_TILE: Final = TILE * TILE
NARROW: Final = 4 * TILE  # quantised matrices with fewer rows or columns are cut into strips
# Window of int8 weight tiles after a device's first missing tile, because an incomplete block occupies f32 memory.
TILES_AHEAD: Final = 16
HASH_BYTES: Final = 32
VERSION: Final = 2
MAX_DIM: Final = 2**31 - 1
MAX_NAME: Final = 128


class TileLocation(NamedTuple):
    """One stored tile and its position in the tensor."""

    hash: bytes
    nbytes: int
    dtype: str
    stored_shape: tuple[int, int]
    transposed: bool
    row0: int  #: of its first element in the canonical [in, out] layout
    column0: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a manifest."""

    name: str
    shape: tuple[int, ...]  #: canonical, (in, out) or (n,)
    dtype: str
    transposed: bool  #: stored as [out, in]
    hashes: tuple[bytes, ...]  #: row-major over the stored grid of tiles

    def tile_at(self, row: int, column: int) -> TileLocation:
        """Return the tile at (row, column) of the stored grid."""
        rows, columns = _stored(self.shape, self.transposed)
        tile_rows, tile_columns = tile_shape((rows, columns), self.dtype, len(self.shape) == 1)
        r0, c0 = row * tile_rows, column * tile_columns
        shape = (min(tile_rows, rows - r0), min(tile_columns, columns - c0))
        digest = self.hashes[row * -(-columns // tile_columns) + column]
        nbytes = shape[0] * STORAGES[self.dtype].row_bytes(shape[1])
        row0, column0 = (c0, r0) if self.transposed else (r0, c0)
        return TileLocation(digest, nbytes, self.dtype, shape, self.transposed, row0, column0)

    def tile_bytes(self) -> npt.NDArray[np.int64]:
        """Return the bytes of all tiles, int64 [tiles], in the order of `hashes`."""
        (rows, columns), storage = _stored(self.shape, self.transposed), STORAGES[self.dtype]
        height, width = tile_shape((rows, columns), self.dtype, len(self.shape) == 1)
        widths = [storage.row_bytes(min(width, columns - left)) for left in range(0, columns, width)]
        return np.outer([min(height, rows - top) for top in range(0, rows, height)], widths).reshape(-1)

    def tiles(self) -> Iterator[TileLocation]:
        """Yield all tiles in the order of `hashes`."""
        rows, columns = grid(self.shape, self.transposed, self.dtype)
        for row in range(rows):
            for column in range(columns):
                yield self.tile_at(row, column)


@dataclass(frozen=True)
class Manifest:
    """All tensors of one model."""

    model: str
    entries: tuple[TensorEntry, ...]

    @cached_property
    def by_name(self) -> Mapping[str, TensorEntry]:
        """Return the entries by tensor name."""
        return {entry.name: entry for entry in self.entries}

    @cached_property
    def _encoded(self) -> bytes:
        tensors = [[e.name, list(e.shape), e.dtype, e.transposed, b"".join(e.hashes)] for e in self.entries]
        packed: bytes = msgpack.packb([VERSION, TILE, self.model, tensors])
        return packed

    def encode(self) -> bytes:
        """Return msgpack bytes; equal manifests give equal bytes."""
        return self._encoded

    @cached_property
    def digest(self) -> bytes:
        """Return the SHA-256 of `encode()`, the manifest's name."""
        return hashlib.sha256(self._encoded).digest()

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Return the manifest in `data`. Raises WireError for output that `encode` cannot produce."""
        try:
            fields = msgpack.unpackb(data, use_list=True, strict_map_key=True)
        except (ValueError, msgpack.UnpackException, RecursionError) as error:
            raise WireError(f"a weight manifest is not msgpack ({error}); ask the planner for it again") from error
        if not isinstance(fields, list) or len(fields) != 4 or fields[:2] != [VERSION, TILE]:
            raise _wrong(f"its version or tile size is not {VERSION}, {TILE}: use the same Hepti on all devices")
        model, tensors = fields[2:]
        try:
            check_model(model)
        except HeptiError as error:
            raise _wrong(str(error)) from error
        if not isinstance(tensors, list):
            raise _wrong("its tensors are not a list")
        entries = tuple(_entry(fields) for fields in tensors)
        if len({entry.name for entry in entries}) != len(entries):
            raise _wrong("two tensors have the same name")
        return cls(model, entries)

    def tile_ranges(self, ref: WeightRef) -> tuple[range, range]:
        """Return the grid rows and columns of the tiles in `ref`. Raises WireError for an invalid range."""
        entry = self.by_name.get(ref.tensor)
        if entry is None:
            raise _wrong(f"it has no tensor {ref.tensor!r}")
        limits = (1, *entry.shape)[-2:]
        for (start, stop), limit in zip((ref.rows, ref.columns), limits, strict=True):
            if not 0 <= start <= stop <= limit:
                raise _wrong(f"{start}..{stop} lies outside {ref.tensor} of shape {entry.shape}")
        rows, columns = (ref.columns, ref.rows) if entry.transposed else (ref.rows, ref.columns)
        if rows[0] == rows[1] or columns[0] == columns[1]:
            return range(0), range(0)
        stored = _stored(entry.shape, entry.transposed)
        height, width = tile_shape(stored, entry.dtype, len(entry.shape) == 1)
        return range(rows[0] // height, -(-rows[1] // height)), range(columns[0] // width, -(-columns[1] // width))

    def tiles(self, ref: WeightRef) -> list[TileLocation]:
        """Return the tiles with elements of `ref`. Raises WireError for an invalid range."""
        rows, columns = self.tile_ranges(ref)
        return [self.by_name[ref.tensor].tile_at(row, column) for row in rows for column in columns]


def grid(shape: tuple[int, ...], transposed: bool, dtype: str = "f32") -> tuple[int, int]:
    """Return the rows and columns of a tensor's stored grid of tiles."""
    rows, columns = _stored(shape, transposed)
    height, width = tile_shape((rows, columns), dtype, len(shape) == 1)
    return -(-rows // height), -(-columns // width)


def tile_shape(stored: tuple[int, int], dtype: str, is_vector: bool = False) -> tuple[int, int]:
    """Return the rows and columns of a whole tile in the stored layout."""
    rows, columns = stored
    if is_vector:
        return 1, VECTOR_TILE
    if STORAGES[dtype].block == 1:
        return TILE, TILE
    if rows < NARROW and rows <= columns:
        return BLOCK, VECTOR_TILE // BLOCK
    if columns < NARROW and STORAGES[dtype].block == BLOCK:
        return VECTOR_TILE // BLOCK, BLOCK
    return TILE, TILE


def tile_hash(data: bytes | memoryview) -> bytes:
    """Return the name of a tile."""
    return hashlib.sha256(data).digest()


def tile_array(place: TileLocation, data: bytes | memoryview) -> npt.NDArray[Any] | StoredRows:
    """Return a view of a tile in canonical [in, out] layout, [1, n] for a vector, or its rows in blocks.

    Raises WireError for a wrong size.
    """
    if len(data) != place.nbytes:
        raise WireError(
            f"weight tile {place.hash.hex()[:12]} has {len(data)} bytes instead of {place.nbytes}; ask for it again"
        )
    storage, raw = STORAGES[place.dtype], np.frombuffer(data, np.uint8).reshape(place.stored_shape[0], -1)
    if storage.block > 1 and place.transposed:
        return StoredRows(storage, raw)
    stored = storage.rows(raw)
    return stored.T if place.transposed else stored


def _stored(shape: tuple[int, ...], transposed: bool) -> tuple[int, int]:
    """Return the rows and columns of the stored layout."""
    if len(shape) == 1:
        return 1, shape[0]
    return (shape[1], shape[0]) if transposed else (shape[0], shape[1])


def _entry(fields: Any) -> TensorEntry:
    """Decode an entry; check its size before any allocation."""
    if not isinstance(fields, list) or len(fields) != 5:
        raise _wrong("a tensor does not have five fields")
    name, shape, dtype, transposed, hashes = fields
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise _wrong(f"a tensor's name is not a string of 1 to {MAX_NAME} characters")
    if not isinstance(shape, list) or len(shape) not in (1, 2) or not all(_is_dim(dim) for dim in shape):
        raise _wrong(f"tensor {name!r} has the shape {shape!r}")
    if not isinstance(dtype, str) or dtype not in STORAGES:
        raise _wrong(f"tensor {name!r} has the dtype {dtype!r}; supported: {', '.join(STORAGES)}")
    if not isinstance(transposed, bool) or (transposed and len(shape) == 1):
        raise _wrong(f"tensor {name!r} of shape {shape} cannot be stored transposed = {transposed!r}")
    if shape[0 if transposed else -1] % STORAGES[dtype].block:
        raise _wrong(f"tensor {name!r} of shape {shape} is not whole blocks of {dtype}")
    rows, columns = grid(tuple(shape), transposed, dtype)
    if not isinstance(hashes, bytes) or len(hashes) != rows * columns * HASH_BYTES:
        raise _wrong(f"tensor {name!r} of shape {shape} needs {rows * columns} hashes of {HASH_BYTES} bytes")
    pieces = tuple(hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES))
    return TensorEntry(name, tuple(shape), dtype, transposed, pieces)


def _is_dim(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_DIM


def _wrong(why: str) -> WireError:
    return WireError(f"a weight manifest cannot be used: {why}")
