"""The common part of models' specs and request shapes: plain numbers, no weights; the rest is each family's own.

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

CANDIDATES: Final = 128  # likeliest next tokens in a run's answer that is not all logits


class Draw(NamedTuple):
    """The rule by which a token is drawn from candidates alone (`models.generation`)."""

    place: int = 0  #: of the token in its text
    seed: int = 0  #: of the text's draws
    temperature: float = 0.0  #: 0 takes the likeliest token
    #: Bounds of the drawable tokens: number, joint probability, and least probability relative to the likeliest token.
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class PlainShape:
    """A request's shape on the wire: plain numbers; `InputSpec.shape_of` is the inverse."""

    sizes: tuple[int, ...]  #: of each item
    want: Want = "task"
    mask_rows: tuple[int, ...] = ()  #: rows that the task answers for, in the concatenation of all items
    session_rows: int = 0  #: capacity of the request's session, 0 without a session
    added: bool = False  #: the session's run brings a row that is added to each token's embedding

    @property
    def size(self) -> int:
        """Return the size of all items together."""
        return sum(self.sizes)

    def plain(self) -> PlainShape:
        """Return the shape itself."""
        return self


class RequestShape(Hashable, Protocol):
    """The properties of a request that its Program depends on; equal and hashable by value.

    A request is a batch of items. The unit of an item's size (tokens, rows, images) is the family's.
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
        """Return the capacity of the request's session in rows, 0 without a session."""

    @property
    def new_rows(self) -> int:
        """Return the number of rows that the run adds to its session, 0 without a session."""

    @property
    def mask_positions(self) -> tuple[tuple[int, int], ...]:
        """Return (item, place in it) of each mark that the task answers for, in order."""

    def with_want(self, want: Want) -> Self:
        """Return the same items with another want."""

    def decode_step(self, rows: int, begins: bool = False, added: bool = False) -> Self:
        """Return the run of a number of rows in the same session; raises ValueError without a session.

        begins: it is the first run. added: it brings a row for each token's embedding.
        """

    def answering(self, rows: int) -> Self:
        """Return the same run of a session, answering for its last rows; raises ValueError without a session."""

    def concatenate(self, others: Sequence[Self]) -> Self:
        """Return the batch of these items and then others of the same want."""

    def slice_items(self, first: int, stop: int) -> tuple[Self, slice]:
        """Return the shape of some items, and their slice of the inputs; raises ValueError in a session."""

    def plain(self) -> PlainShape:
        """Return the shape for the wire; `InputSpec.shape_of` is the inverse."""


class InputSpec(Protocol):
    """The inputs of a model's requests, and how they are packed."""

    @property
    def upper_bound(self) -> int:
        """Return the exclusive upper bound of all values of the input."""

    def shape(self, size: int | None = None, /) -> RequestShape:
        """Return a representative request of one item: of a size if the family has several, else the largest."""

    def shape_of(self, plain: PlainShape) -> RequestShape:
        """Return the shape of its plain form; raises ValueError if no request of the model has it."""

    def program_shape(self, shape: Any, /) -> RequestShape:
        """Return the shape under which Programs are built for this shape: runs of sessions share Programs."""

    def input_layout(self, shape: RequestShape) -> tuple[tuple[int, ...], Literal["i32", "u8"]]:
        """Return shape and dtype of a request's input."""


class Spec(Hashable, Protocol):
    """A model's spec: plain numbers, no weights; equal and hashable by value.

    A family with other numbers than a transformer names its own class in `SPEC`.
    """

    @property
    def family(self) -> str:
        """Return the key of `models.FAMILIES`."""

    @property
    def architecture(self) -> str:
        """Return the name in config.json's `architectures`."""

    @property
    def head(self) -> TaskHead:
        """Return the ops after the last layer."""

    @property
    def input_spec(self) -> InputSpec:
        """Return the description of a request's input."""

    def output_shape(self, shape: RequestShape) -> tuple[int, int]:
        """Return the shape of the answer."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for msgpack or JSON, with the key `family`."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the spec that `to_dict` described; raises KeyError or TypeError on other data."""


@dataclass(frozen=True, slots=True)
class Projection:
    """A dense layer after the pooling."""

    path: str  #: folder of the model with its weights
    inputs: int
    outputs: int
    bias: bool = True
    activation: HeadActivation | None = None


@dataclass(frozen=True, slots=True)
class TaskHead:
    """The ops after the last layer."""

    task: Task
    #: Rows of the final hidden states [m, h] that the task reads: each sequence's mean (its sum over the root of its
    #: length; weighted by place), maximum of each column, first row (cls), last row, rows at mask tokens, or all rows
    #: (none); of a picture also the mean of its patches, alone or after the first row.
    pooling: Pooling
    normalize: bool = False
    pooler: bool = False  #: a dense layer after cls
    outputs: int = 0  #: columns of the logits, 0 without logits
    labels: tuple[str, ...] = ()  #: names of the outputs, for readers of answers; not on the wire
    #: Of the dense layer before the last one: the pooler's, or that before the vocabulary.
    activation: HeadActivation = "tanh"
    tied: bool = False  #: the token embeddings are the matrix of the logits too, unless the checkpoint has one
    projections: tuple[Projection, ...] = ()  #: dense layers after the pooling
    logits_scaling: float = 1.0  #: divides the logits of tokens
    square: int = 0  #: side of the square of patches that becomes one row of a picture: concatenated, or their mean

    def columns(self, hidden: int) -> int:
        """Return the columns of the task's output, given those of the hidden states."""
        return self.outputs or (self.projections[-1].outputs if self.projections else hidden)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data without the labels; `from_dict` is the inverse, except for labels."""
        data = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "labels"}
        return data | {"projections": [asdict(projection) for projection in self.projections]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TaskHead:
        """Return the head that `to_dict` described; raises TypeError on other data."""
        values = {name: value for name, value in data.items() if name != "labels"}
        return cls(**values | {"projections": tuple(Projection(**one) for one in data.get("projections", ()))})
