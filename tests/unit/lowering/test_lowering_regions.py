"""Regions against plain sets of indices, and several ranges of rows of a map as one convolution."""

from __future__ import annotations

from itertools import pairwise, product

from hypothesis import given
from hypothesis import strategies as st

from hepti_mqtt.lowering import regions as rg
from hepti_mqtt.lowering.ops import Conv

sets = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4)), max_size=3).map(
    lambda pairs: rg.union(*(rg.span(a, a + n) for a, n in pairs))
)
areas = st.tuples(sets, sets)


def plain(s: rg.IndexSet) -> set[int]:
    return set(rg.indices(s))


def cells(r: rg.Region) -> set[tuple[int, ...]]:
    return set(product(*map(rg.indices, r)))


@given(sets, sets, st.integers(1, 5))
def test_sets_are_what_python_sets_are(s, t, unit):
    assert plain(rg.intersect_sets(s, t)) == plain(s) & plain(t)
    assert plain(rg.subtract_set(s, t)) == plain(s) - plain(t)
    assert plain(rg.union(s, t)) == plain(s) | plain(t)
    assert rg.index_count(s) == len(plain(s))
    assert plain(rg.shift(s, 3)) == {i + 3 for i in plain(s)}
    assert rg.index_set(sorted(plain(s), reverse=True)) == s
    assert plain(rg.round_to_units(s, unit)) == {i // unit * unit + n for i in plain(s) for n in range(unit)}
    for result in (rg.intersect_sets(s, t), rg.subtract_set(s, t), rg.union(s, t)):
        assert all(a < z for a, z in result)
        assert all(z < a for (_, z), (a, _) in pairwise(result))


@given(sets, sets)
def test_place_says_where_indices_lie_in_an_array_of_others(s, t):
    inner = rg.intersect_sets(s, t)
    array = sorted(plain(t))
    assert [array[i] for i in rg.indices(rg.positions_in(inner, t))] == sorted(plain(inner))


@given(areas, areas)
def test_regions_are_sets_of_cells(r, q):
    assert cells(rg.intersect(r, q) or ((), ())) == cells(r) & cells(q)
    rest = rg.subtract(r, q)
    assert set().union(*map(cells, rest), set()) == cells(r) - cells(q) or not all(r)
    assert sum(map(rg.volume, rest)) == len(cells(r) - cells(q)) or not all(r)
    assert rg.is_within(r, q) == (cells(r) <= cells(q)) or not cells(r)


@given(st.lists(areas.filter(all), max_size=4))
def test_disjoint_covers_the_union_once(rs):
    out = rg.disjoint(rs)
    assert set().union(*map(cells, out), set()) == set().union(*map(cells, rs), set())
    assert sum(map(rg.volume, out)) == len(set().union(*map(cells, out), set()))


@given(areas.filter(all), st.integers(0, 3))
def test_rectangles_bring_a_region_to_its_place(r, by):
    target = tuple(rg.shift(s, by) for s in r)
    moved = {}
    for source, there in rg.rectangles(r, target):
        assert [z - a for a, z in source] == [z - a for a, z in there]
        moved.update(zip(product(*(range(*s) for s in source)), product(*(range(*t) for t in there)), strict=True))
    assert moved == {cell: tuple(i + by for i in cell) for cell in cells(r)}


ROWS, COLUMNS = 11, rg.span(0, 4)


def conv(size=3, stride=1, dilation=1, pad=1, rows=ROWS):
    y = (rows + 2 * pad - (size - 1) * dilation - 1) // stride + 1
    return Conv(
        name="conv", inputs=("x",), tensors=("w", "b"), space=(max(y, 0), 4, 5), source=(rows, 4, 3),
        kernel=(size, 1), stride=(stride, 1), dilation=(dilation, 1), pad=(pad, 0, pad, 0),
    )  # fmt: skip


def bands_of(op, rows):
    return op.kernel_call((rows, COLUMNS, rg.span(0, 5)), ()).attrs["bands"]


@given(
    size=st.integers(1, 4),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 3),
    pad=st.integers(0, 3),
    picked=st.sets(st.integers(0, 16), min_size=2),
)
def test_every_row_sees_under_its_window_what_it_sees_of_the_whole_map(size, stride, dilation, pad, picked):
    op = conv(size, stride, dilation, pad)
    rows = rg.index_set(r for r in picked if r < op.space[0])
    if len(rows) < 2:
        return
    region = (rows, COLUMNS, rg.span(0, 5))
    held = list(rg.indices(op.input_regions(region)[0][0]))
    for (first, stop, top, bottom, origin), (a, z) in zip(bands_of(op, rows), rows, strict=True):
        assert origin == a
        assert top + stop - first + bottom >= (z - a - 1) * stride + (size - 1) * dilation + 1
        for row, place in product(range(a, z), range(size)):
            on_map = row * stride + place * dilation - pad
            here = first - top + (row - a) * stride + place * dilation
            assert (held[here] if first <= here < stop else None) == (on_map if 0 <= on_map < ROWS else None)
