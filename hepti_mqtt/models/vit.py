"""ViT (Dosovitskiy et al., 2021): an encoder of image patches that norms before each block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from hepti_mqtt.models import patches, text
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.tensors import TensorSource
from hepti_mqtt.models.transformer import ModelSpec

ARCHITECTURES: Final = patches.architectures("ViT")
BASE_NAMES: Final = ("vit.", "")
PICTURE_CLASSES: Final = {"vit": "ViT"}


def spec(architecture: str, config: JsonConfig, extras: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a vision transformer; raises ModelError, UnsupportedModelError."""
    image = patches.image_stem(config, extras, PICTURE_CLASSES)
    return patches.encoder_spec(
        "vit", architecture, config, image, patches.task_head(ARCHITECTURES[architecture], config)
    )


def tensors(spec: ModelSpec) -> Iterator[TensorSource]:
    """Yield the tensors of a vision transformer, from the stem to the head."""
    yield from patches.stem_tensors(spec, BASE_NAMES)
    for i in range(spec.layers):
        yield from text.layer_tensors(spec, f"layers.{i}.", BASE_NAMES, f"encoder.layer.{i}.", patches.LAYER)
    yield from patches.task_tensors(spec, BASE_NAMES)


graph = patches.graph
reference = patches.reference
