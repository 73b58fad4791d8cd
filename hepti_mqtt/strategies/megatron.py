"""`megatron`: Megatron-LM's division (Shoeybi et al., 2019) with equal shares.

Query, key, value and the first MLP matrix by columns, the other two by rows; the partial sums meet by an all-reduce,
direct or in a ring. Norms run everywhere.
"""

from __future__ import annotations

from itertools import product

from hepti_mqtt.lowering import Piece, Rule, Set, Table, box, roles, union
from hepti_mqtt.lowering.ops import Op
from hepti_mqtt.strategies.method import HEADS, MLP, ROWS, Division, Method, reduced_on_rows


def table(division: Division) -> Table:
    """Return the layouts: the partial sums, and who adds which rows of them."""
    reduce = ring if division.option("reduce") == "ring" else reduced_on_rows
    rows = division.parts(ROWS)
    return Table(
        {
            roles.ATTENTION_OUT: reduce(division.parts(HEADS), rows),
            roles.MLP_DOWN: reduce(division.parts(MLP), rows),
        }
    )


def ring(parts: list[Set], rows: list[Set]) -> Rule:
    """Return a ring all-reduce in 2 (N - 1) rounds: the sum of chunk c ends on device c and goes round again."""
    n = len(parts)

    def rule(op: Op) -> list[Piece]:
        out = [Piece(i, box(op, {2: part})) for i, part in enumerate(parts)]
        for t, c in product(range(1, n), range(n)):
            over = union(*(parts[(c + 1 + s) % n] for s in range(t + 1)))
            out.append(Piece((c + 1 + t) % n, box(op, {0: rows[c], 2: over}), relay=True))
        for t, c in product(range(1, n), range(n)):
            out.append(Piece((c + t) % n, box(op, {0: rows[c]}), relay=True))
        return out

    return rule


METHOD = Method(
    "megatron",
    "Megatron-LM: own heads and MLP columns, equal shares, all-reduce",
    table,
    shares=(ROWS, HEADS, MLP),
    options=({"reduce": "direct"}, {"reduce": "ring"}),
    equal=True,
    offered=False,
)
