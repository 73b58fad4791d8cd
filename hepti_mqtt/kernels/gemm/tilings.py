"""Which register tile f32 products run with: one of a small table, all of them over the same panels of weights.

What is best on a CPU is found by trying (`kernels/trial.py`), once per machine, and used from the next start on. The
choice changes no bit of a result: whatever the tile and however long the pieces of k, every output is one sum over k in
ascending order, begun with the bias and kept in f32 between two pieces.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

import llvmlite.binding as llvm

from hepti_mqtt.errors import ConfigError
from hepti_mqtt.kernels.machine import jit
from hepti_mqtt.kernels.machine.isa import OVERRIDE, Tile, cpu_model, isa

PIN: Final = "HEPTI_KERNELS_TILE"


class Tiling(NamedTuple):
    """`rows` x `vectors` sums in registers, over pieces of `depth` rows of a panel.

    vectors: of those of a panel; a tile that takes fewer goes over a panel in strips. steps: as in `Tile`.
    """

    rows: int
    vectors: int
    depth: int
    steps: int = 0

    @property
    def name(self) -> str:
        """Return the name by which it is pinned and kept."""
        return f"{self.rows}x{self.vectors}x{self.depth}"

    def tile(self, of: Tile) -> Tile:
        """Return the register tile, over panels of the tile that the instruction set has."""
        return of._replace(rows=self.rows, vectors=self.vectors, panel=of.vectors, steps=self.steps)


# The first is used where nothing was tried. High tiles read a panel less often, wide ones need fewer broadcasts. Where
# the compiler does two steps of a high tile at once it keeps sums on the stack (Zen 4: 0.72 of the speed of 6 x 4). Not
# in the table for the same reason: 13 x 2 and 14 x 2 (Cascade Lake), 10 x 2 of NEON (a CPU without a name).
TILINGS: Final[Mapping[str, tuple[Tiling, ...]]] = {
    "avx512": (
        Tiling(6, 4, 1024, steps=4),
        Tiling(6, 4, 512, steps=4),
        Tiling(6, 4, 256, steps=4),
        Tiling(12, 2, 512, steps=1),
    ),
    "avx2": (
        Tiling(6, 2, 1024, steps=4),
        Tiling(6, 2, 512, steps=4),
        Tiling(6, 2, 256, steps=4),
        Tiling(4, 2, 512, steps=4),
        Tiling(12, 1, 512, steps=1),
    ),
    "sse": (Tiling(6, 2, 512), Tiling(6, 2, 256)),
    "neon": (Tiling(8, 2, 512), Tiling(8, 2, 256), Tiling(9, 2, 512), Tiling(12, 1, 512)),
    "generic": (Tiling(4, 2, 512),),
}


def table() -> Mapping[str, Tiling]:
    """Return the tilings of the instruction set in use, by name; the first is the default."""
    return {tiling.name: tiling for tiling in TILINGS[isa()]}


def chosen() -> Tiling:
    """Return the tiling to use: the pinned one, else the one that was fastest here, else the default.

    The environment variable HEPTI_KERNELS_TILE pins it. One that names no tile counts as none here, where modules are
    imported: `require_known_pin` is asked before any kernel is loaded.
    """
    found, pinned = table(), os.environ.get(PIN)
    return found[pinned if pinned and pinned in found else kept() or next(iter(found))]


def require_known_pin() -> None:
    """Raise ConfigError if HEPTI_KERNELS_TILE names no tile of the instruction set in use."""
    if (pinned := os.environ.get(PIN)) and pinned not in table():
        raise ConfigError(f"{PIN}={pinned!r} is no register tile of {isa()}; use one of {list(table())}")


def how_chosen() -> str:
    """Return why the tiling is what it is, in a word or two."""
    if os.environ.get(PIN):
        return f"pinned by {PIN}"
    return "fastest here" if kept() else "by default"


def kept() -> str | None:
    """Return the name of the tiling that was fastest on this CPU, with these sources; None if none was tried."""
    path = _path()
    if path is None:
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["sources"] == jit.sources_stamp() and found["tile"] in table():
            return str(found["tile"])
    return None


def keep(name: str, seconds: Mapping[str, object]) -> None:
    """Keep the name of the fastest tiling for later starts, and what was measured; raises OSError if it cannot be."""
    path = _path()
    if path is None:
        return
    text = json.dumps({"sources": jit.sources_stamp(), "cpu": cpu_model(), "tile": name, "seconds": seconds})
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def _path() -> Path | None:
    """Return the file of this CPU beside the compile cache; None where there is no cache, or the set is forced."""
    directory = None if os.environ.get(OVERRIDE) else jit.cache_directory()
    if directory is None:
        return None
    cpu = f"{cpu_model()} {llvm.get_host_cpu_name()} {isa()}"
    return directory / f"hepti-tile-{sha256(cpu.encode()).hexdigest()[:12]}.json"
