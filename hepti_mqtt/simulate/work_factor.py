"""How much work a plan does more than once.

A tensor that a table does not place is computed by everyone who needs it. That is legal, and the answer is right: only
this figure tells a forgotten line from one that was left out on purpose.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hepti_mqtt.lowering import PLANNER_PLACE, Lowered
from hepti_mqtt.lowering.graph import TEMPLATE
from hepti_mqtt.lowering.ops import Op
from hepti_mqtt.lowering.regions import disjoint, volume
from hepti_mqtt.lowering.tiles import Tile
from hepti_mqtt.plan import Plan
from hepti_mqtt.program import Compute
from hepti_mqtt.spec import RequestShape, Spec
from hepti_mqtt.strategies import lowered

WORTH_SAYING: Final = 1.005  # below it, a factor is printed as 1.00


@dataclass(frozen=True, slots=True)
class WorkFactor:
    """Computed divided by needed.

    total: FLOPs of all devices over those of one device alone. roles: elements computed over distinct ones, for each
    role of tensors where that is more than 1; copies and sums of partial results are not counted.
    """

    total: float
    roles: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {"factor": round(self.total, 4), "roles": {role: round(f, 4) for role, f in self.roles.items()}}

    def text(self) -> str:
        """Return the factor, and what is computed more than once, as a sentence."""
        again = ", ".join(f"{role} {factor:.2f}" for role, factor in self.roles.items())
        return f"work {self.total:.2f} of one device's" + (f"; computed more than once: {again}" if again else "")


def plan_work(spec: Spec, plan: Plan, shape: RequestShape) -> WorkFactor:
    """Return the work factor of a request under a plan; raises as `lowered` does."""
    alone = Plan(plan.model, plan.epoch, "single", (plan.head,), plan.head)
    return work_factor(lowered(spec, plan, shape), lowered(spec, alone, shape))


def work_factor(made: Lowered, alone: Lowered) -> WorkFactor:
    """Return the work factor of a lowered request; alone: the same request on one device."""
    computed: dict[str, int] = defaultdict(int)
    needed: dict[str, int] = defaultdict(int)
    for block in range(len(made.graph.blocks)):
        for op in made.graph.ops[slice(*made.graph.span(block))]:
            done, distinct = volumes(op, made.tiles[op.name])
            computed[op.role] += done * _times(made, block)
            needed[op.role] += distinct * _times(made, block)
    factors = {role: done / needed[role] for role, done in computed.items() if done}
    one = flops(alone)
    total = flops(made) / one if one else 1.0
    return WorkFactor(total, {role: f for role, f in factors.items() if f >= WORTH_SAYING})


def volumes(op: Op, tiles: Sequence[Tile]) -> tuple[int, int]:
    """Return (elements that devices compute of an op, those of them that differ), over its whole iteration space."""
    if op.is_view:
        return 0, 0
    regions = [t.region for t in tiles if not t.relay and t.device != PLANNER_PLACE]
    return sum(map(volume, regions)), sum(map(volume, disjoint(regions)))


def flops(made: Lowered) -> float:
    """Return the FLOPs of all devices, equal blocks counted from one of them."""
    from hepti_mqtt.kernels import KERNELS  # here: see clock.py

    total = 0.0
    for device in made.names:
        draft = made.draft(device)
        for _, block, op in draft.ops:
            if isinstance(op, Compute):
                total += KERNELS[op.kernel].work(op, draft.slots).flops * _times(made, block)
    return total


def _times(made: Lowered, block: int) -> int:
    """Return how many blocks one of `made.graph` stands for."""
    return made.run.repeats if made.run is not None and block == made.run.first + TEMPLATE else 1
