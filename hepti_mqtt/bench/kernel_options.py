"""What the kernels' benchmark can be told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

OUT: Final = Path("results/kernels")
# The keys of kernel_cases.GROUPS, which checks that they are.
GROUPS: Final = ("linear", "curve", "stream", "int8", "layer", "maps", "threads")


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure; `seconds` ends a run early, and the next one goes on."""

    out: Path
    quick: bool = False
    threads: tuple[int, ...] = (1, 2)
    only: tuple[str, ...] = GROUPS
    seed: int = 1
    seconds: float | None = None
    command: str = ""
