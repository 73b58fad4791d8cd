"""Towers of pictures for decoders: encoders whose rows replace tokens in a decoder's prompt.

SmolVLM and Idefics 3 (Laurençon et al., 2024) put the patches of each square side by side, Gemma 3 (2025) takes their
mean and norms it; then a matrix leads to the decoder's columns. n patches of p x p pixels, s patches of a side of
a square, h hidden, w columns of the decoder, B pictures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from hepti_mqtt.core.errors import ModelError, UnsupportedModelError
from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.core.spec import Pooling, TaskHead
from hepti_mqtt.lowering.graph import GraphBuilder
from hepti_mqtt.lowering.ops import Norm
from hepti_mqtt.lowering.roles import TASK
from hepti_mqtt.models import clip, patches, plain
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.shapes import ImageBatch
from hepti_mqtt.models.tensors import TensorSource, prefixed, vector, weight
from hepti_mqtt.models.towers import IMAGE, TEXT, Towers
from hepti_mqtt.models.transformer import ImageStem, ModelSpec, add_layers
from hepti_mqtt.models.views import Views, read_views


class _Joint(NamedTuple):
    """The layers between a tower's rows and a decoder's."""

    pooling: Pooling
    #: Alternative stored prefixes of the tower, and names of the matrix to the decoder's columns.
    bases: tuple[str, ...]
    matrix: tuple[str, ...]
    #: Names of the norm before the matrix, empty without one.
    norm: tuple[str, ...] = ()
    #: The matrix is stored as [in, out].
    upright: bool = False


_SHUFFLED: Final = _Joint("shuffled", ("model.vision_model.",), ("model.connector.modality_projection.proj.weight",))
_AVERAGED: Final = _Joint(
    "grid_mean",
    ("vision_tower.vision_model.", "vision_tower.", "model.vision_tower.vision_model.", "model.vision_tower."),
    prefixed(("", "model."), "multi_modal_projector.mm_input_projection_weight"),
    prefixed(("", "model."), "multi_modal_projector.mm_soft_emb_norm"),
    upright=True,
)
_JOINTS: Final[Mapping[str, _Joint]] = {
    "Gemma3VisionTower": _AVERAGED,
    "Idefics3VisionTransformer": _SHUFFLED,
    "SmolVLMVisionTransformer": _SHUFFLED,
}
ARCHITECTURES: Final = dict.fromkeys(_JOINTS, IMAGE)
MODEL_TYPES: Final = {
    "Gemma3VisionTower": "siglip_vision_model",
    "Idefics3VisionTransformer": "idefics3_vision",
    "SmolVLMVisionTransformer": "smolvlm_vision",
}
# Defaults of missing keys in transformers.
_IDEFICS: Final = {
    "model_type": "idefics3_vision", "hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 16, "num_channels": 3, "image_size": 224, "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
}  # fmt: skip
_LLAMA: Final[Mapping[str, Any]] = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


def _of_idefics(whole: JsonConfig) -> dict[str, dict[str, Any]]:
    """Return `Towers.taken`; raises ModelError, UnsupportedModelError."""
    text = JsonConfig(f"{whole.file}: text_config", whole.get("text_config", {}))
    text.require_one_of("model_type", "llama", "llama")
    for key in ("qk_layer_norms", "use_resampler"):
        text.require_one_of(key, False, False)
    vision = JsonConfig(f"{whole.file}: vision_config", whole.get("vision_config", {}))
    vision.require_one_of("use_base_siglip", False, False)
    token = whole.whole("image_token_id", 128257)
    columns = text.positive("hidden_size", _LLAMA["hidden_size"])
    joint = {"square": whole.positive("scale_factor", 2), "outputs": columns, "max_image_size": None, "size": None}
    return {TEXT: {"image_token_id": token, "_flash_attn_2_enabled": None, "perceiver_config": None}, IMAGE: joint}


_GEMMA: Final[Mapping[str, Any]] = {
    "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216,
    "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}  # fmt: skip
_SIGLIP: Final[Mapping[str, Any]] = {
    **_IDEFICS, "model_type": "siglip_vision_model", "hidden_size": 768, "num_attention_heads": 12, "patch_size": 16,
}  # fmt: skip


def _of_gemma(whole: JsonConfig) -> dict[str, dict[str, Any]]:
    """Return `Towers.taken`; raises ModelError, UnsupportedModelError."""
    text = JsonConfig(f"{whole.file}: text_config", whole.get("text_config", {}))
    text.require_one_of("model_type", _GEMMA["model_type"], _GEMMA["model_type"])
    text.require_one_of("use_bidirectional_attention", False, False)
    vision = JsonConfig(f"{whole.file}: vision_config", {**_SIGLIP, **whole.get("vision_config", {})})
    vision.require_one_of("model_type", _SIGLIP["model_type"], _SIGLIP["model_type"])
    whole = whole.renamed({"image_token_index": "image_token_id"})
    rows, side = whole.positive("mm_tokens_per_image", 256), vision.square("image_size") // vision.square("patch_size")
    if math.isqrt(rows) ** 2 != rows or side % math.isqrt(rows):
        raise UnsupportedModelError(
            f"{whole.file}: mm_tokens_per_image {rows} is not supported: squares do not fill {side} x {side} patches"
        )
    joint = {"square": side // math.isqrt(rows), "outputs": text.positive("hidden_size", _GEMMA["hidden_size"])}
    token = whole.whole("image_token_id", 262144)
    return {TEXT: {"image_token_id": token, "picture_rows": rows}, IMAGE: joint}


def _towers(tower: str, model_type: str) -> Towers:
    return Towers(
        {TEXT: ("LlamaForCausalLM", _LLAMA), IMAGE: (tower, {**_IDEFICS, "model_type": model_type})},
        shared=("tie_word_embeddings",),
        taken=_of_idefics,
        renamed={TEXT: {"model.text_model.": "model."}},
        sees=True,
    )


TOWERS: Final = {
    "Gemma3ForConditionalGeneration": Towers(
        {TEXT: ("Gemma3ForCausalLM", _GEMMA), IMAGE: ("Gemma3VisionTower", _SIGLIP)},
        shared=("tie_word_embeddings",),
        taken=_of_gemma,
        renamed={
            TEXT: {
                "language_model.model.": "model.",
                "model.language_model.": "model.",
                "language_model.lm_head.": "lm_head.",
            }
        },
        sees=True,
    ),
    "Idefics3ForConditionalGeneration": _towers("Idefics3VisionTransformer", "idefics3_vision"),
    "SmolVLMForConditionalGeneration": _towers("SmolVLMVisionTransformer", "smolvlm_vision"),
}


def spec(architecture: str, config: JsonConfig, extras: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a tower; raises ModelError, UnsupportedModelError."""
    joint, hidden = _JOINTS[architecture], config.positive("hidden_size")
    side, patch = config.square("image_size"), config.square("patch_size")
    channels, square = config.positive("num_channels"), config.positive("square")
    if channels != 3:
        raise UnsupportedModelError(f"config.json: num_channels {channels} is not supported; supported: 3 (RGB)")
    looks = views(config, extras)
    if side // patch % square:
        raise ModelError(f"config.json: squares of {square} patches do not fill pictures of {side // patch} a side")
    if joint.pooling == "shuffled" and not _keeps_places(side // patch):
        raise UnsupportedModelError(
            f"config.json: pictures of {side // patch} patches a side have rounded positions in transformers, which "
            "are not supported"
        )
    image = ImageStem(side // patch * patch, patch, channels, looks.mean, looks.std, classed=False)
    return ModelSpec(
        family="eyes",
        architecture=architecture,
        layers=config.positive("num_hidden_layers"),
        hidden=hidden,
        heads=config.heads(hidden),
        mlp=config.positive("intermediate_size"),
        norm_first=True,
        activation=config.activation(),
        norm_eps=config.number("layer_norm_eps", 1e-6),
        max_tokens=image.rows,
        head=TaskHead("picture_rows", joint.pooling, outputs=config.positive("outputs"), square=square),
        image=image,
    )


def views(config: JsonConfig, extras: Mapping[str, Any]) -> Views:
    """Return the views of pictures for a tower; raises ModelError, UnsupportedModelError."""
    side = config.square("image_size")
    return read_views(extras, side, (side // config.square("patch_size") // config.positive("square")) ** 2)


def _keeps_places(side: int) -> bool:
    """Return whether the place of each patch is its own: transformers finds them by fractions of a side, in f32."""
    step = 1 / side
    borders = np.arange(step, 1.0, step).astype(np.float32)
    at = np.minimum(np.arange(side, dtype=np.float32) * (np.float32(1) / np.float32(side)), np.float32(1 - 1e-6))
    return np.array_equal(np.searchsorted(borders, at, side="right"), np.arange(side))


def tensors(spec: ModelSpec) -> Iterator[TensorSource]:
    """Yield the tensors of a tower, from the stem to the matrix of its rows."""
    joint, h, outputs = _JOINTS[spec.architecture], spec.hidden, spec.head.outputs
    yield from clip.stem_tensors(spec, joint.bases, prefix=0)
    yield vector("stem.patch.bias", prefixed(joint.bases, "embeddings.patch_embedding.bias"), h)
    yield from clip.layer_tensors(spec, joint.bases)
    width = h * spec.head.square**2 if joint.pooling == "shuffled" else h
    if joint.norm:
        yield vector("head.norm.weight", prefixed(joint.norm, ".weight"), h)
    matrix = weight("head.rows.weight", joint.matrix, width, outputs)
    yield replace(matrix, stored_shape=(width, outputs), transposed=False) if joint.upright else matrix


def graph(net: GraphBuilder, spec: ModelSpec, shape: ImageBatch, refs: Mapping[str, WeightRef]) -> None:
    """Add the graph of a batch: pixels u8 [B, C, S, S] -> rows [B n / s^2, w]."""
    joint, s = _JOINTS[spec.architecture], spec.head.square
    x = add_layers(net, spec, shape, patches.embed(net, spec, shape, refs), refs)  # [m, h]
    x = net.norm("final_norm", net.rows("rows", x, TASK), TASK, "final_norm", spec.norm)
    if shape.want == "hidden":
        return
    places = _places(spec, shape.count)  # [B n / s^2, s^2]
    # Rows are chosen in ascending order, so that a square is put together from its patches' places.
    parts = [net.rows(f"part.{i}", x, TASK, tuple(rows)) for i, rows in enumerate(places.T.tolist())]
    if joint.pooling == "shuffled":
        x = net.join("squares", parts, TASK)  # [B n / s^2, s^2 h]
    else:
        x = parts[0]
        for i, part in enumerate(parts[1:], 1):
            x = net.sum(f"squares.{i}", x, part, TASK)  # [B n / s^2, h], s^2 times the mean
    if joint.norm:
        x = net.norm("squares_normed", x, TASK, "head.norm", _row_norm(spec, s**4), bias=False)
    net.linear("picture_rows", x, TASK, {"head.rows": spec.head.outputs}, bias=False)


def _row_norm(spec: ModelSpec, factor: int = 1) -> Norm:
    """Return the norm of means; factor: the square of what they are multiplied by."""
    return Norm(spec.norm_eps * factor, rms=True, gamma_offset=1.0)


def _places(spec: ModelSpec, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the patches of each square, line by line, of all pictures: [B n / s^2, s^2]."""
    side, s = patches.stem_of(spec).side, spec.head.square
    grid = np.arange(count * side * side).reshape(count, side // s, s, side // s, s)
    return grid.transpose(0, 1, 3, 2, 4).reshape(-1, s * s)


def reference(
    spec: ModelSpec, tensors: plain.Tensors, inputs: plain.Array, shape: ImageBatch
) -> tuple[plain.Array, plain.Array]:
    """Return (hidden states after the final norm [m, h], rows of the decoder) for pixels, in plain NumPy."""
    x = plain.layers(tensors, spec, patches.reference_embed(spec, tensors, inputs), shape)
    x = plain.norm(tensors, "final_norm", x, spec.norm)  # [m, h]
    if shape.want == "hidden":
        return x, x
    joint = _JOINTS[spec.architecture]
    squares = x[_places(spec, shape.count)]  # [B n / s^2, s^2, h]
    rows = squares.reshape(len(squares), -1) if joint.pooling == "shuffled" else squares.mean(axis=1)
    if joint.norm:
        rows = plain.norm(tensors, "head.norm", rows, _row_norm(spec))
    return x, plain.linear(tensors, "head.rows", rows)
