"""A graph under a table: the Programs of all devices, equal blocks worked out once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256

from hepti_mqtt.ids import PLANNER
from hepti_mqtt.lowering.draft import Draft
from hepti_mqtt.lowering.fuse import fuse
from hepti_mqtt.lowering.graph import TEMPLATE, Graph, Run
from hepti_mqtt.lowering.layouts import PLANNER_PLACE, Table, pieces_of
from hepti_mqtt.lowering.lower import lower
from hepti_mqtt.lowering.stretch import repeatable, repeated_refs, shortest, stretch
from hepti_mqtt.lowering.tiles import Tiles, analyse
from hepti_mqtt.program import Program, WeightRef


class SkippedError(Exception):
    """Layers that a graph is without are not worked out as their neighbours are: the whole graph is needed."""


class Lowered:
    """What a graph becomes under a table, for devices in source order.

    run: the equal blocks of which one stands for several in `short`, None if all are worked out. outline: of a graph
    without most of its equal layers, the graph of another request, `like` it; only its names and places are read.
    Raises ValueError for a table that does not fit the graph, with the tensor, region and device.
    """

    def __init__(self, graph: Graph, table: Table, names: Sequence[str], outline: Graph | None = None) -> None:
        table.check(graph)
        self.whole, self.table, self.names = outline or graph, table, tuple(names)
        self.run: Run | None = self.whole.run if table.uniform else None
        self.graph, self.tiles = self._analyse(graph.short() if self.run else graph)
        if self.run and not repeatable(self.graph, self.run, self.tiles):
            self.run = None
            if outline is not None:
                raise SkippedError
            self.graph, self.tiles = self._analyse(graph)
        if self.run:
            self.graph, self.run = shortest(self.graph, self.run, self.tiles)
            self.tiles = {op.name: self.tiles[op.name] for op in self.graph.ops}
        self._drafts: dict[str, Draft] = {}

    def _analyse(self, graph: Graph) -> tuple[Graph, Tiles]:
        placed = {}
        for op in graph.ops:
            rule = self.table.rule(op)
            layout = None if rule is None else rule(op)
            if layout is not None:
                placed[op.name] = pieces_of(op, layout, self.names)
        fused, pieces = fuse(graph, placed)
        return fused, analyse(fused, pieces, self.names)

    def draft(self, device: str) -> Draft:
        """Return a device's ops with equal blocks once, by block."""
        if device not in self._drafts:
            again = None if self.run is None else self.run.first + TEMPLATE
            self._drafts[device] = lower(self.graph, self.tiles, self.names.index(device), self.names, again)
        return self._drafts[device]

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the names of all tensors, by number."""
        return self.whole.names

    def short(self, device: str) -> Program:
        """Return a device's Program with equal blocks once."""
        return self.draft(device).program(device, self.nodes)

    def program(self, device: str) -> Program:
        """Return a device's whole Program."""
        draft = self.draft(device)
        if self.run is None:
            return draft.program(device, self.nodes)
        slots, ops = stretch(draft, self.whole, self.run)
        return Program(device, tuple(slots), tuple(ops), self.nodes)

    def holds(self, device: str, role: str) -> bool:
        """Return whether a device computes tensors of a role."""
        number = self.names.index(device)
        return any(t.device == number for op in self.graph.ops if op.role == role for t in self.tiles[op.name])

    def sources(self, device: str) -> frozenset[str]:
        """Return the devices, and the planner, that a device hears."""
        number = self.names.index(device)
        messages = ((t.device, m) for tiles in self.tiles.values() for t in tiles for m in t.messages)
        heard = {source for source, message in messages if number in message.to and source != number}
        return frozenset(PLANNER if n == PLANNER_PLACE else self.names[n] for n in heard)

    def refs(self, device: str) -> tuple[WeightRef, ...]:
        """Return the distinct weight ranges of a device's whole Program, from its tiles alone."""
        number = self.names.index(device)
        found: dict[WeightRef, None] = {}
        template = range(0) if self.run is None else range(*self.graph.span(self.run.first + TEMPLATE))
        for place, op in enumerate(self.graph.ops):
            regions = (t.region for t in self.tiles[op.name] if t.device == number and not t.relay)
            refs = () if op.is_view else dict.fromkeys(ref for region in regions for ref in op.refs(region))
            found.update(dict.fromkeys(refs))
            if place in template and self.run is not None:
                found.update(dict.fromkeys(repeated_refs(tuple(refs), self.whole, self.run)))
        return tuple(found)

    @property
    def repeated(self) -> tuple[int, int] | None:
        """Return (layer, times): the layer of `short` that stands for several, None if none does."""
        if self.run is None:
            return None
        op = self.whole.ops[self.whole.blocks[self.run.first + TEMPLATE]]
        return op.layer, self.run.repeats

    @cached_property
    def digest(self) -> bytes:
        """Return 8 bytes that are equal where two versions of this package make the same Programs."""
        text = repr([(op.name, self.tiles[op.name]) for op in self.graph.ops]) + repr(self.nodes)
        return sha256(text.encode()).digest()[:8]
