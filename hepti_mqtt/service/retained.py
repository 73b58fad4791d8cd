"""Retained messages of a site: list and clear topics, and sweep topics that no part of Hepti reads."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Iterable
from math import inf
from typing import Final

from hepti_mqtt.core.errors import HeptiError, WireError
from hepti_mqtt.protocol.topics import Kind, Topics
from hepti_mqtt.transport.base import Delivery
from hepti_mqtt.transport.broker_limits import Echo
from hepti_mqtt.transport.url import BrokerUrl

ECHO_S: Final = 10.0
SWEEP_S: Final = 300.0  # between two sweeps; after a sweep that clears topics, the next follows after a second
SWEPT_BYTES: Final = 64 << 20  # of retained payloads that one sweep receives
RETAINED: Final[frozenset[Kind]] = frozenset({"status", "caps", "use", "planner_status", "plan"})


def retained_topics(
    url: BrokerUrl, topics: Topics, filters: Iterable[str], *, cleared: Iterable[str] = (), most_bytes: float = inf
) -> list[str]:
    """Clear topics; return the topics retained before.

    most_bytes: limit of received payloads. Raises NetworkError if the broker does not answer.
    """
    end, mark = topics.probe("doctor"), uuid.uuid4().bytes
    retained, left, name = set[str](), most_bytes, f"hepti-{topics.site}-retained-{uuid.uuid4().hex[:12]}"
    with Echo(url, name, end, ECHO_S, qos=1, until_s=time.monotonic() + ECHO_S) as echo:
        echo.open()
        echo.subscribe(filters)
        for topic in cleared:
            echo.clear(topic)
        echo.send(mark, 1)
        while left > 0:
            event = echo.next()
            if isinstance(event, Delivery) and event.payload == mark:
                break
            if isinstance(event, Delivery) and event.retained and event.payload:
                retained.add(event.topic)
                left -= len(event.payload)
    return sorted(retained)


def unread_topics(topics: Topics, retained: Iterable[str]) -> list[str]:
    """Return the retained topics of a site that no part of Hepti reads as retained."""

    home = topics.everything().replace("#", "home/")  # states for Home Assistant

    def is_read(topic: str) -> bool:
        try:
            return topics.parse(topic).kind in RETAINED
        except WireError:
            return topic.startswith(home)

    return [topic for topic in retained if not is_read(topic)]


class RetainedSweep:
    """A thread that clears unread topics; otherwise a client with write access could fill the broker's memory."""

    def __init__(self, url: BrokerUrl, topics: Topics, log: logging.Logger) -> None:
        self._url, self._topics, self._log = url, topics, log
        self._cleared = set[str]()  # by the last sweep
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="planner-sweep", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Start no further sweep, without waiting for a running sweep."""
        self._ended.set()

    def sweep(self) -> int:
        """Clear once; return how many topics were cleared that the last sweep did not clear. Raises NetworkError."""
        filters = self._topics.swept()
        unread = unread_topics(self._topics, retained_topics(self._url, self._topics, filters, most_bytes=SWEPT_BYTES))
        fresh, self._cleared = set(unread) - self._cleared, set(unread)
        if fresh:
            retained_topics(self._url, self._topics, (), cleared=unread)
            self._log.warning(
                "Cleared %d retained messages that no part of Hepti reads, such as %s. Find out who publishes them.",
                len(unread),
                unread[0],
            )
        return len(fresh)

    def _run(self) -> None:
        pause_s = 0.0
        while not self._ended.wait(pause_s):
            try:
                pause_s = SWEEP_S if self.sweep() == 0 else 1.0
            except HeptiError as error:
                self._log.info("retained messages are not swept now: %s", error)
                pause_s = SWEEP_S
