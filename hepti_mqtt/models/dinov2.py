"""DINOv2 (Oquab et al., 2023; with registers: Darcet et al., 2024): ViT with scaled blocks.

The scales are in the matrices before them. Positions are for the pictures of the training, and resized for others.
Registers are rows without a position between the class token and the patches. n patches, h hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from hepti_mqtt.models import patches, text
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.tensors import TensorSource, dense, norm, prefixed
from hepti_mqtt.models.transformer import ModelSpec

ARCHITECTURES: Final = patches.architectures("Dinov2", "Dinov2WithRegisters")
PICTURE_CLASSES: Final = {"dinov2": "Bit", "dinov2_with_registers": "Bit"}
_LAYER: Final = {
    "attention_norm": "norm1",
    "query": "attention.attention.query",
    "key": "attention.attention.key",
    "value": "attention.attention.value",
    "attention_out": "attention.output.dense",
    "mlp_norm": "norm2",
}
_PLAIN: Final = _LAYER | {"mlp_up": "mlp.fc1", "mlp_down": "mlp.fc2"}
_GATED: Final = _LAYER | {"mlp_gate": "mlp.weights_in", "mlp_up": "mlp.weights_in", "mlp_down": "mlp.weights_out"}


def _has_registers(architecture: str) -> bool:
    return architecture.startswith("Dinov2WithRegisters")


def spec(architecture: str, config: JsonConfig, extras: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a DINOv2; raises ModelError, UnsupportedModelError."""
    registers = config.positive("num_register_tokens", 4) if _has_registers(architecture) else 0
    image = patches.image_stem(config, extras, PICTURE_CLASSES, registers, any_size=True)
    mlp = int(config.positive("hidden_size") * config.positive("mlp_ratio", 4))
    task = ARCHITECTURES[architecture]
    head = patches.task_head(task, config, "cls" if task == "embedding" else "cls_patches")
    if not config.flag("use_swiglu_ffn", False):
        return patches.encoder_spec("dinov2", architecture, config, image, head, mlp, 1e-6)
    encoder = patches.encoder_spec("dinov2", architecture, config, image, head, (int(mlp * 2 / 3) + 7) // 8 * 8, 1e-6)
    return replace(encoder, activation="silu", block=replace(encoder.block, gated=True))


def tensors(spec: ModelSpec) -> Iterator[TensorSource]:
    """Yield the tensors of a DINOv2, from the stem to the head."""
    registers, h = _has_registers(spec.architecture), spec.hidden
    base = ("dinov2_with_registers." if registers else "dinov2.", "")
    yield from patches.stem_tensors(spec, base, "register_tokens", placed=1, smooth=registers)
    for i in range(spec.layers):
        stored = f"encoder.layer.{i}."
        parts = text.layer_tensors(spec, f"layers.{i}.", base, stored, _GATED if spec.block.gated else _PLAIN)
        scales = {"attention_out": "layer_scale1", "mlp_down": "layer_scale2"}
        yield from patches.scaled(parts, {k: prefixed(base, f"{stored}{v}.lambda1") for k, v in scales.items()})
    yield from norm("final_norm", base, "layernorm", h)
    if spec.head.outputs:
        yield from dense("head.classifier", ("",), "classifier", 2 * h, spec.head.outputs)


graph = patches.graph
reference = patches.reference
