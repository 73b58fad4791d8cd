"""Layer norm of rows whose columns lie on several devices: the moments of each part, and the norm from all of them.

moments    x [r, c] -> [r, 2]: mean and standard deviation (of the c values themselves), which are finite in f32 as x
           is; the sum of squared distances from the mean would not be from 1e19 on. Of no columns they are 0.
normalise  x [r, c], p_1 ... p_n [r, 2] (moments of all columns of the row, among them those of x) ->
           (x - mean) / sqrt(variance + eps) * gamma + beta; weights gamma [c], beta [c]; attributes counts (columns of
           each part), eps. Parts are combined in the order given (Chan, Golub and LeVeque 1979, formula 2.1).

Arithmetic is f64; what is sent is f32. A sum of squares beside a sum would lose the digits that its mean takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numba import float32

from hepti_mqtt.kernels.base import Array, Check, Kernel, Run, nothing, row_parts, rowwise
from hepti_mqtt.kernels.elementary import ZERO
from hepti_mqtt.kernels.machine.addresses import address_table, floats
from hepti_mqtt.kernels.machine.jit import FLOAT, INT, INT_ARRAY, fills, kernel, reads
from hepti_mqtt.kernels.machine.workers import Workers
from hepti_mqtt.kernels.rowwise.norms import moments_of, reciprocal_root, scale_row
from hepti_mqtt.kernels.weights import Weight
from hepti_mqtt.program import Compute, SlotSpec


@kernel(reads(float32, 2), fills(float32, 2), INT, INT, part=2)
def _moments(x: Any, out: Any, first: int, stop: int) -> None:
    for row in range(first, stop):
        mean, squares = moments_of(x[row])
        out[row, 0] = np.float32(mean)
        out[row, 1] = np.float32(np.sqrt(squares / x.shape[1]))


@kernel(
    reads(float32, 2),
    fills(float32, 2),
    INT_ARRAY,
    INT_ARRAY,
    reads(float32, 1),
    reads(float32, 1),
    FLOAT,
    INT,
    INT,
    part=2,
)
def _normalise(
    x: Any, out: Any, addresses: Any, counts: Any, gamma: Any, beta: Any, eps: Any, first: int, stop: int
) -> None:
    for row in range(first, stop):
        mean, squares, count = 0.0, 0.0, 0
        for p in range(len(counts)):
            if counts[p] > 0:
                part = floats(addresses[p] + 8 * row, 2)
                away, deviation = np.float64(part[0]) - mean, np.float64(part[1])
                share = counts[p] / np.float64(count + counts[p])
                mean += away * share
                squares += deviation * deviation * counts[p] + away * away * count * share
                count += counts[p]
        scale_row(x[row], out[row], mean, reciprocal_root(squares / count + np.float64(eps)), gamma, beta)


def _bind_moments(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], pool: Workers) -> Run:
    check = Check(op, slots)
    check.count(1)
    check.dtypes()
    check.rank(2)
    check.weights(weights, 0)
    r, c = check.reads[0].shape
    check.shape(check.writes[0], (r, 2))
    parts = row_parts(r, c, pool)
    if not c:
        return _no_columns
    find = pool.bind(_moments, parts)

    def run(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        find(reads[0], writes[0])

    return run


def _no_columns(_reads: Sequence[Array], writes: Sequence[Array]) -> None:
    writes[0][...] = ZERO


def _bind_normalise(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], pool: Workers) -> Run:
    check = Check(op, slots)
    check.count(None)
    check.dtypes()
    check.rank(2)
    check.weights(weights, 2)
    (r, c), counts = check.reads[0].shape, np.asarray(op.attrs["counts"], np.int64)
    check.shape(check.writes[0], (r, c))
    for spec in check.reads[1:]:
        check.shape(spec, (r, 2))
    check.that(len(counts) == len(op.reads) - 1, f"counts has {len(counts)} numbers, not one for each part")
    fits = not (counts < 0).any() and counts.sum() >= c
    check.that(fits, f"counts {counts.tolist()} must be >= 0 and at least the {c} columns of x in all")
    gamma, beta = (check.plain(w, (c,)) for w in weights)
    eps, parts = np.float32(op.attrs["eps"]), row_parts(r, c, pool)
    table, fill = address_table(len(counts))
    if not parts or not c:
        return nothing
    norm = pool.bind(_normalise, parts)

    def run(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        fill(reads[1:])
        norm(reads[0], writes[0], table, counts, gamma, beta, eps)

    return run


def _reference_moments(
    _op: Compute,
    _slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    _weights: Sequence[Array],
) -> list[Array]:
    x = reads[0].astype(np.float64)
    if not x.shape[1]:
        return [np.zeros((len(x), 2))]
    return [np.stack([x.mean(axis=1), x.std(axis=1)], axis=1)]


def _reference_normalise(
    op: Compute,
    _slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    weights: Sequence[Array],
) -> list[Array]:
    if not reads[0].shape[1]:
        return [reads[0]]
    x, counts = reads[0].astype(np.float64), np.asarray(op.attrs["counts"])
    used = counts > 0
    means, deviations = (np.stack([p[:, i].astype(np.float64) for p in reads[1:]])[used] for i in (0, 1))
    weight = counts[used][:, None]
    mean = (means * weight).sum(axis=0) / counts.sum()
    var = (weight * (deviations**2 + (means - mean) ** 2)).sum(axis=0) / counts.sum()
    return [(x - mean[:, None]) / np.sqrt(var[:, None] + op.attrs["eps"]) * weights[0] + weights[1]]


MOMENTS: Final = Kernel("moments", _bind_moments, _reference_moments, rowwise)
NORMALISE: Final = Kernel("normalise", _bind_normalise, _reference_normalise, rowwise)
