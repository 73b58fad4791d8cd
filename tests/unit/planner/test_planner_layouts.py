"""In which layout a decoder's runs of how many rows are: in that which the simulator finds fastest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from swarm import profile_curve

from hepti_mqtt.checkpoint.make import spec_of_kind
from hepti_mqtt.config.settings import find_bundled_site
from hepti_mqtt.config.sites import load_site
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.profiles import Cluster, DeviceProfile, Link
from hepti_mqtt.cost.simulator import TopicNames
from hepti_mqtt.models import quantised
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.planner import Question, decide, price
from hepti_mqtt.strategies import STRATEGIES

TINY = spec_of_kind("tiny-llama")
SPEC = replace(TINY, layers=8, hidden=1024, heads=16, mlp=2048, max_tokens=512, block=replace(TINY.block, head_dim=64))
SPEC = replace(SPEC, text=replace(SPEC.text, positions=512))
LAYOUTS = ("", *STRATEGIES["decoder"].layouts)
CONTEXT = 512


def question(site, spec=SPEC):
    return Question(
        TopicNames("home", "m"), spec, site, TokenBatch((1,), cache=CONTEXT), PlanVersion(1, 1), strategy="decoder",
        devices=tuple(site.devices),
    )  # fmt: skip


def site_of(gflops, mbit, memory_bytes):
    profiles = {
        f"d{i}": DeviceProfile(f"d{i}", profile_curve(g * 1e9), 2e9, 4e9, memory_bytes=memory_bytes)
        for i, g in enumerate(gflops)
    }
    links = {name: Link(0.1e-3, mbit * 125e3, mbit * 125e3) for name in profiles}
    return Cluster(profiles, links, endpoints=frozenset(profiles))


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
    query = question(site_of(gflops, mbit, memory))
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
    query = question(load_site(find_bundled_site(Path("configs/sites/four-pi4.yaml"))), quantised(LLAMA, "q4"))
    decision = decide(query)
    plan = decision.chosen.plan
    alone = replace(plan, strategy="single", devices=(plan.root,), shares={}, ranges={}, layouts={})
    gains = {k: seconds(query, alone, 128) / seconds(query, way, 128) for k, way in ways(plan).items()}
    many = replace(query, shape=TokenBatch((128,), cache=CONTEXT))
    sent = {k: price(many, way, full=True).nbytes for k, way in ways(plan).items()}
    assert list(plan.layouts)[-1] == "row"
    assert gains["row"] > 3.6 > 3.2 > gains["block"] > gains[""]
    assert sent["row"] < sent["block"] / 5
