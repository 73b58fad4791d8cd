"""A site on the hosts of a lab and another program on the first of them, which answer lines and are asked in turn."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

from benchmarks.lab.calibrate import calibrate
from benchmarks.lab.hosts import Process
from benchmarks.lab.lab import Lab
from benchmarks.lab.site import LabSite
from benchmarks.lab.spec import LabSpec

PATIENCE_S: Final = 900.0
Answers = list[dict[str, Any]]


class Asked(NamedTuple):
    """What is asked, and with which keys."""

    process: Process
    keys: Mapping[str, Any]


class Beside(NamedTuple):
    """The lab, the names of its hosts, and both programs."""

    lab: Lab
    names: list[str]
    outside: Process
    site: Process


@contextmanager
def beside(spec: LabSpec, module: str, name: str, model: Path, words: Sequence[str] = ()) -> Iterator[Beside]:
    """Start all of it; module: of both programs. words: to the planner, which serves the model under its name."""
    with TemporaryDirectory(prefix="hepti-beside-") as scratch, Lab(spec, Path(scratch) / "lab") as lab:
        calibrate(lab, spec, lambda line: print(line, file=sys.stderr))
        names = list(lab.hosts)
        with LabSite(lab, {name: model}, tuple(words)) as site:
            outside = lab.hosts[names[0]].talk("outside", module, environment={"OMP_NUM_THREADS": "1"})
            yield Beside(lab, names, outside, site.talk("asker", module))


def say(process: Process, **order: Any) -> dict[str, Any]:
    """Send a line and return the answer."""
    process.send(json.dumps(order))
    return dict(json.loads(process.receive(PATIENCE_S)))


def in_turn(asked: Mapping[str, Asked], orders: Sequence[Mapping[str, Any]]) -> dict[str, Answers]:
    """Return the answers to each order, by name; of two orders one is given backwards."""
    found: dict[str, Answers] = {name: [] for name in asked}
    for number, order in enumerate(orders):
        for name in list(asked)[:: 1 if number % 2 == 0 else -1]:
            found[name].append(say(asked[name].process, do="ask", **order, **asked[name].keys))
    return found


def ratio(over: Answers, under: Answers, part: str) -> str:
    """Return the median of the ratios of a number within rounds."""
    return f"{median(one[part] / other[part] for one, other in zip(over, under, strict=True)):.2f}"
