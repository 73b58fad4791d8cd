"""The bytes that a device loads for a plan, given the weights that it holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sites import plan

from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.cost.memory import weights_bytes
from hepti_mqtt.cost.moves import bytes_to_load
from hepti_mqtt.strategies.plan_programs import resident_weights

SPEC = spec_of_kind("bert-large", 2)
HEADS = ("row", {"variant": "heads"})
EQUAL = plan(SPEC, HEADS, (1.0, 1.0, 1.0, 1.0))


def loads(new: Plan, *held: Plan) -> list[int]:
    return [bytes_to_load(SPEC, new, device, held) for device in new.devices]


def test_heads_that_move_by_one_between_devices_that_hold_all_weights_load_nothing() -> None:
    moved = plan(SPEC, HEADS, (5.0, 3.0, 4.0, 4.0))
    assert moved.ranges != EQUAL.ranges
    assert loads(moved, EQUAL) == loads(EQUAL, moved) == [0, 0, 0, 0]


def test_devices_that_change_places_load_nothing_but_what_the_head_alone_has() -> None:
    swapped = replace(EQUAL, devices=("d1", "d0", "d2", "d3"))
    assert loads(swapped, EQUAL) == [0, 0, 0, 0]
    first = replace(swapped, root="d1")
    (embeddings, *others) = loads(first, EQUAL)
    assert others == [0, 0, 0]
    assert embeddings == weights_bytes(
        set(resident_weights(SPEC, first, "d1")) - {*resident_weights(SPEC, EQUAL, "d1")}
    )


def test_fewer_columns_of_what_is_there_load_nothing_and_more_are_loaded_whole() -> None:
    before, after = (plan(SPEC, ("column", {}), shares) for shares in ((1.0, 1.0), (5.0, 3.0)))
    assert bytes_to_load(SPEC, after, "d1", [before]) == 0
    assert bytes_to_load(SPEC, after, "d0", [before]) > weights_bytes(resident_weights(SPEC, before, "d1"))


@pytest.mark.parametrize("held", [(), (EQUAL,)])
def test_of_a_device_that_holds_nothing_everything_is_loaded(held: tuple[Plan, ...]) -> None:
    alone = replace(plan(SPEC, ("single", {}), (1.0,)), devices=("d9",), root="d9")
    assert loads(alone, *held) == [weights_bytes(resident_weights(SPEC, alone, "d9"))]


def test_a_plan_that_was_left_is_loaded_already() -> None:
    block = plan(SPEC, ("block", {}), (1.0, 1.0, 1.0, 1.0))
    assert loads(block, plan(SPEC, ("single", {}), (1.0,)), block) == [0, 0, 0, 0]
