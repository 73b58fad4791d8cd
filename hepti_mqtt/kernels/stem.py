"""Kernels that make rows of a request's inputs: embeddings of tokens, patches of pictures.

embed_tokens       ids i32 [m] -> norm of scale * word[id % V] + position[offset + place in its sequence] +
                   type[id // V], [m, h], of V words. Attribute parts names the weights in their order: word, and
                   perhaps position, type, gamma (without it there is no norm), beta. Others: lengths, position_offset,
                   scale, those of `base.norm_of`, and `words` (first, V) if word is a range of all words: others have
                   zeros. word may also be a packed matrix with a column for each word.
embed_at           ids i32 [m], at -> word[id] + position[at + i], [m, h]; weights word, position. Attributes lengths:
                   of the items, one without; i counts within each; and `words`, as above. `at` is an i32 slot [1];
                   positions beyond the table raise ValueError.
patchify           pixels u8 [B, C, S, S] -> (pixel / 255 - mean) / std, [B (S/p)^2, C p p], a patch flattened as
                   (channel, y, x) like the weight of a convolution; attributes patch (p), mean, std (per channel).
frames             i32 [n] -> f32 of n numbers in any shape: each times the attribute step (fixed point).
add_table          x [r, c] -> x + table[first row + i, first column + j]; weight table plain; attribute
                   first (row and column).
prepend_positions  patches [B n, h] -> [B (k + n), h]: for each image the rows of a prefix [k, h], then its patches.
                   Weights: parts of the prefix, if any, tables or single rows, and last position [j + n, h], which is
                   added to the first j rows of the prefix and to the patches; attribute images (B).
repeat_row         x [m, *] -> [m, h]: the weight row [h] in all rows; only the number of rows of x counts.

An id outside the vocabulary, or of a type that is not there, raises ValueError before anything is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final

import numpy as np
from numba import float32, int32, uint8
from numpy.typing import NDArray

from hepti_mqtt.core.program import Compute, Work
from hepti_mqtt.kernels.base import (
    Array,
    Arrays,
    Check,
    Kernel,
    Slots,
    Weights,
    check_at,
    items_of,
    norm_of,
    reference_norm,
    refuse_at,
    rowwise,
    starts_of,
)
from hepti_mqtt.kernels.calls import Call, Calls, operands
from hepti_mqtt.kernels.jit import FLOAT, INT, INT_ARRAY, fills, kernel, reads
from hepti_mqtt.kernels.rowwise import normalise_row
from hepti_mqtt.kernels.threads import Workers
from hepti_mqtt.kernels.words import Words


@kernel(
    reads(int32, 1), fills(float32, 2), reads(float32, 2), reads(float32, 2), INT_ARRAY, INT, FLOAT,
    reads(float32, 1), reads(float32, 1), FLOAT, INT,
)  # fmt: skip
def _finish_rows(
    ids: Any, out: Any, position: Any, types: Any, positions: Any, vocabulary: int, scale: Any, gamma: Any, beta: Any,
    eps: Any, centred: int,
) -> None:  # fmt: skip
    """Scale the embeddings of words in out, add those of positions and types, and norm the rows."""
    h = out.shape[1]
    for row in range(len(ids)):
        kind, place = ids[row] // vocabulary, positions[row]
        for i in range(h):
            out[row, i] = out[row, i] * scale + position[place, i] + types[kind, i]
        if len(gamma) > 0:
            normalise_row(out[row], out[row], gamma, beta, eps, centred)


@kernel(fills(float32, 2), reads(int32, 1), INT_ARRAY, reads(float32, 2))
def _add_positions(out: Any, at: Any, starts: Any, position: Any) -> None:
    """Add to the rows of each item the positions from its `at` on."""
    for item in range(len(at)):
        if at[item] < 0 or at[item] + starts[item + 1] - starts[item] > len(position):
            raise ValueError
    for item in range(len(at)):
        for row in range(starts[item], starts[item + 1]):
            for i in range(out.shape[1]):
                out[row, i] += position[at[item] + row - starts[item], i]


def _positions(op: Compute) -> NDArray[np.int64]:
    starts = starts_of(op.attrs["lengths"])
    within = np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts))
    return np.asarray(within + op.attrs["position_offset"], np.int64)


def _parts(op: Compute, weights: Sequence[Any]) -> dict[str, Any]:
    """Return the weights of embeddings by their names; a packed word has a column for each row of the table."""
    names = op.attrs["parts"]
    if len(weights) != len(names):
        raise ValueError(f"{op.kernel}: needs {len(names)} weights, {', '.join(names)}, got {len(weights)}")
    return dict(zip(names, weights, strict=True))


def _bind_embed_tokens(op: Compute, slots: Slots, weights: Weights, _pool: Workers) -> Calls:
    check = Check.of(op, slots, 1, dtypes=("i32", "f32"))
    parts = _parts(op, weights)
    m, h = check.writes[0].shape
    check.shape(check.reads[0], (m,))
    none = np.zeros((1, h), np.float32)
    words = Words(check, parts["word"], h)
    position, types = (check.table(parts.get(name, none), h) for name in ("position", "type"))
    check.that(len(types) > 0, "the table of token types is empty")
    norm = [parts[name] for name in ("gamma", "beta") if name in parts]
    nowhere = np.zeros(0, np.float32)
    how = norm_of(check, norm, h) if norm else (nowhere, nowhere, np.float32(0), 0)
    positions = _positions(op) if "position" in parts else np.zeros(m, np.int64)
    check.that(len(positions) == m, f"lengths sum to {len(positions)}, there are {m} ids")
    if not m or not h:
        return []
    last, offset = int(positions.max()), int(positions.min())
    check.that(offset >= 0 and last < len(position), f"position {last} is beyond the {len(position)} of the model")
    (ids,), (out,) = operands(op, slots)
    scale = np.float32(op.attrs.get("scale", 1.0))
    finish = ids, out, position, types, positions, words.vocabulary, scale, *how
    return [words.gather(ids, out, len(types)), Call(_finish_rows, finish)]


def _bind_embed_at(op: Compute, slots: Slots, weights: Weights, _pool: Workers) -> Calls:
    lengths = items_of(op, slots[op.reads[0]].shape[0])
    check = check_at(op, slots, ("i32",), len(lengths))
    check.weights(weights, 2)
    m, h = check.writes[0].shape
    check.shape(check.reads[0], (m,))
    words, position = Words(check, weights[0], h), check.table(weights[1], h)
    if not m or not h:
        return []
    refuse = refuse_at(op, lengths, len(position), "positions of the model")
    (ids, at), (out,) = operands(op, slots)
    added = out, at, starts_of(lengths), position
    return [words.gather(ids, out), Call(_add_positions, added, refuse=refuse)]


def _reference_words(op: Compute, given: Array) -> Array:
    """Return the embeddings of all words [V, h], zeros for words beyond an op's range."""
    rows = given.T if op.weights and op.weights[0].layout == "packed" else given
    first, vocabulary = op.attrs.get("words", (0, len(rows)))
    whole = np.zeros((vocabulary, rows.shape[1]))
    whole[first : first + len(rows)] = rows
    return whole


def _reference_embed_tokens(op: Compute, _slots: Slots, reads: Arrays, weights: Arrays) -> list[Array]:
    parts = {name: np.atleast_2d(w).astype(np.float64, copy=False) for name, w in _parts(op, weights).items()}
    words = _reference_words(op, parts["word"])
    kinds, tokens = np.divmod(reads[0], len(words))
    total = words[tokens] * op.attrs.get("scale", 1.0)
    if "position" in parts:
        total = total + parts["position"][_positions(op)]
    if "type" in parts:
        total = total + parts["type"][kinds]
    norm = [parts[name][0] for name in ("gamma", "beta") if name in parts]
    return [reference_norm(total, norm, op.attrs) if norm else total]


def _reference_embed_at(op: Compute, _slots: Slots, reads: Arrays, weights: Arrays) -> list[Array]:
    ids, at = reads
    word, position = (np.atleast_2d(w).astype(np.float64, copy=False) for w in weights)
    word = _reference_words(op, word)
    items = zip(at.tolist(), items_of(op, len(ids)), strict=True)
    return [word[ids] + position[np.concatenate([np.arange(first, first + rows) for first, rows in items])]]


def _work_of_embedding(op: Compute, slots: Slots) -> Work:
    # Rows of two tables are read, one result is written.
    return Work("rowwise", nbytes=3.0 * slots[op.writes[0]].nbytes)


EMBED_TOKENS: Final = Kernel("embed_tokens", _bind_embed_tokens, _reference_embed_tokens, _work_of_embedding)
EMBED_AT: Final = Kernel("embed_at", _bind_embed_at, _reference_embed_at, _work_of_embedding)


@kernel(reads(uint8, 4), fills(float32, 2), INT, reads(float32, 1), reads(float32, 1))
def _patchify(pixels: Any, out: Any, patch: int, scale: Any, shift: Any) -> None:
    images, channels, size = pixels.shape[0], pixels.shape[1], pixels.shape[2]
    side = size // patch
    for image in range(images):
        for channel in range(channels):
            for y in range(side * patch):
                for across in range(side):
                    row = (image * side + y // patch) * side + across
                    at = (channel * patch + y % patch) * patch
                    for x in range(patch):
                        pixel = np.float32(pixels[image, channel, y, across * patch + x])
                        out[row, at + x] = pixel * scale[channel] + shift[channel]


def _bind_patchify(op: Compute, slots: Slots, weights: Weights, _pool: Workers) -> Calls:
    check = Check.of(op, slots, 1, dtypes=("u8", "f32"))
    check.weights(weights, 0)
    patch = op.attrs["patch"]
    images, channels, size, width = check.reads[0].shape
    check.that(size == width and patch >= 1 and size % patch == 0, f"images must be squares of patches of {patch}")
    check.shape(check.writes[0], (images * (size // patch) ** 2, channels * patch * patch))
    mean, std = (np.asarray(op.attrs[name], np.float64) for name in ("mean", "std"))
    check.that(mean.shape == std.shape == (channels,), f"mean and std need {channels} values, one per channel")
    check.that(bool((std > 0).all()), "std must be > 0")
    scale, shift = (1 / (255 * std)).astype(np.float32), (-mean / std).astype(np.float32)
    (pixels,), (out,) = operands(op, slots)
    return [Call(_patchify, (pixels, out, patch, scale, shift))]


def _reference_patchify(op: Compute, _slots: Slots, reads: Arrays, _weights: Arrays) -> list[Array]:
    p = op.attrs["patch"]
    images, channels, size, _ = reads[0].shape
    mean, std = (np.asarray(op.attrs[name], np.float64)[:, None, None] for name in ("mean", "std"))
    values = (reads[0] / 255.0 - mean) / std
    grid = values.reshape(images, channels, size // p, p, size // p, p)
    return [grid.transpose(0, 2, 4, 1, 3, 5).reshape(-1, channels * p * p)]


@kernel(reads(float32, 2), fills(float32, 2), reads(float32, 2), reads(float32, 2), INT)
def _prepend_positions(patches: Any, out: Any, prefix: Any, position: Any, images: int) -> None:
    n, h = position.shape
    first = len(prefix)
    for image in range(images):
        row = image * (first + n)
        out[row : row + first] = prefix
        for j in range(n):
            for i in range(h):
                out[row + first + j, i] = patches[image * n + j, i] + position[j, i]


def _bind_prepend_positions(op: Compute, slots: Slots, weights: Weights, _pool: Workers) -> Calls:
    check = Check.of(op, slots, 1, rank=2)
    images, h = op.attrs["images"], check.writes[0].shape[1]
    check.that(len(weights) >= 1, "needs positions, got no weights")
    prefix = np.concatenate([np.empty((0, h), np.float32), *(check.table(weight, h) for weight in weights[:-1])])
    position = check.table(weights[-1], h)
    if not images:
        return []
    n = check.reads[0].shape[0] // images
    placed = len(position) - n
    check.that(0 <= placed <= len(prefix), f"{len(position)} positions make no sense for {len(prefix)} + {n} rows")
    check.shape(check.reads[0], (images * n, h))
    check.shape(check.writes[0], (images * (len(prefix) + n), h))
    prefix[:placed] += position[:placed]
    position = position[placed:]
    (patches,), (out,) = operands(op, slots)
    return [Call(_prepend_positions, (patches, out, prefix, position, images))]


def _reference_prepend_positions(op: Compute, _slots: Slots, reads: Arrays, weights: Arrays) -> list[Array]:
    *parts, position = (np.atleast_2d(weight).astype(np.float64) for weight in weights)
    images, h = op.attrs["images"], position.shape[1]
    prefix = np.concatenate([np.empty((0, h)), *parts])
    placed = len(position) - len(reads[0]) // images
    prefix[:placed] += position[:placed]
    patches = reads[0].astype(np.float64).reshape(images, -1, h) + position[placed:]
    first = np.broadcast_to(prefix, (images, *prefix.shape))
    return [np.concatenate([first, patches], axis=1).reshape(-1, h)]


@kernel(reads(int32, 1), fills(float32, 1), FLOAT)
def _scale(numbers: Any, out: Any, step: Any) -> None:
    for i in range(len(numbers)):
        out[i] = np.float32(numbers[i]) * step


def _bind_frames(op: Compute, slots: Slots, weights: Weights, _pool: Workers) -> Calls:
    check = Check.of(op, slots, 1, dtypes=("i32", "f32"))
    check.weights(weights, 0)
    check.shape(check.reads[0], (prod(check.writes[0].shape),))
    (numbers,), (out,) = operands(op, slots)
    return [Call(_scale, (numbers, out.reshape(-1), np.float32(op.attrs["step"])))]


def _reference_frames(op: Compute, slots: Slots, reads: Arrays, _weights: Arrays) -> list[Array]:
    return [(reads[0] * op.attrs["step"]).reshape(slots[op.writes[0]].shape)]


@kernel(reads(float32, 2), reads(float32, 2), fills(float32, 2), INT, INT)
def _add_table(x: Any, table: Any, out: Any, row: int, column: int) -> None:
    for r in range(x.shape[0]):
        for c in range(x.shape[1]):
            out[r, c] = x[r, c] + table[row + r, column + c]


def _bind_add_table(op: Compute, slots: Slots, weights: Weights, _pool: Workers) -> Calls:
    check = Check.of(op, slots, 1, rank=2)
    check.weights(weights, 1)
    table, (row, column) = check.plain(weights[0], (-1, -1)), op.attrs["first"]
    r, c = check.writes[0].shape
    check.shape(check.reads[0], (r, c))
    inside = 0 <= row <= len(table) - r and 0 <= column <= table.shape[1] - c
    check.that(inside, f"a table of {list(table.shape)} has no {r} x {c} from {row}, {column} on")
    (x,), (out,) = operands(op, slots)
    return [Call(_add_table, (x, table, out, row, column))]


def _reference_add_table(op: Compute, _slots: Slots, reads: Arrays, weights: Arrays) -> list[Array]:
    (row, column), (r, c) = op.attrs["first"], reads[0].shape
    return [reads[0].astype(np.float64) + weights[0][row : row + r, column : column + c]]


@kernel(reads(float32, 1), fills(float32, 2))
def _repeat_row(row: Any, out: Any) -> None:
    for r in range(len(out)):
        out[r] = row


def _bind_repeat_row(op: Compute, slots: Slots, weights: Weights, _pool: Workers) -> Calls:
    check = Check.of(op, slots, 1, rank=2)
    check.weights(weights, 1)
    m, h = check.writes[0].shape
    row = check.plain(weights[0], (h,))
    check.that(check.reads[0].shape[0] == m, f"{m} rows of {check.reads[0].shape[0]}")
    _, (out,) = operands(op, slots)
    return [Call(_repeat_row, (row, out))]


def _reference_repeat_row(op: Compute, slots: Slots, _reads: Arrays, weights: Arrays) -> list[Array]:
    return [np.broadcast_to(np.ravel(weights[0]), slots[op.writes[0]].shape)]


REPEAT_ROW: Final = Kernel("repeat_row", _bind_repeat_row, _reference_repeat_row, rowwise)
FRAMES: Final = Kernel("frames", _bind_frames, _reference_frames, rowwise)
ADD_TABLE: Final = Kernel("add_table", _bind_add_table, _reference_add_table, rowwise)
PATCHIFY: Final = Kernel("patchify", _bind_patchify, _reference_patchify, rowwise)
PREPEND_POSITIONS: Final = Kernel("prepend_positions", _bind_prepend_positions, _reference_prepend_positions, rowwise)
