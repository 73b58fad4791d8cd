"""Experiments without devices: the simulator's times, bytes and memory for a site file, more devices than a lab holds.

What stands in such a report was computed, not measured, and every table says so.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import cycle, groupby, islice, product
from pathlib import Path
from typing import Any, Final, cast

from rich.console import Console

from hepti_mqtt.bench.contenders import ALONE, AUTO, CONTENDERS, SITE, STRATEGY_NAMES
from hepti_mqtt.bench.experiment import ALL, STORAGES, WIRES, spec_of, strategies_of
from hepti_mqtt.bench.provenance import header
from hepti_mqtt.bench.report import head
from hepti_mqtt.bench.results import FILE, Results, Writer, read
from hepti_mqtt.bench.values import listed, number, whole
from hepti_mqtt.checkpoint import KINDS as MODEL_KINDS
from hepti_mqtt.config import settings
from hepti_mqtt.config.settings import parse_size
from hepti_mqtt.config.sites import load_site
from hepti_mqtt.cost.profiles import Cluster
from hepti_mqtt.cost.simulator import Naming
from hepti_mqtt.errors import ConfigError, PlanError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.models import graph, largest_shape, shape_for
from hepti_mqtt.models.shapes import Pictures
from hepti_mqtt.plan import Storage, WireDtype
from hepti_mqtt.planner import Question, decide

KIND: Final = "simulate"
MARK: Final = "simulated, not measured"
_KEYS: Final = (
    *("name", "kind", "site", "rates", "models", "lengths", "strategies", "devices", "wire", "weights", "memory"),
    *("requests", "layers"),
)


@dataclass(frozen=True, slots=True)
class Point:
    """One thing to simulate. rate: Mbit/s, None as the site file has it. memory: of each device, "" as there."""

    site: str
    rate: float | None
    model: str
    tokens: int
    memory: str
    weights: str
    wire: str
    devices: int
    strategy: str
    requests: int = 0

    @property
    def group(self) -> tuple[str, float | None, str, int, str, str, str, int]:
        """Return what stands in one table."""
        return self.site, self.rate, self.model, self.tokens, self.memory, self.weights, self.wire, self.requests

    @property
    def id(self) -> str:
        """Return a name that depends on the content alone."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class SimulatedExperiment:
    """A file of points, and what it was read from."""

    name: str
    points: tuple[Point, ...]
    sites: Mapping[str, Cluster]
    layers: int | None
    source: Mapping[str, Any]
    seed: int = 0

    @property
    def digest(self) -> str:
        """Return a hash of what is simulated."""
        content = {"file": self.source, "sites": {name: asdict(site) for name, site in self.sites.items()}}
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def parse(data: Mapping[str, Any], base: Path) -> SimulatedExperiment:
    """Return the experiment of a mapping; raises ConfigError that names the key."""
    for key in data:
        if key not in _KEYS:
            raise ConfigError(f"unknown key {key!r}; a simulated experiment has {', '.join(_KEYS)}")
    for key in ("name", "site", "models", "strategies", "devices"):
        if key not in data:
            raise ConfigError(f"a simulated experiment needs `{key}:`")
    sites = {name: _site(name, base) for name in listed("site", data["site"])}
    given = listed("strategies", data["strategies"])
    names = list(STRATEGY_NAMES) if given == [ALL] else [s for each in given for s in strategies_of(each)]
    for key, allowed in (("models", tuple(MODEL_KINDS)), ("wire", WIRES), ("weights", STORAGES)):
        for each in listed(key, data.get(key, [])):
            if each not in allowed:
                raise ConfigError(f"`{key}` has {each!r}; it is one of {', '.join(allowed)}")
    budgets = [str(each) for each in listed("memory", data.get("memory", [""]))]
    for budget in filter(None, budgets):
        parse_size(budget)
    rates: list[float | None] = [number("rates", each) for each in listed("rates", data.get("rates", []))]
    axes = product(
        sites,
        rates or [None],
        listed("models", data["models"]),
        [whole("lengths", each, 1) for each in listed("lengths", data.get("lengths", [128]))],
        budgets,
        listed("weights", data.get("weights", ["f32"])),
        listed("wire", data.get("wire", ["f32"])),
        [whole("devices", each, 1) for each in listed("devices", data["devices"])],
        names,
        [whole("requests", each, 0) for each in listed("requests", data.get("requests", [0]))],
    )
    layers = None if data.get("layers") is None else whole("layers", data["layers"], 1)
    points = tuple(dict.fromkeys(point for each in axes if (point := _point(*each)) is not None))
    if not points:
        raise ConfigError("`strategies`, `models` and `devices` leave nothing to simulate")
    return SimulatedExperiment(str(data["name"]), points, sites, layers, dict(data))


def _point(site: str, rate: float | None, model: str, tokens: int, *rest: Any) -> Point | None:
    """Return a point, None for one that cannot be: a method on too many devices, or that does not divide the model."""
    tokens = _tokens(model) or tokens
    point = Point(site, rate, model, tokens, *rest)
    contender = CONTENDERS[point.strategy]
    fits = _takes(point.strategy, point.devices) or (point.strategy == AUTO and point.devices == 1)
    return point if fits and contender.source == SITE and _divides(point.strategy, model) else None


@lru_cache(maxsize=64)
def _tokens(model: str) -> int | None:
    """Return the tokens of a picture, None for a model of texts."""
    spec = spec_of(model)
    return largest_shape(spec).size if isinstance(spec.reads, Pictures) else None


@lru_cache(maxsize=4096)
def _takes(strategy: str, devices: int) -> bool:
    return CONTENDERS[strategy].takes(devices)


@lru_cache(maxsize=4096)
def _divides(strategy: str, model: str) -> bool:
    spec = spec_of(model)
    return CONTENDERS[strategy].divides(graph(spec, largest_shape(spec)))


def _site(name: Any, base: Path) -> Cluster:
    path = settings.find_bundled_config("sites", Path(str(name)))
    if not path.is_file() and not (path := base / str(name)).is_file():
        known = ", ".join(settings.bundled_configs("sites"))
        raise ConfigError(f"`site`: there is no {name!r}; give a file, or one of {known}")
    return load_site(path)


def cluster_of(site: Cluster, point: Point) -> Cluster:
    """Return so many devices as a point has, those of the site over and over, with its rate and memory."""
    profiles, links = {}, {}
    for place, name in enumerate(islice(cycle(site.devices), point.devices)):
        own = name if place < len(site.devices) else f"{name}-{place // len(site.devices) + 1}"
        profiles[own], links[own] = replace(site.devices[name], name=own), site.links[name]
        if point.memory:
            profiles[own] = replace(profiles[own], memory_bytes=float(parse_size(point.memory)))
        if point.rate is not None:
            rate = point.rate * 1e6 / 8
            links[own] = replace(links[own], up_bytes_per_s=rate, down_bytes_per_s=rate)
    broker = site.broker_bytes_per_s if point.rate is None else point.rate * 1e6 / 8
    endpoints = frozenset(profiles) if site.endpoints else frozenset()
    return replace(site, devices=profiles, links=links, broker_bytes_per_s=broker, endpoints=endpoints, peer_links={})


def simulated(point: Point, site: Cluster, layers: int | None) -> dict[str, Any]:
    """Return what the simulator says of a point: a record of a turn, that failed where nothing fits."""
    contender, cluster = CONTENDERS[point.strategy], cluster_of(site, point)
    spec = spec_of(point.model, layers)
    question = Question(
        Naming("bench", point.model),
        spec,
        cluster,
        shape_for(spec, point.tokens),
        Epoch(1, 1),
        strategy=contender.strategy,
        options=contender.options or {},
        devices=tuple(cluster.devices) if contender.strategy else None,
        wire=cast(WireDtype, point.wire),
        storage=cast(Storage, point.weights),
        requests=point.requests,
        in_flight=2 * point.devices if point.requests else 1,  # enough that no stage waits for the next request
    )
    try:
        chosen = decide(question).chosen
    except (PlanError, ConfigError) as error:
        return {"ok": False, "message": str(error).splitlines()[0], "lacks": str(error).splitlines()[1:2]}
    found = {
        "plan": chosen.plan.method,
        "devices": list(chosen.plan.devices),
        "route": chosen.plan.route,
        "ms": chosen.price.seconds * 1e3,
        "bytes": chosen.price.nbytes,
        "needs_bytes": dict(chosen.price.needs),
    }
    if chosen.price.load is not None:
        found["requests_per_s"] = chosen.price.load.requests_per_s
    return {"ok": True, **found}


def run(
    experiment: SimulatedExperiment,
    out: Path,
    command: str,
    *,
    resume: bool,
    console: Console,
    calibrations: Path | None = None,
) -> None:
    """Simulate what is missing in `out` and write it there."""
    del calibrations  # nothing is measured
    said = json.loads(json.dumps({**header(experiment, command), "kind": KIND}, default=str))
    with Writer(out, said, resume=resume) as writer:
        done = {r["point"] for r in writer.results.records if r["record"] == "point"}
        for place, point in enumerate(experiment.points, 1):
            if point.id not in done:
                found = simulated(point, experiment.sites[point.site], experiment.layers)
                writer.add("point", point=point.id, of=asdict(point), **found)
                words = f"{found['ms']:.1f} ms" if found["ok"] else found["message"]
                where = f"{point.model} {point.tokens}, {point.strategy} on {point.devices}"
                console.print(f"{place}/{len(experiment.points)} {where}: {words}", markup=False)


def write(directory: Path) -> list[Path]:
    """Write report.md beside the results of a directory; return the files."""
    results, text = read(directory), directory / "report.md"
    text.write_text("\n".join([*head(results), *tables(results)]) + "\n", encoding="utf-8")
    return [directory / FILE, text]


def tables(results: Results) -> Iterator[str]:
    """Yield a table per site, rate, model and length: methods by numbers of devices, Hepti's choice marked."""
    found = [(Point(**r["of"]), r) for r in results.records if r["record"] == "point"]
    for group, part in groupby(sorted(found, key=lambda f: repr(f[0].group)), key=lambda f: f[0].group):
        yield from _table(group, list(part))


def _table(group: tuple[Any, ...], found: Sequence[tuple[Point, Mapping[str, Any]]]) -> Iterator[str]:
    site, rate, model, tokens, memory, weights, wire, requests = group
    counts = sorted({p.devices for p, _ in found})
    by_place = {(p.strategy, p.devices): r for p, r in found}
    chosen = {n: r["plan"] for n in counts if (r := by_place.get((AUTO, n), {})).get("ok")}
    links = "" if rate is None else f", {rate:g} Mbit/s"
    kept = (f", {memory} each" if memory else "") + f", weights {weights}, wire {wire}"
    what = f"requests/s, {requests} requests" if requests else "ms"
    yield from (f"## {model}, {tokens} tokens, {site}{links}{kept}: {what} ({MARK})", "")
    yield "| method | " + " | ".join(f"{n} devices" for n in counts) + " | bytes | most MiB on a device |"
    yield "|---" + "|---:" * (len(counts) + 2) + "|"
    for name in dict.fromkeys(p.strategy for p, _ in found):
        cells = [_words(by_place.get((name, n)), chosen.get(n) == name, name == AUTO) for n in counts]
        last = next((r for n in reversed(counts) if (r := by_place.get((name, n), {})).get("ok")), None)
        ends = ["", ""] if last is None else [str(last["bytes"]), f"{max(last['needs_bytes'].values()) / 2**20:.0f}"]
        yield f"| {name} | " + " | ".join([*cells, *ends]) + " |"
    yield from ("", *_ideal(by_place, counts), *_missing(found), "")


def _words(r: Mapping[str, Any] | None, chosen: bool, auto: bool) -> str:
    if r is None:
        return ""
    if not r["ok"]:
        return "does not fit"
    figure = f"{r['requests_per_s']:.3g}" if "requests_per_s" in r else f"{r['ms']:.1f}"
    return f"{figure} ({r['plan']})" if auto else f"**{figure}** <- Hepti" if chosen else figure


def _ideal(by_place: Mapping[tuple[str, int], Mapping[str, Any]], counts: Sequence[int]) -> Iterator[str]:
    """Tell how far Hepti's choice is from the ideal line: one device's time over the number of devices."""
    alone = next((r for n in counts if (r := by_place.get((ALONE, n), {})).get("ok")), None)
    if alone is None or "requests_per_s" in alone:
        return
    parts = [f"{n}: {alone['ms'] / r['ms']:.2f} of {n}" for n in counts if (r := by_place.get((AUTO, n), {})).get("ok")]
    if parts:
        yield f"Times as fast as one device, of an ideal line: {', '.join(parts)}."


def _missing(found: Sequence[tuple[Point, Mapping[str, Any]]]) -> Iterator[str]:
    for p, r in found:
        if not r["ok"]:
            yield f"- {p.strategy} on {p.devices}: {' '.join([r['message'], *r['lacks']])}"
