"""What an experiment file says, checked before anything starts, and the cells that it stands for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

from hepti_mqtt.bench.bars import bars_of
from hepti_mqtt.bench.contenders import AUTO, CONTENDERS, SITE, STRATEGY_NAMES
from hepti_mqtt.bench.outside import BASELINES
from hepti_mqtt.bench.values import listed, number, one_of, whole
from hepti_mqtt.checkpoint import KINDS as MODEL_KINDS
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.config import load_yaml, settings
from hepti_mqtt.config.settings import parse_size
from hepti_mqtt.errors import ConfigError
from hepti_mqtt.lab.changes import Change, load_script
from hepti_mqtt.lab.spec import MEMORY_BYTES, LabSpec
from hepti_mqtt.lab.spec import load as load_lab
from hepti_mqtt.models import graph, largest_shape
from hepti_mqtt.models.shapes import Pictures
from hepti_mqtt.plan import Objective, Storage
from hepti_mqtt.spec import Spec

Parsed = TypeVar("Parsed")

ALL: Final = "all"
EACH: Final = "each"  # every host of a lab, alone
WIRES: Final = ("f32", "f16", "i8")
FREE: Final = "auto"  # the planner chooses the route
ROUTES: Final = (FREE, "broker", "mesh")
STORAGES: Final = get_args(Storage)
OBJECTIVES: Final = get_args(Objective)
LATENCY: Final[Objective] = "latency"
KINDS: Final = ("infer",)


def size_words(tokens: int | None) -> str:
    """Return the size of a request for people; None is a picture."""
    return "one picture" if tokens is None else f"{tokens} tokens"


@dataclass(frozen=True, slots=True)
class Cell:
    """One thing to time.

    rate: Mbit/s, None as the lab file has it. tokens: None for pictures. strategy: of CONTENDERS. copy: of an A/A pair.
    route: of ROUTES. weights: how the layers' matrices are kept. requests: that are asked at once, for the throughput;
    0: one after the other. objective: what the planner chooses by.
    """

    lab: str
    rate: float | None
    model: str
    tokens: int | None
    strategy: str
    devices: tuple[str, ...]
    wire: str
    copy: int = 0
    route: str = FREE
    weights: str = "f32"
    requests: int = 0
    objective: str = LATENCY

    @property
    def id(self) -> str:
        """Return a name that depends on the content alone; fields that came later only where they say something."""
        own = {k: v for k, v in asdict(self).items() if k not in _LATER or v != _LATER[k]}
        return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def group(self) -> tuple[str, float | None, str, int | None]:
        """Return what cells that take turns have in common."""
        return self.lab, self.rate, self.model, self.tokens

    @property
    def label(self) -> str:
        """Return a name for people, unique in its group."""
        wire = "" if self.wire == "f32" else f" {self.wire}"
        route = "" if self.route == FREE else f" {self.route}"
        weights = "" if self.weights == "f32" else f" weights {self.weights}"
        load = f" {self.requests} at once" if self.requests else ""
        sought = "" if self.objective == LATENCY else f" for {self.objective}"
        return f"{self.strategy} x{len(self.devices)}{wire}{route}{weights}{load}{sought}{' again' * self.copy}"


_LATER: Final = {"weights": "f32", "requests": 0, "objective": LATENCY}


@dataclass(frozen=True, slots=True)
class Experiment:
    """An experiment file. models: name -> kind of `hepti model make`, or directory. layers: fewer than the kind has.

    outside: baselines that take turns with the strategies. weights: how the layers' matrices are kept. requests: that
    are asked at once, 0 for one after the other. objectives: by strategy. watched: strategies that are asked while the
    changes are made. settle: seconds for which the planner's own choice is served first, at the most, until it stands.
    """

    name: str
    kind: str
    labs: Mapping[str, LabSpec]
    rates: tuple[float, ...]
    models: Mapping[str, str | Path]
    lengths: tuple[int, ...]
    strategies: tuple[str, ...]
    outside: tuple[str, ...]
    devices: tuple[int | str | tuple[str, ...], ...]
    wire: tuple[str, ...]
    route: tuple[str, ...]
    weights: tuple[str, ...]
    requests: tuple[int, ...]
    objectives: Mapping[str, tuple[str, ...]]
    repetitions: int
    warmup: int
    settle: int
    rounds: int
    seed: int
    layers: int | None
    changes: tuple[Change, ...]
    watched: tuple[str, ...]
    source: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """Return a hash of what is measured: the file without its bars, and every lab in it."""
        measured = {key: value for key, value in self.source.items() if key != "bars"}
        content = {"file": measured, "labs": {name: asdict(spec) for name, spec in self.labs.items()}}
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def names() -> dict[str, Path]:
    """Return the experiments that come with Hepti."""
    return settings.bundled_configs("experiments")


def load(experiment: str, quick: bool = False, given: Mapping[str, Any] | None = None) -> Experiment:
    """Return the experiment of a file or a name in configs/experiments; raises ConfigError that names file and key.

    quick: with the changes of its `quick:`. given: what a user wants instead of what the file has, by its keys.
    """
    return load_with(lambda _: parse, experiment, quick, given or {})


def load_with(
    parser_of: Callable[[Mapping[str, Any]], Callable[[Mapping[str, Any], Path], Parsed]],
    experiment: str,
    quick: bool,
    given: Mapping[str, Any],
) -> Parsed:
    """Return what the parser that is chosen by a file's content makes of it, as `load` does."""
    known = names()
    path = known.get(experiment, Path(experiment))
    if not path.is_file():
        raise ConfigError(f"there is no experiment {experiment!r}; give a file, or one of {', '.join(known)}")
    data = load_yaml(path)
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}: an experiment is a mapping of keys, not {type(data).__name__}")
    own = data.get("quick") or {}
    if not isinstance(own, Mapping):
        raise ConfigError(f"{path}: `quick` is a mapping of the keys that a quick run changes")
    lab = given.get("lab")
    given = {**given, "lab": str(Path(lab).resolve())} if lab and Path(lab).is_file() else given
    chosen = {key: value for key, value in {**data, "quick": None}.items() if value is not None}
    chosen.update(own if quick else {})
    chosen.update(given)
    try:
        parser = parser_of(chosen)
        parser({**chosen, **own, **given}, path.parent)
        return parser(chosen, path.parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse(data: Mapping[str, Any], base: Path) -> Experiment:
    """Return the experiment of a mapping; `base`: where its paths begin. Raises ConfigError that names the key."""
    for key in data:
        if key not in _KEYS:
            raise ConfigError(f"unknown key {key!r}; known are {', '.join(_KEYS)}")
    for key in ("name", "lab", "models", "strategies", "devices"):
        if key not in data:
            raise ConfigError(f"an experiment needs `{key}:`")
    labs = {spec.name: spec for spec in _labs(data, base)}
    rates = tuple(number("rates", rate) for rate in listed("rates", data.get("rates", [])))
    for spec in labs.values():
        for rate in rates:
            spec.with_rate(rate)
    given = listed("strategies", data["strategies"])
    strategies = STRATEGY_NAMES if given == [ALL] else tuple(s for name in given for s in strategies_of(name))
    bars_of(data.get("bars", []))  # the report reads them from the results
    outside = listed("outside", data.get("outside", []))
    outside = list(BASELINES) if outside == [ALL] else outside
    changes: tuple[Change, ...] = ()
    if data.get("changes") is not None:
        script = _path(data["changes"], base)
        for spec in labs.values():
            changes = load_script(script, spec)
    made = Experiment(
        name=str(data["name"]),
        kind=one_of("kind", data.get("kind", "infer"), KINDS),
        labs=labs,
        rates=rates,
        models=dict(_model(each, base) for each in listed("models", data["models"])),
        lengths=tuple(whole("lengths", n, 1) for n in listed("lengths", data.get("lengths", [128]))),
        strategies=strategies,
        outside=tuple(one_of("outside", name, tuple(BASELINES)) for name in outside),
        devices=tuple(_devices(each, labs) for each in listed("devices", data["devices"])),
        wire=tuple(one_of("wire", each, WIRES) for each in listed("wire", data.get("wire", ["f32"]))),
        route=tuple(one_of("route", each, ROUTES) for each in listed("route", data.get("route", [FREE]))),
        weights=tuple(one_of("weights", each, STORAGES) for each in listed("weights", data.get("weights", ["f32"]))),
        requests=tuple(whole("requests", each, 0) for each in listed("requests", data.get("requests", [0]))),
        objectives=_objectives(data.get("objective", LATENCY), strategies),
        repetitions=whole("repetitions", data.get("repetitions", 3), 1),
        warmup=whole("warmup", data.get("warmup", 1), 0),
        settle=whole("settle", data.get("settle", 0), 0),
        rounds=whole("rounds", data.get("rounds", 6), 1),
        seed=whole("seed", data.get("seed", 0), 0),
        layers=None if data.get("layers") is None else whole("layers", data["layers"], 1),
        changes=changes,
        watched=tuple(one_of("watched", name, strategies) for name in listed("watched", data.get("watched", [AUTO])))
        if changes
        else (),
        source=dict(data),
    )
    if not cells(made):
        raise ConfigError("`strategies` and `devices` leave nothing to measure; `single` needs 1, the others 2 or more")
    return made


def cells(experiment: Experiment) -> list[Cell]:
    """Return every cell, those of a group beside each other; a method that cannot divide a model has none there."""
    names = (*experiment.strategies, *experiment.outside)
    found: dict[Cell, None] = {}
    for lab, spec in experiment.labs.items():
        for rate in experiment.rates or (None,):
            for model, kind in experiment.models.items():
                model_spec = spec_of(kind)
                able = {
                    name for name in names if CONTENDERS[name].divides(graph(model_spec, largest_shape(model_spec)))
                }
                for tokens in (None,) if isinstance(model_spec.reads, Pictures) else experiment.lengths:
                    found.update(dict.fromkeys(_group(experiment, spec, (lab, rate, model, tokens), able)))
    return list(found)


def _group(
    experiment: Experiment, spec: LabSpec, group: tuple[str, float | None, str, int | None], able: Container[str]
) -> Iterator[Cell]:
    e = experiment
    names = (*e.strategies, *e.outside)
    for place, name in enumerate(names):
        if name not in able:
            continue
        contender, copy = CONTENDERS[name], names[:place].count(name)
        for devices in (each for count in experiment.devices for each in _groups_of(count, spec)):
            if contender.takes(len(devices)):
                ways = product(e.wire, e.route) if contender.wires else (("f32", FREE),)
                plain = (("f32", 0, LATENCY),)
                kept = product(e.weights, e.requests, e.objectives[name]) if contender.source == SITE else plain
                for (wire, route), (weights, requests, objective) in product(ways, tuple(kept)):
                    yield Cell(*group, name, devices, wire, copy, route, weights, requests, objective)


def _objectives(value: Any, strategies: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Return what each strategy is chosen by: of one value or list for all, or of a mapping; latency without one."""
    named = value if isinstance(value, Mapping) else dict.fromkeys(strategies, value)
    found: dict[str, tuple[str, ...]] = dict.fromkeys(strategies, (LATENCY,))
    for key, each in named.items():
        sought = tuple(one_of("objective", o, OBJECTIVES) for o in listed("objective", each))
        if not (own := [name for name in strategies_of(key) if name in found]):
            raise ConfigError(f"`objective` has {key!r}, which is not among `strategies`")
        found.update(dict.fromkeys(own, sought))
    return found


def spec_of(kind: str | Path, layers: int | None = None) -> Spec:
    """Return the spec of a kind of `hepti model make`, of so many layers, or of a directory."""
    if isinstance(kind, str):
        return spec_of_kind(kind, layers)
    from hepti_mqtt.checkpoint import Checkpoint

    with Checkpoint.open(kind, kind.name) as checkpoint:
        return checkpoint.spec


def _labs(data: Mapping[str, Any], base: Path) -> Iterator[LabSpec]:
    """Yield the labs of a file, each once for every budget of memory that its hosts have instead of their own."""
    for each in listed("lab", data["lab"]):
        lab = lab_of(each, base, data.get("dilation"))
        for budget in listed("memory", data.get("memory", [None])):
            yield lab if budget is None else _with_memory(lab, budget)


def _with_memory(lab: LabSpec, budget: Any) -> LabSpec:
    try:
        nbytes = parse_size(str(budget))
    except ConfigError as error:
        raise ConfigError(f"`memory`: {error}") from error
    if not MEMORY_BYTES[0] <= nbytes <= MEMORY_BYTES[1]:
        raise ConfigError(f"`memory` has {budget!r}; it needs {MEMORY_BYTES[0]} to {MEMORY_BYTES[1]} bytes, or a size")
    hosts = tuple(replace(host, memory_bytes=nbytes) for host in lab.hosts)
    return replace(lab, name=f"{lab.name}-{str(budget).lower()}", hosts=hosts)


def lab_of(value: Any, base: Path, dilation: Any = None) -> LabSpec:
    """Return the lab of a name in configs/lab or a path, so many times as slow; raises ConfigError."""
    if not isinstance(value, str):
        raise ConfigError(f"`lab` is {value!r}; it needs the name of a file in configs/lab, or a path")
    if (own := settings.bundled_configs("lab").get(value)) is not None:
        return load_lab(own, dilation)
    path = _path(value, base)
    if not path.is_file():
        known = ", ".join(settings.bundled_configs("lab"))
        raise ConfigError(f"`lab`: there is no {value!r}; give a file, or one of {known}")
    return load_lab(path, dilation)


def strategies_of(value: Any) -> list[str]:
    """Return the names that one entry stands for: a strategy without a variant is all of its variants."""
    found = [name for name in STRATEGY_NAMES if value in (name, name.partition("/")[0])]
    if not found:
        raise ConfigError(f"`strategies`: there is no {value!r}; choose from {', '.join((ALL, *STRATEGY_NAMES))}")
    return found


def _model(value: Any, base: Path) -> tuple[str, str | Path]:
    if value in MODEL_KINDS:
        return value, value
    if isinstance(value, str) and (_path(value, base) / "config.json").is_file():
        return _path(value, base).name, _path(value, base)
    raise ConfigError(
        f"`models`: {value!r} is neither a directory with a config.json nor one of {', '.join(MODEL_KINDS)}"
    )


def _groups_of(count: int | str | tuple[str, ...], spec: LabSpec) -> list[tuple[str, ...]]:
    names = tuple(h.name for h in spec.hosts)
    if isinstance(count, tuple):
        return [count]
    return [names[:count]] if isinstance(count, int) else [(name,) for name in names]


def _devices(value: Any, labs: Mapping[str, LabSpec]) -> int | str | tuple[str, ...]:
    if value == EACH:
        return EACH
    for spec in labs.values():
        if isinstance(value, list) and value:
            for name in value:
                try:
                    spec.host(name)
                except ConfigError as error:
                    raise ConfigError(f"`devices`: {error}") from error
        elif isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= len(spec.hosts):
            raise ConfigError(f"`devices` has {value!r}; lab {spec.name} allows 1 to {len(spec.hosts)}, or its names")
    return tuple(sorted(set(value))) if isinstance(value, list) else int(value)


def _path(value: Any, base: Path) -> Path:
    if not isinstance(value, str):
        raise ConfigError(f"{value!r} is not a path")
    return (base / value).resolve()


_KEYS: Final = (
    *("name", "kind", "lab", "rates", "models", "lengths", "strategies", "outside", "devices", "wire", "route"),
    *(
        "weights",
        "memory",
        "dilation",
        "requests",
        "objective",
        "bars",
        "repetitions",
        "warmup",
        "settle",
        "rounds",
        "seed",
        "layers",
        "changes",
        "watched",
    ),
)
