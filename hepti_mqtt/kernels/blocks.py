"""Matrices in the blocks of their file: panels with one output column per 32-bit lane, filled tile by tile.

A panel is `WIDTH` columns of a matrix [k, n], block after block of 32 or 256 k:

    scales     f16 [WIDTH]
    minima     f16 [WIDTH] (q4_1, q4_k, q5_k)
    parts      [WIDTH][4 bytes] of parts of a block (q4_k, q5_k: scales and minima of 6 bits, q6_k: scales)
    fifths     groups of 4 k: [WIDTH][4 bytes] of the fifth bits of parts (q5_k)
    codes      groups of 4 k: [WIDTH][4 bytes]; of nibbles four groups, each with group g + 4 in its high halves; of
               q6_k three groups together: upper pairs of bits for four, then the nibbles of two each

It has exactly the bytes of its rows: a vector is four k of as many columns, nothing is added across lanes, and nibbles
keep GGUF's order, which pairs k and k + 16, too. Columns beyond n have scales of 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.core.storage import STORAGES, Octets, Storage, StoredRows
from hepti_mqtt.kernels.cpu import TILE
from hepti_mqtt.kernels.pages import aligned_zeros

VECTORS: Final = 2  # of a panel
LANES: Final = TILE.lanes
WIDTH: Final = VECTORS * LANES


class Field(NamedTuple):
    """A part of a stored block, in groups of bytes."""

    #: bytes of a group; they lie together in a lane
    group: int
    #: of the groups, in the order of the panel
    starts: Sequence[int]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the field in a block."""
        return self.group * len(self.starts)

    def places(self) -> NDArray[np.intp]:
        """Return the places of the bytes in a stored block."""
        return np.add.outer(self.starts, np.arange(self.group)).reshape(-1)

    def groups(self, stored: Octets) -> NDArray[Any]:
        """Return the groups [n, blocks, groups], each as one number, of columns u8 [n, blocks, block_bytes]."""
        first, last = min(self.starts), max(self.starts) + self.group
        numbers = stored[:, :, first:last].view(f"u{self.group}")
        order = [(start - first) // self.group for start in self.starts]
        return numbers if order == list(range(numbers.shape[2])) else numbers[:, :, order]


def _six_bits() -> list[int]:
    """Return the starts of groups of q6_k: four upper pairs of bits, then the nibbles of two each."""
    return [
        at
        for half in range(2)
        for g in range(0, 32, 4)
        for at in (128 + 32 * half + g, 64 * half + g, 64 * half + 32 + g)
    ]


# The fields of each block of a panel, in the order of reading: memory is read in one direction.
FIELDS: Final[Mapping[str, Mapping[str, Field]]] = {
    "q4_0": {"scale": Field(2, [0]), "codes": Field(4, range(2, 18, 4))},
    "q4_1": {"scale": Field(2, [0]), "least": Field(2, [2]), "codes": Field(4, range(4, 20, 4))},
    "q8_0": {"scale": Field(2, [0]), "codes": Field(4, range(2, 34, 4))},
    "q4_k": {
        "scale": Field(2, [0]),
        "least": Field(2, [2]),
        "parts": Field(4, range(4, 16, 4)),
        "codes": Field(4, range(16, 144, 4)),
    },
    "q5_k": {
        "scale": Field(2, [0]),
        "least": Field(2, [2]),
        "parts": Field(4, range(4, 16, 4)),
        "fifths": Field(4, range(16, 48, 4)),
        "codes": Field(4, range(48, 176, 4)),
    },
    "q6_k": {"scale": Field(2, [208]), "parts": Field(4, range(192, 208, 4)), "codes": Field(4, _six_bits())},
}


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """The right-hand side of a matmul in blocks: panels u8 [ceil(columns / WIDTH), blocks, WIDTH * block_bytes]."""

    storage: Storage
    panels: Octets
    rows: int
    columns: int

    def columns_at(self, numbers: NDArray[np.integer]) -> NDArray[np.float32]:
        """Return the values of some columns, f32 [len(numbers), rows]."""
        raw = np.empty((len(numbers), self.panels.shape[1], self.storage.block_bytes), np.uint8)
        panel, lane = np.divmod(numbers, WIDTH)
        for field, octets in _octets_of_fields(self.panels, self.storage):
            groups = octets.reshape(*octets.shape[:2], len(field.starts), WIDTH, field.group)
            raw[:, :, field.places()] = groups[panel, :, :, lane].reshape(len(numbers), len(raw[0]), -1)
        return self.storage.rows(raw.reshape(len(numbers), -1))

    def plain(self) -> NDArray[np.float32]:
        """Return a copy as [rows, columns], in f32."""
        return np.ascontiguousarray(self.columns_at(np.arange(self.columns)).T)


def _octets_of_fields(panels: Octets, storage: Storage) -> Iterator[tuple[Field, Octets]]:
    """Yield each field of a block and a view of its bytes in panels, [P, blocks, groups * WIDTH * group]."""
    first = 0
    for field in FIELDS[storage.name].values():
        last = first + field.nbytes * WIDTH
        yield field, panels[:, :, first:last]
        first = last


def places_of(storage: Storage) -> NDArray[np.int64]:
    """Return the places of the bytes of a stored block in a block of a panel, int64 [block_bytes, 2].

    Columns: place of the first column's byte, bytes from there to the next column's.
    """
    places, first = np.zeros((storage.block_bytes, 2), np.int64), 0
    for field in FIELDS[storage.name].values():
        for start in field.starts:
            for i in range(field.group):
                places[start + i] = first + i, field.group
            first += field.group * WIDTH
    return places


Part = tuple[int, int, int, int]  # rows top..bottom, columns left..right


class Arrived:
    """The arrived elements of a range, as parts of tiles."""

    def __init__(self, ref: WeightRef) -> None:
        self._ref = ref
        self._taken: set[Part] = set()

    def inside(self, shape: tuple[int, ...], row0: int, column0: int) -> tuple[Part, int] | None:
        """Return (the part of a tile in the range, its number of new elements), None if no part is.

        Raises ValueError if the part overlaps an earlier one without being equal.
        """
        (first_row, last_row), (first_column, last_column) = self._ref.rows, self._ref.columns
        top, bottom = max(row0, first_row), min(row0 + shape[0], last_row)
        left, right = max(column0, first_column), min(column0 + shape[1], last_column)
        if top >= bottom or left >= right:
            return None
        part = (top, bottom, left, right)
        return part, self._note(part)

    def _note(self, part: Part) -> int:
        if part in self._taken:
            return 0
        top, bottom, left, right = part
        for t, b, first, last in self._taken:
            if top < b and t < bottom and left < last and first < right:
                raise ValueError(
                    f"tiles of {self._ref.tensor} overlap: rows {top}..{bottom}, columns {left}..{right} and rows "
                    f"{t}..{b}, columns {first}..{last}; cut a tensor into one grid"
                )
        self._taken.add(part)
        return (bottom - top) * (right - left)

    def require_all(self) -> None:
        """Raise ValueError if elements are missing."""
        rows, columns = size_of(self._ref)
        have = sum((b - t) * (r - left) for t, b, left, r in self._taken)
        if have != rows * columns:
            raise ValueError(
                f"{self._ref.tensor}: {rows * columns - have} of {rows * columns} elements of rows {self._ref.rows}, "
                f"columns {self._ref.columns} never arrived; ask for the missing tiles"
            )


def size_of(ref: WeightRef) -> tuple[int, int]:
    """Return the rows and columns of a range; raises ValueError if it is invalid."""
    rows, columns = ref.rows[1] - ref.rows[0], ref.columns[1] - ref.columns[0]
    if rows < 0 or columns < 0 or ref.layout not in ("packed", "plain"):
        raise ValueError(f"{ref} is no range of a tensor: need start <= stop and layout packed or plain")
    return rows, columns


class BlockBuffer:
    """A matrix in blocks while its tiles arrive, in any order; a repeated tile counts once."""

    def __init__(self, ref: WeightRef) -> None:
        self.ref = ref
        self._storage = STORAGES[ref.weight_dtype]
        rows, columns = size_of(ref)
        block = self._storage.block
        if ref.rows[0] % block or rows % block:
            raise ValueError(f"{ref}: a range of rows is in whole blocks of {block}; divide the matrix there")
        count = -(-columns // WIDTH)
        shape = (count, rows // block, WIDTH * self._storage.block_bytes)
        self._array: Octets = aligned_zeros(shape, "u1")
        self._arrived = Arrived(ref)

    def put(self, tile: StoredRows | NDArray[Any], row0: int, column0: int) -> int:
        """Copy the part of a tile in the range of the weight; return the number of new elements.

        tile: its first element is (row0, column0) of the tensor. Raises ValueError if it has another storage, or if it
        overlaps an earlier tile without being equal.
        """
        if not isinstance(tile, StoredRows) or tile.storage != self._storage:
            storage = tile.storage.name if isinstance(tile, StoredRows) else f"{tile.dtype}"
            raise ValueError(f"a tile of {self.ref.tensor} must be in {self._storage.name}, not in {storage}")
        inside = self._arrived.inside(tile.shape, row0, column0)
        if inside is None:
            return 0
        (top, bottom, left, right), new = inside
        if new:
            raw = tile.raw.reshape(tile.shape[1], -1, self._storage.block_bytes)
            block = self._storage.block
            part = raw[left - column0 : right - column0, (top - row0) // block : (bottom - row0) // block]
            first_row, first_column = self.ref.rows[0], self.ref.columns[0]
            self._copy(part, (top - first_row) // block, left - first_column)
        return new

    def _copy(self, part: Octets, block: int, column: int) -> None:
        """Store columns [n, blocks, block_bytes] from (block, column) of the range on."""
        n, blocks = part.shape[:2]
        edges = (column, -(-column // WIDTH) * WIDTH, (column + n) // WIDTH * WIDTH, column + n)
        for left, right in pairwise(sorted({edge for edge in edges if column <= edge <= column + n})):
            panels, lanes = slice(left // WIDTH, -(-right // WIDTH)), slice(left % WIDTH, (right - 1) % WIDTH + 1)
            columns = part[left - column : right - column]
            for field, octets in _octets_of_fields(self._array[panels, block : block + blocks], self._storage):
                view = octets.view(f"u{field.group}").reshape(*octets.shape[:2], -1, WIDTH)
                groups = field.groups(columns).reshape(len(view), -1, blocks, view.shape[2])
                view[..., lanes] = groups.transpose(0, 2, 3, 1)

    def finish(self) -> BlockMatrix:
        """Return the weight; raises ValueError if elements are missing."""
        self._arrived.require_all()
        return self.weight()

    def weight(self) -> BlockMatrix:
        """Return the weight, complete or not: its array is this buffer's memory."""
        return BlockMatrix(self._storage, self._array, *size_of(self.ref))
