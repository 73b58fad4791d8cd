"""What the register tiles over narrow weights are made of, by kind; see `narrow_tile`."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from llvmlite import ir

from hepti_mqtt.kernels.machine.isa import DOT, TILE, Dot, Tile, isa

Kind = Literal["f16", "w8a8", "w8a32"]

GROUP: Final = 4  # bytes of a row that one step of an int8 dot product takes

# Every CPU of these sets converts half precision in one instruction; elsewhere LLVM would call a library function that
# Numba does not link.
HALF_IN_HARDWARE: Final = isa() in ("avx512", "avx2", "neon")


class Form(NamedTuple):
    """What a kind of tile is made of: its size, the type of its sums, bytes of a panel's vector and of a step's row."""

    kind: Kind
    lanes: int
    rows: int
    vectors: int
    sums: ir.Type
    vector_bytes: int
    fma: bool
    dot: Dot
    half_in_hardware: bool
    steps: int = 0  # as in `Tile`

    @property
    def width(self) -> int:
        """Return the columns of one panel."""
        return self.lanes * self.vectors


def form(kind: Kind, tile: Tile = TILE, dot: Dot = DOT, half_in_hardware: bool = HALF_IN_HARDWARE) -> Form:
    """Return the form of a kind on a register tile."""
    if kind == "w8a8":
        size, steps = GROUP * dot.lanes, tile.steps if dot.intrinsic else 0
        return Form(
            kind, dot.lanes, dot.rows, dot.vectors, ir.IntType(32), size, tile.fma, dot, half_in_hardware, steps
        )
    size = 2 if kind == "f16" else 1
    nbytes = size * tile.lanes
    return Form(
        kind, tile.lanes, tile.rows, tile.vectors, ir.FloatType(), nbytes, tile.fma, dot, half_in_hardware, tile.steps
    )


FORMS: Final = {kind: form(kind) for kind in ("f16", "w8a32", "w8a8")}
