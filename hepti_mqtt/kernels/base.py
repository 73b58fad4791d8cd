"""What a kernel is: its three functions, the checks that kernels share, and helpers of their NumPy references."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.core.program import NUMPY_DTYPE, Compute, SlotSpec, Work
from hepti_mqtt.kernels.blocks import BlockMatrix
from hepti_mqtt.kernels.calls import Calls
from hepti_mqtt.kernels.jit import compile_all, compile_first
from hepti_mqtt.kernels.tape import Tape
from hepti_mqtt.kernels.threads import Parts, Workers, ranges
from hepti_mqtt.kernels.weights import NarrowMatrix, PackedMatrix, Weight

Array = NDArray[Any]
Arrays = Sequence[Array]
Slots = Sequence[SlotSpec]
Weights = Sequence[Weight]

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _gelu(x: Array) -> Array:
    return np.asarray(x * 0.5 * (1.0 + _erf(x / math.sqrt(2.0))))


def _gelu_tanh(x: Array) -> Array:
    return x * 0.5 * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


REFERENCE_ACTIVATIONS: Final[Mapping[str | None, Callable[[Array], Array]]] = {
    None: lambda x: x,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: np.where(x < 0, 0.0, x),
    "tanh": np.tanh,
    "relu6": lambda x: np.where(x < 0, 0.0, np.where(x > 6, 6.0, x)),
    "leaky_relu": lambda x: np.where(x < 0, 0.1 * x, x),
    "silu": lambda x: x * 0.5 * (1.0 + np.tanh(0.5 * x)),
    "quick_gelu": lambda x: x * 0.5 * (1.0 + np.tanh(0.851 * x)),
    "sigmoid": lambda x: 0.5 * (1.0 + np.tanh(0.5 * x)),
    "hard_sigmoid": lambda x: np.clip(x + 3.0, 0.0, 6.0) / 6.0,
    "hard_swish": lambda x: x * np.clip(x + 3.0, 0.0, 6.0) / 6.0,
}


def reference_norm(x: Array, weights: Arrays, attrs: Mapping[str, Any]) -> Array:
    """Return the norm of `norm_of` over the last axis; weights: gamma, and perhaps beta."""
    x = x.astype(np.float64)
    mean = x.mean(axis=-1, keepdims=True) * (not attrs.get("rms", False))
    var = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    gamma = (weights[0] + attrs.get("gamma_offset", 0.0)) / attrs.get("divisor", 1.0)
    beta = weights[1] if len(weights) > 1 else 0.0
    return np.asarray((x - mean) / np.sqrt(var + attrs["eps"]) * gamma + beta)


Bind = Callable[[Compute, Slots, Weights, Workers], Calls]
Reference = Callable[[Compute, Slots, Arrays, Arrays], list[Array]]
Estimate = Callable[[Compute, Slots], Work]
Scratch = Callable[[Compute, Slots], int]


def _no_scratch(_op: Compute, _slots: Slots) -> int:
    return 0


# Elements of an op per thread at least; above it `choice` decides.
ROWWISE_GRAIN = 1 << 14


class BoundKernel:
    """The calls of an op with its weights; calling it runs them alone, on arrays that the op reads and writes."""

    def __init__(self, op: Compute, slots: Slots, calls: Calls, pool: Workers) -> None:
        self.calls = calls
        self._op, self._slots, self._pool = op, slots, pool
        self._tape: Tape | None = None

    def __call__(self, reads: Arrays, writes: Arrays) -> None:
        """Run the op; the arrays are trusted."""
        arrays = dict(zip((*self._op.reads, *self._op.writes), (*reads, *writes), strict=True))
        if self._tape is None:
            growing = [slot for slot in arrays if self._slots[slot].state]
            self._tape = Tape([self.calls], self._pool, list(arrays), growing)
        row, scratch = 0, np.empty(self._tape.nbytes, np.uint8)
        while row < len(self.calls):  # also if the pool is interrupted
            row = self._tape.run(list(arrays.values()), scratch, row)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of the table. An op's `slots` are the slot table of its Program; its weights are in their order."""

    name: str
    bind_function: Bind
    reference_function: Reference
    #: (op, slots) -> the work of an op, for the cost model
    work: Estimate
    #: only `jit.compile_all` compiles its code, not `compile_first`
    later: bool = False
    #: (op, slots) -> scratch bytes of a run; 0 if they are small compared with the slots
    scratch_bytes: Scratch = _no_scratch
    #: the size of a bound op's tables of matrices does not depend on their columns
    by_matrix: bool = False

    def bind(self, op: Compute, slots: Slots, weights: Weights, pool: Workers) -> BoundKernel:
        """Return the calls of one op of a template; they allocate nothing large and release the GIL.

        Shapes, attributes and weights are evaluated here, once. Calls trust their arrays, and must not run on two
        threads at once. Raises ValueError if the op does not fit together.
        """
        is_later = self.later or any(isinstance(w, NarrowMatrix | BlockMatrix) for w in weights)
        (compile_all if is_later else compile_first)()
        try:
            return BoundKernel(op, slots, self.bind_function(op, slots, weights, pool), pool)
        except KeyError as error:
            raise ValueError(f"{self.name}: attribute {error} is missing; it has {sorted(op.attrs)}") from error

    def reference(self, op: Compute, slots: Slots, reads: Arrays, weights: Arrays) -> list[Array]:
        """Return the results of an op, by plain NumPy in float64; weights are plain arrays [in, out] or [n]."""
        dtypes = [NUMPY_DTYPE[slots[s].dtype] for s in op.writes]
        results = self.reference_function(op, slots, reads, weights)
        return [np.ascontiguousarray(r, dtype=t) for r, t in zip(results, dtypes, strict=True)]


class Check:
    """Checks of one op; every failure is a ValueError that names the kernel."""

    def __init__(self, op: Compute, slots: Slots) -> None:
        self.op = op
        self.reads = [slots[s] for s in op.reads]
        self.writes = [slots[s] for s in op.writes]

    @classmethod
    def of(
        cls, op: Compute, slots: Slots, reads: int | None, writes: int = 1, rank: int | None = None,
        dtypes: tuple[str, str] | None = ("f32", "f32"),
    ) -> Check:  # fmt: skip
        """Return the checks of an op with these numbers of slots, rank and dtypes (of reads, of writes).

        reads: None for one or more. rank, dtypes: None for any.
        """
        check = cls(op, slots)
        check.that(
            bool(check.reads) if reads is None else len(check.reads) == reads, f"must read {reads or 'some'} slots"
        )
        check.that(len(check.writes) == writes, f"must write {writes} slots")
        if dtypes is not None:
            check.dtypes(*dtypes)
        ranks = {len(spec.shape) for spec in (*check.reads, *check.writes)}
        check.that(rank is None or ranks == {rank}, f"slots must have {rank} dimensions")
        return check

    def that(self, condition: bool, message: str) -> None:
        """Raise ValueError unless `condition` holds."""
        if not condition:
            raise ValueError(
                f"{self.op.kernel}: {message} (reads {[s.shape for s in self.reads]}, "
                f"writes {[s.shape for s in self.writes]}); the Program and its weights must come from one model spec"
            )

    def dtypes(self, reads: str, writes: str) -> None:
        """Check that all slots that the op reads and writes have these dtypes."""
        self.that(all(s.dtype == reads for s in self.reads), f"must read {reads}")
        self.that(all(s.dtype == writes for s in self.writes), f"must write {writes}")

    def shape(self, spec: SlotSpec, wanted: tuple[int, ...]) -> None:
        """Check the shape of one slot."""
        self.that(spec.shape == wanted, f"{spec.shape} should be {wanted}")

    def packed(self, weight: Weight) -> PackedMatrix:
        """Return a weight that must be packed."""
        if not isinstance(weight, PackedMatrix):
            message = f"{self.op.kernel}: needs a packed f32 matrix, got {_kind(weight)}; fix its WeightRef"
            raise ValueError(message)  # noqa: TRY004
        return weight

    def plain(self, weight: Weight, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Return a weight that must be a plain f32 array of `shape`; -1 matches any extent."""
        if not isinstance(weight, np.ndarray):
            message = f"{self.op.kernel}: needs a plain array, got {_kind(weight)}; fix its WeightRef"
            raise ValueError(message)  # noqa: TRY004
        fits = weight.ndim == len(shape) and all(w in (-1, s) for s, w in zip(weight.shape, shape, strict=True))
        self.that(
            fits and weight.dtype == np.float32, f"weight {weight.dtype}{list(weight.shape)} should be f32{shape}"
        )
        return np.ascontiguousarray(weight)

    def table(self, weight: Weight, width: int) -> NDArray[np.float32]:
        """Return a weight that must be a plain table [.., width]; one of a single row arrives as [width]."""
        if isinstance(weight, np.ndarray) and weight.ndim == 1:
            weight = weight.reshape(1, -1)
        return self.plain(weight, (-1, width))

    def weights(self, weights: Weights, count: int) -> None:
        """Check how many weights the op has."""
        self.that(len(weights) == count, f"needs {count} weights, got {len(weights)}")


def _kind(weight: Weight) -> str:
    if isinstance(weight, NarrowMatrix):
        return f"a packed {weight.storage} matrix"
    if isinstance(weight, BlockMatrix):
        return f"a matrix in blocks of {weight.storage.name}"
    return "a packed matrix" if isinstance(weight, PackedMatrix) else "a plain array"


def norm_of(check: Check, weights: Weights, h: int) -> tuple[NDArray[np.float32], NDArray[np.float32], np.float32, int]:
    """Return (gamma [h], beta [h], eps, 1 if rows are centred else 0) of an op that norms rows.

    weights: gamma, and beta if there is one. Attributes: eps; optional rms (rows are not centred), gamma_offset (added
    to gamma) and divisor (of that sum).
    """
    attrs = check.op.attrs
    check.that(1 <= len(weights) <= 2, f"needs gamma and perhaps beta, got {len(weights)} weights")
    gamma = check.plain(weights[0], (h,)) + np.float32(attrs.get("gamma_offset", 0.0))
    gamma /= np.float32(attrs.get("divisor", 1.0))
    beta = check.plain(weights[1], (h,)) if len(weights) > 1 else np.zeros(h, np.float32)
    return gamma, beta, np.float32(attrs["eps"]), int(not attrs.get("rms", False))


def row_parts(rows: int, columns: int, pool: Workers) -> Parts:
    """Return ranges of rows for the threads of `pool`; one range if there is too little work for several threads."""
    return ranges(rows, min(pool.threads, 1 + rows * columns // ROWWISE_GRAIN), rows * columns)


def starts_of(lengths: Sequence[int]) -> NDArray[np.int64]:
    """Return the first packed row of every sequence and the end of the last one: int64 [B + 1]."""
    return np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))]).astype(np.int64)


def rowwise(op: Compute, slots: Slots) -> Work:
    """Return the work of an op that reads and writes each of its values once: bytes moved."""
    return Work("rowwise", nbytes=float(sum(slots[s].nbytes for s in (*op.reads, *op.writes))))


def check_at(op: Compute, slots: Slots, dtypes: tuple[str, ...], items: int = 1, result: str = "f32") -> Check:
    """Check an op that reads arrays [m] or [m, n] of these dtypes, then `at`, and writes [m, n] of a dtype."""
    check = Check.of(op, slots, len(dtypes) + 1, dtypes=None)
    got = tuple(s.dtype for s in check.reads)
    check.that(got == (*dtypes, "i32"), f"must read {[*dtypes, 'i32']}, not {list(got)}")
    check.that(check.writes[0].dtype == result, f"must write {result}")
    check.shape(check.reads[-1], (items,))
    ranks = [len(s.shape) for s in (*check.reads[:-1], check.writes[0])]
    check.that(ranks == [1 if d == "i32" else 2 for d in (*dtypes, "f32")], "slots must be matrices, ids a vector")
    return check


def items_of(op: Compute, rows: int) -> tuple[int, ...]:
    """Return the rows of each item of an op with `at`: all of one item, unless it has `lengths`.

    Raises ValueError if they are not as many.
    """
    lengths = tuple(op.attrs.get("lengths", (rows,)))
    if sum(lengths) != rows or min(lengths, default=0) < 0:
        raise ValueError(f"{op.kernel}: items of {lengths} rows are not the {rows} rows that it reads")
    return lengths


def refuse_at(op: Compute, lengths: Sequence[int], size: int, what: str) -> Callable[..., None]:
    """Return a function of a call's arguments that raises ValueError if new rows of items lie outside 0..size.

    lengths: new rows of each item; they begin at the positions in the last i32 argument. what: the unit of size.
    """

    def refuse(*arguments: Any) -> None:
        at = [a for a in arguments if isinstance(a, np.ndarray) and a.dtype == np.int32][-1]
        for first, rows in zip(at.tolist(), lengths, strict=True):
            if first < 0 or first + rows > size:
                raise ValueError(
                    f"{op.kernel}: rows {first}..{first + rows} do not lie in the {size} {what}; end sequences earlier"
                )

    return refuse
