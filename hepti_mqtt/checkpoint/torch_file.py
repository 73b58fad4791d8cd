"""Reads ranges of rows from pytorch_model.bin without PyTorch, and without running code of the pickle.

Since PyTorch 1.6 the file is an uncompressed ZIP archive: `data.pkl` names the storage and place of each tensor, and
each storage is a member of its own. Names in the pickle that do not describe tensors are refused, so it runs no code.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

from hepti_mqtt.checkpoint.safetensors_file import RowsFile
from hepti_mqtt.checkpoint.storage import TensorReader
from hepti_mqtt.core.errors import ModelError

_DTYPES: Final[Mapping[str, tuple[str, int]]] = {
    "HalfStorage": ("F16", 2),
    "FloatStorage": ("F32", 4),
    "BFloat16Storage": ("BF16", 2),
    "DoubleStorage": ("F64", 8),
    "LongStorage": ("I64", 8),
    "IntStorage": ("I32", 4),
    "ShortStorage": ("I16", 2),
    "CharStorage": ("I8", 1),
    "ByteStorage": ("U8", 1),
    "BoolStorage": ("BOOL", 1),
}
_MAX_PICKLE_BYTES: Final = 64 << 20
_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")  # of a ZIP member: signature, lengths of name and extra field
_CONVERT: Final = "save it as safetensors on a machine that has PyTorch: model.save_pretrained(DIR)"


class _Storage(NamedTuple):
    """A storage of the archive: type of its elements, name of its member, number of elements."""

    dtype: str
    item_bytes: int
    key: str
    length: int


class _Tensor(NamedTuple):
    """A tensor as a pickle describes it: a part of a storage, in elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_more: Any) -> _Tensor:
    return _Tensor(storage, offset, tuple(shape), tuple(strides))


class _Unpickler(pickle.Unpickler):
    """Understands tensors, and dictionaries of them."""

    _KNOWN: Final[Mapping[tuple[str, str], Callable[..., Any]]] = {
        ("collections", "OrderedDict"): OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2"): _tensor,
        ("torch._utils", "_rebuild_parameter"): lambda tensor, *_more: tensor,
    }

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return name
        if (module, name) not in self._KNOWN:
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which is no part of a tensor")
        return self._KNOWN[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        _, kind, key, _, count = pid
        dtype, item_bytes = _DTYPES[kind]
        return _Storage(dtype, item_bytes, str(key), int(count))


class TorchFile(RowsFile):
    """One open file of PyTorch."""

    def __init__(self, path: Path) -> None:
        """Open `path`; raises ModelError for another format, or objects other than tensors."""
        super().__init__(path)
        try:
            with path.open("rb") as file, zipfile.ZipFile(file) as archive:
                self.tensors = self._described(archive)
        except (zipfile.BadZipFile, pickle.UnpicklingError) as error:
            self.close()
            raise ModelError(
                f"{path} cannot be read ({error}): it is incomplete, of PyTorch before 1.6, or not a dictionary of "
                f"tensors; copy it again, or {_CONVERT}"
            ) from error
        except Exception as error:  # a damaged pickle may raise any error
            self.close()
            raise ModelError(f"{path} cannot be read ({error!r}); copy it again, or {_CONVERT}") from error

    def _described(self, archive: zipfile.ZipFile) -> Mapping[str, TensorReader]:
        members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if "data.pkl" not in members or members["data.pkl"].file_size > _MAX_PICKLE_BYTES:
            raise zipfile.BadZipFile("no data.pkl in it")
        if "byteorder" in members and archive.read(members["byteorder"]).strip() != b"little":
            raise zipfile.BadZipFile("its numbers are big-endian")
        with archive.open(members["data.pkl"]) as described:
            loaded = _Unpickler(described).load()
        if isinstance(loaded, Mapping) and isinstance(loaded.get("state_dict"), Mapping):
            loaded = loaded["state_dict"]
        if not isinstance(loaded, Mapping):
            raise pickle.UnpicklingError("it holds no dictionary of tensors")
        return {str(k): self._reader(str(k), t, members) for k, t in loaded.items() if isinstance(t, _Tensor)}

    def _reader(self, name: str, tensor: _Tensor, members: Mapping[str, zipfile.ZipInfo]) -> TensorReader:
        storage, size = tensor.storage, prod(tensor.shape)
        member = members[f"data/{storage.key}"]
        if member.compress_type != zipfile.ZIP_STORED:
            raise zipfile.BadZipFile(f"{name} is compressed")
        whole = tuple(prod(tensor.shape[i + 1 :]) for i in range(len(tensor.shape)))
        if any(a != b for a, b, n in zip(tensor.strides, whole, tensor.shape, strict=True) if n > 1):
            raise pickle.UnpicklingError(f"the rows of {name} do not lie one after the other")
        if min((tensor.offset, *tensor.shape)) < 0 or (tensor.offset + size) * storage.item_bytes > member.file_size:
            raise zipfile.BadZipFile(f"{name} lies outside its storage")
        start = member.header_offset
        signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(self.pread(start, _LOCAL_HEADER.size))
        if signature != b"PK\x03\x04":
            raise zipfile.BadZipFile(f"{name} has no header")
        start += _LOCAL_HEADER.size + name_bytes + extra_bytes + tensor.offset * storage.item_bytes
        return TensorReader(tensor.shape, storage.dtype, partial(self.rows, start, storage.dtype))
