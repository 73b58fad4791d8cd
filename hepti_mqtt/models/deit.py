"""DeiT (Touvron et al., 2021): ViT with a distillation token after the class token.

That token learns the teacher's labels with a second classifier; the answer is the mean of both logits.
Models without that token are stored as ViT. n patches, h hidden, B images of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.lowering.graph import GraphBuilder
from hepti_mqtt.lowering.ops import Reshape
from hepti_mqtt.lowering.roles import TASK
from hepti_mqtt.models import heads, patches, plain, text
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.shapes import PackedBatch
from hepti_mqtt.models.tensors import TensorSource, dense, norm
from hepti_mqtt.models.transformer import ModelSpec, add_layers

TEACHER: Final = "DeiTForImageClassificationWithTeacher"
ARCHITECTURES: Final = {**patches.architectures("DeiT"), TEACHER: "image_classification"}
PICTURE_CLASSES: Final = {"deit": "DeiT"}
_BASE_NAMES: Final = ("deit.", "")
_TOKENS: Final = ("cls", "distillation")


def spec(architecture: str, config: JsonConfig, extras: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a DeiT; raises ModelError, UnsupportedModelError."""
    image = patches.image_stem(config, extras, PICTURE_CLASSES, registers=1)
    head = patches.task_head(ARCHITECTURES[architecture], config)
    return patches.encoder_spec("deit", architecture, config, image, head)


def tensors(spec: ModelSpec) -> Iterator[TensorSource]:
    """Yield the tensors of a DeiT, from the stem to the head."""
    yield from patches.stem_tensors(spec, _BASE_NAMES, "distillation_token")
    for i in range(spec.layers):
        yield from text.layer_tensors(spec, f"layers.{i}.", _BASE_NAMES, f"encoder.layer.{i}.", patches.LAYER)
    if spec.architecture != TEACHER:
        yield from patches.task_tensors(spec, _BASE_NAMES)
        return
    yield from norm("final_norm", _BASE_NAMES, "layernorm", spec.hidden)
    for token in _TOKENS:
        yield from dense(f"head.{token}", ("",), f"{token}_classifier", spec.hidden, spec.head.outputs)


def graph(net: GraphBuilder, spec: ModelSpec, shape: PackedBatch, refs: Mapping[str, WeightRef]) -> None:
    """Add the graph of a batch of images: pixels u8 [B, C, S, S] -> the task's output."""
    x = patches.embed(net, spec, shape, refs)  # [m, h]
    x = add_layers(net, spec, shape, x, refs)  # [m, h]
    if spec.architecture != TEACHER or shape.want == "hidden":
        heads.add_head(net, spec, shape, x, refs)
        return
    images, labels = len(shape.lengths), spec.head.outputs
    logits = []
    for place, token in enumerate(_TOKENS):
        row = net.rows(f"{token}.row", x, TASK, [start + place for start in shape.starts])  # [B, h]
        row = net.norm(f"{token}.norm", row, TASK, "final_norm", spec.norm)
        logits.append(net.linear(f"{token}.logits", row, TASK, {f"head.{token}": labels}))  # [B, labels]
    both = net.join("logits", logits, TASK)  # [B, 2 labels]
    source, dims = (images, 2 * labels), (2 * images, labels)
    net.add_op(Reshape(name="pairs", inputs=(both,), role=TASK, space=dims, source=source))
    net.opaque("mean", ("pairs",), TASK, "pool_rows", (images, labels), lengths=(2,) * images, mode="mean")


def reference(
    spec: ModelSpec, tensors: plain.Tensors, pixels: plain.Array, shape: PackedBatch
) -> tuple[plain.Array, plain.Array]:
    """Return (final hidden states [m, h], the task's output) for pixels [B, C, S, S], in plain NumPy."""
    x = plain.layers(tensors, spec, patches.reference_embed(spec, tensors, pixels), shape)  # [m, h]
    if spec.architecture != TEACHER or shape.want == "hidden":
        return heads.reference_head(spec, tensors, x, shape)
    hidden = plain.norm(tensors, "final_norm", x, spec.norm)
    starts = np.array(shape.starts)
    logits = [plain.linear(tensors, f"head.{token}", hidden[starts + i]) for i, token in enumerate(_TOKENS)]
    return hidden, np.mean(logits, axis=0)
