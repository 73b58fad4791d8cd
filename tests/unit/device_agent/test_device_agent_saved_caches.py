"""Saved KV caches: what was written comes back once, and nothing that another version, machine or fault has left."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from device_agent import saved_caches
from device_agent.saved_caches import SavedCaches
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.runtime.worker.kv_caches import KeptCache

LOG = logging.getLogger("test")
LAYOUT = b"l" * 32


def cache(number: int, rows: int = 5, layout: bytes = LAYOUT) -> KeptCache:
    values = np.random.default_rng(number)
    arrays = {
        "k.0": values.normal(size=(8, 2, 3)).astype(np.float32),
        "v.0": values.normal(size=(8, 6)).astype(np.float16),
    }
    return KeptCache(layout, PlanVersion(7, 1), number, rows, arrays)


def saved(directory: Path, limit_bytes: int = 1 << 20) -> SavedCaches:
    return SavedCaches(directory / "kv", limit_bytes, LOG)


def files(directory: Path) -> list[Path]:
    return sorted((directory / "kv").glob("*"))


def test_rows_come_back_once_in_their_order(tmp_path: Path) -> None:
    given = [cache(3), cache(1, rows=8), cache(2)]
    saved(tmp_path).save(given)
    assert not any(path.stat().st_mode & 0o077 for path in files(tmp_path))
    back = saved(tmp_path).take(LAYOUT)
    assert [(c.layout, c.origin, c.number, c.rows) for c in back] == [c[:4] for c in given]
    for one, other in zip(back, given, strict=True):
        for name, array in other.arrays.items():
            assert one.arrays[name].dtype == array.dtype
            np.testing.assert_array_equal(one.arrays[name], array[: other.rows])
    assert not files(tmp_path)
    assert saved(tmp_path).take(LAYOUT) == ()


def test_caches_of_other_layouts_wait_for_their_plan(tmp_path: Path) -> None:
    saved(tmp_path).save([cache(1), cache(2, layout=b"o" * 32)])
    assert [c.number for c in saved(tmp_path).take(LAYOUT)] == [1]
    assert [c.number for c in saved(tmp_path).take(b"o" * 32)] == [2]


@pytest.mark.parametrize(("limit", "kept"), [(0, []), (179, []), (180, [3]), (540, [1, 2, 3])])
def test_the_last_caches_are_saved_within_the_limit(tmp_path: Path, limit: int, kept: list[int]) -> None:
    saved(tmp_path, limit).save([cache(1), cache(2), cache(3)])  # of 180 bytes each
    assert [c.number for c in saved(tmp_path).take(LAYOUT)] == kept


def test_older_files_make_room(tmp_path: Path) -> None:
    saved(tmp_path).save([cache(1, layout=b"o" * 32), cache(2, layout=b"o" * 32)])
    one_file = files(tmp_path)[0].stat().st_size
    saved(tmp_path, 180 + one_file).save([cache(3)])
    assert [c.number for c in saved(tmp_path).take(b"o" * 32)] == [2]
    assert [c.number for c in saved(tmp_path).take(LAYOUT)] == [3]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


FAULTS: dict[str, Callable[[Path], object]] = {
    "a changed byte": flip,
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "empty": lambda path: path.write_bytes(b""),
    "no header": lambda path: path.write_bytes(b"\x05\0\0\0hello"),
    "a long header": lambda path: path.write_bytes(b"\xff" * 4 + path.read_bytes()[4:]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_file_is_dropped(tmp_path: Path, fault: str) -> None:
    saved(tmp_path).save([cache(1), cache(2)])
    FAULTS[fault](files(tmp_path)[0])
    assert [c.number for c in saved(tmp_path).take(LAYOUT)] == [2]
    assert not files(tmp_path)


@pytest.mark.parametrize("changed", [{"FORMAT": 2}, {"__version__": "9.9"}, {"isa": lambda: "abacus"}])
def test_files_of_another_version_or_machine_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, object]
) -> None:
    saved(tmp_path).save([cache(1)])
    for name, value in changed.items():
        monkeypatch.setattr(saved_caches, name, value)
    assert saved(tmp_path).take(LAYOUT) == ()
    assert not files(tmp_path)


def test_what_a_killed_process_left_goes_with_the_next_save(tmp_path: Path) -> None:
    saved(tmp_path).save([cache(1)])
    (tmp_path / "kv" / ".7.1.2.kv.4711").write_bytes(b"half")
    saved(tmp_path).save([cache(3)])
    assert len(files(tmp_path)) == len([*(tmp_path / "kv").iterdir()]) == 2


def test_a_directory_that_cannot_be_written_loses_the_caches_alone(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("")
    saved(tmp_path).save([cache(1)])
    assert saved(tmp_path).take(LAYOUT) == ()
