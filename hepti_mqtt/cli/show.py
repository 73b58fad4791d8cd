"""`hepti devices` and `hepti plan`: what there is, and how a model is divided and why."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hepti_mqtt.cli import output
from hepti_mqtt.cli.site import PLANNER_S, require_broker
from hepti_mqtt.client import Hepti
from hepti_mqtt.client.described import cluster_described
from hepti_mqtt.cluster import Cluster
from hepti_mqtt.errors import ConfigError, PlanError
from hepti_mqtt.plan import Plan
from hepti_mqtt.program import Program
from hepti_mqtt.simulate import Naming, Simulation, explain, simulate, timeline_svg, timeline_text
from hepti_mqtt.spec import ModelSpec, RequestShape
from hepti_mqtt.strategies import programs


def devices(args: argparse.Namespace) -> int:
    """Print every device of the site with what it said of itself."""
    with Hepti.connect(require_broker(args), site=args.site) as hepti:
        found = hepti.devices(wait_s=args.wait)
    if args.json:
        output.print_json({"site": args.site, "devices": found})
        return 0
    rows = []
    for d in found:
        hb = d.get("heartbeat") or {}
        rows.append(
            (
                d["device"],
                d["status"],
                d.get("threads", "-"),
                d.get("isa", "-"),
                f"{d['memory_budget_bytes'] / output.MIB:.0f}" if "memory_budget_bytes" in d else "-",
                f"{_gflops(d):.1f}" if "curves" in d else "-",
                _scaled(hb.get("round_trip_s"), 1e3, 2),
                _scaled(hb.get("bandwidth_bytes_per_s"), 8e-6, 0),
                _scaled(hb.get("cpu_other"), 100, 0),
                _scaled(hb.get("slowdown"), 1, 2),
            )
        )
    columns = (
        "device",
        "status",
        "threads",
        "isa",
        "MiB",
        "GFLOP/s",
        "round trip ms",
        "Mbit/s",
        "other CPU %",
        "slowdown",
    )
    output.print_table(f"site {args.site}", columns, rows)
    return 0


def _gflops(device: Mapping[str, Any]) -> float:
    curve = max(device["curves"]["linear"], key=lambda c: c["k"] * c["n"])
    rows, seconds = curve["points"][-1]
    return float(2e-9 * rows * curve["k"] * curve["n"] / seconds)


def _scaled(value: float | None, factor: float, digits: int) -> str:
    return "-" if value is None else f"{value * factor:.{digits}f}"


def plan(args: argparse.Namespace) -> int:
    """Print the active plan of a model, the candidates that it was chosen from, and on request its Programs."""
    with Hepti.connect(require_broker(args), site=args.site) as hepti:
        model = args.model or _only(hepti.models(PLANNER_S))
        shown = hepti.plan(model, PLANNER_S)
        found = hepti.devices(wait_s=1.5) if args.explain or args.svg else []
    if args.json:
        output.print_json({k: v for k, v in shown.items() if k != "spec"})
    else:
        print_plan(model, shown)
    if (args.explain or args.svg) and shown["active"]:
        active, spec = Plan.from_dict(shown["active"]), ModelSpec.from_dict(shown["spec"])
        shape = RequestShape((active.predicted_tokens or min(128, spec.max_tokens),))
        played = play_plan(args.site, spec, active, shape, cluster_described(found, active.devices))
        if args.svg:
            draw_plan(args.svg, active, played)
        if args.explain and not args.json:
            explain_plan(active, played, args.layer)
    return PlanError.exit_code if shown["error"] else 0


def _only(names: Sequence[str]) -> str:
    if len(names) != 1:
        raise ConfigError(f"name a model; the planner serves: {', '.join(names) or 'none'}")
    return names[0]


def print_plan(model: str, shown: Mapping[str, Any]) -> None:
    """Print the candidates as a table and the reason as a sentence."""
    if shown.get("error"):
        output.print_lines([f"no plan for {model}: {shown['error']['message']}"])
        return
    rows = [
        (
            "*" if place == 0 else "",
            c["name"],
            ", ".join(c["devices"]),
            f"{c['predicted_ms']:.1f}",
            f"{c['expected_ms']:.1f}",
            c["bytes"],
            "yes"
            if c["feasible"]
            else "; ".join(f"{d} lacks {b / output.MIB:.0f} MiB" for d, b in c["missing"].items()),
        )
        for place, c in enumerate(shown.get("candidates") or [])
    ]
    if rows:
        output.print_table(
            f"plans for {model}", ("", "strategy", "devices", "predicted ms", "expected ms", "bytes", "fits"), rows
        )
    active = shown.get("active")
    if active is None:
        output.print_lines([f"no plan of {model} is active yet"])
        return
    epoch = ".".join(map(str, active["epoch"]))
    kept = f"weights {active['storage']}, wire {active['wire']}, route {active['route']}"
    output.print_lines([f"active: epoch {epoch}, head {active['head']}, {kept}"])
    output.print_lines([f"why: {active['reason']}"])


@dataclass(frozen=True, slots=True)
class Played:
    """A request of `shape` under a plan, as the simulator saw it."""

    spec: ModelSpec
    shape: RequestShape
    programs: Mapping[str, Program]
    result: Simulation


def play_plan(site: str, spec: ModelSpec, plan: Plan, shape: RequestShape, cluster: Cluster) -> Played:
    """Return what happens in a request under a plan, by simulation."""
    parts = programs(spec, plan, shape)
    return Played(spec, shape, parts, simulate(Naming(site, plan.model), spec, shape, parts, cluster, record=True))


def draw_plan(file: Path, plan: Plan, played: Played) -> None:
    """Write the time line as a picture; raises ConfigError if the file cannot be written."""
    title = f"{plan.strategy} {' '.join(plan.options.values())}, {played.shape.tokens} tokens, simulated"
    try:
        file.write_text(timeline_svg(played.result.events, plan.devices, played.result.seconds, title))
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror or error}; choose another --svg") from error
    output.err.print(f"wrote {file}", markup=False)


def explain_plan(plan: Plan, played: Played, layer: int) -> None:
    """Print one layer's ops of every device and the time line."""
    layer, result = min(layer, played.spec.layers - 1), played.result
    for name, program in played.programs.items():
        use = result.devices[name]
        busy = f"computes {use.compute_s * 1e3:.1f} ms, waits {use.wait_s * 1e3:.1f} ms, sends {use.sent_bytes} bytes"
        output.print_lines(["", f"{name}: {len(program.ops)} ops, {busy}; layer {layer}:", *explain(program, layer)])
    title = f"time line of {played.shape.tokens} tokens (simulated, {result.seconds * 1e3:.1f} ms):"
    output.print_lines(["", title, *timeline_text(result.events, plan.devices, result.seconds)])
