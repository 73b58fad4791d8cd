from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels_support import array

from hepti_mqtt.kernels import NarrowMatrix, PackedMatrix, allocate, twin, weight_bytes
from hepti_mqtt.program import WeightRef

RANGE = st.tuples(st.integers(0, 90), st.integers(0, 90)).map(lambda r: (min(r), max(r)))


def tiles(matrix, height, width):
    return [
        (matrix[r : r + height, c : c + width], r, c)
        for r in range(0, matrix.shape[0], height)
        for c in range(0, matrix.shape[1], width)
    ]


@given(
    rows=RANGE,
    columns=RANGE,
    layout=st.sampled_from(["packed", "plain"]),
    grid=st.tuples(st.integers(7, 60), st.integers(7, 60)),
    dtype=st.sampled_from(["f4", "f2"]),
    transposed=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_tiles_in_any_order_give_the_range(rows, columns, layout, grid, dtype, transposed, order):
    matrix = array(90, 90).astype(dtype)
    stored = matrix.T.copy().T if transposed else matrix
    buffer = allocate(WeightRef("w", rows, columns, layout))
    arriving = tiles(stored, *grid)
    order.shuffle(arriving)
    taken = sum(buffer.put(*tile) for tile in arriving)
    weight = buffer.finish()
    want = matrix[slice(*rows), slice(*columns)].astype(np.float32)
    assert taken == want.size
    if layout == "packed":
        assert isinstance(weight, PackedMatrix)
        assert weight.panels.nbytes == weight_bytes(buffer.ref)
        np.testing.assert_array_equal(weight.plain(), want)
        padded = weight.panels.transpose(1, 0, 2).reshape(weight.rows, weight.panels.shape[0] * weight.panels.shape[2])
        assert (padded[:, weight.columns :] == 0).all()
    else:
        assert weight.nbytes == weight_bytes(buffer.ref)
        np.testing.assert_array_equal(weight, want[0] if rows == (0, 1) else want)


def test_a_tile_that_comes_twice_counts_once():
    buffer = allocate(WeightRef("w", (0, 4), (0, 8)))
    assert buffer.put(array(4, 4), 0, 0) == 16
    assert buffer.put(array(4, 4), 0, 0) == 0
    with pytest.raises(ValueError, match="16 of 32 elements"):
        buffer.finish()


def test_tiles_of_two_grids_are_refused():
    buffer = allocate(WeightRef("w", (0, 4), (0, 8)))
    buffer.put(array(4, 5), 0, 0)
    with pytest.raises(ValueError, match="overlap"):
        buffer.put(array(4, 4), 0, 4)


def test_a_tile_outside_the_range_is_not_taken():
    buffer = allocate(WeightRef("w", (10, 14), (0, 8)))
    assert buffer.put(array(10, 8), 0, 0) == 0
    assert buffer.put(array(4, 8), 14, 0) == 0


def test_what_is_no_tile_or_no_range_is_refused():
    buffer = allocate(WeightRef("w", (0, 4), (0, 8)))
    with pytest.raises(ValueError, match="must be f32 or f16"):
        buffer.put(array(4, 8).astype(np.float64), 0, 0)
    with pytest.raises(ValueError, match="must be f32 or f16"):
        buffer.put(array(4), 0, 0)
    with pytest.raises(ValueError, match="no range"):
        allocate(WeightRef("w", (4, 0), (0, 8)))


@given(
    rows=RANGE,
    columns=RANGE,
    storage=st.sampled_from(["f16", "w8a32", "w8a8"]),
    grid=st.tuples(st.integers(7, 60), st.integers(7, 60)),
    dtype=st.sampled_from(["f4", "f2"]),
    order=st.randoms(use_true_random=False),
)
def test_narrow_weights_do_not_depend_on_the_order_of_tiles(rows, columns, storage, grid, dtype, order):
    matrix = array(90, 90).astype(dtype)
    ref = WeightRef("w", rows, columns, "packed", storage)
    whole, buffer = allocate(ref), allocate(ref)
    whole.put(matrix, 0, 0)
    arriving = tiles(matrix, *grid)
    order.shuffle(arriving)
    assert sum(buffer.put(*tile) for tile in (*arriving, *arriving)) == (rows[1] - rows[0]) * (columns[1] - columns[0])
    want, got = whole.finish(), buffer.finish()
    assert isinstance(got, NarrowMatrix)
    for name in ("panels", "scales", "sums"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    assert got.panels.nbytes + got.scales.nbytes + got.sums.nbytes == weight_bytes(ref)
    plain = matrix[slice(*rows), slice(*columns)].astype(np.float32)
    step = np.abs(plain).max(axis=0, initial=0) / 127 if storage != "f16" else np.abs(plain) / 1024 + 1e-7
    assert (np.abs(got.plain() - plain) <= 0.5001 * step).all()


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        (WeightRef("w", (0, 4), (0, 8), "packed", "i4"), "stored as one of"),  # type: ignore[arg-type]
        (WeightRef("w", (0, 4), (0, 8), "plain", "f16"), "a plain array as f32"),
    ],
)
def test_a_storage_that_does_not_exist_is_refused(ref, message):
    for function in (allocate, weight_bytes):
        with pytest.raises(ValueError, match=message):
            function(ref)


@pytest.mark.parametrize("storage", ["f32", "f16", "w8a32", "w8a8"])
def test_a_twin_is_equal_and_has_memory_of_its_own(storage):
    buffer = allocate(WeightRef("w", (0, 70), (0, 90), "packed", storage))
    buffer.put(array(70, 90), 0, 0)
    first = buffer.finish()
    second = twin(first)
    expected = first.plain().copy()
    first.panels[...] = 1
    np.testing.assert_array_equal(second.plain(), expected)
    assert second.panels.ctypes.data % 64 == 0
    plain = array(1, 90)
    assert not np.shares_memory(twin(plain), plain)
