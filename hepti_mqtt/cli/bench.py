"""`hepti bench`: experiments."""

from __future__ import annotations

import argparse
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hepti_mqtt.cli import output
from hepti_mqtt.errors import ConfigError


def arguments(sub: argparse.ArgumentParser) -> None:
    """Add the arguments of `hepti bench`."""
    sub.add_argument(
        "what", nargs="?", metavar="EXPERIMENT", help="a name or a file; or kernels, transport, report, compare"
    )
    sub.add_argument("results", nargs="*", type=Path, metavar="RESULTS", help="of report (one) and compare (two)")
    sub.add_argument("--list", action="store_true", help="list the experiments that come with Hepti")
    sub.add_argument("--out", type=Path, metavar="DIR", help="where results go (default: a new directory in ./results)")
    sub.add_argument("--resume", action="store_true", help="go on with what --out has not got yet")
    sub.add_argument(
        "--calibrations", type=Path, metavar="DIR", help="verify the quotas kept there instead of finding them anew"
    )
    sub.add_argument("--lab", metavar="FILE", help="another lab than the experiment's; of transport: its hosts")
    sub.add_argument("--rate", type=float, action="append", metavar="MBIT", help="other rates; may be repeated")
    sub.add_argument("--dilation", type=float, metavar="TIMES", help="the lab so many times as slow: hosts and links")
    sub.add_argument(
        "--quick", action="store_true", help="the experiment with its `quick:` values; a sample of the kernels"
    )
    kernels = sub.add_argument_group("of `bench kernels`")
    kernels.add_argument("--threads", type=_counts, default=(1, 2), metavar="1,2", help="thread counts (default 1,2)")
    kernels.add_argument(
        "--only", type=_groups, metavar="GROUP,..", help="groups of cases (default: all; a wrong one lists them)"
    )
    kernels.add_argument("--seed", type=int, default=1, help="of the data and the sample (default 1)")
    kernels.add_argument("--seconds", type=float, help="stop after so long; the same command goes on from there")


def _counts(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = (0,)
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of thread counts, such as 1,2")
    return numbers


def _groups(text: str) -> tuple[str, ...]:
    from hepti_mqtt.bench.kernel_options import GROUPS

    chosen = tuple(text.split(","))
    if unknown := set(chosen) - set(GROUPS):
        raise argparse.ArgumentTypeError(
            f"there is no group {', '.join(sorted(unknown))}; the groups are {', '.join(GROUPS)}"
        )
    return chosen


def bench(args: argparse.Namespace) -> int:
    """Run `hepti bench`."""
    if args.list:
        return _list(args)
    action, count = {
        "kernels": (_kernels, 0),
        "transport": (_transport, 0),
        "report": (_report, 1),
        "compare": (_compare, 2),
    }.get(args.what, (_run, 0))
    if args.what is None or len(args.results) != count:
        raise ConfigError(
            "use `hepti bench EXPERIMENT`, `kernels` or `transport`, `bench report RESULTS`, `bench compare A B` or "
            "`bench --list`"
        )
    return action(args)


def _list(args: argparse.Namespace) -> int:
    from hepti_mqtt.bench.experiment import names
    from hepti_mqtt.bench.kinds import load

    loaded = [(name, load(name), load(name, quick=True)) for name in names()]
    rows = [(name, kind.count(whole), kind.count(quick)) for name, (kind, whole), (_, quick) in loaded]
    if args.json:
        output.print_json({"experiments": [{"name": n, "cells": c, "quick_cells": q} for n, c, q in rows]})
    else:
        output.print_table("experiments", ("name", "cells", "with --quick"), rows)
    return 0


def _run(args: argparse.Namespace) -> int:
    from hepti_mqtt.bench.kinds import load

    given = {"lab": args.lab, "rates": args.rate, "dilation": args.dilation}
    kind, experiment = load(args.what, args.quick, {key: value for key, value in given.items() if value is not None})
    if args.resume and args.out is None:
        raise ConfigError("--resume goes on with a directory: name it with --out")
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    out = args.out or Path("results") / f"{experiment.name}-{stamp}"
    command = shlex.join(["hepti", *sys.argv[1:]])
    kind.run(experiment, out, command, resume=args.resume, console=output.err, calibrations=args.calibrations)
    return _written(args, out)


def _kernels(args: argparse.Namespace) -> int:
    from hepti_mqtt.bench import kernel_bars, kernel_report, kernels
    from hepti_mqtt.bench.kernel_options import GROUPS, OUT, Options

    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    only = args.only or GROUPS
    options = Options(args.out or OUT, args.quick, args.threads, only, args.seed, args.seconds, command)
    results = kernels.run(options)
    if args.json:
        figures = [figure._asdict() for figure in kernel_report.summary(results.records)]
        bars = [
            {"name": name, "bar": bar, "measured": found and found.value, "met": met}
            for name, bar, found, met in kernel_bars.verdicts(results.records)
        ]
        said = {"provenance": results.provenance, "missing": results.missing, "bars": bars, "figures": figures}
        output.print_json(said)
        return 0
    output.print_lines(kernel_report.markdown(results.records, results.provenance).splitlines())
    output.print_lines([f"written to {options.out}"])
    if results.missing:
        output.print_lines([f"{results.missing} cases are not measured yet; the same command goes on"])
    return 0


def _transport(args: argparse.Namespace) -> int:
    from hepti_mqtt.bench import transport, transport_report

    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    out = args.out or transport.OUT
    if args.lab:
        results = _transport_in_lab(args, out, command)
    else:
        options = transport.Options.quick(out, command) if args.quick else transport.Options(out, command=command)
        results = transport.run(options)
    if args.json:
        output.print_json(results)
        return 0
    output.print_lines(transport_report.markdown(results))
    output.print_lines([f"written to {out}"])
    return 0


def _transport_in_lab(args: argparse.Namespace, out: Path, command: str) -> dict[str, Any]:
    from hepti_mqtt.bench import transport_lab

    place = transport_lab.place(Path(args.lab), args.dilation, args.rate or (), args.calibrations, output.err.print)
    return transport_lab.run(transport_lab.options(out, command, quick=args.quick), place)


def _report(args: argparse.Namespace) -> int:
    return _written(args, args.results[0])


def _written(args: argparse.Namespace, directory: Path) -> int:
    from hepti_mqtt.bench.kinds import write

    if not directory.is_dir():
        raise ConfigError(f"{directory} is no directory of results")
    files = write(directory)
    if args.json:
        output.print_json({"files": [str(path) for path in files]})
    else:
        output.print_lines([f"wrote {path}" for path in files])
    return 0


def _compare(args: argparse.Namespace) -> int:
    from hepti_mqtt.bench.report import compare
    from hepti_mqtt.bench.results import read

    same, lines = compare(*(read(path) for path in args.results))
    if args.json:
        output.print_json({"agree": same, "cells": lines})
    else:
        output.print_lines(lines)
    return 0 if same else 1
