"""A run that continues under another plan: from a border between two blocks on it runs the new plan's Program.

At the border, devices exchange what they lack of the tensors that cross it. Then each device runs the ops of the new
plan's own Program after the border. So a plan needs no further Programs, and a run can stop before any block.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from hepti_mqtt.core.program import DTYPE_BYTES, Compute, ExchangeKey, Program, Recv, Send, Slot, slots_written
from hepti_mqtt.core.program import Op as ProgramOp
from hepti_mqtt.lowering.graph import Graph
from hepti_mqtt.lowering.layouts import PLANNER_INDEX
from hepti_mqtt.lowering.lower import ForwardWalk, HeldRegion, Lowered
from hepti_mqtt.lowering.ops import Op
from hepti_mqtt.lowering.regions import Region, disjoint, format_region, index_count, intersect, subtract, volume
from hepti_mqtt.lowering.tiles import UncoveredError


class HandoverError(ValueError):
    """A run cannot continue under the new plan from this block."""


class Move(NamedTuple):
    """Cells of a tensor that `target` needs and `source` holds."""

    node: int
    source: str
    target: str
    cells: Region
    part: int  #: number among the source's moves of this tensor
    nbytes: int


class HandedOver(NamedTuple):
    """A device's ops from a border on."""

    program: Program
    taken: tuple[tuple[ExchangeKey, Slot], ...]  #: slots of the device's old Program that fill exchanges with itself


def crossing(graph: Graph, block: int) -> list[int]:
    """Return the tensors of earlier blocks that this or a later block reads; raises HandoverError for no border."""
    if not 0 < block < len(graph.blocks):
        raise HandoverError(f"block {block} is no border of a graph with {len(graph.blocks)} blocks")
    start = graph.blocks[block]
    places = (graph.position[name] for op in graph.ops[start:] for name in op.inputs)
    return sorted({place for place in places if place < start})


def moves(before: Lowered, after: Lowered, block: int) -> list[Move]:
    """Return the cells that devices send each other at a border, and the cells that they keep (source is target).

    Raises HandoverError if no device holds a needed cell, or if its holder does not send to the device that needs it.
    """
    if before.nodes != after.nodes:
        raise HandoverError("the plans have different graphs")
    out: list[Move] = []
    for node in crossing(after.full_graph, block):
        op, holdings = after.full_graph.ops[node], list(_holdings(before, node))
        numbers: dict[str, int] = defaultdict(int)
        for target in after.names:
            for region in disjoint(_needed(after, node, target)):
                for source, cells in _cover(op, region, sorted(holdings, key=lambda h: h[0] != target)):
                    if source != target and not _is_sender(before, after, target, source):
                        raise HandoverError(f"{op.name}: {target} does not receive from {source}")
                    nbytes = volume(cells) * DTYPE_BYTES[op.dtype]
                    out.append(Move(node, source, target, cells, numbers[source], nbytes))
                    numbers[source] += source != target
    return out


def _is_sender(before: Lowered, after: Lowered, target: str, source: str) -> bool:
    """Return whether `source` sends to `target` under the new plan or, if it has no part in it, under the old plan."""
    if source in after.names:
        return source in after.senders(target)
    return target in before.names and source in before.senders(target)


def _holdings(before: Lowered, node: int) -> Iterator[tuple[str, Region]]:
    """Yield (device, cells): computed whole results of a tensor."""
    op, _ = before.template_of(node)
    if op is None:
        return
    for tile in before.tiles[op.name]:
        whole = tile.region[op.rank :] == op.full_region[op.rank :] and not op.is_state(tile.region)
        if whole and not tile.relay and tile.device != PLANNER_INDEX:
            yield before.names[tile.device], tile.region[: op.rank]


def _needed(after: Lowered, node: int, device: str) -> Iterator[Region]:
    """Yield a device's cells of a tensor, in slots that later blocks read."""
    op, _ = after.template_of(node)
    if op is None:
        return
    number, read = after.names.index(device), list(_read_after(after, op, after.names.index(device)))
    for tile in after.tiles[op.name]:
        regions = [m.region for m in tile.messages if number in m.to] if tile.device != number else [tile.region]
        for cells in (region[: op.rank] for region in regions):
            if any(intersect(cells, region) for region in read):
                yield cells


def _read_after(after: Lowered, op: Op, number: int) -> Iterator[Region]:
    """Yield the cells of a tensor that a device's ops of later blocks read."""
    graph = after.graph
    block = bisect(graph.blocks, graph.position[op.name])
    for reader in graph.ops[graph.blocks[block] :] if block < len(graph.blocks) else ():
        if op.name in reader.inputs:
            regions = [t.region for t in after.tiles[reader.name] if t.device == number and not t.relay]
            for name, each in (
                (n, r) for r in regions for n, r in zip(reader.inputs, reader.input_regions(r), strict=True)
            ):
                if name == op.name and all(each):
                    yield each


def _cover(op: Op, need: Region, holdings: list[tuple[str, Region]]) -> Iterator[tuple[str, Region]]:
    """Yield (source, cells) that cover a region; the first holder of a cell sends it."""
    left = [need]
    for source, cells in holdings:
        rest: list[Region] = []
        for region in left:
            if (part := intersect(region, cells)) is not None:
                yield source, part
                rest += subtract(region, part)
            else:
                rest.append(region)
        left = rest
    if left:
        raise HandoverError(f"{op.name}: no device holds {format_region(left[0])} of it under the old plan")


def hand_over(before: Lowered, after: Lowered, block: int, device: str) -> HandedOver:
    """Return a device's ops from a border on; a device without a part in the new plan only sends.

    Raises HandoverError if the handover is impossible.
    """
    moved = moves(before, after, block)
    stays, graph = device in after.names, after.full_graph
    whole, start = after.full_program(device) if stays else Program(device, (), (), graph.names), graph.blocks[block]
    later = [op for op in whole.ops if op.node >= start]
    walk = _Handover(after, whole, device)
    taken = walk.take_own(before, start, sorted({m.node for m in moved if m.source == device}))
    for move in moved:
        if move.source == device != move.target:
            walk.send_part(move)
    for move in moved:
        if move.target == device != move.source:
            walk.receive_cells(walk.at(move.node), move.cells, move.source, move.part)
    for slot in _missing(whole, later):
        walk.fill(slot, crossing(after.full_graph, block))
    ops = (*(op for _, _, op in walk.out.ops), *later)
    return HandedOver(Program(device, tuple(walk.out.slots), ops, graph.names, graph.blocks), taken)


def _missing(program: Program, ops: list[ProgramOp]) -> list[Slot]:
    """Return the slots with memory that ops read and no op fills."""
    filled = {slot for op in ops for slot in slots_written(op)}
    return list(dict.fromkeys(slot for op in ops for slot in program.reads(op) if slot not in filled))


class _Handover(ForwardWalk):
    """A device's ops at the border, in slots after those of its whole Program."""

    def __init__(self, after: Lowered, whole: Program, device: str) -> None:
        number = after.names.index(device) if device in after.names else len(after.names)
        super().__init__(after.graph, after.tiles, number, after.names)
        self.after, self.name = after, device
        self.out.slots = list(whole.slots)
        self.turns = [0] * len(whole.slots)
        self.places: dict[Slot, tuple[int, Region]] | None = None

    def at(self, node: int) -> Op:
        """Return the op that produces a tensor in the shortened graph, and make it the walk's current op."""
        op, _ = self.after.template_of(node)
        if op is None:
            raise HandoverError(f"{self.after.nodes[node]} lies within another op")
        self.op = op.relabelled(index=node, layer=self.after.full_graph.ops[node].layer)
        return self.op

    def take_own(self, before: Lowered, start: int, nodes: list[int]) -> tuple[tuple[ExchangeKey, Slot], ...]:
        """Receive from the device itself what its old Program has computed; return the exchanges and their slots.

        start: the first tensor after the border. Slots without a reader after it may be freed by then.
        """
        taken: list[tuple[ExchangeKey, Slot]] = []
        program = before.full_program(self.name) if nodes else None
        read = {slot for op in program.ops if op.node >= start for slot in program.reads(op)} if program else set()
        for node in nodes:
            target, (op, copies) = self.at(node), before.template_of(node)
            assert op is not None
            slot_in = before.moved_slots(self.name, op, copies)
            for part, (slot, region) in enumerate(_computed(before, op, self.name)):
                source = slot_in(slot)
                if source is None or program is None or program.base(source) not in read:
                    raise HandoverError(f"{op.name} is not kept on {self.name} until the border")
                own = self.receive_cells(target, region[: op.rank], self.name, part)
                taken.append((own.key, source))
        return tuple(taken)

    def receive_cells(self, op: Op, cells: Region, source: str, part: int) -> Recv:
        """Receive cells of a tensor."""
        slot = self.slot(tuple(map(index_count, cells)), op.dtype)
        recv = Recv(slot, source, op.index, part, op.layer, exact=True)
        self.emit(recv, 0)
        self.held[op.name].append(HeldRegion(slot, cells + op.full_region[op.rank :], state=False))
        return recv

    def send_part(self, move: Move) -> None:
        """Send a move's cells to another device."""
        op = self.at(move.node)
        slot = self.gather(op, move.cells + op.full_region[op.rank :]).slot
        self.emit(Send(slot, (move.target,), move.node, move.part, op.layer, 0, exact=True), 0)

    def fill(self, slot: Slot, nodes: list[int]) -> None:
        """Assemble the cells of a slot of the whole Program at the border."""
        if self.places is None:
            self.places = dict(self._placed(nodes))
        if slot not in self.places:
            raise HandoverError(f"slot {slot} of {self.name} holds more than the tensors that cross the border")
        node, region = self.places[slot]
        op = self.at(node)
        shape = self.out.slots[slot].shape
        try:
            whole = self.gather(op, region[: op.rank] + op.full_region[op.rank :])
        except UncoveredError as error:  # the whole Program receives it before the border
            missing = format_region(error.missing[0])
            raise HandoverError(f"{op.name}: {self.name} only relays {missing} of it") from error
        if self.out.slots[whole.slot].shape != shape:
            raise HandoverError(f"{op.name} lies in another shape")
        ranges = tuple((0, n) for n in shape)
        copies = {"copies": ((0, ranges, ranges),)}
        self.emit(Compute("assemble", (whole.slot,), (slot,), (), copies, op.layer, op.index), 0)

    def _placed(self, nodes: list[int]) -> Iterator[tuple[Slot, tuple[int, Region]]]:
        """Yield the slots of the whole Program that hold cells of the tensors: computed, received or assembled."""
        draft = self.after.compact_builder(self.name)
        for node in nodes:
            op, copies = self.after.template_of(node)
            if op is None:
                continue
            slot_in = self.after.moved_slots(self.name, op, copies)
            held = [(h.slot, h.region) for h in draft.held[op.name] if not h.state]
            held += [(o.slot, region) for (name, region), o in draft.gathered.items() if name == op.name]
            for slot, region in held:
                is_whole = region[op.rank :] == op.full_region[op.rank :]
                if is_whole and (place := slot_in(slot)) is not None:
                    yield place, (node, region)


def _computed(before: Lowered, op: Op, device: str) -> Iterator[tuple[Slot, Region]]:
    """Yield (slot, region) of a tensor that a device computes, in the order of the walk."""
    number = before.names.index(device)
    held = iter(before.compact_builder(device).held[op.name])
    for tile in before.tiles[op.name]:
        if tile.device != number:
            for _ in (m for m in tile.messages if number in m.to):
                next(held)
            continue
        entry = next(held)
        if not tile.relay and not entry.state and tile.region[op.rank :] == op.full_region[op.rank :]:
            yield entry.slot, entry.region
