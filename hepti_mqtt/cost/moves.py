"""The weights that devices must load to move from one plan to another."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.core.spec import Spec
from hepti_mqtt.cost.memory import matrices, weights_bytes
from hepti_mqtt.strategies.plan_programs import KEPT_RESIDENTS, PlanKey, resident_weights


def bytes_to_load(spec: Spec, plan: Plan, device: str, held: Iterable[Plan]) -> int:
    """Return the bytes that a device must load for a plan if it holds weights of others, the last loaded plan first."""
    return weights_bytes(resident_weights(spec, plan, device), held_matrices(spec, device, held))


def held_matrices(spec: Spec, device: str, held: Iterable[Plan]) -> frozenset[WeightRef]:
    """Return the matrices that a device holds for some plans, the last loaded plan first."""
    plans = tuple(PlanKey(other.for_device(device)) for other in held if device in other.devices)
    return _held_matrices(spec, plans, device)


@lru_cache(maxsize=KEPT_RESIDENTS)
def _held_matrices(spec: Spec, plans: tuple[PlanKey, ...], device: str) -> frozenset[WeightRef]:
    held = frozenset[WeightRef]()
    for key in reversed(plans):
        held |= frozenset(matrices(resident_weights(spec, key.plan, device), held).values())
    return held
