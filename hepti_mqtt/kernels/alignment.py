"""The kernel that aligns tokens with sound, by the attention of some heads (Radford et al., 2022).

align_tokens  q_1, kv_1 ... q_n, kv_n [m, h] and [S, 2 h] of n layers, extent i32 [3] -> [m, 1]: the row of sound at
              which each token begins. extent: first and last row of q that count (exclusive), and rows of sound that
              count. Attributes: heads, pairs (layer, head); head_dim. Rows of q that do not count have 0.

Of each head: softmax over all S rows of sound, mean 0 and deviation 1 over the tokens, a median over 7 rows of sound.
Their mean is the gain of a path from the first token and row to the last ones; dynamic time warping takes the best.
A result is NaN if a weight is not finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numba import float32, int32, uint8

from hepti_mqtt.core.program import Compute, SlotSpec, Work
from hepti_mqtt.kernels.base import Array, Check, Kernel
from hepti_mqtt.kernels.calls import Addresses, Call, Calls, operands, scratch
from hepti_mqtt.kernels.elementary import ZERO, exp_of_negative
from hepti_mqtt.kernels.jit import FLOAT, INT, INT_ARRAY, fills, floats, helper, kernel, reads
from hepti_mqtt.kernels.threads import Workers
from hepti_mqtt.kernels.weights import Weight

MEDIAN: Final = 7  # rows of sound, as every published model has it
_HALF: Final = MEDIAN // 2
_BOTH, _TOKEN, _SOUND = range(3)  # what a step of the path advances
_INFINITY: Final = np.float32(np.inf)


@helper
def _attend(q: Any, kv: Any, width: int, column: int, d: int, scale: Any, weights: Any, sounds: int) -> None:
    """Write the softmax of one row's scores over all keys to weights [sounds]."""
    top = -_INFINITY
    for key in range(sounds):
        score = ZERO
        for i in range(d):
            score += q[column + i] * kv[key * 2 * width + column + i]
        weights[key] = score * scale
        top = max(top, weights[key])
    total = 0.0
    for key in range(sounds):
        weights[key] = exp_of_negative(weights[key] - top)
        total += np.float64(weights[key])
    for key in range(sounds):
        weights[key] = np.float32(weights[key] / total)


@helper
def _standardise(weights: Any, n: int, f: int) -> None:
    """Give each of the first f columns mean 0 and deviation 1 over n rows; 0 where all of its rows are equal."""
    for key in range(f):
        mean, square = 0.0, 0.0
        for row in range(n):
            mean += np.float64(weights[row, key])
        mean /= n
        for row in range(n):
            square += (np.float64(weights[row, key]) - mean) ** 2
        by = 1 / np.sqrt(square / n) if square > 0 else 0.0 * square  # NaN stays
        for row in range(n):
            weights[row, key] = np.float32((np.float64(weights[row, key]) - mean) * by)


@helper
def _add_medians(weights: Any, f: int, total: Any, near: Any) -> None:
    """Add the median around each of the first f values of a row; the row is mirrored at its ends."""
    for key in range(f):
        value = weights[key]
        if f > _HALF:
            for i in range(MEDIAN):
                at = abs(key + i - _HALF)
                at = 2 * (f - 1) - at if at >= f else at
                place, value = i, weights[at]
                while place > 0 and near[place - 1] > value:
                    near[place] = near[place - 1]
                    place -= 1
                near[place] = value
            value = near[_HALF]
        total[key] += value


@helper
def _warp(gain: Any, n: int, f: int, cost: Any, trace: Any) -> None:
    """Find the best path through the gains [n, f]; trace: how it comes to each place."""
    for i in range(n + 1):
        cost[0, i] = _INFINITY
    cost[0, 0] = ZERO
    for key in range(f):
        before, now = cost[key & 1], cost[1 - (key & 1)]
        now[0] = _INFINITY
        for i in range(1, n + 1):
            both, token, sound = before[i - 1], now[i - 1], before[i]
            step, least = _SOUND, sound
            if both < token and both < sound:
                step, least = _BOTH, both
            elif token < both and token < sound:
                step, least = _TOKEN, token
            now[i] = least - gain[i - 1, key]
            trace[i - 1, key] = step


@kernel(
    INT_ARRAY, INT_ARRAY, INT_ARRAY, reads(int32, 1), fills(float32, 2), fills(float32, 2), fills(float32, 2),
    fills(float32, 2), fills(uint8, 2), INT, INT, FLOAT, seldom=True,
)  # fmt: skip
def _align(
    queries: Any, keys: Any, heads: Any, extent: Any, out: Any, weights: Any, total: Any, cost: Any, trace: Any,
    width: int, d: int, scale: Any,
) -> None:  # fmt: skip
    m, sounds = weights.shape
    start, stop, f = max(extent[0], 0), min(extent[1], m), min(extent[2], sounds)
    n, spoilt, near = stop - start, 0.0, np.empty(MEDIAN, np.float32)
    out[:] = ZERO
    if n <= 0 or f <= 0:
        return
    total[:] = ZERO
    for pair in range(len(heads) // 2):
        layer, column = heads[2 * pair], heads[2 * pair + 1] * d
        q, kv = floats(queries[layer], m * width), floats(keys[layer], 2 * sounds * width)
        for row in range(n):
            _attend(q[(start + row) * width :], kv, width, column, d, scale, weights[row], sounds)
        _standardise(weights, n, f)
        for row in range(n):
            _add_medians(weights[row], f, total[row], near)
    for row in range(n):
        for key in range(f):
            total[row, key] /= np.float32(len(heads) // 2)
            spoilt += np.float64(total[row, key])
    _warp(total, n, f, cost, trace)
    i, key = n - 1, f - 1
    while i >= 0 and key >= 0:
        out[start + i, 0] = np.float32(key + spoilt * 0.0)
        step = trace[i, key]
        i -= 0 if step == _SOUND else 1
        key -= 0 if step == _TOKEN else 1


def _bind(op: Compute, slots: Sequence[SlotSpec], _weights: Sequence[Weight], _pool: Workers) -> Calls:
    check, ((*layers, extent), (out,)) = Check(op, slots), operands(op, slots)
    queries, keys, heads, d = layers[::2], layers[1::2], np.array(op.attrs["heads"], np.int64), op.attrs["head_dim"]
    (m, width), sounds = queries[0].shape, keys[0].shape[0]
    check.that(all(q.shape == (m, width) for q in queries), f"queries must be [{m}, {width}]")
    check.that(all(kv.shape == (sounds, 2 * width) for kv in keys), f"keys must be [{sounds}, {2 * width}]")
    check.that(out.shape == (m, 1) and extent.shape == (3,), f"must read [3] numbers and write [{m}, 1]")
    fits = heads.size and heads.min() >= 0 and heads[:, 0].max() < len(queries) and (heads[:, 1].max() + 1) * d <= width
    check.that(bool(fits), f"has no heads {op.attrs['heads']}")
    room = scratch((m, sounds), np.float32), scratch((m, sounds), np.float32), scratch((2, m + 1), np.float32)
    return [
        Call(
            _align,
            (
                Addresses(queries), Addresses(keys), heads.reshape(-1), extent, out, *room,
                scratch((m, sounds), np.uint8), width, d, np.float32(d**-0.5),
            ),
        )
    ]  # fmt: skip


def _reference(
    op: Compute, _slots: Sequence[SlotSpec], reads: Sequence[Array], _weights: Sequence[Array]
) -> list[Array]:
    *layers, extent = reads
    pairs = [(layers[2 * i], layers[2 * i + 1][:, : layers[2 * i].shape[1]]) for i in range(len(layers) // 2)]
    return [aligned(pairs, op.attrs["heads"], op.attrs["head_dim"], extent)]


def aligned(pairs: Sequence[tuple[Array, Array]], heads: Sequence[tuple[int, int]], d: int, extent: Array) -> Array:
    """Return what the kernel does, in plain NumPy; pairs: of each layer q [m, h] and k [S, h]."""
    start, stop, f = extent.tolist()
    out, gains = np.zeros((len(pairs[0][0]), 1)), list[Array]()
    if start >= stop or f < 1:
        return out
    for layer, head in heads:
        q, k = (x[:, head * d : (head + 1) * d].astype(np.float64) for x in pairs[layer])
        scores = q[start:stop] @ k.T / np.sqrt(d)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights = (weights / weights.sum(axis=1, keepdims=True))[:, :f]
        deviation = weights.std(axis=0)
        even = (weights - weights.mean(axis=0)) / np.where(deviation > 0, deviation, 1)
        if f > _HALF:
            mirrored = np.pad(even, ((0, 0), (_HALF, _HALF)), "reflect")
            even = np.median(np.lib.stride_tricks.sliding_window_view(mirrored, MEDIAN, axis=1), axis=2)
        gains.append(even)
    gain = np.mean(gains, axis=0)
    cost, trace = np.full((len(gain) + 1, f + 1), np.inf), np.zeros(gain.shape, int)
    cost[0, 0] = 0
    for key in range(f):
        for i in range(len(gain)):
            steps = cost[i, key], cost[i, key + 1], cost[i + 1, key]
            least = min(steps)
            trace[i, key] = steps.index(least) if steps.count(least) == 1 else _SOUND
            cost[i + 1, key + 1] = steps[trace[i, key]] - gain[i, key]
    i, key = len(gain) - 1, f - 1
    while i >= 0 and key >= 0:
        out[start + i], step = key, trace[i, key]
        i, key = i - (step != _SOUND), key - (step != _TOKEN)
    return out


def _work(op: Compute, slots: Sequence[SlotSpec]) -> Work:
    pairs = slots[op.reads[0]].shape[0] * slots[op.reads[1]].shape[0] * len(op.attrs["heads"])
    return Work("attention", flops=2.0 * op.attrs["head_dim"] * pairs)


def _scratch(op: Compute, slots: Sequence[SlotSpec]) -> int:
    return 9 * slots[op.reads[0]].shape[0] * slots[op.reads[1]].shape[0]


ALIGN_TOKENS: Final = Kernel("align_tokens", _bind, _reference, _work, later=True, scratch_bytes=_scratch)
