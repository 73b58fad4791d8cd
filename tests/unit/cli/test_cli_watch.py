"""What `hepti top` does with a terminal, and without one."""

import os
import pty
import subprocess
import sys

PROGRAM = """
import itertools
from hepti_mqtt.cli import output
number = itertools.count(1)
output.watch(lambda: output.print_lines([f"look {next(number)} [not markup]"]), 0.01)
print("left")
"""


def test_a_terminal_shows_it_again_and_again_until_q():
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=theirs, stdout=theirs, env={**os.environ, "TERM": "xterm"}
    )
    os.close(theirs)
    seen = b""
    try:
        while b"look 3 [not markup]" not in seen:
            seen += os.read(ours, 4096)
        os.write(ours, b"q")
        while b"left" not in seen:
            seen += os.read(ours, 4096)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_without_a_terminal_it_is_printed_once():
    out = subprocess.run([sys.executable, "-c", PROGRAM], stdin=subprocess.DEVNULL, capture_output=True, check=True)
    assert out.stdout.decode().splitlines() == ["look 1 [not markup]", "left"]
