"""What a search finds: a plan, and the candidates that it was chosen from."""

from __future__ import annotations

from dataclasses import dataclass

from hepti_mqtt.cluster import Cluster
from hepti_mqtt.plan import Plan
from hepti_mqtt.planner.price import Played, Price


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan with its price and the share weights that it came from."""

    plan: Plan
    price: Price
    weights: tuple[float, ...]

    @property
    def name(self) -> str:
        """Return strategy and variant, as people write it."""
        return self.plan.method


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen plan, and the best candidate of every (strategy, variant) for comparison, best first.

    `reason` says in one sentence why the plan was chosen, `cluster` is what devices and links were when it was.
    `digest`: `plan_programs.programs_digest` of the plan. `behind`: strategies and variants that the question did not
    compare, each by the first price that showed it to be too slow, without its memory.
    """

    chosen: Candidate
    ranking: tuple[Candidate, ...]
    reason: str
    cluster: Cluster
    digest: bytes
    behind: tuple[Candidate, ...] = ()

    @property
    def single(self) -> Candidate | None:
        """Return the best device alone, whether chosen or not; None if no device holds the model."""
        return next((c for c in self.ranking if len(c.plan.devices) == 1 and c.price.feasible), None)

    def played(self, run: Plan) -> Played | None:
        """Return the search's own simulation of the chosen plan, or of one of its replicas; None if it has none."""
        devices = set(run.devices)
        return next((p for p in self.chosen.price.played if p.simulation.devices.keys() == devices), None)
