"""Play the plans of a measured experiment again, with and without the broker's own link: replay.py RESULTS.jsonl...

Devices have the speed that they measured of themselves and links the rate of the lab, so that what is left is the
simulator's own error. Prints CSV: measured ms, and what was predicted then, without and with the broker's link.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import median

from hepti_mqtt.client.described import cluster_described
from hepti_mqtt.cost.simulator import Naming, simulate
from hepti_mqtt.lab.site import SITE
from hepti_mqtt.models import spec_from_dict
from hepti_mqtt.models.shapes import PackedTokens
from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import make_plan, programs

LATENCY_S = 0.3e-3  # of the lab's links, with what a broker takes


def main(files: list[str]) -> None:
    """Print one line for every turn that was answered."""
    lines = [json.loads(line) for file in files for line in Path(file).read_text(encoding="utf-8").splitlines()]
    turns = [line for line in lines if line["record"] == "turn" and line["ok"]]
    # Turns of Hepti's own choice hold what devices said of themselves.
    told = {(turn["of"]["model"], turn["of"]["rate"]): turn for turn in turns if turn.get("active")}
    print("model,rate_mbit,strategy,devices,measured_ms,predicted_ms,without_broker_ms,with_broker_ms")
    for turn in sorted(
        turns, key=lambda t: (t["of"]["model"], -t["of"]["rate"], t["of"]["strategy"], len(t["of"]["devices"]))
    ):
        cell, chosen = turn["of"], turn["plan"]
        if not chosen or (cell["model"], cell["rate"]) not in told:
            continue
        known, names = told[cell["model"], cell["rate"]], tuple(chosen["devices"])
        spec, shape = spec_from_dict(known["spec"]), PackedTokens((turn["tokens"],))
        draft = Plan(cell["model"], tuple(chosen["epoch"]), chosen["strategy"], names, names[0], wire=chosen["wire"])
        plan = make_plan(spec, draft, chosen["strategy"], chosen["options"], tuple(chosen["devices"].values()))
        rate = cell["rate"] * 1e6 / 8
        said = cluster_described(known["devices"], names)
        cluster = replace(
            said,
            devices={n: replace(d, slowdown=1.0) for n, d in said.devices.items()},
            links={
                n: replace(li, latency_s=LATENCY_S, up_bytes_per_s=rate, down_bytes_per_s=rate)
                for n, li in said.links.items()
            },
        )
        parts = programs(spec, plan, shape)
        without, shared = (
            1e3 * simulate(Naming(SITE, plan.model), spec, shape, parts, replace(cluster, broker_bytes_per_s=b)).seconds
            for b in (inf, rate)
        )
        way = "/".join([chosen["strategy"], *chosen["options"].values()])
        times = (median(turn["latency_ms"]), turn["predicted_ms"], without, shared)
        print(cell["model"], f"{cell['rate']:g}", way, len(names), *(f"{t:.0f}" for t in times), sep=",")


if __name__ == "__main__":
    main(sys.argv[1:])
