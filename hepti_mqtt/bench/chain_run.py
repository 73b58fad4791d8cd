"""Runs the chain of MatMuls in a lab: a broker, two devices, and every condition calibrated before it is measured."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from hepti_mqtt.bench.chain import PRIMARY, SECONDARY
from hepti_mqtt.bench.chain_experiment import KIND, ChainExperiment
from hepti_mqtt.bench.chain_pair import ChainPair, rounds
from hepti_mqtt.bench.chain_results import Condition, turn_of
from hepti_mqtt.bench.provenance import header
from hepti_mqtt.bench.results import Writer
from hepti_mqtt.lab.calibrate import calibrate
from hepti_mqtt.lab.calibrate import markdown as calibration_table
from hepti_mqtt.lab.changes import Change
from hepti_mqtt.lab.hosts import Talking
from hepti_mqtt.lab.lab import Lab
from hepti_mqtt.lab.spec import HUB

START_S: Final = 60.0


def run(
    experiment: ChainExperiment,
    out: Path,
    command: str,
    *,
    resume: bool,
    console: Console,
    calibrations: Path | None = None,
) -> None:
    """Measure what is missing in `out` and write it there; raises the error of a lab or a device.

    calibrations: a directory of earlier ones, which several experiments may share; None for one of its own in `out`.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        Writer(
            out, json.loads(json.dumps({**header(experiment, command), "kind": KIND}, default=str)), resume=resume
        ) as writer,
        Progress(*columns, console=console) as bar,
    ):
        done = {turn_of(r) for r in writer.results.records if r["record"] == "case"}
        total = len(experiment.conditions) * experiment.rounds * len(experiment.wanted)
        task = bar.add_task(experiment.name, total=total, completed=len(done))
        if len(done) < total:
            with ExitStack() as stack:
                _Measuring(experiment, out, writer, bar, task, stack, calibrations or out / "calibration").all(done)


class _Measuring:
    """The lab with its broker and both devices, which start at full speed and stay for all conditions."""

    def __init__(
        self,
        experiment: ChainExperiment,
        out: Path,
        writer: Writer,
        bar: Progress,
        task: TaskID,
        stack: ExitStack,
        calibrations: Path,
    ) -> None:
        self.experiment, self.writer, self.bar, self.task = experiment, writer, bar, task
        self.calibrations = calibrations
        self.lab = stack.enter_context(Lab(experiment.lab, out.resolve() / "logs"))
        broker = _start_broker(self.lab, stack)
        hosts = self.lab.hosts
        self.pair = ChainPair(hosts[PRIMARY], hosts[SECONDARY], broker, "chain", experiment.seed)
        stack.callback(self.pair.close)

    def all(self, done: set[tuple[Any, ...]]) -> None:
        """Measure every condition that has anything left."""
        e = self.experiment
        for condition in e.conditions:
            todo = [
                (number, case)
                for number in range(e.rounds)
                for case in e.wanted
                if (*condition, number, *astuple(case)) not in done
            ]
            if todo:
                self._set(condition)
                for record in rounds(self.pair, todo, e.seed, condition._asdict()):
                    self.writer.add("case", **record)
                    self.bar.advance(self.task)

    def _set(self, condition: Condition) -> None:
        """Put links and quotas of a condition in force, and write down what they are."""
        self.bar.update(self.task, description=condition.label)
        spec = self.experiment.spec(condition)
        if spec.rate_mbit is not None:
            for name in (HUB, *self.lab.hosts):
                self.lab.apply(Change(0.0, "rate", name, mbit=spec.rate_mbit))
        figures = calibrate(spec, self.lab.hub, self.lab.hosts, self.calibrations, self._say)
        self._say(calibration_table(figures))
        for miss in figures.misses():
            self._say(f"warning: {miss}")
        record = {"lab": asdict(spec), "calibration": figures.to_dict(), "misses": figures.misses()}
        self.writer.add("lab", **condition._asdict(), **record)
        for host in (self.lab.hub, *self.lab.hosts.values()):
            host.throttle(True)

    def _say(self, line: str) -> None:
        self.bar.console.print(line, markup=False)


def _start_broker(lab: Lab, stack: ExitStack) -> str:
    """Start a broker where the lab wants it and return its URL."""
    host = lab.broker_host
    broker: Talking = host.talk("broker", [host.python, "-m", "hepti_mqtt.lab.broker", host.address, "0"])

    def end() -> None:
        broker.signal(15)
        broker.wait(START_S)

    stack.callback(end)
    url: str = json.loads(broker.receive(START_S))["url"]
    return url
