"""The op `linear` as a contender: its data, its weights in every storage, and the check before it is timed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.bench.kernel_rivals import F32, Maker
from hepti_mqtt.bench.kernel_shapes import Shape
from hepti_mqtt.bench.kernel_timing import Contender
from hepti_mqtt.errors import BenchError
from hepti_mqtt.kernels import KERNELS, NarrowMatrix, PackedMatrix, Weight, Workers, allocate
from hepti_mqtt.plan import Storage
from hepti_mqtt.program import Compute, SlotSpec, WeightRef

# Roundings of f32 that a sum of k products, its scale and its bias may add to k.
_MORE_ROUNDINGS = 4
# The step of 8 bits over a row, or over all of x, that includes 0; PyTorch's dynamic int8 leaves out one bit of it.
_LEVELS, _RIVAL_LEVELS = 254.0, 127.0


@dataclass(frozen=True, slots=True)
class Data:
    """x [m, k], w [k, n], b [n], and what they make in float64: x @ w + b and |x| |w| + |b|, both [m, n]."""

    x: F32
    w: F32
    b: F32
    exact: NDArray[np.float64]
    size: NDArray[np.float64]

    def rounding(self) -> NDArray[np.float64]:
        """Return the bound of f32 on |error| [m, n]: (k + 4) u (|x| |w| + |b|), u = 2^-24 (Higham 2002, 3.1)."""
        return np.asarray((self.x.shape[1] + _MORE_ROUNDINGS) * 2.0**-24 * self.size)


def data(shape: Shape, seed: int) -> Data:
    """Return seeded data of a shape: its values do not depend on which other shapes are measured."""
    m, n, k, _ = shape
    rng = np.random.default_rng([seed, m, n, k])
    x, w = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32) / np.float32(k**0.5)
    return made_of(x, w, rng.standard_normal(n, np.float32))


def made_of(x: F32, w: F32, b: F32) -> Data:
    """Return the data of x @ w + b."""
    return Data(x, w, b, x.astype(np.float64) @ w + b, np.abs(x).astype(np.float64) @ np.abs(w) + np.abs(b))


def check(name: str, got: F32, of: Data, bound: NDArray[np.float64]) -> None:
    """Raise BenchError unless |got - exact| <= bound everywhere; NaN is out of any bound."""
    wrong = ~(np.abs(got - of.exact) <= bound)
    if wrong.any():
        (m, k), n = of.x.shape, len(of.b)
        raise BenchError(
            f"{name} computes [{m}, {k}] @ [{k}, {n}] wrongly in {wrong.sum()} of {wrong.size} values; nothing was "
            "timed. Run the tests of the kernels: pytest tests/kernels"
        )


def ours(of: Data, storage: Storage, pool: Workers) -> tuple[Contender, int]:
    """Return (the op as the executor calls it, bytes of its matrix), checked against what its weights stand for."""
    attrs = {"bias": True, "activation": None, "residual": False}
    out = np.empty((len(of.x), len(of.b)), np.float32)
    op, slots = Compute("linear", (0,), (1,), (), attrs), (SlotSpec(of.x.shape), SlotSpec(out.shape))
    matrix = _weight("w", of.w, "packed", storage)
    weights = [matrix, _weight("b", of.b[None], "plain", "f32")]
    KERNELS["linear"].checked(op, slots, weights, pool)([of.x], [out])
    stored = made_of(of.x, matrix.plain(), of.b) if isinstance(matrix, NarrowMatrix) else of
    bound = stored.rounding()
    if storage == "w8a8":
        # Half a step of the row's activations, times the weights that they meet.
        steps = (of.x.max(axis=1, initial=0) - of.x.min(axis=1, initial=0)) / _LEVELS
        bound += 0.5 * np.outer(steps, np.abs(stored.w).sum(axis=0)) * (1 + 1e-5)
    check(f"linear in {storage}", out, stored, bound)
    return partial(KERNELS["linear"].bind(op, slots, weights, pool), [of.x], [out]), _nbytes(matrix)


def _weight(name: str, array: F32, layout: Any, storage: Storage) -> Weight:
    rows, columns = array.shape
    buffer = allocate(WeightRef(name, (0, rows), (0, columns), layout, storage))
    buffer.put(array, 0, 0)
    return buffer.finish()


def _nbytes(matrix: Weight) -> int:
    """Return the bytes that are read of a matrix: its panels, and what scales them."""
    if isinstance(matrix, NarrowMatrix):
        return matrix.panels.nbytes + matrix.scales.nbytes + matrix.sums.nbytes
    return matrix.panels.nbytes if isinstance(matrix, PackedMatrix) else matrix.nbytes


def theirs(of: Data, makers: Mapping[str, Maker], threads: int) -> dict[str, Contender]:
    """Return rivals in f32, each checked."""
    return _checked(of, makers, threads, of.rounding())


def theirs_int8(of: Data, makers: Mapping[str, Maker], threads: int) -> dict[str, Contender]:
    """Return rivals that quantise weights and activations with one step each per matrix, each checked."""
    x_step = (of.x.max(initial=0) - of.x.min(initial=0)) / _RIVAL_LEVELS
    w_step = 2 * np.abs(of.w).max() / _RIVAL_LEVELS
    error_of_x, error_of_w = np.full_like(of.x, x_step / 2, np.float64), np.full_like(of.w, w_step / 2, np.float64)
    bound = of.rounding() + error_of_x @ (np.abs(of.w) + error_of_w) + np.abs(of.x) @ error_of_w
    return _checked(of, makers, threads, bound)


def _checked(of: Data, makers: Mapping[str, Maker], threads: int, bound: NDArray[np.float64]) -> dict[str, Contender]:
    found: dict[str, Contender] = {}
    for name, make in makers.items():
        found[name], result = make(of.x, of.w, of.b, threads)
        found[name]()
        check(name, result(), of, bound)
    return found
