"""What an experiment file says, checked before anything starts, and the cells that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

from benchmarks import files
from benchmarks.lab.changes import Change, load_script
from benchmarks.lab.spec import LabSpec, memory, one_of, only
from benchmarks.lab.spec import load as load_lab
from benchmarks.outside import BASELINES
from hepti_mqtt.checkpoint import KINDS as MODEL_KINDS
from hepti_mqtt.checkpoint import Checkpoint, spec_of_kind
from hepti_mqtt.config import load_yaml, mapping
from hepti_mqtt.core.errors import ConfigError
from hepti_mqtt.core.plan import Objective, WeightDtype
from hepti_mqtt.core.spec import Spec
from hepti_mqtt.lowering.graph import Graph
from hepti_mqtt.models import graph, largest_shape
from hepti_mqtt.models.shapes import ImageInput
from hepti_mqtt.shares import Options
from hepti_mqtt.strategies import STRATEGIES

ALL: Final = "all"
EACH: Final = "each"  # every host of a lab, alone
AUTO: Final = "auto"  # the planner chooses the method
FREE: Final = "auto"  # the planner chooses the route
WIRES: Final = ("f32", "f16", "i8")
ROUTES: Final = (FREE, "broker", "mesh")
STORAGES: Final = get_args(WeightDtype)
OBJECTIVES: Final = get_args(Objective)
MOST: Final = 16  # devices up to which variants that depend on their number have names here


class Contender(NamedTuple):
    """What can be timed. least, most: numbers of devices, None: no limit. outside: a baseline of others.

    strategy, options: of Hepti's own methods, None and none for the planner's choice and for others.
    """

    least: int
    most: int | None
    outside: bool = False
    strategy: str | None = None
    options: Options | None = None

    def takes(self, devices: int) -> bool:
        """Return whether it runs on so many devices."""
        if self.least > devices or (self.most is not None and devices > self.most):
            return False
        choices = STRATEGIES[self.strategy].variants_for(devices) if self.strategy else ()
        return self.strategy is None or (self.options or {}) in [dict(o) for o in choices]

    def divides(self, model: Graph) -> bool:
        """Return whether it can compute a model."""
        return self.strategy is None or STRATEGIES[self.strategy].why_unsupported(model) is None


def _methods() -> Iterator[tuple[str, Contender]]:
    for s in STRATEGIES.values():
        least, most = (1, 1) if s.max_devices == 1 else (2, None)
        for options in s.all_variants(MOST).values():
            yield "/".join([s.name, *options.values()]), Contender(least, most, False, s.name, dict(options))


# Hepti's own choice, its methods by hand, and the outside baselines.
CONTENDERS: Final[Mapping[str, Contender]] = {
    AUTO: Contender(2, None),
    **dict(_methods()),
    **{name: Contender(b.least, b.most, outside=True) for name, b in BASELINES.items()},
}
STRATEGY_NAMES: Final = tuple(name for name, contender in CONTENDERS.items() if not contender.outside)
# What every other cell is compared with: the method that knows one device only.
ALONE: Final = next(s.name for s in STRATEGIES.values() if s.max_devices == 1)


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
    wire: str = "f32"
    copy: int = 0
    route: str = FREE
    weights: str = "f32"
    requests: int = 0
    objective: str = "latency"

    @property
    def group(self) -> tuple[str, float | None, str, int | None]:
        """Return what cells that take turns have in common."""
        return self.lab, self.rate, self.model, self.tokens

    @property
    def how(self) -> tuple[str, ...]:
        """Return what sets it apart from others on the same hosts, in words."""
        words = (self.strategy, self.wire, self.route, f"weights {self.weights}", f"{self.requests} at once")
        plain = ("", "f32", FREE, "weights f32", "0 at once")
        kept = [word for word, usual in zip(words, plain, strict=True) if word != usual or usual == ""]
        sought = [] if self.objective == "latency" else [f"for {self.objective}"]
        return (*kept, *sought, *["again"] * self.copy)

    @property
    def label(self) -> str:
        """Return a name for people, unique in its group."""
        return f"{self.how[0]} x{len(self.devices)} {' '.join(self.how[1:])}".strip()

    @property
    def title(self) -> str:
        """Return the name of its group for people."""
        rate = "" if self.rate is None else f" at {self.rate:g} Mbit/s"
        return f"{self.model}, {'one picture' if self.tokens is None else f'{self.tokens} tokens'}, {self.lab}{rate}"

    @staticmethod
    def of(data: Mapping[str, Any]) -> Cell:
        """Return the cell that a record was made from."""
        return Cell(**{**data, "devices": tuple(data["devices"])})


@dataclass(frozen=True, slots=True)
class Experiment:
    """An experiment file of kind `infer`. models: name -> kind of `hepti model make`, or directory.

    layers: fewer than the kind has. outside: baselines that take turns with the strategies. objectives: by strategy.
    watched: strategies that are asked while the changes are made. settle: seconds for which the planner's own choice is
    served first, at the most, until it stands.
    """

    name: str
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


_KEYS: Final = (
    *("name", "kind", "lab", "rates", "models", "lengths", "strategies", "outside", "devices", "wire", "route"),
    *("weights", "memory", "dilation", "requests", "objective", "repetitions", "warmup", "settle", "rounds", "seed"),
    *("layers", "changes", "watched"),
)


def read(name: str, quick: bool, given: Mapping[str, Any]) -> tuple[dict[str, Any], Path]:
    """Return the keys of a file, or of a name in benchmarks/experiments, and where its paths begin; raises ConfigError.

    quick: with the changes of its `quick:`. given: what replaces what the file has, by its keys.
    """
    path = files.find("experiments", Path(name))
    if not path.is_file():
        known = ", ".join(files.names("experiments"))
        raise ConfigError(f"there is no experiment {name!r}; give a file, or one of {known}")
    data = dict(mapping(f"{path}: an experiment", load_yaml(path)))
    sample = mapping(f"{path}: `quick`", data.pop("quick", None) or {})
    return {**data, **(sample if quick else {}), **given}, path.parent


def parse(data: Mapping[str, Any], base: Path) -> Experiment:
    """Return the experiment of a mapping; `base`: where its paths begin. Raises ConfigError that names the key."""
    only("the experiment", data, _KEYS)
    require(data, "name", "lab", "models", "strategies", "devices")
    labs = {spec.name: spec for spec in _labs(data, base)}
    rates = numbers(data, "rates", [])
    for spec in labs.values():
        for rate in rates:
            spec.with_rate(rate)
    strategies = strategies_of(listed(data["strategies"]))
    outside = listed(data.get("outside", []))
    changes: tuple[Change, ...] = ()
    for spec in labs.values() if data.get("changes") else ():
        changes = load_script((base / data["changes"]).resolve(), spec)
    made = Experiment(
        name=str(data["name"]),
        labs=labs,
        rates=rates,
        models=dict(_model(each, base) for each in listed(data["models"])),
        lengths=wholes(data, "lengths", [128], 1),
        strategies=strategies,
        outside=tuple(BASELINES) if outside == [ALL] else words(data, "outside", [], tuple(BASELINES)),
        devices=tuple(_devices(each, labs) for each in listed(data["devices"])),
        wire=words(data, "wire", ["f32"], WIRES),
        route=words(data, "route", [FREE], ROUTES),
        weights=words(data, "weights", ["f32"], STORAGES),
        requests=wholes(data, "requests", [0], 0),
        objectives=_objectives(data.get("objective", "latency"), strategies),
        repetitions=whole(data, "repetitions", 3, 1),
        warmup=whole(data, "warmup", 1, 0),
        settle=whole(data, "settle", 0, 0),
        rounds=whole(data, "rounds", 6, 1),
        seed=whole(data, "seed", 0, 0),
        layers=whole(data, "layers", 1, 1) if data.get("layers") else None,
        changes=changes,
        watched=words(data, "watched", [AUTO], strategies) if changes else (),
    )
    if not cells(made):
        raise ConfigError("`strategies` and `devices` leave nothing to measure; `single` needs 1, the others 2 or more")
    return made


def cells(experiment: Experiment) -> list[Cell]:
    """Return every cell, those of a group beside each other; a method that cannot divide a model has none there."""
    found: dict[Cell, None] = {}
    for lab, rate, (model, kind) in product(experiment.labs, experiment.rates or (None,), experiment.models.items()):
        spec = spec_of(kind)
        able = {name for name, c in CONTENDERS.items() if c.divides(graph(spec, largest_shape(spec)))}
        for tokens in (None,) if isinstance(spec.input_spec, ImageInput) else experiment.lengths:
            found.update(dict.fromkeys(_group(experiment, (lab, rate, model, tokens), able)))
    return list(found)


def _group(e: Experiment, group: tuple[str, float | None, str, int | None], able: Container[str]) -> Iterator[Cell]:
    names = (*e.strategies, *e.outside)
    hosts = tuple(host.name for host in e.labs[group[0]].hosts)
    for place, name in enumerate(names):
        contender, copy = CONTENDERS[name], names[:place].count(name)
        for devices in (each for count in e.devices for each in _groups_of(count, hosts)):
            if name not in able or not contender.takes(len(devices)):
                continue
            ways = product(e.wire, e.route) if contender.most != 1 and not contender.outside else [("f32", FREE)]
            loads = [("f32", 0, "latency")]
            if not contender.outside:
                loads = list(product(e.weights, e.requests, e.objectives[name]))
            for (wire, route), (weights, requests, objective) in product(ways, loads):
                yield Cell(*group, name, devices, wire, copy, route, weights, requests, objective)


def _groups_of(count: int | str | tuple[str, ...], hosts: tuple[str, ...]) -> list[tuple[str, ...]]:
    if isinstance(count, tuple):
        return [count]
    return [hosts[:count]] if isinstance(count, int) else [(name,) for name in hosts]


def spec_of(kind: str | Path, layers: int | None = None) -> Spec:
    """Return the spec of a kind of `hepti model make`, of so many layers, or of a directory."""
    if isinstance(kind, str):
        return spec_of_kind(kind, layers)
    with Checkpoint.open(kind, kind.name) as checkpoint:
        return checkpoint.spec


def lab_of(value: Any, base: Path, dilation: Any = None) -> LabSpec:
    """Return the lab of a name in benchmarks/labs or a path; raises ConfigError."""
    path = files.names("labs").get(str(value), (base / str(value)).resolve())
    if not path.is_file():
        raise ConfigError(f"`lab`: there is no {value!r}; give a file, or one of {', '.join(files.names('labs'))}")
    return load_lab(path, dilation)


def _labs(data: Mapping[str, Any], base: Path) -> Iterator[LabSpec]:
    """Yield the labs of a file, each once for every budget of memory that its hosts have instead of their own."""
    for each, limit in product(listed(data["lab"]), listed(data.get("memory", [None]))):
        lab = lab_of(each, base, data.get("dilation"))
        if limit is not None:
            hosts = tuple(replace(host, memory_bytes=memory(limit)) for host in lab.hosts)
            lab = replace(lab, name=f"{lab.name}-{str(limit).lower()}", hosts=hosts)
        yield lab


def strategies_of(values: Sequence[Any]) -> tuple[str, ...]:
    """Return the names that entries stand for: a strategy without a variant is all of its variants, `all` is all."""
    if list(values) == [ALL]:
        return STRATEGY_NAMES
    found: list[str] = []
    for value in values:
        own = [name for name in STRATEGY_NAMES if value in (name, name.partition("/")[0])]
        if not own:
            raise ConfigError(f"`strategies`: there is no {value!r}; choose from {', '.join((ALL, *STRATEGY_NAMES))}")
        found += own
    return tuple(found)


def _objectives(value: Any, strategies: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Return what each strategy is chosen by: of one value or list for all, or of a mapping; latency without one."""
    named = value if isinstance(value, Mapping) else dict.fromkeys(strategies, value)
    found: dict[str, tuple[str, ...]] = dict.fromkeys(strategies, ("latency",))
    for key, each in named.items():
        sought = tuple(one_of("objective", o, OBJECTIVES) for o in listed(each))
        found.update(dict.fromkeys((name for name in strategies_of([key]) if name in found), sought))
    return found


def _model(value: Any, base: Path) -> tuple[str, str | Path]:
    if value in MODEL_KINDS:
        return value, value
    path = (base / str(value)).resolve()
    if (path / "config.json").is_file():
        return path.name, path
    raise ConfigError(f"`models`: {value!r} is no directory with a config.json, nor one of {', '.join(MODEL_KINDS)}")


def _devices(value: Any, labs: Mapping[str, LabSpec]) -> int | str | tuple[str, ...]:
    for spec in labs.values():
        if isinstance(value, list):
            for name in value:
                spec.host(name)
        elif value != EACH and (not isinstance(value, int) or not 1 <= value <= len(spec.hosts)):
            raise ConfigError(f"`devices` has {value!r}; lab {spec.name} allows 1 to {len(spec.hosts)}, or its names")
    return tuple(sorted(set(value))) if isinstance(value, list) else value


# -- values, each refused with its key ------------------------------------------------------------------------------


def require(data: Mapping[str, Any], *keys: str) -> None:
    """Raise ConfigError for a key that is not there."""
    if missing := [key for key in keys if key not in data]:
        raise ConfigError(f"the experiment needs `{missing[0]}:`")


def listed(value: Any) -> list[Any]:
    """Return a value or a list of them as a list."""
    return list(value) if isinstance(value, list | tuple) else [value]


def words(data: Mapping[str, Any], key: str, default: Any, allowed: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a key, each one of those that are allowed."""
    return tuple(one_of(key, each, allowed) for each in listed(data.get(key, default)))


def whole(data: Mapping[str, Any], key: str, default: int, least: int) -> int:
    """Return the whole number of a key, from `least`."""
    return wholes(data, key, default, least)[0]


def wholes(data: Mapping[str, Any], key: str, default: Any, least: int) -> tuple[int, ...]:
    """Return the whole numbers of a key, each from `least`."""
    return tuple(int(each) for each in _checked(data, key, default, lambda v: isinstance(v, int) and v >= least))


def numbers(data: Mapping[str, Any], key: str, default: Any) -> tuple[float, ...]:
    """Return the numbers above 0 of a key."""
    return tuple(float(v) for v in _checked(data, key, default, lambda v: isinstance(v, int | float) and v > 0))


def _checked(data: Mapping[str, Any], key: str, default: Any, fits: Callable[[Any], bool]) -> list[Any]:
    found = listed(data.get(key, default))
    for each in found:
        if isinstance(each, bool) or not fits(each):
            raise ConfigError(f"`{key}` has {each!r}, which is no number that it can have")
    return found
