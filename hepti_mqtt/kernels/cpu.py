"""The instruction set of this machine, and the register tile that follows from it."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import llvmlite.binding as llvm
import numba
from hepti_mqtt.errors import ConfigError

OVERRIDE: Final = "HEPTI_KERNELS_ISA"
DOT_OVERRIDE: Final = "HEPTI_KERNELS_DOT"

# getauxval's AT_HWCAP, and the bit in it that Linux calls asimddp (arch/arm64/include/uapi/asm/hwcap.h).
_AT_HWCAP: Final = 16
_HWCAP_ASIMDDP: Final = 1 << 20


class Tile(NamedTuple):
    """Register tile of the matmul micro-kernel.

    lanes: f32 values of one vector register. rows: rows of the activation. vectors: vectors of the weight panel.
    fma: whether a fused multiply-add is one instruction. lane_broadcast: whether an instruction multiplies by one lane
    of a register, so that activations are loaded as vectors (NEON) and not broadcast one by one from memory (x86).
    panel: vectors of a panel of which the tile takes only some, or of each of several that it takes, else 0. steps: of
    k in one turn of the loop of a tile that has all its vectors; 0 as many as the compiler likes. depth: rows of a
    panel that all tiles use before they go on to the next ones.
    """

    lanes: int
    rows: int
    vectors: int
    fma: bool
    lane_broadcast: bool
    panel: int = 0
    steps: int = 0
    depth: int = 512

    @property
    def width(self) -> int:
        """Return NR, the columns of one weight panel."""
        return self.lanes * (self.panel or self.vectors)

    def sizes(self) -> list[tuple[int, int]]:
        """Return the (rows, vectors) of all tiles."""
        return [(rows, vectors) for vectors in range(1, self.vectors + 1) for rows in range(1, self.rows + 1)]


# rows * vectors accumulators, `vectors` of the panel and one activation must fit the registers: 32 (AVX-512, NEON)
# or 16 (AVX2, SSE); else they spill and the speed halves. Of the tiles that fit, a wide one needs the fewest loads and
# leaves the compiler the fewest broadcasts to move: AVX-512 at 12 x 2 spilled, and had 0.68 of the peak of 6 x 4.
# Intel adds counters and addresses in the pipelines that multiply: of a loop of one step it is a tenth of the peak.
TILES: Final[Mapping[str, Tile]] = {
    "avx512": Tile(lanes=16, rows=6, vectors=4, fma=True, lane_broadcast=False, steps=4, depth=1024),
    "avx2": Tile(lanes=8, rows=6, vectors=2, fma=True, lane_broadcast=False, steps=4, depth=1024),
    "sse": Tile(lanes=4, rows=6, vectors=2, fma=False, lane_broadcast=False),
    "neon": Tile(lanes=4, rows=8, vectors=2, fma=True, lane_broadcast=True),
    "generic": Tile(lanes=4, rows=4, vectors=2, fma=False, lane_broadcast=False),
}


class Dot(NamedTuple):
    """Register tile of the int8 micro-kernel, whose step adds four products of bytes to each i32 of a vector.

    lanes: i32 sums of one vector register. rows, vectors: as in `Tile`. intrinsic: LLVM function of the instruction, or
    "" where there is none (widened to i32, multiplied and added). signed: whether it takes activations as s8 (NEON) or
    as u8 (x86); weights are s8. needs: the set of `TILES` and the CPU feature that it goes with, or "". enables: what
    LLVM must be given as a feature where it does not detect it.
    """

    lanes: int
    rows: int
    vectors: int
    intrinsic: str
    signed: bool
    needs: tuple[str, str]
    enables: str = ""

    @property
    def width(self) -> int:
        """Return the columns of one weight panel."""
        return self.lanes * self.vectors


# The first one that the CPU has is used.
DOTS: Final[Mapping[str, Dot]] = {
    "avx512vnni": Dot(16, 6, 4, "llvm.x86.avx512.vpdpbusd.512", False, ("avx512", "avx512vnni")),
    "avxvnni": Dot(8, 6, 2, "llvm.x86.avx512.vpdpbusd.256", False, ("avx2", "avxvnni")),
    "dotprod": Dot(4, 8, 2, "llvm.aarch64.neon.sdot.v4i32.v16i8", True, ("neon", "dotprod"), "+dotprod"),
    "plain": Dot(4, 2, 2, "", False, ("", "")),
}


def isa() -> str:
    """Return the instruction set that the kernels use: a key of `TILES`.

    The environment variable HEPTI_KERNELS_ISA overrides it (for tests). One that names none counts as unset here, where
    modules are imported: `require_known` is asked before any kernel is loaded.
    """
    chosen = os.environ.get(OVERRIDE)
    return chosen if chosen and chosen in TILES else _own()


def architecture() -> str:
    """Return what this process is compiled for, as LLVM names it: x86_64, aarch64, ...

    `platform.machine` is what the kernel says, which under a 32-bit personality (`setarch`, some containers) is a
    32-bit machine for a 64-bit process too.
    """
    name: str = llvm.get_process_triple().partition("-")[0].lower()
    return {"arm64": "aarch64", "amd64": "x86_64"}.get(name, name)


def _own() -> str:
    if architecture() == "aarch64":
        return "neon"
    if architecture() != "x86_64":
        return "generic"
    features = _features()
    if features.get("avx512f"):
        return "avx512"
    return "avx2" if features.get("avx2") and features.get("fma") else "sse"


def _features() -> dict[str, bool]:
    """Return what the CPU has that Numba compiles for: this one, unless NUMBA_CPU_NAME or NUMBA_CPU_FEATURES say other.

    What a name alone implies is not known here: a smaller tile than might be is right, a larger one ends the process.
    """
    listed: str | None = getattr(numba.config, "CPU_FEATURES", None)  # "" for the CPU called generic
    if listed is None:
        return dict(llvm.get_host_cpu_features())
    return {word[1:]: word[0] == "+" for word in filter(None, map(str.strip, listed.split(",")))}


def dot() -> str:
    """Return how int8 products are added: a key of `DOTS`.

    The environment variable HEPTI_KERNELS_DOT overrides it (for tests), as HEPTI_KERNELS_ISA does the other.
    """
    if (chosen := os.environ.get(DOT_OVERRIDE)) in DOTS:
        return str(chosen)
    return _dots()[0]


def _dots() -> list[str]:
    """Return the int8 tiles that can be compiled, the best one first."""
    features = {**_features(), "": True}
    features["dotprod"] = features.get("dotprod", False) or _has_sdot()
    return [name for name, d in DOTS.items() if d.needs[0] in (isa(), "") and features.get(d.needs[1])]


def require_known() -> None:
    """Raise ConfigError if the environment forces an unknown instruction set or int8 tile, or one that this CPU lacks.

    LLVM ends the process where code names a register or an instruction that the CPU lacks.
    """
    if (chosen := os.environ.get(OVERRIDE)) and chosen not in TILES:
        raise ConfigError(f"{OVERRIDE}={chosen!r} is not an instruction set of the kernels; use one of {list(TILES)}")
    if chosen and TILES[chosen].lanes > TILES[_own()].lanes:
        raise ConfigError(f"{OVERRIDE}={chosen!r} has wider vectors than this CPU, which has {_own()}; unset it")
    if (chosen := os.environ.get(DOT_OVERRIDE)) and chosen not in DOTS:
        raise ConfigError(f"{DOT_OVERRIDE}={chosen!r} is no int8 tile of the kernels; use one of {list(DOTS)}")
    if chosen and chosen not in _dots():
        raise ConfigError(f"{DOT_OVERRIDE}={chosen!r} is an int8 tile that {isa()} has not here; use one of {_dots()}")


def cpu_model() -> str:
    """Return the name of the CPU, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model", "Hardware"):
                return f"{architecture()} {value.strip()}"
    except OSError:
        pass
    return f"{architecture()} {platform.processor()}"


def _has_sdot() -> bool:
    """Return whether Linux says that this ARM CPU has byte dot products.

    LLVM (22) does not list them among the features of the host, not even of a CPU that it knows by name.
    """
    return sys.platform == "linux" and architecture() == "aarch64" and bool(_hwcap() & _HWCAP_ASIMDDP)


def _hwcap() -> int:
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    return int(getauxval(_AT_HWCAP))


# Every CPU of these sets converts half precision in one instruction. Elsewhere LLVM would call a library function that
# Numba does not link.
HALF_IN_HARDWARE: Final = isa() in ("avx512", "avx2", "neon")
TILE: Final = TILES[isa()]
DOT: Final = DOTS[dot()]
