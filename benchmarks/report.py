"""What results of kind `infer` say, as Markdown: medians with intervals, ratios within rounds, choices, predictions."""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks import plots
from benchmarks.experiment import ALONE, AUTO, CONTENDERS, Cell
from benchmarks.lab.calibrate import Calibration
from benchmarks.lab.site import SITE
from benchmarks.provenance import FILE, Results, head
from benchmarks.tables import Interval, median_interval, ratio, table
from hepti_mqtt.client.described import cluster_of_devices
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.profiles import Cluster, Link, PeerLink
from hepti_mqtt.core.spec import Spec
from hepti_mqtt.cost.explain import flops
from hepti_mqtt.cost.simulator import TopicNames, simulate, simulate_requests, simulated_request, steady_state
from hepti_mqtt.models import representative_shape, spec_from_dict
from hepti_mqtt.strategies.plan_programs import device_programs, lower_plan

Turn = Mapping[str, Any]
_COLUMNS: Final = (
    *("lab", "rate", "model", "tokens", "strategy", "devices", "wire", "route", "weights", "requests", "objective"),
    *("copy", "round", "repetition", "latency_ms", "compute_ms", "wait_ms", "bytes", "predicted_ms", "expected_ms"),
    *("error", "failure"),
)


@dataclass(frozen=True, slots=True)
class Figures:
    """One cell that has times: those of its rounds in ms, what was predicted last (None without), its last turn.

    Of requests that are asked at once, a time is what one of them takes of the time for all: the throughput's inverse.
    """

    cell: Cell
    by_round: Mapping[int, float]
    predicted_ms: float | None
    turn: Turn
    failed: int

    @property
    def ms(self) -> float:
        """Return the median of the rounds."""
        return median(self.by_round.values())

    @property
    def interval(self) -> Interval:
        """Return it with its interval."""
        return median_interval(self.by_round.values())


def figures(results: Results) -> list[Figures]:
    """Return the figures of every cell that has times, in order of its first turn."""
    turns: dict[Cell, list[Turn]] = defaultdict(list)
    for r in results.of("turn"):
        turns[Cell.of(r["of"])].append(r)
    found = []
    for cell, own in turns.items():
        good = [r for r in own if r["ok"]]
        if not good:
            continue
        if cell.requests:
            by_round = {r["round"]: 1e3 / median(r["requests_per_s"]) for r in good}
            per_s = requests_per_s(([r for r in good if r.get("active")] or good)[-1])
            predicted_ms = None if per_s is None else 1e3 / per_s
        else:
            by_round = {r["round"]: median(r["latency_ms"]) for r in good}
            predicted_ms = good[-1].get("predicted_ms")
        found.append(Figures(cell, by_round, predicted_ms, good[-1], len(own) - len(good)))
    return found


def write(results: Results, directory: Path) -> list[Path]:
    """Write report.md, results.csv and pictures beside the results; return the files."""
    rows, text = directory / "results.csv", directory / "report.md"
    with rows.open("w", newline="", encoding="utf-8") as file:
        lines = csv.DictWriter(file, _COLUMNS, extrasaction="ignore")
        lines.writeheader()
        for r in results.of("turn"):
            for place, latency in enumerate(r["latency_ms"] if r["ok"] else [None]):
                own = {"devices": " ".join(r["of"]["devices"]), "repetition": place, "failure": r.get("message")}
                lines.writerow({**r["of"], **r, **own, "latency_ms": latency})
    found, plays = figures(results), plays_of(results)
    drawn = list(plots.draw(found, directory))
    drawn += [plots.under_changes(p, directory / f"changes-{n}.svg") for n, p in enumerate(plays, 1)]
    said = [*_markdown(results, found, plays), *(f"![{path.stem}]({path.name})" for path in drawn)]
    text.write_text("\n".join(said) + "\n", encoding="utf-8")
    return [directory / FILE, rows, text, *drawn]


def _markdown(results: Results, found: Sequence[Figures], plays: Sequence[Play]) -> Iterator[str]:
    yield from head(results.header["experiment"], results.header)
    for r in results.of("lab"):
        lab, rate, times = r["lab"], r["lab"]["rate_mbit"], r["lab"].get("dilation", 1)
        slowed = f", {times:g} times slower than its file says" if times != 1 else ""
        yield f"## Lab {lab['name']}, {'links as they are' if rate is None else f'{rate:g} Mbit/s'}{slowed}\n"
        yield from Calibration.from_dict(r["calibration"]).lines()
    for _, part in groupby(sorted(found, key=_subject), key=_subject):
        yield from _overview(list(part))
    yield from _choices(results, found)
    yield from _predictions(found)
    for group, part in groupby(sorted(found, key=lambda f: repr(f.cell.group)), key=lambda f: f.cell.group):
        own = list(part)
        yield from (f"## {own[0].cell.title}", "", *_table(own), "", *_throughput(own))
        for r in {str(r["of"]): r for r in results.of("turn") if not r["ok"]}.values():
            if Cell.of(r["of"]).group == group:
                yield f"- failed: {Cell.of(r['of']).label}: {r['message'].splitlines()[0]}"
        yield ""
    for each in plays:
        yield from _changes(each)


def _subject(f: Figures) -> str:
    return repr((f.cell.lab, f.cell.model, f.cell.tokens))


# -- every cell at a glance, choices, predictions ---------------------------------------------------------------------


def _overview(own: Sequence[Figures]) -> Iterator[str]:
    """Yield contenders by rates and devices, the fastest of each column in bold, where there are several columns."""
    columns = sorted({(-(f.cell.rate or 0.0), len(f.cell.devices), f.cell.devices) for f in own})
    if len(columns) < 2:
        return
    kinds = list(CONTENDERS)
    rows = sorted({f.cell.how for f in own}, key=lambda how: (kinds.index(how[0]), how[1:]))
    place = {(f.cell.how, (-(f.cell.rate or 0.0), len(f.cell.devices), f.cell.devices)): f for f in own}
    best = {c: min(f.ms for (_, column), f in place.items() if column == c) for c in columns}
    names = [f"{f'{-rate:g} Mbit/s: ' if rate else ''}{', '.join(devices)}" for rate, _, devices in columns]
    lines = [[" ".join(how), *(_words(place.get((how, column)), best[column]) for column in columns)] for how in rows]
    yield f"## {own[0].cell.model}, {own[0].cell.title.split(', ')[1]}, {own[0].cell.lab}: median ms (predicted)\n"
    yield from (*table(("devices", *names), lines), "")


def _words(f: Figures | None, best: float) -> str | None:
    if f is None:
        return None
    figure = f"**{f.ms:.4g}**" if f.ms == best else f"{f.ms:.4g}"
    return figure if f.predicted_ms is None else f"{figure} ({f.predicted_ms:.4g})"


def _choices(results: Results, found: Sequence[Figures]) -> Iterator[str]:
    """Yield what Hepti chose, and what it is beside: all by ratios of times within rounds."""
    own = [f for f in found if f.cell.strategy == AUTO]
    if not own:
        return
    yield "## Hepti's choice\n"
    rows = []
    for f in own:
        alike = [g for g in found if g is not f and _alike(f.cell, g.cell)]
        hand = [g for g in alike if not CONTENDERS[g.cell.strategy].outside and g.cell.strategy != AUTO]
        others = [g for g in alike if CONTENDERS[g.cell.strategy].outside]
        alone = [g for g in hand if g.cell.strategy == ALONE]
        rows.append(
            [
                *(f"{f.cell.title}: {f.cell.label}", plan_words(_whole(f.turn)), round(f.ms, 1)),
                *(_beside(f, alone), _beside(f, hand), _beside(f, others), _of_hosts(f, alone)),
                *(_part(f, _unlimited_ms(f.turn)), _part(f, _least_ms(f, results))),
            ]
        )
    names = ("cell", "plan", "ms", "speed-up over the fastest host", "over the best by hand", "over the best outside")
    yield from table((*names, "of the hosts added up", "of unlimited links", "of all hosts' speed"), rows)
    yield "\nThe last two are simulated: the plan with links that carry everything at once, and all work at the"
    yield "calibrated speed of all hosts.\n"


def _alike(own: Cell, other: Cell) -> bool:
    """Return whether a choice could have been another cell: on the same hosts, or on one of them."""
    contender = CONTENDERS[other.strategy]
    if other.copy or own.group != other.group or own.requests != other.requests:
        return False
    same = contender.outside or own.weights == other.weights
    if len(other.devices) == 1:
        return same and set(other.devices) <= set(own.devices)
    return same and set(own.devices) == set(other.devices) and (contender.outside or own.wire == other.wire)


def _beside(f: Figures, others: Sequence[Figures]) -> str | None:
    """Return the speed-up over the fastest of others, with its name."""
    best = min((g for g in others if g.by_round.keys() & f.by_round.keys()), key=lambda g: g.ms, default=None)
    return None if best is None else f"{ratio(best.by_round, f.by_round).median:.2f} ({best.cell.label})"


def _of_hosts(f: Figures, alone: Sequence[Figures]) -> float | None:
    """Return the throughput of a choice beside that of all its hosts, each alone, added up."""
    hosts = {g.cell.devices[0]: 1 / g.ms for g in alone}
    whole = f.cell.requests and hosts.keys() >= set(f.cell.devices)
    return round(1 / f.ms / sum(hosts[name] for name in f.cell.devices), 2) if whole else None


def _part(f: Figures, least_ms: float | None) -> str | None:
    return None if least_ms is None or f.cell.requests else f"{least_ms / f.ms:.0%}"


def _plan_of(turn: Turn) -> tuple[Spec, Plan, Cluster] | None:
    """Return what a turn ran under, and its devices as they described themselves; None where it does not say."""
    active = turn.get("active")
    if not active or list(active["version"]) != list(turn["plan"]["version"]):
        return None
    plan = Plan.from_dict(active)
    return spec_from_dict(turn["spec"]), plan, cluster_of_devices(turn["devices"], plan.devices)


def _unlimited_ms(turn: Turn) -> float | None:
    """Return how long one request takes under the same plan by simulation, if links carried everything at once."""
    found = _plan_of(turn)
    if found is None or found[1].replicas:
        return None
    spec, plan, cluster = found
    shape, free = representative_shape(spec, turn["tokens"]), Link(0.0, inf, inf)
    links, peers = dict.fromkeys(cluster.links, free), dict.fromkeys(cluster.peer_links, PeerLink(0.0, inf))
    cluster = replace(cluster, links=links, peer_links=peers, broker_bytes_per_s=inf, planner_link=free)
    return (
        simulate(TopicNames(SITE, plan.model), spec, shape, device_programs(spec, plan, shape), cluster).seconds * 1e3
    )


def _least_ms(f: Figures, results: Results) -> float | None:
    """Return all work of a request, none of it done twice, at the speed that all hosts were calibrated to have."""
    labs = [r for r in results.of("lab") if (r["lab"]["name"], r["lab"]["rate_mbit"]) == (f.cell.lab, f.cell.rate)]
    if not f.turn.get("spec") or not labs:
        return None
    spec = spec_from_dict(f.turn["spec"])
    alone = Plan(f.cell.model, PlanVersion(1, 1), ALONE, ("one",), "one")
    work = flops(lower_plan(spec, alone, representative_shape(spec, f.turn["tokens"])))
    hosts = [h for h in labs[0]["calibration"]["hosts"] if h["host"] in f.cell.devices]
    return work / sum(h["kernel_gflops"] for h in hosts) * 1e-6 if hosts else None


def requests_per_s(turn: Turn) -> float | None:
    """Return what comes out per second by simulation of as many requests, packed as they were packed."""
    found, batches = _plan_of(turn), turn.get("batches")
    if found is None or not batches:
        return None
    spec, plan, cluster = found
    naming = TopicNames(SITE, plan.model)
    # Each of a batch of four says four: a run for every fourth of them.
    runs = [size for size in sorted(set(batches)) for _ in range(max(1, round(batches.count(size) / size)))]
    made = {
        n: simulated_request(naming, spec, plan, representative_shape(spec, turn["tokens"], n), cluster)
        for n in set(runs)
    }
    done = simulate_requests(naming, spec, [made[n] for n in runs], cluster, turn["in_flight"])
    under_way = max(1, round(turn["of"]["requests"] * len(runs) / len(batches)))
    return steady_state(done.runs, under_way).sequences_per_s


def _predictions(found: Sequence[Figures]) -> Iterator[str]:
    """Yield predicted over measured time by the number of devices of the plan, without and with what runs taught."""
    rows = []
    told = [f for f in found if f.predicted_ms is not None]
    for count in sorted({len(f.turn["plan"]["devices"]) for f in told}):
        own = [f for f in told if len(f.turn["plan"]["devices"]) == count]
        alone = [f.predicted_ms / f.ms for f in own if f.predicted_ms is not None]
        taught = [ms / f.ms for f in own if not f.cell.requests and (ms := f.turn.get("expected_ms")) is not None]
        rows.append([count, *_spread(alone), *_spread(taught)])
    if rows:
        yield "## Predicted over measured\n"
        yield "By the simulator alone, and with what earlier requests had taught before the last one of each turn.\n"
        names = ("cells", "median", "least", "most")
        yield from (*table(("devices of the plan", *names, *(f"taught: {name}" for name in names)), rows), "")


def _spread(ratios: Sequence[float]) -> tuple[Any, ...]:
    if not ratios:
        return 0, None, None, None
    return len(ratios), *(f"{value:.2f}" for value in (median(ratios), min(ratios), max(ratios)))


# -- a group in full --------------------------------------------------------------------------------------------


def _table(own: Sequence[Figures]) -> Iterator[str]:
    for f in own:
        twins = [g for g in own if f.cell.copy and replace(f.cell, copy=0) == g.cell]
        if twins:
            both = ratio(f.by_round, twins[0].by_round)
            yield f"A/A {twins[0].cell.label}: {both.median:.3f} [{both.low:.3f}, {both.high:.3f}] ({both.level:.0%})\n"
    plain = (ALONE, 0, "f32", 0)
    alone = next((f for f in own if (f.cell.strategy, f.cell.copy, f.cell.weights, f.cell.requests) == plain), None)
    rows = []
    for f in sorted(own, key=lambda f: (f.cell.strategy != AUTO, f.cell.label)):
        against = ""
        if alone is not None and not f.cell.requests and f.by_round.keys() & alone.by_round.keys():
            r = ratio(f.by_round, alone.by_round)
            against = f"{r.median:.2f} [{r.low:.2f}, {r.high:.2f}]"
        needs = f.turn.get("needs_bytes")
        rows.append(
            [
                f.cell.label + (f" ({f.failed} turns failed)" if f.failed else ""),
                *(round(f.ms, 1), f.interval.words(), against),
                *(f.predicted_ms and round(f.predicted_ms, 1), f.turn.get("bytes")),
                *(round(max(needs.values()) / 2**20) if needs else None, f"{f.turn['error']:.0e}"),
                plan_words(_whole(f.turn)) if f.cell.strategy == AUTO else "",
            ]
        )
    names = ("cell", "median ms", "interval", "this / single", "predicted ms", "bytes", "MiB", "error", "Hepti's plan")
    yield from table(names, rows)


def _throughput(own: Sequence[Figures]) -> Iterator[str]:
    """Yield what came out per second where requests were asked at once; latencies of such cells hold the waiting."""
    rows = []
    for f in (f for f in own if f.cell.requests):
        per_s = median_interval(1e3 / ms for ms in f.by_round.values())
        ms = f.predicted_ms
        predicted = (None, None) if ms is None else (f"{1e3 / ms:.2f}", f"{f.ms / ms:.2f}")
        first = [f.cell.label, ", ".join(f.cell.devices), f"{per_s.median:.2f}", per_s.words(2)]
        rows.append([*first, *predicted, f.turn["bytes"], plan_words(_whole(f.turn))])
    if rows:
        names = ("throughput", "hosts", "requests/s", "interval", "predicted", "predicted / measured", "bytes", "plan")
        yield from (*table(names, rows), "")


def _whole(turn: Turn) -> Mapping[str, Any]:
    """Return the plan of a turn with all of its devices: of replicas an answer names those of its own run."""
    plan: Mapping[str, Any] = turn["plan"]
    active = turn.get("active")
    known = active and list(active["version"]) == list(plan["version"])
    return {**plan, "devices": active["devices"]} if active and known else plan


def plan_words(plan: Mapping[str, Any]) -> str:
    """Return what a plan is, e.g. "row/kv on pi1, pi2"."""
    return f"{'/'.join([plan['strategy'], *plan['options'].values()])} on {', '.join(plan['devices'])}"


# -- under changes --------------------------------------------------------------------------------------------------


@dataclass
class Play:
    """What happened to one cell while a script changed the lab. unix_s: when it began.

    requests: `under_change` records; changes: `change` records, which have `do`, `host` and how much.
    """

    cell: Cell
    unix_s: float
    requests: list[Turn] = field(default_factory=list)
    changes: list[Turn] = field(default_factory=list)


@dataclass
class Part:
    """The requests between two events. at_s: of the event, after the play's begin; what: a change, or "" for a plan."""

    at_s: float
    what: str
    plan: str
    requests: list[Turn] = field(default_factory=list)


def plays_of(results: Results) -> list[Play]:
    """Return the plays of all cells that were watched while a script changed the lab."""
    plays: list[Play] = []
    for r in results.of("play", "change", "under_change"):
        if r["record"] == "play":
            plays.append(Play(Cell.of(r["of"]), r["unix_s"]))
        else:
            (plays[-1].changes if r["record"] == "change" else plays[-1].requests).append(r)
    return plays


def parts(play: Play) -> list[Part]:
    """Return the play cut at every change and at every answer under another plan than the one before it.

    A request belongs to where it began. One that failed has no plan and cuts nothing.
    """
    found = [Part(0.0, "begin", "")]
    for record in sorted((*play.changes, *play.requests), key=lambda r: float(r["unix_s"])):
        at_s = record["unix_s"] - play.unix_s
        if record["record"] == "change":
            found.append(Part(at_s, change_words(record), found[-1].plan))
            continue
        plan = plan_words(record["plan"]) if record["ok"] else found[-1].plan
        if found[-1].plan and plan != found[-1].plan:
            found.append(Part(at_s, "", plan))
        found[-1].plan = plan
        found[-1].requests.append(record)
    return found


def change_words(change: Turn) -> str:
    """Return what was done, e.g. "rate pi2 50 Mbit/s", and why it failed if it did."""
    units = {"mbit": "{:g} Mbit/s", "gflops": "{:g} GFLOP/s", "share": "{:.0%}"}
    amounts = [form.format(change[key]) for key, form in units.items() if key in change]
    failed = [f"(failed: {change['error']})"] if "error" in change else []
    return " ".join([change["do"], change["host"], *amounts, *failed])


def _changes(play: Play) -> Iterator[str]:
    """Yield a line per change and per new plan, with the requests between."""
    rows = []
    for part in parts(play):
        times = [r["latency_ms"][0] for r in part.requests if r["ok"]]
        spread = (round(median(times)), round(max(times))) if times else (None, None)
        rows.append(
            [round(part.at_s, 1), part.what, part.plan, len(part.requests), len(part.requests) - len(times), *spread]
        )
    yield f"## {play.cell.title}, {play.cell.label}: under changes\n"
    yield from table(("s", "what", "plan", "requests", "failed", "median ms", "slowest ms"), rows)
    failures = Counter(r["message"].splitlines()[0] for r in play.requests if not r["ok"])
    yield f"\n{failures.total()} of {len(play.requests)} requests failed"
    yield from (*(f"- {message} ({count} times)" for message, count in failures.items()), "")
