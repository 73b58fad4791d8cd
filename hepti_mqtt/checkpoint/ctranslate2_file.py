"""Reads CTranslate2's model.bin (version 6) as the checkpoint that it was converted from, range by range of rows.

u32 version; string spec; u32 revision; u32 count; then of each variable: string name, u8 rank, u32 per dimension, u8
type, u32 bytes, data; then u32 aliases, each two strings. All little-endian; a string is its u16 length, with a final
zero byte, then its bytes. Joined matrices are split by rows, under the original's names.
An int8 matrix has a second variable with the scale that multiplied each row.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hepti_mqtt.checkpoint.cursor import Cursor
from hepti_mqtt.checkpoint.formats import explain_file
from hepti_mqtt.checkpoint.safetensors_file import RowsFile
from hepti_mqtt.checkpoint.storage import TensorReader
from hepti_mqtt.core.errors import ModelError, UnsupportedModelError

FILE: Final = "model.bin"
_VERSION: Final = 6
_SPEC: Final = "WhisperSpec"
_MOST: Final = 1 << 16  # variables, and bytes of a name
_TYPES: Final[Mapping[int, tuple[str, str]]] = {  # the name of safetensors, and NumPy's
    0: ("F32", "<f4"),
    1: ("I8", "<i1"),
    2: ("I16", "<i2"),
    3: ("I32", "<i4"),
    4: ("F16", "<f2"),
    5: ("BF16", "<u2"),
}
_ACTIVATIONS: Final = {0: "relu", 1: "gelu_new", 2: "silu", 3: "gelu"}


class _Variable(NamedTuple):
    name: str  # not an alias
    shape: tuple[int, ...]
    dtype: str
    offset: int
    itemsize: int


class CTranslate2File(RowsFile):
    """An open model.bin; config: config.json with the file's own sizes under the original's keys.

    Raises ModelError for another format or a truncated file, UnsupportedModelError for another version or model.
    """

    def __init__(self, path: Path, own: Mapping[str, Any]) -> None:
        super().__init__(path)
        try:
            self._variables = self._read_variables()
            self.tensors = dict(self._named())
            self.config = {**own, **self._sizes()}
        except (struct.error, KeyError, IndexError, UnicodeDecodeError, ValueError) as error:
            self.close()
            raise ModelError(
                f"{path} cannot be read as a model of CTranslate2 ({error}): {explain_file(path)}"
            ) from error
        except BaseException:
            self.close()
            raise

    # -- the file -----------------------------------------------------------------------------------------------------

    def _read_variables(self) -> dict[str, _Variable]:
        """Return the place of each variable in the file, including aliases."""
        end = self.stamps[0].nbytes
        cursor = Cursor(self.pread, end)
        (version,) = cursor.numbers("<I")
        if version != _VERSION:
            raise UnsupportedModelError(
                f"{self.path} is no model of CTranslate2 in version {_VERSION} (it begins with {version}); convert the "
                "original again with a current ct2-transformers-converter, or give the original"
            )
        if (spec := _text(cursor)) != _SPEC:
            raise UnsupportedModelError(f"{self.path} is a {spec[:80]} of CTranslate2; {_SPEC} is supported alone")
        _, count = cursor.numbers("<II")
        variables: dict[str, _Variable] = {}
        for _ in range(min(count, _MOST)):
            name = _text(cursor)
            (rank,) = cursor.numbers("<B")
            *dims, kind, nbytes = cursor.numbers(f"<{rank}IBI")
            dtype, stored = _TYPES[kind]
            variables[name] = _Variable(name, tuple(dims), dtype, cursor.at, np.dtype(stored).itemsize)
            if prod(dims) * np.dtype(stored).itemsize != nbytes:
                raise ValueError(f"{name[:80]} of {dims} has {nbytes} bytes")
            cursor.skip(nbytes)
        for _ in range(min(cursor.numbers("<I")[0], _MOST)):
            alias, name = _text(cursor), _text(cursor)
            variables[alias] = variables[name]
        return variables

    def _scalar(self, name: str) -> int:
        variable = self._variables[name]
        return int(np.frombuffer(self.pread(variable.offset, variable.itemsize), f"<i{variable.itemsize}")[0])

    # -- as the original ----------------------------------------------------------------------------------------------

    def _named(self) -> Iterator[tuple[str, TensorReader]]:
        """Yield the tensors under the names of the original; one variable under two names is one tensor."""
        whole: dict[str, TensorReader] = {}
        for name, variable in self._variables.items():
            parts = _original(name)
            if not parts or not variable.shape:
                continue
            if len(parts) == 1 and variable.name in whole:
                yield parts[0], whole[variable.name]
                continue
            rows = variable.shape[0] // len(parts)
            for place, part in enumerate(parts):
                reader = self._reader(name, variable, place, rows)
                if len(parts) == 1:
                    whole[variable.name] = reader
                yield part, reader

    def _reader(self, name: str, variable: _Variable, place: int, rows: int) -> TensorReader:
        """Return a part of a variable, of as many rows as the others."""
        shape = (rows, *variable.shape[1:])
        if variable.dtype == "I8":
            scale = self._variables[f"{variable.name}_scale"]
            if scale.dtype != "F32" or scale.shape != variable.shape[:1]:
                raise UnsupportedModelError(f"{self.path}: {name} has a scale of {scale.shape}; one per row is read")
            read: Callable[..., npt.NDArray[Any]] = partial(self._dequantised, variable, scale, place * rows)
            return TensorReader(shape, "F32", read)
        vector = len(variable.shape) == 1
        at = variable.offset + place * rows * (1 if vector else prod(shape[1:])) * variable.itemsize
        return TensorReader(shape, variable.dtype, partial(self.rows, at, variable.dtype))

    def _dequantised(
        self, variable: _Variable, scale: _Variable, first: int, start: int, stop: int, columns: int
    ) -> npt.NDArray[np.float32]:
        """Return rows start..stop of a part of a matrix in int8, divided by their scales."""
        data = self.pread(variable.offset + (first + start) * columns, (stop - start) * columns)
        scales = np.frombuffer(self.pread(scale.offset + 4 * (first + start), 4 * (stop - start)), "<f4")
        whole = np.frombuffer(data, np.int8).reshape(stop - start, columns)
        return np.asarray(whole / scales[:, None], np.float32)

    def _sizes(self) -> dict[str, Any]:
        """Return the sizes in the original's config.json."""
        shapes = {name: variable.shape for name, variable in self._variables.items()}
        vocab, hidden = shapes["decoder/embeddings/weight"]
        layers = {
            side: len(
                {name.split("/")[1] for name in shapes if name.startswith(f"{side}/layer_") and "/layer_n" not in name}
            )
            for side in ("encoder", "decoder")
        }
        for name, only in (("decoder/pre_norm", 1), ("decoder/scale_embeddings", 0), ("decoder/alibi", 0)):
            if name in shapes and self._scalar(name) != only:
                raise UnsupportedModelError(f"{self.path}: {name} {self._scalar(name)} is not supported")
        activation = self._scalar("decoder/activation")
        if activation not in _ACTIVATIONS:
            raise UnsupportedModelError(f"{self.path}: activation {activation} of CTranslate2 is unknown")
        return {
            "architectures": ["WhisperForConditionalGeneration"],
            "model_type": "whisper",
            "is_encoder_decoder": True,
            **{f"{side}_layers": count for side, count in layers.items()},
            **{f"{side}_attention_heads": self._scalar(f"{side}/num_heads") for side in layers},
            **{f"{side}_ffn_dim": shapes[f"{side}/layer_0/ffn/linear_0/weight"][0] for side in layers},
            "d_model": hidden,
            "activation_function": _ACTIVATIONS[activation],
            "vocab_size": vocab,
            "num_mel_bins": shapes["encoder/conv1/weight"][1],
            "max_source_positions": shapes["encoder/position_encodings/encodings"][0],
            "max_target_positions": shapes["decoder/position_encodings/encodings"][0],
        }


def _text(cursor: Cursor) -> str:
    """Return a string."""
    return cursor.take(cursor.numbers("<H")[0]).rstrip(b"\0").decode()


_LAYER: Final = re.compile(
    r"(encoder|decoder)/layer_(\d+)/(self_attention|attention|ffn)/(\w+)/(weight|bias|gamma|beta)"
)
_ENDS: Final = {"gamma": "weight", "beta": "bias"}
_PARTS: Final[Mapping[tuple[str, str], tuple[str, ...]]] = {
    ("self_attention", "linear_0"): ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attention", "linear_1"): ("self_attn.out_proj",),
    ("self_attention", "layer_norm"): ("self_attn_layer_norm",),
    ("attention", "linear_0"): ("encoder_attn.q_proj",),
    ("attention", "linear_1"): ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    ("attention", "linear_2"): ("encoder_attn.out_proj",),
    ("attention", "layer_norm"): ("encoder_attn_layer_norm",),
    ("ffn", "linear_0"): ("fc1",),
    ("ffn", "linear_1"): ("fc2",),
    ("ffn", "layer_norm"): ("final_layer_norm",),
}
_OTHERS: Final[Mapping[str, str]] = {
    "encoder/conv1/weight": "model.encoder.conv1.weight",
    "encoder/conv1/bias": "model.encoder.conv1.bias",
    "encoder/conv2/weight": "model.encoder.conv2.weight",
    "encoder/conv2/bias": "model.encoder.conv2.bias",
    "decoder/embeddings/weight": "model.decoder.embed_tokens.weight",
    "decoder/projection/weight": "proj_out.weight",
    **{f"{s}/position_encodings/encodings": f"model.{s}.embed_positions.weight" for s in ("encoder", "decoder")},
    **{f"{s}/layer_norm/{a}": f"model.{s}.layer_norm.{b}" for s in ("encoder", "decoder") for a, b in _ENDS.items()},
}


def _original(name: str) -> tuple[str, ...]:
    """Return the names of the original tensors in a variable's rows; none for other variables."""
    if name in _OTHERS:
        return (_OTHERS[name],)
    if (match := _LAYER.fullmatch(name)) is None:
        return ()
    side, layer, block, part, end = match.groups()
    end = _ENDS.get(end, end)
    return tuple(f"model.{side}.layers.{layer}.{p}.{end}" for p in _PARTS.get((block, part), ()))


def find(directory: Path) -> Path | None:
    """Return the model.bin of a directory."""
    path = directory / FILE
    return path if path.is_file() else None
