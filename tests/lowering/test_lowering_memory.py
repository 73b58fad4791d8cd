"""What a device keeps of plans that are gone."""

from __future__ import annotations

import gc
import random
import tracemalloc

from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.ids import Epoch
from hepti_mqtt.models.shapes import PackedTokens
from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import make_plan, program

SPEC = spec_of_kind("tiny-bert")
WAYS = (("row", {"variant": "kv"}), ("row", {"variant": "heads"}), ("megatron", {"reduce": "direct"}))
PLANS = 60


def lower(rng: random.Random) -> None:
    """Make the Programs of one device under plans whose shares were never there before."""
    for number in range(PLANS):
        names = ("a", "b", "c")[: rng.choice((2, 3))]
        name, options = rng.choice(WAYS)
        weights = tuple(rng.uniform(0.5, 2) for _ in names)
        plan = make_plan(SPEC, Plan("m", Epoch(1, number), name, names, names[0]), name, options, weights)
        for length in (5, 17, 40):
            program(SPEC, plan, PackedTokens((length,)), "a")


def test_a_device_keeps_as_much_of_many_plans_as_of_few() -> None:
    rng = random.Random(1)
    tracemalloc.start()
    try:
        held = []
        for _ in range(3):
            lower(rng)
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0] / 2**20)
    finally:
        tracemalloc.stop()
    assert held[2] - held[0] < 0.7, held
