"""The table of decoders with rotary positions, and their specs and tensors; `causal.py` has their graph.

A decoder continues a text, or embeds it. All have norms before attention and MLP, a gated MLP, and keys and values that
groups of heads share. A row of `DECODERS` states how config.json, tensors and GGUF files of an architecture differ from
Llama's (Touvron et al., 2023). m tokens, h hidden, a heads, d columns of a head, f MLP width.
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
_NORMED: Final = (  # each head of queries and keys has a norm
    {part: _LAYER[part] for part in _QKV}
    | {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
    | {part: name for part, name in _LAYER.items() if part not in _QKV}
)
_BLOCK: Final = BlockSpec(biases=(), norm_bias=False, rms=True, gated=True)
# Windows are refused: Llama ignores them, but the cache of transformers drops tokens by them.
_WINDOWS: Final[Mapping[str, tuple[Any, ...]]] = {
    "attention_chunk_size": (), "layer_types": (), "sliding_window": (), "rope_interleaved": (False,),
}  # fmt: skip
Windows = Callable[[JsonConfig, bool], tuple[int, ...]]  # (config.json, is causal) -> `BlockSpec.windows`


class Gguf(NamedTuple):
    """An architecture in GGUF files: its name, and the keys that it has or lacks."""

    #: Value of `general.architecture`.
    name: str
    #: Keys and values of config.json that the metadata lacks.
    config: Mapping[str, Any] = {}
    #: Further keys of the metadata, each with its key of config.json; common keys are in `gguf_names.KEYS`.
    keys: Mapping[str, str] = {}
    #: The converter moved the two rows of a rotated pair of queries or keys next to each other.
    pairs_together: bool = False
    #: GGUF names of a layer's parts that differ from `gguf_names`, each with its part (a key of `part_names`).
    parts: Mapping[str, str] = {}
    #: Keys and values of YaRN's scaling that the metadata lacks.
    yarn: Mapping[str, Any] = {}
    #: Return keys of config.json that are computed from the others.
    derived: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda _: {}


_QWEN_MIXTURE: Final = mixture(
    _NORMED, "mlp.gate", *(f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down"))
)


class Decoder(NamedTuple):
    """An architecture in the table: its differences from Llama, which the defaults describe."""

    #: `model_type` in config.json.
    model_type: str
    #: Stored names of a layer's parts, below `model.layers.N.`; the parts are the keys of `_LAYER` and `_NORMED`.
    part_names: Mapping[str, str] = _LAYER
    #: Differences in the computation of a layer; `spec` adds what config.json states.
    block: BlockSpec = _BLOCK
    #: Matrices with biases (see `BlockSpec.biases`), by the flag of config.json that adds them; "": always.
    biases: Mapping[str, tuple[str, ...]] = {}
    #: Keys of config.json about attention and positions that `spec` and this row's functions read.
    reads: Sequence[str] = ()
    #: Further keys that would change answers, with their supported values; a missing or null key is always supported.
    only: Mapping[str, tuple[Any, ...]] = {}
    #: Default of head_dim; 0: hidden_size / heads.
    head_dim: int = 0
    #: Default of num_key_value_heads; 0: as many as heads.
    kv_heads: int = 0
    #: Default of rope_theta, the base of rotary positions.
    theta: float = 10_000.0
    #: Default of tie_word_embeddings.
    tied: bool = False
    #: Default of rms_norm_eps.
    norm_eps: float = 1e-6
    #: Key of config.json that names the MLP's activation.
    activation: str = "hidden_act"
    #: Return `BlockSpec.windows`.
    windows: Windows = lambda _config, _is_causal: ()
    #: Return the rotary positions of the layers; a tuple with fewer entries than layers repeats.
    ropes: Callable[[JsonConfig, int, Decoder], Sequence[Rope]] = lambda config, d, decoder: (
        read_rope(config, d, decoder.theta),
    )
    #: Return the factor of attention scores, without `Rope.factor`.
    scale: Callable[[JsonConfig, int], float] = lambda _, d: d**-0.5
    #: config.json may have multipliers of embeddings, residuals and logits.
    multiplied: bool = False
    #: Embeddings are multiplied by the square root of h.
    scaled_by_root: bool = False
    #: Its mixture of experts; None: each layer has an MLP.
    experts: Experts | None = None
    #: Its GGUF files; None: they are not supported.
    gguf: Gguf | None = None


def _mistral_windows(config: JsonConfig, _is_causal: bool) -> tuple[int, ...]:
    positions = config.positive("max_position_embeddings")
    # null means no window, a missing key 4096.
    is_windowed = config.data.get("sliding_window", 0) is not None
    window = config.positive("sliding_window", 4096) if is_windowed else positions
    return (window - 1,) if window < positions else ()


def _phi3_windows(config: JsonConfig, _is_causal: bool) -> tuple[int, ...]:
    positions = config.positive("max_position_embeddings")
    window = config.positive("sliding_window", positions)
    return (window - 1,) if window < positions else ()


def _qwen_windows(config: JsonConfig, is_causal: bool) -> tuple[int, ...]:
    layers = config.positive("num_hidden_layers")
    has_windows = config.flag("use_sliding_window", False) and config.data.get("sliding_window", 0) is not None
    window = config.positive("sliding_window", 4096)
    first_windowed = config.whole("max_window_layers", 28) if has_windows else layers
    full = config.layer_kinds(layers, lambda i: i < first_windowed)
    if not all(full) and not (has_windows and is_causal):
        raise UnsupportedModelError(
            f"config.json: layer_types of {SLIDING} need use_sliding_window and causal attention; without them only "
            f"{FULL} is supported"
        )
    return () if all(full) else tuple(-1 if is_full else window - 1 for is_full in full)


def _gemma_full(config: JsonConfig) -> tuple[bool, ...]:
    """Return whether each layer attends to all tokens; `_sliding_window_pattern` has no effect, as in transformers."""
    pattern = config.positive("sliding_window_pattern", 6)
    return config.layer_kinds(config.positive("num_hidden_layers"), lambda i: (i + 1) % pattern == 0)


def _gemma_windows(config: JsonConfig, is_causal: bool) -> tuple[int, ...]:
    window = config.positive("sliding_window", 4096)
    farthest = window - 1 if is_causal else window // 2  # the window includes the token's own row
    return tuple(-1 if is_full else farthest for is_full in _gemma_full(config))


def _alternating_windows(config: JsonConfig, _is_causal: bool) -> tuple[int, ...]:
    """Return windows for every second layer, from the first on, unless layer_types names other layers."""
    farthest = config.positive("sliding_window", 128) - 1
    full = config.layer_kinds(config.positive("num_hidden_layers"), lambda i: bool(i % 2))
    return tuple(-1 if is_full else farthest for is_full in full)


def _gemma_ropes(config: JsonConfig, d: int, decoder: Decoder) -> Sequence[Rope]:
    ropes = {
        True: read_rope(config, d, decoder.theta, kind=FULL),
        False: read_rope(config, d, 10_000.0, "rope_local_base_freq", SLIDING),
    }
    return tuple(ropes[is_full] for is_full in _gemma_full(config))


def _smollm3_ropes(config: JsonConfig, d: int, decoder: Decoder) -> Sequence[Rope]:
    """Return no positions for layers with 0 in no_rope_layers; without this key for every fourth layer."""
    layers, interval = config.positive("num_hidden_layers"), config.positive("no_rope_layer_interval", 4)
    named = config.get("no_rope_layers", [int((i + 1) % interval != 0) for i in range(layers)])
    if not isinstance(named, list) or len(named) < layers or not set(named) <= {0, 1}:
        raise config.bad_value("no_rope_layers", f"a list of {layers} of 0 and 1", named)
    if not all(config.layer_kinds(layers, lambda _: True)):
        raise UnsupportedModelError(f"config.json: layer_types of {SLIDING} are not supported; only {FULL} is")
    rope = read_rope(config, d, decoder.theta)
    return tuple(rope if has_positions else Rope(0.0) for has_positions in named[:layers])


_GPT_OSS_SCALING: Final = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def _gpt_oss_ropes(config: JsonConfig, d: int, decoder: Decoder) -> Sequence[Rope]:
    """Return positions scaled by YaRN; config.json may name another scaling."""
    has_scaling = config.get("rope_parameters", None) or config.get("rope_scaling", None)
    data = config.data if has_scaling else {**config.data, "rope_parameters": _GPT_OSS_SCALING}
    return (read_rope(JsonConfig(config.file, data), d, decoder.theta),)


def _gemma_scalar(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return query_pre_attn_scalar: d, but h / a in the model of 27 B, which alone has 62 layers."""
    is_27b = config["num_hidden_layers"] == 62
    scalar = config["hidden_size"] / config["num_attention_heads"] if is_27b else config["head_dim"]
    return {"query_pre_attn_scalar": scalar}


_ATTENTION_MATRICES: Final = ("qkv", "attention_out")
_LLAMA: Final = Decoder(
    "llama",
    biases={"attention_bias": _ATTENTION_MATRICES, "mlp_bias": ("mlp_up", "mlp_down")},
    only=_WINDOWS,
    gguf=Gguf("llama", {"hidden_act": "silu"}, pairs_together=True),
)
_QWEN3: Final = Decoder(
    "qwen3",
    _NORMED,
    replace(_BLOCK, head_norms=True),
    {"attention_bias": _ATTENTION_MATRICES},
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
    {"attention_bias": _ATTENTION_MATRICES},
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
        # Older files lack sliding_window_pattern; its default is right for them.
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
        {"attention_bias": _ATTENTION_MATRICES},
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
        {"": _ATTENTION_MATRICES},
        ("layer_types", "sliding_window"),
        {"swiglu_alpha": (1.702,), "attention_bias": (True,)},  # quick GELU has this alpha
        head_dim=64,
        kv_heads=8,
        theta=150_000.0,
        norm_eps=1e-5,
        windows=_alternating_windows,
        ropes=_gpt_oss_ropes,
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
# An architecture without head embeds; in a directory of sentence-transformers the others embed too (`_head`).
ARCHITECTURES: Final = {name: "generation" if name.endswith("ForCausalLM") else "embedding" for name in DECODERS}
TOKENIZER_CLASSES: Final = {
    "gemma3_text": "GemmaTokenizer", "qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer", "granite": "GPT2Tokenizer",
}  # fmt: skip
OWN_KEYS: Final = frozenset({"quantization_config"})
MODEL_TYPES: Final = {name: decoder.model_type for name, decoder in DECODERS.items()}


def spec(architecture: str, config: JsonConfig, extras: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a decoder; raises ModelError, UnsupportedModelError."""
    decoder = DECODERS[architecture]
    experts = decoder.experts
    config.refuse_unknown_attention(*decoder.reads, *decoder.only)
    config.check_keys(KeyTable(frozenset(decoder.reads), only=decoder.only, closed=False))
    hidden, positions = config.positive("hidden_size"), config.positive("max_position_embeddings")
    _check_quantisation(config, experts)
    is_free = decoder.head_dim or (experts and config.get("head_dim", 0))  # d need not be h / a
    heads = config.positive("num_attention_heads") if is_free else config.heads(hidden)
    d = config.positive("head_dim", decoder.head_dim or hidden // heads)
    if decoder.block.row_norms and d * heads != hidden:
        raise config.bad_value("head_dim", f"hidden_size {hidden} / {heads} heads: its norms take whole rows", d)
    is_causal = config.flag("is_causal", True) and not config.flag("use_bidirectional_attention", False)
    ropes = decoder.ropes(config, d, decoder)
    biases = (part for flag, parts in decoder.biases.items() if not flag or config.flag(flag, False) for part in parts)
    block = replace(
        decoder.block,
        biases=tuple(biases),
        kv_heads=config.positive("num_key_value_heads", decoder.kv_heads or heads),
        head_dim=d,
        scale=decoder.scale(config, d) * next((rope.factor for rope in ropes if rope.theta), 1.0),
        causal=is_causal,
        thetas=tuple(rope.theta for rope in ropes),
        windows=decoder.windows(config, is_causal),
        rope_divisors=tuple(rope.divisors for rope in ropes),
        picture_rows=config.whole("picture_rows", 0),
    )
    if experts is not None:
        block = with_experts(block, config, experts)
    head = _head(architecture, config, extras, decoder)
    if head.task == "generation" and not block.causal:
        raise UnsupportedModelError(
            "config.json: a model that generates must have causal attention; correct is_causal or "
            "use_bidirectional_attention, or use it for embeddings (sentence-transformers)"
        )
    if heads % block.kv_heads:
        raise ModelError(f"config.json: num_key_value_heads {block.kv_heads} do not divide {heads} heads")
    # The graph computes hidden states divided by the residual multiplier r, so its residual sums need no factor:
    # embeddings are divided by r, and epsilons of norms by r^2, so that normed rows are the same.
    residual = config.number("residual_multiplier", 1.0) if decoder.multiplied else 1.0
    embedding = config.number("embedding_multiplier", 1.0) if decoder.multiplied else 1.0
    root = math.sqrt(hidden) if decoder.scaled_by_root else 1.0
    return ModelSpec(
        family="decoder",
        architecture=architecture,
        layers=config.positive("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        mlp=config.positive("intermediate_size" if experts is None else experts.width),
        norm_first=True,
        activation=(experts and experts.activation) or config.activation(decoder.activation),
        norm_eps=config.number("rms_norm_eps", decoder.norm_eps) / residual**2,
        max_tokens=sentences.max_tokens(min(positions, MOST_TOKENS), extras),
        head=head,
        text=TextStem(config.positive("vocab_size"), positions, types=0, scale=root * embedding / residual),
        block=block,
    )


def _check_quantisation(config: JsonConfig, experts: Experts | None) -> None:
    """Raise UnsupportedModelError for quantised weights, except experts in MXFP4 of a family that stores them so."""
    stated = config.get("quantization_config", None)
    is_mxfp4 = isinstance(stated, Mapping) and stated.get("quant_method") == "mxfp4"
    if stated is not None and not (is_mxfp4 and experts is not None and experts.by_inputs):
        raise UnsupportedModelError(
            f"config.json: quantization_config {str(stated)[:60]} is not supported; use the model before quantisation, "
            "or a GGUF file of it"
        )


def _head(architecture: str, config: JsonConfig, extras: Mapping[str, Any], decoder: Decoder) -> TaskHead:
    if sentences.MODULES in extras:
        return sentences.sentence_head(extras)
    if ARCHITECTURES[architecture] == "embedding":
        return TaskHead("embedding", "last")
    vocab = config.positive("vocab_size")
    end_tokens(config, extras, vocab)  # raises for keys that would change the text
    tied = config.flag("tie_word_embeddings", decoder.tied)
    scaling = config.number("logits_scaling", 1.0) if decoder.multiplied else 1.0
    return TaskHead("generation", "last", outputs=vocab, tied=tied, logits_scaling=scaling)


def _parts(spec: ModelSpec, layer: int) -> Mapping[str, str]:
    """Return the stored names of a layer's parts, without those of experts (`expert_tensors`)."""
    without = ("mlp_gate", "mlp_up", "mlp_down") if _has_experts(spec, layer) else (ROUTER,)
    names = DECODERS[spec.architecture].part_names
    return {part: name for part, name in names.items() if part not in without and not part.startswith("expert_")}


def _has_experts(spec: ModelSpec, layer: int) -> bool:
    return spec.block.experts > 0 and layer not in spec.block.dense_layers


def tensors(spec: ModelSpec) -> Iterator[TensorSource]:
    """Yield the tensors of a decoder, from the stem to the head."""
    base, decoder = ("model.", ""), DECODERS[spec.architecture]
    embeddings = prefixed(base, "embed_tokens.weight")
    stored = (*embeddings, causal.LM_HEAD) if spec.head.tied else embeddings
    yield table("stem.word", stored, text.stem_of(spec).vocab, spec.hidden)
    for i in range(spec.layers):
        layer = f"layers.{i}."
        yield from text.layer_tensors(spec, layer, base, layer, _parts(spec, i))
        if decoder.experts is not None and _has_experts(spec, i):
            yield from expert_tensors(spec, layer, base, layer, decoder.part_names, decoder.experts)
    yield from norm("final_norm", base, "norm", spec.hidden, bias=False)
    yield from causal.head_tensors(spec, embeddings)


__all__ = ["ARCHITECTURES", "MODEL_TYPES", "OWN_KEYS", "TOKENIZER_CLASSES", "graph", "reference", "spec", "tensors"]
