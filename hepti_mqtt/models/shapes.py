"""The request shapes of the families: a packed batch of token sequences, and a batch of images."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from hepti_mqtt.core.spec import PlainShape, RequestShape, Want

STEP: Final = 2.0**-20  # of the fixed-point numbers that a request brings


def fixed_point(numbers: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.int32]:
    """Return numbers [r, c] below 2,048 as a request brings them, [r c]; they are kept to 5e-7."""
    return np.asarray(np.rint(numbers.reshape(-1) / STEP), np.int32)


class PackedBatch:
    """A batch of token sequences or patches, packed one below the other; by default without session and marks."""

    __slots__ = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the rows of each item."""
        raise NotImplementedError

    @property
    def tokens(self) -> int:
        """Return m, all rows."""
        return sum(self.lengths)

    @property
    def starts(self) -> tuple[int, ...]:
        """Return the first row of each item."""
        return _starts(self.lengths)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.lengths

    @property
    def size(self) -> int:
        return self.tokens

    @property
    def want(self) -> Want:
        raise NotImplementedError

    @property
    def mask_rows(self) -> tuple[int, ...]:
        """Return the rows of mask tokens."""
        return ()

    @property
    def mask_positions(self) -> tuple[tuple[int, int], ...]:
        starts = self.starts
        items = [bisect_right(starts, row) - 1 for row in self.mask_rows]
        return tuple((item, row - starts[item]) for item, row in zip(items, self.mask_rows, strict=True))

    @property
    def session_rows(self) -> int:
        return 0

    @property
    def new_rows(self) -> int:
        return self.tokens if self.session_rows else 0


def _starts(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(lengths, initial=0))[:-1]


@dataclass(frozen=True, slots=True)
class TokenBatch(PackedBatch):
    """A packed batch of token sequences; its unit of size is the token.

    lengths: tokens of each sequence. mask_rows: packed rows of mask tokens (masked_token task), or those for which a
    session's run answers, none for the last one alone. want: `task` for the task's output, `hidden` for the final
    hidden states of all rows [m, h]. cache: rows for which a decoder's cache has room, those of this run included; each
    sequence is of a session of its own, and inputs are the number of rows that each has already, then all ids, so that
    one Program serves every position.
    """

    lengths: tuple[int, ...] = field()  # else the property of the base class is its default
    want: Want = "task"
    mask_rows: tuple[int, ...] = ()
    cache: int = 0
    #: a session's run brings a row that is added to the embedding of each token
    added: bool = False

    @property
    def session_rows(self) -> int:
        return self.cache

    def with_want(self, want: Want) -> TokenBatch:
        return replace(self, want=want)

    def decode_step(self, rows: int, begins: bool = False, added: bool = False) -> TokenBatch:  # noqa: ARG002
        """Return the run of a number of tokens in one of the sessions; the first one is like the others."""
        return replace(self, lengths=(rows,), mask_rows=(), added=added)

    def answering(self, rows: int) -> TokenBatch:
        """Return the same run, which answers for each of its last rows instead of the last one alone."""
        return replace(self, mask_rows=tuple(range(self.tokens - rows, self.tokens)))

    @property
    def temperatures(self) -> int:
        """Return how many temperatures the inputs end with: one for each row that a run answers for by candidates."""
        return len(self.mask_rows) or len(self.lengths) if self.want == "candidates" else 0

    def concatenate(self, others: Sequence[TokenBatch]) -> TokenBatch:
        shapes = (self, *others)
        starts = _starts([shape.tokens for shape in shapes])
        masks = (start + row for start, shape in zip(starts, shapes, strict=True) for row in shape.mask_rows)
        lengths, cache = chain.from_iterable(shape.lengths for shape in shapes), max(shape.cache for shape in shapes)
        return replace(self, lengths=tuple(lengths), mask_rows=tuple(masks), cache=cache)

    def slice_items(self, first: int, stop: int) -> tuple[TokenBatch, slice]:
        if self.cache and (first, stop) != (0, len(self.lengths)):
            raise ValueError("a request with a session is not divided")
        if self.cache:
            return self, slice(None)  # the first of its inputs is no id
        start, tokens = sum(self.lengths[:first]), sum(self.lengths[first:stop])
        masks = tuple(row - start for row in self.mask_rows if start <= row < start + tokens)
        return replace(self, lengths=self.lengths[first:stop], mask_rows=masks), slice(start, start + tokens)

    def plain(self) -> PlainShape:
        return PlainShape(self.lengths, self.want, self.mask_rows, self.cache, self.added)


@dataclass(frozen=True, slots=True)
class ImageBatch(PackedBatch):
    """A batch of images of one size, or of the feature maps that a net makes of them; it keeps no session.

    rows: the size of each: the patches of a transformer and the row before them; 1 where a net takes an image as it is.
    """

    count: int
    rows: int = 1
    want: Want = "task"

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.rows,) * self.count

    def with_want(self, want: Want) -> ImageBatch:
        return replace(self, want=want)

    def decode_step(self, rows: int, begins: bool = False, added: bool = False) -> ImageBatch:  # noqa: ARG002
        """Raise ValueError: images have no session."""
        raise ValueError(f"images have no session that could go on with {rows} rows")

    def answering(self, rows: int) -> ImageBatch:
        """Raise ValueError: images have no session."""
        raise ValueError(f"images have no session that could answer for {rows} rows")

    def concatenate(self, others: Sequence[ImageBatch]) -> ImageBatch:
        return replace(self, count=self.count + sum(other.count for other in others))

    def slice_items(self, first: int, stop: int) -> tuple[ImageBatch, slice]:
        return replace(self, count=stop - first), slice(first, stop)

    def plain(self) -> PlainShape:
        return PlainShape(self.lengths, self.want)


# ----------------------------------------------------------------------------------------------------------------------
# Inputs of requests: token ids, token ids after a cache, or pictures.


CACHE_ROWS: Final = 64  # of the smallest cache; others are twice, four times ... as large
# Of a session's largest run; others are smaller powers of two. From 32 rows on, time per row is constant, and other
# requests wait for a single run of a long prompt at a time.
CHUNK_ROWS: Final = 128
OVERLAP_ROWS: Final = 16  # that are computed again at most: about what one more run costs


def cache_rows(tokens: int, longest: int) -> int:
    """Return the rows that are set aside for a session of a number of tokens, where the longest text has `longest`."""
    rows = CACHE_ROWS
    while rows < tokens:
        rows *= 2
    return min(rows, longest)


def next_rows(cached: int, total: int) -> tuple[int, int]:
    """Return the rows of a session's next run; the first `cached` of `total` rows are in the cache.

    The last run may begin over rows that are cached already: they give the same keys and values again, and no Program
    is needed but those of powers of two.
    """
    left = total - cached
    if left >= CHUNK_ROWS:
        return cached, cached + CHUNK_ROWS
    size = 1 << (left - 1).bit_length()
    if size <= min(total, left + OVERLAP_ROWS):
        return total - size, total
    return cached, cached + size // 2


@dataclass(frozen=True, slots=True)
class TextInput:
    """A request brings token ids i32 [m]: of a vocabulary, at most `longest` in a sequence.

    masks: the task answers for mask tokens, so that a request has at least one. types: of tokens, 1 where all are
    alike; a token of another type than the first travels as id + type x vocabulary. end, padded: see `TextStem`.
    """

    vocab: int
    longest: int
    masks: bool = False
    types: int = 1
    end: int | None = None
    padded: bool = False

    @property
    def upper_bound(self) -> int:
        return self.vocab * self.types

    def shape(self, tokens: int | None = None) -> TokenBatch:
        """Return a request of one sequence: of so many tokens where the model takes them, else the longest."""
        length = self.longest if tokens is None or self.padded else min(tokens, self.longest)
        return TokenBatch((length,), mask_rows=(0,) if self.masks else ())

    def batch(self, lengths: tuple[int, ...], want: Want = "task", mask_rows: tuple[int, ...] = ()) -> TokenBatch:
        """Return a request of sequences of these lengths."""
        return TokenBatch(lengths, want, mask_rows)

    def shape_of(self, plain: PlainShape) -> TokenBatch:
        """Return the shape that travelled; raises ValueError for one with a session, which only decoders have."""
        if plain.session_rows or plain.want not in ("task", "hidden") or plain.added:
            raise ValueError(f"a model without sessions cannot keep {plain.session_rows} rows or give {plain.want}")
        return TokenBatch(plain.sizes, plain.want, plain.mask_rows)

    def program_shape(self, shape: TokenBatch) -> TokenBatch:
        return shape

    def input_layout(self, shape: RequestShape) -> tuple[tuple[int, ...], Literal["i32"]]:
        return (shape.size,), "i32"


@dataclass(frozen=True, slots=True)
class DecoderInput(TextInput):
    """A request brings i32 [B + m]: how many rows the session of each item has already, then token ids.

    Where candidates are wanted, a temperature for each row that it answers for follows, as the bits of f32; then, in a
    run that brings them, the rows [m, width] that are added to embeddings, in fixed point.
    """

    #: h
    width: int = 0
    #: rows of a picture, which see each other; 0: they see earlier rows only
    picture_rows: int = 0

    def shape(self, tokens: int | None = None) -> TokenBatch:
        """Return one step with a cache for a sequence of so many tokens, else the largest run of the longest sequence.

        What a step costs depends on its position: the kernels reckon with the mean over a cache.
        """
        if tokens is None:
            rows = max(CHUNK_ROWS, self.picture_rows)
            return TokenBatch((min(self.longest, rows),), "candidates", cache=self.longest)
        return TokenBatch((1,), "candidates", cache=self.cache(tokens))

    def shape_of(self, plain: PlainShape) -> TokenBatch:
        """Return the shape that travelled; raises ValueError for added rows in a run of several sessions."""
        if plain.added and (len(plain.sizes) > 1 or not plain.session_rows):
            raise ValueError("rows are added in a run of one session")
        if plain.want == "alignment":
            raise ValueError("tokens of speech alone are aligned")
        return TokenBatch(plain.sizes, plain.want, plain.mask_rows, plain.session_rows, plain.added)

    def program_shape(self, shape: TokenBatch) -> TokenBatch:
        return replace(shape, cache=self.longest)

    def cache(self, tokens: int) -> int:
        """Return the rows of the cache of a sequence that ends with so many tokens."""
        return cache_rows(tokens, self.longest)

    def input_layout(self, shape: RequestShape) -> tuple[tuple[int, ...], Literal["i32"]]:
        assert isinstance(shape, TokenBatch)
        added = shape.size * self.width if shape.added else 0
        return (len(shape.sizes) + shape.size + shape.temperatures + added,), "i32"


@dataclass(frozen=True, slots=True)
class ImageInput:
    """A request brings pictures u8 [B, channels, size, size] with `rows` rows each in the net.

    shortest: pixels of the resized shorter side before the centre crop; 0: the whole picture, made square. square: the
    longer side gets as many.
    """

    size: int
    channels: int
    rows: int = 1
    shortest: int = 0
    square: bool = False

    @property
    def upper_bound(self) -> int:
        return 256

    def shape(self, _size: int | None = None) -> ImageBatch:
        """Return a request of one picture, whatever size is named."""
        return self.batch(1)

    def batch(self, count: int, want: Want = "task") -> ImageBatch:
        """Return a request of so many pictures."""
        return ImageBatch(count, self.rows, want)

    def shape_of(self, plain: PlainShape) -> ImageBatch:
        """Return the shape that travelled; raises ValueError unless it is whole pictures."""
        batch = self.batch(len(plain.sizes), plain.want)
        if batch.plain() != plain or plain.want not in ("task", "hidden"):
            raise ValueError(f"pictures of this model have {self.rows} rows each, no marks and no session")
        return batch

    def program_shape(self, shape: ImageBatch) -> ImageBatch:
        return shape

    def input_layout(self, shape: RequestShape) -> tuple[tuple[int, ...], Literal["u8"]]:
        return (len(shape.sizes), self.channels, self.size, self.size), "u8"
