"""From a graph and a table to Programs: a forward walk per device, with equal blocks lowered once."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from hashlib import sha256
from math import prod
from typing import Any, Final, NamedTuple

from hepti_mqtt.core.ids import PLANNER
from hepti_mqtt.core.program import (
    Compute,
    Keyed,
    Program,
    Recv,
    Send,
    Slot,
    SlotDtype,
    SlotSpec,
    WeightRef,
    slots_read,
)
from hepti_mqtt.core.program import Op as ProgramOp
from hepti_mqtt.lowering.graph import TEMPLATE_BLOCK, Graph, Repeat
from hepti_mqtt.lowering.layouts import PLANNER_INDEX, Piece, Table, checked_pieces
from hepti_mqtt.lowering.ops import Call, Input, Op, Operand
from hepti_mqtt.lowering.regions import (
    IndexSet,
    Region,
    disjoint,
    format_region,
    index_count,
    intersect,
    is_within,
    positions_in,
    rectangles,
    span,
    subtract,
)
from hepti_mqtt.lowering.rewrites import fuse_ops
from hepti_mqtt.lowering.tiles import Tile, Tiles, cover, plan_tiles


class HeldRegion(NamedTuple):
    """A region of a tensor that a slot of the device holds."""

    slot: Slot
    region: Region
    state: bool  #: the slot holds a partial result in the op's own format (`Op.is_state`)


@dataclass(slots=True)
class ProgramBuilder:
    """A Program in blocks."""

    slots: list[SlotSpec] = field(default_factory=list)
    ops: list[tuple[int, int, ProgramOp]] = field(default_factory=list)  #: (turn, block, op)
    first_slots: list[Slot] = field(default_factory=list)  #: first slot of each block
    first_ops: list[int] = field(default_factory=list)  #: first op of each block
    #: Regions of each tensor that the device computes or receives.
    held: Mapping[str, list[HeldRegion]] = field(default_factory=dict)
    #: Regions of tensors that the device assembles.
    gathered: Mapping[tuple[str, Region], Operand] = field(default_factory=dict)
    program: Program | None = None  #: the Program, after the first `build`

    def begin_block(self) -> None:
        """Begin a block."""
        self.first_slots.append(len(self.slots))
        self.first_ops.append(len(self.ops))

    def build(self, device: str, graph: Graph) -> Program:
        """Return the Program, ops of a lower turn first; later calls return the same one."""
        if self.program is None:
            ordered = sorted(self.ops, key=lambda entry: entry[0])
            ops = tuple(op for _, _, op in ordered)
            self.program = Program(device, tuple(self.slots), ops, graph.names, graph.blocks)
        return self.program


# ----------------------------------------------------------------------------------------------------------------------
# Ops of a block of a Program, relocated to a block that is alike.


class Relocation(NamedTuple):
    """Relocates the ops of a block: other slots, nodes and tensors.

    A layer's dozens of ops become hundreds, so the methods construct each with as few calls as possible.
    """

    first: Slot  #: slots from `first` on move by `by`
    by: int
    nodes: int  #: distance of the nodes
    tensors: Mapping[str, str]  #: stored tensors of the other block, by those of this one
    layers: Mapping[int, int] | Sequence[int]  #: layer of each node

    def relocate_buffers(self, slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
        """Return relocated slots."""
        first, by = self.first, self.by
        return tuple([slot + by if slot >= first else slot for slot in slots])

    def relocate_specs(self, specs: Iterable[SlotSpec]) -> list[SlotSpec]:
        """Return relocated slot specs: the bases of views move too."""
        return [spec if spec.base is None and not spec.state else self._spec(spec) for spec in specs]

    def _spec(self, spec: SlotSpec) -> SlotSpec:
        if spec.state:
            return spec._replace(state=self.tensors.get(spec.state, spec.state))
        assert spec.base is not None
        return SlotSpec(spec.shape, spec.dtype, self.relocate_buffers((spec.base,))[0], spec.start)

    def relocate_weights(self, refs: Iterable[WeightRef]) -> tuple[WeightRef, ...]:
        """Return the same ranges of the other block's tensors."""
        new, tensors = tuple.__new__, self.tensors
        return tuple([new(WeightRef, (tensors[t], rows, cols, kind, kept)) for t, rows, cols, kind, kept in refs])

    def relocate_ops(self, ops: Iterable[ProgramOp]) -> Iterator[ProgramOp]:
        """Yield relocated ops."""
        new, (first, by, nodes, _, layers) = tuple.__new__, self
        for op in ops:
            node = op.node + nodes
            if isinstance(op, Compute):
                kernel, reads, writes, weights, attrs, *_ = op  # passes add fused parts later
                reads = tuple([slot + by if slot >= first else slot for slot in reads])
                writes = tuple([slot + by for slot in writes])
                weights = weights and self.relocate_weights(weights)
                yield new(Compute, (kernel, reads, writes, weights, attrs, layers[node], node, ()))
            elif isinstance(op, Send):
                at, to, _, part, _, row, exact, route = op
                yield new(Send, (at + by if at >= first else at, to, node, part, layers[node], row, exact, route))
            else:
                at, source, _, part, _, exact, _, _ = op
                yield new(Recv, (at + by, source, node, part, layers[node], exact, (), -1))

    def relocate_reader(self, op: ProgramOp) -> ProgramOp:
        """Return an op with relocated slots and all else unchanged."""
        if isinstance(op, Compute):
            return op._replace(reads=self.relocate_buffers(op.reads), writes=self.relocate_buffers(op.writes))
        return op._replace(slot=self.relocate_buffers((op.slot,))[0])


# ----------------------------------------------------------------------------------------------------------------------
# The forward walk: one device's Program from the tiles of all devices.
#
# Each op receives its messages, assembles its inputs, computes its tiles and sends them. An input that lies in one
# slot is a view of it. Otherwise one op assembles it, in the order of the table, so that the bits of the answer do not
# depend on the order of arrival.


_ADD: Final = "add"
KEPT_COPIES: Final = 1024


class ForwardWalk:
    """The walk of one device, by its number among `names`."""

    def __init__(self, graph: Graph, tiles: Tiles, device: int, names: Sequence[str]) -> None:
        self.graph, self.tiles, self.device, self.names = graph, tiles, device, names
        self.out = ProgramBuilder()
        self.turns: list[int] = []  # turn of each slot
        self.held: dict[str, list[HeldRegion]] = {op.name: [] for op in graph.ops}
        self.pieces: dict[str, tuple[Piece, ...]] = {}
        self.gathered: dict[tuple[str, Region], Operand] = {}
        self.out.held, self.out.gathered = self.held, self.gathered
        self.views: dict[tuple[Slot, int, tuple[int, ...]], Slot] = {}
        self.adds: dict[Slot, int] = {}  # slot -> the `add` that fills it
        self.turn, self.block, self.op = 0, 0, graph.ops[0]

    def draft(self) -> ProgramBuilder:
        """Return the device's Program; raises ValueError for an op without a kernel."""
        for block in range(len(self.graph.blocks)):
            self.block = block
            self.out.begin_block()
            for op in self.graph.ops[slice(*self.graph.block_range(block))]:
                self.lower_op(op)
        self._drop_unread_sums()
        return self.out

    def lower_op(self, op: Op) -> None:
        """Append this device's ops for a tensor."""
        self.op = op
        for tile in self.tiles[op.name]:
            self.turn = tile.order
            state = op.is_state(tile.region)
            if tile.device != self.device:
                self.receive(op, tile, state)
            elif (slot := self.produce(op, tile, state)) is not None:
                self.held[op.name].append(HeldRegion(slot, tile.region, state))
                self.send(op, tile, slot, state)

    # -- tiles --------------------------------------------------------------------------------------------------------

    def receive(self, op: Op, tile: Tile, state: bool) -> None:
        """Receive the messages of another device's tile, or of the planner's."""
        for message in tile.messages:
            if self.device in message.to:
                slot = self.slot(op.shape(message.region, state), op.dtype)
                source = PLANNER if tile.device == PLANNER_INDEX else self.names[tile.device]
                self.emit(Recv(slot, source, op.index, message.part, op.layer, op.stays_f32), self.turn)
                self.turns[slot] = self.turn
                self.held[op.name].append(HeldRegion(slot, message.region, state))

    def produce(self, op: Op, tile: Tile, state: bool) -> Slot | None:
        """Compute, relay or view a tile of this device; return its slot."""
        if isinstance(op, Input):
            raise ValueError(f"{op.name}: only the planner has the input of a request")  # noqa: TRY004
        if tile.relay:
            if state:
                raise ValueError(f"{op.name}: partial results in a format of their own cannot be relayed")
            return self.gather(op, tile.region).slot
        if op.is_session_state and not op.inputs:
            return self.session_slot(op, self.slot(op.shape(tile.region, False), op.dtype))
        needs = [
            (self.graph.by_name[name], r) for name, r in zip(op.inputs, op.input_regions(tile.region), strict=True)
        ]
        sources = [
            (n, source, region) for n, (source, r) in enumerate(needs) if (region := source.region_for(r)) is not None
        ]
        if op.is_view:
            return self.concatenate(op, tile.region, needs)
        operands: list[Operand] = []
        for n, source, region in sources:
            if n == op.summed_input:
                operands += self.parts(source, region)
            else:
                others = [r for _, other, r in sources if other is source]
                joint = disjoint(others) if len(others) > 1 else ()
                operands.append(self.operand(op, n, source, needs[n][1], region, joint))
        slot = self.compute(op, op.kernel_call(tile.region, operands), operands, op.shape(tile.region, state))
        return self.session_slot(op, slot) if op.is_session_state else slot

    def session_slot(self, op: Op, slot: Slot) -> Slot:
        """Mark a slot as session state; return it."""
        self.out.slots[slot] = self.out.slots[slot]._replace(state=op.tensors[0])
        return slot

    def send(self, op: Op, tile: Tile, slot: Slot, state: bool) -> None:
        """Send a tile's messages."""
        cells = op.result_cells(tile.region, state)
        for message in tile.messages:
            inner = op.result_cells(message.region, state)
            part = self.rectangle(slot, cells, inner)
            devices = tuple(self.names[d] for d in message.to if d != PLANNER_INDEX)
            if devices:
                send = Send(part, devices, op.index, message.part, op.layer, 0, op.stays_f32)
                self.emit(send, self.turns[part])
            if PLANNER_INDEX in message.to:
                rows, *rest = inner
                if len(rows) != 1 or tuple(rest) != op.full_region[1 : op.rank]:
                    raise ValueError(f"{op.name}: an answer is given in whole rows, not in {format_region(inner)}")
                self.emit(Send(part, (PLANNER,), op.index, message.part, op.layer, rows[0][0]), self.turns[part])

    # -- reading ------------------------------------------------------------------------------------------------------

    def covering_parts(self, source: Op, region: Region) -> list[tuple[HeldRegion, Region]]:
        """Return (held region, part of it) that cover a region, every index once."""
        held = self.held[source.name]
        for h in reversed(held):
            if h.region == region:
                return [(h, region)]
        pieces = self.pieces.get(source.name, ())
        if len(pieces) < len(held):  # a relay reads the pieces before it
            pieces = self.pieces[source.name] = tuple(Piece(self.device, h.region) for h in held)
        return [(held[i], part) for i, part in cover(source, region, pieces, self.device)]

    def operand(
        self, op: Op, number: int, source: Op, need: Region, region: Region, joint: Sequence[Region]
    ) -> Operand:
        """Return an input as a view of one slot if the kernel can read one, else assembled.

        region: of the source's space that yields `need`. joint: larger regions of the source that the op reads too, so
        that one assembled slot serves both.
        """
        picks = self.covering_parts(source, region)
        if len(picks) == 1 and not picks[0][0].state:
            held, _ = picks[0]
            view = self.within(op, number, held.slot, source.result_cells(held.region, False), need)
            if view is not None:
                return view
        for wider in joint:
            if wider != region and is_within(region, wider):
                whole = self.gather(source, wider)
                view = self.within(op, number, whole.slot, whole.cells, need)
                if view is not None:
                    return view
        whole = self.gather(source, region)
        view = self.within(op, number, whole.slot, whole.cells, need)
        return view or Operand(self.rectangle(whole.slot, whole.cells, need), need)

    def within(self, op: Op, number: int, slot: Slot, cells: Region, need: Region) -> Operand | None:
        """Return `need` as rows of a slot, with exactly its columns or with more if the kernel can select them."""
        rows = positions_in(need[0], cells[0])
        if len(rows) != 1:
            return None
        if need[1:] == cells[1:]:
            return Operand(self.rows(slot, rows[0][0], index_count(need[0])), need)
        if len(need) == 2 and op.accepts_columns(number, need, cells):
            return Operand(self.rows(slot, rows[0][0], index_count(need[0])), (need[0], cells[1]))
        return None

    def parts(self, source: Op, region: Region) -> list[Operand]:
        """Return an input as its summands if all have one region, else as the sum."""
        picks = self.covering_parts(source, region)
        n = source.rank
        if all(part[:n] == region[:n] for _, part in picks):
            return [
                Operand(self.rectangle(h.slot, source.result_cells(h.region, False), region[:n]), region[:n], part)
                for h, part in picks
            ]
        whole = self.gather(source, region)
        return [Operand(whole.slot, whole.cells, region)]

    def gather(self, source: Op, region: Region) -> Operand:
        """Return a region in one slot: its parts concatenated, and added where they overlap."""
        key = (source.name, region)
        if key not in self.gathered:
            cells = region[: source.rank]
            pieces = [
                (self.cell(source, region, cell, group), cell)
                for cell, group in _cells(source, region, self.covering_parts(source, region))
            ]
            slot = pieces[0][0] if len(pieces) == 1 else self.assemble(pieces, cells, source.dtype)
            self.gathered[key] = Operand(slot, cells, region)
        return self.gathered[key]

    def cell(self, source: Op, region: Region, cell: Region, group: Sequence[tuple[HeldRegion, Region]]) -> Slot:
        """Return the value of some result indices from all parts that hold them."""
        slots = []
        for held, part in group:
            cells = source.result_cells(held.region, held.state)
            inner = source.result_cells((*cell, *part[source.rank :]), held.state)
            slots.append(self.rectangle(held.slot, cells, inner))
        if len(group) == 1 and not group[0][0].state:
            return slots[0]
        call = source.combine_call((*cell, *region[source.rank :]))
        return self.compute(source, call, [Operand(s, cell) for s in slots], tuple(map(index_count, cell)))

    def concatenate(self, op: Op, region: Region, needs: Sequence[tuple[Op, Region]]) -> Slot:
        """Return the slot of a view op: its inputs' pieces assembled, or a view of the only piece."""
        parts = []
        for n, (source, need) in enumerate(needs):
            if (wider := source.region_for(need)) is None:
                continue
            whole = self.gather(source, wider)
            parts.append((self.rectangle(whole.slot, whole.cells, need), op.filled_region(n, region)))
        if len(parts) > 1:
            return self.assemble(parts, region[: op.rank], op.dtype)
        return self.viewed(parts[0][0], 0, op.shape(region, False))

    # -- slots --------------------------------------------------------------------------------------------------------

    def slot(self, shape: tuple[int, ...], dtype: SlotDtype) -> Slot:
        """Return a new slot."""
        self.out.slots.append(SlotSpec(shape, dtype))
        self.turns.append(self.turn)
        return len(self.out.slots) - 1

    def rows(self, slot: Slot, start: int, height: int) -> Slot:
        """Return rows start..start + height of a slot: the slot or a view."""
        shape = self.out.slots[slot].shape
        return self.viewed(slot, start, (height, *shape[1:]))

    def viewed(self, slot: Slot, start: int, shape: tuple[int, ...]) -> Slot:
        """Return a view of a slot from a row on; the slot itself if the view is all of it."""
        spec = self.out.slots[slot]
        if start == 0 and spec.shape == shape:
            return slot
        base, first = slot, start
        if spec.base is not None:  # a view's rows may be longer than its base's
            base, longer = spec.base, prod(spec.shape[1:]) // max(prod(self.out.slots[spec.base].shape[1:]), 1)
            first = spec.start + start * longer
        key = (base, first, shape)
        if key not in self.views:
            self.out.slots.append(SlotSpec(shape, spec.dtype, base, first))
            self.turns.append(self.turns[slot])
            self.views[key] = len(self.out.slots) - 1
        return self.views[key]

    def rectangle(self, slot: Slot, cells: Region, inner: Region) -> Slot:
        """Return a part of a slot: a view if the part is whole rows, else a copy."""
        if inner == cells:
            return slot
        rows = positions_in(inner[0], cells[0])
        if len(rows) == 1 and inner[1:] == cells[1:]:
            return self.rows(slot, rows[0][0], index_count(inner[0]))
        spec = self.out.slots[slot]
        rest = tuple(span(0, n) for n in spec.shape[len(cells) :])
        at = (*map(positions_in, inner, cells), *rest)
        shape = tuple(map(index_count, (*inner, *rest)))
        target = tuple(span(0, n) for n in shape)
        copies = tuple((0, a, b) for a, b in rectangles(at, target))
        return self.kernel(Call("assemble", (), {"copies": copies}), (slot,), shape, spec.dtype)

    def assemble(self, pieces: Sequence[tuple[Slot, Region]], cells: Region, dtype: SlotDtype) -> Slot:
        """Return a new slot with the pieces (slot, cells) in their places."""
        copies = _copies(tuple([inner for _, inner in pieces]), cells)
        reads = tuple([slot for slot, _ in pieces])
        return self.kernel(Call("assemble", (), {"copies": copies}), reads, tuple(map(index_count, cells)), dtype)

    # -- ops ----------------------------------------------------------------------------------------------------------

    def compute(self, op: Op, call: Call, operands: Sequence[Operand], shape: tuple[int, ...]) -> Slot:
        """Append a kernel; a layer norm joins the `add` that fills its input."""
        reads = tuple(o.slot for o in operands)
        at = self.adds.get(reads[0]) if call.kernel == "layer_norm" else None
        if at is not None and self.out.ops[at][1] == self.block:  # ops of two blocks never join, since blocks repeat
            return self._add_norm(self.adds.pop(reads[0]), call, reads[0], op)
        slot = self.kernel(call, reads, shape, op.dtype)
        if call.kernel == _ADD:
            self.adds[slot] = len(self.out.ops) - 1
        return slot

    def kernel(self, call: Call, reads: tuple[Slot, ...], shape: tuple[int, ...], dtype: SlotDtype) -> Slot:
        """Append a kernel; return the new slot that it fills."""
        turn = max([self.turn, *(self.turns[s] for s in reads)])
        slot = self.slot(shape, dtype)
        self.turns[slot] = turn
        op = Compute(call.kernel, reads, (slot,), call.weights, call.attrs, self.op.layer, self.op.index)
        self.emit(op, turn)
        return slot

    def emit(self, op: ProgramOp, turn: int) -> None:
        """Append an op."""
        self.out.ops.append((turn, self.block, op))

    def _add_norm(self, at: int, norm: Call, total: Slot, op: Op) -> Slot:
        turn, block, add = self.out.ops[at]
        assert isinstance(add, Compute)
        spec = self.out.slots[total]
        slot = self.slot(spec.shape, spec.dtype)
        self.turns[slot] = turn
        attrs: dict[str, Any] = {"bias": False, **norm.attrs, "keep_sum": True}
        joint = add._replace(
            kernel="add_norm", writes=(total, slot), weights=norm.weights, attrs=attrs, layer=op.layer, node=op.index
        )
        self.out.ops[at] = (turn, block, joint)
        return slot

    def _drop_unread_sums(self) -> None:
        """Remove unread sums from the outputs of `add_norm` ops."""
        bases = [i if s.base is None else s.base for i, s in enumerate(self.out.slots)]
        read = {bases[s] for _, _, op in self.out.ops for s in slots_read(op)}
        for at, (turn, block, op) in enumerate(self.out.ops):
            if isinstance(op, Compute) and op.kernel == "add_norm" and op.writes[0] not in read:
                attrs = {**op.attrs, "keep_sum": False}
                self.out.ops[at] = (turn, block, op._replace(writes=op.writes[1:], attrs=attrs))


@lru_cache(maxsize=KEPT_COPIES)
def _copies(pieces: tuple[Region, ...], cells: Region) -> tuple[tuple[int, IndexSet, IndexSet], ...]:
    """Return the copies of plain rectangles, (number of the piece, source, target), that assemble the pieces."""
    copies = []
    for n, inner in enumerate(pieces):
        source = tuple(span(0, index_count(s)) for s in inner)
        copies += [(n, a, b) for a, b in rectangles(source, tuple(map(positions_in, inner, cells)))]
    return tuple(copies)


def _cells(
    op: Op, region: Region, picks: Sequence[tuple[HeldRegion, Region]]
) -> list[tuple[Region, list[tuple[HeldRegion, Region]]]]:
    """Return disjoint rectangles of the result, each with all parts that contain it, in the order of the table."""
    n = op.rank
    groups: dict[Region, list[tuple[HeldRegion, Region]]] = {}
    for pick in picks:
        groups.setdefault(pick[1][:n], []).append(pick)
    cells = list(groups)
    # A cover holds every index once: without reduced dimensions nothing overlaps.
    if n == len(op.space) or not any(intersect(a, b) for i, a in enumerate(cells) for b in cells[:i]):
        return list(groups.items())
    cut = [region[:n]]
    for key in cells:
        cut = [c for r in cut for c in (*filter(None, (intersect(r, key),)), *subtract(r, key))]
    return [(cell, [(h, p) for h, p in picks if is_within(cell, p[:n])]) for cell in cut]


# ----------------------------------------------------------------------------------------------------------------------
# Equal blocks are lowered once: their ops repeat, with slots, nodes and tensors relocated by whole blocks.


def can_repeat(short: Graph, run: Repeat, tiles: Tiles) -> bool:
    """Return whether the template block may stand for any number of blocks.

    A block's tiles follow from the demands of the next block. If the template and the block before it have equal tiles,
    so has every block inserted between them.
    """
    template = run.first + TEMPLATE_BLOCK
    return _equal(short, tiles, template - 1, template) and not any(
        tile.order for op in short.ops for tile in tiles[op.name]
    )


def shorten_repeat(short: Graph, run: Repeat, tiles: Tiles) -> tuple[Graph, Repeat]:
    """Return the graph and its run without the block after the template, if that has equal tiles."""
    template = run.first + TEMPLATE_BLOCK
    if not _equal(short, tiles, template, template + 1):
        return short, run
    return short.without_blocks(template, template + 2), replace(run, kept=run.kept - 1)


def _equal(graph: Graph, tiles: Tiles, a: int, b: int) -> bool:
    (a0, a1), (b0, b1) = graph.block_range(a), graph.block_range(b)
    return all(tiles[x.name] == tiles[y.name] for x, y in zip(graph.ops[a0:a1], graph.ops[b0:b1], strict=True))


def expand_slots(draft: ProgramBuilder, graph: Graph, run: Repeat) -> list[SlotSpec]:
    """Return the slots of the whole graph from the draft for the shortened graph."""
    low, high, moves, last = _moves(draft, graph, run)
    slots = draft.slots[:high]
    for move in moves:
        slots += move.relocate_specs(draft.slots[low:high])
    return slots + last.relocate_specs(draft.slots[high:])


def expand_ops(draft: ProgramBuilder, graph: Graph, run: Repeat) -> list[ProgramOp]:
    """Return the ops of the whole graph from the draft for the shortened graph."""
    template, (_, _, moves, last) = run.first + TEMPLATE_BLOCK, _moves(draft, graph, run)
    every, (start, end) = [op for _, _, op in draft.ops], draft.first_ops[template : template + 2]
    inner, ops = every[start:end], every[:end]
    for move in moves:
        ops += move.relocate_ops(inner)
    return [*ops, *map(last.relocate_reader, every[end:])]


def _moves(draft: ProgramBuilder, graph: Graph, run: Repeat) -> tuple[Slot, Slot, list[Relocation], Relocation]:
    """Return the template's first and last slot, the relocations of its copies, and that of all later blocks."""
    template, last = run.first + TEMPLATE_BLOCK, run.template_count - 1
    before, low, high = (draft.first_slots[b] for b in (template - 1, template, template + 1))
    moves = [_move(graph, run, n, before, n * (high - low)) for n in range(1, run.template_count)]
    return low, high, moves, _move(graph, run, last, low, last * (high - low))


def _move(graph: Graph, run: Repeat, n: int, first: Slot, by: int) -> Relocation:
    """Return the relocation of the template block by `n` blocks."""
    start, stop = graph.block_range(run.first + TEMPLATE_BLOCK)
    return Relocation(first, by, n * (stop - start), graph.repeated_tensors[n], graph.layer_of)


# ----------------------------------------------------------------------------------------------------------------------
# A search lowers hundreds of tables. If two tables differ at the border between two devices only, all other devices
# compute, receive and send the same.


LOWERED_CACHE_SIZE: Final = 64  # some hundred KB each


class DevicePart(Keyed):
    """The key of a device's ops: its own tiles, and the messages that it receives."""

    __slots__ = ("walk",)

    def __init__(self, lowered: Lowered, device: int) -> None:
        self.walk: Callable[[], ProgramBuilder] | None = lambda: ForwardWalk(
            lowered.graph, lowered.tiles, device, lowered.names
        ).draft()
        tiles = [_tiles_of(device, op, lowered.tiles[op.name]) for op in lowered.graph.ops]
        ops = tuple([op.name for op in lowered.graph.ops])
        super().__init__((lowered.full_graph, lowered.repeat, ops, lowered.names, device, tuple(tiles)))


def _tiles_of(device: int, op: Op, tiles: Sequence[Tile]) -> tuple[object, ...]:
    """Return an op's tiles of a device, and for other devices' tiles the messages to it."""
    parts: list[object] = []
    for tile in tiles:
        if tile.device == device:
            parts.append(tile)
        elif received := [(m.region, m.part) for m in tile.messages if device in m.to]:
            parts.append((tile.device, tile.order, op.is_state(tile.region), tuple(received)))
    return tuple(parts)


@lru_cache(maxsize=LOWERED_CACHE_SIZE)
def _builder(part: DevicePart) -> ProgramBuilder:
    assert part.walk is not None
    builder, part.walk = part.walk(), None  # the cache keeps the key; without the walk, all devices' tiles may go
    return builder


# ----------------------------------------------------------------------------------------------------------------------
# A graph under a table: the Programs of all devices, equal blocks lowered once.


class Lowered:
    """A graph under a table, for devices in source order.

    Raises ValueError, with tensor, region and device, if the table does not fit the graph.
    """

    def __init__(self, graph: Graph, table: Table, names: Sequence[str]) -> None:
        table.check(graph)
        self.full_graph, self.table, self.names = graph, table, tuple(names)
        #: Equal blocks; `compact_program` has one for several. None if it has all blocks.
        self.repeat: Repeat | None = graph.repeat if table.uniform else None
        self.graph, self.tiles = self._analyse(graph.shortened() if self.repeat else graph)
        if self.repeat and not can_repeat(self.graph, self.repeat, self.tiles):
            self.repeat = None
            self.graph, self.tiles = self._analyse(graph)
        if self.repeat:
            self.graph, self.repeat = shorten_repeat(self.graph, self.repeat, self.tiles)
            self.tiles = {op.name: self.tiles[op.name] for op in self.graph.ops}
        self._drafts: dict[str, ProgramBuilder] = {}

    def _analyse(self, graph: Graph) -> tuple[Graph, Tiles]:
        placed = {}
        for op in graph.ops:
            rule = self.table.rule(op)
            layout = None if rule is None else rule(op)
            if layout is not None:
                placed[op.name] = checked_pieces(op, layout, self.names)
        fused, pieces = fuse_ops(graph, placed)
        return fused, plan_tiles(fused, pieces, self.names)

    def compact_builder(self, device: str) -> ProgramBuilder:
        """Return a device's ops by block, with equal blocks once."""
        if device not in self._drafts:
            walk = ForwardWalk(self.graph, self.tiles, self.names.index(device), self.names)
            self._drafts[device] = walk.draft()
        return self._drafts[device]

    def share_part(self, device: str) -> None:
        """Share a device's ops with tables in which it has the same part.

        For searches alone: an agent builds the Programs of few tables, so sharing would not pay off.
        """
        if device in self.names and device not in self._drafts:  # tasks have parts of their own
            self._drafts[device] = _builder(DevicePart(self, self.names.index(device)))

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the names of all tensors, by number."""
        return self.full_graph.names

    def compact_program(self, device: str) -> Program:
        """Return a device's Program with equal blocks once."""
        return self.compact_builder(device).build(device, self.full_graph)

    def full_program(self, device: str) -> Program:
        """Return a device's whole Program."""
        draft = self.compact_builder(device)
        if self.repeat is None:
            return draft.build(device, self.full_graph)
        ops = expand_ops(draft, self.full_graph, self.repeat)
        return Program(device, self._full_slots(device), tuple(ops), self.nodes, self.full_graph.blocks)

    def _full_slots(self, device: str) -> tuple[SlotSpec, ...]:
        draft = self.compact_builder(device)
        return tuple(draft.slots if self.repeat is None else expand_slots(draft, self.full_graph, self.repeat))

    def session_bytes(self, device: str) -> int:
        """Return the bytes that the session of a run's first item keeps on a device."""
        arrays = Program(device, self._full_slots(device), (), self.nodes).session_arrays()
        return sum(spec.nbytes for spec in arrays.values())

    def computes_role(self, device: str, role: str) -> bool:
        """Return whether a device computes tensors of a role."""
        number = self.names.index(device)
        return any(t.device == number for op in self.graph.ops if op.role == role for t in self.tiles[op.name])

    def senders(self, device: str) -> frozenset[str]:
        """Return the devices that send tensors to a device, and the planner if it does."""
        number = self.names.index(device)
        messages = ((t.device, m) for tiles in self.tiles.values() for t in tiles for m in t.messages)
        sources = {source for source, message in messages if number in message.to and source != number}
        return frozenset(PLANNER if n == PLANNER_INDEX else self.names[n] for n in sources)

    def weight_refs(self, device: str) -> tuple[WeightRef, ...]:
        """Return the distinct weight ranges of a device's whole Program, from its tiles alone."""
        whole: dict[WeightRef, None] = {}
        for refs, is_repeated in self._weights_of_ops(device):
            whole.update(dict.fromkeys(refs))
            if is_repeated and self.repeat is not None:
                for n in range(1, self.repeat.template_count):
                    whole.update(dict.fromkeys(_move(self.full_graph, self.repeat, n, 0, 0).relocate_weights(refs)))
        return tuple(whole)

    def weight_counts(self, device: str) -> dict[WeightRef, int]:
        """Return the weight ranges of a device's compact Program, each with the number of layers that have its like."""
        counts: dict[WeightRef, int] = {}
        for refs, is_repeated in self._weights_of_ops(device):
            if is_repeated and self.repeat is not None:
                moved, times = self.full_graph.repeated_tensors[1], self.repeat.template_count
                counts |= {ref: times if moved.get(ref.tensor, ref.tensor) != ref.tensor else 1 for ref in refs}
            else:
                counts |= dict.fromkeys(refs, 1)
        return counts

    def _weights_of_ops(self, device: str) -> Iterator[tuple[tuple[WeightRef, ...], bool]]:
        """Yield the distinct weight ranges of each op, and whether its block is the repeated one."""
        number = self.names.index(device)
        template = (
            range(0) if self.repeat is None else range(*self.graph.block_range(self.repeat.first + TEMPLATE_BLOCK))
        )
        for index, op in enumerate(self.graph.ops):
            regions = (t.region for t in self.tiles[op.name] if t.device == number and not t.relay)
            refs = () if op.is_view else dict.fromkeys(ref for region in regions for ref in op.weight_refs(region))
            yield tuple(refs), index in template

    def template_of(self, node: int) -> tuple[Op | None, int]:
        """Return the op of `graph` that stands for a tensor, and how many blocks after it the tensor lies.

        None if another op has fused the tensor's op.
        """
        run, copies = self.repeat, 0
        if run is not None:
            start, stop = self.full_graph.block_range(run.first + TEMPLATE_BLOCK)
            beyond = (node - start) // (stop - start)
            copies = min(max(beyond, 0), run.template_count - 1)
            node -= copies * (stop - start) if beyond <= copies else 0
        return self._by_index.get(node), copies

    @cached_property
    def _by_index(self) -> Mapping[int, Op]:
        return {op.index: op for op in self.graph.ops}

    def moved_slots(self, device: str, op: Op, copies: int) -> Callable[[Slot], Slot | None]:
        """Return the map from a device's slots of an op's block to those of its whole Program; None for others."""
        draft, block = self.compact_builder(device), bisect(self.graph.blocks, self.graph.position[op.name]) - 1
        ends = [*draft.first_slots, len(draft.slots)]
        by = 0
        if copies and self.repeat is not None:
            template = self.repeat.first + TEMPLATE_BLOCK
            by = copies * (ends[template + 1] - ends[template])
        own = range(ends[block], ends[block + 1])
        return lambda slot: slot + by if slot in own else None

    @property
    def repeated_layer(self) -> tuple[int, int] | None:
        """Return (layer, times): the layer of `graph` that stands for several, None if none does."""
        if self.repeat is None:
            return None
        op = self.full_graph.ops[self.full_graph.blocks[self.repeat.first + TEMPLATE_BLOCK]]
        return op.layer, self.repeat.template_count

    @cached_property
    def digest(self) -> bytes:
        """Return 8 bytes; two versions of this package with equal digests build the same Programs."""
        text = repr([(op.name, self.tiles[op.name]) for op in self.graph.ops]) + repr(self.nodes)
        return sha256(text.encode()).digest()[:8]
