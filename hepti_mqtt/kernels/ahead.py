"""Compiling ahead of use, in processes of their own: as many as there are cores, whoever on the machine starts them.

`python -m hepti_mqtt.kernels.ahead first|all|behind THREADS PARENT` is such a process. It fills the compile cache and
ends, so what the compiler needed of memory ends with it. All that use one cache share the work: who compiles kernel i
has locked byte i of one file, and every process one of as many files as there are cores. The system lets go of a lock
when its process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Final, Literal, get_args

from hepti_mqtt.kernels import registry  # noqa: F401  registers every kernel
from hepti_mqtt.kernels.gemm.linear import TILING
from hepti_mqtt.kernels.gemm.tilings import PIN
from hepti_mqtt.kernels.machine import handover, jit, turns

Which = Literal["first", "all", "behind"]
Tell = Callable[[int, int], None]
_Start = Callable[[Path], list[subprocess.Popen[bytes]]]

LOCKS: Final = "hepti-compiling.lock"
_CORE: Final = "hepti-compiling-{}.lock"
_LOOK_S: Final = 0.5
# What a process that compiles for later returns when an agent starts meanwhile: there is more to do, but not now.
NOT_NOW: Final = os.EX_TEMPFAIL
# They take longest, so they come first: the last one that is begun holds up the others least.
_LONG: Final = (
    "attention_units",
    "linear_w8a8",
    "linear_int8",
    "_conv2d",
    "quantise_rows",
    "_linear_stream",
    "_linear",
)

ROOT: Final = Path(__file__).parents[2]


class _Job:
    """A kernel and, for pools of threads, the handing over of its parts; `place` is its place in `jit.registered`."""

    def __init__(self, place: int, threads: int) -> None:
        self.place, self._threads = place, threads
        self.dispatcher, self.arguments = jit.registered[place]
        self.name: str = self.dispatcher.py_func.__name__

    def done(self) -> bool:
        """Return whether all of it is in the cache."""
        shared = self._threads == 1 or handover.shared_in_cache(self.dispatcher)
        return shared and jit.in_cache(self.dispatcher, self.arguments)

    def compile(self) -> None:
        """Compile it into the cache."""
        self.dispatcher.compile(self.arguments)
        if self._threads > 1 and (how := jit.divided.get(self.dispatcher)) is not None:
            handover.shared_of(self.dispatcher, *how)


def _jobs(which: Which, threads: int) -> list[_Job]:
    places = [i for i, (d, _) in enumerate(jit.registered) if which != "first" or d not in jit.later]
    jobs = [_Job(i, threads) for i in places]
    order = {name: i for i, name in enumerate(_LONG)}
    return sorted(jobs, key=lambda job: order.get(job.name, len(order)))


def fill_cache(which: Which, threads: int, tell: Tell = lambda *_: None, most: int | None = None) -> None:
    """Compile what the cache has not, in other processes; return when it is there, or when they can do no more.

    which: what `jit.compile_first` or `compile_all` needs, the latter also `behind` agents that start. threads: of the
    pool that will run them. tell: gets (kernels that are there, all of them), again and again. most: processes of ours
    at once, by default one per core. Without a cache it returns at once: every process compiles for itself then. Raises
    ConfigError for a wrong setting of the environment.
    """
    jit.check_settings()
    directory = jit.cache_directory()
    jobs = _jobs(which, threads)
    missing = [job for job in jobs if not job.done()]
    tell(len(jobs) - len(missing), len(jobs))
    if directory is None or not missing:
        return
    with suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / LOCKS).open("ab") as locks:
            _fill(directory, locks, jobs, partial(_start, which, threads), tell, most or len(os.sched_getaffinity(0)))


def _fill(directory: Path, locks: IO[bytes], jobs: Sequence[_Job], start: _Start, tell: Tell, most: int) -> None:
    children: dict[subprocess.Popen[bytes], int] = {}  # each with how many kernels were missing when it began
    missing, failed = list(jobs), False

    def unclaimed() -> Iterator[_Job]:
        return (job for job in missing if _claim(locks, job.place, probe=True))

    try:
        while True:
            over = {child: code for child in children if (code := child.poll()) is not None}
            missing = [job for job in missing if not job.done()]  # after the look at who has ended
            if not missing:
                break
            tell(len(jobs) - len(missing), len(jobs))
            # Who ends well, and nothing is there and nobody at work, compiles what this process does not find.
            idle = any(code == 0 and children[child] == len(missing) for child, code in over.items())
            failed = failed or any(code not in (0, NOT_NOW) for code in over.values())
            failed = failed or (idle and len(list(unclaimed())) == len(missing))
            children = {child: began for child, began in children.items() if child not in over}
            if failed and not children:
                return  # for want of memory or disk, or it does not compile: the caller compiles for itself, and sees
            if not failed and len(children) < most and any(unclaimed()):
                children |= dict.fromkeys(start(directory), len(missing))
            time.sleep(_LOOK_S)
        tell(len(jobs), len(jobs))
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.wait()


def _start(which: Which, threads: int, directory: Path) -> list[subprocess.Popen[bytes]]:
    """Start a process if a core is free: it inherits the lock of one; none for later, while agents start.

    It would only wait, after imports that take those agents' time.
    """
    if which == "behind" and not turns.nobody_starts(directory):
        return []
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "hepti_mqtt.kernels.ahead", which, str(threads), str(os.getpid())]
    for core in range(os.cpu_count() or 1):
        with (directory / _CORE.format(core)).open("ab") as lock, suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            environment = {**os.environ, "PYTHONPATH": path, PIN: TILING.name}
            null = subprocess.DEVNULL
            return [subprocess.Popen(command, env=environment, stdin=null, stdout=null, pass_fds=[lock.fileno()])]
    return []


def _claim(locks: IO[bytes], place: int, probe: bool = False) -> bool:
    """Return whether nobody compiles this kernel; from then on the calling process does, unless it is only a probe."""
    try:
        fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except OSError:
        return False
    if probe:
        fcntl.lockf(locks, fcntl.LOCK_UN, 1, place)
    return True


def ready(threads: int) -> bool:
    """Return whether nothing is left to compile in other processes: all is in the cache, or there is none."""
    return jit.cache_directory() is None or all(job.done() for job in _jobs("all", threads))


def cache_directory() -> Path | None:
    """Return where compiled kernels are kept, None if nowhere."""
    return jit.cache_directory()


def load(everything: bool) -> jit.Warm:
    """Load what f32 weights need, or everything, from the cache, and compile here what it has not."""
    (jit.compile_all if everything else jit.compile_first)()
    return jit.warm()


def load_rest(threads: int, tell: Tell) -> jit.Warm:
    """Compile what is missing behind agents that start, one kernel after the other, and load it.

    Whoever needs one of these kernels meanwhile waits. tell: as of `fill_cache`; it may raise, which ends it.
    """
    jit.compile_all(lambda: fill_cache("behind", threads, tell, most=1))
    if threads > 1:
        handover.prepare()
    return jit.warm()


def main(which: Which, threads: int, parent: int) -> int:
    """Compile what nobody else does, as long as the parent lives; return the exit code.

    For later, only as long as no agent starts: one that waited would hold a core's lock, and claims, which they need.
    """
    directory = jit.cache_directory()
    if directory is None:
        return 1
    if which == "behind":
        with suppress(OSError):
            os.nice(10)
    with (directory / LOCKS).open("ab") as locks:
        for job in _jobs(which, threads):
            if os.getppid() != parent:
                break
            if which == "behind" and not turns.nobody_starts(directory):
                return NOT_NOW
            if not job.done() and _claim(locks, job.place) and not job.done():
                with turns.compiling(directory):
                    job.compile()  # the claim ends with this process: the kernel is in the cache
                if not job.done():
                    return 1  # a full disk
    return 0


if __name__ == "__main__":
    sys.exit(main(next(w for w in get_args(Which) if w == sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
