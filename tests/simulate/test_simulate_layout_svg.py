"""The picture of the layouts: one line per tensor, everything inside the frame, and every message in words."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from sites import FAMILIES, METHODS, plan, request

from hepti_mqtt.cost.explain import COLOURS, drawn, layout_svg, sent_lines
from hepti_mqtt.lowering import PLANNER_PLACE, Lowered, Net, Table, on, roles, span, split
from hepti_mqtt.lowering.ops import Conv
from hepti_mqtt.models import graph
from hepti_mqtt.models.transformer import ModelSpec
from hepti_mqtt.plan_programs import lowered
from hepti_mqtt.strategies import STRATEGIES

SVG = "{http://www.w3.org/2000/svg}"


def made(family="bert-embedding", method=("block", {}), devices=3, lengths=(13,), want="hidden"):
    spec = FAMILIES[family]
    if isinstance(spec, ModelSpec):
        spec = replace(spec, layers=8)
    shape, _ = request(spec, lengths, want)
    count = min(devices, STRATEGIES[method[0]].most_devices or devices)
    return lowered(spec, plan(spec, method, (1.0, *[2.0] * (count - 1))), shape)


def parse(picture: str) -> ElementTree.Element:
    return ElementTree.fromstring(picture)


def words(root: ElementTree.Element) -> list[str]:
    return [t.text or "" for t in root.iter(f"{SVG}text")]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: "-".join([m[0], *m[1].values()]))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_a_layer_is_there_and_nothing_lies_outside(family, method):
    spec = FAMILIES[family]
    if (reason := STRATEGIES[method[0]].unsupported(graph(spec, request(spec, (1,))[0]))) is not None:
        pytest.skip(reason)
    found = made(family, method, devices=4)
    last = found.whole.layers() - 1
    root = parse(layout_svg(found, [last], "a <title>"))
    width, height = (float(n) for n in root.attrib["viewBox"].split()[2:])
    bold = [t.text for t in root.iter(f"{SVG}text") if t.get("class") == "n"]
    assert bold == [*found.names, "tensor", "sent", *(op.name for op in drawn(found, [last]))]
    for rect in list(root.iter(f"{SVG}rect"))[2:]:  # the first two are the pattern's and the background
        x, y, w, h = (float(rect.attrib[k]) for k in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height
        assert min(w, h) > 0
    for text in root.iter(f"{SVG}text"):
        assert 0 < float(text.attrib["y"]) < height
    assert words(root)[0].startswith("a <title>")


def test_an_area_of_its_colour_is_a_device_s_share():
    found = made(method=("column", {}), devices=3)
    root = parse(layout_svg(found, [1], "t"))
    areas = dict.fromkeys(COLOURS[:3], 0.0)
    for rect in root.iter(f"{SVG}rect"):
        if rect.get("class") == "o" and rect.attrib["fill"] in areas and float(rect.attrib["y"]) > 80:
            areas[rect.attrib["fill"]] += float(rect.attrib["width"]) * float(rect.attrib["height"])
    names = ("qkv", "attention", "o", "g", "down")
    volumes = [0, 0, 0]
    for name in names:
        op = found.graph.by_name[f"1.{name}"]
        for tile in found.tiles[op.name]:
            volumes[tile.device] += sum(z - a for a, z in tile.region[1])
    # What is computed everywhere is alike for all: it cancels in the differences.
    ratio = (areas[COLOURS[1]] - areas[COLOURS[0]]) / (volumes[1] - volumes[0])
    assert (areas[COLOURS[2]] - areas[COLOURS[1]]) == pytest.approx(ratio * (volumes[2] - volumes[1]), abs=25)


def test_partial_sums_are_hatched_sheets_and_said_in_words():
    root = parse(layout_svg(made(), [1], "t"))
    hatched = [r for r in root.iter(f"{SVG}rect") if r.get("fill") == "url(#h)" and float(r.attrib["y"]) > 80]
    assert len(hatched) == 2 * 3 * 3  # two matrices: on each device its own sheet and those of the two others
    assert "partial: inner 0:8" in words(root)
    whole = layout_svg(made(method=("single", {})), [1], "t")
    assert whole.count("url(#h)") == 1  # in the legend


def test_what_is_computed_again_is_said():
    assert "computed 3.00 times" in words(parse(layout_svg(made(method=("column", {})), [1], "t")))
    assert "computed" not in " ".join(words(parse(layout_svg(made(), [1], "t")))[7:])


def test_messages_in_words_and_kilobytes():
    found = made(method=("row", {"variant": "kv"}))
    op = found.graph.by_name["1.qkv"]
    lines = sent_lines(op, found.tiles["1.qkv"], found.names, "f32")
    rows = [sum(z - a for a, z in m.region[0]) for t in found.tiles["1.qkv"] for m in t.messages]
    assert lines[0] == f"d0 → d1, d2 {rows[0] * 2 * 32 * 4 / 1e3:.3g} KB (part 0)"
    assert sent_lines(op, found.tiles["1.qkv"], found.names, "f16")[0] != lines[0]
    last = found.graph.answer
    assert [line.split(" ")[2] for line in sent_lines(last, found.tiles[last.name], found.names, "i8")] == ["planner"]


def test_equal_layers_that_are_worked_out_once_stand_for_each_other():
    found = made()
    assert found.repeated is not None
    inner = found.repeated[0]
    assert layout_svg(found, [inner + 1], "t") == layout_svg(found, [inner], "t")
    assert "(layers 2 to 6 are alike)" in layout_svg(found, [inner], "t")
    both = [op.layer for op in drawn(found, [0, 7])]
    assert set(both) == {0, 7}
    assert both == sorted(both)
    with pytest.raises(ValueError, match="the model has 8"):
        layout_svg(found, [8], "t")


def test_long_names_and_many_devices_keep_their_lanes():
    found = made(devices=8)
    found.names = tuple(f"a-board-in-the-hall-{i}" for i in range(8))
    root = parse(layout_svg(found, [1], "t"))
    found_words = words(root)
    assert "…he-hall-7" in found_words
    assert all(len(w) < 42 for w in found_words if "→" in w)
    captions = [t for t in root.iter(f"{SVG}text") if t.get("class") == "c" and re.match("part", t.text or "")]
    assert captions
    assert max(len(t.text or "") for t in captions) <= 15


def test_the_planner_has_no_lane():
    found = made()
    assert any(t.device == PLANNER_PLACE for t in found.tiles["ids"])
    assert "ids" not in words(parse(layout_svg(found, [0], "t")))


def test_maps_have_one_scale_for_both_directions_and_show_their_halo():
    net = Net()
    x = net.whole("x", [net.input("given", (8, 8, 2), "f32")], roles.STEM, "any", (8, 8, 2))
    for name in ("a", "b"):
        tensors = (f"{name}.weight", f"{name}.bias")
        sides = {"kernel": (3, 3), "pad": (1, 1, 1, 1), "source": (8, 8, 2)}
        x = net.put(Conv(name=name, inputs=(x,), role=roles.MAP, tensors=tensors, space=(8, 8, 2), **sides))
    table = Table({roles.INPUT: on(PLANNER_PLACE), roles.STEM: on(0), roles.MAP: split([span(0, 4), span(4, 8)], 0)})
    picture = layout_svg(Lowered(net.graph(), table, ("left", "right")), [0], "t")
    frames = [r for r in parse(picture).iter(f"{SVG}rect") if r.get("class") == "e"]
    assert len(frames) == 3 * 2
    assert all(r.attrib["width"] == r.attrib["height"] for r in frames)
    assert "left → right 0.064 KB (part 0)" in words(parse(picture))  # a row of 8 x 2 numbers
