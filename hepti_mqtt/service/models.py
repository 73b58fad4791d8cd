"""The models that a planner serves: opened, and their pins checked."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.errors import ConfigError, ModelError, RequestError
from hepti_mqtt.ids import check_name
from hepti_mqtt.models import storages
from hepti_mqtt.runtime.planner.flight import Pins
from hepti_mqtt.service.config import PlannerConfig
from hepti_mqtt.service.desk import Model
from hepti_mqtt.service.envelope import checked_pins
from hepti_mqtt.spec import Spec


def open_models(config: PlannerConfig, stack: contextlib.ExitStack) -> dict[str, Model]:
    """Return the models that can be used, and name the others; raises the first one's ModelError if there is none.

    Weights that a model cannot have are a ConfigError where it is the only one; of several it keeps f32.
    """
    models: dict[str, Model] = {}
    bad: list[ModelError] = []
    for name, directory in config.models.items():
        p = config.pins.get(name, Pins())
        try:
            pins = checked_pins(p.strategy, p.options, p.devices, p.wire, p.storage, p.route, p.accuracy)
            pins = replace(pins, objective=p.objective)
        except RequestError as error:
            raise ConfigError(f"model {name}: {error}") from error
        try:
            checkpoint = stack.enter_context(Checkpoint.open(directory, check_name("model", name)))
            config.log.info("model %s: %d tensors", name, len(checkpoint.manifest.entries))
        except ModelError as error:
            bad.append(error)
            if len(config.models) > 1:
                config.log.warning("model %s is not served: %s", name, error)
            continue
        models[name] = Model(name, checkpoint, _able(config, name, checkpoint.spec, pins))
    if not models:
        raise bad[0]
    return models


def _able(config: PlannerConfig, name: str, spec: Spec, pins: Pins) -> Pins:
    """Return a model's pins with f32 for weights that its family cannot have."""
    able = storages(spec)
    if pins.storage in able:
        return pins
    why = f"{spec.architecture} can keep its weights in {' or '.join(able)} alone, and {pins.storage} is asked for"
    if len(config.models) == 1:
        raise ConfigError(f"model {name}: {why}; leave out --weights, or ask for {able[0]}")
    config.log.warning("model %s: %s; it keeps f32", name, why)
    return replace(pins, storage="f32")
