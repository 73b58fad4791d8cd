from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels_support import RNG, Case, array, held

from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.cost.memory import matrices, weights_bytes
from hepti_mqtt.kernels import allocate, arrays_of, is_part, part, twin, weight_bytes
from hepti_mqtt.kernels.weights import BLOCK, PANELS

RNG.seed(1)  # for the cases below, which are drawn when this file is imported

RANGE = st.tuples(st.integers(0, 90), st.integers(0, 90)).map(lambda r: (min(r), max(r)))


def tiles(matrix, height, width):
    return [
        (matrix[r : r + height, c : c + width], r, c)
        for r in range(0, matrix.shape[0], height)
        for c in range(0, matrix.shape[1], width)
    ]


STORAGES = ["f32", "f16", "w8a32", "w8a8"]


@given(
    rows=RANGE,
    columns=RANGE,
    stored=st.sampled_from([("plain", "f32"), *(("packed", storage) for storage in STORAGES)]),
    grid=st.tuples(st.integers(7, 60), st.integers(7, 60)),
    dtype=st.sampled_from(["f4", "f2"]),
    transposed=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_tiles_in_any_order_give_the_range(rows, columns, stored, grid, dtype, transposed, order):
    matrix = array(90, 90).astype(dtype)
    ref = WeightRef("w", rows, columns, *stored)
    want = matrix[slice(*rows), slice(*columns)].astype(np.float32)
    whole, buffer = allocate(ref), allocate(ref)
    whole.put(matrix, 0, 0)
    arriving = tiles(matrix.T.copy().T if transposed else matrix, *grid)
    order.shuffle(arriving)
    assert sum(buffer.put(*tile) for tile in (*arriving, *arriving)) == want.size
    weight = buffer.finish()
    assert sum(part.nbytes for part in arrays_of(weight)) == weight_bytes(ref)
    for one, other in zip(arrays_of(weight), arrays_of(whole.finish()), strict=True):
        np.testing.assert_array_equal(one, other)
    if stored[0] == "plain":
        np.testing.assert_array_equal(weight, want[0] if rows == (0, 1) else want)
        return
    step = {"f32": 0, "f16": np.abs(want) / 1024 + 1e-7}.get(stored[1], np.abs(want).max(axis=0, initial=0) / 127)
    assert (np.abs(weight.plain() - want) <= 0.5001 * step).all()


def test_a_tile_counts_once_and_within_the_range_alone():
    buffer = allocate(WeightRef("w", (10, 14), (0, 8)))
    assert [buffer.put(array(rows, 8), row, 0) for rows, row in ((10, 0), (4, 14))] == [0, 0]
    assert [buffer.put(array(4, 4), 10, 0) for _ in range(2)] == [16, 0]
    with pytest.raises(ValueError, match="16 of 32 elements"):
        buffer.finish()


NO_TILES = {"f64": (array(4, 8).astype(np.float64), 0), "1-D": (array(4), 0), "another grid": (array(4, 4), 4)}


@pytest.mark.parametrize(("tile", "column"), NO_TILES.values(), ids=NO_TILES)
def test_what_is_no_tile_is_refused(tile, column):
    buffer = allocate(WeightRef("w", (0, 4), (0, 8)))
    buffer.put(array(4, 5), 0, 0)
    with pytest.raises(ValueError, match="of w"):
        buffer.put(tile, 0, column)


WRONG = {
    "an unknown storage": WeightRef("w", (0, 4), (0, 8), "packed", "i4"),  # type: ignore[arg-type]
    "a plain array in f16": WeightRef("w", (0, 4), (0, 8), "plain", "f16"),
    "a range that ends before it starts": WeightRef("w", (4, 0), (0, 8)),
}


@pytest.mark.parametrize("ref", WRONG.values(), ids=WRONG)
def test_a_range_or_storage_that_does_not_exist_is_refused(ref):
    for function in (allocate, weight_bytes):
        with pytest.raises(ValueError, match=r"^WeightRef"):
            function(ref)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_twin_is_equal_and_has_memory_of_its_own(storage):
    first = held(array(70, 90), storage)
    second = twin(first)
    expected = first.plain().copy()
    first.panels[...] = 1
    np.testing.assert_array_equal(second.plain(), expected)
    assert second.panels.ctypes.data % 64 == 0
    plain = array(1, 90)
    assert not np.shares_memory(twin(plain), plain)


# -- parts of larger matrices -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("rows", [1, 2, 40])
def test_a_part_is_a_view_and_computes_the_same_bits_as_a_matrix_of_its_own(storage, rows):
    width, k = PANELS[storage].width, BLOCK + 20
    tensor = array(k, 4 * width + 5)
    whole = WeightRef("w", (0, k), (0, tensor.shape[1]), "packed", storage)
    base, x = held(tensor, storage), array(rows, k)
    for first, last in ((0, width), (width, 3 * width), (2 * width, 4 * width + 5), (0, 4 * width + 5), (width, width)):
        ref = whole._replace(columns=(first, last))
        assert is_part(ref, whole)
        cut, own = part(base, whole, ref), held(tensor, ref=ref)
        np.testing.assert_array_equal(cut.plain(), own.plain())
        assert first == last or np.shares_memory(cut.panels, base.panels)
        attrs = {"bias": False, "activation": None, "residual": False}
        outs = (Case("linear", [x], [(rows, last - first)], [weight], **attrs).run()[0] for weight in (cut, own))
        np.testing.assert_array_equal(*outs)


def test_what_is_not_cut_at_panels_is_no_part():
    width = PANELS["f32"].width
    whole = WeightRef("w", (0, 9), (width, 4 * width))
    assert not is_part(whole._replace(columns=(width + 1, 2 * width)), whole)
    assert not is_part(whole._replace(columns=(width, 2 * width - 1)), whole)
    assert not is_part(whole._replace(columns=(0, 2 * width)), whole)
    assert not is_part(whole._replace(rows=(0, 8), columns=(width, 2 * width)), whole)
    assert not is_part(whole._replace(weight_dtype="f16", columns=(width, 2 * width)), whole)
    assert is_part(WeightRef("b", (0, 1), (3, 5), "plain"), WeightRef("b", (0, 1), (1, 8), "plain"))
    assert not is_part(WeightRef("t", (0, 4), (3, 5), "plain"), WeightRef("t", (0, 4), (1, 8), "plain"))


RANGES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted), min_size=1, max_size=6)


@given(first=RANGES, then=RANGES, step=st.sampled_from([1, PANELS["f32"].width, 2 * PANELS["f32"].width]))
def test_every_range_is_a_part_of_its_matrix_and_matrices_have_no_column_that_nobody_needs(first, then, step):
    loads = [[WeightRef("w", (0, 3), (step * a, step * b)) for a, b in ranges] for ranges in (first, then)]
    held = set()
    for refs in loads:
        found = matrices(refs, held)
        assert list(found) == list(dict.fromkeys(refs))
        assert all(is_part(ref, matrix) for ref, matrix in found.items())
        new = set(found.values()) - held
        needed = {column for ref in refs for column in range(*ref.columns)}
        assert {column for matrix in new for column in range(*matrix.columns)} <= needed
        assert weights_bytes(refs, held) == sum(map(weight_bytes, new))
        held |= new
    assert weights_bytes(loads[0], held) == weights_bytes(loads[1], held) == 0
