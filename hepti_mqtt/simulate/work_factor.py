"""How much work a plan does more than once.

A tensor that a table does not place is computed by everyone who needs it. That is legal, and the answer is right: only
this figure tells a forgotten line from one that was left out on purpose.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from hepti_mqtt.lowering import PLANNER_PLACE, Lowered, roles
from hepti_mqtt.lowering.graph import TEMPLATE
from hepti_mqtt.lowering.ops import Op, ReorderedAttention
from hepti_mqtt.lowering.regions import disjoint, volume
from hepti_mqtt.lowering.tiles import Tile
from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import lowered
from hepti_mqtt.program import ITEMSIZE, Compute
from hepti_mqtt.spec import RequestShape, Spec

WORTH_SAYING: Final = 1.005  # below it, a factor is printed as 1.00
MAPS: Final = frozenset((roles.MAP, roles.MAP_SUM))


class MapBytes(NamedTuple):
    """What dividing feature maps costs: payload in f32, a copy for every receiver, and FLOPs beyond one device's.

    halo: rows and columns beside own ones. gathered: to devices that then have the whole map.
    """

    halo: int
    gathered: int
    flops_again: float


@dataclass(frozen=True, slots=True)
class WorkFactor:
    """Computed divided by needed.

    total: FLOPs of all devices over those of one device alone. roles: elements computed over distinct ones, for each
    role of tensors where that is more than 1; copies and sums of partial results are not counted. maps: None for a
    model without feature maps. idle: devices that compute nothing, as where there are fewer rows than devices.
    reordered: whether attention is over its input, without keys and values.
    """

    total: float
    roles: Mapping[str, float]
    maps: MapBytes | None = None
    idle: tuple[str, ...] = ()
    reordered: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        told: dict[str, Any] = {
            "factor": round(self.total, 4),
            "roles": {role: round(f, 4) for role, f in self.roles.items()},
        }
        if self.maps is not None:
            told["maps"] = self.maps._asdict()
        if self.idle:
            told["idle"] = list(self.idle)
        if self.reordered:
            told["reordered"] = True
        return told

    def text(self) -> str:
        """Return the factor, and what is computed more than once, as a sentence."""
        again = ", ".join(f"{role} {factor:.2f}" for role, factor in self.roles.items())
        parts = [f"work {self.total:.2f} of one device's", f"computed more than once: {again}" if again else ""]
        if self.maps is not None:
            halo, gathered, flops = self.maps
            parts.append(
                f"halo {halo / 1e3:.1f} kB, whole maps {gathered / 1e3:.1f} kB, computed again {flops / 1e6:.2f} MFLOP"
            )
        if self.reordered:
            parts.append("products reordered: attention is over its input, and no keys or values are computed")
        if self.idle:
            parts.append(f"nothing to do for {', '.join(self.idle)}")
        return "; ".join(filter(None, parts))


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
    again = {role: f for role, f in factors.items() if f >= WORTH_SAYING}
    idle = tuple(d for d in made.names if not any(isinstance(op, Compute) for _, _, op in made.draft(d).ops))
    other = any(isinstance(op, ReorderedAttention) for op in made.graph.ops)
    return WorkFactor(total, again, _map_bytes(made, (total - 1) * one), idle, other)


def _map_bytes(made: Lowered, flops_again: float) -> MapBytes | None:
    """Return what devices send each other of feature maps; flops_again: what they compute more than once."""
    halo = gathered = 0
    for block in range(len(made.graph.blocks)):
        for op in made.graph.ops[slice(*made.graph.span(block))]:
            if op.role in MAPS:
                beside, whole = _exchanged(op, made.tiles[op.name])
                halo, gathered = halo + beside * _times(made, block), gathered + whole * _times(made, block)
    return MapBytes(halo, gathered, round(flops_again)) if MAPS & made.graph.roles else None


def _exchanged(op: Op, tiles: Sequence[Tile]) -> tuple[int, int]:
    """Return (bytes to devices that have a part of an op then, bytes to those that have all of it)."""
    own: dict[int, int] = defaultdict(int)
    got: dict[int, int] = defaultdict(int)
    for t in tiles:
        own[t.device] += volume(t.region[: op.rank])
        for message in t.messages:
            for d in message.to:
                got[d] += volume(message.region[: op.rank])
    size = ITEMSIZE["f32"]
    whole = sum(n for d, n in got.items() if own[d] + n >= volume(op.full[: op.rank])) * size
    return sum(got.values()) * size - whole, whole


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
