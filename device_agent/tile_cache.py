"""The weight cache on disk: files under a size limit; the least recently used is evicted first.

Tiles are named by the hash of their bytes. Packed weights, the panels that kernels read, are named by a key of their
source. A start maps packed weights into its memory, and packs tiles if a packed weight is missing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import shutil
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from io import FileIO
from math import inf
from pathlib import Path
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from hepti_mqtt.config.state import write_atomically
from hepti_mqtt.core.errors import HeptiError
from hepti_mqtt.core.ids import check_model
from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.core.storage import Octets
from hepti_mqtt.kernels import Weight, allocate, arrays_of, layout_of, with_arrays

RESERVE_BYTES: Final = 64 << 20  # of the disk, or a twentieth of a small one, left to other programs
_SMALL: Final = 20
RECORD: Final = "models.json"
MAX_MODELS: Final = 16  # in a record
ADVICE: Final = "free disk space, replace a worn SD card, or choose another directory with --cache"
_TILE_KEY_BYTES: Final = 32  # a tile's SHA-256
_PACKED: Final = b"p"  # ends the key of a packed weight, so that no tile has it
_CHUNK: Final = 1 << 20  # bytes that are read, then summed from the processor's cache
_SUM_BYTES: Final = 8
_LINE: Final = 64  # bytes of a cache line: each array of a packed weight begins at one
_PREFIX: Final = 2  # hex digits of a name that name its directory
_log: Final = logging.getLogger("hepti.agent")


def free_cache_bytes(directory: Path) -> int:
    """Return the disk space left for tiles; negative if they already use too much."""
    usage = shutil.disk_usage(directory)
    return usage.free - min(RESERVE_BYTES, usage.total // _SMALL)


def packed_key(manifest: bytes, matrix: WeightRef) -> bytes:
    """Return the key of a packed weight; equal keys mean equal arrays. manifest: its digest."""
    text = f"{manifest.hex()} {tuple(matrix)} {layout_of(matrix)}"
    return hashlib.sha256(text.encode()).digest() + _PACKED


class _Stamp(NamedTuple):
    """A file's identity: with an equal stamp it is unchanged since it was checked."""

    inode: int
    nbytes: int
    modified_ns: int


def _stamp(stat: os.stat_result) -> _Stamp:
    return _Stamp(stat.st_ino, stat.st_size, stat.st_mtime_ns)


@dataclass(slots=True)
class CacheRecord:
    """A device's record of its tiles, kept across starts."""

    #: SHA-256 of the manifest that each model was last loaded from, the last one last.
    manifests: dict[str, bytes] = field(default_factory=dict)
    read_bytes_per_s: float = 0.0  #: rate of loading cached tiles with the whole processor; 0: not measured
    receive_bytes_per_s: float = 0.0  #: the same for received tiles


class TileCache:
    """Tiles by their SHA-256, and packed weights by their key, in files `<directory>/<two hex digits>/<key in hex>`.

    limit_bytes: of all files; 0 turns the cache off. Tiles also make room on a full disk: they can be fetched again,
    other files cannot. A read-only directory is read. room_bytes: returns the free bytes for tiles. on_trouble: called
    when `trouble` changes. counters: `cache_corrupt` files that did not match their name, `cache_evicted`,
    `cache_errors` of the file system. Not thread safe.
    """

    def __init__(
        self,
        directory: Path,
        limit_bytes: int,
        counters: Counter[str],
        room_bytes: Callable[[Path], int] = free_cache_bytes,
        on_trouble: Callable[[], None] = lambda: None,
    ) -> None:
        self._directory = directory
        self._limit, self._room_bytes = limit_bytes, room_bytes
        self._counters = counters
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._checked: dict[bytes, _Stamp] = {}
        #: Packed weights in use: removing their files would give no room back.
        self._mapped: WeakValueDictionary[bytes, mmap.mmap] = WeakValueDictionary()
        self.bytes = 0
        self._on_trouble = on_trouble
        self.trouble = ""  #: why new tiles are not kept; "" if they are
        if limit_bytes > 0:
            self._check_writable()
            self._scan()
            if not self._evict(0, self._sizes):  # the disk is full even without tiles
                self._drop(list(self._sizes), self.bytes)

    @property
    def is_kept(self) -> bool:
        """Return whether new tiles are kept."""
        return self._limit > 0 and not self.trouble

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._sizes

    def get(self, digest: bytes) -> bytes | None:
        """Return the checked blob of a hash, or None; a damaged file is removed.

        An unchanged file is hashed once per process: a board without SHA-256 instructions hashes as slowly as it
        multiplies, and each new plan reads the same files again.
        """
        if digest not in self._sizes:
            return None
        path = self._path(digest)
        try:
            with path.open("rb") as file:
                data, stamp = file.read(), _stamp(os.fstat(file.fileno()))
        except OSError:
            self._forget(digest)
            return None
        if self._checked.get(digest) != stamp and hashlib.sha256(data).digest() != digest:
            self._counters["cache_corrupt"] += 1
            self._remove(digest)
            return None
        self._touch(digest, path, stamp)
        return data

    def _touch(self, digest: bytes, path: Path, stamp: _Stamp) -> None:
        """Mark a file as just used, and keep its new stamp."""
        now_ns = time.time_ns()
        try:
            os.utime(path, ns=(now_ns, now_ns))
        except OSError:  # another user's file: its time of use stays old
            now_ns = stamp.modified_ns
        self._checked[digest] = stamp._replace(modified_ns=now_ns)
        self._sizes.move_to_end(digest)

    def put(self, digest: bytes, data: bytes | memoryview, keep: Collection[bytes] = ()) -> None:
        """Store a blob, unless only blobs in `keep` could make room for it; the caller has checked its hash."""
        if len(data) > self._limit or digest in self._sizes:
            return
        if self._evict(len(data), (other for other in self._sizes if other not in keep)):
            if (stat := self._write(digest, data)) is not None:
                self._checked[digest] = _stamp(stat)
        elif len(data) > self._room():
            self._set_trouble("the disk is full")

    def get_packed(self, key: bytes, matrix: WeightRef) -> Weight | None:
        """Return a packed weight as a view of its file, or None; a damaged file is removed.

        The file is read once for its sum, which detects damage by a worn disk or a power cut: a page that cannot be
        read raises here, instead of ending the process when a kernel touches it. A hash is not needed: a user who can
        write to this directory can also change this program.
        """
        if key not in self._sizes:
            return None
        like, path = allocate(matrix).weight(), self._path(key)
        starts, nbytes = _places(like)
        try:
            with path.open("rb", buffering=0) as file:
                stat = os.fstat(file.fileno())
                if stat.st_size != nbytes + _SUM_BYTES or _read_sum(file, nbytes) != file.read(_SUM_BYTES):
                    self._counters["cache_corrupt"] += 1
                    self._remove(key)
                    return None
                # A private mapping: kernels take writable arrays, and a stray write must not reach the file.
                memory = mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_COPY)
        except OSError:
            self._forget(key)
            return None
        self._mapped[key] = memory
        self._touch(key, path, _stamp(stat))
        arrays = zip(arrays_of(like), starts, strict=True)
        return with_arrays(
            like, [np.frombuffer(memory, a.dtype, a.size, start).reshape(a.shape) for a, start in arrays]
        )

    def put_packed(self, key: bytes, weight: Weight) -> None:
        """Store a packed weight, unless tiles would have to make room: a tile cannot be derived from it."""
        nbytes = _places(weight)[1] + _SUM_BYTES
        if nbytes <= self._limit and key not in self._sizes and self._evict(nbytes, self._packed()):
            arrays = [array.reshape(-1).view(np.uint8) for array in arrays_of(weight)]
            padded = [part for array in arrays for part in (array.data, bytes(-len(array) % _LINE))]
            self._write(key, *padded, _encode_sum(sum(map(_sum, arrays))))

    def _write(self, key: bytes, *data: bytes | memoryview) -> os.stat_result | None:
        """Write a file and count it; on an error set `trouble` and return None."""
        path = self._path(key)
        try:
            try:
                stat = write_atomically(path, data)
            except FileNotFoundError:  # create the directory only if missing: mkdir per tile took 6 % of a load
                path.parent.mkdir(parents=True, exist_ok=True)
                stat = write_atomically(path, data)
        except OSError as error:
            self._counters["cache_errors"] += 1
            self._set_trouble(error.strerror or str(error))
            return None
        self._set_trouble("")
        self._sizes[key] = stat.st_size
        self.bytes += stat.st_size
        return stat

    def read_record(self) -> CacheRecord:
        """Return the stored record, an empty one if it cannot be read."""
        try:
            stored = json.loads((self._directory / RECORD).read_text(encoding="utf-8"))
            manifests = {check_model(name): bytes.fromhex(text) for name, text in stored["manifests"].items()}
            rates = [float(stored[name]) for name in ("read_bytes_per_s", "receive_bytes_per_s")]
            if not all(0 <= rate < inf for rate in rates):
                return CacheRecord()
            return CacheRecord(manifests, *rates)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, HeptiError):
            return CacheRecord()

    def write_record(self, record: CacheRecord) -> None:
        """Store a record if the disk can be written."""
        if not self.is_kept:
            return
        while len(record.manifests) > MAX_MODELS:
            del record.manifests[next(iter(record.manifests))]
        stored = {**asdict(record), "manifests": {name: digest.hex() for name, digest in record.manifests.items()}}
        try:
            write_atomically(self._directory / RECORD, json.dumps(stored).encode())
        except OSError as error:
            self._set_trouble(error.strerror or str(error))

    def _check_writable(self) -> None:
        """Set `trouble` before the first tile if the directory cannot be written."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            write_atomically(self._directory / "writable", b"")
            (self._directory / "writable").unlink()
        except OSError as error:
            self._set_trouble(error.strerror or str(error))

    def _set_trouble(self, why: str) -> None:
        """Report a change: new tiles are not kept, or are kept again."""
        if bool(why) != bool(self.trouble):
            if why:
                _log.warning(
                    "cannot cache weights in %s (%s): this device serves from memory and loads them again after every "
                    "start; %s",
                    self._directory,
                    why,
                    ADVICE,
                )
            self.trouble = f"cannot cache weights: {why}" if why else ""
            self._on_trouble()

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self._directory / name[:_PREFIX] / name

    def _scan(self) -> None:
        files: list[tuple[float, bytes, int]] = []
        for file in self._files():
            try:
                digest, stat = bytes.fromhex(file.name), file.stat()
            except ValueError:  # a temporary file left by a crash
                with suppress(OSError):
                    os.unlink(file.path)
                continue
            except OSError:
                continue
            files.append((stat.st_mtime, digest, stat.st_size))
        for _, digest, size in sorted(files):
            self._sizes[digest] = size
            self.bytes += size

    def _files(self) -> Iterator[os.DirEntry[str]]:
        """Yield the files of the cache; none if the directory cannot be read."""
        with suppress(OSError), os.scandir(self._directory) as directories:
            for directory in directories:
                if len(directory.name) == _PREFIX:
                    with suppress(OSError), os.scandir(directory.path) as files:
                        yield from files

    def _packed(self) -> Iterator[bytes]:
        return (key for key in self._sizes if len(key) > _TILE_KEY_BYTES)

    def _evict(self, wanted: int, from_: Iterable[bytes]) -> bool:
        """Make room for `wanted` bytes, under the limit and on the disk; return whether there is room.

        from_: the files that may be removed if no weight in use is a view of them, in this order.
        """
        over = max(self.bytes + wanted - self._limit, wanted - self._room())
        if over <= 0:
            return True
        loose = [digest for digest in from_ if digest not in self._mapped]
        if sum(self._sizes[digest] for digest in loose) < over:
            return False
        self._drop(loose, over)
        return True

    def _drop(self, digests: Iterable[bytes], over: int) -> None:
        """Remove blobs of at least `over` bytes."""
        enough = self.bytes - over
        for digest in digests:
            if self.bytes <= enough:
                return
            self._counters["cache_evicted"] += 1
            self._remove(digest)

    def _room(self) -> int:
        try:
            return self._room_bytes(self._directory)
        except OSError:  # no directory yet, or an unknown size: a write will fail if there is no room
            return sys.maxsize

    def _remove(self, digest: bytes) -> None:
        with suppress(OSError):
            self._path(digest).unlink()
        self._forget(digest)

    def _forget(self, digest: bytes) -> None:
        self._checked.pop(digest, None)
        self.bytes -= self._sizes.pop(digest, 0)


def _places(weight: Weight) -> tuple[list[int], int]:
    """Return where each array of a weight begins in its file, and where the last one ends."""
    starts, end = list[int](), 0
    for array in arrays_of(weight):
        starts.append(end)
        end += array.nbytes + -array.nbytes % _LINE
    return starts, end


def _sum(octets: Octets) -> int:
    """Return the sum of 64-bit words, modulo 2**64 for all but the last one; zeros complete the last word."""
    words = len(octets) // _SUM_BYTES * _SUM_BYTES
    last = octets[words:].tobytes().ljust(_SUM_BYTES, b"\0")
    return int(octets[:words].view(np.uint64).sum()) + int.from_bytes(last, sys.byteorder)


def _read_sum(file: FileIO, nbytes: int) -> bytes:
    """Read `nbytes` and return their encoded sum; each chunk is summed while the processor's cache holds it."""
    chunk, total = np.empty(min(_CHUNK, nbytes), np.uint8), 0
    for at in range(0, nbytes, _CHUNK):
        part = chunk[: nbytes - at]
        file.readinto(part.data)
        total += _sum(part)
    return _encode_sum(total)


def _encode_sum(total: int) -> bytes:
    """Return the last bytes of a file; inverted, so that a file of zeros is invalid."""
    return (~total % (1 << 8 * _SUM_BYTES)).to_bytes(_SUM_BYTES, sys.byteorder)
