"""Names in topics, starts of processes, and plan versions."""

from __future__ import annotations

import re
from typing import Final, NamedTuple, TypeGuard

from hepti_mqtt.core.errors import BadNameError

PLANNER: Final = "planner"
ALL_DEVICES: Final = "all"
RESERVED_NAMES: Final = frozenset({PLANNER, ALL_DEVICES})
NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
LONGEST_NAME: Final = 64


class Start(NamedTuple):
    """A start of a process under its name; the greater of two starts is the newer one."""

    term: int  #: one more than the term of the last start that the broker retained
    boot: int  #: random; identifies the start in messages, and orders starts that read the broker at the same time


class PlanVersion(NamedTuple):
    """The id of a plan: the boot of the planner's start, then a number that grows with every plan."""

    boot: int
    number: int

    def __str__(self) -> str:
        return f"{self.boot}.{self.number}"


def valid_name(text: str) -> str:
    """Return a name that may stand in a topic, derived from any text; empty if no character may."""
    return re.sub(r"[^a-z0-9_-]+", "-", text.lower()).strip("-_")[:64]


PART_MARK: Final = "."  # not in any name that people choose


def part_name(model: str, part: str) -> str:
    """Return the name of a further model served under the name of `model`; raise `BadNameError`."""
    return check_model(f"{model}{PART_MARK}{part}")


def whole_model(model: str) -> str:
    """Return the name that people use for a model: its own, or for a part the name of the whole."""
    return model.partition(PART_MARK)[0]


def check_model(name: str) -> str:
    """Return the name of a model or of a part of one; raise `BadNameError` for other names."""
    if isinstance(name, str) and name.count(PART_MARK) == 1 and len(name) <= LONGEST_NAME:
        for part in name.split(PART_MARK):
            check_name("model", part)
        return name
    return check_name("model", name)


def is_name(name: object) -> TypeGuard[str]:
    """Return whether `check_name` accepts a name."""
    return isinstance(name, str) and NAME.fullmatch(name) is not None and name not in RESERVED_NAMES


def check_name(kind: str, name: str) -> str:
    """Return `name` if it may stand in a topic; raise `BadNameError` otherwise.

    `kind` is the word for the message: device, client, site or model.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        example = valid_name(name) if isinstance(name, str) else ""
        raise BadNameError(
            f"{kind} name {name!r} cannot stand in an MQTT topic: use 1 to 64 of a-z 0-9 _ -, "
            f"beginning with a letter or digit{f', such as {example}' if example else ''}"
        )
    if name in RESERVED_NAMES:
        raise BadNameError(f"{kind} name {name!r} is reserved; choose another")
    return name
