"""Text from a GGUF file on this host, against llama.cpp: the same tokens first, then seconds, interleaved.

`python -m benchmarks decoders model=FILE llama=DIR cpu=zen4 threads=1 x=i8`; llama: with the libraries of `llama_cpp`.
One thread is measured in processor time, several by the clock on the wall.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.outside.llama_cpp import LlamaCpp
from benchmarks.tables import table
from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.core.ids import PLANNER, PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.program import NUMPY_DTYPE
from hepti_mqtt.kernels import Workers
from hepti_mqtt.runtime.worker.executor import BoundProgram, Executor, bind, pack
from hepti_mqtt.strategies.plan_programs import device_programs

PROMPTS: Final = (128, 512)
SAME: Final = 16  # first tokens that both must choose
STEPS: Final = 32  # of a measurement of generation


class Decoder(Protocol):
    """What decodes: tokens in, logits of the last one out."""

    def begin(self) -> None:
        """Forget what came before."""

    def add(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Add tokens; return logits [vocabulary]."""


class Hepti:
    """A model in this process, as an agent that holds all of it computes it."""

    def __init__(self, model: Path, rows: int, threads: int, x: str) -> None:
        dtype = "w8a8" if x == "i8" else "f32"
        self._plan = Plan("m", PlanVersion(1, 1), "single", ("a",), "a", weight_dtype=dtype)  # type: ignore[arg-type]
        self._workers, self._executor, self._run = Workers(threads), Executor(), 0
        self._bound: dict[int, BoundProgram] = {}
        with Checkpoint.open(model) as whole:
            self._spec = whole.spec
            self._shape = self._spec.input_spec.shape(rows).with_want("task")
            program = device_programs(self._spec, self._plan, self._shape)["a"]
            self._weights = pack(whole.weights(), program.weights())
        self._states = {n: np.empty(s.shape, NUMPY_DTYPE[s.dtype]) for n, s in program.session_arrays().items()}
        self._there = 0

    def begin(self) -> None:
        """Forget what came before."""
        self._there = 0

    def add(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Add tokens; return logits [vocabulary]."""
        bound = self._bound.get(len(ids))
        if bound is None:
            program = device_programs(self._spec, self._plan, self._shape.decode_step(len(ids)))["a"]
            bound = self._bound[len(ids)] = bind(program, self._weights, self._workers)
        self._run += 1
        self._executor.admit(self._run, bound, self._states)
        for key in bound.template.inputs:
            self._executor.deliver(self._run, key, np.array([self._there, *ids], np.int32))
        self._there += len(ids)
        found = np.empty((0, 0), np.float32)
        while (step := self._executor.next_step()) is not None:
            outgoing = step.run()
            if outgoing is not None and outgoing.op.to == (PLANNER,):
                found = np.array(outgoing.array, np.float32)
        self._executor.finish_if_done(self._run)
        last: NDArray[np.float32] = found[-1]
        return last


def main(
    model: str,
    llama: str,
    cpu: str = "zen4",
    threads: int = 1,
    x: str = "i8",
    rounds: int = 5,
    prompts: Sequence[int] = PROMPTS,
) -> None:
    """Print tokens per second of both, and the ratio; greater than 1: Hepti is faster."""
    rows = max(prompts) + STEPS + 1
    ours = Hepti(Path(model).expanduser(), rows, threads, x)
    theirs = LlamaCpp(Path(llama).expanduser(), cpu, Path(model).expanduser(), rows, threads)
    ids = [int(i) for i in np.random.default_rng(0).integers(1000, 20000, max(prompts))]
    begun = [greedy(each, ids[: min(prompts)], SAME) for each in (ours, theirs)]
    same = next((i for i, pair in enumerate(zip(*begun, strict=True)) if len(set(pair)) > 1), SAME)
    print(f"the first {same} of {SAME} tokens are the same; cosine of logits {_cosine(ours, theirs, ids[:32]):.5f}")
    found = []
    for name, count, act in [
        *((f"prompt of {n}", n, _prompt(ids[:n])) for n in prompts),
        ("generation", STEPS, _generation(ids[: min(prompts)])),
    ]:
        times = _interleaved(act, (ours, theirs), rounds, threads)
        per_s = [count / median(own) for own in times]
        ratios = [their / our for our, their in zip(*times, strict=True)]
        found.append((name, *per_s, median(ratios)))
    print("\n".join(table(("", "Hepti, tokens/s", "llama.cpp", "ratio"), found)))


def greedy(decoder: Decoder, prompt: Sequence[int], count: int) -> list[int]:
    """Return the likeliest tokens after a prompt."""
    decoder.begin()
    found = [int(decoder.add(prompt).argmax())]
    while len(found) < count:
        found.append(int(decoder.add(found[-1:]).argmax()))
    return found


def _cosine(ours: Decoder, theirs: Decoder, ids: Sequence[int]) -> float:
    found = []
    for each in (ours, theirs):
        each.begin()
        logits = each.add(ids).astype(np.float64)
        found.append(logits / np.linalg.norm(logits))
    return float(found[0] @ found[1])


Act = Callable[[Decoder, Callable[[], float]], float]


def _prompt(ids: Sequence[int]) -> Act:
    def act(decoder: Decoder, clock: Callable[[], float]) -> float:
        decoder.begin()
        begun = clock()
        decoder.add(ids)
        return clock() - begun

    return act


def _generation(ids: Sequence[int]) -> Act:
    def act(decoder: Decoder, clock: Callable[[], float]) -> float:
        decoder.begin()
        token = int(decoder.add(ids).argmax())
        begun = clock()
        for _ in range(STEPS):
            token = int(decoder.add([token]).argmax())
        return clock() - begun

    return act


def _interleaved(act: Act, decoders: Sequence[Decoder], rounds: int, threads: int) -> list[list[float]]:
    """Return the seconds of each; the first round does not count."""
    clock = time.process_time if threads == 1 else time.perf_counter
    times = [[act(decoder, clock) for decoder in decoders] for _ in range(1 + rounds)]
    return [list(own) for own in zip(*times[1:], strict=True)]
