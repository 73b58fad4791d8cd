"""A planner with a budget for the wire, at a site of real processes: it measures, chooses, says it, and keeps it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from site_processes import PATIENCE_S, SITE, poll, running_site

from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.cli.main import main
from hepti_mqtt.client import Hepti

pytestmark = [pytest.mark.processes, pytest.mark.broker, pytest.mark.wide]

IDS = [5, 6, 7, 8, 9, 10, 11, 12]
BUDGET = 0.01


def test_a_site_within_a_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A broker on so slow a link that f16 pays for any exchange.
    slow = ("--broker-mbit", "1", "--route", "broker", "--strategy", "row", "--variant", "kv", "--devices", "a,b")
    models = {"tiny": make_model("tiny-bert", tmp_path / "model", seed=5)}
    agents = dict.fromkeys(("a", "b"), "600MiB")
    for site in running_site(tmp_path, models, agents, planner=(*slow, "--accuracy", str(BUDGET))):
        with Hepti.connect(site.url, site=SITE, client_id="tester") as hepti:
            hepti.wait_ready("tiny", PATIENCE_S)
            poll(lambda hepti=hepti: hepti.plan("tiny")["active"], "a plan")
            narrow = hepti.infer("tiny", ids=IDS, want="hidden", timeout_s=PATIENCE_S)
            assert narrow.plan["wire"] != "f32"
            assert 0 < narrow.plan["wire_error"] < BUDGET
            exact = hepti.infer("tiny", ids=IDS, want="hidden", wire="f32", timeout_s=PATIENCE_S)
            assert (exact.plan["wire"], exact.plan["wire_error"]) == ("f32", None)
            assert narrow.hidden is not None
            assert exact.hidden is not None
            error = np.linalg.norm(narrow.hidden - exact.hidden) / np.linalg.norm(exact.hidden)
            assert 0 < error <= BUDGET
        assert main(("plan", "tiny", "--broker", site.url, "--site", SITE)) == 0
        assert f"wire {narrow.plan['wire']} (moves the answer by" in capsys.readouterr().out
