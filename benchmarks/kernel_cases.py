"""What the kernels' benchmark measures: groups of cases, each of which checks its contenders before they are timed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, get_args

from benchmarks import kernel_linear
from benchmarks.kernel_layer import checked_runners
from benchmarks.kernel_roofs import Roof, multiply_adds, reads_of_memory
from benchmarks.kernel_timing import Contender, Shape, interleaved, shapes
from hepti_mqtt.checkpoint.make import spec_of_kind
from hepti_mqtt.core.plan import WeightDtype
from hepti_mqtt.kernels import Workers
from hepti_mqtt.models import require_transformer

# Shapes with fewer weights than this are judged in the mean alone.
LARGE_WEIGHTS: Final = 1 << 18
QUICK_SHAPES, QUICK_INT8_SHAPES, QUICK_MANY_ROWS = 24, 8, 16
# Rows from which several threads are held against one.
MANY_ROWS: Final = 64
SINGLE: Final = "ours, 1 thread"
# The group that measures several threads of ours, and no rival, in a process of its own.
THREADS: Final = "threads"
# Names of roofs in a record.
ROOF, ROOF_OF_ONE = "roof", "roof, 1 thread"
# A sample of several threads: the cores of a virtual machine that have been idle come late, by a millisecond or more.
_LONG_SAMPLE_S: Final = 2e-2
CURVE_ROWS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 197, 256, 384)
# Rows from which the arithmetic, and not the memory, limits int8.
INT8_ROWS: Final = 48
# 197 rows are those of ViT-Large, whose matrices are as large as BERT-Large's.
LAYER_MODEL, LAYER_ROWS = "bert-large", (32, 128, 197, 384, 512)
# The weights that one call streams: larger than last-level caches, as a model's weights are.
STREAM_BYTES: Final = 1 << 28
_MATRICES: Final = ((1024, 1024), (4096, 1024), (1024, 4096))
_STORAGES: Final[tuple[WeightDtype, ...]] = get_args(WeightDtype)


@dataclass(frozen=True, slots=True)
class Case:
    """One shape of one group; `storage` is that of the weights, where a group has cases in several."""

    group: str
    shape: Shape
    storage: WeightDtype = "f32"

    @property
    def key(self) -> str:
        """Return what names the case in the file of results."""
        return f"{self.group}:{self.shape.m}x{self.shape.n}x{self.shape.k}:{self.storage}"


@dataclass(frozen=True, slots=True)
class Conditions:
    """How a process measures: its threads, the rounds of a case, the seed of the data."""

    threads: int
    rounds: int
    seed: int

    @property
    def pause_s(self) -> float:
        """Return how long idle threads of a rival may spin on a core that the next one needs: OpenBLAS some 25 ms."""
        return 0.05 if self.threads > 1 else 0.0


Pools = Mapping[str, Workers]
Chosen = tuple[Shape, WeightDtype]
Cases = Iterator[Chosen]


def _f32(shape: Shape) -> Chosen:
    return shape, "f32"


def _sample(of: Sequence[Shape], count: int, quick: bool, seed: int) -> Cases:
    chosen = random.Random(seed).sample(of, min(count, len(of))) if quick else of
    return map(_f32, chosen)


def _every_shape(quick: bool, seed: int) -> Cases:
    return _sample(shapes(), QUICK_SHAPES, quick, seed)


def _curve_shapes(quick: bool, _seed: int) -> Cases:
    """Return t(rows) over the matrices that make up most of BERT-Large."""
    return (_f32(Shape(m, n, k, 0.0)) for n, k in _MATRICES[: 1 if quick else None] for m in CURVE_ROWS)


def _stream_shapes(quick: bool, _seed: int) -> Cases:
    for n, k in _MATRICES[: 1 if quick else None]:
        for storage in _STORAGES:
            rows = (1,) if quick else (1, 2, 4, 8)
            yield from ((Shape(m, n, k, 0.0), storage) for m in rows)


def _int8_shapes(quick: bool, seed: int) -> Cases:
    wanted = [s for s in shapes() if s.m >= INT8_ROWS and s.n * s.k >= LARGE_WEIGHTS]
    return _sample(wanted, QUICK_INT8_SHAPES, quick, seed)


def _many_rows_shapes(quick: bool, seed: int) -> Cases:
    wanted = [s for s in shapes() if s.m >= MANY_ROWS and s.n * s.k >= LARGE_WEIGHTS]
    return _sample(wanted, QUICK_MANY_ROWS, quick, seed)


def _layer_shapes(_quick: bool, _seed: int) -> Cases:
    spec = require_transformer(spec_of_kind(LAYER_MODEL))
    return (_f32(Shape(m, spec.mlp, spec.hidden, 0.0)) for m in LAYER_ROWS)


# The loop of one pool is the same for all cases.
_peak: Final = cache(multiply_adds)


def _below(roofs: Mapping[str, Roof], contenders: Mapping[str, Contender], *how: Any) -> dict[str, Any]:
    """Time contenders, and the roofs among them: held against its best moment, every kernel would be slow.

    how: what `interleaved` takes.
    """
    seconds = interleaved({**contenders, **{name: roof.run for name, roof in roofs.items()}}, *how)
    found = {name: {"amount": roof.amount, "seconds": seconds.pop(name)} for name, roof in roofs.items()}
    return {"roofs": found, "seconds": seconds}


def _against_rivals(case: Case, conditions: Conditions, pools: Pools) -> dict[str, Any]:
    of = kernel_linear.data(case.shape, conditions.seed)
    contenders = {"ours": kernel_linear.ours(of, "f32", pools["ours"])[0]}
    contenders |= kernel_linear.theirs(of, kernel_linear.rivals(), conditions.threads)
    roofs = {ROOF: _peak(pools["ours"])}
    return {**_below(roofs, contenders, conditions.rounds, conditions.pause_s), "flops": case.shape.flops}


def _beside_one_thread(case: Case, conditions: Conditions, pools: Pools) -> dict[str, Any]:
    """Time several threads beside one: without rivals, whose idle threads spin on the core that a thread needs.

    The FMA peaks of as many threads, and of one, take turns with them: what the machine's cores give together.
    """
    of = kernel_linear.data(case.shape, conditions.seed)
    contenders = {name: kernel_linear.ours(of, "f32", pool)[0] for name, pool in pools.items()}
    roofs = {ROOF: _peak(pools["ours"]), ROOF_OF_ONE: _peak(pools[SINGLE])}
    return {**_below(roofs, contenders, conditions.rounds, 0.0, _LONG_SAMPLE_S), "flops": case.shape.flops}


def _narrow(case: Case, conditions: Conditions, pools: Pools) -> dict[str, Any]:
    """Time w8a8 beside the other storages of our own and dynamic int8 of others, both with the activations' part."""
    of = kernel_linear.data(case.shape, conditions.seed)
    names = {"ours" if storage == "w8a8" else f"ours, {storage}": storage for storage in _STORAGES}
    contenders = {name: kernel_linear.ours(of, storage, pools["ours"])[0] for name, storage in names.items()}
    contenders |= kernel_linear.theirs_int8(of, kernel_linear.int8_rivals(), conditions.threads)
    return {"seconds": interleaved(contenders, conditions.rounds, conditions.pause_s), "flops": case.shape.flops}


def _streaming(case: Case, conditions: Conditions, pools: Pools) -> dict[str, Any]:
    """Time few rows against weights that lie in no cache: as many copies of the matrix as fill STREAM_BYTES."""
    of = kernel_linear.data(case.shape, conditions.seed)
    made = [kernel_linear.ours(of, case.storage, pools["ours"])]
    nbytes = made[0][1]
    made += [kernel_linear.ours(of, case.storage, pools["ours"]) for _ in range(-(-STREAM_BYTES // nbytes) - 1)]

    def all_of_them() -> None:
        for call, _ in made:
            call()

    found = _below({ROOF: reads_of_memory()}, {"ours": all_of_them}, conditions.rounds, conditions.pause_s)
    return {**found, "weight_bytes": len(made) * nbytes, "flops": len(made) * case.shape.flops}


def _layer(case: Case, conditions: Conditions, pools: Pools) -> dict[str, Any]:
    spec, rows = require_transformer(spec_of_kind(LAYER_MODEL, layers=1)), case.shape.m
    contenders = checked_runners(spec, rows, conditions.threads, conditions.seed, pools["ours"])
    h, up = spec.hidden, spec.mlp
    flops = 2.0 * rows * (4 * h * h + 2 * h * up) + 4.0 * rows * rows * h
    return {"seconds": interleaved(contenders, conditions.rounds, conditions.pause_s), "flops": flops}


Measure = Callable[[Case, Conditions, Pools], dict[str, Any]]
Choose = Callable[[bool, int], Cases]

GROUPS: Final[Mapping[str, tuple[Choose, Measure]]] = {
    "linear": (_every_shape, _against_rivals),
    "curve": (_curve_shapes, _against_rivals),
    "stream": (_stream_shapes, _streaming),
    "int8": (_int8_shapes, _narrow),
    "layer": (_layer_shapes, _layer),
    THREADS: (_many_rows_shapes, _beside_one_thread),
}


def cases(groups: Sequence[str], quick: bool, seed: int) -> Iterator[Case]:
    """Return the cases of some groups; `quick` takes a seeded sample."""
    for group in groups:
        for chosen in GROUPS[group][0](quick, seed):
            yield Case(group, *chosen)


def measure(case: Case, conditions: Conditions, pools: Pools) -> dict[str, Any]:
    """Return the record of one case: what it is, seconds per call of every contender and round, FLOPs, roofs.

    pools: {"ours": as many threads as the conditions say} and, for the group `threads`, {SINGLE: one thread}. elapsed_s
    is what the case took in all, with its data, checks and warm-up.
    """
    m, n, k, weight = case.shape
    began = time.monotonic()
    found = GROUPS[case.group][1](case, conditions, pools)
    names = {"key": case.key, "group": case.group, "storage": case.storage, "threads": conditions.threads}
    sizes = {"m": m, "n": n, "k": k, "weight": weight}
    return {**names, **sizes, **found, "elapsed_s": time.monotonic() - began}
