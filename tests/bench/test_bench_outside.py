"""Outside baselines: every one equals the reference on both families; what they need is named where it is missing."""

from __future__ import annotations

import socket
from importlib.util import find_spec

import pytest

from hepti_mqtt.bench.outside import BASELINES, common, start
from hepti_mqtt.bench.outside.onnx_single import make as make_onnx
from hepti_mqtt.bench.outside.torch_single import make as make_torch
from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.errors import ConfigError, LabError
from hepti_mqtt.lab.local import LocalHost

NEEDS = {name: ("onnx", "onnxruntime") if name == "onnxruntime" else ("torch",) for name in BASELINES}
MISSING = {name: [p for p in packages if not find_spec(p)] for name, packages in NEEDS.items()}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    return {kind: make_model(kind, place / kind) for kind in ("tiny-bert", "tiny-roberta", "tiny-vit")}


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["tiny-bert", "tiny-roberta", "tiny-vit"])
@pytest.mark.parametrize("name", BASELINES)
def test_the_output_is_the_reference_before_a_time_counts(name, kind, models, tmp_path):
    if MISSING[name]:
        pytest.skip(f"{', '.join(MISSING[name])} not installed: make test-outside has an environment with it")
    count = min(BASELINES[name].most, 2)
    hosts = [LocalHost(f"h{i}", tmp_path / f"h{i}") for i in range(count)]
    try:
        group = start(name, hosts, models[kind], 13, port=free_port(), interface="lo")
        assert group.difference < 1e-4
        assert group.versions
        assert group.measure() > 0
        assert group.measure() > 0
        group.close()
    finally:
        for host in hosts:
            host.close()


def test_unknown_names_and_numbers_of_hosts(models, tmp_path):
    with LocalHost("h", tmp_path / "h") as host:
        with pytest.raises(ConfigError, match="no baseline 'x'; known are torch"):
            start("x", [host], models["tiny-bert"], 8)
        with pytest.raises(ConfigError, match="takes 2 to 16 hosts, not 1"):
            start("torch-megatron", [host], models["tiny-bert"], 8)


def test_too_many_tokens_end_the_baseline_with_the_limit(models, tmp_path):
    with LocalHost("h", tmp_path / "h") as host, pytest.raises(LabError, match="99999 tokens do not fit"):
        start("torch", [host], models["tiny-bert"], 99_999)


@pytest.mark.parametrize(("make", "name"), [(make_torch, "torch"), (make_onnx, "onnxruntime")])
def test_a_missing_package_is_named_with_how_to_get_it(make, name, models):
    if not MISSING[name]:
        pytest.skip("installed here")
    options = common.Options(str(models["tiny-bert"]), 8, 0, 0, 1, "127.0.0.1:1", "")
    with pytest.raises(ConfigError, match="pip install"):
        make(options, common.task(options))
