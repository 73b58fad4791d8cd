"""Matrices in the blocks of their file: tiles in any order make the matrix, and products are those of its values."""

from __future__ import annotations

import numpy as np
import pytest
from gguf_writer import quantised
from kernels_support import checked, pool

from hepti_mqtt.core.program import Compute, SlotSpec, WeightRef
from hepti_mqtt.core.storage import BLOCK_STORAGES, STORAGES, StoredRows
from hepti_mqtt.kernels import KERNELS, allocate
from hepti_mqtt.kernels.blocks import WIDTH, BlockMatrix

RNG = np.random.default_rng(5)


def stored(storage: str, k: int, n: int) -> StoredRows:
    return StoredRows(STORAGES[storage], quantised(RNG.standard_normal((n, k)), storage))


def packed(rows: StoredRows, tile: int = 1 << 20) -> BlockMatrix:
    k, n = rows.shape
    buffer = allocate(WeightRef("w", (0, k), (0, n), "packed", rows.storage.name))
    buffer.put(rows, 0, 0)
    return buffer.finish()


@pytest.mark.parametrize("storage", BLOCK_STORAGES)
def test_tiles_in_any_order_make_a_range_of_a_matrix(storage: str) -> None:
    unit = STORAGES[storage].block
    whole = stored(storage, 10 * unit, 150)
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
        buffer.put(stored("q8_0", 32, 8), 0, 0)
    with pytest.raises(ValueError, match="never arrived"):
        buffer.finish()


@pytest.mark.parametrize(
    ("m", "k", "widths", "threads"), [(1, 64, (70, 32), 1), (2, 1536, (33,), 2), (13, 768, (96, 1), 2)]
)
def test_products_are_those_of_the_values(m: int, k: int, widths: tuple[int, ...], threads: int) -> None:
    """Of several storages in one product, with and without bias, activation and residual."""
    storages = [storage for storage in BLOCK_STORAGES if k % STORAGES[storage].block == 0]
    for first in range(len(storages)):
        parts = [stored(storages[(first + i) % len(storages)], k, n) for i, n in enumerate(widths)]
        x, n = RNG.standard_normal((m, k)).astype(np.float32), sum(widths)
        biases = [RNG.standard_normal(w).astype(np.float32) for w in widths]
        for residual, activation, how in ((first % 2 == 0, "silu", "f32"), (first % 2 == 1, None, "i8")):
            slots = [SlotSpec((m, k)), SlotSpec((m, n)), SlotSpec((m, n))]
            attrs = {"bias": residual, "residual": residual, "activation": activation, "x": how}
            op = Compute("linear", (0, 1) if residual else (0,), (2,), attrs=attrs)
            reads = [x, RNG.standard_normal((m, n)).astype(np.float32)][: 1 + residual]
            out = np.full((m, n), np.nan, np.float32)
            more = biases if residual else []
            matrices = [packed(part) for part in parts]
            with pool(threads) as workers:
                checked(op, slots, [*matrices, *more], workers)(reads, [out])
            plain = [part.values() for part in parts]
            (want,) = KERNELS["linear"].reference(op, slots, reads, [*plain, *more])
            scale = np.abs(x) @ np.abs(np.concatenate(plain, axis=1)) + 1
            assert (np.abs(out - want) / scale).max() < 1e-6
            if m > 1:  # a row's bits do not depend on those beside it
                alone = np.empty((1, n), np.float32)
                one = [SlotSpec((1, k)), SlotSpec((1, n)), SlotSpec((1, n))]
                own = [np.ascontiguousarray(array[1:2]) for array in reads]
                with pool(1) as workers:
                    checked(op, one, [*matrices, *more], workers)(own, [alone])
                np.testing.assert_array_equal(alone[0], out[1])


def test_what_is_not_finite_stays_so() -> None:
    x = RNG.standard_normal((3, 64)).astype(np.float32)
    x[1, 40], x[2, 3] = np.nan, np.inf
    out = np.empty((3, 40), np.float32)
    weight = packed(stored("q4_1", 64, 40))
    for how in ("f32", "i8"):
        attrs = {"bias": False, "residual": False, "activation": None, "x": how}
        op = Compute("linear", (0,), (1,), attrs=attrs)
        with pool(1) as workers:
            checked(op, [SlotSpec((3, 64)), SlotSpec((3, 40))], [weight], workers)([x], [out])
        assert np.isfinite(out[0]).all()
        assert not np.isfinite(out[1:]).any()
