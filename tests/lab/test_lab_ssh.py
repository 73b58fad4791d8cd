"""Boards by SSH: against a real server on this machine where there is one, and always through a stand-in transport."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.errors import LabError
from hepti_mqtt.lab.changes import Change
from hepti_mqtt.lab.lab import Lab
from hepti_mqtt.lab.site import Device, LabSite
from hepti_mqtt.lab.spec import load
from hepti_mqtt.lab.ssh import SshHost

PATIENCE_S = 30.0
ROOT = Path(__file__).parents[2]
SSHD = shutil.which("sshd", path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin")))


class Server(NamedTuple):
    port: int
    key: Path
    directory: Path

    def command(self, key: Path | None = None) -> list[str]:
        known = self.directory / "known_hosts"
        return [
            *("ssh", "-F", "none", "-i", str(key or self.key), "-o", "IdentitiesOnly=yes", "-p", str(self.port)),
            *("-o", f"UserKnownHostsFile={known}", "-o", "StrictHostKeyChecking=yes"),
            f"{getpass.getuser()}@127.0.0.1",
        ]


def _key(path: Path) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("no OpenSSH server and client here; the stand-in transport is tested instead")
    directory = tmp_path_factory.mktemp("sshd")
    host, user = _key(directory / "host"), _key(directory / "user")
    (directory / "authorized").write_text((directory / "user.pub").read_text())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (directory / "known_hosts").write_text(f"[127.0.0.1]:{port} {(directory / 'host.pub').read_text()}")
    lines = {
        "Port": port,
        "ListenAddress": "127.0.0.1",
        "HostKey": host,
        "AuthorizedKeysFile": directory / "authorized",
        "PidFile": "none",
        "UsePAM": "no",
        "StrictModes": "no",
        "PasswordAuthentication": "no",
        "KbdInteractiveAuthentication": "no",
        "PermitRootLogin": "prohibit-password",
    }
    (directory / "config").write_text("".join(f"{k} {v}\n" for k, v in lines.items()))
    arguments = [SSHD, "-D", "-e", "-f", str(directory / "config")]
    made = Path("/run/sshd")  # sshd wants it where it was built to separate privileges
    if not made.is_dir():
        try:
            made.mkdir()
        except OSError:
            pytest.skip("no /run/sshd, and no right to make it")
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(arguments, stderr=log, stdin=subprocess.DEVNULL)
    try:
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None, (directory / "log").read_text()
                assert time.monotonic() < until
        yield Server(port, user, directory)
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def _python(directory: Path) -> str:
    """Return an interpreter that has this checkout, whatever the login's environment says."""
    path = directory / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return str(path)


def _host(command: list[str], directory: Path, name: str = "board", python: str | None = None) -> SshHost:
    directory.mkdir(exist_ok=True)
    return SshHost(
        name,
        "127.0.0.1",
        command,
        directory / "here",
        python=python or _python(directory),
        directory=str(directory / "there"),
    )


@pytest.fixture(scope="module", params=["ssh", "sh"])
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHost]:
    command = request.getfixturevalue("server").command() if request.param == "ssh" else ["sh", "-c"]
    with _host(command, tmp_path_factory.mktemp("board")) as host:
        yield host


def test_a_command_runs_there_with_its_code_words_and_odd_arguments(host):
    odd = "a 'b' \"c\" $HOME ; | é"
    code = "import os, sys; print(sys.argv[1], os.environ['WORD']); print('bad', file=sys.stderr); sys.exit(3)"
    done = host.run([host.python, "-c", code, odd], {"WORD": odd})
    assert (done.code, done.out, done.err) == (3, f"{odd} {odd}\n", "bad\n")
    assert host.run(["no-such-program"]).code == 127
    assert host.run(["sh", "-c", "kill -9 $$"]).code == -9


def test_a_started_process_runs_on_its_log_can_be_read_and_signals_reach_its_children(host):
    process = host.start("parent", ["sh", "-c", "sleep 600 & echo $!; wait"])
    until = time.monotonic() + PATIENCE_S
    while not process.log().strip():
        assert time.monotonic() < until
    child = psutil.Process(int(process.log()))
    assert process.poll() is None
    process.signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == -signal.SIGTERM
    assert psutil.wait_procs([child], PATIENCE_S)[1] == []
    process.signal(signal.SIGTERM)  # nobody is there: no error


def test_lines_there_and_back_then_the_end_with_its_last_words(host):
    talk = host.talk("echo", ["sh", "-c", "read x; echo got $x; echo why >&2"])
    talk.send("this")
    assert talk.receive(PATIENCE_S) == "got this"
    with pytest.raises(LabError, match=r"(?s)closed its output.*on board: why"):
        talk.receive(PATIENCE_S)


def test_a_process_ends_with_the_connection(host):
    talk = host.talk("orphan", [host.python, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"])
    there = psutil.Process(int(talk.receive(PATIENCE_S)))
    talk.now._process.close()  # as if this program had been killed
    assert psutil.wait_procs([there], PATIENCE_S)[1] == []


@pytest.fixture(params=["ssh", "sh", "local"])
def lab_file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    name = f"boards-{os.getpid()}"
    board: dict[str, object] = {"python": _python(tmp_path)}
    if request.param == "ssh":
        board["command"] = request.getfixturevalue("server").command()
    elif request.param == "sh":
        board["command"] = ["sh", "-c"]
    kind = {"kind": "local"} if request.param == "local" else {"kind": "ssh", "address": "127.0.0.1"}
    path = tmp_path / "lab.json"  # which is YAML too
    path.write_text(json.dumps({"name": name, **kind, "hosts": {"a": board}}))
    yield path
    shutil.rmtree(Path.home() / ".cache/hepti/lab" / name, ignore_errors=True)


def test_what_runs_on_a_board_is_stopped_continued_killed_and_restarted(lab_file, tmp_path):
    def change(do):
        lab.apply(Change(0.0, do, "a"))

    def is_stopped(wanted):
        until = time.monotonic() + PATIENCE_S
        while (there.status() == psutil.STATUS_STOPPED) != wanted:
            assert time.monotonic() < until
            time.sleep(0.01)

    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with Lab(load(lab_file), tmp_path / "lab") as lab:
        host = lab.hosts["a"]
        talk = host.talk("wait", [host.python, "-c", code])
        there = psutil.Process(int(talk.receive(PATIENCE_S)))
        change("stop")
        is_stopped(True)
        change("cont")
        is_stopped(False)
        change("kill")
        assert talk.poll() == -signal.SIGKILL
        assert psutil.wait_procs([there], PATIENCE_S)[1] == []
        change("restart")
        again = int(talk.receive(PATIENCE_S))
        assert again != there.pid
        assert talk.poll() is None
    assert psutil.wait_procs([psutil.Process(again)] if psutil.pid_exists(again) else [], PATIENCE_S)[1] == []


def test_lab_run_runs_a_command_on_a_board_and_plays_its_script(lab_file, tmp_path):
    script = tmp_path / "changes.yaml"
    script.write_text("- {at: 1, do: kill, host: a}\n")
    run = [sys.executable, "-m", "hepti_mqtt.cli", "lab", "run", str(lab_file), "--dir", str(tmp_path), "--host", "a"]
    done = subprocess.run(
        [*run, "--", "sh", "-c", "echo $((6 * 7)); exit 5"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (5, "42\n"), done.stderr
    done = subprocess.run(
        [*run, "--script", str(script), "--", "sleep", "600"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert [json.loads(line)["do"] for line in done.stderr.splitlines()] == ["kill"]


def test_a_directory_is_copied_once_per_content(host, tmp_path):
    source = tmp_path / "model"
    (source / "inner").mkdir(parents=True)
    (source / "inner" / "weights").write_bytes(b"\x00\xff" * 5000)
    first = Path(host.provide(source))
    assert first != source
    assert (first / "inner" / "weights").read_bytes() == b"\x00\xff" * 5000
    before = (first / "inner" / "weights").stat().st_ino
    assert Path(host.provide(source)) == first
    assert (first / "inner" / "weights").stat().st_ino == before
    (source / "inner" / "weights").write_bytes(b"new")
    second = Path(host.provide(source))
    assert second != first
    assert (second / "inner" / "weights").read_bytes() == b"new"


def test_an_interpreter_without_hepti(tmp_path):
    empty = tmp_path / "empty"
    empty.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    empty.chmod(0o755)
    with pytest.raises(LabError, match=r"has no Hepti .*install it there"):
        _host(["sh", "-c"], tmp_path / "x", python=str(empty))


def test_a_wrong_key_a_closed_port_and_an_unknown_server_say_what_to_do(server, tmp_path):
    wrong = _key(tmp_path / "wrong")
    with pytest.raises(LabError, match=r"Permission denied.*ssh-copy-id"):
        _host(server.command(wrong), tmp_path / "a")
    with socket.create_server(("127.0.0.1", 0)) as free:
        closed = server._replace(port=free.getsockname()[1])
    with pytest.raises(LabError, match=r"no SSH server listens there"):
        _host(closed.command(), tmp_path / "b")
    (tmp_path / "known_hosts").write_text("")
    with pytest.raises(LabError, match="not known here"):
        _host(server._replace(directory=tmp_path).command(), tmp_path / "c")


@pytest.mark.processes
@pytest.mark.broker
def test_a_site_of_two_boards_answers(server, tmp_path):
    model = make_model("tiny-bert", tmp_path / "model", seed=3)
    with (
        _host(server.command(), tmp_path / "one", "one") as one,
        _host(server.command(), tmp_path / "two", "two") as two,
        LabSite(one, [Device(one, memory="100MiB"), Device(two, memory="100MiB")], {"tiny": model}) as site,
    ):
        done = site.run_client(["infer", "tiny", "--tokens", "9", "--check", "--json", "--devices", "one,two"])
        assert done.code == 0, done.err
        site.kill("two")
        site.restart("two")
        site.wait_ready()
