"""Runs an experiment of kind `infer`: a lab and a site per network, cells in turns, every turn written down at once."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from benchmarks.experiment import AUTO, CONTENDERS, FREE, Cell, Experiment, cells
from benchmarks.lab.calibrate import calibrate
from benchmarks.lab.changes import Script
from benchmarks.lab.lab import Lab
from benchmarks.lab.site import LabSite
from benchmarks.lab.spec import LabSpec
from benchmarks.outside import Outside, require
from benchmarks.provenance import Writer
from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.client.described import random_input, reference
from hepti_mqtt.core.errors import ConfigError
from hepti_mqtt.models import largest_shape

ANSWER_S: Final = 900.0  # a turn with a swap of plans and a slow host
AFTERWARDS_S: Final = 15.0  # of requests after a script's last change: a dead device is noticed after 6 s
# After a turn of a baseline: agents' probes found their hosts busy, and from those the planner knows of links.
SETTLE_S: Final = 2.5


def progress(console: Console) -> Progress:
    """Return a bar that says what is measured, how much there is, and how long that will take."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)


def count(experiment: Experiment) -> int:
    """Return the number of cells."""
    return len(cells(experiment))


def run(experiment: Experiment, out: Path, writer: Writer, console: Console) -> None:
    """Measure and write it down; raises the error of a lab, a site or a driver."""
    require(experiment.outside)
    wanted = cells(experiment)
    with progress(console) as bar:
        task = bar.add_task(experiment.name, total=experiment.rounds * len(wanted))
        models = prepare_models(experiment, out, wanted)
        # Changes leave a lab that nothing else is measured on.
        width = len(wanted[0].group) if experiment.changes else 2
        for (lab, rate, *_), part in groupby(wanted, key=lambda cell: cell.group[:width]):
            own = list(part)
            watched = _watched(experiment, own)
            spec = experiment.labs[lab].with_rate(rate)
            measuring = _Measuring(experiment, out, writer, bar, task, models)
            measuring.network(spec, own, watched[0] if watched else None, timed=True)
            for cell in watched[1:]:  # each on a lab of its own
                measuring.network(spec, [cell], cell, timed=False)


def prepare_models(experiment: Experiment, out: Path, wanted: Sequence[Cell]) -> dict[str, Path]:
    """Make models, seeded inputs and references; return each model's directory."""
    found = {}
    for name, kind in experiment.models.items():
        directory = found[name] = kind if isinstance(kind, Path) else out / "models" / name
        if isinstance(kind, str):
            make_model(kind, directory, experiment.seed, experiment.layers)
        with Checkpoint.open(directory, name) as checkpoint:
            for tokens in dict.fromkeys(cell.tokens for cell in wanted if cell.model == name):
                limit = largest_shape(checkpoint.spec).size
                if tokens is not None and tokens > limit:
                    raise ConfigError(f"`lengths` has {tokens}, and {name} reads at most {limit} tokens")
                place = _reference(out, name, tokens)
                place.parent.mkdir(parents=True, exist_ok=True)
                body = random_input(checkpoint.spec, tokens or 1, experiment.seed, photographs=True)
                place.with_suffix(".json").write_text(json.dumps(body))
                np.save(place, reference(checkpoint, body))
    return found


def _watched(experiment: Experiment, group: Sequence[Cell]) -> list[Cell]:
    """Return the cells that are asked while the script changes the lab: of each watched strategy that on most hosts."""
    found = {cell.strategy: cell for cell in sorted(group, key=lambda cell: len(cell.devices))}
    return [found[name] for name in experiment.watched if name in found]


def turns(group: Sequence[Cell], number: int, seed: int) -> list[Cell]:
    """Return a round's order: shuffled by seed and round, so that no cell always follows the same one.

    Every second round goes the way of the one before backwards: what comes of a place in the order, or of whose weights
    are there already, falls on any two cells alike.
    """
    shuffled = sorted(group, key=repr)
    random.Random(f"{seed}/{number // 2}").shuffle(shuffled)
    return shuffled[::-1] if number % 2 else shuffled


class _Measuring:
    def __init__(
        self,
        experiment: Experiment,
        out: Path,
        writer: Writer,
        bar: Progress,
        task: TaskID,
        models: Mapping[str, Path],
    ) -> None:
        self.experiment, self.out, self.writer = experiment, out, writer
        self.bar, self.task, self.models = bar, task, models

    def network(self, spec: LabSpec, own: Sequence[Cell], watched: Cell | None, *, timed: bool) -> None:
        """Measure the cells of one lab at one rate; then, with a cell to watch, what changes do to it."""
        logs = self.out.resolve() / "logs"
        with ExitStack() as stack:
            made = _with_room(spec) if self.experiment.outside else spec
            # Every rate measures its hosts again; the tiles of weights are the same at all of them.
            kept = logs / f"{spec.name}-kept"
            self.lab = stack.enter_context(Lab(made, logs / f"{spec.name}-{spec.rate_mbit or 0:g}", kept))
            figures = calibrate(self.lab, spec, self.say)
            for line in figures.lines():
                self.say(line)
            used = {cell.model: self.models[cell.model] for cell in own}
            site = stack.enter_context(LabSite(self.lab, used))
            self.writer.add("lab", lab=asdict(spec), calibration=asdict(figures))
            self.driver = site.talk("driver", "benchmarks.driver")
            self.outside = stack.enter_context(Outside())
            self.limits = {host.name: host.memory_bytes for host in spec.hosts}
            for _, part in groupby(own, key=lambda cell: cell.group):
                self._group(list(part), timed)
            if watched is not None:
                self._under_changes(watched)

    def _group(self, group: Sequence[Cell], timed: bool) -> None:
        place = _reference(self.out, group[0].model, group[0].tokens).resolve()
        body = json.loads(place.with_suffix(".json").read_text())
        load = {"do": "load", "key": _key(group[0]), "model": group[0].model, "body": body, "reference": str(place)}
        self._ask(load)
        e = self.experiment
        for number in range(e.rounds if timed else 0):
            for cell in turns(group, number, e.seed):
                self.bar.update(self.task, description=f"{cell.model} {cell.tokens or ''} {cell.label}")
                if CONTENDERS[cell.strategy].outside:
                    answer = self._baseline(cell, body, place)
                else:
                    last = (cell.strategy == AUTO or cell.requests > 0) and number == e.rounds - 1
                    answer = self._site(cell, describe=last)
                self.writer.add("turn", of=asdict(cell), round=number, **answer)
                self.bar.advance(self.task)

    def _site(self, cell: Cell, describe: bool) -> dict[str, Any]:
        """Return what the driver says of a turn of Hepti's."""
        turn = self._ask(self._order(cell, "bring"))
        e = self.experiment
        if turn["ok"] and e.settle and cell.strategy == AUTO:
            turn |= self._ask({**self._order(cell, "settle"), "most_s": e.settle})
        if turn["ok"]:
            fields = {"warmup": e.warmup, "repetitions": e.repetitions, "describe": describe}
            turn |= self._ask({**self._order(cell, "measure"), **fields, "requests": cell.requests})
        return turn

    def _baseline(self, cell: Cell, body: Mapping[str, Any], reference: Path) -> dict[str, Any]:
        """Return a turn of an outside baseline, for which the agents of the site stand still."""
        hosts = [self.lab.host(name) for name in cell.devices]
        e, model = self.experiment, self.models[cell.model].resolve()
        turn = self.outside.turn(cell.strategy, hosts, model, body, reference, e.warmup, e.repetitions)
        time.sleep(SETTLE_S)
        for name, held in zip(cell.devices, turn.get("rss_bytes", ()), strict=False):
            limit = self.limits[name]
            if limit is not None and held > limit:
                message = f"{cell.strategy} holds {held / 1e9:.2f} GB on {name}, which has {limit / 1e9:.2f}"
                return {"ok": False, "unix_s": turn["unix_s"], "code": "memory", "message": message}
        return turn

    def _under_changes(self, cell: Cell) -> None:
        """Ask without a pause while the script changes the lab, and a few times more."""
        self.bar.update(self.task, description=f"{cell.model} {cell.label} under changes")
        self.writer.add("play", of=asdict(cell), unix_s=time.time())
        with Script(self.experiment.changes, self.lab.apply, lambda r: self.writer.add("change", **r)) as script:
            until: float | None = None
            while until is None or time.monotonic() < until:
                self.writer.add("under_change", **self._ask(self._order(cell, "once")))
                if until is None and script.finished():
                    until = time.monotonic() + AFTERWARDS_S

    def _order(self, cell: Cell, do: str) -> dict[str, Any]:
        """Return what the driver is to do; the planner's own choice among all hosts pins no devices."""
        contender = CONTENDERS[cell.strategy]
        free = cell.strategy == AUTO and len(cell.devices) == len(self.lab.hosts)
        return {
            "do": do,
            "key": _key(cell),
            "strategy": contender.strategy or cell.strategy,
            "options": dict(contender.options or {}),
            "devices": None if free else list(cell.devices),
            "wire": cell.wire,
            "weights": cell.weights,
            "route": None if cell.route == FREE else cell.route,
            "objective": cell.objective,
        }

    def _ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        self.driver.send(json.dumps(order))
        answer: dict[str, Any] = json.loads(self.driver.receive(ANSWER_S))
        return answer

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self.bar.console.print(line, markup=False)


def _with_room(spec: LabSpec) -> LabSpec:
    """Return a lab whose limits of memory hold an agent and a baseline, each with as much as the lab file says.

    Agents keep weights while they stand still, as much as their budget allows.
    """
    hosts = (h if h.memory_bytes is None else replace(h, memory_bytes=2 * h.memory_bytes) for h in spec.hosts)
    return replace(spec, hosts=tuple(hosts))


def _key(cell: Cell) -> str:
    return f"{cell.model}-{cell.tokens or 'picture'}"


def _reference(out: Path, model: str, tokens: int | None) -> Path:
    return out / "references" / f"{model}-{tokens or 'picture'}.npy"
