"""Seeded random models: the JSON files of a directory with a family's real shapes, or with tiny ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Kind:
    """A model to write from a seed."""

    #: config.json; its initializer_range, if any, is the spread of the weights. Real models spread 0.02 over hundreds
    #: of columns; a few dozen need more for attention and GELU to bend at all.
    config: Mapping[str, Any]
    #: The other JSON files by name.
    extras: Mapping[str, Any] = field(default_factory=dict)
    #: config.json's key of the number of layers.
    depth: str = "num_hidden_layers"


@cache
def _all() -> Mapping[str, Any]:
    """Return kinds.json: by family, then by name."""
    data: Mapping[str, Any] = json.loads(resources.files(__package__).joinpath("kinds.json").read_text("utf-8"))
    return data


def kinds_of(family: str) -> Mapping[str, Kind]:
    """Return the kinds of a family by name; labels: how many classes a task has."""
    kinds = {}
    for name, kind in _all()[family].items():
        labels = [f"LABEL_{i}" for i in range(kind.get("labels", 0))]
        numbered = {str(i): label for i, label in enumerate(labels)}
        of_labels = {"id2label": numbered, "label2id": {label: i for i, label in enumerate(labels)}} if labels else {}
        rest = {key: kind[key] for key in ("extras", "depth") if key in kind}
        kinds[name] = Kind({**kind["config"], **of_labels}, **rest)
    return kinds
