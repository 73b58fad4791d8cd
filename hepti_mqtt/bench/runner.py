"""Runs an experiment: a lab and a site per network, cells in turns, every turn written down at once."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from hepti_mqtt.bench.contenders import AUTO, CONTENDERS, OUTSIDE, SITE
from hepti_mqtt.bench.experiment import Cell, Experiment, cells
from hepti_mqtt.bench.outside import Outside, require
from hepti_mqtt.bench.provenance import header
from hepti_mqtt.bench.results import Writer
from hepti_mqtt.bench.sources import Baselines, Site, Source, with_room
from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.client.described import random_input, reference
from hepti_mqtt.errors import ConfigError
from hepti_mqtt.lab.calibrate import calibrate
from hepti_mqtt.lab.calibrate import markdown as calibration_table
from hepti_mqtt.lab.changes import Script, Stamp
from hepti_mqtt.lab.lab import Lab
from hepti_mqtt.lab.site import LabSite
from hepti_mqtt.lab.spec import LabSpec
from hepti_mqtt.models import largest_shape

AFTERWARDS_S: Final = 15.0  # of requests after a script's last change: a dead device is noticed after 6 s


def run(
    experiment: Experiment, out: Path, command: str, *, resume: bool, console: Console, calibrations: Path | None = None
) -> None:
    """Measure what is missing in `out` and write it there; raises the error of a lab, a site or a driver.

    calibrations: a directory of earlier ones, which several experiments may share; None for one of its own in `out`.
    """
    wanted = cells(experiment)
    if any(spec.kind != "ssh" for spec in experiment.labs.values()):  # boards have interpreters of their own
        require(experiment.outside)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        Writer(out, json.loads(json.dumps(header(experiment, command), default=str)), resume=resume) as writer,
        Progress(*columns, console=console) as bar,
    ):
        done = writer.results.done()
        todo = {cell: [r for r in range(experiment.rounds) if (cell.id, r) not in done] for cell in wanted}
        total = experiment.rounds * len(wanted)
        task = bar.add_task(experiment.name, total=total, completed=total - sum(map(len, todo.values())))
        models = prepare_models(experiment, out, wanted)
        played = {cell for cell, play in writer.results.plays().items() if play.whole}
        # Changes leave a lab that nothing else is measured on.
        width = len(wanted[0].group) if experiment.changes else 2
        for (lab, rate, *_), part in groupby(wanted, key=lambda cell: cell.group[:width]):
            own = list(part)
            watched = [cell for cell in watched_of(experiment, own) if cell.id not in played]
            own = [cell for cell in own if todo[cell] or cell in watched[:1]]
            # Changes leave a lab that nothing else is watched on either.
            parts = [(own, watched[0] if watched else None), *(([cell], cell) for cell in watched[1:])] if own else []
            for number, (part_own, each) in enumerate(parts):
                spec = experiment.labs[lab] if rate is None else experiment.labs[lab].with_rate(rate)
                _Measuring(experiment, out, writer, bar, task, models, calibrations or out / "calibration").network(
                    spec, part_own, todo if number == 0 else dict.fromkeys(part_own, ()), each
                )


def prepare_models(experiment: Experiment, out: Path, wanted: Sequence[Cell]) -> dict[str, Path]:
    """Make the models, seeded inputs and references that are not in `out` yet; return each model's directory."""
    found = {}
    for name, kind in experiment.models.items():
        directory = kind if isinstance(kind, Path) else out / "models" / name
        if isinstance(kind, str) and not (directory / "config.json").exists():
            make_model(kind, directory, experiment.seed, experiment.layers)
        found[name] = directory
        with Checkpoint.open(directory, name) as checkpoint:
            for tokens in dict.fromkeys(cell.tokens for cell in wanted if cell.model == name):
                limit = largest_shape(checkpoint.spec).size
                if tokens is not None and tokens > limit:
                    raise ConfigError(f"`lengths` has {tokens}, and {name} reads at most {limit} tokens")
                place = _reference(out, name, tokens)
                if not place.exists():
                    place.parent.mkdir(parents=True, exist_ok=True)
                    body = random_input(checkpoint.spec, tokens or 1, experiment.seed, photographs=True)
                    place.with_suffix(".json").write_text(json.dumps(body))
                    np.save(place, reference(checkpoint, body))
    return found


def watched_of(experiment: Experiment, group: Sequence[Cell]) -> list[Cell]:
    """Return the cells that are asked for while the script changes the lab: of each watched strategy that on most
    devices, by default Hepti's own choice.
    """
    found = {}
    for cell in sorted(group, key=lambda cell: len(cell.devices)):
        if cell.strategy in experiment.watched:
            found[cell.strategy] = cell
    return [found[name] for name in experiment.watched if name in found]


class _Measuring:
    def __init__(
        self,
        experiment: Experiment,
        out: Path,
        writer: Writer,
        bar: Progress,
        task: TaskID,
        models: Mapping[str, Path],
        calibrations: Path,
    ) -> None:
        self.experiment, self.out, self.writer = experiment, out, writer
        self.bar, self.task, self.models, self.calibrations = bar, task, models, calibrations

    def network(
        self, spec: LabSpec, own: Sequence[Cell], todo: Mapping[Cell, Sequence[int]], watched: Cell | None
    ) -> None:
        """Measure the cells of one lab at one rate; then, with a cell to watch, what changes do to it."""
        with ExitStack() as stack:
            made = with_room(spec) if self.experiment.outside else spec
            logs = self.out.resolve() / "logs"
            # Every rate measures its hosts anew; the tiles of weights are the same at all of them.
            own_logs = logs / f"{spec.name}-{spec.rate_mbit or 0:g}"
            lab = stack.enter_context(Lab(made, own_logs, kept=logs / f"{spec.name}-kept"))
            figures = calibrate(spec, lab.hub, lab.hosts, self.calibrations, self._say)
            self._say(calibration_table(figures))
            for miss in figures.misses():
                self._say(f"warning: {miss}")
            used = {cell.model: self.models[cell.model] for cell in own}
            site = stack.enter_context(LabSite.of(spec, lab.hub, lab.hosts, used))
            lab.restart = site.restart
            self.writer.add("lab", lab=asdict(spec), calibration=figures.to_dict(), misses=figures.misses())
            asked, outside = Site(self.experiment, lab, site), stack.enter_context(Outside())
            memory = {host.name: host.memory_bytes for host in spec.hosts}
            baselines = Baselines(self.experiment, lab, self.models, memory, outside)
            sources: dict[str, Source] = {SITE: asked, OUTSIDE: baselines}
            for _, part in groupby(own, key=lambda cell: cell.group):
                self._group(sources, list(part), todo)
            if watched is not None:
                self._under_changes(asked, lab, watched)

    def _group(self, sources: Mapping[str, Source], group: Sequence[Cell], todo: Mapping[Cell, Sequence[int]]) -> None:
        place = _reference(self.out, group[0].model, group[0].tokens)
        for source in sources.values():
            source.begin(group[0], json.loads(place.with_suffix(".json").read_text()), place.resolve())
        e = self.experiment
        for number in range(e.rounds):
            for cell in turns(group, number, e.seed):
                if number in todo[cell]:
                    self.bar.update(self.task, description=f"{cell.model} {cell.tokens or ''} {cell.label}")
                    last = (cell.strategy == AUTO or cell.requests > 0) and number == e.rounds - 1
                    answer = sources[CONTENDERS[cell.strategy].source].measure(cell, describe=last)
                    self.writer.turn(cell, number, answer)
                    self.bar.advance(self.task)

    def _under_changes(self, site: Site, lab: Lab, cell: Cell) -> None:
        """Ask without a pause while the script changes the lab, and a few times more."""
        self.bar.update(self.task, description=f"{cell.model} under changes")
        self.writer.add("play", cell=cell.id, of=asdict(cell), unix_s=time.time())

        def report(stamp: Stamp) -> None:
            self.writer.add("change", cell=cell.id, **stamp.record())

        with Script(self.experiment.changes, lab.apply, report) as script:
            until: float | None = None
            while until is None or time.monotonic() < until:
                self.writer.add("under_change", cell=cell.id, **site.once(cell))
                if until is None and script.finished():
                    until = time.monotonic() + AFTERWARDS_S
        self.writer.add("played", cell=cell.id)

    def _say(self, line: str) -> None:
        self.bar.console.print(line, markup=False)


def turns(group: Sequence[Cell], number: int, seed: int) -> list[Cell]:
    """Return a round's order: shuffled by seed and round, so that no cell always follows the same one.

    Every second round goes the way of the one before backwards: what comes of a place in the order, or of whose weights
    are there already, falls on any two cells alike.
    """
    shuffled = sorted(group, key=lambda cell: cell.id)
    random.Random(f"{seed}/{number // 2}").shuffle(shuffled)
    return shuffled[::-1] if number % 2 else shuffled


def _reference(out: Path, model: str, tokens: int | None) -> Path:
    return out / "references" / f"{model}-{tokens or 'picture'}.npy"
