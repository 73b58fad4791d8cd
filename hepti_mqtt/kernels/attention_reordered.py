"""Kernel `attention_reordered`: attention in Voltage's order of products (Hu and Li, 2024).

q [r, *], x [s, w] -> [r, heads d]: ((q Wk.T) x.T), then (P x) Wv + b, so that no keys and values are computed: fewer
multiplications for few queries and many rows of x. Weights: Wk, Wv packed [w, heads d]; with attribute bias both
biases, plain [heads d]; the bias of keys adds the same to all scores of a query and is not used. Other attributes as
`attention` has.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import float32
from numpy.typing import NDArray

from hepti_mqtt.core.program import Compute, SlotSpec, Work
from hepti_mqtt.kernels.attention import ATTENTION, GRAIN, key_ranges_of, pairs_of, tiles_of_op
from hepti_mqtt.kernels.attention_tile import KEYS, LANES, LOG2E, scores_of, softmax_tile, transpose
from hepti_mqtt.kernels.base import Array, Arrays, Check, Kernel, Slots, Weights
from hepti_mqtt.kernels.calls import Calls, operands
from hepti_mqtt.kernels.elementary import ZERO
from hepti_mqtt.kernels.jit import FLOAT, INT, TABLE, fills, helper, kernel, reads
from hepti_mqtt.kernels.threads import Workers, ranges
from hepti_mqtt.kernels.tile import MR, NR, panel_of_columns, panel_of_rows

_MINUS_INF: Final = np.float32(-np.inf)

# Columns of the table of units: rows of q, rows of x, first head, heads.
_FIRST, _STOP, _LOW, _HIGH, _HEAD, _HEADS = range(6)


@helper
def _through_keys(
    matrix: Any, column: int, d: int, vectors: int, queries: Any, zeros: Any, lane: int, wide: Any
) -> None:
    """Fill wide [w, NR], from `lane` on, with columns column..column + d of Wk times queries [d, NR]."""
    w = matrix.shape[1]
    at = column
    while at < column + d:
        panel, inside = at // NR, at % NR
        depth = min(NR - inside, column + d - at)
        left = matrix.ctypes.data + 4 * (panel * w * NR + inside)
        right = queries.ctypes.data + 4 * (at - column) * NR
        for i in range(0, w, MR):
            out = wide.ctypes.data + 4 * (i * NR + lane)
            start, stride = (out, NR) if at > column else (zeros.ctypes.data, 0)
            panel_of_rows(min(MR, w - i), vectors, left + 4 * i * NR, NR, depth, right, start, stride, out, NR)
        at += depth


@helper
def _mixed(x: Any, low: int, keys: int, vectors: int, scores: Any, zeros: Any, started: Any, total: Any) -> None:
    """Add the transpose of x[low : low + keys] times scores [keys, NR] to total [w, NR], or start it."""
    w = x.shape[1]
    for c in range(0, w, MR):
        out = total.ctypes.data + 4 * c * NR
        start, stride = (out, NR) if started else (zeros.ctypes.data, 0)
        at = x.ctypes.data + 4 * (low * w + c)
        panel_of_columns(min(MR, w - c), vectors, at, w, keys, scores.ctypes.data, start, stride, out, NR)


@helper
def _through_values(
    matrix: Any, column: int, d: int, vectors: int, total: Any, lane: int, zeros: Any, result: Any
) -> None:
    """Fill result [d, NR] with the transpose of columns column..column + d of Wv times total [w, NR] from `lane` on."""
    w = matrix.shape[1]
    at = column
    while at < column + d:
        panel, inside = at // NR, at % NR
        rows = min(MR, NR - inside, column + d - at)
        left = matrix.ctypes.data + 4 * (panel * w * NR + inside)
        out = result.ctypes.data + 4 * (at - column) * NR
        right = total.ctypes.data + 4 * lane
        panel_of_columns(rows, vectors, left, NR, w, right, zeros.ctypes.data, 0, out, NR)
        at += rows


@kernel(
    reads(float32, 2), reads(float32, 2), fills(float32, 2), reads(float32, 3), reads(float32, 3), reads(float32, 1),
    TABLE, INT, INT, FLOAT, INT, INT, part=2, seldom=True,
)  # fmt: skip
def _reordered_units(
    q: Any, x: Any, out: Any, key_panels: Any, value_panels: Any, bias: Any, units: Any, q_column: int, d: int,
    scale: Any, first: int, stop: int,
) -> None:  # fmt: skip
    """Fill the rows and heads of out of the units first..stop."""
    w = x.shape[1]
    narrow = np.empty(d * NR, np.float32)
    wide, total = np.zeros(w * NR, np.float32), np.empty(w * NR, np.float32)
    scores = np.empty(KEYS * NR, np.float32)
    zeros = np.zeros(NR, np.float32)
    high, norm, rescale = np.empty(NR, np.float32), np.empty(NR, np.float32), np.empty(NR, np.float32)
    for unit in range(first, stop):
        row, count = units[unit, _FIRST], units[unit, _STOP] - units[unit, _FIRST]
        low, end = units[unit, _LOW], units[unit, _HIGH]
        head, heads = units[unit, _HEAD], units[unit, _HEADS]
        if end <= low:
            out[row : row + count, head * d : (head + heads) * d] = ZERO
            continue
        vectors = -(-count // LANES)
        for j in range(heads):
            transpose(q, row, count, q_column + (head + j) * d, d, scale * LOG2E, narrow)
            # The next head overwrites the lanes beyond this head's queries.
            _through_keys(key_panels, (head + j) * d, d, vectors, narrow, zeros, j * count, wide)
        high[:] = _MINUS_INF
        norm[:] = ZERO
        together = -(-heads * count // LANES)
        for block in range(low, end, KEYS):
            keys = min(KEYS, end - block)
            scores_of(x.ctypes.data + 4 * block * w, w, keys, together, wide, w, zeros, scores)
            softmax_tile(together, scores.ctypes.data, keys, high.ctypes.data, norm.ctypes.data, rescale.ctypes.data)
            if block > low:
                for c in range(w):
                    for i in range(together * LANES):
                        total[c * NR + i] *= rescale[i]
            _mixed(x, block, keys, together, scores, zeros, block > low, total)
        for j in range(heads):
            lane, column = j * count, (head + j) * d
            _through_values(value_panels, column, d, vectors, total, lane, zeros, narrow)
            for i in range(count):
                weight = norm[lane + i]
                for c in range(d):
                    out[row + i, column + c] = narrow[c * NR + i] / weight + bias[column + c]


def _check_reordered(op: Compute, slots: Slots) -> tuple[Check, int, int]:
    """Return (the op's checks, heads, columns of a head); raises ValueError if its slots do not fit together."""
    check = Check.of(op, slots, 2, rank=2)
    heads, d, column = op.attrs["heads"], op.attrs["head_dim"], op.attrs["q_column"]
    check.that(d >= 1 and heads >= 0, f"heads {heads} of {d} columns make no sense")
    r, width = check.reads[0].shape
    check.that(0 <= column <= width - heads * d, "q_column leaves no room for the heads")
    check.that(len(op.attrs["q_rows"]) == r, f"q_rows names {len(op.attrs['q_rows'])} rows, q has {r}")
    check.shape(check.writes[0], (r, heads * d))
    return check, heads, d


def units_of(tiles: NDArray[np.int64], heads: int) -> NDArray[np.int64]:
    """Return the units, int64 [units, 6]: a tile of queries, its first head and number of heads.

    A unit has as many heads as fit into the lanes, the last one in whole vectors. Heads are the outer loop, so that
    weights stay in the cache.
    """
    counts = (stop - first for first, stop, *_ in tiles.tolist())
    room = [(NR - -(-count // LANES) * LANES) // count + 1 for count in counts]
    units = [
        (*tile[:4], head, min(most, heads - head))
        for tile, most in zip(tiles.tolist(), room, strict=True)
        for head in range(0, heads, most)
    ]
    return np.asarray(sorted(units, key=lambda unit: unit[_HEAD]), np.int64).reshape(-1, 6)


def _bind_reordered(op: Compute, slots: Slots, weights: Weights, pool: Workers) -> Calls:
    check, heads, d = _check_reordered(op, slots)
    has_bias = bool(op.attrs["bias"])
    check.weights(weights, 4 if has_bias else 2)
    s, w = check.reads[1].shape
    keys, values = (check.packed(weight) for weight in weights[:2])
    for name, matrix in (("keys", keys), ("values", values)):
        fits = (matrix.rows, matrix.columns) == (w, heads * d)
        check.that(fits, f"the matrix of {name} is {matrix.rows} x {matrix.columns}, should be {w} x {heads * d}")
    biases = [check.plain(weight, (heads * d,)) for weight in weights[2:]]
    bias = biases[1] if has_bias else np.zeros(heads * d, np.float32)
    units = units_of(tiles_of_op(op, key_ranges_of(op, s)), heads)
    if not len(units):
        return []
    flops = int(_flops(op, s, w))
    threads = min(pool.threads, 1 + flops // GRAIN)
    parts = ranges(len(units), threads if threads == 1 else 4 * threads, flops)
    fixed = (keys.panels, values.panels, bias, units, op.attrs["q_column"], d, np.float32(op.attrs["scale"]))
    (q, x), (out,) = operands(op, slots)
    return pool.bind(_reordered_units, parts)(q, x, out, *fixed)


def _flops(op: Compute, keys: int, w: int) -> float:
    heads, d, r = int(op.attrs["heads"]), int(op.attrs["head_dim"]), len(op.attrs["q_rows"])
    return 4.0 * heads * w * (r * d + pairs_of(key_ranges_of(op, keys).ranges))


def _work_reordered(op: Compute, slots: Slots) -> Work:
    """Return the work as that of a matmul: each query of each head goes through Wk, x, x again and Wv.

    Reading Wk and Wv comes on top: in a matmul of so many rows it is hidden, but only one head's queries meet a weight.
    """
    s, w = slots[op.reads[1]].shape
    heads, r, flops = op.attrs["heads"], len(op.attrs["q_rows"]), _flops(op, s, w)
    nbytes = 2.0 * 4 * w * heads * op.attrs["head_dim"]
    return Work("linear", rows=heads * r, k=w, n=round(flops / max(2 * heads * r * w, 1)), flops=flops, nbytes=nbytes)


def _reference_reordered(op: Compute, slots: Slots, reads: Arrays, weights: Arrays) -> list[Array]:
    """Return the attention over keys and values that the reference computes first."""
    _, heads, d = _check_reordered(op, slots)
    q, x = (a.astype(np.float64) for a in reads)
    bias = weights[3] if op.attrs["bias"] else 0.0
    kv = np.concatenate([x @ weights[0].astype(np.float64), x @ weights[1].astype(np.float64) + bias], axis=1)
    attrs = {**op.attrs, "k_column": 0, "v_column": heads * d}
    whole = op._replace(kernel="attention", reads=(0, 1), writes=(2,), attrs=attrs)
    specs = (slots[op.reads[0]], SlotSpec(kv.shape), slots[op.writes[0]])
    return ATTENTION.reference_function(whole, specs, (q, kv), ())


ATTENTION_REORDERED: Final = Kernel(
    "attention_reordered", _bind_reordered, _reference_reordered, _work_reordered, later=True
)
