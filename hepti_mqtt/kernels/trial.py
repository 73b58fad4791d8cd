"""Trying the register tiles of f32 products, once per machine, in a process of its own behind the agent's work.

`python -m hepti_mqtt.kernels.trial PARENT` compiles all of them into the cache, measures them in turns for some seconds
and keeps the name of the fastest, which later starts use. It ends early when its parent does.
"""

from __future__ import annotations

import fcntl
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from hepti_mqtt.kernels.ahead import ROOT
from hepti_mqtt.kernels.gemm import linear, tilings
from hepti_mqtt.kernels.gemm.epilogue import NONE
from hepti_mqtt.kernels.gemm.tilings import Tiling
from hepti_mqtt.kernels.machine import jit, turns
from hepti_mqtt.kernels.machine.isa import OVERRIDE
from hepti_mqtt.kernels.weights import PackedMatrix, allocate
from hepti_mqtt.program import WeightRef

# Rows, k and n of products as layers of encoders have them, on one device and divided.
SHAPES: Final = ((128, 1024, 1024), (32, 1024, 1024), (197, 384, 1536))
TRY_S: Final = 2.5
BETTER: Final = 1.03  # a tile that is not so much faster than the default may be so by chance
LOCK: Final = "hepti-trial.lock"
_LOOK_S: Final = 0.2
_LEAST_ROUNDS: Final = 2

Trials = Mapping[str, Sequence[Callable[[], object]]]


def needed() -> bool:
    """Return whether tiles are still to be tried here: there are several, none is pinned, none was fastest."""
    free = jit.JIT and not os.environ.get(tilings.PIN) and len(tilings.table()) > 1
    return free and not os.environ.get(OVERRIDE) and jit.cache_directory() is not None and not tilings.kept()


def run(undisturbed: Callable[[], bool]) -> str | None:
    """Try the tiles in another process; return the name of the fastest, None if it came to nothing.

    undisturbed: asked again and again; the trial ends when it is no longer so.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    null, environment = subprocess.DEVNULL, {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-m", "hepti_mqtt.kernels.trial", str(os.getpid())]
    child = subprocess.Popen(command, env=environment, stdin=null, stdout=null)
    try:
        while child.poll() is None:
            if not undisturbed():
                return None
            with suppress(subprocess.TimeoutExpired):
                child.wait(_LOOK_S)
    finally:
        child.terminate()
        child.wait()
    return tilings.kept()


def fastest(seconds: Mapping[str, Sequence[float]]) -> str:
    """Return the name of the tile that is fastest in the mean over shapes; the first one unless another is clearly so.

    seconds: by name the time of every shape.
    """
    names = list(seconds)

    def speedup(name: str) -> float:
        ratios = [a / b for a, b in zip(seconds[names[0]], seconds[name], strict=True)]
        return math.prod(ratios) ** (1 / len(ratios))

    best = max(names, key=speedup)
    return best if speedup(best) >= BETTER else names[0]


def measure(
    trials: Trials, alive: Callable[[], bool] = lambda: True, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Return the shortest time of every trial, all of them taking turns for `TRY_S`."""
    best = {name: [math.inf] * len(shapes) for name, shapes in trials.items()}
    end, rounds = clock() + TRY_S, 0
    while alive() and (rounds < _LEAST_ROUNDS or clock() < end):
        for shape in range(len(SHAPES)):
            for name, of_shapes in trials.items():
                start = clock()
                of_shapes[shape]()
                best[name][shape] = min(best[name][shape], clock() - start)
        rounds += 1
    return best


class Product:
    """One product to be timed, of random values."""

    def __init__(self, m: int, k: int, n: int) -> None:
        generator = np.random.default_rng(m)
        buffer = allocate(WeightRef("w", (0, k), (0, n), "packed", "f32"))
        buffer.put(generator.standard_normal((k, n), np.float32), 0, 0)
        self._matrix = buffer.finish()  # the table has only its address
        if not isinstance(self._matrix, PackedMatrix):
            raise TypeError("weights in f32 are packed in panels of f32")
        self._table, self._bias = linear.panels_of([self._matrix], [])
        self._x, self._rows = generator.standard_normal((m, k), np.float32), m
        self.out = np.empty((m, n), np.float32)

    def compute(self, kernel: Callable[..., object], depth: int) -> None:
        """Fill `out` by this kernel, in pieces of `depth`."""
        none, panels = np.empty((0, 0), np.float32), len(self._table)
        kernel(self._x, self.out, none, self._table, self._bias, NONE, depth, 0, panels, 0, self._rows)


def compiled(names: Mapping[str, Tiling], products: Sequence[Product], alive: Callable[[], bool]) -> Trials:
    """Return by name each product with that tile, its code compiled or from the cache; none once it is not `alive`."""
    kernels: dict[str, Callable[..., object]] = {}
    trials: dict[str, list[Callable[[], object]]] = {}
    for name, tiling in names.items():
        function = linear.product_of(tiling)
        code = function.__qualname__  # one for several depths
        if alive() and code not in kernels:
            kernels[code] = jit.entry_of(jit.template(function), linear.SIGNATURE)[0]
        if code in kernels:
            trials[name] = [partial(product.compute, kernels[code], tiling.depth) for product in products]
    return trials


def main(parent: int) -> int:
    """Try the tiles unless somebody does; return the exit code."""
    directory = jit.cache_directory()
    if directory is None:
        return 1
    with suppress(OSError):
        os.nice(10)
    with (directory / LOCK).open("ab") as lock, suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not tilings.kept():
            return _try(directory, lambda: os.getppid() == parent)
    return 0


def _try(directory: Path, alive: Callable[[], bool]) -> int:
    with turns.compiling(directory):
        jit.compile_first()
        trials = compiled(tilings.table(), [Product(*shape) for shape in SHAPES], alive)
    with turns.measuring(directory, lambda: None if alive() else sys.exit(1)):
        seconds = measure(trials, alive)
    if not alive():
        return 1
    tilings.keep(fastest(seconds), seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
