"""What people see of Programs, time lines and layouts: everything is there and inside the frame."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest
from sites import EVERY_FAMILY, FAMILIES, METHODS, plan, request
from test_cost_clock import NAMING, SHAPE, SPEC, relay, site

from hepti_mqtt.cost.explain import drawn, format_program, layout_svg, timeline_svg, timeline_text
from hepti_mqtt.cost.simulator import Throughput, simulate
from hepti_mqtt.models.transformer import ModelSpec
from hepti_mqtt.strategies import STRATEGIES
from hepti_mqtt.strategies.plan_programs import lower_plan

SVG = "{http://www.w3.org/2000/svg}"


def lowered_of(family="bert-embedding", method=("block", {}), devices=3, lengths=(13,), want="hidden"):
    spec = EVERY_FAMILY[family]
    if isinstance(spec, ModelSpec):
        spec = replace(spec, layers=8)
    shape, _ = request(spec, lengths if isinstance(spec, ModelSpec) else (1,), want)
    count = min(devices, STRATEGIES[method[0]].max_devices or devices)
    return lower_plan(spec, plan(spec, method, (1.0, *[2.0] * (count - 1))), shape)


def parse(picture: str) -> ElementTree.Element:
    return ElementTree.fromstring(picture)


@pytest.mark.parametrize(
    ("family", "method"),
    [(list(FAMILIES)[i % len(FAMILIES)], m) for i, m in enumerate(METHODS[::4])]
    + [("tiny-convnet", ("map_rows", {"cut": "1"}))],
    ids=str,
)
def test_every_tensor_of_a_layer_is_there_and_nothing_lies_outside(family, method):
    lowered = lowered_of(family, method, devices=4)
    last = lowered.full_graph.layer_count() - 1
    root = parse(layout_svg(lowered, [last], "a <title>"))
    width, height = (float(n) for n in root.attrib["viewBox"].split()[2:])
    bold = [t.text for t in root.iter(f"{SVG}text") if t.get("class") == "n"]
    assert bold == [*lowered.names, "tensor", "sent", *(op.name for op in drawn(lowered, [last]))]
    for rect in list(root.iter(f"{SVG}rect"))[2:]:  # the first two are the pattern's and the background
        x, y, w, h = (float(rect.attrib[k]) for k in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height
        assert min(w, h) > 0
    for text in root.iter(f"{SVG}text"):
        assert 0 < float(text.attrib["y"]) < height


def test_ops_and_time_lines_are_drawn():
    parts = relay(3)
    result = simulate(NAMING, SPEC, SHAPE, parts, site("d0", "d1", "d2"), record=True)
    lines = format_program(parts["d0"])
    assert any("send" in line and "-> d1, d2" in line for line in lines)
    assert any("assemble" in line for line in lines)
    assert len({len(line) for line in timeline_text(result.events, tuple(parts), result.seconds)}) == 1
    svg = timeline_svg(result.events, tuple(parts), result.seconds, "a <title>")
    assert "a <title>" in "".join(parse(svg).itertext())
    load = Throughput(12, 2, 0.59327, 2.37308, 3.3712, 4.0)
    assert load.to_dict()["longest_ms"] == 4000.0
    assert "0.593" in load.text()
