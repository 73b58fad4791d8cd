"""What `hepti demo` refuses, and how it ends."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

from hepti_mqtt.cli import demo
from hepti_mqtt.errors import ConfigError

PATIENCE_S = 60
WITH_A_CHILD = """
import signal, subprocess, sys
from hepti_mqtt.cli.shared import child_processes
with child_processes() as children:
    children.running["child"] = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    print(children.running["child"].pid, flush=True)
    signal.pause()
"""


def test_a_demo_without_its_model_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="pip install"):
        demo.find_model()


def test_the_demo_starts_no_devices_beside_those_of_a_site(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [{"device": "kitchen", "status": "online"}, {"device": "old", "status": "offline"}]

    class Found:
        def __enter__(self) -> Found:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def devices(self, wait_s: float) -> list[dict[str, str]]:
            return there

    monkeypatch.setattr(demo.Hepti, "connect", lambda *_, **__: Found())
    with pytest.raises(ConfigError):
        demo.require_no_devices("mqtt://h", "home")
    there[0]["status"] = "offline"
    demo.require_no_devices("mqtt://h", "home")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_demo_that_is_told_to_end_takes_its_processes_along(number: signal.Signals) -> None:
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
