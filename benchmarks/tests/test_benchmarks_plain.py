"""What the benchmarks compute without a host: files, cells, intervals, quotas, Programs of the chain, reports."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import chain_experiment, experiment, files, report
from benchmarks.__main__ import KINDS, _kind, _parse, main
from benchmarks.chain import PRIMARY, Case, left, programs, reference, weights
from benchmarks.errors import LabError
from benchmarks.experiment import AUTO, Cell
from benchmarks.lab.calibrate import Calibration, HostFigures, solve
from benchmarks.lab.changes import parse_change
from benchmarks.lab.spec import LabSpec, check_quotas, load, parse
from benchmarks.provenance import Results, Writer, provenance, read
from benchmarks.runner import turns
from benchmarks.tables import median_interval, ratio
from hepti_mqtt.core.errors import ConfigError
from hepti_mqtt.core.ids import PLANNER
from hepti_mqtt.kernels import Workers
from hepti_mqtt.runtime.worker.executor import Executor, bind, pack

PAIR = {"name": "pair", "rate": 100, "hosts": {"pi1": {"gflops": 20}, "pi2": {"gflops": 20}}}


def loaded(name: str, quick: bool = False, **given: Any) -> Any:
    data, base = experiment.read(name, quick, given)
    return _parse(_kind(data)[0], data, base)


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", files.names("experiments"))
def test_every_experiment_can_be_parsed(name: str, quick: bool) -> None:
    assert loaded(name, quick).name == name


@pytest.mark.parametrize("name", files.names("labs"))
def test_every_lab_can_be_parsed(name: str) -> None:
    assert load(files.names("labs")[name]).hosts


@pytest.mark.parametrize(
    ("given_", "word"),
    [
        ({"speed": 3}, "speed"),
        ({"devices": [9]}, "devices"),
        ({"strategies": ["rows"]}, "rows"),
        ({"lab": "nowhere"}, "nowhere"),
        ({"rounds": 0}, "rounds"),
        ({"wire": ["f8"]}, "wire"),
        ({"models": ["nothing"]}, "nothing"),
        ({"kind": "other"}, "kind"),
    ],
)
def test_a_wrong_key_is_named(given_: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        loaded("wire", **given_)


def test_main_says_what_is_wrong_and_returns_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nothing"]) == ConfigError.exit_code
    assert "nothing" in capsys.readouterr().err
    assert main(["wire", "rates"]) == ConfigError.exit_code


def test_cells_of_the_wires_take_turns_and_come_back_from_records() -> None:
    cells = experiment.cells(loaded("wire", quick=True))
    assert len(set(cells)) == len(cells)
    assert {c.wire for c in cells if len(c.devices) > 1} == {"f32", "f16", "i8"}
    assert {c.wire for c in cells if len(c.devices) == 1} == {"f32"}
    first, second = turns(cells, 0, 1), turns(cells, 1, 1)
    assert sorted(first, key=repr) == sorted(cells, key=repr)
    assert second == first[::-1]
    assert [Cell.of(json.loads(json.dumps(asdict(cell)))) for cell in cells] == cells


@pytest.mark.parametrize(("n", "ranks"), [(6, (1, 6)), (9, (2, 8)), (16, (4, 13)), (30, (10, 21))])
def test_ranks_are_those_of_the_tables(n: int, ranks: tuple[int, int]) -> None:
    interval = median_interval(range(1, n + 1))
    assert (interval.low, interval.high) == ranks
    assert interval.level >= 0.95


def test_a_drift_that_hits_both_does_not_touch_the_ratio() -> None:
    drift = {n: 1.0 + n for n in range(8)}
    assert ratio({n: 2 * d for n, d in drift.items()}, drift)[:3] == (2.0, 2.0, 2.0)


@given(st.floats(12.0, 60.0), st.floats(0.8, 1.2), st.floats(0.05, 1.0))
def test_the_quota_found_has_the_speed_whatever_the_curve(target: float, bend: float, start: float) -> None:
    cpu, speed = solve(lambda cpu: 140.0 * cpu**bend, target, 1.0, start)
    assert 0 < cpu <= 1
    assert math.isclose(speed, target, rel_tol=0.05)
    with pytest.raises(LabError):
        solve(lambda cpu: 10.0 * cpu, 20.0, 1.0, start)


@pytest.mark.parametrize(
    "wrong",
    [
        {"hosts": {}},
        {"kind": "ssh"},
        {"hosts": {"hub": {}}},
        {"kind": "local"},  # has a rate
        {"hosts": {"pi1": {"gflops": -1}}},
        {"isa": "mmx"},
        {"more": 1},
    ],
)
def test_a_wrong_lab_file_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        parse({**PAIR, **wrong}, "pair.yaml")


def test_quotas_beyond_the_machine_are_refused_with_what_helps() -> None:
    lab = parse(PAIR, "pair.yaml")
    assert check_quotas(lab, 100.0, 1) == pytest.approx(0.7)
    with pytest.raises(LabError, match="--dilation 2"):
        check_quotas(lab, 40.0, 1)


@pytest.mark.parametrize(
    "step", [{"do": "rate"}, {"do": "rate", "mbit": 0}, {"do": "kill", "mbit": 3}, {"do": "stop", "host": "pi3"}, {}]
)
def test_a_wrong_step_of_a_script_is_refused(step: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        parse_change({"at": 1, "host": "pi1", **step}, parse(PAIR, "pair.yaml"))


@given(st.builds(Case, st.integers(1, 9), st.integers(0, 100), st.integers(1, 4), st.sampled_from(("work", "echo"))))
def test_both_programs_of_the_chain_give_its_product(case: Case) -> None:
    matrices, made = weights(0), programs(case)
    resident = pack(matrices, [w for p in made.values() for w in p.weights()])
    executors = {device: Executor() for device in made}
    for device, program in made.items():
        executors[device].admit(1, bind(program, resident, Workers(1)))
    x, output = left(0, case.rows), None
    executors[PRIMARY].deliver(1, (0, 0, PLANNER), x)
    while not all(executor.finish_if_done(1) for executor in executors.values() if 1 in executor):
        for device, executor in executors.items():
            while (step := executor.next_step()) is not None:
                out = step.run()
                if out is not None and out.op.to == (PLANNER,):
                    output = np.array(out.array)
                elif out is not None:
                    executors[out.op.to[0]].deliver(1, (out.op.node, out.op.part, device), np.array(out.array))
    np.testing.assert_allclose(output, reference(case, x, matrices), atol=1e-4)


def chain_records(best: int) -> list[dict[str, Any]]:
    """Return records of two rounds, in which `best` percent on the secondary take the least time."""
    found = []
    for number, share in ((n, s) for n in range(2) for s in (0, 30, 60, 90)):
        for kind in ("work", "parts", "echo") if share else ("work",):
            seconds = 0.1 if not share else 0.04 + abs(share - best) / 1000
            record = {"record": "case", "rate_mbit": 940, "cpu_percent": 100, "round": number, "rows": 256}
            record |= {"share": share, "chunks": 1, "kind": kind, "latency_s": seconds, "bytes": 1, "error": 0.0}
            found.append({**record, "primary_compute_s": seconds / 2, "secondary_compute_s": seconds / 3})
    return found


def test_the_best_share_of_the_chain_is_found_and_reported(tmp_path: Path) -> None:
    records = chain_records(60)
    found = chain_experiment.points(records)
    assert chain_experiment.best_shares(found, 256, "split") == {chain_experiment.Condition(940, 100): 60}
    header = {**provenance(), "experiment": "chain", "command": "x"}
    files_ = chain_experiment.write(Results(header, records), tmp_path)
    assert all(path.stat().st_size for path in files_ if path.name != "results.jsonl")


def turn(strategy: str, devices: list[str], number: int, ms: float, **more: Any) -> dict[str, Any]:
    cell = Cell("pair", 100.0, "bert-base", 64, strategy, tuple(devices))
    plan = {"strategy": "row", "options": {"variant": "kv"}, "devices": dict.fromkeys(devices), "version": [1, 1]}
    figures = {"latency_ms": [ms, ms + 1], "error": 1e-6, "predicted_ms": 90.0, "expected_ms": 95.0, "bytes": 1000}
    return {"record": "turn", "of": asdict(cell), "round": number, "ok": True, "plan": plan, **figures, **more}


def test_a_report_tells_medians_choices_failures_and_changes(tmp_path: Path) -> None:
    hosts = ["pi1", "pi2"]
    lab = {"record": "lab", "lab": asdict(LabSpec("pair", "emulated", (), 100.0))}
    calibration = Calibration("pair", "here", (HostFigures("pi1", 20.0, 0.2, 20.0, 25.0, 9.0),), 100.0)
    records = [{**lab, "calibration": asdict(calibration)}]
    for number in range(2):
        records += [turn("single", hosts[:1], number, 100.0 + number), turn(AUTO, hosts, number, 50.0 + number)]
        records.append(turn("row/kv", hosts, number, 55.0))
        records.append({**turn("block", hosts, number, 0.0), "ok": False, "message": "does not fit"})
    play = {"record": "play", "of": records[2]["of"], "unix_s": 10.0}
    change = {"record": "change", "unix_s": 12.0, "do": "kill", "host": "pi2"}
    asked = [{"record": "under_change", "ok": True, "unix_s": 11.0, "latency_ms": [50.0], "plan": records[2]["plan"]}]
    asked.append({"record": "under_change", "ok": False, "unix_s": 13.0, "message": "lost"})
    with Writer(tmp_path, {**provenance(), "experiment": "e", "seed": 0, "command": "x"}) as writer:
        for record in [*records, play, *asked, change]:
            writer.add(record["record"], **{k: v for k, v in record.items() if k != "record"})
    with pytest.raises(ConfigError):
        Writer(tmp_path, {})
    found = read(tmp_path)
    written = report.write(found, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "1.98" in text or "1.99" in text, "speed-up over the fastest host, within rounds"
    assert "1.09 (row/kv x2)" in text
    assert "does not fit" in text
    assert "kill pi2" in text
    assert "1 of 2 requests failed" in text
    assert all(path.stat().st_size for path in written)


def test_a_simulated_experiment_runs_to_its_report(tmp_path: Path) -> None:
    words = ["models=[minilm]", "lengths=[16]", "devices=[1,2]", "strategies=[auto,single,row/kv]"]
    out = tmp_path / "out"
    assert main(["methods-simulated", "--quick", *words, "--out", str(out)]) == 0
    text = (out / "report.md").read_text()
    assert "simulated, not measured" in text
    assert "row/kv" in text
    assert set(KINDS) >= {read(out).header["kind"]}
