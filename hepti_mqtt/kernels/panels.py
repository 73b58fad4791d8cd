"""The table of panels: the addresses of a product's matrices, and the columns of its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.core.storage import BLOCK_STORAGES
from hepti_mqtt.kernels.blocks import BlockMatrix
from hepti_mqtt.kernels.jit import helper
from hepti_mqtt.kernels.weights import PANELS, NarrowMatrix, PackedMatrix

Matrix = PackedMatrix | NarrowMatrix | BlockMatrix

#: Columns of the table: addresses of codes and bias; first column of the result, and how many count; the place of the
#: storage among `BLOCK_STORAGES`, 0 of others; addresses of scales and sums of codes, 0 for none.
CODES, BIAS, COLUMN, VALID, KIND, SCALES, SUMS = range(7)


def panels_of(
    matrices: Sequence[Matrix], biases: Sequence[NDArray[np.float32]]
) -> tuple[NDArray[np.int64], tuple[object, ...]]:
    """Return the table int64 [P, 7], and the owners of its addresses, which must live as long as it.

    biases: one for each matrix, or none.
    """
    table, padded_biases, column = list[tuple[int, ...]](), list[NDArray[np.float32]](), 0
    for place, matrix in enumerate(matrices):
        name = storage_of(matrix)
        count, width = len(matrix.panels), PANELS[name].width
        bias = np.zeros((count, width), np.float32)
        if biases:
            bias.reshape(-1)[: matrix.columns] = biases[place]
        padded_biases.append(bias)
        kind = BLOCK_STORAGES.index(name) if isinstance(matrix, BlockMatrix) else 0
        scales = (matrix.scales, matrix.sums) if isinstance(matrix, NarrowMatrix) else ()
        for p in range(count):
            of_columns = [_address(array, p) for array in scales] or [0, 0]
            valid = min(width, matrix.columns - p * width)
            table.append((_address(matrix.panels, p), _address(bias, p), column + p * width, valid, kind, *of_columns))
        column += matrix.columns
    return np.asarray(table, np.int64).reshape(-1, 1 + SUMS), (*matrices, *padded_biases)


def storage_of(matrix: Matrix) -> Any:
    """Return the name of a matrix's storage."""
    if isinstance(matrix, BlockMatrix):
        return matrix.storage.name
    return matrix.storage if isinstance(matrix, NarrowMatrix) else "f32"


def _address(array: NDArray[Any], p: int) -> int:
    """Return the address of a panel's part of an array, 0 of an empty array."""
    return int(array.__array_interface__["data"][0]) + p * array[0].nbytes if len(array) else 0


@helper
def adjacent(panels: Any, p: int, count: int, last: int, width: int, nbytes: int, scale_bytes: int) -> Any:
    """Return `count` if the panels p..p + count are adjacent, with their biases and scales, else 1.

    nbytes, scale_bytes: of a panel's codes and scales.
    """
    if p + count > last:
        return 1
    for q in range(p + 1, p + count):
        coded = panels[q, CODES] == panels[q - 1, CODES] + nbytes
        scaled = panels[q, SCALES] == panels[q - 1, SCALES] + scale_bytes
        biased = panels[q, BIAS] == panels[q - 1, BIAS] + 4 * width
        if not (coded and scaled and biased and panels[q, COLUMN] == panels[q - 1, COLUMN] + width):
            return 1
    return count
