"""Messages between planner, agents and clients, except frames; docs/reference/wire.md is normative.

A control message is a msgpack array [code, field, field, ...] with a code of `CODES`, a heartbeat an array without a
code. Status and capabilities are JSON objects. For compatible versions, a decoder ignores unknown JSON keys and accepts
missing fields with a default; arrays have exactly their fields. A field is declared only in its class;
`plausible.FIELDS` defines its valid values by its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from ipaddress import ip_address
from typing import Any, Final, Literal, NamedTuple, TypeVar, get_args

import msgpack

from hepti_mqtt import __version__
from hepti_mqtt.core.errors import BadNameError, WireError
from hepti_mqtt.core.ids import PlanVersion, Start, check_name
from hepti_mqtt.core.plan import KEYS, OPTIONAL_KEYS, Plan
from hepti_mqtt.core.spec import PlainShape
from hepti_mqtt.protocol import keys, plausible
from hepti_mqtt.protocol.frames import MAGIC, Body, Frame, check_shape, want_number, want_of
from hepti_mqtt.protocol.frames import decode as decode_frame
from hepti_mqtt.protocol.plausible import MAX_PEERS, Check, Plain

MAX_MESSAGE_BYTES: Final = 1_000_000
MAX_SELF_BYTES: Final = 65_536  # of a status, caps or heartbeat
MAX_SHAPES: Final = 16
MAX_SHAPE_NUMBERS: Final = 4096  # lengths and mask rows of one shape
MAX_TOKEN: Final = 128
MAX_TROUBLE: Final = 200
FINGERPRINT_DIGITS: Final = 64


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a device's MQTT endpoint for its own messages."""

    host: str  #: an IP address
    port: int
    fingerprint: str = ""  #: SHA-256 of its certificate in hex, "" without TLS

    @property
    def loopback(self) -> bool:
        """Return whether the host is a loopback address."""
        return ip_address(self.host).is_loopback


@dataclass(frozen=True, slots=True)
class Peer:
    """A device's peer with a mesh route under one plan version."""

    device: str
    endpoint: Endpoint
    token_out: str  #: for connections to the peer's endpoint, "" if the broker carries this direction
    token_in: str  #: for connections of the peer to the device, "" if the broker carries this direction


class LinkReport(NamedTuple):
    """The measured link to a peer."""

    round_trip_s: float
    bytes_per_s: float | None


class PeerStats(NamedTuple):
    """The traffic between a device and a peer since the boot."""

    frames_in: int
    bytes_in: int
    frames_out: int
    bytes_out: int
    queued_bytes: int  #: now, because the peer reads slowly
    dropped: int  #: messages to the peer, because the queue was full
    reconnections: int  #: to the peer's endpoint
    joined: int  #: 1 if the device is subscribed at the peer
    timed_bytes: int = 0  #: received while the device only waited for the rest of a tensor
    timed_us: int = 0  #: duration of these waits
    trouble: str = ""  #: reason if not joined


@dataclass(frozen=True, slots=True)
class Status:
    """The retained state of a device or the planner."""

    state: Literal["online", "offline", "starting"]
    boot: int  #: of the process's `ids.Start`
    doing: str = ""  #: activity of a starting device
    done: int = 0  #: steps of this activity
    total: int = 0
    version: str = ""  #: of Hepti, "" before 0.2.0
    public_key: str = ""  #: of a planner, see `keys`
    term: int = 0  #: of the process's `ids.Start`
    reason: str = ""  #: for "offline"; empty in a will, i.e. after a crash

    @property
    def start(self) -> Start:
        """Return the start of the publishing process."""
        return Start(self.term, self.boot)


STOPPED: Final = "stopped"  # reason of a device after a normal stop
QUESTION: Final = Status("offline", 0)  # published, not retained, to request a running process's status


@dataclass(frozen=True, slots=True)
class Caps:
    """The retained capabilities of a device."""

    device: str
    boot: int
    cores: int
    threads: int
    memory_budget_bytes: int
    rss_idle_bytes: int
    isa: str
    version: str
    curves: Plain  #: measured time curves
    largest_packet_bytes: int  #: 0 if not measured yet
    mqtt: int  #: version of its connection, 4 (3.1.1) or 5
    endpoint: Endpoint | None = None  #: None without a mesh
    public_key: str = ""  #: see `keys`


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A device's periodic measurements."""

    boot: int
    seq: int
    cpu_other: float  #: load of other processes without a local broker, 0..1 of all cores
    free_bytes: int
    temperature_c: float | None
    round_trip_s: float | None
    bandwidth_bytes_per_s: float | None
    slowdown: float  #: observed op time over predicted op time
    rss_bytes: int
    counters: Mapping[str, int] = field(default_factory=dict)  #: bytes, packets, drops, ... since the boot
    peers: Mapping[str, LinkReport] = field(default_factory=dict)  #: links by peer
    edges: Mapping[str, PeerStats] = field(default_factory=dict)  #: traffic by peer
    peer_frame_s: float | None = None  #: processor time per frame from or to peers, None without frames
    peer_byte_s: float | None = None  #: processor time per byte of these frames
    clock_s: float = 0.0  #: wall clock in Unix time, for users only; 0 if unknown


# -- control messages ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Transaction:
    """A message about a step of a plan: prepare, activate or release."""

    transaction_id: int
    model: str
    plan_version: PlanVersion


@dataclass(frozen=True, slots=True)
class _PlanMessage:
    """A message about a plan."""

    model: str
    plan_version: PlanVersion


@dataclass(frozen=True, slots=True)
class _RunMessage(_PlanMessage):
    """A message about a run."""

    run_id: int


@dataclass(frozen=True, slots=True)
class Prepare:
    """Planner to agent: prepare a plan (weights, kernels, subscriptions), then answer `Ready`."""

    transaction_id: int
    plan: Plain  #: `Plan.to_dict`
    spec: Plain  #: `ModelSpec.to_dict`
    manifest: bytes  #: SHA-256 of the model's manifest
    in_flight: int  #: concurrent runs
    shapes: tuple[PlainShape, ...] = ()  #: of expected requests, the most urgent first
    build_first: int = 0  #: Programs to build before `Ready`; idle devices build the others
    peers: tuple[Peer, ...] = ()  #: devices with a mesh route to or from this device
    key: bytes = b""  #: of the plan's frames, encrypted by `Channel.wrapped`; empty without tags
    checked: keys.Checked = "header"  #: part of a frame that its tag covers
    share: float = 0.0  #: fraction of device and link that loading may take from runs; 0: as background work


@dataclass(frozen=True, slots=True)
class Activate(_Transaction):
    """Planner to agent: accept runs under this plan version."""


@dataclass(frozen=True, slots=True)
class Release(_Transaction):
    """Planner to agent: release this plan version and drop its frames."""


@dataclass(frozen=True, slots=True)
class Cancel(_RunMessage):
    """Planner to agent: cancel a run."""


@dataclass(frozen=True, slots=True)
class LeaseTasks(_RunMessage):
    """Planner to agent: compute these tasks of a run's queue; an empty tuple ends the run's tasks."""

    tasks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HandOver(_RunMessage):
    """Planner to agent: stop a run before a block and send its tensors to the devices that continue it.

    The receiving device has no part in the new plan.
    """

    block: int
    heir: int  #: run that continues under the new plan
    plan: Plain  #: the new plan


@dataclass(frozen=True, slots=True)
class EndSessions(_PlanMessage):
    """Planner to agent: release the KV caches of these sessions of a plan."""

    sessions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReleaseAll:
    """Planner to agent: release every plan and cancel its runs."""

    transaction_id: int


@dataclass(frozen=True, slots=True)
class Ready(_Transaction):
    """Agent to planner: the plan is loaded and all subscriptions are acknowledged."""

    resident_bytes: int
    digest: bytes  #: `Lowered.digest` of the longest request, for comparison with the planner's digest


@dataclass(frozen=True, slots=True)
class PrepareProgress(_Transaction):
    """Agent to planner: loaded bytes of a plan's weights; 0 of 0: the device answers, but has loaded nothing yet."""

    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class PrepareFailed(_Transaction):
    """Agent to planner: the plan cannot be prepared."""

    code: str  #: of an error, or `memory`, `mesh` or `forgotten`
    text: str
    missing_bytes: int  #: 0 if unknown
    peers: tuple[str, ...] = ()  #: unreachable peers with code "mesh"; the plan may have been ready before


@dataclass(frozen=True, slots=True)
class RequestTiles:
    """Agent to planner: send these weight tiles."""

    model: str
    hashes: tuple[bytes, ...]  #: SHA-256
    share: float = 0.0  #: fraction of the device's link that tiles may take from runs; 0: as background work


@dataclass(frozen=True, slots=True)
class CachedTiles:
    """Agent to planner: the cached tiles of a model, and the rates of loading tiles with the whole processor."""

    model: str
    manifest: bytes  #: SHA-256 of the manifest that defines the order of tiles
    tiles: bytes  #: bitmap of tiles, most significant bit first
    read_bytes_per_s: float = 0.0  #: from the cache (read, verify, pack); 0: not measured
    receive_bytes_per_s: float = 0.0  #: over the network (verify, store, pack); 0: not measured


class KeptSession(NamedTuple):
    """A KV cache of an earlier plan version on a device."""

    origin: PlanVersion  #: the earlier plan version
    number: int  #: of the session, under both plan versions
    rows: int


@dataclass(frozen=True, slots=True)
class KeptSessions(_PlanMessage):
    """Agent to planner: sessions of earlier plan versions that continue under this plan version."""

    sessions: tuple[KeptSession, ...]


@dataclass(frozen=True, slots=True)
class RunFailed(_RunMessage):
    """Agent to planner: a run failed on this device."""

    #: of an error, or of a loss: `wire` (an invalid frame), `session` (KV caches), `link` (a connection to a peer),
    #: `passed` (too late for a handover)
    code: str
    text: str
    sessions: tuple[int, ...] = ()  #: sessions of the run that the device has lost


@dataclass(frozen=True, slots=True)
class TaskDone(_RunMessage):
    """Agent to planner: a task of a run's queue is computed and sent."""

    task: int


@dataclass(frozen=True, slots=True)
class RunProgress(_RunMessage):
    """Agent to planner: the current block of a long run."""

    block: int


Command = Prepare | Activate | Release | Cancel | ReleaseAll | LeaseTasks | HandOver | EndSessions
Prepared = Ready | PrepareProgress | PrepareFailed
Report = Prepared | RequestTiles | RunFailed | TaskDone | RunProgress | CachedTiles | KeptSessions
Message = Command | Report

# Codes are part of the wire format: only append. 1..99: planner to agent, 100..: agent to planner.
CODES: Final[Mapping[int, type[Any]]] = {
    1: Prepare,
    2: Activate,
    3: Release,
    4: Cancel,
    5: ReleaseAll,
    6: LeaseTasks,
    7: HandOver,
    8: EndSessions,
    100: Ready,
    101: PrepareProgress,
    102: PrepareFailed,
    103: RequestTiles,
    104: RunFailed,
    105: TaskDone,
    106: RunProgress,
    107: CachedTiles,
    108: KeptSessions,
}
_CODE_OF: Final = {cls: code for code, cls in CODES.items()}

Decoded = TypeVar("Decoded")


# -- structured fields -----------------------------------------------------------------------------------------------


def endpoint(value: Any) -> Endpoint | None:
    """Return an endpoint from an endpoint, its plain form or None. Raises ValueError."""
    if value is None:
        return None
    entry = asdict(value) if isinstance(value, Endpoint) else value
    if not isinstance(entry, dict) or not {"host", "port", "fingerprint"} <= entry.keys():
        raise ValueError("not an endpoint with host, port and fingerprint")
    return _endpoint(entry["host"], entry["port"], entry["fingerprint"])


def _endpoint(host: Any, port: Any, fingerprint: Any) -> Endpoint:
    if type(host) is not str:
        raise ValueError("not a host")
    ip_address(plausible.encodable(host))  # a name is refused, because its look-up may take a peer seconds
    plausible.number("peer.port")(port)
    if type(fingerprint) is not str or (fingerprint and not _is_fingerprint(fingerprint)):
        raise ValueError("not the fingerprint of a certificate")
    return Endpoint(host, port, fingerprint)


def _is_fingerprint(text: str) -> bool:
    return len(text) == FINGERPRINT_DIGITS and set(text) <= set("0123456789abcdef")


def _plain_peer(peer: Peer) -> list[Any]:
    at = peer.endpoint
    return [peer.device, at.host, at.port, at.fingerprint, peer.token_out, peer.token_in]


def _peer(value: Any) -> Peer:
    entry = _plain_peer(value) if isinstance(value, Peer) else value
    if type(entry) not in (list, tuple) or len(entry) != 6:
        raise ValueError("not a peer [device, host, port, fingerprint, token, token]")
    device, host, port, fingerprint, token_out, token_in = entry
    return Peer(plausible.device_name(device), _endpoint(host, port, fingerprint), _token(token_out), _token(token_in))


def _token(value: Any) -> str:
    if type(value) is not str or len(value) > MAX_TOKEN or not value.isascii():
        raise ValueError(f"not a token of at most {MAX_TOKEN} characters")
    return value


def _public_key(value: Any) -> str:
    if value != "" and not keys.is_public_key(value):
        raise ValueError("not a public key")
    return str(value)


def _frame_key(value: Any) -> bytes:
    if type(value) is not bytes or len(value) not in (0, keys.KEY_BYTES):
        raise ValueError(f"not a key of {keys.KEY_BYTES} bytes")
    return value


def _plain_shape(shape: PlainShape) -> list[Any]:
    return [want_number(shape), shape.session_rows, list(shape.sizes), list(shape.mask_rows)]


def _shape(value: Any) -> PlainShape:
    entry = _plain_shape(value) if isinstance(value, PlainShape) else value
    if type(entry) is not list or len(entry) != 4:
        raise ValueError("not a shape [want, cache, lengths, mask rows]")
    want, cache, lengths, masks = entry
    if type(lengths) is not list or type(masks) is not list or len(lengths) + len(masks) > MAX_SHAPE_NUMBERS:
        raise ValueError(f"a shape's lengths and mask rows are not lists of {MAX_SHAPE_NUMBERS} numbers together")
    count = plausible.COUNT
    kind, added = want_of(count(want))
    shape = PlainShape(tuple(map(count, lengths)), kind, tuple(map(count, masks)), count(cache), added)
    check_shape(shape)
    return shape


def _kept_session(value: Any) -> KeptSession:
    if type(value) not in (list, tuple, KeptSession) or len(value) != 3:
        raise ValueError("not a session [plan version, number, rows]")
    origin, number, rows = value
    return KeptSession(_ALL["plan_version"](origin), plausible.COUNT(number), plausible.COUNT(rows))


def _link_reports(value: Any) -> dict[str, LinkReport]:
    checks = [plausible.number("peer.round_trip_s"), plausible.number("peer.bytes_per_s")]
    return {
        name: LinkReport(*(check(part) for check, part in zip(checks, entry, strict=True)))
        for name, entry in _by_peer(value, 2).items()
    }


def _peer_stats(value: Any) -> dict[str, PeerStats]:
    return {
        name: PeerStats._make((*map(plausible.COUNT, counts), plausible.text(trouble)[:MAX_TROUBLE]))
        for name, (*counts, trouble) in _by_peer(value, len(PeerStats._fields)).items()
    }


def _by_peer(value: Any, length: int) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > MAX_PEERS:
        raise ValueError(f"not a map of at most {MAX_PEERS} peers")
    if not all(isinstance(entry, list | tuple) and len(entry) == length for entry in value.values()):
        raise ValueError(f"not {length} numbers for each peer")
    return {check_name("device", name): entry for name, entry in value.items()}


_STRUCTURED: Final[Mapping[str, Check]] = {
    "shapes": plausible.bounded("shapes", MAX_SHAPES, _shape),
    "endpoint": endpoint,
    "public_key": _public_key,
    "key": _frame_key,
    "checked": plausible.one_of(*get_args(keys.Checked)),
    "edges": _peer_stats,
    "Prepare.peers": plausible.bounded("peers", MAX_PEERS, _peer),
    "PrepareFailed.peers": plausible.bounded("devices", MAX_PEERS, plausible.device_name),
    "Heartbeat.peers": _link_reports,
    "KeptSessions.sessions": plausible.bounded("sessions", plausible.MAX_TASKS, _kept_session),
}
_ALL: Final[Mapping[str, Check]] = {**plausible.FIELDS, **_STRUCTURED}
# A field without a rule raises KeyError at import.
_RULES: Final[Mapping[type[Any], Mapping[str, Check]]] = {
    cls: {f.name: _ALL.get(f"{cls.__name__}.{f.name}") or _ALL[f.name] for f in fields(cls)}
    for cls in (*CODES.values(), Status, Caps, Heartbeat)
}
# Optional fields of JSON objects.
_DEFAULTS: Final[Mapping[type[Any], Mapping[str, Any]]] = {
    cls: {f.name: f.default for f in fields(cls) if f.default is not MISSING} for cls in (Status, Caps)
}


# -- bytes -----------------------------------------------------------------------------------------------------------


def encode(message: Message) -> bytes:
    """Return the payload of a control message. Raises `WireError` for a field that `decode` would refuse."""
    code = _CODE_OF.get(type(message))
    if code is None:
        raise WireError(f"{type(message).__name__} is not a control message")
    if isinstance(message, PrepareFailed | RunFailed):  # report an error despite an invalid text
        message = replace(message, text=plausible.sendable(message.text))
    return _pack(message, [code])


def decode(payload: Body) -> Message:
    """Return the control message of a payload without checking its seal. Raises `WireError`."""
    return decode_sealed(payload)[0]


def decode_sealed(payload: Body) -> tuple[Message, keys.Seal | None]:
    """Return the control message of a payload and its seal, if it has one. Raises `WireError`."""
    body, seal = keys.split(payload)
    values = _unpack(body)
    if not values or type(values[0]) is not int or values[0] not in CODES:
        raise WireError(f"unsupported code {values[:1]!r} of a control message; update the older program")
    message: Message = _build(CODES[values[0]], values[1:])
    return message, seal


def decode_sealed_report(payload: Body) -> tuple[Message | Frame, keys.Seal | None]:
    """Return an agent's frame, if the payload begins with the frames' magic, or control message, and its seal."""
    return (decode_frame(payload), None) if bytes(payload[: len(MAGIC)]) == MAGIC else decode_sealed(payload)


def encode_heartbeat(heartbeat: Heartbeat) -> bytes:
    """Return the payload of a heartbeat. Raises `WireError` for a field out of range."""
    return _pack(heartbeat, [])


def decode_heartbeat(payload: Body) -> Heartbeat:
    """Return the heartbeat of a payload. Raises `WireError`."""
    return _build(Heartbeat, _unpack(payload, MAX_SELF_BYTES))


def encode_status(status: Status) -> bytes:
    """Return the JSON of a status. Raises `WireError` for a field out of range."""
    return _to_json(status)


def decode_status(payload: Body) -> Status:
    """Return the status of a JSON payload. Raises `WireError`."""
    return _from_json(Status, payload)


def decode_use(payload: Body) -> bool:
    """Return whether plans may use a device; an empty payload means yes. Raises `WireError`.

    The values are those of a Home Assistant switch.
    """
    value = bytes(payload).strip().lower()
    if value not in (b"on", b"off", b""):
        raise WireError(f"{value[:20]!r} is neither on nor off")
    return value != b"off"


def encode_caps(caps: Caps) -> bytes:
    """Return the JSON of a device's capabilities. Raises `WireError` for a field out of range."""
    return _to_json(caps)


def decode_caps(payload: Body) -> Caps:
    """Return the capabilities of a JSON payload. Raises `WireError`."""
    return _from_json(Caps, payload)


def _pack(message: object, head: list[Any]) -> bytes:
    _verify(message)
    values = [getattr(message, entry.name) for entry in fields(message)]  # type: ignore[arg-type]
    limit = MAX_SELF_BYTES if isinstance(message, Heartbeat) else MAX_MESSAGE_BYTES
    try:
        payload: bytes = msgpack.packb(head + values, default=_plain)
    except (ValueError, TypeError, OverflowError) as error:
        raise WireError(f"{type(message).__name__} cannot be packed: {error}") from error
    _check_size(type(message).__name__, payload, limit)
    return payload


def _plain(value: object) -> list[Any]:
    if isinstance(value, PlainShape):
        return _plain_shape(value)
    if isinstance(value, Peer):
        return _plain_peer(value)
    raise TypeError(f"{type(value).__name__} is not plain data")


def _unpack(payload: Body, limit: int = MAX_MESSAGE_BYTES) -> list[Any]:
    _check_size("a message", payload, limit)
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
        absent = _DEFAULTS[type(message)]
        values = {key: value for key, value in asdict(message).items() if key not in absent or value != absent[key]}
        payload = json.dumps(values, allow_nan=False).encode()
    except (ValueError, TypeError) as error:
        raise WireError(f"{type(message).__name__} cannot be written as JSON: {error}") from error
    _check_size(type(message).__name__, payload, MAX_SELF_BYTES)
    return payload


def _from_json(cls: type[Decoded], payload: Body) -> Decoded:
    _check_size(cls.__name__, payload, MAX_SELF_BYTES)
    try:
        values = json.loads(bytes(payload))
    except (ValueError, RecursionError) as error:
        raise WireError(f"the payload is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise WireError("the payload is not a JSON object")
    values = {**_DEFAULTS[cls], **values}
    try:
        return _build(cls, [values[name] for name in _RULES[cls]])
    except KeyError as error:
        raise WireError(f"{cls.__name__} lacks {error}") from error


def _check_size(what: str, payload: Body, limit: int) -> None:
    if len(payload) > limit:
        raise WireError(f"{what} of {len(payload)} bytes is over the limit of {limit}")


def _verify(message: object) -> None:
    for name, check in _RULES[type(message)].items():
        _checked(type(message), name, check, getattr(message, name))


def _build(cls: type[Decoded], values: list[Any]) -> Decoded:
    rules = _RULES[cls]
    if len(values) != len(rules):
        raise WireError(f"{cls.__name__} has {len(rules)} fields, not {len(values)}; update the older program")
    return cls(*(_checked(cls, name, check, value) for (name, check), value in zip(rules.items(), values, strict=True)))


def _checked(cls: type[Any], name: str, check: Check, value: Any) -> Any:
    try:
        return check(value)
    except (ValueError, BadNameError) as error:
        raise WireError(f"{cls.__name__}.{name}: {error}") from error


# -- JSON objects for users: the record of a model's plans, and answers ----------------------------------------------
#
# A planner of another version may omit keys that this version reads. Additional keys are ignored.


RECORD: Final = (
    "boot", "active", "preparing", "pinned", "pinned_preparing", "spec", "directory", "in_flight", "unused", "clocks",
    "candidates", "progress", "reason", "story", "considered", "evidence", "error",
)  # fmt: skip
_KINDS: Final = {
    **dict.fromkeys(("pinned", "pinned_preparing", "candidates", "story", "considered"), list),
    **dict.fromkeys(("unused", "progress", "clocks", "evidence"), Mapping),
}
CANDIDATE: Final = (
    "name", "devices", "route", "wire", "wire_error", "predicted_ms", "expected_ms", "bytes", "feasible", "missing",
)  # fmt: skip
STEP: Final = ("time", "plan", "from", "to", "cause")
ASSESSMENT: Final = (
    "name", "devices", "gain", "probability", "requests", "cost_s", "load_s", "load_bytes", "verdict", "why",
)  # fmt: skip
ERROR: Final = ("code", "message", "detail")
PLAN: Final = tuple(KEYS.get(f.name, f.name) for f in fields(Plan) if f.name not in OPTIONAL_KEYS)
ANSWER: Final = (
    "id", "model", "result", "plan", "tokens", "compute_ms", "wait_ms", "bytes_on_wire", "predicted_bytes",
    "predicted_ms",
)  # fmt: skip
TOKEN: Final = ("index", "token", "text")  # sent for each token before the answer
LOGPROBS: Final = "logprobs"  # with a token, if requested
THINKING: Final = "thinking"  # with a token of a reasoning model: the part of its text outside the answer
ACCEPTED_BY: Final = "accepted_by"  # before the answer: the group that accepted a shared request
ANSWER_PLAN: Final = ("id", "strategy", "options", "wire", "weights", "route", "devices")


def is_compatible(version: str) -> bool:
    """Return whether a version has the same wire format, i.e. the same first two numbers."""
    return version.split(".")[:2] == __version__.split(".")[:2]


def unreadable(what: str) -> WireError:
    """Return the error for a record or answer that no planner of this version writes."""
    return WireError(
        f"{what}: the planner is of another version than this program ({__version__}), or another program has changed "
        "its message. Compare `hepti --version` on both machines, and install one version; if they are equal, restart "
        "the planner"
    )


def missing_record_key(record: Mapping[str, Any]) -> str | None:
    """Return the first key that a record of a model's plans lacks, None if it is complete."""
    for key in RECORD:
        if key not in record or not isinstance(record[key], _KINDS.get(key, object)):
            return key
    own = (record["active"], record["preparing"])
    plans = [plan for plan in (*own, *record["pinned"], *record["pinned_preparing"]) if plan is not None]
    errors = [] if record["error"] is None else [record["error"]]
    parts = (
        (plans, PLAN),
        (record["candidates"], CANDIDATE),
        (record["story"], STEP),
        (record["considered"], ASSESSMENT),
        (errors, ERROR),
    )
    return next((missing for entries, keys in parts for part in entries if (missing := _missing(part, keys))), None)


def missing_answer_key(answer: Mapping[str, Any]) -> str | None:
    """Return the first key that an answer lacks, None if it is complete."""
    return _missing(answer, ANSWER) or _missing(answer["plan"], ANSWER_PLAN)


def _missing(part: Any, keys: Sequence[str]) -> str | None:
    return next((key for key in keys if not isinstance(part, Mapping) or key not in part), None)
