"""The agent as a service: installed, upgraded and uninstalled; a stand-in for systemctl starts and ends it."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from site_processes import SITE, Voice, trust_measurement

from hepti_mqtt.cli.main import main
from hepti_mqtt.embedded_broker import start_broker
from hepti_mqtt.protocol.topics import Topics

# Starts and ends what the unit says; compiled kernels stay where they are.
SYSTEMCTL = f"""#!{sys.executable}
import os, shlex, signal, subprocess, sys, time
from pathlib import Path
place = Path(__file__).parent
pid, words = place / "pid", [word for word in sys.argv[1:] if word != "--user"]
with (place / "calls").open("a") as calls:
    calls.write(" ".join(words) + chr(10))
def runs():
    stat = Path(f"/proc/{{pid.read_text()}}/stat") if pid.exists() else None
    return stat is not None and stat.exists() and " Z " not in stat.read_text()
def stop():
    if runs():
        os.kill(int(pid.read_text()), signal.SIGTERM)
    while runs():
        time.sleep(0.02)
    pid.unlink(missing_ok=True)
if words[0] == "restart":
    stop()
    unit = (Path(os.environ["XDG_CONFIG_HOME"]) / "systemd/user/hepti-agent.service").read_text()
    values = dict(line.partition("=")[::2] for line in unit.splitlines() if "=" in line)
    given = dict(word.split("=", 1) for word in shlex.split(values["Environment"]))
    given.pop("NUMBA_CACHE_DIR")
    program, *rest = shlex.split(values["ExecStart"])
    log = (place / "log").open("ab")
    started = subprocess.Popen([sys.executable, "-m", "hepti_mqtt.cli", "agent", *rest], env={{**os.environ, **given}},
        stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    pid.write_text(str(started.pid))
elif words[0] == "disable":
    stop()
elif words[0] == "is-active":
    print("active" if runs() else "failed")
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return a home directory with a stand-in for systemctl on PATH."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "systemctl").write_text(SYSTEMCTL)
    (tools / "loginctl").write_text("#!/bin/sh\nexit 1\n")
    for tool in ("systemctl", "loginctl"):
        (tools / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path
    pid = tools / "pid"
    if pid.exists():
        os.kill(int(pid.read_text()), signal.SIGKILL)


def test_a_service_comes_online_keeps_what_it_has_and_leaves_nothing(machine, capsys):
    own, status = ["--user"], Topics(SITE).status("pi-1")
    with start_broker() as broker:
        install = ["agent", "install", "--broker", str(broker.url), "--site", SITE, "--id", "pi-1", "--threads", "1"]
        trust_measurement()
        assert main([*install, *own]) == 0
        assert "pi-1 is online" in capsys.readouterr().out
        login = machine / "config/hepti/agent.login"
        assert login.stat().st_mode & 0o077 == 0
        first = (machine / "tools/pid").read_text()
        kept = {path for path in (machine / "cache").rglob("*") if path.is_file()}
        assert kept
        trust_measurement()
        assert main(["agent", "upgrade", *own]) == 0
        assert (machine / "tools/pid").read_text() != first
        assert {path for path in (machine / "cache").rglob("*") if path.is_file()} >= kept
        assert "--threads 1" in (machine / "config/systemd/user/hepti-agent.service").read_text()
        assert main(["agent", "uninstall", *own]) == 0
        voice = Voice(str(broker.url), status, "mark")
        voice.say("mark", b"")
        assert voice.next()[0] == "mark", "the broker retains nothing of it"
        voice.close()
    assert not [path for place in ("config", "cache") for path in (machine / place).rglob("*") if path.is_file()]
    calls = (machine / "tools/calls").read_text().splitlines()
    assert {"enable hepti-agent", "disable --now hepti-agent", "daemon-reload"} <= set(calls)


@pytest.mark.parametrize("login", [None, "mqtt://pi-1:secret@127.0.0.1:1\n"])
@pytest.mark.parametrize(
    ("broken", "url", "code", "said"),
    [
        ("", "", 3, "journalctl --user -u hepti-agent"),  # the agent refuses an option
        ("", "mqtt://127.0.0.1:1", 3, "127.0.0.1:1"),
        ("enable", "mqtt://127.0.0.1:1", 2, "systemctl --user enable"),
    ],
)
def test_an_installation_that_fails_says_so_and_leaves_the_files_as_they_were(
    machine, capsys, broken, url, code, said, login
):
    place = machine / "config/hepti/agent.login"
    if login is not None:
        place.parent.mkdir(parents=True)
        place.write_text(login)
    tool = machine / "tools/systemctl"
    tool.write_text(tool.read_text() + f'if words[0] == "{broken}":\n    sys.exit(1)\n')
    with start_broker() as broker:
        install = ["agent", "install", "--user", "--broker", url or str(broker.url), "--id", "pi-1"]
        assert main([*install, "--mesh-host", "no-address"]) == code
    assert said in capsys.readouterr().err
    files = {path: path.read_text() for path in (machine / "config").rglob("*") if path.is_file()}
    assert files == ({} if login is None else {place: login})
