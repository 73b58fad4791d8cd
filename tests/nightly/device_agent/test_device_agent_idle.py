"""What an agent that is online and idle has in memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from site_processes import Site, poll

from hepti_mqtt.embedded_broker import start_broker

READY = "all kernels ready"
MOST_MIB = 150
# Packages that only other commands need, and parts of NumPy and Numba that nobody needs here.
NOT_IMPORTED = (
    *("PIL", "tokenizers", "safetensors", "cryptography", "asyncio", "amqtt", "sqlite3.dbapi2"),
    *("numpy.testing", "numpy.f2py", "numba.testing", "numba.tests", "numba.cuda", "unittest"),
    *("hepti_mqtt.planner", "hepti_mqtt.service", "benchmarks", "hepti_mqtt.checkpoint"),
)


PROGRAM = (sys.executable, "-X", "importtime", "-m", "hepti_mqtt.cli")  # as an installation starts it


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_an_idle_agent_is_small_and_has_imported_what_it_needs_alone(tmp_path):
    # Numba imports the coverage tool where it is installed, as for tests: a site does not have it.
    (tmp_path / "coverage.py").write_text("raise ImportError\n")
    with start_broker() as broker, Site(tmp_path, broker, {}) as site:
        site.agent("idle", "600MiB", "--threads", "2", program=PROGRAM)
        poll(lambda: READY in site.log("idle"), "the compiled kernels")
        rollup = Path(f"/proc/{site.running['idle'].pid}/smaps_rollup").read_text()
        lines, _, _ = site.log("idle").partition(READY)
    imported = {line.rsplit("|", 1)[1].strip() for line in lines.splitlines() if line.startswith("import time:")}
    assert "numba" in imported, lines
    assert not [m for m in imported if any(m == name or m.startswith(f"{name}.") for name in NOT_IMPORTED)]
    resident = next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Rss:"))
    assert resident <= MOST_MIB * 1024, f"{resident >> 10} MiB"
