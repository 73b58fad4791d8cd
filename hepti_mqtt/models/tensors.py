"""The tensors of a model: their places in a Hugging Face checkpoint, and references of Programs to them.

A tensor has a canonical name, the same in all families, and stored names, those of checkpoints. Matrices have the
orientation [in, out], as in `x @ W`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hepti_mqtt.core.plan import Range
from hepti_mqtt.core.program import Layout, WeightRef

EMBEDDING_TABLE: Final = "stem.word"  # the table of embeddings
LOGITS_MATRIX: Final = "head.decoder.weight"  # the matrix to the logits


@dataclass(frozen=True, slots=True)
class BatchNorm:
    """Stored names of a batch norm after a convolution: (x - mean) / sqrt(variance + eps) * weight + bias.

    Layer scale, a factor per channel, has a weight alone; its other names are empty.
    """

    weight: str
    bias: str = ""
    mean: str = ""
    variance: str = ""
    eps: float = 0.0

    @classmethod
    def under(cls, prefix: str, eps: float = 1e-5) -> BatchNorm:
        """Return PyTorch's names."""
        return cls(f"{prefix}.weight", f"{prefix}.bias", f"{prefix}.running_mean", f"{prefix}.running_var", eps)


@dataclass(frozen=True, slots=True)
class Resized:
    """Bicubic resizing of a table of positions: its rows after the first `kept` are a square grid."""

    #: Rows that are not part of the grid.
    kept: int
    #: Side of the stored grid.
    stored: int
    #: Side of the resized grid.
    side: int
    #: Widen the filter if the grid gets coarser (PyTorch's `antialias`).
    smooth: bool

    def rows(self, table: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Return the table [kept + stored^2, h] with the other grid: [kept + side^2, h]."""
        along = self._weights()  # [side, stored]
        grid = table[self.kept :].reshape(self.stored, self.stored, -1).astype(np.float64)
        resized = np.einsum("ya,xb,abh->yxh", along, along, grid, optimize=True)
        return np.concatenate([table[: self.kept], resized.reshape(self.side**2, -1)])

    def _weights(self) -> npt.NDArray[np.float64]:
        """Return the weight of each stored row in each new row, as in PyTorch's `interpolate`, [side, stored].

        Without `antialias` PyTorch uses another parameter of the filter, and repeats the border row.
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
    """A layer norm and a dense layer, applied to rows of a table on reading; stored names of their tensors."""

    #: Alternative names of the layer's matrix [out, in] and bias, and of the norm's weight and bias.
    matrix: tuple[str, ...]
    bias: tuple[str, ...]
    gamma: tuple[str, ...]
    beta: tuple[str, ...]
    #: Epsilon of the norm.
    eps: float

    def rows(self, table: npt.NDArray[Any], read: Callable[[tuple[str, ...]], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Return rows [n, in] of the table after norm and layer, [n, out]; read: return a tensor by its names."""
        x = table.astype(np.float64)
        x = x - x.mean(axis=1, keepdims=True)
        x = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + self.eps) * read(self.gamma) + read(self.beta)
        return np.asarray(x @ read(self.matrix).astype(np.float64).T + read(self.bias))


class Place(NamedTuple):
    """A tensor as a part of a stored tensor."""

    #: Name of the stored tensor.
    name: str
    #: Shape of the stored tensor.
    shape: tuple[int, ...]
    #: First row of the part; if the part has all rows, its first element in each row.
    first: int
    #: Distance between rows, or elements, of the part.
    step: int = 1
    #: The stored tensor is [matrices, in, out], so the part is read transposed.
    by_inputs: bool = False


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor of a model, its storage in a checkpoint, and the changes of its values on reading."""

    #: Canonical name.
    name: str
    #: (in, out) of a matrix, (rows, columns) of a table, or (n,) of a vector.
    shape: tuple[int, ...]
    #: Alternative stored names; the first that a checkpoint has is read. Without any name the tensor is zeros.
    stored: tuple[str, ...]
    #: Shape of the stored tensor: it has the elements of `shape` in the same order, or in that of the transpose if
    #: `transposed`.
    stored_shape: tuple[int, ...]
    #: Stored as [out, in].
    transposed: bool = False
    #: Layout in kernels.
    layout: Layout = "plain"
    #: Name in a checkpoint of `hepti model make`, if not the first of `stored`; tied tensors share it.
    created_name: str = ""
    #: Shape [C, ...] of a stored row of a convolution; on reading, its channels become the last dimension.
    channels_first: tuple[int, ...] = ()
    #: Batch norm that is folded in: it scales the rows of a matrix. A vector is the bias after the folding; its stored
    #: name is the norm's bias, or the convolution's bias if the norm has none.
    norm: BatchNorm | None = None
    #: Stored name of the convolution's bias before the norm, for such a vector.
    convolution_bias: str = ""
    #: Alternative names of a vector that multiplies the stored rows, or the elements of a vector.
    factor: tuple[str, ...] = ()
    #: Resizing of a table of positions.
    resized: Resized | None = None
    #: Layers that are applied to the rows of a table.
    projected: Projected | None = None
    #: Stored tensors that may have it as a part: the first one in a checkpoint is read, `model make` writes the first.
    places: tuple[Place, ...] = ()

    @property
    def primary_name(self) -> str:
        """Return the stored name in most checkpoints."""
        return self.created_name or self.stored[0]

    def factor_name(self, stored: Container[str]) -> str:
        """Return the name of the factor in a checkpoint; empty without a factor. stored: names in the checkpoint."""
        return chosen(self.factor, stored)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Return the rows and columns of the tensor as it is read from a checkpoint; a vector is one row."""
        rows, columns = (1, *self.shape)[-2:]
        return (columns, rows) if self.transposed else (rows, columns)

    def place_in(self, stored: Container[str]) -> Place | None:
        """Return the first place in a checkpoint, or the first of all if it has none; None without places."""
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
    """Return the first of alternative names in a checkpoint, or the first of all if it has none; empty for no name."""
    names = tuple(names)
    return next((name for name in names if name in stored), next(iter(names), ""))


def prefixed(prefixes: Iterable[str], *suffixes: str) -> tuple[str, ...]:
    """Return each prefix with every suffix."""
    return tuple(prefix + suffix for prefix in prefixes for suffix in suffixes)


def vector(name: str, stored: tuple[str, ...], n: int, stored_shape: tuple[int, ...] = ()) -> TensorSource:
    """Return the source of a vector (n,); stored_shape: if it begins with dimensions of 1."""
    return TensorSource(name, (n,), stored, stored_shape or (n,))


def table(name: str, stored: tuple[str, ...], rows: int, columns: int, leading: tuple[int, ...] = ()) -> TensorSource:
    """Return the source of a table [rows, columns] for look-ups of rows; leading: first dimensions, of 1, as stored."""
    return TensorSource(name, (rows, columns), stored, (*leading, rows, columns))


def weight(
    name: str, stored: tuple[str, ...], n_in: int, n_out: int, stored_shape: tuple[int, ...] = ()
) -> TensorSource:
    """Return the source of a matmul weight [in, out], stored as [out, in]."""
    return TensorSource(name, (n_in, n_out), stored, stored_shape or (n_out, n_in), transposed=True, layout="packed")


def dense(name: str, prefixes: Iterable[str], stored: str, n_in: int, n_out: int) -> tuple[TensorSource, ...]:
    """Return weight and bias of a dense layer; prefixes: alternatives before the stored name."""
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
    """Return weight and bias of a norm; they are called gamma and beta in checkpoints converted from TensorFlow."""
    prefixes = tuple(prefixes)
    gamma = vector(f"{name}.weight", prefixed(prefixes, f"{stored}.weight", f"{stored}.gamma"), n)
    beta = vector(f"{name}.bias", prefixed(prefixes, f"{stored}.bias", f"{stored}.beta"), n)
    return (gamma, beta) if bias else (gamma,)


def transposed(source: TensorSource) -> TensorSource:
    """Return a table [rows, columns] as a matrix [columns, rows], with the same stored tensor."""
    return replace(source, shape=source.shape[::-1], transposed=True, layout="packed")


def vector_ref(name: str, columns: Range) -> WeightRef:
    """Return a reference to a range of a vector."""
    return WeightRef(name, (0, 1), columns, "plain")


def whole_ref(source: TensorSource) -> WeightRef:
    """Return a reference to a whole tensor."""
    if len(source.shape) == 1:
        return vector_ref(source.name, (0, source.shape[0]))
    rows, columns = source.shape
    return WeightRef(source.name, (0, rows), (0, columns), source.layout)
