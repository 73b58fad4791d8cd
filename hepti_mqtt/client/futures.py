"""The futures of answers."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from hepti_mqtt.client.answer import Answer
from hepti_mqtt.errors import HeptiError


class Stream(Future[Answer]):
    """The future of an answer whose parts are shown as they come; None in `parts` is the end."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()


def settle(token: object, outcome: Answer | HeptiError) -> None:
    """Give a future its answer, or the error that a request ended with; one that was cancelled keeps that."""
    assert isinstance(token, Future)
    if not token.set_running_or_notify_cancel():
        return
    if isinstance(outcome, HeptiError):
        token.set_exception(outcome)
    else:
        token.set_result(outcome)
