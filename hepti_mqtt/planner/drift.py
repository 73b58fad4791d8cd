"""When to plan again: a device's speed or link has differed from what the plan was made for, long enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log
from typing import Final

GROSS: Final = 2.0  # beyond so many times, less patience: what is off by that much is no noise


@dataclass(slots=True)
class DriftRule:
    """Fires when any observed value has been off by more than `factor` for `hold_s`, and not within `rest_s` of a plan.

    Nor within `rest_s` of a disturbance: devices that load weights compute slowly and have full links. Where a value is
    off by more than `GROSS`, both times are shorter, the more the further it is off; a rest after a plan is at least
    `hold_s`, and one after a disturbance stays whole. A processor that fell to a quarter while the rule rested after a
    plan waited 20 s for the next one.

    Values are positive (slowdown, bandwidth, round trip), by any key; `planned` are those that the plan was made with.
    """

    factor: float = 1.15  # a search is whole only where some prices tell of more (`again`)
    hold_s: float = 5.0
    rest_s: float = 15.0
    planned: dict[str, float] = field(default_factory=dict)
    _since: dict[str, float] = field(default_factory=dict)
    _made_at: float = float("-inf")
    _disturbed_at: float = float("-inf")

    def plan_made(self, values: Mapping[str, float], now: float) -> None:
        """Take the values that a new plan was made with."""
        self.planned = dict(values)
        self._since.clear()
        self._made_at = now

    def disturbed(self, now: float) -> None:
        """Take it that what is observed now says nothing of how things will be."""
        self._since.clear()
        self._disturbed_at = now

    def rests(self, since: float, now: float) -> bool:
        """Return whether what began at `since`, or a disturbance, is too recent to be judged by its times."""
        return now - max(since, self._disturbed_at) < self.rest_s

    def observe(self, values: Mapping[str, float], now: float, grown: float | None = None) -> str | None:
        """Return what has drifted, in words, or None; grown: the factor for values that are larger, if another."""
        for key, value in values.items():
            base = self.planned.get(key)
            if base is None or base <= 0 or value <= 0:
                continue
            ratio = value / base
            off = max(ratio, 1 / ratio)
            if off <= (self.factor if grown is None or ratio < 1 else grown):
                self._since.pop(key, None)
                continue
            since = self._since.setdefault(key, now)
            patience = min(log(GROSS) / log(off), 1.0)
            hold_s, rest_s = patience * self.hold_s, max(patience * self.rest_s, min(self.hold_s, self.rest_s))
            if now - since >= hold_s and now - self._made_at >= rest_s and now - self._disturbed_at >= self.rest_s:
                return f"{key} is {ratio:.2f} times what the plan was made for, since {now - since:.0f} s"
        return None
