"""The experiments and labs that come with the benchmarks, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]


def names(kind: str) -> dict[str, Path]:
    """Return the files of `benchmarks/experiments` or `benchmarks/labs` by name."""
    return {path.stem: path for path in sorted((ROOT / "benchmarks" / kind).glob("*.yaml"))}


def find(kind: str, given: Path) -> Path:
    """Return the given file if it exists, else the one of this name here."""
    return given if given.exists() else names(kind).get(given.name.removesuffix(".yaml"), given)
