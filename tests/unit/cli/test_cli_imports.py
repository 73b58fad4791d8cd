"""What a command imports: nothing that it may not need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MAIN = "from hepti_mqtt.cli.main import main"


@pytest.mark.parametrize(
    ("code", "without"),
    [
        ("import hepti_mqtt.cli.main, hepti_mqtt.cli.doctor", {"numpy", "numba", "rich", "hepti_mqtt.transport"}),
        (
            "import hepti_mqtt.cli.main, hepti_mqtt.cli.infer",
            {"numba", "hepti_mqtt.checkpoint", "hepti_mqtt.service", "hepti_mqtt.planner"},
        ),
        ("import hepti_mqtt.service.requests", {"hepti_mqtt.service.planner"}),
        ("import hepti_mqtt.service.planner", {"prometheus_client"}),
        ("import device_agent.agent", {"prometheus_client"}),
        (f"{MAIN}\nmain(['agent', '--help'])", {"numba", "PIL", "psutil"}),
        (f"{MAIN}\nassert main(['model', 'make', 'tiny-bert', '--out', 'made']) == 0", {"numba", "PIL", "psutil"}),
    ],
    ids=[
        "help and doctor",
        "infer",
        "a client that reads a request",
        "a planner without metrics",
        "an agent without metrics",
        "agent --help",
        "model make",
    ],
)
def test_a_command_begins_without(code: str, without: set[str], tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-c", code]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines()}
    assert any(name.startswith("hepti_mqtt.") for name in imported)
    assert not without & imported
