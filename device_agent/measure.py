"""Self-measurement: how fast this device computes and exchanges frames, in the terms of its profile."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, cycle, groupby, islice
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from device_agent.machine import core_capacities, last_level_cache_bytes, usable_cores
from hepti_mqtt import __version__
from hepti_mqtt.config.state import write_atomically
from hepti_mqtt.cost.reported import profile_from_caps
from hepti_mqtt.errors import HeptiError
from hepti_mqtt.ids import PlanVersion
from hepti_mqtt.kernels import KERNELS, Weight, Workers, allocate, isa, twin, weight_bytes
from hepti_mqtt.kernels.calls import Call, Calls, Operand, received, sent
from hepti_mqtt.kernels.cpu import cpu_model
from hepti_mqtt.kernels.jit import JIT, cache_directory
from hepti_mqtt.kernels.tape import Tape
from hepti_mqtt.kernels.transfers import Peers
from hepti_mqtt.plan import WeightDtype
from hepti_mqtt.program import Compute, Program, Recv, SlotSpec, WeightRef
from hepti_mqtt.protocol.frames import Frame, decode, encode, encode_parts
from hepti_mqtt.runtime.worker.executor import Executor, bind
from hepti_mqtt.storage import BLOCK_STORAGES, PRODUCTS, STORAGES, BlockStorage, Product, StoredRows
from hepti_mqtt.transport.mesh import Mesh
from hepti_mqtt.transport.peer import Address
from hepti_mqtt.transport.sockets import mesh_possible

_TOPIC: Final = "x/m/0/near/far"
_PATIENCE_S: Final = 0.5
_TRIES: Final = 4
PEERS: Final = 3  # frames that follow each other, as in an exchange of four devices: the first finds cold caches


class LoopbackMesh:
    """Two endpoints on loopback, one of which reads from the other; raises OSError if they cannot be opened."""

    def __init__(self) -> None:
        self._events: list[object] = []
        self._pool, self._tapes = Workers(1), dict[int, tuple[Tape, list[NDArray[np.uint8]]]]()
        with contextlib.ExitStack() as stack:
            self._near = Mesh("127.0.0.1", 0, user="near", on_message=_ignore, on_event=self._events.append)
            stack.callback(self._near.close)
            self._far = Mesh("127.0.0.1", 0, user="far", on_message=_ignore, on_event=self._events.append)
            stack.callback(self._far.close)
            self._stack = stack.pop_all()

    def __enter__(self) -> LoopbackMesh:
        """Connect them; raises TimeoutError if that takes long."""
        self._near.admit("far", "self", "token", [_TOPIC])
        self._far.join("near", "self", Address("127.0.0.1", self._near.port), "token", [_TOPIC])
        for _ in range(_TRIES):
            if not self._events:
                self._far.wait(_PATIENCE_S)
        if not self._events:
            self._stack.close()
            raise TimeoutError("an endpoint of this process does not answer")
        for mesh in (self._near, self._far):
            self._stack.enter_context(mesh.channels.hold())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def echo(self, body: NDArray[np.uint8]) -> None:
        """Send an array `PEERS` times, and receive it, as a tape does; raises TimeoutError if it does not come."""
        tape, arrays = self._tapes.get(body.size) or self._tapes.setdefault(body.size, self._tape(body))
        peers = Peers(1, self._far.channels.wake, int(1e3 * _PATIENCE_S))
        if tape.run(arrays, peers=peers) < len(tape.calls):
            raise TimeoutError("a frame does not come back")

    def _tape(self, body: NDArray[np.uint8]) -> tuple[Tape, list[NDArray[np.uint8]]]:
        """Return a tape that exchanges an array, and its arrays."""
        sends, *receives = (Operand(slot, 0, body.shape, body.dtype) for slot in range(1 + PEERS))
        tape = Tape(
            [Calls([Call(sent, (sends,)), Call(received, (each,))]) for each in receives], self._pool, range(1 + PEERS)
        )
        header, _ = encode_parts(Frame("tensor", "m", PlanVersion(1, 1), 1, source="near", shape=body.shape, body=body))
        counted, near, far = len(header) + body.size, self._near.channels, self._far.channels
        head = (near.route("far", _TOPIC, counted) or b"") + header
        for row in range(len(tape.calls)):
            tape.learn(row, far.channel("near") if row % 2 else near.channel("far"), head, counted)
        return tape, [body, *(np.empty_like(body) for _ in receives)]


def _ignore(*_: object) -> None:
    """Take a message that comes when nothing is measured."""


# ----------------------------------------------------------------------------------------------------------------------
# Self-measurement: what this device tells the planner about its speed, in the terms of `cluster.profile_from_caps`.


Curves = dict[str, Any]

SHAPES: Final = ((384, 384), (384, 1536), (1024, 1024), (1024, 4096))
ROWS: Final = (1, 8, 32, 128)
_MIDDLE: Final = 2  # the shape in which narrower storages are measured
REPEATS: Final = 3
WINDOW_S: Final = 0.06  # several periods of a CPU quota: a short op fits into what one period allows at full speed
BUDGET_S: Final = 2.0  # larger shapes are left out when they would take the measurement beyond that
CHAIN: Final = 512  # ops of a run, which takes as long beside them as some hundred ops
FRAME_SIZES: Final = (256, 1 << 20)
MESH_SIZES: Final = (256, 1 << 16)
MAX_COLD_BYTES: Final = 64 << 20  # of weights, however large the caches are: making them takes time
TRIES: Final = 3  # to measure a small and a large frame until the large one takes longer
MAX_DRIFT: Final = 1.25  # a cached measurement that is off by more is made again

OUTLIER_RATIO: Final = 4.0  # times as long as any other run
_PIECE: Final = 1 << 14  # of a frame: less than any connection holds back
_SPOT: Final = (0, 2)  # shape and rows of the quick check of a cached measurement


def load_or_measure(
    file: Path,
    workers: Workers,
    memory_bytes: int,
    with_narrow_weights: bool = True,
    force: bool = False,
    check: Callable[[], None] = lambda: None,
    trusted_since_s: float | None = None,
    most_storages: int | None = None,
) -> tuple[Curves, bool]:
    """Return the curves and whether they come from the cache, `file`; the caller holds the compile lock.

    A cached measurement counts for the same version, instruction set, CPU, threads and share of the cores, if one
    quick matmul takes about as long as it did then, and not with `force`. One written since `trusted_since_s` (Unix
    time) needs no such check: a neighbour has just made it, and while others start the check would often fail.
    with_narrow_weights: their kernels must be ready. check: called before each point and before a result is cached; it
    raises if the device is needed for something else. most_storages: of narrow weights that are added to a cached
    measurement.
    """
    key = {
        "version": __version__,
        "isa": isa(),
        "threads": workers.threads,
        "cores": usable_cores(),
        "capacities": core_capacities(),
        "cpu": cpu_model(),
        "mesh": mesh_possible(),
        "weights": "cold, of twice the caches",
        "ops and frames": "rows of a tape",
    }
    curves = None if force else _cached(file, key)
    cached = curves is not None and (
        _written_since(file, trusted_since_s) or _still_accurate(curves, workers, memory_bytes)
    )
    if curves is None or not cached:
        curves = measure(workers, memory_bytes, with_narrow_weights, check)
        _store(file, key, curves, check)
    elif with_narrow_weights:
        for of_storage in islice(_narrow(curves, workers, memory_bytes, check), most_storages):
            curves, cached = {**curves, "linear": curves["linear"] + of_storage}, False
            _store(file, key, curves, check)
    return curves, cached


def _store(file: Path, key: Curves, curves: Curves, check: Callable[[], None]) -> None:
    """Cache a measurement that nothing has disturbed."""
    check()
    with suppress(OSError):  # then the next start measures again
        write_atomically(file, json.dumps({"key": key, "curves": curves}).encode())


def measurement_file(own: Path, threads: int) -> Path:
    """Return the file of a measurement, which agents of a machine share: in the compile cache, else in `own`."""
    shared = cache_directory()
    directory = own if shared is None or not os.access(shared, os.W_OK) else shared
    return directory / f"hepti-measurement-{threads}-{usable_cores():g}.json"


def _written_since(file: Path, since_s: float | None) -> bool:
    with suppress(OSError):
        return since_s is not None and file.stat().st_mtime >= since_s
    return False


def has_narrow_curves(curves: Curves) -> bool:
    """Return whether curves are those of every storage of weights, and of activations in int8 where they may be so."""
    return set(map(_product, curves["linear"])) >= set(PRODUCTS)


def _product(curve: Curves) -> Product:
    return Product(curve.get("storage", "f32"), curve.get("x") == "i8")


def measure(
    workers: Workers, memory_bytes: int, narrow: bool = True, check: Callable[[], None] = lambda: None
) -> Curves:
    """Return time curves and rates of this device; takes about 5 s at most. Kernels must be warm.

    Weights come from memory, not from a cache: a model's do, of which all others are used between two uses of one.
    memory_bytes: shapes whose weights would take more than a quarter of it are left out. narrow: with narrow weights.
    check: called before each point. Raises HeptiError if two measurements in a row are implausible.
    """
    with suppress(ValueError):  # as after a stall of seconds
        return _measured(workers, memory_bytes, narrow, check)
    try:
        return _measured(workers, memory_bytes, narrow, check)
    except ValueError as error:
        why = f"self-measurement failed: {error}. Restart the agent when the machine is otherwise idle"
        raise HeptiError(why) from error


def _measured(workers: Workers, memory_bytes: int, narrow: bool, check: Callable[[], None]) -> Curves:
    """Return one measurement; raises ValueError if it is implausible."""
    linear: list[Curves] = []
    begin = time.perf_counter()
    for k, n in SHAPES:
        too_slow = bool(linear) and time.perf_counter() - begin + _expected(linear[-1], k, n) > BUDGET_S
        if linear and (too_slow or 4 * weight_bytes(_matrix(k, n)) > memory_bytes):
            continue
        linear.append({"k": k, "n": n, "points": _linear_points(_ColdMatmul(k, n, memory_bytes), workers, check)})
    forget = _cache_flusher(linear, workers, memory_bytes)
    curves: Curves = {
        "linear": linear,
        "attention_flops_per_s": _attention(workers),
        "rowwise_bytes_per_s": _rowwise(workers),
        "op_overhead_s": _op_overhead(workers, forget),
        **_frames(forget),
        **_mesh_frames(forget),
    }
    del forget  # its weights: those of one measurement at a time are enough
    if narrow:
        linear += list(chain.from_iterable(_narrow(curves, workers, memory_bytes, check)))
    profile_from_caps("self", curves, memory_bytes, 1.0)
    return curves


def _narrow(curves: Curves, workers: Workers, memory_bytes: int, check: Callable[[], None]) -> Iterator[list[Curves]]:
    """Measure the curves of narrow weights that are missing, and yield those of one storage after the other."""
    known = list(map(_product, curves["linear"]))
    whole, n = SHAPES[min(_MIDDLE, known.count(Product()) - 1)]
    for storage, products in groupby((one for one in PRODUCTS if one not in known), attrgetter("weights")):
        k = whole - whole % STORAGES[storage].block if storage in STORAGES else whole
        weights, of_storage = _ColdMatmul(k, n, memory_bytes, storage), []
        for product in products:
            points = _linear_points(weights, workers, check, product.rounded)
            x = {"x": "i8"} if product.rounded else {}
            of_storage.append({"k": k, "n": n, "points": points, "storage": storage, **x})
        del weights  # those of one measurement at a time are enough
        yield of_storage


def _expected(measured: Curves, k: int, n: int) -> float:
    """Return how long measuring [k, n] will take, by what another shape took."""
    area = k * n / (measured["k"] * measured["n"])
    return float(sum(max(WINDOW_S, (1 + REPEATS) * seconds * area) for _, seconds in measured["points"]))


def _cached(path: Path, key: Curves) -> Curves | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        curves: Curves = found["curves"]
        profile_from_caps("self", curves, 0.0, 1.0)
        return curves if found["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _still_accurate(curves: Curves, workers: Workers, memory_bytes: int) -> bool:
    shape, row = _SPOT
    k, n = SHAPES[shape]
    for curve in curves["linear"]:
        if (curve["k"], curve["n"]) == (k, n) and len(curve["points"]) > row:
            rows, before = curve["points"][row]
            now = _seconds(_ColdMatmul(k, n, memory_bytes).run(rows, workers), workers.threads)
            return bool(max(now / before, before / now) <= MAX_DRIFT)
    return False


def _matrix(k: int, n: int, storage: WeightDtype | BlockStorage = "f32") -> WeightRef:
    return WeightRef("w", (0, k), (0, n), "packed", storage)


class _ColdMatmul:
    """Weights [k, n] several times, together more than the caches hold, and what multiplies by each of them in turn.

    memory_bytes: a quarter of it is not exceeded while more than one is left.
    """

    def __init__(self, k: int, n: int, memory_bytes: int, storage: WeightDtype | BlockStorage = "f32") -> None:
        self._refs = (_matrix(k, n, storage), WeightRef("b", (0, 1), (0, n), "plain"))
        rng = np.random.default_rng(0)
        values: list[NDArray[Any] | StoredRows] = [
            rng.standard_normal((ref.rows[1], n), np.float32) for ref in self._refs
        ]
        if storage in BLOCK_STORAGES:
            kind = STORAGES[storage]  # any bytes will do whose scales are normal numbers
            values[0] = StoredRows(kind, np.full((n, kind.row_bytes(k)), 0x11, np.uint8))
        nbytes = sum(map(weight_bytes, self._refs))
        most = min(2 * last_level_cache_bytes(), MAX_COLD_BYTES, memory_bytes // 4)
        first = _packed(self._refs, values)
        self._copies = [first, *([twin(weight) for weight in first] for _ in range(most // nbytes - 1))]
        self._k, self._n = k, n

    def run(self, rows: int, workers: Workers, rounded: bool = False) -> Callable[[], None]:
        """Return what multiplies `rows` rows, rounded to int8 first or not, by the next of the matrices."""
        attrs = {"bias": True, "activation": None, "residual": False, **({"x": "i8"} if rounded else {})}
        op = Compute("linear", (0,), (1,), self._refs, attrs)
        slots = (SlotSpec((rows, self._k)), SlotSpec((rows, self._n)))
        reads, writes = _arrays(op, slots)
        runs = cycle([KERNELS[op.kernel].bind(op, slots, weights, workers) for weights in self._copies])
        return lambda: next(runs)(reads, writes)


def _packed(refs: Sequence[WeightRef], values: Sequence[NDArray[Any] | StoredRows]) -> list[Weight]:
    out: list[Weight] = []
    for ref, value in zip(refs, values, strict=True):
        buffer = allocate(ref)
        buffer.put(value, 0, 0)
        out.append(buffer.finish())
    return out


def _linear_points(
    weights: _ColdMatmul, workers: Workers, check: Callable[[], None], rounded: bool = False
) -> list[list[float]]:
    points: list[list[float]] = []
    for rows in ROWS:
        check()
        points.append([rows, _seconds(weights.run(rows, workers, rounded), workers.threads)])
    return monotone(points)


def monotone(points: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the points [rows, seconds] made monotone: fewer rows never take longer, which removes disturbances."""
    out: list[list[float]] = []
    for rows, seconds in reversed(points):
        out.append([rows, min(seconds, out[-1][1]) if out else seconds])
    return out[::-1]


def _runner(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], workers: Workers) -> Callable[[], None]:
    run = KERNELS[op.kernel].bind(op, slots, weights, workers)
    reads, writes = _arrays(op, slots)
    return lambda: run(reads, writes)


def _arrays(op: Compute, slots: Sequence[SlotSpec]) -> tuple[list[Any], list[Any]]:
    rng = np.random.default_rng(1)
    reads = [rng.standard_normal(slots[s].shape, np.float32) for s in op.reads]
    return reads, [np.empty(slots[s].shape, np.float32) for s in op.writes]


def _seconds(act: Callable[[], object], threads: int = 1, before: Callable[[], object] | None = None) -> float:
    """Return the mean time of runs within a window, the first of which does not count; threads: that a run keeps busy.

    Where the system gives less than that, time is processor time over the cores that it gives: what a clock on the wall
    shows depends on where in the quota's period a run begins. before: called before each run, in no time. Runs that
    were held up (swapping, a process that was stopped) do not count.
    """
    share = usable_cores()
    clock, part = (time.process_time, share) if share < threads else (time.perf_counter, 1.0)
    act()
    spent: list[float] = []
    start = time.perf_counter()
    while time.perf_counter() - start < WINDOW_S or len(spent) < REPEATS:
        if before is not None:
            before()
        begin = clock()
        act()
        spent.append(clock() - begin)
    return max(fmean(without_outliers(spent)) / part, 1e-9)


def without_outliers(spent: Sequence[float]) -> list[float]:
    """Return times without the longest, while that is out of all proportion to the next one.

    Not all that are far above the usual: of an op that fits several times into what a hidden quota gives at once, every
    few take ten times as long, and they are what the quota costs.
    """
    left = sorted(spent)
    while len(left) > 1 and left[-1] > OUTLIER_RATIO * left[-2]:
        left.pop()
    return left


def _attention(workers: Workers) -> float:
    rows, heads, head_dim = 128, 8, 64
    width = heads * head_dim
    attrs = {
        "q_column": 0,
        "k_column": width,
        "v_column": 2 * width,
        "heads": heads,
        "head_dim": head_dim,
        "q_rows": range(rows),
        "k_rows": ((0, rows),),
        "lengths": (rows,),
        "scale": head_dim**-0.5,
    }
    slots = (SlotSpec((rows, 3 * width)), SlotSpec((rows, width)))
    op = Compute("attention", (0, 0), (1,), (), attrs)
    return float(KERNELS["attention"].work(op, slots).flops) / _seconds(
        _runner(op, slots, (), workers), workers.threads
    )


def _rowwise(workers: Workers) -> float:
    rows, hidden = 128, 1024
    slots = (SlotSpec((rows, hidden)), SlotSpec((rows, hidden)))
    refs = tuple(WeightRef(name, (0, 1), (0, hidden), "plain") for name in ("gamma", "beta"))
    op = Compute("layer_norm", (0,), (1,), refs, {"eps": 1e-5})
    weights = [np.ones(hidden, np.float32), np.zeros(hidden, np.float32)]
    nbytes = float(KERNELS["layer_norm"].work(op, slots).nbytes)
    return nbytes / _seconds(_runner(op, slots, weights, workers), workers.threads)


def _op_overhead(workers: Workers, forget: Callable[[], None]) -> float:
    """Return the time of one op that computes nearly nothing, by way of the executor, as it is between two matmuls."""
    ops = [Compute("add", (n, n), (n + 1,), (), {"bias": False}) for n in range(CHAIN)]
    program = Program("self", (SlotSpec((1, 8)),) * (CHAIN + 1), (Recv(0, "planner", 0), *ops))
    bound, first = bind(program, {}, workers), 0
    executor = Executor()
    inputs = np.zeros((1, 8), np.float32)

    def chain() -> None:
        executor.admit(first, bound)
        executor.deliver(first, (0, 0, "planner"), inputs)
        step = executor.next_step()
        assert step is not None
        step.run()
        executor.drop(first)

    return _seconds(chain, before=forget) / CHAIN


def _cache_flusher(linear: Sequence[Curves], workers: Workers, memory_bytes: int) -> Callable[[], None]:
    """Return what fills the caches with a matmul's data, as happens before nearly all that a device does.

    Of a shape that was measured: larger ones would take more of the memory than a measurement may.
    """
    measured = linear[min(_MIDDLE, len(linear) - 1)]
    return _ColdMatmul(measured["k"], measured["n"], memory_bytes).run(8, workers)


def _frames(forget: Callable[[], None]) -> Curves:
    """Return the fixed time and the rate of sending, or of receiving, a frame: making or reading it, and TCP's work.

    Through a connection to itself: no link is in it, and what a slow CPU needs for a fast one is.
    """
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            frame_s, rate = _fit_frame_cost(lambda body: _echo_frame(body, near, far), FRAME_SIZES, forget)
    return {"frame_s": frame_s, "copy_bytes_per_s": rate}


def _fit_frame_cost(
    act: Callable[[Any], object], sizes: tuple[int, int], forget: Callable[[], None], count: int = 1
) -> tuple[float, float]:
    """Return the fixed time and the rate of a frame from rounds of small and of large ones, of a half each.

    count: frames of a round.

    A small one that takes no less was held up, and would make bytes cost nothing and frames cost too much.
    """
    rounds = [partial(act, np.zeros(size, np.uint8)) for size in sizes]
    for _ in range(TRIES):
        small, large = (_seconds(each, before=forget) / (2 * count) for each in rounds)
        if large > small:
            break
    return min(small, large), (sizes[1] - sizes[0]) / max(large - small, 1e-9)


def _echo_frame(body: np.ndarray[Any, np.dtype[np.uint8]], near: socket.socket, far: socket.socket) -> object:
    frame = memoryview(encode(Frame("tensor", "m", PlanVersion(1, 1), 1, source="self", shape=body.shape, body=body)))
    received = memoryview(bytearray(len(frame)))
    for start in range(0, len(frame), _PIECE):
        piece = frame[start : start + _PIECE]
        near.sendall(piece)
        read = start
        while read < start + len(piece):
            read += far.recv_into(received[read : start + len(piece)])
    return decode(received).array()


def _mesh_frames(forget: Callable[[], None]) -> Curves:
    """Return the same of a frame over mesh, for each receiver; nothing where there is no mesh."""
    if not JIT or not mesh_possible():
        return {}
    try:
        with LoopbackMesh() as mesh:
            frame_s, rate = _fit_frame_cost(mesh.echo, MESH_SIZES, forget, PEERS)
    except (OSError, TimeoutError):  # no address or no descriptors are left; what plans take instead is good enough
        return {}
    return {"mesh_frame_s": frame_s, "mesh_copy_bytes_per_s": rate}
