"""`python -m benchmarks.lab.probe WHAT`: what one host measures of itself, and of its link to another; JSON on stdout.

numpy, kernel   GFLOP/s of [256, 1024] x [1024, 1024] in float32 on one thread
memory          GB/s of reading an array far larger than the caches
warm            compiles every kernel, so that later processes load them
listen ADDRESS  answers one `send`; prints its port first
send ADDRESS PORT   goodput there and back, and round trips, over one connection
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from statistics import median
from typing import Any, Final

THREADS: Final = int(os.environ.get("HEPTI_PROBE_THREADS", "1"))
# An inherited setting such as OPENBLAS_CORETYPE=Haswell would halve NumPy's speed, and the quota follows that.
# In a lab that holds its hosts to an instruction set, that is what they have.
if "HEPTI_KERNELS_ISA" not in os.environ:
    for _name in [name for name in os.environ if name.startswith(("OPENBLAS_", "MKL_"))]:
        del os.environ[_name]
for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.environ[_name] = str(THREADS)  # before NumPy loads its BLAS, which reads them once

import numpy as np  # noqa: E402

from hepti_mqtt.core.errors import ConfigError  # noqa: E402

SHAPE: Final = (256, 1024, 1024)  # m, k, n
MEASURE_S: Final = 0.7
MEMORY_BYTES: Final = 128 << 20
TRANSFER_S: Final = 1.0
SETTLE_S: Final = 0.2  # the bucket of a shaped link lets its first bytes pass for free
PINGS: Final = 50
TIMEOUT_S: Final = 30.0
_CHUNK: Final = 1 << 16
_DATA, _END = b"d", b"e"


def per_s(act: Callable[[], object], amount: float) -> float:
    """Return `amount` per second over at least MEASURE_S."""
    act()
    begin, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - begin) < MEASURE_S:
        act()
        count += 1
    return count * amount / passed


def numpy_speed() -> dict[str, Any]:
    """Return GFLOP/s of NumPy's matmul at the lab's shape."""
    m, k, n = SHAPE
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
    out = np.empty((m, n), np.float32)
    return {"gflops_per_s": per_s(lambda: np.matmul(x, w, out=out), 2e-9 * m * k * n)}


def kernel_speed() -> dict[str, Any]:
    """Return GFLOP/s of Hepti's linear kernel at the lab's shape, bias included in its time and not in its count."""
    from hepti_mqtt.core.program import Compute, SlotSpec, WeightRef
    from hepti_mqtt.kernels import KERNELS, Workers, allocate

    m, k, n = SHAPE
    rng = np.random.default_rng(0)
    refs = (WeightRef("w", (0, k), (0, n)), WeightRef("b", (0, 1), (0, n), "plain"))
    weights = []
    for ref, rows in zip(refs, (k, 1), strict=True):
        buffer = allocate(ref)
        buffer.put(rng.standard_normal((rows, n), np.float32), 0, 0)
        weights.append(buffer.finish())
    op = Compute("linear", (0,), (1,), refs, {"bias": True, "activation": None, "residual": False})
    x, out = rng.standard_normal((m, k), np.float32), np.empty((m, n), np.float32)
    workers = Workers(THREADS)
    try:
        run = KERNELS["linear"].bind(op, (SlotSpec((m, k)), SlotSpec((m, n))), weights, workers)
        return {"gflops_per_s": per_s(lambda: run([x], [out]), 2e-9 * m * k * n)}
    finally:
        workers.close()


def memory_speed() -> dict[str, Any]:
    """Return GB/s of reading memory: sums of 64-bit integers, which cost less than the bytes they wait for."""
    data = np.ones(MEMORY_BYTES // 8, np.int64)
    # A whole pass may take long on a slow host; one part of it is larger than a core's own caches.
    parts = cycle(np.array_split(data, 16))
    return {"gb_per_s": per_s(lambda: next(parts).sum(), data.nbytes / 16e9)}


def warm() -> dict[str, Any]:
    """Compile every kernel and its wrapper into the cache."""
    from hepti_mqtt.kernels import isa
    from hepti_mqtt.kernels.precompile import fill_cache

    start = time.perf_counter()
    fill_cache("all")
    return {"isa": isa(), "seconds": time.perf_counter() - start}


def listen(address: str) -> dict[str, Any]:
    """Answer one `send`: echo its pings, take its stream, and stream back; prints {"port": ...} first."""
    with socket.create_server((address, 0)) as server:
        server.settimeout(TIMEOUT_S)
        print(json.dumps({"port": server.getsockname()[1]}), flush=True)
        connection, _ = server.accept()
    with connection:
        _prepare(connection)
        for _ in range(PINGS):
            connection.sendall(_exactly(connection, 1))
        up = _receive_stream(connection)
        connection.sendall(json.dumps(up).encode().ljust(64))
        _send_stream(connection)
        _exactly(connection, 1)  # the other end has read everything
    return {"mbit_per_s": up["mbit_per_s"]}


def send(address: str, port: int) -> dict[str, Any]:
    """Return Mbit/s of goodput up (from here) and down (to here), and the median round trip in ms of single bytes."""
    with socket.create_connection((address, port), TIMEOUT_S) as connection:
        _prepare(connection)
        trips: list[float] = []
        for _ in range(PINGS):
            start = time.perf_counter()
            connection.sendall(b"p")
            _exactly(connection, 1)
            trips.append(time.perf_counter() - start)
        _send_stream(connection)
        up = json.loads(_exactly(connection, 64))
        down = _receive_stream(connection)
        connection.sendall(b"q")
    return {"up_mbit_per_s": up["mbit_per_s"], "down_mbit_per_s": down["mbit_per_s"], "rtt_ms": 1e3 * median(trips)}


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("the other end closed the connection in the middle")
        data += part
    return data


def _send_stream(connection: socket.socket) -> None:
    chunk, last = _DATA * _CHUNK, _DATA * (_CHUNK - 1) + _END
    until = time.perf_counter() + SETTLE_S + TRANSFER_S
    while time.perf_counter() < until:
        connection.sendall(chunk)
    connection.sendall(last)


def _receive_stream(connection: socket.socket) -> dict[str, float]:
    """Return the rate of what arrives after SETTLE_S, by this end's clock; the stream's last byte is its mark."""
    buffer = bytearray(1 << 18)
    begin = 0.0
    since: float | None = None
    counted = 0
    while True:
        count = connection.recv_into(buffer)
        now = time.perf_counter()
        if not count:
            raise ConnectionError("the other end closed the connection in the middle of a stream")
        begin = begin or now
        if since is not None:
            counted += count
        elif now - begin >= SETTLE_S:
            since = now
        if buffer[count - 1 : count] == _END:
            break
    if since is None or now <= since:
        raise ConnectionError("the stream ended before its rate could be seen")
    return {"mbit_per_s": 8e-6 * counted / (now - since)}


WHATS: Final[Mapping[str, tuple[int, Callable[..., dict[str, Any]]]]] = {
    "numpy": (0, numpy_speed),
    "kernel": (0, kernel_speed),
    "memory": (0, memory_speed),
    "warm": (0, warm),
    "listen": (1, listen),
    "send": (2, lambda address, port: send(address, int(port))),
}


def main(arguments: Sequence[str]) -> int:
    """Do what the arguments say, or every line of stdin; return the exit code."""
    if list(arguments) != ["serve"]:
        return answer(arguments)
    print("ready", flush=True)
    return next((code for line in sys.stdin if (code := answer(line.split()))), 0)


def answer(arguments: Sequence[str]) -> int:
    """Measure what the first argument names and print it as one line of JSON; return the exit code."""
    arity, measure = WHATS.get(arguments[0] if arguments else "", (-1, dict))
    if len(arguments) - 1 != arity:
        print(f"usage: python -m benchmarks.lab.probe {'|'.join(WHATS)}|serve [ADDRESS [PORT]]", file=sys.stderr)
        return 2
    try:
        print(json.dumps(measure(*arguments[1:])), flush=True)
    except (OSError, ValueError, ConfigError) as error:
        print(f"probe {arguments[0]}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
