"""Shapes and inputs of requests: token sequences, token sequences in sessions, and images."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from hepti_mqtt.core.spec import PlainShape, RequestShape, Want

STEP: Final = 2.0**-20  # unit of the fixed-point numbers in requests


def fixed_point(numbers: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.int32]:
    """Return numbers [r, c] below 2,048 in fixed point, [r c]; the error is at most 5e-7."""
    return np.asarray(np.rint(numbers.reshape(-1) / STEP), np.int32)


class PackedBatch:
    """A batch of token sequences or images, packed one below the other; by default without session and mask tokens."""

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

    In a run of sessions each sequence belongs to another session. The number of rows in their caches is an input, not
    part of the shape, so one Program serves every position.
    """

    #: Tokens of each sequence.
    lengths: tuple[int, ...] = field()  # without `field()` the base class's property would be its default
    #: See `RequestShape.want`.
    want: Want = "task"
    #: Packed rows of mask tokens (task masked_token), or rows that a session's run answers for; empty: its last row.
    mask_rows: tuple[int, ...] = ()
    #: Capacity of each session's cache in rows, 0 without sessions.
    cache: int = 0
    #: The session's run brings a row that is added to each token's embedding.
    added: bool = False

    @property
    def session_rows(self) -> int:
        return self.cache

    def with_want(self, want: Want) -> TokenBatch:
        return replace(self, want=want)

    def decode_step(self, rows: int, begins: bool = False, added: bool = False) -> TokenBatch:  # noqa: ARG002
        """Return a run of one of the sessions, of `rows` tokens; `begins` makes no difference."""
        return replace(self, lengths=(rows,), mask_rows=(), added=added)

    def answering(self, rows: int) -> TokenBatch:
        """Return the same run with answers for its last `rows` rows."""
        return replace(self, mask_rows=tuple(range(self.tokens - rows, self.tokens)))

    @property
    def temperatures(self) -> int:
        """Return the number of temperatures in the inputs: one for each row with candidates."""
        return len(self.mask_rows) or len(self.lengths) if self.want == "candidates" else 0

    def concatenate(self, others: Sequence[TokenBatch]) -> TokenBatch:
        shapes = (self, *others)
        starts = _starts([shape.tokens for shape in shapes])
        masks = (start + row for start, shape in zip(starts, shapes, strict=True) for row in shape.mask_rows)
        lengths, cache = chain.from_iterable(shape.lengths for shape in shapes), max(shape.cache for shape in shapes)
        return replace(self, lengths=tuple(lengths), mask_rows=tuple(masks), cache=cache)

    def slice_items(self, first: int, stop: int) -> tuple[TokenBatch, slice]:
        if self.cache and (first, stop) != (0, len(self.lengths)):
            raise ValueError("a request with a session cannot be sliced")
        if self.cache:
            return self, slice(None)  # its inputs are not ids alone
        start, tokens = sum(self.lengths[:first]), sum(self.lengths[first:stop])
        masks = tuple(row - start for row in self.mask_rows if start <= row < start + tokens)
        return replace(self, lengths=self.lengths[first:stop], mask_rows=masks), slice(start, start + tokens)

    def plain(self) -> PlainShape:
        return PlainShape(self.lengths, self.want, self.mask_rows, self.cache, self.added)


@dataclass(frozen=True, slots=True)
class ImageBatch(PackedBatch):
    """A batch of images of one size, without a session."""

    #: Number of images.
    count: int
    #: Rows of each image in a transformer (`ImageStem.rows`); 1 in a CNN.
    rows: int = 1
    want: Want = "task"

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.rows,) * self.count

    def with_want(self, want: Want) -> ImageBatch:
        return replace(self, want=want)

    def decode_step(self, rows: int, begins: bool = False, added: bool = False) -> ImageBatch:  # noqa: ARG002
        """Raise ValueError: images have no session."""
        raise ValueError(f"images have no session that could continue with {rows} rows")

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
# Inputs of requests: token ids, token ids in sessions, or pictures.


CACHE_ROWS: Final = 64  # of the smallest cache; larger ones double it, up to the longest text
# Rows of the largest run of a prompt; shorter runs have powers of two. From 32 rows on the time per row is constant, so
# larger runs would only make other requests wait longer.
CHUNK_ROWS: Final = 128
OVERLAP_ROWS: Final = 16  # most cached rows that a run may compute again; a further run costs about as much


def cache_rows(tokens: int, longest: int) -> int:
    """Return the capacity in rows of a session for a number of tokens; longest: tokens of the model's longest text."""
    rows = CACHE_ROWS
    while rows < tokens:
        rows *= 2
    return min(rows, longest)


def next_rows(cached: int, total: int) -> tuple[int, int]:
    """Return the rows start..stop of a session's next run; the first `cached` of `total` rows are in the cache.

    The last run may compute cached rows again, with equal keys and values, so that its size is a power of two.
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
    """The input is token ids i32 [m]; a token of type t has the id: id + t x vocab."""

    vocab: int
    #: Tokens of the longest sequence.
    longest: int
    #: The task answers for mask tokens, so a request has at least one.
    masks: bool = False
    #: Number of token types.
    types: int = 1
    #: See `TextStem`.
    end: int | None = None
    padded: bool = False

    @property
    def upper_bound(self) -> int:
        return self.vocab * self.types

    def shape(self, tokens: int | None = None) -> TokenBatch:
        """Return a request of one sequence of at most `tokens` tokens; the longest for None and for padded texts."""
        length = self.longest if tokens is None or self.padded else min(tokens, self.longest)
        return TokenBatch((length,), mask_rows=(0,) if self.masks else ())

    def batch(self, lengths: tuple[int, ...], want: Want = "task", mask_rows: tuple[int, ...] = ()) -> TokenBatch:
        """Return a request of sequences of these lengths."""
        return TokenBatch(lengths, want, mask_rows)

    def shape_of(self, plain: PlainShape) -> TokenBatch:
        """Return the shape of its plain form; raises ValueError if it has a session, which only decoders support."""
        if plain.session_rows or plain.want not in ("task", "hidden") or plain.added:
            raise ValueError(f"a model without sessions cannot keep {plain.session_rows} rows or return {plain.want}")
        return TokenBatch(plain.sizes, plain.want, plain.mask_rows)

    def program_shape(self, shape: TokenBatch) -> TokenBatch:
        return shape

    def input_layout(self, shape: RequestShape) -> tuple[tuple[int, ...], Literal["i32"]]:
        return (shape.size,), "i32"


@dataclass(frozen=True, slots=True)
class DecoderInput(TextInput):
    """The input is i32: the number of rows in each session's cache [B], token ids [m], temperatures, added rows.

    There is a temperature, as the bits of an f32, for each row with candidates. Added rows [m, width] are in fixed
    point, and present if `TokenBatch.added`.
    """

    #: Columns of added rows, h.
    width: int = 0
    #: See `BlockSpec.picture_rows`.
    picture_rows: int = 0

    def shape(self, tokens: int | None = None) -> TokenBatch:
        """Return a step with a cache for a sequence of `tokens` tokens; None: the largest run of the longest sequence.

        The cost of a step depends on its position; the cost model uses the mean over the cache.
        """
        if tokens is None:
            rows = max(CHUNK_ROWS, self.picture_rows)
            return TokenBatch((min(self.longest, rows),), "candidates", cache=self.longest)
        return TokenBatch((1,), "candidates", cache=self.cache(tokens))

    def shape_of(self, plain: PlainShape) -> TokenBatch:
        """Return the shape of its plain form; raises ValueError for added rows in a run of several sessions."""
        if plain.added and (len(plain.sizes) > 1 or not plain.session_rows):
            raise ValueError("rows can be added only in a run of one session")
        if plain.want == "alignment":
            raise ValueError("only models of speech return an alignment")
        return TokenBatch(plain.sizes, plain.want, plain.mask_rows, plain.session_rows, plain.added)

    def program_shape(self, shape: TokenBatch) -> TokenBatch:
        return replace(shape, cache=self.longest)

    def cache(self, tokens: int) -> int:
        """Return the capacity in rows of a session's cache for a sequence of `tokens` tokens."""
        return cache_rows(tokens, self.longest)

    def input_layout(self, shape: RequestShape) -> tuple[tuple[int, ...], Literal["i32"]]:
        assert isinstance(shape, TokenBatch)
        added = shape.size * self.width if shape.added else 0
        return (len(shape.sizes) + shape.size + shape.temperatures + added,), "i32"


@dataclass(frozen=True, slots=True)
class ImageInput:
    """The input is pictures u8 [B, channels, size, size]."""

    #: Pixels of a side.
    size: int
    channels: int
    #: See `ImageBatch.rows`.
    rows: int = 1
    #: See `ImageStem`.
    shortest: int = 0
    square: bool = False

    @property
    def upper_bound(self) -> int:
        return 256

    def shape(self, _size: int | None = None) -> ImageBatch:
        """Return a request of one picture."""
        return self.batch(1)

    def batch(self, count: int, want: Want = "task") -> ImageBatch:
        """Return a request of `count` pictures."""
        return ImageBatch(count, self.rows, want)

    def shape_of(self, plain: PlainShape) -> ImageBatch:
        """Return the shape of its plain form; raises ValueError unless it consists of whole pictures."""
        batch = self.batch(len(plain.sizes), plain.want)
        if batch.plain() != plain or plain.want not in ("task", "hidden"):
            raise ValueError(f"pictures of this model have {self.rows} rows each, no marks and no session")
        return batch

    def program_shape(self, shape: ImageBatch) -> ImageBatch:
        return shape

    def input_layout(self, shape: RequestShape) -> tuple[tuple[int, ...], Literal["u8"]]:
        return (len(shape.sizes), self.channels, self.size, self.size), "u8"
