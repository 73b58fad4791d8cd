"""Collectives as layouts: partial sums over the inner dimension of a matmul meet on the devices that own rows of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from hepti_mqtt.lowering.layouts import Piece, Rule, box
from hepti_mqtt.lowering.ops import Op
from hepti_mqtt.lowering.regions import Set, union


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


def ring_scatter(parts: Sequence[Set], rows: Sequence[Set]) -> Rule:
    """Return a ring reduce-scatter in N - 1 rounds, the matmul cut into its chunks: chunk c ends on device c.

    Each device computes first the chunk that it sends on first, and its own last, so that a chunk of the sum travels
    while the next device computes its part of it.
    """
    n = len(parts)

    def rule(op: Op) -> list[Piece]:
        out = []
        for t, i in product(range(n), range(n)):
            c = (i - 1 - t) % n
            out.append(Piece(i, box(op, {0: rows[c], 2: parts[i]})))
            if t:
                over = union(*(parts[(c + 1 + s) % n] for s in range(t + 1)))
                out.append(Piece(i, box(op, {0: rows[c], 2: over}), relay=True))
        return out

    return rule


def ring_gather(rows: Sequence[Set]) -> Rule:
    """Return a ring all-gather in N - 1 rounds: every device passes on what it has just received.

    Own rows stand last once more: whoever is not in the ring gets them from their owner.
    """
    n = len(rows)

    def rule(op: Op) -> list[Piece]:
        out = [Piece(i, box(op, {0: own})) for i, own in enumerate(rows)]
        for t, i in product(range(1, n), range(n)):
            out.append(Piece(i, box(op, {0: rows[(i - t) % n]}), relay=True))
        return out + [Piece(i, box(op, {0: own}), relay=True) for i, own in enumerate(rows)]

    return rule
