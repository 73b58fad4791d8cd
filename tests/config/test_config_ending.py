"""Signals that end a process in order."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from hepti_mqtt.config.process import ended_by_signals, stop_event, uninterrupted

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
        with ended_by_signals(), ExitStack() as stack:
            stack.callback(passed.append, "closed")
            signal.raise_signal(number)

    with pytest.raises(SystemExit) as end:
        work()
    assert passed == ["closed"]
    assert end.value.code == 128 + number
    assert [signal.getsignal(n) for n in ENDING] == [signal.SIG_DFL] * 2


def test_a_signal_that_is_ignored_stays_so() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    with ended_by_signals():
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
        with ended_by_signals(), uninterrupted():
            signal.raise_signal(signal.SIGTERM)
            removed.append(True)

    with pytest.raises(SystemExit):
        work()
    assert removed
