"""A pytest plugin: illegal steps of a session fail a test, and a test that fails prints the stories of its sessions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from typing import Final

import pytest

from hepti_mqtt.runtime.machinery import StateMachine, Transition, TransitionLog

SHOWN: Final = 8  # stories of a failed test, those that were last told to: property tests make very many

_told: OrderedDict[int, TransitionLog] = OrderedDict()
_tell = TransitionLog.append


def _tell_and_note(story: TransitionLog, transition: Transition) -> None:
    _told[id(story)] = story
    _told.move_to_end(id(story))
    while len(_told) > SHOWN:
        _told.popitem(last=False)
    _tell(story, transition)


def pytest_configure() -> None:
    """Watch every story, and let illegal steps raise."""
    TransitionLog.append = _tell_and_note
    StateMachine.strict = True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Forget the stories of the test before."""
    _told.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the stories that were told during a test to its report, if it failed."""
    report = yield
    if report.failed:
        report.sections += [(f"story: {s.title}", "\n".join(s.as_text())) for s in list(_told.values())]
    return report
