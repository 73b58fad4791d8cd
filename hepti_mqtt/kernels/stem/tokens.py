"""Kernels that make rows of token ids.

embed_tokens  ids i32 [m] -> layer norm of word[id] + position[offset + place in its sequence] + type[0], [m, h];
              weights word, position, type (may be left out), gamma, beta; attributes lengths, position_offset, eps.
embed_at      ids i32 [m], at -> word[id] + position[at + i], [m, h]; weights word, position. `at` is what `positions`
              says; positions beyond the table raise ValueError before anything is written.

An id outside the vocabulary raises ValueError before anything is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numba import float32, int32
from numpy.typing import NDArray

from hepti_mqtt.kernels import references
from hepti_mqtt.kernels.base import Array, Check, Kernel, Run, nothing, starts_of
from hepti_mqtt.kernels.machine.jit import FLOAT, INT_ARRAY, fills, kernel, reads
from hepti_mqtt.kernels.machine.workers import Workers
from hepti_mqtt.kernels.positions import check_at, first_of
from hepti_mqtt.kernels.rowwise.norms import normalise_row
from hepti_mqtt.kernels.weights import Weight
from hepti_mqtt.program import Compute, SlotSpec, Work


@kernel(
    reads(int32, 1),
    fills(float32, 2),
    reads(float32, 2),
    reads(float32, 2),
    reads(float32, 1),
    reads(float32, 1),
    reads(float32, 1),
    INT_ARRAY,
    FLOAT,
)
def _embed_tokens(
    ids: Any, out: Any, word: Any, position: Any, kind: Any, gamma: Any, beta: Any, positions: Any, eps: Any
) -> None:
    h = out.shape[1]
    for row in range(len(ids)):
        token, place = ids[row], positions[row]
        for i in range(h):
            out[row, i] = word[token, i] + position[place, i] + kind[i]
        normalise_row(out[row], out[row], gamma, beta, eps)


def _positions(op: Compute) -> NDArray[np.int64]:
    starts = starts_of(op.attrs["lengths"])
    within = np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts))
    return np.asarray(within + op.attrs["position_offset"], np.int64)


def _bind_embed_tokens(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], _pool: Workers) -> Run:
    check = Check(op, slots)
    check.count(1)
    check.dtypes("i32", "f32")
    check.weights(weights, 4 if len(weights) == 4 else 5)
    m, h = check.writes[0].shape
    check.shape(check.reads[0], (m,))
    word, position, *typed = (check.table(w, h) for w in weights[:-2])
    kinds = typed[0] if typed else np.zeros((1, h), np.float32)
    gamma, beta = (check.plain(w, (h,)) for w in weights[-2:])
    check.that(len(kinds) > 0, "the table of token types is empty")
    positions = _positions(op)
    check.that(len(positions) == m, f"lengths sum to {len(positions)}, there are {m} ids")
    if not m or not h:
        return nothing
    last, offset = int(positions.max()), int(positions.min())
    check.that(offset >= 0 and last < len(position), f"position {last} is beyond the {len(position)} of the model")
    eps, vocab, kind = np.float32(op.attrs["eps"]), len(word), kinds[0]

    def run(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        ids = reads[0]
        _check_ids(ids, vocab)
        _embed_tokens(ids, writes[0], word, position, kind, gamma, beta, positions, eps)

    return run


def _bind_embed_at(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], _pool: Workers) -> Run:
    check = check_at(op, slots, ("i32",))
    check.weights(weights, 2)
    m, h = check.writes[0].shape
    check.shape(check.reads[0], (m,))
    word, position = (check.table(w, h) for w in weights)
    if not m or not h:
        return nothing

    def run(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        ids, out = reads[0], writes[0]
        _check_ids(ids, len(word))
        first = first_of(op, reads[1], m, len(position), "positions of the model")
        # The ids are checked above; "raise" would go through a buffer.
        np.take(word, ids, axis=0, out=out, mode="clip")
        np.add(out, position[first : first + m], out=out)

    return run


def _check_ids(ids: Array, vocabulary: int) -> None:
    """Raise ValueError if one of some token ids is outside the vocabulary."""
    if ids.min() < 0 or ids.max() >= vocabulary:
        bad = ids[(ids < 0) | (ids >= vocabulary)][0]
        raise ValueError(f"token id {bad} is outside the vocabulary 0..{vocabulary - 1}; tokenise for this model")


def _reference_embed_tokens(
    op: Compute,
    _slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    weights: Sequence[Array],
) -> list[Array]:
    word, position, *typed = (np.atleast_2d(w).astype(np.float64, copy=False) for w in weights[:-2])
    total = word[reads[0]] + position[_positions(op)] + (typed[0][0] if typed else 0)
    return [references.layer_norm(total, weights[-2], weights[-1], op.attrs["eps"])]


def _reference_embed_at(
    _op: Compute,
    _slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    weights: Sequence[Array],
) -> list[Array]:
    ids, first = reads[0], int(reads[1][0])
    word, position = (np.atleast_2d(w).astype(np.float64, copy=False) for w in weights)
    return [word[ids] + position[first : first + len(ids)]]


def _work(op: Compute, slots: Sequence[SlotSpec]) -> Work:
    # Rows of two tables are read, one result is written.
    return Work("rowwise", nbytes=3.0 * slots[op.writes[0]].nbytes)


EMBED_TOKENS: Final = Kernel("embed_tokens", _bind_embed_tokens, _reference_embed_tokens, _work)
EMBED_AT: Final = Kernel("embed_at", _bind_embed_at, _reference_embed_at, _work)
