"""What requests bring: token ids, token ids behind a cache, or pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from hepti_mqtt.models.shapes import Images, PackedTokens
from hepti_mqtt.spec import PlainShape, RequestShape, Want

CACHE_ROWS: Final = 64  # of the smallest cache; others are twice, four times ... as large


@dataclass(frozen=True, slots=True)
class Text:
    """A request brings token ids i32 [m]: of a vocabulary, at most `longest` in a sequence.

    masks: the task answers for mask tokens, so that a request has at least one.
    """

    vocab: int
    longest: int
    masks: bool = False

    @property
    def below(self) -> int:
        """Return the bound below which all values of the input are."""
        return self.vocab

    def shape(self, tokens: int | None = None) -> PackedTokens:
        """Return a request of one sequence: of so many tokens where the model takes them, else the longest."""
        length = self.longest if tokens is None else min(tokens, self.longest)
        return PackedTokens((length,), mask_rows=(0,) if self.masks else ())

    def batch(self, lengths: tuple[int, ...], want: Want = "task", mask_rows: tuple[int, ...] = ()) -> PackedTokens:
        """Return a request of sequences of these lengths."""
        return PackedTokens(lengths, want, mask_rows)

    def shape_of(self, plain: PlainShape) -> PackedTokens:
        """Return the shape that travelled; raises ValueError for one with a session, which only decoders have."""
        if plain.session_rows:
            raise ValueError(f"a model without sessions cannot keep {plain.session_rows} rows")
        return PackedTokens(plain.sizes, plain.want, plain.marks)

    def input(self, shape: RequestShape) -> tuple[tuple[int, ...], Literal["i32"]]:
        """Return shape and dtype of what a request brings."""
        return (shape.size,), "i32"


@dataclass(frozen=True, slots=True)
class Decoding(Text):
    """A request brings i32 [1 + m]: how many rows the cache of its session has already, then token ids."""

    def shape(self, tokens: int | None = None) -> PackedTokens:
        """Return one step with a cache for a sequence of so many tokens, else the longest sequence in one run.

        What a step costs depends on its position: the kernels reckon with the mean over a cache.
        """
        if tokens is None:
            return PackedTokens((self.longest,), cache=self.cache(self.longest))
        return PackedTokens((1,), cache=self.cache(tokens))

    def shape_of(self, plain: PlainShape) -> PackedTokens:
        """Return the shape that travelled."""
        return PackedTokens(plain.sizes, plain.want, plain.marks, plain.session_rows)

    def cache(self, tokens: int) -> int:
        """Return the rows of the cache of a sequence that ends with so many tokens."""
        rows = CACHE_ROWS
        while rows < tokens:
            rows *= 2
        return min(rows, self.longest)

    def input(self, shape: RequestShape) -> tuple[tuple[int, ...], Literal["i32"]]:
        """Return shape and dtype of what a request brings."""
        return (1 + shape.size,), "i32"


@dataclass(frozen=True, slots=True)
class Pictures:
    """A request brings pictures u8 [B, channels, size, size], each of which has `rows` rows in the net.

    shortest: pixels of the shorter side of a picture whose middle is taken; 0: all of it, made square.
    """

    size: int
    channels: int
    rows: int = 1
    shortest: int = 0

    @property
    def below(self) -> int:
        """Return the bound below which all values of the input are."""
        return 256

    def shape(self, _size: int | None = None) -> Images:
        """Return a request of one picture, whatever size is named."""
        return self.batch(1)

    def batch(self, count: int, want: Want = "task") -> Images:
        """Return a request of so many pictures."""
        return Images(count, self.rows, want)

    def shape_of(self, plain: PlainShape) -> Images:
        """Return the shape that travelled; raises ValueError for one that is not of whole pictures alone."""
        made = self.batch(len(plain.sizes), plain.want)
        if made.plain() != plain:
            raise ValueError(f"pictures of this model have {self.rows} rows each, no marks and no session")
        return made

    def input(self, shape: RequestShape) -> tuple[tuple[int, ...], Literal["u8"]]:
        """Return shape and dtype of what a request brings."""
        return (len(shape.sizes), self.channels, self.size, self.size), "u8"
