"""`hepti lab` as a user has it: exit codes, stamps, and that nothing stays after its end, its crash or Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from emulation import PATIENCE_S, left_of, needs_emulation, unique

from hepti_mqtt.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
HEPTI = [sys.executable, "-m", "hepti_mqtt.cli", "lab"]
SAY = "import time; print('here', flush=True); time.sleep(1000)"


def hepti(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*HEPTI, *words], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.fixture
def name() -> Iterator[str]:
    chosen = unique()
    yield chosen
    left = left_of(chosen)
    if left:
        hepti("down", chosen)
    assert left == []


@pytest.fixture
def file(tmp_path: Path, name: str) -> str:
    path = tmp_path / "lab.yaml"
    path.write_text(f"name: {name}\nrate: 100\nhosts: {{a: , b: }}\n")
    return str(path)


@needs_emulation
def test_run_gives_the_commands_output_and_exit_code(file: str, tmp_path: Path) -> None:
    done = hepti(
        "run", file, "--rate", "50", "--dir", str(tmp_path), "--host", "b", "--", "sh", "-c", "ip -br -4 a; exit 7"
    )
    assert done.returncode == 7, done.stderr
    assert "10.77.0.3/24" in done.stdout


@needs_emulation
def test_run_stamps_the_changes_of_a_script(file: str, tmp_path: Path) -> None:
    script = tmp_path / "changes.yaml"
    script.write_text("- {at: 0.1, do: cut, host: b}\n- {at: 0, do: rate, host: a, mbit: 5}\n")
    wait = "until ip link show dev eth0 | grep -q NO-CARRIER; do sleep 0.05; done; sleep 0.3"
    done = hepti("run", file, "--dir", str(tmp_path), "--script", str(script), "--host", "b", "--", "sh", "-c", wait)
    assert done.returncode == 0, done.stderr
    stamps = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(s["do"], s["host"], s["planned_s"]) for s in stamps] == [("rate", "a", 0.0), ("cut", "b", 0.1)]
    assert all(s["begun_s"] >= s["planned_s"] for s in stamps)


@needs_emulation
def test_up_leaves_a_lab_that_status_shows_and_down_removes(file: str, name: str, tmp_path: Path) -> None:
    up = hepti("up", file, "--dir", str(tmp_path))
    assert up.returncode == 0, up.stderr
    again = hepti("up", file, "--dir", str(tmp_path))
    assert again.returncode == 1
    assert f"hepti lab down {name}" in again.stderr
    status = hepti("status", "--json")
    (shown,) = [lab for lab in json.loads(status.stdout)["labs"] if lab["lab"] == name]
    assert (shown["state"], list(shown["hosts"])) == ("up", ["hub", "a", "b"])
    assert name in hepti("status").stdout
    assert hepti("down", name).returncode == 0
    assert left_of(name) == []


@contextmanager
def begin(file: str, directory: Path, where: str = "a") -> Iterator[subprocess.Popen[str]]:
    words = ["run", file, "--dir", str(directory), "--host", where, "--", sys.executable, "-c", SAY]
    process = subprocess.Popen([*HEPTI, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@needs_emulation
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_removes_everything(file: str, name: str, tmp_path: Path, number: signal.Signals) -> None:
    with begin(file, tmp_path) as process:
        assert left_of(name)
        assert hepti("down", name).returncode == 1  # in use
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == (130 if number == signal.SIGINT else 128 + number)
    assert left_of(name) == []


@needs_emulation
def test_what_a_killed_run_leaves_is_named_and_removed_with_its_processes(file: str, name: str, tmp_path: Path) -> None:
    with begin(file, tmp_path) as process:
        process.kill()
        process.wait(PATIENCE_S)
        status = json.loads(hepti("status", "--json").stdout)
        (shown,) = [lab for lab in status["labs"] if lab["lab"] == name]
        assert shown["state"] == "leftover"
        pids = [int(p) for p in (Path(shown["hosts"]["a"]["group"]) / "cgroup.procs").read_text().split()]
        assert pids
        assert f"hepti lab down {name}" in hepti("up", file).stderr
        down = hepti("down", name)
        assert down.returncode == 0, down.stderr
        assert [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()] == []
    assert left_of(name) == []


def fails(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["lab", *words])
    return code, capsys.readouterr().err


def test_a_users_mistakes_end_with_2_and_words(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "s.yaml"
    script.write_text("- {at: 1, do: cut, host: c}")
    for words, said in (
        (("up", str(tmp_path / "none.yaml")), "none.yaml"),
        (("up", file, "--rate", "0"), "`rate`"),
        (("up", file, "--dilation", "0"), "`dilation`"),
        (("run", file, "--host", "c", "--", "true"), "'c'"),
        (("run", file, "--script", str(script), "--", "true"), "step 1"),
        (("up", str(ROOT / "configs/lab/this-machine.yaml")), "hepti lab run"),
        (("down", "no-such-lab"), "no-such-lab"),
    ):
        code, text = fails(capsys, *words)
        assert (code, said in text) == (2, True), (words, text)


@pytest.mark.parametrize(
    ("target", "value", "words"),
    [
        ("hepti_mqtt.lab.network.shutil.which", lambda name: None, "apt install iproute2"),
        ("hepti_mqtt.lab.emulation.os.geteuid", lambda: 1000, "sudo"),
    ],
)
def test_what_the_machine_lacks_is_said_before_anything_is_made(
    file: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    target: str,
    value: object,
    words: str,
) -> None:
    monkeypatch.setattr(target, value)
    code, text = fails(capsys, "up", file)
    assert (code, words in text) == (1, True), text


def test_a_local_lab_runs_a_command_here(tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    path.write_text("name: here\nkind: local\nhosts: {a: }\n")
    done = hepti("run", str(path), "--dir", str(tmp_path), "--host", "a", "--", "sh", "-c", "echo $((6 * 7))")
    assert (done.returncode, done.stdout) == (0, "42\n")
