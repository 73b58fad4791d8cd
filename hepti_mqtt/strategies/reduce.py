"""Partial sums over parts of the inner dimension of a matmul, added by the devices that own rows of the result."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from hepti_mqtt.lowering import Piece, Rule, Set, box, union
from hepti_mqtt.lowering.ops import Op


def direct(parts: Sequence[Set], rows: Sequence[Set]) -> Rule:
    """Return a direct reduce-scatter: every part goes to the owners of its rows at once."""

    def rule(op: Op) -> list[Piece]:
        partial = [Piece(i, box(op, {2: part})) for i, part in enumerate(parts)]
        return partial + [Piece(i, box(op, {0: r}), relay=True) for i, r in enumerate(rows)]

    return rule


def ring(parts: Sequence[Set], rows: Sequence[Set]) -> Rule:
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
