"""Bars of an experiment file: refused with the reason, met or missed by made-up results, and what plans are beside."""

from dataclasses import asdict, replace

import pytest
from swarm import curves

from hepti_mqtt.bench import foreseen, report
from hepti_mqtt.bench.bars import bars_of
from hepti_mqtt.bench.experiment import Cell
from hepti_mqtt.bench.overview import figures
from hepti_mqtt.bench.results import Writer, read
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.errors import ConfigError
from hepti_mqtt.lab.calibrate import Calibration, HostFigures
from hepti_mqtt.plan import Plan

HEADER = {
    **{"experiment": "made up", "digest": "d", "machine": "m", "python": "3", "versions": {}, "revision": "r"},
    **{"seed": 0, "command": "hepti bench"},
}
SINGLE = Cell("lab", 940.0, "m", 8, "single", ("a",), "f32")
ROW = replace(SINGLE, strategy="row/kv", devices=("a", "b"))
AUTO = replace(ROW, strategy="auto")
GOOD = {"variant": "auto", "against": "single", "at least": 1.5}
SAID = [{"device": d, "curves": curves(1e9), "memory_budget_bytes": 1 << 30, "heartbeat": None} for d in "ab"]
PLAN = Plan("m", (1, 1), "row", ("a", "b"), "a", {"variant": "kv"}, {"rows": (1.0, 1.0)})
DESCRIBED = {"active": PLAN.to_dict(), "spec": spec_of_kind("tiny-bert").to_dict(), "in_flight": 2, "devices": SAID}


def answer(ms, **more):
    plan = {"strategy": "row", "options": {"variant": "kv"}, "devices": ["a", "b"], "wire": "f32", "epoch": [1, 1]}
    found = {"latency_ms": [ms], "error": 1e-6, "plan": plan, "bytes": 10, "predicted_ms": ms * 1.1, "tokens": 8}
    return {"ok": True, **found, **more}


def said(tmp_path, bars, turns, lab=None):
    """Return the lines of the report's bars, for turns of (cell, answer) in one round."""
    with Writer(tmp_path, {**HEADER, "file": {"bars": bars}}, resume=False) as writer:
        if lab is not None:
            writer.add("lab", lab={"name": "lab", "rate_mbit": 940.0}, calibration=lab.to_dict(), misses=[])
        for cell, found in turns:
            writer.turn(cell, 0, found)
    lines = report.markdown(read(tmp_path)).splitlines()
    start = lines.index("## Bars")
    return lines[start + 4 : lines.index("", start + 4)]


@pytest.mark.parametrize(
    ("bars", "words"),
    [
        ({}, "`bars` is a list"),
        ([GOOD, {**GOOD, "atleast": 2}], "bar 2 of `bars` has 'atleast'"),
        ([{**GOOD, "at most": 2}], "needs `variant`, `against` and one of"),
        ([{**GOOD, "variant": "diagonal"}], "`variant` has 'diagonal'; it needs names"),
        ([{**GOOD, "against": "worst"}], "`against` has 'worst'; it needs names of strategies, or best"),
        ([{**GOOD, "at least": -1}], "needs a number above 0"),
        ([{**GOOD, "where": {"colour": 1}}], "`where` is"),
        ([{**GOOD, "against": "predicted"}], "go with each other alone"),
    ],
)
def test_what_is_no_bar_is_refused_with_the_reason(bars, words):
    with pytest.raises(ConfigError, match=words):
        bars_of(bars)


def test_bars_are_met_or_missed_by_the_ratio_of_the_cells_that_they_name(tmp_path):
    bars = [
        {**GOOD, "where": {"rate": 940}},
        {**GOOD, "at least": 2.5},
        {**GOOD, "where": {"rate": 100}},
        {"variant": "auto", "against": "best", "at most": 1.05, "mean": 1.02},
        {"variant": "auto", "against": "megatron", "at most": 0.7},
    ]
    turns = [(SINGLE, answer(200.0)), (ROW, answer(96.0)), (AUTO, answer(100.0))]
    where = "auto x2, m, 8 tokens, lab at 940 Mbit/s"
    assert said(tmp_path, bars, turns) == [
        f"| variant auto, against single, at least 1.5 | met | 2.00 | {where} | single x1 on a, 200.0 ms |",
        f"| variant auto, against single, at least 2.5 | **missed** | 2.00 | {where} | single x1 on a, 200.0 ms |",
        "| variant auto, against single, at least 1.5 | not measured | | rate 100 | |",
        f"| variant auto, against best, at most 1.05, mean 1.02 | met | 1.04 | {where} | row/kv x2 on a, b, 96.0 ms |",
        "| variant auto, against best, at most 1.05, mean 1.02: geometric mean | **missed** | 1.04 | all 1 | |",
        f"| variant auto, against megatron, at most 0.7 | not measured | | {where} | "
        "megatron/direct or megatron/ring: not measured beside it |",
    ]


def test_a_bar_may_compare_two_models(tmp_path):
    bar = {"variant": "row", "against": "single", "at least": 3, "where": {"model": "m"}, "of": {"model": "n"}}
    turns = [(SINGLE, answer(200.0)), (replace(SINGLE, model="n"), answer(400.0)), (ROW, answer(100.0))]
    (line,) = said(tmp_path, [bar], turns)
    assert "| met | 4.00 |" in line


def test_predictions_are_judged_by_method(tmp_path):
    bar = {"variant": "all", "against": "predicted", "within": 0.2, "mean": 0.05}
    one, row = said(tmp_path, [bar], [(SINGLE, answer(200.0)), (ROW, answer(100.0, predicted_ms=97.0))])
    assert "single | **missed** | median 10.0%, most 10.0% of 1 |" in one
    assert "row | met | median 3.0%, most 3.0% of 1 |" in row


def test_predictions_stand_beside_what_runs_have_taught(tmp_path):
    turns = [(SINGLE, answer(200.0)), (ROW, answer(100.0, predicted_ms=80.0, expected_ms=95.0))]
    with Writer(tmp_path, HEADER, resume=False) as writer:
        for cell, found in turns:
            writer.turn(cell, 0, found)
    assert "| 2 | 2 | 0.95 | 0.80 | 1.10 | 1 | 0.95 | 0.95 | 0.95 |" in report.markdown(read(tmp_path))


def test_throughput_is_compared_with_all_hosts_alone_and_with_its_own_prediction(tmp_path):
    loaded = {"requests": 4, "objective": "throughput"}
    cells = [replace(cell, **loaded) for cell in (SINGLE, replace(SINGLE, devices=("b",)), AUTO)]
    speeds = (10.0, 30.0, 36.0)
    turns = [(cell, answer(900.0, requests_per_s=[n])) for cell, n in zip(cells, speeds, strict=True)]
    turns[-1][1].update(**DESCRIBED, batches=[1, 1, 2, 2])
    bar = {"variant": "auto", "against": "sum of hosts", "at least": 0.85}
    (line,) = said(tmp_path, [bar], turns)
    assert "| met | 0.90 |" in line
    text = report.markdown(read(tmp_path))
    assert "Hosts alone, added up: 40.00 requests/s (a, b)." in text
    own = next(f for f in figures(read(tmp_path)) if f.cell.strategy == "auto")
    assert own.ms == pytest.approx(1000 / 36)
    assert own.predicted_ms == pytest.approx(1000 / foreseen.requests_per_s({**turns[-1][1], "of": asdict(cells[-1])}))
    assert "(= " not in line


def test_one_host_that_was_not_measured_alone_leaves_no_sum(tmp_path):
    loaded = {"requests": 4}
    turns = [(replace(c, **loaded), answer(9.0, requests_per_s=[1.0])) for c in (SINGLE, AUTO)]
    (line,) = said(tmp_path, [{"variant": "auto", "against": "sum of hosts", "at least": 0.85}], turns)
    assert "| not measured | |" in line
    assert "`single` on b: not measured" in line


def test_what_is_foreseen_follows_from_the_plan_and_its_devices():
    told = {**answer(5.0, **DESCRIBED), "of": asdict(AUTO)}
    one = foreseen.requests_per_s({**told, "batches": [1]})
    assert foreseen.requests_per_s({**told, "batches": [1] * 8}) > one, (
        "the second request begins before the first ends"
    )
    assert foreseen.requests_per_s({**told, "batches": [1], "plan": {**told["plan"], "epoch": [1, 2]}}) is None
    slow = [{**d, "heartbeat": {"bandwidth_bytes_per_s": 1e5}} for d in SAID]
    assert foreseen.unlimited_ms({**told, "devices": slow}) == foreseen.unlimited_ms(told) < 5.0


def test_the_least_time_is_all_work_at_the_speed_of_all_hosts(tmp_path):
    hosts = tuple(HostFigures(name, None, None, 1.0, 2.0, 1.0) for name in "abc")
    calibration = Calibration("lab", "m", hosts)
    told = {**answer(5.0, **DESCRIBED), "of": asdict(AUTO)}
    two = foreseen.least_ms(told, calibration)
    assert foreseen.least_ms({**told, "of": asdict(SINGLE)}, calibration) == pytest.approx(2 * two)
    bars = [{"variant": "auto", "against": words, "at least": 0.5} for words in ("sum of speeds", "unlimited link")]
    speeds, unlimited = said(tmp_path, bars, [(AUTO, answer(4 * two, **DESCRIBED))], calibration)
    assert "| **missed** | 0.25 |" in speeds
    assert "not measured" not in unlimited
