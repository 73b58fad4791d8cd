"""The kinds of experiments: how each is parsed, counted, run and reported. A new kind is one row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from hepti_mqtt.bench import chain_experiment, chain_report, chain_run, experiment, report, runner, simulated
from hepti_mqtt.bench.results import read
from hepti_mqtt.errors import ConfigError

DEFAULT: Final = "infer"


class Kind(NamedTuple):
    """parse: file -> experiment. count: of its cells. run: measures. write: results -> report, tables, plots."""

    parse: Callable[[Mapping[str, Any], Path], Any]
    count: Callable[[Any], int]
    run: Callable[..., None]
    write: Callable[[Path], list[Path]]


KINDS: Final[Mapping[str, Kind]] = {
    DEFAULT: Kind(experiment.parse, lambda e: len(experiment.cells(e)), runner.run, report.write),
    chain_experiment.KIND: Kind(
        chain_experiment.parse, lambda e: len(e.conditions) * len(e.wanted), chain_run.run, chain_report.write
    ),
    simulated.KIND: Kind(simulated.parse, lambda e: len(e.points), simulated.run, simulated.write),
}


def load(name: str, quick: bool = False, given: Mapping[str, Any] | None = None) -> tuple[Kind, Any]:
    """Return the kind and the experiment of a file, as `experiment.load` does; raises ConfigError."""
    found: list[Kind] = []

    def parser_of(data: Mapping[str, Any]) -> Callable[[Mapping[str, Any], Path], Any]:
        found.append(_kind(data.get("kind", DEFAULT)))
        return found[0].parse

    made = experiment.load_with(parser_of, name, quick, given or {})
    return found[0], made


def write(directory: Path) -> list[Path]:
    """Write the report of a directory's results, of whatever kind they are; raises ConfigError."""
    return _kind(read(directory).header.get("kind", DEFAULT)).write(directory)


def _kind(name: Any) -> Kind:
    if not isinstance(name, str) or name not in KINDS:
        raise ConfigError(f"`kind` is {name!r}; it is one of {', '.join(KINDS)}")
    return KINDS[name]
