"""Kernels of a mixture of experts: products of rows with the matrices of the experts that they choose.

`experts_up` reads x [m, h] and the router's logits [m, E], writes [m chosen, f]: activation(x @ gate_e) * (x @ up_e) of
row i's experts in rows i chosen ..; weights: E gates, then E ups, packed [h, f]. `experts_down` reads these rows and
the logits, writes [m, c]: the sum of hidden @ down_e by the experts' weights; weights: E matrices, packed [f, c].
Attributes: experts, chosen; activation, or normed (weights are a softmax over the chosen experts, else over all).
Optional: bias (the last weights are tables [E, columns] that are added to the products); of `experts_up` limit (gates
are at most that, ups between minus and plus that) and offset (added to ups).

Rows of one expert are multiplied together, and the experts of a row are added in ascending order: an output depends on
its row alone. Matrices of experts that no row chooses are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.kernels.base import REFERENCE_ACTIVATIONS, Array, BoundKernel, Check, Kernel
from hepti_mqtt.kernels.blocks import BlockMatrix
from hepti_mqtt.kernels.calls import Call, Calls, operands
from hepti_mqtt.kernels.linear import LINEAR
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
    """Products of some rows with one of several equal matrices, bound when they are first needed."""

    def __init__(self, matrices: Sequence[Weight], rounded: bool, pool: Workers) -> None:
        self._matrices, self._pool = matrices, pool
        self._attrs = {"bias": False, "residual": False, "activation": None, **({"x": "i8"} if rounded else {})}
        self._runs: dict[tuple[int, int], BoundKernel] = {}

    def __call__(self, number: int, x: Array) -> Array:
        """Return x @ matrix [r, n]; x: rows up to a power of two are computed, of which few numbers are bound."""
        rows, size = len(x), 1 << (len(x) - 1).bit_length()
        if size > rows:
            x = np.concatenate([x, np.zeros((size - rows, x.shape[1]), np.float32)])
        matrix = self._matrices[number]
        assert isinstance(matrix, PackedMatrix | BlockMatrix)
        out = np.empty((size, matrix.columns), np.float32)
        if (run := self._runs.get((number, size))) is None:
            op, specs = Compute("linear", (0,), (1,), attrs=self._attrs), (SlotSpec(x.shape), SlotSpec(out.shape))
            run = self._runs[number, size] = LINEAR.bind(op, specs, [matrix], self._pool)
        run((np.ascontiguousarray(x),), (out,))
        return out[:rows]


def _checked(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], kinds: int) -> Check:
    check, experts = Check(op, slots), op.attrs["experts"]
    check.count(2)
    check.dtypes()
    check.rank(2)
    check.weights(weights, kinds * (experts + bool(op.attrs.get("bias"))))
    check.that(1 <= op.attrs["chosen"] <= experts, f"{op.attrs['chosen']} of {experts} experts cannot be chosen")
    check.that(check.reads[1].shape[1] == experts, f"needs the logits of {experts} experts")
    for weight in weights[: kinds * experts]:
        if not isinstance(weight, PackedMatrix | BlockMatrix):
            raise ValueError(f"{op.kernel}: needs packed matrices in f32 or in blocks; fix its WeightRef")  # noqa: TRY004
        check.that(weight.rows == check.reads[0].shape[1], f"a matrix has {weight.rows} rows")
        check.that(weight.columns == check.writes[0].shape[1], f"a matrix has {weight.columns} columns")
    return check


def _biases(check: Check, weights: Sequence[Weight], kinds: int) -> list[Array]:
    """Return the bias of each expert's products [E, columns], for each kind of matrix; zeros without biases."""
    experts, columns = check.op.attrs["experts"], check.writes[0].shape[1]
    if not check.op.attrs.get("bias"):
        return [np.zeros((experts, columns), np.float32)] * kinds
    return [check.table(weight, columns).reshape(experts, columns) for weight in weights[kinds * experts :]]


def _limited(attrs: Mapping[str, Any], gate: Array, up: Array) -> tuple[Array, Array]:
    """Return gate and up columns within their limits, and the offset added."""
    if limit := attrs.get("limit"):
        gate, up = np.minimum(gate, gate.dtype.type(limit)), np.clip(up, -limit, limit)
    return gate, up + up.dtype.type(attrs.get("offset", 0.0))


def _bind_up(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], pool: Workers) -> Calls:
    check, experts, count = _checked(op, slots, weights, 2), op.attrs["experts"], op.attrs["chosen"]
    (m, _), (_, f) = check.reads[0].shape, check.writes[0].shape
    check.shape(check.writes[0], (m * count, f))
    if not m or not f:
        return []
    product, activation = _Products(weights, op.attrs.get("x") == "i8", pool), op.attrs["activation"]
    gated: dict[int, BoundKernel] = {}
    of_gate, of_up = _biases(check, weights, 2)

    def multiply(x: Array, logits: Array, out: Array) -> None:
        for expert, places in _groups(chosen_experts(logits, count)):
            rows, n = np.ascontiguousarray(x[places // count]), len(places)
            if n not in gated:
                specs = [SlotSpec((n, f))] * 3
                gated[n] = GATE.bind(Compute("gate", (0, 1), (2,), attrs={"activation": activation}), specs, [], pool)
            hidden = np.empty((n, f), np.float32)
            gate, up = product(expert, rows) + of_gate[expert], product(experts + expert, rows) + of_up[expert]
            gated[n](_limited(op.attrs, gate, up), (hidden,))
            out[places] = hidden

    given, results = operands(op, slots)
    return [Call(multiply, (*given, *results))]


def _bind_down(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], pool: Workers) -> Calls:
    check, count, normed = _checked(op, slots, weights, 1), op.attrs["chosen"], bool(op.attrs["normed"])
    m = check.writes[0].shape[0]
    check.that(check.reads[0].shape[0] == m * count, f"needs {count} rows for each of {m}")
    if not m or not check.writes[0].shape[1]:
        return []
    product = _Products(weights, op.attrs.get("x") == "i8", pool)
    (bias,) = _biases(check, weights, 1)

    def multiply(hidden: Array, logits: Array, out: Array) -> None:
        chosen = chosen_experts(logits, count)
        scales = expert_weights(logits, chosen, normed).reshape(-1)
        out[...] = 0
        for expert, places in _groups(chosen):  # each expert once in a row, so rows are different
            rows = product(expert, np.ascontiguousarray(hidden[places])) + bias[expert]
            out[places // count] += scales[places, None] * rows

    given, results = operands(op, slots)
    return [Call(multiply, (*given, *results))]


def _reference_up(
    op: Compute, _slots: Sequence[SlotSpec], reads: Sequence[Array], weights: Sequence[Array]
) -> list[Array]:
    x, logits = (read.astype(np.float64) for read in reads)
    experts, count = op.attrs["experts"], op.attrs["chosen"]
    chosen, function = chosen_experts(logits, count).reshape(-1), REFERENCE_ACTIVATIONS[op.attrs["activation"]]
    of_gate, of_up = weights[2 * experts :] if op.attrs.get("bias") else np.zeros((2, experts, 1))
    rows = []
    for i, e in enumerate(chosen.tolist()):
        row = x[i // count]
        gate, up = _limited(op.attrs, row @ weights[e] + of_gate[e], row @ weights[experts + e] + of_up[e])
        rows.append(function(gate) * up)
    return [np.stack(rows)]


def _reference_down(
    op: Compute, _slots: Sequence[SlotSpec], reads: Sequence[Array], weights: Sequence[Array]
) -> list[Array]:
    hidden, logits = (read.astype(np.float64) for read in reads)
    chosen = chosen_experts(logits, op.attrs["chosen"])
    scales = expert_weights(logits, chosen, bool(op.attrs["normed"])).reshape(-1)
    biases = weights[-1] if op.attrs.get("bias") else np.zeros((op.attrs["experts"], 1))
    parts = [
        scale * (row @ weights[e] + biases[e])
        for row, e, scale in zip(hidden, chosen.reshape(-1).tolist(), scales, strict=True)
    ]
    return [np.stack(parts).reshape(len(logits), op.attrs["chosen"], -1).sum(axis=1)]


def read_experts(rows: int, experts: int, chosen: int) -> float:
    """Return how many experts some rows choose, on average, if each chooses any of them alike."""
    return experts * (1 - (1 - chosen / experts) ** rows)


def _work(op: Compute, slots: Sequence[SlotSpec]) -> Work:
    """Return the work of the chosen experts: others are not read."""
    experts, chosen = op.attrs["experts"], op.attrs["chosen"]
    m, k, n = slots[op.reads[1]].shape[0], slots[op.reads[0]].shape[1], slots[op.writes[0]].shape[1]
    kinds = 2 if op.kernel == "experts_up" else 1
    storage = op.weights[0].weight_dtype
    product = Product(storage, op.attrs.get("x") == "i8" and storage in BLOCK_STORAGES)
    read = max(read_experts(m, experts, chosen), 1.0)
    columns, flops = max(round(read * n * kinds), 1), 2.0 * m * chosen * k * n * kinds
    return Work("linear", rows=max(round(m * chosen / read), 1), k=k, n=columns, flops=flops, product=product)


EXPERTS_UP: Final = Kernel("experts_up", _bind_up, _reference_up, _work)
EXPERTS_DOWN: Final = Kernel("experts_down", _bind_down, _reference_down, _work)
