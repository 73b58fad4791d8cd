"""Where each tensor of a model stands in a Hugging Face checkpoint, and how a Program refers to it.

Canonical names are the same for all families; matrices are in [in, out] orientation, as `x @ W` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hepti_mqtt.core.plan import Range
from hepti_mqtt.core.program import Layout, WeightRef

WORDS: Final = "stem.word"  # the table of embeddings
HEAD: Final = "head.decoder.weight"  # the matrix to the logits


@dataclass(frozen=True, slots=True)
class BatchNorm:
    """A batch norm after a convolution: (x - mean) / sqrt(variance + eps) * weight + bias; names in a checkpoint.

    Of a mere factor of each channel (layer scale) there is weight alone: all other names are empty.
    """

    weight: str
    bias: str = ""
    mean: str = ""
    variance: str = ""
    eps: float = 0.0

    @classmethod
    def under(cls, prefix: str, eps: float = 1e-5) -> BatchNorm:
        """Return the names that PyTorch gives it."""
        return cls(f"{prefix}.weight", f"{prefix}.bias", f"{prefix}.running_mean", f"{prefix}.running_var", eps)


@dataclass(frozen=True, slots=True)
class Resized:
    """A table of `kept` rows and then those of a square grid, which becomes one of another size, bicubic.

    stored, side: of the grid before and then. smooth: the filter is as much wider as the new grid is coarser.
    """

    kept: int
    stored: int
    side: int
    smooth: bool

    def rows(self, table: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Return the table [kept + stored^2, h] with the other grid: [kept + side^2, h]."""
        along = self._weights()  # [side, stored]
        grid = table[self.kept :].reshape(self.stored, self.stored, -1).astype(np.float64)
        resized = np.einsum("ya,xb,abh->yxh", along, along, grid, optimize=True)
        return np.concatenate([table[: self.kept], resized.reshape(self.side**2, -1)])

    def _weights(self) -> npt.NDArray[np.float64]:
        """Return what each stored row adds to each new one, as PyTorch's `interpolate` has it with `antialias` or not.

        Without it the filter's parameter is another one, and beyond the border the last row stands.
        """
        ratio = self.stored / self.side
        wide, a = (max(ratio, 1.0), -0.5) if self.smooth else (1.0, -0.75)
        centre = (np.arange(self.side) + 0.5) * ratio - 0.5
        beyond = int(2 * wide) + 2
        places = np.arange(-beyond, self.stored + beyond)
        t = np.abs(places - centre[:, None]) / wide
        near = ((a + 2) * t - (a + 3)) * t * t + 1
        far = ((a * t - 5 * a) * t + 8 * a) * t - 4 * a
        values = np.where(t <= 1, near, np.where(t < 2, far, 0.0))
        inside = values[:, beyond:-beyond].copy()
        if not self.smooth:
            inside[:, 0] += values[:, :beyond].sum(axis=1)
            inside[:, -1] += values[:, -beyond:].sum(axis=1)
        return np.asarray(inside / inside.sum(axis=1, keepdims=True))


@dataclass(frozen=True, slots=True)
class Projected:
    """A layer norm and a dense layer through which rows of a table go when they are read.

    All are alternative names in a checkpoint. matrix: [out, in].
    """

    matrix: tuple[str, ...]
    bias: tuple[str, ...]
    gamma: tuple[str, ...]
    beta: tuple[str, ...]
    eps: float

    def rows(self, table: npt.NDArray[Any], read: Callable[[tuple[str, ...]], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Return rows [n, in] of the table after norm and layer, [n, out]; read: returns a tensor by names."""
        x = table.astype(np.float64)
        x = x - x.mean(axis=1, keepdims=True)
        x = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + self.eps) * read(self.gamma) + read(self.beta)
        return np.asarray(x @ read(self.matrix).astype(np.float64).T + read(self.bias))


class Place(NamedTuple):
    """Where a checkpoint may store a tensor as a part of another one."""

    name: str
    #: Shape of the whole stored tensor.
    shape: tuple[int, ...]
    #: First row of the part, or first element of a row where it has all rows.
    first: int
    #: Distance between rows or elements of the part.
    step: int = 1
    #: The stored rows are the inputs of matrices, [matrices, in, out].
    by_inputs: bool = False


@dataclass(frozen=True, slots=True)
class TensorSource:
    """One tensor: its canonical name and shape, and how a checkpoint stores it.

    shape: (in, out), (rows, columns) of a table, or (n,). stored: alternative names in a checkpoint; the
    first one counts; zeros without a name. stored_shape: as the checkpoint has it, with `shape`'s elements in the
    same order, or in the order of its transpose where `transposed` ([out, in]). layout: how kernels use it.
    created_name: the name in a new checkpoint where that is not the first; two tensors that are tied have one.
    channels_first: of a stored row, what it is there, [C, ...], while its channels come last here. norm: folded in at
    reading, as a factor of each stored row, or, of a vector, which is then stored as the norm's bias, with what the
    norm does to `convolution_bias`, if anything. factor: alternative names of a vector by which each stored row, or
    element, is multiplied. resized, projected: what becomes of its rows.
    """

    name: str
    shape: tuple[int, ...]
    stored: tuple[str, ...]
    stored_shape: tuple[int, ...]
    transposed: bool = False
    layout: Layout = "plain"
    created_name: str = ""
    channels_first: tuple[int, ...] = ()
    norm: BatchNorm | None = None
    convolution_bias: str = ""
    factor: tuple[str, ...] = ()
    resized: Resized | None = None
    projected: Projected | None = None
    #: Parts of other tensors that it may be, in the order of preference; the first one is what `model make` writes.
    places: tuple[Place, ...] = ()

    @property
    def primary_name(self) -> str:
        """Return the name that most checkpoints have for it."""
        return self.created_name or self.stored[0]

    def factor_name(self, stored: Container[str]) -> str:
        """Return the factor's name among those of a checkpoint; empty without a factor."""
        return chosen(self.factor, stored)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Return the rows and columns of the tensor as it is read from a checkpoint; a vector is one row."""
        rows, columns = (1, *self.shape)[-2:]
        return (columns, rows) if self.transposed else (rows, columns)

    def place_in(self, stored: Container[str]) -> Place | None:
        """Return the place that a checkpoint has, else the first; None for a tensor without places."""
        return next((place for place in self.places if place.name in stored), next(iter(self.places), None))

    def folded_shapes(self, stored: Container[str] = ()) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the other stored tensors that are folded into it; stored: names in the checkpoint."""
        names = [self.factor_name(stored), self.convolution_bias]
        if self.norm is not None:
            names += [self.norm.weight, self.norm.mean, self.norm.variance]
        shapes = {name: self.stored_shape[:1] for name in names if name}
        if (layer := self.projected) is not None:
            width, columns = self.stored_shape[1], self.shape[1]
            sizes = {
                layer.matrix: (columns, width),
                layer.bias: (columns,),
                layer.gamma: (width,),
                layer.beta: (width,),
            }
            shapes |= {chosen(names, stored): size for names, size in sizes.items()}
        return shapes


def chosen(names: Iterable[str], stored: Container[str]) -> str:
    """Return the first of alternative names that a checkpoint has, or else the first; empty without any."""
    names = tuple(names)
    return next((name for name in names if name in stored), next(iter(names), ""))


def prefixed(prefixes: Iterable[str], *suffixes: str) -> tuple[str, ...]:
    """Return every prefix with every suffix."""
    return tuple(prefix + suffix for prefix in prefixes for suffix in suffixes)


def vector(name: str, stored: tuple[str, ...], n: int, stored_shape: tuple[int, ...] = ()) -> TensorSource:
    """Return the source of a vector (n,); `stored_shape` where it has dimensions of 1 in front."""
    return TensorSource(name, (n,), stored, stored_shape or (n,))


def table(name: str, stored: tuple[str, ...], rows: int, columns: int, leading: tuple[int, ...] = ()) -> TensorSource:
    """Return the source of a table [rows, columns] for look-ups of rows."""
    return TensorSource(name, (rows, columns), stored, (*leading, rows, columns))


def weight(
    name: str, stored: tuple[str, ...], n_in: int, n_out: int, stored_shape: tuple[int, ...] = ()
) -> TensorSource:
    """Return the source of a matmul weight [in, out], stored as [out, in]."""
    return TensorSource(name, (n_in, n_out), stored, stored_shape or (n_out, n_in), transposed=True, layout="packed")


def dense(name: str, prefixes: Iterable[str], stored: str, n_in: int, n_out: int) -> tuple[TensorSource, ...]:
    """Return weight and bias of a dense layer."""
    prefixes = tuple(prefixes)
    return (
        weight(f"{name}.weight", prefixed(prefixes, f"{stored}.weight"), n_in, n_out),
        vector(f"{name}.bias", prefixed(prefixes, f"{stored}.bias"), n_out),
    )


def zeros(name: str, n: int) -> TensorSource:
    """Return the source of a vector (n,) of zeros, which no checkpoint stores."""
    return TensorSource(name, (n,), (), (n,))


def conv1d(name: str, prefixes: Iterable[str], stored: str, n_in: int, n_out: int) -> tuple[TensorSource, ...]:
    """Return weight and bias of GPT-2's dense layer, which is stored as [in, out]."""
    prefixes = tuple(prefixes)
    places = prefixed(prefixes, f"{stored}.weight")
    return (
        TensorSource(f"{name}.weight", (n_in, n_out), places, (n_in, n_out), layout="packed"),
        vector(f"{name}.bias", prefixed(prefixes, f"{stored}.bias"), n_out),
    )


def fused(source: TensorSource, first: int, rows: int) -> TensorSource:
    """Return the source as a part of a stored tensor, from row or element `first` on."""
    shape = (rows, *source.stored_shape[1:])
    places = tuple(Place(name, shape, first) for name in source.stored)
    return replace(source, places=places, stored_shape=shape)


def norm(name: str, prefixes: Iterable[str], stored: str, n: int, bias: bool = True) -> tuple[TensorSource, ...]:
    """Return weight and bias of a layer norm; checkpoints converted from TensorFlow say gamma and beta."""
    prefixes = tuple(prefixes)
    gamma = vector(f"{name}.weight", prefixed(prefixes, f"{stored}.weight", f"{stored}.gamma"), n)
    beta = vector(f"{name}.bias", prefixed(prefixes, f"{stored}.bias", f"{stored}.beta"), n)
    return (gamma, beta) if bias else (gamma,)


def transposed(source: TensorSource) -> TensorSource:
    """Return a table [rows, columns] as a matrix [columns, rows]; it is stored alike."""
    return replace(source, shape=source.shape[::-1], transposed=True, layout="packed")


def vector_ref(name: str, columns: Range) -> WeightRef:
    """Return a reference to a range of a vector."""
    return WeightRef(name, (0, 1), columns, "plain")


def whole_ref(source: TensorSource) -> WeightRef:
    """Return a reference to all of a tensor, in the layout that kernels read it in."""
    if len(source.shape) == 1:
        return vector_ref(source.name, (0, source.shape[0]))
    rows, columns = source.shape
    return WeightRef(source.name, (0, rows), (0, columns), source.layout)
