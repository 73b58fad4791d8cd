"""What a command imports: nothing that it may not need."""

import subprocess
import sys

import pytest

MAIN = "from hepti_mqtt.cli.main import main"
ENGINE = {"numba", "PIL", "psutil"}
#: Of each process: what it runs, and what it has not imported by then.
PROCESSES = {
    "small commands": (
        ("import hepti_mqtt.cli.main, hepti_mqtt.cli.doctor", {"numpy", "numba", "rich", "hepti_mqtt.transport"}),
        (f"{MAIN}\ntry: main(['agent', '--help'])\nexcept SystemExit: pass", ENGINE),
        (f"{MAIN}\nassert main(['model', 'make', 'tiny-bert', '--out', 'made']) == 0", ENGINE),
    ),
    "infer": (
        (
            "import hepti_mqtt.cli.main, hepti_mqtt.cli.infer",
            {"numba", "hepti_mqtt.checkpoint", "hepti_mqtt.service", "hepti_mqtt.planner"},
        ),
    ),
    "services": (
        ("import hepti_mqtt.service.requests", {"hepti_mqtt.service.planner"}),  # a client that reads a request
        ("import hepti_mqtt.service.planner, device_agent.agent", {"prometheus_client"}),
    ),
}


@pytest.mark.parametrize("name", PROCESSES)
def test_a_command_begins_without(name, tmp_path):
    steps = [f"{code}\nassert not {without!r} & {{*sys.modules}}" for code, without in PROCESSES[name]]
    subprocess.run([sys.executable, "-c", "\n".join(["import sys", *steps])], cwd=tmp_path, check=True)
