"""Reads ranges of rows from safetensors files without ever holding, or mapping, more than that.

Mapped pages count as resident memory of the process, and a device's budget is measured as that; so the rows are read
with `pread`, from the operating system's page cache where it has them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from hepti_mqtt.checkpoint.formats import explain_file, refuse_pointers
from hepti_mqtt.checkpoint.storage import TensorReader, WeightsReader, file_stamp
from hepti_mqtt.core.errors import ModelError
from hepti_mqtt.core.storage import STORAGES
from hepti_mqtt.models.mixture import PACKED

_STORED: Final[Mapping[str, np.dtype[Any]]] = {
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "BF16": np.dtype("<u2"),
    "F64": np.dtype("<f8"),
    "U8": np.dtype("u1"),
}
_MAX_HEADER: Final = 100_000_000  # the format's own limit


class RowsFile:
    """An open file of tensors; `tensors`: their readers by name, set by subclasses."""

    tensors: Mapping[str, TensorReader]
    #: The wider storages to which matrices are converted on reading, by storages in the file.
    widened: dict[str, str]

    def __init__(self, path: Path) -> None:
        """Open `path`; raises ModelError if it is missing, unreadable or a Git LFS pointer."""
        self.path, self.widened = path, {}
        refuse_pointers([path])
        try:
            self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {explain_file(path)}") from error
        self.stamps = [file_stamp(path, os.fstat(self._fd))]

    def rows(self, offset: int, dtype: str, start: int, stop: int, columns: int) -> npt.NDArray[Any]:
        """Return rows start..stop of a tensor that begins at `offset`: f16 as stored, other dtypes as f32."""
        stored = _STORED[dtype]
        row_bytes = columns * stored.itemsize
        data = self.pread(offset + start * row_bytes, (stop - start) * row_bytes)
        array = np.frombuffer(data, stored).reshape(stop - start, columns)
        if dtype == "BF16":  # the upper half of a float32
            return (array.astype("<u4") << 16).view("<f4")
        return array.astype("<f4") if dtype == "F64" else array

    def pread(self, offset: int, count: int) -> bytes:
        """Return `count` bytes from `offset`; raises ModelError if the file has shrunk or cannot be read."""
        pieces = []
        while count:
            try:
                piece = os.pread(self._fd, count, offset)
            except OSError as error:
                raise ModelError(f"{self.path} cannot be read ({error}); check the disk and start again") from error
            if not piece:
                raise ModelError(f"{self.path} ends before byte {offset + count}: it was changed; start again")
            pieces.append(piece)
            offset += len(piece)
            count -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class WeightsFile(RowsFile):
    """One open safetensors file."""

    def __init__(self, path: Path) -> None:
        """Open and validate `path`; raises ModelError if it is missing, truncated or malformed."""
        super().__init__(path)
        try:
            # The format's own library checks sizes, overlaps and gaps; its mapping ends with the block.
            with safe_open(path, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            self.close()
            why = explain_file(path, _needed_bytes(path))
            raise ModelError(f"{path} cannot be read as safetensors ({error}): {why}") from error
        self.tensors = self._header()

    def _header(self) -> Mapping[str, TensorReader]:
        size = int.from_bytes(self.pread(0, 8), "little")
        header = json.loads(self.pread(8, size))
        tensors = {
            name: TensorReader(
                tuple(entry["shape"]),
                entry["dtype"],
                partial(self.rows, 8 + size + entry["data_offsets"][0], entry["dtype"]),
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
        for name, blocks in [*tensors.items()]:
            scales = tensors.get(f"{name.removesuffix(PACKED)}{_SCALES}") if name.endswith(PACKED) else None
            if scales is not None and _is_packed(blocks, scales):
                tensors[name] = _packed(blocks, scales)
                self.widened[_MXFP4.name] = _MXFP4.wider
                del tensors[f"{name.removesuffix(PACKED)}{_SCALES}"]
        return tensors


_SCALES: Final = "_scales"
_MXFP4: Final = STORAGES["mxfp4"]


def _is_packed(blocks: TensorReader, scales: TensorReader) -> bool:
    """Return whether two tensors are the codes and exponents of matrices in MXFP4."""
    half = _MXFP4.block // 2
    return {blocks.dtype, scales.dtype} == {"U8"} and blocks.shape == (*scales.shape, half) and len(scales.shape) > 1


def _packed(blocks: TensorReader, scales: TensorReader) -> TensorReader:
    """Return the reader of matrices [..., out, in] in MXFP4, which widens them.

    In GGUF the low halves of bytes are the first values of a block; here two neighbours share a byte.
    """
    wider = STORAGES[_MXFP4.wider]

    def raw(start: int, stop: int, columns: int) -> npt.NDArray[np.uint8]:
        groups, half = columns // _MXFP4.block, _MXFP4.block // 2
        pairs = blocks.read(start, stop, groups * half).reshape(-1, groups, half)
        codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(stop - start, groups, _MXFP4.block)
        halves = codes[..., :half] | codes[..., half:] << 4
        exponents = scales.read(start, stop, groups)[..., None]
        return _MXFP4.widened(np.concatenate([exponents, halves], axis=2).reshape(stop - start, -1))

    shape = (*scales.shape[:-1], scales.shape[-1] * _MXFP4.block)
    return TensorReader(shape, wider.name, lambda *place: wider.rows(raw(*place)), raw)


def _needed_bytes(path: Path) -> int | None:
    """Return the size that a file's header promises, None for no header."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > _MAX_HEADER:
                return None
            header = file.read(size)
        if len(header) < size:
            return 8 + size
        return 8 + size + max(int(e["data_offsets"][1]) for k, e in json.loads(header).items() if k != "__metadata__")
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return None


def open_shards(index: Path, file: type[RowsFile]) -> list[RowsFile]:
    """Return the open files that an index names; raises ModelError if one is missing or malformed."""
    directory = index.parent
    shards = [directory / name for name in _shards(index)]
    missing = [path.name for path in shards if not path.is_file()]
    if missing:
        raise ModelError(f"{index} names {', '.join(missing)}, missing in {directory}; copy the missing files")
    refuse_pointers(shards)
    files: list[RowsFile] = []
    try:
        files.extend(file(path) for path in shards)
    except ModelError:
        close_all(files)
        raise
    return files


def close_all(files: Sequence[WeightsReader]) -> None:
    """Close every file."""
    for file in files:
        file.close()


def _shards(index: Path) -> list[str]:
    data = read_json(index)
    weight_map = data.get("weight_map") if isinstance(data, Mapping) else None
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise ModelError(f"{index}: key 'weight_map' is missing or empty; copy the file again")
    shards = sorted({str(name) for name in weight_map.values()})
    for name in shards:
        if Path(name).name != name:
            raise ModelError(f"{index}: {name!r} is not a file of its own directory; shards must be next to the index")
    return shards


def read_json(path: Path) -> Any:
    """Return the JSON in `path`; raises ModelError if it is missing or broken."""
    refuse_pointers([path])
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing; copy the whole model directory, config.json included") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}; check the path and its permissions") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}); copy the file again") from error
