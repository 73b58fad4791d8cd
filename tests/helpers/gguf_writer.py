"""Writes GGUF files as llama.cpp's converter does, and quantises as it does, value by value as its C source reads."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import pre_tokenizers

from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.core.storage import STORAGES

KIND = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "q4_k": 12, "q5_k": 13, "q6_k": 14,
    "bf16": 30, "mxfp4": 39,
}  # fmt: skip
LAYER = {
    "attention_norm": "attn_norm", "query": "attn_q", "key": "attn_k", "value": "attn_v", "query_norm": "attn_q_norm",
    "key_norm": "attn_k_norm", "sinks": "attn_sinks", "attention_out": "attn_output",
    "attention_out_norm": "post_attention_norm", "mlp_norm": "ffn_norm", "router": "ffn_gate_inp",
    "mlp_gate": "ffn_gate", "mlp_up": "ffn_up", "mlp_down": "ffn_down", "mlp_down_norm": "post_ffw_norm",
}  # fmt: skip
WHOLE = {"stem.word": "token_embd", "final_norm": "output_norm", "head.decoder": "output"}


def quantised(values: np.ndarray, storage: str) -> np.ndarray:
    """Return rows [n, k] as stored, u8 [n, bytes]; what k does not divide is f16, as converters do."""
    values = np.ascontiguousarray(values, np.float32)
    if storage == "f32":
        return values.view(np.uint8)
    if storage == "f16":
        return values.astype("<f2").view(np.uint8)
    if storage == "bf16":
        return np.ascontiguousarray(values.view("<u4") >> 16).astype("<u2").view(np.uint8)
    layout = STORAGES[storage]
    blocks = values.reshape(-1, layout.block)
    return np.stack([_BLOCK[storage](block) for block in blocks]).reshape(len(values), -1)


def _half(value: Any) -> np.ndarray:
    return np.array([value], "<f2").view(np.uint8)


def _q4_0(x: np.ndarray) -> np.ndarray:
    step = x[np.abs(x).argmax()] / -8
    q = np.clip(np.floor(x / step + 8.5) if step else 8 + 0 * x, 0, 15).astype(np.uint8)
    return np.concatenate([_half(step), q[:16] | q[16:] << 4])


def _q4_1(x: np.ndarray) -> np.ndarray:
    step = (x.max() - x.min()) / 15
    q = np.clip(np.floor((x - x.min()) / step + 0.5) if step else 0 * x, 0, 15).astype(np.uint8)
    return np.concatenate([_half(step), _half(x.min()), q[:16] | q[16:] << 4])


def _q8_0(x: np.ndarray) -> np.ndarray:
    step = np.abs(x).max() / 127
    return np.concatenate([_half(step), (np.rint(x / step) if step else 0 * x).astype(np.int8).view(np.uint8)])


def _q5_0(x: np.ndarray) -> np.ndarray:
    step = x[np.abs(x).argmax()] / -16
    q = np.clip(np.floor(x / step + 16.5) if step else 16 + 0 * x, 0, 31).astype(np.uint8)
    return np.concatenate([_half(step), np.packbits(q >> 4, bitorder="little"), q[:16] & 15 | (q[16:] & 15) << 4])


def _q5_1(x: np.ndarray) -> np.ndarray:
    step = (x.max() - x.min()) / 31
    q = np.clip(np.floor((x - x.min()) / step + 0.5) if step else 0 * x, 0, 31).astype(np.uint8)
    low = q[:16] & 15 | (q[16:] & 15) << 4
    return np.concatenate([_half(step), _half(x.min()), np.packbits(q >> 4, bitorder="little"), low])


def _eight_parts(x: np.ndarray, most: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Return scales and minima as stored, and codes [8, 32] from 0 to `most`."""
    parts = x.reshape(8, 32)
    least = np.maximum(-parts.min(axis=1), 0)
    steps = (parts.max(axis=1) + least) / most
    scale, minimum = (max(float(np.float16(v.max() / 63)), 1e-7) for v in (steps, least))
    scales, minima = (np.rint(v / of).clip(0, 63).astype(np.uint8) for v, of in ((steps, scale), (least, minimum)))
    own = np.maximum(scale * scales, 1e-9)[:, None]
    q = np.rint((parts + (minimum * minima)[:, None]) / own).clip(0, most).astype(np.uint8)
    both = [v[:4] | v[4:] >> 4 << 6 for v in (scales, minima)]
    packed = [*both, scales[4:] & 15 | (minima[4:] & 15) << 4]
    return [_half(scale), _half(minimum), *packed], q


def _q4_k(x: np.ndarray) -> np.ndarray:
    scales, q = _eight_parts(x, 15)
    return np.concatenate([*scales, *(q[::2] | q[1::2] << 4)])


def _q5_k(x: np.ndarray) -> np.ndarray:
    scales, q = _eight_parts(x, 31)
    fifths = np.packbits(q >> 4, axis=0, bitorder="little")
    return np.concatenate([*scales, *fifths, *(q[::2] & 15 | (q[1::2] & 15) << 4)])


def _q6_k(x: np.ndarray) -> np.ndarray:
    parts = x.reshape(16, 16)
    steps = parts[np.arange(16), np.abs(parts).argmax(axis=1)] / -32
    scale = max(float(np.float16(np.abs(steps).max() / 127)), 1e-7)
    scales = np.rint(steps / scale).clip(-128, 127).astype(np.int8)
    own = np.where(scales, scale * scales, 1.0)[:, None]
    q = (np.rint(parts / own).clip(-32, 31) + 32).astype(np.uint8).reshape(2, 4, 32)
    lower = q[:, :2] & 15 | (q[:, 2:] & 15) << 4
    upper = q[:, 0] >> 4 | q[:, 1] >> 4 << 2 | q[:, 2] >> 4 << 4 | q[:, 3] >> 4 << 6
    return np.concatenate([lower.reshape(-1), upper.reshape(-1), scales.view(np.uint8), _half(scale)])


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _mxfp4(x: np.ndarray) -> np.ndarray:
    top = np.abs(x).max()
    exponent = int(np.floor(np.log2(top))) - 2 if top else -127
    q = np.abs(x[:, None] / 2.0**exponent - FP4).argmin(axis=1).astype(np.uint8)
    return np.concatenate([np.array([exponent + 127], np.uint8), q[:16] | q[16:] << 4])


_BLOCK = {
    "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0, "q4_k": _q4_k, "q5_k": _q5_k,
    "q6_k": _q6_k, "mxfp4": _mxfp4,
}  # fmt: skip


def text_bytes(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value_bytes(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text_bytes(value)
    first, *_ = value
    items = b"".join(value_bytes(item)[4:] for item in value)
    kind = struct.pack("<I", 5) if isinstance(first, int) else value_bytes(first)[:4]  # signed, as the converter has it
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(value)) + items


def head_bytes(metadata: Mapping[str, Any], infos: Sequence[bytes]) -> bytes:
    """Return what comes before the tensors; infos: the description of each."""
    keys = [text_bytes(key) + value_bytes(value) for key, value in metadata.items()]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(keys)) + b"".join([*keys, *infos])
    return head + b"\0" * (-len(head) % 32)


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[np.ndarray, str]]) -> Path:
    """Write a file; tensors: values [rows, columns] or [n], and how they are stored."""
    infos, data = [], b""
    for name, (values, storage) in tensors.items():
        raw = quantised(values.reshape(-1, values.shape[-1]), storage)
        dims = struct.pack(f"<I{values.ndim}Q", values.ndim, *values.shape[::-1])
        infos.append(text_bytes(name) + dims + struct.pack("<IQ", KIND[storage], len(data)))
        data += raw.tobytes() + b"\0" * (-raw.nbytes % 32)
    path.write_bytes(head_bytes(metadata, infos) + data)
    return path


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of queries or keys in the converter's order."""
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def converted(
    original: Path,
    path: Path,
    storage: str,
    table: str = "",
    architecture: str = "llama",
    added: Mapping[str, tuple[np.ndarray, str]] | None = None,
    files: int = 1,
    control: tuple[str, ...] = (),
    **more: Any,
) -> Path:
    """Write a decoder as GGUF; storage: of the matrices, table: of the embeddings.

    added: more tensors. files: how many the model is split into, of which `path` has no number.
    control: names of the first control tokens.
    """
    with Checkpoint.open(original) as whole:
        spec, tensors = whole.spec, dict(whole.tensors())
        config = whole.config
    stored: dict[str, tuple[np.ndarray, str]] = {}
    for name, array in tensors.items():
        own, end = (name, "weight") if name.endswith(("stem.word", "sinks")) else name.rsplit(".", 1)
        values, how = (array.T if array.ndim == 2 and own != "stem.word" else array), "f32"
        if ".experts." in own:
            _, layer, _, *expert, part = own.split(".")
            if end == "bias":
                stored[f"blk.{layer}.ffn_{part}_exps.bias"] = array, "f32"
                continue
            whole = stored.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", (np.empty((0, *values.shape)), storage))
            assert [str(len(whole[0]))] == expert
            how = "f16" if values.shape[1] % STORAGES[storage].block else storage
            stored[f"blk.{layer}.ffn_{part}_exps.weight"] = np.concatenate([whole[0], values[None]]), how
            continue
        if own.startswith("layers."):
            _, layer, part = own.split(".")
            if part in ("query", "key") and architecture in ("llama", "smollm3", "granite", "granitemoe"):
                values = permuted(values, spec.heads if part == "query" else spec.kv_heads)
            is_other = architecture == "gpt-oss" and part == "mlp_norm"
            own = f"blk.{layer}.{'post_attention_norm' if is_other else LAYER[part]}"
        else:
            own = WHOLE[own]
            if own == "output" and spec.head.tied:
                continue
        if architecture == "gemma3" and own.endswith("norm"):
            values = values + 1
        if values.ndim == 2:
            how = (table or "f16") if own in ("token_embd", "output") else storage
            how = "f16" if values.shape[1] % STORAGES[how].block else how
        stored[f"{own}.{end}"] = (values, how)
    if architecture == "phi3":
        for layer in range(spec.layers):
            for whole, parts in (("attn_qkv", ("attn_q", "attn_k", "attn_v")), ("ffn_up", ("ffn_gate", "ffn_up"))):
                rows = [stored.pop(f"blk.{layer}.{part}.weight") for part in parts]
                stored[f"blk.{layer}.{whole}.weight"] = np.concatenate([values for values, _ in rows]), rows[0][1]
    stored |= added or {}
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: (c not in "ĠÃ©", c))
    first = [*control, *["<s>", "<unk>", "<|user|>", "</s>"][len(control) :]]
    tokens = [*first, "ab", *letters, *map(str, range(10, 1000))][: spec.head.outputs]
    metadata = {
        "general.architecture": architecture,
        f"{architecture}.block_count": spec.layers,
        f"{architecture}.context_length": config["max_position_embeddings"],
        f"{architecture}.embedding_length": spec.hidden,
        f"{architecture}.feed_forward_length": spec.mlp,
        f"{architecture}.attention.head_count": spec.heads,
        f"{architecture}.attention.head_count_kv": spec.kv_heads,
        f"{architecture}.attention.key_length": spec.head_dim,
        f"{architecture}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{architecture}.rope.freq_base": float(config["rope_theta"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 4 + [1] * (len(tokens) - 4),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.chat_template": "{{ messages[0].content }}",
        **more,
    }
    metadata = {key: value for key, value in metadata.items() if value is not None}
    if files == 1:
        return write_gguf(path, metadata, stored)
    paths, names = [path.with_name(f"{path.stem}-{i + 1:05}-of-{files:05}.gguf") for i in range(files)], [*stored]
    for i, part in enumerate(paths):
        split = {"split.no": i, "split.count": files, "split.tensors.count": len(names)}
        own = {name: stored[name] for name in names[i::files]}
        write_gguf(part, split | (metadata if i == 0 else {"general.alignment": 32}), own)
    return paths[0]
