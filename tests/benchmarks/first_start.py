"""How long a first start takes: `python tests/benchmarks/first_start.py [--agents 1,3] [--old DIR]`.

Agents are started at once, as processes with a compile cache of their own that is empty; the time counts until the last
of them is online. `--old` names a checkout to compare with: both take turns, so that they share a machine's good and
bad minutes. Prints a table: seconds, CPU seconds of all agents with their children, the ratio to one agent and to the
old checkout.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from hepti_mqtt.client import Hepti  # noqa: E402
from hepti_mqtt.embedded_broker import start_broker  # noqa: E402

LIMIT_S = 900.0


def first_start(checkout: Path, agents: int) -> tuple[float, float]:
    """Return (seconds until all are online, CPU seconds that they and their children took)."""
    with TemporaryDirectory() as scratch, start_broker() as broker:
        names = [f"d{i}" for i in range(agents)]
        environment = {**os.environ, "PYTHONPATH": str(checkout), "HEPTI_BROKER": broker.url}
        places = {"NUMBA_CACHE_DIR": "numba", "XDG_CACHE_HOME": "cache", "XDG_STATE_HOME": "state"}
        environment |= {name: str(Path(scratch) / place) for name, place in places.items()}
        command = [sys.executable, "-m", "hepti_mqtt.cli", "agent", "--memory", "100MiB", "--id"]
        with Hepti.connect(broker.url, client_id="timer") as hepti:
            before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
            log = (Path(scratch) / "log").open("wb")
            running = [
                subprocess.Popen([*command, name], env=environment, cwd=checkout, stdout=log, stderr=log)
                for name in names
            ]
            try:
                while {d["device"] for d in hepti.devices(0.2) if d["status"] == "online"} != set(names):
                    if time.monotonic() - start > LIMIT_S or any(p.poll() is not None for p in running):
                        raise SystemExit((Path(scratch) / "log").read_text())
                seconds = time.monotonic() - start
            finally:
                for process in running:
                    process.terminate()
                for process in running:
                    process.wait()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", default="1,3", help="how many start at once; several numbers, one after the other")
    parser.add_argument("--old", type=Path, help="a checkout to compare with")
    options = parser.parse_args()
    checkouts = [*([options.old.resolve()] if options.old else []), ROOT]
    times: dict[tuple[int, Path], float] = {}
    print(f"{'agents':>6} {'checkout':<8} {'seconds':>8} {'CPU s':>8} {'x one':>6} {'x old':>6}", flush=True)
    for agents in map(int, options.agents.split(",")):
        for checkout in checkouts:
            seconds, cpu_s = first_start(checkout, agents)
            times[agents, checkout] = seconds
            one = seconds / times.get((1, checkout), seconds)
            old = seconds / times.get((agents, checkouts[0]), seconds)
            name = "this" if checkout == ROOT else "old"
            print(f"{agents:>6} {name:<8} {seconds:>8.1f} {cpu_s:>8.1f} {one:>6.2f} {old:>6.2f}", flush=True)


if __name__ == "__main__":
    main()
