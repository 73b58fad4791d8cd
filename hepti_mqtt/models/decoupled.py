"""The decoupled transformer (DeTransformer, DATE 2024): groups of layers that are parted into independent sub-blocks.

A group is L / groups - 1 decoupled layers and then one original layer. Sub-block i sees columns i of h / parts alone
and is a whole transformer block on them: its query, key and value have all h columns, its MLP all f. Between a group's
beginning and its original layer nothing is exchanged. It is a model of its own, to be trained as such.

m tokens, h hidden, f MLP width, w = h / parts columns of a sub-block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hepti_mqtt.core.errors import ModelError
from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.core.spec import Task
from hepti_mqtt.lowering.graph import GraphBuilder
from hepti_mqtt.lowering.roles import JOIN, SLICE
from hepti_mqtt.models import heads, patches, plain, text, vit
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.shapes import PackedBatch
from hepti_mqtt.models.tensors import TensorSource
from hepti_mqtt.models.transformer import Layer, ModelSpec, post_norm, pre_norm

ARCHITECTURES: Final[Mapping[str, Task]] = {
    "DecoupledBertModel": "embedding",
    "DecoupledViTForImageClassification": "image_classification",
}


@dataclass(frozen=True, slots=True)
class DecoupledSpec(ModelSpec):
    """An encoder of text or pictures in `groups` groups, with `parts` sub-blocks in decoupled layers."""

    groups: int = 1
    parts: int = 1


SPEC: Final = DecoupledSpec
LAYER: Final = {part: part for part in text.LAYER_PARTS}


def spec(architecture: str, config: JsonConfig, extras: Mapping[str, Any]) -> DecoupledSpec:
    """Return the spec of a decoupled encoder; raises ModelError, UnsupportedModelError."""
    task = ARCHITECTURES[architecture]
    if task == "embedding":
        head = text.task_head(task, config, extras, pooler=False)
        types = config.positive("type_vocab_size", 2)
        encoder = text.encoder_spec("decoupled", architecture, config, extras, head, types=types)
    else:
        config.require_one_of("qkv_bias", True, True)
        image = patches.image_stem(config, extras, vit.PICTURE_CLASSES)
        encoder = patches.encoder_spec("decoupled", architecture, config, image, patches.task_head(task, config))
    groups, parts = config.positive("num_groups"), config.positive("num_parts")
    if encoder.layers % groups or encoder.layers == groups:
        raise ModelError(
            f"config.json: num_groups {groups} must divide num_hidden_layers {encoder.layers} and be less; it can be "
            f"{_divisors(encoder.layers, encoder.layers - 1) or 'none: a decoupled model has two layers or more'}"
        )
    if encoder.hidden % parts:
        raise ModelError(
            f"config.json: num_parts {parts} does not divide hidden_size {encoder.hidden}; it can be "
            f"{_divisors(encoder.hidden, encoder.hidden)}"
        )
    fields = {name: getattr(encoder, name) for name in ModelSpec.__dataclass_fields__}
    return DecoupledSpec(**fields, groups=groups, parts=parts)


def _divisors(n: int, most: int) -> str:
    return ", ".join(str(d) for d in range(1, most + 1) if n % d == 0)


def tensors(spec: DecoupledSpec) -> Iterator[TensorSource]:
    """Yield the tensors of a decoupled encoder, from the stem to the head."""
    yield from text.stem_tensors(spec, ("",)) if spec.image is None else patches.stem_tensors(spec, vit.BASE_NAMES)
    for here, columns in _layers(spec):
        yield from text.layer_tensors(spec, here, ("",), here, LAYER, columns)
    if spec.image is not None:
        yield from patches.task_tensors(spec, vit.BASE_NAMES)


def _layers(spec: DecoupledSpec) -> Iterator[tuple[str, int]]:
    """Yield (prefix of its tensors, columns) of every sub-block and original layer."""
    depth = spec.layers // spec.groups
    for group in range(spec.groups):
        for j in range(depth - 1):
            for part in range(spec.parts):
                yield f"layers.{group * depth + j}.part.{part}.", spec.hidden // spec.parts
        yield f"layers.{group * depth + depth - 1}.", spec.hidden


def graph(net: GraphBuilder, spec: DecoupledSpec, shape: PackedBatch, refs: Mapping[str, WeightRef]) -> None:
    """Add the graph of one batch: ids i32 [m], or pixels u8 [B, C, S, S] -> the task's output."""
    x = (text if spec.image is None else patches).embed(net, spec, shape, refs)  # [m, h]
    layer = pre_norm if spec.norm_first else post_norm
    n, w, depth = Layer.of(spec, shape), spec.hidden // spec.parts, spec.layers // spec.groups
    for first in range(0, spec.layers, depth):
        net.begin_block()
        ends = []
        for part in range(spec.parts):
            net.set_layer(first, part)
            z = net.columns(f"{first}.{part}.in", x, SLICE, part * w, (part + 1) * w)  # [m, w]
            for i in range(first, first + depth - 1):
                net.set_layer(i, part)
                z = layer(net, f"{i}.{part}.", f"layers.{i}.part.{part}.", z, n)  # [m, w]
            ends.append(z)
        last = first + depth - 1
        net.set_layer(last)
        x = layer(net, f"{last}.", f"layers.{last}.", net.join(f"{last}.in", ends, JOIN), n)  # [m, h]
    net.begin_block()
    heads.add_head(net, spec, shape, x, refs)  # [m, h] or [B, h]


def reference(
    spec: DecoupledSpec, tensors: plain.Tensors, inputs: plain.Array, shape: PackedBatch
) -> tuple[plain.Array, plain.Array]:
    """Return (final hidden states [m, h], the task's output) for a request's input, in plain NumPy."""
    pictures = spec.image is not None
    x = (
        patches.reference_embed(spec, tensors, inputs)
        if pictures
        else text.reference_embed(spec, tensors, inputs, shape)
    )  # [m, h]
    layer = plain.pre_norm if spec.norm_first else plain.post_norm
    n, depth = Layer.of(spec, shape), spec.layers // spec.groups
    for first in range(0, spec.layers, depth):
        slices = np.split(x, spec.parts, axis=1)  # [m, w] each
        for i in range(first, first + depth - 1):
            slices = [layer(tensors, f"layers.{i}.part.{p}.", z, n) for p, z in enumerate(slices)]
        x = layer(tensors, f"layers.{first + depth - 1}.", np.concatenate(slices, axis=1), n)  # [m, h]
    return heads.reference_head(spec, tensors, x, shape)
