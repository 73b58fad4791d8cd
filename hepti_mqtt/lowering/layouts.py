"""Layouts: which device holds which region of a tensor, and tables of them by the tensors' roles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from hepti_mqtt.lowering.graph import Graph
from hepti_mqtt.lowering.ops import Op
from hepti_mqtt.lowering.regions import Region, Set, whole_units
from hepti_mqtt.lowering.regions import text as region_text

PLANNER_PLACE: Final = -1  # the planner, among devices that are numbers


class Piece(NamedTuple):
    """A device holds a region of an op's space: computed there, or (relay) put together from the pieces before it.

    turn: ops of a lower turn come first in the Program (micro-batches).
    """

    device: int
    region: Region
    relay: bool = False
    turn: int = 0


# A layout, given the op whose dimensions it divides; None leaves this op to be computed where it is needed.
Rule = Callable[[Op], list[Piece] | None]


@dataclass(frozen=True)
class Table:
    """A method: the layout of each tensor that it places, by role; what it does not place is computed where needed.

    where_present: the same for roles that not every family has. uniform: layouts do not look at an op's layer, so that
    equal layers are divided alike.
    """

    lines: Mapping[str, Rule] = field(default_factory=dict)
    where_present: Mapping[str, Rule] = field(default_factory=dict)
    uniform: bool = True

    def rule(self, op: Op) -> Rule | None:
        """Return the layout of an op, None if the table does not place it."""
        return self.lines.get(op.role) or self.where_present.get(op.role)

    def check(self, graph: Graph) -> None:
        """Raise ValueError if a line names a role that no tensor of the graph has."""
        for role in self.lines:
            if role not in graph.roles:
                raise ValueError(f"no tensor has the role {role!r}; this family has {', '.join(sorted(graph.roles))}")

    def over(self, frame: Table) -> Table:
        """Return this table with the lines of `frame` for what it does not place itself."""
        return Table(self.lines, {**frame.lines, **frame.where_present, **self.where_present}, self.uniform)


def pieces_of(op: Op, pieces: Iterable[Piece], names: Sequence[str]) -> tuple[Piece, ...]:
    """Return an op's pieces, empty ones left out; raises ValueError for regions that the op cannot have.

    names: of the devices, in their order.
    """
    out = []
    for piece in pieces:
        if not all(piece.region):
            continue
        if not PLANNER_PLACE <= piece.device < len(names):
            raise ValueError(f"{op.name}: device {piece.device} is none of the {len(names)}")
        reach = zip(piece.region, op.space, strict=False)
        if len(piece.region) != len(op.space) or any(s[0][0] < 0 or s[-1][1] > n for s, n in reach):
            raise ValueError(f"{op.name}: {_holds(piece, names)}, its space is {region_text(op.full)}")
        for dim, (s, unit) in enumerate(zip(piece.region, op.units, strict=False)):
            if unit > 1 and whole_units(s, unit) != s:
                raise ValueError(
                    f"{op.name}: {_holds(piece, names)}, but dimension {dim} is cut in units of {unit} only"
                )
        out.append(piece)
    return tuple(out)


def _holds(piece: Piece, names: Sequence[str]) -> str:
    who = "the planner" if piece.device == PLANNER_PLACE else names[piece.device]
    return f"{who} is to hold {region_text(piece.region)}"


# -- rules ------------------------------------------------------------------------------------------------------------


def box(op: Op, at: Mapping[int, Set]) -> Region:
    """Return the op's whole space but for the given dimensions; raises ValueError for one that it does not have."""
    for dim in at:
        if dim >= len(op.space):
            raise ValueError(f"{op.name} has no dimension {dim}: its space is {region_text(op.full)}")
    return tuple(at.get(i, s) for i, s in enumerate(op.full))


def on(device: int) -> Rule:
    """Return the layout of a tensor that one device holds."""
    return lambda op: [Piece(device, op.full)]


def split(parts: Sequence[Set], dim: int, relay: bool = False) -> Rule:
    """Return the layout in which device i holds part i of a dimension."""
    return lambda op: [Piece(i, box(op, {dim: part}), relay) for i, part in enumerate(parts)]


def tile(pieces: Iterable[tuple[int, Mapping[int, Set]]]) -> Rule:
    """Return the layout of pieces (device, {dimension: part}), in the order given."""
    fixed = tuple(pieces)
    return lambda op: [Piece(device, box(op, at)) for device, at in fixed]
