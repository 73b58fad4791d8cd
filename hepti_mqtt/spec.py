"""What every model tells of itself and of its requests: plain numbers, no weights; the rest is its family's.

Letters used in every shape of the project: m tokens (packed, no padding), h hidden, f MLP width, a heads,
d = h / a, L layers, N devices, B sequences of a batch.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

Task = Literal["embedding", "classification", "masked_token", "image_classification", "feature_map", "generation"]
Activation = Literal["gelu", "gelu_tanh", "relu"]
HeadActivation = Activation | Literal["tanh"]
Want = Literal["task", "hidden"]


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


class Reads(Protocol):
    """What the requests of a model bring, and how they are packed: the family's own."""

    @property
    def below(self) -> int:
        """Return the bound below which all values of the input are."""

    def shape(self, tokens: int | None = None) -> RequestShape:
        """Return a representative request of one item: of so many tokens where it has any, else the largest."""

    def input(self, shape: RequestShape) -> tuple[tuple[int, ...], Literal["i32", "u8"]]:
        """Return shape and dtype of what a request brings."""


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
    tied: the word embeddings are the matrix of the logits too, unless a checkpoint stores one of its own.
    """

    task: Task
    pooling: Literal["mean", "cls", "mask", "last"]
    normalize: bool = False
    pooler: bool = False
    outputs: int = 0
    labels: tuple[str, ...] = ()
    activation: HeadActivation = "tanh"
    tied: bool = False
