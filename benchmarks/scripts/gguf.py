"""Write a GGUF file that nobody has to download: Llama's shapes with weights from a seed, or a file stored otherwise.

`python -m benchmarks gguf out=FILE kind=llama-1b storage=q4_0`, or `source=FILE` in place of a kind. Wants `gguf`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.errors import BenchError

TABLE: Final = "q8_0"  # of the embeddings, which are the head too
AT_ONCE: Final = 1 << 24  # values that are quantised at once
Floats = NDArray[np.float32]
Rows = Callable[[int, int], Floats]


class Shape(NamedTuple):
    """The sizes of a decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    mlp: int
    vocabulary: int = 128_256


KINDS: Final = {
    "llama-1b": Shape(16, 2048, 32, 8, 64, 8192),
    "llama-3b": Shape(28, 3072, 24, 8, 128, 8192),
}


def main(out: str, kind: str = "", source: str = "", storage: str = "q4_0", seed: int = 0) -> None:
    """Write the file, its matrices stored as wanted and its embeddings as Q8_0."""
    import gguf

    if (kind in KINDS) == bool(source):
        raise BenchError(f"give a kind ({', '.join(KINDS)}), or a source to be stored otherwise")
    target = Path(out).expanduser()
    writer = gguf.GGUFWriter(target, "llama")
    matrices = _copied(gguf, writer, Path(source).expanduser()) if source else _seeded(writer, KINDS[kind], seed)
    for name, (count, width), rows in matrices:
        how = gguf.GGMLQuantizationType[(TABLE if name == "token_embd.weight" else storage).upper()]
        step = max(AT_ONCE // width, 1)
        parts = (rows(at, min(at + step, count)) for at in range(0, count, step))
        writer.add_tensor(name, np.concatenate([gguf.quantize(part, how) for part in parts]), raw_dtype=how)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{target}: {target.stat().st_size:,} bytes")


def _seeded(writer: Any, of: Shape, seed: int) -> Iterator[tuple[str, tuple[int, int], Rows]]:
    """Give the writer what is no matrix; yield each matrix: its name, [rows, columns], and what makes rows of it."""
    writer.add_block_count(of.layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(of.hidden)
    writer.add_feed_forward_length(of.mlp)
    writer.add_head_count(of.heads)
    writer.add_head_count_kv(of.kv_heads)
    writer.add_key_length(of.head)
    writer.add_value_length(of.head)
    writer.add_rope_dimension_count(of.head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500_000.0)
    _words(writer, of.vocabulary)
    kv, q = of.kv_heads * of.head, of.heads * of.head
    matrices = {"token_embd.weight": (of.vocabulary, of.hidden)}
    writer.add_tensor("output_norm.weight", np.ones(of.hidden, np.float32))
    for layer in range(of.layers):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(of.hidden, np.float32))
        matrices |= {
            f"blk.{layer}.{name}.weight": size
            for name, size in {
                "attn_q": (q, of.hidden), "attn_k": (kv, of.hidden), "attn_v": (kv, of.hidden),
                "attn_output": (of.hidden, q), "ffn_gate": (of.mlp, of.hidden), "ffn_up": (of.mlp, of.hidden),
                "ffn_down": (of.hidden, of.mlp),
            }.items()
        }  # fmt: skip
    random = np.random.default_rng(seed)
    for name, size in matrices.items():
        yield name, size, partial(_normals, random, size[1])


def _normals(random: np.random.Generator, columns: int, at: int, stop: int) -> Floats:
    """Return rows whose products keep the size of what they multiply."""
    return random.standard_normal((stop - at, columns), np.float32) * np.float32(columns**-0.5)


def _words(writer: Any, count: int) -> None:
    """Give the writer a vocabulary of bytes, and words that no text has."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    first = ["<s>", "</s>", "ab"]  # files without a pair of bytes that are joined are refused
    unused = [f"<unused{i}>" for i in range(count - len(letters) - len(first))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*first, *letters, *unused])
    writer.add_token_types([3, 3] + [1] * (count - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)


def _copied(gguf: Any, writer: Any, path: Path) -> Iterator[tuple[str, tuple[int, int], Rows]]:
    """Give the writer all of a file but its matrices, and yield those as numbers."""
    reader = gguf.GGUFReader(path)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind, *inner = field.types
            writer.add_key_value(name, field.contents(), kind, inner[-1] if inner else None)
    for tensor in reader.tensors:
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, np.array(tensor.data))
            continue
        columns, rows = (int(n) for n in tensor.shape)

        def part(at: int, stop: int, stored: Any = tensor) -> Floats:
            return np.ascontiguousarray(gguf.dequantize(stored.data[at:stop], stored.tensor_type), np.float32)

        yield tensor.name, (rows, columns), part
