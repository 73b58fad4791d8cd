"""Threads that run the parts of one kernel, and how they get them: through memory, in compiled code, without the GIL.

Kernels release the GIL, so plain threads are enough; Numba's own thread layer cannot be used because its portable
implementation must not be entered from two threads. A part's result depends neither on its thread nor on the number of
parts; on how many threads an op runs is a matter of time alone (`choice`).

The calling thread enters compiled code once, with the kernel's arguments as a tuple. It writes them into the pool's
memory, marks a lane for every other thread, runs parts until none is left, takes back the lanes that no thread has
begun, and waits for the others. Of n threads, thread t has the parts t, t + n, t + 2 n, and so on; when it has done
them it takes parts that others have not begun. So a late or slow thread delays the others little. A thread polls its
lane for a while after its last task: waking it takes as long as many an op. Then it sleeps on its queue, which also
carries the parts of plain Python functions.

The pool's memory is int64 [BLOCK + threads x LANE]: the block (whether a part has failed, the kernel's address, its
arguments as Numba passes them), then the lanes. The first lane is the calling thread's and says where the parts are.

Linux wakes a thread on the core of the waking thread unless it knows of an idle core that shares a cache, and on a
virtual machine it knows of none. Two threads of a pool then share one core, for seconds where both poll: the other core
takes no thread that has run within half a millisecond. So a thread that begins its parts on the core of another one
moves to one that none of them is on.
"""

from __future__ import annotations

import ctypes
import platform
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from threading import Lock
from typing import Any, Final, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from hepti_mqtt.kernels.choice import Choice
from hepti_mqtt.kernels.jit import (
    INT,
    INT_ARRAY,
    JIT,
    TABLE,
    compile_first,
    emitter,
    entry,
    entry_of,
    helper,
    in_cache,
    kernel,
    lowered,
    template,
)
from hepti_mqtt.kernels.jit import divided as divided_kernels

# Places in the block, and its size.
FAILED, _ADDRESS, BLOCK = 0, 1, 112
# Places in a lane, and its size: whole pairs of cache lines, so that no two threads write to one, nor to a pair fetched
# together. In the second line, _BEGUN counts the thread's parts that anybody has begun, and _CORE says on which core it
# began. Then two sets of cores.
STATE, ASLEEP, _BEGUN, _CORE, _MAY, _FREE, LANE = 0, 1, 8, 9, 16, 32, 48
_WORDS: Final = _FREE - _MAY
# Places in the first lane, where all parts are.
_ENTRY, _FIRST, _COUNT, _STRIDE, _THREADS = 3, 4, 5, 6, 7

# States of a lane. Its thread makes TAKEN of ISSUED, and IDLE when the parts are done. The calling thread takes a lane
# back that is still ISSUED, and makes AWAITED of TAKEN before it sleeps until that thread wakes it. CALLED sends the
# thread to its queue.
IDLE, _ISSUED, _TAKEN, AWAITED, CALLED = range(5)

# Why a thread is asleep: nothing came, or it must not poll where it is.
_UNUSED, _DRIVEN_OFF = 1, 2

# Looks between two offers of the core to other threads, so that two models on one core do not wait for each other.
_LOOKS: Final = 256
_MONOTONIC: Final = 1  # the clock, as Linux calls it
_MOST_AWAY: Final = 100_000  # nanoseconds after which it came back to this thread too late: others compute there
# What a look that found nothing does, with its arguments, so that a thread that shares the core's units runs faster.
_PAUSE: Final = ("llvm.x86.sse2.pause", ())
_ISB: Final = ("llvm.aarch64.isb", (15,))
_REST: Final = {"x86_64": _PAUSE, "amd64": _PAUSE, "aarch64": _ISB, "arm64": _ISB}.get(platform.machine().lower())

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


def _of_system(name: str, count: int) -> Callable[..., Any]:
    """Return what `lowered` takes for a function of the C library; its result is -1 where there is none."""
    try:
        is_there = hasattr(ctypes.CDLL(None), name)
    except (OSError, TypeError):  # no such library here
        is_there = False

    def codegen(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        if not is_there:
            return _I64(-1)
        kind = ir.FunctionType(ir.IntType(32), [_I64] * count)
        call = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        return builder.sext(builder.call(call, values), _I64)

    return emitter(count, codegen, types.int64)


def _emit_rest(context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
    if _REST is not None:
        name, values = _REST
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)] * len(values))
        call = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        builder.call(call, [ir.IntType(32)(value) for value in values])
    return context.get_dummy_value()


def _compiled_alone(*_arguments: Any) -> Any:
    raise NotImplementedError("parts are handed over by compiled code alone; without it the pool's queues carry them")


_write: Final = lowered(_emit_write, _compiled_alone)
_call: Final = lowered(_emit_call, _compiled_alone)
_get: Final = lowered(_emit_get, _compiled_alone)
_put: Final = lowered(_emit_put, _compiled_alone)
_swap: Final = lowered(_emit_swap, _compiled_alone)  # whether the value was the old one and is the new one now
_take: Final = lowered(_emit_take, _compiled_alone)  # the value, which is one more from then on
_rest: Final = lowered(emitter(0, _emit_rest), _compiled_alone)
_pass_on: Final = lowered(_of_system("sched_yield", 0), _compiled_alone)  # lets a thread that waits for this core run
_core: Final = lowered(_of_system("sched_getcpu", 0), _compiled_alone)
_clock: Final = lowered(_of_system("clock_gettime", 2), _compiled_alone)  # of (which, address of seconds, nanoseconds)
# Of (0: this thread, bytes, address of the set): fill the set of cores that it may run on, or change it; 0 if done.
_allowed: Final = lowered(_of_system("sched_getaffinity", 3), _compiled_alone)
_allow: Final = lowered(_of_system("sched_setaffinity", 3), _compiled_alone)


@helper
def _is_taken(lanes: int, number: int, core: int) -> bool:
    """Return whether the calling thread, or another one before this one, began on a core."""
    taken = False
    for i in range(number):
        taken |= _get(lanes + 8 * (LANE * i + _CORE)) == core
    return taken and core >= 0


@helper
def _keep_apart(lanes: int, number: int) -> None:
    """Note the core that this thread is on, and leave it if it is taken.

    It may go anywhere afterwards, as before: this is no pinning.
    """
    here = _core()
    _put(lanes + 8 * (LANE * number + _CORE), here)
    if not _is_taken(lanes, number, here):
        return
    may, free = lanes + 8 * (LANE * number + _MAY), lanes + 8 * (LANE * number + _FREE)
    if _allowed(0, 8 * _WORDS, may) < 0:
        return
    for word in range(_WORDS):
        left = _get(may + 8 * word)
        for i in range(number):
            taken = _get(lanes + 8 * (LANE * i + _CORE))
            if taken // 64 == word:
                left &= ~(1 << taken % 64)
        _put(free + 8 * word, left)
    # It fails where none is free; then it stays.
    if _allow(0, 8 * _WORDS, free) == 0:
        _allow(0, 8 * _WORDS, may)
        _put(lanes + 8 * (LANE * number + _CORE), _core())


@helper
def _now(place: int) -> Any:
    """Return nanoseconds since some time; place: of two values. Always the same where the clock is not known."""
    _clock(_MONOTONIC, place)
    return 1_000_000_000 * _get(place) + _get(place + 8)


@helper
def _offer(lanes: int, number: int) -> Any:
    """Let a thread that waits for this core run; return whether to go on polling here.

    Not on a taken core, where it would take half the time of the thread that computes, nor where others compute: it
    would be one more that shares all cores with its caller.
    """
    if _is_taken(lanes, number, _core()):
        return False
    scratch = lanes + 8 * (LANE * number + _FREE)
    begun = _now(scratch)
    _pass_on()
    return _now(scratch) - begun < _MOST_AWAY


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


@kernel(INT, INT, INT)
def serve(lanes: int, number: int, polls: int) -> None:
    """Run what is issued in a thread's lane, until nothing was in `polls` looks, or the caller wants more.

    lanes: the address of the first.
    """
    lane = lanes + 8 * LANE * number
    _put(lane + 8 * ASLEEP, 0)
    if number > 0:
        _keep_apart(lanes, number)
    look = 0
    while look < polls or look == 0:
        look += 1
        state = _get(lane + 8 * STATE)
        if state == CALLED:
            _put(lane + 8 * STATE, IDLE)
            break
        if state == _ISSUED and _swap(lane + 8 * STATE, _ISSUED, _TAKEN):
            _keep_apart(lanes, number)
            _run(lanes, number)
            if not _swap(lane + 8 * STATE, _TAKEN, IDLE):
                return
            look = 0
        elif look % _LOOKS:
            _rest()
        elif not _offer(lanes, number):
            _put(lane + 8 * ASLEEP, _DRIVEN_OFF)
            return
    _put(lane + 8 * ASLEEP, _UNUSED)


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
    _put(lanes + 8 * _CORE, _core())
    for i in range(1, threads):
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
            if look % _LOOKS:
                _rest()
            else:
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

# The kernels that are divided into parts, as far as they were needed or compiled when `prepare` was called.
shared: Final[dict[Any, Shared]] = {}


def prepare() -> None:
    """Compile, or load from the cache, the kernels of f32 weights and how parts of all that are there are handed over.

    That of the others comes when an op is bound.
    """
    compile_first()
    for dispatcher in divided_kernels:
        if dispatcher.signatures:
            handed_over(dispatcher)


def handed_over(function: Callable[..., None]) -> Shared | None:
    """Return how the parts of a kernel are handed over, compiled if need be; None of a plain function."""
    if function not in shared and function in divided_kernels:
        with _preparing:
            if function not in shared:
                shared[function] = shared_of(function, *divided_kernels[function])
    return shared.get(function)


def shared_of(dispatcher: Any, arguments: tuple[Any, ...], width: int) -> Shared:
    """Return the compiled kernel of these argument types, of which the last `width` say the part, to be shared."""
    return Shared(entry_of(_sharing, _taken(arguments, width))[0], entry_of(dispatcher, arguments)[1])


def shared_in_cache(dispatcher: Any) -> bool:
    """Return whether the cache has what hands over the parts of a kernel, or it has none."""
    return dispatcher not in divided_kernels or in_cache(_sharing, _taken(*divided_kernels[dispatcher]))


def _taken(arguments: tuple[Any, ...], width: int) -> tuple[Any, ...]:
    of: Any = types.Tuple  # without types in Numba
    return (INT, of(arguments[:-width]), of((types.int64,) * width), TABLE, INT_ARRAY, INT, INT)


# Multiply-adds of which an op needs as many as these for each thread, and those of the least part. Less is over before
# another thread has begun, whatever the machine; above it `choice` finds out.
_GRAIN: Final = 1 << 17
_LEAST: Final = 1 << 18

# How long a thread polls, and the calling one for others: longer than most gaps between two hand-overs of a run, since
# waking takes some 50 µs of both threads, and shorter than a wait for the network.
POLL_SECONDS: Final = 1e-3

Part = tuple[int, ...]
_Task = tuple[Callable[..., None], tuple[Any, ...], Sequence[Part]]
_WAKE: Final = ()  # what a queue carries to a thread that shall look at its lane


class Parts(tuple[Part, ...]):
    """Parts of one kernel, also as the table int64 [parts, values] that compiled code reads.

    Of n threads, which are as many as the pool has but no more than `threads`, thread t has the parts [t::n]. work:
    what tells how long they take from others of the same kernel.
    """

    table: NDArray[np.int64]
    threads: int
    work: int

    def __new__(cls, parts: Iterable[Part], threads: int | None = None, work: int = 0) -> Parts:
        """Return the parts; they are worth as many threads as there are parts unless `threads` says less."""
        made = super().__new__(cls, parts)
        made.table = np.array(made, np.int64, ndmin=2)
        made.threads = len(made) if threads is None else min(threads, len(made))
        made.work = work
        return made

    def whole(self) -> Part:
        """Return all of them as one, of parts that are ranges: start, stop, start, stop ..."""
        starts, stops = self.table[:, ::2].min(axis=0), self.table[:, 1::2].max(axis=0)
        return tuple(np.stack([starts, stops], axis=1).ravel().tolist())


class Workers:
    """Runs a kernel's parts on `threads` threads, of which the calling thread is one.

    Made for one calling thread. `close()` ends the threads; a closed pool runs everything on the calling thread. Raises
    ValueError if `threads` < 1. clock: by which runs are measured.
    """

    def __init__(self, threads: int, clock: Callable[[], float] = time.perf_counter) -> None:
        if threads < 1:
            raise ValueError(f"kernels need at least one thread, got {threads}")
        self.threads = threads
        self._clock = clock
        self._choices: dict[Hashable, Choice] = {}
        self._memory: NDArray[np.int64] = np.zeros(BLOCK + threads * LANE, np.int64)
        self._polls = _polls_of(POLL_SECONDS) if JIT and threads > 1 else 0
        self._woke = False
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
            mine = parts if isinstance(parts, Parts) else Parts(parts)
            self._share(compiled, arguments, mine, min(self.threads, mine.threads))
        else:
            self._queue(function, arguments, parts)

    def bind(self, function: Callable[..., None], parts: Parts, kind: Hashable = None) -> Callable[..., None]:
        """Return `call(*arguments)`, which runs a compiled kernel for all parts on as many threads as take least time.

        It trusts its arguments as `jit.entry` says. The parts are ranges. kind: what of the other arguments tells how
        long it takes.
        """
        whole = parts.whole() if parts else ()
        return self.fastest((function, whole, parts.work, kind), self.ways(function, parts))

    def bind_sized(
        self, function: Callable[..., None], parts: Parts, kind: Hashable = None
    ) -> Callable[[int], Callable[..., None]]:
        """Return `call(work)(*arguments)`, which does what `bind` does where runs are of different work."""
        ways, calls = self.ways(function, parts), dict[int, Callable[..., None]]()

        def call(work: int) -> Callable[..., None]:
            size = work.bit_length()  # half as much again is alike
            if (known := calls.get(size)) is None:
                able = {n: way for n, way in ways.items() if n == 1 or work >= _GRAIN}
                known = calls[size] = self.fastest((function, parts.whole(), size, kind), able)
            return known

        return call

    def ways(self, function: Callable[..., None], parts: Parts) -> dict[int, Callable[..., None]]:
        """Return `call(*arguments)` for each number of threads that may be best, the most first.

        One thread has all parts as one.
        """
        if not parts:
            return {1: lambda *_arguments: None}
        alone, whole, threads = entry(function), parts.whole(), min(self.threads, parts.threads)
        found: dict[int, Callable[..., None]] = {}
        kernel = handed_over(function) if threads > 1 else None
        while threads > 1:
            found[threads] = partial(self._each_on, threads, function, kernel, parts)
            threads //= 2
        return {**found, 1: lambda *arguments: alone(*arguments, *whole)}

    def fastest(self, key: Hashable, ways: Mapping[int, Callable[..., None]]) -> Callable[..., None]:
        """Return what runs that of several ways which takes least time, by the number of threads that each takes.

        key: what has in common with others how long the ways take.
        """
        runs = tuple(ways.values())
        if len(runs) == 1:
            return runs[0]
        choice, clock = self._choices.setdefault(key, Choice(tuple(ways))), self._clock

        def run(*arguments: Any) -> None:
            if choice.skips:
                choice.skips -= 1
                runs[choice.next](*arguments)
                return
            place, self._woke = choice.next, False
            begun = clock()
            runs[place](*arguments)
            choice.note(place, clock() - begun, self._woke)

        return run

    def _each_on(
        self, threads: int, function: Callable[..., None], kernel: Shared | None, parts: Parts, *arguments: Any
    ) -> None:
        if kernel is None or not self._tasks:
            self.each(function, arguments, parts)
        else:
            self._share(kernel, arguments, parts, threads)

    def _share(self, kernel: Shared, arguments: tuple[Any, ...], parts: Parts, threads: int) -> None:
        memory = self._memory
        for at, tasks in zip(range(BLOCK + LANE, BLOCK + threads * LANE, LANE), self._tasks, strict=False):
            if why := memory[at + ASLEEP]:
                memory[at + ASLEEP] = 0
                self._woke |= bool(why == _UNUSED)
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
        lanes = self._memory.__array_interface__["data"][0] + 8 * BLOCK
        while True:
            if JIT:
                serve(lanes, lane, self._polls)
            if self._memory[at + STATE] == AWAITED:
                self._memory[at + STATE] = IDLE
                self._done.put(None)
                continue
            if (task := tasks.get()) is None:
                return
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
        serve(lane.__array_interface__["data"][0], 0, polls)
        best = min(best, time.perf_counter() - start)
    return max(1, int(polls * seconds / best))


def ranges(count: int, parts: int, work: int = 0) -> Parts:
    """Divide 0..count into at most `parts` non-empty half-open ranges of nearly equal size; none if count is 0."""
    parts = max(1, min(parts, count))
    cuts = [count * i // parts for i in range(parts + 1)]
    return Parts(((a, b) for a, b in pairwise(cuts) if b > a), work=work)


def panel_parts(
    panels: int, ragged: bool, rows: int, threads: int, least_panels: int, least_rows: int, work: int = 0
) -> Parts:
    """Divide panels x rows for `threads` into parts (first panel, stop, first row, stop).

    Every thread gets as many whole panels, in parts that each have half of what is left, `least_panels` at least: what
    it has not begun others may take. The panels left over, and a last one that is ragged (narrower), are cut by rows,
    one piece for each thread, unless that makes fewer than `least_rows`: then some threads get a panel more.
    """
    if threads == 1:
        return Parts([(0, panels, 0, rows)], 1, work)
    by_rows = rows >= threads * least_rows
    whole, at = (panels - (ragged and by_rows)) // threads, 0
    parts: list[Part] = []
    while at < whole:
        size = min(max(least_panels, (whole - at + 1) // 2), whole - at)
        parts += [(t * whole + at, t * whole + at + size, 0, rows) for t in range(threads)]
        at += size
    pieces = ranges(rows, threads if by_rows else -(-threads // panels))
    return Parts(parts + [(p, p + 1, *r) for p in range(threads * whole, panels) for r in pieces], threads, work)


def matmul_parts(
    panels: int, ragged: bool, rows: int, panel_size: int, threads: int, least_rows: int, least: int = _LEAST
) -> Parts:
    """Divide panels of `panel_size` weights x rows as `panel_parts` does; least: multiply-adds of a part."""
    of_panel = max(1, rows * panel_size)
    threads = min(threads, 1 + panels * of_panel // _GRAIN)
    return panel_parts(panels, ragged, rows, threads, -(-least // of_panel), least_rows, panels * of_panel)


def parts_of_panels(panels: int, panel_size: int, threads: int) -> Parts:
    """Divide panels as `matmul_parts` does, each for all rows: (first panel, last panel). panel_size: with all rows."""
    by_panel = matmul_parts(panels, False, 1, panel_size, threads, 1)
    return Parts((part[:2] for part in by_panel), by_panel.threads, by_panel.work)
