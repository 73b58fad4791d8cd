"""Threads that run the parts of one kernel.

Kernels release the GIL, so plain threads are enough; Numba's own thread layer cannot be used because its portable
implementation must not be entered from two threads. A part's result does not depend on which thread runs it, nor on
how many parts there are.

Parts of a compiled kernel are handed over by compiled code (`handover.py`), within a microsecond while a thread looks
for them. A thread that has seen none for a short time sleeps on its queue, which wakes it, and which also carries the
parts of plain Python functions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.kernels.machine.cores import NOWHERE, core, leave
from hepti_mqtt.kernels.machine.handover import (
    ASLEEP,
    AWAITED,
    BLOCK,
    CALLED,
    FAILED,
    IDLE,
    LANE,
    STATE,
    Shared,
    prepare,
    serve,
    shared,
)
from hepti_mqtt.kernels.machine.jit import JIT, entry

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
