"""Look-up of token embeddings: rows of a table, or columns of a matrix in any storage, of all tokens or of a range.

The kernels of `stem.py` call it. A word is a token's number in the table.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import float32, int32, uint8
from numpy.typing import NDArray

from hepti_mqtt.core.storage import BLOCK_STORAGES
from hepti_mqtt.kernels.base import Array, Check
from hepti_mqtt.kernels.blocks import WIDTH, BlockMatrix, places_of
from hepti_mqtt.kernels.calls import Call, Operand
from hepti_mqtt.kernels.elementary import ZERO, from_half
from hepti_mqtt.kernels.jit import INT, INT_ARRAY, TABLE, fills, floats, helper, kernel, octets, reads
from hepti_mqtt.kernels.weights import BLOCK, NarrowMatrix, PackedMatrix, Weight

# Columns of `how`: first word and number of words of the range, width of a panel, values or bytes of a panel; then for
# f32 the distance of a word's values, for narrow storages their kind.
_FIRST, _COUNT, _WIDTH, _PANEL, _STEP = range(5)
_KIND = _STEP
# Kinds of narrow storages: int8 and f16 by the bytes of a value, then those in blocks in the order of BLOCK_STORAGES.
_BYTES, _HALVES, _Q4_0, _Q4_1, _Q8_0, _Q4_K, _Q5_K, _Q6_K = 1, 2, 3, 4, 5, 6, 7, 8
_KINDS: Final = {"w8a8": _BYTES, "w8a32": _BYTES, "f16": _HALVES} | {s: 3 + i for i, s in enumerate(BLOCK_STORAGES)}
_LARGE: Final = _Q4_K  # the first kind with large blocks; all later ones have them too
_OF_LARGE, _OF_SMALL = 256, 32  # values of a large and of a small block


@helper
def _half(raw: Any, at: int) -> Any:
    return from_half(int(raw[at]) | int(raw[at + 1]) << 8)


@helper
def _signed(octet: Any) -> Any:
    return np.float32(int(octet) - 256 if octet > 127 else int(octet))


@helper
def _decode_small(kind: int, raw: Any, out: Any) -> None:
    """Fill out [32] with the values of a block."""
    scale = _half(raw, 0)
    if kind == _Q8_0:
        for j in range(_OF_SMALL):
            out[j] = _signed(raw[2 + j]) * scale
        return
    at, least = (2, ZERO) if kind == _Q4_0 else (4, _half(raw, 2))
    below = np.float32(8 if kind == _Q4_0 else 0)
    for j in range(_OF_SMALL // 2):
        code = int(raw[at + j])
        out[j] = (np.float32(code & 15) - below) * scale + least
        out[j + _OF_SMALL // 2] = (np.float32(code >> 4) - below) * scale + least


@helper
def _decode_parts(kind: int, raw: Any, out: Any) -> None:
    """Fill out [256] with the values of a block of q4_k or q5_k: eight parts, with scales and minima of 6 bits."""
    scale, least, first = _half(raw, 0), _half(raw, 2), 16 if kind == _Q4_K else 48
    for part in range(8):
        low, high, top = int(raw[4 + part % 4]), int(raw[8 + part % 4]), int(raw[12 + part % 4])
        if part < 4:
            six, minimum = low & 63, high & 63
        else:
            six, minimum = top & 15 | low >> 6 << 4, top >> 4 | high >> 6 << 4
        by, below = np.float32(six) * scale, np.float32(minimum) * least
        for j in range(_OF_SMALL):
            code = int(raw[first + part // 2 * _OF_SMALL + j]) >> 4 * (part % 2) & 15
            if kind == _Q5_K:
                code |= (int(raw[16 + j]) >> part & 1) << 4
            out[part * _OF_SMALL + j] = np.float32(code) * by - below


@helper
def _decode_sixes(raw: Any, out: Any) -> None:
    """Fill out [256] with the values of a block of q6_k: a scale for each 16 values."""
    scale = _half(raw, 208)
    for i in range(_OF_LARGE):
        half, part, j = i // 128, i % 128 // _OF_SMALL, i % _OF_SMALL
        lower = int(raw[64 * half + _OF_SMALL * (part % 2) + j]) >> 4 * (part // 2) & 15
        upper = int(raw[128 + _OF_SMALL * half + j]) >> 2 * part & 3
        out[i] = np.float32((lower | upper << 4) - 32) * (_signed(raw[192 + i // 16]) * scale)


@helper
def _refuse(ids: Any, vocabulary: int, types: int) -> None:
    for row in range(len(ids)):
        if ids[row] < 0 or ids[row] >= vocabulary * types:
            raise ValueError


@kernel(reads(int32, 1), fills(float32, 2), INT, INT, reads(float32, 1), INT_ARRAY)
def _gather(ids: Any, out: Any, vocabulary: int, types: int, values: Any, how: Any) -> None:
    """Fill rows of out with the embeddings of words that are f32, and with zeros for words beyond the range."""
    _refuse(ids, vocabulary, types)
    width, h = how[_WIDTH], out.shape[1]
    for row in range(len(ids)):
        word, target = ids[row] % vocabulary - how[_FIRST], floats(out.ctypes.data + 4 * row * h, h)
        if word < 0 or word >= how[_COUNT]:
            target[:] = ZERO
            continue
        source = values[word // width * how[_PANEL] + word % width :]
        for i in range(h):
            target[i] = source[i * how[_STEP]]


@kernel(reads(int32, 1), fills(float32, 2), INT, INT, reads(uint8, 1), reads(float32, 1), TABLE, INT_ARRAY, narrow=True)
def _gather_narrow(
    ids: Any, out: Any, vocabulary: int, types: int, panels: Any, scales: Any, places: Any, how: Any
) -> None:
    """Fill rows of out with the embeddings of words in a narrow storage, and with zeros for words beyond the range.

    scales: f32 [P, B, width] of int8. places: where the bytes of the first word lie in a block of a panel, or in a step
    of k of a panel, and how far from there those of the next word.
    """
    _refuse(ids, vocabulary, types)
    width, kind, h, step = how[_WIDTH], how[_KIND], out.shape[1], len(places)
    size = step // kind if kind < _Q4_0 else _OF_SMALL if kind < _LARGE else _OF_LARGE
    raw, values, blocks = np.empty(step, np.uint8), np.empty(size, np.float32), -(-h // size)
    for row in range(len(ids)):
        word, target = ids[row] % vocabulary - how[_FIRST], floats(out.ctypes.data + 4 * row * h, h)
        if word < 0 or word >= how[_COUNT]:
            target[:] = ZERO
            continue
        panel, lane = word // width, word % width
        for block in range(blocks):
            source = octets(panels.ctypes.data + panel * how[_PANEL] + block * step * width, step * width)
            for i in range(step):
                raw[i] = source[places[i, 0] + lane * places[i, 1]]
            if kind == _BYTES:
                at = (panel * -(-h // BLOCK) + block * size // BLOCK) * width + lane
                for i in range(size):
                    values[i] = _signed(raw[i]) * scales[at]
            elif kind == _HALVES:
                values[0] = _half(raw, 0)
            elif kind < _LARGE:
                _decode_small(kind, raw, values)
            elif kind < _Q6_K:
                _decode_parts(kind, raw, values)
            else:
                _decode_sixes(raw, values)
            for i in range(min(size, h - block * size)):
                target[block * size + i] = values[i]


class Words:
    """The embeddings of words [h] of an op, as a plain table [words, h] or a packed matrix [h, words].

    Attribute words of the op: (first word of the range, words of the vocabulary); all words without.
    """

    def __init__(self, check: Check, weight: Weight, h: int) -> None:
        if isinstance(weight, np.ndarray):
            weight = check.table(weight, h)
            count = len(weight)
        else:
            check.that(weight.rows == h, f"words have {weight.rows} values")
            count = weight.columns
        first, self.vocabulary = check.op.attrs.get("words", (0, count))
        fits = 0 <= first <= first + count <= self.vocabulary
        check.that(fits, f"of {self.vocabulary} words there are {count}")
        self._weight, self._range, self._h = weight, (first, count), h

    def gather(self, ids: Operand, out: Operand, types: int = 1) -> Call:
        """Return the call that fills out [n, h] with the embeddings of ids [n]; id = type * vocabulary + word."""
        weight, h, vocabulary = self._weight, self._h, self.vocabulary

        def refuse(ids: Array, *_others: Any) -> None:
            if ids.min() < 0 or ids.max() >= vocabulary * types:
                bad = ids[(ids < 0) | (ids >= vocabulary * types)][0]
                of = f" of {types} token types" if types > 1 else ""
                raise ValueError(
                    f"token id {bad} is outside the vocabulary 0..{vocabulary - 1}{of}; tokenise for this model"
                )

        given = ids, out, vocabulary, types
        if isinstance(weight, np.ndarray):
            how = np.array([*self._range, 1, h, 1])
            return Call(_gather, (*given, weight.reshape(-1), how), refuse=refuse)
        panels = weight.panels.reshape(-1)
        width = weight.panels.shape[2] if not isinstance(weight, BlockMatrix) else WIDTH
        if isinstance(weight, PackedMatrix):
            return Call(_gather, (*given, panels, np.array([*self._range, width, h * width, width])), refuse=refuse)
        places, scales = _places(weight), np.zeros(0, np.float32)
        if isinstance(weight, NarrowMatrix):
            scales = weight.scales.reshape(-1)
        name = weight.storage if isinstance(weight, NarrowMatrix) else weight.storage.name
        how = np.array([*self._range, width, weight.panels[0].nbytes if len(weight.panels) else 0, _KINDS[name]])
        return Call(_gather_narrow, (*given, panels.view(np.uint8), scales, places, how), refuse=refuse)


def _places(weight: NarrowMatrix | BlockMatrix) -> NDArray[np.int64]:
    """Return (place, bytes from word to word) of each byte of a word's block in a panel, of the first word."""
    if isinstance(weight, BlockMatrix):
        return places_of(weight.storage)
    nbytes = weight.panels.itemsize * weight.panels.shape[3]
    return np.array([(i, nbytes) for i in range(nbytes)])
