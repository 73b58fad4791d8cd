"""Kernels of a mixture of experts: products of rows with the matrices of the experts that they choose.

`experts_up` reads x [m, h] and the router's logits [m, E], writes [m chosen, f]: activation(x @ gate_e) * (x @ up_e) of
row i's experts in rows i chosen ..; weights: E gates, then E ups, packed [h, f]. `experts_down` reads these rows and
the logits, writes [m, c]: the sum of hidden @ down_e by the experts' weights; weights: E matrices, packed [f, c].
Attributes: experts, chosen; activation, or normed (weights are a softmax over the chosen experts, else over all).

Rows of one expert are multiplied together, and the experts of a row are added in ascending order: an output depends on
its row alone. Matrices of experts that no row chooses are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.kernels import block_product
from hepti_mqtt.kernels.base import REFERENCE_ACTIVATIONS, Array, Check, Kernel, Run, nothing
from hepti_mqtt.kernels.blocks import BlockMatrix
from hepti_mqtt.kernels.linear import bind_alike
from hepti_mqtt.kernels.rowwise import GATE
from hepti_mqtt.kernels.threads import Workers
from hepti_mqtt.kernels.weights import PackedMatrix, Weight
from hepti_mqtt.program import Compute, SlotSpec, Work
from hepti_mqtt.storage import BLOCK_STORAGES, Product


def chosen_experts(logits: Array, count: int) -> NDArray[np.intp]:
    """Return the experts of each row, ascending: [m, count]; of equal logits the first."""
    return np.sort(np.argsort(-logits, axis=1, kind="stable")[:, :count], axis=1)


def expert_weights(logits: Array, chosen: NDArray[np.intp], normed: bool) -> Array:
    """Return the weights of chosen experts, [m, count]: a softmax over them, or over all experts."""
    own = np.take_along_axis(logits, chosen, axis=1)
    top = logits.max(axis=1, keepdims=True)
    whole = own if normed else logits
    return np.asarray(np.exp(own - top) / np.exp(whole - top).sum(axis=1, keepdims=True))


def _groups(chosen: NDArray[np.intp]) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Yield (expert, its places among all choices), experts ascending."""
    flat = chosen.reshape(-1)
    order = np.argsort(flat, kind="stable")
    experts, starts = np.unique(flat[order], return_index=True)
    yield from zip(experts.tolist(), np.split(order, starts[1:]), strict=True)


class _Products:
    """Products of some rows with some of several equal matrices."""

    def __init__(self, matrices: Sequence[Weight], rounded: bool, pool: Workers) -> None:
        in_blocks = [matrix for matrix in matrices if isinstance(matrix, BlockMatrix)]
        packed = [matrix for matrix in matrices if isinstance(matrix, PackedMatrix)]
        self._columns = (in_blocks or packed)[0].columns
        self._of_rows = block_product.bind_alike(in_blocks, rounded, pool) if in_blocks else bind_alike(packed, pool)
        self._alive = matrices  # what is bound has only their addresses
        self._bound: dict[tuple[int, int], block_product.ProductOf] = {}

    def __call__(self, numbers: Sequence[int], x: Array) -> Array:
        """Return x @ matrices side by side [r, count n]; up to a power of two rows are computed: few are bound."""
        rows, size = len(x), 1 << (len(x) - 1).bit_length()
        if size > rows:
            x = np.concatenate([x, np.zeros((size - rows, x.shape[1]), np.float32)])
        key = size, len(numbers)
        if (product := self._bound.get(key)) is None:
            product = self._bound[key] = self._of_rows(*key)
        out = np.empty((size, len(numbers) * self._columns), np.float32)
        product(numbers, np.ascontiguousarray(x), out)
        return out[:rows]


def _checked(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], kinds: int) -> Check:
    check, experts = Check(op, slots), op.attrs["experts"]
    check.count(2)
    check.dtypes()
    check.rank(2)
    check.weights(weights, kinds * experts)
    check.that(1 <= op.attrs["chosen"] <= experts, f"{op.attrs['chosen']} of {experts} experts cannot be chosen")
    check.that(check.reads[1].shape[1] == experts, f"needs the logits of {experts} experts")
    for weight in weights:
        if not isinstance(weight, PackedMatrix | BlockMatrix):
            raise ValueError(f"{op.kernel}: needs packed matrices in f32 or in blocks; fix its WeightRef")  # noqa: TRY004
        check.that(weight.rows == check.reads[0].shape[1], f"a matrix has {weight.rows} rows")
        check.that(weight.columns == check.writes[0].shape[1], f"a matrix has {weight.columns} columns")
    return check


def _bind_up(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], pool: Workers) -> Run:
    check, experts, count = _checked(op, slots, weights, 2), op.attrs["experts"], op.attrs["chosen"]
    (m, _), (_, f) = check.reads[0].shape, check.writes[0].shape
    check.shape(check.writes[0], (m * count, f))
    if not m or not f:
        return nothing
    product, activation = _Products(weights, op.attrs.get("x") == "i8", pool), op.attrs["activation"]
    specs = [SlotSpec((m * count, f))] * 3
    gate = GATE.bind(Compute("gate", (0, 1), (2,), attrs={"activation": activation}), specs, [], pool)

    def run(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        x, logits = reads
        chosen = chosen_experts(logits, count)
        if m == 1:  # all chosen matrices in one product
            numbers = [*chosen[0], *(experts + chosen[0])]
            both = product(numbers, x).reshape(2, count, f)
            gate((both[0], both[1]), (writes[0],))
            return
        gates, ups = (np.empty((m * count, f), np.float32) for _ in range(2))
        for expert, places in _groups(chosen):
            both = product([expert, experts + expert], x[places // count])
            gates[places], ups[places] = both[:, :f], both[:, f:]
        gate((gates, ups), (writes[0],))

    return run


def _bind_down(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], pool: Workers) -> Run:
    check, count, normed = _checked(op, slots, weights, 1), op.attrs["chosen"], bool(op.attrs["normed"])
    m = check.writes[0].shape[0]
    check.that(check.reads[0].shape[0] == m * count, f"needs {count} rows for each of {m}")
    if not m or not check.writes[0].shape[1]:
        return nothing
    product = _Products(weights, op.attrs.get("x") == "i8", pool)

    def run(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        hidden, logits = reads
        chosen = chosen_experts(logits, count)
        scales, out = expert_weights(logits, chosen, normed).reshape(-1), writes[0]
        out[...] = 0
        for expert, places in _groups(chosen):  # each expert once in a row, so rows are different
            out[places // count] += scales[places, None] * product([expert], hidden[places])

    return run


def _reference_up(
    op: Compute, _slots: Sequence[SlotSpec], reads: Sequence[Array], weights: Sequence[Array]
) -> list[Array]:
    x, logits = (read.astype(np.float64) for read in reads)
    experts, count = op.attrs["experts"], op.attrs["chosen"]
    chosen, function = chosen_experts(logits, count).reshape(-1), REFERENCE_ACTIVATIONS[op.attrs["activation"]]
    rows = [x[i // count] for i in range(len(chosen))]
    return [
        np.stack(
            [
                function(row @ weights[e]) * (row @ weights[experts + e])
                for row, e in zip(rows, chosen.tolist(), strict=True)
            ]
        )
    ]


def _reference_down(
    op: Compute, _slots: Sequence[SlotSpec], reads: Sequence[Array], weights: Sequence[Array]
) -> list[Array]:
    hidden, logits = (read.astype(np.float64) for read in reads)
    chosen = chosen_experts(logits, op.attrs["chosen"])
    scales = expert_weights(logits, chosen, bool(op.attrs["normed"])).reshape(-1)
    parts = [
        scale * (row @ weights[e]) for row, e, scale in zip(hidden, chosen.reshape(-1).tolist(), scales, strict=True)
    ]
    return [np.stack(parts).reshape(len(logits), op.attrs["chosen"], -1).sum(axis=1)]


def read_experts(rows: int, experts: int, chosen: int) -> float:
    """Return how many experts some rows choose, on average, if each chooses any of them alike."""
    return experts * (1 - (1 - chosen / experts) ** rows)


def _work(op: Compute, slots: Sequence[SlotSpec]) -> Work:
    """Return the work of the chosen experts: others are not read."""
    experts, chosen = op.attrs["experts"], op.attrs["chosen"]
    m, k, n = slots[op.reads[1]].shape[0], slots[op.reads[0]].shape[1], slots[op.writes[0]].shape[1]
    kinds = len(op.weights) // experts
    storage = op.weights[0].weight_dtype
    product = Product(storage, op.attrs.get("x") == "i8" and storage in BLOCK_STORAGES)
    read = max(read_experts(m, experts, chosen), 1.0)
    columns, flops = max(round(read * n * kinds), 1), 2.0 * m * chosen * k * n * kinds
    return Work("linear", rows=max(round(m * chosen / read), 1), k=k, n=columns, flops=flops, product=product)


EXPERTS_UP: Final = Kernel("experts_up", _bind_up, _reference_up, _work, notes_panels=False)
EXPERTS_DOWN: Final = Kernel("experts_down", _bind_down, _reference_down, _work, notes_panels=False)
