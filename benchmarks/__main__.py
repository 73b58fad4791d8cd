"""`python -m benchmarks NAME [key=value ...]`: run an experiment or a script of this folder, from a checkout."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import yaml

from benchmarks import experiment, files
from benchmarks.lab import command as labs
from benchmarks.provenance import Writer, provenance, read
from benchmarks.tables import table
from hepti_mqtt.cli import output
from hepti_mqtt.config.settings import check_environment
from hepti_mqtt.core.errors import ConfigError, HeptiError

DEFAULT: Final = "infer"
# A kind of experiment is a module with parse (keys -> experiment), count (of its cells), run, and write (the report).
KINDS: Final[Mapping[str, tuple[str, str]]] = {
    DEFAULT: ("benchmarks.runner", "benchmarks.report"),
    "chain": ("benchmarks.chain_experiment",) * 2,
    "simulate": ("benchmarks.simulated",) * 2,
    "transport": ("benchmarks.transport",) * 2,
    "kernels": ("benchmarks.kernels",) * 2,
}
SCRIPTS: Final = tuple(sorted(path.stem for path in (Path(__file__).parent / "scripts").glob("[a-z]*.py")))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    of_labs = words[:1] == ["lab"]
    (labs.arguments if of_labs else _arguments)(parser)
    args = parser.parse_args(words[1:]) if of_labs else parser.parse_intermixed_args(words)
    try:
        check_environment()
        return labs.lab(args) if of_labs else _run(args, shlex.join(["python", "-m", "benchmarks", *words]))
    except HeptiError as error:
        output.err.print(f"benchmarks: {error}", markup=False)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="an experiment (name or file), a script, `list`, `lab`, or `report DIR`")
    parser.add_argument("given", nargs="*", metavar="KEY=VALUE", help="in place of what the file has, in YAML")
    parser.add_argument("--quick", action="store_true", help="with the file's `quick:` values, a sample")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where results go (default: benchmarks/results/...)")


def _run(args: argparse.Namespace, command: str) -> int:
    if args.name == "list":
        output.print_lines(_listed())
        return 0
    if args.name == "report":
        for directory in args.given or [""]:
            found = read(Path(directory))
            _report(_kind(found.header)[1], Path(directory))
        return 0
    given = _given(args.given)
    if args.name in SCRIPTS:
        import_module(f"benchmarks.scripts.{args.name}").main(**given)
        return 0
    data, base = experiment.read(args.name, args.quick, given)
    running, reporting = _kind(data)
    made = _parse(running, data, base)
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    out = args.out or files.ROOT / "benchmarks" / "results" / f"{made.name}-{stamp}"
    header = {"experiment": made.name, "kind": data.get("kind", DEFAULT), "seed": made.seed, "command": command}
    try:
        with Writer(out, {**provenance(), **header, "file": data}) as writer:
            running.run(made, out, writer, output.err)
    finally:  # what was interrupted keeps what it has
        if (out / "results.jsonl").exists():
            _report(reporting, out)
    return 0


def _kind(data: Mapping[str, Any]) -> tuple[ModuleType, ModuleType]:
    name = data.get("kind", DEFAULT)
    if name not in KINDS:
        raise ConfigError(f"`kind` is {name!r}; it is one of {', '.join(KINDS)}")
    running, reporting = map(import_module, KINDS[name])
    return running, reporting


def _parse(kind: ModuleType, data: Mapping[str, Any], base: Path) -> Any:
    try:
        return (kind.parse if hasattr(kind, "parse") else experiment.parse)(data, base)
    except ConfigError as error:
        raise ConfigError(f"{data.get('name')}: {error}") from error


def _report(kind: ModuleType, directory: Path) -> None:
    output.print_lines([f"wrote {path}" for path in kind.write(read(directory), directory)])


def _given(words: Sequence[str]) -> dict[str, Any]:
    pairs = [word.partition("=") for word in words]
    if wrong := [key for key, sign, _ in pairs if not sign]:
        raise ConfigError(f"{wrong[0]!r} is no KEY=VALUE, such as rates=[240]")
    return {key: yaml.safe_load(value) for key, _, value in pairs}


def _listed() -> list[str]:
    """Return what there is, with the number of cells; parses every file, so that none is broken."""
    rows: list[tuple[Any, ...]] = []
    for name in files.names("experiments"):
        counts = []
        for quick in (False, True):
            data, base = experiment.read(name, quick, {})
            running, _ = _kind(data)
            counts.append(running.count(_parse(running, data, base)))
        rows.append((name, data.get("kind", DEFAULT), *counts))
    rows += [(name, "script", None, None) for name in SCRIPTS]
    return table(("name", "kind", "cells", "with --quick"), rows)


if __name__ == "__main__":
    sys.exit(main())
