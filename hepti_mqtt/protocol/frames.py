"""How much memory a payload holds while it waits."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, pairwise
from math import prod
from typing import Any, Final, Literal, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.errors import BadNameError, WireError
from hepti_mqtt.ids import PLANNER, PlanVersion, check_model
from hepti_mqtt.program import DTYPE_BYTES, NUMPY_DTYPE, ExchangeKey, SlotDtype
from hepti_mqtt.protocol.keys import TAG_BYTES, UNKEYED, FrameKey, frame_tag, same_tag
from hepti_mqtt.protocol.plausible import COUNT, U32, U63, number
from hepti_mqtt.protocol.topics import check_source
from hepti_mqtt.spec import Draw, PlainShape, RequestShape, Want

BUFFER_GRANULARITY: Final = (
    16_384  # buffers of payloads are a multiple of it, so that those of nearly one size share them
)


def held_bytes(nbytes: int) -> int:
    """Return the size of the buffer that a payload of so many bytes keeps from being used again."""
    return -(-max(nbytes, 1) // BUFFER_GRANULARITY) * BUFFER_GRANULARITY


# ----------------------------------------------------------------------------------------------------------------------
# Frames: one publish that carries one array, as a header of fixed size and raw little-endian bytes.
#
#     offset 0    4 bytes   magic b"HPT4" (the last byte is the version)
#     offset 4    2 bytes   length n of the header fields, little-endian
#     offset 6    n bytes   the fields, a msgpack array in the order of `Frame` without the admission number, `kind`
# and
#                           `dtype` as indices of KINDS and DTYPES
#     ...         zeros to offset 240
#     offset 240  8 bytes   the tag (`keys.frame_tag`), zeros under a plan without a key
#     offset 248  8 bytes   the admission number, little-endian
#     offset 256            the array, C order, little-endian; nothing after it
#
# The header has a fixed size so that the simulator counts bytes exactly, and a multiple of 64 so that the array is
# aligned when the payload is. All before the tag is the same in every request of a shape: it is written
# once, and read and checked once, which is most of what a small frame costs. Received bodies are views of the payload;
# nothing is allocated before every size is checked. The normative text is docs/reference/wire.md.


FrameKind = Literal["tensor", "work", "output", "done", "tile", "probe", "held", "wanted", "refused"]
Body = bytes | bytearray | memoryview

# Indices of these stand in the header, so only append.
KINDS: Final[tuple[FrameKind, ...]] = (
    "tensor",
    "work",
    "output",
    "done",
    "tile",
    "probe",
    "held",
    "wanted",
    "refused",
)
DTYPES: Final[tuple[SlotDtype, ...]] = ("f32", "f16", "i8", "u8", "i32")
WANTS: Final[tuple[Want, ...]] = ("task", "hidden", "candidates", "alignment")

MAGIC: Final = b"HPT4"
HEADER_BYTES: Final = 256
ALIGN: Final = 64
_PREFIX_BYTES: Final = 6
HEADER_PREFIX_BYTES: Final = 240  # the header but for its tag and its admission number
_RUN_ID_AT: Final = HEADER_PREFIX_BYTES + TAG_BYTES
_CACHED_PREFIXES: Final = 512  # read headers that are remembered, 2 KB each: those of a large model's exchanges

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
    """One array on its way, and what it is.

    node, part, source: which exchange of the request (epoch, admission) it is: a tensor of the model's graph by number,
    and the number of the message among those of its source. layer: where the tensor stands, as in the topic. shape: at
    most 4 dimensions; row_start: the first of its rows within the whole value. numbers: at most 8 counters (for
    example microseconds of computing and waiting, bytes sent). model may be empty in probes only. body: C order,
    little-endian, exactly as many bytes as shape and dtype say. header: of a frame that has come, as it was sent.
    """

    kind: FrameKind
    model: str
    plan_version: PlanVersion
    run_id: int
    layer: int = 0
    node: int = 0
    source: str = PLANNER
    part: int = 0
    dtype: SlotDtype = "u8"
    shape: tuple[int, ...] = (0,)
    row_start: int = 0
    numbers: tuple[int, ...] = ()
    body: Body | NDArray[Any] = b""
    header: bytes = b""

    def array(self) -> NDArray[Any]:
        """Return the body as a read-only array of `shape` and `dtype`: a view, no copy."""
        out = np.frombuffer(self.body, NUMPY_DTYPE[self.dtype]).reshape(self.shape)
        out.flags.writeable = False
        return out

    def equals(self, other: Frame) -> bool:
        """Return whether both are the same frame: header and body."""
        return bytes(encode(self)) == bytes(encode(other))

    def has_tag(self, key: FrameKey) -> bool:
        """Return whether a frame that has come is of somebody who knows the key."""
        return not key.key or _has_tag(key, self.header, _body_view(self))


def frame_bytes(body_bytes: int) -> int:
    """Return the bytes of a frame whose array has `body_bytes`."""
    return HEADER_BYTES + body_bytes


def _has_tag(key: FrameKey, header: bytes, body: Body) -> bool:
    tag = frame_tag(key, header[:HEADER_PREFIX_BYTES], header[_RUN_ID_AT:], body)
    return same_tag(tag, header[HEADER_PREFIX_BYTES:_RUN_ID_AT])


def encode(frame: Frame, key: FrameKey = UNKEYED) -> bytes:
    """Return the payload of a frame, with one copy of the body; as `encode_parts` otherwise."""
    return b"".join(encode_parts(frame, key))


def encode_parts(frame: Frame, key: FrameKey = UNKEYED) -> tuple[bytes, memoryview]:
    """Return the payload of a frame as its header and a view of its body, which is not copied.

    The body may be an array of any layout; it is sent in C order. Raises `WireError` if a field breaks the limits
    that `decode` checks.
    """
    body = _body_view(frame)
    return frame_header(header_prefix(frame, body.nbytes), run_id_bytes(frame.run_id), body, key), body


def header_prefix(frame: Frame, body_bytes: int) -> bytes:
    """Return a frame's header but for its tag and its admission number; raises `WireError` as `encode_parts` does."""
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
    """Return the end of a frame's header; raises `WireError` for a number out of its range."""
    if type(run_id) is not int or not 0 <= run_id <= U63:
        raise WireError(f"the frame's admission {run_id!r} is not a number from 0 to {U63}")
    return run_id.to_bytes(8, "little")


def frame_header(prefix: bytes, run_id: bytes, body: Body, key: FrameKey) -> bytes:
    """Return the header of a frame from what `header_prefix` and `run_id_bytes` returned."""
    return prefix + frame_tag(key, prefix, run_id, body) + run_id


def decode(payload: Body) -> Frame:
    """Return the frame of a payload; its body is a view of `payload`. Raises `WireError` on anything else."""
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
        raise WireError(f"the frame's admission {run_id} is not a number from 0 to {U63}")
    _check_size(frame, len(view) - HEADER_BYTES)
    values = (*before, run_id, *after, view[HEADER_BYTES:], header)
    return Frame(*values)


@lru_cache(maxsize=_CACHED_PREFIXES)
def _decode_prefix(about: bytes) -> tuple[tuple[Any, ...], tuple[Any, ...], Frame]:
    """Return a frame's values before and after its admission number, from what `about` returned, and such a frame."""
    end = _PREFIX_BYTES + int.from_bytes(about[4:6], "little")
    if end > HEADER_PREFIX_BYTES or any(about[end:]):
        raise WireError("the frame's header is longer than its place or not padded with zeros")
    frame = _frame(_fields(about[_PREFIX_BYTES:end]))
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
    """Raise WireError unless every field is of its type and within its limit."""
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


@lru_cache(maxsize=1024)  # the same few names come with every frame
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
    # A view of bytes has any shape, also an empty one, which memoryview.cast refuses.
    return np.ascontiguousarray(body).reshape(-1).view(np.uint8).data


# -- requests --------------------------------------------------------------------------------------------------------
#
# The body of a work frame: int32 [want, B, n_mask, cache, lengths (B), mask rows (n_mask)], with a cache [session,
# flags, source] of each item, zeros to a multiple of 64, then the inputs. The header's numbers say what the
# inputs are: index of their dtype, then their dimensions. Of a run that goes on with another one, layer is the block
# from which on, node and part are the lower and the upper 32 bits of the other's run id. Of a run that follows from
# another one's answer, layer is 0, node and part are the same, and how each item's id is drawn from it stands behind
# the sessions. Of all others the three are 0.


class DecoderSession(NamedTuple):
    """The KV cache of an item of a run; each request has a number of its own, also for a cache that it takes over."""

    number: int = 0  #: 0 for an item without a session
    final: bool = False  #: devices drop the session after this run
    source: int = 0  #: the session that has the rows before the run's own, 0 for none
    takes_over: bool = False  #: the source ends, so devices need not copy its rows


class Continued(NamedTuple):
    """The run that a run goes on with under another plan, and the block of the graph from which on."""

    run_id: int
    block: int


class Followed(NamedTuple):
    """The run from whose answer a run follows, and how the id of each item is drawn from it."""

    run_id: int
    draws: tuple[Draw, ...]


_COUNTS: Final = struct.Struct("<4i")  # want, sequences, mask rows, cache
MAX_HEADS: Final = 64  # of work frames
_ADDED: Final = 16  # with the index of a want: a row is added to the embedding of each token
_SESSION_NUMBERS: Final = 3  # of each session: its number, flags and source
_FINAL: Final = 1
_TAKES_OVER: Final = 2
_DRAW: Final = np.dtype(list(zip(Draw._fields, ("<u4", "<u8", "<f8", "<u4", "<f4", "<f4"), strict=True)))
MAX_TOGETHER: Final = 8  # sessions of one run


def want_number(shape: PlainShape) -> int:
    """Return what stands in messages for a run's want, and for whether rows are added to its embeddings."""
    return WANTS.index(shape.want) | (_ADDED if shape.added else 0)


def want_of(number: int) -> tuple[Want, bool]:
    """Return the want that a number stands for, and whether rows are added; raises ValueError for any other."""
    want = number & ~_ADDED
    if not 0 <= want < len(WANTS):
        raise ValueError(f"a shape cannot have want {number}")
    return WANTS[want], bool(number & _ADDED)


def work_bytes(shape: RequestShape | PlainShape, input_nbytes: int) -> int:
    """Return the exact bytes of the work frame of a request whose inputs have `input_nbytes`."""
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
    """Return the frame that hands a request to the devices; continued: with the rest of a run.

    follows: the run whose answer the ids that are -1 in `inputs` are drawn from.

    inputs: token ids int32 [m], packed, those of a decoder [B + m] behind the rows that the cache of each item has
    already, or pixels uint8 [B, channels, size, size]. sessions: of all items, none where they have none. Raises
    `WireError` if they do not fit `shape` or break a limit.
    """
    dtype: SlotDtype = "u8" if inputs.dtype == NUMPY_DTYPE["u8"] else "i32"
    if inputs.dtype != NUMPY_DTYPE[dtype]:
        raise WireError(f"inputs are {inputs.dtype}; send token ids as int32 or pixels as uint8")
    plain = shape.plain()
    _check_request(plain, dtype, inputs.shape)
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
    """Return the work frame of a run that goes on with that of `work` from a block on."""
    return replace(work, run_id=run_id, layer=block, node=work.run_id & U32, part=work.run_id >> 32, header=b"")


def decode_work(frame: Frame) -> tuple[PlainShape, NDArray[Any]]:
    """Return the request's shape and its inputs (a read-only view) of a work frame.

    Ids are not compared with a vocabulary here: that is the model's business. Raises `WireError` if the frame is no
    work frame or its body contradicts itself.
    """
    shape, _, values = _decode_body(frame)
    inputs = np.frombuffer(values, NUMPY_DTYPE[DTYPES[frame.numbers[0]]]).reshape(frame.numbers[1:])
    inputs.flags.writeable = False
    return shape, inputs


def decode_sessions(frame: Frame) -> tuple[DecoderSession, ...]:
    """Return the sessions of a work frame, none without a cache; raises as `decode_work` does."""
    return _decode_body(frame)[1]


def _decode_body(frame: Frame) -> tuple[PlainShape, tuple[DecoderSession, ...], memoryview]:
    """Return shape, sessions and the bytes of the inputs of a work frame."""
    if frame.kind != "work" or frame.dtype != "u8" or not frame.numbers:
        raise WireError(f"a frame of kind {frame.kind!r}, {frame.dtype} is not a request")
    dtype = DTYPES[_index("input dtype", frame.numbers[0], len(DTYPES))]
    dims = frame.numbers[1:]
    body = _body_view(frame)
    if len(body) < ALIGN:
        raise WireError(f"a request of {len(body)} bytes is truncated")
    want, sequences, masks, cache = _COUNTS.unpack_from(body)
    known = 0 <= want & ~_ADDED < len(WANTS)
    if not known or not 0 < sequences <= MAX_SEQUENCES or not 0 <= masks <= MAX_TOKENS:
        raise WireError(f"a request cannot have want {want}, {sequences} sequences, {masks} mask rows")
    draws = _draw_numbers(frame, sequences)
    head_bytes = _work_header_bytes(sequences, masks, cache, 4 * draws)
    if head_bytes + prod(dims) * DTYPE_BYTES[dtype] != len(body):
        raise WireError(f"a request of {len(body)} bytes does not hold {sequences} sequences and {dtype}{list(dims)}")
    return *_decode_head(bytes(body[:head_bytes]), dtype, dims, draws), body[head_bytes:]


@lru_cache(maxsize=MAX_HEADS)
def _decode_head(
    head: bytes, dtype: SlotDtype, dims: tuple[int, ...], draws: int
) -> tuple[PlainShape, tuple[DecoderSession, ...]]:
    """Return shape and sessions of a request; most tokens of a text have the same head. draws: numbers of draws."""
    want, sequences, masks, cache, *numbers = np.frombuffer(head, NUMPY_DTYPE["i32"]).tolist()
    named = numbers[sequences + masks :][: _session_numbers(sequences, cache)]
    of_sessions = list(zip(named[::3], named[1::3], named[2::3], strict=True))
    if any(flags not in range(_FINAL + _TAKES_OVER + 1) for _, flags, _ in of_sessions):
        raise WireError("a session's flags are those of its last run, 1, and of taking its source over, 2")
    if any(numbers[sequences + masks + len(named) + draws :]):
        raise WireError("the request's lengths are not padded with zeros")
    kind, added = want_of(want)
    shape = PlainShape(tuple(numbers[:sequences]), kind, tuple(numbers[sequences : sequences + masks]), cache, added)
    sessions = tuple(DecoderSession(n, bool(f & _FINAL), source, bool(f & _TAKES_OVER)) for n, f, source in of_sessions)
    _check_request(shape, dtype, dims)
    _check_sessions(shape, sessions)
    return shape, sessions


def _session_fields(session: DecoderSession) -> tuple[int, int, int]:
    return session.number, _FINAL * session.final + _TAKES_OVER * session.takes_over, session.source


def decode_continued(frame: Frame) -> Continued | None:
    """Return with what run a work frame goes on, None if the run begins with its request."""
    return Continued(frame.part << 32 | frame.node, frame.layer) if frame.layer else None


def decode_followed(frame: Frame) -> Followed | None:
    """Return what the ids of a work frame that are -1 are drawn from, None where none are."""
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
    named = [session.number for session in sessions if session.number]
    none = all(session == DecoderSession() for session in sessions if not session.number)
    if not (valid and other and none) or len(sessions) != (len(shape.sizes) if shape.session_rows else 0):
        raise WireError(f"a run of {len(shape.sizes)} items with caches of {shape.session_rows} rows has {sessions}")
    if len(set(named)) < len(named):
        raise WireError(f"items of one run share a session: {sessions}")


def _work_header_bytes(sequences: int, masks: int, cache: int, draw_bytes: int = 0) -> int:
    numbers = sequences + masks + _session_numbers(sequences, cache)
    return -(-(_COUNTS.size + 4 * numbers + draw_bytes) // ALIGN) * ALIGN


def _session_numbers(sequences: int, cache: int) -> int:
    return _SESSION_NUMBERS * sequences if cache else 0


def check_shape(shape: PlainShape) -> None:
    """Raise `WireError` unless a request may have this shape; its numbers are whole numbers."""
    sequences, tokens = len(shape.sizes), shape.size
    if shape.want not in WANTS or not 0 < sequences <= MAX_SEQUENCES or min(shape.sizes) < 1 or tokens > MAX_TOKENS:
        raise WireError(
            f"a request needs 1 to {MAX_SEQUENCES} sequences of at least one token, at most {MAX_TOKENS} in all, got "
            f"{sequences} of {tokens} tokens (want {shape.want!r})"
        )
    rows = shape.mask_rows
    if rows and (rows[0] < 0 or rows[-1] >= tokens or any(a >= b for a, b in pairwise(rows))):
        raise WireError(f"mask rows must rise within 0 to {tokens - 1}")
    if shape.added and (sequences > 1 or not shape.session_rows):
        raise WireError("rows are added to the embeddings of one session's run")
    if shape.session_rows and (sequences > MAX_TOGETHER or not max(shape.sizes) <= shape.session_rows <= MAX_TOKENS):
        raise WireError(f"a cache of {shape.session_rows} rows is not for {sequences} sequences of {tokens} tokens")


def _check_request(shape: PlainShape, dtype: SlotDtype, dims: tuple[int, ...]) -> None:
    check_shape(shape)
    sequences, tokens = len(shape.sizes), shape.size
    # What a run of a session brings beside its ids, the model's own layout says.
    row = dtype == "i32" and len(dims) == 1
    ids = row and (dims[0] > tokens if shape.session_rows else dims[0] == tokens)
    pixels = dtype == "u8" and len(dims) == 4 and dims[0] == sequences
    if not ids and not pixels:
        raise WireError(f"inputs {dtype}{list(dims)} fit neither {tokens} token ids nor {sequences} images")


# ----------------------------------------------------------------------------------------------------------------------
# Tensors as they come from peers: what all frames of one exchange have in common is read and checked once.
#
# The same exchanges come with every request of a shape. Of a frame whose sender, topic, size and header (but for its
# admission number) are those of one that was checked before, only the number is new: nothing else is read of it, and
# no
# `Frame` is made, which on a slow host took as long as the kernel did to receive it.


MAX_EXCHANGES: Final = 2048  # exchanges, 1 KB each: those of a large model


class KnownExchange(NamedTuple):
    """What the frames of an exchange have in common. plan_key: model and epoch. nbytes: of a whole frame.

    head: what stands before the array on the connection, with zeros for tag and number of the run.
    """

    header_prefix: bytes
    plan_key: tuple[str, PlanVersion]
    key: ExchangeKey
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int
    head: bytes


class TensorArrival(NamedTuple):
    """A tensor that has come over mesh, as good as checked; payload: its whole frame."""

    exchange: KnownExchange
    run_id: int
    payload: memoryview

    def array(self) -> NDArray[Any]:
        """Return its read-only array: a view, no copy."""
        # An ndarray made of the payload itself would refer to the memory behind it, and not to the view by which
        # `Buffers` knows that it is in use.
        array = np.frombuffer(self.payload, self.exchange.dtype, -1, HEADER_BYTES).reshape(self.exchange.shape)
        array.flags.writeable = False
        return array

    def has_tag(self, key: FrameKey) -> bool:
        """Return whether it is of somebody who knows the key."""
        if not key.key:
            return True
        end, body = bytes(self.payload[HEADER_PREFIX_BYTES:HEADER_BYTES]), self.payload[HEADER_BYTES:]
        return same_tag(frame_tag(key, self.exchange.header_prefix, end[TAG_BYTES:], body), end[:TAG_BYTES])

    def frame(self) -> Frame:
        """Return all that its frame says."""
        return decode(self.payload)


class ExchangeCache:
    """The exchanges whose frames were checked, by sender, topic and header."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, bytes], KnownExchange] = {}

    def arrival(self, peer: str, topic: str, payload: memoryview) -> TensorArrival | None:
        """Return a payload as an arrival of a known exchange; None for what has to be read and checked as a whole."""
        exchange = self._known.get((peer, topic, bytes(payload[:HEADER_PREFIX_BYTES])))
        if exchange is None or exchange.nbytes != payload.nbytes:
            return None
        run_id = int.from_bytes(payload[_RUN_ID_AT:HEADER_BYTES], "little")
        return TensorArrival(exchange, run_id, payload) if run_id <= U63 else None

    def learn(self, peer: str, topic: str, payload: memoryview, frame: Frame, packet_head: bytes = b"") -> None:
        """Remember the exchange of a tensor's frame that was read from `payload` and may come from there.

        packet_head: what its packets begin with.
        """
        if payload.nbytes == HEADER_BYTES:
            return  # an empty array has no place in a payload
        if len(self._known) >= MAX_EXCHANGES:
            self._known.clear()
        prefix = bytes(payload[:HEADER_PREFIX_BYTES])
        self._known[peer, topic, prefix] = KnownExchange(
            prefix,
            (frame.model, frame.plan_version),
            (frame.node, frame.part, frame.source),
            np.dtype(NUMPY_DTYPE[frame.dtype]),
            frame.shape,
            payload.nbytes,
            packet_head + prefix.ljust(HEADER_BYTES, b"\0"),
        )
