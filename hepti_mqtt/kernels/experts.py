"""Kernels of a mixture of experts: products of rows with the matrices of the experts that they choose.

`experts_up` reads x [m, h] and the router's logits [m, E], writes [m chosen, f]: activation(x @ gate_e) * (x @ up_e) of
row i's experts in rows i chosen ..; weights: E gates, then E ups, packed [h, f]. `experts_down` reads these rows and
the logits, writes [m, c]: the sum of hidden @ down_e by the experts' weights; weights: E matrices, packed [f, c].
Attributes: experts, chosen; activation, or normed (weights are a softmax over the chosen experts, else over all).
Optional: bias (the last weights are tables [E, columns] that are added to the products); of `experts_up` limit (gates
are at most that, ups between minus and plus that) and offset (added to ups).

A choice is a row and one of its experts. Choices are sorted by expert, their rows gathered, and multiplied in tiles of
one expert each; matrices of experts that no row chooses are not read. The experts of a row are added in ascending
order: an output depends on its row alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numba import float32, uint8
from numpy.typing import NDArray

from hepti_mqtt.core.program import Compute, Work
from hepti_mqtt.core.storage import BLOCK, BLOCK_STORAGES, Product
from hepti_mqtt.kernels.base import REFERENCE_ACTIVATIONS, Array, Arrays, Check, Kernel, Slots, Weights, row_parts
from hepti_mqtt.kernels.block_product import prepare_tile, sizes, sizes_of_rows
from hepti_mqtt.kernels.block_tile import BYTEWISE, DIGITS, ROWS, block_tile
from hepti_mqtt.kernels.blocks import WIDTH, BlockMatrix
from hepti_mqtt.kernels.calls import Call, Calls, Operand, operands, scratch
from hepti_mqtt.kernels.cpu import TILE
from hepti_mqtt.kernels.elementary import ZERO, exp_of_negative
from hepti_mqtt.kernels.jit import FLOAT, INT, INT_ARRAY, TABLE, fills, floats, helper, kernel, reads
from hepti_mqtt.kernels.threads import Workers, parts_of_panels
from hepti_mqtt.kernels.tile import MR, NR, activate, activation_of, panel_of_rows, store
from hepti_mqtt.kernels.weights import PackedMatrix

# Columns of the table of matrices: address of the first panel, bytes of a panel, address of the first bias, bytes
# between biases of panels, place of the storage among `BLOCK_STORAGES`.
_PANELS, _BYTES, _BIAS, _BIAS_BYTES, _KIND = range(5)
# Columns of the table of tiles: expert, first choice, choices (0 beyond the last tile).
_EXPERT, _FIRST, _COUNT = range(3)

_VECTORS: Final = NR // TILE.lanes
_NO_RESIDUAL: Final = np.empty((0, 0), np.float32)
_TAKEN: Final = 1


def chosen_experts(logits: Array, count: int) -> NDArray[np.intp]:
    """Return the experts of each row, ascending: [m, count]; of equal logits the first."""
    return np.sort(np.argsort(-logits, axis=1, kind="stable")[:, :count], axis=1)


def expert_weights(logits: Array, chosen: NDArray[np.intp], normed: bool) -> Array:
    """Return the weights of chosen experts, [m, count]: a softmax over them, or over all experts."""
    own = np.take_along_axis(logits, chosen, axis=1)
    top = logits.max(axis=1, keepdims=True)
    whole = own if normed else logits
    return np.asarray(np.exp(own - top) / np.exp(whole - top).sum(axis=1, keepdims=True))


@helper
def _choose(logits: Any, row: int, count: int, taken: Any) -> Any:
    """Mark the experts of a row in taken [E], of equal logits the first; return the largest logit."""
    experts = logits.shape[1]
    taken[:] = 0
    top = logits[row, 0]
    for _ in range(count):
        best = -1
        for e in range(experts):
            if taken[e] != _TAKEN and (best < 0 or logits[row, e] > logits[row, best]):
                best = e
        taken[best] = _TAKEN
        top = max(top, logits[row, best])
    return top


@kernel(
    reads(float32, 2), INT, INT, INT, INT_ARRAY, INT_ARRAY, fills(float32, 1), TABLE, seldom=True,
)  # fmt: skip
def _route(logits: Any, count: int, normed: int, height: int, chosen: Any, order: Any, scales: Any, tiles: Any) -> None:
    """Choose the `count` experts of each row; sort the choices by expert, and divide them into tiles.

    chosen [m count]: the expert of each choice, ascending in a row. scales [m count]: its weight in the row's result.
    order [m count]: the choices by expert. tiles [T, 3]: of at most `height` choices of one expert.
    """
    m, experts = logits.shape
    taken, begins = np.empty(experts, np.int64), np.zeros(experts + 1, np.int64)
    for row in range(m):
        top, total, at = _choose(logits, row, count, taken), ZERO, row * count
        for e in range(experts):
            weight = exp_of_negative(logits[row, e] - top)
            if taken[e] == _TAKEN:
                chosen[at], scales[at] = e, weight
                begins[e + 1] += 1
                at += 1
            if taken[e] == _TAKEN or not normed:
                total += weight
        for i in range(row * count, at):
            scales[i] /= total
    tile = 0
    for e in range(experts):
        rows = begins[e + 1]
        parts = -(-rows // height)
        for t in range(parts):  # tiles of nearly equal height
            first = t * rows // parts
            tiles[tile, _EXPERT], tiles[tile, _FIRST] = e, begins[e] + first
            tiles[tile, _COUNT] = (t + 1) * rows // parts - first
            tile += 1
        begins[e + 1] += begins[e]
    for t in range(tile, len(tiles)):
        tiles[t, _COUNT] = 0
    for choice in range(m * count):
        e = chosen[choice]
        order[begins[e]] = choice
        begins[e] += 1


@kernel(reads(float32, 2), fills(float32, 2), INT_ARRAY, INT, INT, INT, part=2, seldom=True)
def _gather(x: Any, out: Any, order: Any, by: int, first: int, stop: int) -> None:
    """Fill rows of out with the row of x of each choice, which has `by` choices."""
    for i in range(first, stop):
        source = floats(x.ctypes.data + 4 * x.shape[1] * (order[i] // by), x.shape[1])
        target = floats(out.ctypes.data + 4 * x.shape[1] * i, x.shape[1])
        for c in range(len(target)):
            target[c] = source[c]


@kernel(
    reads(float32, 2), TABLE, fills(uint8, 1), fills(float32, 1), INT, INT, INT, part=2, seldom=True,
)  # fmt: skip
def _prepare(x: Any, tiles: Any, taken: Any, words: Any, rounded: int, first: int, stop: int) -> None:
    """Prepare gathered rows x for tiles first..stop, as `block_product` does: codes in `taken`, scales in `words`."""
    of_row = sizes_of_rows(1, x.shape[1], rounded)
    for t in range(first, stop):
        row, count = tiles[t, _FIRST], tiles[t, _COUNT]
        if count > 0:
            left, of_words = taken.ctypes.data + of_row[0] * row, words.ctypes.data + 4 * of_row[1] * row
            prepare_tile(x, rounded, row, count, left, of_words)


@helper
def _group_end(tiles: Any, first: int) -> int:
    """Return the end of the tiles that have the expert of the first one."""
    stop = first + 1
    while stop < len(tiles) and tiles[stop, _COUNT] > 0 and tiles[stop, _EXPERT] == tiles[first, _EXPERT]:
        stop += 1
    return stop


@kernel(
    reads(float32, 2), TABLE, TABLE, fills(float32, 2), reads(float32, 2), INT, INT, part=2, seldom=True,
)  # fmt: skip
def _multiply(x: Any, tiles: Any, matrices: Any, out: Any, residual: Any, first_panel: int, last_panel: int) -> None:
    """Fill the columns of some panels of out [choices, n] with the gathered rows times their experts' matrices."""
    k, n = x.shape[1], out.shape[1]
    sums, group = np.empty(MR * NR, np.float32), 0
    while group < len(tiles) and tiles[group, _COUNT] > 0:
        stop, matrix = _group_end(tiles, group), matrices[tiles[group, _EXPERT]]
        for p in range(first_panel, last_panel):
            panel, bias = matrix[_PANELS] + p * matrix[_BYTES], matrix[_BIAS] + p * matrix[_BIAS_BYTES]
            valid = min(NR, n - p * NR)
            for t in range(group, stop):
                row, count = tiles[t, _FIRST], tiles[t, _COUNT]
                place, stride = sums.ctypes.data, NR
                if valid == NR:
                    place, stride = out.ctypes.data + 4 * (n * row + p * NR), n
                panel_of_rows(count, _VECTORS, x.ctypes.data + 4 * k * row, k, k, panel, bias, 0, place, stride)
                if valid < NR:
                    store(sums[: count * NR], NR, row, count, out, residual, p * NR, valid)
        group = stop


@kernel(
    reads(uint8, 1), reads(float32, 1), INT, INT, TABLE, TABLE, fills(float32, 2), reads(float32, 2), INT, INT, part=2,
    seldom=True,
)  # fmt: skip
def _multiply_blocks(
    taken: Any, words: Any, k: int, rounded: int, tiles: Any, matrices: Any, out: Any, residual: Any, first_panel: int,
    last_panel: int,
) -> None:  # fmt: skip
    """As `_multiply`, for matrices in blocks; taken, words: rows that `_prepare` has prepared."""
    n, digits = out.shape[1], 1 if rounded else DIGITS
    of_row = sizes_of_rows(1, k, rounded)
    sums, group = np.empty(ROWS[rounded] * WIDTH, np.float32), 0
    while group < len(tiles) and tiles[group, _COUNT] > 0:
        stop, matrix = _group_end(tiles, group), matrices[tiles[group, _EXPERT]]
        variant = 2 * matrix[_KIND] + (rounded if BYTEWISE else 0)
        for p in range(first_panel, last_panel):
            panel, bias = matrix[_PANELS] + p * matrix[_BYTES], matrix[_BIAS] + p * matrix[_BIAS_BYTES]
            valid = min(WIDTH, n - p * WIDTH)
            for t in range(group, stop):
                row, count = tiles[t, _FIRST], tiles[t, _COUNT]
                # Addresses are read at their use: Numba frees an array after its last use.
                left, of_words = taken.ctypes.data + of_row[0] * row, words.ctypes.data + 4 * of_row[1] * row
                c, c_stride = sums.ctypes.data, 4 * WIDTH
                if valid == WIDTH:
                    c, c_stride = out.ctypes.data + 4 * (n * row + p * WIDTH), 4 * n
                block_tile(digits * count, variant, panel, k // BLOCK, left, of_words, bias, 0, c, c_stride)
                if valid < WIDTH:
                    store(sums[: count * WIDTH], WIDTH, row, count, out, residual, p * WIDTH, valid)
        group = stop


@kernel(
    reads(float32, 2), reads(float32, 2), INT_ARRAY, INT, FLOAT, FLOAT, fills(float32, 2), INT, INT, part=2,
    seldom=True,
)  # fmt: skip
def _gate(
    gates: Any, ups: Any, order: Any, activation: int, limit: Any, offset: Any, out: Any, first: int, stop: int
) -> None:
    """Fill the rows of out of some choices in `order`; limit, offset: as `experts_up` has them, infinity for none."""
    f = out.shape[1]
    for i in range(first, stop):
        gate, up = floats(gates.ctypes.data + 4 * f * i, f), floats(ups.ctypes.data + 4 * f * i, f)
        target = floats(out.ctypes.data + 4 * f * order[i], f)
        for c in range(f):
            target[c] = limit if gate[c] > limit else gate[c]
        activate(target, activation)
        for c in range(f):
            other = limit if up[c] > limit else up[c]
            other = -limit if other < -limit else other
            target[c] *= other + offset


@kernel(
    reads(float32, 2), INT_ARRAY, reads(float32, 1), INT, fills(float32, 2), INT, INT, part=2, seldom=True,
)  # fmt: skip
def _add_up(parts: Any, order: Any, scales: Any, count: int, out: Any, first: int, stop: int) -> None:
    """Fill columns first..stop of out [m, n] with the sum of each row's parts [m count, n], by their scales."""
    n = out.shape[1]
    for row in range(len(out)):
        out[row, first:stop] = ZERO
    for i in range(len(order)):
        scale, row = scales[order[i]], order[i] // count
        part = floats(parts.ctypes.data + 4 * (n * i + first), stop - first)
        target = floats(out.ctypes.data + 4 * (n * row + first), stop - first)
        for c in range(len(part)):
            target[c] += scale * part[c]


class _Choices(NamedTuple):
    """The choices of a run in scratch memory, in the order of `_route`'s arguments."""

    chosen: Operand
    order: Operand
    scales: Operand
    tiles: Operand


def _choices(logits: Operand, count: int, normed: bool, height: int) -> tuple[_Choices, Call]:
    """Return the arrays of a run's choices, and the call that fills them."""
    m, experts = logits.shape
    tiles = min(experts, m * count) + m * count // height
    choices = _Choices(
        scratch((m * count,), np.int64), scratch((m * count,), np.int64), scratch((m * count,), np.float32),
        scratch((tiles, 1 + _COUNT), np.int64),
    )  # fmt: skip
    return choices, Call(_route, (logits, count, int(normed), height, *choices))


def _table_of(matrices: Weights, bias: Array | None) -> tuple[NDArray[np.int64], tuple[object, ...]]:
    """Return the table of equal matrices, and the owners of its memory; bias: [E, columns], None for zeros."""
    width, rows, alive = _width(matrices), list[tuple[int, ...]](), list[object](matrices)
    columns = _columns(matrices)
    panels = -(-columns // width)
    if bias is None:
        padded, of_expert, of_panel = np.zeros(width, np.float32), 0, 0
    elif columns % width:
        padded, of_expert, of_panel = (
            np.pad(bias, ((0, 0), (0, panels * width - columns))),
            4 * panels * width,
            4 * width,
        )
    else:
        padded, of_expert, of_panel = bias, 4 * columns, 4 * width
    begin = int(padded.__array_interface__["data"][0])
    for e, matrix in enumerate(matrices):
        assert isinstance(matrix, PackedMatrix | BlockMatrix)
        kind = BLOCK_STORAGES.index(matrix.storage.name) if isinstance(matrix, BlockMatrix) else 0
        at = int(matrix.panels.__array_interface__["data"][0])
        rows.append((at, matrix.panels[0].nbytes, begin + e * of_expert, of_panel, kind))
    return np.asarray(rows, np.int64).reshape(-1, 1 + _KIND), (*alive, padded)


def _width(matrices: Weights) -> int:
    return WIDTH if isinstance(matrices[0], BlockMatrix) else NR


def _columns(matrices: Weights) -> int:
    assert isinstance(matrices[0], PackedMatrix | BlockMatrix)
    return matrices[0].columns


class _Products:
    """Products of the rows of all choices with their experts' matrices; by: choices of a row of x."""

    def __init__(self, x: Operand, choices: _Choices, by: int, rounded: bool, pool: Workers) -> None:
        self._choices, self._rounded, self._pool = choices, rounded, pool
        self._rows = scratch((choices.order.shape[0], x.shape[1]), np.float32)
        self._taken: tuple[Operand, Operand] | None = None
        gather = pool.bind(_gather, row_parts(self._rows.shape[0], x.shape[1], pool))
        self.calls: Calls = gather(x, self._rows, choices.order, by)

    def add(self, matrices: Weights, bias: Array | None) -> Operand:
        """Add the calls of the products with one matrix of each expert; return their results [choices, n]."""
        table, alive = _table_of(matrices, bias)
        (choices, k), n = self._rows.shape, _columns(matrices)
        out, width = scratch((choices, n), np.float32), _width(matrices)
        parts = parts_of_panels(-(-n // width), choices * width * k, self._pool.threads)
        if width == WIDTH and isinstance(matrices[0], BlockMatrix):
            kinds = tuple(np.unique(table[:, _KIND]).tolist())
            bind = self._pool.bind(_multiply_blocks, parts, (choices, self._rounded, kinds))
            given: tuple[Any, ...] = (*self._prepared(), k, int(self._rounded))
        else:
            bind, given = self._pool.bind(_multiply, parts, choices), (self._rows,)
        self.calls += bind(*given, self._choices.tiles, table, out, _NO_RESIDUAL, alive=alive)
        return out

    def _prepared(self) -> tuple[Operand, Operand]:
        """Return the prepared rows for matrices in blocks; add the call that prepares them before the first product."""
        if self._taken is None:
            (choices, k), tiles = self._rows.shape, self._choices.tiles.shape[0]
            octets, words = sizes(choices, k, int(self._rounded))
            self._taken = scratch((octets,), np.uint8), scratch((words,), np.float32)
            prepare = self._pool.bind(_prepare, row_parts(tiles, k * DIGITS, self._pool))
            self.calls += prepare(self._rows, self._choices.tiles, *self._taken, int(self._rounded))
        return self._taken


def _checked(op: Compute, slots: Slots, weights: Weights, kinds: int) -> Check:
    check, experts = Check.of(op, slots, 2, rank=2), op.attrs["experts"]
    check.weights(weights, kinds * (experts + bool(op.attrs.get("bias"))))
    check.that(1 <= op.attrs["chosen"] <= experts, f"{op.attrs['chosen']} of {experts} experts cannot be chosen")
    check.that(check.reads[1].shape[1] == experts, f"needs the logits of {experts} experts")
    for place, weight in enumerate(weights[: kinds * experts]):
        if not isinstance(weight, PackedMatrix | BlockMatrix):
            raise ValueError(f"{op.kernel}: needs packed matrices in f32 or in blocks; fix its WeightRef")  # noqa: TRY004
        check.that(weight.rows == check.reads[0].shape[1], f"a matrix has {weight.rows} rows")
        check.that(weight.columns == check.writes[0].shape[1], f"a matrix has {weight.columns} columns")
        alike = type(weight) is type(weights[place // experts * experts])
        check.that(alike, "matrices of some experts are in blocks, and those of others are not")
    return check


def _biases(check: Check, weights: Weights, kinds: int) -> Sequence[Array | None]:
    """Return the bias of each expert's products [E, columns] for each kind of matrix, None without biases."""
    experts, columns = check.op.attrs["experts"], check.writes[0].shape[1]
    if not check.op.attrs.get("bias"):
        return (None,) * kinds
    return [check.table(weight, columns).reshape(experts, columns) for weight in weights[kinds * experts :]]


def _height(weights: Weights, rounded: bool) -> int:
    """Return the rows of the largest tile that all of an op's matrices have."""
    return min(ROWS[rounded] if isinstance(weight, BlockMatrix) else MR for weight in weights)


def _bind_up(op: Compute, slots: Slots, weights: Weights, pool: Workers) -> Calls:
    check, experts, count = _checked(op, slots, weights, 2), op.attrs["experts"], op.attrs["chosen"]
    (m, _), (_, f) = check.reads[0].shape, check.writes[0].shape
    check.shape(check.writes[0], (m * count, f))
    activation = activation_of(check, op.attrs["activation"])
    of_gate, of_up = _biases(check, weights, 2)
    if not m or not f:
        return []
    (x, logits), (out,) = operands(op, slots)
    rounded, kinds = op.attrs.get("x") == "i8", (weights[:experts], weights[experts : 2 * experts])
    choices, route = _choices(logits, count, True, _height((*kinds[0][:1], *kinds[1][:1]), rounded))
    products = _Products(x, choices, count, rounded, pool)
    gates, ups = products.add(kinds[0], of_gate), products.add(kinds[1], of_up)
    limit, offset = np.float32(op.attrs.get("limit", np.inf)), np.float32(op.attrs.get("offset", 0.0))
    gate = pool.bind(_gate, row_parts(m * count, f, pool))
    return [route, *products.calls, *gate(gates, ups, choices.order, activation, limit, offset, out)]


def _bind_down(op: Compute, slots: Slots, weights: Weights, pool: Workers) -> Calls:
    check, count, normed = _checked(op, slots, weights, 1), op.attrs["chosen"], bool(op.attrs["normed"])
    m, n = check.writes[0].shape
    check.that(check.reads[0].shape[0] == m * count, f"needs {count} rows for each of {m}")
    (bias,) = _biases(check, weights, 1)
    if not m or not n:
        return []
    (hidden, logits), (out,) = operands(op, slots)
    rounded, matrices = op.attrs.get("x") == "i8", weights[: op.attrs["experts"]]
    choices, route = _choices(logits, count, normed, _height(matrices[:1], rounded))
    products = _Products(hidden, choices, 1, rounded, pool)
    parts = products.add(matrices, bias)
    add_up = pool.bind(_add_up, row_parts(n, m * count, pool))
    return [route, *products.calls, *add_up(parts, choices.order, choices.scales, count, out)]


def _limited(attrs: Mapping[str, Any], gate: Array, up: Array) -> tuple[Array, Array]:
    """Return gate and up columns within their limits, and the offset added."""
    if limit := attrs.get("limit"):
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate, up + attrs.get("offset", 0.0)


def _reference_up(op: Compute, _slots: Slots, reads: Arrays, weights: Arrays) -> list[Array]:
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


def _reference_down(op: Compute, _slots: Slots, reads: Arrays, weights: Arrays) -> list[Array]:
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


def _work(op: Compute, slots: Slots) -> Work:
    """Return the work of the chosen experts: others are not read."""
    experts, chosen = op.attrs["experts"], op.attrs["chosen"]
    m, k, n = slots[op.reads[1]].shape[0], slots[op.reads[0]].shape[1], slots[op.writes[0]].shape[1]
    kinds = 2 if op.kernel == "experts_up" else 1
    storage = op.weights[0].weight_dtype
    product = Product(storage, op.attrs.get("x") == "i8" and storage in BLOCK_STORAGES)
    read = max(read_experts(m, experts, chosen), 1.0)
    columns, flops = max(round(read * n * kinds), 1), 2.0 * m * chosen * k * n * kinds
    return Work("linear", rows=max(round(m * chosen / read), 1), k=k, n=columns, flops=flops, product=product)


def _scratch(op: Compute, slots: Slots) -> int:
    """Return the bytes of gathered rows, as numbers and as products take them, and of the products."""
    m, k, n = slots[op.reads[1]].shape[0], slots[op.reads[0]].shape[1], slots[op.writes[0]].shape[1]
    return int(m * op.attrs["chosen"]) * (8 * k + 4 * n * (2 if op.kernel == "experts_up" else 1))


EXPERTS_UP: Final = Kernel("experts_up", _bind_up, _reference_up, _work, scratch_bytes=_scratch, by_matrix=True)
EXPERTS_DOWN: Final = Kernel("experts_down", _bind_down, _reference_down, _work, scratch_bytes=_scratch, by_matrix=True)
