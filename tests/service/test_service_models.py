"""The models that a planner opens, and what its user has pinned for all of them."""

from __future__ import annotations

import contextlib

import pytest

from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.errors import ConfigError
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.service import PlannerConfig
from hepti_mqtt.service.setup import open_models
from hepti_mqtt.transport import BrokerUrl

NOWHERE = BrokerUrl.parse("mqtt://127.0.0.1:1")


@pytest.fixture
def cnn(tmp_path, kept_hashes):
    make_model("tiny-resnet", tmp_path / "cnn", seed=1)
    return tmp_path / "cnn"


def pinned(storage, **models):
    return PlannerConfig(NOWHERE, "s", models, dict.fromkeys(models, Pins(storage=storage)))


def test_weights_that_the_only_model_cannot_have_end_the_planner_at_the_start(cnn):
    with contextlib.ExitStack() as stack, pytest.raises(ConfigError, match=r"model cnn: .* f32 alone, and w8a8"):
        open_models(pinned("w8a8", cnn=cnn), stack)


def test_of_several_models_one_that_cannot_have_the_weights_keeps_f32(cnn, checkpoints, caplog):
    with contextlib.ExitStack() as stack:
        opened = open_models(pinned("w8a8", cnn=cnn, bert=checkpoints["bert"].path), stack)
    assert {name: model.pins.storage for name, model in opened.items()} == {"cnn": "f32", "bert": "w8a8"}
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "model cnn" in said
    assert "f32 alone, and w8a8" in said
