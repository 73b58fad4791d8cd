"""Draws the pictures here: one layer of a small model under each method; `make pictures` runs it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from leasing import LEASED, leased_request
from sites import EVERY_FAMILY, FAMILIES, plan, request

from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.config.sites import load_site
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.profiles import Cluster, Curve, DeviceProfile, Link
from hepti_mqtt.core.spec import Spec
from hepti_mqtt.cost.explain import layout_svg, timeline_svg
from hepti_mqtt.cost.simulator import TopicNames, simulate, simulate_requests, simulated_request
from hepti_mqtt.models import graph
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.models.transformer import ModelSpec
from hepti_mqtt.shares import DeviceResources
from hepti_mqtt.strategies import STRATEGIES
from hepti_mqtt.strategies.plan_programs import device_programs, lower_plan, make_plan

HERE = Path(__file__).parent
DEVICES = 4
LAYERS = 8


class Picture(NamedTuple):
    """A variant of a method; lengths: of the sequences; layers: that are drawn, all of a model without equal ones."""

    method: str
    options: dict[str, str]
    lengths: tuple[int, ...] = (16,)
    layers: tuple[int, ...] = (2,)
    devices: int = DEVICES
    changes: tuple[tuple[str, int], ...] = ()  # of the model's spec


# Methods that need more than their first variant on four devices, one layer and one sequence.
CHOSEN = (
    Picture("grid", {"nt": "2"}),
    Picture("two_d", {"x": "2"}),
    Picture("voltage", {"order": "kept"}),
    Picture("voltage", {"order": "reordered"}),
    Picture("pipeline", {}, (10, 6), (3, 4)),
    Picture("map_rows", {"cut": "none"}),
    Picture("coedge", {}),
    *(Picture("fused_tiles", {"cut": cut}) for cut in ("none", "1")),
    Picture("replicas", {}),
    *(
        Picture("decoupled", {"original": o}, (16,), (2, 3), 2, (("layers", 6), ("groups", 3), ("parts", 2)))
        for o in ("everywhere", "megatron")
    ),
)


# Time lines: one or two layers of BERT-Base, or two groups of a decoupled model, on four boards at 240 Mbit/s.
SITE = HERE.parents[1] / "configs" / "sites" / "four-pi4.yaml"
RATE = 240e6 / 8
TOKENS = 128
TIMED = (
    ("single", {}),
    ("row", {"variant": "heads"}),
    ("column", {}),
    ("block", {}),
    ("grid", {"nt": "2"}),
    ("megatron", {"reduce": "ring"}),
    ("two_d", {"x": "2"}),
    ("galaxy", {"exchange": "ring"}),
    ("voltage", {}),
    ("pipeline", {}),
    ("decoupled", {"original": "everywhere"}),
)


def time_line(method: str, options: dict[str, str]) -> str:
    """Return the time line of a request under a method, as the simulator sees it."""
    base = spec_of_kind("debert-base" if method == "decoupled" else "bert-base")
    deep = {"two_d": 1}.get(method, 2)
    spec = replace(base, layers=6, groups=2) if method == "decoupled" else replace(base, layers=deep)
    site = load_site(SITE)
    links = {name: replace(link, up_bytes_per_s=RATE, down_bytes_per_s=RATE) for name, link in site.links.items()}
    cluster = replace(site, links=links, broker_bytes_per_s=RATE)
    devices = tuple(cluster.devices)[: STRATEGIES[method].max_devices]
    # A pipeline shows what it is for where several sequences are in flight.
    lengths = (TOKENS // 4,) * 4 if method == "pipeline" else (TOKENS,)
    resources = [DeviceResources(RATE, link.latency_s) for link in links.values()][: len(devices)]
    weights = [cluster.devices[d].speed(TOKENS) for d in devices]
    template = Plan(
        "model", PlanVersion(1, 1), method, devices, devices[0], route="mesh" if len(devices) > 1 else "broker"
    )
    chosen = make_plan(spec, template, method, options, weights, resources)
    shape = TokenBatch(lengths)
    played = simulate(
        TopicNames("home", "model"), spec, shape, device_programs(spec, chosen, shape), cluster, record=True
    )
    what = "two groups of DeBERT-Base" if method == "decoupled" else f"{deep} layer{'s' * (deep > 1)} of BERT-Base"
    batch = f"{len(lengths)} x {lengths[0]}" if len(lengths) > 1 else f"{TOKENS}"
    title = f"{chosen.method}: {what}, {batch} tokens, 240 Mbit/s, simulated: {played.seconds * 1e3:.0f} ms"
    return timeline_svg(played.events, devices, played.seconds, title)


def leases() -> str:
    """Return the time line of a request with leased tiles while one device becomes slower."""
    drawn = leased_request("vgg16", "mixed-four", {"cut": "3", **LEASED}, {"pi1": 2.0})
    title = (
        f"{drawn.plan.method}: VGG-16 on mixed-four, pi1 at half its speed from 50 ms on, simulated: "
        f"{drawn.slower.seconds * 1e3:.0f} ms, {drawn.steady.seconds * 1e3:.0f} ms otherwise"
    )
    return timeline_svg(drawn.slower.events, drawn.plan.devices, drawn.slower.seconds, title)


def spec_of(method: str) -> Spec | None:
    """Return a small model that a method divides, None if there is none."""
    for spec in EVERY_FAMILY.values():
        if STRATEGIES[method].why_unsupported(graph(spec, request(spec, (1,))[0])) is None:
            return replace(spec, layers=LAYERS, mlp=4 * spec.hidden) if type(spec) is ModelSpec else spec
    return None


def pictures() -> dict[str, str]:
    """Return every picture by its file name."""
    wanted = list(CHOSEN)
    for name, method in STRATEGIES.items():
        if name not in {p.method for p in CHOSEN} and spec_of(name) is not None:
            devices = min(DEVICES, method.max_devices or DEVICES)
            wanted += [Picture(name, dict(options)) for options in method.variants_for(devices)]
    layouts = {"-".join([p.method, *p.options.values()]) + ".svg": draw(p) for p in wanted}
    layouts["fused_tiles-leased.svg"] = leases()
    return layouts | {f"{name}-time.svg": time_line(name, dict(options)) for name, options in TIMED}


def draw(picture: Picture) -> str:
    """Return one picture: devices with equal shares, for a request of all hidden states."""
    spec = spec_of(picture.method)
    assert spec is not None
    if STRATEGIES[picture.method].groups is not None:
        return draw_requests(picture)
    spec = replace(spec, **dict(picture.changes))
    devices = min(picture.devices, STRATEGIES[picture.method].max_devices or DEVICES)
    chosen = plan(spec, (picture.method, picture.options), (1.0,) * devices)
    if isinstance(spec, ModelSpec):
        drawn = lower_plan(spec, chosen, request(spec, picture.lengths, "hidden")[0])
        what, layers = f"{sum(picture.lengths)} tokens", picture.layers
    else:
        drawn = lower_plan(spec, chosen, request(spec, (1,))[0])
        what, layers = "one request", tuple(range(drawn.full_graph.layer_count()))
    which = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
    return layout_svg(drawn, layers, f"{chosen.method}: a small model, {what}, {which}")


def draw_requests(picture: Picture) -> str:
    """Return the time line of eight requests on replicas; the first is three times as fast as the last."""
    spec, naming = replace(FAMILIES["bert-embedding"], layers=1), TopicNames("home", "m")
    chosen = plan(spec, (picture.method, picture.options), (1.0,) * picture.devices)
    speeds = dict(zip(chosen.devices, (3.0, 2.0, 2.0, 1.0), strict=True))
    profiles = {
        d: DeviceProfile(d, (Curve(32, 32, ((1, 1e-3 / s), (20, 2e-2 / s))),), 1e6 * s, 1e6 * s)
        for d, s in speeds.items()
    }
    cluster = Cluster(profiles, {d: Link(1e-3, 3e7, 3e7) for d in chosen.devices})
    shape, _ = request(spec, picture.lengths)
    requests = (simulated_request(naming, spec, chosen, shape, cluster),) * 8
    played = simulate_requests(naming, spec, requests, cluster, in_flight=1, record=True)
    seconds = max(run.answered_s for run in played.runs)
    title = f"{chosen.method}: eight requests that wait, devices of speeds 3, 2, 2 and 1"
    return timeline_svg(played.events, chosen.devices, seconds, title)


def main() -> int:
    """Write the pictures, and remove outdated ones."""
    current = pictures()
    for old in HERE.glob("*.svg"):
        if old.name not in current:
            old.unlink()
    for name, picture in current.items():
        (HERE / name).write_text(picture, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
