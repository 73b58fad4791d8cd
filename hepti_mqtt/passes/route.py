"""Who carries the exchanges, for every strategy alike: a pass from Program to Program.

Over the broker, or over mesh: from the sender straight to each receiver. What is for the planner stays on the broker.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hepti_mqtt.ids import PLANNER
from hepti_mqtt.plan import Pair, Route
from hepti_mqtt.program import Op, Program, Send


def routed(program: Program, route: Route, relayed: Collection[Pair] = ()) -> Program:
    """Return `program` with its exchanges between devices on `route`; "broker" changes nothing.

    relayed: (source, target) whose exchanges go over the broker all the same. A Send to receivers of both kinds becomes
    two, with one key: each receiver has its exchange once, by one way or the other.
    """
    if route == "broker":
        return program
    past = frozenset(relayed)
    ops: list[Op] = []
    for op in program.ops:
        ops += _ways(op, program.device, past) if isinstance(op, Send) else (op,)
    return replace(program, ops=tuple(ops))


def _ways(op: Send, source: str, relayed: frozenset[Pair]) -> tuple[Send, ...]:
    direct = tuple(to for to in op.to if to != PLANNER and (source, to) not in relayed)
    if not direct:
        return (op,)
    mesh = op._replace(to=direct, route="mesh")
    if len(direct) == len(op.to):
        return (mesh,)
    by_broker = op._replace(to=tuple(to for to in op.to if to not in direct))
    return by_broker, mesh  # the longer way first
