"""Parts that encoders of pictures in patches share: the stem, the tensors of a layer, the head on the class token.

n patches of p x p pixels in C channels per image, S the image's side, B images of a batch. A picture's rows are the
class token, others before the patches, and the patches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from hepti_mqtt.core.errors import ModelError, UnsupportedModelError
from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.core.spec import Pooling, Task, TaskHead
from hepti_mqtt.lowering.graph import GraphBuilder
from hepti_mqtt.lowering.roles import STEM
from hepti_mqtt.models import heads, pictures, plain
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.shapes import PackedBatch
from hepti_mqtt.models.tensors import Resized, TensorSource, dense, norm, prefixed, table, vector, weight
from hepti_mqtt.models.transformer import MATRICES, BlockSpec, ImageStem, ModelSpec, add_layers

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


def architectures(*names: str) -> dict[str, Task]:
    """Return the task of each architecture of models with these names."""
    tasks: dict[str, Task] = {"Model": "embedding", "ForImageClassification": "image_classification"}
    return {f"{name}{end}": task for name in names for end, task in tasks.items()}


def task_head(task: Task, config: JsonConfig, pooling: Pooling | None = None) -> TaskHead:
    """Return the head of a task on what a pooling gives, by default on the class token, with a dense layer to embed.

    Raises ModelError, UnsupportedModelError.
    """
    if task == "image_classification":
        labels = config.labels()
        return TaskHead(task, pooling or "cls", outputs=len(labels), labels=labels)
    if pooling is not None:
        return TaskHead(task, pooling)
    hidden = config.positive("hidden_size")
    config.require_one_of("pooler_act", "tanh", "tanh")
    config.require_one_of("pooler_output_size", hidden, hidden)
    return TaskHead(task, "cls", pooler=True)


def encoder_spec(
    family: str,
    architecture: str,
    config: JsonConfig,
    image: ImageStem,
    head: TaskHead,
    mlp: int = 0,
    eps: float = 1e-12,
) -> ModelSpec:
    """Return the spec of an encoder of patches that norms before each block; raises ModelError, UnsupportedModelError.

    mlp: width of its MLP, by default intermediate_size. eps: default of layer_norm_eps.
    """
    hidden = config.positive("hidden_size")
    heads = config.heads(hidden)
    config.require_one_of("head_dim", hidden // heads, hidden // heads)
    return ModelSpec(
        family=family,
        architecture=architecture,
        layers=config.positive("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        mlp=mlp or config.positive("intermediate_size"),
        norm_first=True,
        activation=config.activation(),
        norm_eps=config.number("layer_norm_eps", eps),
        max_tokens=image.rows,
        head=head,
        image=image,
        block=BlockSpec(biases=MATRICES if config.flag("qkv_bias", True) else MATRICES[1:]),
    )


def image_stem(
    config: JsonConfig,
    extras: Mapping[str, Any],
    classes: Mapping[str, str],
    registers: int = 0,
    any_size: bool = False,
) -> ImageStem:
    """Return the stem; the preprocessor's scale goes into mean and std: the kernel computes (pixel/255 - mean)/std.

    classes: of transformers that make pixels, by model_type. registers: rows between class token and patches. any_size:
    pictures may have another size than the stored positions.
    """
    size, patch = config.square("image_size"), config.square("patch_size")
    channels = config.positive("num_channels", 3)
    if channels != 3:
        raise UnsupportedModelError(f"config.json: num_channels {channels} is not supported; supported: 3 (RGB)")
    if size % patch:
        raise ModelError(f"config.json: patch_size {patch} does not divide image_size {size}")
    pre = pictures.Preprocessor(classes.get(str(config.get("model_type", ""))), extras)
    mean, std = pre.pixel_scale()
    crop = pre.crop(None if any_size else size)
    if crop.size % patch:
        raise UnsupportedModelError(
            f"{pre.config.file}: pictures become {crop.size} x {crop.size}, which is no multiple of patch_size {patch}"
        )
    grid = size // patch if size != crop.size else 0
    return ImageStem(crop.size, patch, channels, mean, std, crop.shortest, crop.square, registers, grid)


def stem_of(spec: ModelSpec) -> ImageStem:
    """Return the stem of a model that reads pictures."""
    assert spec.image is not None
    return spec.image


def stem_tensors(
    spec: ModelSpec, base: tuple[str, ...], registers: str = "", placed: int = 0, smooth: bool = False
) -> Iterator[TensorSource]:
    """Yield the tensors of the stem.

    registers: stored name of the rows after the class token. placed: rows before the patches with positions, by default
    all. smooth: of positions for other pictures, see `Resized`.
    """
    image, h = stem_of(spec), spec.hidden
    channels, p = image.channels, image.patch
    patch = "embeddings.patch_embeddings.projection"
    yield weight("stem.patch.weight", prefixed(base, f"{patch}.weight"), channels * p * p, h, (h, channels, p, p))
    yield vector("stem.patch.bias", prefixed(base, f"{patch}.bias"), h)
    yield vector("stem.cls", prefixed(base, "embeddings.cls_token"), h, (1, 1, h))
    if image.registers:
        yield table("stem.registers", prefixed(base, f"embeddings.{registers}"), image.registers, h, (1,))
    placed = placed or image.prefix
    position = table("stem.position", prefixed(base, "embeddings.position_embeddings"), placed + image.patches, h, (1,))
    if not image.positions:
        position = replace(position, stored=(), stored_shape=position.shape)
    elif image.grid:
        resized = Resized(placed, image.grid, image.side, smooth)
        position = replace(position, stored_shape=(1, placed + image.grid**2, h), resized=resized)
    yield position


def scaled(sources: Iterable[TensorSource], factors: Mapping[str, tuple[str, ...]]) -> Iterator[TensorSource]:
    """Yield the tensors with factors in them (LayerScale); factors: one's names in a checkpoint, by part of a layer."""
    for source in sources:
        yield replace(source, factor=factors.get(source.name.split(".")[-2], ()))


def task_tensors(spec: ModelSpec, base: tuple[str, ...]) -> Iterator[TensorSource]:
    """Yield the tensors after the layers."""
    h = spec.hidden
    yield from norm("final_norm", base, "layernorm", h)
    if spec.head.pooler:
        yield from dense("head.pooler", base, "pooler.dense", h, h)
    if spec.head.outputs:
        yield from dense("head.classifier", ("",), "classifier", h, spec.head.outputs)


def embed(net: GraphBuilder, spec: ModelSpec, shape: PackedBatch, refs: Mapping[str, WeightRef]) -> str:
    """Add the stem of a batch of images, with its norm if it has one: pixels u8 [B, C, S, S] -> [m, h]."""
    image, images, h = stem_of(spec), len(shape.lengths), spec.hidden
    pixels = net.input("pixels", (images, image.channels, image.size, image.size), "u8")
    rows, width = images * image.patches, image.channels * image.patch**2
    patches = net.opaque(
        "patches", (pixels,), STEM, "patchify", (rows, width), patch=image.patch, mean=image.mean, std=image.std
    )
    x = net.linear("projected", patches, STEM, {"stem.patch": h}, bias="stem.patch.bias" in refs)  # [B n, h]
    weights = [refs[name] for name in ("stem.cls", "stem.registers", "stem.position") if name in refs]
    x = net.opaque("embedded", (x,), STEM, "prepend_positions", (shape.tokens, h), weights, images=images)
    if "stem.norm.weight" not in refs:
        return x
    weights = [refs["stem.norm.weight"], refs["stem.norm.bias"]]
    return net.opaque("normed", (x,), STEM, "layer_norm", net.shape_of(x), weights, **spec.norm.attrs)


def graph(net: GraphBuilder, spec: ModelSpec, shape: PackedBatch, refs: Mapping[str, WeightRef]) -> None:
    """Add the graph of a batch of images: pixels u8 [B, C, S, S] -> the task's output."""
    x = embed(net, spec, shape, refs)  # [m, h]
    x = add_layers(net, spec, shape, x, refs)  # [m, h]
    heads.add_head(net, spec, shape, x, refs)


def reference_embed(spec: ModelSpec, tensors: plain.Tensors, pixels: plain.Array) -> plain.Array:
    """Return the embeddings of pixels [B, C, S, S]: [m, h]."""
    image = stem_of(spec)
    dtype = tensors["stem.position"].dtype
    mean, std = (np.array(v, dtype)[:, None, None] for v in (image.mean, image.std))
    values = (pixels.astype(dtype) / 255 - mean) / std  # [B, C, S, S]
    p, side = image.patch, image.side
    blocks = values.reshape(-1, image.channels, side, p, side, p).transpose(0, 2, 4, 1, 3, 5)
    patches = blocks.reshape(len(values), image.patches, -1)  # [B, n, C p p]
    x = plain.linear(tensors, "stem.patch", patches)  # [B, n, h]
    rows = [tensors[name] for name in ("stem.cls", "stem.registers") if name in tensors]
    prefix = np.vstack([np.empty((0, spec.hidden), dtype), *rows])  # [k, h]
    x = np.concatenate([np.broadcast_to(prefix, (len(x), *prefix.shape)), x], axis=1)  # [B, k + n, h]
    position = tensors["stem.position"]
    x[:, : len(position) - image.patches] += position[: len(position) - image.patches]
    x[:, image.prefix :] += position[len(position) - image.patches :]
    x = x.reshape(-1, spec.hidden)
    return plain.norm(tensors, "stem.norm", x, spec.norm) if "stem.norm.weight" in tensors else x


def reference(
    spec: ModelSpec, tensors: plain.Tensors, pixels: plain.Array, shape: PackedBatch
) -> tuple[plain.Array, plain.Array]:
    """Return (final hidden states [m, h], the task's output) for pixels [B, C, S, S], in plain NumPy."""
    x = reference_embed(spec, tensors, pixels)  # [m, h]
    return heads.reference_head(spec, tensors, plain.layers(tensors, spec, x, shape), shape)
