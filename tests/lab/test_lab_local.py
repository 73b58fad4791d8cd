"""Processes of this machine as a host: they are ended whole, their words are kept, and errors name the log."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hepti_mqtt.errors import LabError
from hepti_mqtt.lab.local import LocalHost

PATIENCE_S = 30.0


@pytest.fixture
def host(tmp_path: Path) -> Iterator[LocalHost]:
    with LocalHost("here", tmp_path / "here") as host:
        yield host


def test_a_command_runs_to_its_end_with_its_code_and_words(host):
    code = "import os, sys; print(os.environ['WORD']); print('bad', file=sys.stderr); sys.exit(3)"
    done = host.run([host.python, "-c", code], {"WORD": "good"})
    assert (done.code, done.out, done.err) == (3, "good\n", "bad\n")


def test_a_command_without_end_is_ended(host):
    with pytest.raises(LabError, match="did not end within"):
        host.run(["sleep", "600"], timeout_s=0.2)


def test_a_program_that_is_not_there(host):
    for begin in (host.run, lambda arguments: host.start("x", arguments)):
        with pytest.raises(LabError, match="no-such-program"):
            begin(["no-such-program"])


def test_a_log_is_of_this_start_alone(host):
    for word in ("first", "second"):
        process = host.start("again", ["echo", word])
        assert process.wait(PATIENCE_S) == 0
        assert process.log() == f"{word}\n"
    assert (Path(host.directory) / "again.log").read_text() == "first\nsecond\n"


def test_a_signal_reaches_the_children_too(host):
    talk = host.talk("parent", ["sh", "-c", "sleep 600 & echo $!; wait"])
    child = psutil.Process(int(talk.receive(PATIENCE_S)))
    talk.signal(signal.SIGKILL)
    assert talk.wait(PATIENCE_S) == -signal.SIGKILL
    assert psutil.wait_procs([child], PATIENCE_S)[1] == []
    talk.signal(signal.SIGKILL)  # nobody is there: no error


def test_leaving_ends_what_was_started(tmp_path):
    with LocalHost("here", tmp_path) as host:
        talk = host.talk("sleeper", [sys.executable, "-c", "import os, time; print(os.getpid()); time.sleep(600)"])
        # The line comes with the process's end or a flush; its number is known anyway.
        process = psutil.Process(talk.now.pid)
    assert not process.is_running()


def test_lines_there_and_back_then_the_end_with_its_last_words(host):
    talk = host.talk("echo", ["sh", "-c", "read x; echo got $x; echo why >&2"])
    talk.send("this")
    assert talk.receive(PATIENCE_S) == "got this"
    with pytest.raises(LabError, match=r"(?s)closed its output.*echo\.log.*why"):
        talk.receive(PATIENCE_S)
    talk.wait(PATIENCE_S)
    with pytest.raises(LabError, match="does not listen"):
        talk.send("more")


def test_silence_is_an_error_that_names_the_log(host):
    talk = host.talk("mute", ["sleep", "600"])
    with pytest.raises(LabError, match=r"says nothing for .*mute\.log"):
        talk.receive(0.1)
    with pytest.raises(LabError, match="still runs"):
        talk.wait(0.1)


def test_what_it_provides_must_exist(host, tmp_path):
    assert host.provide(tmp_path) == str(tmp_path.resolve())
    with pytest.raises(LabError, match="does not exist"):
        host.provide(tmp_path / "nothing")
