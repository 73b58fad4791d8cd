"""What devices are told of each other's endpoints, and what they tell of the links between them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from ipaddress import ip_address
from typing import Any, Final, Literal, NamedTuple, TypeVar

import msgpack

from hepti_mqtt.errors import BadNameError, WireError
from hepti_mqtt.ids import PlanVersion, check_name
from hepti_mqtt.plan import KEYS, Plan
from hepti_mqtt.protocol import plausible
from hepti_mqtt.protocol.frames import MAGIC, Body, Frame
from hepti_mqtt.protocol.frames import decode as decode_frame
from hepti_mqtt.protocol.plausible import Plain
from hepti_mqtt.spec import PlainShape

MAX_PEERS: Final = 64
MAX_TOKEN: Final = 128
MAX_TROUBLE: Final = 200
FINGERPRINT_DIGITS: Final = 64


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a device is an MQTT endpoint for what it publishes itself: an address, never a name, and a port.

    fingerprint: SHA-256 of its certificate in hex, "" without TLS.
    """

    host: str
    port: int
    fingerprint: str = ""

    @property
    def loopback(self) -> bool:
        """Return whether only processes of its own machine reach it."""
        return ip_address(self.host).is_loopback


@dataclass(frozen=True, slots=True)
class Peer:
    """A device that another one has a mesh route to or from, under one epoch.

    token_out: with which it comes to the other's endpoint; token_in: with which the other one comes to it. Each is ""
    where the broker carries what travels that way.
    """

    device: str
    endpoint: Endpoint
    token_out: str
    token_in: str


class LinkReport(NamedTuple):
    """The way to a peer as measured: round trip, and the rate where it could be told."""

    round_trip_s: float
    bytes_per_s: float | None


class PeerStats(NamedTuple):
    """What went between a device and one of its peers, since the boot.

    frames and bytes, in and out; queued_bytes: that wait now, because the peer is slow to take them; dropped: messages
    for which there was no room; reconnections: to its endpoint. joined: 1 if this device hears the peer now; trouble:
    why it does not, in words.
    """

    frames_in: int
    bytes_in: int
    frames_out: int
    bytes_out: int
    queued_bytes: int
    dropped: int
    reconnections: int
    joined: int
    trouble: str = ""


def plain(value: object) -> Any:
    """Return an Endpoint or a Peer as plain data."""
    if isinstance(value, Peer):
        return [value.device, value.endpoint.host, value.endpoint.port, value.endpoint.fingerprint, *_tokens(value)]
    if isinstance(value, Endpoint):
        return asdict(value)
    return value


def endpoint(value: Any) -> Endpoint | None:
    """Return an endpoint from its plain form, or None."""
    if value is None:
        return None
    told = plain(value)
    if not isinstance(told, dict) or not {"host", "port", "fingerprint"} <= told.keys():
        raise ValueError("not an endpoint with host, port and fingerprint")
    return _endpoint(told["host"], told["port"], told["fingerprint"])


def peers(value: Any) -> tuple[Peer, ...]:
    """Return a bounded tuple of peers, from their plain form or as they are."""
    if type(value) not in (list, tuple) or len(value) > MAX_PEERS:
        raise ValueError(f"not a list of at most {MAX_PEERS} peers")
    return tuple(_peer(plain(entry)) for entry in value)


def names(value: Any) -> tuple[str, ...]:
    """Return a bounded tuple of devices; raises `BadNameError` too."""
    if type(value) not in (list, tuple) or len(value) > MAX_PEERS:
        raise ValueError(f"not a list of at most {MAX_PEERS} devices")
    return tuple(plausible.device_name(entry) for entry in value)


def reports(value: Any) -> dict[str, LinkReport]:
    """Return the measured links of a heartbeat by peer; raises `BadNameError` too."""
    found = {}
    for name, entry in _by_peer(value, 2).items():
        rate = entry[1]
        found[name] = LinkReport(plausible.positive(entry[0]), None if rate is None else plausible.positive(rate))
    return found


def peer_stats(value: Any) -> dict[str, PeerStats]:
    """Return the counts of a heartbeat by peer; raises `BadNameError` too."""
    found = {}
    for name, (*counts, trouble) in _by_peer(value, len(PeerStats._fields)).items():
        found[name] = PeerStats._make((*map(plausible.count, counts), plausible.text(trouble)[:MAX_TROUBLE]))
    return found


def _by_peer(value: Any, fields: int) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > MAX_PEERS:
        raise ValueError(f"not a map of at most {MAX_PEERS} peers")
    if not all(isinstance(entry, list | tuple) and len(entry) == fields for entry in value.values()):
        raise ValueError(f"not {fields} numbers for each peer")
    return {check_name("device", name): entry for name, entry in value.items()}


def _peer(value: Any) -> Peer:
    if type(value) not in (list, tuple) or len(value) != 6:
        raise ValueError("not a peer [device, host, port, fingerprint, token, token]")
    device, host, port, fingerprint, token_out, token_in = value
    return Peer(plausible.device_name(device), _endpoint(host, port, fingerprint), _token(token_out), _token(token_in))


def _endpoint(host: Any, port: Any, fingerprint: Any) -> Endpoint:
    if type(host) is not str or type(port) is not int or not 0 < port < 65_536:
        raise ValueError("not a host and a port")
    ip_address(plausible.whole(host))  # a name would be looked up by whoever connects, which may take seconds
    if type(fingerprint) is not str or (fingerprint and not _hex(fingerprint)):
        raise ValueError("not the fingerprint of a certificate")
    return Endpoint(host, port, fingerprint)


def _hex(text: str) -> bool:
    return len(text) == FINGERPRINT_DIGITS and set(text) <= set("0123456789abcdef")


def _token(value: Any) -> str:
    if type(value) is not str or len(value) > MAX_TOKEN or not value.isascii():
        raise ValueError(f"not a token of at most {MAX_TOKEN} characters")
    return value


def _tokens(peer: Peer) -> tuple[str, str]:
    return peer.token_out, peer.token_in


# ----------------------------------------------------------------------------------------------------------------------
# What devices and the planner tell of themselves: their state, what they can do, how they are.


@dataclass(frozen=True, slots=True)
class Status:
    """Retained word of a device or the planner about itself; boot tells a late will from a new start.

    A device that is starting says what it is doing, and how much of it is done, in steps; of other states they are
    empty.
    """

    state: Literal["online", "offline", "starting"]
    boot: int
    doing: str = ""
    done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Caps:
    """What a device can do, retained.

    curves: measured time curves, opaque here. largest_packet_bytes: 0 if not yet measured. mqtt: protocol of its
    connection, 4 (3.1.1) or 5. endpoint: where peers read from it directly, None where they cannot.
    """

    device: str
    boot: int
    cores: int
    threads: int
    memory_budget_bytes: int
    rss_idle_bytes: int
    isa: str
    version: str
    curves: Plain
    largest_packet_bytes: int
    mqtt: int
    endpoint: Endpoint | None = None


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What changes on a device from second to second.

    cpu_other: 0..1 of all cores, without the agent and a local broker. slowdown: observed over predicted op time, 1 is
    as measured. counters: bytes, packets, drops, ... since the boot. peers: the ways to peers, as measured; edges: what
    went there and came from them. peer_frame_s, peer_byte_s: what a frame from or to a peer costs the device, and each
    byte of it, None until there were some.
    """

    boot: int
    seq: int
    cpu_other: float
    free_bytes: int
    temperature_c: float | None
    round_trip_s: float | None
    bandwidth_bytes_per_s: float | None
    slowdown: float
    rss_bytes: int
    counters: Mapping[str, int] = field(default_factory=dict)
    peers: Mapping[str, LinkReport] = field(default_factory=dict)
    edges: Mapping[str, PeerStats] = field(default_factory=dict)
    peer_frame_s: float | None = None
    peer_byte_s: float | None = None


# ----------------------------------------------------------------------------------------------------------------------
# Control messages: small dataclasses, their codes on the wire, and checks of every field.
#
# Between planner and agents a message is one msgpack array [code, field, field, ...]; codes are in `CODES`. What a
# person
# may read (status, capabilities) is a JSON object. A heartbeat is a msgpack array without a code: its topic says what
# it
# is. Unknown keys of a JSON object are ignored, so that a newer agent can say more, and what has a default may be left
# out; arrays have exactly their fields.


MAX_MESSAGE_BYTES: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Prepare:
    """Planner to agent: make a plan ready (weights, kernels, subscriptions), then answer `Ready`.

    plan, spec: `to_dict` of Plan and ModelSpec. manifest: SHA-256 of the model's manifest. in_flight: requests that may
    be under way at once. shapes: of requests that are foreseen, the most urgent first; the Programs of the first
    `build_first` of them are built before the device is ready, the others while no request runs. peers: who this
    device has a mesh route to or from.
    """

    transaction_id: int
    plan: Plain
    spec: Plain
    manifest: bytes
    in_flight: int
    shapes: tuple[PlainShape, ...] = ()
    build_first: int = 0
    peers: tuple[Peer, ...] = ()


@dataclass(frozen=True, slots=True)
class Activate:
    """Planner to agent: requests of this epoch may come."""

    transaction_id: int
    model: str
    plan_version: PlanVersion


@dataclass(frozen=True, slots=True)
class Release:
    """Planner to agent: forget this epoch; its frames are dead."""

    transaction_id: int
    model: str
    plan_version: PlanVersion


@dataclass(frozen=True, slots=True)
class Cancel:
    """Planner to agent: forget one request."""

    model: str
    plan_version: PlanVersion
    run_id: int


@dataclass(frozen=True, slots=True)
class LeaseTasks:
    """Planner to agent: compute these tasks of a request's bag; none: all are computed, leave what you have of them."""

    model: str
    plan_version: PlanVersion
    run_id: int
    tasks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReleaseAll:
    """Planner to agent: give up every plan, with what runs under it."""

    transaction_id: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Agent to planner: the plan is loaded, and every subscription is acknowledged.

    digest: `Lowered.digest` of the longest request, by which the planner sees that both derive the same Programs.
    """

    transaction_id: int
    model: str
    plan_version: PlanVersion
    resident_bytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class PrepareProgress:
    """Agent to planner: how much of the weights is there."""

    transaction_id: int
    model: str
    plan_version: PlanVersion
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class PrepareFailed:
    """Agent to planner: the plan cannot be made ready; `code` is that of an error class, missing_bytes 0 if unknown.

    peers: with code "mesh", those that the device cannot hear directly; the plan may have been ready before.
    """

    transaction_id: int
    model: str
    plan_version: PlanVersion
    code: str
    text: str
    missing_bytes: int
    peers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestTiles:
    """Agent to planner: send these weight tiles, named by their SHA-256."""

    model: str
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class RunFailed:
    """Agent to planner: one request cannot be answered here."""

    model: str
    plan_version: PlanVersion
    run_id: int
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class TaskDone:
    """Agent to planner: a task of a request's bag is computed and sent."""

    model: str
    plan_version: PlanVersion
    run_id: int
    task: int


Command = Prepare | Activate | Release | Cancel | ReleaseAll | LeaseTasks
Report = Ready | PrepareProgress | PrepareFailed | RequestTiles | RunFailed | TaskDone
Message = Command | Report

# Codes stand on the wire: only append. 1..99 go down to an agent, 100.. up to the planner.
CODES: Final[Mapping[int, type[Any]]] = {
    1: Prepare,
    2: Activate,
    3: Release,
    4: Cancel,
    5: ReleaseAll,
    6: LeaseTasks,
    100: Ready,
    101: PrepareProgress,
    102: PrepareFailed,
    103: RequestTiles,
    104: RunFailed,
    105: TaskDone,
}
_CODE_OF: Final = {cls: code for code, cls in CODES.items()}

Rules = Mapping[str, Callable[[Any], Any]]

_EPOCH_KEY: Final[Rules] = {
    "transaction_id": plausible.count,
    "model": plausible.model_name,
    "plan_version": plausible.epoch,
}
_REQUEST_KEY: Final[Rules] = {
    "model": plausible.model_name,
    "plan_version": plausible.epoch,
    "run_id": plausible.count,
}
_WHY: Final[Rules] = {"code": plausible.text, "text": plausible.text}
_RULES: Final[Mapping[type[Any], Rules]] = {
    Prepare: {
        "transaction_id": plausible.count,
        "plan": plausible.plain,
        "spec": plausible.plain,
        "manifest": plausible.digest,
        "in_flight": plausible.count,
        "shapes": plausible.shapes,
        "build_first": plausible.count,
        "peers": peers,
    },
    Activate: _EPOCH_KEY,
    Release: _EPOCH_KEY,
    Cancel: _REQUEST_KEY,
    ReleaseAll: {"transaction_id": plausible.count},
    LeaseTasks: {**_REQUEST_KEY, "tasks": plausible.tasks},
    Ready: {**_EPOCH_KEY, "resident_bytes": plausible.count, "digest": plausible.programs_digest},
    PrepareProgress: {**_EPOCH_KEY, "done_bytes": plausible.count, "total_bytes": plausible.count},
    PrepareFailed: {**_EPOCH_KEY, **_WHY, "missing_bytes": plausible.count, "peers": names},
    RequestTiles: {"model": plausible.model_name, "hashes": plausible.digests},
    RunFailed: {**_REQUEST_KEY, **_WHY},
    TaskDone: {**_REQUEST_KEY, "task": plausible.count},
    Status: {
        "state": plausible.state,
        "boot": plausible.boot,
        "doing": plausible.text,
        "done": plausible.count,
        "total": plausible.count,
    },
    Caps: {
        "device": plausible.device_name,
        "boot": plausible.boot,
        **dict.fromkeys(("cores", "threads", "memory_budget_bytes", "rss_idle_bytes"), plausible.count),
        "isa": plausible.text,
        "version": plausible.text,
        "curves": plausible.plain,
        "largest_packet_bytes": plausible.count,
        "mqtt": plausible.protocol,
        "endpoint": endpoint,
    },
    Heartbeat: {
        "boot": plausible.boot,
        "seq": plausible.count,
        "cpu_other": plausible.share,
        "free_bytes": plausible.count,
        **dict.fromkeys(("temperature_c", "round_trip_s", "bandwidth_bytes_per_s"), plausible.maybe_real),
        "slowdown": plausible.positive,
        "rss_bytes": plausible.count,
        "counters": plausible.counters,
        "peers": reports,
        "edges": peer_stats,
        **dict.fromkeys(("peer_frame_s", "peer_byte_s"), plausible.maybe_real),
    },
}
# What may be left out of a JSON object, and what that means.
_DEFAULTS: Final[Mapping[type[Any], Mapping[str, Any]]] = {
    Caps: {"endpoint": None},
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
    if isinstance(message, PrepareFailed | RunFailed):  # whatever an error says, it must be told
        message = replace(message, text=plausible.sendable(message.text))
    return _pack(message, [code])


def decode(payload: Body) -> Message:
    """Return the control message of a payload; raises `WireError` on anything else."""
    values = _unpack(payload)
    if not values or type(values[0]) is not int or values[0] not in CODES:
        raise WireError(f"a control message begins with a known code, not {values[:1]!r}; update the older program")
    message: Message = _build(CODES[values[0]], values[1:])
    return message


def decode_report(payload: Body) -> Message | Frame:
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
        return plausible.plain_shape(value)
    if isinstance(value, Peer):
        return list(plain(value))
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
        absent = _DEFAULTS.get(type(message), {})
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
    values = {**_DEFAULTS.get(cls, {}), **values}
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


# ----------------------------------------------------------------------------------------------------------------------
# What the planner tells users in maps: the keys of a model's record and of an answer, and what one of them lacks.
#
# A planner of another version may leave out what this one reads. What it says beyond is nobody's loss.


RECORD: Final = (
    "boot", "active", "preparing", "pinned", "pinned_preparing", "spec", "directory", "in_flight", "unused",
    "candidates", "progress", "reason", "story", "error",
)  # fmt: skip
_KINDS: Final = {
    **dict.fromkeys(("pinned", "pinned_preparing", "candidates", "story"), list),
    **dict.fromkeys(("unused", "progress"), Mapping),
}
CANDIDATE: Final = (
    "name", "devices", "route", "wire", "wire_error", "predicted_ms", "expected_ms", "bytes", "feasible", "missing",
)  # fmt: skip
STEP: Final = ("time", "plan", "from", "to", "cause")
ERROR: Final = ("code", "message")
# Few plans have replicas.
PLAN: Final = tuple(KEYS.get(f.name, f.name) for f in fields(Plan) if f.name != "replicas")
# Of an answer what `hepti infer` shows.
ANSWER: Final = (
    "id", "model", "result", "plan", "tokens", "compute_ms", "wait_ms", "bytes_on_wire", "predicted_bytes",
    "predicted_ms",
)  # fmt: skip
TOKEN: Final = ("index", "token", "text")  # of each of them, before the answer
ANSWER_PLAN: Final = ("id", "strategy", "options", "wire", "weights", "route", "devices")


def version_mismatch(what: str) -> WireError:
    """Return the error for what a planner tells otherwise than this version reads it."""
    return WireError(f"{what}: the planner is of another version than this program; update one of them")


def missing_record_key(record: Mapping[str, Any]) -> str | None:
    """Return what a record of a model's plans lacks, None if it has all that this version reads."""
    for key in RECORD:
        if key not in record or not isinstance(record[key], _KINDS.get(key, object)):
            return key
    own = (record["active"], record["preparing"])
    plans = [plan for plan in (*own, *record["pinned"], *record["pinned_preparing"]) if plan is not None]
    errors = [] if record["error"] is None else [record["error"]]
    parts = ((plans, PLAN), (record["candidates"], CANDIDATE), (record["story"], STEP), (errors, ERROR))
    return next((missing for told, keys in parts for part in told if (missing := _missing(part, keys))), None)


def missing_answer_key(answer: Mapping[str, Any]) -> str | None:
    """Return what an answer lacks, None if it has all that this version reads."""
    return _missing(answer, ANSWER) or _missing(answer["plan"], ANSWER_PLAN)


def _missing(part: Any, keys: Sequence[str]) -> str | None:
    """Return the first of `keys` that a map does not have; of what is no map that is the first."""
    return next((key for key in keys if not isinstance(part, Mapping) or key not in part), None)
