"""KV caches on disk between two processes of a device: written at a requested stop, read once and deleted."""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgpack
import numpy as np
import numpy.typing as npt

from device_agent.tile_cache import free_cache_bytes
from hepti_mqtt import __version__
from hepti_mqtt.config.state import PRIVATE, write_atomically
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.kernels import isa
from hepti_mqtt.runtime.worker.kv_caches import KeptCache

FORMAT: Final = 1
SHARE: Final = 8  # KV caches take at most one part in so many of `--cache-size`
SUFFIX: Final = ".kv"
MAX_HEADER_BYTES: Final = 1 << 20
_LENGTH: Final = struct.Struct("<I")  # of the header
_DTYPES: Final = frozenset({"float16", "float32"})


class SavedCaches:
    """The saved KV caches of one device, a file for each: a header in msgpack, then the rows of each array.

    limit_bytes: of all files; 0 saves none. Texts can be guessed from the rows, so only this user can read the files.
    """

    def __init__(self, directory: Path, limit_bytes: int, log: logging.Logger) -> None:
        self._directory, self._limit, self._log = directory, limit_bytes, log

    def save(self, caches: Sequence[KeptCache]) -> None:
        """Save the last caches that fit into the limit, at the cost of older files."""
        if not caches or not self._limit:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            for unfinished in self._directory.glob(f".*{SUFFIX}.*"):  # of a process that was killed
                unfinished.unlink(missing_ok=True)
            room = min(self._limit, free_cache_bytes(self._directory) + sum(map(_nbytes, self._files())))
            chosen = list[KeptCache]()
            for cache in reversed(caches):
                room -= sum(rows.nbytes for rows in _arrays(cache).values())
                if room < 0:
                    break
                chosen.insert(0, cache)
            self._trim(max(room, 0))
            for cache in chosen:
                _write(self._directory / f"{cache.origin}.{cache.number}{SUFFIX}", cache)
        except OSError as error:
            self._log.warning("KV caches are not saved: %s", error.strerror or error)
        else:
            self._log.info("saved %d of %d KV caches", len(chosen), len(caches))

    def take(self, layout: bytes) -> tuple[KeptCache, ...]:
        """Return the caches of a layout, the oldest first, and delete their files.

        Files of another version or machine, and damaged ones, are deleted too.
        """
        out = list[KeptCache]()
        for path in self._files():
            try:
                with path.open("rb") as file:
                    header = _read_header(file)
                    if header["layout"] != layout:
                        continue
                    out.append(_read_rows(header, file))
            except (OSError, ValueError, KeyError, TypeError, struct.error, msgpack.UnpackException) as error:
                self._log.warning("dropped the saved KV cache %s: %s", path.name, error)
            with suppress(OSError):  # the directory may be read-only
                path.unlink()
        return tuple(out)

    def _files(self) -> list[Path]:
        """Return the files, the oldest first."""
        return sorted(self._directory.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)

    def _trim(self, nbytes: int) -> None:
        """Delete the oldest files until all of them take no more than some bytes."""
        files = self._files()
        total = sum(map(_nbytes, files))
        for path in files:
            if total <= nbytes:
                return
            total -= _nbytes(path)
            path.unlink()


def _nbytes(path: Path) -> int:
    return path.stat().st_size


def _arrays(cache: KeptCache) -> dict[str, npt.NDArray[Any]]:
    """Return the cached rows of each array."""
    return {name: array[: cache.rows] for name, array in sorted(cache.arrays.items())}


def _write(path: Path, cache: KeptCache) -> None:
    arrays = _arrays(cache)
    parts = [array.data.cast("B") for array in arrays.values()]
    content = {
        "layout": cache.layout,
        "origin": list(cache.origin),
        "number": cache.number,
        "rows": cache.rows,
        "arrays": [[name, array.dtype.name, list(array.shape)] for name, array in arrays.items()],
    }
    header = msgpack.packb([FORMAT, __version__, isa(), _checksum(content, parts), content])
    write_atomically(path, [_LENGTH.pack(len(header)), header, *parts], PRIVATE)


def _checksum(content: Mapping[str, Any], parts: Sequence[memoryview]) -> bytes:
    """Return the SHA-256 of a header's content and of the rows."""
    out = hashlib.sha256(msgpack.packb(content))
    for part in parts:
        out.update(part)
    return out.digest()


def _read_header(file: BinaryIO) -> dict[str, Any]:
    """Return the content of a file's header; raises ValueError if this process cannot use the file."""
    nbytes = _LENGTH.unpack(file.read(_LENGTH.size))[0]
    if nbytes > MAX_HEADER_BYTES:
        raise ValueError("it is damaged")
    written, version, machine, checksum, content = msgpack.unpackb(file.read(nbytes))
    if (written, version, machine) != (FORMAT, __version__, isa()):
        raise ValueError(f"written by version {version} on {machine}")
    return {**content, "checksum": checksum}


def _read_rows(header: Mapping[str, Any], file: BinaryIO) -> KeptCache:
    """Return the cache of a file; raises ValueError if it is damaged."""
    content = {key: value for key, value in header.items() if key != "checksum"}
    rows, arrays = int(content["rows"]), dict[str, npt.NDArray[Any]]()
    left = _nbytes(Path(file.name)) - file.tell()
    for name, dtype, shape in content["arrays"]:
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if dtype not in _DTYPES or shape[0] != rows or not 0 <= nbytes <= left:
            raise ValueError("it is damaged")
        arrays[name] = np.empty(shape, dtype)
        left -= file.readinto(arrays[name].data.cast("B"))  # type: ignore[attr-defined]
    parts = [array.data.cast("B") for array in arrays.values()]
    if left or _checksum(content, parts) != header["checksum"]:
        raise ValueError("it is damaged")
    return KeptCache(content["layout"], PlanVersion(*content["origin"]), int(content["number"]), rows, arrays)
