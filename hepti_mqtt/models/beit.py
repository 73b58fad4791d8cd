"""BEiT (Bao et al., 2022): ViT with scaled blocks and a bias of scores by the step between patches.

The scales are in the matrices before them; keys have no bias. n patches, h hidden, a heads, W patches of a side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from hepti_mqtt.core.errors import UnsupportedModelError
from hepti_mqtt.core.spec import Pooling
from hepti_mqtt.models import patches, text
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.tensors import TensorSource, dense, norm, prefixed, table, zeros
from hepti_mqtt.models.transformer import BlockSpec, ModelSpec

ARCHITECTURES: Final = patches.architectures("Beit")
PICTURE_CLASSES: Final = {"beit": "Beit"}
_BASE_NAMES: Final = ("beit.", "")
_SCALES: Final = {"attention_out": "lambda_1", "mlp_down": "lambda_2"}
_OWN, _SHARED = "use_relative_position_bias", "use_shared_relative_position_bias"


def spec(architecture: str, config: JsonConfig, extras: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a BEiT; raises ModelError, UnsupportedModelError."""
    image = patches.image_stem(config, extras, PICTURE_CLASSES)
    image = replace(image, positions=config.flag("use_absolute_position_embeddings", False))
    config.number("layer_scale_init_value", 0.1)  # without scales there are no tensors of them
    pooling: Pooling = "patches" if config.flag("use_mean_pooling", True) else "cls"
    head = patches.task_head(ARCHITECTURES[architecture], config, pooling)
    own, shared = config.flag(_OWN, False), config.flag(_SHARED, False)
    if own and shared:
        raise UnsupportedModelError(f"config.json: {_OWN} is not supported together with {_SHARED}")
    block = BlockSpec()
    if own or shared:
        block = BlockSpec(buckets=(2 * image.side - 1) ** 2 + 3, side=image.side, shared_bias=shared)
    return replace(patches.encoder_spec("beit", architecture, config, image, head), block=block)


def tensors(spec: ModelSpec) -> Iterator[TensorSource]:
    """Yield the tensors of a BEiT, from the stem to the head."""
    h, buckets = spec.hidden, spec.block.buckets
    bias = "relative_position_bias.relative_position_bias_table"
    yield from patches.stem_tensors(spec, _BASE_NAMES)
    if buckets and spec.block.shared_bias:
        yield table("relative_bias", prefixed(_BASE_NAMES, f"encoder.{bias}"), buckets, spec.heads)
    for i in range(spec.layers):
        here, stored = f"layers.{i}.", f"encoder.layer.{i}."
        parts = text.layer_tensors(spec, here, _BASE_NAMES, stored, patches.LAYER)
        factors = {part: prefixed(_BASE_NAMES, f"{stored}{name}") for part, name in _SCALES.items()}
        for source in patches.scaled(parts, factors):
            yield zeros(source.name, h) if source.name == f"{here}key.bias" else source
        if buckets and not spec.block.shared_bias:
            own = prefixed(_BASE_NAMES, f"{stored}attention.attention.{bias}")
            yield table(f"{here}relative_bias", own, buckets, spec.heads)
    mean = spec.head.pooling == "patches"
    yield from norm(
        "head.pooler_norm" if mean else "final_norm", _BASE_NAMES, "pooler.layernorm" if mean else "layernorm", h
    )
    if spec.head.outputs:
        yield from dense("head.classifier", ("",), "classifier", h, spec.head.outputs)


graph = patches.graph
reference = patches.reference
