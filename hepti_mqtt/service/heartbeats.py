"""Heartbeats have their own connection and a limit before parsing, so they delay no answer."""

from __future__ import annotations

import threading
import time
from typing import Any, Final

from hepti_mqtt.protocol.messages import MAX_SELF_BYTES
from hepti_mqtt.transport.base import OnState
from hepti_mqtt.transport.broker_connection import DataConnection
from hepti_mqtt.transport.url import BrokerUrl

TOPICS: Final = 1024  # with a waiting heartbeat; more than the devices that a site remembers
TAKEN: Final = 32  # heartbeats that the session handles per tick


class HeartbeatInbox:
    """Keep the latest heartbeat of each device until the session takes it.

    A flood of one device replaces only its own heartbeats; with a flood of invented devices, each device keeps its
    turn.
    """

    def __init__(self, url: BrokerUrl, name: str, topics: str, on_state: OnState) -> None:
        self._transport = DataConnection(url, name, on_message=self.put, on_state=on_state, name="planner-heartbeats")
        self._transport.subscribe([(topics, 0)])
        self.connect, self.close = self._transport.connect, self._transport.close
        self._lock = threading.Lock()  # guards the following fields
        self._latest: dict[str, bytes] = {}  # by topic, longest wait first
        self.heard_s = 0.0

    def put(self, topic: str, payload: Any) -> None:
        """Keep a heartbeat; called on the network thread."""
        self.heard_s = time.monotonic()
        with self._lock:
            if len(payload) <= MAX_SELF_BYTES and (topic in self._latest or len(self._latest) < TOPICS):
                self._latest[topic] = bytes(payload)

    def take(self) -> list[tuple[str, bytes]]:
        """Remove and return the (topic, payload) of at most TAKEN heartbeats."""
        with self._lock:
            topics = list(self._latest)[:TAKEN]
            return [(topic, self._latest.pop(topic)) for topic in topics]
