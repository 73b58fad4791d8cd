"""Checkpoints that hold several models: towers for texts and pictures, each an ordinary model.

A tower's config.json comes from the checkpoint's; its weights are in the same files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import exp
from typing import Any, Final, NamedTuple

from hepti_mqtt.models.config import JsonConfig

TEXT: Final = "text"
IMAGE: Final = "image"
_SECTIONS: Final = {TEXT: "text_config", IMAGE: "vision_config"}


class Similarity(NamedTuple):
    """How well a text fits a picture: the cosine of their vectors times `factor`, plus `bias`.

    apart: each text has a score of its own, by a sigmoid; else the scores of all texts add up to 1.
    """

    factor: float
    bias: float
    apart: bool


class Matching(NamedTuple):
    """Stored names of the numbers of a `Similarity`: `scale`, the logarithm of its factor, and its bias, if any.

    shape: as they are stored.
    """

    scale: str
    bias: str = ""
    apart: bool = False
    shape: tuple[int, ...] = ()

    def similarity(self, number: Callable[[str], float]) -> Similarity:
        """Return the similarity, from the stored numbers by name."""
        return Similarity(exp(number(self.scale)), number(self.bias) if self.bias else 0.0, self.apart)


@dataclass(frozen=True)
class Towers:
    """The models of a checkpoint, in order: (architecture, defaults of missing keys of config.json) by name."""

    models: Mapping[str, tuple[str, Mapping[str, Any]]]
    #: How texts and pictures are compared; None: they are not.
    matching: Matching | None = None
    #: Keys of the whole file that each model reads.
    shared: tuple[str, ...] = ()
    #: A second section of the file, `..._dict`, overrules the first.
    overruled: bool = False
    #: Return further keys of each model's config.json, from the whole file; null removes a key.
    taken: Callable[[JsonConfig], Mapping[str, Mapping[str, Any]]] = lambda _: {}
    #: By model: the prefix of its own stored names, by the checkpoint's prefix.
    renamed: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    #: The first model is a decoder, and its prompts may have rows of pictures from the second.
    sees: bool = False

    def configs(self, whole: JsonConfig) -> dict[str, dict[str, Any]]:
        """Return the config.json of each model; raises ModelError."""
        return {name: self._config(whole, name) for name in self.models}

    def _config(self, whole: JsonConfig, name: str) -> dict[str, Any]:
        architecture, usual = self.models[name]
        section = _SECTIONS[name]
        values = {**usual, **_section(whole, section)}
        # As transformers reads them: a second section is complete, and overrules the first.
        if self.overruled and (over := _section(whole, f"{section}_dict")):
            values |= {**usual, **over}
        values |= {key: whole.get(key, usual[key]) for key in self.shared if key in usual}
        values |= self.taken(whole).get(name, {})
        values = {key: value for key, value in values.items() if value is not None}
        return values | {"architectures": [architecture], "model_type": usual["model_type"]}


ONE_MODEL: Final = Towers({})


def _section(whole: JsonConfig, key: str) -> Mapping[str, Any]:
    values = JsonConfig(f"{whole.file}: {key}", whole.get(key, {})).data
    return {name: value for name, value in values.items() if value is not None}
