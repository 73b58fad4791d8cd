"""A Mosquitto with lines of its own in mosquitto.conf."""

from __future__ import annotations

import contextlib
import getpass
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from broker_kinds import mosquitto_or_skip
from site_processes import free_port, listens, poll


@contextlib.contextmanager
def mosquitto_with(directory: Path, *lines: str, needs: str = "") -> Iterator[SimpleNamespace]:
    """Run Mosquitto with the project's settings and these lines; skips the test where it is not installed.

    needs: what this Mosquitto may lack; the test is skipped if it does not start.
    """
    program = mosquitto_or_skip()
    port, file = free_port(), directory / "mosquitto.conf"
    head = [f"listener {port} 127.0.0.1", "allow_anonymous true", f"user {getpass.getuser()}", "set_tcp_nodelay true"]
    file.write_text("\n".join([*head, *lines, ""]))
    with (directory / "mosquitto.log").open("wb") as log:
        process = subprocess.Popen([program, "-c", file], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        poll(lambda: listens(port) or (needs and process.poll() is not None), "the broker")
        if process.poll() is not None:
            pytest.skip(f"this Mosquitto has no {needs}")
        yield SimpleNamespace(url=f"mqtt://127.0.0.1:{port}", port=port, kind="mosquitto")
    finally:
        process.kill()
        process.wait()
