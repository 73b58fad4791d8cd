"""`hepti bench`: which methods it measures, that answers are checked, and one small run on a real site."""

from __future__ import annotations

import argparse
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from site_processes import SITE, Site, poll

from hepti_mqtt.checkpoint import make_model, spec_of_kind
from hepti_mqtt.cli import bench
from hepti_mqtt.cli.main import main
from hepti_mqtt.core.errors import ConfigError, PlanError
from hepti_mqtt.embedded_broker import start_broker

SPEC = spec_of_kind("minilm")
TURNS = argparse.Namespace(rounds=2, repeat=2, seed=0, timeout=10.0, wire="f32")


def test_by_default_every_method_that_the_planner_may_choose_is_measured():
    names = [cell.method for cell in bench.cells_of(SPEC, ["a", "b"], None, [16, 32], "f32")]
    assert names[:2] == ["auto", "single"]
    assert {"row/kv", "row/heads", "block"} <= set(names)
    assert len(names) == 2 * len(set(names))


def test_one_device_leaves_nothing_to_split():
    assert [cell.method for cell in bench.cells_of(SPEC, ["a"], None, [16], "f32")] == ["auto", "single"]


def test_an_unknown_method_is_refused():
    with pytest.raises(ConfigError):
        bench.cells_of(SPEC, ["a", "b"], ["rows"], [16], "f32")


class Answers:
    """A site on which `block` answers wrongly and `column` does not fit."""

    def infer(self, _model, **request):
        if request.get("strategy") == "column":
            raise PlanError("does not fit")
        hidden = np.full((4, 4), 2.0 if request.get("strategy") == "block" else 1.0, np.float32)
        return SimpleNamespace(hidden=hidden, latency_ms=10.0 if request.get("strategy") == "single" else 5.0)

    def foretold(self, answer, **request):
        plan = {"strategy": request.get("strategy", "row"), "options": {}, "devices": ["a"]}
        return SimpleNamespace(raw={"plan": plan, "predicted_ms": 9.0, "bytes_on_wire": 7})


def test_what_is_wrong_or_does_not_fit_has_no_times(capsys):
    cells = bench.cells_of(SPEC, ["a", "b"], ["auto", "block", "column"], [16], "f32")
    hepti: Any = Answers()
    bench.measure(hepti, "m", SPEC, cells, TURNS, lambda _: None)
    by_name = {cell.method: cell for cell in cells}
    assert {name for name, cell in by_name.items() if cell.times} == {"auto", "single"}
    assert by_name["auto"].speed_up(by_name["single"]) == 2.0
    assert "does not fit" in by_name["column"].failed
    bench.report(cells, "m", ["a", "b"])
    assert "auto" in capsys.readouterr().out


def test_a_site_is_measured(tmp_path, capsys):
    with (
        start_broker() as broker,
        Site(tmp_path, broker, {"model": make_model("tiny-bert", tmp_path / "model", layers=2)}) as site,
    ):
        for name in ("agent1", "agent2"):
            site.agent(name, "300MiB")
        for name in ("agent1", "agent2"):
            poll(lambda name=name: "is online" in site.log(name), f"{name} online")
        site.planner()
        words = ["--methods", "auto,row/kv", "--lengths", "16", "--rounds", "1", "--repeat", "1", "--json"]
        picture = tmp_path / "times.svg"
        where = ["--broker", site.url, "--site", SITE, "--plot", str(picture)]
        assert main(["bench", "model", *words, *where]) == 0
    output = json.loads(capsys.readouterr().out)
    assert {cell["method"] for cell in output["cells"] if cell["median_ms"]} == {"auto", "row/kv", "single"}
    assert picture.stat().st_size
