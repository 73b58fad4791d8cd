"""Heartbeats come on a connection of their own and are bounded before they are parsed, so they delay no answer."""

from __future__ import annotations

import threading
import time
from typing import Any, Final

from hepti_mqtt.protocol.messages import MAX_SELF_BYTES
from hepti_mqtt.transport import (
    BrokerUrl,
    DataConnection,
    OnState,
)

TOPICS: Final = 1024  # with a heartbeat that waits; more devices than a site remembers
TAKEN: Final = 32  # heartbeats that the session handles at one tick


class HeartbeatInbox:
    """Keeps the latest heartbeat of each device until the session takes it.

    A flood of one device replaces its own heartbeats; a flood of many invented devices leaves the others their turn.
    """

    def __init__(self, url: BrokerUrl, name: str, topics: str, on_state: OnState) -> None:
        self._transport = DataConnection(url, name, on_message=self.put, on_state=on_state, name="planner-heartbeats")
        self._transport.subscribe([(topics, 0)])
        self.connect, self.close = self._transport.connect, self._transport.close
        self._lock = threading.Lock()  # guards what follows
        self._latest: dict[str, bytes] = {}  # by topic; the one that has waited longest comes first
        self.heard_s = 0.0
        self.dropped = 0

    def put(self, topic: str, payload: Any) -> None:
        """Keep a heartbeat; called on the network thread."""
        self.heard_s = time.monotonic()
        with self._lock:
            if len(payload) > MAX_SELF_BYTES or (topic not in self._latest and len(self._latest) >= TOPICS):
                self.dropped += 1
            else:
                self._latest[topic] = bytes(payload)

    def take(self) -> list[tuple[str, bytes]]:
        """Remove and return the (topic, payload) of at most TAKEN heartbeats."""
        with self._lock:
            topics = list(self._latest)[:TAKEN]
            return [(topic, self._latest.pop(topic)) for topic in topics]
