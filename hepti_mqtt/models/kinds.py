"""Kinds of seeded random models: JSON files of published models or of tiny ones, by family (`kinds.json`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Kind:
    """A model that `hepti model make` writes from a seed."""

    #: config.json; its initializer_range, if any, is the standard deviation of the weights. Tiny models need more than
    #: the usual 0.02: with few columns attention and GELU would be almost linear.
    config: Mapping[str, Any]
    #: The other JSON files by name.
    extras: Mapping[str, Any] = field(default_factory=dict)
    #: Key of the number of layers in config.json.
    depth: str = "num_hidden_layers"


@cache
def _all() -> Mapping[str, Any]:
    """Return kinds.json: kinds by family, then by name."""
    data: Mapping[str, Any] = json.loads(resources.files(__package__).joinpath("kinds.json").read_text("utf-8"))
    return data


def kinds_of(family: str) -> Mapping[str, Kind]:
    """Return the kinds of a family by name; `labels` in the file becomes so many names of classes in config.json."""
    kinds = {}
    for name, kind in _all()[family].items():
        labels = [f"LABEL_{i}" for i in range(kind.get("labels", 0))]
        numbered = {str(i): label for i, label in enumerate(labels)}
        of_labels = {"id2label": numbered, "label2id": {label: i for i, label in enumerate(labels)}} if labels else {}
        rest = {key: kind[key] for key in ("extras", "depth") if key in kind}
        kinds[name] = Kind({**kind["config"], **of_labels}, **rest)
    return kinds
