"""One table of message fields with units and bounds, and its checks.

Decoding refuses a message with a field out of bounds. Numbers beyond the narrower `credible` bounds are decoded but not
used for planning: a heartbeat's number is replaced by `instead`, other fields are refused. docs/reference/wire.md
contains the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

from hepti_mqtt.core.ids import PlanVersion, check_model, check_name
from hepti_mqtt.protocol.topics import MAX_LAYER

Plain = Mapping[str, Any]
Check = Callable[[Any], Any]

U32: Final = 2**32 - 1
U63: Final = 2**63 - 1
MAX_REAL: Final = 1e15
MAX_BITMAP_BYTES: Final = 131_072  # a million tiles, i.e. 256 GB
MAX_TEXT: Final = 65_536
MAX_HASHES: Final = 16_384
MAX_COUNTERS: Final = 256
MAX_DEPTH: Final = 16
MAX_TASKS: Final = 1024
MAX_PEERS: Final = 64
MAX_CURVES: Final = 64
MAX_POINTS: Final = 64  # of a curve
MAX_ENTRIES: Final = 65_536  # of a list in a spec
MAX_REASON: Final = 4096
MIN_PACKET_BYTES: Final = 4096  # below it a device's own caps would not pass the broker
HASH_BYTES: Final = 32
PROGRAMS_BYTES: Final = 8
MAX_TERM: Final = U32


@dataclass(frozen=True, slots=True)
class Number:
    """The rule of a number with its unit and inclusive bounds."""

    unit: str = ""
    low: float = 0
    high: float = U63
    real: bool = False  #: a float; otherwise an integer
    optional: bool = False  #: whether None is valid
    credible: tuple[float, float] | None = None  #: narrower bounds for planning
    instead: float | None = None  #: replaces a heartbeat's number beyond `credible`

    def __call__(self, value: Any) -> Any:
        """Return the checked value, a float if `real`. Raises ValueError."""
        if value is None and self.optional:
            return None
        types = (int, float) if self.real else (int,)
        if type(value) not in types or not self.low <= value <= self.high:
            raise ValueError(f"not a number from {self.low:.16g} to {self.high:.16g}")
        return float(value) if self.real else value

    def check_credible(self, value: float) -> float:
        """Return a number within `credible`. Raises ValueError for other numbers."""
        low, high = self.credible or (self.low, self.high)
        if not low <= value <= high:
            raise ValueError(f"not a number from {low:.16g} to {high:.16g}")
        return value


@dataclass(frozen=True, slots=True)
class Octets:
    """Bytes of one length."""

    length: int

    def __call__(self, value: Any) -> bytes:
        """Return the checked bytes. Raises ValueError."""
        if type(value) is not bytes or len(value) != self.length:
            raise ValueError(f"not {self.length} bytes")
        return value


def real(unit: str, low: float, high: float) -> Number:
    """Return the rule of a float without narrower bounds."""
    return Number(unit, low, high, real=True)


def measured(unit: str, low: float, high: float) -> Number:
    """Return the rule of an optional float; None replaces it beyond credible bounds."""
    return Number(unit, -MAX_REAL, MAX_REAL, True, True, credible=(low, high))


def text(value: Any) -> str:
    """Return a text of bounded length."""
    if type(value) is not str or len(value) > MAX_TEXT:
        raise ValueError(f"not a text of at most {MAX_TEXT} characters")
    return encodable(value)


def bitmap(value: Any) -> bytes:
    """Return a bitmap of bounded length."""
    if type(value) is not bytes or len(value) > MAX_BITMAP_BYTES:
        raise ValueError(f"not at most {MAX_BITMAP_BYTES} bytes")
    return value


def sendable(value: str) -> str:
    """Make a text valid for `text`: truncate it, and replace invalid characters by "?"."""
    return value[:MAX_TEXT].encode(errors="replace").decode()


def encodable(value: str) -> str:
    """Return a text without lone surrogates, which JSON allows and UTF-8 cannot encode."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError("not a text in UTF-8") from error
    return value


def bounded(what: str, limit: int, check: Check, least: int = 0) -> Check:
    """Return the rule of a list of `least` to `limit` values; the result is a tuple."""

    def rule(value: Any) -> tuple[Any, ...]:
        if type(value) not in (list, tuple) or not least <= len(value) <= limit:
            raise ValueError(f"not a list of {least} to {limit} {what}")
        return tuple(map(check, value))

    return rule


def one_of(*values: Any) -> Check:
    """Return the rule of an enumeration."""

    def rule(value: Any) -> Any:
        if type(value) is not type(values[0]) or value not in values:
            raise ValueError(f"none of {', '.join(map(repr, values))}")
        return value

    return rule


def device_name(value: Any) -> str:
    """Return a device's name. Raises `BadNameError`."""
    return check_name("device", value)


def plain(value: Any) -> Plain:
    """Return a map of plain data: None, bool, int, finite float, text, bytes, lists, maps; at most MAX_DEPTH deep."""
    _check_plain(value, MAX_DEPTH)
    if type(value) is not dict:
        raise ValueError("not a map")
    return value


def _check_plain(value: Any, depth: int) -> None:
    if depth == 0:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if isinstance(value, dict):
        for key, entry in value.items():
            if type(key) is not str:
                raise ValueError("a key is not a text")
            encodable(key)
            _check_plain(entry, depth - 1)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            _check_plain(entry, depth - 1)
    elif type(value) is str:
        encodable(value)
    elif not (value is None or type(value) in (bool, int, float, bytes)):
        raise ValueError(f"{type(value).__name__} is not plain data")
    elif type(value) is float and not isfinite(value):
        raise ValueError("a number is not finite")


def _plan_version(value: Any) -> PlanVersion:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError("not a plan version [boot, number]")
    return PlanVersion(COUNT(value[0]), COUNT(value[1]))


def _counters(value: Any) -> Mapping[str, int]:
    if not isinstance(value, dict) or len(value) > MAX_COUNTERS:
        raise ValueError(f"not a map of at most {MAX_COUNTERS} counters")
    return {text(key): COUNT(entry) for key, entry in value.items()}


COUNT: Final = Number()
BYTES: Final = Number("bytes")
_RATE: Final = (1e4, 1e16)

# Rules by field name, or `CLASS.name` and `spec.name` if a name is ambiguous. `messages` adds structured fields.
FIELDS: Final[Mapping[str, Check]] = {
    # Control messages.
    "transaction_id": COUNT,
    "model": check_model,
    "plan_version": _plan_version,
    "run_id": COUNT,
    "plan": plain,
    "spec": plain,
    "manifest": Octets(HASH_BYTES),
    "in_flight": Number("runs", credible=(0, 64)),
    "build_first": Number("shapes"),
    "share": real("", 0, 1),
    "resident_bytes": BYTES,
    "digest": Octets(PROGRAMS_BYTES),
    "done_bytes": BYTES,
    "total_bytes": BYTES,
    "missing_bytes": BYTES,
    "code": text,
    "text": text,
    "tiles": bitmap,
    "read_bytes_per_s": real("bytes/s", 0, MAX_REAL),
    "receive_bytes_per_s": real("bytes/s", 0, MAX_REAL),
    "hashes": bounded("hashes", MAX_HASHES, Octets(HASH_BYTES), least=1),
    "task": COUNT,
    "block": Number("", 0, MAX_LAYER),
    "heir": COUNT,
    "tasks": bounded("tasks", MAX_TASKS, COUNT),
    "sessions": bounded("sessions", MAX_TASKS, COUNT),
    # Status and capabilities.
    "state": one_of("online", "offline", "starting"),
    "boot": Number("", 0, U32),
    "term": Number("starts", 0, MAX_TERM),
    "doing": text,
    "reason": text,
    "done": Number("steps"),
    "total": Number("steps"),
    "version": text,
    "device": device_name,
    "cores": Number("", credible=(1, 1 << 16)),
    "threads": Number("", credible=(1, 1 << 16)),
    "memory_budget_bytes": Number("bytes", credible=(0, 1 << 50)),
    "rss_idle_bytes": Number("bytes", credible=(0, 1 << 50)),
    "isa": text,
    "curves": plain,
    "largest_packet_bytes": Number("bytes", credible=(MIN_PACKET_BYTES, U63)),  # or 0: not measured
    "mqtt": one_of(4, 5),
    # Measured curves.
    "frame_s": real("s", 0, 1),
    "mesh_frame_s": real("s", 0, 1),
    "op_overhead_s": real("s", 0, 1),
    "attention_flops_per_s": real("FLOP/s", *_RATE),
    "rowwise_bytes_per_s": real("bytes/s", *_RATE),
    "copy_bytes_per_s": real("bytes/s", *_RATE),
    "mesh_copy_bytes_per_s": real("bytes/s", *_RATE),
    "curve.k": Number("columns", 1, 10**6),
    "curve.n": Number("columns", 1, 10**6),
    "curve.rows": Number("rows", 1, 10**6),
    "curve.seconds": real("s", 1e-9, 3600),
    # Heartbeats.
    "seq": COUNT,
    "clock_s": real("unix s", 0, MAX_REAL),
    "cpu_other": real("of all cores", 0, 1),
    "free_bytes": BYTES,
    "temperature_c": Number("°C", -MAX_REAL, MAX_REAL, real=True, optional=True),
    "round_trip_s": measured("s", 0, 3600),
    "bandwidth_bytes_per_s": measured("bytes/s", 1, MAX_REAL),
    "slowdown": Number("ratio", 0, MAX_REAL, real=True, credible=(1e-4, 1e4), instead=1.0),
    "rss_bytes": BYTES,
    "counters": _counters,
    "peer_frame_s": measured("s", 0, 10),
    "peer_byte_s": measured("s", 0, 1e-3),
    "peer.round_trip_s": Number("s", 0, MAX_REAL, real=True, credible=(0, 3600)),
    "peer.bytes_per_s": Number("bytes/s", 0, MAX_REAL, real=True, optional=True, credible=(1, MAX_REAL)),
    "peer.port": Number("", 1, 65_535),
    # Frames.
    "layer": Number("", 0, MAX_LAYER),
    "node": Number("", 0, U32),
    "part": Number("", 0, U32),
    "row_start": Number("rows", 0, U32),
    # A plan and its spec, checked before an agent allocates memory for them.
    "plan.devices": Number("devices", 1, 64),
    "plan.share": real("", 0, 1e18),  # at most a device's FLOP/s, doubled by the search for small parts
    "plan.range": Number("rows or columns", 0, 1 << 24),
    "spec.layers": Number("", 0, 1024),
    "spec.groups": Number("", 0, 1024),
    "spec.parts": Number("", 0, 64),
    "spec.heads": Number("", 0, 4096),
    "spec.max_tokens": Number("tokens", 0, 65_536),
    "spec.positions": Number("tokens", 0, 1 << 20),
    "spec.size": Number("pixels", 0, 4096),
    "spec.registers": Number("rows", 0, 1024),
    "spec.side": Number("patches", 0, 256),
    "spec.nodes.groups": Number("channels", 1, 1 << 24),  # of one convolution, which is one op for any number of groups
    "spec.*": Number("rows or columns", 0, 1 << 24),
}


def number(name: str) -> Number:
    """Return the rule of a number in FIELDS."""
    rule = FIELDS[name]
    assert isinstance(rule, Number)
    return rule


def check(name: str, value: Any) -> Any:
    """Return a field's checked and credible value. Raises ValueError with the field's name."""
    try:
        checked, rule = FIELDS[name](value), FIELDS[name]
        return rule.check_credible(checked) if isinstance(rule, Number) and checked is not None else checked
    except ValueError as error:
        raise ValueError(f"{name} is {error}") from error


def check_spec(value: Any, name: str = "spec") -> None:
    """Check each part of a spec in the form of `to_dict`. Raises ValueError with the name of an invalid part."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            if isinstance(part, int) and not isinstance(part, bool):
                rule = next(n for n in (f"{name}.{key}", f"spec.{key}", "spec.*") if n in FIELDS)
                try:
                    check(rule, part)
                except ValueError as error:
                    raise ValueError(f"{name}.{key} {part} {error}") from error
            check_spec(part, f"{name}.{key}")
    elif isinstance(value, str):
        if len(value) > MAX_REASON:
            raise ValueError(f"{name} {value[:80]!r} is too long a text")
    elif isinstance(value, Sequence):
        if len(value) > MAX_ENTRIES:
            raise ValueError(f"{name} has {len(value)} entries, more than {MAX_ENTRIES}")
        for part in value:
            check_spec(part, name)
    elif isinstance(value, float) and not isfinite(value):
        raise ValueError(f"{name} {value} is not finite")
