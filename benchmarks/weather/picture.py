"""A site in one picture: latency of its requests, which plan they ran under, and why that changed."""

from __future__ import annotations

from html import escape
from math import ceil
from typing import Final

from benchmarks.weather.site import History
from hepti_mqtt.cost.explain import COLOURS

_LEFT, _WIDTH, _TOP, _HEIGHT, _LINE = 70, 900, 40, 260, 14
_ROWS: Final = 8  # methods that are named


def weather_svg(history: History, title: str) -> str:
    """Return the picture as SVG: a dot per request in the colour of its plan's method, a line per change of plan.

    What a line or a dot stands for is its tooltip; below are the methods, the phases, and how long searches took.
    """
    seconds, answers = history.truth.seconds, history.answers
    names = list(dict.fromkeys(f"{a.plan.method} on {len(a.plan.devices)}" for a in answers))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    longest = sorted(a.seconds for a in answers)[int(0.995 * (len(answers) - 1))] if answers else 1.0
    bottom, most = _TOP + _HEIGHT, max(longest * 1.15, 1e-6)

    def x(now: float) -> float:
        return _LEFT + now / seconds * _WIDTH

    def y(latency: float) -> float:
        return bottom - min(latency / most, 1.0) * _HEIGHT

    height = bottom + 62 + _LINE * (min(len(names), _ROWS) + 1)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="100%" height="100%" fill="white"/><text x="10" y="18" font-size="13">{escape(title)}</text>',
    ]
    for i, (start, name) in enumerate(history.truth.phases):
        stop = [*(at for at, _ in history.truth.phases), seconds][i + 1]
        shade = "#f2f2f2" if i % 2 else "#fafafa"
        out.append(
            f'<rect x="{x(start):.1f}" y="{_TOP}" width="{x(stop) - x(start):.1f}" height="{_HEIGHT}" fill="{shade}"/>'
        )
        out.append(f'<text x="{x(start) + 2:.1f}" y="{_TOP - 4}" font-size="9" fill="#555">{escape(name)}</text>')
    for part in range(5):
        value = most * part / 4
        out.append(f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value * 1e3:.0f} ms</text>')
    for begun, took in history.searches:
        width = max(x(begun + took) - x(begun), 0.6)
        out.append(f'<rect x="{x(begun):.1f}" y="{bottom + 4}" width="{width:.1f}" height="8" fill="#888"/>')
    for c in history.changes:
        dash = "" if c.loads else ' stroke-dasharray="3 3"'
        out.append(
            f'<line x1="{x(c.now):.1f}" x2="{x(c.now):.1f}" y1="{_TOP}" y2="{bottom}" stroke="#b3261e"{dash}>'
            f"<title>{escape(c.text)}</title></line>"
        )
    for a in answers:
        fill = colours[f"{a.plan.method} on {len(a.plan.devices)}"]
        out.append(
            f'<circle cx="{x(a.asked_s):.1f}" cy="{y(a.seconds):.1f}" r="1.6" fill="{fill}">'
            f"<title>{a.seconds * 1e3:.0f} ms</title></circle>"
        )
    minutes = range(0, int(seconds / 60) + 1, max(ceil(seconds / 600), 1))
    out += [f'<text x="{x(60 * m):.1f}" y="{bottom + 26}" text-anchor="middle">{m} min</text>' for m in minutes]
    out.append(f'<text x="{_LEFT - 6}" y="{bottom + 12}" text-anchor="end" fill="#555">searches</text>')
    notes = [(name, colours[name]) for name in names[:_ROWS]]
    notes.append(
        ("a change of plan: whole lines load weights, dashed ones nothing; point at one for the reason", "#b3261e")
    )
    for i, (name, fill) in enumerate(notes):
        at = bottom + 46 + _LINE * i
        out.append(f'<rect x="{_LEFT}" y="{at - 8}" width="9" height="9" fill="{fill}"/>')
        out.append(f'<text x="{_LEFT + 14}" y="{at}">{escape(name)}</text>')
    return "\n".join([*out, "</svg>"])
