"""Statistics of the gateway's requests for the dashboard: the site's last answers, and the errors of the last hour."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from hepti_mqtt.core.errors import HeptiError

ERRORS: Final = 100
HOUR_S: Final = 3600.0
RATE_S: Final = 5.0
TOKENS: Final = 1000
SAME_S: Final = 5.0  # errors this close are one error, reported by gateway and planner


class GatewayStatistics:
    """Recent errors, tokens and waiting requests."""

    def __init__(self) -> None:
        #: Unanswered requests, by model.
        self.waiting: Counter[str] = Counter()
        #: Times of the last streamed tokens, in unix seconds.
        self._tokens: deque[float] = deque(maxlen=TOKENS)
        self._errors: deque[dict[str, Any]] = deque(maxlen=ERRORS)

    def add_error(self, model: str, error: HeptiError, now_s: float) -> None:
        """Record an error; now_s: unix seconds."""
        self._errors.append({"time": now_s, "model": model, "code": error.code, "message": str(error)[:500]})

    def add_token(self, now_s: float) -> None:
        """Count a streamed token; now_s: unix seconds."""
        self._tokens.append(now_s)

    def tokens_per_s(self, now_s: float) -> float | None:
        """Return the rate of streamed tokens of the last seconds, None without any."""
        recent = [at for at in self._tokens if now_s - at < RATE_S]
        return len(recent) / max(now_s - recent[0], 1.0) if recent else None

    def to_dict(self, outcomes: Sequence[Mapping[str, Any]], now_s: float) -> dict[str, Any]:
        """Return the answers of the site and the errors of the last hour, oldest first.

        outcomes: of all clients' requests, from the planner, without error messages; the gateway has those of its own.
        """
        own = [dict(error) for error in self._errors]
        for one in outcomes:
            if one["outcome"] != "ok" and not any(_is_same(error, one) for error in own):
                own.append({"time": one["time"], "model": one["model"], "code": one["outcome"], "message": ""})
        recent = sorted((error for error in own if now_s - error["time"] < HOUR_S), key=lambda error: error["time"])
        answers = [one for one in outcomes if one["outcome"] == "ok"]
        return {
            "waiting": {model: count for model, count in self.waiting.items() if count},
            "tokens_per_s": self.tokens_per_s(now_s),
            "answers": answers,
            "errors": recent[-ERRORS:],
        }


def _is_same(error: Mapping[str, Any], one: Mapping[str, Any]) -> bool:
    near = abs(error["time"] - one["time"]) < SAME_S
    return bool(error["message"]) and near and (error["model"], error["code"]) == (one["model"], one["outcome"])
