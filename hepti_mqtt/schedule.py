"""The one rule by which a Program runs, shared by the executor and the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hepti_mqtt.ids import PLANNER
from hepti_mqtt.program import Key, Program, Recv, Slot, written


@dataclass(frozen=True, slots=True)
class Template:
    """A Program prepared for running: readiness is a counter per op, and a slot is free after its last reader.

    kept: slots that are filled from the start. pending: distinct slots that an op waits for. readers: ops that read a
    slot or a view of it. uses: how many of them. recv: the op and slot that an exchange fills. inputs: the exchanges
    that the request itself brings. first: ops that wait for nothing.
    """

    program: Program
    kept: tuple[Slot, ...]
    pending: tuple[int, ...]
    readers: tuple[tuple[int, ...], ...]
    uses: tuple[int, ...]
    recv: Mapping[Key, tuple[int, Slot]]
    inputs: tuple[Key, ...]
    first: tuple[int, ...]
    runnable: int


def template(program: Program) -> Template:
    """Return the Template of a Program."""
    readers: list[list[int]] = [[] for _ in program.slots]
    pending, first = [], []
    recv: dict[Key, tuple[int, Slot]] = {}
    kept = program.kept()
    for place, op in enumerate(program.ops):
        slots = program.reads(op)
        for slot in slots:
            readers[slot].append(place)
        pending.append(len(set(slots).difference(kept)))
        if isinstance(op, Recv):
            recv[op.key] = (place, written(op)[0])
        elif not pending[-1]:
            first.append(place)
    return Template(
        program=program,
        kept=kept,
        pending=tuple(pending),
        readers=tuple(tuple(r) for r in readers),
        uses=tuple(len(r) for r in readers),
        recv=recv,
        inputs=tuple(key for key in recv if key[2] == PLANNER),
        first=tuple(first),
        runnable=len(program.ops) - len(recv),
    )
