"""Seeded random models: the JSON files of a directory with a family's real shapes, or with tiny ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

# Real models spread 0.02 over hundreds of columns; a few dozen need more for attention and GELU to bend at all.
TINY_SPREAD: Final = 0.15

BASE: Final = {
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "initializer_range": 0.02,
}
LARGE: Final = {
    "num_hidden_layers": 24,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "initializer_range": 0.02,
}
TINY: Final = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 72,
    "initializer_range": TINY_SPREAD,
    "hidden_act": "gelu",
    "vocab_size": 211,
    "max_position_embeddings": 40,
}


@dataclass(frozen=True)
class Kind:
    """A model that can be made from a seed.

    config: config.json; its initializer_range, if any, is the spread of the weights. extras: the other JSON files by
    name. depth: config.json's key of the number of layers.
    """

    config: Mapping[str, Any]
    extras: Mapping[str, Any] = field(default_factory=dict)
    depth: str = "num_hidden_layers"


def make_kind(
    architecture: str,
    model_type: str,
    *sizes: Mapping[str, Any],
    labels: int = 0,
    depth: str = "num_hidden_layers",
    **more: Any,
) -> Kind:
    """Return a kind of an architecture: config.json's keys of `sizes`, then `more`; labels: classes of its task."""
    config = {"architectures": [architecture], "model_type": model_type}
    for size in sizes:
        config |= size
    return Kind(config | more | (label_fields(labels) if labels else {}), depth=depth)


def label_fields(count: int) -> dict[str, Any]:
    """Return what config.json says of `count` classes."""
    names = [f"LABEL_{i}" for i in range(count)]
    return {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
