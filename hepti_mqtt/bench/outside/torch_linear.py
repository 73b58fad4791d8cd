"""A linear layer as eager PyTorch has it, or with its weights packed once into a library's own layout.

Eager PyTorch packs a matrix anew in each call. Packed, it is what `torch.compile` makes of a frozen model: oneDNN's
layout or MKL's, whichever is faster for the shape on this host, tried at the first call, which is not timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from hepti_mqtt.errors import ConfigError

Tensor = Any
_Compute = Callable[[Tensor], Tensor]
_TRIALS: Final = 5
_faster: dict[tuple[int, ...], str] = {}  # by rows and the shape of the matrix


class Linear:
    """x W + b, x always of the same number of rows; weight: [in, out]."""

    def __init__(self, weight: Any, bias: Any | None, *, packed: bool) -> None:
        self._weight = torch.from_numpy(np.ascontiguousarray(weight.T))
        self._bias = None if bias is None else torch.from_numpy(np.array(bias))
        self._compute: _Compute | None = None if packed else self._plain

    def __call__(self, x: Tensor) -> Tensor:
        """Return it for x [rows, in]."""
        if self._compute is None:
            self._compute = _packed(self._weight, self._bias, x)
            del self._weight  # held once
        return self._compute(x)

    def _plain(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


def _packed(weight: Tensor, bias: Tensor | None, x: Tensor) -> _Compute:
    shape = len(x), *weight.shape
    if shape not in _faster:
        forms = {name: pack(weight, bias, len(x)) for name, pack in _layouts().items()}
        times: dict[str, list[float]] = {name: [] for name in forms}
        for _ in range(_TRIALS):
            for name, compute in forms.items():
                begin = time.perf_counter()
                compute(x)
                times[name].append(time.perf_counter() - begin)
        _faster[shape] = min(times, key=lambda name: median(times[name]))
    return _layouts()[_faster[shape]](weight, bias, len(x))


def _layouts() -> Mapping[str, Callable[[Tensor, Tensor | None, int], _Compute]]:
    """Return the libraries that this PyTorch has; raises ConfigError if there is none."""
    found = {"oneDNN": (torch.backends.mkldnn, _by_onednn), "MKL": (torch.backends.mkl, _by_mkl)}
    if not (there := {name: pack for name, (library, pack) in found.items() if library.is_available()}):
        raise ConfigError("this PyTorch has neither oneDNN nor MKL: leave the baselines of packed weights out")
    return there


def _by_onednn(weight: Tensor, bias: Tensor | None, rows: int) -> _Compute:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _by_mkl(weight: Tensor, bias: Tensor | None, rows: int) -> _Compute:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)
    # Of the plain matrix it reads the shape alone while x has the rows that it was packed for.
    shape = torch.empty(1).expand(weight.shape)
    return lambda x: torch.ops.mkl._mkl_linear(x, packed, shape, bias, rows)
