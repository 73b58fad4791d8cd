"""What every `linear` does to a tile of sums while it is in the first-level cache: scale, activation, residual."""

from __future__ import annotations

from typing import Any, Final

from hepti_mqtt.kernels import elementary
from hepti_mqtt.kernels.base import Check
from hepti_mqtt.kernels.elementary import ONE
from hepti_mqtt.kernels.jit import helper
from hepti_mqtt.kernels.memory import floats

ACTIVATIONS: Final = (None, "gelu", "gelu_tanh", "relu", "tanh", "silu", "silu_gate")
NONE, GELU, GELU_TANH, RELU, TANH, SILU, SILU_GATE = range(7)

_gelu, _gelu_tanh, _relu, _tanh = elementary.gelu, elementary.gelu_tanh, elementary.relu, elementary.tanh
_silu = elementary.silu


def activation_of(check: Check, name: str | None, gated: bool = False) -> int:
    """Return the place of an activation in `ACTIVATIONS`; ValueError if it is none, or a gate where none is."""
    choice = ACTIVATIONS if gated else ACTIVATIONS[:SILU_GATE]
    check.that(name in choice, f"activation {name!r} is not in {choice}")
    return ACTIVATIONS.index(name)


@helper
def activate(tile: Any, gate: Any, activation: int, scale: Any) -> None:
    """Replace tile by the activation of scale times tile; SILU_GATE reads gate, of the same size, the others do not."""
    if scale != ONE:
        for i in range(tile.size):
            tile[i] *= scale
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
    elif activation == SILU:
        for i in range(tile.size):
            tile[i] = _silu(tile[i])
    elif activation == SILU_GATE:
        for i in range(tile.size):
            tile[i] = _silu(gate[i] * scale) * tile[i]


@helper
def store(
    tile: Any, stride: int, row: int, rows: int, out: Any, at: int, residual: Any, column: int, valid: int
) -> None:
    """Copy `valid` columns of tile [rows, stride] to out[row :, at :]; add residual[row :, column :] if column >= 0.

    Rows are taken by address: an index that might be negative, for all that Numba knows, made every store a scatter.
    """
    for i in range(rows):
        sums = floats(tile.ctypes.data + 4 * i * stride, valid)
        target = floats(out.ctypes.data + 4 * ((row + i) * out.shape[1] + at), valid)
        if column >= 0:
            added = floats(residual.ctypes.data + 4 * ((row + i) * residual.shape[1] + column), valid)
            for j in range(valid):
                target[j] = sums[j] + added[j]
        else:
            for j in range(valid):
                target[j] = sums[j]
