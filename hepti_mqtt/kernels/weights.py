"""Weights as kernels read them: packed panels or plain arrays, filled tile by tile in any order.

A packed matrix [k, n] is stored as panels [ceil(n / NR), k, NR] (NR = `TILE.width`): the micro-kernel reads a panel in
order. Columns beyond n are zero. Half precision has the same layout. int8 has a scale for each column of each block of
`BLOCK` rows, and is quantised block by block; a block that no single tile covers is held in f32 until it is complete.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Final, NamedTuple, cast

import numpy as np
from numba import float32, int8, uint16
from numpy.typing import NDArray

from hepti_mqtt.core.plan import WeightDtype
from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.core.storage import BLOCK_STORAGES, STORAGES, BlockStorage, StoredRows
from hepti_mqtt.kernels.blocks import WIDTH, Arrived, BlockBuffer, BlockMatrix, size_of
from hepti_mqtt.kernels.cpu import DOT, TILE
from hepti_mqtt.kernels.elementary import bits_of, from_bits
from hepti_mqtt.kernels.jit import INT, compile_all, compile_first, fills, helper, kernel, reads
from hepti_mqtt.kernels.pages import aligned_zeros

NR: Final = TILE.width

# Rows of k with one scale for a column, and values of a row of x with one scale. The least cosine of the real MiniLM's
# embeddings over sentences is 0.9986 with whole columns and rows, 0.9992 with 256, 0.9995 with 128, which costs a
# seventh of the speed of w8a8.
BLOCK: Final = 256
_STEPS: Final = np.float32(127.0)


# Version of packed weights in files. Raise it if the arrays of `arrays_of` or their places change: a file of an earlier
# version is then not read.
LAYOUT_VERSION: Final = 2


class Panels(NamedTuple):
    """The layout of a storage's panels: columns of a panel, rows of k interleaved by column, and the dtype."""

    width: int
    group: int
    dtype: str


PANELS: Final[Mapping[WeightDtype | BlockStorage, Panels]] = {
    "f32": Panels(NR, 1, "f4"),
    "f16": Panels(NR, 1, "f2"),
    "w8a32": Panels(NR, 1, "i1"),
    "w8a8": Panels(DOT.width, 4, "i1"),
    **{name: Panels(WIDTH, 4, "u1") for name in BLOCK_STORAGES},
}


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """The right-hand side of a matmul: panels f32 [ceil(columns / NR), rows, NR], zero beyond `columns`."""

    panels: NDArray[np.float32]
    rows: int
    columns: int

    def plain(self) -> NDArray[np.float32]:
        """Return a copy as [rows, columns]."""
        wide = self.panels.transpose(1, 0, 2).reshape(self.rows, len(self.panels) * NR)
        return np.ascontiguousarray(wide[:, : self.columns])


@dataclass(frozen=True, slots=True)
class NarrowMatrix:
    """The right-hand side of a matmul in a narrow storage."""

    storage: WeightDtype
    #: [P, ceil(rows / group), width, group], zero beyond `rows` and `columns`
    panels: NDArray[Any]
    #: f32 [P, B, width] for B = `blocks(rows)`: one step of a column's codes in a block; NaN if a value is not finite;
    #: f16: empty
    scales: NDArray[np.float32]
    #: f32 [P, B, width]: the sums of codes; w8a8, else empty
    sums: NDArray[np.float32]
    rows: int
    columns: int

    def plain(self) -> NDArray[np.float32]:
        """Return a copy of the values as f32 [rows, columns]."""
        count, groups, width, group = self.panels.shape
        wide = self.panels.transpose(1, 3, 0, 2).reshape(groups * group, count * width).astype(np.float32)
        if self.scales.size:
            scales = self.scales.transpose(1, 0, 2).reshape(-1, count * width)
            wide *= np.repeat(scales, BLOCK, axis=0)[: len(wide)]
        return np.ascontiguousarray(wide[: self.rows, : self.columns])


Weight = PackedMatrix | NarrowMatrix | BlockMatrix | NDArray[np.float32]


def twin(weight: Weight) -> Weight:
    """Return a copy of a weight in new memory."""
    return with_arrays(weight, [_aligned(array) for array in arrays_of(weight)])


def arrays_of(weight: Weight) -> tuple[NDArray[Any], ...]:
    """Return the arrays of a weight in a fixed order; with its `layout_of` they describe it completely."""
    if isinstance(weight, np.ndarray):
        return (weight,)
    return (weight.panels, weight.scales, weight.sums) if isinstance(weight, NarrowMatrix) else (weight.panels,)


def with_arrays(weight: Weight, arrays: Sequence[NDArray[Any]]) -> Weight:
    """Return a weight like this one with other arrays, in the order of `arrays_of`."""
    if isinstance(weight, np.ndarray):
        return arrays[0]
    if isinstance(weight, NarrowMatrix):
        return replace(weight, panels=arrays[0], scales=arrays[1], sums=arrays[2])
    return replace(weight, panels=arrays[0])  # type: ignore[arg-type]  # either matrix has panels


def layout_of(ref: WeightRef) -> str:
    """Return a text of the array layout of a weight on this machine; equal texts mean equal arrays."""
    panels = PANELS[ref.weight_dtype] if ref.layout == "packed" else None
    return f"{LAYOUT_VERSION} {sys.byteorder} {BLOCK} {panels}"


def _aligned(array: NDArray[Any]) -> NDArray[Any]:
    copy = aligned_zeros(array.shape, array.dtype.str)
    copy[...] = array
    return copy


def blocks(rows: int) -> int:
    """Return the number of blocks of scales of `rows` of k; at least one, so that a scale exists."""
    return max(1, -(-rows // BLOCK))


def weight_bytes(ref: WeightRef) -> int:
    """Return the resident bytes of the weight of `ref`, padding and scales included."""
    rows, columns = _size(ref)
    if ref.layout == "plain":
        return rows * columns * 4
    width, group, dtype = PANELS[ref.weight_dtype]
    padded = -(-columns // width) * width
    if ref.weight_dtype in BLOCK_STORAGES:
        return padded * STORAGES[ref.weight_dtype].row_bytes(rows)
    of_columns = {"w8a8": 8, "w8a32": 4}.get(ref.weight_dtype, 0)
    return -(-rows // group) * group * padded * np.dtype(dtype).itemsize + of_columns * padded * blocks(rows)


def loading_bytes(ref: WeightRef) -> int:
    """Return the most bytes of a buffer of `ref` in addition to its weight while tiles arrive.

    An int8 panel is kept in f32 until it is complete; tiles that arrive row by row complete all panels with the last
    row of tiles.
    """
    rows, columns = _size(ref)
    if ref.layout == "plain" or ref.weight_dtype not in ("w8a8", "w8a32"):
        return 0
    width = PANELS[ref.weight_dtype].width
    return rows * -(-columns // width) * width * 4


class WeightBuffer:
    """A weight while its tiles arrive, in any order; a repeated tile counts once."""

    def __init__(self, ref: WeightRef) -> None:
        self.ref = ref
        rows, columns = _size(ref)
        self._panels = PANELS[ref.weight_dtype] if ref.layout == "packed" else None
        self._sums = np.zeros((0, 0, 0), np.float32)
        self._scales = np.zeros((0, 0, 0), np.float32)
        self._staged: dict[tuple[int, int], NDArray[np.float32]] = {}
        self._missing: dict[tuple[int, int], int] = {}
        if self._panels is None:
            self._array: NDArray[Any] = aligned_zeros((rows, columns), "f4")
        else:
            width, group, dtype = self._panels
            count = -(-columns // width)
            shape = (count, -(-rows // group), width, group)
            self._array = aligned_zeros(shape[:3] if group == 1 else shape, dtype)
            if dtype == "i1":
                self._scales = np.zeros((count, blocks(rows), width), np.float32)
            if group > 1:
                self._sums = np.zeros((count, blocks(rows), width), np.float32)
        self._arrived = Arrived(ref)

    def put(self, tile: NDArray[Any] | StoredRows, row0: int, column0: int) -> int:
        """Copy the part of a tile in the range of the weight; return the number of new elements.

        tile: f32 or f16 [k', n'], any strides, or rows in blocks; its first element is (row0, column0) of the tensor.
        Raises ValueError if it is neither, or if it overlaps an earlier tile without being equal.
        """
        if isinstance(tile, StoredRows):
            tile = tile.values()
        if tile.ndim != 2 or tile.dtype not in (np.float32, np.float16):
            raise ValueError(f"a tile of {self.ref.tensor} must be f32 or f16 [rows, columns], got {_describe(tile)}")
        inside = self._arrived.inside(tile.shape, row0, column0)
        if inside is None:
            return 0
        (top, bottom, left, right), new = inside
        part = tile[top - row0 : bottom - row0, left - column0 : right - column0]
        if new:
            self._copy(part, top - self.ref.rows[0], left - self.ref.columns[0])
        return new

    def finish(self) -> Weight:
        """Return the weight; raises ValueError if elements are missing."""
        self._arrived.require_all()
        return self.weight()

    def weight(self) -> Weight:
        """Return the weight, complete or not: its arrays are views of this buffer's memory."""
        rows, columns = _size(self.ref)
        if self._panels is None:
            return self._array[0] if self.ref.rows == (0, 1) else self._array
        if self.ref.weight_dtype == "f32":
            return PackedMatrix(self._array, rows, columns)
        panels = self._array if self._array.ndim == 4 else self._array[..., None]
        return NarrowMatrix(cast(WeightDtype, self.ref.weight_dtype), panels, self._scales, self._sums, rows, columns)

    def _copy(self, part: NDArray[Any], row: int, column: int) -> None:
        """Store new elements at (row, column) of the range."""
        rows, columns = part.shape
        if self._panels is None:
            self._array[row : row + rows, column : column + columns] = part
            return
        (compile_first if self.ref.weight_dtype == "f32" else compile_all)()
        if self.ref.weight_dtype == "f16":
            with np.errstate(over="ignore"):  # values beyond 65504 become infinity, as in hardware
                half = part.astype(np.float16)
            _pack_half(half.view(np.uint16), self._array.view(np.uint16), row, column)
            return
        part = part.astype(np.float32, copy=False)
        if self.ref.weight_dtype == "f32":
            _pack(part, self._array, row, column)
            return
        width = self._panels.width
        for p in range(column // width, (column + columns - 1) // width + 1):
            left, right = max(p * width, column), min((p + 1) * width, column + columns)
            for b in range(row // BLOCK, (row + rows - 1) // BLOCK + 1):
                top, bottom = max(b * BLOCK, row), min((b + 1) * BLOCK, row + rows)
                piece = part[top - row : bottom - row, left - column : right - column]
                self._stage(p, b, piece, top - b * BLOCK, left - p * width)

    def _stage(self, panel: int, block: int, part: NDArray[np.float32], row: int, column: int) -> None:
        """Quantise a block of a panel if `part` completes it; else keep its arrived values in f32."""
        rows, columns = _size(self.ref)
        width = self._scales.shape[2]
        height, valid = min(BLOCK, rows - block * BLOCK), min(width, columns - panel * width)
        staged = self._staged.pop((panel, block), None)
        if staged is None:
            staged = np.zeros((1, height, width), np.float32)
        _pack(part, staged, row, column)
        missing = self._missing.pop((panel, block), height * valid) - part.size
        if missing:
            self._staged[panel, block], self._missing[panel, block] = staged, missing
            return
        group = self._array.shape[3] if self._array.ndim == 4 else 1
        codes = self._array[panel, block * BLOCK // group : -(-(block * BLOCK + height) // group)]
        codes = codes if group > 1 else codes[..., None]
        _quantise(staged[0], codes, self._scales[panel, block])
        if self._sums.size:
            self._sums[panel, block] = codes.sum(axis=(0, 2), dtype=np.int32)


# ----------------------------------------------------------------------------------------------------------------------
# Ranges inside others: a weight may be a view of columns of a larger one, cut at the borders of panels.


def is_part(ref: WeightRef, matrix: WeightRef) -> bool:
    """Return whether the weight of `ref` is a view of the weight of `matrix`: whole panels, or any part of a vector."""
    if ref == matrix:
        return True
    step = _cut_step(matrix)
    if not step or kin(ref) != kin(matrix):
        return False
    (first, last), (start, stop) = ref.columns, matrix.columns
    ends = last == stop or (last - start) % step == 0
    return start <= first <= last <= stop and (first - start) % step == 0 and ends


def kin(ref: WeightRef) -> tuple[object, ...]:
    """Return the key that a range has in common with the ranges that may contain it."""
    return (ref.tensor, ref.rows, ref.layout, ref.weight_dtype)


def _cut_step(ref: WeightRef) -> int:
    """Return the number of columns that divides every part; 0 if there are no parts."""
    if ref.layout == "packed":
        return PANELS[ref.weight_dtype].width
    return 1 if ref.rows == (0, 1) else 0


def joined(refs: Iterable[WeightRef]) -> dict[WeightRef, WeightRef]:
    """Return the range that contains each range: touching ranges of a tensor become one, if parts can be cut."""
    wholes = {ref: ref for ref in refs}
    alike: dict[tuple[object, ...], list[WeightRef]] = {}
    for ref in wholes:
        alike.setdefault(kin(ref), []).append(ref)
    for several in alike.values():
        if len(several) > 1:
            wholes.update(_joined(sorted(several, key=attrgetter("columns"))))
    return wholes


def _joined(refs: list[WeightRef]) -> dict[WeightRef, WeightRef]:
    """Return `joined` of ranges of one tensor, sorted by columns."""
    step, wholes = _cut_step(refs[0]), dict[WeightRef, WeightRef]()
    (start, stop), parts = refs[0].columns, refs[:1]
    for ref in refs[1:]:
        first, last = ref.columns
        wide = max(stop, last)
        cut = (
            step
            and (first - start) % step == 0
            and all(end == wide or (end - start) % step == 0 for end in (stop, last))
        )
        if not cut or first > stop:
            wholes.update(dict.fromkeys(parts, parts[0]._replace(columns=(start, stop))))
            start, wide, parts = first, last, []
        stop = wide
        parts.append(ref)
    return {**wholes, **dict.fromkeys(parts, parts[0]._replace(columns=(start, stop)))}


def part(weight: Weight, matrix: WeightRef, ref: WeightRef) -> Weight:
    """Return the weight of `ref` as a view of the weight of `matrix`; ref `is_part` of matrix."""
    if ref == matrix:
        return weight
    first, last = (column - matrix.columns[0] for column in ref.columns)
    if isinstance(weight, np.ndarray):
        return weight[first:last]
    width = PANELS[matrix.weight_dtype].width
    own = slice(first // width, -(-last // width))
    if isinstance(weight, NarrowMatrix):
        weight = replace(weight, scales=weight.scales[own], sums=weight.sums[own])
    return replace(weight, panels=weight.panels[own], columns=last - first)  # type: ignore[arg-type]


def allocate(ref: WeightRef) -> WeightBuffer | BlockBuffer:
    """Return an empty buffer for the weight of `ref`; raises ValueError if its range is invalid."""
    _size(ref)
    return BlockBuffer(ref) if ref.weight_dtype in BLOCK_STORAGES else WeightBuffer(ref)


def _size(ref: WeightRef) -> tuple[int, int]:
    """Return the rows and columns of a range; raises ValueError if it is invalid."""
    if ref.weight_dtype not in PANELS or (ref.layout == "plain" and ref.weight_dtype != "f32"):
        raise ValueError(f"{ref}: a packed matrix is stored as one of {list(PANELS)}, a plain array as f32")
    return size_of(ref)


def _describe(array: NDArray[Any]) -> str:
    return f"{array.dtype}{list(array.shape)}"


@helper
def _pack_panels(tile: Any, panels: Any, row: int, column: int) -> None:
    """Copy a tile [k', n'] into panels [P, k, width] at (row, column) of the matrix."""
    k, n = tile.shape
    width = panels.shape[2]
    for panel in range(column // width, (column + n - 1) // width + 1):
        start = max(panel * width, column)
        stop = min((panel + 1) * width, column + n)
        for i in range(k):
            for j in range(start, stop):
                panels[panel, row + i, j - panel * width] = tile[i, j - column]


@kernel(reads(float32, 2, "A"), fills(float32, 3), INT, INT)
def _pack(tile: Any, panels: Any, row: int, column: int) -> None:
    _pack_panels(tile, panels, row, column)


@kernel(reads(uint16, 2, "A"), fills(uint16, 3), INT, INT, narrow=True)
def _pack_half(tile: Any, panels: Any, row: int, column: int) -> None:
    _pack_panels(tile, panels, row, column)


@kernel(reads(float32, 2), fills(int8, 3), fills(float32, 1), narrow=True)
def _quantise(panel: Any, codes: Any, scales: Any) -> None:
    """Fill codes [ceil(k / group), width, group] and scales [width] with panel [k, width], rounded to 127 steps."""
    k, width = panel.shape
    group = codes.shape[2]
    tops = np.zeros(width, np.int32)
    for i in range(k):
        for j in range(width):
            # The bits of f32 >= 0 are ordered like the values, with infinity and NaN above all.
            bits = bits_of(abs(panel[i, j]))
            tops[j] = max(tops[j], bits)
    for j in range(width):
        most = from_bits(tops[j])
        scales[j] = most / _STEPS if most < np.inf else np.float32(np.nan)
    for i in range(k):
        for j in range(width):
            code = panel[i, j] / scales[j] if scales[j] > 0 else np.float32(0)
            codes[i // group, j, i % group] = np.int8(min(max(np.rint(code), -_STEPS), _STEPS))
