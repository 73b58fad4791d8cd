"""Who tells an agent to end is heard, also where the interrupt falls into something that swallows it."""

from __future__ import annotations

import signal
import weakref

import pytest

from device_agent.agent import _Signals
from device_agent.events import AgentEvent, Stop
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
    with _Signals() as signals:
        signals.check()
        tell_in_a_callback()
        with pytest.raises(KeyboardInterrupt):
            signals.check()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_was_lost_ends_the_session_thread():
    inbox: Inbox[AgentEvent] = Inbox()
    with _Signals() as signals:
        tell_in_a_callback()
        signals.deliver_to(inbox)
    assert isinstance(inbox.get(0.0), Stop)


def test_a_signal_interrupts_before_the_session_thread_runs_and_is_an_event_then():
    inbox: Inbox[AgentEvent] = Inbox()
    with _Signals() as signals, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    with _Signals() as signals:
        signals.deliver_to(inbox)
        signal.raise_signal(signal.SIGTERM)
    assert isinstance(inbox.get(0.0), Stop)
