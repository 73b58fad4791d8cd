"""A process: signals that end it, its files and its log."""

import logging
import signal
from contextlib import ExitStack

import pytest

from hepti_mqtt.config.process import block_signals, exit_on_signals, setup_logging, stop_event
from hepti_mqtt.config.state import write_atomically

ENDING = [signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(autouse=True)
def nobody_handles_signals():
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_ends_through_every_finally_and_means_what_it_did_afterwards(number):
    passed = []

    def work():
        with exit_on_signals(), ExitStack() as stack:
            stack.callback(passed.append, "closed")
            signal.raise_signal(number)

    with pytest.raises(SystemExit) as end:
        work()
    assert passed == ["closed"]
    assert end.value.code == 128 + number
    assert [signal.getsignal(n) for n in ENDING] == [signal.SIG_DFL] * 2


def test_a_signal_that_is_ignored_stays_so():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    with exit_on_signals():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize(
    ("number", "handler", "stops"),
    [*((number, signal.SIG_DFL, True) for number in (*ENDING, signal.SIGINT)), (signal.SIGHUP, signal.SIG_IGN, False)],
)
def test_a_signal_sets_the_stop_event_unless_nohup_ignores_it(number, handler, stops):
    interrupt = signal.getsignal(signal.SIGINT)
    signal.signal(number, handler)
    try:
        stop = stop_event()
        assert not stop.is_set()
        signal.raise_signal(number)
        assert stop.is_set() is stops
    finally:
        signal.signal(signal.SIGINT, interrupt)


def test_a_second_signal_waits_until_everything_is_removed():
    removed = []

    def work():
        with exit_on_signals(), block_signals():
            signal.raise_signal(signal.SIGTERM)
            removed.append(True)

    with pytest.raises(SystemExit):
        work()
    assert removed


def test_write_leaves_no_temporary_file_behind(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path / "taken", b"x")
    write_atomically(tmp_path / "file", b"y")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "taken"]
    assert (tmp_path / "file").read_bytes() == b"y"


def test_verbose_is_about_ourselves(monkeypatch):
    root, handler, lines = logging.getLogger(), logging.Handler(), []
    levels = {name: logging.getLogger(name).level for name in ("", "hepti", "hepti_mqtt", "device_agent")}
    monkeypatch.setattr(handler, "emit", lambda record: lines.append(handler.format(record)))
    monkeypatch.setattr(root, "handlers", [])
    try:
        setup_logging(handler, "%(name)s", verbose=True)
        for name in ("hepti.agent", "hepti_mqtt.runtime", "device_agent", "numba.core.ssa", "PIL"):
            logging.getLogger(name).debug("word")
        assert lines == ["hepti.agent", "hepti_mqtt.runtime", "device_agent"]
        root.handlers = []
        setup_logging(handler, "%(name)s")
        logging.getLogger("hepti.agent").debug("other word")
        logging.getLogger("numba").warning("other word")
        assert lines[3:] == ["numba"]
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
