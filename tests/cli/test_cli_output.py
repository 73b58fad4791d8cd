"""What is printed is what was given."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from site_processes import PATIENCE_S, ROOT

from hepti_mqtt.cli import output


def test_codes_of_emoji_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    said = '{"text": "who :id: is [bold] :warning:"}'
    output.print_lines([said])
    output.print_text(said)
    assert capsys.readouterr().out == f"{said}\n{said}"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("encoding", "name", "shown"), [("ascii", "küche".encode(), r"k\xfcche"), ("utf-8", b"k\xff", r"k\udcff")]
)
def test_what_the_output_cannot_hold_is_written_out(tmp_path: Path, encoding: str, name: bytes, shown: str) -> None:
    command = ["-m", "hepti_mqtt.cli", "site", "init", bytes(tmp_path) + b"/" + name]
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1", "PYTHONIOENCODING": encoding},
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert shown in done.stdout.decode()
