"""What a command imports before its first line: nothing that it may not need."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("modules", "without"),
    [
        (["cli.main", "cli.doctor"], {"numpy", "numba", "rich", "hepti_mqtt.transport"}),
        (["cli.main", "cli.infer"], {"numba", "hepti_mqtt.checkpoint", "hepti_mqtt.service", "hepti_mqtt.planner"}),
        (["service.requests"], {"hepti_mqtt.service.planner"}),
        (["service.planner"], {"prometheus_client"}),
    ],
    ids=["help and doctor", "infer", "a client that reads a request", "a planner without metrics"],
)
def test_a_command_begins_without(modules: list[str], without: set[str]) -> None:
    lines = ["import sys", *(f"import hepti_mqtt.{module}" for module in modules), "print(*sys.modules)"]
    ran = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert not without & {*ran.stdout.split()}
