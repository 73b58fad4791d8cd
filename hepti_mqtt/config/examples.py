"""The files that come with Hepti: experiments, labs, sites and units, in a checkout's `configs` or in the package."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

Kind = Literal["experiments", "lab", "sites", "systemd"]

_CHECKOUT: Final = Path(__file__).parents[2] / "configs"
FOLDER: Final = _CHECKOUT if _CHECKOUT.is_dir() else Path(__file__).parents[1] / "configs"


def names(kind: Kind) -> dict[str, Path]:
    """Return the files of one kind that are written in YAML, by name."""
    return {path.stem: path for path in sorted((FOLDER / kind).glob("*.yaml"))}


def find(kind: Kind, given: Path) -> Path:
    """Return the file that is meant: the given one if it exists, else one of ours by name or as `configs/KIND/NAME`."""
    bare = given if str(given.parent) == "." else Path(given.name) if given.parent == Path("configs", kind) else None
    if given.exists() or bare is None:
        return given
    return names(kind).get(bare.name.removesuffix(".yaml"), given)
