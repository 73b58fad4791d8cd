"""Simulated experiments: points of a file, reports that say that nothing was measured, and what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from rich.console import Console

from hepti_mqtt.bench import kinds
from hepti_mqtt.bench.results import read
from hepti_mqtt.bench.simulated import MARK, cluster_of, parse
from hepti_mqtt.errors import ConfigError

GOOD = {
    "name": "x",
    "kind": "simulate",
    "site": "four-pi4",
    "rates": [100],
    "models": ["tiny-bert"],
    "lengths": [16],
    "strategies": ["auto", "single", "grid", "pipeline/latency"],
    "devices": [1, 6],
}


def made(**changes):
    return parse({**GOOD, **changes}, Path())


def test_points_are_what_can_be():
    found = {(p.strategy, p.devices) for p in made().points}
    assert found == {
        ("auto", 1), ("single", 1), ("auto", 6), ("pipeline/latency", 6),
        *((f"grid/{nt}", 6) for nt in (1, 2, 3, 6)),
    }  # fmt: skip
    assert len({p.id for p in made().points}) == len(made().points)
    assert {p.tokens for p in made(models=["tiny-vit"]).points} == {17}


def test_more_devices_than_a_site_has_are_its_own_over_again():
    experiment = made(devices=[6], memory=["64MiB"])
    found = cluster_of(experiment.sites["four-pi4"], experiment.points[0])
    assert list(found.devices) == ["pi1", "pi2", "pi3", "pi4", "pi1-2", "pi2-2"]
    assert {d.memory_bytes for d in found.devices.values()} == {64 * 2**20}
    assert {link.up_bytes_per_s for link in found.links.values()} == {12.5e6}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lab": "four-pi4"}, "unknown key 'lab'"),
        ({"site": "nowhere"}, "`site`: there is no 'nowhere'"),
        ({"models": ["tiny"]}, "`models` has 'tiny'"),
        ({"strategies": ["magic"]}, "there is no 'magic'"),
        ({"memory": ["much"]}, "'much' is no size"),
        ({"strategies": ["single"], "devices": [2]}, "leave nothing to simulate"),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(changes, words):
    with pytest.raises(ConfigError, match=words):
        made(**changes)


def test_a_report_says_that_it_is_simulated_what_was_chosen_and_what_does_not_fit(tmp_path):
    file, out = tmp_path / "x.yaml", tmp_path / "out"
    small = {"strategies": ["auto", "single", "block"], "devices": [1, 2], "memory": ["", "60KiB"], "requests": [0]}
    file.write_text(yaml.safe_dump({**GOOD, **small}))
    kind, experiment = kinds.load(str(file))
    assert kind.count(experiment) == 8
    kind.run(experiment, out, "the command", resume=False, console=Console(quiet=True))
    kinds.write(out)
    text = (out / "report.md").read_text()
    assert text.count(MARK) == 2
    assert "<- Hepti" in text
    assert "single on 1: no strategy fits tiny-bert into the devices' memory:" in text
    records = [r for r in read(out).records if r["record"] == "point"]
    assert {r["ok"] for r in records} == {True, False}
    kind.run(experiment, out, "the command", resume=True, console=Console(quiet=True))
    assert len(read(out).records) == len(records)
