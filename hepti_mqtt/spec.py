"""What every model states of itself and of its requests: plain numbers, no weights; the rest is its family's.

Letters used in every shape of the project: m tokens (packed, no padding), h hidden, f MLP width, a heads,
d = h / a, L layers, N devices, B sequences of a batch.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal, NamedTuple, Protocol, Self

Task = Literal[
    "embedding",
    "classification",
    "token_classification",
    "question_answering",
    "masked_token",
    "image_classification",
    "feature_map",
    "generation",
    "transcription",
    "picture_rows",
]
Pooling = Literal[
    "mean",
    "sqrt_mean",
    "weighted_mean",
    "max",
    "cls",
    "last",
    "mask",
    "none",
    "patches",
    "cls_patches",
    "attention",
    "shuffled",
    "grid_mean",
]
Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"]
HeadActivation = Activation | Literal["tanh"]
Want = Literal["task", "hidden", "candidates", "alignment"]

CANDIDATES: Final = 128  # of the next token that a run answers with, where they are enough


class Draw(NamedTuple):
    """How a token is drawn from candidates alone (`models.generation`).

    place: of the token in its text. seed: of the text's draws. temperature: 0 takes the likeliest token. top_k, top_p,
    min_p: how many, what share together, and what share of the likeliest one's probability may be drawn.
    """

    place: int = 0
    seed: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class PlainShape:
    """A request's shape as it travels: plain numbers, which `Reads.shape_of` makes the family's own again.

    sizes: of each item. mask_rows: places that the task answers for, of all items one behind the other. session_rows:
    for which the request's session has room, 0 without one.
    """

    sizes: tuple[int, ...]
    want: Want = "task"
    mask_rows: tuple[int, ...] = ()
    session_rows: int = 0
    #: the run of a session brings a row that is added to the embedding of each token
    added: bool = False

    @property
    def size(self) -> int:
        """Return the size of all items together."""
        return sum(self.sizes)

    def plain(self) -> PlainShape:
        """Return it as it is."""
        return self


class RequestShape(Hashable, Protocol):
    """What of a request a Program depends on, the family's own; equal and hashable by value.

    A request is a batch of items. What the size of one counts (tokens, rows, images) is the family's.
    """

    @property
    def want(self) -> Want:
        """Return `task` for the task's output, `hidden` for the final hidden states, `candidates` for the likeliest
        next tokens instead of all logits, `alignment` for the rows of sound at which tokens begin."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the size of each item."""

    @property
    def size(self) -> int:
        """Return the size of all items together."""

    @property
    def session_rows(self) -> int:
        """Return the rows that the request's session has room for, 0 without one."""

    @property
    def new_rows(self) -> int:
        """Return how many rows the run adds to its session, 0 without one."""

    @property
    def mask_positions(self) -> tuple[tuple[int, int], ...]:
        """Return item and place in it of each mark that the task answers for, in their order."""

    def with_want(self, want: Want) -> Self:
        """Return the same items with another want."""

    def decode_step(self, rows: int, begins: bool = False, added: bool = False) -> Self:
        """Return the run of a number of rows in the same session; raises ValueError without one.

        begins: it is the first one. added: it brings a row for the embedding of each token.
        """

    def answering(self, rows: int) -> Self:
        """Return the same run of a session, which answers for its last rows; raises ValueError without a session."""

    def concatenate(self, others: Sequence[Self]) -> Self:
        """Return the batch of these items and of others behind them, which want the same."""

    def slice_items(self, first: int, stop: int) -> tuple[Self, slice]:
        """Return the shape of some of the items, and where they are in the inputs; raises ValueError in a session."""

    def plain(self) -> PlainShape:
        """Return the shape as it travels; `Reads.shape_of` is the inverse."""


class InputSpec(Protocol):
    """What the requests of a model bring, and how they are packed: the family's own."""

    @property
    def upper_bound(self) -> int:
        """Return the bound below which all values of the input are."""

    def shape(self, size: int | None = None, /) -> RequestShape:
        """Return a representative request of one item: of that size where the family has several, else the largest."""

    def shape_of(self, plain: PlainShape) -> RequestShape:
        """Return the shape that travelled; raises ValueError for one that no request of the model has."""

    def program_shape(self, shape: Any, /) -> RequestShape:
        """Return the shape whose Program computes this one, too: runs of sessions have it in common."""

    def input_layout(self, shape: RequestShape) -> tuple[tuple[int, ...], Literal["i32", "u8"]]:
        """Return shape and dtype of what a request brings."""


class Spec(Hashable, Protocol):
    """What every family's spec tells: plain numbers, no weights; equal and hashable by value.

    head: the task of an answer. A family with other numbers than a transformer has names the
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
    def input_spec(self) -> InputSpec:
        """Return what a request brings."""

    def output_shape(self, shape: RequestShape) -> tuple[int, int]:
        """Return the shape of the answer."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for msgpack or JSON, with the key `family`."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the spec that `to_dict` described; raises KeyError or TypeError on other data."""


@dataclass(frozen=True, slots=True)
class Projection:
    """A dense layer behind the pooling; path: the folder of the model that holds its weights."""

    path: str
    inputs: int
    outputs: int
    bias: bool = True
    activation: HeadActivation | None = None


@dataclass(frozen=True, slots=True)
class TaskHead:
    """What follows the last layer.

    pooling: which rows of the final hidden states [m, h] the task reads: the mean over each sequence (its sum by the
    root of the length, by place), the largest of each column, its first row (cls), its last one, the rows at mask
    tokens, or all as they are (none); of a picture also the mean of its patches, alone or behind the first row. pooler:
    a dense layer after cls. projections: those behind the pooling. outputs: columns of the logits, 0 without.
    activation: of the dense layer before the last one: the pooler's, or that before the vocabulary. tied: the word
    embeddings are the matrix of the logits too, unless a checkpoint stores one of its own. labels: the names of the
    outputs, which only who reads answers needs: they do not travel. logits_scaling: divides the logits of words.
    """

    task: Task
    pooling: Pooling
    normalize: bool = False
    pooler: bool = False
    outputs: int = 0
    labels: tuple[str, ...] = ()
    activation: HeadActivation = "tanh"
    tied: bool = False
    projections: tuple[Projection, ...] = ()
    logits_scaling: float = 1.0
    #: patches of a side of the square that becomes one row of a picture: side by side, or their mean
    square: int = 0

    def columns(self, hidden: int) -> int:
        """Return the columns of the task's output, of a model with that many hidden ones."""
        return self.outputs or (self.projections[-1].outputs if self.projections else hidden)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data without the labels; `from_dict` is the inverse but for those."""
        told = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "labels"}
        return told | {"projections": [asdict(projection) for projection in self.projections]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TaskHead:
        """Return the head that `to_dict` described; raises TypeError on other data."""
        told = {name: value for name, value in data.items() if name != "labels"}
        return cls(**told | {"projections": tuple(Projection(**one) for one in data.get("projections", ()))})
