"""The past of a group's plans: its searches, the rule's last judgement, and the plans that served before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from typing import Final

from hepti_mqtt.plan import Plan
from hepti_mqtt.planner import Decision, Recalled, Verdict
from hepti_mqtt.planner.estimates import Means, StrategyKey
from hepti_mqtt.planner.surface import Priced
from hepti_mqtt.runtime.coordinator.plans import PlanRecord, Search, is_same_division
from hepti_mqtt.runtime.coordinator.search_kinds import SearchKind

MAX_RELEASED: Final = 3  # released plans whose weights are looked for


@dataclass(slots=True)
class SearchHistory:
    """The last searches of a group: their inputs and the plans that they named."""

    decision: Decision | None = None  #: of the last search
    candidates: tuple[Priced, ...] = ()  #: plans of the last searches, each as it was priced
    began_s: float = -inf  #: start of the last search
    began_site: frozenset[object] = frozenset()  #: devices and plans of the site at that start
    began_inputs: Means = field(default_factory=dict)  #: estimates at that start
    inputs: Means = field(default_factory=dict)  #: estimates behind `candidates`

    def begin(self, inputs: Means, site: frozenset[object], now: float) -> None:
        """Note the start of a search."""
        self.began_inputs, self.began_site, self.began_s = inputs, site, now

    def learn(self, decision: Decision, search: Search) -> Decision:
        """Take the plans of a search; return the decision with all candidates."""

        def is_among(plan: Plan, plans: Iterable[Plan]) -> bool:
            return any(is_same_division(plan, other) for other in plans)

        others = [c for c in decision.ranking[1:] if c.price.feasible and not is_among(c.plan, search.refused)]
        fresh = [Priced(c, decision.cluster) for c in (decision.chosen, *others)]
        earlier: list[Priced] = []
        if search.rules.keeps_known:
            out = [*(k.candidate.plan for k in fresh), *search.refused]
            earlier = [k for k in self.candidates if not is_among(k.candidate.plan, out)]
            decision = replace(decision, ranking=(*decision.ranking, *(k.candidate for k in earlier)))
        if search.kind is not SearchKind.NAMED:  # changes since the search began are no part of it
            self.inputs = self.began_inputs
        self.candidates, self.decision = (*fresh, *earlier), decision
        return decision

    def plans_to_load(self, record: PlanRecord, most: int) -> tuple[Plan, ...]:
        """Return the first candidates other than a plan whose devices lacked weights when they were priced."""
        lacking = (k.candidate.plan for k in self.candidates if any(k.candidate.load_bytes.values()))
        return tuple(islice((plan for plan in lacking if not is_same_division(record.plan, plan)), most))


@dataclass(slots=True)
class Judgement:
    """The rule's last judgement of a group's plans."""

    verdict: Verdict = field(default_factory=lambda: Verdict(None))
    judged_s: float = -inf  #: when the rule, or the reason to ask it, was looked at last
    lessons: int = 0  #: runs in the estimates that it judged by
    may_gain: float = inf  #: part of the active plan's time that a search may win
    tried: dict[StrategyKey, float] = field(default_factory=dict)  #: when methods were tried

    def record(self, verdict: Verdict, may_gain: float, lessons: int, now: float) -> None:
        """Take a verdict."""
        self.verdict, self.may_gain, self.lessons, self.judged_s = verdict, may_gain, lessons, now

    def note_looked(self, now: float) -> None:
        """Note that there was no reason to ask the rule."""
        self.judged_s = now


@dataclass(slots=True)
class FormerPlans:
    """Plans that do not serve any more but may again."""

    released: tuple[Plan, ...] = ()  #: last first; devices keep their weights while they have room
    recalled: Recalled | None = None  #: the plan that served last, also of an earlier planner, while none serves
    recall_by_s: float = -inf  #: until then searches wait for that plan and its devices

    def note_released(self, plan: Plan) -> None:
        """Remember a released plan."""
        self.released = (plan, *(p for p in self.released if not is_same_division(p, plan)))[:MAX_RELEASED]

    def note_lost(self, recalled: Recalled) -> None:
        """Remember the active plan that has just lost a device."""
        self.recalled = recalled

    def excuse(self, device: str) -> None:
        """Let the plan that served last serve again after another start of a device: it was asked to stop."""
        if self.recalled is not None:
            boots = {name: boot for name, boot in self.recalled.boots.items() if name != device}
            self.recalled = self.recalled._replace(boots=boots)

    def wait_for_earlier(self, by_s: float) -> None:
        """Let searches wait for the plan of an earlier planner."""
        self.recall_by_s = by_s

    def note_earlier(self, recalled: Recalled | None) -> None:
        """Remember the plan of an earlier planner, or stop the wait for it if there is none."""
        self.recalled = recalled or self.recalled
        if self.recalled is None:
            self.recall_by_s = -inf

    def forget(self) -> None:
        """Drop the plan that served before, and the wait for it."""
        self.recalled, self.recall_by_s = None, -inf
