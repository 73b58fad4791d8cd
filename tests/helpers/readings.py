"""A small family with a request shape of its own: series of a sensor's readings, each asked about one of them.

One transformer layer over the readings of a series; the answer is the row of the reading that is asked about.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any, Final, Literal

import numpy as np

from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.core.spec import PlainShape, RequestShape, TaskHead, Want
from hepti_mqtt.lowering import roles
from hepti_mqtt.lowering.graph import GraphBuilder
from hepti_mqtt.models import plain
from hepti_mqtt.models.tensors import TensorSource, dense, norm, table
from hepti_mqtt.models.transformer import Layer, post_norm

FAMILY: Final = "readings"
ARCHITECTURES: Final[Mapping[str, Any]] = {"Readings": "embedding"}
KINDS: Final[Mapping[str, Any]] = {}
WIDTH, HEADS, MLP, EPS = 32, 4, 48, 1e-12
LEVELS, LONGEST = 50, 20  # values of a reading, and readings of all series of a request together

HEAD: Final = TaskHead("embedding", "cls")


@dataclass(frozen=True)
class Series:
    """Readings of each series, and which of its own readings each is asked about."""

    series: tuple[tuple[int, int], ...]
    want: Want = "task"

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(count for count, _ in self.series)

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def session_rows(self) -> int:
        return 0

    @property
    def new_rows(self) -> int:
        return 0

    @property
    def mask_positions(self) -> tuple[tuple[int, int], ...]:
        return tuple((item, place) for item, (_, place) in enumerate(self.series))

    @property
    def rows(self) -> tuple[int, ...]:
        """Return the row of each reading that is asked about."""
        starts = accumulate(self.sizes, initial=0)
        return tuple(start + place for start, (_, place) in zip(starts, self.series, strict=False))

    def with_want(self, want: Want) -> Series:
        return replace(self, want=want)

    def decode_step(self, rows: int, begins: bool = False) -> Series:
        raise ValueError("a series has no session")

    def concatenate(self, others: Sequence[Series]) -> Series:
        return replace(self, series=sum((other.series for other in others), self.series))

    def slice_items(self, first: int, stop: int) -> tuple[Series, slice]:
        ends = (0, *accumulate(self.sizes))
        return replace(self, series=self.series[first:stop]), slice(ends[first], ends[stop])

    def plain(self) -> PlainShape:
        return PlainShape(self.sizes, self.want, self.rows)


@dataclass(frozen=True)
class Reads:
    """A request brings i32 [m]: the readings of all series one behind the other."""

    upper_bound: int = LEVELS

    def shape(self, size: int | None = None) -> Series:
        return Series(((min(size or LONGEST, LONGEST), 0),))

    def program_shape(self, shape: Series) -> Series:
        """Return itself: there are no sessions."""
        return shape

    def shape_of(self, plain: PlainShape) -> Series:
        if len(plain.mask_rows) != len(plain.sizes):
            raise ValueError("one reading of each series is asked about")
        starts = accumulate(plain.sizes, initial=0)
        places = (mark - start for start, mark in zip(starts, plain.mask_rows, strict=False))
        series = Series(tuple(zip(plain.sizes, places, strict=True)), plain.want)
        if plain.session_rows or any(not 0 <= place < count for count, place in series.series):
            raise ValueError("one reading of each series is asked about, and nothing is kept")
        return series

    def input_layout(self, shape: RequestShape) -> tuple[tuple[int, ...], Literal["i32"]]:
        return (shape.size,), "i32"


@dataclass(frozen=True)
class ReadingsSpec:
    """The sizes are constants above; only the number of layers differs."""

    layers: int
    family: str = FAMILY
    architecture: str = "Readings"
    head: TaskHead = HEAD

    @property
    def input_spec(self) -> Reads:
        return Reads()

    def output_shape(self, shape: RequestShape) -> tuple[int, int]:
        return (shape.size if shape.want == "hidden" else len(shape.sizes)), WIDTH

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ReadingsSpec:
        return cls(**{**data, "head": replace(TaskHead.from_dict(data["head"]), labels=tuple(data["head"]["labels"]))})


SPEC: Final = ReadingsSpec


def tensors(spec: ReadingsSpec) -> Iterator[TensorSource]:
    """Yield the tables of the stem and the matrices of each layer."""
    yield table("stem.level", ("level",), LEVELS, WIDTH)
    yield table("stem.place", ("place",), LONGEST, WIDTH)
    yield from norm("stem.norm", ("",), "norm", WIDTH)
    for i in range(spec.layers):
        here = f"layers.{i}."
        for part in ("query", "key", "value", "attention_out"):
            yield from dense(f"{here}{part}", (here,), part, WIDTH, WIDTH)
        yield from dense(f"{here}mlp_up", (here,), "up", WIDTH, MLP)
        yield from dense(f"{here}mlp_down", (here,), "down", MLP, WIDTH)
        yield from norm(f"{here}attention_norm", (here,), "attention_norm", WIDTH)
        yield from norm(f"{here}mlp_norm", (here,), "mlp_norm", WIDTH)


def _layer(shape: Series) -> Layer:
    return Layer(WIDTH, HEADS, MLP, "gelu", EPS, shape.sizes)


def graph(net: GraphBuilder, spec: ReadingsSpec, shape: Series, refs: Mapping[str, WeightRef]) -> None:
    """Add the graph: readings i32 [m] -> the rows asked about [B, h], or all of them [m, h]."""
    ids = net.input("readings", (shape.size,), "i32")
    stem = [refs[f"stem.{part}"] for part in ("level", "place", "norm.weight", "norm.bias")]
    dims, what = (shape.size, WIDTH), {"lengths": shape.sizes, "position_offset": 0, "eps": EPS}
    what["parts"] = ("word", "position", "gamma", "beta")
    x = net.opaque("embedded", (ids,), roles.STEM, "embed_tokens", dims, stem, **what)
    for i in net.layers(spec.layers):
        net.begin_block()
        x = post_norm(net, f"{i}.", f"layers.{i}.", x, _layer(shape))
    net.begin_block()
    net.rows("rows", x, roles.TASK, None if shape.want == "hidden" else shape.rows)


def reference(
    spec: ReadingsSpec, t: plain.Tensors, readings: plain.Array, shape: Series
) -> tuple[plain.Array, plain.Array]:
    """Return all rows [m, h] and the answer, in plain NumPy."""
    x = plain.norm(t, "stem.norm", t["stem.level"][readings] + t["stem.place"][plain.token_positions(shape.sizes)], EPS)
    for i in range(spec.layers):
        x = plain.post_norm(t, f"layers.{i}.", x, _layer(shape))
    return x, x if shape.want == "hidden" else np.asarray(x[list(shape.rows)])
