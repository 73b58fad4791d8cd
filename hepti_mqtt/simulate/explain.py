"""Programs and their time lines for people: the fourth reader of a Program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

from hepti_mqtt.program import Compute, Op, Program, Send, SlotSpec, WeightRef
from hepti_mqtt.simulate.outcome import Event

LANES: Final = ("task", "compute", "send", "up", "down")
_COLOURS: Final[Mapping[str, str]] = {
    "task": "#cfd8e3",
    "compute": "#3b7dd8",
    "send": "#8a63d2",
    "up": "#e08a2e",
    "down": "#3fa36b",
}
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"


def explain(program: Program, layer: int | None = None) -> list[str]:
    """Return one line per op; with `layer`, only that layer's (a Program's inner layers are alike)."""
    return [
        f"{place:5d}  {_line(program, op)}"
        for place, op in enumerate(program.ops)
        if layer is None or op.layer == layer
    ]


def _line(program: Program, op: Op) -> str:
    node = program.node(op.node)
    if isinstance(op, Compute):
        reads = ", ".join(_slot(program, s) for s in op.reads)
        writes = ", ".join(_slot(program, s) for s in op.writes)
        weights = " ".join(_weight(w) for w in op.weights if w.layout == "packed")
        return f"{op.label:<18} {reads} -> {writes}   ({node})" + (f"   with {weights}" if weights else "")
    if isinstance(op, Send):
        return f"{'send':<18} {_slot(program, op.slot)} -> {', '.join(op.to)}   ({node}, part {op.part})"
    source = " or ".join([op.source, *op.others])
    return f"{'receive':<18} {_slot(program, op.slot)} <- {source}   ({node}, part {op.part})"


def _slot(program: Program, slot: int) -> str:
    spec: SlotSpec = program.slots[slot]
    size = "x".join(map(str, spec.shape))
    return f"s{slot}[{size}]" if spec.base is None else f"s{spec.base}[{size} from row {spec.start}]"


def _weight(ref: WeightRef) -> str:
    name = ref.tensor.removesuffix(".weight").split(".", 2)[-1]
    return f"{name}[{ref.rows[0]}:{ref.rows[1]}, {ref.columns[0]}:{ref.columns[1]}]"


def tasks_of(events: Sequence[Event], device: str) -> str:
    """Return which tasks of a bag a device computed, and which it gave up; nothing without a bag."""
    tasks = sorted((e for e in events if (e.device, e.lane) == (device, "task")), key=lambda e: e.stop)
    return ", ".join(e.label for e in tasks)


def places_taken(events: Sequence[Event], places: Sequence[str], head: str) -> tuple[str, ...]:
    """Return the places of a bag's table, its tasks and the head's own part, by number and who took them first."""
    done = sorted((e for e in events if e.lane == "task"), key=lambda e: e.stop, reverse=True)
    by = {e.label: e.device for e in done}
    return tuple(f"{place.rpartition(' ')[2]}: {by.get(place, head)}" for place in places)


def timeline_text(events: Sequence[Event], devices: Sequence[str], seconds: float, width: int = 72) -> list[str]:
    """Return one line per device and lane: how busy each moment was, from ' ' (idle) to '#' (always busy).

    Lane `task` has the number of the task of a bag that is leased to the device then, from 10 on as a letter.
    """
    marks = " .:+#"
    lines = []
    for device in devices:
        if (leased := _leased(events, device, seconds, width)).strip():
            lines.append(f"{device:>12} {'task':<8}|{leased}|")
        for lane in ("compute", "up", "down"):
            busy = [0.0] * width
            for e in events:
                if e.device == device and e.lane == lane:
                    _spread(busy, e.start / seconds * width, e.stop / seconds * width)
            if any(busy):
                bar = "".join(marks[min(int(b * len(marks)), len(marks) - 1)] for b in busy)
                lines.append(f"{device:>12} {lane:<8}|{bar}|")
    lines.append(f"{'':>12} {'ms':<8}|0{f'{seconds * 1e3:.1f}':>{width - 1}}|")
    return lines


def _leased(events: Sequence[Event], device: str, seconds: float, width: int) -> str:
    """Return the task that a device has in the middle of each cell."""
    cells = [" "] * width
    for e in events:
        if (e.device, e.lane) == (device, "task"):
            start, stop = round(e.start / seconds * width), round(e.stop / seconds * width)
            cells[start:stop] = _DIGITS[_number(e) % len(_DIGITS)] * (min(stop, width) - start)
    return "".join(cells)


def _number(event: Event) -> int:
    """Return the number of the task that a bar of lane `task` is of."""
    return int(event.label.split()[1])


def _spread(busy: list[float], start: float, stop: float) -> None:
    """Add the part of each cell that lies in start..stop."""
    for cell in range(max(int(start), 0), min(int(stop) + 1, len(busy))):
        busy[cell] += max(min(stop, cell + 1) - max(start, cell), 0.0)


def _inside(event: Event, x: float, y: float, width: float) -> str:
    """Return what is written in a task's bar: its name, or its number where the bar is short."""
    text = event.label if width > 6 * len(event.label) else str(_number(event))
    middle = x + width / 2
    return f'<text x="{middle:.2f}" y="{y + 10}" text-anchor="middle" font-size="10">{escape(text)}</text>'


def timeline_svg(events: Sequence[Event], devices: Sequence[str], seconds: float, title: str) -> str:
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
                    out.append(_inside(e, x, y, w))
        y += row
    out.append(f'<text x="{left}" y="{y + 14}">0 ms</text>')
    out.append(f'<text x="{left + width}" y="{y + 14}" text-anchor="end">{seconds * 1e3:.1f} ms</text></svg>')
    return "\n".join(out)
