"""The instruction set of this machine, and its register tiles."""

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

from hepti_mqtt.core.errors import ConfigError

OVERRIDE: Final = "HEPTI_KERNELS_ISA"
DOT_OVERRIDE: Final = "HEPTI_KERNELS_DOT"

# getauxval's AT_HWCAP, and the bit in it that Linux calls asimddp (arch/arm64/include/uapi/asm/hwcap.h).
_AT_HWCAP: Final = 16
_HWCAP_ASIMDDP: Final = 1 << 20


class Tile(NamedTuple):
    """Register tile of the matmul micro-kernel."""

    #: f32 values of one vector register
    lanes: int
    #: rows of the activation
    rows: int
    #: vectors of the weight panel
    vectors: int
    #: whether a fused multiply-add is one instruction
    fma: bool
    #: whether an instruction multiplies by one lane of a register: activations are then loaded as vectors (NEON), else
    #: broadcast one by one from memory (x86)
    lane_broadcast: bool
    #: vectors of a panel, if the tile takes only some of them or several panels; else 0
    panel: int = 0
    #: steps of k in one turn of the loop of a tile with all its vectors; 0: the compiler chooses
    steps: int = 0
    #: rows of a panel that all tiles use before the next ones
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
    """Register tile of the int8 micro-kernel; a step adds four products of bytes to each i32 of a vector."""

    #: i32 sums of one vector register
    lanes: int
    rows: int
    vectors: int
    #: LLVM function of the instruction; "" without one (bytes are widened to i32, multiplied and added)
    intrinsic: str
    #: whether activations are s8 (NEON) or u8 (x86); weights are s8
    signed: bool
    #: the set of `TILES` and the CPU feature, or ""
    needs: tuple[str, str]
    #: a feature that LLVM does not detect
    enables: str = ""

    @property
    def width(self) -> int:
        """Return the columns of one weight panel."""
        return self.lanes * self.vectors


# The first supported one is used.
DOTS: Final[Mapping[str, Dot]] = {
    "avx512vnni": Dot(16, 6, 4, "llvm.x86.avx512.vpdpbusd.512", False, ("avx512", "avx512vnni")),
    "avxvnni": Dot(8, 6, 2, "llvm.x86.avx512.vpdpbusd.256", False, ("avx2", "avxvnni")),
    "dotprod": Dot(4, 8, 2, "llvm.aarch64.neon.sdot.v4i32.v16i8", True, ("neon", "dotprod"), "+dotprod"),
    "plain": Dot(4, 2, 2, "", False, ("", "")),
}


def isa() -> str:
    """Return the instruction set that the kernels use: a key of `TILES`.

    The environment variable HEPTI_KERNELS_ISA overrides it (for tests). An unknown name counts as unset during imports;
    `require_known` refuses it before any kernel is loaded.
    """
    chosen = os.environ.get(OVERRIDE)
    return chosen if chosen and chosen in TILES else _own()


def architecture() -> str:
    """Return the architecture of this process, as LLVM names it: x86_64, aarch64, ...

    `platform.machine` names the kernel's: under a 32-bit personality (`setarch`, some containers) a 32-bit machine,
    also for a 64-bit process.
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
    """Return the features of Numba's target CPU: this one, unless NUMBA_CPU_NAME or NUMBA_CPU_FEATURES name another.

    Features that a CPU's name implies are not listed: a tile may be smaller than possible; a larger one would crash.
    """
    listed: str | None = getattr(numba.config, "CPU_FEATURES", None)  # "" for the CPU called generic
    if listed is None:
        return dict(llvm.get_host_cpu_features())
    return {word[1:]: word[0] == "+" for word in filter(None, map(str.strip, listed.split(",")))}


def dot() -> str:
    """Return the int8 tile of this machine: a key of `DOTS`; HEPTI_KERNELS_DOT overrides it (for tests)."""
    if (chosen := os.environ.get(DOT_OVERRIDE)) in DOTS:
        return str(chosen)
    return _dots()[0]


def _dots() -> list[str]:
    """Return the int8 tiles that can be compiled, the best one first."""
    features = {**_features(), "": True}
    features["dotprod"] = features.get("dotprod", False) or _has_sdot()
    return [name for name, d in DOTS.items() if d.needs[0] in (isa(), "") and features.get(d.needs[1])]


def require_known() -> None:
    """Raise ConfigError if the environment forces an instruction set or int8 tile that is unknown or not supported.

    LLVM ends the process if code uses a register or an instruction that the CPU lacks.
    """
    if (chosen := os.environ.get(OVERRIDE)) and chosen not in TILES:
        raise ConfigError(f"{OVERRIDE}={chosen!r} is not an instruction set of the kernels; use one of {list(TILES)}")
    if chosen and TILES[chosen].lanes > TILES[_own()].lanes:
        raise ConfigError(f"{OVERRIDE}={chosen!r} has wider vectors than this CPU, which has {_own()}; unset it")
    if (chosen := os.environ.get(DOT_OVERRIDE)) and chosen not in DOTS:
        raise ConfigError(f"{DOT_OVERRIDE}={chosen!r} is no int8 tile of the kernels; use one of {list(DOTS)}")
    if chosen and chosen not in _dots():
        raise ConfigError(f"{DOT_OVERRIDE}={chosen!r} is an int8 tile that {isa()} lacks here; use one of {_dots()}")


def cpu_model() -> str:
    """Return the architecture and the name of the CPU, if the system reports one."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model", "Hardware"):
                return f"{architecture()} {value.strip()}"
    except OSError:
        pass
    return f"{architecture()} {platform.processor()}"


def _has_sdot() -> bool:
    """Return whether Linux reports byte dot products of this ARM CPU.

    LLVM (22) does not list them among the features of the host, not even of a CPU with a name.
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
