"""A Program in the making: slots and ops in blocks, as the graph has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from math import prod
from typing import Any, Final, NamedTuple

from hepti_mqtt.ids import PLANNER
from hepti_mqtt.lowering.graph import TEMPLATE, Graph, Run
from hepti_mqtt.lowering.layouts import PLANNER_PLACE, Piece, Table, pieces_of
from hepti_mqtt.lowering.ops import Call, Input, Op, Operand
from hepti_mqtt.lowering.regions import Region, count, disjoint, inside, meet, minus, place, rectangles, span, text
from hepti_mqtt.lowering.rewrites import fuse
from hepti_mqtt.lowering.tiles import Tile, Tiles, analyse, cover
from hepti_mqtt.program import Compute, Program, Recv, Send, Slot, SlotDtype, SlotSpec, WeightRef
from hepti_mqtt.program import Op as ProgramOp


class Held(NamedTuple):
    """A region that a device has in a slot; state: as a partial result in a format of its own."""

    slot: Slot
    region: Region
    state: bool


@dataclass(slots=True)
class Draft:
    """A Program in blocks: ops with their turn and block, and the first slot and op of each block."""

    slots: list[SlotSpec] = field(default_factory=list)
    ops: list[tuple[int, int, ProgramOp]] = field(default_factory=list)
    starts: list[Slot] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)

    def begin(self) -> None:
        """Begin a block."""
        self.starts.append(len(self.slots))
        self.begun.append(len(self.ops))

    def block(self, number: int) -> list[ProgramOp]:
        """Return the ops of a block that is not the last one."""
        return [op for _, _, op in self.ops[self.begun[number] : self.begun[number + 1]]]

    def size(self, block: int) -> tuple[int, int]:
        """Return how many slots and ops a block has that is not the last one."""
        return self.starts[block + 1] - self.starts[block], self.begun[block + 1] - self.begun[block]

    def within(self, block: int, ops: Sequence[Op], have: Mapping[str, Sequence[Held]]) -> tuple[list[object], ...]:
        """Return what a block is, wherever it stands: equal for two where the same is done with what was before them.

        ops: its tensors. have: where they are.
        """
        start, stop = self.starts[block : block + 2]
        return (
            [_relative(op, start, ops[0].index) for op in self.block(block)],
            [_relative_spec(spec, start) for spec in self.slots[start:stop]],
            [(h.slot - start, h.region, h.state) for op in ops for h in have[op.name]],
        )

    def program(self, device: str, nodes: tuple[str, ...]) -> Program:
        """Return the Program, ops of a lower turn first."""
        ordered = sorted(self.ops, key=lambda entry: entry[0])
        return Program(device, tuple(self.slots), tuple(op for _, _, op in ordered), nodes)


def _relative(op: ProgramOp, start: Slot, node: int) -> tuple[object, ...]:
    if isinstance(op, Compute):
        reads = [max(slot - start, -1) for slot in op.reads]
        return op.kernel, reads, [slot - start for slot in op.writes], op.attrs, op.node - node
    slot, who, number, part, _, *rest = op
    return type(op), max(slot - start, -1), who, number - node, part, rest


def _relative_spec(spec: SlotSpec, start: Slot) -> tuple[object, ...]:
    shape, dtype, base, row, state = spec
    return shape, dtype, base if base is None else max(base - start, -1), row, bool(state)


# ----------------------------------------------------------------------------------------------------------------------
# Ops of one block of a Program taken to the place of another one that is alike.


class Move(NamedTuple):
    """Takes ops to another place: slots from `first` on by `by`, nodes by `nodes`, other tensors.

    layers: of each node. A layer's dozens of ops become hundreds here, so each is made with as few calls as can be.
    """

    first: Slot
    by: int
    nodes: int
    tensors: Mapping[str, str]
    layers: Mapping[int, int] | Sequence[int]

    def slots(self, slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
        """Return slots in their place."""
        first, by = self.first, self.by
        return tuple([slot + by if slot >= first else slot for slot in slots])

    def specs(self, specs: Iterable[SlotSpec]) -> list[SlotSpec]:
        """Return what slots are: views are of slots in their place."""
        return [spec if spec.base is None and not spec.state else self._spec(spec) for spec in specs]

    def _spec(self, spec: SlotSpec) -> SlotSpec:
        if spec.state:
            return spec._replace(state=self.tensors.get(spec.state, spec.state))
        assert spec.base is not None
        return SlotSpec(spec.shape, spec.dtype, self.slots((spec.base,))[0], spec.start)

    def refs(self, refs: Iterable[WeightRef]) -> tuple[WeightRef, ...]:
        """Return the same ranges of the other tensors."""
        new, tensors = tuple.__new__, self.tensors
        return tuple([new(WeightRef, (tensors[t], rows, cols, kind, kept)) for t, rows, cols, kind, kept in refs])

    def ops(self, ops: Iterable[ProgramOp]) -> Iterator[ProgramOp]:
        """Yield ops in their place."""
        new, (first, by, nodes, _, layers) = tuple.__new__, self
        for op in ops:
            node = op.node + nodes
            if isinstance(op, Compute):
                kernel, reads, writes, weights, attrs, *_ = op  # parts are made later, by passes
                reads = tuple([slot + by if slot >= first else slot for slot in reads])
                writes = tuple([slot + by for slot in writes])
                weights = weights and self.refs(weights)
                yield new(Compute, (kernel, reads, writes, weights, attrs, layers[node], node, ()))
            elif isinstance(op, Send):
                at, to, _, part, _, row, exact, route = op
                yield new(Send, (at + by if at >= first else at, to, node, part, layers[node], row, exact, route))
            else:
                at, source, _, part, _, exact, _, _ = op
                yield new(Recv, (at + by, source, node, part, layers[node], exact, (), -1))

    def behind(self, op: ProgramOp) -> ProgramOp:
        """Return an op that stays what it is but for its slots."""
        if isinstance(op, Compute):
            return op._replace(reads=self.slots(op.reads), writes=self.slots(op.writes))
        return op._replace(slot=self.slots((op.slot,))[0])


def moved(ops: Sequence[Op], to: Sequence[Op], first: Slot, by: int) -> Move:
    """Return what takes what was made for some tensors to where other ones stand that are worked out alike."""
    tensors = {a: b for x, y in zip(ops, to, strict=True) for a, b in zip(x.tensors, y.tensors, strict=True)}
    return Move(first, by, to[0].index - ops[0].index, tensors, {op.index: op.layer for op in to})


# ----------------------------------------------------------------------------------------------------------------------
# The forward walk: one device's Program from the tiles of all devices.
#
# What was promised is received, inputs are put together, tiles are computed and sent. An input that lies in one slot
# is a
# view of it; else one op assembles it, in the order of the table, so that the bits do not depend on what arrives when.


_ADD: Final = "add"


def lower(graph: Graph, tiles: Tiles, device: int, names: Sequence[str], again: int | None = None) -> Draft:
    """Return one device's Program from the tiles of all devices; raises ValueError for what no kernel computes.

    again: a block whose tiles are those of the block before it, as are the turns of all.
    """
    return _Walk(graph, tiles, device, names).draft(again)


class _Walk:
    def __init__(self, graph: Graph, tiles: Tiles, device: int, names: Sequence[str]) -> None:
        self.graph, self.tiles, self.device, self.names = graph, tiles, device, names
        self.out = Draft()
        self.turns: list[int] = []  # of each slot
        self.have: dict[str, list[Held]] = {op.name: [] for op in graph.ops}
        self.pieces: dict[str, tuple[Piece, ...]] = {}
        self.together: dict[tuple[str, Region], Operand] = {}
        self.views: dict[tuple[Slot, int, tuple[int, ...]], Slot] = {}
        self.adds: dict[Slot, int] = {}  # slot -> the `add` that fills it
        self.turn, self.block, self.op = 0, 0, graph.ops[0]

    def draft(self, again: int | None) -> Draft:
        for block in range(len(self.graph.blocks)):
            self.block = block
            self.out.begin()
            if block != again or not self.again():
                for op in self.graph.ops[slice(*self.graph.span(block))]:
                    self.visit(op)
        self._drop_unread_sums()
        return self.out

    def visit(self, op: Op) -> None:
        """Append what this device does for a tensor."""
        self.op = op
        for tile in self.tiles[op.name]:
            self.turn = tile.turn
            state = op.is_state(tile.region)
            if tile.device != self.device:
                self.receive(op, tile, state)
            elif (slot := self.fill(op, tile, state)) is not None:
                self.have[op.name].append(Held(slot, tile.region, state))
                self.send(op, tile, slot, state)

    def again(self) -> bool:
        """Append the block before once more if it came out as the one before that; return whether it did.

        What it reads of its predecessor has a counterpart in itself then, and that is what this block reads.
        """
        out, number = self.out, self.block
        ops = [self.graph.ops[slice(*self.graph.span(b))] for b in (number - 2, number - 1, number)]
        if out.size(number - 2) != out.size(number - 1):
            return False
        if out.within(number - 2, ops[0], self.have) != out.within(number - 1, ops[1], self.have):
            return False
        move = moved(ops[1], ops[2], out.starts[-3], out.starts[-1] - out.starts[-2])
        low, inner = out.starts[-2], out.block(number - 1)
        out.ops += [(0, number, op) for op in move.ops(inner)]
        out.slots += move.specs(out.slots[low:])
        self.turns += self.turns[low:]
        names = {x.name: y.name for x, y in zip(ops[1], ops[2], strict=True)}
        for a, b in names.items():
            self.have[b] = [Held(slot + move.by, region, state) for slot, region, state in self.have[a]]
        for (name, region), whole in list(self.together.items()):
            if name in names:
                self.together[names[name], region] = whole._replace(slot=whole.slot + move.by)
        for (base, first, shape), view in list(self.views.items()):
            if view >= low:
                self.views[move.slots((base,))[0], first, shape] = view + move.by
        return True

    # -- tiles --------------------------------------------------------------------------------------------------------

    def receive(self, op: Op, tile: Tile, state: bool) -> None:
        """Take what a tile of another device, or of the planner, sends here."""
        for message in tile.messages:
            if self.device in message.to:
                slot = self.slot(op.shape(message.region, state), op.dtype)
                source = PLANNER if tile.device == PLANNER_PLACE else self.names[tile.device]
                self.emit(Recv(slot, source, op.index, message.part, op.layer, op.exact), self.turn)
                self.turns[slot] = self.turn
                self.have[op.name].append(Held(slot, message.region, state))

    def fill(self, op: Op, tile: Tile, state: bool) -> Slot | None:
        """Compute, relay or view a tile of this device; return its slot."""
        if isinstance(op, Input):
            raise ValueError(f"{op.name}: only the planner has what a request brings")  # noqa: TRY004
        if tile.relay:
            if state:
                raise ValueError(f"{op.name}: partial results in a format of their own cannot be relayed")
            return self.whole(op, tile.region).slot
        if op.session and not op.inputs:
            return self.kept(op, tile.region)
        needs = [(self.graph.by_name[name], r) for name, r in zip(op.inputs, op.need(tile.region), strict=True)]
        wanted = [(n, source, region) for n, (source, r) in enumerate(needs) if (region := source.of(r)) is not None]
        if op.is_view:
            return self.side_by_side(op, tile.region, needs)
        operands: list[Operand] = []
        for n, source, region in wanted:
            if n == op.summands:
                operands += self.parts(source, region)
            else:
                others = [r for _, other, r in wanted if other is source]
                joint = disjoint(others) if len(others) > 1 else ()
                operands.append(self.operand(op, n, source, needs[n][1], region, joint))
        slot = self.compute(op, op.call(tile.region, operands), operands, op.shape(tile.region, state))
        if op.session:
            self.out.slots[slot] = self.out.slots[slot]._replace(state=op.tensors[0])
        return slot

    def kept(self, op: Op, region: Region) -> Slot:
        """Return the slot of what the session has kept."""
        slot = self.slot(op.shape(region, False), op.dtype)
        self.out.slots[slot] = self.out.slots[slot]._replace(state=op.tensors[0])
        return slot

    def send(self, op: Op, tile: Tile, slot: Slot, state: bool) -> None:
        """Send what of a tile others asked for."""
        cells = op.cells(tile.region, state)
        for message in tile.messages:
            inner = op.cells(message.region, state)
            part = self.rectangle(slot, cells, inner)
            devices = tuple(self.names[d] for d in message.to if d != PLANNER_PLACE)
            if devices:
                send = Send(part, devices, op.index, message.part, op.layer, 0, op.exact)
                self.emit(send, self.turns[part])
            if PLANNER_PLACE in message.to:
                rows, *rest = inner
                if len(rows) != 1 or tuple(rest) != op.full[1 : op.rank]:
                    raise ValueError(f"{op.name}: an answer is given in whole rows, not in {text(inner)}")
                self.emit(Send(part, (PLANNER,), op.index, message.part, op.layer, rows[0][0]), self.turns[part])

    # -- reading ------------------------------------------------------------------------------------------------------

    def picks(self, source: Op, region: Region) -> list[tuple[Held, Region]]:
        """Return what this device has of a region, every index once: (where, part)."""
        held = self.have[source.name]
        for h in reversed(held):
            if h.region == region:
                return [(h, region)]
        pieces = self.pieces.get(source.name, ())
        if len(pieces) < len(held):  # a relay reads what stands before it
            pieces = self.pieces[source.name] = tuple(Piece(self.device, h.region) for h in held)
        return [(held[i], part) for i, part in cover(source, region, pieces, self.device)]

    def operand(
        self, op: Op, number: int, source: Op, need: Region, region: Region, joint: Sequence[Region]
    ) -> Operand:
        """Return an input as a view of one slot where the kernel can take it so, else put together.

        region: of the source's space that yields `need`. joint: all that the op needs of the source where that is more,
        so that what is put together is so once.
        """
        picks = self.picks(source, region)
        if len(picks) == 1 and not picks[0][0].state:
            held, _ = picks[0]
            found = self.within(op, number, held.slot, source.cells(held.region, False), need)
            if found is not None:
                return found
        for wider in joint:
            if wider != region and inside(region, wider):
                whole = self.whole(source, wider)
                found = self.within(op, number, whole.slot, whole.cells, need)
                if found is not None:
                    return found
        whole = self.whole(source, region)
        found = self.within(op, number, whole.slot, whole.cells, need)
        return found or Operand(self.rectangle(whole.slot, whole.cells, need), need)

    def within(self, op: Op, number: int, slot: Slot, cells: Region, need: Region) -> Operand | None:
        """Return `need` as rows of a slot, with all of its columns or those that the kernel finds by itself."""
        rows = place(need[0], cells[0])
        if len(rows) != 1:
            return None
        if need[1:] == cells[1:]:
            return Operand(self.rows(slot, rows[0][0], count(need[0])), need)
        if len(need) == 2 and op.takes(number, need, cells):
            return Operand(self.rows(slot, rows[0][0], count(need[0])), (need[0], cells[1]))
        return None

    def parts(self, source: Op, region: Region) -> list[Operand]:
        """Return an input as its summands where all are of one region, else as the sum."""
        picks = self.picks(source, region)
        n = source.rank
        if all(part[:n] == region[:n] for _, part in picks):
            return [
                Operand(self.rectangle(h.slot, source.cells(h.region, False), region[:n]), region[:n], part)
                for h, part in picks
            ]
        whole = self.whole(source, region)
        return [Operand(whole.slot, whole.cells, region)]

    def whole(self, source: Op, region: Region) -> Operand:
        """Return a region in one slot: its parts side by side, and added where they overlap."""
        key = (source.name, region)
        if key not in self.together:
            cells = region[: source.rank]
            pieces = [
                (self.cell(source, region, cell, group), cell)
                for cell, group in _cells(source, region, self.picks(source, region))
            ]
            slot = pieces[0][0] if len(pieces) == 1 else self.assemble(pieces, cells, source.dtype)
            self.together[key] = Operand(slot, cells, region)
        return self.together[key]

    def cell(self, source: Op, region: Region, cell: Region, group: Sequence[tuple[Held, Region]]) -> Slot:
        """Return the value of some result indices from all parts that hold them."""
        slots = []
        for held, part in group:
            cells = source.cells(held.region, held.state)
            inner = source.cells((*cell, *part[source.rank :]), held.state)
            slots.append(self.rectangle(held.slot, cells, inner))
        if len(group) == 1 and not group[0][0].state:
            return slots[0]
        call = source.combine((*cell, *region[source.rank :]))
        return self.compute(source, call, [Operand(s, cell) for s in slots], tuple(map(count, cell)))

    def side_by_side(self, op: Op, region: Region, needs: Sequence[tuple[Op, Region]]) -> Slot:
        """Return the slot of an op whose result is pieces of its inputs: the input itself where it is one."""
        found = []
        for n, (source, need) in enumerate(needs):
            if (wider := source.of(need)) is None:
                continue
            whole = self.whole(source, wider)
            found.append((self.rectangle(whole.slot, whole.cells, need), op.filled(n, region)))
        if len(found) > 1:
            return self.assemble(found, region[: op.rank], op.dtype)
        return self.reshaped(found[0][0], op.shape(region, False))

    # -- slots --------------------------------------------------------------------------------------------------------

    def slot(self, shape: tuple[int, ...], dtype: SlotDtype) -> Slot:
        self.out.slots.append(SlotSpec(shape, dtype))
        self.turns.append(self.turn)
        return len(self.out.slots) - 1

    def rows(self, slot: Slot, start: int, height: int) -> Slot:
        """Return rows start..start + height of a slot: itself, or a view."""
        shape = self.out.slots[slot].shape
        return self.viewed(slot, start, (height, *shape[1:]))

    def reshaped(self, slot: Slot, shape: tuple[int, ...]) -> Slot:
        """Return a slot in another shape."""
        return slot if self.out.slots[slot].shape == shape else self.viewed(slot, 0, shape)

    def viewed(self, slot: Slot, start: int, shape: tuple[int, ...]) -> Slot:
        spec = self.out.slots[slot]
        if start == 0 and spec.shape == shape:
            return slot
        base, first = slot, start
        if spec.base is not None:  # whose rows may be longer than those of what it is a view of
            base, longer = spec.base, prod(spec.shape[1:]) // max(prod(self.out.slots[spec.base].shape[1:]), 1)
            first = spec.start + start * longer
        key = (base, first, shape)
        if key not in self.views:
            self.out.slots.append(SlotSpec(shape, spec.dtype, base, first))
            self.turns.append(self.turns[slot])
            self.views[key] = len(self.out.slots) - 1
        return self.views[key]

    def rectangle(self, slot: Slot, cells: Region, inner: Region) -> Slot:
        """Return a part of a slot: a view where it is rows of it, else a copy."""
        if inner == cells:
            return slot
        rows = place(inner[0], cells[0])
        if len(rows) == 1 and inner[1:] == cells[1:]:
            return self.rows(slot, rows[0][0], count(inner[0]))
        spec = self.out.slots[slot]
        rest = tuple(span(0, n) for n in spec.shape[len(cells) :])
        at = (*map(place, inner, cells), *rest)
        shape = tuple(map(count, (*inner, *rest)))
        target = tuple(span(0, n) for n in shape)
        copies = tuple((0, a, b) for a, b in rectangles(at, target))
        return self.kernel(Call("assemble", (), {"copies": copies}), (slot,), shape, spec.dtype)

    def assemble(self, pieces: Sequence[tuple[Slot, Region]], cells: Region, dtype: SlotDtype) -> Slot:
        """Return a new slot with the pieces, each a slot of the given cells, in their places."""
        copies = []
        for n, (_, inner) in enumerate(pieces):
            source = tuple(span(0, count(s)) for s in inner)
            copies += [(n, a, b) for a, b in rectangles(source, tuple(map(place, inner, cells)))]
        reads = tuple(slot for slot, _ in pieces)
        return self.kernel(Call("assemble", (), {"copies": tuple(copies)}), reads, tuple(map(count, cells)), dtype)

    # -- ops ----------------------------------------------------------------------------------------------------------

    def compute(self, op: Op, call: Call, operands: Sequence[Operand], shape: tuple[int, ...]) -> Slot:
        """Append a kernel; a layer norm of what an `add` has just filled becomes a part of that."""
        reads = tuple(o.slot for o in operands)
        if call.kernel == "layer_norm" and self._may_join(reads[0]):
            return self._add_norm(self.adds.pop(reads[0]), call, reads[0], op)
        slot = self.kernel(call, reads, shape, op.dtype)
        if call.kernel == _ADD:
            self.adds[slot] = len(self.out.ops) - 1
        return slot

    def kernel(self, call: Call, reads: tuple[Slot, ...], shape: tuple[int, ...], dtype: SlotDtype) -> Slot:
        turn = max([self.turn, *(self.turns[s] for s in reads)])
        slot = self.slot(shape, dtype)
        self.turns[slot] = turn
        op = Compute(call.kernel, reads, (slot,), call.weights, call.attrs, self.op.layer, self.op.index)
        self.emit(op, turn)
        return slot

    def emit(self, op: ProgramOp, turn: int) -> None:
        self.out.ops.append((turn, self.block, op))

    def _may_join(self, total: Slot) -> bool:
        """Return whether an `add` of this block has filled a slot: blocks are repeated, so each is for itself."""
        return total in self.adds and self.out.ops[self.adds[total]][1] == self.block

    def _add_norm(self, at: int, norm: Call, total: Slot, op: Op) -> Slot:
        turn, block, add = self.out.ops[at]
        assert isinstance(add, Compute)
        spec = self.out.slots[total]
        slot = self.slot(spec.shape, spec.dtype)
        self.turns[slot] = turn
        attrs: dict[str, Any] = {"bias": False, "eps": norm.attrs["eps"], "keep_sum": True}
        joint = add._replace(
            kernel="add_norm",
            writes=(total, slot),
            weights=norm.weights,
            attrs=attrs,
            layer=op.layer,
            node=op.index,
        )
        self.out.ops[at] = (turn, block, joint)
        return slot

    def _drop_unread_sums(self) -> None:
        """Let a sum that nobody reads be normalised in place."""
        bases = [i if s.base is None else s.base for i, s in enumerate(self.out.slots)]
        read = {bases[s] for _, _, op in self.out.ops for s in _reads(op)}
        for at, (turn, block, op) in enumerate(self.out.ops):
            if isinstance(op, Compute) and op.kernel == "add_norm" and op.writes[0] not in read:
                attrs = {**op.attrs, "keep_sum": False}
                self.out.ops[at] = (turn, block, op._replace(writes=op.writes[1:], attrs=attrs))


def _reads(op: ProgramOp) -> tuple[Slot, ...]:
    return op.reads if isinstance(op, Compute) else (op.slot,) if isinstance(op, Send) else ()


def _cells(
    op: Op, region: Region, picks: Sequence[tuple[Held, Region]]
) -> list[tuple[Region, list[tuple[Held, Region]]]]:
    """Return disjoint rectangles of the result, each with all parts that hold it, in the order of the table."""
    n = op.rank
    groups: dict[Region, list[tuple[Held, Region]]] = {}
    for pick in picks:
        groups.setdefault(pick[1][:n], []).append(pick)
    cells = list(groups)
    # What covers a region has every index once: without reduced dimensions nothing overlaps.
    if n == len(op.space) or not any(meet(a, b) for i, a in enumerate(cells) for b in cells[:i]):
        return list(groups.items())
    cut = [region[:n]]
    for key in cells:
        cut = [c for r in cut for c in (*filter(None, (meet(r, key),)), *minus(r, key))]
    return [(cell, [(h, p) for h, p in picks if inside(cell, p[:n])]) for cell in cut]


# ----------------------------------------------------------------------------------------------------------------------
# Equal blocks are worked out once: their ops repeated, with slots, nodes and tensors moved by whole blocks.


def repeatable(short: Graph, run: Run, tiles: Tiles) -> bool:
    """Return whether the repeated block may stand for any number of them.

    Tiles follow from what the next block asks for. The repeated block asks the one before it for what that has given it
    tiles for; if both have equal tiles, so has every block that is put between them.
    """
    template = run.first + TEMPLATE
    return _equal(short, tiles, template - 1, template) and not any(
        tile.turn for op in short.ops for tile in tiles[op.name]
    )


def shortest(short: Graph, run: Run, tiles: Tiles) -> tuple[Graph, Run]:
    """Return the graph and its run without the block behind the repeated one where that has equal tiles."""
    template = run.first + TEMPLATE
    if not _equal(short, tiles, template, template + 1):
        return short, run
    return short.without(template, template + 2), replace(run, kept=run.kept - 1)


def _equal(graph: Graph, tiles: Tiles, a: int, b: int) -> bool:
    (a0, a1), (b0, b1) = graph.span(a), graph.span(b)
    return all(tiles[x.name] == tiles[y.name] for x, y in zip(graph.ops[a0:a1], graph.ops[b0:b1], strict=True))


def stretch(draft: Draft, graph: Graph, run: Run) -> tuple[list[SlotSpec], list[ProgramOp]]:
    """Return the slots and ops of the whole graph from the draft for the short one."""
    template = run.first + TEMPLATE
    before, low, high = (draft.starts[b] for b in (template - 1, template, template + 1))
    every, inner = [op for _, _, op in draft.ops], draft.block(template)
    end = draft.begun[template + 1]
    slots, ops = draft.slots[:high], every[:end]
    for n in range(1, run.repeats):
        move = _move(graph, run, n, before, n * (high - low))
        slots += move.specs(draft.slots[low:high])
        ops += move.ops(inner)
    last = run.repeats - 1
    move = _move(graph, run, last, low, last * (high - low))
    slots += move.specs(draft.slots[high:])
    ops += map(move.behind, every[end:])
    return slots, ops


def repeated_refs(refs: Sequence[WeightRef], graph: Graph, run: Run) -> Iterator[WeightRef]:
    """Yield, for weights of the repeated block, those of the blocks that it stands for."""
    for n in range(1, run.repeats):
        yield from _move(graph, run, n, 0, 0).refs(refs)


def _move(graph: Graph, run: Run, n: int, first: Slot, by: int) -> Move:
    """Return what takes the repeated block to its place in the whole graph, `n` blocks on."""
    start, stop = graph.span(run.first + TEMPLATE)
    return Move(first, by, n * (stop - start), graph.renamed[n], graph.layer_of)


# ----------------------------------------------------------------------------------------------------------------------
# A graph under a table: the Programs of all devices, equal blocks worked out once.


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
        for index, op in enumerate(self.graph.ops):
            regions = (t.region for t in self.tiles[op.name] if t.device == number and not t.relay)
            refs = () if op.is_view else dict.fromkeys(ref for region in regions for ref in op.refs(region))
            found.update(dict.fromkeys(refs))
            if index in template and self.run is not None:
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
