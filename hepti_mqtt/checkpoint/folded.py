"""Stored tensors as the kernels want them: channels last, and the batch norm behind a convolution folded into it.

Both look at one stored row at a time, so that a model's weights are never held at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hepti_mqtt.models import TensorSource


class Stored(Protocol):
    """A tensor in a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return its shape."""

    @property
    def dtype(self) -> str:
        """Return the name of its dtype in safetensors."""

    @property
    def is_float(self) -> bool:
        """Return whether `read` can give its elements."""

    def read(self, start: int, stop: int, columns: int) -> npt.NDArray[Any]:
        """Return rows start..stop of the tensor as [rows, columns]: f16 as stored, other dtypes as f32."""


class Weights(Protocol):
    """An open file of tensors."""

    @property
    def stamps(self) -> Sequence[tuple[str, int, int]]:
        """Return path, size and modification time of each file that it is in."""

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """Return its tensors by name."""

    def close(self) -> None:
        """Close it; a second call does nothing."""


def folded(source: TensorSource, stored: Mapping[str, Stored], name: str) -> Stored:
    """Return the tensor `name` of a checkpoint as its source wants it."""
    if not source.channels_first and source.norm is None:
        return stored[name]
    return _Folded(source, stored, stored[name])


class _Folded:
    """A stored tensor that is changed at reading."""

    def __init__(self, source: TensorSource, stored: Mapping[str, Stored], tensor: Stored) -> None:
        self._source, self._stored, self._tensor = source, stored, tensor
        self.shape, self.is_float = tensor.shape, tensor.is_float
        self.dtype = tensor.dtype if source.norm is None else "F32"

    def read(self, start: int, stop: int, columns: int) -> npt.NDArray[Any]:
        """Return rows start..stop as [rows, columns], columns with the channels last."""
        source = self._source
        rows = self._tensor.read(start, stop, columns)
        if source.channels_first and source.transposed:
            rows = _channels_last(rows, source.channels_first)
        elif source.channels_first:  # stored [k, n]: rows are what has channels
            rows = _channels_last(self._tensor.read(0, self.shape[0], columns).T, source.channels_first).T[start:stop]
        if source.norm is None:
            return np.ascontiguousarray(rows)
        factor = self._vector(source.norm.weight) / np.sqrt(self._vector(source.norm.variance) + source.norm.eps)
        if len(source.shape) == 2:
            return np.ascontiguousarray(rows * factor[start:stop, None], np.float32)
        before = self._vector(source.before) if source.before else 0.0
        return np.ascontiguousarray(rows + (before - self._vector(source.norm.mean)) * factor, np.float32)

    def _vector(self, name: str) -> npt.NDArray[np.float64]:
        """Return a vector [n] of the norm, in double precision."""
        return np.asarray(self._stored[name].read(0, 1, self._stored[name].shape[0])[0], np.float64)


def _channels_last(rows: npt.NDArray[Any], first: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return rows [n, C ...] as [n, ... C]."""
    return np.moveaxis(rows.reshape(-1, *first), 1, -1).reshape(rows.shape)
