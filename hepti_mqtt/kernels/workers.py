"""Threads that run the parts of one kernel.

Kernels release the GIL, so plain threads are enough; Numba's own thread layer cannot be used because its portable
implementation must not be entered from two threads. A part's result does not depend on which thread runs it, nor on
how many parts there are.

Queues carry the tasks. Before a thread blocks on its queue it polls a counter for a short time without the GIL: the
next op of a layer comes within microseconds, and waking a thread that sleeps takes tens of them. A counter is only a
hint; whatever it says, the queue decides.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from hepti_mqtt.kernels.jit import INT, INT_ARRAY, JIT, compile_all, kernel, lowered

# How long a thread polls: longer than the gap between two ops, far shorter than a wait for the network.
POLL_SECONDS: Final = 5e-5

# Looks between two offers of the core to other threads, so that two models on one core do not wait for each other.
_LOOKS: Final = 256
_CAN_YIELD: Final = hasattr(os, "sched_yield")

_LINE: Final = 8  # int64 values of a cache line: counters of two threads never share one


def _emit_counter(_context: Any, _address: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), codegen


def _emit_count(_context: Any, _address: Any, _value: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        builder.store_atomic(arguments[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _emit_pass_on(_context: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        if _CAN_YIELD:
            module = builder.module
            name = "sched_yield"
            call = module.globals.get(name) or ir.Function(module, ir.FunctionType(ir.IntType(32), []), name)
            builder.call(call, [])
        return context.get_dummy_value()

    return types.void(), codegen


def _plain_pass_on() -> None:
    """Keep the core: without compiled code nobody polls."""


def _plain_counter(_address: int) -> int:
    return -1


def _plain_count(_address: int, _value: int) -> None:
    """Tell nobody: without compiled code nobody polls."""


_pass_on: Final = lowered(_emit_pass_on, _plain_pass_on)  # lets another thread that waits for this core run
_counter: Final = lowered(_emit_counter, _plain_counter)
_count: Final = lowered(_emit_count, _plain_count)


@kernel(INT_ARRAY, INT, INT, INT_ARRAY, INT, INT)
def _poll(mine: Any, at: int, value: int, theirs: Any, wanted: int, polls: int) -> None:
    """Set mine[at] to `value`, then wait until theirs[at] is `wanted`, for at most `polls` looks at it."""
    _count(mine.ctypes.data + 8 * at, value)
    for look in range(polls):
        if look % _LOOKS == _LOOKS - 1:
            _pass_on()
        if _counter(theirs.ctypes.data + 8 * at) == wanted:
            break


Part = tuple[int, ...]
_Task = tuple[Callable[..., None], tuple[Any, ...], Sequence[Part]]


class Workers:
    """Runs a kernel's parts on `threads` threads, of which the calling thread is one.

    Made for one calling thread. `close()` ends the threads; a closed pool runs everything on the calling thread. Raises
    ValueError if `threads` < 1.
    """

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"kernels need at least one thread, got {threads}")
        self.threads = threads
        self._polls = _polls_of(POLL_SECONDS) if JIT and threads > 1 else 0
        self._issued: NDArray[np.int64] = np.zeros(threads * _LINE, np.int64)
        self._finished: NDArray[np.int64] = np.zeros(threads * _LINE, np.int64)
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._tasks: list[SimpleQueue[_Task | None]] = [SimpleQueue() for _ in range(threads - 1)]
        self._running = [
            threading.Thread(target=self._serve, args=(tasks, i * _LINE), name=f"hepti-kernel-{i + 1}", daemon=True)
            for i, tasks in enumerate(self._tasks)
        ]
        for thread in self._running:
            thread.start()

    def each(self, function: Callable[..., None], arguments: tuple[Any, ...], parts: Sequence[Part]) -> None:
        """Call `function(*arguments, *part)` for every part; return when all are done.

        The first error of a part is raised after the others have ended.
        """
        if len(parts) == 1:
            function(*arguments, *parts[0])
            return
        lanes = 1 + len(self._tasks)
        busy: list[int] = []
        for lane, tasks in enumerate(self._tasks, 1):
            if mine := parts[lane::lanes]:
                tasks.put((function, arguments, mine))
                busy.append((lane - 1) * _LINE)
                self._issued[busy[-1]] += 1
        failures: list[BaseException] = []
        try:
            for part in parts[::lanes]:
                function(*arguments, *part)
        except BaseException as error:
            failures.append(error)
        for at in busy:
            issued = int(self._issued[at])
            _poll(self._issued, at, issued, self._finished, issued, self._polls)
        outcomes = [self._done.get() for _ in busy]
        failures += [outcome for outcome in outcomes if outcome is not None]
        if failures:
            raise failures[0]

    def close(self) -> None:
        """End the threads; safe to call twice."""
        for tasks in self._tasks:
            tasks.put(None)
        for thread in self._running:
            thread.join()
        self._tasks, self._running = [], []

    def _serve(self, tasks: SimpleQueue[_Task | None], at: int) -> None:
        finished = 0
        while True:
            _poll(self._finished, at, finished, self._issued, finished + 1, self._polls)
            if (task := tasks.get()) is None:
                return
            function, arguments, parts = task
            try:
                for part in parts:
                    function(*arguments, *part)
            except BaseException as error:
                self._done.put(error)
            else:
                self._done.put(None)
            finished += 1
            del task, function, arguments, parts  # arrays of a finished op must not live until the next


def _polls_of(seconds: float) -> int:
    """Return how many polls take `seconds` on this machine."""
    compile_all()
    never, polls, best = np.zeros(1, np.int64), 1 << 15, 1.0
    for _ in range(3):
        start = time.perf_counter()
        _poll(never, 0, 0, never, 1, polls)
        best = min(best, time.perf_counter() - start)
    return max(1, int(polls * seconds / best))


def ranges(count: int, parts: int) -> list[Part]:
    """Divide 0..count into at most `parts` non-empty half-open ranges of nearly equal size; none if count is 0."""
    parts = max(1, min(parts, count))
    cuts = [count * i // parts for i in range(parts + 1)]
    return [(a, b) for a, b in pairwise(cuts) if b > a]
