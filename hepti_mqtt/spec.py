"""What every model tells of itself and of its requests: plain numbers, no weights; the rest is its family's.

Letters used in every shape of the project: m tokens (packed, no padding), h hidden, f MLP width, a heads,
d = h / a, L layers, N devices, B sequences of a batch.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, Self

Task = Literal["embedding", "classification", "masked_token", "image_classification", "generation"]
Activation = Literal["gelu", "gelu_tanh", "relu"]
HeadActivation = Activation | Literal["tanh"]
Want = Literal["task", "hidden"]

EMBEDDING: Final = "embedding"
CACHE_ROWS: Final = 64  # of the smallest cache; others are twice, four times ... as large


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What of a request a Program depends on.

    lengths: tokens of each packed sequence. mask_rows: packed rows of mask tokens (masked_token task only).
    want: `task` for the task's output, `hidden` for the final hidden states of all rows [m, h]. cache: rows for which
    a decoder's cache has room, those of this run included; its inputs are the number of rows there already, then the
    ids, so that one Program serves every position.
    """

    lengths: tuple[int, ...]
    want: Want = "task"
    mask_rows: tuple[int, ...] = ()
    cache: int = 0

    @property
    def tokens(self) -> int:
        """Return m, the packed rows of the whole batch."""
        return sum(self.lengths)

    @property
    def starts(self) -> tuple[int, ...]:
        """Return the first packed row of each sequence."""
        out, at = [], 0
        for length in self.lengths:
            out.append(at)
            at += length
        return tuple(out)


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

    def shape(self, tokens: int | None = None) -> RequestShape:
        """Return a request of one sequence: of so many tokens where the model takes them, else the longest."""
        length = self.longest if tokens is None else min(tokens, self.longest)
        return RequestShape((length,), mask_rows=(0,) if self.masks else ())

    def input(self, shape: RequestShape) -> tuple[tuple[int, ...], Literal["i32"]]:
        """Return shape and dtype of what a request brings."""
        return (shape.tokens,), "i32"


@dataclass(frozen=True, slots=True)
class Decoding(Text):
    """A request brings i32 [1 + m]: how many rows the cache of its session has already, then token ids."""

    def shape(self, tokens: int | None = None) -> RequestShape:
        """Return one step with a cache for a sequence of so many tokens, else the longest sequence in one run.

        What a step costs depends on its position: the kernels reckon with the mean over a cache.
        """
        if tokens is None:
            return RequestShape((self.longest,), cache=self.cache(self.longest))
        return RequestShape((1,), cache=self.cache(tokens))

    def cache(self, tokens: int) -> int:
        """Return the rows of the cache of a sequence that ends with so many tokens."""
        rows = CACHE_ROWS
        while rows < tokens:
            rows *= 2
        return min(rows, self.longest)

    def input(self, shape: RequestShape) -> tuple[tuple[int, ...], Literal["i32"]]:
        """Return shape and dtype of what a request brings."""
        return (1 + shape.tokens,), "i32"


@dataclass(frozen=True, slots=True)
class Pictures:
    """A request brings pictures u8 [B, channels, size, size], each of which counts as `rows` tokens of its length."""

    size: int
    channels: int
    rows: int = 1

    @property
    def below(self) -> int:
        """Return the bound below which all values of the input are."""
        return 256

    def shape(self, _tokens: int | None = None) -> RequestShape:
        """Return a request of one picture, whatever number of tokens is named."""
        return RequestShape((self.rows,))

    def input(self, shape: RequestShape) -> tuple[tuple[int, ...], Literal["u8"]]:
        """Return shape and dtype of what a request brings."""
        return (len(shape.lengths), self.channels, self.size, self.size), "u8"


Reads = Text | Pictures


class Spec(Hashable, Protocol):
    """What every family's spec tells: plain numbers, no weights; equal and hashable by value.

    head: the task that an answer is told by. A family with other numbers than a transformer has names the
    class of its own in `SPEC`; its `from_dict` is the inverse of `to_dict`.
    """

    @property
    def family(self) -> str:
        """Return the key of `models.FAMILIES`."""

    @property
    def architecture(self) -> str:
        """Return the name in config.json's `architectures`."""

    @property
    def head(self) -> TaskHead:
        """Return what follows the last layer."""

    @property
    def reads(self) -> Reads:
        """Return what a request brings."""

    def output_shape(self, shape: RequestShape) -> tuple[int, int]:
        """Return the shape of the answer."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for msgpack or JSON, with the key `family`."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the spec that `to_dict` described; raises KeyError or TypeError on other data."""


@dataclass(frozen=True, slots=True)
class TaskHead:
    """What follows the last layer.

    pooling: which rows of the final hidden states [m, h] the task reads: the mean over each sequence, its first row
    (cls), its last one, or the rows at mask tokens. pooler: a dense layer after cls. outputs: columns of the
    logits, 0 without. activation: of the dense layer before the last one: the pooler's, or that before the vocabulary.
    """

    task: Task
    pooling: Literal["mean", "cls", "mask", "last"]
    normalize: bool = False
    pooler: bool = False
    outputs: int = 0
    labels: tuple[str, ...] = ()
    activation: HeadActivation = "tanh"
