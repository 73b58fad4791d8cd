"""In which layout a decoder's runs of how many rows are: in that which the simulator finds fastest."""

from __future__ import annotations

from dataclasses import replace

import pytest
import questions
from questions import bundled, cluster, device, meshed

from hepti_mqtt.checkpoint.make import spec_of_kind
from hepti_mqtt.models import quantised
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.planner import decide, price
from hepti_mqtt.strategies import STRATEGIES

TINY = spec_of_kind("tiny-llama")
SPEC = replace(TINY, layers=8, hidden=1024, heads=16, mlp=2048, max_tokens=512, block=replace(TINY.block, head_dim=64))
SPEC = replace(SPEC, text=replace(SPEC.text, positions=512))
LAYOUTS = ("", *STRATEGIES["decoder"].layouts)
CONTEXT = 512


def question(site, spec=SPEC):
    step = TokenBatch((1,), cache=CONTEXT)
    return questions.question(spec, site, step, strategy="decoder", devices=tuple(site.devices))


def seconds(query, plan, rows):
    return price(replace(query, shape=TokenBatch((rows,), cache=CONTEXT)), plan, full=True).seconds


def ways(plan):
    return {layout: replace(plan, layouts={layout: 0} if layout else {}) for layout in LAYOUTS}


@pytest.mark.parametrize(
    ("gflops", "mbit", "memory", "last"),
    [
        ((20, 20, 20, 20), 940, 4 << 30, "row"),
        ((20, 20, 20, 20), 100, 4 << 30, "row"),
        ((20, 20, 20, 20), 940, 400 << 20, "block"),  # all weights fit on each device, but barely
        ((20, 20, 20, 20), 940, 250 << 20, "block"),  # they do not fit
        ((40, 20, 10), 9400, 4 << 30, "block"),  # they would gain next to nothing
    ],
)
def test_runs_of_any_size_are_in_the_layout_that_is_fastest(gflops, mbit, memory, last):
    devices = (replace(device(f"d{i}", g, memory), attention_flops_per_s=2e9) for i, g in enumerate(gflops))
    query = question(meshed(cluster(*devices, mbit=mbit, latency_s=0.1e-3)))
    chosen = decide(query).chosen
    plan, able = chosen.plan, LAYOUTS[: LAYOUTS.index(last) + 1]
    assert list(plan.layouts)[-1] == last
    assert all(need <= memory for need in chosen.price.needs.values())
    for rows in (1, 2, 8, 32, 128):
        own, by_layout = seconds(query, plan, rows), {k: seconds(query, way, rows) for k, way in ways(plan).items()}
        assert own in by_layout.values()
        if rows > 1:
            assert own <= 1.01 * min(by_layout[layout] for layout in able), (rows, by_layout)
    assert decide(replace(query, active=plan)).chosen.plan.layouts == plan.layouts


LLAMA = replace(
    TINY, layers=16, hidden=2048, heads=32, mlp=8192, max_tokens=8192, head=replace(TINY.head, outputs=128256),
    text=replace(TINY.text, vocab=128256, positions=8192), block=replace(TINY.block, head_dim=64, kv_heads=8),
)  # fmt: skip


def test_four_boards_read_a_prompt_by_rows_three_times_as_fast_as_one():
    query = question(bundled("four-pi4"), quantised(LLAMA, "q4"))
    plan = decide(query).chosen.plan
    alone = replace(plan, strategy="single", devices=(plan.root,), shares={}, ranges={}, layouts={})
    gains = {k: seconds(query, alone, 128) / seconds(query, way, 128) for k, way in ways(plan).items()}
    many = replace(query, shape=TokenBatch((128,), cache=CONTEXT))
    sent = {k: price(many, way, full=True).nbytes for k, way in ways(plan).items()}
    assert list(plan.layouts)[-1] == "row"
    assert gains["row"] > 3.6 > 3.2 > gains["block"] > gains[""]
    assert sent["row"] < sent["block"] / 5
