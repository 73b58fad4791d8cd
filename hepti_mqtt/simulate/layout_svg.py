"""The layouts of a plan as a picture: who holds which region of each tensor of a layer, and what travels.

A line per tensor, a lane per device. In its lane a device has what it computes in its own colour, and what it receives
pale and dashed in the colour of the sender. A partial result is a sheet of its own, one per part of the reduced
dimensions; sheets that are to be added lie on a stack, the complete result in front.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import product
from math import prod
from typing import Final, NamedTuple

from hepti_mqtt.lowering import PLANNER_PLACE, Lowered, Region, Set, span
from hepti_mqtt.lowering.ops import Input, Op
from hepti_mqtt.lowering.tiles import Tile
from hepti_mqtt.plan import WireDtype
from hepti_mqtt.program import ITEMSIZE
from hepti_mqtt.simulate.work_factor import WORTH_SAYING, volumes

# Neighbours differ in lightness, so that they differ in grey too.
COLOURS: Final = ("#1f4e8c", "#f0a030", "#2f8f6b", "#611030", "#9ccdf0", "#8f8f1f", "#5b3a8e", "#d9777f")
_INK, _DIM, _LINE, _WARN = "#1c1c1c", "#5a5a5a", "#b8b8b8", "#b3261e"
_LEFT, _SENT, _GAP, _HEAD, _LINE_HEIGHT = 176, 280, 22, 84, 14
_ROWS, _ROW, _MAP = 64, 12, 96  # pixels: of the most rows, of one at most, of the side of a map
_STEP, _STEPS = 10, 4  # pixels between two sheets, where there are no more than so many
_LANES, _LANE_MIN = 640, 84  # pixels of all lanes together; of one at least
_THIN, _HAIR = 5, 2.5  # the least pixels of a tensor's side, and of a part of it
_SENT_CHARS: Final = 41

_NOTE: Final = (
    "[rows × columns | what a result is summed over]. Rows and columns are drawn to scale, each to its own. "
    "Sheets on a stack are added; the complete result, if a device has it, is in front."
)
_REDUCED: Final[Mapping[str, str]] = {"linear": "inner", "attention": "keys", "moments": "columns"}


class _Scale(NamedTuple):
    """Pixels per index of the first two dimensions."""

    row: float
    column: float

    def size(self, op: Op) -> tuple[float, float]:
        """Return the width and height of a tensor."""
        rows, columns = _sides(op)
        return max(columns * self.column, _THIN), max(rows * self.row, _THIN)


class _Patch(NamedTuple):
    """A region in a device's lane: whose colour it has, and how it got there."""

    region: Region
    owner: int
    received: bool
    partial: bool


@dataclass(slots=True)
class _Lane:
    """What one device has of one tensor: a sheet for each part of the dimensions that are not drawn."""

    sheets: dict[Region, list[_Patch]] = field(default_factory=dict)
    relayed: bool = False

    def put(self, op: Op, region: Region, owner: int, received: bool) -> None:
        """Add a region; whatever is complete lies on one sheet, also where rows are summed over different keys."""
        partial = _partial(op, region)
        key = region[2:] if partial else region[2 : op.rank] + op.full[max(op.rank, 2) :]
        self.sheets.setdefault(key, []).append(_Patch(region, owner, received, partial))

    def ordered(self, full: Region) -> list[Region]:
        """Return the sheets from back to front: received parts, own parts, the complete result."""
        own = {key for key, found in self.sheets.items() if any(not p.received for p in found)}
        return sorted(self.sheets, key=lambda key: (key == full[2:], key in own))


def layout_svg(
    made: Lowered, layers: Sequence[int], title: str, wire: WireDtype = "f32", names: Sequence[str] = ()
) -> str:
    """Return the layouts of some layers of `made` as an SVG picture; sizes of messages are for numbers as `wire`.

    names: of the lanes, if not those of `made`. Of equal layers that are worked out once, the one that stands for the
    others is drawn. Raises ValueError if there is no such layer.
    """
    ops = drawn(made, layers)
    if not ops:
        raise ValueError(f"there is no layer {', '.join(map(str, layers))}: the model has {made.whole.layers()}")
    names = [_short(name) for name in names or made.names]
    lane = max(_LANES / len(names) - _GAP, _LANE_MIN)
    lanes = {op.name: [_lane(op, made.tiles[op.name], d) for d in range(len(names))] for op in ops}
    rises = {name: max(_rise(len(of.sheets)) for of in found) for name, found in lanes.items()}
    scales = _scales(ops, {name: lane - rise for name, rise in rises.items()})
    canvas = _Canvas(names, lane)
    y = float(_HEAD)
    for op in ops:
        y = canvas.tensor(op, made.tiles[op.name], lanes[op.name], scales[op.rank > 2], y, wire)
    if made.repeated is not None and (first := made.repeated[0]) in {op.layer for op in ops}:
        title += f" (layers {first} to {first + made.repeated[1] - 1} are alike)"
    return canvas.svg(title, y)


def drawn(made: Lowered, layers: Sequence[int]) -> list[Op]:
    """Return the tensors of some layers in graph order; of equal layers, those of the one that stands for them."""
    known = {op.layer for op in made.graph.ops}
    stand_in = made.repeated[0] if made.repeated else -1
    chosen = {layer if layer in known else stand_in for layer in layers if layer < made.whole.layers()}
    return [op for op in made.graph.ops if op.layer in chosen and not isinstance(op, Input)]


def _lane(op: Op, tiles: Sequence[Tile], device: int) -> _Lane:
    """Return what a device computes, puts together and receives of a tensor; what it passes on, it has received."""
    lane = _Lane()
    here = [(t, m.region) for t in tiles if t.device != PLANNER_PLACE for m in t.messages if device in m.to]
    passed = {region for _, region in here}
    for tile in tiles:
        if tile.device == device and not (tile.relay and tile.region in passed):
            lane.put(op, tile.region, device, received=False)
            lane.relayed |= tile.relay
    for tile, region in here:
        lane.put(op, region, tile.device, received=True)
    return lane


def _partial(op: Op, region: Region) -> bool:
    """Return whether a region lacks a part of what its result is summed over."""
    whole = op.trim(region[: op.rank] + op.full[op.rank :])
    return whole is not None and whole[op.rank :] != region[op.rank :]


def _sides(op: Op) -> tuple[int, int]:
    """Return the extent of the two dimensions that are drawn."""
    return op.space[0], op.space[1] if op.rank > 1 else 1


def _rise(sheets: int) -> float:
    """Return by how much the hindmost of some sheets is moved."""
    return _STEP * min(max(sheets - 1, 0), _STEPS)


def _scales(ops: Sequence[Op], widths: Mapping[str, float]) -> tuple[_Scale, _Scale]:
    """Return the scale of matrices, rows and columns each by their own, and that of maps, alike in both directions."""
    scales = []
    for of_maps, height in ((False, _ROWS), (True, _MAP)):
        sides = [(*_sides(op), widths[op.name]) for op in ops if (op.rank > 2) == of_maps] or [(1, 1, 1.0)]
        row, column = (min(height / r for r, _, _ in sides), min(w / c for _, c, w in sides))
        both = min(row, column)
        scales.append(_Scale(both, both) if of_maps else _Scale(min(row, _ROW), column))
    return scales[0], scales[1]


# -- drawing ----------------------------------------------------------------------------------------------------------


class _Canvas:
    """The picture in the making: shapes and words, from top to bottom."""

    def __init__(self, names: Sequence[str], lane: float) -> None:
        self.names, self.lane = names, lane
        self.out: list[str] = []
        self.width = _LEFT + len(names) * (lane + _GAP) + _SENT

    def x(self, device: int) -> float:
        return _LEFT + device * (self.lane + _GAP)

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        self.out.append(f'<text x="{x:g}" y="{y:g}"{kind and f" class={chr(34)}{kind}{chr(34)}"}>{escape(text)}</text>')

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
            captions = _captions(op, lane, int(self.lane / 5.4))
            lines = max(lines, len(captions))
            for n, caption in enumerate(captions):
                self.text(self.x(device), top + height + 12 + 12 * n, caption, "c")
        sent = sent_lines(op, tiles, self.names, wire)
        for n, line in enumerate(sent):
            self.text(self.width - _SENT, y + 20 + _LINE_HEIGHT * n, line, "s")
        return max(top + height + 12 * lines, y + 6 + _LINE_HEIGHT * max(words, len(sent))) + 12

    def label(self, op: Op, tiles: Sequence[Tile], y: float) -> int:
        """Write what a tensor is; return how many lines that took."""
        computed, distinct = volumes(op, tiles)
        words = [(op.name, "n"), *([(op.role, "")] if op.role and op.role != op.name.rpartition(".")[2] else [])]
        words += [(_kind(op), "c"), (_space(op), "c")]
        if computed >= WORTH_SAYING * distinct > 0:
            words.append((f"computed {computed / distinct:.2f} times", "w"))
        for n, (text, kind) in enumerate(words):
            self.text(12, y + 20 + _LINE_HEIGHT * n, text, kind)
        return len(words)

    def stack(self, op: Op, lane: _Lane, box: tuple[float, float, float, float], scale: _Scale) -> None:
        """Draw what a device has of a tensor, sheets to be added behind the complete one."""
        x, y, width, height = box
        keys = lane.ordered(op.full) or [()]
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
        w, h = max(w, _HAIR), max(h, _HAIR)  # one row of many is still seen
        if patch.received:
            inner = (x + 0.7, y + 0.7, max(w - 1.4, 0.6), max(h - 1.4, 0.6))
            self.rect(inner, f'class="r" fill="{colour}" stroke="{colour}"')
        else:
            frame = 'class="o" ' if min(w, h) > _HAIR else ""
            self.rect((x, y, w, h), f'{frame}fill="{colour}"')
        if patch.partial:
            self.rect((x, y, w, h), 'fill="url(#h)"')

    def svg(self, title: str, bottom: float) -> str:
        """Return the picture with its head, legend and frame."""
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
        """Draw what colours and strokes mean."""
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
    """Return which op a tensor is, with what is fused into it."""
    words = [op.kind, getattr(op, "activation", None), "residual" if getattr(op, "residual", False) else None]
    return " + ".join(w for w in words if w)


def _space(op: Op) -> str:
    """Return the extents of a tensor, and behind a bar of what it is summed over."""
    result, reduced = (" × ".join(map(str, dims)) for dims in (op.space[: op.rank], op.space[op.rank :]))
    return f"[{result} | {reduced}]" if reduced else f"[{result}]"


def _set(s: Set) -> str:
    return "+".join(f"{a}:{z}" for a, z in s)


def _captions(op: Op, lane: _Lane, chars: int) -> list[str]:
    """Return what the sheets of a device are parts of, in at most two lines."""
    lines = []
    own = {key: any(p.partial for p in found if not p.received) for key, found in lane.sheets.items()}
    parts = [key for key, partial in own.items() if partial]
    if parts:
        what = _REDUCED.get(op.kind, "inner")
        text = ", ".join(" × ".join(map(_set, key[op.rank - 2 :])) for key in parts)
        many = f"{len(parts)} parts" if len(parts) > 1 else "partial"
        lines.append(_fitting(chars, f"partial: {what} {text}", f"{many} over {what}", many))
    others = {key[: op.rank - 2] for key, found in lane.sheets.items() if any(not p.received for p in found)}
    if op.rank > 2 and others and others != {op.full[2 : op.rank]}:
        text = ", ".join(" × ".join(map(_set, key)) for key in sorted(others))
        lines.append(_fitting(chars, f"channels {text}", "some channels"))
    if lane.relayed and parts:
        lines.append("sum in front")
    return lines


def sent_lines(op: Op, tiles: Sequence[Tile], names: Sequence[str], wire: WireDtype) -> list[str]:
    """Return one line per sender: what goes to whom, with the payload in KB and the numbers of the messages."""
    sent: dict[int, dict[tuple[int, ...], list[tuple[int, float]]]] = {}
    for tile in tiles:
        if tile.device == PLANNER_PLACE:
            continue
        for message in tile.messages:
            cells = op.shape(message.region, op.is_state(tile.region))
            item = ITEMSIZE["f32" if op.exact else wire] if PLANNER_PLACE not in message.to else ITEMSIZE["f32"]
            to = sent.setdefault(tile.device, {}).setdefault(message.to, [])
            to.append((message.part, prod(cells) * item / 1e3))
    lines = []
    for device, groups in sent.items():
        whole = " · ".join(f"{_group(to, names)} {_size(sum(kb for _, kb in found))}" for to, found in groups.items())
        parts = [part for found in groups.values() for part, _ in found]
        numbers = f"part {parts[0]}" if len(parts) == 1 else f"parts {min(parts)}–{max(parts)}"
        sizes = _sizes([kb for found in groups.values() for _, kb in found])
        count = f"{len({d for to in groups for d in to})} devices"
        shorter = [f"{whole} ({numbers})", whole, f"{count}, {sizes} ({numbers})", f"{count}, {sizes}"]
        lines.append(_fitting(_SENT_CHARS, *(f"{names[device]} → {words}" for words in shorter)))
    return lines


def _fitting(chars: int, *texts: str) -> str:
    """Return the first text that is short enough, or what fits of the last."""
    return next((text for text in texts if len(text) <= chars), texts[-1][:chars])


def _group(to: Sequence[int], names: Sequence[str]) -> str:
    return ", ".join("planner" if d == PLANNER_PLACE else names[d] for d in to)


def _size(kb: float) -> str:
    return f"{kb:.3g} KB" if kb < 1000 else f"{kb / 1e3:.3g} MB"


def _sizes(kb: Sequence[float]) -> str:
    low, high = _size(min(kb)), _size(max(kb))
    return f"{low} each" if low == high else f"{low.removesuffix(high[-3:])}–{high}"
