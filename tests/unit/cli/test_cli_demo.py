"""What `hepti demo` refuses, and how it ends."""

import contextlib
import signal
import subprocess
import sys
from unittest.mock import MagicMock

import psutil
import pytest

from hepti_mqtt.cli import demo
from hepti_mqtt.core.errors import ConfigError

PATIENCE_S = 60
WITH_A_CHILD = """
import signal, subprocess, sys
from hepti_mqtt.cli.shared import child_processes
with child_processes() as children:
    children.running["child"] = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    print(children.running["child"].pid, flush=True)
    signal.pause()
"""


def test_a_demo_without_its_model_is_refused(monkeypatch):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError):
        demo.find_model()


@pytest.mark.parametrize("status", ["online", "offline"])
def test_the_demo_starts_no_devices_beside_those_of_a_site(status, monkeypatch):
    site = MagicMock()
    site.__enter__.return_value.devices.return_value = [
        {"device": "kitchen", "status": status}, {"device": "old", "status": "offline"},
    ]  # fmt: skip
    monkeypatch.setattr(demo.Hepti, "connect", lambda *_, **__: site)
    with pytest.raises(ConfigError) if status == "online" else contextlib.nullcontext():
        demo.require_no_devices("mqtt://h", "home")


MEASURED = [
    {"shares": {"attic": 1.0}, "latency_ms": 26.0, "max_abs_err": 2e-6},
    {"shares": {"attic": 0.5, "kitchen": 0.5}, "latency_ms": 32.0, "max_abs_err": 1e-6},
    {"shares": {"attic": 0.4, "kitchen": 0.6}, "latency_ms": 84.0, "max_abs_err": 0.3},
]


@pytest.mark.parametrize("devices", [{"attic": 1.0}, {"attic": 0.5, "kitchen": 0.5}])
def test_the_summary_counts_right_answers_and_predicts_nothing_on_shared_cores(devices):
    text = " ".join(demo.summary({"devices": devices}, 30.0, MEASURED, (3300.0, 971.0)))
    assert all(words in text for words in ("2 of 3", "32 to 84 ms", "3.4 times")), "one method gave another answer"
    assert "predicted" not in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_demo_that_is_told_to_end_takes_its_processes_along(number):
    process = subprocess.Popen([sys.executable, "-c", WITH_A_CHILD], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    try:
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 128 + number
        assert not child.is_running()
    finally:
        process.kill()
        if child.is_running():
            child.kill()
        process.communicate()
