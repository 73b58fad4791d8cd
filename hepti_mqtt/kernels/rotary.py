"""Kernel `rotate`: rotary positions (RoFormer, Su et al., 2021) in queries and keys, after a norm of each head.

rotate  x [r, n], n columns of whole heads: first those of queries, then of keys, then of values -> the same, queries
        and keys rotated by their positions. Columns i and i + d / 2 of a head are a pair. Attributes: head_dim (d),
        q_heads, k_heads, theta, rows (packed row of each row of x), lengths. Weights: none, or gamma [d] of queries and
        of keys, by which heads are normed first; then attributes eps and gamma_offset as `base.norm_of` has. Optional:
        divisors, of the frequencies [d / 2]. With an i32 slot `at` [B] after x, the rows of each of the B sequences are
        that many places later; attribute places: their number; places beyond raise ValueError.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np
from numba import float32, int32
from numpy.typing import NDArray

from hepti_mqtt.core.program import Compute
from hepti_mqtt.kernels.base import (
    Array,
    Arrays,
    Check,
    Kernel,
    Slots,
    Weights,
    check_at,
    norm_of,
    refuse_at,
    row_parts,
    rowwise,
    starts_of,
)
from hepti_mqtt.kernels.calls import Call, Calls, Operand, operands, scratch
from hepti_mqtt.kernels.jit import FLOAT, INT, INT_ARRAY, fills, kernel, reads
from hepti_mqtt.kernels.rowwise import root_mean_square, same_shapes
from hepti_mqtt.kernels.threads import Workers

_MOST_TABLES: Final = 8  # one for each theta, head size and longest sequence


@kernel(
    reads(float32, 2), fills(float32, 2), INT, INT, INT, reads(float32, 2), reads(float32, 2), INT_ARRAY,
    reads(float32, 1), reads(float32, 1), FLOAT, INT, INT, part=2,
)  # fmt: skip
def _rotate(
    x: Any, out: Any, d: int, q_heads: int, k_heads: int, cosines: Any, sines: Any, positions: Any, q_gamma: Any,
    k_gamma: Any, eps: Any, first: int, stop: int,
) -> None:  # fmt: skip
    half, rotated = d // 2, (q_heads + k_heads) * d
    for row in range(first, stop):
        cosine, sine = cosines[positions[row]], sines[positions[row]]
        source, target = x[row], out[row]
        for i in range(rotated, x.shape[1]):
            target[i] = source[i]
        for head in range(q_heads + k_heads):
            head_in, head_out = source[head * d : head * d + d], target[head * d : head * d + d]
            gamma = q_gamma if head < q_heads else k_gamma
            if len(gamma) > 0:
                by = root_mean_square(head_in, eps)
                for i in range(d):
                    head_out[i] = np.float32(np.float64(head_in[i]) * by) * gamma[i]
            else:
                for i in range(d):
                    head_out[i] = head_in[i]
            for i in range(half):
                a, b = head_out[i], head_out[i + half]
                head_out[i] = a * cosine[i] - b * sine[i]
                head_out[i + half] = b * cosine[i] + a * sine[i]


@kernel(INT_ARRAY, INT_ARRAY, reads(int32, 1), INT_ARRAY, INT)
def _move(positions: Any, items: Any, at: Any, moved: Any, places: int) -> None:
    for i in range(len(moved)):
        moved[i] = positions[i] + at[items[i]]
        if at[items[i]] < 0 or moved[i] >= places:
            raise ValueError


@lru_cache(maxsize=_MOST_TABLES)
def _angles(
    theta: float, d: int, length: int, divisors: tuple[float, ...]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return cosines and sines of positions 0..length, [length, d / 2] each; angles are f32, as in transformers."""
    frequencies = np.float32(1) / np.float32(theta) ** (np.arange(0, d, 2, dtype=np.float32) / np.float32(d))
    if divisors:
        frequencies = np.asarray(frequencies / np.asarray(divisors), np.float32)
    angles = (np.arange(length, dtype=np.float32)[:, None] * frequencies).astype(np.float64)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _positions(op: Compute) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the place of each row in its sequence, and which sequence that is, [r] each."""
    starts, rows = starts_of(op.attrs["lengths"]), np.asarray(op.attrs["rows"], np.int64)
    if len(rows) and (rows.min() < 0 or rows.max() >= starts[-1]):
        raise ValueError(f"{op.kernel}: rows must lie in the {starts[-1]} packed rows of its lengths")
    items = np.asarray(np.searchsorted(starts, rows, side="right") - 1, np.int64)
    return np.asarray(rows - starts[items], np.int64), items


def _check(op: Compute, slots: Slots) -> tuple[Check, int, int]:
    """Return (the op's checks, its rows, columns of a head)."""
    if len(op.reads) > 1:
        check = check_at(op, slots, ("f32",), len(op.attrs["lengths"]))
        r, n = check.reads[0].shape
        check.shape(check.writes[0], (r, n))
    else:
        check, r, n = same_shapes(op, slots, 1)
    d, heads = op.attrs["head_dim"], op.attrs["q_heads"] + op.attrs["k_heads"]
    check.that(d >= 2 and d % 2 == 0 and n % d == 0, f"heads of {d} columns make no sense")
    check.that(0 <= heads * d <= n, f"there is no room for {heads} heads to rotate")
    divisors = op.attrs.get("divisors", ())
    check.that(len(divisors) in (0, d // 2), f"{len(divisors)} divisors of {d // 2} frequencies do not fit")
    check.that(len(op.attrs["rows"]) == r, f"rows names {len(op.attrs['rows'])} rows, x has {r}")
    return check, r, d


def _bind(op: Compute, slots: Slots, weights: Weights, pool: Workers) -> Calls:
    check, r, d = _check(op, slots)
    positions, items = _positions(op)
    check.weights(weights, 2 if weights else 0)
    none = np.zeros(0, np.float32)
    norms = [norm_of(check, [weight], d) for weight in weights]
    q_gamma, k_gamma = (norm[0] for norm in norms) if norms else (none, none)
    eps = norms[0][2] if norms else np.float32(0)
    parts = row_parts(r, check.reads[0].shape[1], pool)
    if not parts or not check.reads[0].shape[1]:
        return []
    places = op.attrs["places"] if len(op.reads) > 1 else max(op.attrs["lengths"])
    cosines, sines = _angles(float(op.attrs["theta"]), d, places, tuple(op.attrs.get("divisors", ())))
    given, (out,) = operands(op, slots)
    calls = Calls()
    moved: Operand | NDArray[np.int64] = positions
    if len(given) > 1:
        moved = scratch(positions.shape, np.int64)
        used = [int(positions[items == item].max(initial=-1)) + 1 for item in range(len(op.attrs["lengths"]))]
        refuse = refuse_at(op, used, places, "places of a sequence")
        calls.append(Call(_move, (positions, items, given[1], moved, places), refuse=refuse))
    heads = op.attrs["q_heads"], op.attrs["k_heads"]
    return calls + pool.bind(_rotate, parts)(given[0], out, d, *heads, cosines, sines, moved, q_gamma, k_gamma, eps)


def _reference(op: Compute, slots: Slots, reads: Arrays, weights: Arrays) -> list[Array]:
    _, r, d = _check(op, slots)
    positions, items = _positions(op)
    positions = positions + reads[1][items] if len(reads) > 1 else positions
    x = reads[0].astype(np.float64).reshape(r, reads[0].shape[1] // d, d)
    q, k = op.attrs["q_heads"], op.attrs["k_heads"]
    out = x.copy()
    for heads, place in ((slice(0, q), 0), (slice(q, q + k), 1)):
        part = x[:, heads]
        if weights:
            gamma = weights[place] + op.attrs.get("gamma_offset", 0.0)
            part = part / np.sqrt(np.square(part).mean(axis=-1, keepdims=True) + op.attrs["eps"]) * gamma
        frequencies = 1 / op.attrs["theta"] ** (np.arange(0, d, 2) / d) / np.asarray(op.attrs.get("divisors") or 1.0)
        angles = positions[:, None, None] * frequencies
        a, b = part[..., : d // 2], part[..., d // 2 :]
        turned = [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)]
        out[:, heads] = np.concatenate(turned, axis=-1)
    return [out.reshape(reads[0].shape)]


ROTATE: Final = Kernel("rotate", _bind, _reference, rowwise)
