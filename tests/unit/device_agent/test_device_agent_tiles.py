"""Tiles on disk: what is there is whole, bounded and the last used; a bad disk only costs asking again."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections import Counter
from types import SimpleNamespace

import pytest
from device_agent_support import sha
from hypothesis import given
from hypothesis import strategies as st

from device_agent import tile_cache
from device_agent.tile_cache import TileCache, free_cache_bytes


def blob(i, size=100):
    return bytes([i % 256]) * size


@pytest.fixture
def counters():
    return Counter()


def files(directory):
    return {p.name for p in directory.glob("??/*")}


@pytest.mark.parametrize("damage", [b"", b"til", b"tilf", b"tile and more"])
def test_a_damaged_file_is_removed_and_counted(tmp_path, counters, damage):
    TileCache(tmp_path, 1000, counters).put(sha(b"tile"), b"tile")
    (path,) = tmp_path.glob("??/*")
    path.write_bytes(damage)
    cache = TileCache(tmp_path, 1000, counters)
    assert cache.get(sha(b"tile")) is None
    assert sha(b"tile") not in cache
    assert counters["cache_corrupt"] == 1
    assert files(tmp_path) == set()
    cache.put(sha(b"tile"), b"tile")
    assert cache.get(sha(b"tile")) == b"tile"


@pytest.fixture
def hashed(monkeypatch):
    """The sizes of what the cache has hashed."""
    sizes = []

    def sha256(data):
        sizes.append(len(data))
        return hashlib.sha256(data)

    monkeypatch.setattr(tile_cache, "hashlib", SimpleNamespace(sha256=sha256))
    return sizes


@pytest.mark.parametrize("settable", [True, False])
def test_a_restart_reads_the_files_hashes_each_once_and_clears_what_is_half_written(
    tmp_path, counters, hashed, monkeypatch, settable
):
    TileCache(tmp_path, 1000, counters).put(sha(b"tile"), b"tile")
    (half,) = (path.parent / ".abcd.123" for path in tmp_path.glob("??/*"))
    half.write_bytes(b"half")
    if not settable:
        monkeypatch.setattr(tile_cache.os, "utime", lambda *_, **__: (_ for _ in ()).throw(PermissionError()))
    cache = TileCache(tmp_path, 1000, counters)
    assert sha(b"tile") in cache
    assert [cache.get(sha(b"tile")) for _ in range(3)] == [b"tile"] * 3
    assert (hashed, cache.bytes) == ([4], 4)
    assert not half.exists()


@pytest.mark.parametrize("change", ["replaced", "written", "removed"])
def test_a_file_that_somebody_has_touched_is_read_again(tmp_path, counters, hashed, change):
    cache = TileCache(tmp_path, 1000, counters)
    cache.put(sha(b"tile"), b"tile")
    assert cache.get(sha(b"tile")) == b"tile"
    (path,) = tmp_path.glob("??/*")
    if change == "removed":
        path.unlink()
    elif change == "replaced":
        stat = path.stat()
        (tmp_path / "new").write_bytes(b"tilf")
        os.utime(tmp_path / "new", ns=(stat.st_atime_ns, stat.st_mtime_ns))
        (tmp_path / "new").replace(path)
    else:
        path.write_bytes(b"tilf")
        os.utime(path, ns=(1, 1))
    assert cache.get(sha(b"tile")) is None
    assert counters["cache_corrupt"] == (change != "removed")
    assert hashed == ([] if change == "removed" else [4])
    assert cache.bytes == 0


@pytest.mark.parametrize(
    ("keep", "left"),
    [((), (True, False, True, True)), ((0, 1), (True, True, False, True)), ((0, 1, 2), (True, True, True, False))],
)
def test_the_least_recently_used_goes_first_and_what_is_kept_never(tmp_path, counters, keep, left):
    cache = TileCache(tmp_path, 300, counters)
    tiles = [blob(i) for i in range(4)]
    for tile in tiles[:3]:
        cache.put(sha(tile), tile)
    assert cache.get(sha(tiles[0])) == tiles[0]
    cache.put(sha(tiles[3]), tiles[3], keep={sha(tiles[n]) for n in keep})
    assert tuple(sha(t) in cache for t in tiles) == left
    assert counters["cache_evicted"] == left[3]


def test_a_full_disk_is_counted_not_raised(tmp_path, counters, monkeypatch):
    cache = TileCache(tmp_path, 1000, counters)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("device_agent.tile_cache.write_atomically", full)
    cache.put(sha(b"tile"), b"tile")
    assert counters["cache_errors"] == 1
    assert cache.get(sha(b"tile")) is None


def test_a_directory_that_cannot_be_made_keeps_nothing_and_says_so(tmp_path, counters, caplog):
    (tmp_path / "file").write_text("no directory")
    changes = []
    cache = TileCache(tmp_path / "file" / "tiles", 1000, counters, on_trouble=lambda: changes.append(1))
    assert cache.trouble
    assert not cache.is_kept
    cache.put(sha(b"tile"), b"tile")
    assert len(changes) == 1
    assert cache.get(sha(b"tile")) is None
    assert len(caplog.records) == 1
    (tmp_path / "file").unlink()
    cache.put(sha(b"tile"), b"tile")
    assert cache.get(sha(b"tile")) == b"tile"
    assert (cache.trouble, len(changes)) == ("", 2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a file system")
def test_a_read_only_disk_is_read(tmp_path, counters):
    before = TileCache(tmp_path / "disk", 1000, counters)
    mount = ["mount", "-t", "tmpfs", "tmpfs", str(tmp_path / "disk")]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount")
    try:
        before.put(sha(b"tile"), b"tile")
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "disk")], check=True)
        cache = TileCache(tmp_path / "disk", 1000, counters)
        cache.put(sha(b"other"), b"other")
        assert cache.get(sha(b"tile")) == b"tile"
        assert cache.get(sha(b"other")) is None
        assert cache.trouble
    finally:
        subprocess.run(["umount", str(tmp_path / "disk")], check=True)


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=60), st.integers(0, 900))
def test_bytes_on_disk_never_exceed_the_limit(tmp_path_factory, operations, limit):
    directory = tmp_path_factory.mktemp("tiles")
    cache = TileCache(directory, limit, Counter())
    for number, read in operations:
        tile = blob(number, 10 + 17 * number)
        if read:
            assert cache.get(sha(tile)) in (None, tile)
        else:
            cache.put(sha(tile), tile)
        on_disk = sum(p.stat().st_size for p in directory.glob("??/*"))
        assert on_disk == cache.bytes <= limit


def test_tiles_go_where_others_fill_the_disk(tmp_path, counters, caplog):
    left = [1000]

    def room(_):
        return left[0] - sum(f.stat().st_size for f in tmp_path.glob("??/*"))

    cache = TileCache(tmp_path, 10_000, counters, room)
    tiles = [blob(i) for i in range(4)]
    for tile in tiles[:3]:
        cache.put(sha(tile), tile)
    left[0] = 250  # others have taken their part
    cache.put(sha(tiles[3]), tiles[3], keep=[sha(tiles[2])])
    assert files(tmp_path) == {sha(tiles[2]).hex(), sha(tiles[3]).hex()}
    left[0] = -50
    for tile in tiles[:2]:
        cache.put(sha(tile), tile)
    assert sha(tiles[0]) not in cache
    assert len(caplog.records) == 1, "said once"
    again = TileCache(tmp_path, 10_000, counters, room)
    assert files(tmp_path) == set(), "a cache that is opened on a full disk makes room"
    assert again.bytes == 0


def test_a_small_disk_keeps_a_part_of_itself(tmp_path, monkeypatch):
    usage = SimpleNamespace(total=1000 << 20, free=60 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert free_cache_bytes(tmp_path) == (60 - 50) << 20
    usage.total = 100_000 << 20
    assert free_cache_bytes(tmp_path) == (60 - 64) << 20
