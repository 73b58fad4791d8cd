"""What Hepti should be ahead of, by simulation: its choice beside every method by hand, BERT-Large on four devices.

Run by hand: `make bench-bars` (OUT=directory). Nothing is measured: every figure is the simulator's. What is in OUT
already is not simulated again, so a run that was cut goes on. docs/results.md says what the columns are.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from hepti_mqtt.bench.contenders import CONTENDERS, SITE, STRATEGY_NAMES
from hepti_mqtt.bench.experiment import spec_of
from hepti_mqtt.bench.simulated import Point, cluster_of
from hepti_mqtt.config import settings
from hepti_mqtt.config.sites import load_site
from hepti_mqtt.cost.explain import flops
from hepti_mqtt.cost.profiles import Cluster
from hepti_mqtt.cost.simulator import Naming
from hepti_mqtt.errors import ConfigError, PlanError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.models import graph, largest_shape, shape_for
from hepti_mqtt.plan_programs import lowered
from hepti_mqtt.planner import Candidate, Question, decide, price

MODEL, DEVICES = "bert-large", 4
SITES, RATES, LENGTHS = ("four-pi4", "mixed-four-roomy"), (940, 240, 100), (128, 256)
UNLIMITED_BYTES_PER_S = 1e15
EQUAL, UNEVEN = "megatron", "galaxy"  # what the choice is held against by name


def main() -> None:
    """Simulate what is missing, then print the table."""
    out = Path(os.environ.get("OUT", "results/bars")) / "bars.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    kept = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    found = {(r["site"], r["rate"], r["tokens"], r["name"]): r for r in kept}
    with out.open("a") as file:
        for site, rate, tokens in product(SITES, RATES, LENGTHS):
            for name in ("auto", *by_hand()):
                if (site, rate, tokens, name) not in found:
                    record = {
                        "site": site,
                        "rate": rate,
                        "tokens": tokens,
                        "name": name,
                        **told(site, rate, tokens, name),
                    }
                    found[site, rate, tokens, name] = record
                    file.write(json.dumps(record) + "\n")
                    file.flush()
    print_table(found)


def by_hand() -> Iterator[str]:
    """Yield every method and variant that a user can pin for four devices."""
    spec = spec_of(MODEL)
    kind = graph(spec, largest_shape(spec))
    for name in STRATEGY_NAMES:
        contender = CONTENDERS[name]
        takes = any(contender.takes(n) for n in range(1, DEVICES + 1))
        if (
            contender.source == SITE
            and contender.strategy not in {None, "replicas"}
            and takes
            and contender.divides(kind)
        ):
            yield name


def question(site: str, rate: int, tokens: int, name: str) -> Question:
    """Return what is asked: for a method by hand, on the best subset of the devices."""
    point = Point(site, rate, MODEL, tokens, "", "f32", "f32", DEVICES, name)
    spec, contender = spec_of(MODEL), CONTENDERS[name]
    return Question(
        Naming("bench", MODEL),
        spec,
        cluster_of(load_site(settings.find_bundled_config("sites", Path(site))), point),
        shape_for(spec, tokens),
        Epoch(1, 1),
        strategy=contender.strategy,
        options=contender.options or {},
    )


def told(site: str, rate: int, tokens: int, name: str) -> dict[str, Any]:
    """Return the milliseconds of a method: on the best subset, on all devices; of the choice, what bounds it too."""
    asked = question(site, rate, tokens, name)
    best = chosen(asked)
    if best is None:
        return {"ms": None}
    record: dict[str, Any] = {"ms": best.price.seconds * 1e3, "plan": best.plan.method, "on": len(best.plan.devices)}
    if name.partition("/")[0] in {EQUAL, UNEVEN}:
        whole = chosen(replace(asked, devices=tuple(asked.cluster.devices)))
        record["all_ms"] = None if whole is None else whole.price.seconds * 1e3
    if name == "auto":
        free = price(replace(asked, cluster=unlimited(asked.cluster)), best.plan, full=True)
        record |= {"unlimited_ms": free.seconds * 1e3, "ideal_ms": ideal_s(asked, best) * 1e3}
    return record


def chosen(asked: Question) -> Candidate | None:
    """Return the best plan, None where nothing fits or the method does not take so many devices."""
    try:
        return decide(asked).chosen
    except (PlanError, ConfigError):
        return None


def unlimited(cluster: Cluster) -> Cluster:
    """Return the same devices on links that carry anything at once."""
    rate = UNLIMITED_BYTES_PER_S
    links = {
        n: replace(link, latency_s=0.0, up_bytes_per_s=rate, down_bytes_per_s=rate) for n, link in cluster.links.items()
    }
    return replace(cluster, links=links, broker_bytes_per_s=rate)


def ideal_s(asked: Question, best: Candidate) -> float:
    """Return the work of one device alone over the sum of all devices' speeds."""
    head = best.plan.head
    alone = replace(best.plan, strategy="single", devices=(head,), options={}, weights={}, ranges={})
    speeds = (device.speed(asked.shape.tokens) for device in asked.cluster.devices.values())
    return flops(lowered(asked.spec, alone, asked.shape)) / sum(speeds)


def print_table(found: Mapping[tuple[str, int, int, str], Mapping[str, Any]]) -> None:
    """Print a markdown table, and the geometric mean of the choice over the best by hand."""
    print(f"{MODEL}, {DEVICES} devices, f32: simulated, not measured\n")
    print("| site | Mbit/s | m | Hepti's choice, ms | best by hand, ms | choice / best |", end="")
    print(f" less than {EQUAL}, equal | less than {UNEVEN}, uneven | of the unlimited link | of work / speeds |")
    print("|---|---:|---:|---|---|---:|---:|---:|---:|---:|")
    ratios = []
    for site, rate, tokens in product(SITES, RATES, LENGTHS):
        rows = {name: r for (*key, name), r in found.items() if key == [site, rate, tokens] and r["ms"] is not None}
        auto = rows.pop("auto")
        best = min(rows, key=lambda name: rows[name]["ms"])
        ratios.append(auto["ms"] / rows[best]["ms"])
        less = [_less(auto["ms"], rows, name) for name in (EQUAL, UNEVEN)]
        shares = [f"{auto[key] / auto['ms']:.0%}" for key in ("unlimited_ms", "ideal_ms")]
        print(f"| {site} | {rate} | {tokens} | {auto['ms']:.0f}, {auto['plan']} on {auto['on']}", end="")
        print(f" | {rows[best]['ms']:.0f}, {best} on {rows[best]['on']} | {ratios[-1]:.3f} | ", end="")
        print(" | ".join([*less, *shares]), "|")
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"\nchoice / best by hand: geometric mean {mean:.3f}, worst {max(ratios):.3f}")


def _less(ms: float, rows: Mapping[str, Mapping[str, Any]], strategy: str) -> str:
    """Return how much less time the choice takes than the fastest variant of a method on all devices."""
    theirs = [r["all_ms"] for n, r in rows.items() if n.partition("/")[0] == strategy and r["all_ms"] is not None]
    return f"{1 - ms / min(theirs):.0%}" if theirs else "does not fit"


if __name__ == "__main__":
    main()
