"""What became of the site's requests, told to all who watch it: an event with the last answers, once a second."""

from __future__ import annotations

import json
import threading
from collections import deque
from typing import Final

from hepti_mqtt.protocol.topics import ANSWERS
from hepti_mqtt.service.handler import Reply

TOLD: Final = 64  # answers of one event: a page has no use for more in a second


class Served:
    """Answers that nobody was told of yet; any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: deque[dict[str, object]] = deque(maxlen=TOLD)

    def record(self, reply: Reply, latency_ms: float, now_s: float) -> None:
        """Remember an answer; latency_ms: from request to answer in the planner, now_s: unix seconds.

        An error's message may quote its request, so its code alone is told.
        """
        told: dict[str, object] = {"time": now_s, "model": reply.key.model, "outcome": reply.outcome}
        told |= {"latency_ms": latency_ms, "predicted_ms": reply.predicted_ms, "plan": reply.plan or None}
        with self._lock:
            self._answers.append(told)

    def take(self) -> bytes | None:
        """Return the event with what came since the last one, None without any."""
        with self._lock:
            if not self._answers:
                return None
            told = list(self._answers)
            self._answers.clear()
        return json.dumps({"kind": ANSWERS, "answers": told, "time": told[-1]["time"]}).encode()
