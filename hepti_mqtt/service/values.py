"""What JSON values are, in a word."""

from __future__ import annotations

from typing import Any


def is_int(value: Any) -> bool:
    """Return whether a JSON value is a whole number; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def kind(value: Any) -> str:
    """Return a short word for a JSON value, never all of it."""
    if value is None or isinstance(value, bool | int | float):
        return str(value)[:40]
    words: dict[str, str] = {"str": "a string", "list": "a list", "dict": "an object"}
    name = type(value).__name__
    return words.get(name, name)


def quoted(value: Any) -> str:
    """Return a short word for a JSON value where a string could have been right: the beginning of the string itself."""
    return repr(value[:40]) if isinstance(value, str) else kind(value)
