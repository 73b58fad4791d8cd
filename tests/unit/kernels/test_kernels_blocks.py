"""Matrices in the blocks of their file: tiles in any order make the matrix, and products are those of its values."""

from __future__ import annotations

import numpy as np
import pytest
from gguf_writer import quantised
from kernels_support import Case, held

from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.core.storage import BLOCK, BLOCK_STORAGES, STORAGES, StoredRows
from hepti_mqtt.kernels import allocate
from hepti_mqtt.kernels.blocks import WIDTH


def stored(storage: str, k: int, n: int, rng: np.random.Generator) -> StoredRows:
    return StoredRows(STORAGES[storage], quantised(rng.standard_normal((n, k)), storage))


@pytest.mark.parametrize("storage", BLOCK_STORAGES)
def test_tiles_in_any_order_make_a_range_of_a_matrix(storage: str) -> None:
    unit = STORAGES[storage].block
    whole = stored(storage, 10 * unit, 150, np.random.default_rng(5))
    rows, columns = (2 * unit, 9 * unit), (WIDTH, 131)
    buffer = allocate(WeightRef("w", rows, columns, "packed", storage))
    nbytes = whole.storage.row_bytes(8 * unit)
    tiles = [
        (StoredRows(whole.storage, whole.raw[n : n + 70, nbytes * i : nbytes * (i + 1)]), 8 * unit * i, n)
        for n in range(0, 150, 70)
        for i in range(2)
    ]
    new = sum(buffer.put(*tiles[i]) for i in (3, 0, 5, 3, 1, 4, 2))
    assert new == (rows[1] - rows[0]) * (columns[1] - columns[0])
    matrix = buffer.finish()
    np.testing.assert_array_equal(matrix.plain(), whole.values()[slice(*rows), slice(*columns)])


def test_what_is_not_whole_blocks_is_refused() -> None:
    for rows, storage in (((0, 40), "q4_0"), ((16, 48), "q4_0"), ((0, 288), "q4_k"), ((32, 288), "q6_k")):
        with pytest.raises(ValueError, match="blocks"):
            allocate(WeightRef("w", rows, (0, 8), "packed", storage))
    buffer = allocate(WeightRef("w", (0, 32), (0, 8), "packed", "q4_0"))
    with pytest.raises(ValueError, match="q8_0"):
        buffer.put(stored("q8_0", 32, 8, np.random.default_rng(5)), 0, 0)
    with pytest.raises(ValueError, match="never arrived"):
        buffer.finish()


def normals(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def steps_at_ties(x: np.ndarray) -> np.ndarray:
    """Return the step of each activation that f32 and the reference may round to different codes, else 0."""
    parts = x.astype(np.float64).reshape(len(x), -1, BLOCK)
    step = np.abs(parts).max(axis=2, keepdims=True) / 127
    return (step * (np.abs(parts / step % 1 - 0.5) < 127 * 2.0**-22)).reshape(x.shape)


@pytest.mark.parametrize(
    ("m", "k", "widths", "threads"), [(1, 64, (70, 32), 1), (2, 1536, (33,), 2), (13, 768, (96, 1), 2)]
)
def test_products_are_those_of_the_values(m: int, k: int, widths: tuple[int, ...], threads: int) -> None:
    """Of several storages in one product, with and without bias, activation and residual."""
    rng, n = np.random.default_rng(k), sum(widths)
    storages = [storage for storage in BLOCK_STORAGES if k % STORAGES[storage].block == 0]
    for first in range(len(storages)):
        matrices = [held(stored(storages[(first + i) % len(storages)], k, w, rng)) for i, w in enumerate(widths)]
        biases = [normals(rng, w) for w in widths]
        for whole, activation, how in ((first % 2 == 0, "silu", "f32"), (first % 2 == 1, None, "i8")):
            reads = [normals(rng, m, k), normals(rng, m, n)][: 1 + whole]
            attrs = {"bias": whole, "residual": whole, "activation": activation, "x": how}
            case = Case("linear", reads, [(m, n)], [*matrices, *biases] if whole else matrices, **attrs)
            (out,), (want,) = case.run(threads), case.reference()
            size = np.abs(np.concatenate(case.plain[: len(widths)], axis=1))
            near = 1e-6 * (np.abs(reads[0]) @ size + 1)
            assert (np.abs(out - want) < near + (steps_at_ties(reads[0]) @ size if how == "i8" else 0)).all()
            if m > 1:  # a row's bits do not depend on those beside it
                alone = Case("linear", [read[1:2] for read in reads], [(1, n)], case.weights, **attrs)
                np.testing.assert_array_equal(alone.run()[0][0], out[1])


@pytest.mark.parametrize("how", ["f32", "i8"])
def test_what_is_not_finite_stays_so(how: str) -> None:
    rng = np.random.default_rng(5)
    x = normals(rng, 3, 64)
    x[1, 40], x[2, 3] = np.nan, np.inf
    attrs = {"bias": False, "residual": False, "activation": None, "x": how}
    (out,) = Case("linear", [x], [(3, 40)], [held(stored("q4_1", 64, 40, rng))], **attrs).run()
    assert np.isfinite(out[0]).all()
    assert not np.isfinite(out[1:]).any()
