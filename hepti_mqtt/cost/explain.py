"""Explains a plan: the work that it repeats, its Programs and time lines as text, its layouts as a picture.

Every device computes an unplaced tensor that it needs. The answer is right either way, so only the work factor shows a
missing rule in a method's table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import product
from math import prod
from typing import Any, Final, NamedTuple

from hepti_mqtt.core.plan import Plan, WireDtype
from hepti_mqtt.core.program import DTYPE_BYTES, Compute, Program, Send, SlotSpec, WeightRef
from hepti_mqtt.core.program import Op as ProgramOp
from hepti_mqtt.core.spec import RequestShape, Spec
from hepti_mqtt.cost.simulator import TimelineEvent
from hepti_mqtt.lowering import roles
from hepti_mqtt.lowering.attention import ReorderedAttention
from hepti_mqtt.lowering.graph import TEMPLATE_BLOCK
from hepti_mqtt.lowering.layouts import PLANNER_INDEX
from hepti_mqtt.lowering.lower import Lowered
from hepti_mqtt.lowering.ops import Input, Op
from hepti_mqtt.lowering.regions import IndexSet, Region, disjoint, span, volume
from hepti_mqtt.lowering.tiles import Tile
from hepti_mqtt.strategies.plan_programs import lower_plan

REPORTED_FROM: Final = 1.005  # a smaller factor would be printed as 1.00
MAPS: Final = frozenset((roles.MAP, roles.MAP_SUM))


class MapBytes(NamedTuple):
    """Costs of dividing feature maps: payload in f32, with a copy for every receiver, and repeated FLOPs."""

    halo: int  #: rows and columns next to own ones
    gathered: int  #: to devices that thereby have the whole map
    flops_again: float  #: beyond one device's


@dataclass(frozen=True, slots=True)
class WorkFactor:
    """Computed work divided by needed work."""

    total: float  #: FLOPs of all devices over those of one device alone
    #: Computed over distinct elements by role, where more than 1; copies and sums of partial results do not count.
    roles: Mapping[str, float]
    maps: MapBytes | None = None  #: None for a model without feature maps
    idle: tuple[str, ...] = ()  #: devices that compute nothing, e.g. because there are fewer rows than devices
    reordered: bool = False  #: attention reads its input directly, without keys and values

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        data: dict[str, Any] = {
            "factor": round(self.total, 4),
            "roles": {role: round(f, 4) for role, f in self.roles.items()},
        }
        if self.maps is not None:
            data["maps"] = self.maps._asdict()
        if self.idle:
            data["idle"] = list(self.idle)
        if self.reordered:
            data["reordered"] = True
        return data

    def text(self) -> str:
        """Return the factor and the repeated work as a sentence."""
        again = ", ".join(f"{role} {factor:.2f}" for role, factor in self.roles.items())
        parts = [f"work {self.total:.2f} of one device's", f"computed more than once: {again}" if again else ""]
        if self.maps is not None:
            halo, gathered, flops = self.maps
            parts.append(
                f"halo {halo / 1e3:.1f} kB, whole maps {gathered / 1e3:.1f} kB, computed again {flops / 1e6:.2f} MFLOP"
            )
        if self.reordered:
            parts.append("reordered products: attention reads its input directly, without keys and values")
        if self.idle:
            parts.append(f"nothing to do for {', '.join(self.idle)}")
        return "; ".join(filter(None, parts))


def plan_work_factor(spec: Spec, plan: Plan, shape: RequestShape) -> WorkFactor:
    """Return the work factor of a request under a plan; raises as `lower_plan` does."""
    alone = Plan(plan.model, plan.version, "single", (plan.root,), plan.root)
    return work_factor(lower_plan(spec, plan, shape), lower_plan(spec, alone, shape))


def work_factor(lowered: Lowered, alone: Lowered) -> WorkFactor:
    """Return the work factor of a lowered request; alone: the same request on one device."""
    computed: dict[str, int] = defaultdict(int)
    needed: dict[str, int] = defaultdict(int)
    halo = gathered = 0
    for block in range(len(lowered.graph.blocks)):
        times = _times(lowered, block)
        for op in lowered.graph.ops[slice(*lowered.graph.block_range(block))]:
            done, distinct = computed_and_distinct(op, lowered.tiles[op.name])
            computed[op.role] += done * times
            needed[op.role] += distinct * times
            if op.role in MAPS:
                part, whole = _exchanged(op, lowered.tiles[op.name])
                halo, gathered = halo + part * times, gathered + whole * times
    factors = {role: done / needed[role] for role, done in computed.items() if done}
    one = flops(alone)
    total = flops(lowered) / one if one else 1.0
    maps = MapBytes(halo, gathered, round((total - 1) * one)) if MAPS & lowered.graph.roles else None
    again = {role: f for role, f in factors.items() if f >= REPORTED_FROM}
    builders = {device: lowered.compact_builder(device) for device in lowered.names}
    idle = tuple(d for d, builder in builders.items() if not any(isinstance(op, Compute) for _, _, op in builder.ops))
    other = any(isinstance(op, ReorderedAttention) for op in lowered.graph.ops)
    return WorkFactor(total, again, maps, idle, other)


def _exchanged(op: Op, tiles: Sequence[Tile]) -> tuple[int, int]:
    """Return (bytes to devices that have a part of an op thereafter, bytes to devices that have all of it)."""
    own: dict[int, int] = defaultdict(int)
    got: dict[int, int] = defaultdict(int)
    for t in tiles:
        own[t.device] += volume(t.region[: op.rank])
        for message in t.messages:
            for d in message.to:
                got[d] += volume(message.region[: op.rank])
    size = DTYPE_BYTES["f32"]
    whole = sum(n for d, n in got.items() if own[d] + n >= volume(op.full_region[: op.rank])) * size
    return sum(got.values()) * size - whole, whole


def computed_and_distinct(op: Op, tiles: Sequence[Tile]) -> tuple[int, int]:
    """Return (elements of an op that devices compute, distinct ones among them), over its whole iteration space."""
    if op.is_view:
        return 0, 0
    regions = [t.region for t in tiles if not t.relay and t.device != PLANNER_INDEX]
    return sum(map(volume, regions)), sum(map(volume, disjoint(regions)))


def flops(lowered: Lowered) -> float:
    """Return the FLOPs of all devices, equal blocks counted from one of them."""
    from hepti_mqtt.kernels import KERNELS  # Numba takes long to import

    total = 0.0
    for device in lowered.names:
        draft = lowered.compact_builder(device)
        for _, block, op in draft.ops:
            if isinstance(op, Compute):
                total += KERNELS[op.kernel].work(op, draft.slots).flops * _times(lowered, block)
    return total


def _times(lowered: Lowered, block: int) -> int:
    """Return how many blocks a block of `lowered.graph` stands for."""
    run = lowered.repeat
    return run.template_count if run is not None and block == run.first + TEMPLATE_BLOCK else 1


# ----------------------------------------------------------------------------------------------------------------------
# Programs and their time lines for people.


LANES: Final = ("task", "compute", "send", "up", "down")
_COLOURS: Final[Mapping[str, str]] = {
    "task": "#cfd8e3",
    "compute": "#3b7dd8",
    "send": "#8a63d2",
    "up": "#e08a2e",
    "down": "#3fa36b",
}


def format_program(program: Program, layer: int | None = None) -> list[str]:
    """Return one line per op, of one layer if `layer` is given: a Program's inner layers are alike."""
    return [
        f"{place:5d}  {_line(program, op)}"
        for place, op in enumerate(program.ops)
        if layer is None or op.layer == layer
    ]


def _line(program: Program, op: ProgramOp) -> str:
    node = program.node(op.node)
    if isinstance(op, Compute):
        reads = ", ".join(_slot(program, s) for s in op.reads)
        writes = ", ".join(_slot(program, s) for s in op.writes)
        weights = " ".join(_weight(w) for w in op.weights if w.layout == "packed")
        return f"{op.label:<18} {reads} -> {writes}   ({node})" + (f"   with {weights}" if weights else "")
    if isinstance(op, Send):
        return f"{'send':<18} {_slot(program, op.slot)} -> {', '.join(op.to)}   ({node}, part {op.part})"
    source = " or ".join([op.source, *op.alternates])
    return f"{'receive':<18} {_slot(program, op.slot)} <- {source}   ({node}, part {op.part})"


def _slot(program: Program, slot: int) -> str:
    spec: SlotSpec = program.slots[slot]
    size = "x".join(map(str, spec.shape))
    return f"s{slot}[{size}]" if spec.base is None else f"s{spec.base}[{size} from row {spec.start}]"


def _weight(ref: WeightRef) -> str:
    name = ref.tensor.removesuffix(".weight").split(".", 2)[-1]
    return f"{name}[{ref.rows[0]}:{ref.rows[1]}, {ref.columns[0]}:{ref.columns[1]}]"


def task_summary(events: Sequence[TimelineEvent], device: str) -> str:
    """Return the leased tasks that a device computed or abandoned; empty without leases."""
    tasks = sorted((e for e in events if (e.device, e.lane) == (device, "task")), key=lambda e: e.stop)
    return ", ".join(e.label for e in tasks)


def task_owners(events: Sequence[TimelineEvent], places: Sequence[str], root: str) -> tuple[str, ...]:
    """Return the places of leased tasks and of the root, by number, each with its first device."""
    done = sorted((e for e in events if e.lane == "task"), key=lambda e: e.stop, reverse=True)
    by = {e.label: e.device for e in done}
    return tuple(f"{place.rpartition(' ')[2]}: {by.get(place, root)}" for place in places)


def timeline_text(events: Sequence[TimelineEvent], devices: Sequence[str], seconds: float) -> list[str]:
    """Return one line per device and lane, with the load of each moment from ' ' (idle) to '#' (always busy)."""
    marks, width = " .:+#", 72
    lines = []
    for (device, lane), busy in timeline_busy(events, devices, seconds, width).items():
        bar = "".join(marks[min(int(b * len(marks)), len(marks) - 1)] for b in busy)
        lines.append(f"{device:>12} {lane:<8}|{bar}|")
    lines.append(f"{'':>12} {'ms':<8}|0{f'{seconds * 1e3:.1f}':>{width - 1}}|")
    return lines


def timeline_busy(
    events: Sequence[TimelineEvent], devices: Sequence[str], seconds: float, width: int
) -> dict[tuple[str, str], list[float]]:
    """Return the load of each of `width` moments, 0 to 1, by device and lane (compute, up, down); no idle lanes."""
    loads = {(device, lane): [0.0] * width for device in devices for lane in ("compute", "up", "down")}
    for e in events:
        start, stop = e.start / seconds * width, e.stop / seconds * width
        busy = loads.get((e.device, e.lane), [])
        for cell in range(max(int(start), 0), min(int(stop) + 1, len(busy))):
            busy[cell] += max(min(stop, cell + 1) - max(start, cell), 0.0)
    return {key: busy for key, busy in loads.items() if any(busy)}


def timeline_svg(events: Sequence[TimelineEvent], devices: Sequence[str], seconds: float, title: str) -> str:
    """Return the time line as an SVG picture: a row per device and lane, a bar per event with its label as tooltip."""
    left, width, row, gap = 130, 900, 14, 8
    lanes = [(d, lane) for d in devices for lane in LANES if any(e.device == d and e.lane == lane for e in events)]
    height = 50 + len(lanes) * row + len(devices) * gap
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 20}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="100%" height="100%" fill="white"/><text x="10" y="16" font-size="13">{escape(title)}</text>',
    ]
    y, last = 28, ""
    for device, lane in lanes:
        if device != last:
            y += gap if last else 0
            last = device
            out.append(f'<text x="6" y="{y + 10}" font-weight="bold">{escape(device)}</text>')
        out.append(f'<text x="{left - 6}" y="{y + 10}" text-anchor="end" fill="#555">{lane}</text>')
        out.append(f'<rect x="{left}" y="{y}" width="{width}" height="{row - 2}" fill="#f2f2f2"/>')
        for e in events:
            if (e.device, e.lane) == (device, lane):
                x, w = left + e.start / seconds * width, max((e.stop - e.start) / seconds * width, 0.3)
                out.append(
                    f'<rect x="{x:.2f}" y="{y}" width="{w:.2f}" height="{row - 2}" fill="{_COLOURS[lane]}">'
                    f"<title>{escape(e.label)} {e.start * 1e3:.3f}..{e.stop * 1e3:.3f} ms</title></rect>"
                )
                if lane == "task":
                    out.append(f'<text x="{x + 2:.2f}" y="{y + 10}" font-size="10">{e.label.split()[1]}</text>')
        y += row
    out.append(f'<text x="{left}" y="{y + 14}">0 ms</text>')
    out.append(f'<text x="{left + width}" y="{y + 14}" text-anchor="end">{seconds * 1e3:.1f} ms</text></svg>')
    return "\n".join(out)


# ----------------------------------------------------------------------------------------------------------------------
# The layouts of a plan as a picture: regions of each tensor of a layer by device, and messages.
#
# A line per tensor, a lane per device. A lane shows computed regions in the device's own colour, and received regions
# pale and dashed in the sender's colour. A partial result is a sheet of its own, one per part of the reduced
# dimensions. Summands are stacked sheets, with the complete result in front.


# Neighbours differ in lightness, so that they differ in grey too.
COLOURS: Final = ("#1f4e8c", "#f0a030", "#2f8f6b", "#611030", "#9ccdf0", "#8f8f1f", "#5b3a8e", "#d9777f")
_INK, _DIM, _LINE, _WARN = "#1c1c1c", "#5a5a5a", "#b8b8b8", "#b3261e"
_LEFT, _SENT, _GAP, _HEAD, _LINE_HEIGHT = 176, 280, 22, 84, 14
_ROWS, _ROW, _MAP = 64, 12, 96  # pixels: of the most rows, of one row at most, of a map's side
_STEP, _STEPS = 10, 4  # pixels between two sheets; the most offsets of a stack
_LANES, _LANE_MIN = 640, 84  # pixels of all lanes together; of one at least
_THIN, _HAIR = 5, 2.5  # the least pixels of a tensor's side, and of a part of it
_SENT_CHARS, _CHAR = 41, 5.4  # characters of a message line; pixels of a small character

_NOTE: Final = (
    "[rows × columns | what a result is summed over]. Rows and columns are drawn to scale, each to its own. "
    "Sheets on a stack are added; the complete result, if a device has it, is in front."
)
_REDUCED: Final[Mapping[str, str]] = {
    "linear": "inner",
    "attention": "keys",
    "moments": "columns",
    "candidates": "words",
    "embedding": "words",
}


class _Scale(NamedTuple):
    """Pixels per index of the first two dimensions."""

    row: float
    column: float

    def size(self, op: Op) -> tuple[float, float]:
        """Return the width and height of a tensor."""
        rows, columns = _sides(op)
        return max(columns * self.column, _THIN), max(rows * self.row, _THIN)


class _Patch(NamedTuple):
    """A region in a device's lane."""

    region: Region
    owner: int  #: the device that gives it its colour
    received: bool
    partial: bool


@dataclass(slots=True)
class _Lane:
    """One device's part of one tensor: a sheet for each part of the dimensions that are not drawn."""

    sheets: dict[Region, list[_Patch]] = field(default_factory=dict)
    relayed: bool = False

    def put(self, op: Op, region: Region, owner: int, received: bool) -> None:
        """Add a region; complete regions share one sheet, even if rows are summed over different keys."""
        partial = _partial(op, region)
        key = region[2:] if partial else region[2 : op.rank] + op.full_region[max(op.rank, 2) :]
        self.sheets.setdefault(key, []).append(_Patch(region, owner, received, partial))

    def ordered(self, full: Region) -> list[Region]:
        """Return the sheets from back to front: received parts, own parts, the complete result."""
        own = {key for key, patches in self.sheets.items() if any(not p.received for p in patches)}
        return sorted(self.sheets, key=lambda key: (key == full[2:], key in own))


def layout_svg(
    lowered: Lowered, layers: Sequence[int], title: str, wire: WireDtype = "f32", names: Sequence[str] = ()
) -> str:
    """Return the layouts of some layers of `lowered` as an SVG picture; `wire` determines the sizes of messages.

    names: of the lanes, by default those of `lowered`. For equal layers the picture shows their template.
    Raises ValueError if there is no such layer.
    """
    ops = drawn(lowered, layers)
    if not ops:
        raise ValueError(
            f"there is no layer {', '.join(map(str, layers))}: the model has {lowered.full_graph.layer_count()}"
        )
    names = [_short(name) for name in names or lowered.names]
    lane = max(_LANES / len(names) - _GAP, _LANE_MIN)
    lanes = {op.name: [_lane(op, lowered.tiles[op.name], d) for d in range(len(names))] for op in ops}
    rises = {name: max(_rise(len(lane_of.sheets)) for lane_of in of_devices) for name, of_devices in lanes.items()}
    scales = _scales(ops, {name: lane - rise for name, rise in rises.items()})
    canvas = _Canvas(names, lane)
    y = float(_HEAD)
    for op in ops:
        y = canvas.tensor(op, lowered.tiles[op.name], lanes[op.name], scales[op.rank > 2], y, wire)
    if lowered.repeated_layer is not None and (first := lowered.repeated_layer[0]) in {op.layer for op in ops}:
        title += f" (layers {first} to {first + lowered.repeated_layer[1] - 1} are alike)"
    return canvas.svg(title, y)


def drawn(lowered: Lowered, layers: Sequence[int]) -> list[Op]:
    """Return the tensors of some layers in graph order; for equal layers, those of their template."""
    layers_drawn = {op.layer for op in lowered.graph.ops}
    stand_in = lowered.repeated_layer[0] if lowered.repeated_layer else -1
    count = lowered.full_graph.layer_count()
    chosen = {layer if layer in layers_drawn else stand_in for layer in layers if layer < count}
    return [op for op in lowered.graph.ops if op.layer in chosen and not isinstance(op, Input)]


def _lane(op: Op, tiles: Sequence[Tile], device: int) -> _Lane:
    """Return a device's computed, assembled and received regions of a tensor; relayed regions count as received."""
    lane = _Lane()
    received = [(t, m.region) for t in tiles if t.device != PLANNER_INDEX for m in t.messages if device in m.to]
    passed = {region for _, region in received}
    for tile in tiles:
        if tile.device == device and not (tile.relay and tile.region in passed):
            lane.put(op, tile.region, device, received=False)
            lane.relayed |= tile.relay
    for tile, region in received:
        lane.put(op, region, tile.device, received=True)
    return lane


def _partial(op: Op, region: Region) -> bool:
    """Return whether a region lacks a part of the reduced dimensions."""
    whole = op.trim(region[: op.rank] + op.full_region[op.rank :])
    return whole is not None and whole[op.rank :] != region[op.rank :]


def _sides(op: Op) -> tuple[int, int]:
    """Return the extent of the two dimensions that are drawn."""
    return op.space[0], op.space[1] if op.rank > 1 else 1


def _rise(sheets: int) -> float:
    """Return the offset of the hindmost sheet of a stack."""
    return _STEP * min(max(sheets - 1, 0), _STEPS)


def _scales(ops: Sequence[Op], widths: Mapping[str, float]) -> tuple[_Scale, _Scale]:
    """Return the scale of matrices, for rows and columns each, and that of maps, equal in both directions."""
    scales = []
    for of_maps, height in ((False, _ROWS), (True, _MAP)):
        sides = [(*_sides(op), widths[op.name]) for op in ops if (op.rank > 2) == of_maps] or [(1, 1, 1.0)]
        row, column = (min(height / r for r, _, _ in sides), min(w / c for _, c, w in sides))
        both = min(row, column)
        scales.append(_Scale(both, both) if of_maps else _Scale(min(row, _ROW), column))
    return scales[0], scales[1]


# -- drawing ----------------------------------------------------------------------------------------------------------


class _Canvas:
    """A picture under construction: shapes and text, from top to bottom."""

    def __init__(self, names: Sequence[str], lane: float) -> None:
        self.names, self.lane = names, lane
        self.out: list[str] = []
        self.width = _LEFT + len(names) * (lane + _GAP) + _SENT

    def x(self, device: int) -> float:
        return _LEFT + device * (self.lane + _GAP)

    def text(self, x: float, y: float, text: str, kind: str = "", chars: int = 999) -> None:
        """Write a line; cut it after `chars` characters, with the full text as a tooltip."""
        cut = text if len(text) <= chars else f"{text[: chars - 1]}…"
        tip = "" if cut == text else f"<title>{escape(text)}</title>"
        as_class = kind and f' class="{kind}"'
        self.out.append(f'<text x="{x:g}" y="{y:g}"{as_class}>{escape(cut)}{tip}</text>')

    def rect(self, box: tuple[float, float, float, float], attrs: str) -> None:
        x, y, w, h = (f"{v:.1f}".removesuffix(".0") for v in box)
        self.out.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" {attrs}/>')

    def tensor(
        self, op: Op, tiles: Sequence[Tile], lanes: Sequence[_Lane], scale: _Scale, y: float, wire: WireDtype
    ) -> float:
        """Draw a tensor with its top at y; return the top of the next."""
        self.out.append(f'<path d="M8 {y:g}H{self.width - 8:g}" stroke="#e4e4e4"/>')
        words = self.label(op, tiles, y)
        width, height = scale.size(op)
        top, lines = y + 12 + max(_rise(len(lane.sheets)) for lane in lanes), 0
        for device, lane in enumerate(lanes):
            self.stack(op, lane, (self.x(device), top, width, height), scale)
            if caption := _caption(op, lane):
                lines = 1
                self.text(self.x(device), top + height + 12, caption, "c", int(self.lane / _CHAR))
        sent = sent_lines(op, tiles, self.names, wire)
        for n, line in enumerate(sent):
            self.text(self.width - _SENT, y + 20 + _LINE_HEIGHT * n, line, "s", _SENT_CHARS)
        return max(top + height + 12 * lines, y + 6 + _LINE_HEIGHT * max(words, len(sent))) + 12

    def label(self, op: Op, tiles: Sequence[Tile], y: float) -> int:
        """Write the description of a tensor; return its number of lines."""
        computed, distinct = computed_and_distinct(op, tiles)
        words = [(op.name, "n"), *([(op.role, "")] if op.role and op.role != op.name.rpartition(".")[2] else [])]
        words += [(_kind(op), "c"), (_space(op), "c")]
        if computed >= REPORTED_FROM * distinct > 0:
            words.append((f"computed {computed / distinct:.2f} times", "w"))
        for n, (text, kind) in enumerate(words):
            self.text(12, y + 20 + _LINE_HEIGHT * n, text, kind)
        return len(words)

    def stack(self, op: Op, lane: _Lane, box: tuple[float, float, float, float], scale: _Scale) -> None:
        """Draw a device's part of a tensor, with summands stacked under the complete result."""
        x, y, width, height = box
        keys = lane.ordered(op.full_region) or [()]
        for n, key in enumerate(keys):
            by = _rise(len(keys)) * (len(keys) - 1 - n) / max(len(keys) - 1, 1)
            self.rect((x + by, y - by, width, height), 'class="e"')
            for patch in lane.sheets.get(key, ()):
                for part in _rectangles(op, patch.region, scale):
                    self.patch(patch, (x + by + part[0], y - by + part[1], part[2], part[3]))

    def patch(self, patch: _Patch, box: tuple[float, float, float, float]) -> None:
        """Draw one rectangle."""
        colour = COLOURS[patch.owner % len(COLOURS)]
        x, y, w, h = box
        w, h = max(w, _HAIR), max(h, _HAIR)  # even one row of many stays visible
        if patch.received:
            inner = (x + 0.7, y + 0.7, max(w - 1.4, 0.6), max(h - 1.4, 0.6))
            self.rect(inner, f'class="r" fill="{colour}" stroke="{colour}"')
        else:
            frame = 'class="o" ' if min(w, h) > _HAIR else ""
            self.rect((x, y, w, h), f'{frame}fill="{colour}"')
        if patch.partial:
            self.rect((x, y, w, h), 'fill="url(#h)"')

    def svg(self, title: str, bottom: float) -> str:
        """Return the picture with its title, legend and frame."""
        body, self.out = self.out, []
        self.text(12, 22, title, "t")
        self.legend(46)
        for device, name in enumerate(self.names):
            self.text(self.x(device), _HEAD - 8, name, "n")
        self.text(12, _HEAD - 8, "tensor", "n")
        self.text(self.width - _SENT, _HEAD - 8, "sent", "n")
        self.out.append(f'<path d="M8 {bottom:g}H{self.width - 8:g}" stroke="#e4e4e4"/>')
        self.text(12, bottom + 16, _NOTE, "c")
        bottom += 26
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {bottom:g}" '
            f'width="{self.width:g}" height="{bottom:g}" font-family="Helvetica,Arial,sans-serif" font-size="12" '
            f'fill="{_INK}">\n<style>.t{{font-size:15px;font-weight:bold}}.n{{font-weight:bold}}'
            f".c{{font-size:10.5px;fill:{_DIM}}}.s{{font-size:11px}}.w{{font-size:11px;fill:{_WARN};font-weight:bold}}"
            f".e{{fill:#fff;stroke:{_LINE}}}.o{{stroke:#fff;stroke-width:.6}}"
            ".r{fill-opacity:.22;stroke-width:1.3;stroke-dasharray:3 2}</style>\n"
            '<defs><pattern id="h" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            '<rect width="2.4" height="6" fill="#fff" fill-opacity=".6"/></pattern></defs>\n'
            '<rect width="100%" height="100%" fill="#fff"/>'
        )
        return "\n".join([head, *self.out, *body, "</svg>\n"])

    def legend(self, y: float) -> None:
        """Draw the meaning of colours and strokes."""
        x = 12.0
        for device, name in enumerate(self.names):
            self.rect((x, y - 10, 14, 11), f'class="o" fill="{COLOURS[device % len(COLOURS)]}"')
            self.text(x + 18, y, name, "s")
            x += 34 + 7 * len(name)
        grey = "#6b6b6b"
        for text, shapes in (
            ("computed", (f'class="o" fill="{grey}"',)),
            ("partial sum", (f'class="o" fill="{grey}"', 'fill="url(#h)"')),
            ("received from the device of that colour", (f'class="r" fill="{grey}" stroke="{grey}"',)),
        ):
            for shape in shapes:
                self.rect((x, y - 10, 14, 11), shape)
            self.text(x + 18, y, text, "s")
            x += 42 + 5.9 * len(text)


def _rectangles(op: Op, region: Region, scale: _Scale) -> Iterable[tuple[float, float, float, float]]:
    """Yield x, y, width and height of a region's ranges of rows and columns."""
    rows, columns = region[0], region[1] if op.rank > 1 else span(0, 1)
    width, height = scale.size(op)
    down, right = height / _sides(op)[0], width / _sides(op)[1]
    for (a, z), (c, e) in product(rows, columns):
        yield c * right, a * down, (e - c) * right, (z - a) * down


# -- words ------------------------------------------------------------------------------------------------------------


def _short(name: str) -> str:
    """Return a device's name, or the end of a long one."""
    return name if len(name) <= 10 else f"…{name[-9:]}"


def _kind(op: Op) -> str:
    """Return the kind of a tensor's op, with fused ops."""
    words = [op.kind, getattr(op, "activation", None), "residual" if getattr(op, "residual", False) else None]
    return " + ".join(w for w in words if w)


def _space(op: Op) -> str:
    """Return the extents of a tensor and, after a bar, of its reduced dimensions."""
    result, reduced = (" × ".join(map(str, dims)) for dims in (op.space[: op.rank], op.space[op.rank :]))
    return f"[{result} | {reduced}]" if reduced else f"[{result}]"


def _set(s: IndexSet) -> str:
    return "+".join(f"{a}:{z}" for a, z in s)


def _caption(op: Op, lane: _Lane) -> str:
    """Return a description of the parts on a device's sheets."""
    words = []
    own = {key: any(p.partial for p in patches if not p.received) for key, patches in lane.sheets.items()}
    parts = [key for key, partial in own.items() if partial]
    if parts:
        text = ", ".join(" × ".join(map(_set, key[op.rank - 2 :])) for key in parts)
        words.append(f"partial: {_REDUCED.get(op.kind, 'inner')} {text}")
    others = {key[: op.rank - 2] for key, patches in lane.sheets.items() if any(not p.received for p in patches)}
    if op.rank > 2 and others and others != {op.full_region[2 : op.rank]}:
        words.append("channels " + ", ".join(" × ".join(map(_set, key)) for key in sorted(others)))
    if lane.relayed and parts:
        words.append("sum in front")
    return "; ".join(words)


def sent_lines(op: Op, tiles: Sequence[Tile], names: Sequence[str], wire: WireDtype) -> list[str]:
    """Return one line per sender: receivers, payload in KB and numbers of the messages."""
    sent: dict[int, dict[tuple[int, ...], float]] = {}
    numbers: dict[int, list[int]] = {}
    for tile in tiles:
        for message in tile.messages if tile.device != PLANNER_INDEX else ():
            narrow = not op.stays_f32 and PLANNER_INDEX not in message.to
            cells = prod(op.shape(message.region, op.is_state(tile.region)))
            to = sent.setdefault(tile.device, {})
            to[message.to] = to.get(message.to, 0.0) + cells * DTYPE_BYTES[wire if narrow else "f32"] / 1e3
            numbers.setdefault(tile.device, []).append(message.part)
    lines = []
    for device, groups in sent.items():
        text = " · ".join(f"{_group(to, names)} {_size(kb)}" for to, kb in groups.items())
        first, last = min(numbers[device]), max(numbers[device])
        lines.append(f"{names[device]} → {text} ({f'part {first}' if first == last else f'parts {first}–{last}'})")
    return lines


def _group(to: Sequence[int], names: Sequence[str]) -> str:
    return ", ".join("planner" if d == PLANNER_INDEX else names[d] for d in to)


def _size(kb: float) -> str:
    return f"{kb:.3g} KB" if kb < 1000 else f"{kb / 1e3:.3g} MB"
