"""ViT (Dosovitskiy et al., 2021): an encoder of image patches that norms before each block.

n patches of p x p pixels in C channels per image, S the image's side, B images of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from hepti_mqtt.errors import ModelError, UnsupportedModelError
from hepti_mqtt.lowering import GraphBuilder
from hepti_mqtt.lowering.roles import STEM
from hepti_mqtt.models import heads, pictures, plain, text
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.kinds import BASE, LARGE, TINY_SPREAD, Kind, make_kind
from hepti_mqtt.models.shapes import PackedBatch
from hepti_mqtt.models.tensors import TensorSource, dense, norm, prefixed, table, vector, weight
from hepti_mqtt.models.transformer import ImageStem, Layer, ModelSpec, pre_norm
from hepti_mqtt.program import WeightRef
from hepti_mqtt.spec import Task, TaskHead

ARCHITECTURES: Final[Mapping[str, Task]] = {
    "ViTModel": "embedding",
    "ViTForImageClassification": "image_classification",
}
BASE_NAMES: Final = ("vit.", "")
PICTURE_CLASSES: Final = {"vit": "ViT"}


LAYER: Final = {
    "attention_norm": "layernorm_before",
    "query": "attention.attention.query",
    "key": "attention.attention.key",
    "value": "attention.attention.value",
    "attention_out": "attention.output.dense",
    "mlp_norm": "layernorm_after",
    "mlp_up": "intermediate.dense",
    "mlp_down": "output.dense",
}


def spec(architecture: str, config: JsonConfig, extras: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a vision transformer; raises ModelError, UnsupportedModelError."""
    config.require_one_of("qkv_bias", True, True)
    return encoder_spec("vit", architecture, ARCHITECTURES[architecture], config, extras)


def encoder_spec(
    family: str, architecture: str, task: Task, config: JsonConfig, extras: Mapping[str, Any]
) -> ModelSpec:
    """Return the spec of an encoder of patches that norms before each block; raises ModelError."""
    hidden = config.positive("hidden_size")
    image = image_stem(config, extras, PICTURE_CLASSES.get(str(config.get("model_type", ""))))
    if task == "image_classification":
        labels = config.labels()
        head = TaskHead(task, "cls", outputs=len(labels), labels=labels)
    else:
        config.require_one_of("pooler_act", "tanh", "tanh")
        config.require_one_of("pooler_output_size", hidden, hidden)
        head = TaskHead(task, "cls", pooler=True)
    return ModelSpec(
        family=family,
        architecture=architecture,
        layers=config.positive("num_hidden_layers"),
        hidden=hidden,
        heads=config.heads(hidden),
        mlp=config.positive("intermediate_size"),
        norm_first=True,
        activation=config.activation(),
        norm_eps=config.number("layer_norm_eps", 1e-12),
        max_tokens=image.patches + 1,
        head=head,
        image=image,
    )


def image_stem(config: JsonConfig, extras: Mapping[str, Any], usual: str | None) -> ImageStem:
    """Return the stem; the preprocessor's scale goes into mean and std: the kernel computes (pixel/255 - mean)/std.

    usual: the class of transformers that makes pixels where the files name none.
    """
    size, patch = config.square("image_size"), config.square("patch_size")
    channels = config.positive("num_channels", 3)
    if channels != 3:
        raise UnsupportedModelError(f"config.json: num_channels {channels} is not supported; supported: 3 (RGB)")
    if size % patch:
        raise ModelError(f"config.json: patch_size {patch} does not divide image_size {size}")
    pre = pictures.Preprocessor(usual, extras)
    mean, std = pre.pixel_scale()
    return ImageStem(size, patch, channels, mean, std, pre.crop(size).shortest)


def stem_tensors(spec: ModelSpec) -> Iterator[TensorSource]:
    """Yield the tensors of the stem."""
    assert spec.image is not None
    h, channels, p, n = spec.hidden, spec.image.channels, spec.image.patch, spec.image.patches
    patch = "embeddings.patch_embeddings.projection"
    yield weight("stem.patch.weight", prefixed(BASE_NAMES, f"{patch}.weight"), channels * p * p, h, (h, channels, p, p))
    yield vector("stem.patch.bias", prefixed(BASE_NAMES, f"{patch}.bias"), h)
    yield vector("stem.cls", prefixed(BASE_NAMES, "embeddings.cls_token"), h, (1, 1, h))
    yield table("stem.position", prefixed(BASE_NAMES, "embeddings.position_embeddings"), n + 1, h, (1,))


def task_tensors(spec: ModelSpec) -> Iterator[TensorSource]:
    """Yield the tensors behind the layers."""
    h = spec.hidden
    yield from norm("final_norm", BASE_NAMES, "layernorm", h)
    if spec.head.pooler:
        yield from dense("head.pooler", BASE_NAMES, "pooler.dense", h, h)
    if spec.head.outputs:
        yield from dense("head.classifier", ("",), "classifier", h, spec.head.outputs)


def tensors(spec: ModelSpec) -> Iterator[TensorSource]:
    """Yield the tensors of a vision transformer, from the stem to the head."""
    yield from stem_tensors(spec)
    for i in range(spec.layers):
        yield from text.layer_tensors(spec, f"layers.{i}.", BASE_NAMES, f"encoder.layer.{i}.", LAYER)
    yield from task_tensors(spec)


def embed(net: GraphBuilder, spec: ModelSpec, shape: PackedBatch, refs: Mapping[str, WeightRef]) -> str:
    """Add the stem of a batch of images: pixels u8 [B, C, S, S] -> [m, h]."""
    image = spec.image
    assert image is not None
    images, h = len(shape.lengths), spec.hidden
    pixels = net.input("pixels", (images, image.channels, image.size, image.size), "u8")
    rows, width = images * image.patches, image.channels * image.patch**2
    patches = net.opaque(
        "patches", (pixels,), STEM, "patchify", (rows, width), patch=image.patch, mean=image.mean, std=image.std
    )
    x = net.linear("projected", patches, STEM, {"stem.patch": h}, bias="stem.patch.bias" in refs)  # [B n, h]
    weights = (refs["stem.cls"], refs["stem.position"])
    return net.opaque("embedded", (x,), STEM, "prepend_positions", (shape.tokens, h), weights, images=images)


def graph(net: GraphBuilder, spec: ModelSpec, shape: PackedBatch, refs: Mapping[str, WeightRef]) -> None:
    """Add the graph of a batch of images: pixels u8 [B, C, S, S] -> the task's output."""
    x = embed(net, spec, shape, refs)  # [m, h]
    n = Layer.of(spec, shape)
    for i in net.layers(spec.layers):
        x = pre_norm(net, f"{i}.", f"layers.{i}.", x, n)
    net.begin_block()
    heads.add_head(net, spec, shape, x, refs)


def reference_embed(spec: ModelSpec, tensors: plain.Tensors, pixels: plain.Array) -> plain.Array:
    """Return the embeddings of pixels [B, C, S, S]: [m, h]."""
    image = spec.image
    assert image is not None
    dtype = tensors["stem.cls"].dtype
    mean, std = (np.array(v, dtype)[:, None, None] for v in (image.mean, image.std))
    values = (pixels.astype(dtype) / 255 - mean) / std  # [B, C, S, S]
    p, side = image.patch, image.size // image.patch
    blocks = values.reshape(-1, image.channels, side, p, side, p).transpose(0, 2, 4, 1, 3, 5)
    patches = blocks.reshape(len(values), image.patches, -1)  # [B, n, C p p]
    x = plain.linear(tensors, "stem.patch", patches)  # [B, n, h]
    cls = np.broadcast_to(tensors["stem.cls"], (len(values), 1, spec.hidden))
    x = np.concatenate([cls, x], axis=1) + tensors["stem.position"]  # [B, n + 1, h]
    return x.reshape(-1, spec.hidden)


def reference(
    spec: ModelSpec, tensors: plain.Tensors, pixels: plain.Array, shape: PackedBatch
) -> tuple[plain.Array, plain.Array]:
    """Return (final hidden states [m, h], the task's output) for pixels [B, C, S, S], in plain NumPy."""
    x = reference_embed(spec, tensors, pixels)  # [m, h]
    for i in range(spec.layers):
        x = plain.pre_norm(tensors, f"layers.{i}.", x, Layer.of(spec, shape))  # [m, h]
    return heads.reference_head(spec, tensors, x, shape)


_VIT: Final = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "num_channels": 3, "qkv_bias": True}
REAL: Final = {"image_size": 224, "patch_size": 16}
TINY: Final = {
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "intermediate_size": 100,
    "initializer_range": TINY_SPREAD,
    "image_size": 20,
    "patch_size": 5,
}


def image_kind(
    architecture: str, *sizes: Mapping[str, Any], model_type: str = "vit", labels: int = 0, **more: Any
) -> Kind:
    """Return a kind that reads pictures; see `kind`."""
    made = make_kind(architecture, model_type, *sizes, _VIT, labels=labels, **more)
    side = made.config["image_size"]
    preprocessor = {
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "ViTImageProcessor",
        "image_std": [0.5, 0.5, 0.5],
        "resample": 2,
        "rescale_factor": 1 / 255,
        "size": {"height": side, "width": side},
    }
    return replace(made, extras={"preprocessor_config.json": preprocessor})


KINDS: Final = {
    "vit-base": image_kind("ViTForImageClassification", BASE, REAL, labels=1000),
    "vit-large": image_kind("ViTForImageClassification", LARGE, REAL, labels=1000),
    "tiny-vit": image_kind("ViTModel", TINY),
    "tiny-vit-classifier": image_kind("ViTForImageClassification", TINY, labels=7),
}
