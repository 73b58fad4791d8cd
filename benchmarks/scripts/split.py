"""One request on one agent against the same request split over several: `hepti bench` on a site of this machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.lab.lab import Lab
from benchmarks.lab.site import LabSite
from benchmarks.lab.spec import HostSpec, LabSpec
from hepti_mqtt.checkpoint import make_model, spec_of_kind
from hepti_mqtt.cli import bench
from hepti_mqtt.client import Hepti


def main(model: str = "bert-large", tokens: int = 128, agents: int = 2, rounds: int = 3, repeat: int = 5) -> None:
    """Print a table; every agent has one thread."""
    lab_spec = LabSpec("split", "local", tuple(HostSpec(f"agent{n + 1}") for n in range(agents)))
    with TemporaryDirectory(prefix="hepti-split-") as scratch, Lab(lab_spec, Path(scratch) / "lab") as lab:
        directory = make_model(model, Path(scratch) / "model")
        with LabSite(lab, {"model": directory}) as site, Hepti.connect(site.url, site=site.site) as hepti:
            spec, devices = spec_of_kind(model), list(lab.hosts)
            cells = bench.cells_of(spec, devices, None, [tokens], "f32")
            turns = argparse.Namespace(rounds=rounds, repeat=repeat, seed=0, timeout=300.0, wire="f32")
            bench.measure(hepti, "model", spec, cells, turns, lambda line: print(line, file=sys.stderr))
    bench.report(cells, model, devices)
