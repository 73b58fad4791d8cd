"""Functions of the NumPy references that several kernels share, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _gelu(x: Array) -> Array:
    return np.asarray(x * 0.5 * (1.0 + _erf(x / math.sqrt(2.0))))


def _gelu_tanh(x: Array) -> Array:
    return x * 0.5 * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS: Final[Mapping[str | None, Callable[[Array], Array]]] = {
    None: lambda x: x,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: np.where(x < 0, 0.0, x),
    "tanh": np.tanh,
    "relu6": lambda x: np.where(x < 0, 0.0, np.where(x > 6, 6.0, x)),
    "leaky_relu": lambda x: np.where(x < 0, 0.1 * x, x),
}


def layer_norm(x: Array, gamma: Array, beta: Array, eps: float) -> Array:
    """Return (x - mean) / sqrt(var + eps) * gamma + beta over the last axis."""
    x = x.astype(np.float64)
    mean = x.mean(axis=-1, keepdims=True)
    var = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    return np.asarray((x - mean) / np.sqrt(var + eps) * gamma + beta)
