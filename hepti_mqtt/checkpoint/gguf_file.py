"""Reads GGUF (versions 2 and 3) like the checkpoint from which it was converted, by ranges of rows.

The metadata is returned as config.json and tokenizer.json, tensors under the names of the original (`gguf_names`), and
weights in the blocks of the file (`core.storage`).

Format, all little-endian: "GGUF"; u32 version; u64 number of tensors; u64 number of keys; for each key: string, u32
type, value; for each tensor: string, u32 rank, u64 per dimension (innermost first), u32 type, u64 offset; then the
data, aligned. A string is u64 length and bytes; an array is u32 type, u64 length and values.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hepti_mqtt.checkpoint.cursor import Cursor
from hepti_mqtt.checkpoint.formats import explain_file, has_safetensors
from hepti_mqtt.checkpoint.gguf_names import ARCHITECTURES, BIASES, KEYS, NEUTRAL, TENSORS, layer_names
from hepti_mqtt.checkpoint.gguf_tokenizer import end_token_ids, tokenizer_files
from hepti_mqtt.checkpoint.safetensors_file import RowsFile, close_all
from hepti_mqtt.checkpoint.storage import Rows, TensorReader
from hepti_mqtt.core.errors import ModelError, UnsupportedModelError
from hepti_mqtt.core.storage import STORAGES, Storage
from hepti_mqtt.models.decoder import DECODERS

MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_MOST: Final = 1 << 16  # limit of keys, and of tensors
_MOST_VALUES: Final = 1 << 22  # limit of an array's values
_MOST_RANK: Final = 4
_NUMBERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT, _STRING, _ARRAY = 6, 8, 9
_CONFIG: Final = "tokenizer_config.json"
# Storages (`core.storage.STORAGES`) by their number in GGUF files; then names of unsupported ones, for errors.
_KINDS: Final[Mapping[int, str]] = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 10: "q2_k", 11: "q3_k", 12: "q4_k",
    13: "q5_k", 14: "q6_k", 20: "iq4_nl", 23: "iq4_xs", 30: "bf16", 39: "mxfp4",
}  # fmt: skip
_OTHERS: Final[Mapping[int, str]] = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip


_SPLIT: Final = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf")


class _Tensor(NamedTuple):
    shape: tuple[int, ...]
    storage: Storage
    #: First byte in its file.
    offset: int
    #: Index of its file in a split model.
    part: int = 0


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file of a path: the file itself, or that of a directory without safetensors; None if none.

    Of a split model it is the first file. Raises ModelError for a directory with several models.
    """
    if path.is_file():
        return _first_part(path) if path.suffix == ".gguf" else None
    if has_safetensors(path):
        return None
    models = sorted({_first_part(file) for file in path.glob("*.gguf")})
    if len(models) > 1:
        raise ModelError(f"{path} has {len(models)} GGUF files; give one of them, as in --model NAME={models[0]}")
    return models[0] if models else None


def _first_part(path: Path) -> Path:
    """Return the first file of a split model, else the file itself."""
    split = _SPLIT.fullmatch(path.name)
    return path if split is None else path.with_name(f"{split[1]}-00001-of-{split[3]}.gguf")


class GgufFile(RowsFile):
    """An open GGUF file of a supported architecture.

    config, tokenizer, tokenizer_config: the contents of the original's JSON files; tokenizer is None if the file has
    none. Raises ModelError for another format or a truncated file, UnsupportedModelError for an unsupported model.
    """

    def __init__(self, path: Path, *, whole: bool = True) -> None:
        """Open the file; whole: refuse a file that ends before its last tensor."""
        super().__init__(path)
        self._whole = whole
        self._others: list[RowsFile] = []
        self.tokenizer: dict[str, Any] | None = None
        self.tokenizer_config: dict[str, Any] = {}
        try:
            self._metadata, self._tensors = self._read(self)
            self._add_parts()
            self._refuse()
            self.config = self._config()
            self.tensors = dict(self._named())
            if "tokenizer.ggml.model" in self._metadata:
                self.tokenizer, self.tokenizer_config = tokenizer_files(path, self._metadata)
        except (struct.error, KeyError, IndexError, TypeError, UnicodeDecodeError, ValueError, OverflowError) as error:
            self.close()
            raise ModelError(f"{path} cannot be read as GGUF ({error}): {explain_file(path)}") from error
        except BaseException:
            self.close()
            raise

    # -- the file -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close all files; a second call does nothing."""
        super().close()
        close_all(self._others)

    def _add_parts(self) -> None:
        """Open the other files of a split model; raises ModelError if one is missing or of another model."""
        count = self._metadata.get("split.count", 1)
        split = _SPLIT.fullmatch(self.path.name)
        if count == 1:
            return
        if split is None or int(split[3]) != count:
            raise ModelError(
                f"{self.path} is one of {count} files of a model; keep their names, as in "
                f"MODEL-00001-of-{count:05}.gguf"
            )
        for number in range(2, count + 1):
            path = self.path.with_name(f"{split[1]}-{number:05}-of-{split[3]}.gguf")
            if not path.is_file():
                raise ModelError(f"{path} is missing: the model is in {count} files; copy all of them")
            self._others.append(file := RowsFile(path))
            self.stamps += file.stamps
            metadata, tensors = self._read(file)
            if (metadata.get("split.no"), metadata.get("split.count")) != (number - 1, count):
                raise ModelError(f"{path} is no part of this model; copy all its files again")
            if twice := self._tensors.keys() & tensors.keys():
                raise ValueError(f"{min(twice)} stands in two files")
            self._tensors |= {name: tensor._replace(part=number - 1) for name, tensor in tensors.items()}
        if self._metadata.get("split.tensors.count", len(self._tensors)) != len(self._tensors):
            raise ModelError(f"{self.path} and its other files lack tensors; copy all of them again")

    def _read(self, file: RowsFile) -> tuple[dict[str, Any], dict[str, _Tensor]]:
        """Return the metadata of a file, and where each tensor is."""
        end = file.stamps[-1].nbytes
        cursor = Cursor(file.pread, end)
        if cursor.take(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        (version,) = cursor.numbers("<I")
        if version not in _VERSIONS:
            raise UnsupportedModelError(f"{file.path} is GGUF in version {version}; supported: versions 2 and 3")
        tensors, keys = cursor.numbers("<QQ")
        if max(tensors, keys) > _MOST:
            raise ValueError(f"{tensors} tensors and {keys} keys")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            name = _text(cursor)
            metadata[name] = _value(cursor, cursor.numbers("<I")[0])
        rows = [self._info(cursor) for _ in range(tensors)]
        align = metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1:
            raise ValueError(f"an alignment of {align}")
        base = -(-cursor.at // align) * align
        by_name: dict[str, _Tensor] = {}
        for name, tensor in rows:
            nbytes = math.prod(tensor.shape) // tensor.storage.block * tensor.storage.block_bytes
            if self._whole and (stop := base + tensor.offset + nbytes) > end:
                raise ModelError(
                    f"{file.path} has {end:,} bytes, and {name} ends at {stop:,}: its copy or download was cut off; "
                    "copy it again"
                )
            if name in by_name:
                raise ValueError(f"{name} stands in it twice")
            by_name[name] = tensor._replace(offset=base + tensor.offset)
        return metadata, by_name

    def _info(self, cursor: Cursor) -> tuple[str, _Tensor]:
        name = _text(cursor)
        (rank,) = cursor.numbers("<I")
        if not 1 <= rank <= _MOST_RANK:
            raise ValueError(f"{name[:80]} has {rank} dimensions")
        *dims, kind, offset = cursor.numbers(f"<{rank}QIQ")
        if kind not in _KINDS:
            supported = ", ".join(name.upper() for name in _KINDS.values())
            raise UnsupportedModelError(
                f"{self.path}: {name[:80]} is stored as {_OTHERS.get(kind, f'type {kind}')}, which is not supported; "
                f"give the model in one of {supported}"
            )
        storage = STORAGES[_KINDS[kind]]
        if not all(0 < dim < 1 << 31 for dim in dims) or dims[0] % storage.block:
            raise ValueError(f"{name[:80]} of {dims} in blocks of {storage.block}")
        return name, _Tensor(tuple(reversed(dims)), storage, offset)

    # -- as the original ----------------------------------------------------------------------------------------------

    def _refuse(self) -> None:
        """Raise UnsupportedModelError for unsupported architectures and options."""
        name = str(self._metadata.get("general.architecture"))
        original = ARCHITECTURES.get((name, bool(self._metadata.get(f"{name}.expert_count"))))
        if original is None:
            names = ", ".join(dict.fromkeys(name for name, _ in ARCHITECTURES))
            raise UnsupportedModelError(
                f"{self.path} has the architecture {name[:40]!r}, which is not supported in GGUF (supported: {names}); "
                "give the original model with model.safetensors"
            )
        self._architecture, self._decoder = original, DECODERS[original]
        assert self._decoder.gguf is not None
        self._gguf = self._decoder.gguf
        for key, value in self._metadata.items():
            own = key.removeprefix(f"{name}.")
            is_supported = own in KEYS or own in self._gguf.keys or value == NEUTRAL.get(own, math.nan)
            if own != key and not is_supported:
                raise UnsupportedModelError(
                    f"{self.path}: {key} {str(value)[:60]} may change answers, and is not supported; give the "
                    "original model with model.safetensors"
                )

    def _config(self) -> dict[str, Any]:
        """Return the part of the original's config.json that the metadata and the tensors contain."""
        data, gguf = self._metadata, self._gguf
        name = data["general.architecture"]
        given = {key.removeprefix(f"{name}."): value for key, value in data.items() if key.startswith(f"{name}.")}
        config: dict[str, Any] = {
            "architectures": [self._architecture],
            "model_type": self._decoder.model_type,
            **gguf.config,
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "vocab_size": self._tensors["token_embd.weight"].shape[0],
            **{to: given[key] for key, to in {**KEYS, **gguf.keys}.items() if to and key in given},
        }
        for flag in self._decoder.biases.keys() & BIASES.keys():
            config[flag] = f"blk.0.{BIASES[flag]}.bias" in self._tensors
        if not config.get("sliding_window", 1):
            del config["sliding_window"]
        config["eos_token_id"] = end_token_ids(data)
        words = len(data.get("tokenizer.ggml.tokens", ())) or config["vocab_size"]
        for size in (given.get("vocab_size", words), words):
            if size != config["vocab_size"]:
                raise ValueError(f"{size} words, and embeddings of {config['vocab_size']}")
        head = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
        config |= gguf.derived(config)
        for key in ("rope.dimension_count", "attention.value_length"):
            if given.get(key, head) != head:
                raise UnsupportedModelError(f"{self.path}: {key} {given[key]} is not supported where heads have {head}")
        if "rope_freqs.weight" in self._tensors:
            config["rope_scaling"] = self._scaling(head, config.get("rope_theta", 10_000.0))
            if doubled := {"rope.scaling.type", "rope.scaling.factor"} & given.keys():
                raise UnsupportedModelError(
                    f"{self.path}: {doubled.pop()} and rope_freqs.weight scale positions twice, which is not "
                    "supported; give the original model with model.safetensors"
                )
        elif scaling := self._stretched(given):
            config["rope_scaling"] = scaling
        return config

    def _stretched(self, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the scaling of rotary positions in the metadata, None for none; llama.cpp's default type is linear.

        Raises UnsupportedModelError.
        """
        kind, factor = given.get("rope.scaling.type", "linear"), given.get("rope.scaling.factor", 0)
        if kind == "none" or (kind == "linear" and not factor):
            return None
        part = {"rope_type": kind, "factor": factor or 1.0}
        if kind == "yarn":
            part["original_max_position_embeddings"] = given["rope.scaling.original_context_length"]
            part |= self._gguf.yarn
        elif kind != "linear":
            raise UnsupportedModelError(f"{self.path}: rotary positions scaled by {str(kind)[:40]!r} are not supported")
        return part

    def _scaling(self, head: int, theta: float) -> dict[str, Any]:
        """Return the scaling of a published Llama 3 that has the file's factors (rope_freqs.weight).

        Raises UnsupportedModelError for other factors.
        """
        factors = self._rows("rope_freqs.weight", 0, 1, head // 2)[0]
        frequencies = theta ** (-np.arange(0, head, 2) / head)
        for factor in (8.0, 32.0):
            low, high, before = 1.0, 4.0, 8192
            smooth = np.clip((before * frequencies / (2 * np.pi) - low) / (high - low), 0, 1)
            if np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
                return {
                    "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                    "original_max_position_embeddings": before,
                }  # fmt: skip
        raise UnsupportedModelError(
            f"{self.path}: its factors of rotary positions (rope_freqs.weight) are not those of Llama 3.1 or 3.2; give "
            "the original model with model.safetensors"
        )

    def _named(self) -> Iterator[tuple[str, TensorReader]]:
        """Yield the readers of all tensors, under the names of the original."""
        heads: dict[str, int] = {}
        parts = layer_names(self._decoder)
        if self._gguf.pairs_together:
            heads = {"attn_q": self.config["num_attention_heads"]}
            heads["attn_k"] = self.config.get("num_key_value_heads", heads["attn_q"])
        for name, tensor in self._tensors.items():
            own, end = name.rsplit(".", 1)
            block, _, part = own.removeprefix("blk.").partition(".")
            original = TENSORS.get(own) or (part in parts and f"model.layers.{block}.{parts[part]}")
            if not original:
                raise UnsupportedModelError(f"{self.path}: the tensor {name[:80]} is unknown in this architecture")
            reader = self._reader(name, tensor, heads.get(part, 0))
            if "{}" in original and len(tensor.shape) == 3:  # the matrices of all experts, one below the other
                yield from ((f"{original.format(e)}.{end}", matrix) for e, matrix in enumerate(_matrices(reader)))
            elif name != "rope_freqs.weight":
                yield f"{original}.{end}", reader

    def _reader(self, name: str, tensor: _Tensor, heads: int) -> TensorReader:
        """Return a tensor's reader; heads: number of its heads if the converter reordered their rows, else 0."""
        of_vector = len(tensor.shape) == 1
        rows = tensor.shape[0] // heads if heads else 1
        storage = STORAGES[tensor.storage.wider or tensor.storage.name]
        if storage != tensor.storage:
            self.widened[tensor.storage.name] = storage.name

        def raw(start: int, stop: int, columns: int) -> npt.NDArray[np.uint8]:
            if not heads:
                return self._raw(name, start, stop, columns)
            first, last = start // rows * rows, -(-stop // rows) * rows
            return self._raw(name, first, last, columns)[_original_rows(start, stop, rows) - first]

        offset = np.float32(self._decoder.block.gamma_offset if name.endswith("norm.weight") else 0)

        def read(start: int, stop: int, columns: int) -> npt.NDArray[Any]:
            if offset:
                return storage.rows(raw(start, stop, columns)) - offset
            if heads and of_vector:
                whole = self._rows(name, 0, 1, tensor.shape[0])
                return whole[:, _original_rows(0, tensor.shape[0], rows)][:, :columns]
            return storage.rows(raw(start, stop, columns))

        dtype = {"f32": "F32", "f16": "F16", "bf16": "BF16"}.get(storage.name, storage.name)
        return TensorReader(tensor.shape, dtype, read, raw if storage.block > 1 else None)

    def _raw(self, name: str, start: int, stop: int, columns: int) -> npt.NDArray[np.uint8]:
        """Return stored rows u8 [rows, bytes], in the wider storage if the file's storage has one."""
        tensor = self._tensors[name]
        nbytes = tensor.storage.row_bytes(columns)
        file = self._others[tensor.part - 1] if tensor.part else self
        data = file.pread(tensor.offset + start * nbytes, (stop - start) * nbytes)
        rows = np.frombuffer(data, np.uint8).reshape(stop - start, nbytes)
        return tensor.storage.widened(rows) if tensor.storage.wider else rows

    def _rows(self, name: str, start: int, stop: int, columns: int) -> npt.NDArray[Any]:
        storage = self._tensors[name].storage
        return STORAGES[storage.wider or storage.name].rows(self._raw(name, start, stop, columns))


def _matrices(stacked: TensorReader) -> Iterator[TensorReader]:
    """Yield the readers of the matrices of a tensor [n, rows, columns]."""
    count, rows, columns = stacked.shape

    def part(read: Rows, first: int) -> Rows:
        return lambda start, stop, width: read(first + start, first + stop, width)

    for first in range(0, count * rows, rows):
        raw = None if stacked.raw is None else part(stacked.raw, first)
        yield TensorReader((rows, columns), stacked.dtype, part(stacked.read, first), raw)


def _original_rows(start: int, stop: int, head: int) -> npt.NDArray[np.intp]:
    """Return the file's row of each row of the original: in the file, the rows of a rotated pair are neighbours."""
    row = np.arange(start, stop)
    half, pair = np.divmod(row % head, head // 2)
    return np.asarray(row - row % head + 2 * pair + half, np.intp)


def _text(cursor: Cursor) -> str:
    return cursor.take(cursor.numbers("<Q")[0]).decode()


def _value(cursor: Cursor, kind: int) -> Any:
    """Return a value of the metadata; raises KeyError for arrays of arrays, which no model has."""
    if kind == _STRING:
        return _text(cursor)
    if kind == _FLOAT:  # the shortest decimal of this f32, as in the original: 1e-5
        return float(str(np.float32(cursor.numbers("<f")[0])))
    if kind != _ARRAY:
        return cursor.numbers(f"<{_NUMBERS[kind]}")[0]
    of, count = cursor.numbers("<IQ")
    if count > _MOST_VALUES:
        raise ValueError(f"an array of {count} values")
    if of == _STRING:
        return [_text(cursor) for _ in range(count)]
    return list(cursor.numbers(f"<{count}{_NUMBERS[of]}"))


def gguf_extras(file: GgufFile, own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a model's other JSON files, from the GGUF file and from files next to it.

    own: JSON files next to it; only generation_config.json and the limit of a text's length are read.
    """
    generation = {name: data for name, data in own.items() if name == "generation_config.json"}
    if file.tokenizer is None:
        return generation
    limits = own.get(_CONFIG, {})
    limit = {key: limits[key] for key in ("model_max_length",) if isinstance(limits, Mapping) and key in limits}
    return {_CONFIG: {**file.tokenizer_config, **limit}, **generation}
