"""Exchanges over mesh: any strategy, every receiver once by the way that its pair has, the same bits and digest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from programs_run import run_programs
from sites import FAMILIES, METHODS, plan, request, tensors

from hepti_mqtt.ids import PLANNER
from hepti_mqtt.plan_programs import programs, programs_digest, short_programs
from hepti_mqtt.program import Program, Send, addresses, check
from hepti_mqtt.strategies import STRATEGIES

SPLIT = [m for m in METHODS if STRATEGIES[m[0]].most_devices is None]
IDS = ["-".join([m[0], *m[1].values()]) for m in SPLIT]
SPEC = FAMILIES["bert-embedding"]
RELAYED = (("d0", "d1"), ("d2", "d0"))


def by_receiver(program: Program) -> list[tuple[int, int, str, str]]:
    """Return (node, part, receiver, route) of everything that a Program sends."""
    return [(op.node, op.part, to, op.route) for op in program.ops if isinstance(op, Send) for to in op.to]


@pytest.mark.parametrize("method", SPLIT, ids=IDS)
def test_every_receiver_has_each_exchange_once_by_the_way_of_its_pair(method):
    fixed = plan(SPEC, method, (1.0, 2.0, 1.0))
    shape, _ = request(SPEC, (13, 4))
    plain = programs(SPEC, fixed, shape)
    mesh = replace(fixed, route="mesh", relayed=RELAYED)
    for name, routed in programs(SPEC, mesh, shape).items():
        check(routed)
        for op in routed.ops:
            assert not isinstance(op, Send) or op.route == "broker" or addresses(op) == op.to
        broker = {PLANNER} | {target for source, target in RELAYED if source == name}
        expected = [(n, p, to, "broker" if to in broker else "mesh") for n, p, to, _ in by_receiver(plain[name])]
        assert sorted(by_receiver(routed)) == sorted(expected)
        assert routed.sources() == plain[name].sources()
    assert programs_digest(SPEC, mesh) == programs_digest(SPEC, fixed)


@pytest.mark.parametrize("method", [("row", {"variant": "kv"}), ("block", {})], ids=["row", "block"])
def test_the_bits_of_an_answer_do_not_depend_on_the_way(method):
    fixed = replace(plan(SPEC, method, (1.0, 2.0, 1.0)), wire="f16")
    shape, inputs = request(SPEC, (13, 4))
    by_broker = run_programs(programs(SPEC, fixed, shape), tensors(SPEC), inputs)
    mesh = replace(fixed, route="mesh", relayed=RELAYED)
    assert np.array_equal(run_programs(programs(SPEC, mesh, shape), tensors(SPEC), inputs), by_broker)


def test_the_broker_carries_everything_where_nothing_else_is_said():
    fixed = plan(SPEC, SPLIT[0], (1.0, 1.0))
    shape, _ = request(SPEC, (9,))
    assert replace(fixed, relayed=RELAYED).route == "broker"
    assert short_programs(SPEC, replace(fixed, relayed=RELAYED), shape) == short_programs(SPEC, fixed, shape)
