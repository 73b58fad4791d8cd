"""Outside baselines: every one equals the reference on both families; what they need is named where it is missing."""

from importlib.util import find_spec

import numpy as np
import pytest

from hepti_mqtt.bench.outside import BASELINES, Outside, common, require
from hepti_mqtt.bench.outside.onnx_single import make as make_onnx
from hepti_mqtt.bench.outside.torch_single import make as make_torch
from hepti_mqtt.bench.results import read
from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.cli.main import main
from hepti_mqtt.client.described import random_input, reference
from hepti_mqtt.errors import ConfigError
from hepti_mqtt.lab.local import LocalHost

MISSING = {name: [p for p in b.library.packages if not find_spec(p)] for name, b in BASELINES.items()}
EXPERIMENT = """
name: tiny
lab: pair.yaml
models: [tiny-bert, tiny-vit]
lengths: [12]
strategies: [auto, single]
outside: all
devices: [1, 2]
repetitions: 2
rounds: 2
"""
LAB = "{name: pair, kind: local, defaults: {threads: 1, memory: 600MiB}, hosts: {one: {}, two: {}}}"


def needs(*names):
    missing = sorted({package for name in names for package in MISSING[name]})
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: make test-outside has an environment with it")


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Return, by kind, a model, a request, and where its reference is."""
    place = tmp_path_factory.mktemp("models")
    found = {}
    for kind in ("tiny-bert", "tiny-roberta", "tiny-vit"):
        with Checkpoint.open(make_model(kind, place / kind)) as checkpoint:
            body = random_input(checkpoint.spec, 13 if checkpoint.spec.text else 1, 0)
            np.save(place / f"{kind}.npy", reference(checkpoint, body))
        found[kind] = place / kind, body, place / f"{kind}.npy"
    return found


@pytest.fixture
def hosts(tmp_path):
    made = [LocalHost(f"h{i}", tmp_path / f"h{i}") for i in range(2)]
    yield made
    for host in made:
        host.close()


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["tiny-bert", "tiny-roberta", "tiny-vit"])
def test_the_output_is_the_reference_before_a_time_counts(kind, cases, hosts):
    needs(*BASELINES)
    with Outside() as outside:
        for name, baseline in [*BASELINES.items(), *BASELINES.items()]:  # twice: groups are left and made again
            turn = outside.turn(name, hosts[: min(baseline.most, 2)], *cases[kind], 1, 3)
            assert turn["ok"], turn["message"]
            assert turn["error"] < 1e-5
            assert turn["versions"]
            assert len(turn["latency_ms"]) == 3
            assert min(turn["latency_ms"]) > 0


@pytest.mark.processes
def test_a_wrong_answer_and_a_rank_that_dies_fail_one_turn_and_not_the_next(cases, hosts, tmp_path):
    needs("torch-megatron")
    model, body, right = cases["tiny-bert"]
    wrong = tmp_path / "wrong.npy"
    np.save(wrong, np.load(right) + 0.01)
    with Outside() as outside:
        turn = outside.turn("torch-megatron", hosts, model, body, wrong, 0, 1)
        assert not turn["ok"]
        assert "it is not timed" in turn["message"]
        assert outside.turn("torch-megatron", hosts, model, body, right, 0, 1)["ok"]
        hosts[1].signal(9)
        turn = outside.turn("torch-megatron", hosts, model, body, right, 0, 1)
        assert not turn["ok"]
        assert "outside-torch" in turn["message"]
        assert outside.turn("torch-megatron", hosts, model, body, right, 0, 1)["ok"]


@pytest.mark.processes
def test_baselines_take_turns_with_the_strategies_of_an_experiment(tmp_path):
    needs(*BASELINES)
    (tmp_path / "pair.yaml").write_text(LAB)
    (tmp_path / "tiny.yaml").write_text(EXPERIMENT)
    out = tmp_path / "out"
    assert main(["bench", str(tmp_path / "tiny.yaml"), "--out", str(out)]) == 0
    turns = read(out).turns()
    assert len(turns) == 2 * 2 * (1 + 1 + len(BASELINES))
    assert all(t["ok"] and t["error"] < 1e-4 and len(t["latency_ms"]) == 2 for t in turns)
    report = (out / "report.md").read_text()
    assert all(f"| {name} x{min(b.most, 2)} |" in report for name, b in BASELINES.items())
    assert len((out / "results.csv").read_text().splitlines()) == 1 + 2 * len(turns)


def test_a_number_of_hosts_that_it_does_not_take_is_refused(cases, hosts):
    with Outside() as outside, pytest.raises(ConfigError, match="takes 2 to 16 hosts, not 1"):
        outside.turn("torch-megatron", hosts[:1], *cases["tiny-bert"], 0, 1)


def test_a_missing_package_is_told_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("hepti_mqtt.bench.outside.baselines.find_spec", lambda name: None)
    (tmp_path / "pair.yaml").write_text(LAB)
    (tmp_path / "tiny.yaml").write_text(EXPERIMENT)
    assert main(["bench", str(tmp_path / "tiny.yaml"), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "torch needs torch" in said
    assert "pip install torch" in said
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match=r"onnx and onnxruntime, .* pip install onnx onnxruntime"):
        require(["onnxruntime"])
    require([])


@pytest.mark.parametrize(("make", "name"), [(make_torch, "torch"), (make_onnx, "onnxruntime")])
def test_a_host_without_the_package_says_how_to_get_it(make, name, cases):
    if not MISSING[name]:
        pytest.skip("installed here")
    model, body, _ = cases["tiny-bert"]
    with Checkpoint.open(model) as checkpoint, pytest.raises(ConfigError, match="pip install"):
        make(common.Options(), common.task(checkpoint, body))
