"""A family's computation as a graph: tensor ops in topological order, in blocks of which many are alike.

The last op is the answer. Blocks are what a family repeats (its layers), with what stands before and behind them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple

from hepti_mqtt.lowering.ops import Op

KEPT: Final = 5  # of a run of equal blocks: two before, the one that is repeated, two behind
TEMPLATE: Final = 2  # the place of the repeated one among them


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks first..stop of a graph are alike: equal ops, that read each other and the block before in one way.

    kept: how many are left when the run is cut short.
    """

    first: int
    stop: int
    kept: int = KEPT

    @property
    def repeats(self) -> int:
        """Return how many blocks the repeated one stands for when the run is cut short."""
        return self.stop - self.first - self.kept + 1


class Skipped(NamedTuple):
    """Equal layers that a graph is without: before the op at `place`, how many blocks and ops of the whole graph."""

    place: int
    blocks: int
    ops: int


NOTHING: Final = Skipped(0, 0, 0)


@dataclass(frozen=True, eq=False)
class Graph:
    """Ops in topological order; blocks: the first op of each block.

    skipped: what it is without. The index of an op is its place in the whole graph. Graphs are not compared: equal ops
    may differ in their names, by which tables and answers are made.
    """

    ops: tuple[Op, ...]
    blocks: tuple[int, ...]
    skipped: Skipped = NOTHING

    @property
    def answer(self) -> Op:
        """Return the op whose result is the answer."""
        return self.ops[-1]

    @cached_property
    def by_name(self) -> dict[str, Op]:
        """Return the ops by name."""
        return {op.name: op for op in self.ops}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors."""
        return tuple([op.name for op in self.ops])

    @cached_property
    def layer_of(self) -> tuple[int, ...]:
        """Return the layers of all tensors."""
        return tuple([op.layer for op in self.ops])

    @cached_property
    def place(self) -> dict[str, int]:
        """Return where the ops are, by name."""
        return {op.name: place for place, op in enumerate(self.ops)}

    @cached_property
    def roles(self) -> frozenset[str]:
        """Return the roles of all tensors."""
        return frozenset(op.role for op in self.ops)

    def first(self, role: str) -> Op:
        """Return the first op of a role; raises ValueError if there is none."""
        for op in self.ops:
            if op.role == role:
                return op
        raise ValueError(f"no tensor has the role {role!r}; there are {', '.join(sorted(self.roles))}")

    def layers(self) -> int:
        """Return the number of layers."""
        return max(op.layer for op in self.ops) + 1

    def span(self, block: int) -> tuple[int, int]:
        """Return the ops first..stop of a block."""
        after = block + 1
        return self.blocks[block], self.blocks[after] if after < len(self.blocks) else len(self.ops)

    @cached_property
    def run(self) -> Run | None:
        """Return the longest run of equal blocks that is worth cutting short, None if there is none."""
        best = Run(0, 0)
        patterns = [self._pattern(block) for block in range(len(self.blocks))]
        for first, block in _runs(patterns):
            if block - first > best.stop - best.first:
                best = Run(first, block)
        return best if best.stop - best.first > KEPT else None

    @cached_property
    def renamed(self) -> tuple[Mapping[str, str], ...]:
        """Return, for the repeated block of the run and those behind it, its stored tensors by the repeated one's."""
        run = self.run
        if run is None:
            return ()
        first, *others = (self.ops[slice(*self.span(b))] for b in range(run.first + TEMPLATE, run.stop))
        return tuple(
            {
                a: b
                for x, y in zip(first, block, strict=True)
                if x.tensors
                for a, b in zip(x.tensors, y.tensors, strict=True)
            }
            for block in (first, *others)
        )

    def _pattern(self, block: int) -> list[tuple[object, ...]]:
        """Return what the ops of a block are and read, so that alike blocks have equal ones.

        Inputs are counted from the block, or in the graph if they are of no neighbour.
        """
        start, stop = self.span(block)
        near, place = self.blocks[max(block - 1, 0)], self.place
        return [
            (op, op.role, *[(True, at - start) if (at := place[x]) >= near else (False, at) for x in op.inputs])
            for op in self.ops[start:stop]
        ]

    def like(self, whole: Graph) -> bool:
        """Return whether the run of equal blocks is that of `whole`, and what is skipped is not needed of it."""
        run, other = self.run, whole.run
        if run is None or other is None:
            return False
        behind = self.blocks[run.stop - (KEPT - TEMPLATE - 1)]
        return (
            self.span(run.first + TEMPLATE)[1] <= self.skipped.place <= behind
            and (run.first, run.stop + self.skipped.blocks) == (other.first, other.stop)
            and len(self.ops) + self.skipped.ops == len(whole.ops)
        )

    def short(self) -> Graph:
        """Return the graph with its run of equal blocks cut to `KEPT`; itself if there is none.

        Ops keep their index in the whole graph.
        """
        run = self.run
        if run is None:
            return self
        template = run.first + TEMPLATE
        return self.without(template, run.stop - (KEPT - TEMPLATE - 1))

    def without(self, template: int, behind: int) -> Graph:
        """Return the graph without the blocks between two: what they gave to the next one, `template` gives."""
        before, start = slice(*self.span(behind - 1)), self.blocks[template]
        names = {a.name: b.name for a, b in zip(self.ops[before], self.ops[start:], strict=False)}
        ops: list[Op] = []
        blocks = []
        for block in (*range(template + 1), *range(behind, len(self.blocks))):
            blocks.append(len(ops))
            for op in self.ops[slice(*self.span(block))]:
                moved = block == behind and any(name in names for name in op.inputs)
                ops.append(replace(op, inputs=tuple(names.get(n, n) for n in op.inputs)) if moved else op)
        return Graph(tuple(ops), tuple(blocks))


def _runs(patterns: Sequence[object]) -> Iterator[tuple[int, int]]:
    """Yield where equal patterns stand one behind the other: first..stop."""
    first = 0
    for place in range(1, len(patterns) + 1):
        if place == len(patterns) or patterns[place] != patterns[first]:
            yield first, place
            first = place
