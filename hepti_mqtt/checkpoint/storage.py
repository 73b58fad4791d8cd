"""Readers of stored tensors, with the changes that a `TensorSource` asks for; and the cache of manifests.

Changes: parts of stored tensors, channels last, norms and factors folded in, positions resized, dense layers applied.
Readers read a range of rows, so the weights of a model are never in memory together.
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

# Names of supported dtypes: those of safetensors, and of `core.storage`.
FLOATS: Final = frozenset({"F16", "F32", "BF16", "F64", *STORAGES})


class FileStamp(NamedTuple):
    """The identity of a file; changed_ns is the time of its inode, which programs cannot set back."""

    path: str
    nbytes: int
    modified_ns: int
    changed_ns: int
    inode: int


Rows = Callable[[int, int, int], npt.NDArray[Any]]  # (start, stop, columns) -> rows start..stop


@dataclass(frozen=True, slots=True)
class TensorReader:
    """A tensor in a file, read by ranges of rows."""

    shape: tuple[int, ...]
    #: Name in safetensors ("F16"), or of a storage in blocks ("q4_0").
    dtype: str
    #: Return rows as [rows, columns], f16 for F16 and else f32.
    read: Rows
    #: Return rows in blocks as stored, u8 [rows, bytes]; None for other storages.
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


def source_reader(source: TensorSource, stored: Mapping[str, TensorReader], name: str) -> TensorReader:
    """Return the reader of a source: the stored tensor `name` with the source's changes."""
    if (place := source.place_in(stored)) is not None:
        return _part(source, place, stored[name])
    computed = source.norm is not None or bool(source.factor) or source.resized is not None
    computed = computed or source.projected is not None
    if not source.channels_first and not computed:
        return stored[name]
    reader = stored[name]
    read = _FoldedRows(source, stored, reader).read
    return TensorReader(reader.shape, "F32" if computed else reader.dtype, read)


def _part(source: TensorSource, place: Place, reader: TensorReader) -> TensorReader:
    """Return the reader of a source that is a part of a stored tensor."""
    first, step, whole = place.first, place.step, place.shape[-1]
    if place.by_inputs:
        return TensorReader(source.matrix_shape, reader.dtype, _transposed(source, place, reader))
    if source.matrix_shape[0] == 1 or source.matrix_shape[1] < whole:  # elements of rows
        return TensorReader(
            source.matrix_shape,
            reader.dtype,
            lambda a, z, n: reader.read(a, z, whole)[:, first : first + step * n : step],
        )

    def rows(read: Rows) -> Rows:
        return lambda a, z, columns: read(first + step * a, first + step * (z - 1) + 1, columns)[::step]

    return TensorReader(source.matrix_shape, reader.dtype, rows(reader.read), reader.raw and rows(reader.raw))


@lru_cache(maxsize=1)
def _whole_matrix(reader: TensorReader, first: int, stop: int, columns: int) -> npt.NDArray[Any]:
    """Return stored rows; the last result is cached, because bands of one matrix are read one after the other."""
    return reader.read(first, stop, columns)


def _transposed(source: TensorSource, place: Place, reader: TensorReader) -> Rows:
    """Return the reader of rows of a matrix [out, in] that is stored as columns of [in, width], `step` apart."""
    inputs, width = source.shape[0], place.shape[-1]
    matrix, first = divmod(place.first, width)

    def read(start: int, stop: int, columns: int) -> npt.NDArray[Any]:
        whole = _whole_matrix(reader, matrix * inputs, (matrix + 1) * inputs, width)
        low, high = first + place.step * start, first + place.step * (stop - 1) + 1
        return np.ascontiguousarray(whole[:columns, low : high : place.step].T)

    return read


class _FoldedRows:
    """A stored tensor that is changed on reading."""

    def __init__(self, source: TensorSource, stored: Mapping[str, TensorReader], reader: TensorReader) -> None:
        self._source, self._stored, self._reader = source, stored, reader

    def read(self, start: int, stop: int, columns: int) -> npt.NDArray[Any]:
        """Return rows start..stop as [rows, columns] after all changes."""
        source = self._source
        if source.resized is not None:
            whole = self._reader.read(0, math.prod(self._reader.shape) // columns, columns)
            return np.ascontiguousarray(source.resized.rows(whole)[start:stop], np.float32)
        rows = self._reader.read(start, stop, columns)
        if source.projected is not None:
            return np.ascontiguousarray(source.projected.rows(rows, self._whole), np.float32)
        if source.channels_first and source.transposed:
            rows = _channels_last(rows, source.channels_first)
        elif source.channels_first:  # stored as [k, n]: k has the channels
            rows = _channels_last(self._reader.read(0, self._reader.shape[0], columns).T, source.channels_first).T[
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
        """Return the whole tensor with the first of these names, [n] or [rows, columns]."""
        reader = self._stored[chosen(names, self._stored)]
        rows, columns = (1, *reader.shape)[-2:]
        return reader.read(0, rows, columns).reshape(reader.shape)

    def _vector(self, name: str) -> npt.NDArray[np.float64]:
        """Return a stored vector [n] in double precision."""
        return np.asarray(self._stored[name].read(0, 1, self._stored[name].shape[0])[0], np.float64)


def _channels_last(rows: npt.NDArray[Any], first: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return rows [n, C ...] as [n, ... C]."""
    return np.moveaxis(rows.reshape(-1, *first), 1, -1).reshape(rows.shape)


# ----------------------------------------------------------------------------------------------------------------------
# Keeps the manifest of a checkpoint in the user's cache, so that a second start does not hash every weight again.
#
# Another file may have the same size and time (reproducible images, `rsync -t`), in a read-only image even the same
# inode. So the key of a manifest also contains samples of every tensor.


def file_stamp(path: Path, status: os.stat_result) -> FileStamp:
    """Return the stamp of a file."""
    return FileStamp(str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def sample_digest(readers: Mapping[str, TensorReader]) -> str:
    """Return a digest of the first, middle and last rows of all tensors, and of names and shapes; vectors are whole."""
    digest = hashlib.sha256()
    for name, reader in sorted(readers.items()):
        digest.update(repr((name, reader.shape, reader.dtype)).encode())
        if not reader.is_float or 0 in reader.shape:
            continue
        stacked = len(reader.shape) == 3  # matrices of experts: their rows are sampled, not whole matrices
        rows = math.prod(reader.shape[:-1]) if stacked else reader.shape[0] if len(reader.shape) > 1 else 1
        columns = math.prod(reader.shape) // rows
        for row in sorted({0, rows // 2, rows - 1}):
            digest.update(reader.read(row, row + 1, columns).tobytes())
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
    """Return the cached manifest under the name `model`, or None if it is missing or damaged."""
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
    """Write a manifest to the cache; without it only the next start is slower, so errors are ignored."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(manifest.digest + manifest.encode())
                file.flush()
                # Other processes read the old file or the complete new one.
                os.replace(file.name, path)
            except OSError:  # otherwise each start on a full disk would leave a file
                os.unlink(file.name)
