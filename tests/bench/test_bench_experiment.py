"""Experiment files: what cannot be is refused with its key, the rest becomes cells."""

from pathlib import Path

import pytest

from hepti_mqtt.bench import kinds
from hepti_mqtt.bench.contenders import STRATEGY_NAMES
from hepti_mqtt.bench.experiment import Cell, cells, load, names, parse
from hepti_mqtt.bench.outside import BASELINES
from hepti_mqtt.bench.runner import turns, watched_of
from hepti_mqtt.bench.sources import order
from hepti_mqtt.errors import ConfigError

GOOD = {
    "name": "x",
    "lab": "four-pi4",
    "rates": [940, 100],
    "models": ["tiny-bert", "tiny-vit"],
    "lengths": [8, 16],
    "strategies": ["auto", "single", "row"],
    "devices": [1, 2, ["pi1", "pi4"]],
}


def made(**changes):
    return parse({**GOOD, **changes}, Path())


def test_cells_are_what_the_file_says():
    found = cells(made())
    # single on 1; auto and the four variants of row on 2 and on pi1+pi4; 3 inputs at 2 rates
    assert len(found) == (1 + 5 * 2) * 3 * 2
    assert len({c.id for c in found}) == len(found)
    assert {c.tokens for c in found if c.model == "tiny-vit"} == {None}
    assert {c.devices for c in found if c.strategy == "single"} == {("pi1",)}


def test_ids_depend_on_the_content_alone():
    assert [c.id for c in cells(made())] == [c.id for c in cells(made(rounds=9, name="y"))]
    assert made().digest != made(rounds=9).digest


def test_the_same_strategy_twice_is_an_a_a_pair():
    found = cells(made(strategies=["single", "single"], rates=[], models=["tiny-bert"], lengths=[8]))
    assert [c.label for c in found] == ["single x1", "single x1 again"]


def test_all_means_every_strategy():
    assert made(strategies="all").strategies == STRATEGY_NAMES


def test_routes_take_turns_where_devices_exchange_something():
    alike = {
        "strategies": ["single", "row/kv"],
        "models": ["tiny-bert"],
        "lengths": [8],
        "rates": [],
        "devices": [1, 2],
    }
    found = cells(made(route=["broker", "mesh"], **alike))
    assert [(c.label, order(c, load("strategies").labs["four-pi4"])["route"]) for c in found] == [
        ("single x1", None),
        ("row/kv x2 broker", "broker"),
        ("row/kv x2 mesh", "mesh"),
    ]
    assert {c.route for c in cells(made(**alike))} == {"auto"}


def test_baselines_are_cells_of_as_many_devices_as_they_take():
    alike = {"strategies": ["single", "row/kv"], "models": ["tiny-bert"], "lengths": [8], "rates": [], "wire": ["f16"]}
    found = cells(made(outside="all", **alike))
    assert {c.strategy for c in found} == {"single", "row/kv", *BASELINES}
    devices = {name: {len(c.devices) for c in found if c.strategy == name} for name in BASELINES}
    assert devices == {name: {min(baseline.most, 2)} for name, baseline in BASELINES.items()}
    # What is no exchange of Hepti's has no narrower dtype, and is held to the bound of float32.
    assert {c.wire for c in found if c.strategy != "row/kv"} == {"f32"}
    assert len(cells(made(outside=["torch"], **alike))) == len(cells(made(**alike))) + 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"colour": 1}, "unknown key 'colour'"),
        ({"kind": "race"}, "`kind` is 'race'; it is one of infer"),
        ({"lab": "moon"}, "there is no 'moon'"),
        ({"rates": [-5]}, "rate"),
        ({"rates": ["fast"]}, "`rates` has 'fast'"),
        ({"models": ["gpt-9"]}, "'gpt-9' is neither"),
        ({"strategies": ["diagonal"]}, "there is no 'diagonal'; choose from all, auto"),
        ({"devices": [5]}, "allows 1 to 4"),
        ({"devices": [["pi1", "pi9"]]}, "no host 'pi9'"),
        ({"outside": ["tensorflow"]}, "`outside` is 'tensorflow'; it is one of torch, "),
        ({"outside": [{}]}, "`outside` is {}"),
        ({"wire": ["f64"]}, "`wire` is 'f64'"),
        ({"route": ["post"]}, "`route` is 'post'; it is one of auto, broker, mesh"),
        ({"objective": "speed"}, "`objective` is 'speed'; it is one of latency, throughput, memory"),
        ({"objective": {"block": "memory"}}, "`objective` has 'block', which is not among `strategies`"),
        ({"bars": [{"variant": "auto"}]}, "bar 1 of `bars` needs"),
        ({"rounds": 0}, "`rounds` is 0"),
        ({"repetitions": True}, "`repetitions`"),
        ({"lengths": [0]}, "`lengths`"),
        ({"devices": [1], "strategies": ["row"]}, "nothing to measure"),
        ({"lab": "this-machine", "devices": [2]}, "only emulated links"),
        ({"lab": "this-machine", "devices": [2], "rates": [], "dilation": 2}, "`dilation` slows emulated hosts only"),
        ({"dilation": "slow"}, "`dilation` is 'slow'"),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(changes, words):
    with pytest.raises(ConfigError, match=words):
        made(**changes)


@pytest.mark.parametrize("key", ["name", "lab", "models", "strategies", "devices"])
def test_what_is_missing_is_named(key):
    with pytest.raises(ConfigError, match=f"needs `{key}:`"):
        parse({k: v for k, v in GOOD.items() if k != key}, Path())


@pytest.mark.parametrize("name", names())
def test_the_experiments_that_come_with_hepti_can_be_read(name):
    for quick in (False, True):
        kind, made = kinds.load(name, quick)
        assert kind.count(made)


def test_a_file_that_is_not_there_names_those_that_are():
    with pytest.raises(ConfigError, match="there is no experiment 'nothing'; give a file, or one of aa"):
        load("nothing")


def test_rounds_are_shuffled_by_seed_and_nothing_is_lost():
    group = cells(made(rates=[], models=["tiny-bert"], lengths=[8]))
    rounds = [turns(group, r, 0) for r in range(4)]
    assert all(set(r) == set(group) and len(r) == len(group) for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1
    assert rounds == [turns(group[::-1], r, 0) for r in range(4)]
    assert (rounds[1], rounds[3]) == (rounds[0][::-1], rounds[2][::-1]), "before and after fall on any two cells alike"


def test_the_planners_own_choice_is_free_only_among_all_hosts():
    spec = made().labs["four-pi4"]
    by_count = {len(c.devices): c for c in cells(made(strategies=["auto"], devices=[2, 4]))}
    assert order(by_count[4], spec)["devices"] is None
    assert order(by_count[2], spec)["devices"] == ["pi1", "pi2"]
    heads = next(c for c in cells(made()) if c.strategy == "row/heads")
    assert order(heads, spec)["options"] == {"variant": "heads"}


def test_weights_and_requests_at_once_are_dimensions_of_the_site_alone():
    found = cells(made(strategies=["single"], outside=["torch"], devices=[1], weights=["f32", "f16"], requests=[0, 8]))
    alike = {(c.strategy, c.weights, c.requests) for c in found}
    assert alike == {("torch", "f32", 0), *(("single", w, n) for w in ("f32", "f16") for n in (0, 8))}
    assert any(c.label == "single x1 weights f16 8 at once" for c in found)


def test_an_objective_is_for_all_strategies_or_for_those_that_are_named():
    alike = {"strategies": ["auto", "single"], "devices": [1, 2], "models": ["tiny-bert"], "lengths": [8], "rates": []}
    spec = made().labs["four-pi4"]

    def sought(objective):
        found = cells(made(objective=objective, **alike))
        return {(c.strategy, order(c, spec)["objective"]) for c in found}

    assert sought("throughput") == {("auto", "throughput"), ("single", "throughput")}
    assert sought({"auto": ["latency", "memory"]}) == {("auto", "latency"), ("auto", "memory"), ("single", "latency")}
    assert cells(made(objective="throughput", **alike))[0].label == "auto x2 for throughput"


def test_each_is_every_host_alone():
    found = cells(made(strategies=["single", "auto"], devices=["each", 2], models=["tiny-bert"], lengths=[8], rates=[]))
    assert [c.devices for c in found if c.strategy == "single"] == [("pi1",), ("pi2",), ("pi3",), ("pi4",)]
    assert [c.devices for c in found if c.strategy == "auto"] == [("pi1", "pi2")]


def test_bars_are_no_part_of_what_is_measured():
    bars = [{"variant": "auto", "against": "single", "at least": 2}]
    assert made().digest == made(bars=bars).digest != made(objective="memory").digest


def test_what_came_later_does_not_change_the_ids_of_results_that_are_there():
    cell = Cell("lab", 940.0, "m", 8, "single", ("pi1",), "f32")
    assert cell.id == "8210339560a7"


def test_a_budget_of_memory_makes_a_lab_of_its_own():
    labs = made(memory=["1GiB", "500MiB"]).labs
    assert list(labs) == ["four-pi4-1gib", "four-pi4-500mib"]
    assert {host.memory_bytes for host in labs["four-pi4-500mib"].hosts} == {500 * 2**20}


def test_a_dilated_experiment_has_dilated_labs_and_its_own_results():
    assert {lab.dilation for lab in made(dilation=2).labs.values()} == {2}
    assert made(dilation=2).digest != made().digest
    assert cells(made(dilation=2)) == cells(made()), "rates are those that it stands for"
    assert load("mesh-bar", given={"dilation": 3, "rates": [240]}).labs["mixed-four"].dilation == 3


def test_only_methods_that_divide_a_model_have_cells_of_it():
    found = cells(made(models=["tiny-bert", "tiny-debert"], strategies=["single", "decoupled/megatron"]))
    assert {c.model for c in found if c.strategy == "decoupled/megatron"} == {"tiny-debert"}


def test_a_variant_runs_on_the_numbers_of_devices_that_it_has():
    found = cells(made(strategies=["grid"], devices=[2, 3, 4], models=["tiny-bert"]))
    assert {(c.strategy, len(c.devices)) for c in found} == {
        *(("grid/1", n) for n in (2, 3, 4)), ("grid/2", 2), ("grid/2", 4), ("grid/3", 3), ("grid/4", 4),
    }  # fmt: skip
    told = order(found[0], made().labs["four-pi4"], do="bring")
    assert (told["strategy"], told["options"], told["weights"]) == ("grid", {"nt": "1"}, "f32")


def test_who_is_watched_is_named_and_is_hepti_itself_by_default():
    script = {"devices": [2, 4], "changes": str(Path("configs/experiments/scripts/failing.yaml").resolve())}
    found = made(strategies=["auto", "voltage/equal"], watched=["auto", "voltage/equal"], **script)
    assert [(c.strategy, len(c.devices)) for c in watched_of(found, cells(found))] == [
        ("auto", 4),
        ("voltage/equal", 4),
    ]
    plain = made(strategies=["auto", "voltage"], **script)
    assert [c.strategy for c in watched_of(plain, cells(plain))] == ["auto"]
