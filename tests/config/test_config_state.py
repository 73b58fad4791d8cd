"""Boot counters only grow, and files are replaced whole."""

from __future__ import annotations

import errno
import itertools
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hepti_mqtt.config.state import AHEAD_S, latest_boot, next_boot, write_atomically
from hepti_mqtt.errors import ConfigError
from hepti_mqtt.protocol.plausible import MAX_BOOT


def test_boot_is_the_time_at_first(tmp_path):
    assert next_boot(tmp_path, lambda: 1700000000.9) == 1700000000


@given(times=st.lists(st.floats(0, 4e9), min_size=2, max_size=20))
def test_boot_grows_whatever_the_clock_does(tmp_path_factory, times):
    directory = tmp_path_factory.mktemp("boot")
    boots = [next_boot(directory, lambda t=t: t) for t in times]
    assert all(b > a for a, b in itertools.pairwise(boots))
    assert all(b >= int(t) for b, t in zip(boots, times, strict=True))


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff\xfe", b"12 34", b"-7", str(2**62).encode()])
def test_a_broken_counter_counts_as_none(tmp_path, content):
    (tmp_path / "boot").write_bytes(content)
    assert next_boot(tmp_path, lambda: 5.0) == 5
    assert next_boot(tmp_path, lambda: 5.0) == 6


def test_boots_of_a_time_that_has_not_come_are_not_believed():
    now = 1_800_000_000
    assert latest_boot(now - 5, now + 0.5) == now + AHEAD_S
    assert latest_boot(now, 1000.0) == now + AHEAD_S, "our clock was set at an earlier start"
    assert latest_boot(7, 1000.0) == MAX_BOOT, "without a clock nobody can be judged"


def test_a_counter_that_cannot_be_stored_is_an_error(tmp_path):
    (tmp_path / "boot").mkdir()
    with pytest.raises(ConfigError, match="boot counter"):
        next_boot(tmp_path)


def test_write_leaves_no_temporary_file_behind(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        write_atomically(tmp_path / "taken", b"x")
    write_atomically(tmp_path / "file", b"y")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "taken"]
    assert (tmp_path / "file").read_bytes() == b"y"


@pytest.fixture
def full_disk(monkeypatch):
    """A disk on which no file can be made until something is taken away from it."""
    honest, full = os.open, [True]

    def make(path, flags, *rest, **more):
        if flags & os.O_CREAT and full[0]:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return honest(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", make)
    return full


def test_on_a_full_disk_the_counter_takes_the_room_of_the_old_one(tmp_path, full_disk):
    (tmp_path / "boot").write_text("1700000123")
    assert next_boot(tmp_path, lambda: 5.0) == 1700000124
    assert next_boot(tmp_path, lambda: 5.0) == 1700000125
    assert (tmp_path / "boot").read_text() == "1700000125"


def test_room_is_made_before_the_disk_counts_as_full(tmp_path, full_disk):
    assert next_boot(tmp_path, lambda: 5.0, lambda: full_disk.clear() or full_disk.append(False)) == 5
    assert (tmp_path / "boot").read_text() == "5"


def test_where_nothing_can_be_stored_the_clock_must_do(tmp_path, full_disk, caplog):
    assert next_boot(tmp_path, lambda: 1700000000.0) == 1700000000
    assert "make room" in caplog.text
