"""Frames: publishes with one array each, work frames of runs, and received tensors with their headers cached."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, pairwise
from math import prod
from typing import Any, Final, Literal, NamedTuple, get_args

import msgpack
import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.core.errors import BadNameError, WireError
from hepti_mqtt.core.ids import PLANNER, PlanVersion, check_model
from hepti_mqtt.core.program import DTYPE_BYTES, NUMPY_DTYPE, ExchangeKey, SlotDtype
from hepti_mqtt.core.recent import Recent
from hepti_mqtt.core.spec import Draw, PlainShape, RequestShape, Want
from hepti_mqtt.protocol.keys import TAG_BYTES, UNKEYED, FrameKey, frame_tag, same_tag
from hepti_mqtt.protocol.plausible import COUNT, U32, U63, number
from hepti_mqtt.protocol.topics import check_source

BUFFER_GRANULARITY: Final = 16_384  # buffer sizes are multiples of it, so payloads of similar sizes share buffers


def held_bytes(nbytes: int) -> int:
    """Return the size of the buffer for a payload."""
    return -(-max(nbytes, 1) // BUFFER_GRANULARITY) * BUFFER_GRANULARITY


# ----------------------------------------------------------------------------------------------------------------------
# Frames: one publish that carries one array, as a header of fixed size and raw little-endian bytes.
#
#     offset 0    4 bytes   magic b"HPT4" (the last byte is the version)
#     offset 4    2 bytes   length n of the header fields, little-endian
#     offset 6    n bytes   the fields, a msgpack array in the order of `Frame` without run id; `kind` and `dtype` are
#                           indices of KINDS and DTYPES
#     ...         zeros to offset 240
#     offset 240  8 bytes   the tag (`keys.frame_tag`), zeros under a plan without a key
#     offset 248  8 bytes   the run id, little-endian
#     offset 256            the array, C order, little-endian; nothing after it
#
# The header has a fixed size so that the simulator counts bytes exactly. Its size is a multiple of 64, so the array of
# an aligned payload is aligned. The bytes before the tag are equal in all runs of a shape; they are encoded and
# checked once, because this is most of a small frame's cost. Received bodies are views of the payload. All sizes are
# checked before any allocation. The normative text is docs/reference/wire.md.


FrameKind = Literal["tensor", "work", "output", "done", "tile", "probe", "held", "wanted", "refused"]
Body = bytes | bytearray | memoryview

# Headers contain indices of these tuples: only append.
KINDS: Final[tuple[FrameKind, ...]] = get_args(FrameKind)
DTYPES: Final[tuple[SlotDtype, ...]] = ("f32", "f16", "i8", "u8", "i32")
WANTS: Final[tuple[Want, ...]] = ("task", "hidden", "candidates", "alignment")

MAGIC: Final = b"HPT4"
HEADER_BYTES: Final = 256
ALIGN: Final = 64
_PREFIX_BYTES: Final = 6
HEADER_PREFIX_BYTES: Final = 240  # the header without tag and run id
_RUN_ID_AT: Final = HEADER_PREFIX_BYTES + TAG_BYTES
_CACHED_PREFIXES: Final = 512  # decoded headers, 2 KB each, enough for a large model's exchanges

MAX_BODY_BYTES: Final = 256_000_000  # an MQTT packet ends at 268,435,455
MAX_DIMS: Final = 4
MAX_NUMBERS: Final = 8
MAX_SEQUENCES: Final = 65_536
MAX_TOKENS: Final = 16_777_216
MAX_SESSION: Final = 2**31 - 1

_KIND_INDEX: Final = {name: index for index, name in enumerate(KINDS)}
_DTYPE_INDEX: Final = {name: index for index, name in enumerate(DTYPES)}
_FIELDS: Final = 12
_NUMBERS: Final = {name: number(name) for name in ("layer", "node", "part", "row_start")}


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One array and its header."""

    kind: FrameKind
    model: str  #: empty in probes only
    plan_version: PlanVersion
    run_id: int
    layer: int = 0  #: of the tensor, as in the topic
    node: int = 0  #: index of the tensor in the model's graph; (node, part, source) identify an exchange of the run
    source: str = PLANNER
    part: int = 0  #: index of the message among those of its source
    dtype: SlotDtype = "u8"
    shape: tuple[int, ...] = (0,)  #: at most 4 dimensions
    row_start: int = 0  #: index of its first row in the whole tensor
    numbers: tuple[int, ...] = ()  #: at most 8 counters, e.g. microseconds of compute and wait, bytes sent
    body: Body | NDArray[Any] = b""  #: C order, little-endian, as many bytes as shape and dtype require
    header: bytes = b""  #: the header of a received frame

    def array(self) -> NDArray[Any]:
        """Return the body as a read-only view of `shape` and `dtype`."""
        out = np.frombuffer(self.body, NUMPY_DTYPE[self.dtype]).reshape(self.shape)
        out.flags.writeable = False
        return out

    def equals(self, other: Frame) -> bool:
        """Return whether headers and bodies are equal."""
        return bytes(encode(self)) == bytes(encode(other))

    def has_tag(self, key: FrameKey) -> bool:
        """Return whether a received frame has the key's tag."""
        return not key.key or _has_tag(key, self.header, _body_view(self))


def frame_bytes(body_bytes: int) -> int:
    """Return the bytes of a frame with an array of `body_bytes`."""
    return HEADER_BYTES + body_bytes


def _has_tag(key: FrameKey, header: bytes, body: Body) -> bool:
    tag = frame_tag(key, header[:HEADER_PREFIX_BYTES], header[_RUN_ID_AT:], body)
    return same_tag(tag, header[HEADER_PREFIX_BYTES:_RUN_ID_AT])


def encode(frame: Frame, key: FrameKey = UNKEYED) -> bytes:
    """Return the payload of a frame as `encode_parts`, with the body copied."""
    return b"".join(encode_parts(frame, key))


def encode_parts(frame: Frame, key: FrameKey = UNKEYED) -> tuple[bytes, memoryview]:
    """Return the payload of a frame as its header and a view of its body.

    The body may be an array of any layout; it is sent in C order. Raises `WireError` if `decode` would refuse a field.
    """
    body = _body_view(frame)
    return frame_header(header_prefix(frame, body.nbytes), run_id_bytes(frame.run_id), body, key), body


def header_prefix(frame: Frame, body_bytes: int) -> bytes:
    """Return a frame's header without tag and run id. Raises `WireError` as `encode_parts`."""
    if frame.kind not in _KIND_INDEX or frame.dtype not in _DTYPE_INDEX:
        raise WireError(f"cannot encode a frame of kind {frame.kind!r}, dtype {frame.dtype!r}")
    _check_fields(frame)
    _check_size(frame, body_bytes)
    fields = msgpack.packb(
        (
            _KIND_INDEX[frame.kind],
            frame.model,
            frame.plan_version[0],
            frame.plan_version[1],
            frame.layer,
            frame.node,
            frame.source,
            frame.part,
            _DTYPE_INDEX[frame.dtype],
            frame.shape,
            frame.row_start,
            frame.numbers,
        )
    )
    return b"".join((MAGIC, len(fields).to_bytes(2, "little"), fields)).ljust(HEADER_PREFIX_BYTES, b"\0")


def run_id_bytes(run_id: int) -> bytes:
    """Return the end of a frame's header. Raises `WireError` for a number out of range."""
    if type(run_id) is not int or not 0 <= run_id <= U63:
        raise WireError(f"the frame's run id {run_id!r} is not a number from 0 to {U63}")
    return run_id.to_bytes(8, "little")


def frame_header(prefix: bytes, run_id: bytes, body: Body, key: FrameKey) -> bytes:
    """Return the header of a frame; prefix, run_id: from `header_prefix` and `run_id_bytes`."""
    return prefix + frame_tag(key, prefix, run_id, body) + run_id


def decode(payload: Body) -> Frame:
    """Return the frame of a payload; its body is a view of `payload`. Raises `WireError` if it is invalid."""
    view = memoryview(payload)
    if len(view) < HEADER_BYTES or bytes(view[:4]) != MAGIC:
        raise WireError(
            f"{len(view)} bytes are not a frame of this version: a frame begins with {MAGIC!r} and a header of "
            f"{HEADER_BYTES} bytes; update the device that sent it"
        )
    before, after, frame = _decode_prefix(bytes(view[:HEADER_PREFIX_BYTES]))
    header = bytes(view[:HEADER_BYTES])
    run_id = int.from_bytes(header[_RUN_ID_AT:], "little")
    if run_id > U63:
        raise WireError(f"the frame's run id {run_id} is not a number from 0 to {U63}")
    _check_size(frame, len(view) - HEADER_BYTES)
    values = (*before, run_id, *after, view[HEADER_BYTES:], header)
    return Frame(*values)


@lru_cache(maxsize=_CACHED_PREFIXES)
def _decode_prefix(prefix: bytes) -> tuple[tuple[Any, ...], tuple[Any, ...], Frame]:
    """Return a frame's values before and after its run id, and the frame with run id 0."""
    end = _PREFIX_BYTES + int.from_bytes(prefix[4:6], "little")
    if end > HEADER_PREFIX_BYTES or any(prefix[end:]):
        raise WireError(f"the frame's header is longer than {HEADER_PREFIX_BYTES} bytes or not padded with zeros")
    frame = _frame(_fields(prefix[_PREFIX_BYTES:end]))
    _check_fields(frame)
    values = tuple(getattr(frame, name) for name in Frame.__slots__)
    at = Frame.__slots__.index("run_id")
    return values[:at], values[at + 1 : -2], frame


def _fields(data: bytes) -> list[Any]:
    try:
        fields = msgpack.unpackb(data, strict_map_key=True)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise WireError(f"the frame's header is not msgpack: {error!r}") from error
    if type(fields) is not list or len(fields) != _FIELDS:
        raise WireError(f"the frame's header is not a list of {_FIELDS} fields")
    return fields


def _frame(fields: list[Any]) -> Frame:
    kind, model, boot, number, layer, node, source, part, dtype, shape, row_start, numbers = fields
    if type(shape) is not list or type(numbers) is not list:
        raise WireError("the frame's shape and numbers must be lists")
    return Frame(
        kind=KINDS[_index("kind", kind, len(KINDS))],
        model=model,
        plan_version=PlanVersion(boot, number),
        run_id=0,
        layer=layer,
        node=node,
        source=source,
        part=part,
        dtype=DTYPES[_index("dtype", dtype, len(DTYPES))],
        shape=tuple(shape),
        row_start=row_start,
        numbers=tuple(numbers),
    )


def _index(what: str, value: object, count: int) -> int:
    if type(value) is not int or not 0 <= value < count:
        raise WireError(f"the frame's {what} {value!r} is unknown to this version")
    return value


def _check_fields(frame: Frame) -> None:
    """Raise WireError for a field of a wrong type or beyond its limit."""
    boot, version = frame.plan_version
    numbers = [(name, getattr(frame, name), rule) for name, rule in _NUMBERS.items()]
    for what, value, rule in [("boot", boot, COUNT), ("plan version", version, COUNT), *numbers]:
        try:
            rule(value)
        except ValueError as error:
            raise WireError(f"the frame's {what} {value!r} is {error}") from error
    _check_counts("shape", frame.shape, MAX_DIMS)
    _check_counts("numbers", frame.numbers, MAX_NUMBERS)
    if not (frame.model == "" and frame.kind == "probe"):
        _check_text_name("model", frame.model)
    _check_text_name("source", frame.source)


def _check_size(frame: Frame, body_bytes: int) -> None:
    if prod(frame.shape) * DTYPE_BYTES[frame.dtype] != body_bytes:
        raise WireError(f"the frame says {frame.dtype}{list(frame.shape)} but carries {body_bytes} bytes")
    if body_bytes > MAX_BODY_BYTES:
        raise WireError(f"the frame carries {body_bytes} bytes; the limit is {MAX_BODY_BYTES}")


def _check_counts(what: str, values: tuple[int, ...], limit: int) -> None:
    if len(values) > limit:
        raise WireError(f"the frame's {what} has {len(values)} entries; the limit is {limit}")
    for value in values:
        if type(value) is not int or not 0 <= value <= U32:
            raise WireError(f"the frame's {what} holds {value!r}, which is not a number from 0 to {U32}")


def _check_text_name(what: str, name: object) -> None:
    if type(name) is not str:
        raise WireError(f"the frame's {what} is not a text: {name!r}")
    _check_name(what, name)


@lru_cache(maxsize=1024)
def _check_name(what: str, name: str) -> None:
    try:
        _ = check_source(name) if what == "source" else check_model(name)
    except BadNameError as error:
        raise WireError(f"the frame's {what}: {error}") from error


def _body_view(frame: Frame) -> memoryview:
    body = frame.body
    if not isinstance(body, np.ndarray):
        return memoryview(body).cast("B")
    if body.dtype != NUMPY_DTYPE.get(frame.dtype) or body.shape != tuple(frame.shape):
        raise WireError(
            f"the frame says {frame.dtype}{list(frame.shape)} but its array is {body.dtype}{list(body.shape)}"
        )
    # memoryview.cast refuses empty arrays.
    return np.ascontiguousarray(body).reshape(-1).view(np.uint8).data


# -- work frames -----------------------------------------------------------------------------------------------------
#
# The body of a work frame: int32 [want, B, n_mask, cache, lengths (B), mask rows (n_mask)], with a cache also
# [session, flags, source] of each item, zeros to a multiple of 64, then the inputs. The header's numbers are the index
# of the inputs' dtype and their dimensions. A continued run has its first block as layer, and the earlier run's id as
# node (lower 32 bits) and part (upper 32 bits). A run that follows another run's answer has layer 0, that run's id as
# node and part, and each item's draw after the sessions. Other runs have layer, node and part 0.


class DecoderSession(NamedTuple):
    """The KV cache of an item of a run; each generation has its own number, also for a reused cache."""

    number: int = 0  #: 0 for an item without a session
    final: bool = False  #: whether devices drop the session after this run
    source: int = 0  #: session that holds the preceding rows, 0 for none
    takes_over: bool = False  #: whether the source ends, so that devices need not copy its rows


class Continued(NamedTuple):
    """The run that a run continues under another plan, and the first block to compute."""

    run_id: int
    block: int


class Followed(NamedTuple):
    """The run that produces a run's token ids, and the draw for each item."""

    run_id: int
    draws: tuple[Draw, ...]


_COUNTS: Final = struct.Struct("<4i")  # want, sequences, mask rows, cache
MAX_HEADS: Final = 64  # cached heads of work frames
_ADDED: Final = 16  # flag on a want's index: a row is added to each token's embedding
_SESSION_NUMBERS: Final = 3  # number, flags and source
_FINAL: Final = 1
_TAKES_OVER: Final = 2
_DRAW: Final = np.dtype(list(zip(Draw._fields, ("<u4", "<u8", "<f8", "<u4", "<f4", "<f4"), strict=True)))
MAX_TOGETHER: Final = 8  # sessions of one run


def want_number(shape: PlainShape) -> int:
    """Encode a run's want, and whether rows are added to its embeddings, as one number."""
    return WANTS.index(shape.want) | (_ADDED if shape.added else 0)


def want_of(number: int) -> tuple[Want, bool]:
    """Decode `want_number`. Raises ValueError for an unknown want."""
    want = number & ~_ADDED
    if not 0 <= want < len(WANTS):
        raise ValueError(f"a shape cannot have want {number}")
    return WANTS[want], bool(number & _ADDED)


def work_bytes(shape: RequestShape | PlainShape, input_nbytes: int) -> int:
    """Return the exact bytes of a run's work frame."""
    plain = shape.plain()
    return frame_bytes(_work_header_bytes(len(plain.sizes), len(plain.mask_rows), plain.session_rows) + input_nbytes)


def encode_work(
    model: str,
    plan_version: PlanVersion,
    run_id: int,
    shape: RequestShape | PlainShape,
    inputs: NDArray[Any],
    sessions: Sequence[DecoderSession] = (),
    key: FrameKey = UNKEYED,
    continued: Continued | None = None,
    follows: Followed | None = None,
) -> bytes:
    """Return the work frame of a run.

    inputs: packed token ids int32 [m], after each item's cached rows for a decoder [B + m], or pixels uint8
    [B, channels, size, size]. sessions: one per item, or none. continued: the run that this run continues.
    follows: the run whose answer replaces ids of -1 in `inputs`.
    Raises `WireError` if they do not fit `shape` or exceed a limit.
    """
    dtype: SlotDtype = "u8" if inputs.dtype == NUMPY_DTYPE["u8"] else "i32"
    if inputs.dtype != NUMPY_DTYPE[dtype]:
        raise WireError(f"inputs are {inputs.dtype}; send token ids as int32 or pixels as uint8")
    plain = shape.plain()
    _check_inputs(plain, dtype, inputs.shape)
    if plain.session_rows and not sessions:
        sessions = (DecoderSession(),) * len(plain.sizes)
    _check_sessions(plain, sessions)
    draws = b"" if follows is None else np.array([*follows.draws], _DRAW).tobytes()
    size = _work_header_bytes(len(plain.sizes), len(plain.mask_rows), plain.session_rows, len(draws))
    head = np.zeros(size // 4, NUMPY_DTYPE["i32"])
    counts = (want_number(plain), len(plain.sizes), len(plain.mask_rows), plain.session_rows)
    fields = (*counts, *plain.sizes, *plain.mask_rows, *chain.from_iterable(map(_session_fields, sessions)))
    head[: len(fields)] = fields
    head[len(fields) : len(fields) + len(draws) // 4] = np.frombuffer(draws, NUMPY_DTYPE["i32"])
    body = b"".join((head.tobytes(), np.ascontiguousarray(inputs).tobytes()))
    numbers = (_DTYPE_INDEX[dtype], *inputs.shape)
    work = Frame("work", model, plan_version, run_id, shape=(len(body),), numbers=numbers, body=body)
    if follows is not None:
        work = replace(work, node=follows.run_id & U32, part=follows.run_id >> 32)
    if continued is not None:
        work = continue_frame(replace(work, run_id=continued.run_id), run_id, continued.block)
    return encode(work, key)


def continue_frame(work: Frame, run_id: int, block: int) -> Frame:
    """Return the work frame of a run that continues the run of `work` from a block."""
    return replace(work, run_id=run_id, layer=block, node=work.run_id & U32, part=work.run_id >> 32, header=b"")


def decode_work(frame: Frame) -> tuple[PlainShape, NDArray[Any]]:
    """Return shape and inputs (a read-only view) of a work frame.

    The model compares ids with its vocabulary. Raises `WireError` for another frame or an inconsistent body.
    """
    shape, _, values = _decode_body(frame)
    inputs = np.frombuffer(values, NUMPY_DTYPE[DTYPES[frame.numbers[0]]]).reshape(frame.numbers[1:])
    inputs.flags.writeable = False
    return shape, inputs


def decode_sessions(frame: Frame) -> tuple[DecoderSession, ...]:
    """Return the sessions of a work frame, none without a cache. Raises as `decode_work`."""
    return _decode_body(frame)[1]


def _decode_body(frame: Frame) -> tuple[PlainShape, tuple[DecoderSession, ...], memoryview]:
    """Return shape, sessions and inputs (bytes) of a work frame."""
    if frame.kind != "work" or frame.dtype != "u8" or not frame.numbers:
        raise WireError(f"a frame of kind {frame.kind!r}, {frame.dtype} is not a work frame")
    dtype = DTYPES[_index("input dtype", frame.numbers[0], len(DTYPES))]
    dims = frame.numbers[1:]
    body = _body_view(frame)
    if len(body) < ALIGN:
        raise WireError(f"a work frame of {len(body)} bytes is truncated")
    want, sequences, masks, cache = _COUNTS.unpack_from(body)
    is_want = 0 <= want & ~_ADDED < len(WANTS)
    if not is_want or not 0 < sequences <= MAX_SEQUENCES or not 0 <= masks <= MAX_TOKENS:
        raise WireError(f"a run cannot have want {want}, {sequences} sequences, {masks} mask rows")
    draws = _draw_numbers(frame, sequences)
    head_bytes = _work_header_bytes(sequences, masks, cache, 4 * draws)
    if head_bytes + prod(dims) * DTYPE_BYTES[dtype] != len(body):
        raise WireError(f"a work frame of {len(body)} bytes has no {sequences} sequences and {dtype}{list(dims)}")
    return *_decode_head(bytes(body[:head_bytes]), dtype, dims, draws), body[head_bytes:]


@lru_cache(maxsize=MAX_HEADS)
def _decode_head(
    head: bytes, dtype: SlotDtype, dims: tuple[int, ...], draws: int
) -> tuple[PlainShape, tuple[DecoderSession, ...]]:
    """Return shape and sessions of a run; cached because most tokens of a text share a head.

    draws: count of int32 numbers for draws.
    """
    want, sequences, masks, cache, *numbers = np.frombuffer(head, NUMPY_DTYPE["i32"]).tolist()
    fields = numbers[sequences + masks :][: _session_numbers(sequences, cache)]
    of_sessions = list(zip(fields[::3], fields[1::3], fields[2::3], strict=True))
    if any(flags not in range(_FINAL + _TAKES_OVER + 1) for _, flags, _ in of_sessions):
        raise WireError("a session's flags are a sum of 1 (last run) and 2 (takes its source over)")
    if any(numbers[sequences + masks + len(fields) + draws :]):
        raise WireError("a work frame's lengths are not padded with zeros")
    kind, added = want_of(want)
    shape = PlainShape(tuple(numbers[:sequences]), kind, tuple(numbers[sequences : sequences + masks]), cache, added)
    sessions = tuple(DecoderSession(n, bool(f & _FINAL), source, bool(f & _TAKES_OVER)) for n, f, source in of_sessions)
    _check_inputs(shape, dtype, dims)
    _check_sessions(shape, sessions)
    return shape, sessions


def _session_fields(session: DecoderSession) -> tuple[int, int, int]:
    return session.number, _FINAL * session.final + _TAKES_OVER * session.takes_over, session.source


def decode_continued(frame: Frame) -> Continued | None:
    """Return the run that a work frame continues, None for a new run."""
    return Continued(frame.part << 32 | frame.node, frame.layer) if frame.layer else None


def decode_followed(frame: Frame) -> Followed | None:
    """Return the run and draws for ids of -1 in a work frame, None without them."""
    if not (run_id := _followed_run(frame)):
        return None
    body = _body_view(frame)
    _, sequences, masks, cache = _COUNTS.unpack_from(body)
    first = _COUNTS.size + 4 * (sequences + masks + _session_numbers(sequences, cache))
    draws = np.frombuffer(body[first : first + _DRAW.itemsize * sequences], _DRAW)
    return Followed(run_id, tuple(Draw(*draw) for draw in draws.tolist()))


def _followed_run(frame: Frame) -> int:
    return 0 if frame.layer else frame.part << 32 | frame.node


def _draw_numbers(frame: Frame, sequences: int) -> int:
    return _DRAW.itemsize // 4 * sequences if _followed_run(frame) else 0


def _check_sessions(shape: PlainShape, sessions: Sequence[DecoderSession]) -> None:
    valid = all(0 <= s.number <= MAX_SESSION and 0 <= s.source <= MAX_SESSION for s in sessions)
    other = all(s.source != s.number and s.takes_over <= (s.source > 0) for s in sessions if s.number)
    numbers = [session.number for session in sessions if session.number]
    none = all(session == DecoderSession() for session in sessions if not session.number)
    if not (valid and other and none) or len(sessions) != (len(shape.sizes) if shape.session_rows else 0):
        raise WireError(f"a run of {len(shape.sizes)} items with caches of {shape.session_rows} rows has {sessions}")
    if len(set(numbers)) < len(numbers):
        raise WireError(f"items of one run share a session: {sessions}")


def _work_header_bytes(sequences: int, masks: int, cache: int, draw_bytes: int = 0) -> int:
    numbers = sequences + masks + _session_numbers(sequences, cache)
    return -(-(_COUNTS.size + 4 * numbers + draw_bytes) // ALIGN) * ALIGN


def _session_numbers(sequences: int, cache: int) -> int:
    return _SESSION_NUMBERS * sequences if cache else 0


def check_shape(shape: PlainShape) -> None:
    """Raise `WireError` for an invalid shape of a run; its numbers are integers."""
    sequences, tokens = len(shape.sizes), shape.size
    if shape.want not in WANTS or not 0 < sequences <= MAX_SEQUENCES or min(shape.sizes) < 1 or tokens > MAX_TOKENS:
        raise WireError(
            f"a run needs 1 to {MAX_SEQUENCES} sequences of at least one token, at most {MAX_TOKENS} in all, got "
            f"{sequences} of {tokens} tokens (want {shape.want!r})"
        )
    rows = shape.mask_rows
    if rows and (rows[0] < 0 or rows[-1] >= tokens or any(a >= b for a, b in pairwise(rows))):
        raise WireError(f"mask rows must rise within 0 to {tokens - 1}")
    if shape.added and (sequences > 1 or not shape.session_rows):
        raise WireError("rows are added to the embeddings of one session's run")
    if shape.session_rows and (sequences > MAX_TOGETHER or not max(shape.sizes) <= shape.session_rows <= MAX_TOKENS):
        raise WireError(f"a cache of {shape.session_rows} rows is not for {sequences} sequences of {tokens} tokens")


def _check_inputs(shape: PlainShape, dtype: SlotDtype, dims: tuple[int, ...]) -> None:
    check_shape(shape)
    sequences, tokens = len(shape.sizes), shape.size
    # A session's inputs may contain more numbers than ids; the model defines their layout.
    row = dtype == "i32" and len(dims) == 1
    ids = row and (dims[0] > tokens if shape.session_rows else dims[0] == tokens)
    pixels = dtype == "u8" and len(dims) == 4 and dims[0] == sequences
    if not ids and not pixels:
        raise WireError(f"inputs {dtype}{list(dims)} fit neither {tokens} token ids nor {sequences} images")


# ----------------------------------------------------------------------------------------------------------------------
# Tensors from peers: the common fields of an exchange's frames are decoded and checked once.
#
# All runs of a shape have the same exchanges. If sender, topic, size and header prefix of a frame match a checked
# frame, only its run id is new, and no `Frame` is built. On a slow host, building it took as long as receiving.


MAX_EXCHANGES: Final = 2048  # cached exchanges, 1 KB each, enough for a large model


class CheckedExchange(NamedTuple):
    """The common fields of an exchange's frames."""

    header_prefix: bytes
    plan_key: tuple[str, PlanVersion]  #: model and plan version
    key: ExchangeKey
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int  #: of a whole frame
    head: bytes  #: all bytes of a packet before the array, with tag and run id 0


class TensorArrival(NamedTuple):
    """A tensor from a peer with a checked header."""

    exchange: CheckedExchange
    run_id: int
    payload: memoryview  #: the whole frame

    def array(self) -> NDArray[Any]:
        """Return the tensor as a read-only view."""
        # np.frombuffer keeps a reference to this memoryview, so `Buffers` sees that its buffer is in use.
        array = np.frombuffer(self.payload, self.exchange.dtype, -1, HEADER_BYTES).reshape(self.exchange.shape)
        array.flags.writeable = False
        return array

    def has_tag(self, key: FrameKey) -> bool:
        """Return whether the frame has the key's tag."""
        header, body = self.payload[:HEADER_BYTES], self.payload[HEADER_BYTES:]
        return not key.key or _has_tag(key, bytes(header), body)

    def frame(self) -> Frame:
        """Return the decoded frame."""
        return decode(self.payload)


class ExchangeCache:
    """Checked exchanges by sender, topic and header prefix."""

    def __init__(self) -> None:
        self._exchanges = Recent[tuple[str, str, bytes], CheckedExchange](MAX_EXCHANGES)

    def arrival(self, peer: str, topic: str, payload: memoryview) -> TensorArrival | None:
        """Return the tensor of a payload with a checked header; None if the caller must decode the payload."""
        exchange = self._exchanges.get((peer, topic, bytes(payload[:HEADER_PREFIX_BYTES])))
        if exchange is None or exchange.nbytes != payload.nbytes:
            return None
        run_id = int.from_bytes(payload[_RUN_ID_AT:HEADER_BYTES], "little")
        return TensorArrival(exchange, run_id, payload) if run_id <= U63 else None

    def learn(self, peer: str, topic: str, payload: memoryview, frame: Frame, packet_head: bytes = b"") -> None:
        """Cache the exchange of a decoded and permitted tensor frame; packet_head: its PUBLISH header."""
        if payload.nbytes == HEADER_BYTES:
            return  # np.frombuffer refuses an empty array
        prefix = bytes(payload[:HEADER_PREFIX_BYTES])
        self._exchanges[peer, topic, prefix] = CheckedExchange(
            prefix,
            (frame.model, frame.plan_version),
            (frame.node, frame.part, frame.source),
            np.dtype(NUMPY_DTYPE[frame.dtype]),
            frame.shape,
            payload.nbytes,
            packet_head + prefix.ljust(HEADER_BYTES, b"\0"),
        )
