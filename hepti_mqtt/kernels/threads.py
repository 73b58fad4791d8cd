"""Threads that run the parts of one kernel, and how they get them: through memory, in compiled code, without the GIL.

Kernels release the GIL, so plain threads are enough; Numba's own thread layer cannot be used because its portable
implementation must not be entered from two threads. A part's result depends neither on its thread nor on the number
of
parts.

The calling thread enters compiled code once, with the kernel's arguments as a tuple. It writes them into the pool's
memory, marks a lane for every other thread, runs parts until none is left, takes back the lanes that no thread has
begun,
and waits for the others. Of n threads, thread t has the parts t, t + n, t + 2 n, and so on; when it has done them
it takes
parts that others have not begun. So a late or slow thread delays the others little. A thread polls its lane for a
short
time after its last task: the next op of a layer comes within microseconds, and waking a thread, or waiting for the
GIL,
takes tens of them. Then it sleeps on its queue, which also carries the parts of plain Python functions.

The pool's memory is int64 [BLOCK + threads x LANE]: the block (whether a part has failed, the kernel's address, its
arguments as Numba passes them), then the lanes. The first lane is the calling thread's and says where the parts are.

Linux wakes a thread on the core of the waking thread unless it knows of an idle core that shares a cache, and on a
virtual
machine it knows of none. Two threads of a pool would then share one core, so `leave` moves a thread off a taken core.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from queue import SimpleQueue
from threading import Lock
from typing import Any, Final, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from hepti_mqtt.kernels.jit import (
    INT,
    INT_ARRAY,
    JIT,
    TABLE,
    compile_first,
    entry,
    entry_of,
    helper,
    in_cache,
    kernel,
    lowered,
    template,
)
from hepti_mqtt.kernels.jit import divided as divided_kernels

NOWHERE: Final = -1


def _found() -> Callable[[], int]:
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # a C library without it
            return ctypes.CDLL(None).sched_getcpu
    return lambda: NOWHERE


# Returns the number of the core that the calling thread runs on, NOWHERE where that is unknown.
core: Final = _found()


def leave(taken: Collection[int]) -> None:
    """Move the calling thread to another core if it is on one of `taken` and may run on another one.

    It may go anywhere afterwards, as before: this is no pinning.
    """
    if sys.platform == "linux" and core() in taken:
        allowed = os.sched_getaffinity(0)
        if free := allowed.difference(taken):
            with suppress(OSError):  # the allowed cores have changed meanwhile
                os.sched_setaffinity(0, free)
                os.sched_setaffinity(0, allowed)


# Places in the block, and its size.
FAILED, _ADDRESS, BLOCK = 0, 1, 112
# Places in a lane, and its size: two cache lines, so that no two threads write to one, nor to a pair fetched together.
# _BEGUN, in the second line, counts the thread's parts that anybody has begun.
STATE, ASLEEP, _NUMBER, _BEGUN, LANE = 0, 1, 2, 8, 16
# Places in the first lane, where all parts are.
_ENTRY, _FIRST, _COUNT, _STRIDE, _THREADS = 3, 4, 5, 6, 7

# States of a lane. Its thread makes TAKEN of ISSUED, and IDLE when the parts are done. The calling thread takes a lane
# back that is still ISSUED, and makes AWAITED of TAKEN before it sleeps until that thread wakes it. CALLED sends the
# thread to its queue.
IDLE, _ISSUED, _TAKEN, AWAITED, CALLED = range(5)

# Looks between two offers of the core to other threads, so that two models on one core do not wait for each other.
_LOOKS: Final = 256
_CAN_YIELD: Final = hasattr(os, "sched_yield")

_I64: Final = ir.IntType(64)
_SUCCESS: Final = (0, -2)  # what compiled code returns that returns a value, or None


def _at(builder: Any, place: Any, *indices: int) -> Any:
    return builder.gep(place, [ir.IntType(32)(i) for i in indices])


def _emit_write(_context: Any, address: Any, arguments: Any, part: Any, block: Any) -> Any:
    """Write a kernel's address and arguments to the block; return the address of code that runs a part of it."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        fixed, varying = signature.args[1].types, signature.args[2].types
        taken = [_lent(context, builder, kind, builder.extract_value(values[1], i)) for i, kind in enumerate(fixed)]
        flat = context.get_arg_packer(fixed).as_arguments(builder, taken)
        if 2 + len(flat) > BLOCK:
            raise ValueError(f"arguments of {fixed} do not fit into a block of {BLOCK} values; make it larger")
        layout = ir.LiteralStructType([_I64, _I64, *(value.type for value in flat)])
        place = builder.inttoptr(values[3], layout.as_pointer())
        for i, value in enumerate((values[0], *flat)):
            builder.store(value, _at(builder, place, 0, _ADDRESS + i))
        called = context.call_conv.get_function_type(types.none, (*fixed, *varying))
        return builder.ptrtoint(_part_of(builder.module, layout, called, len(varying)), _I64)

    return types.int64(address, arguments, part, block), codegen


def _lent(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """Return an argument without its owner: nothing counts references to what the caller's Python keeps alive.

    A thread that is AWAITED runs on when compiled code of the caller has returned and its counters are gone.
    """
    if not isinstance(kind, types.Array):
        return value
    array = context.make_array(kind)(context, builder, value)
    array.meminfo, array.parent = (ir.Constant(member.type, None) for member in (array.meminfo, array.parent))
    return array._getvalue()


def _part_of(module: Any, layout: Any, called: Any, width: int) -> Any:
    """Return the function of (block, part) that calls the block's kernel with its arguments and `width` of the part."""
    function = ir.Function(module, ir.FunctionType(_I64, [_I64, _I64]), name="hepti_part")
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block())
    block = builder.inttoptr(function.args[0], layout.as_pointer())
    part = builder.inttoptr(function.args[1], _I64.as_pointer())
    address, *fixed = (builder.load(_at(builder, block, 0, i)) for i in range(_ADDRESS, len(layout.elements)))
    varying = [builder.load(_at(builder, part, i)) for i in range(width)]
    result, error = (builder.alloca(argument.pointee) for argument in called.args[:2])
    code = builder.call(builder.inttoptr(address, called.as_pointer()), [result, error, *fixed, *varying])
    good = builder.or_(*(builder.icmp_signed("==", code, code.type(value)) for value in _SUCCESS))
    builder.ret(builder.zext(builder.not_(good), _I64))
    return function


def _emit_call(_context: Any, entry: Any, block: Any, part: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        function = builder.inttoptr(values[0], ir.FunctionType(_I64, [_I64, _I64]).as_pointer())
        return builder.call(function, values[1:])

    return types.int64(entry, block, part), codegen


def _emit_get(_context: Any, address: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(values[0], _I64.as_pointer()), "acquire", 8)

    return types.int64(address), codegen


def _emit_put(_context: Any, address: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        builder.store_atomic(values[1], builder.inttoptr(values[0], _I64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(address, value), codegen


def _emit_swap(_context: Any, address: Any, old: Any, new: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        place = builder.inttoptr(values[0], _I64.as_pointer())
        return builder.extract_value(builder.cmpxchg(place, values[1], values[2], "acq_rel", "acquire"), 1)

    return types.boolean(address, old, new), codegen


def _emit_take(_context: Any, counter: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(values[0], _I64.as_pointer()), _I64(1), "monotonic")

    return types.int64(counter), codegen


def _emit_pass_on(_context: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        if _CAN_YIELD:
            module = builder.module
            name = "sched_yield"
            call = module.globals.get(name) or ir.Function(module, ir.FunctionType(ir.IntType(32), []), name)
            builder.call(call, [])
        return context.get_dummy_value()

    return types.void(), codegen


def _compiled_alone(*_arguments: Any) -> Any:
    raise NotImplementedError("parts are handed over by compiled code alone; without it the pool's queues carry them")


_write: Final = lowered(_emit_write, _compiled_alone)
_call: Final = lowered(_emit_call, _compiled_alone)
_get: Final = lowered(_emit_get, _compiled_alone)
_put: Final = lowered(_emit_put, _compiled_alone)
_swap: Final = lowered(_emit_swap, _compiled_alone)  # whether the value was the old one and is the new one now
_take: Final = lowered(_emit_take, _compiled_alone)  # the value, which is one more from then on
_pass_on: Final = lowered(_emit_pass_on, _compiled_alone)  # lets another thread that waits for this core run


@helper
def _run(lanes: int, number: int) -> None:
    """Run the parts of this thread, then those that the others have not begun; lanes: the address of the first."""
    block = lanes - 8 * BLOCK
    entry, first, stride = _get(lanes + 8 * _ENTRY), _get(lanes + 8 * _FIRST), _get(lanes + 8 * _STRIDE)
    count, threads = _get(lanes + 8 * _COUNT), _get(lanes + 8 * _THREADS)
    failed = 0
    for turn in range(threads):
        whose = (number + turn) % threads
        begun = lanes + 8 * (LANE * whose + _BEGUN)
        part = whose + threads * _take(begun)
        while part < count:
            failed |= _call(entry, block, first + part * stride)
            part = whose + threads * _take(begun)
    if failed:
        _put(block + 8 * FAILED, 1)


@kernel(INT, INT)
def serve(lane: int, polls: int) -> None:
    """Run what is issued in the lane at this address, until nothing was in `polls` looks, or the caller wants more."""
    _put(lane + 8 * ASLEEP, 0)
    look = 0
    while look < polls or look == 0:
        look += 1
        state = _get(lane + 8 * STATE)
        if state == CALLED:
            _put(lane + 8 * STATE, IDLE)
            break
        if state == _ISSUED and _swap(lane + 8 * STATE, _ISSUED, _TAKEN):
            number = _get(lane + 8 * _NUMBER)
            _run(lane - 8 * LANE * number, number)
            if not _swap(lane + 8 * STATE, _TAKEN, IDLE):
                return
            look = 0
        elif look % _LOOKS == 0:
            _pass_on()
    _put(lane + 8 * ASLEEP, 1)


def _share(address: int, arguments: Any, part: Any, parts: Any, memory: Any, threads: int, polls: int) -> int:
    """Run the kernel at `address` for every row of `parts` on so many threads; return how many lanes are AWAITED."""
    block = memory.ctypes.data
    lanes = block + 8 * BLOCK
    _put(lanes + 8 * _ENTRY, _write(address, arguments, part, block))
    _put(lanes + 8 * _FIRST, parts.ctypes.data)
    _put(lanes + 8 * _COUNT, len(parts))
    _put(lanes + 8 * _STRIDE, 8 * parts.shape[1])
    _put(lanes + 8 * _THREADS, threads)
    for i in range(threads):
        _put(lanes + 8 * (LANE * i + _BEGUN), 0)
    for i in range(1, threads):
        _put(lanes + 8 * (LANE * i + _NUMBER), i)
        _put(lanes + 8 * (LANE * i + STATE), _ISSUED)
    _run(lanes, 0)
    for i in range(1, threads):
        _swap(lanes + 8 * (LANE * i + STATE), _ISSUED, IDLE)
    awaited = 0
    for i in range(1, threads):
        state = lanes + 8 * (LANE * i + STATE)
        for look in range(1, polls + 1):
            if _get(state) == IDLE:
                break
            if look % _LOOKS == 0:
                _pass_on()
        if _swap(state, _TAKEN, AWAITED):
            awaited += 1
    return awaited


class Shared(NamedTuple):
    """A kernel as `_share` takes it: `call(address, arguments, part, parts, memory, threads, polls)`."""

    call: Callable[..., int]
    address: int


_sharing: Final = template(_share)
_preparing: Final = Lock()

# The kernels that are divided into parts and were compiled when `prepare` was called.
shared: Final[dict[Any, Shared]] = {}


def prepare() -> None:
    """Compile, or load from the cache, the kernels of f32 weights and how parts of all that are there are handed over.

    Parts of the others go by the pool's queues.
    """
    compile_first()
    with _preparing:
        for dispatcher, (arguments, width) in divided_kernels.items():
            if dispatcher not in shared and dispatcher.signatures:
                shared[dispatcher] = shared_of(dispatcher, arguments, width)


def shared_of(dispatcher: Any, arguments: tuple[Any, ...], width: int) -> Shared:
    """Return the compiled kernel of these argument types, of which the last `width` say the part, to be shared."""
    return Shared(entry_of(_sharing, _taken(arguments, width))[0], entry_of(dispatcher, arguments)[1])


def shared_in_cache(dispatcher: Any) -> bool:
    """Return whether the cache has what hands over the parts of a kernel, or it has none."""
    return dispatcher not in divided_kernels or in_cache(_sharing, _taken(*divided_kernels[dispatcher]))


def _taken(arguments: tuple[Any, ...], width: int) -> tuple[Any, ...]:
    of: Any = types.Tuple  # without types in Numba
    return (INT, of(arguments[:-width]), of((types.int64,) * width), TABLE, INT_ARRAY, INT, INT)


# Multiply-adds below which a hand-over to another thread costs more than it saves, and those of the least part.
_GRAIN: Final = 1 << 19
_LEAST: Final = 1 << 18

# How long a thread polls: longer than the gap between two ops, far shorter than a wait for the network.
POLL_SECONDS: Final = 5e-5

Part = tuple[int, ...]
_Task = tuple[Callable[..., None], tuple[Any, ...], Sequence[Part]]
_WAKE: Final = ()  # what a queue carries to a thread that shall look at its lane


class Parts(tuple[Part, ...]):
    """Parts of one kernel, also as the table int64 [parts, values] that compiled code reads.

    Of n threads, which are as many as the pool has but no more than `threads`, thread t has the parts [t::n].
    """

    table: NDArray[np.int64]
    threads: int

    def __new__(cls, parts: Iterable[Part], threads: int | None = None) -> Parts:
        """Return the parts; they are worth as many threads as there are parts unless `threads` says less."""
        made = super().__new__(cls, parts)
        made.table = np.array(made, np.int64, ndmin=2)
        made.threads = len(made) if threads is None else min(threads, len(made))
        return made


class Workers:
    """Runs a kernel's parts on `threads` threads, of which the calling thread is one.

    Made for one calling thread. `close()` ends the threads; a closed pool runs everything on the calling thread. Raises
    ValueError if `threads` < 1.
    """

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"kernels need at least one thread, got {threads}")
        self.threads = threads
        self._memory: NDArray[np.int64] = np.zeros(BLOCK + threads * LANE, np.int64)
        self._polls = _polls_of(POLL_SECONDS) if JIT and threads > 1 else 0
        self._cores = [NOWHERE] * threads  # where the threads were last, the calling one first
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._tasks: list[SimpleQueue[_Task | tuple[()] | None]] = [SimpleQueue() for _ in range(threads - 1)]
        self._running = [
            threading.Thread(target=self._serve, args=(tasks, i), name=f"hepti-kernel-{i}", daemon=True)
            for i, tasks in enumerate(self._tasks, 1)
        ]
        for thread in self._running:
            thread.start()

    def each(self, function: Callable[..., None], arguments: tuple[Any, ...], parts: Sequence[Part]) -> None:
        """Call `function(*arguments, *part)` for every part; return when all are done.

        The first error of a part is raised after the others have ended.
        """
        if len(parts) < 2 or not self._tasks:
            for part in parts:
                function(*arguments, *part)
        elif (compiled := shared.get(function)) is not None:
            self._share(compiled, arguments, parts if isinstance(parts, Parts) else Parts(parts))
        else:
            self._queue(function, arguments, parts)

    def bind(self, function: Callable[..., None], parts: Sequence[Part]) -> Callable[..., None]:
        """Return `call(*arguments)`, which does what `each` does with these parts of a kernel that is compiled.

        It trusts its arguments as `jit.entry` says.
        """
        if len(parts) == 1:
            alone, part = entry(function), parts[0]
            return lambda *arguments: alone(*arguments, *part)
        return lambda *arguments: self.each(function, arguments, parts)

    def _share(self, kernel: Shared, arguments: tuple[Any, ...], parts: Parts) -> None:
        memory, threads = self._memory, min(self.threads, parts.threads)
        for at, tasks in zip(range(BLOCK + LANE, BLOCK + threads * LANE, LANE), self._tasks, strict=False):
            if memory[at + ASLEEP]:
                memory[at + ASLEEP] = 0
                self._cores[0] = core()
                tasks.put(_WAKE)
        awaited = kernel.call(kernel.address, arguments, parts[0], parts.table, memory, threads, self._polls)
        for _ in range(awaited):
            self._done.get()
        if memory[FAILED]:
            memory[FAILED] = 0
            raise MemoryError(
                "a kernel could not get the memory that it computes in; give it more, or smaller requests"
            )

    def _queue(self, function: Callable[..., None], arguments: tuple[Any, ...], parts: Sequence[Part]) -> None:
        lanes = 1 + len(self._tasks)
        busy = 0
        for lane in range(1, lanes):
            if mine := parts[lane::lanes]:
                self._call(lane, (function, arguments, mine))
                busy += 1
        failures: list[BaseException] = []
        try:
            for part in parts[::lanes]:
                function(*arguments, *part)
        except BaseException as error:
            failures.append(error)
        outcomes = [self._done.get() for _ in range(busy)]
        failures += [outcome for outcome in outcomes if outcome is not None]
        if failures:
            raise failures[0]

    def _call(self, lane: int, task: _Task | None) -> None:
        self._tasks[lane - 1].put(task)
        self._memory[BLOCK + lane * LANE + STATE] = CALLED

    def close(self) -> None:
        """End the threads; safe to call twice."""
        for lane in range(1, 1 + len(self._tasks)):
            self._call(lane, None)
        for thread in self._running:
            thread.join()
        self._tasks, self._running = [], []

    def _serve(self, tasks: SimpleQueue[_Task | tuple[()] | None], lane: int) -> None:
        at = BLOCK + lane * LANE
        address = self._memory.__array_interface__["data"][0] + 8 * at
        while True:
            if JIT:
                serve(address, self._polls)
            if self._memory[at + STATE] == AWAITED:
                self._memory[at + STATE] = IDLE
                self._done.put(None)
                continue
            if (task := tasks.get()) is None:
                return
            leave({where for i, where in enumerate(self._cores) if i != lane})
            self._cores[lane] = core()
            if task:
                function, arguments, parts = task
                try:
                    for part in parts:
                        function(*arguments, *part)
                except BaseException as error:
                    self._done.put(error)
                else:
                    self._done.put(None)
                del function, arguments, parts  # arrays of a finished op must not live until the next
            del task


def _polls_of(seconds: float) -> int:
    """Return how many polls take `seconds` on this machine."""
    prepare()
    lane, polls, best = np.zeros(LANE, np.int64), 1 << 15, 1.0
    for _ in range(3):
        start = time.perf_counter()
        serve(lane.__array_interface__["data"][0], polls)
        best = min(best, time.perf_counter() - start)
    return max(1, int(polls * seconds / best))


def ranges(count: int, parts: int) -> Parts:
    """Divide 0..count into at most `parts` non-empty half-open ranges of nearly equal size; none if count is 0."""
    parts = max(1, min(parts, count))
    cuts = [count * i // parts for i in range(parts + 1)]
    return Parts((a, b) for a, b in pairwise(cuts) if b > a)


def panel_parts(panels: int, ragged: bool, rows: int, threads: int, least_panels: int, least_rows: int) -> Parts:
    """Divide panels x rows for `threads` into parts (first panel, stop, first row, stop).

    Every thread gets as many whole panels, in parts that each have half of what is left, `least_panels` at least: what
    it has not begun others may take. The panels left over, and a last one that is ragged (narrower), are cut by rows,
    one piece for each thread, unless that makes fewer than `least_rows`: then some threads get a panel more.
    """
    if threads == 1:
        return Parts([(0, panels, 0, rows)], 1)
    by_rows = rows >= threads * least_rows
    whole, at = (panels - (ragged and by_rows)) // threads, 0
    parts: list[Part] = []
    while at < whole:
        size = min(max(least_panels, (whole - at + 1) // 2), whole - at)
        parts += [(t * whole + at, t * whole + at + size, 0, rows) for t in range(threads)]
        at += size
    pieces = ranges(rows, threads if by_rows else -(-threads // panels))
    return Parts(parts + [(p, p + 1, *r) for p in range(threads * whole, panels) for r in pieces], threads)


def matmul_parts(panels: int, ragged: bool, rows: int, panel_size: int, threads: int, least_rows: int) -> Parts:
    """Divide panels of `panel_size` weights x rows as `panel_parts` does, for as many threads as it is worth."""
    of_panel = max(1, rows * panel_size)
    threads = min(threads, 1 + panels * of_panel // _GRAIN)
    return panel_parts(panels, ragged, rows, threads, -(-_LEAST // of_panel), least_rows)


def parts_of_panels(panels: int, panel_size: int, threads: int) -> Parts:
    """Divide panels as `matmul_parts` does, each for all rows: (first panel, last panel). panel_size: with all rows."""
    by_panel = matmul_parts(panels, False, 1, panel_size, threads, 1)
    return Parts((part[:2] for part in by_panel), by_panel.threads)
