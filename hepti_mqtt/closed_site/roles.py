"""Roles of users, and Mosquitto's access list; every topic contains its sender's name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple, get_args

from hepti_mqtt.protocol.topics import DROPPED_TOPIC, TOPIC_ROOT

Role = Literal["planner", "device", "client", "viewer", "home"]
AddedRole = Literal["device", "client", "viewer", "home"]  # a site has one planner
ROLES: Final[tuple[Role, ...]] = get_args(Role)


class AclRule(NamedTuple):
    """An access right to topics below the site; `{me}` is the user's name."""

    access: Literal["read", "write", "readwrite"]
    topic: str


def _rights(read: Iterable[str] = (), write: Iterable[str] = (), readwrite: Iterable[str] = ()) -> tuple[AclRule, ...]:
    return (
        *(AclRule("read", topic) for topic in read),
        *(AclRule("write", topic) for topic in write),
        *(AclRule("readwrite", topic) for topic in readwrite),
    )


# The topics of `hepti devices` and `hepti plan`, and of a user's measurement of the broker.
_EVERYBODY: Final = _rights(
    read=("dev/+/status", "dev/+/caps", "dev/+/hb", "planner/status/#", "plan/+/#", "evt/+", "home/+/+"),
    readwrite=("dev/{me}/probe",),
)

_CLIENT: Final = (
    *_rights(read=("infer/+/res/{me}/#",), write=("infer/+/req/{me}", "infer/+/text/{me}")),
    *_EVERYBODY,
)

_RIGHTS: Final[Mapping[Role, tuple[AclRule, ...]]] = {
    "planner": _rights(
        read=("dev/+/hb", "dev/+/up"),
        write=("dev/+/cmd", "work/+/+", "weights/+", "infer/+/res/#"),
        # The planner reads its own status and plans to detect another planner and outdated plans. Its name is not a
        # device name. It clears retained messages of others.
        readwrite=(
            *("planner/status", "plan/+", "evt/+", "home/+/+", "dev/doctor/probe"),
            *("dev/+/status", "dev/+/caps", "dev/+/use", "infer/+/req/+", "infer/+/text/+", "x/+/+/+/+"),
        ),
    ),
    "device": (
        *_rights(
            read=("dev/{me}/cmd", "work/+/+", "weights/{me}", "x/+/+/+/{me}", "x/+/+/+/all"),
            write=("dev/{me}/status", "dev/{me}/caps", "dev/{me}/hb", "dev/{me}/up", "x/+/+/{me}/+"),
        ),
        *_EVERYBODY,
    ),
    "client": _CLIENT,
    "viewer": _EVERYBODY,
    "home": (*_CLIENT, *_rights(write=("dev/+/use",))),
}


# Topics outside the site: the planner announces the site to Home Assistant and logs the broker's dropped messages.
_OUTSIDE: Final[Mapping[Role, tuple[AclRule, ...]]] = {
    "planner": _rights(read=("homeassistant/status", DROPPED_TOPIC), readwrite=("homeassistant/device/+/config",)),
    "home": _rights(read=("homeassistant/device/+/config",), readwrite=("homeassistant/status",)),
}


def acl_rules(role: Role, user: str) -> tuple[AclRule, ...]:
    """Return the rights of a user below its site."""
    return tuple(AclRule(right.access, right.topic.replace("{me}", user)) for right in _RIGHTS[role])


def acl_text(site: str, users: Mapping[str, Role]) -> str:
    """Return Mosquitto's access list; other users have no access. site: a name, or + for all sites of the broker."""
    lines = [
        "# Who may publish and read what. A device's user name is its id, a client's user name is its client name, so",
        "# that every topic names its sender and nobody can speak for another. `hepti site` writes this file.",
    ]
    for user, role in users.items():
        lines += ["", f"# {role}", f"user {user}"]
        lines += [f"topic {right.access} {TOPIC_ROOT}/{site}/{right.topic}" for right in acl_rules(role, user)]
        lines += [f"topic {right.access} {right.topic}" for right in _OUTSIDE.get(role, ())]
    return "\n".join(lines) + "\n"
