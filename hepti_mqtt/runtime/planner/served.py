"""Models that the planner serves, and plans that stand, as values for other threads."""

from __future__ import annotations

from dataclasses import dataclass, field

from hepti_mqtt.cluster import Cluster
from hepti_mqtt.plan import Plan
from hepti_mqtt.planner import Played
from hepti_mqtt.runtime.planner.flight import Pins
from hepti_mqtt.runtime.planner.packs import Batching
from hepti_mqtt.spec import Spec


@dataclass(frozen=True, slots=True)
class Served:
    """A model that the planner serves.

    manifest: hash of the manifest of its weights. tokens: the length that plans are optimised for at first. pins:
    what the planner's user fixed; a request may carry others, which hold for that request alone. batching: which
    requests run together.
    """

    name: str
    spec: Spec
    manifest: bytes
    tokens: int = 128
    pins: Pins = field(default_factory=Pins)
    batching: Batching = field(default_factory=Batching)


@dataclass(frozen=True, slots=True)
class Standing:
    """A plan that is active or being prepared, with the measurements it was chosen by.

    played: the search's own simulation of this very plan by these measurements, None if it simulated another one.
    """

    plan: Plan
    cluster: Cluster
    played: Played | None = None
