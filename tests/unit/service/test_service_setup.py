"""What a planner refuses at its start, because no device would take it or no request could be read."""

import contextlib
import threading

import pytest
from question_cases import put

from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.config.options import PinOptions, PlannerOptions
from hepti_mqtt.core.errors import CertificateDateError, ConfigError, ModelError, UnsupportedModelError
from hepti_mqtt.service import planner
from hepti_mqtt.service.setup import PlannerConfig, open_models
from hepti_mqtt.transport.url import BrokerUrl


def configured(path, file="config.json", **changes):
    put(file, **changes)(path)
    return path


def models_of(paths, *pins, **changes):
    """Return the storages of each of the models that a planner opens."""
    options = PlannerOptions({path.name: path for path in paths}, *pins, **changes)
    with contextlib.ExitStack() as stack:
        models = open_models(PlannerConfig(BrokerUrl.parse("mqtt://127.0.0.1"), "home", options), stack)
        return {n: {*dict(m.checkpoint.spec.storages).values()} for n, m in models.items()}


def opened(*paths):
    return [*models_of(paths)]


def quantised(paths, **changes):
    return models_of(paths, PinOptions(weights="q8"), **changes)


def test_one_of_several_models_that_cannot_be_quantised_is_served_as_it_is(tmp_path):
    bert, llama = (make_model(f"tiny-{kind}", tmp_path / kind) for kind in ("bert", "llama"))
    assert quantised([bert, llama]) == {"bert": set(), "llama": {"q8_0"}}
    with pytest.raises(UnsupportedModelError):
        quantised([bert])
    with pytest.raises(ConfigError):  # it moves the answers too far
        quantised([llama], max_weight_error=1e-4)
    with pytest.raises(ModelError):  # as without quantising
        quantised([bert.parent])


def test_what_every_device_would_refuse_is_refused_at_the_start(tmp_path):
    path = configured(make_model("tiny-resnet", tmp_path / "m"), image_size=5000)
    framed = {"size": {"shortest_edge": 5000}, "crop_size": {"height": 5000, "width": 5000}}
    configured(path, "preprocessor_config.json", **framed)
    with pytest.raises(UnsupportedModelError) as caught:
        opened(path)
    assert "spec.size 5000" in str(caught.value)


@pytest.mark.parametrize("size", [{"num_hidden_layers": 10**9}, {"vocab_size": 10**12}, {"hidden_size": 10**9}])
def test_what_is_beyond_all_bounds_is_refused_before_it_is_laid_out(tmp_path, size):
    with pytest.raises(ModelError):
        opened(configured(make_model("tiny-bert", tmp_path / "m"), **size))


def test_of_several_models_one_with_a_broken_tokenizer_is_left_out(tmp_path):
    path = make_model("tiny-bert", tmp_path / "m")
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError):
        opened(path)
    assert opened(path, make_model("tiny-bert", tmp_path / "good")) == ["good"]


@pytest.mark.parametrize("ending", ["valid", "stopped"])
def test_a_planner_waits_for_a_certificate_to_become_valid(ending, tmp_path, monkeypatch, caplog):
    stop, tries = threading.Event(), []

    def claim(*_):
        tries.append(1)
        if len(tries) < 3:
            raise CertificateDateError("its certificate is valid from tomorrow")
        if ending == "valid":
            raise ConfigError("this is how far it comes")
        stop.set()
        raise CertificateDateError("its certificate is valid from tomorrow")

    monkeypatch.setattr(planner, "claim_site", claim)
    model = make_model("tiny-bert", tmp_path / "m")
    config = PlannerConfig(
        BrokerUrl.parse("mqtts://127.0.0.1:1"), "home", PlannerOptions({"m": model}), state_dir=tmp_path
    )
    with pytest.raises(ConfigError) if ending == "valid" else contextlib.nullcontext():
        planner.run_planner(config, stop)
    assert len(tries) == 3
    assert caplog.text.count("valid from tomorrow") == 1
