"""The history of a group's plans: searches, the rule's last judgement, and former plans."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from typing import Final

from hepti_mqtt.core.plan import Plan
from hepti_mqtt.planner import Decision, EarlierPlan, Verdict
from hepti_mqtt.planner.estimates import Means, StrategyKey
from hepti_mqtt.planner.surface import Priced
from hepti_mqtt.runtime.coordinator.plans import PlanRecord, Search, is_same_division
from hepti_mqtt.runtime.coordinator.search_kinds import SearchKind

MAX_RELEASED: Final = 3  # remembered released plans, whose weights devices may still hold


@dataclass(slots=True)
class SearchHistory:
    """The last searches of a group: their inputs and candidates."""

    decision: Decision | None = None  #: decision of the last search
    candidates: tuple[Priced, ...] = ()  #: plans of the last searches with their prices
    began_s: float = -inf  #: start of the last search
    began_site: frozenset[object] = frozenset()  #: devices and plans of the site at that start
    began_inputs: Means = field(default_factory=dict)  #: estimates at that start
    inputs: Means = field(default_factory=dict)  #: estimates that `candidates` were priced by

    def learn(self, decision: Decision, search: Search) -> Decision:
        """Record the candidates of a search; return the decision with all candidates."""

        def is_among(plan: Plan, plans: Iterable[Plan]) -> bool:
            return any(is_same_division(plan, other) for other in plans)

        others = [c for c in decision.ranking[1:] if c.price.feasible and not is_among(c.plan, search.refused)]
        fresh = [Priced(c, decision.cluster) for c in (decision.chosen, *others)]
        earlier: list[Priced] = []
        if search.rules.keeps_known:
            replaced = [*(k.candidate.plan for k in fresh), *search.refused]
            earlier = [k for k in self.candidates if not is_among(k.candidate.plan, replaced)]
            decision = replace(decision, ranking=(*decision.ranking, *(k.candidate for k in earlier)))
        if search.kind is not SearchKind.NAMED:
            self.inputs = self.began_inputs
        self.candidates, self.decision = (*fresh, *earlier), decision
        return decision

    def plans_to_load(self, record: PlanRecord, most: int) -> tuple[Plan, ...]:
        """Return the first candidates, other than a plan, whose devices lacked weights when they were priced."""
        lacking = (k.candidate.plan for k in self.candidates if any(k.candidate.load_bytes.values()))
        return tuple(islice((plan for plan in lacking if not is_same_division(record.plan, plan)), most))


@dataclass(slots=True)
class Judgement:
    """The rule's last judgement of a group's plans."""

    verdict: Verdict = field(default_factory=lambda: Verdict(None))
    judged_s: float = -inf  #: when a judgement was last due
    learned_runs: int = 0  #: number of runs in its estimates
    may_gain: float = inf  #: share of the active plan's time that a search may save
    tried: dict[StrategyKey, float] = field(default_factory=dict)  #: times of trials, by method


@dataclass(slots=True)
class FormerPlans:
    """Former plans that may serve again."""

    released: tuple[Plan, ...] = ()  #: last first; devices keep their weights while they have room
    #: While no plan serves: the plan that served last, also under an earlier planner.
    recalled: EarlierPlan | None = None
    recall_by_s: float = -inf  #: until then searches wait for that plan and its devices

    def note_released(self, plan: Plan) -> None:
        """Record a released plan."""
        self.released = (plan, *(p for p in self.released if not is_same_division(p, plan)))[:MAX_RELEASED]

    def excuse(self, device: str) -> None:
        """Let the recalled plan serve again after another start of a device that stopped on purpose."""
        if self.recalled is not None:
            boots = {name: boot for name, boot in self.recalled.boots.items() if name != device}
            self.recalled = self.recalled._replace(boots=boots)

    def forget(self) -> None:
        """Drop the recalled plan, and the wait for it."""
        self.recalled, self.recall_by_s = None, -inf
