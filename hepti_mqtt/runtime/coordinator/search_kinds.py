"""The kinds of searches for a plan, and what sets them apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Final

SETTLE_S: Final = 1.0  # after a join, wait for others that come up with it
PRICED_S: Final = 3.0  # requests that have waited for the recalled plan come before the whole search


class SearchKind(StrEnum):
    """What a search looks for; a failed search of any other kind is followed by a whole one."""

    WHOLE = "whole"  #: the best plan of every method and set of devices
    BRIEF = "brief"  #: a better plan among those with loaded weights: after a change, or for a late run
    HURRIED = "hurried"  #: a first plan for requests that wait
    NAMED = "named"  #: the prices of named plans
    RECALLED = "recalled"  #: the plan that served before, at its old price


@dataclass(frozen=True, slots=True)
class SearchRules:
    """How a kind of search runs and what follows it."""

    #: Processor seconds for plans beyond the first ones; infinity: no limit.
    budget_s: float = inf
    #: It takes so little time that it runs during a whole search, and its plan serves waiting requests in any case.
    is_short: bool = False
    #: The plans of earlier searches remain candidates.
    keeps_known: bool = False
    #: Seconds until the whole search that follows a success; infinity: none follows.
    whole_after_s: float = inf


SEARCHES: Final[Mapping[SearchKind, SearchRules]] = {
    SearchKind.WHOLE: SearchRules(),
    SearchKind.BRIEF: SearchRules(budget_s=0.0, keeps_known=True, whole_after_s=SETTLE_S),
    # Enough for plans on all of a few devices: a search takes seconds, a load that was begun in vain a minute.
    SearchKind.HURRIED: SearchRules(budget_s=2.0, is_short=True, whole_after_s=SETTLE_S),
    SearchKind.NAMED: SearchRules(is_short=True, keeps_known=True),
    SearchKind.RECALLED: SearchRules(is_short=True, whole_after_s=PRICED_S),
}
