"""A planner with a budget for the wire, at a site of real processes: it measures, chooses, says it, and keeps it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from site_processes import PATIENCE_S, SITE, running_site

from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.cli.main import main
from hepti_mqtt.client import Hepti

pytestmark = [pytest.mark.processes, pytest.mark.broker, pytest.mark.wide]

IDS = [5, 6, 7, 8, 9, 10, 11, 12]
BUDGET = 0.01


def test_a_site_within_a_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Wide enough that half of the bytes are worth the conversion, also without a network between the devices.
    pins = ("--route", "broker", "--strategy", "row", "--variant", "kv", "--devices", "a,b")
    models = {"tiny": make_model("minilm", tmp_path / "model", seed=5, layers=2)}
    agents = dict.fromkeys(("a", "b"), "600MiB")
    for site in running_site(tmp_path, models, agents, planner=(*pins, "--accuracy", str(BUDGET))):
        with Hepti.connect(site.url, site=SITE, client_id="tester") as hepti:
            hepti.wait_ready("tiny", PATIENCE_S)
            narrow = hepti.infer("tiny", ids=IDS, want="hidden", timeout_s=PATIENCE_S)
            assert narrow.plan["wire"] != "f32"
            assert 0 < narrow.plan["wire_error"] < BUDGET
            assert main(("plan", "tiny", "--broker", site.url, "--site", SITE)) == 0
            assert f"wire {narrow.plan['wire']} (moves the answer by" in capsys.readouterr().out
            exact = hepti.infer("tiny", ids=IDS, want="hidden", wire="f32", timeout_s=PATIENCE_S)
            assert (exact.plan["wire"], exact.plan["wire_error"]) == ("f32", None)
            error = np.linalg.norm(narrow.hidden - exact.hidden) / np.linalg.norm(exact.hidden)
            assert 0 < error <= BUDGET
