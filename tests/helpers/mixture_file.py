"""Writes a GGUF file of Qwen3-MoE's shapes part by part, from seeded codes: gigabytes take seconds and no memory."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from gguf_writer import KIND, head_bytes, text_bytes
from tokenizers import pre_tokenizers

from hepti_mqtt.core.storage import STORAGES


class Shape(NamedTuple):
    """Sizes of a mixture; those of Qwen3-30B-A3B but for layers and vocabulary."""

    layers: int
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 4
    head: int = 128
    experts: int = 128
    chosen: int = 8
    width: int = 768
    vocabulary: int = 32_000
    context: int = 256


def tensors_of(shape: Shape) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and storage of each tensor; the head is the embeddings."""
    h, q, kv, f = shape.hidden, shape.heads * shape.head, shape.kv_heads * shape.head, shape.width
    tensors = {"token_embd.weight": ((shape.vocabulary, h), "q8_0"), "output_norm.weight": ((h,), "f32")}
    for i in range(shape.layers):
        tensors |= {
            f"blk.{i}.{name}.weight": kind
            for name, kind in {
                "attn_norm": ((h,), "f32"),
                "ffn_norm": ((h,), "f32"),
                "attn_q_norm": ((shape.head,), "f32"),
                "attn_k_norm": ((shape.head,), "f32"),
                "attn_q": ((q, h), "q4_0"),
                "attn_k": ((kv, h), "q4_0"),
                "attn_v": ((kv, h), "q4_0"),
                "attn_output": ((h, q), "q4_0"),
                "ffn_gate_inp": ((shape.experts, h), "f32"),
                "ffn_gate_exps": ((shape.experts, f, h), "q4_0"),
                "ffn_up_exps": ((shape.experts, f, h), "q4_0"),
                "ffn_down_exps": ((shape.experts, h, f), "q4_0"),
            }.items()
        }
    return tensors


def write_mixture(path: Path, shape: Shape, seed: int = 3) -> Path:
    """Write the file; each matrix spreads so that a row of normal values stays one."""
    infos, at, tensors = [], 0, tensors_of(shape)
    for name, (dims, storage) in tensors.items():
        place = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims[::-1], KIND[storage], at)
        infos.append(text_bytes(name) + place)
        at += -(-_nbytes(dims, storage) // 32) * 32
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(head_bytes(_metadata(shape), infos))
        for dims, storage in tensors.values():
            _write(file, rng, dims, storage)
            file.write(b"\0" * (-_nbytes(dims, storage) % 32))
    return path


def _nbytes(dims: tuple[int, ...], storage: str) -> int:
    return STORAGES[storage].row_bytes(math.prod(dims))


def _write(file: BinaryIO, rng: np.random.Generator, dims: tuple[int, ...], storage: str) -> None:
    if storage == "f32":
        values = rng.standard_normal(dims, np.float32)
        file.write((values * dims[-1] ** -0.5 if len(dims) > 1 else 1 + 0.1 * values).astype("<f4").tobytes())
        return
    of = STORAGES[storage]
    deviation = 4.6 if storage == "q4_0" else 73.9  # of codes that are all equally likely
    scale = np.array([dims[-1] ** -0.5 / deviation], "<f2").view(np.uint8)
    for _ in range(math.prod(dims[:-2])):
        blocks = math.prod(dims[-2:]) // of.block
        raw = rng.integers(0, 256, (blocks, of.block_bytes), np.uint8)
        raw[:, :2] = scale
        file.write(raw.tobytes())


def _metadata(shape: Shape) -> dict[str, Any]:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "<unk>", "<|user|>", "</s>", "ab", *letters, *(f"w{i}" for i in range(shape.vocabulary))]
    own = {
        "block_count": shape.layers,
        "context_length": shape.context,
        "embedding_length": shape.hidden,
        "feed_forward_length": 3 * shape.hidden,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head,
        "attention.value_length": shape.head,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
        "expert_count": shape.experts,
        "expert_used_count": shape.chosen,
        "expert_feed_forward_length": shape.width,
    }
    return {
        "general.architecture": "qwen3moe",
        **{f"qwen3moe.{key}": value for key, value in own.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens[: shape.vocabulary],
        "tokenizer.ggml.token_type": [3] * 4 + [1] * (shape.vocabulary - 4),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 3,
    }
