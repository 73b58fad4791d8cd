"""What a command imports: nothing that it may not need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("arguments", "without"),
    [
        (["-c", "import hepti_mqtt.cli.main, hepti_mqtt.cli.doctor"], {"numpy", "numba", "rich", "hepti_mqtt.transport"}),
        (
            ["-c", "import hepti_mqtt.cli.main, hepti_mqtt.cli.infer"],
            {"numba", "hepti_mqtt.checkpoint", "hepti_mqtt.service", "hepti_mqtt.planner"},
        ),
        (["-c", "import hepti_mqtt.service.requests"], {"hepti_mqtt.service.planner"}),
        (["-c", "import hepti_mqtt.service.planner"], {"prometheus_client"}),
        (["-c", "import device_agent.agent"], {"prometheus_client"}),
        (["-m", "hepti_mqtt.cli.main", "agent", "--help"], {"numba", "PIL", "psutil"}),
        (["-m", "hepti_mqtt.cli.main", "model", "make", "tiny-bert", "made"], {"numba", "PIL", "psutil"}),
    ],
    ids=["help and doctor", "infer", "a client that reads a request", "a planner without metrics",
         "an agent without metrics", "agent --help", "model make"],
)  # fmt: skip
def test_a_command_begins_without(arguments: list[str], without: set[str], tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", *arguments]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines()}
    assert "argparse" in imported or "-c" in arguments
    assert not without & imported
