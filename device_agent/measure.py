"""Self-measurement: the times of ops and frames on this device, as the curves of its profile."""

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
from hepti_mqtt.core.errors import HeptiError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import WeightDtype
from hepti_mqtt.core.program import Compute, Program, Recv, SlotSpec, WeightRef
from hepti_mqtt.core.storage import BLOCK_STORAGES, PRODUCTS, STORAGES, BlockStorage, Product, StoredRows
from hepti_mqtt.cost.reported import profile_from_caps
from hepti_mqtt.kernels import KERNELS, Weight, Workers, allocate, isa, twin, weight_bytes
from hepti_mqtt.kernels.calls import Call, Calls, Operand, received, sent
from hepti_mqtt.kernels.cpu import cpu_model
from hepti_mqtt.kernels.jit import JIT, cache_directory
from hepti_mqtt.kernels.tape import Tape
from hepti_mqtt.kernels.transfers import Peers
from hepti_mqtt.protocol.frames import Frame, decode, encode, encode_parts
from hepti_mqtt.protocol.messages import Endpoint
from hepti_mqtt.runtime.worker.executor import Executor, bind
from hepti_mqtt.transport.mesh import Mesh
from hepti_mqtt.transport.sockets import mesh_possible

_TOPIC: Final = "x/m/0/near/far"
_PATIENCE_S: Final = 0.5
_TRIES: Final = 4
PEERS: Final = 3  # frames in a row, as in an exchange of four devices; the first one finds cold caches


class LoopbackMesh:
    """Two endpoints on loopback; the second reads from the first. Raises OSError if they cannot be opened."""

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
        self._far.join("near", "self", Endpoint("127.0.0.1", self._near.port), "token", [_TOPIC])
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
        """Send an array `PEERS` times on a tape, and receive it; raises TimeoutError if it does not arrive."""
        tape, arrays = self._tapes.get(body.size) or self._tapes.setdefault(body.size, self._tape(body))
        peers = Peers(1, self._far.channels.wake, int(1e3 * _PATIENCE_S))
        if tape.run(arrays, peers=peers) < len(tape.calls):
            raise TimeoutError("a frame did not arrive")

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
    """Drop a message outside a measurement."""


# ----------------------------------------------------------------------------------------------------------------------
# The measurement, in the terms of `cost.reported.profile_from_caps`.


Curves = dict[str, Any]

SHAPES: Final = ((384, 384), (384, 1536), (1024, 1024), (1024, 4096))
ROWS: Final = (1, 8, 32, 128)
_MIDDLE: Final = 2  # index of the shape in which narrow storages are measured
REPEATS: Final = 3
WINDOW_S: Final = 0.06  # several periods of a CPU quota: within one period a short op runs at full speed
BUDGET_S: Final = 2.0  # for all shapes; larger ones are left out beyond it
CHAIN: Final = 512  # ops of a run: its begin and end take as long as some hundred ops
FRAME_SIZES: Final = (256, 1 << 20)
MESH_SIZES: Final = (256, 1 << 16)
MAX_COLD_BYTES: Final = 64 << 20  # of weights for any size of caches: packing them takes time
TRIES: Final = 3  # to measure a small and a large frame until the large one takes longer
MAX_DRIFT: Final = 1.25  # a cached measurement that is off by more is repeated

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
    quick matmul takes about as long as before, and not with `force`. One written since `trusted_since_s` (Unix time)
    needs no such check: another agent has just measured, and while agents start the check would often fail.
    with_narrow_weights: their kernels must be ready. check: called before each point and before a result is cached; it
    raises if the device is needed for something else. most_storages: narrow storages that are added to a cached
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
    """Return whether curves cover every storage of weights, and int8 activations for the storages that allow them."""
    return set(map(_product, curves["linear"])) >= set(PRODUCTS)


def _product(curve: Curves) -> Product:
    return Product(curve.get("storage", "f32"), curve.get("x") == "i8")


def measure(
    workers: Workers, memory_bytes: int, narrow: bool = True, check: Callable[[], None] = lambda: None
) -> Curves:
    """Return time curves and rates of this device; takes about 5 s at most. Kernels must be warm.

    Weights come from memory, not from a cache, as in a model: between two uses of a matrix all others are used.
    memory_bytes: shapes with weights of more than a quarter of it are left out. narrow: with narrow weights. check:
    called before each point. Raises HeptiError if two measurements in a row are implausible.
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
    curves: Curves = {"linear": linear}
    check()
    curves["attention_flops_per_s"] = _attention(workers)
    check()
    curves["rowwise_bytes_per_s"] = _rowwise(workers)
    check()
    curves["op_overhead_s"] = _op_overhead(workers, forget)
    check()
    curves |= _frames(forget)
    check()
    curves |= _mesh_frames(forget)
    del forget  # free its weights before the next measurement
    if narrow:
        linear += list(chain.from_iterable(_narrow(curves, workers, memory_bytes, check)))
    profile_from_caps("self", curves, memory_bytes, 1.0)
    return curves


def _narrow(curves: Curves, workers: Workers, memory_bytes: int, check: Callable[[], None]) -> Iterator[list[Curves]]:
    """Measure the missing curves of narrow weights; yield those of one storage after the other."""
    measured = list(map(_product, curves["linear"]))
    whole, n = SHAPES[min(_MIDDLE, measured.count(Product()) - 1)]
    for storage, products in groupby((each for each in PRODUCTS if each not in measured), attrgetter("weights")):
        k = whole - whole % STORAGES[storage].block if storage in STORAGES else whole
        weights, of_storage = _ColdMatmul(k, n, memory_bytes, storage), []
        for product in products:
            points = _linear_points(weights, workers, check, product.rounded)
            x = {"x": "i8"} if product.rounded else {}
            of_storage.append({"k": k, "n": n, "points": points, "storage": storage, **x})
        del weights  # before the next storage's
        yield of_storage


def _expected(measured: Curves, k: int, n: int) -> float:
    """Return the seconds that measuring [k, n] will take, scaled from another shape."""
    area = k * n / (measured["k"] * measured["n"])
    return float(sum(max(WINDOW_S, (1 + REPEATS) * seconds * area) for _, seconds in measured["points"]))


def _cached(path: Path, key: Curves) -> Curves | None:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        curves: Curves = stored["curves"]
        profile_from_caps("self", curves, 0.0, 1.0)
        return curves if stored["key"] == key else None
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
    """Copies of weights [k, n], together larger than the caches, and products with each of them in turn.

    memory_bytes: several copies take at most a quarter of it.
    """

    def __init__(self, k: int, n: int, memory_bytes: int, storage: WeightDtype | BlockStorage = "f32") -> None:
        self._refs = (_matrix(k, n, storage), WeightRef("b", (0, 1), (0, n), "plain"))
        rng = np.random.default_rng(0)
        values: list[NDArray[Any] | StoredRows] = [
            rng.standard_normal((ref.rows[1], n), np.float32) for ref in self._refs
        ]
        if storage in BLOCK_STORAGES:
            kind = STORAGES[storage]  # any bytes with scales that are normal numbers
            values[0] = StoredRows(kind, np.full((n, kind.row_bytes(k)), 0x11, np.uint8))
        nbytes = sum(map(weight_bytes, self._refs))
        most = min(2 * last_level_cache_bytes(), MAX_COLD_BYTES, memory_bytes // 4)
        first = _packed(self._refs, values)
        self._copies = [first, *([twin(weight) for weight in first] for _ in range(most // nbytes - 1))]
        self._k, self._n = k, n

    def run(self, rows: int, workers: Workers, rounded: bool = False) -> Callable[[], None]:
        """Return a function that multiplies `rows` rows, `rounded` to int8 or not, by the next matrix."""
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
    """Return points [rows, seconds] in which fewer rows never take longer; removes disturbances."""
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
    """Return the mean time of runs within a window, without the first run; threads: that a run keeps busy.

    If a quota gives fewer cores, time is processor time divided by them: wall time depends on where in the quota's
    period a run begins. before: called before each run; its time does not count. Runs that were held up (swapping, a
    stopped process) do not count.
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
    """Return times without the longest while it is over OUTLIER_RATIO times the next one.

    Other times far above the median stay: under a hidden quota a few runs of a short op take ten times as long, and
    they are the quota's cost.
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
    """Return the executor's time of one op that computes nearly nothing, with caches as after a matmul."""
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
    """Return a function that fills the caches with a matmul's data, as before most ops of a device.

    It uses a measured shape: larger ones would take more memory than a measurement may.
    """
    measured = linear[min(_MIDDLE, len(linear) - 1)]
    return _ColdMatmul(measured["k"], measured["n"], memory_bytes).run(8, workers)


def _frames(forget: Callable[[], None]) -> Curves:
    """Return the fixed time and the rate of sending or receiving a frame: its coding and TCP's work, on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            frame_s, rate = _fit_frame_cost(lambda body: _echo_frame(body, near, far), FRAME_SIZES, forget)
    return {"frame_s": frame_s, "copy_bytes_per_s": rate}


def _fit_frame_cost(
    act: Callable[[Any], object], sizes: tuple[int, int], forget: Callable[[], None], count: int = 1
) -> tuple[float, float]:
    """Return the fixed time and the rate of a frame from rounds of small and of large frames; count: frames of a round.

    Both ends run here, so a frame costs half a round's time. Rounds are repeated if small frames, held up, took longer
    than large ones.
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
    """Return the fixed time and the rate of a mesh frame, for each receiver; {} without mesh."""
    if not JIT or not mesh_possible():
        return {}
    try:
        with LoopbackMesh() as mesh:
            frame_s, rate = _fit_frame_cost(mesh.echo, MESH_SIZES, forget, PEERS)
    except (OSError, TimeoutError):  # no address or descriptors left; plans then use the broker's frame cost
        return {}
    return {"mesh_frame_s": frame_s, "mesh_copy_bytes_per_s": rate}
