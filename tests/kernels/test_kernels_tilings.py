"""Which register tile is used, and that it changes no bit; trying them, on a virtual clock and for real."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hepti_mqtt.errors import ConfigError
from hepti_mqtt.kernels import TILING, ahead, trial
from hepti_mqtt.kernels.gemm import linear, tilings
from hepti_mqtt.kernels.gemm.tilings import TILINGS
from hepti_mqtt.kernels.machine import jit
from hepti_mqtt.kernels.machine.isa import OVERRIDE, TILES, isa

compiled_only = pytest.mark.skipif(not jit.JIT, reason="about compiled code")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Return the file in which the choice is kept, in a directory of the test's own."""
    for name in (tilings.PIN, OVERRIDE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(jit, "cache_directory", lambda: tmp_path)
    return tilings._path()


def test_every_instruction_set_has_tiles_over_its_own_panels():
    assert set(TILINGS) == set(TILES)
    for name, of_set in TILINGS.items():
        default = of_set[0]
        assert (default.rows, default.vectors) == (TILES[name].rows, TILES[name].vectors)
        assert len({tiling.name for tiling in of_set}) == len(of_set)
        for tiling in of_set:
            assert tiling.tile(TILES[name]).width == TILES[name].width
            assert TILES[name].vectors % tiling.vectors == 0
            assert tiling.depth > linear.SHALLOW
        shapes = {(t.rows, t.vectors): t.steps for t in of_set}
        assert all(shapes[t.rows, t.vectors] == t.steps for t in of_set), "the cache knows a tile by rows and vectors"


def test_the_first_is_used_until_another_was_fastest_here(place):
    names = list(tilings.table())
    assert (tilings.chosen().name, tilings.how_chosen()) == (names[0], "by default")
    tilings.keep(names[-1], {})
    assert (tilings.chosen().name, tilings.how_chosen()) == (names[-1], "fastest here")
    assert list(place.parent.iterdir()) == [place]


@pytest.mark.parametrize("change", [{"sources": "other"}, {"tile": "99x9x9"}, {"tile": None}])
def test_a_choice_of_other_sources_or_of_a_tile_that_is_gone_is_none(place, change):
    tilings.keep(list(tilings.table())[-1], {})
    place.write_text(json.dumps({**json.loads(place.read_text()), **change}))
    assert tilings.kept() is None
    place.write_text("{")
    assert tilings.chosen() == TILINGS[isa()][0]


def test_another_cpu_with_the_same_directory_chooses_for_itself(place, monkeypatch):
    tilings.keep(list(tilings.table())[-1], {})
    monkeypatch.setattr(tilings, "cpu_model", lambda: "another")
    assert tilings.kept() is None
    assert place.exists()


def test_a_tile_is_pinned_by_the_environment(place, monkeypatch):
    names = list(tilings.table())
    tilings.keep(names[0], {})
    monkeypatch.setenv(tilings.PIN, names[-1])
    assert tilings.chosen().name == names[-1]
    assert tilings.PIN in tilings.how_chosen()
    assert not trial.needed()


def test_a_pin_that_names_no_tile_is_an_error_where_kernels_are_loaded_not_where_modules_are(place, monkeypatch):
    monkeypatch.setenv(tilings.PIN, "7x7x7")
    assert tilings.chosen().name == next(iter(tilings.table()))
    with pytest.raises(ConfigError, match="'7x7x7' is no register tile"):
        ahead.fill_cache("first", 1)
    monkeypatch.setitem(jit._compiled, "first", -1)
    with pytest.raises(ConfigError, match="use one of"):
        jit.compile_first()


@compiled_only
@pytest.mark.skipif(len(TILINGS[isa()]) == 1, reason="nothing to choose here")
def test_tiles_are_tried_once(place):
    assert trial.needed()
    tilings.keep(next(iter(tilings.table())), {})
    assert not trial.needed()


def test_a_tile_must_be_clearly_faster_than_the_default():
    assert trial.fastest({"a": [1.0, 1.0], "b": [0.99, 0.98], "c": [2.0, 2.0]}) == "a"
    assert trial.fastest({"a": [1.0, 1.0], "b": [0.9, 1.0], "c": [0.9, 0.99]}) == "c"
    assert trial.fastest({"a": [1.0, 1.0], "b": [0.5, 2.1]}) == "a", "in the mean over shapes"


def test_tiles_take_turns_for_as_long_as_they_may():
    clock, calls = [0.0], []

    def call(name, seconds):
        def run():
            calls.append(name)
            clock[0] += seconds

        return [run] * len(trial.SHAPES)

    trials = {"a": call("a", 0.02), "b": call("b", 0.01)}
    found = trial.measure(trials, clock=lambda: clock[0])
    assert calls[:4] == ["a", "b", "a", "b"]
    assert clock[0] < trial.TRY_S + 0.1
    np.testing.assert_allclose(found["a"], 0.02)
    np.testing.assert_allclose(found["b"], 0.01)
    slow = trial.measure({"a": call("a", 9.0)}, clock=lambda: clock[0])
    assert len(slow["a"]) == len(trial.SHAPES), "also where one round takes longer"


@pytest.mark.wide
@compiled_only
def test_no_tile_changes_a_bit_of_a_result():
    shapes = [(m, k, n) for m in (1, 7, 13, 25, 40) for k in (1, 65, 520, 1100) for n in (3, 64, 100, 129)]
    products = [trial.Product(*shape) for shape in shapes]
    results = {}
    for name, runs in trial.compiled(tilings.table(), products, lambda: True).items():
        for run in runs:
            run()
        results[name] = [product.out.tobytes() for product in products]
    assert results.keys() == tilings.table().keys()
    first = results[next(iter(results))]
    for name, result in results.items():
        assert result == first, name


@pytest.mark.processes
def test_a_trial_that_disturbs_comes_to_nothing(place):
    assert trial.run(lambda: False) is None
    assert not place.exists()


@pytest.mark.wide
@compiled_only
def test_a_trial_keeps_the_fastest_and_ends_with_its_parent(place, monkeypatch):
    monkeypatch.setattr(trial, "TRY_S", 0.1)
    assert trial._try(place.parent, lambda: False) == 1
    assert tilings.kept() is None, "nobody waits for it any more"
    assert trial._try(place.parent, lambda: True) == 0
    assert tilings.kept() in tilings.table()
    seconds = json.loads(place.read_text())["seconds"]
    assert all(min(times) > 0 for times in seconds.values())
    assert trial.fastest(seconds) == tilings.kept()


@compiled_only
def test_the_products_of_this_process_run_with_the_chosen_tile():
    function = linear._linear.py_func
    assert TILING.name in tilings.table()
    assert function.__qualname__ == f"_linear_{TILING.rows}x{TILING.vectors}"
    assert (function.__globals__["MR"], function.__globals__["VECTORS"]) == (TILING.rows, TILING.vectors)
