"""SigLIP (Zhai et al., 2023; SigLIP 2, Tschannen et al., 2025): CLIP's towers, trained so that each pair has its score.

A text is filled up to the longest, sees itself whole, and its vector is read at its last token, mostly padding. Of a
picture all patches are read by one learnt query, followed by an MLP. m rows, h hidden, f MLP width, B pictures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from hepti_mqtt.core.errors import UnsupportedModelError
from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.core.spec import TaskHead
from hepti_mqtt.lowering.graph import GraphBuilder
from hepti_mqtt.lowering.roles import TASK
from hepti_mqtt.models import causal, clip, patches, plain
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.sentences import TOKENIZER
from hepti_mqtt.models.shapes import ImageBatch, TokenBatch
from hepti_mqtt.models.tensors import TensorSource, dense, fused, norm, prefixed, vector
from hepti_mqtt.models.towers import IMAGE, TEXT, Matching, Towers
from hepti_mqtt.models.transformer import ModelSpec, add_layers

ARCHITECTURES: Final = {"SiglipTextModel": TEXT, "SiglipVisionModel": IMAGE}
_SIZES: Final = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
}  # fmt: skip
# Defaults of missing keys in transformers.
_TEXT: Final = _SIZES | {"model_type": "siglip_text_model", "vocab_size": 32000, "max_position_embeddings": 64}
_IMAGE: Final = _SIZES | {
    "model_type": "siglip_vision_model", "num_channels": 3, "image_size": 224, "patch_size": 16,
    "vision_use_head": True,
}  # fmt: skip
TOWERS: Final = {
    "SiglipModel": Towers(
        {TEXT: ("SiglipTextModel", _TEXT), IMAGE: ("SiglipVisionModel", _IMAGE)},
        matching=Matching("logit_scale", "logit_bias", apart=True, shape=(1,)),
    )
}
TOKENIZER_CLASSES: Final = {"siglip_text_model": "SiglipTokenizer", "siglip": "SiglipTokenizer"}
PICTURE_CLASSES: Final = {"siglip_vision_model": "Siglip", "siglip": "Siglip"}
_HEAD: Final = "head."


def spec(architecture: str, config: JsonConfig, extras: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a tower; raises ModelError, UnsupportedModelError."""
    part = ARCHITECTURES[architecture]
    config = JsonConfig(config.file, {**(_TEXT if part == TEXT else _IMAGE), **config.data})
    encoder = clip.tower_spec("siglip", architecture, part, config, extras, PICTURE_CLASSES)
    if encoder.text is not None:
        outputs = config.positive("projection_size", encoder.hidden)
        head, stem = TaskHead("embedding", "last", outputs=outputs), replace(encoder.text, padded=True)
        # Texts are padded to this length.
        longest = JsonConfig(TOKENIZER, extras.get(TOKENIZER, {})).positive("model_max_length", encoder.max_tokens)
        return replace(encoder, head=head, text=stem, max_tokens=min(encoder.max_tokens, longest))
    if not config.flag("vision_use_head", True):
        raise UnsupportedModelError("config.json: vision_use_head false is not supported: there would be no vector")
    assert encoder.image is not None
    image = replace(encoder.image, classed=False)
    return replace(encoder, head=TaskHead("embedding", "attention"), image=image, max_tokens=image.rows)


def tensors(spec: ModelSpec) -> Iterator[TensorSource]:
    """Yield the tensors of a tower, from the stem to the head."""
    base, h, f = clip.BASES[ARCHITECTURES[spec.architecture]], spec.hidden, spec.mlp
    yield from clip.stem_tensors(spec, base, prefix=0)
    if spec.image is not None:
        yield vector("stem.patch.bias", prefixed(base, "embeddings.patch_embedding.bias"), h)
    yield from clip.layer_tensors(spec, base)
    if spec.text is not None:
        yield from dense("head.classifier", base, "head", h, spec.head.outputs)
        return
    yield vector("head.probe", prefixed(base, "head.probe"), h, (1, 1, h))
    for i, part in enumerate(("query", "key", "value")):
        # Stored without a dot: one matrix of all three, and one vector.
        for source in dense(f"{_HEAD}{part}", base, "head.attention.in_proj", h, h):
            stored = tuple(name.replace("in_proj.", "in_proj_") for name in source.stored)
            yield fused(replace(source, stored=stored), i * h, 3 * h)
    yield from dense("head.attention_out", base, "head.attention.out_proj", h, h)
    yield from norm("head.mlp_norm", base, "head.layernorm", h)
    yield from dense("head.mlp_up", base, "head.mlp.fc1", h, f)
    yield from dense("head.mlp_down", base, "head.mlp.fc2", f, h)


def graph(net: GraphBuilder, spec: ModelSpec, shape: Any, refs: Mapping[str, WeightRef]) -> None:
    """Add the graph of a batch: ids i32 [m], or pixels u8 [B, C, S, S] -> vectors."""
    if isinstance(shape, TokenBatch):
        causal.graph(net, spec, shape, refs)
        return
    assert isinstance(shape, ImageBatch)
    x = add_layers(net, spec, shape, patches.embed(net, spec, shape, refs), refs)  # [m, h]
    x = net.norm("final_norm", net.rows("rows", x, TASK), TASK, "final_norm", spec.norm)
    if shape.want == "task":
        _pool(net, spec, shape, x, refs)


def _pool(net: GraphBuilder, spec: ModelSpec, shape: ImageBatch, x: str, refs: Mapping[str, WeightRef]) -> None:
    """Add the head: the final hidden states x [m, h] -> vectors [B, h]."""
    h = spec.hidden
    probe = net.opaque("probe", (x,), TASK, "repeat_row", net.shape_of(x), (refs["head.probe"],))  # [m, h]
    q = net.linear("head.q", probe, TASK, {"head.query": h})  # [m, h], a few rows computed
    kv = net.linear("head.kv", x, TASK, {"head.key": h, "head.value": h})  # [m, 2 h]
    pooled = net.attention(
        "head.seen", q, kv, TASK, heads=spec.heads, width=h, columns=(0, 0, h), lengths=shape.lengths
    )  # [m, h]
    y = net.linear(
        "head.o", net.rows("head.rows", pooled, TASK, shape.starts), TASK, {"head.attention_out": h}
    )  # [B, h]
    up = net.linear(
        "head.up", net.norm("head.n", y, TASK, "head.mlp_norm", spec.norm), TASK, {"head.mlp_up": spec.mlp},
        activation=spec.activation,
    )  # fmt: skip
    net.sum("head.x", y, net.linear("head.down", up, TASK, {"head.mlp_down": h}), TASK)  # [B, h]


def reference(
    spec: ModelSpec, tensors: plain.Tensors, inputs: plain.Array, shape: Any
) -> tuple[plain.Array, plain.Array]:
    """Return (hidden states after the final norm [m, h], vectors) for ids [m] or pixels, in plain NumPy."""
    if isinstance(shape, TokenBatch):
        return causal.reference(spec, tensors, inputs, shape)
    assert isinstance(shape, ImageBatch)
    x = plain.layers(tensors, spec, patches.reference_embed(spec, tensors, inputs), shape)
    x = plain.norm(tensors, "final_norm", x, spec.norm)  # [m, h]
    if shape.want == "hidden":
        return x, x
    q = plain.linear(tensors, "head.query", tensors["head.probe"][None])  # [1, h]
    k, v = (plain.linear(tensors, f"head.{part}", x) for part in ("key", "value"))  # [m, h] each
    items = plain.sequence_slices(shape.lengths)
    pooled = np.concatenate([plain.attention_over(q, k[rows], v[rows], spec.heads) for rows in items])  # [B, h]
    y = plain.linear(tensors, "head.attention_out", pooled)
    up = plain.linear(tensors, "head.mlp_up", plain.norm(tensors, "head.mlp_norm", y, spec.norm))
    return x, y + plain.linear(tensors, "head.mlp_down", plain.activate(spec.activation, up))
