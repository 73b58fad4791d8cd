"""The backward walk: from the answer to every computed tile and every message."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

from hepti_mqtt.lowering.graph import Graph
from hepti_mqtt.lowering.layouts import PLANNER_INDEX, Piece
from hepti_mqtt.lowering.ops import Op
from hepti_mqtt.lowering.regions import (
    IndexSet,
    Region,
    disjoint,
    format_region,
    intersect,
    intersect_sets,
    is_within,
    subtract,
    volume,
)

CACHE_SIZE: Final = 256  # entries of each cache; a search takes as long with 2048 (see `regions.CACHE_SIZE`)


class Message(NamedTuple):
    """A region of a tile that its device sends to other devices; `part` numbers the messages of one (node, source)."""

    region: Region
    to: tuple[int, ...]
    part: int


class Tile(NamedTuple):
    """A region that a device computes or relays by one op, and the messages that send it."""

    device: int
    region: Region
    relay: bool
    order: int
    messages: tuple[Message, ...]


Parts = tuple[tuple[int, Region], ...]  # (piece, region of it)
Requested = tuple[tuple[int, tuple[Region, ...]], ...]  # (device, disjoint regions)
Needs = tuple[tuple[int, int, Region], ...]  # (input, device, region)


class UncoveredError(ValueError):
    """No device holds a region that another device needs."""

    def __init__(self, device: int, missing: Sequence[Region], overlapping: bool) -> None:
        super().__init__(device, missing, overlapping)
        self.device, self.missing, self.overlapping = device, missing, overlapping


class _Layout:
    """Pieces, grouped by their first dimension: many devices cut both rows and columns."""

    def __init__(self, pieces: tuple[Piece, ...]) -> None:
        self.pieces = pieces
        self._groups: dict[IndexSet, list[int]] = defaultdict(list)
        for i, piece in enumerate(pieces):
            self._groups[piece.region[0]].append(i)

    def parts(self, need: Region) -> list[tuple[int, Region]]:
        """Return (piece, its overlap with a region), in the order of the pieces."""
        near = [group for first, group in self._groups.items() if intersect_sets(first, need[0])]
        overlaps = ((i, intersect(self.pieces[i].region, need)) for group in near for i in group)
        return sorted((i, part) for i, part in overlaps if part is not None)

    @cached_property
    def is_disjoint(self) -> bool:
        """Return whether no two pieces have an index in common."""
        return _are_disjoint([piece.region for piece in self.pieces])


def _are_disjoint(regions: Sequence[Region]) -> bool:
    """Return whether no two regions have an index in common."""
    for dim in range(len(regions[0])):  # most layouts cut dimensions into ranges
        groups: dict[IndexSet, list[Region]] = defaultdict(list)
        for region in regions:
            groups[region[dim]].append(region)
        if (
            len(groups) > 1
            and all(len(s) == 1 for s in groups)
            and all(a[0][1] <= b[0][0] for a, b in pairwise(sorted(groups)))
        ):
            return all(len(group) == 1 or _are_disjoint(group) for group in groups.values())
    return not any(intersect(a, b) for i, a in enumerate(regions) for b in regions[:i])


@lru_cache(maxsize=CACHE_SIZE)
def cover(op: Op, need: Region, pieces: tuple[Piece, ...], device: int) -> Parts:
    """Return (piece, part) that cover `need`, every index once; a partial sum is taken whole or not at all.

    Order of preference: pieces that leave the fewest summands, own pieces, later pieces (relays follow their sources).
    Raises UncoveredError.
    """
    layout = _Layout(pieces)
    parts = _partition(op, need, layout)
    return _choose_cover(op, need, layout, device) if parts is None else parts


def _choose_cover(op: Op, need: Region, layout: _Layout, device: int) -> Parts:
    n, pieces = op.rank, layout.pieces
    left, out = [need], []
    common = {i: volume(tuple(map(intersect_sets, part[n:], need[n:]))) for i, part in layout.parts(need)}
    order = sorted(common, key=lambda i: (-common[i], pieces[i].device != device, -i))
    refused = False
    for i in order:
        region = pieces[i].region
        rest: list[Region] = []
        for r in left:
            top = intersect(r[:n], region[:n])
            part = op.trim(top + region[n:]) if top else None
            if part and is_within(part, r):
                out.append((i, part))
                rest += subtract(r, part)
            else:
                refused |= part is not None and intersect(part, r) is not None
                rest.append(r)
        left = [t for r in rest if (t := op.trim(r))]
        if not left:
            return tuple(sorted(out))
    raise UncoveredError(device, left, refused)


def _partition(op: Op, need: Region, layout: _Layout) -> Parts | None:
    """Return (piece, part) if the pieces hold every index of `need` once; None if there is a choice.

    A short cut for `cover`: most layouts have no choice.
    """
    n, parts = op.rank, layout.parts(need)
    if any(part[n:] != layout.pieces[i].region[n:] or op.trim(part) != part for i, part in parts):
        return None
    if sum(volume(part) for _, part in parts) != volume(need) or not (len(parts) == 1 or layout.is_disjoint):
        return None
    return tuple(parts)


@lru_cache(maxsize=CACHE_SIZE)
def tiles_for(op: Op, requested: Requested, pieces: tuple[Piece, ...]) -> tuple[tuple[Tile, ...], Needs]:
    """Return the tiles that serve the requested regions, and the input regions that they need."""
    demand: list[dict[int, list[Region]]] = [defaultdict(list) for _ in pieces]
    layouts: dict[int, _Layout] = {}
    plain: dict[tuple[Region, int], Parts | None] = {}  # without a choice, all devices take the same parts

    def ask(device: int, region: Region, before: int) -> None:
        if before not in layouts:
            layouts[before] = _Layout(pieces[:before])
        key, layout = (region, before), layouts[before]
        if key not in plain:
            plain[key] = _partition(op, region, layout)
        for i, part in plain[key] or _choose_cover(op, region, layout, device):
            demand[i][device].append(part)

    for device, regions in requested:
        for region in regions:
            ask(device, region, len(pieces))
    computed: list[tuple[int, Region]] = []
    needs: list[tuple[int, int, Region]] = []
    for i in reversed(range(len(pieces))):  # a relay asks the pieces before it
        device = pieces[i].device
        for region in reversed(_tiles(op, pieces[i], demand[i])):
            computed.append((i, region))
            if pieces[i].relay:
                ask(device, region, i)
            elif device != PLANNER_INDEX:
                needs += [(n, device, r) for n, r in enumerate(op.input_regions(region)) if all(r)]
    computed.reverse()
    return _with_messages(computed, demand, pieces), tuple(needs)


def _tiles(op: Op, piece: Piece, demand: Mapping[int, list[Region]]) -> tuple[Region, ...]:
    """Return the regions of a piece to compute, or to relay, for all regions requested of it.

    Trimming keeps, of the reduced dimensions, the indices that contribute to any requested region.
    """
    n = op.rank
    requested = disjoint(r[:n] + piece.region[n:] for regions in demand.values() for r in regions)
    whole = tuple(t for r in requested if (t := op.trim(r)))
    return whole if piece.relay else computed_regions(op, whole)


def computed_regions(op: Op, requested: Iterable[Region]) -> tuple[Region, ...]:
    """Return the regions to compute for the requested ones, each by one kernel."""
    return tuple(part for region in disjoint(map(op.computed_region, requested)) for part in op.kernel_regions(region))


def _with_messages(
    computed: Sequence[tuple[int, Region]], demand: Sequence[Mapping[int, list[Region]]], pieces: Sequence[Piece]
) -> tuple[Tile, ...]:
    """Return the tiles with their messages: the same region for several devices is one message."""
    tiles = []
    numbers: dict[int, int] = defaultdict(int)
    for i, region in computed:
        device, _, relay, turn = pieces[i]
        to: dict[Region, list[int]] = {}
        for d in sorted(demand[i].keys() - {device}):
            for r in disjoint(demand[i][d]):
                if (part := intersect(r, region)) is not None:
                    to.setdefault(part, []).append(d)
        messages = []
        for part, group in _merged(to).items():
            messages.append(Message(part, tuple(sorted(set(group))), numbers[device]))
            numbers[device] += 1
        tiles.append(Tile(device, region, relay, turn, tuple(messages)))
    return tuple(tiles)


def _merged(to: Mapping[Region, list[int]]) -> dict[Region, list[int]]:
    """Join each message that lies within another one into that one, so that several devices share one publish.

    Messages to the planner are not joined.
    """
    out: dict[Region, list[int]] = {}
    for part, group in to.items():
        wider = next(
            (q for q in to if q != part and PLANNER_INDEX not in (*to[q], *group) and is_within(part, q)), part
        )
        out.setdefault(wider, []).extend(group)
    return out


Tiles = Mapping[str, tuple[Tile, ...]]


def plan_tiles(graph: Graph, pieces: Mapping[str, tuple[Piece, ...]], names: Sequence[str]) -> Tiles:
    """Return the tiles of every tensor, with the messages that bring the planner the answer.

    pieces: of the tensors that the table places. names: of the devices, for errors. Raises ValueError if a tensor's
    layout lacks a region that a device needs.
    """
    walk = _BackwardWalk(graph, pieces, names)
    for block in reversed(range(len(graph.blocks))):
        walk.block(block)
    return {op.name: walk.tiles[op.name] for op in reversed(graph.ops)}


class _Block(NamedTuple):
    """A block that the walk has passed."""

    ops: Sequence[Op]
    #: Regions of each op that devices of later blocks need, by device.
    demands: Sequence[Mapping[int, Sequence[Region]]]
    #: Needs of earlier blocks: (place of the reading op in the block, number of its input, device, region).
    needs: Sequence[tuple[int, int, int, Region]]


class _BackwardWalk:
    """The walk, block by block; a block equal to the next one, with equal demands, takes over its tiles."""

    def __init__(self, graph: Graph, pieces: Mapping[str, tuple[Piece, ...]], names: Sequence[str]) -> None:
        self.graph, self.pieces, self.names = graph, pieces, names
        self.tiles: dict[str, tuple[Tile, ...]] = {}
        self.demands: dict[str, dict[int, list[Region]]] = {op.name: {} for op in graph.ops}
        answer = graph.output
        self.demands[answer.name][PLANNER_INDEX] = [answer.full_region[: answer.rank]]
        self.following = _Block((), (), ())

    def block(self, number: int) -> None:
        """Derive the tiles of a block, and request their inputs."""
        start, stop = self.graph.block_range(number)
        ops, following = self.graph.ops[start:stop], self.following
        demands = [{d: tuple(regions) for d, regions in self.demands[op.name].items()} for op in ops]
        if demands == following.demands and self._alike(ops, following.ops):
            for x, y in zip(ops, following.ops, strict=True):
                self.tiles[x.name] = self.tiles[y.name]
            for at, i, device, region in following.needs:
                self.demands[ops[at].inputs[i]].setdefault(device, []).append(region)
            self.following = _Block(ops, demands, following.needs)
            return
        own, needs = {op.name for op in ops}, []
        for at in reversed(range(len(ops))):
            op = ops[at]
            for i, device, region in self.op(op):
                self.demands[op.inputs[i]].setdefault(device, []).append(region)
                if op.inputs[i] not in own:
                    needs.append((at, i, device, region))
        self.following = _Block(ops, demands, needs)

    def op(self, op: Op) -> Needs:
        """Derive an op's tiles; return the input regions that they need."""
        requested = _requested(op, self.demands[op.name])
        placed = self.pieces.get(op.name)
        try:
            tiles, needs = _where_requested(op, requested) if placed is None else tiles_for(op, requested, placed)
        except UncoveredError as error:
            raise ValueError(_uncovered(op, error, self.names)) from None
        self.tiles[op.name] = tiles
        if op.is_session_state:
            _check_session(op, tiles, self.names)
        return needs

    def _alike(self, ops: Sequence[Op], others: Sequence[Op]) -> bool:
        """Return whether two blocks have equal ops in equal layouts, with inputs at equal places."""
        place, (start, other) = self.graph.position, (self.graph.position[block[0].name] for block in (ops, others))
        return all(
            x == y
            and self.pieces.get(x.name) == self.pieces.get(y.name)
            and all(
                place[a] - start == place[b] - other or (place[a] < start and place[b] < other)
                for a, b in zip(x.inputs, y.inputs, strict=True)
            )
            for x, y in zip(ops, others, strict=True)
        )


def _requested(op: Op, demands: Mapping[int, Sequence[Region]]) -> Requested:
    """Return the regions of an op's space that each device needs; many devices need the same ones."""
    spaces: dict[tuple[Region, ...], tuple[Region, ...]] = {}
    requested = []
    for device in sorted(demands):
        regions = tuple(demands[device])
        if regions not in spaces:
            spaces[regions] = tuple([r for r in map(op.region_for, disjoint(filter(all, regions))) if r is not None])
        requested.append((device, spaces[regions]))
    return tuple(requested)


def _where_requested(op: Op, requested: Requested) -> tuple[tuple[Tile, ...], Needs]:
    """Return the tiles of a tensor without a place, and their needs: every device that reads it computes it."""
    computed: dict[tuple[Region, ...], list[tuple[Region, list[tuple[int, Region]]]]] = {}
    tiles: list[Tile] = []
    needs: list[tuple[int, int, Region]] = []
    for device, regions in requested:
        if regions not in computed:
            computed[regions] = [
                (r, [(n, q) for n, q in enumerate(op.input_regions(r)) if all(q)])
                for r in computed_regions(op, regions)
            ]
        for region, inputs in computed[regions]:
            tiles.append(Tile(device, region, False, 0, ()))
            if device != PLANNER_INDEX:
                needs += [(n, device, q) for n, q in inputs]
    return tuple(tiles), tuple(needs)


def _check_session(op: Op, tiles: Sequence[Tile], names: Sequence[str]) -> None:
    """Raise ValueError unless session state stays on its device, in one array per device."""
    held: dict[int, Region] = {}
    for device, region, relay, _, messages in tiles:
        if relay or messages:
            who = " and ".join(names[d] for m in messages for d in m.to if d != PLANNER_INDEX) or names[device]
            raise ValueError(
                f"{op.name}: {who} needs {format_region(region)} of the session state on {names[device]}, which is "
                "too much to send; compute its readers there"
            )
        if device in held:
            both_text = f"{format_region(held[device])} and {format_region(region)}"
            raise ValueError(f"{op.name}: {names[device]} would keep {both_text} of a session; give it one region")
        held[device] = region


def _uncovered(op: Op, error: UncoveredError, names: Sequence[str]) -> str:
    who = "the planner" if error.device == PLANNER_INDEX else names[error.device]
    missing = " and ".join(map(format_region, error.missing))
    if error.overlapping:
        return f"{op.name}: the partial results of {missing} that {who} needs overlap, so they cannot be added up"
    return f"{op.name}: no device holds {missing}, which {who} needs"
