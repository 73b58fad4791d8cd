"""A process: signals that end it, its boot counter and its log."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hepti_mqtt.config.process import (
    block_signals,
    exit_on_signals,
    setup_logging,
    stop_event,
)
from hepti_mqtt.config.state import next_boot, write_atomically
from hepti_mqtt.errors import ConfigError
from hepti_mqtt.protocol.plausible import MAX_BOOT, MAX_CLOCK_SKEW_S, max_plausible_boot

ENDING = [signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(autouse=True)
def nobody_handles_signals() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_ends_through_every_finally_and_means_what_it_did_afterwards(number: signal.Signals) -> None:
    passed: list[str] = []

    def work() -> None:
        with exit_on_signals(), ExitStack() as stack:
            stack.callback(passed.append, "closed")
            signal.raise_signal(number)

    with pytest.raises(SystemExit) as end:
        work()
    assert passed == ["closed"]
    assert end.value.code == 128 + number
    assert [signal.getsignal(n) for n in ENDING] == [signal.SIG_DFL] * 2


def test_a_signal_that_is_ignored_stays_so() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    with exit_on_signals():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize("number", [*ENDING, signal.SIGINT])
def test_a_signal_sets_the_event_of_a_process_that_ends_in_its_own_time(number: signal.Signals) -> None:
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        stop = stop_event()
        assert not stop.is_set()
        signal.raise_signal(number)
        assert stop.is_set()
    finally:
        signal.signal(signal.SIGINT, interrupt)


def test_a_process_that_outlives_its_terminal_goes_on_without_it() -> None:
    interrupt = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        stop = stop_event()
        signal.raise_signal(signal.SIGHUP)
        assert not stop.is_set()
    finally:
        signal.signal(signal.SIGINT, interrupt)


def test_a_second_signal_waits_until_everything_is_removed() -> None:
    removed = []

    def work() -> None:
        with exit_on_signals(), block_signals():
            signal.raise_signal(signal.SIGTERM)
            removed.append(True)

    with pytest.raises(SystemExit):
        work()
    assert removed


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
    assert max_plausible_boot(now - 5, now + 0.5) == now + MAX_CLOCK_SKEW_S
    assert max_plausible_boot(now, 1000.0) == now + MAX_CLOCK_SKEW_S, "our clock was set at an earlier start"
    assert max_plausible_boot(7, 1000.0) == MAX_BOOT, "without a clock nobody can be judged"


def test_a_counter_that_cannot_be_stored_is_an_error(tmp_path):
    (tmp_path / "boot").mkdir()
    with pytest.raises(ConfigError):
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
    assert "free disk space" in caplog.text


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(self.format(record))


def test_verbose_is_about_ourselves(monkeypatch):
    root = logging.getLogger()
    levels = {name: logging.getLogger(name).level for name in ("", "hepti", "hepti_mqtt", "device_agent")}
    handler = Lines()
    monkeypatch.setattr(root, "handlers", [])
    try:
        setup_logging(handler, "%(name)s", verbose=True)
        for name in ("hepti.agent", "hepti_mqtt.runtime", "device_agent", "numba.core.ssa", "PIL"):
            logging.getLogger(name).debug("word")
        assert handler.lines == ["hepti.agent", "hepti_mqtt.runtime", "device_agent"]
        root.handlers = []
        setup_logging(handler, "%(name)s")
        logging.getLogger("hepti.agent").debug("other word")
        logging.getLogger("numba").warning("other word")
        assert handler.lines[3:] == ["numba"]
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
