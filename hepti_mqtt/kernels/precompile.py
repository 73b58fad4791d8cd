"""Fills the compile cache in processes of their own, so that the compiler's memory ends with them.

`python -m hepti_mqtt.kernels.precompile` is such a process: it reads places in `jit.registered`, a line each,
compiles what is there into the cache, and answers with the same line. One process at a time fills a cache
(`compile_lock`); others that need it wait, and find it filled.
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

Which = Literal["first", "all", "behind"]
Tell = Callable[[int, int], None]

# Between two kernels behind an agent's work, so that an agent that starts and looks for the lock gets it.
_PAUSE_S: Final = 2 * LOOK_S
# The kernels that take longest come first: a long one that is begun last would hold up the others.
_LONG: Final = (
    "attention_units",
    "attention_by_distance",
    "linear_w8a8",
    "linear_int8",
    "_conv2d",
    "quantise_rows",
    "_linear_stream",
    "_linear",
)
_ROOT: Final = Path(__file__).parents[2]


class _Job:
    """A kernel and the wrapper of its signature; `place` is its place in `jit.registered`."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.dispatcher, self.arguments = jit.registered[place]
        self.name: str = self.dispatcher.py_func.__name__

    def done(self) -> bool:
        """Return whether all of it is in the cache."""
        return jit.in_cache(self.dispatcher, self.arguments) and tape.wrapper_in_cache(self.dispatcher)

    def compile(self) -> None:
        """Compile it into the cache."""
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
    """Compile what the cache lacks in other processes; return when it is there, or when they cannot go on.

    which: what `jit.compile_first` needs, what `compile_all` needs, or the latter `behind` an agent's work: slowly, one
    kernel at a time. tell: gets (kernels that are there, all of them) again
    and again; what it raises ends the work. most: processes at once, by default one per core. rest: gets the
    seconds that a kernel took `behind` an agent's work, and returns when the next may be compiled. Without a cache it
    returns at once, and every process compiles for itself. Raises ConfigError for a wrong setting of the environment.
    """
    require_known()
    directory, jobs = jit.cache_directory(), _jobs(which)
    left = jobs

    def missing() -> list[_Job]:
        nonlocal left
        left = [job for job in left if not job.done()]  # a look reads a kernel's files, so no job is looked at again
        tell(len(jobs) - len(left), len(jobs))
        return left

    if not missing() or directory is None:
        return
    arguments = ["nice"] if which == "behind" else []
    most = 1 if which == "behind" else most or len(os.sched_getaffinity(0))
    with Compilers([sys.executable, "-m", "hepti_mqtt.kernels.precompile", *arguments], most) as compilers:
        if which == "behind":
            for job in left:
                begun_s = time.perf_counter()
                with compile_lock(directory, missing):
                    compilers.compile([] if job.done() else [job.place], missing)
                rest(time.perf_counter() - begun_s)
                time.sleep(_PAUSE_S)
        else:
            with compile_lock(directory, missing):
                compilers.compile([job.place for job in missing()], missing)
    missing()


class Compilers:
    """Up to `most` processes that compile, each started when there is work for it and ended with the `with` block.

    One that ends early, for want of memory or disk, is not replaced: its kernel stays missing, and the process that
    needs it compiles it.
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
        """Compile the kernels at these places; `look` is called again and again, and may raise."""
        waiting = list(places)
        while True:
            while waiting and (child := self._free()) is not None:
                with suppress(BrokenPipeError):  # it has ended: its end of file is seen below
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
            with suppress(OSError):  # no memory for another process: those that there are go on
                self._idle.append(subprocess.Popen(self._command, env=environment, stdin=pipe, stdout=pipe, text=True))
                self._all += self._idle
        return self._idle.pop() if self._idle else None


def compiled() -> tuple[int, int]:
    """Return the number of kernels in the cache, and of all kernels."""
    done = [job.done() for job in _jobs("all")]
    return sum(done), len(done)


def load_first() -> jit.Warm:
    """Load what f32 weights need from the cache, and compile here what it lacks."""
    jit.compile_first()
    return jit.warm()


def load_rest(tell: Tell, rest: Callable[[float], None]) -> jit.Warm:
    """Load the kernels that are left and compile what the cache lacks behind the agent's work, one after the other.

    Threads that need a kernel that is being compiled wait for it. tell, rest: as of `fill_cache`; rest also gets the
    processor seconds of each kernel that was loaded.
    """
    jobs = _jobs("all")
    for job in jobs:
        if not job.dispatcher.signatures and job.done():
            begun_s = time.thread_time()
            with suppress(RuntimeError):  # another thread has loaded it since the look, and nothing compiles it again
                job.compile()
            rest(time.thread_time() - begun_s)
    jit.compile_all(lambda: fill_cache("behind", tell, rest=rest))
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
