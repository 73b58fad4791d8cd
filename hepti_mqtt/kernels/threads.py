"""Threads that run the parts of one kernel; compiled code hands parts over through memory, without the GIL.

Kernels release the GIL, so plain threads are enough; Numba's own thread layer cannot be used because its portable
implementation must not be entered from two threads. A part's result depends neither on its thread nor on the number of
parts; the number of threads of an op only changes its time (`choice`).

The calling thread runs the rows of a tape (`tape`) in compiled code. For a kernel of several threads it marks the lane
of every other thread, runs parts until none is left, takes back lanes that no thread has begun, and waits for the
others. Of n threads, thread t has the parts t, t + n, t + 2 n, and so on; then it takes parts that other threads have
not begun. So a late or slow thread delays the others little. After its last parts a thread polls its lane for a while,
because a wake-up takes as long as many ops; then it sleeps on its queue. Without the compiler there are no other
threads: plain Python would share one interpreter.

The pool's memory is int64 [threads x LANE]. The first lane is the calling thread's; it has the addresses of the parts
and of the block of the kernel's arguments.

Linux wakes a thread on the core of the waking thread, unless an idle core shares a cache with it; a virtual machine
shows no shared caches. Two threads of a pool then share one core, for seconds if both poll: the other core takes no
thread that has run within half a millisecond. So a thread that begins its parts on another one's core moves to a core
without threads of the pool.
"""

from __future__ import annotations

import ctypes
import platform
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from hepti_mqtt.kernels.calls import CacheWork, Call, Calls, Part, SizedChoice
from hepti_mqtt.kernels.choice import Choice
from hepti_mqtt.kernels.jit import INT, JIT, emitter, helper, kernel, lowered

# Places in a lane, and its size: whole pairs of cache lines, so that no two threads write to one line, nor to a pair
# that is fetched together. In the second line, BEGUN counts the begun parts of the thread, and CORE is the core on
# which it began. Then two sets of cores.
STATE, ASLEEP, BEGUN, CORE, _MAY, _FREE, LANE = 0, 1, 8, 9, 16, 32, 48
_WORDS: Final = _FREE - _MAY
# Places in the first lane: values for all threads, and whether a part has failed.
BLOCK, ENTRY, FIRST, COUNT, STRIDE, THREADS, FAILED = 2, 3, 4, 5, 6, 7, 10

# States of a lane. Its thread turns ISSUED into TAKEN, and TAKEN into IDLE after the parts. The calling thread takes a
# lane back that is still ISSUED, and turns TAKEN into AWAITED before it sleeps until that thread wakes it. CLOSED sends
# the thread to its queue.
IDLE, ISSUED, TAKEN, AWAITED, CLOSED = range(5)

# Places in `control`, shared by a tape and Python: a flag that stops the tape, memory for the clock; and its size.
FLAG, CLOCK, CONTROL = 0, 6, 16

# Why a thread is asleep: no parts were issued, or it must not poll on its core.
UNUSED, _DRIVEN_OFF = 1, 2

# Looks between two offers of the core to other threads, so that two models on one core do not wait for each other.
LOOKS: Final = 256
_MONOTONIC: Final = 1  # the clock's number on Linux
_MOST_AWAY: Final = 100_000  # nanoseconds of a yield; if it takes longer, others compute on the core
# Instructions, with arguments, of a look without a result: a thread on the same core's units then runs faster.
_PAUSE: Final = ("llvm.x86.sse2.pause", ())
_ISB: Final = ("llvm.aarch64.isb", (15,))
_REST: Final = {"x86_64": _PAUSE, "amd64": _PAUSE, "aarch64": _ISB, "arm64": _ISB}.get(platform.machine().lower())

_I64: Final = ir.IntType(64)


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _I64.as_pointer())


def _emit_call(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
    function = builder.inttoptr(values[0], ir.FunctionType(_I64, [_I64, _I64]).as_pointer())
    return builder.call(function, values[1:])


def _emit_get(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
    return builder.load_atomic(_word(builder, values[0]), "acquire", 8)


def _emit_put(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
    builder.store_atomic(values[1], _word(builder, values[0]), "release", 8)
    return context.get_dummy_value()


def _emit_swap(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
    swapped = builder.cmpxchg(_word(builder, values[0]), values[1], values[2], "acq_rel", "acquire")
    return builder.extract_value(swapped, 1)


def _emit_take(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
    return builder.atomic_rmw("add", _word(builder, values[0]), _I64(1), "monotonic")


def _of_system(name: str, count: int) -> Callable[..., Any]:
    """Return the intrinsic of a function of the C library, for `lowered`; it returns -1 if the library lacks it."""
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
    raise NotImplementedError("only compiled code hands parts over; without the compiler there are no threads")


_call: Final = lowered(emitter(3, _emit_call, types.int64), _compiled_alone)  # (entry, block, part)
_get: Final = lowered(emitter(1, _emit_get, types.int64), _compiled_alone)  # (address)
_put: Final = lowered(emitter(2, _emit_put), _compiled_alone)  # (address, value)
# (address, old, new): whether the value was `old`; it is `new` then
_swap: Final = lowered(emitter(3, _emit_swap, types.boolean), _compiled_alone)
_take: Final = lowered(emitter(1, _emit_take, types.int64), _compiled_alone)  # (address): the value before adding 1
_rest: Final = lowered(emitter(0, _emit_rest), _compiled_alone)
_pass_on: Final = lowered(_of_system("sched_yield", 0), _compiled_alone)  # lets a thread that waits for this core run
_core: Final = lowered(_of_system("sched_getcpu", 0), _compiled_alone)
_clock: Final = lowered(_of_system("clock_gettime", 2), _compiled_alone)  # (clock, address of seconds, nanoseconds)
# (0: this thread, bytes, address): fill the set of cores that it may run on, or change it; return 0 on success.
_allowed: Final = lowered(_of_system("sched_getaffinity", 3), _compiled_alone)
_allow: Final = lowered(_of_system("sched_setaffinity", 3), _compiled_alone)


@helper
def _is_taken(lanes: int, number: int, core: int) -> bool:
    """Return whether a thread with a lower number began on a core."""
    taken = False
    for i in range(number):
        taken |= _get(lanes + 8 * (LANE * i + CORE)) == core
    return taken and core >= 0


@helper
def _keep_apart(lanes: int, number: int) -> None:
    """Note this thread's core, and leave it if it is taken; the thread is not pinned afterwards."""
    here = _core()
    _put(lanes + 8 * (LANE * number + CORE), here)
    if not _is_taken(lanes, number, here):
        return
    may, free = lanes + 8 * (LANE * number + _MAY), lanes + 8 * (LANE * number + _FREE)
    if _allowed(0, 8 * _WORDS, may) < 0:
        return
    for word in range(_WORDS):
        left = _get(may + 8 * word)
        for i in range(number):
            taken = _get(lanes + 8 * (LANE * i + CORE))
            if taken // 64 == word:
                left &= ~(1 << taken % 64)
        _put(free + 8 * word, left)
    # Without a free core this fails, and the thread stays.
    if _allow(0, 8 * _WORDS, free) == 0:
        _allow(0, 8 * _WORDS, may)
        _put(lanes + 8 * (LANE * number + CORE), _core())


@helper
def _now(place: int) -> Any:
    """Return nanoseconds of a monotonic clock, a constant without one; place: address of two values."""
    _clock(_MONOTONIC, place)
    return 1_000_000_000 * _get(place) + _get(place + 8)


@helper
def _offer(lanes: int, number: int) -> Any:
    """Yield this core to a waiting thread; return whether to continue polling.

    Not on a taken core, because polling would take half of the computing thread's time, nor on a core on which others
    compute: it would be one more thread on the cores of its caller.
    """
    if _is_taken(lanes, number, _core()):
        return False
    scratch = lanes + 8 * (LANE * number + _FREE)
    begun = _now(scratch)
    _pass_on()
    return _now(scratch) - begun < _MOST_AWAY


@helper
def _run(lanes: int, number: int) -> None:
    """Run the parts of this thread, then parts that others have not begun; lanes: address of the first lane."""
    block = _get(lanes + 8 * BLOCK)
    entry, first, stride = _get(lanes + 8 * ENTRY), _get(lanes + 8 * FIRST), _get(lanes + 8 * STRIDE)
    count, threads = _get(lanes + 8 * COUNT), _get(lanes + 8 * THREADS)
    failed = 0
    for turn in range(threads):
        owner = (number + turn) % threads
        begun = lanes + 8 * (LANE * owner + BEGUN)
        part = owner + threads * _take(begun)
        while part < count:
            failed |= _call(entry, block, first + part * stride)
            part = owner + threads * _take(begun)
    if failed:
        _put(lanes + 8 * FAILED, 1)


@kernel(INT, INT, INT)
def serve(lanes: int, number: int, polls: int) -> None:
    """Run issued parts of a thread's lane, until `polls` looks in a row see none or the pool is closed.

    lanes: address of the first lane.
    """
    lane = lanes + 8 * LANE * number
    _put(lane + 8 * ASLEEP, 0)
    if number > 0:
        _keep_apart(lanes, number)
    look = 0
    while look < polls or look == 0:
        look += 1
        state = _get(lane + 8 * STATE)
        if state == CLOSED:
            break
        if state == ISSUED and _swap(lane + 8 * STATE, ISSUED, TAKEN):
            _keep_apart(lanes, number)
            _run(lanes, number)
            if not _swap(lane + 8 * STATE, TAKEN, IDLE):
                return
            look = 0
        elif look % LOOKS:
            _rest()
        elif not _offer(lanes, number):
            _put(lane + 8 * ASLEEP, _DRIVEN_OFF)
            return
    _put(lane + 8 * ASLEEP, UNUSED)


# Multiply-adds of an op per thread at least, and of a part at least. Less work ends before another thread has begun, on
# any machine; above it `choice` decides.
_GRAIN: Final = 1 << 17
_LEAST: Final = 1 << 18

# Time of polling, also of the calling thread for others: longer than most gaps between two hand-overs of a run, because
# waking takes some 50 µs of both threads, and shorter than a wait for the network.
POLL_SECONDS: Final = 1e-3


class Parts(tuple[Part, ...]):
    """Parts of one kernel, each (start, stop, start, stop ...). Of n threads, thread t has the parts [t::n]."""

    #: int64 [parts, values], for compiled code
    table: NDArray[np.int64]
    #: the most threads that they are worth
    threads: int
    #: the size of the work, which tells its time from other parts of the same kernel
    work: int

    def __new__(cls, parts: Iterable[Part], threads: int | None = None, work: int = 0) -> Parts:
        """Return the parts; they are worth a thread each, and at most `threads`."""
        new = super().__new__(cls, parts)
        new.table = np.array(new, np.int64, ndmin=2)
        new.threads = len(new) if threads is None else min(threads, len(new))
        new.work = work
        return new

    def whole(self) -> Part:
        """Return the ranges of all parts as one part."""
        starts, stops = self.table[:, ::2].min(axis=0), self.table[:, 1::2].max(axis=0)
        return tuple(np.stack([starts, stops], axis=1).ravel().tolist())


#: No parts.
NO_PARTS: Final = Parts(())


class Workers:
    """Runs a kernel's parts on `threads` threads, the calling thread included.

    For one calling thread. `close()` ends the threads; a closed pool runs everything on the calling thread. Raises
    ValueError if `threads` < 1.
    """

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"kernels need at least one thread, got {threads}")
        self.threads = threads
        self._choices: dict[Hashable, Choice] = {}
        #: the choice of one thread
        self.alone = Choice((1,))
        self.memory: NDArray[np.int64] = np.zeros(threads * LANE, np.int64)
        self.control: NDArray[np.int64] = np.zeros(CONTROL, np.int64)
        self.polls = _polls_of(POLL_SECONDS) if JIT and threads > 1 else 0
        self._done: SimpleQueue[None] = SimpleQueue()
        #: for each other thread: True to look at its lane, False to end
        self._calls: list[SimpleQueue[bool]] = [SimpleQueue() for _ in range(threads - 1 if JIT else 0)]
        self._running = [
            threading.Thread(target=self._serve, args=(calls, i), name=f"hepti-kernel-{i}", daemon=True)
            for i, calls in enumerate(self._calls, 1)
        ]
        for thread in self._running:
            thread.start()

    @property
    def is_open(self) -> bool:
        """Return whether other threads run parts."""
        return bool(self._calls)

    def bind(
        self, function: Callable[..., None], parts: Parts, kind: Hashable = None, work: CacheWork | None = None
    ) -> Callable[..., Calls]:
        """Return `calls(*arguments)`: a compiled kernel for all parts, on the fastest number of threads.

        kind: the part of the arguments on which its time depends. work: for work that differs from run to run. calls
        also takes `refuse` and `alive` of a `Call`.
        """
        if not parts:
            return lambda *_arguments, **_options: []
        key = function, parts.whole(), parts.work, kind
        choice: Choice | SizedChoice | None = None
        if min(self.threads, parts.threads) > 1 and work is not None:
            choice = SizedChoice(work, key, parts)
        else:
            choice = self.choice(key, parts)
        return lambda *arguments, **options: [Call(function, arguments, parts, choice, **options)]

    def choice(self, key: Hashable, parts: Parts) -> Choice | None:
        """Return the choice among all threads that the parts are worth, half of them, and so on; None for one thread.

        key: calls with equal keys take equal times and share a choice.
        """
        threads, ways = min(self.threads, parts.threads), list[int]()
        while threads > 1:
            ways.append(threads)
            threads //= 2
        return self._choices.setdefault(key, Choice((*ways, 1))) if ways else None

    def choice_of(self, sized: SizedChoice, held: NDArray[np.int32]) -> Choice:
        """Return the choice for the work of a run, one thread if that is little; held: of `CacheWork`."""
        work = sized.work.of(held)
        choice = self.choice((sized.key, work.bit_length()), sized.parts) if work >= _GRAIN else None
        return choice or self.alone

    def interrupt(self) -> None:
        """Stop the calling thread's tape before its next row, until `resume`; from any thread."""
        self.control[FLAG] = 1

    def resume(self) -> None:
        """Let tapes run."""
        self.control[FLAG] = 0

    def wake(self, threads: int) -> bool:
        """Wake the sleeping ones of the first threads; return whether one slept because no parts were issued."""
        memory, unused = self.memory, False
        for at, calls in zip(range(LANE, threads * LANE, LANE), self._calls, strict=False):
            if why := memory[at + ASLEEP]:
                memory[at + ASLEEP] = 0
                unused |= bool(why == UNUSED)
                calls.put(True)
        return unused

    def wait(self, lanes: int) -> None:
        """Wait for the threads of AWAITED lanes."""
        for _ in range(lanes):
            self._done.get()

    def close(self) -> None:
        """End the threads; safe to call twice."""
        for at, calls in zip(range(LANE, self.threads * LANE, LANE), self._calls, strict=False):
            calls.put(False)
            self.memory[at + STATE] = CLOSED
        for thread in self._running:
            thread.join()
        self._calls, self._running = [], []

    def _serve(self, calls: SimpleQueue[bool], lane: int) -> None:
        at, lanes = lane * LANE, self.memory.__array_interface__["data"][0]
        while True:
            serve(lanes, lane, self.polls)
            if self.memory[at + STATE] == AWAITED:
                self.memory[at + STATE] = IDLE
                self._done.put(None)
            elif not calls.get():
                return


def _polls_of(seconds: float) -> int:
    """Return the number of polls that take `seconds` on this machine."""
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

    Every thread gets equally many whole panels, in parts of half of the rest, `least_panels` at least: other threads
    may take parts that it has not begun. Panels left over, and a ragged (narrower) last one, are cut by rows, one piece
    for each thread, unless pieces are below `least_rows`: then some threads get a panel more.
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
    """Divide panels like `matmul_parts` into (first panel, stop), each for all rows; panel_size: with all rows."""
    by_panel = matmul_parts(panels, False, 1, panel_size, threads, 1)
    return Parts((part[:2] for part in by_panel), by_panel.threads, by_panel.work)
