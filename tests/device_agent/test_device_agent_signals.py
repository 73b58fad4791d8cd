"""Who tells an agent to end is heard, also where the interrupt falls into something that swallows it."""

from __future__ import annotations

import signal
import subprocess
import sys
import weakref

import pytest

from device_agent.agent import Signals, ToldToEnd, _Agent, run_agent
from device_agent.config import AgentConfig
from device_agent.network import AgentEvent, Stop
from hepti_mqtt.transport import BrokerUrl
from hepti_mqtt.transport.inbox import Inbox


class Thing:
    pass


def tell_in_a_callback() -> None:
    """Send SIGTERM in the callback of a weak reference, where Python drops what is raised."""
    thing = Thing()
    reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGTERM))
    del thing
    assert reference() is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_was_lost_comes_again():
    with Signals() as signals:
        signals.check()
        tell_in_a_callback()
        with pytest.raises(ToldToEnd):
            signals.check()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_was_lost_ends_the_session_thread():
    inbox: Inbox[AgentEvent] = Inbox()
    with Signals() as signals:
        tell_in_a_callback()
        signals.deliver_to(inbox)
    assert isinstance(inbox.get(0.0), Stop)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_interrupts_before_the_session_thread_runs_and_is_an_event_then(number):
    inbox: Inbox[AgentEvent] = Inbox()
    with Signals() as signals, pytest.raises(ToldToEnd):
        signal.raise_signal(number)
    with Signals() as signals:
        signals.deliver_to(inbox)
        signal.raise_signal(number)
    assert isinstance(inbox.get(0.0), Stop)


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_who_is_told_to_end_in_an_import_ends_as_if_nothing_had_happened(number):
    code = (
        "import signal; from device_agent.agent import Signals, ToldToEnd\n"
        "try:\n"
        f"    with Signals(): exec('signal.raise_signal(signal.{number})')\n"
        "except ToldToEnd: print('told')"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "told\n"), done.stderr


def test_an_agent_started_with_nohup_outlives_its_terminal():
    inbox: Inbox[AgentEvent] = Inbox()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            signals.deliver_to(inbox)
            signal.raise_signal(signal.SIGHUP)
        assert inbox.empty()
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.fixture
def config(tmp_path):
    return AgentConfig(BrokerUrl.parse("mqtt://127.0.0.1:1"), "home", "a", cache_dir=tmp_path)


def test_a_second_signal_does_not_keep_an_agent_from_closing_all(config, monkeypatch):
    closed, close = [], _Agent.close

    def close_told_again(agent):
        signal.raise_signal(signal.SIGTERM)
        close(agent)
        closed.append(agent)

    monkeypatch.setattr(_Agent, "run", lambda *_: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(_Agent, "close", close_told_again)
    run_agent(config)
    assert closed


def test_a_signal_while_an_agent_is_put_together_ends_it_without_a_traceback(config, monkeypatch):
    monkeypatch.setattr(_Agent, "__init__", lambda *_: signal.raise_signal(signal.SIGTERM))
    run_agent(config)
