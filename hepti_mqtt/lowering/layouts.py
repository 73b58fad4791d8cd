"""Layouts: which device holds which region of a tensor, and tables of them by the tensors' roles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Final, NamedTuple

from hepti_mqtt.lowering import roles
from hepti_mqtt.lowering.attention import HeadedAttention
from hepti_mqtt.lowering.graph import Graph
from hepti_mqtt.lowering.ops import Op
from hepti_mqtt.lowering.regions import IndexSet, Region, round_to_units, span, union
from hepti_mqtt.lowering.regions import format_region as region_text

PLANNER_INDEX: Final = -1  # stands for the planner among device numbers


class Piece(NamedTuple):
    """A device holds a region of an op's space."""

    device: int
    region: Region
    relay: bool = False  #: assembled from the pieces before it, not computed
    order: int = 0  #: ops of a lower order come first in the Program (micro-batches)


# A layout of an op, for the dimensions of that op; None: every device that reads the op computes it.
Rule = Callable[[Op], list[Piece] | None]


@dataclass(frozen=True)
class Table:
    """A method: layouts by role; a tensor without a layout is computed on every device that reads it."""

    rules: Mapping[str, Rule] = field(default_factory=dict)
    optional_rules: Mapping[str, Rule] = field(default_factory=dict)  #: layouts of roles that not every family has
    uniform: bool = True  #: layouts do not depend on an op's layer, so equal layers are divided alike

    def rule(self, op: Op) -> Rule | None:
        """Return the layout of an op, None if the table does not place it."""
        return self.rules.get(op.role) or self.optional_rules.get(op.role)

    def check(self, graph: Graph) -> None:
        """Raise ValueError if a rule names a role that no tensor of the graph has."""
        for role in self.rules:
            if role not in graph.roles:
                raise ValueError(f"no tensor has the role {role!r}; this family has {', '.join(sorted(graph.roles))}")

    def with_defaults(self, frame: Table) -> Table:
        """Return this table with the rules of `frame` for roles that it does not place itself."""
        return Table(self.rules, {**frame.rules, **frame.optional_rules, **self.optional_rules}, self.uniform)


def checked_pieces(op: Op, pieces: Iterable[Piece], names: Sequence[str]) -> tuple[Piece, ...]:
    """Return an op's pieces without empty ones; raises ValueError for regions that the op cannot have.

    names: of the devices, in order.
    """
    out = []
    for piece in pieces:
        if not all(piece.region):
            continue
        if not PLANNER_INDEX <= piece.device < len(names):
            raise ValueError(f"{op.name}: device {piece.device} is not one of the {len(names)} devices")
        reach = zip(piece.region, op.space, strict=False)
        if len(piece.region) != len(op.space) or any(s[0][0] < 0 or s[-1][1] > n for s, n in reach):
            raise ValueError(f"{op.name}: {_holds(piece, names)}, but its space is {region_text(op.full_region)}")
        for dim, (s, unit) in enumerate(zip(piece.region, op.units, strict=False)):
            if unit > 1 and round_to_units(s, unit) != s:
                raise ValueError(
                    f"{op.name}: {_holds(piece, names)}, but dimension {dim} is cut in units of {unit} only"
                )
        out.append(piece)
    return tuple(out)


def _holds(piece: Piece, names: Sequence[str]) -> str:
    who = "the planner" if piece.device == PLANNER_INDEX else names[piece.device]
    return f"{who} is to hold {region_text(piece.region)}"


# -- rules ------------------------------------------------------------------------------------------------------------


def region_with(op: Op, at: Mapping[int, IndexSet]) -> Region:
    """Return the op's space with other index sets of some dimensions; raises ValueError for a missing dimension."""
    region = list(op.full_region)
    for dim, indices in at.items():
        if dim >= len(region):
            raise ValueError(f"{op.name} has no dimension {dim}: its space is {region_text(op.full_region)}")
        region[dim] = indices
    return tuple(region)


def on_device(device: int) -> Rule:
    """Return the layout of a tensor that one device holds."""
    return lambda op: [Piece(device, op.full_region)]


def split_along(parts: Sequence[IndexSet], dim: int) -> Rule:
    """Return the layout in which device i holds part i of a dimension."""
    return lambda op: [Piece(i, region_with(op, {dim: part})) for i, part in enumerate(parts)]


def explicit(pieces: Iterable[tuple[int, Mapping[int, IndexSet]]]) -> Rule:
    """Return the layout of pieces (device, {dimension: part}), in the order given."""
    fixed = tuple(pieces)
    return lambda op: [Piece(device, region_with(op, at)) for device, at in fixed]


# ----------------------------------------------------------------------------------------------------------------------
# Layouts of a transformer's blocks: norms and residuals between them, q, k and v columns, and rings.


# Computed row by row after attention: matmuls with their fused ops, and norms.
ROWWISE_ROLES: Final = (roles.ATTENTION_SUM, roles.AFTER_ATTENTION, roles.MLP_HIDDEN, roles.MLP_SUM)
BETWEEN_ROLES: Final = (roles.BEFORE_ATTENTION, roles.AFTER_ATTENTION, roles.BEFORE_MLP, roles.AFTER_MLP)


def between_blocks(rule: Rule, root: int | None = None) -> dict[str, Rule]:
    """Return rules that place norms and residuals between the blocks.

    root: computes the first norm, since it has the whole embedding and broadcasts it anyway.
    """
    lines = dict.fromkeys(BETWEEN_ROLES, rule)
    if root is not None:
        first = on_device(root)
        lines[roles.BEFORE_ATTENTION] = lambda op: (rule if op.layer else first)(op)
    return lines


def qkv_columns(graph: Graph, heads: IndexSet, which: str = "qkv") -> IndexSet:
    """Return the columns of heads (columns of attention) in the joint query, key and value matrix."""
    attention = graph.first_with_role(roles.ATTENTION)
    assert isinstance(attention, HeadedAttention)
    return union(*(attention.columns_of(w, heads) for w in which))


def ring_order(parts: Sequence[IndexSet], device: int) -> list[IndexSet]:
    """Return the parts in ring order: the next device's part first, the device's own last."""
    return [*parts[device + 1 :], *parts[: device + 1]]


def merge_parts(parts: Sequence[IndexSet], by: int) -> list[IndexSet]:
    """Return the unions of `by` parts each."""
    return [union(*parts[i : i + by]) for i in range(0, len(parts), by)]


def split_into_groups(parts: Sequence[IndexSet], count: int) -> list[list[IndexSet]]:
    """Return each part, an interval or empty, cut into `count` of about equal size: the first of each, and so on."""
    ends = [part[0] if part else (0, 0) for part in parts]
    return [[span(a + (z - a) * g // count, a + (z - a) * (g + 1) // count) for a, z in ends] for g in range(count)]


# ----------------------------------------------------------------------------------------------------------------------
# Collectives as layouts: partial sums over the inner dimension of a matmul meet on the devices that own rows of it.


def reduce_scatter(parts: Sequence[IndexSet], rows: Sequence[IndexSet]) -> Rule:
    """Return a direct reduce-scatter: every part goes to the owners of its rows in one step."""

    def rule(op: Op) -> list[Piece]:
        partial = [Piece(i, region_with(op, {2: part})) for i, part in enumerate(parts)]
        return partial + [Piece(i, region_with(op, {0: r}), relay=True) for i, r in enumerate(rows)]

    return rule


def ring_all_reduce(parts: Sequence[IndexSet], rows: Sequence[IndexSet]) -> Rule:
    """Return a ring all-reduce in 2 (N - 1) rounds: device c completes the sum of chunk c, which goes round again."""
    n = len(parts)

    def rule(op: Op) -> list[Piece]:
        out = [Piece(i, region_with(op, {2: part})) for i, part in enumerate(parts)]
        for t, c in product(range(1, n), range(n)):
            over = union(*(parts[(c + 1 + s) % n] for s in range(t + 1)))
            out.append(Piece((c + 1 + t) % n, region_with(op, {0: rows[c], 2: over}), relay=True))
        for t, c in product(range(1, n), range(n)):
            out.append(Piece((c + t) % n, region_with(op, {0: rows[c]}), relay=True))
        return out

    return rule


def ring_reduce_scatter(parts: Sequence[IndexSet], rows: Sequence[IndexSet]) -> Rule:
    """Return a ring reduce-scatter in N - 1 rounds: the matmul is cut into chunks, and device c completes chunk c.

    Each device begins with the chunk that it sends first and ends with its own, so that a chunk's sum travels while the
    next device computes its part of it.
    """
    n = len(parts)

    def rule(op: Op) -> list[Piece]:
        out = []
        for t, i in product(range(n), range(n)):
            c = (i - 1 - t) % n
            out.append(Piece(i, region_with(op, {0: rows[c], 2: parts[i]})))
            if t:
                over = union(*(parts[(c + 1 + s) % n] for s in range(t + 1)))
                out.append(Piece(i, region_with(op, {0: rows[c], 2: over}), relay=True))
        return out

    return rule


def ring_all_gather(rows: Sequence[IndexSet]) -> Rule:
    """Return a ring all-gather in N - 1 rounds: every device passes on what it received last.

    Own rows come last once more, so that a device outside the ring receives them from their owner.
    """
    n = len(rows)

    def rule(op: Op) -> list[Piece]:
        out = [Piece(i, region_with(op, {0: own})) for i, own in enumerate(rows)]
        for t, i in product(range(1, n), range(n)):
            out.append(Piece(i, region_with(op, {0: rows[(i - t) % n]}), relay=True))
        return out + [Piece(i, region_with(op, {0: own}), relay=True) for i, own in enumerate(rows)]

    return rule
