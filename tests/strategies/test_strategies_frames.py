"""How many frames an exchange has: what a device has for a peer at one moment goes in one."""

from __future__ import annotations

from collections import Counter

import pytest
from sites import FAMILIES, METHODS, plan, request

from hepti_mqtt.errors import PlanError
from hepti_mqtt.plan_programs import programs
from hepti_mqtt.program import Compute, Program, Recv, Send, addresses


def at_once(program: Program) -> Counter[str]:
    """Return how many frames more than one go to each peer with nothing computed or received between them."""
    found, run, came = Counter[str](), set[str](), set[int]()
    for op in program.ops:
        if isinstance(op, Compute):
            run.clear()
        elif isinstance(op, Recv):
            came.add(program.base(op.slot))
        elif program.base(op.slot) not in came:  # what only passes through leaves when it comes
            found.update(run.intersection(addresses(op)))
            run.update(addresses(op))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_and_values_queries_and_parts_for_one_peer_are_one_frame(family: str) -> None:
    spec, sending = FAMILIES[family], 0
    shape, _ = request(spec, (13,))
    for method in METHODS:
        try:
            parts = programs(spec, plan(spec, method, (1.0, 1.0, 1.0)), shape)
        except PlanError:
            continue  # not on three devices, or not this family
        for device, program in parts.items():
            assert not at_once(program), f"{method} on {device}"
            sending += sum(isinstance(op, Send) for op in program.ops)
    assert sending
