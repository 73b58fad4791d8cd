"""Events with the outcomes of the last requests, published once a second for viewers of the site."""

from __future__ import annotations

import json
import threading
from collections import deque
from typing import Final

from hepti_mqtt.protocol.topics import ANSWERS
from hepti_mqtt.service.handler import Reply

MAX_EVENT_ANSWERS: Final = 64  # per event: a page cannot show more in a second


class RecentAnswers:
    """Outcomes of answers that no event contains yet; callable on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: deque[dict[str, object]] = deque(maxlen=MAX_EVENT_ANSWERS)

    def record(self, reply: Reply, latency_ms: float, now_s: float) -> None:
        """Add an answer; latency_ms: from request to answer in the planner, now_s: unix seconds.

        An event contains only the code of an error, because the message may quote the request.
        """
        answer: dict[str, object] = {"time": now_s, "model": reply.key.model, "outcome": reply.outcome}
        answer |= {"latency_ms": latency_ms, "predicted_ms": reply.predicted_ms, "plan": reply.plan or None}
        with self._lock:
            self._answers.append(answer)

    def take(self) -> bytes | None:
        """Return an event with the answers since the last event, None without answers."""
        with self._lock:
            if not self._answers:
                return None
            answers = list(self._answers)
            self._answers.clear()
        return json.dumps({"kind": ANSWERS, "answers": answers, "time": answers[-1]["time"]}).encode()
