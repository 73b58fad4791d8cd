"""The kinds of searches for a plan, and their rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Final

SETTLE_S: Final = 1.0  # from the join of a device to a search, so that other devices can join
PRICED_S: Final = 3.0  # from the recalled plan to a whole search, so that waiting requests run first


class SearchKind(StrEnum):
    """What a search looks for; a whole search follows a failed search of another kind."""

    WHOLE = "whole"  #: the best plan of every method and set of devices
    BRIEF = "brief"  #: a better plan with loaded weights: after a change, or for a late run
    HURRIED = "hurried"  #: a first plan for queued requests
    NAMED = "named"  #: the prices of named plans
    RECALLED = "recalled"  #: the plan that served before, at its old price


@dataclass(frozen=True, slots=True)
class SearchRules:
    """Limits of a kind of search, and the search that follows it."""

    budget_s: float = inf  #: processor seconds for plans beyond the first ones; infinity: no limit
    is_short: bool = False  #: it may run during a whole search, and its plan always serves waiting requests
    keeps_known: bool = False  #: the plans of earlier searches remain candidates
    whole_after_s: float = inf  #: seconds from a success to the following whole search; infinity: none follows


SEARCHES: Final[Mapping[SearchKind, SearchRules]] = {
    SearchKind.WHOLE: SearchRules(),
    SearchKind.BRIEF: SearchRules(budget_s=0.0, keeps_known=True, whole_after_s=SETTLE_S),
    # Enough for every plan of a few devices: a longer search costs seconds, a useless load a minute.
    SearchKind.HURRIED: SearchRules(budget_s=2.0, is_short=True, whole_after_s=SETTLE_S),
    SearchKind.NAMED: SearchRules(is_short=True, keeps_known=True),
    SearchKind.RECALLED: SearchRules(is_short=True, whole_after_s=PRICED_S),
}
