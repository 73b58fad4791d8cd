"""Decoders with rotary positions, as one table: they continue a text, or embed it by its last token or its mean.

All norm before each block, have a gated MLP, and share keys and values among groups of heads. `DECODERS` has, for each
architecture, how its config.json, its tensors and its GGUF files differ from Llama's (Touvron et al., 2023). m tokens,
h hidden, d columns of a head, f MLP width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from hepti_mqtt.core.errors import ModelError, UnsupportedModelError
from hepti_mqtt.core.spec import TaskHead
from hepti_mqtt.models import causal, sentences, text
from hepti_mqtt.models.causal import graph, reference
from hepti_mqtt.models.config import FULL, SLIDING, JsonConfig, KeyTable
from hepti_mqtt.models.generation import end_tokens
from hepti_mqtt.models.mixture import ROUTER, Experts, expert_tensors, layers_without, mixture, with_experts
from hepti_mqtt.models.rope import Rope, read_rope
from hepti_mqtt.models.tensors import TensorSource, norm, prefixed, table
from hepti_mqtt.models.transformer import BlockSpec, ModelSpec, TextStem

MOST_TOKENS: Final = 65_536
_LAYER: Final = {
    "query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj",
    "attention_out": "self_attn.o_proj", "attention_norm": "input_layernorm", "mlp_gate": "mlp.gate_proj",
    "mlp_up": "mlp.up_proj", "mlp_down": "mlp.down_proj", "mlp_norm": "post_attention_layernorm",
}  # fmt: skip
_QKV: Final = ("query", "key", "value")
_NORMED: Final = (  # heads of queries and keys are normed
    {part: _LAYER[part] for part in _QKV}
    | {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
    | {part: name for part, name in _LAYER.items() if part not in _QKV}
)
_BLOCK: Final = BlockSpec(biases=(), norm_bias=False, rms=True, gated=True)
# Refuse windows: Llama ignores them, but the cache of transformers drops tokens by them.
_WINDOWS: Final[Mapping[str, tuple[Any, ...]]] = {
    "attention_chunk_size": (), "layer_types": (), "sliding_window": (), "rope_interleaved": (False,),
}  # fmt: skip
Windows = Callable[[JsonConfig, bool], tuple[int, ...]]  # (config, causal) -> `BlockSpec.windows`


class Gguf(NamedTuple):
    """How GGUF files name an architecture, and what their metadata leaves out."""

    #: `general.architecture`
    name: str
    #: Keys of config.json that the metadata lacks.
    config: Mapping[str, Any] = {}
    #: Keys of config.json by those of the metadata, besides the common ones.
    keys: Mapping[str, str] = {}
    #: The two rows of a rotated pair of queries or keys are neighbours.
    pairs_together: bool = False
    #: Names of parts of a layer that other architectures call otherwise.
    parts: Mapping[str, str] = {}
    #: Keys of positions scaled by YaRN that the metadata lacks.
    yarn: Mapping[str, Any] = {}
    #: Return what config.json says that follows from the rest of it.
    derived: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda _: {}


_QWEN_MIXTURE: Final = mixture(
    _NORMED, "mlp.gate", *(f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down"))
)


class Decoder(NamedTuple):
    """A family of decoders: what differs from Llama."""

    model_type: str
    #: Names of the parts of a layer in a checkpoint.
    part_names: Mapping[str, str] = _LAYER
    block: BlockSpec = _BLOCK
    #: Matrices with biases, by the flag of config.json that says so; "": always.
    biases: Mapping[str, tuple[str, ...]] = {}
    #: Keys about attention and positions that it reads.
    reads: Sequence[str] = ()
    #: Values that are computed, of keys that would change answers.
    only: Mapping[str, tuple[Any, ...]] = {}
    #: Defaults: columns of a head (0: h / a), heads of keys and values (0: a), the base of positions, tied.
    head_dim: int = 0
    kv_heads: int = 0
    theta: float = 10_000.0
    tied: bool = False
    #: Default of rms_norm_eps.
    norm_eps: float = 1e-6
    activation: str = "hidden_act"
    #: Return the windows of the layers, none where all see all tokens.
    windows: Windows = lambda _config, _causal: ()
    #: Return the positions of each layer, from the first one again where there are more.
    ropes: Callable[[JsonConfig, int, Decoder], Sequence[Rope]] = lambda config, d, of: (
        read_rope(config, d, of.theta),
    )
    #: Return by what scores are multiplied, before the factor of positions.
    scale: Callable[[JsonConfig, int], float] = lambda _, d: d**-0.5
    #: Embeddings, residuals and logits have multipliers.
    multiplied: bool = False
    #: Embeddings are multiplied by the root of h.
    scaled_by_root: bool = False
    experts: Experts | None = None
    gguf: Gguf | None = None


def _mistral_windows(config: JsonConfig, _causal: bool) -> tuple[int, ...]:
    positions = config.positive("max_position_embeddings")
    # A null window is no window; a missing one is 4096.
    is_windowed = config.data.get("sliding_window", 0) is not None
    near = config.positive("sliding_window", 4096) if is_windowed else positions
    return (near - 1,) if near < positions else ()


def _phi3_windows(config: JsonConfig, _causal: bool) -> tuple[int, ...]:
    positions = config.positive("max_position_embeddings")
    near = config.positive("sliding_window", positions)
    return (near - 1,) if near < positions else ()


def _qwen_windows(config: JsonConfig, causal: bool) -> tuple[int, ...]:
    layers = config.positive("num_hidden_layers")
    slides = config.flag("use_sliding_window", False) and config.data.get("sliding_window", 0) is not None
    near = config.positive("sliding_window", 4096)
    later = config.whole("max_window_layers", 28) if slides else layers
    full = config.layer_kinds(layers, lambda i: i < later)
    if not all(full) and not (slides and causal):
        raise UnsupportedModelError(
            f"config.json: layer_types of {SLIDING} need use_sliding_window and causal attention; only {FULL} is "
            "supported here"
        )
    return () if all(full) else tuple(-1 if sees_all else near - 1 for sees_all in full)


def _gemma_full(config: JsonConfig) -> tuple[bool, ...]:
    """Return whether each layer sees all tokens; transformers ignores the older key with an underscore."""
    pattern = config.positive("sliding_window_pattern", 6)
    return config.layer_kinds(config.positive("num_hidden_layers"), lambda i: (i + 1) % pattern == 0)


def _gemma_windows(config: JsonConfig, causal: bool) -> tuple[int, ...]:
    window = config.positive("sliding_window", 4096)
    near = window - 1 if causal else window // 2  # the window counts the token's own row
    return tuple(-1 if sees_all else near for sees_all in _gemma_full(config))


def _alternating_windows(config: JsonConfig, _causal: bool) -> tuple[int, ...]:
    """Return the windows of layers; every second layer sees all tokens."""
    near = config.positive("sliding_window", 128) - 1
    kinds = config.layer_kinds(config.positive("num_hidden_layers"), lambda i: bool(i % 2))
    return tuple(-1 if sees_all else near for sees_all in kinds)


def _gemma_ropes(config: JsonConfig, d: int, of: Decoder) -> Sequence[Rope]:
    ropes = {
        True: read_rope(config, d, of.theta, kind=FULL),
        False: read_rope(config, d, 10_000.0, "rope_local_base_freq", SLIDING),
    }
    return tuple(ropes[sees_all] for sees_all in _gemma_full(config))


def _smollm3_ropes(config: JsonConfig, d: int, of: Decoder) -> Sequence[Rope]:
    """Every fourth layer has no positions, or the layers in the file."""
    layers, interval = config.positive("num_hidden_layers"), config.positive("no_rope_layer_interval", 4)
    named = config.get("no_rope_layers", [int((i + 1) % interval != 0) for i in range(layers)])
    if not isinstance(named, list) or len(named) < layers or not set(named) <= {0, 1}:
        raise config.bad_value("no_rope_layers", f"a list of {layers} of 0 and 1", named)
    if not all(config.layer_kinds(layers, lambda _: True)):
        raise UnsupportedModelError(f"config.json: layer_types of {SLIDING} are not supported; only {FULL} is")
    rope = read_rope(config, d, of.theta)
    return tuple(rope if turns else Rope(0.0) for turns in named[:layers])


_LENGTHENED: Final = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def _lengthened_ropes(config: JsonConfig, d: int, of: Decoder) -> Sequence[Rope]:
    """Return positions that are scaled by YaRN unless the file says otherwise."""
    says = config.get("rope_parameters", None) or config.get("rope_scaling", None)
    data = config.data if says else {**config.data, "rope_parameters": _LENGTHENED}
    return (read_rope(JsonConfig(config.file, data), d, of.theta),)


def _gemma_scalar(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return by what scores are divided: the columns of a head, but in the model of 27 B those of a row for each."""
    wide = config["num_hidden_layers"] == 62
    own = config["hidden_size"] / config["num_attention_heads"] if wide else config["head_dim"]
    return {"query_pre_attn_scalar": own}


_OUT: Final = ("qkv", "attention_out")
_LLAMA: Final = Decoder(
    "llama",
    biases={"attention_bias": _OUT, "mlp_bias": ("mlp_up", "mlp_down")},
    only=_WINDOWS,
    gguf=Gguf("llama", {"hidden_act": "silu"}, pairs_together=True),
)
_QWEN3: Final = Decoder(
    "qwen3",
    _NORMED,
    replace(_BLOCK, head_norms=True),
    {"attention_bias": _OUT},
    ("use_sliding_window", "sliding_window", "max_window_layers", "is_causal"),
    head_dim=128,
    windows=_qwen_windows,
    gguf=Gguf("qwen3", {"hidden_act": "silu"}),
)
_GEMMA3: Final = Decoder(
    "gemma3_text",
    _NORMED
    | {
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_down_norm": "post_feedforward_layernorm",
    },
    replace(_BLOCK, head_norms=True, gamma_offset=1.0, added_norms=True),
    {"attention_bias": _OUT},
    (
        "use_bidirectional_attention", "sliding_window", "sliding_window_pattern", "_sliding_window_pattern",
        "query_pre_attn_scalar", "rope_local_base_freq",
    ),
    {"final_logit_softcapping": ()},
    head_dim=256,
    kv_heads=4,
    theta=1_000_000.0,
    tied=True,
    activation="hidden_activation",
    windows=_gemma_windows,
    ropes=_gemma_ropes,
    scale=lambda config, _: config.number("query_pre_attn_scalar", 256) ** -0.5,
    scaled_by_root=True,
    gguf=Gguf(
        "gemma3",
        # Of the layers every sixth sees all tokens, by no key of older files.
        {"hidden_activation": "gelu_pytorch_tanh", "rope_local_base_freq": 10_000.0, "rope_theta": 1_000_000.0},
        {
            "attention.sliding_window": "sliding_window",
            "attention.sliding_window_pattern": "sliding_window_pattern",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        derived=_gemma_scalar,
    ),
)  # fmt: skip
_GRANITE_GGUF: Final = Gguf(
    "granite",
    {"hidden_act": "silu"},
    {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    pairs_together=True,
)
_GRANITE: Final = Decoder(
    "granite",
    biases=_LLAMA.biases,
    reads=("attention_multiplier",),
    only=_WINDOWS,
    scale=lambda config, _: config.number("attention_multiplier", 1.0),
    multiplied=True,
    gguf=_GRANITE_GGUF,
)
_EXPERT_COUNTS: Final = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
DECODERS: Final[Mapping[str, Decoder]] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": Decoder(
        "mistral",
        only={key: value for key, value in _WINDOWS.items() if key != "sliding_window"},
        reads=("sliding_window",),
        kv_heads=8,
        windows=_mistral_windows,
    ),
    "Qwen2ForCausalLM": Decoder(
        "qwen2",
        biases={"": ("qkv",)},
        reads=("use_sliding_window", "sliding_window", "max_window_layers"),
        only={"use_mrope": (False,)},
        windows=_qwen_windows,
        gguf=Gguf("qwen2", {"hidden_act": "silu"}),
    ),
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3Model": _QWEN3,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3TextModel": _GEMMA3,
    "Phi3ForCausalLM": Decoder(
        "phi3",
        _LAYER | dict.fromkeys(_QKV, "self_attn.qkv_proj") | dict.fromkeys(("mlp_gate", "mlp_up"), "mlp.gate_up_proj"),
        reads=("sliding_window",),
        norm_eps=1e-5,
        only={"attention_bias": (False,), "partial_rotary_factor": (1.0,)},
        windows=_phi3_windows,
        gguf=Gguf("phi3", {"hidden_act": "silu"}, {"attention.sliding_window": "sliding_window"}),
    ),
    "Qwen3MoeForCausalLM": _QWEN3._replace(
        model_type="qwen3_moe",
        part_names=_QWEN_MIXTURE,
        only={},
        head_dim=0,
        kv_heads=4,
        experts=Experts(
            "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", layers_without
        ),
        gguf=Gguf(
            "qwen3moe",
            {"hidden_act": "silu", "norm_topk_prob": True},
            _EXPERT_COUNTS | {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"},
        ),
    ),
    "MixtralForCausalLM": Decoder(
        "mixtral",
        mixture(_LAYER, "block_sparse_moe.gate", *(f"block_sparse_moe.experts.{{}}.w{n}" for n in (1, 3, 2))),
        norm_eps=1e-5,
        only=_WINDOWS,
        kv_heads=8,
        theta=1_000_000.0,
        experts=Experts("num_local_experts"),
        gguf=Gguf("llama", {"hidden_act": "silu"}, _EXPERT_COUNTS, pairs_together=True),
    ),
    "OlmoeForCausalLM": Decoder(
        "olmoe",
        _QWEN_MIXTURE,
        replace(_BLOCK, row_norms=True),
        {"attention_bias": _OUT},
        only={**_WINDOWS, "clip_qkv": ()},
        norm_eps=1e-5,
        experts=Experts("num_experts", normed="norm_topk_prob"),
        gguf=Gguf(
            "olmoe", {"hidden_act": "silu", "norm_topk_prob": False}, _EXPERT_COUNTS | {"expert_count": "num_experts"}
        ),
    ),
    "GraniteMoeForCausalLM": _GRANITE._replace(
        model_type="granitemoe",
        part_names=mixture(
            _LAYER,
            "block_sparse_moe.router.layer",
            *["block_sparse_moe.input_linear"] * 2,
            "block_sparse_moe.output_linear",
        ),
        experts=Experts("num_local_experts"),
        gguf=_GRANITE_GGUF._replace(name="granitemoe", keys={**_GRANITE_GGUF.keys, **_EXPERT_COUNTS}),
    ),
    "GptOssForCausalLM": Decoder(
        "gpt_oss",
        mixture(
            _LAYER | {"sinks": "self_attn.sinks"},
            "mlp.router",
            *["mlp.experts.gate_up_proj"] * 2,
            "mlp.experts.down_proj",
        ),
        replace(_BLOCK, sinks=True),
        {"": _OUT},
        ("layer_types", "sliding_window"),
        {"swiglu_alpha": (1.702,), "attention_bias": (True,)},  # alpha: that of quick GELU
        head_dim=64,
        kv_heads=8,
        theta=150_000.0,
        norm_eps=1e-5,
        windows=_alternating_windows,
        ropes=_lengthened_ropes,
        experts=Experts(
            "num_local_experts",
            activation="quick_gelu",
            limit=("swiglu_limit", 7.0),
            up_offset=1.0,
            biases=True,
            ends=("", "_bias"),
            alternate=True,
            by_inputs=True,
        ),
        gguf=Gguf(
            "gpt-oss",
            {"hidden_act": "silu"},
            _EXPERT_COUNTS
            | {"expert_feed_forward_length": "intermediate_size", "attention.sliding_window": "sliding_window"},
            parts={"post_attention_norm": "mlp_norm"},
            yarn={"truncate": False},
        ),
    ),
    "SmolLM3ForCausalLM": Decoder(
        "smollm3",
        biases=_LLAMA.biases,
        reads=("layer_types", "no_rope_layers", "no_rope_layer_interval", "sliding_window"),
        only={"use_sliding_window": (False,)},
        kv_heads=4,
        theta=2_000_000.0,
        tied=True,
        ropes=_smollm3_ropes,
        gguf=Gguf("smollm3", {"hidden_act": "silu"}, pairs_together=True),
    ),
    "GraniteForCausalLM": _GRANITE,
}
# Those of a model below its head embed, and the others in a directory of sentence-transformers.
ARCHITECTURES: Final = {name: "generation" if name.endswith("ForCausalLM") else "embedding" for name in DECODERS}
TOKENIZER_CLASSES: Final = {
    "gemma3_text": "GemmaTokenizer", "qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer", "granite": "GPT2Tokenizer",
}  # fmt: skip
OWN_KEYS: Final = frozenset({"quantization_config"})
MODEL_TYPES: Final = {name: row.model_type for name, row in DECODERS.items()}


def spec(architecture: str, config: JsonConfig, extras: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a decoder; raises ModelError, UnsupportedModelError."""
    of = DECODERS[architecture]
    config.refuse_unknown_attention(*of.reads, *of.only)
    config.check_keys(KeyTable(frozenset(of.reads), only=of.only, closed=False))
    hidden, positions = config.positive("hidden_size"), config.positive("max_position_embeddings")
    _check_packing(config, of)
    is_free = of.head_dim or (of.experts and config.get("head_dim", 0))  # d need not be h / a
    heads = config.positive("num_attention_heads") if is_free else config.heads(hidden)
    d = config.positive("head_dim", of.head_dim or hidden // heads)
    if of.block.row_norms and d * heads != hidden:
        raise config.bad_value("head_dim", f"hidden_size {hidden} / {heads} heads: its norms take whole rows", d)
    sees_before = config.flag("is_causal", True) and not config.flag("use_bidirectional_attention", False)
    ropes = of.ropes(config, d, of)
    block = replace(
        of.block,
        biases=tuple(b for flag, some in of.biases.items() if not flag or config.flag(flag, False) for b in some),
        kv_heads=config.positive("num_key_value_heads", of.kv_heads or heads),
        head_dim=d,
        scale=of.scale(config, d) * next((rope.factor for rope in ropes if rope.theta), 1.0),
        causal=sees_before,
        thetas=tuple(rope.theta for rope in ropes),
        windows=of.windows(config, sees_before),
        rope_divisors=tuple(rope.divisors for rope in ropes),
        picture_rows=config.whole("picture_rows", 0),
    )
    if of.experts is not None:
        block = with_experts(block, config, of.experts)
    head = _head(architecture, config, extras, of)
    if head.task == "generation" and not block.causal:
        raise UnsupportedModelError("config.json: a model that generates must see only tokens before")
    if heads % block.kv_heads:
        raise ModelError(f"config.json: num_key_value_heads {block.kv_heads} do not divide {heads} heads")
    # A residual that is multiplied by r, in numbers 1 / r of the model's: norms see no difference but in epsilon.
    residual = config.number("residual_multiplier", 1.0) if of.multiplied else 1.0
    embedding = config.number("embedding_multiplier", 1.0) if of.multiplied else 1.0
    root = math.sqrt(hidden) if of.scaled_by_root else 1.0
    return ModelSpec(
        family="decoder",
        architecture=architecture,
        layers=config.positive("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        mlp=config.positive("intermediate_size" if of.experts is None else of.experts.width),
        norm_first=True,
        activation=(of.experts and of.experts.activation) or config.activation(of.activation),
        norm_eps=config.number("rms_norm_eps", of.norm_eps) / residual**2,
        max_tokens=sentences.max_tokens(min(positions, MOST_TOKENS), extras),
        head=head,
        text=TextStem(config.positive("vocab_size"), positions, types=0, scale=root * embedding / residual),
        block=block,
    )


def _check_packing(config: JsonConfig, of: Decoder) -> None:
    """Raise UnsupportedModelError for weights that are quantised, unless they are the family's packed experts."""
    how = config.get("quantization_config", None)
    is_packed = isinstance(how, Mapping) and how.get("quant_method") == "mxfp4"
    if how is not None and not (is_packed and of.experts is not None and of.experts.by_inputs):
        raise UnsupportedModelError(
            f"config.json: quantization_config {str(how)[:60]} is not supported; give the model in numbers or as GGUF"
        )


def _head(architecture: str, config: JsonConfig, extras: Mapping[str, Any], of: Decoder) -> TaskHead:
    if sentences.MODULES in extras:
        return sentences.sentence_head(extras)
    if ARCHITECTURES[architecture] == "embedding":
        return TaskHead("embedding", "last")
    vocab = config.positive("vocab_size")
    end_tokens(config, extras, vocab)  # what would change the text is refused
    tied = config.flag("tie_word_embeddings", of.tied)
    scaling = config.number("logits_scaling", 1.0) if of.multiplied else 1.0
    return TaskHead("generation", "last", outputs=vocab, tied=tied, logits_scaling=scaling)


def _parts(spec: ModelSpec, layer: int) -> Mapping[str, str]:
    """Return what a checkpoint calls the parts of a layer."""
    without = ("mlp_gate", "mlp_up", "mlp_down") if _has_experts(spec, layer) else (ROUTER,)
    names = DECODERS[spec.architecture].part_names
    return {part: name for part, name in names.items() if part not in without and not part.startswith("expert_")}


def _has_experts(spec: ModelSpec, layer: int) -> bool:
    return spec.block.experts > 0 and layer not in spec.block.dense_layers


def tensors(spec: ModelSpec) -> Iterator[TensorSource]:
    """Yield the tensors of a decoder, from the stem to the head."""
    base, of = ("model.", ""), DECODERS[spec.architecture]
    words = prefixed(base, "embed_tokens.weight")
    stored = (*words, causal.LOGITS) if spec.head.tied else words
    yield table("stem.word", stored, text.stem_of(spec).vocab, spec.hidden)
    for i in range(spec.layers):
        here = f"layers.{i}."
        yield from text.layer_tensors(spec, here, base, here, _parts(spec, i))
        if of.experts is not None and _has_experts(spec, i):
            yield from expert_tensors(spec, here, base, here, of.part_names, of.experts)
    yield from norm("final_norm", base, "norm", spec.hidden, bias=False)
    yield from causal.head_tensors(spec, words)


__all__ = ["ARCHITECTURES", "MODEL_TYPES", "OWN_KEYS", "TOKENIZER_CLASSES", "graph", "reference", "spec", "tensors"]
