"""What became of the gateway's requests: the last answers, and the errors of the last hour."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from hepti_mqtt.client import Answer
from hepti_mqtt.errors import HeptiError

ANSWERS: Final = 240
ERRORS: Final = 100
HOUR_S: Final = 3600.0


class Journal:
    """Bounded; times are unix seconds. waiting: requests sent and not answered."""

    def __init__(self) -> None:
        self.waiting = 0
        self._answers: deque[dict[str, Any]] = deque(maxlen=ANSWERS)
        self._errors: deque[dict[str, Any]] = deque(maxlen=ERRORS)

    def add_answer(self, answer: Answer, now_s: float) -> None:
        """Remember how long an answer took, and what was predicted."""
        told = answer.raw
        entry = {"time": now_s, "model": told.get("model"), "latency_ms": answer.latency_ms}
        entry |= {"predicted_ms": told.get("predicted_ms"), "plan": (told.get("plan") or {}).get("id")}
        self._answers.append(entry)

    def add_error(self, model: str, error: HeptiError, now_s: float) -> None:
        """Remember an error."""
        self._errors.append({"time": now_s, "model": model, "code": error.code, "message": str(error)[:500]})

    def to_dict(self, now_s: float) -> dict[str, Any]:
        """Return what is remembered, oldest first, without errors that are older than an hour."""
        recent = [error for error in self._errors if now_s - error["time"] < HOUR_S]
        return {"waiting": self.waiting, "answers": list(self._answers), "errors": recent}
