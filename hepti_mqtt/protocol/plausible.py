"""Checks of single fields of a message: a value goes in, the value to keep comes out, ValueError says what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, Final

from hepti_mqtt.ids import PlanVersion, check_name
from hepti_mqtt.protocol.frames import U63, WANTS, check_shape
from hepti_mqtt.spec import PlainShape

Plain = Mapping[str, Any]

HASH_BYTES: Final = 32
MAX_TEXT: Final = 65_536
MAX_HASHES: Final = 16_384
MAX_COUNTERS: Final = 256
MAX_DEPTH: Final = 16
MAX_TASKS: Final = 1024
MAX_SHAPES: Final = 16
MAX_SHAPE_NUMBERS: Final = 4096  # lengths and mask rows of one shape
PROGRAMS_BYTES: Final = 8
MAX_BOOT: Final = 2**32 - 1  # boot counters are unix seconds, or a little more


def count(value: Any) -> int:
    """Return a whole number from 0 to 2^63 - 1."""
    if type(value) is not int or not 0 <= value <= U63:
        raise ValueError("not a number from 0 to 2^63 - 1")
    return value


def boot(value: Any) -> int:
    """Return a boot counter."""
    if type(value) is not int or not 0 <= value <= MAX_BOOT:
        raise ValueError(f"not a boot counter from 0 to {MAX_BOOT}")
    return value


def real(value: Any, low: float = -1e15, high: float = 1e15) -> float:
    """Return a finite number within `low` and `high` as float."""
    if type(value) not in (int, float) or not isfinite(value) or not low <= value <= high:
        raise ValueError(f"not a number from {low:g} to {high:g}")
    return float(value)


def maybe_real(value: Any) -> float | None:
    """Return a finite number, or None."""
    return None if value is None else real(value)


def share(value: Any) -> float:
    """Return a number from 0 to 1."""
    return real(value, 0.0, 1.0)


def positive(value: Any) -> float:
    """Return a number from 0 on."""
    return real(value, 0.0)


def text(value: Any) -> str:
    """Return a text of bounded length."""
    if type(value) is not str or len(value) > MAX_TEXT:
        raise ValueError(f"not a text of at most {MAX_TEXT} characters")
    return whole(value)


def sendable(value: str) -> str:
    """Return a text of whatever origin as `text` takes it: cut, and "?" for what cannot be written."""
    return value[:MAX_TEXT].encode(errors="replace").decode()


def whole(value: str) -> str:
    """Return a text that can be written; JSON can spell half a character (a lone surrogate), which cannot."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError("a text that cannot be written as UTF-8") from error
    return value


def model_name(value: Any) -> str:
    """Return a model's name; raises `BadNameError`."""
    return check_name("model", value)


def device_name(value: Any) -> str:
    """Return a device's name; raises `BadNameError`."""
    return check_name("device", value)


def digest(value: Any) -> bytes:
    """Return a SHA-256."""
    if type(value) is not bytes or len(value) != HASH_BYTES:
        raise ValueError(f"not a hash of {HASH_BYTES} bytes")
    return value


def digests(value: Any) -> tuple[bytes, ...]:
    """Return a bounded, non-empty tuple of SHA-256."""
    if type(value) not in (list, tuple) or not 0 < len(value) <= MAX_HASHES:
        raise ValueError(f"not a list of 1 to {MAX_HASHES} hashes")
    return tuple(digest(entry) for entry in value)


def programs_digest(value: Any) -> bytes:
    """Return the digest of Programs."""
    if type(value) is not bytes or len(value) != PROGRAMS_BYTES:
        raise ValueError(f"not a digest of {PROGRAMS_BYTES} bytes")
    return value


def shapes(value: Any) -> tuple[PlainShape, ...]:
    """Return a bounded tuple of request shapes, from their plain form or as they are; raises `WireError` too."""
    if type(value) not in (list, tuple) or len(value) > MAX_SHAPES:
        raise ValueError(f"not a list of at most {MAX_SHAPES} shapes")
    return tuple(_shape(plain_shape(entry) if isinstance(entry, PlainShape) else entry) for entry in value)


def plain_shape(shape: PlainShape) -> list[Any]:
    """Return a request's shape as plain data: [want, cache, lengths, mask rows]."""
    return [WANTS.index(shape.want), shape.session_rows, list(shape.sizes), list(shape.mask_rows)]


def _shape(value: Any) -> PlainShape:
    if type(value) is not list or len(value) != 4:
        raise ValueError("not a shape [want, cache, lengths, mask rows]")
    want, cache, lengths, masks = value
    if type(lengths) is not list or type(masks) is not list or len(lengths) + len(masks) > MAX_SHAPE_NUMBERS:
        raise ValueError(f"a shape's lengths and mask rows are not lists of {MAX_SHAPE_NUMBERS} numbers together")
    if count(want) >= len(WANTS):
        raise ValueError(f"a shape cannot have want {want}")
    shape = PlainShape(tuple(map(count, lengths)), WANTS[want], tuple(map(count, masks)), count(cache))
    check_shape(shape)
    return shape


def epoch(value: Any) -> PlanVersion:
    """Return an epoch of [boot, number]."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError("not an epoch [boot, number]")
    return PlanVersion(count(value[0]), count(value[1]))


def tasks(value: Any) -> tuple[int, ...]:
    """Return a bounded tuple of the numbers of tasks."""
    if type(value) not in (list, tuple) or len(value) > MAX_TASKS:
        raise ValueError(f"not a list of at most {MAX_TASKS} tasks")
    return tuple(map(count, value))


def state(value: Any) -> str:
    """Return online | offline | starting."""
    if value not in ("online", "offline", "starting"):
        raise ValueError("none of 'online', 'offline', 'starting'")
    return str(value)


def protocol(value: Any) -> int:
    """Return the number of an MQTT protocol, 4 or 5."""
    if type(value) is not int or value not in (4, 5):
        raise ValueError("neither 4 (MQTT 3.1.1) nor 5")
    return value


def plain(value: Any) -> Plain:
    """Return a map of plain data: None, bool, int, finite float, str, bytes, list, map of texts, not too deep."""
    _check_plain(value, MAX_DEPTH)
    if type(value) is not dict:
        raise ValueError("not a map")
    return value


def _check_plain(value: Any, depth: int) -> None:
    if depth == 0:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if isinstance(value, dict):
        if not all(type(key) is str for key in value):
            raise ValueError("has a key that is not a text")
        for key, entry in value.items():
            whole(key)
            _check_plain(entry, depth - 1)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            _check_plain(entry, depth - 1)
    elif type(value) is str:
        whole(value)
    elif not (value is None or type(value) in (bool, int, float, bytes)):
        raise ValueError(f"holds {type(value).__name__}, which is no plain data")
    elif type(value) is float and not isfinite(value):
        raise ValueError("holds a number that is not finite")


def counters(value: Any) -> Mapping[str, int]:
    """Return a map of names to counts."""
    if not isinstance(value, dict) or len(value) > MAX_COUNTERS:
        raise ValueError(f"not a map of at most {MAX_COUNTERS} counters")
    return {text(key): count(entry) for key, entry in value.items()}
