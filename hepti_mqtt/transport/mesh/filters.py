"""Topic filters: which are filters at all, what they match, and which of them another one covers."""

from __future__ import annotations


def is_filter(pattern: str) -> bool:
    """Return whether this is a topic filter as MQTT has it."""
    levels = pattern.split("/")
    return (
        bool(pattern)
        and all(level == "+" or "+" not in level for level in levels)
        and all("#" not in level for level in levels[:-1])
        and (levels[-1] == "#" or "#" not in levels[-1])
    )


def is_topic(name: str) -> bool:
    """Return whether something may be published on this."""
    return bool(name) and not any(c in name for c in "+#\0")


def matches(pattern: str, topic: str) -> bool:
    """Return whether a filter takes in a topic."""
    return _within(pattern.split("/"), topic.split("/"))


def covers(allowed: str, asked: str) -> bool:
    """Return whether every topic that `asked` takes in is taken in by `allowed` as well."""
    outer, inner = allowed.split("/"), asked.split("/")
    if inner[-1] == "#":
        # "a/#" is also "a": only a "#" at or before its place has all of it.
        return outer[-1] == "#" and len(outer) <= len(inner) and _within(outer, inner)
    return _within(outer, inner)


def _within(outer: list[str], inner: list[str]) -> bool:
    if outer[0] in ("+", "#") and inner[0].startswith("$"):
        return False
    if outer[-1] == "#":
        outer, inner = outer[:-1], inner[: len(outer) - 1]
    return len(outer) == len(inner) and all(a in (b, "+") for a, b in zip(outer, inner, strict=True))
