"""CLIP (Radford et al., 2021): towers for texts and pictures with vectors in one space.

Both norm before each block. A text sees earlier tokens only, and its vector is read at the token that ends it; a
picture is normed before the layers, and its vector is read at the class token. m tokens, h hidden, n patches, B items.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.core.spec import TaskHead
from hepti_mqtt.lowering.graph import GraphBuilder
from hepti_mqtt.models import causal, patches, plain, sentences, text
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.models.tensors import TensorSource, norm, prefixed, table, vector, weight
from hepti_mqtt.models.towers import IMAGE, TEXT, Matching, Towers
from hepti_mqtt.models.transformer import BlockSpec, ModelSpec, TextStem


class _Tower(NamedTuple):
    """An architecture: its tower, and the stored name of its projection, if it has one."""

    part: str
    projection: str = ""


ARCHITECTURES: Final[Mapping[str, _Tower]] = {
    "CLIPTextModel": _Tower(TEXT),
    "CLIPTextModelWithProjection": _Tower(TEXT, "text_projection"),
    "CLIPVisionModel": _Tower(IMAGE),
    "CLIPVisionModelWithProjection": _Tower(IMAGE, "visual_projection"),
}
_SIZES: Final = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "num_hidden_layers": 12, "projection_dim": 512}
# Defaults of missing keys in transformers.
_TEXT: Final = _SIZES | {
    "model_type": "clip_text_model", "vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048,
    "num_attention_heads": 8, "max_position_embeddings": 77, "eos_token_id": 49407,
}  # fmt: skip
_IMAGE: Final = _SIZES | {
    "model_type": "clip_vision_model", "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12,
    "num_channels": 3, "image_size": 224, "patch_size": 32,
}  # fmt: skip
TOWERS: Final = {
    "CLIPModel": Towers(
        {TEXT: ("CLIPTextModelWithProjection", _TEXT), IMAGE: ("CLIPVisionModelWithProjection", _IMAGE)},
        Matching("logit_scale"),
        ("projection_dim",),
        overruled=True,
    )
}
TOKENIZER_CLASSES: Final = {"clip_text_model": "CLIPTokenizer", "clip": "CLIPTokenizer"}
PICTURE_CLASSES: Final = {"clip_vision_model": "CLIP", "clip": "CLIP"}
OLD_END: Final = 2  # wrong end token in older files, in place of the highest id
LAYER: Final = {
    "attention_norm": "layer_norm1",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "attention_out": "self_attn.out_proj",
    "mlp_norm": "layer_norm2",
    "mlp_up": "mlp.fc1",
    "mlp_down": "mlp.fc2",
}
BASES: Final = {TEXT: ("text_model.", ""), IMAGE: ("vision_model.", "")}


def spec(architecture: str, config: JsonConfig, extras: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a tower; raises ModelError, UnsupportedModelError."""
    part, projection = ARCHITECTURES[architecture]
    config = JsonConfig(config.file, {**(_TEXT if part == TEXT else _IMAGE), **config.data})
    outputs = config.positive("projection_dim") if projection else 0
    encoder = tower_spec("clip", architecture, part, config, extras, PICTURE_CLASSES)
    head = TaskHead("embedding", "last" if part == TEXT else "cls", outputs=outputs)
    if encoder.text is None:
        return replace(encoder, head=head)
    end = config.require("eos_token_id")
    if not isinstance(end, int) or not 0 <= end < encoder.text.vocab:
        raise config.bad_value("eos_token_id", f"a token from 0 to {encoder.text.vocab - 1}", end)
    stem = replace(encoder.text, end=encoder.text.vocab if end == OLD_END else end)
    return replace(encoder, head=head, text=stem, block=BlockSpec(causal=True))


def tower_spec(
    family: str, architecture: str, part: str, config: JsonConfig, extras: Mapping[str, Any], classes: Mapping[str, str]
) -> ModelSpec:
    """Return the parts of the spec that both towers share; raises ModelError, UnsupportedModelError.

    classes: of transformers that make pixels, by model_type.
    """
    hidden = config.positive("hidden_size")
    if part == TEXT:
        positions = config.positive("max_position_embeddings")
        longest = sentences.max_tokens(positions, extras)
        stem, image = TextStem(config.positive("vocab_size"), positions, types=0), None
    else:
        stem, image = None, patches.image_stem(config, extras, classes)
        longest = image.rows
    return ModelSpec(
        family=family,
        architecture=architecture,
        layers=config.positive("num_hidden_layers"),
        hidden=hidden,
        heads=config.heads(hidden),
        mlp=config.positive("intermediate_size"),
        norm_first=True,
        activation=config.activation(),
        norm_eps=config.number("layer_norm_eps", 1e-5),
        max_tokens=longest,
        head=TaskHead("embedding", "cls"),
        text=stem,
        image=image,
    )


def tensors(spec: ModelSpec) -> Iterator[TensorSource]:
    """Yield the tensors of a tower, from the stem to the projection."""
    part, projection = ARCHITECTURES[spec.architecture]
    base, h = BASES[part], spec.hidden
    yield from stem_tensors(spec, base)
    if spec.image is not None:
        yield vector("stem.cls", prefixed(base, "embeddings.class_embedding"), h)
        yield from norm("stem.norm", base, "pre_layrnorm", h)
    yield from layer_tensors(spec, base)
    if projection:
        yield weight("head.classifier.weight", (f"{projection}.weight",), h, spec.head.outputs)


def stem_tensors(spec: ModelSpec, base: tuple[str, ...], prefix: int = 1) -> Iterator[TensorSource]:
    """Yield the embeddings of tokens, or of patches after `prefix` rows, and the positions of all rows."""
    h = spec.hidden
    if spec.text is not None:
        yield table("stem.word", prefixed(base, "embeddings.token_embedding.weight"), spec.text.vocab, h)
    rows = spec.text.positions if spec.text is not None else 0
    if (image := spec.image) is not None:
        p, rows = image.patch, image.patches + prefix
        patch, shape = prefixed(base, "embeddings.patch_embedding.weight"), (h, image.channels, p, p)
        yield weight("stem.patch.weight", patch, image.channels * p * p, h, shape)
    yield table("stem.position", prefixed(base, "embeddings.position_embedding.weight"), rows, h)


def layer_tensors(spec: ModelSpec, base: tuple[str, ...]) -> Iterator[TensorSource]:
    """Yield the tensors of all layers and of the final norm."""
    for i in range(spec.layers):
        yield from text.layer_tensors(spec, f"layers.{i}.", base, f"encoder.layers.{i}.", LAYER)
    yield from norm("final_norm", base, "final_layer_norm" if spec.text else "post_layernorm", spec.hidden)


def graph(net: GraphBuilder, spec: ModelSpec, shape: Any, refs: Mapping[str, WeightRef]) -> None:
    """Add the graph of a batch: ids i32 [m], or pixels u8 [B, C, S, S] -> vectors."""
    (causal if isinstance(shape, TokenBatch) else patches).graph(net, spec, shape, refs)


def reference(
    spec: ModelSpec, tensors: plain.Tensors, inputs: plain.Array, shape: Any
) -> tuple[plain.Array, plain.Array]:
    """Return (hidden states after the final norm [m, h], vectors) for ids [m] or pixels, in plain NumPy."""
    if isinstance(shape, TokenBatch):
        return causal.reference(spec, tensors, inputs, shape)
    return patches.reference(spec, tensors, inputs, shape)


def preprocessor(side: int) -> dict[str, Any]:
    """Return the preprocessor_config.json for centre crops."""
    return {
        "crop_size": side, "do_center_crop": True, "do_normalize": True, "do_resize": True, "resample": 3,
        "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": side},
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    }  # fmt: skip
