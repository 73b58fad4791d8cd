"""`hepti devices`, `top` and `plan`: the devices, how a model is divided and why."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, get_args

from hepti_mqtt.cli import output
from hepti_mqtt.cli.shared import PLANNER_S, check_readable, only_model, require_broker
from hepti_mqtt.client import Hepti
from hepti_mqtt.client.described import cluster_of_devices, sanitize_device, unusable_reason, usable
from hepti_mqtt.client.simulated import SimulatedPlan, simulate_plan
from hepti_mqtt.core.errors import ConfigError, HeptiError, PlanError
from hepti_mqtt.core.plan import NARROW_WIRE_DTYPES, Objective, Plan, Route
from hepti_mqtt.core.profiles import Cluster
from hepti_mqtt.core.program import Program
from hepti_mqtt.core.spec import RequestShape, Spec
from hepti_mqtt.cost.explain import (
    format_program,
    layout_svg,
    plan_work_factor,
    task_owners,
    task_summary,
    timeline_svg,
    timeline_text,
)
from hepti_mqtt.cost.simulator import (
    ROUNDS,
    Simulation,
    Throughput,
    TopicNames,
    simulate,
    simulate_throughput,
    simulated_request,
)
from hepti_mqtt.models import representative_shape, spec_from_dict
from hepti_mqtt.planner import Candidate, Decision, Question, decide
from hepti_mqtt.planner.candidates import relayed, with_route
from hepti_mqtt.protocol.messages import unreadable
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.strategies import STRATEGIES
from hepti_mqtt.strategies.plan_programs import device_programs, lower_plan


def print_candidates(title: str, ranking: Sequence[Candidate]) -> None:
    """Print the best candidate of every strategy and variant, best first; `-`: no requests were played for it."""
    columns: dict[str, Callable[[Candidate], object]] = {
        "strategy": lambda c: c.name,
        "devices": lambda c: ", ".join(c.plan.devices),
        "route": lambda c: c.plan.route if c.plan.wire == "f32" else f"{c.plan.route}, {c.plan.wire}",
        "predicted ms": lambda c: f"{c.price.seconds * 1e3:.1f}",
        "requests/s": lambda c: f"{c.price.load.requests_per_s:.3g}" if c.price.load else "-",
        "of memory": lambda c: f"{c.price.memory_share:.0%}",
        "MiB": lambda c: " ".join(f"{n / output.MIB:.0f}" for n in c.price.needs.values()),
        "fits": lambda c: "yes" if c.price.feasible else "no",
    }
    if not any(c.price.load for c in ranking):
        del columns["requests/s"]
    output.print_items(title, columns, ranking)


def search_now(
    naming: TopicNames,
    model: tuple[Spec, Plan, RequestShape],
    devices: Sequence[Mapping[str, Any]],
    in_flight: int,
    objective: Objective,
) -> Decision:
    """Return the decision of a search for the online devices, by simulation of one and of several requests.

    model: the spec, the active plan (its wire and storage are kept), and the shape of a request. Raises as `decide`.
    """
    spec, plan, shape = model
    cluster = cluster_of_devices(devices, [d["device"] for d in devices if d["status"] == "online" and "curves" in d])
    pins = Pins(wire=plan.wire, weight_dtype=plan.weight_dtype, objective=objective)
    requests = ROUNDS * in_flight
    return decide(pins.question(naming, spec, cluster, shape, plan.version, in_flight=in_flight, requests=requests))


# ----------------------------------------------------------------------------------------------------------------------
# The time of a plan by the other route, or with narrower numbers on the wire, by simulation.


def what_if(site: str, spec: Spec, plan: Plan, shape: RequestShape, cluster: Cluster) -> list[str]:
    """Return a line about routes and one about narrow numbers of a plan; none for one device: it sends nothing."""
    plan = plan.executables[0]  # of replicas all are alike in this
    if len(plan.devices) == 1:
        return []
    question = Question(
        TopicNames(site, plan.model), spec, cluster, shape, plan.version, relayed_pairs=frozenset(plan.relayed_pairs)
    )

    def played(other: Plan) -> Simulation:
        parts: dict[str, Program] = device_programs(spec, other, shape)
        return simulate(question.naming, spec, shape, parts, cluster)

    apart = relayed(question, plan.devices)
    pairs = len(plan.devices) * (len(plan.devices) - 1)
    words = []
    for route in get_args(Route):
        if route == "mesh" and len(apart) == pairs:
            words.append("over mesh: none of these devices can connect to each other")
            continue
        relayed_by_broker = f", {len(apart)} of {pairs} pairs over the broker" if route == "mesh" and apart else ""
        words.append(f"over {route} {_costs(played(with_route(question, plan, route)))}{relayed_by_broker}")
    lines = [f"routes of {plan.method}: " + "; ".join(words)]
    if plan.wire == "f32":
        now, words = played(plan), []
        for wire in reversed(NARROW_WIRE_DTYPES):
            narrow = played(replace(plan, wire=wire))
            words.append(f"{wire} {_costs(narrow)}, {now.seconds / narrow.seconds:.2f}x speed-up")
        lines.append(f"numbers on the wire: f32 {_costs(now)}; {'; '.join(words)}; --accuracy lets the planner choose")
    return lines


def _costs(played: Simulation) -> str:
    return f"{played.seconds * 1e3:.1f} ms ({played.nbytes / 1e6:.1f} MB)"


# ----------------------------------------------------------------------------------------------------------------------
# `hepti devices`, `hepti top` and `hepti plan`.


WATCH_S: Final = 2.0
STEPS_SHOWN: Final = 8


def devices(args: argparse.Namespace) -> int:
    """Print every device of the site with its own description."""
    with Hepti.connect(require_broker(args), site=args.site) as hepti:
        show = partial(_print_devices, hepti, args)
        if args.watch:
            output.watch(show, WATCH_S)
        else:
            show()
    return 0


def top(args: argparse.Namespace) -> int:
    """Show devices and plans until q is pressed; without a terminal print them once."""

    def show() -> None:
        _print_devices(hepti, args)
        try:
            records = {name: hepti.plan(name, PLANNER_S) for name in hepti.models(PLANNER_S)}
        except HeptiError as error:
            output.print_lines(["", str(error)])
            return
        output.print_lines([""])
        _print_plans(records)

    with Hepti.connect(require_broker(args), site=args.site) as hepti:
        output.watch(show, WATCH_S)
    return 0


def _print_plans(records: Mapping[str, Mapping[str, Any]]) -> None:
    rows, steps = [], []
    for name, record in records.items():
        active, best = record["active"], next(iter(record["candidates"]), None)
        error = (record["error"] or {}).get("message")
        # A planner of another version may lack `loading`.
        doing = record.get("loading") or ("preparing another plan" if record["preparing"] else "")
        method = "/".join([active["strategy"], *active["options"].values()]) if active else "-"
        names = ", ".join(active["devices"]) if active else "-"
        predicted = output.predicted(record, best["devices"], best["predicted_ms"]) if active and best else "-"
        rows.append((name, method, names, predicted, error or doing or (active["reason"] if active else "-")))
        steps += [(one["time"], one["plan"], f"{one['from']} to {one['to']}", one["cause"]) for one in record["story"]]
    output.print_table("plans", ("model", "strategy", "devices", "predicted ms", "why"), rows)
    last = [
        (datetime.fromtimestamp(at).strftime("%H:%M:%S"), *others)
        for at, *others in sorted(steps, reverse=True)[:STEPS_SHOWN]
    ]
    output.print_lines([""])
    output.print_table("the last steps", ("time", "plan", "step", "cause"), last)


def _print_devices(hepti: Hepti, args: argparse.Namespace) -> None:
    devices = hepti.devices(wait_s=args.wait)
    clocks, unused = hepti.odd_clocks(devices), hepti.unused()
    if not devices and not hepti.planner_online:
        raise ConfigError(
            f"there is no planner and no device at site {args.site}; check --site and HEPTI_SITE, or start them: "
            "hepti planner --model NAME=DIR, hepti agent"
        )
    refused = {d["device"]: why for d in devices if (why := unusable_reason(d)) is not None}
    if args.json:
        reasons = unused | refused
        listed = [{**d, "refused": reasons.get(d["device"])} for d in devices]
        output.print_json({"site": args.site, "devices": listed, "odd_clocks": clocks})
        return

    def heard(key: str, factor: float, digits: int) -> Callable[[Mapping[str, Any]], str]:
        return lambda d: _scaled(_beat(d).get(key), factor, digits)

    columns: dict[str, Callable[[Mapping[str, Any]], object]] = {
        "device": lambda d: d["device"],
        "status": output.status_text,
        "threads": lambda d: d.get("threads", "-"),
        "isa": lambda d: d.get("isa", "-"),
        "MiB": lambda d: _scaled(d.get("memory_budget_bytes"), 1 / output.MIB, 0),
        "GFLOP/s": lambda d: f"{_gflops(d):.1f}" if "curves" in d else "-",
        "round trip ms": heard("round_trip_s", 1e3, 2),
        "Mbit/s": heard("bandwidth_bytes_per_s", 8e-6, 0),
        "other CPU %": heard("cpu_other", 100, 0),
        "slowdown": heard("slowdown", 1, 2),
        "built late": lambda d: _beat(d)["counters"].get("programs_built_late", 0) if "counters" in _beat(d) else "-",
        "hears directly": _hears,
    }
    shown = [{"device": name, "status": "refused"} if (name := d["device"]) in refused else d for d in devices]
    output.print_items(f"site {args.site}", columns, shown)
    for device, said in (unused | refused).items():
        output.print_lines([f"{device} is not used: {said}"])
    for d in devices:
        if (wrong := sanitize_device(d)[1]) is not None:
            output.print_lines([f"{d['device']} published implausible data: {wrong}. Restart its agent"])
    print_peer_traffic(devices)
    print_weights(devices)
    output.print_lines([f"{line}: {output.CLOCK_ADVICE}" for line in clocks])


def _beat(device: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a device's last heartbeat, empty without one."""
    return device.get("heartbeat") or {}


def _hears(device: Mapping[str, Any]) -> str:
    """Return the peers with a direct connection to a device; "-" if all its exchanges pass the broker."""
    if device.get("endpoint") is None:
        return "-"
    return ", ".join(name for name, edge in _beat(device).get("edges", {}).items() if edge["joined"]) or "none"


def print_peer_traffic(devices: Sequence[Mapping[str, Any]]) -> None:
    """Print the direct traffic between devices, and why other pairs need the broker."""
    online = {d["device"]: d["heartbeat"] for d in devices if d["status"] == "online" and d.get("heartbeat")}
    rows, lines = [], []
    for target, heartbeat in online.items():
        for source, edge in heartbeat.get("edges", {}).items():
            sent, link = (online.get(source, {}).get(key, {}).get(target, {}) for key in ("edges", "peers"))
            if edge["frames_in"] or edge["joined"]:
                received = edge["frames_in"], f"{edge['bytes_in'] / output.MIB:.1f}"
                queue = sent.get("queued_bytes", "-"), sent.get("dropped", "-"), edge["reconnections"]
                speed = _scaled(link.get("round_trip_s"), 1e3, 2), _scaled(link.get("bytes_per_s"), 8e-6, 0)
                rows.append((source, target, *received, *queue, *speed))
            if source in online and edge["trouble"] and not edge["joined"]:
                lines.append(f"{target} has no direct connection from {source} ({edge['trouble']}); the broker relays")
    if rows:
        columns = ("from", "to", "frames", "MiB", "queued", "dropped", "reconnected", "round trip ms", "Mbit/s")
        output.print_table("directly between devices", columns, rows)
    output.print_lines(lines)


def print_weights(devices: Sequence[Mapping[str, Any]]) -> None:
    """Print the bytes of weights that each device received from peers and from the planner, and sent to peers."""
    rows = []
    for device in devices:
        counters = _beat(device).get("counters", {})
        received, peers, sent = (
            counters.get(f"tile_bytes_{way}", 0) / output.MIB for way in ("received", "from_peers", "to_peers")
        )
        if received or sent:
            rows.append((device["device"], f"{peers:.1f}", f"{received - peers:.1f}", f"{sent:.1f}"))
    if rows:
        columns = ("device", "MiB from peers", "MiB from the planner", "MiB to peers")
        output.print_table("weights over the network since the start", columns, rows)


def _gflops(device: Mapping[str, Any]) -> float:
    curve = max(device["curves"]["linear"], key=lambda c: c["k"] * c["n"])
    rows, seconds = curve["points"][-1]
    return float(2e-9 * rows * curve["k"] * curve["n"] / seconds)


def _scaled(value: float | None, factor: float, digits: int) -> str:
    return "-" if value is None else f"{value * factor:.{digits}f}"


def plan(args: argparse.Namespace) -> int:
    """Print the active plan of a model, its candidates, and on request its Programs."""
    with Hepti.connect(require_broker(args), site=args.site) as hepti:
        model = args.model or only_model(hepti)
        shown = hepti.plan(model, PLANNER_S)
        devices = usable(hepti.devices(wait_s=1.5)) if needs_simulation(args) else []
    active = _active(shown)
    played = load = None
    if active and needs_simulation(args):
        cluster = cluster_of_devices(devices, active[1].devices)
        played = simulate_plan(args.site, *active, cluster)
        load = simulate_plan_load(args.site, played, cluster, shown.get("in_flight", 1)) if args.explain else None
    if args.json:
        throughput = {"load": load.to_dict()} if load is not None else {}
        work = {"work": plan_work_factor(*active).to_dict()} if active else {}
        output.print_json({k: v for k, v in shown.items() if k != "spec"} | work | throughput)
    else:
        print_plan(model, shown, args.explain)
        if args.story:
            print_plan_history(model, shown)
        if args.story or args.explain:
            print_judgement(model, shown)
    if played is not None:
        write_pictures(args, played)
        if load is not None and not args.json:
            output.print_lines([f"latency alone {played.result.seconds * 1e3:.1f} ms; {load.text()}"])
            output.print_lines(what_if(args.site, played.spec, played.plan, played.shape, cluster))
            objective: Objective = args.objective or "latency"
            parts = (played.spec, played.plan, played.shape)
            others = search_now(TopicNames(args.site, model), parts, devices, shown.get("in_flight", 1), objective)
            print_candidates(f"what a search finds now for {objective}, simulated", others.ranking)
            output.print_lines([f"why: {others.reason}"])
            explain_plan(played, args.layer)
    return PlanError.exit_code if shown["error"] else 0


def _active(shown: Mapping[str, Any]) -> tuple[Spec, Plan, RequestShape] | None:
    """Return the spec, the active plan and the shape of its typical request; None without an active plan."""
    if not shown["active"]:
        return None
    with check_readable("the plan"):
        active, spec = Plan.from_dict(shown["active"]), spec_from_dict(shown["spec"])
        if unknown := sorted({part.strategy for part in active.executables} - STRATEGIES.keys()):
            raise unreadable(f"this version has no strategy {unknown[0]!r}, which the plan uses")
        return spec, active, representative_shape(spec, active.predicted_tokens or 128)


def print_plan(model: str, shown: Mapping[str, Any], explain: bool = False) -> None:
    """Print the candidates as a table and the reason; explain: also why candidates do not fit."""
    if shown.get("error"):
        output.print_lines([f"no plan for {model}: {shown['error']['message']}"])
        output.print_lines(shown["error"]["detail"] if explain else [])
        return
    candidates: Sequence[Mapping[str, Any]] = shown.get("candidates") or ()
    columns: dict[str, Callable[[Mapping[str, Any]], object]] = {
        "": lambda c: "*" if c is candidates[0] else "",
        "strategy": lambda c: c["name"],
        "devices": lambda c: ", ".join(c["devices"]),
        "route": lambda c: c["route"],
        "wire": lambda c: c["wire"],
        "predicted ms": lambda c: output.predicted(shown, c["devices"], c["predicted_ms"]),
        "expected ms": lambda c: output.predicted(shown, c["devices"], c["expected_ms"]),
        "sent": lambda c: output.size(c["bytes"]),
        "fits": _fits,
    }
    if candidates:
        output.print_items(f"plans for {model}", columns, candidates)
    active = shown.get("active")
    if active is None:
        output.print_lines([f"no plan of {model} is active yet"])
    else:
        output.print_lines([f"active: {_described(active)}", f"why: {active['reason']}"])
    for plan in shown.get("pinned") or []:
        divided = f"{'/'.join([plan['strategy'], *plan['options'].values()])} on {', '.join(plan['devices'])}"
        output.print_lines([f"pinned by requests: {divided}, {_described(plan)}"])


def _fits(candidate: Mapping[str, Any]) -> str:
    if candidate["feasible"] is None:
        return "not worked out: too slow"
    lacking = (f"{d} lacks {b / output.MIB:.0f} MiB" for d, b in candidate["missing"].items())
    return "yes" if candidate["feasible"] else "; ".join(lacking)


def _described(plan: Mapping[str, Any]) -> str:
    version = ".".join(map(str, plan["version"]))
    moved = {
        what: plan[what] if error is None else f"{plan[what]} (by which answers move by {error:.1e} of them)"
        for what, error in (("storage", plan["weight_error"]), ("wire", plan["wire_error"]))
    }
    kept = f"weights {moved['storage']}, wire {moved['wire']}, route {plan['route']}"
    if plan["relayed"]:
        kept += f", over the broker from {', '.join(' to '.join(pair) for pair in plan['relayed'])}"
    for layout, most in plan.get("layouts", {}).items():
        kept += f", runs of more than {most} rows as in {layout}"
    sides = [f"{r['strategy']} on {', '.join(r['devices'])}" for r in plan.get("replicas", ())]
    return f"plan version {version}, root device {plan['root']}, {kept}" + (
        f"; side by side {'; '.join(sides)}" if sides else ""
    )


def print_plan_history(model: str, shown: Mapping[str, Any]) -> None:
    """Print the last steps of a model's plans, oldest first, in local time."""
    columns: dict[str, Callable[[Mapping[str, Any]], object]] = {
        "time": lambda step: datetime.fromtimestamp(step["time"]).isoformat(" ", "milliseconds"),
        **{key: itemgetter(key) for key in ("plan", "from", "to", "cause")},
    }
    output.print_items(f"story of the plans for {model}", columns, shown.get("story") or ())


def print_judgement(model: str, shown: Mapping[str, Any]) -> None:
    """Print the planner's last judgement of alternatives to the active plan, and its evidence."""
    columns: dict[str, Callable[[Mapping[str, Any]], object]] = {
        "strategy": lambda a: a["name"],
        "devices": lambda a: ", ".join(a["devices"]),
        "gain": lambda a: f"{a['gain']:.0%}",
        "probability": lambda a: f"{a['probability']:.2f}",
        "requests": lambda a: f"{a['requests']:.0f}",
        "cost s": lambda a: f"{a['cost_s']:.1f}",
        "MiB to load": lambda a: f"{a['load_bytes'] / output.MIB:.0f}",
        "verdict": lambda a: f"{a['verdict']}: {a['why']}",
    }
    if considered := shown.get("considered"):
        output.print_items(f"alternatives to the active plan for {model}", columns, considered)
    evidence = [(device, sentence) for device, said in (shown.get("evidence") or {}).items() for sentence in said]
    if evidence:
        output.print_table("beliefs about devices and links", ("device", "evidence"), evidence)


def needs_simulation(args: argparse.Namespace) -> bool:
    """Return whether the arguments need a simulation."""
    return bool(args.explain or args.svg or args.layout_svg)


def simulate_plan_load(site: str, played: SimulatedPlan, cluster: Cluster, in_flight: int) -> Throughput:
    """Return the simulated throughput of a plan with `in_flight` requests at once."""
    naming = TopicNames(site, played.plan.model)
    request = simulated_request(naming, played.spec, played.plan, played.shape, cluster, played.programs)
    return simulate_throughput(naming, played.spec, request, cluster, in_flight, ROUNDS * in_flight)


def write_pictures(args: argparse.Namespace, played: SimulatedPlan) -> None:
    """Write the pictures that the arguments name; raises ConfigError if a file cannot be written."""
    plan, result = played.plan, played.result
    if args.svg:
        title = f"{played.title()}, simulated"
        write_picture("--svg", args.svg, timeline_svg(result.events, plan.devices, result.seconds, title))
    if args.layout_svg:
        lowered = lower_plan(played.spec, plan, played.shape)
        layers = [min(layer, lowered.full_graph.layer_count() - 1) for layer in args.layer]
        which = f"layer {layers[0]}" if len(set(layers)) == 1 else f"layers {layers[0]} to {layers[-1]}"
        is_divided = lowered.names == plan.executables[0].devices
        names = lowered.names if is_divided else task_owners(result.events, lowered.names, plan.root)
        title = f"{played.title()}, {which}"
        write_picture("--layout-svg", args.layout_svg, layout_svg(lowered, layers, title, plan.wire, names))


def write_picture(option: str, file: Path, picture: str) -> None:
    """Write a picture to the file of an option; raises ConfigError if that fails."""
    try:
        file.write_text(picture, "utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror or error}; choose another {option}") from error
    output.err.print(f"wrote {file}", markup=False)


def explain_plan(played: SimulatedPlan, layers: Sequence[int]) -> None:
    """Print the work factor, some layers' ops of every device and the time line."""
    result = played.result
    last = max(op.layer for program in played.programs.values() for op in program.ops)
    output.print_lines(["", plan_work_factor(played.spec, played.plan, played.shape).text()])
    for name, program in played.programs.items():
        use = result.devices[name]
        busy = f"computes {use.compute_s * 1e3:.1f} ms, waits {use.wait_s * 1e3:.1f} ms, sends {use.sent_bytes} bytes"
        took = task_summary(result.events, name)
        output.print_lines(["", f"{name}: {len(program.ops)} ops, {busy}{took and '; in this run ' + took}"])
        for layer in dict.fromkeys(min(layer, last) for layer in layers):
            output.print_lines([f"layer {layer}:", *format_program(program, layer)])
    title = f"time line of {played.shape.size} tokens (simulated, {result.seconds * 1e3:.1f} ms):"
    output.print_lines(["", title, *timeline_text(result.events, played.plan.devices, result.seconds)])
