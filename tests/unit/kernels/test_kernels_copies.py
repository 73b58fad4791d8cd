from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels_support import RNG, Case, array, spec

from hepti_mqtt.core.program import Work

RNG.seed(1)  # for the cases below, which are drawn when this file is imported


@st.composite
def assembled(draw):
    """Return (reads, copies, what they must make): a result cut into rectangles that lie anywhere in the reads."""
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)))
    want = np.arange(np.prod(shape), dtype="f4").reshape(shape)
    targets = [tuple((0, n) for n in shape)]
    for _ in range(draw(st.integers(0, 6))):
        cut = targets.pop(draw(st.integers(0, len(targets) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(*cut[axis]))
        start, stop = cut[axis]
        targets += [(*cut[:axis], part, *cut[axis + 1 :]) for part in ((start, at), (at, stop))]
    reads, copies = [], []
    for target in draw(st.permutations(targets)):
        before = [draw(st.integers(0, 3)) for _ in shape]
        source = tuple((a, a + stop - start) for a, (start, stop) in zip(before, target, strict=True))
        read = np.full([stop + draw(st.integers(0, 2)) for _, stop in source], -1, "f4")
        read[tuple(slice(*r) for r in source)] = want[tuple(slice(*r) for r in target)]
        copies.append((len(reads), source, target))
        reads.append(read)
    return reads, tuple(copies), want


@given(assembled(), st.sampled_from(["f4", "f2", "i1", "u1", "i4"]))
def test_assemble(parts, dtype):
    reads, copies, want = parts
    reads, want = [(r % 100).astype(dtype) for r in reads], (want % 100).astype(dtype)
    case = Case("assemble", reads, [want.shape], dtype=spec(want).dtype, copies=copies)
    np.testing.assert_array_equal(case.check(0, 0)[0], want)


@given(assembled(), st.data())
def test_assemble_widens_what_came_narrow_with_the_bits_of_the_separate_kernels(parts, data):
    reads, copies, want = parts
    wide, given = [], []
    for read in reads:
        x = array(*read.shape, scale=3.0)
        wire = data.draw(st.sampled_from(["f32", "f16", "i8"]))
        if wire == "f32":
            given.append(x)
            wide.append(x)
            continue
        codes = (*x.shape[:-1], x.shape[-1] + 4) if wire == "i8" else x.shape
        given.append(Case(f"to_{wire}", [x], [codes], dtype=wire).run()[0])
        wide.append(Case(f"from_{wire}", [given[-1]], [x.shape]).run()[0])
    case = Case("assemble", given, [want.shape], copies=copies)
    alone = Case("assemble", wide, [want.shape], copies=copies).run()[0]
    np.testing.assert_array_equal(case.check(0, 0)[0], alone)
    moved = sum(np.prod(want[tuple(slice(*r) for r in target)].shape) * given[n].itemsize for n, _, target in copies)
    assert case.kernel.work(case.op, case.slots) == Work("rowwise", nbytes=float(want.nbytes + moved))


def rows_to(read, sources, first, columns, target_columns=None):
    """Return copies of single rows of a read to the rows of the result from `first` on."""
    target_columns = target_columns or columns
    return [(read, ((r, r + 1), columns), ((i, i + 1), target_columns)) for i, r in enumerate(sources, first)]


@given(sources=st.lists(st.integers(0, 30), max_size=40), others=st.integers(0, 12), data=st.data())
def test_assemble_of_many_single_rows(sources, others, data):
    x, y = array(31, 4), array(12, 4)
    copies = rows_to(0, sources, 0, (0, 4)) + rows_to(1, range(others), len(sources), (0, 4))
    copies = tuple(data.draw(st.permutations(copies)))
    case = Case("assemble", [x, y], [(len(sources) + others, 4)], copies=copies)
    np.testing.assert_array_equal(case.run()[0], np.concatenate([x[sources], y[:others]]))


WHOLE, ROW = (0, ((0, 3), (0, 2)), ((0, 3), (0, 2))), (0, ((0, 1), (0, 2)), ((0, 1), (0, 2)))
CODED = (0, ((0, 3), (0, 8)), ((0, 3), (0, 8)))


def one(copies=(WHOLE,), shape=(3, 2), read=None, **more):
    return Case("assemble", [array(3, 2) if read is None else read], [shape], copies=copies, **more)


WRONG = {
    "no copies": one(()),
    "a row twice": one((ROW, ROW, ROW)),
    "all and a row": one((WHOLE, ROW)),
    "an array too many": one(((1, *WHOLE[1:]),)),
    "a negative array": one(((-1, *WHOLE[1:]),)),
    "rows beyond the array": one(((0, ((1, 4), (0, 2)), WHOLE[2]),)),
    "negative rows": one(((0, ((-1, 2), (0, 2)), WHOLE[2]),)),
    "another shape": one(((0, ((0, 2), (0, 2)), WHOLE[2]),)),
    "one dimension": one(((0, ((0, 3),), WHOLE[2]),)),
    "another rank": one(shape=(6,)),
    "another dtype": one(dtype="i32"),
    "no attribute": Case("assemble", [array(3, 2)], [(3, 2)]),
    "scales of rows are no values": one((CODED,), (3, 8), np.zeros((3, 8), np.int8)),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_assemble_refuses_copies_that_do_not_fill_the_result_once(wrong):
    with pytest.raises(ValueError, match=r"^assemble: "):
        wrong.run()
