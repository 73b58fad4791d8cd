"""Rotary positions as config.json has them: their base, and by what frequencies are divided for longer texts.

Scalings: linear; `llama3` (Llama 3.1); `yarn` (YaRN, Peng et al., 2023). Each keeps a part of every frequency and
divides the rest by the factor. Source: transformers, `modeling_rope_utils`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hepti_mqtt.core.errors import ModelError, UnsupportedModelError
from hepti_mqtt.models.config import FULL, SLIDING, JsonConfig, KeyTable

Kept = Callable[[JsonConfig, int, float], npt.NDArray[np.float64]]  # of each frequency [d / 2], between 0 and 1
_COMMON: Final = frozenset({"factor", "rope_theta", "rope_type", "type"})
_BEFORE: Final = "original_max_position_embeddings"
_PLACES: Final = ("rope_parameters", "rope_scaling")  # of newer files, and of older ones


class Rope(NamedTuple):
    """theta: the base. divisors: of the frequencies [d / 2], none where all are 1. factor: of the scores."""

    theta: float
    divisors: tuple[float, ...] = ()
    factor: float = 1.0


def _linear(_: JsonConfig, d: int, __: float) -> npt.NDArray[np.float64]:
    return np.zeros(d // 2)


def _llama3(part: JsonConfig, d: int, theta: float) -> npt.NDArray[np.float64]:
    for key in ("low_freq_factor", "high_freq_factor"):
        part.require(key)
    low, high, before = (part.number(key, 1.0) for key in ("low_freq_factor", "high_freq_factor", _BEFORE))
    if high <= low:
        raise part.bad_value("high_freq_factor", f"greater than low_freq_factor {low}", high)
    turns = before * theta ** (-np.arange(0, d, 2) / d) / (2 * math.pi)
    return np.clip((turns - low) / (high - low), 0, 1)


def _yarn(part: JsonConfig, d: int, theta: float) -> npt.NDArray[np.float64]:
    before, truncate = part.number(_BEFORE, 1.0), part.flag("truncate", True)
    fast, slow = part.number("beta_fast", 32), part.number("beta_slow", 1)
    first, last = (d * math.log(before / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (fast, slow))
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, d - 1)
    last += 0.001 if first == last else 0.0
    return np.asarray(1 - np.clip((np.arange(d // 2) - first) / (last - first), 0, 1))


_KEPT: Final[Mapping[str, tuple[Kept, frozenset[str]]]] = {
    "linear": (_linear, frozenset()),
    "llama3": (_llama3, frozenset({"low_freq_factor", "high_freq_factor", _BEFORE})),
    "yarn": (
        _yarn,
        frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", _BEFORE}),
    ),
}


_LENGTHENED: Final = [how for how, (_, keys) in _KEPT.items() if _BEFORE in keys]


def read_rope(config: JsonConfig, d: int, default: float, key: str = "rope_theta", kind: str = "") -> Rope:
    """Return the rotary positions of heads of d columns; raises ModelError, UnsupportedModelError for other scalings.

    default, key: of the base in older files. kind: of the layers, where several kinds have positions of their own.
    """
    _check_places(config, kind)
    if kind == SLIDING or config.get(_PLACES[0], {}):  # older files never scale these; the newer key is enough
        config = JsonConfig(config.file, {**config.data, "rope_scaling": None})
    for place in _PLACES:
        whole = config.get(place, {})
        nested = isinstance(whole, Mapping) and isinstance(whole.get(kind), Mapping)
        part: Any = whole[kind] if nested else whole
        how: Any = (part.get("rope_type") or part.get("type")) if isinstance(part, Mapping) else None
        # One factor of scores counts for all layers.
        kinds = ["default", *(name for name in _KEPT if not (kind and name == "yarn"))]
        if how is not None and how not in kinds:
            raise UnsupportedModelError(
                f"{config.file}: {place}: rope_type {str(how)[:40]!r} is not supported; supported: {', '.join(kinds)}"
            )
        if how not in _KEPT:
            continue
        if kind and not nested and "rope_type" not in part:
            raise ModelError(
                f"{config.file}: {place} has type {how!r}, which transformers does not read where layers have two "
                f"kinds: if positions were scaled in training, name it rope_type, else take {place} out"
            )
        rest = {name: value for name, value in part.items() if name == "rope_theta"}
        data = {**config.data, place: {**whole, kind: rest} if nested else rest}
        theta = JsonConfig(config.file, data).rope_theta(default, key, kind)
        if how in _LENGTHENED:  # the length in training, if nothing says it
            part = {_BEFORE: config.get(_BEFORE, config.positive("max_position_embeddings"))} | part
        return _scaled(JsonConfig(f"{config.file}: {place}", part), how, d, theta)
    return Rope(config.rope_theta(default, key, kind))


def _check_places(config: JsonConfig, kind: str) -> None:
    """Raise UnsupportedModelError if versions of transformers differ in which of two statements counts."""
    new, old = (config.get(place, {}) for place in _PLACES)
    if new and old and new != old:
        raise UnsupportedModelError(
            f"{config.file}: rope_parameters and rope_scaling differ, and versions of transformers differ in which of "
            "them counts; remove the wrong one"
        )
    if kind and new and isinstance(new, Mapping) and not {FULL, SLIDING} & new.keys():
        raise UnsupportedModelError(
            f"{config.file}: rope_parameters are the same for all layers, which transformers ignores in this model; "
            f"give {FULL} and {SLIDING} parameters of their own"
        )
    for part in (new, old):
        inner = part.get(_BEFORE) if isinstance(part, Mapping) else None
        if inner is not None and config.get(_BEFORE, inner) != inner:
            raise UnsupportedModelError(
                f"{config.file}: {_BEFORE} is {config.data[_BEFORE]!r} in one place and {inner!r} in another; remove "
                "the wrong one"
            )


def _scaled(part: JsonConfig, how: str, d: int, theta: float) -> Rope:
    kept_by, keys = _KEPT[how]
    part.check_keys(KeyTable(_COMMON | keys, only={"partial_rotary_factor": (1.0, 1)}))
    part.require("factor")
    factor = part.number("factor", 1.0)
    if factor < 1:
        raise part.bad_value("factor", "at least 1", factor)
    if theta <= 1:
        raise part.bad_value("rope_theta", "greater than 1 where positions are scaled", theta)
    kept = kept_by(part, d, theta)
    divisors = tuple(float(v) for v in 1 / ((1 - kept) / factor + kept))
    return Rope(theta, divisors, _attention_factor(part, factor) ** 2 if how == "yarn" else 1.0)


def _attention_factor(part: JsonConfig, factor: float) -> float:
    """Return the factor of queries and of keys."""
    if part.get("attention_factor", None) is not None:
        return part.number("attention_factor", 1.0)
    grown = 0.1 * math.log(factor)
    one, all_of = (part.at_least_zero(key, 0.0) for key in ("mscale", "mscale_all_dim"))
    return (grown * one + 1) / (grown * all_of + 1) if one and all_of else grown + 1
