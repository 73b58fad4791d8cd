"""Start of a planner: configuration and models."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path

from platformdirs import user_state_path

from hepti_mqtt.checkpoint import Checkpoint, model_parts
from hepti_mqtt.config import Settings
from hepti_mqtt.config.options import PlannerOptions
from hepti_mqtt.core.errors import ConfigError, ModelError, PlanError, RequestError, UnsupportedModelError, WireError
from hepti_mqtt.core.ids import check_name
from hepti_mqtt.core.plan import CacheDtype, Quantised
from hepti_mqtt.models import weight_dtypes
from hepti_mqtt.protocol.manifest import Manifest
from hepti_mqtt.protocol.messages import MAX_MESSAGE_BYTES, Prepare, encode
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.service.envelope import supported_pins, validate_pins
from hepti_mqtt.service.handler import OpenModel
from hepti_mqtt.service.solver import MeasuredErrors
from hepti_mqtt.transport.url import BrokerUrl


def state_directory(site: str, directory: Path | None = None) -> Path:
    """Return the state directory of a site's planner; directory: parent, by default the user's state directory.

    Create it if it is missing. Raises ConfigError if the creation fails.
    """
    place = (directory or user_state_path("hepti")) / "planner" / site
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the planner's state cannot be kept in {place}: {error.strerror or error}; make it writable, or set "
            "XDG_STATE_HOME"
        ) from error
    return place


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """Configuration of a site's planner; state_dir: by default the user's state directory."""

    url: BrokerUrl
    site: str
    options: PlannerOptions
    state_dir: Path | None = None
    log: logging.Logger = field(default_factory=lambda: logging.getLogger("hepti.planner"))

    @classmethod
    def of(cls, settings: Settings, options: PlannerOptions) -> PlannerConfig:
        """Return the configuration of a command line; raises ConfigError for a missing broker, a bad URL or site."""
        return cls(BrokerUrl.parse(settings.require_broker()), check_name("site", settings.site), options)


def open_models(config: PlannerConfig, stack: contextlib.ExitStack) -> dict[str, OpenModel]:
    """Return the usable models and log the others; raises the first ModelError if no model is usable.

    An unsupported weight dtype raises ConfigError for a single model; one of several models falls back to f32.
    """
    models: dict[str, OpenModel] = {}
    bad: list[ModelError] = []
    try:
        pins = validate_pins(config.options.pins.to_pins())
    except RequestError as error:
        raise ConfigError(str(error)) from error
    for name, directory in config.options.models.items():
        try:
            opened = _open_model(config, check_name("model", name), directory, stack)
            for part, checkpoint in opened.items():
                config.log.info("model %s: %d tensors", part, len(checkpoint.manifest.entries))
                if checkpoint.quantisation is not None:
                    config.log.info("model %s: %s", part, checkpoint.quantisation.text())
        except ModelError as error:
            bad.append(error)
            if len(config.options.models) > 1:
                config.log.warning("model %s is not served: %s", name, error)
            continue
        for part, checkpoint in opened.items():
            own = supported_pins(pins, checkpoint.spec, [one.spec for one in opened.values()])
            models[part] = OpenModel(part, checkpoint, _with_able_weights(config, part, checkpoint, own))
    if not models:
        raise bad[0]
    return models


def _open_model(
    config: PlannerConfig, name: str, directory: str | Path, stack: contextlib.ExitStack
) -> dict[str, Checkpoint]:
    """Return the models of a directory, quantised as configured.

    If the quantisation is unsupported or its error too large, one of several models stays unquantised, and a single
    model raises ConfigError. Raises ModelError.
    """
    how, cache = config.options.pins.quantised, config.options.pins.kv_cache
    try:
        with contextlib.ExitStack() as own:
            opened = _open_parts(directory, name, own, how, cache)
            if how is not None:
                for checkpoint in opened.values():
                    MeasuredErrors.of(checkpoint, config.options.max_weight_error).require_weights(how)
            stack.enter_context(own.pop_all())
            return opened
    except (UnsupportedModelError, PlanError) as error:
        if (how is None and cache == "f32") or len(config.options.models) == 1:
            raise (error if isinstance(error, ModelError) else ConfigError(f"model {name}: {error}")) from error
        config.log.warning("model %s keeps its numbers: %s", name, error)
    return _open_parts(directory, name, stack)


def _open_parts(
    directory: str | Path,
    name: str,
    stack: contextlib.ExitStack,
    quantised: Quantised | None = None,
    cache: CacheDtype = "f32",
) -> dict[str, Checkpoint]:
    """Return the models of a directory by their names on the site; raises ModelError."""
    opened = {}
    for part in model_parts(directory):
        checkpoint = stack.enter_context(Checkpoint.open(directory, name, part, quantised, cache))
        if checkpoint.has_tokenizer:
            _ = checkpoint.tokenizer  # read now, because the directory may change before the first request
        _ = checkpoint.languages, checkpoint.similarity
        require_acceptable(checkpoint)
        opened[checkpoint.name] = checkpoint
    return opened


def require_acceptable(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedModelError if every device would refuse the model; run the devices' checks first."""
    spec, manifest = checkpoint.spec.to_dict(), checkpoint.manifest
    try:
        size = len(encode(Prepare(1, {}, spec, manifest.digest, in_flight=1)))
        if size > MAX_MESSAGE_BYTES // 2:  # a plan of many devices and shapes needs the rest
            raise ValueError(f"its description has {size} bytes, and {MAX_MESSAGE_BYTES // 2} fit into a message")
        Manifest.decode(manifest.encode())
    except (ValueError, WireError) as error:
        raise UnsupportedModelError(
            f"{checkpoint.path}: devices would refuse this model ({error}); use a smaller one, or report this"
        ) from error


def _with_able_weights(config: PlannerConfig, name: str, checkpoint: Checkpoint, pins: Pins) -> Pins:
    """Return a model's pins; replace an unsupported or too inaccurate weight dtype by f32."""
    able = weight_dtypes(checkpoint.spec)
    if pins.weight_dtype == "f32":
        return pins
    if pins.weight_dtype in able:
        try:
            MeasuredErrors.of(checkpoint, config.options.max_weight_error).require_weights(pins.weight_dtype)
        except PlanError as error:
            why = str(error)
        else:
            return pins
    else:
        what = f"{checkpoint.spec.architecture} supports only weights in {' or '.join(able)}"
        why = f"{what}, not {pins.weight_dtype}; leave out --weights, or choose {able[0]}"
    if len(config.options.models) == 1:
        raise ConfigError(f"model {name}: {why}")
    config.log.warning("model %s keeps f32: %s", name, why)
    return replace(pins, weight_dtype="f32")
