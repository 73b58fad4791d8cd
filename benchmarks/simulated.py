"""Experiments without devices: the simulator's times, bytes and memory for a site file, more devices than a lab holds.

What stands in such a report was computed, not measured, and every table says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import cycle, groupby, islice, product
from pathlib import Path
from typing import Any, Final, cast

from rich.console import Console

from benchmarks.experiment import (
    ALONE,
    AUTO,
    CONTENDERS,
    STORAGES,
    WIRES,
    listed,
    numbers,
    require,
    spec_of,
    strategies_of,
    wholes,
    words,
)
from benchmarks.lab.spec import only
from benchmarks.provenance import FILE, Results, Writer, head
from benchmarks.tables import table
from hepti_mqtt.checkpoint import KINDS as MODEL_KINDS
from hepti_mqtt.config import settings
from hepti_mqtt.config.settings import parse_size
from hepti_mqtt.config.sites import load_site
from hepti_mqtt.core.errors import ConfigError, PlanError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import WeightDtype, WireDtype
from hepti_mqtt.core.profiles import Cluster
from hepti_mqtt.cost.simulator import TopicNames
from hepti_mqtt.models import graph, largest_shape, representative_shape
from hepti_mqtt.models.shapes import ImageInput
from hepti_mqtt.planner import Question, decide

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
    requests: int
    devices: int
    strategy: str

    @property
    def group(self) -> tuple[Any, ...]:
        """Return what stands in one table."""
        return tuple(asdict(self).values())[:8]


@dataclass(frozen=True, slots=True)
class Simulated:
    """A file of points."""

    name: str
    points: tuple[Point, ...]
    layers: int | None
    seed: int = 0


def parse(data: Mapping[str, Any], _base: Path) -> Simulated:
    """Return the experiment of a mapping; raises ConfigError that names the key."""
    only("a simulated experiment", data, _KEYS)
    require(data, "name", "site", "models", "strategies", "devices")
    for budget in filter(None, listed(data.get("memory", ""))):
        parse_size(str(budget))
    for site in listed(data["site"]):
        site_of(site)
    axes = product(
        listed(data["site"]),
        numbers(data, "rates", []) or [None],
        words(data, "models", [], tuple(MODEL_KINDS)),
        wholes(data, "lengths", [128], 1),
        map(str, listed(data.get("memory", ""))),
        words(data, "weights", ["f32"], STORAGES),
        words(data, "wire", ["f32"], WIRES),
        wholes(data, "requests", [0], 0),
        wholes(data, "devices", [], 1),
        strategies_of(listed(data["strategies"])),
    )
    points = tuple(dict.fromkeys(point for each in axes if (point := _point(*each)) is not None))
    if not points:
        raise ConfigError("`strategies`, `models` and `devices` leave nothing to simulate")
    return Simulated(str(data["name"]), points, data.get("layers"))


def _point(site: str, rate: float | None, model: str, tokens: int, *rest: Any) -> Point | None:
    """Return a point, None for one that cannot be: a method on too many devices, or that does not divide the model."""
    point = Point(site, rate, model, _tokens(model) or tokens, *rest)
    fits = _takes(point.strategy, point.devices) or (point.strategy == AUTO and point.devices == 1)
    return point if fits and _divides(point.strategy, model) else None


@lru_cache(maxsize=64)
def _tokens(model: str) -> int | None:
    """Return the tokens of a picture, None for a model of texts."""
    spec = spec_of(model)
    return largest_shape(spec).size if isinstance(spec.input_spec, ImageInput) else None


@lru_cache(maxsize=4096)
def _takes(strategy: str, devices: int) -> bool:
    return CONTENDERS[strategy].takes(devices)


@lru_cache(maxsize=4096)
def _divides(strategy: str, model: str) -> bool:
    spec = spec_of(model)
    return CONTENDERS[strategy].divides(graph(spec, largest_shape(spec)))


@lru_cache(maxsize=16)
def site_of(name: str) -> Cluster:
    """Return the devices of a file, or of a name in configs/sites."""
    return load_site(settings.find_bundled_site(Path(str(name))))


def question(point: Point, layers: int | None = None) -> Question:
    """Return what the planner is asked: so many devices, those of the site over and over, by the point's method."""
    site, profiles, links = site_of(point.site), {}, {}
    broker = site.broker_bytes_per_s if point.rate is None else point.rate * 1e6 / 8
    for place, name in enumerate(islice(cycle(site.devices), point.devices)):
        own = name if place < len(site.devices) else f"{name}-{place // len(site.devices) + 1}"
        profiles[own], links[own] = replace(site.devices[name], name=own), site.links[name]
        if point.memory:
            profiles[own] = replace(profiles[own], memory_bytes=float(parse_size(point.memory)))
        if point.rate is not None:
            links[own] = replace(links[own], up_bytes_per_s=broker, down_bytes_per_s=broker)
    ends = frozenset(profiles) if site.endpoints else frozenset()
    cluster = replace(site, devices=profiles, links=links, broker_bytes_per_s=broker, endpoints=ends, peer_links={})
    contender, spec = CONTENDERS[point.strategy], spec_of(point.model, layers)
    return Question(
        TopicNames("bench", point.model),
        spec,
        cluster,
        representative_shape(spec, point.tokens),
        PlanVersion(1, 1),
        strategy=contender.strategy,
        options=contender.options or {},
        devices=tuple(profiles) if contender.strategy else None,
        wire=cast(WireDtype, point.wire),
        weight_dtype=cast(WeightDtype, point.weights),
        requests=point.requests,
        in_flight=2 * point.devices if point.requests else 1,  # enough that no stage waits for the next request
    )


def _simulated(point: Point, layers: int | None) -> dict[str, Any]:
    """Return what the simulator says of a point, or what is missing where nothing fits."""
    try:
        chosen = decide(question(point, layers)).chosen
    except (PlanError, ConfigError) as error:
        return {"ok": False, "message": " ".join(str(error).splitlines()[:2])}
    price = chosen.price
    load = {} if price.load is None else {"requests_per_s": price.load.requests_per_s}
    found = {"plan": chosen.plan.method, "devices": list(chosen.plan.devices), "ms": price.seconds * 1e3}
    return {"ok": True, **found, "bytes": price.nbytes, "needs_bytes": max(price.needs.values()), **load}


def count(experiment: Simulated) -> int:
    """Return the number of points."""
    return len(experiment.points)


def run(experiment: Simulated, _out: Path, writer: Writer, console: Console) -> None:
    """Simulate and write it down."""
    for place, point in enumerate(experiment.points, 1):
        found = _simulated(point, experiment.layers)
        writer.add("point", of=asdict(point), **found)
        said = f"{found['ms']:.1f} ms" if found["ok"] else found["message"]
        where = f"{point.model} {point.tokens}, {point.strategy} on {point.devices}"
        console.print(f"{place}/{len(experiment.points)} {where}: {said}", markup=False)


def write(results: Results, directory: Path) -> list[Path]:
    """Write report.md beside the results; return the files."""
    text = directory / "report.md"
    found = sorted(((Point(**r["of"]), r) for r in results.of("point")), key=lambda f: repr(f[0].group))
    lines = head(results.header["experiment"], results.header)
    for _, part in groupby(found, key=lambda f: f[0].group):
        lines += _table(list(part))
    text.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [directory / FILE, text]


def _table(found: Sequence[tuple[Point, Mapping[str, Any]]]) -> Iterator[str]:
    """Yield methods by numbers of devices, Hepti's choice marked."""
    p = found[0][0]
    counts = sorted({point.devices for point, _ in found})
    place = {(point.strategy, point.devices): r for point, r in found}
    chosen = {n: r["plan"] for n in counts if (r := place.get((AUTO, n), {})).get("ok")}
    links, kept = "" if p.rate is None else f", {p.rate:g} Mbit/s", f", {p.memory} each" if p.memory else ""
    what = f"requests/s, {p.requests} requests" if p.requests else "ms"
    where = f"{p.model}, {p.tokens} tokens, {p.site}{links}{kept}, weights {p.weights}, wire {p.wire}"
    yield f"## {where}: {what} (simulated, not measured)\n"
    rows = []
    for name in dict.fromkeys(point.strategy for point, _ in found):
        good = [r for n in counts if (r := place.get((name, n), {})).get("ok")]
        ends = [good[-1]["bytes"], round(good[-1]["needs_bytes"] / 2**20)] if good else [None, None]
        rows.append([name, *(_words(place.get((name, n)), chosen.get(n), name) for n in counts), *ends])
    yield from (*table(("method", *(f"{n} devices" for n in counts), "bytes", "most MiB on a device"), rows), "")
    alone = next((r for n in counts if (r := place.get((ALONE, n), {})).get("ok")), None)
    if alone is not None and not p.requests:
        gains = [f"{n}: {alone['ms'] / r['ms']:.2f}" for n in counts if (r := place.get((AUTO, n), {})).get("ok")]
        yield f"Speed-up over one device, by devices: {', '.join(gains)}.\n"
    by_hand = [r["ms"] for q, r in found if r["ok"] and q.strategy != AUTO]
    if chosen and by_hand and not p.requests:
        best = min(place[AUTO, n]["ms"] for n in chosen)
        yield f"Hepti's choice over the best method by hand: {best / min(by_hand):.3f}.\n"
    yield from (f"- {q.strategy} on {q.devices}: {r['message']}" for q, r in found if not r["ok"])
    yield ""


def _words(r: Mapping[str, Any] | None, chosen: str | None, name: str) -> str | None:
    if r is None or not r["ok"]:
        return None if r is None else "does not fit"
    figure = f"{r['requests_per_s']:.3g}" if "requests_per_s" in r else f"{r['ms']:.1f}"
    return f"{figure} ({r['plan']})" if name == AUTO else f"**{figure}** <- Hepti" if chosen == name else figure
