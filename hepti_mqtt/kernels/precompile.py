"""Fills the compile cache in separate processes, so that the compiler's memory ends with them.

`python -m hepti_mqtt.kernels.precompile` is such a process: it reads places in `jit.registered`, a line each, compiles
the kernel of each place into the cache, and answers with the same line. One process at a time fills a cache
(`compile_lock`); others that need it wait until it is filled.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Final, Literal, Self

from hepti_mqtt.kernels import (
    jit,
    registry,  # noqa: F401  registers every kernel
    tape,
)
from hepti_mqtt.kernels.compile_cache import LOOK_S, compile_lock
from hepti_mqtt.kernels.cpu import require_known

Which = Literal["first", "all", "slowly"]
Tell = Callable[[int, int], None]

# Between two kernels compiled `slowly`, so that a starting agent that waits for the lock gets it.
_PAUSE_S: Final = 2 * LOOK_S
# The kernels with the longest compilation are first: at the end they would delay the whole.
_LONG: Final = (
    "attention_units",
    "attention_by_distance",
    "linear_w8a8",
    "linear_int8",
    "_conv2d",
    "quantise_rows",
    "_linear",
)
_ROOT: Final = Path(__file__).parents[2]


class _Job:
    """A kernel and the wrapper of its signature; place: in `jit.registered`."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.dispatcher, self.arguments = jit.registered[place]
        self.name: str = self.dispatcher.py_func.__name__

    def done(self) -> bool:
        """Return whether kernel and wrapper are in the cache."""
        return jit.in_cache(self.dispatcher, self.arguments) and tape.wrapper_in_cache(self.dispatcher)

    def compile(self) -> None:
        """Compile kernel and wrapper into the cache."""
        self.dispatcher.compile(self.arguments)
        tape.wrapper_of(self.dispatcher)


def _jobs(which: Which) -> list[_Job]:
    places = [i for i, (d, _) in enumerate(jit.registered) if which != "first" or d not in jit.later]
    jobs = [_Job(i) for i in places]
    order = {name: i for i, name in enumerate(_LONG)}
    return sorted(jobs, key=lambda job: order.get(job.name, len(order)))


def fill_cache(
    which: Which,
    tell: Tell = lambda *_: None,
    most: int | None = None,
    rest: Callable[[float], None] = lambda _: None,
) -> None:
    """Compile the kernels that the cache lacks in other processes; return after the last one, or if they fail.

    which: the kernels of `jit.compile_first`, of `compile_all`, or of the latter `slowly`, one at a time in the
    background. tell: gets (compiled kernels, all kernels) repeatedly; its exception ends the work. most: processes, by
    default one per core. rest: gets the seconds of a kernel compiled `slowly`, and returns when the next one may be
    compiled. Without a cache nothing is compiled here. Raises ConfigError for a wrong setting of the environment.
    """
    require_known()
    directory, jobs = jit.cache_directory(), _jobs(which)
    left = jobs

    def missing() -> list[_Job]:
        nonlocal left
        left = [job for job in left if not job.done()]  # `done` reads files, so finished jobs are dropped
        tell(len(jobs) - len(left), len(jobs))
        return left

    if not missing() or directory is None:
        return
    arguments = ["nice"] if which == "slowly" else []
    most = 1 if which == "slowly" else most or len(os.sched_getaffinity(0))
    with Compilers([sys.executable, "-m", "hepti_mqtt.kernels.precompile", *arguments], most) as compilers:
        if which == "slowly":
            for job in left:
                with compile_lock(directory, missing):
                    begun_s = time.perf_counter()
                    compilers.compile([] if job.done() else [job.place], missing)
                rest(time.perf_counter() - begun_s)
                time.sleep(_PAUSE_S)
        else:
            with compile_lock(directory, missing):
                compilers.compile([job.place for job in missing()], missing)
    missing()


class Compilers:
    """Up to `most` compiling processes, each started for its first kernel and ended with the `with` block.

    A process that ends early, without memory or disk, is not replaced: its kernel stays missing, and the process that
    needs the kernel compiles it.
    """

    def __init__(self, command: Sequence[str], most: int) -> None:
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        self._command, self._environment = command, {**os.environ, "PYTHONPATH": path}
        self._most = most
        self._all: list[subprocess.Popen[str]] = []
        self._idle: list[subprocess.Popen[str]] = []
        self._busy = DefaultSelector()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._busy.close()
        for child in self._all:
            child.terminate()
        for child in self._all:
            child.communicate()

    def compile(self, places: Sequence[int], look: Callable[[], object]) -> None:
        """Compile the kernels at these places; `look` is called repeatedly, and may raise."""
        waiting = list(places)
        while True:
            while waiting and (child := self._free()) is not None:
                with suppress(BrokenPipeError):  # the process has ended: `select` returns its end of file
                    print(waiting.pop(0), file=child.stdin, flush=True)
                self._busy.register(child.stdout, EVENT_READ, child)  # type: ignore[arg-type]
            if not self._busy.get_map():
                return
            for key, _ in self._busy.select(LOOK_S):
                self._busy.unregister(key.fileobj)
                if key.data.stdout.readline():
                    self._idle.append(key.data)
                else:
                    self._most -= 1
            look()

    def _free(self) -> subprocess.Popen[str] | None:
        if not self._idle and len(self._all) < self._most:
            pipe, environment = subprocess.PIPE, self._environment
            with suppress(OSError):  # no memory for another process: the existing ones continue
                self._idle.append(subprocess.Popen(self._command, env=environment, stdin=pipe, stdout=pipe, text=True))
                self._all += self._idle
        return self._idle.pop() if self._idle else None


def compiled() -> tuple[int, int]:
    """Return the number of kernels in the cache, and of all kernels."""
    done = [job.done() for job in _jobs("all")]
    return sum(done), len(done)


def load_first() -> jit.Warm:
    """Load the kernels of f32 weights from the cache, and compile missing ones in this process."""
    jit.compile_first()
    return jit.warm()


def load_rest(tell: Tell, rest: Callable[[float], None]) -> jit.Warm:
    """Load the remaining kernels, and compile missing ones in the background, one after the other.

    Threads that need a kernel in compilation wait for it. tell, rest: of `fill_cache`; rest also gets the processor
    seconds of each loaded kernel.
    """
    jobs = _jobs("all")
    for job in jobs:
        begun_s = time.perf_counter()
        if not job.dispatcher.signatures and job.done():
            with suppress(RuntimeError):  # another thread has just loaded it, and disabled its compilation
                job.compile()
            rest(time.perf_counter() - begun_s)
    jit.compile_all(lambda: fill_cache("slowly", tell, rest=rest))
    tape.prepare()
    for job in jobs:
        job.dispatcher.disable_compile()
    return jit.warm()


def main(nice: bool) -> int:
    """Compile the kernels that standard input names until it ends; return the exit code."""
    if nice:
        with suppress(OSError):
            os.nice(10)
    for line in sys.stdin:
        job = _Job(int(line))
        if not job.done():
            job.compile()
        if not job.done():
            return 1  # a full disk
        print(job.place, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main("nice" in sys.argv[1:]))
