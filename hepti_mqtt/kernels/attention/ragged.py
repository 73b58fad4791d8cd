"""Kernels `attention` and `attention_block`: packed sequences of ragged length, over all keys or some of them.

Read q [r, *] and kv [s, *], which may be one slot. Attributes: q_column, k_column, v_column (first column of q, k and v
in their arrays), heads, head_dim (d), q_rows (packed row of each row of q), k_rows (the packed rows that the rows of kv
are: half-open ranges (start, stop) in ascending order that do not overlap), lengths (tokens of each packed sequence; a
query attends to the keys of its own), scale; optional causal (True: only to keys at its own position or before).
`attention` writes [r, heads d]. `attention_block` writes states [r, heads, d + 2]: the sum of exp(score - maximum) v,
not normalised, then the maximum and the sum of exp(score - maximum) over the keys of kv alone; a row without a key
there has 0, -inf and 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.kernels.attention.tiles import HeadLayout, attention_units
from hepti_mqtt.kernels.base import Array, Check, Kernel, Run, nothing, starts_of
from hepti_mqtt.kernels.gemm.tile import NR
from hepti_mqtt.kernels.machine.workers import Workers, ranges
from hepti_mqtt.kernels.weights import Weight
from hepti_mqtt.program import Compute, SlotSpec, Work

# Flops of a tile below which a hand-over to another thread costs more than it saves.
GRAIN: Final = 1 << 19


def ranges_of_keys(op: Compute, keys: int) -> NDArray[np.int64]:
    """Return for every query row the range of rows of kv that it attends to: int64 [r, 2], (0, 0) for none."""
    starts = starts_of(op.attrs["lengths"])
    rows = np.asarray(op.attrs["q_rows"], np.int64)
    if len(rows) and (rows.min() < 0 or rows.max() >= starts[-1]):
        raise ValueError(
            f"{op.kernel}: q_rows must lie in the {starts[-1]} packed rows of lengths {op.attrs['lengths']}"
        )
    sequence = np.searchsorted(starts, rows, side="right") - 1
    k_rows = _k_rows(op, keys, int(starts[-1]))
    stop = np.minimum(starts[sequence + 1], rows + 1) if op.attrs.get("causal", False) else starts[sequence + 1]
    # Ranges ascend, so the keys of a sequence lie side by side in kv.
    found = np.stack([np.searchsorted(k_rows, starts[sequence]), np.searchsorted(k_rows, stop)], axis=1)
    found[found[:, 0] >= found[:, 1]] = 0
    return found


def _k_rows(op: Compute, keys: int, m: int) -> NDArray[np.int64]:
    """Return the packed row of every row of kv, int64 [keys]."""
    given = [(int(start), int(stop)) for start, stop in op.attrs["k_rows"]]
    edges = [0, *(edge for given_range in given for edge in given_range), m]
    found = np.concatenate([np.arange(0), *(np.arange(*r) for r in given)])
    if any(a > b for a, b in pairwise(edges)) or len(found) != keys:
        raise ValueError(
            f"{op.kernel}: k_rows must be ranges of the {m} packed rows in ascending order, {keys} rows in all as kv "
            f"has, got {given}"
        )
    return found


def tiles_of(key_ranges: NDArray[np.int64], causal: bool) -> NDArray[np.int64]:
    """Return runs of at most NR query rows, int64 [tiles, 4] of first, stop, low, high: one range of keys for all.

    Causal rows share only where their keys begin: there high is the end of the longest range.
    """
    alike = key_ranges[:, :1] if causal else key_ranges
    changes = np.flatnonzero(np.any(alike[1:] != alike[:-1], axis=1)) + 1
    cuts = [0, *changes.tolist(), len(key_ranges)]
    rows = [(at, min(at + NR, b)) for a, b in pairwise(cuts) for at in range(a, b, NR)]
    found = [(a, b, key_ranges[a, 0], key_ranges[a:b, 1].max()) for a, b in rows]
    return np.asarray(found, np.int64).reshape(-1, 4)


def check_heads(check: Check) -> HeadLayout:
    """Return where the heads lie of an op that reads q and kv, then anything; ValueError if not in their columns."""
    attrs, with_state = check.op.attrs, int(check.op.kernel == "attention_block")
    columns = {name: attrs[name] for name in ("q_column", "k_column", "v_column")}
    found = HeadLayout(**columns, heads=attrs["heads"], d=attrs["head_dim"], with_state=with_state)
    check.that(found.d >= 1 and found.heads >= 0, f"heads {found.heads} of {found.d} columns make no sense")
    for (name, column), read in zip(columns.items(), (0, 1, 1), strict=True):
        most = check.reads[read].shape[1] - found.heads * found.d
        check.that(0 <= column <= most, f"{name} leaves no room for the heads")
    return found


def _check(op: Compute, slots: Sequence[SlotSpec]) -> tuple[int, int, HeadLayout]:
    """Return (rows of q, rows of kv, layout of heads)."""
    check = Check(op, slots)
    check.count(2)
    check.dtypes()
    r, s = (spec.shape[0] for spec in check.reads)
    check.that(len(op.attrs["q_rows"]) == r, f"q_rows names {len(op.attrs['q_rows'])} rows, q has {r}")
    layout = check_heads(check)
    wanted = (r, layout.heads, layout.d + 2) if layout.with_state else (r, layout.heads * layout.d)
    check.shape(check.writes[0], wanted)
    return r, s, layout


def _bind(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], pool: Workers) -> Run:
    r, s, layout = _check(op, slots)
    Check(op, slots).weights(weights, 0)
    if not r * layout.heads:
        return nothing
    key_ranges = ranges_of_keys(op, s)
    tiles = tiles_of(key_ranges, op.attrs.get("causal", False))
    limits = np.ascontiguousarray(key_ranges[:, 1])
    table = layout.table()
    threads = min(pool.threads, 1 + int(_pairs(key_ranges) * 4 * layout.heads * layout.d) // GRAIN)
    # More parts than threads: the tiles of ragged sequences are of uneven cost.
    parts = ranges(layout.heads * len(tiles), threads if threads == 1 else 4 * threads)
    scale, attend = np.float32(op.attrs["scale"]), pool.bind(attention_units, parts)

    def run(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        attend(reads[0], reads[1], writes[0].reshape(-1), tiles, limits, table, scale)

    return run


def _pairs(key_ranges: NDArray[np.int64]) -> int:
    return int((key_ranges[:, 1] - key_ranges[:, 0]).sum())


def _work(op: Compute, slots: Sequence[SlotSpec]) -> Work:
    keys = slots[op.reads[1]].shape[0]
    if len(op.attrs["lengths"]) == 1 and not op.attrs.get("causal", False):
        pairs = len(op.attrs["q_rows"]) * keys  # of one sequence every row attends to all keys; searches ask this often
    else:
        pairs = _pairs(ranges_of_keys(op, keys))
    return Work("attention", flops=4.0 * op.attrs["head_dim"] * op.attrs["heads"] * pairs)


def _reference_states(op: Compute, slots: Sequence[SlotSpec], q: Array, kv: Array) -> Array:
    _, s, (*columns, heads, d, _) = _check(op, slots)
    out = np.zeros((len(q), heads, d + 2))
    out[:, :, d] = -np.inf
    queries, keys, values = (  # [heads, rows, d]
        x[:, c : c + heads * d].astype(np.float64).reshape(len(x), heads, d).transpose(1, 0, 2)
        for x, c in zip((q, kv, kv), columns, strict=True)
    )
    key_ranges = ranges_of_keys(op, s)
    for low, high in np.unique(key_ranges, axis=0).tolist():  # rows that attend to the same keys together
        if high > low:
            rows = np.flatnonzero((key_ranges == (low, high)).all(axis=1))
            scores = queries[:, rows] @ keys[:, low:high].transpose(0, 2, 1) * op.attrs["scale"]
            top = scores.max(axis=-1, keepdims=True)
            p = np.exp(scores - np.where(top > -np.inf, top, 0.0))
            found = np.concatenate([p @ values[:, low:high], top, p.sum(axis=-1, keepdims=True)], axis=-1)
            out[rows] = found.transpose(1, 0, 2)
    return out


def _finish(states: Array) -> Array:
    norm = states[:, :, -1:]
    r, heads, width = states.shape
    return np.asarray((states[:, :, :-2] / np.where(norm == 0, 1.0, norm)).reshape(r, heads * (width - 2)))


def _reference(
    op: Compute,
    slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    _weights: Sequence[Array],
) -> list[Array]:
    states = _reference_states(op, slots, reads[0], reads[1])
    return [states if op.kernel == "attention_block" else _finish(states)]


ATTENTION: Final = Kernel("attention", _bind, _reference, _work)
ATTENTION_BLOCK: Final = Kernel("attention_block", _bind, _reference, _work)
