"""Values of an experiment file, each refused with its key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hepti_mqtt.errors import ConfigError


def listed(key: str, value: Any) -> list[Any]:
    """Return a value or a list of them as a list; raises ConfigError for a mapping."""
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, Mapping):
        raise ConfigError(f"`{key}` is a mapping; it needs a value or a list of values")
    return [value]


def whole(key: str, value: Any, least: int) -> int:
    """Return a whole number from `least`; raises ConfigError that names the key."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"`{key}` is {value!r}; it needs a whole number from {least}")
    return value


def number(key: str, value: Any) -> float:
    """Return a number of Mbit/s; raises ConfigError that names the key."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"`{key}` has {value!r}; it needs Mbit/s as numbers")
    return float(value)


def one_of(key: str, value: Any, allowed: Sequence[str]) -> str:
    """Return one of the words that are allowed; raises ConfigError that names them."""
    if value not in allowed:
        raise ConfigError(f"`{key}` is {value!r}; it is one of {', '.join(allowed)}")
    return str(value)
