"""Latency and throughput of several requests, from when each was asked, dispatched and answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Any, Final, NamedTuple

ROUNDS: Final = 6  # as many requests in flight make a load that is steady: two rounds at its ends do not count


class RunTimes(NamedTuple):
    """When a request was asked, dispatched and answered, in seconds; how many sequences it had."""

    asked_s: float
    dispatched_s: float
    answered_s: float
    sequences: int = 1

    @property
    def latency_s(self) -> float:
        """Return the seconds from question to answer, what it waited for room among them."""
        return self.answered_s - self.asked_s


@dataclass(frozen=True, slots=True)
class Load:
    """What a plan does with requests that follow one another: of so many, `in_flight` at once.

    requests_per_s, sequences_per_s: in the steady state. latency_s, longest_s: the median and the longest of a request.
    """

    requests: int
    in_flight: int
    requests_per_s: float
    sequences_per_s: float
    latency_s: float
    longest_s: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "requests": self.requests,
            "in_flight": self.in_flight,
            "requests_per_s": self.requests_per_s,
            "sequences_per_s": self.sequences_per_s,
            "latency_ms": self.latency_s * 1e3,
            "longest_ms": self.longest_s * 1e3,
        }

    def text(self) -> str:
        """Return it as a sentence."""
        each = "" if self.sequences_per_s == self.requests_per_s else f" ({self.sequences_per_s:.3g} sequences/s)"
        return (
            f"throughput {self.requests_per_s:.3g} requests/s{each} with {self.in_flight} in flight; "
            f"latency then {self.latency_s * 1e3:.1f} ms, the longest of {self.requests} {self.longest_s * 1e3:.1f} ms"
        )


def load_of(runs: Sequence[RunTimes], in_flight: int) -> Load:
    """Return the load that these requests were; raises ValueError without any.

    The steady state lies between two answers: after the first the devices are full, at the second the last request was
    dispatched. Between them are whole rounds of `in_flight` answers, because answers may come in bunches of that. Where
    requests are too few for one round it is all of them, from the first question on: less than what can be kept up.
    """
    if not runs:
        raise ValueError("no request, no load")
    answered = sorted(runs, key=lambda run: run.answered_s)
    stop = len(answered) - in_flight
    start = in_flight + stop % in_flight
    if start < stop:
        counted = answered[start:stop]
        since = answered[start - 1].answered_s
    else:
        counted, since = answered, min(run.asked_s for run in runs)
    seconds = counted[-1].answered_s - since
    per_s = 1 / seconds if seconds else inf
    latencies = [run.latency_s for run in runs]
    return Load(
        len(runs),
        in_flight,
        len(counted) * per_s,
        sum(run.sequences for run in counted) * per_s,
        median(latencies),
        max(latencies),
    )
