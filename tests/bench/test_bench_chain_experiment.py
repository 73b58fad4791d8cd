"""The experiment kind `chain`: its file, a run on this machine cut off and gone on with, and its report."""

import json
import shutil

import pytest

from hepti_mqtt.bench import chain_report
from hepti_mqtt.bench.chain_experiment import parse
from hepti_mqtt.bench.chain_results import Condition, points, turn_of
from hepti_mqtt.bench.kinds import load
from hepti_mqtt.bench.results import read
from hepti_mqtt.cli.main import main
from hepti_mqtt.errors import ConfigError

LAB = "{name: two, kind: local, defaults: {threads: 1}, hosts: {primary: {}, secondary: {}}}"
TINY = "{name: small, kind: chain, lab: two.yaml, rows: [8, 16], shares: [50, 100], chunks: 2, rounds: 2}"


def test_the_paper_has_its_conditions_and_targets():
    kind, made = load("matmul-chain")
    assert set(made.conditions) == {Condition(940, 100), Condition(240, 100), Condition(940, 25), Condition(240, 25)}
    assert kind.count(made) == 4 * len(made.wanted)
    spec = made.spec(Condition(240, 25))
    assert spec.calibrate == "kernel"
    assert [(h.name, h.gflops, spec.rate_of(h.name)) for h in spec.hosts] == [
        ("primary", 24.6, 240.0),
        ("secondary", 70.6 / 4, 240.0),
    ]
    assert kind.count(load("matmul-chain", quick=True)[1]) < kind.count(made)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"strategies": []}, "unknown key 'strategies'"),
        ({"rows": None}, "needs `rows:`"),
        ({"rows": []}, "`rows`"),
        ({"shares": [0]}, "`shares`"),
        ({"shares": [50, 50]}, "`shares`"),
        ({"cpu": [101]}, "`cpu`"),
        ({"rounds": 0}, "`rounds`"),
        ({"rates": [-1]}, "rate"),
        ({"lab": "four-pi4"}, "no host 'primary'"),
        ({"lab": "nowhere"}, "there is no 'nowhere'"),
        ({"lab": "two.yaml", "cpu": [25]}, "`cpu` needs an emulated lab"),
        ({"lab": "two.yaml", "rates": [940]}, "only emulated links"),
    ],
)
def test_mistakes_are_named(tmp_path, change, words):
    (tmp_path / "two.yaml").write_text(LAB)
    data = {"name": "x", "lab": "primary-secondary", "rows": [8], "shares": [50], **change}
    with pytest.raises(ConfigError, match=words):
        parse({key: value for key, value in data.items() if value is not None}, tmp_path)


def test_an_unknown_kind_is_refused(tmp_path, capsys):
    (tmp_path / "x.yaml").write_text("{name: x, kind: strange}")
    assert main(["bench", str(tmp_path / "x.yaml")]) == 2
    assert "it is one of infer, chain" in capsys.readouterr().err


@pytest.mark.wide  # half a minute; test_bench_run resumes an experiment too
@pytest.mark.broker
@pytest.mark.processes
def test_run_cut_off_resume_report(tmp_path):
    if shutil.which("mosquitto") is None and not shutil.which("/usr/sbin/mosquitto"):
        pytest.skip("mosquitto is not installed")
    (tmp_path / "two.yaml").write_text(LAB)
    file, out = tmp_path / "small.yaml", tmp_path / "out"
    file.write_text(TINY)
    assert main(["bench", str(file), "--out", str(out)]) == 0
    whole = (out / "results.jsonl").read_text().splitlines()
    turns = [turn_of(r) for r in map(json.loads, whole) if r["record"] == "case"]
    assert len(set(turns)) == len(turns) == 2 * (2 + 4 * 3 + 4)

    (out / "results.jsonl").write_text("\n".join([*whole[:9], whole[9][:20]]))  # cut off within a line
    assert main(["bench", str(file), "--out", str(out), "--resume"]) == 0
    again = [turn_of(r) for r in read(out).records if r["record"] == "case"]
    assert sorted(again) == sorted(turns)

    results = read(out)
    assert len([r for r in results.records if r["record"] == "lab"]) == 2
    text = (out / "report.md").read_text()
    assert "| 16 |" in text
    assert "links as they are, CPU 100 %" in text
    assert "not measured: 940 Mbit/s, CPU 100 %; 240" in text
    assert len((out / "results.csv").read_text().splitlines()) == 1 + len(turns)
    found = points(r for r in results.records if r["record"] == "case")
    assert "| 50 |" in "\n".join(chain_report.markdown(results, found))
    assert main(["bench", "report", str(out)]) == 0
