"""The roofs of this CPU as measured: fused multiply-adds in registers, and bytes read from memory.

A kernel's speed is judged against these two (the roofline of Williams, Waterman and Patterson 2009), measured with
the
vectors of `TILE`. They drift with the machine's clock and its other guests: time them interleaved with what they
judge.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
from llvmlite import ir
from numba import float32, types

from hepti_mqtt.kernels.cpu import TILE
from hepti_mqtt.kernels.ir_vectors import loop
from hepti_mqtt.kernels.jit import INT, compile_all, fills, kernel, lowered, reads
from hepti_mqtt.kernels.threads import Workers

# Independent accumulators: more than the latency (4 to 5 cycles) times two pipelines, and no more than 16 registers.
_CHAINS: Final = 12
# Streams of memory that are read at once, each with its own prefetches.
_STREAMS: Final = (1, 2, 4, 8)

# How long the loop of multiply-adds takes at least, and into how many parts it is cut for each of several threads.
_ROOF_S: Final = 2e-3
_PARTS: Final = 8
# Values of f32 that a part may write to: two cache lines, so that no two threads write to one.
_LINE: Final = 32

_F32: Final = ir.FloatType()
_I64: Final = ir.IntType(64)
_VECTOR: Final = ir.VectorType(_F32, TILE.lanes)
_POINTER: Final = _VECTOR.as_pointer()


def _loop(builder: Any, count: Any, values: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    return loop(builder, (ir.Constant(_I64, 0), count, 1), values, body, as_written=False)


def _keep(builder: Any, out: Any, values: list[Any]) -> None:
    total = values[0]
    for value in values[1:]:
        total = builder.fadd(total, value)
    builder.store(total, builder.inttoptr(out, _POINTER)).align = 4


def _load(builder: Any, address: Any) -> Any:
    value = builder.load(builder.inttoptr(address, _POINTER))
    value.align = 4
    return value


def _emit_multiply_adds(_context: Any, _out: Any, _factor: Any, _count: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        out, factor, count = arguments
        name = f"llvm.{'fma' if TILE.fma else 'fmuladd'}.v{TILE.lanes}f32"
        module = builder.module
        multiply_add = module.globals.get(name) or ir.Function(module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), name)
        x = _load(builder, factor)
        starts = [builder.fadd(x, ir.Constant(_VECTOR, [float(i)] * TILE.lanes)) for i in range(_CHAINS)]
        ends = _loop(builder, count, starts, lambda _, sums: [builder.call(multiply_add, [s, x, x]) for s in sums])
        _keep(builder, out, ends)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _emit_reads(streams: int) -> Callable[..., Any]:
    def emit(_context: Any, _out: Any, _first: Any, _vectors: Any) -> Any:
        def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            out, first, vectors = arguments
            size, unroll = 4 * TILE.lanes, max(1, 8 // streams)
            length = builder.sdiv(vectors, ir.Constant(_I64, streams * unroll))

            def body(i: Any, sums: list[Any]) -> list[Any]:
                new = []
                for place, total in enumerate(sums):
                    stream, step = divmod(place, unroll)
                    index = builder.add(builder.mul(length, ir.Constant(_I64, stream)), i)
                    at = builder.add(builder.mul(index, ir.Constant(_I64, unroll)), ir.Constant(_I64, step))
                    address = builder.add(first, builder.mul(at, ir.Constant(_I64, size)))
                    new.append(builder.fadd(total, _load(builder, address)))
                return new

            _keep(
                builder,
                out,
                _loop(builder, length, [ir.Constant(_VECTOR, [0.0] * TILE.lanes)] * streams * unroll, body),
            )
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), codegen

    return emit


def _plain_multiply_adds(_out: int, _factor: int, count: int) -> None:
    x = np.full(TILE.lanes, 0.5, np.float32)
    for _ in range(count):
        x = x * np.float32(0.5) + np.float32(0.5)


def _plain_reads(_out: int, _first: int, _vectors: int) -> None:
    """Read nothing: without compiled code there is no loop whose speed would say anything of the memory."""


_fma: Final = lowered(_emit_multiply_adds, _plain_multiply_adds)
_read_1, _read_2, _read_4, _read_8 = (lowered(_emit_reads(s), _plain_reads) for s in _STREAMS)


@kernel(fills(float32, 2), reads(float32, 1), INT, INT, part=1)
def _multiply_adds(out: Any, factor: Any, count: int, part: int) -> None:
    _fma(out.ctypes.data + 4 * part * out.shape[1], factor.ctypes.data, count)


@kernel(fills(float32, 1), reads(float32, 1), INT)
def _read(out: Any, array: Any, streams: int) -> None:
    vectors = array.size // TILE.lanes
    if streams == 1:
        _read_1(out.ctypes.data, array.ctypes.data, vectors)
    elif streams == 2:
        _read_2(out.ctypes.data, array.ctypes.data, vectors)
    elif streams == 4:
        _read_4(out.ctypes.data, array.ctypes.data, vectors)
    else:
        _read_8(out.ctypes.data, array.ctypes.data, vectors)


class Roof(NamedTuple):
    """What the machine can do at most: `run` does `amount` of it, FLOPs or bytes."""

    run: Callable[[], None]
    amount: float


def multiply_adds(pool: Workers) -> Roof:
    """Return a loop of f32 multiply-adds in registers alone, of some 2 ms on every thread of the pool at once."""
    compile_all()
    parts = range(1 if pool.threads == 1 else _PARTS * pool.threads)
    out, factor = np.empty((len(parts), _LINE), np.float32), np.full(TILE.lanes, 0.5, np.float32)
    count, each = 1000, _ROOF_S * pool.threads / len(parts)
    # The least of three: a first call, or one that the machine interrupts, would end the search at a loop so short that
    # the call itself shows.
    while min(_seconds(_multiply_adds, out, factor, count, 0) for _ in range(3)) < each:
        count *= 2
    amount = 2.0 * TILE.lanes * _CHAINS * count * len(parts)
    threads = ThreadPoolExecutor(pool.threads)  # compiled code of several threads runs at once

    def run() -> None:
        deque(threads.map(lambda part: _multiply_adds(out, factor, count, part), range(len(parts))), maxlen=0)

    return Roof(run, amount)


def reads_of_memory(nbytes: int = 1 << 28, repeats: int = 3) -> Roof:
    """Return a loop that reads an array from memory, in the number of streams (1 to 8) that was fastest in a trial.

    nbytes: size of the array, several times the last-level cache (the default holds for caches up to some 64 MB); at
    least 64 vectors, else ValueError.
    """
    if nbytes < 64 * 4 * TILE.lanes:
        raise ValueError(f"{nbytes} bytes are too few to time; the array must be larger than the last-level cache")
    compile_all()
    out, array = np.empty(TILE.lanes, np.float32), np.ones(nbytes // 4, np.float32)
    trials = {s: median(_seconds(_read, out, array, s) for _ in range(repeats)) for s in _STREAMS}
    return Roof(partial(_read, out, array, min(trials, key=trials.__getitem__)), array.nbytes)


def _seconds(function: Callable[..., object], *arguments: object) -> float:
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start
