"""What every `linear` does to a tile of sums while it is in the first-level cache: activation, residual."""

from __future__ import annotations

from typing import Any, Final

from hepti_mqtt.kernels import elementary
from hepti_mqtt.kernels.base import Check
from hepti_mqtt.kernels.machine.addresses import fetch_to_read, fetch_to_write, floats
from hepti_mqtt.kernels.machine.jit import helper

ACTIVATIONS: Final = (None, "gelu", "gelu_tanh", "relu", "tanh", "relu6", "leaky_relu")
NONE, GELU, GELU_TANH, RELU, TANH, RELU6, LEAKY_RELU = range(7)

_LINE: Final = 16  # floats of a cache line

_gelu, _gelu_tanh, _relu, _tanh = elementary.gelu, elementary.gelu_tanh, elementary.relu, elementary.tanh
_relu6, _leaky_relu = elementary.relu6, elementary.leaky_relu


def activation_of(check: Check, name: str | None) -> int:
    """Return the place of an activation in `ACTIVATIONS`; ValueError if it is none."""
    check.that(name in ACTIVATIONS, f"activation {name!r} is not in {ACTIVATIONS}")
    return ACTIVATIONS.index(name)


@helper
def activate(tile: Any, activation: int) -> None:
    """Replace tile by its activation."""
    if activation == GELU:
        for i in range(tile.size):
            tile[i] = _gelu(tile[i])
    elif activation == GELU_TANH:
        for i in range(tile.size):
            tile[i] = _gelu_tanh(tile[i])
    elif activation == RELU:
        for i in range(tile.size):
            tile[i] = _relu(tile[i])
    elif activation == TANH:
        for i in range(tile.size):
            tile[i] = _tanh(tile[i])
    elif activation == RELU6:
        for i in range(tile.size):
            tile[i] = _relu6(tile[i])
    elif activation == LEAKY_RELU:
        for i in range(tile.size):
            tile[i] = _leaky_relu(tile[i])


@helper
def ask_for_rows(row: int, rows: int, out: Any, residual: Any, column: int, valid: int) -> None:
    """Ask for the memory that `store` will write and read, while the tile computes.

    Rows lie KB apart, so no hardware fetches the next one. Where rows do not begin with a cache line, the first line of
    a panel is the last one of the panel before.
    """
    for i in range(rows):
        for j in range(0, valid, _LINE):
            at = 4 * ((row + i) * out.shape[1] + column + min(j + _LINE, valid) - 1)
            fetch_to_write(out.ctypes.data + at)
            if residual.size > 0:
                fetch_to_read(residual.ctypes.data + at)


@helper
def store(tile: Any, stride: int, row: int, rows: int, out: Any, residual: Any, column: int, valid: int) -> None:
    """Copy `valid` columns of tile [rows, stride] to out[row :, column :], and add those of residual if it has any.

    Rows are taken by address: an index that might be negative, for all that Numba knows, made every store a scatter.
    """
    for i in range(rows):
        sums = floats(tile.ctypes.data + 4 * i * stride, valid)
        target = floats(out.ctypes.data + 4 * ((row + i) * out.shape[1] + column), valid)
        if residual.size > 0:
            added = floats(residual.ctypes.data + 4 * ((row + i) * residual.shape[1] + column), valid)
            for j in range(valid):
                target[j] = sums[j] + added[j]
        else:
            for j in range(valid):
                target[j] = sums[j]
