"""Stored tensors in kernel layout: channels last, norms, factors and dense layers folded in, positions resized.

All work row by row, so a model's weights are never in memory at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import platformdirs

from hepti_mqtt.core.errors import WireError
from hepti_mqtt.core.storage import STORAGES
from hepti_mqtt.models import TensorSource
from hepti_mqtt.models.tensors import Place, chosen
from hepti_mqtt.protocol.manifest import HASH_BYTES, Manifest

# Names of dtypes as in safetensors, and of `storage`.
FLOATS: Final = frozenset({"F16", "F32", "BF16", "F64", *STORAGES})


class FileStamp(NamedTuple):
    """The identity of a file; changed_ns is the time of its inode, which programs cannot set back."""

    path: str
    nbytes: int
    modified_ns: int
    changed_ns: int
    inode: int


Rows = Callable[[int, int, int], npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class TensorReader:
    """A tensor in a file.

    read(start, stop, columns): returns rows start..stop as [rows, columns], f16 as stored, other dtypes as f32. raw:
    returns them as stored, u8 [rows, bytes], where dtype is a storage in blocks.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Rows
    raw: Rows | None = None

    @property
    def is_float(self) -> bool:
        """Return whether `read` supports the dtype."""
        return self.dtype in FLOATS


def zeros_reader(shape: tuple[int, ...]) -> TensorReader:
    """Return a tensor of zeros."""
    return TensorReader(shape, "F32", lambda start, stop, columns: np.zeros((stop - start, columns), np.float32))


class WeightsReader(Protocol):
    """An open file of tensors."""

    @property
    def stamps(self) -> Sequence[FileStamp]:
        """Return the stamps of its files."""

    @property
    def tensors(self) -> Mapping[str, TensorReader]:
        """Return its tensors by name."""

    def close(self) -> None:
        """Close it; a second call does nothing."""


def fold_batch_norm(source: TensorSource, stored: Mapping[str, TensorReader], name: str) -> TensorReader:
    """Return the tensor `name` of a checkpoint as its source wants it."""
    if (place := source.place_in(stored)) is not None:
        return _part(source, place, stored[name])
    computed = source.norm is not None or bool(source.factor) or source.resized is not None
    computed = computed or source.projected is not None
    if not source.channels_first and not computed:
        return stored[name]
    tensor = stored[name]
    read = _FoldedRows(source, stored, tensor).read
    return TensorReader(tensor.shape, "F32" if computed else tensor.dtype, read)


def _part(source: TensorSource, place: Place, tensor: TensorReader) -> TensorReader:
    """Return the rows, or elements, of a stored tensor that are a source's."""
    first, step, whole = place.first, place.step, place.shape[-1]
    if place.by_inputs:
        return TensorReader(source.matrix_shape, tensor.dtype, _transposed(source, place, tensor))
    if source.matrix_shape[0] == 1 or source.matrix_shape[1] < whole:  # elements of rows
        return TensorReader(
            source.matrix_shape,
            tensor.dtype,
            lambda a, z, n: tensor.read(a, z, whole)[:, first : first + step * n : step],
        )

    def rows(read: Rows) -> Rows:
        return lambda a, z, columns: read(first + step * a, first + step * (z - 1) + 1, columns)[::step]

    return TensorReader(source.matrix_shape, tensor.dtype, rows(tensor.read), tensor.raw and rows(tensor.raw))


@lru_cache(maxsize=1)
def _whole_matrix(tensor: TensorReader, first: int, stop: int, columns: int) -> npt.NDArray[Any]:
    """Return stored rows; the last ones are kept, since bands of one matrix are read one after the other."""
    return tensor.read(first, stop, columns)


def _transposed(source: TensorSource, place: Place, tensor: TensorReader) -> Rows:
    """Return how rows are read of a matrix [out, in] that is stored as columns of [in, width], `step` apart."""
    inputs, width = source.shape[0], place.shape[-1]
    matrix, first = divmod(place.first, width)

    def read(start: int, stop: int, columns: int) -> npt.NDArray[Any]:
        whole = _whole_matrix(tensor, matrix * inputs, (matrix + 1) * inputs, width)
        low, high = first + place.step * start, first + place.step * (stop - 1) + 1
        return np.ascontiguousarray(whole[:columns, low : high : place.step].T)

    return read


class _FoldedRows:
    """A stored tensor that is changed at reading."""

    def __init__(self, source: TensorSource, stored: Mapping[str, TensorReader], tensor: TensorReader) -> None:
        self._source, self._stored, self._tensor = source, stored, tensor

    def read(self, start: int, stop: int, columns: int) -> npt.NDArray[Any]:
        """Return rows start..stop as [rows, columns], columns with the channels last."""
        source = self._source
        if source.resized is not None:
            whole = self._tensor.read(0, math.prod(self._tensor.shape) // columns, columns)
            return np.ascontiguousarray(source.resized.rows(whole)[start:stop], np.float32)
        rows = self._tensor.read(start, stop, columns)
        if source.projected is not None:
            return np.ascontiguousarray(source.projected.rows(rows, self._whole), np.float32)
        if source.channels_first and source.transposed:
            rows = _channels_last(rows, source.channels_first)
        elif source.channels_first:  # stored [k, n]: rows are what has channels
            rows = _channels_last(self._tensor.read(0, self._tensor.shape[0], columns).T, source.channels_first).T[
                start:stop
            ]
        if source.factor:
            scale = self._vector(source.factor_name(self._stored))
            return np.ascontiguousarray(
                rows * (scale[start:stop, None] if len(source.shape) == 2 else scale), np.float32
            )
        if source.norm is None:
            return np.ascontiguousarray(rows)
        factor = self._vector(source.norm.weight)
        if source.norm.variance:
            factor = factor / np.sqrt(self._vector(source.norm.variance) + source.norm.eps)
        if not source.norm.mean and len(source.shape) == 1:
            return np.ascontiguousarray(rows * factor, np.float32)
        if len(source.shape) == 2:
            return np.ascontiguousarray(rows * factor[start:stop, None], np.float32)
        before = self._vector(source.convolution_bias) if source.convolution_bias else 0.0
        return np.ascontiguousarray(rows + (before - self._vector(source.norm.mean)) * factor, np.float32)

    def _whole(self, names: tuple[str, ...]) -> npt.NDArray[Any]:
        """Return a tensor [n] or [rows, columns] of one of these names."""
        tensor = self._stored[chosen(names, self._stored)]
        rows, columns = (1, *tensor.shape)[-2:]
        return tensor.read(0, rows, columns).reshape(tensor.shape)

    def _vector(self, name: str) -> npt.NDArray[np.float64]:
        """Return a vector [n] of the norm, in double precision."""
        return np.asarray(self._stored[name].read(0, 1, self._stored[name].shape[0])[0], np.float64)


def _channels_last(rows: npt.NDArray[Any], first: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return rows [n, C ...] as [n, ... C]."""
    return np.moveaxis(rows.reshape(-1, *first), 1, -1).reshape(rows.shape)


# ----------------------------------------------------------------------------------------------------------------------
# Keeps the manifest of a checkpoint in the user's cache, so that a second start does not hash every weight again.
#
# A new file may have the same size and time (reproducible images, `rsync -t`), in a read-only image even the same
# inode. So the key of a manifest also has samples of every tensor.


def file_stamp(path: Path, status: os.stat_result) -> FileStamp:
    """Return the stamp of a file."""
    return FileStamp(str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def sample_digest(tensors: Mapping[str, TensorReader]) -> str:
    """Return a digest of the first, middle and last rows of all tensors, and of names and shapes; vectors are whole."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(repr((name, tensor.shape, tensor.dtype)).encode())
        if not tensor.is_float or 0 in tensor.shape:
            continue
        stacked = len(tensor.shape) == 3  # matrices of experts: a row of one, not one of them
        rows = math.prod(tensor.shape[:-1]) if stacked else tensor.shape[0] if len(tensor.shape) > 1 else 1
        columns = math.prod(tensor.shape) // rows
        for row in sorted({0, rows // 2, rows - 1}):
            digest.update(tensor.read(row, row + 1, columns).tobytes())
    return digest.hexdigest()


def manifest_cache_path(
    stamps: Iterable[FileStamp],
    stored: Mapping[str, TensorReader],
    sources: Iterable[TensorSource],
    storages: Sequence[tuple[str, str]] = (),
) -> Path:
    """Return the path of the cached manifest of files, their stored tensors and the model's tensors.

    storages: of tensors in blocks, stored or quantised.
    """
    what = (list(stamps), sample_digest(stored), list(sources), list(storages))
    key = hashlib.sha256(repr(what).encode()).hexdigest()
    return Path(platformdirs.user_cache_dir("hepti")) / "manifests" / key


def load_cached_manifest(path: Path, model: str) -> Manifest | None:
    """Return the kept manifest under the name `model`, or None if it is missing or damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, encoded = data[:HASH_BYTES], data[HASH_BYTES:]
    if hashlib.sha256(encoded).digest() != digest:
        return None
    try:
        return Manifest(model, Manifest.decode(encoded).entries)
    except WireError:
        return None


def store_cached_manifest(path: Path, manifest: Manifest) -> None:
    """Keep a manifest; a cache that cannot be written only makes the next start slower."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(manifest.digest + manifest.encode())
                file.flush()
                # Readers see the old file or the whole new one, whichever process writes at the same time.
                os.replace(file.name, path)
            except OSError:  # a full disk must not get fuller with every start
                os.unlink(file.name)
