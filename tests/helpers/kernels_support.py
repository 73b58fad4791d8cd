"""Runs one kernel beside its reference: what every test of a kernel needs."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from hypothesis import settings
from numpy.typing import NDArray

from hepti_mqtt.core.program import NUMPY_DTYPE, Compute, SlotSpec, WeightRef
from hepti_mqtt.core.storage import StoredRows
from hepti_mqtt.kernels import KERNELS, Weight, Workers, allocate, jit, warm_up
from hepti_mqtt.kernels.cpu import isa
from hepti_mqtt.kernels.jit import JIT

Array = NDArray[Any]
DTYPES = {np.dtype(v): k for k, v in NUMPY_DTYPE.items()}

# Where the suite runs once again for another instruction set, which has no cache: the modules whose kernels it needs,
# by their names in the package.
ALONE = "HEPTI_TEST_KERNELS_OF"
if needed := os.environ.get(ALONE, "").split():
    jit.registered[:] = [
        k for k in jit.registered if k[0].py_func.__module__.removeprefix("hepti_mqtt.kernels.") in needed
    ]
    for other in set(jit.divided) - {dispatcher for dispatcher, _ in jit.registered}:
        del jit.divided[other]
warm_up()  # so that no example of hypothesis pays for it
settings.register_profile("kernels", deadline=None, max_examples=25 if JIT else 5)
settings.load_profile("kernels")

# The generator that hypothesis seeds again for every example, so that a failing example fails again.
RNG = np.random.mtrand._rand
RNG.seed(1)


def array(*shape: int, scale: float = 1.0) -> Array:
    return (RNG.standard_normal(shape) * scale).astype(np.float32)


def runnable() -> list[str]:
    """Return the instruction sets with a tile that this CPU can run, but for the one that every test runs with here."""
    features = llvm.get_host_cpu_features()
    if platform.machine().lower() in ("aarch64", "arm64"):
        able = ["generic", "neon"]
    else:
        wide = [("avx2", "avx2"), ("avx512", "avx512f")]
        able = ["generic", "sse", *(name for name, feature in wide if features.get(feature))]
    return [name for name in able if name != isa()]


def spec(a: Array) -> SlotSpec:
    return SlotSpec(a.shape, DTYPES[a.dtype])


def held(
    tensor: Array | StoredRows, storage: str = "f32", layout: str = "packed", ref: WeightRef | None = None
) -> Weight:
    """Return a tensor, or the range `ref` of it, as kernels hold it."""
    if isinstance(tensor, StoredRows):
        storage = tensor.storage.name
    whole = tensor.reshape(1, -1) if isinstance(tensor, np.ndarray) and tensor.ndim == 1 else tensor
    rows, columns = whole.shape
    buffer = allocate(ref or WeightRef("w", (0, rows), (0, columns), layout, storage))
    buffer.put(whole, 0, 0)
    return buffer.finish()


def checked(
    op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], workers: Workers
) -> Callable[[Sequence[Array], Sequence[Array]], None]:
    """Return a bound kernel that first checks its arrays, because compiled code trusts them."""
    run = KERNELS[op.kernel].bind(op, slots, weights, workers)

    def call(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        for slot, given in zip((*op.reads, *op.writes), (*reads, *writes), strict=True):
            assert (given.dtype, given.shape) == (NUMPY_DTYPE[slots[slot].dtype], slots[slot].shape)
            assert given.flags.c_contiguous
        run(reads, writes)

    return call


class Case:
    """One op with its arrays.

    weights: plain, of which the first `packed` are packed, or as kernels hold them.
    """

    def __init__(
        self,
        kernel: str,
        /,
        reads: Sequence[Array],
        shapes: Sequence[tuple[int, ...]],
        weights: Sequence[Array | Weight] = (),
        packed: int = 0,
        dtype: str = "f32",
        **attrs: Any,
    ) -> None:
        self.reads, self.plain = list(reads), [w if isinstance(w, np.ndarray) else w.plain() for w in weights]
        self.slots = [*map(spec, reads), *(SlotSpec(s, dtype) for s in shapes)]
        n = len(reads)
        self.op = Compute(kernel, tuple(range(n)), tuple(range(n, n + len(shapes))), (), attrs)
        self.weights = [
            held(w, layout="packed" if i < packed else "plain") if isinstance(w, np.ndarray) else w
            for i, w in enumerate(weights)
        ]
        self.kernel = KERNELS[kernel]

    def run(self, threads: int = 1) -> list[Array]:
        with pool(threads) as workers:
            run = checked(self.op, self.slots, self.weights, workers)
            writes = [poisoned(self.slots[s]) for s in self.op.writes]
            again = [poisoned(self.slots[s]) for s in self.op.writes]
            with np.errstate(all="ignore"):  # compiled code does not warn; plain Python does
                run(self.reads, writes)
                run(self.reads, again)
        for a, b in zip(writes, again, strict=True):
            np.testing.assert_array_equal(a, b)
        return writes

    def reference(self) -> list[Array]:
        with np.errstate(invalid="ignore", over="ignore"):
            return self.kernel.reference(self.op, self.slots, self.reads, self.plain)

    def check(self, rtol: float = 2e-5, atol: float = 2e-5) -> list[Array]:
        got, want = self.run(), self.reference()
        for g, w in zip(got, want, strict=True):
            assert g.shape == w.shape
            assert g.dtype == w.dtype
            np.testing.assert_allclose(g, w, rtol=rtol, atol=atol)
        return got


def poisoned(slot: SlotSpec) -> Array:
    """Return an array in which an element that is never written is not mistaken for a result."""
    out = np.empty(slot.shape, NUMPY_DTYPE[slot.dtype])
    out[...] = 77 if slot.dtype != "f32" else np.float32(7e7)
    return out


@contextmanager
def pool(threads: int) -> Iterator[Workers]:
    workers = Workers(threads)
    try:
        yield workers
    finally:
        workers.close()
