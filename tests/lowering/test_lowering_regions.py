"""Sets and regions against plain sets of indices."""

from __future__ import annotations

from itertools import pairwise, product

from hypothesis import given
from hypothesis import strategies as st

from hepti_mqtt.lowering import regions as rg

sets = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4)), max_size=3).map(
    lambda pairs: rg.union(*(rg.span(a, a + n) for a, n in pairs))
)
areas = st.tuples(sets, sets)


def plain(s: rg.Set) -> set[int]:
    return set(rg.indices(s))


def cells(r: rg.Region) -> set[tuple[int, ...]]:
    return set(product(*map(rg.indices, r)))


@given(sets, sets, st.integers(1, 5))
def test_sets_are_what_python_sets_are(s, t, unit):
    assert plain(rg.both(s, t)) == plain(s) & plain(t)
    assert plain(rg.without(s, t)) == plain(s) - plain(t)
    assert plain(rg.union(s, t)) == plain(s) | plain(t)
    assert rg.count(s) == len(plain(s))
    assert plain(rg.shift(s, 3)) == {i + 3 for i in plain(s)}
    assert rg.to_set(sorted(plain(s), reverse=True)) == s
    assert plain(rg.whole_units(s, unit)) == {i // unit * unit + n for i in plain(s) for n in range(unit)}
    for result in (rg.both(s, t), rg.without(s, t), rg.union(s, t)):
        assert all(a < z for a, z in result)
        assert all(z < a for (_, z), (a, _) in pairwise(result))


@given(sets, sets)
def test_place_says_where_indices_lie_in_an_array_of_others(s, t):
    inner = rg.both(s, t)
    array = sorted(plain(t))
    assert [array[i] for i in rg.indices(rg.place(inner, t))] == sorted(plain(inner))


@given(areas, areas)
def test_regions_are_sets_of_cells(r, q):
    assert cells(rg.meet(r, q) or ((), ())) == cells(r) & cells(q)
    rest = rg.minus(r, q)
    assert set().union(*map(cells, rest), set()) == cells(r) - cells(q) or not all(r)
    assert sum(map(rg.volume, rest)) == len(cells(r) - cells(q)) or not all(r)
    assert rg.inside(r, q) == (cells(r) <= cells(q)) or not cells(r)


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
