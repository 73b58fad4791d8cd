"""What the kernels' benchmark measures: groups of cases, each of which checks its contenders before they are timed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from hepti_mqtt.bench import kernel_options
from hepti_mqtt.bench.kernel_rivals import F32, rivals
from hepti_mqtt.bench.kernel_shapes import Shape, shapes
from hepti_mqtt.bench.kernel_timing import Contender, interleaved
from hepti_mqtt.errors import BenchError
from hepti_mqtt.kernels import KERNELS, Weight, Workers, allocate
from hepti_mqtt.kernels.peak import fma_peak, read_bandwidth
from hepti_mqtt.program import Compute, SlotSpec, WeightRef

QUICK_SHAPES: Final = 24
CURVE_ROWS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)
# The weights that one call streams: larger than last-level caches, as a model's weights are.
STREAM_BYTES: Final = 1 << 28


@dataclass(frozen=True, slots=True)
class Case:
    """One shape of one group."""

    group: str
    shape: Shape

    @property
    def key(self) -> str:
        """Return what names the case in the file of results."""
        return f"{self.group}:{self.shape.m}x{self.shape.n}x{self.shape.k}"


@dataclass(frozen=True, slots=True)
class Conditions:
    """How a process measures: its threads, the rounds of every case, the seed of the data."""

    threads: int
    rounds: int
    seed: int


def _every_shape(quick: bool, seed: int) -> Sequence[Shape]:
    return random.Random(seed).sample(shapes(), QUICK_SHAPES) if quick else shapes()


def _curve_shapes(quick: bool, _seed: int) -> Sequence[Shape]:
    """Return t(rows) over the two matrices that make up most of BERT-Large."""
    matrices = [(1024, 1024)] if quick else [(1024, 1024), (4096, 1024), (1024, 4096)]
    return [Shape(m, n, k, 0.0) for n, k in matrices for m in CURVE_ROWS]


def _stream_shapes(quick: bool, _seed: int) -> Sequence[Shape]:
    rows = (1,) if quick else (1, 2, 4, 8)
    return [Shape(m, n, k, 0.0) for n, k in ((1024, 1024), (4096, 1024), (1024, 4096)) for m in rows]


def _data(case: Case, seed: int) -> tuple[F32, F32, F32]:
    m, n, k, _ = case.shape
    rng = np.random.default_rng([seed, m, n, k])
    x, w = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32) / np.float32(k**0.5)
    return x, w, rng.standard_normal(n, np.float32)


def _weight(name: str, array: F32, packed: bool) -> Weight:
    plain = array.reshape(-1, array.shape[-1])
    rows, columns = plain.shape
    buffer = allocate(WeightRef(name, (0, rows), (0, columns), "packed" if packed else "plain"))
    buffer.put(plain, 0, 0)
    return buffer.finish()


def _ours(x: F32, w: F32, b: F32, pool: Workers) -> tuple[Contender, F32]:
    """Return (the op as the executor calls it, its output)."""
    attrs = {"bias": True, "activation": None, "residual": False}
    out = np.empty((len(x), len(b)), np.float32)
    op, slots = Compute("linear", (0,), (1,), (), attrs), (SlotSpec(x.shape), SlotSpec(out.shape))
    weights = [_weight("w", w, packed=True), _weight("b", b, packed=False)]
    KERNELS["linear"].checked(op, slots, weights, pool)([x], [out])
    return partial(KERNELS["linear"].bind(op, slots, weights, pool), [x], [out]), out


def check(name: str, got: F32, x: F32, w: F32, b: F32) -> None:
    """Raise BenchError unless got = x @ w + b within the bound of a sum of k products in any order.

    |error| <= (k + 2) u (|x| |w| + |b|), u = 2^-24 (Higham 2002, section 3.1); NaN is out of any bound.
    """
    exact = x.astype(np.float64) @ w + b
    bound = (x.shape[1] + 2) * 2.0**-24 * (np.abs(x).astype(np.float64) @ np.abs(w) + np.abs(b))
    wrong = ~(np.abs(got - exact) <= bound)
    if wrong.any():
        raise BenchError(
            f"{name} computes [{x.shape[0]}, {x.shape[1]}] @ [{w.shape[0]}, {w.shape[1]}] wrongly in {wrong.sum()} of "
            f"{wrong.size} values; nothing was timed. Run the tests of the kernels: pytest tests/kernels"
        )


def _against_rivals(case: Case, conditions: Conditions, pools: Mapping[str, Workers]) -> dict[str, Any]:
    x, w, b = _data(case, conditions.seed)
    contenders: dict[str, Contender] = {}
    for name, pool in pools.items():
        contenders[name], out = _ours(x, w, b, pool)
        check(name, out, x, w, b)
    for name, make in rivals().items():
        contenders[name], result = make(x, w, b, conditions.threads)
        contenders[name]()
        check(name, result(), x, w, b)
    peak = fma_peak(repeats=2)
    seconds = interleaved(contenders, conditions.rounds)
    return {"seconds": seconds, "peak_flops_per_s": max(peak, fma_peak(repeats=2))}


def _streaming(case: Case, conditions: Conditions, pools: Mapping[str, Workers]) -> dict[str, Any]:
    """Time few rows against weights that lie in no cache: as many copies of the matrix as fill STREAM_BYTES."""
    x, w, b = _data(case, conditions.seed)
    copies = -(-STREAM_BYTES // w.nbytes)
    made = [_ours(x, w, b, pools["ours"]) for _ in range(copies)]
    for _, out in made:
        check("ours", out, x, w, b)

    def all_of_them() -> None:
        for call, _ in made:
            call()

    before = read_bandwidth()
    seconds = interleaved({"ours": all_of_them}, conditions.rounds)
    bandwidth = max(before, read_bandwidth())
    return {"seconds": seconds, "weight_bytes": copies * w.nbytes, "read_bytes_per_s": bandwidth}


Measure = Callable[[Case, Conditions, Mapping[str, Workers]], dict[str, Any]]
Choose = Callable[[bool, int], Sequence[Shape]]

GROUPS: Final[Mapping[str, tuple[Choose, Measure]]] = {
    "linear": (_every_shape, _against_rivals),
    "curve": (_curve_shapes, _against_rivals),
    "stream": (_stream_shapes, _streaming),
}

if tuple(GROUPS) != kernel_options.GROUPS:
    raise ImportError("kernel_options names other groups than there are")


def cases(groups: Sequence[str], quick: bool, seed: int) -> Iterator[Case]:
    """Return the cases of some groups; `quick` takes a seeded sample of the shapes."""
    for group in groups:
        for shape in GROUPS[group][0](quick, seed):
            yield Case(group, shape)


def measure(case: Case, conditions: Conditions, pools: Mapping[str, Workers]) -> dict[str, Any]:
    """Return the record of one case: what it is, seconds per call of every contender and round, and the roofs.

    pools: {"ours": as many threads as the conditions say} and, to compare with, {"ours, 1 thread": ...}.
    """
    m, n, k, weight = case.shape
    names = {"key": case.key, "group": case.group, "threads": conditions.threads}
    return {**names, "m": m, "n": n, "k": k, "weight": weight, **GROUPS[case.group][1](case, conditions, pools)}
