"""The bars that an experiment file states: what one variant must reach against another, and where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from hepti_mqtt.bench.contenders import CONTENDERS, OUTSIDE, SITE
from hepti_mqtt.errors import ConfigError

BEST: Final = "best"
SUM: Final = "sum of hosts"
UNLIMITED: Final = "unlimited link"
SPEEDS: Final = "sum of speeds"
PREDICTED: Final = "predicted"
AGAINST: Final[Mapping[str, str]] = {
    BEST: "the fastest of all methods by hand",
    SUM: "all hosts, each alone, added up",
    UNLIMITED: "the same plan with unlimited links, simulated",
    SPEEDS: "all work at the calibrated speed of all hosts",
    PREDICTED: "its own prediction",
}
_WHERE: Final = ("lab", "rate", "model", "tokens", "wire", "route", "weights", "requests", "devices")
_LIMITS: Final = ("at least", "at most", "within")
_KEYS: Final = ("variant", "against", *_LIMITS, "mean", "where", "of")


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar. variant: contenders, of which the fastest counts. against: the same, or one word of AGAINST.

    limit, value: "at least" so many times as fast, "at most" so many times as long, or "within" such a share of its
    prediction. mean: the bound of the geometric mean over all cells, for predictions of the median: None without one.
    where: fields of the cells that it is for. of: fields in which the other cell differs from that.
    """

    variant: tuple[str, ...]
    against: tuple[str, ...]
    limit: str
    value: float
    mean: float | None
    where: Mapping[str, Any]
    of: Mapping[str, Any]
    words: str


def bars_of(data: Any) -> tuple[Bar, ...]:
    """Return the bars of a file's `bars:`; raises ConfigError that says which one is wrong and why."""
    if not isinstance(data, list):
        raise ConfigError("`bars` is a list; each is e.g. {variant: auto, against: single, at least: 2.8}")
    return tuple(_bar(place, each) for place, each in enumerate(data, 1))


def _bar(place: int, data: Any) -> Bar:
    if not isinstance(data, Mapping) or (unknown := sorted(set(data) - set(_KEYS), key=str)):
        wrong = f"has {', '.join(map(repr, unknown))}" if isinstance(data, Mapping) else f"is {data!r}"
        raise ConfigError(f"bar {place} of `bars` {wrong}; its keys are {', '.join(_KEYS)}")
    limits = [key for key in _LIMITS if key in data]
    if len(limits) != 1 or "variant" not in data or "against" not in data:
        raise ConfigError(f"bar {place} of `bars` needs `variant`, `against` and one of {', '.join(_LIMITS)}")
    limit, against = limits[0], _names(place, "against", data["against"])
    if (limit == "within") != (against == (PREDICTED,)):
        raise ConfigError(f"bar {place} of `bars`: `within` and `against: {PREDICTED}` go with each other alone")
    own, other = (_fields(place, key, data.get(key, {})) for key in ("where", "of"))
    mean = None if data.get("mean") is None else _number(place, "mean", data["mean"])
    variant = _names(place, "variant", data["variant"])
    words = {key: value for key, value in data.items() if key != "where"}
    said = ", ".join(f"{key} {' or '.join(map(str, v)) if isinstance(v, list) else v}" for key, v in words.items())
    return Bar(variant, against, limit, _number(place, limit, data[limit]), mean, own, other, said)


def _names(place: int, key: str, value: Any) -> tuple[str, ...]:
    """Return the contenders that names stand for, or the one word that stands for something else."""
    if key == "against" and isinstance(value, str) and value in AGAINST:
        return (str(value),)
    if key == "variant" and value == "all":
        return tuple(name for name, contender in CONTENDERS.items() if contender.source == SITE)
    found = []
    for each in value if isinstance(value, list) else [value]:
        alike = [n for n, c in CONTENDERS.items() if each == n or (c.source != OUTSIDE and n.partition("/")[0] == each)]
        if not alike:
            words = f", or {', '.join(AGAINST)}" if key == "against" else ", or all"
            raise ConfigError(f"bar {place} of `bars`: `{key}` has {each!r}; it needs names of strategies{words}")
        found += alike
    return tuple(dict.fromkeys(found))


def _fields(place: int, key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not set(value) <= set(_WHERE):
        raise ConfigError(f"bar {place} of `bars`: `{key}` is {value!r}; it is a mapping of {', '.join(_WHERE)}")
    return dict(value)


def _number(place: int, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"bar {place} of `bars`: `{key}` is {value!r}; it needs a number above 0")
    return float(value)
