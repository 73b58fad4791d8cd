"""Control messages: small dataclasses, their codes on the wire, and checks of every field.

Between planner and agents a message is one msgpack array [code, field, field, ...]; codes are in `CODES`. What a person
may read (status, capabilities) is a JSON object. A heartbeat is a msgpack array without a code: its topic says what it
is. Unknown keys of a JSON object are ignored, so that a newer agent can say more, and what has a default may be left
out; arrays have exactly their fields.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, TypeVar

import msgpack

from hepti_mqtt.errors import BadNameError, WireError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.spec import PlainShape
from hepti_mqtt.wire import checks, peers
from hepti_mqtt.wire.checks import Plain
from hepti_mqtt.wire.described import Caps, Heartbeat, Status
from hepti_mqtt.wire.frames import MAGIC, Body, Frame
from hepti_mqtt.wire.frames import decode as decode_frame
from hepti_mqtt.wire.peers import Peer

MAX_MESSAGE_BYTES: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Prepare:
    """Planner to agent: make a plan ready (weights, kernels, subscriptions), then answer `Ready`.

    plan, spec: `to_dict` of Plan and ModelSpec. manifest: SHA-256 of the model's manifest. in_flight: requests that may
    be under way at once. shapes: of requests that are foreseen, the most urgent first; the Programs of the first
    `needed` of them are built before the device is ready, the others while no request runs. peers: who this device has
    a mesh route to or from.
    """

    txn: int
    plan: Plain
    spec: Plain
    manifest: bytes
    in_flight: int
    shapes: tuple[PlainShape, ...] = ()
    needed: int = 0
    peers: tuple[Peer, ...] = ()


@dataclass(frozen=True, slots=True)
class Activate:
    """Planner to agent: requests of this epoch may come."""

    txn: int
    model: str
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Release:
    """Planner to agent: forget this epoch; its frames are dead."""

    txn: int
    model: str
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Cancel:
    """Planner to agent: forget one request."""

    model: str
    epoch: Epoch
    admission: int


@dataclass(frozen=True, slots=True)
class Lease:
    """Planner to agent: compute these tasks of a request's bag; none: all are computed, leave what you have of them."""

    model: str
    epoch: Epoch
    admission: int
    tasks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drain:
    """Planner to agent: give up every plan, with what runs under it."""

    txn: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Agent to planner: the plan is loaded, and every subscription is acknowledged.

    digest: `Lowered.digest` of the longest request, by which the planner sees that both derive the same Programs.
    """

    txn: int
    model: str
    epoch: Epoch
    resident_bytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Progress:
    """Agent to planner: how much of the weights is there."""

    txn: int
    model: str
    epoch: Epoch
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Agent to planner: the plan cannot be made ready; `code` is that of an error class, missing_bytes 0 if unknown.

    peers: with code "mesh", those that the device cannot hear directly; the plan may have been ready before.
    """

    txn: int
    model: str
    epoch: Epoch
    code: str
    text: str
    missing_bytes: int
    peers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TileAsk:
    """Agent to planner: send these weight tiles, named by their SHA-256."""

    model: str
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """Agent to planner: one request cannot be answered here."""

    model: str
    epoch: Epoch
    admission: int
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class TaskDone:
    """Agent to planner: a task of a request's bag is computed and sent."""

    model: str
    epoch: Epoch
    admission: int
    task: int


Command = Prepare | Activate | Release | Cancel | Drain | Lease
UpMessage = Ready | Progress | Failed | TileAsk | RequestFailed | TaskDone
Message = Command | UpMessage

# Codes stand on the wire: only append. 1..99 go down to an agent, 100.. up to the planner.
CODES: Final[Mapping[int, type[Any]]] = {
    1: Prepare,
    2: Activate,
    3: Release,
    4: Cancel,
    5: Drain,
    6: Lease,
    100: Ready,
    101: Progress,
    102: Failed,
    103: TileAsk,
    104: RequestFailed,
    105: TaskDone,
}
_CODE_OF: Final = {cls: code for code, cls in CODES.items()}

Rules = Mapping[str, Callable[[Any], Any]]

_EPOCH_KEY: Final[Rules] = {"txn": checks.count, "model": checks.model_name, "epoch": checks.epoch}
_REQUEST_KEY: Final[Rules] = {"model": checks.model_name, "epoch": checks.epoch, "admission": checks.count}
_WHY: Final[Rules] = {"code": checks.text, "text": checks.text}
_RULES: Final[Mapping[type[Any], Rules]] = {
    Prepare: {
        "txn": checks.count,
        "plan": checks.plain,
        "spec": checks.plain,
        "manifest": checks.digest,
        "in_flight": checks.count,
        "shapes": checks.shapes,
        "needed": checks.count,
        "peers": peers.peers,
    },
    Activate: _EPOCH_KEY,
    Release: _EPOCH_KEY,
    Cancel: _REQUEST_KEY,
    Drain: {"txn": checks.count},
    Lease: {**_REQUEST_KEY, "tasks": checks.tasks},
    Ready: {**_EPOCH_KEY, "resident_bytes": checks.count, "digest": checks.programs_digest},
    Progress: {**_EPOCH_KEY, "done_bytes": checks.count, "total_bytes": checks.count},
    Failed: {**_EPOCH_KEY, **_WHY, "missing_bytes": checks.count, "peers": peers.names},
    TileAsk: {"model": checks.model_name, "hashes": checks.digests},
    RequestFailed: {**_REQUEST_KEY, **_WHY},
    TaskDone: {**_REQUEST_KEY, "task": checks.count},
    Status: {
        "state": checks.state,
        "boot": checks.boot,
        "doing": checks.text,
        "done": checks.count,
        "total": checks.count,
    },
    Caps: {
        "device": checks.device_name,
        "boot": checks.boot,
        **dict.fromkeys(("cores", "threads", "memory_budget_bytes", "rss_idle_bytes"), checks.count),
        "isa": checks.text,
        "version": checks.text,
        "curves": checks.plain,
        "largest_packet_bytes": checks.count,
        "mqtt": checks.protocol,
        "endpoint": peers.endpoint,
        "tile": checks.text,
    },
    Heartbeat: {
        "boot": checks.boot,
        "seq": checks.count,
        "cpu_other": checks.share,
        "free_bytes": checks.count,
        **dict.fromkeys(("temperature_c", "round_trip_s", "bandwidth_bytes_per_s"), checks.maybe_real),
        "slowdown": checks.positive,
        "rss_bytes": checks.count,
        "counters": checks.counters,
        "peers": peers.reports,
        "edges": peers.edges,
        **dict.fromkeys(("peer_frame_s", "peer_byte_s"), checks.maybe_real),
    },
}
# What may be left out of a JSON object, and what that means.
_ABSENT: Final[Mapping[type[Any], Mapping[str, Any]]] = {
    Caps: {"endpoint": None, "tile": ""},
    Status: {"doing": "", "done": 0, "total": 0},
}

for _cls, _rules in _RULES.items():  # a field without a check must not reach a peer
    if [entry.name for entry in fields(_cls)] != list(_rules):
        raise TypeError(f"{_cls.__name__}: fields and checks differ: {list(_rules)}")
if set(_RULES) - {Status, Caps, Heartbeat} != set(CODES.values()):
    raise TypeError("every control message needs a code and checks")

Known = TypeVar("Known")


def encode(message: Message) -> bytes:
    """Return the payload of a control message; raises `WireError` if a field is not what its peer would accept."""
    code = _CODE_OF.get(type(message))
    if code is None:
        raise WireError(f"{type(message).__name__} is not a control message")
    if isinstance(message, Failed | RequestFailed):  # whatever an error says, it must be told
        message = replace(message, text=checks.sendable(message.text))
    return _pack(message, [code])


def decode(payload: Body) -> Message:
    """Return the control message of a payload; raises `WireError` on anything else."""
    values = _unpack(payload)
    if not values or type(values[0]) is not int or values[0] not in CODES:
        raise WireError(f"a control message begins with a known code, not {values[:1]!r}; update the older program")
    message: Message = _build(CODES[values[0]], values[1:])
    return message


def decode_up(payload: Body) -> Message | Frame:
    """Return what an agent sent up: a frame if the payload begins with the frames' magic, else a control message."""
    return decode_frame(payload) if bytes(payload[: len(MAGIC)]) == MAGIC else decode(payload)


def encode_heartbeat(heartbeat: Heartbeat) -> bytes:
    """Return the payload of a heartbeat; raises `WireError` if a field is out of range."""
    return _pack(heartbeat, [])


def decode_heartbeat(payload: Body) -> Heartbeat:
    """Return the heartbeat of a payload; raises `WireError` on anything else."""
    return _build(Heartbeat, _unpack(payload))


def encode_status(status: Status) -> bytes:
    """Return the JSON of a status; raises `WireError` if a field is out of range."""
    return _to_json(status)


def decode_status(payload: Body) -> Status:
    """Return the status of a JSON payload; raises `WireError` on anything else."""
    return _from_json(Status, payload)


def encode_caps(caps: Caps) -> bytes:
    """Return the JSON of a device's capabilities; raises `WireError` if a field is out of range."""
    return _to_json(caps)


def decode_caps(payload: Body) -> Caps:
    """Return the capabilities of a JSON payload; raises `WireError` on anything else."""
    return _from_json(Caps, payload)


def _pack(message: object, head: list[Any]) -> bytes:
    _verify(message)
    values = [getattr(message, entry.name) for entry in fields(message)]  # type: ignore[arg-type]
    try:
        payload: bytes = msgpack.packb(head + values, default=_plain)
    except (ValueError, TypeError, OverflowError) as error:
        raise WireError(f"{type(message).__name__} cannot be packed: {error}") from error
    return _limit(message, payload)


def _plain(value: object) -> list[Any]:
    if isinstance(value, PlainShape):
        return checks.plain_shape(value)
    if isinstance(value, Peer):
        return list(peers.plain(value))
    raise TypeError(f"{type(value).__name__} is no plain data")


def _unpack(payload: Body) -> list[Any]:
    if len(payload) > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {len(payload)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    try:
        values = msgpack.unpackb(payload, strict_map_key=True)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise WireError(f"the payload is not msgpack: {error!r}") from error
    if type(values) is not list:
        raise WireError("the payload is not a msgpack array")
    return values


def _to_json(message: Any) -> bytes:
    _verify(message)
    try:
        absent = _ABSENT.get(type(message), {})
        said = {key: value for key, value in asdict(message).items() if key not in absent or value != absent[key]}
        payload = json.dumps(said, allow_nan=False).encode()
    except (ValueError, TypeError) as error:
        raise WireError(f"{type(message).__name__} cannot be written as JSON: {error}") from error
    return _limit(message, payload)


def _from_json(cls: type[Known], payload: Body) -> Known:
    if len(payload) > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {len(payload)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    try:
        values = json.loads(bytes(payload))
    except (ValueError, RecursionError) as error:
        raise WireError(f"the payload is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise WireError("the payload is not a JSON object")
    values = {**_ABSENT.get(cls, {}), **values}
    try:
        return _build(cls, [values[name] for name in _RULES[cls]])
    except KeyError as error:
        raise WireError(f"{cls.__name__} lacks {error}") from error


def _limit(message: object, payload: bytes) -> bytes:
    if len(payload) > MAX_MESSAGE_BYTES:
        raise WireError(f"{type(message).__name__} has {len(payload)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    return payload


def _verify(message: object) -> None:
    for name, check in _RULES[type(message)].items():
        _checked(type(message), name, check, getattr(message, name))


def _build(cls: type[Known], values: list[Any]) -> Known:
    rules = _RULES[cls]
    if len(values) != len(rules):
        raise WireError(f"{cls.__name__} has {len(rules)} fields, not {len(values)}; update the older program")
    return cls(*(_checked(cls, name, check, value) for (name, check), value in zip(rules.items(), values, strict=True)))


def _checked(cls: type[Any], name: str, check: Callable[[Any], Any], value: Any) -> Any:
    try:
        return check(value)
    except (ValueError, BadNameError) as error:
        raise WireError(f"{cls.__name__}.{name}: {error}") from error
