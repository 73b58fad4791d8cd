"""What an agent that is online and idle has in memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hepti_mqtt.embedded_broker import start_broker

PATIENCE_S = 120.0
READY = "all kernels ready"
MOST_MIB = 150
# Packages that only other commands need, and parts of NumPy and Numba that nobody needs here.
NOT_IMPORTED = (
    *("PIL", "tokenizers", "safetensors", "cryptography", "asyncio", "amqtt", "sqlite3.dbapi2"),
    *("numpy.testing", "numpy.f2py", "numba.testing", "numba.tests", "numba.cuda", "unittest"),
    *("hepti_mqtt.planner", "hepti_mqtt.service", "benchmarks", "hepti_mqtt.checkpoint"),
)


@pytest.fixture
def agent(tmp_path):
    """Return a started agent; `hepti agent`, as an installation runs it."""
    with start_broker() as broker:
        # Numba imports the coverage tool where it is installed, as for tests: a site does not have it.
        (tmp_path / "coverage.py").write_text("raise ImportError\n")
        root = Path(__file__).parents[3]
        process = subprocess.Popen(
            [sys.executable, "-X", "importtime", "-m", "hepti_mqtt.cli", "agent", "--id", "idle1", "--threads", "2"],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, root))),
                "HEPTI_BROKER": broker.url,
                "XDG_CACHE_HOME": str(tmp_path / "cache"),
                "XDG_STATE_HOME": str(tmp_path / "state"),
            },
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        kill = threading.Timer(PATIENCE_S, process.kill)
        kill.start()
        try:
            yield process
        finally:
            kill.cancel()
            process.kill()
            process.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_an_idle_agent_is_small_and_has_imported_what_it_needs_alone(agent):
    imported, log = set(), []
    for line in agent.stderr:
        if line.startswith("import time:"):
            imported.add(line.rsplit("|", 1)[1].strip())
        else:
            log.append(line)
        if READY in line:
            break
    assert "numba" in imported, log
    imported_too_early = [m for m in imported if any(m == name or m.startswith(f"{name}.") for name in NOT_IMPORTED)]
    assert not imported_too_early
    rollup = Path(f"/proc/{agent.pid}/smaps_rollup").read_text()
    resident = next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Rss:"))
    assert resident <= MOST_MIB * 1024, f"{resident >> 10} MiB"
