"""Rotary positions in config.json: their base, and scalings, which divide frequencies for longer texts.

Scalings: `linear`; `llama3` (Llama 3.1); `yarn` (YaRN, Peng et al., 2023). A scaling divides by its factor a part of
each frequency, and leaves the rest unscaled. Source: transformers, `modeling_rope_utils`. d columns of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hepti_mqtt.core.errors import ModelError, UnsupportedModelError
from hepti_mqtt.models.config import FULL, SLIDING, JsonConfig, KeyTable

# (the scaling, d, theta) -> the unscaled part of each frequency, 0 to 1, [d / 2].
Unscaled = Callable[[JsonConfig, int, float], npt.NDArray[np.float64]]
_COMMON: Final = frozenset({"factor", "rope_theta", "rope_type", "type"})
_TRAINED_LENGTH: Final = "original_max_position_embeddings"
_PLACES: Final = ("rope_parameters", "rope_scaling")  # keys of newer and of older files


class Rope(NamedTuple):
    """The rotary positions of a layer."""

    #: Base of the frequencies; 0: the layer has no positions.
    theta: float
    #: Divisors of the frequencies [d / 2], empty if all are 1.
    divisors: tuple[float, ...] = ()
    #: Factor of the attention scores.
    factor: float = 1.0


def _linear(_: JsonConfig, d: int, __: float) -> npt.NDArray[np.float64]:
    return np.zeros(d // 2)


def _llama3(part: JsonConfig, d: int, theta: float) -> npt.NDArray[np.float64]:
    for key in ("low_freq_factor", "high_freq_factor"):
        part.require(key)
    low, high, length = (part.number(key, 1.0) for key in ("low_freq_factor", "high_freq_factor", _TRAINED_LENGTH))
    if high <= low:
        raise part.bad_value("high_freq_factor", f"greater than low_freq_factor {low}", high)
    turns = length * theta ** (-np.arange(0, d, 2) / d) / (2 * math.pi)
    return np.clip((turns - low) / (high - low), 0, 1)


def _yarn(part: JsonConfig, d: int, theta: float) -> npt.NDArray[np.float64]:
    length, truncate = part.number(_TRAINED_LENGTH, 1.0), part.flag("truncate", True)
    fast, slow = part.number("beta_fast", 32), part.number("beta_slow", 1)
    first, last = (d * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (fast, slow))
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, d - 1)
    last += 0.001 if first == last else 0.0
    return np.asarray(1 - np.clip((np.arange(d // 2) - first) / (last - first), 0, 1))


# Scalings by `rope_type`: the unscaled parts, and the keys of the scaling.
_SCALINGS: Final[Mapping[str, tuple[Unscaled, frozenset[str]]]] = {
    "linear": (_linear, frozenset()),
    "llama3": (_llama3, frozenset({"low_freq_factor", "high_freq_factor", _TRAINED_LENGTH})),
    "yarn": (
        _yarn,
        frozenset(
            {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", _TRAINED_LENGTH}
        ),
    ),
}


def read_rope(config: JsonConfig, d: int, default: float, key: str = "rope_theta", kind: str = "") -> Rope:
    """Return the rotary positions of heads of d columns; raises ModelError, UnsupportedModelError for other scalings.

    default: of the base. key: of the base outside `rope_parameters`. kind: `FULL` or `SLIDING`, if these layers have
    different positions.
    """
    _check_places(config, kind)
    # rope_scaling never applies to layers with windows, and repeats rope_parameters if both are present.
    if kind == SLIDING or config.get(_PLACES[0], {}):
        config = JsonConfig(config.file, {**config.data, "rope_scaling": None})
    for place in _PLACES:
        whole = config.get(place, {})
        nested = isinstance(whole, Mapping) and isinstance(whole.get(kind), Mapping)
        part: Any = whole[kind] if nested else whole
        how: Any = (part.get("rope_type") or part.get("type")) if isinstance(part, Mapping) else None
        # YaRN's factor of scores applies to all layers, so kinds of layers with different positions cannot have it.
        kinds = ["default", *(name for name in _SCALINGS if not (kind and name == "yarn"))]
        if how is not None and how not in kinds:
            raise UnsupportedModelError(
                f"{config.file}: {place}: rope_type {str(how)[:40]!r} is not supported; supported: {', '.join(kinds)}"
            )
        if how not in _SCALINGS:
            continue
        if kind and not nested and "rope_type" not in part:
            raise ModelError(
                f"{config.file}: {place} has type {how!r}, which transformers ignores in a model with layers of two "
                f"kinds: if positions were scaled in training, rename type to rope_type, else remove {place}"
            )
        rest = {name: value for name, value in part.items() if name == "rope_theta"}
        data = {**config.data, place: {**whole, kind: rest} if nested else rest}
        theta = JsonConfig(config.file, data).rope_theta(default, key, kind)
        if _TRAINED_LENGTH in _SCALINGS[how][1]:
            length = config.get(_TRAINED_LENGTH, config.positive("max_position_embeddings"))
            part = {_TRAINED_LENGTH: length} | part
        return _scaled(JsonConfig(f"{config.file}: {place}", part), how, d, theta)
    return Rope(config.rope_theta(default, key, kind))


def _check_places(config: JsonConfig, kind: str) -> None:
    """Raise UnsupportedModelError for contradictory keys, because versions of transformers use different ones."""
    new, old = (config.get(place, {}) for place in _PLACES)
    if new and old and new != old:
        raise UnsupportedModelError(
            f"{config.file}: rope_parameters and rope_scaling differ, and versions of transformers use different ones; "
            "remove the wrong one"
        )
    if kind and new and isinstance(new, Mapping) and not {FULL, SLIDING} & new.keys():
        raise UnsupportedModelError(
            f"{config.file}: rope_parameters has neither {FULL} nor {SLIDING}, so transformers ignores it in this "
            "model; put the parameters under these two keys"
        )
    for part in (new, old):
        inner = part.get(_TRAINED_LENGTH) if isinstance(part, Mapping) else None
        if inner is not None and config.get(_TRAINED_LENGTH, inner) != inner:
            raise UnsupportedModelError(
                f"{config.file}: {_TRAINED_LENGTH} is {config.data[_TRAINED_LENGTH]!r} in one place and {inner!r} in "
                "another; remove the wrong one"
            )


def _scaled(part: JsonConfig, how: str, d: int, theta: float) -> Rope:
    unscaled_parts, keys = _SCALINGS[how]
    part.check_keys(KeyTable(_COMMON | keys, only={"partial_rotary_factor": (1.0, 1)}))
    part.require("factor")
    factor = part.number("factor", 1.0)
    if factor < 1:
        raise part.bad_value("factor", "at least 1", factor)
    if theta <= 1:
        raise part.bad_value("rope_theta", "greater than 1 if positions are scaled", theta)
    unscaled = unscaled_parts(part, d, theta)
    divisors = tuple(float(v) for v in 1 / ((1 - unscaled) / factor + unscaled))
    return Rope(theta, divisors, _attention_factor(part, factor) ** 2 if how == "yarn" else 1.0)


def _attention_factor(part: JsonConfig, factor: float) -> float:
    """Return YaRN's factor of queries and of keys; scores have its square."""
    if part.get("attention_factor", None) is not None:
        return part.number("attention_factor", 1.0)
    slope = 0.1 * math.log(factor)
    one, all_dims = (part.at_least_zero(key, 0.0) for key in ("mscale", "mscale_all_dim"))
    return (slope * one + 1) / (slope * all_dims + 1) if one and all_dims else slope + 1
