"""The instruction set of this machine, and the register tile that follows from it."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Final, NamedTuple

import llvmlite.binding as llvm

OVERRIDE: Final = "HEPTI_KERNELS_ISA"


class Tile(NamedTuple):
    """Register tile of the matmul micro-kernel.

    lanes: f32 values of one vector register. rows: rows of the activation. vectors: vectors of the weight panel.
    fma: whether a fused multiply-add is one instruction. lane_broadcast: whether an instruction multiplies by one lane
    of a register, so that activations are loaded as vectors (NEON) and not broadcast one by one from memory (x86).
    """

    lanes: int
    rows: int
    vectors: int
    fma: bool
    lane_broadcast: bool

    @property
    def width(self) -> int:
        """Return NR, the columns of one weight panel."""
        return self.lanes * self.vectors


# rows * vectors accumulators, `vectors` of the panel and one activation must fit the registers: 32 (AVX-512, NEON)
# or 16 (AVX2, SSE); else they spill and the speed halves. Of the tiles that fit, a wide one needs the fewest loads and
# leaves the compiler the fewest broadcasts to move: AVX-512 at 12 x 2 spilled, and had 0.68 of the peak of 6 x 4.
TILES: Final[Mapping[str, Tile]] = {
    "avx512": Tile(lanes=16, rows=6, vectors=4, fma=True, lane_broadcast=False),
    "avx2": Tile(lanes=8, rows=6, vectors=2, fma=True, lane_broadcast=False),
    "sse": Tile(lanes=4, rows=6, vectors=2, fma=False, lane_broadcast=False),
    "neon": Tile(lanes=4, rows=8, vectors=2, fma=True, lane_broadcast=True),
    "generic": Tile(lanes=4, rows=4, vectors=2, fma=False, lane_broadcast=False),
}


def isa() -> str:
    """Return the instruction set that the kernels use: a key of `TILES`.

    The environment variable HEPTI_KERNELS_ISA overrides it (for tests); raises ValueError if it names no tile.
    """
    chosen = os.environ.get(OVERRIDE)
    if chosen:
        if chosen not in TILES:
            raise ValueError(
                f"{OVERRIDE}={chosen!r} is not an instruction set of the kernels; use one of {list(TILES)}"
            )
        return chosen
    machine = platform.machine().lower()
    if machine in ("aarch64", "arm64"):
        return "neon"
    if machine not in ("x86_64", "amd64"):
        return "generic"
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        return "avx512"
    return "avx2" if features.get("avx2") and features.get("fma") else "sse"


TILE: Final = TILES[isa()]
