"""One request on one agent against the same request split over several, on this machine, one thread each.

Run by hand: `make bench-split` (MODEL=kind, TOKENS=n, AGENTS=n). Every strategy is checked against the NumPy reference
before it is timed; then all take turns, so that a drifting machine hits all alike. Prints medians and ratios.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from site_processes import SITE, Site, poll

from hepti_mqtt import __version__, models
from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.client import Hepti
from hepti_mqtt.client.described import random_input
from hepti_mqtt.embedded_broker import start_broker
from hepti_mqtt.service.requests import prepare
from hepti_mqtt.strategies import STRATEGIES

BOUND = 2e-4


def main() -> None:
    """Print a markdown table."""
    kind, tokens = os.environ.get("MODEL", "bert-large"), int(os.environ.get("TOKENS", "128"))
    agents = [f"agent{i + 1}" for i in range(int(os.environ.get("AGENTS", "2")))]
    repeat = int(os.environ.get("REPEAT", "15"))
    with TemporaryDirectory(prefix="hepti-split-") as scratch, start_broker() as broker:
        directory = make_model(kind, Path(scratch) / "model")
        site = Site(Path(scratch), broker, {"model": directory})
        try:
            for name in agents:  # one after the other, so that each measures itself undisturbed
                site.agent(name, "2GiB")
                poll(lambda name=name: "is online" in site.log(name), f"{name} online")
            site.planner()
            with Hepti.connect(site.url, site=SITE, client_id="bench") as hepti:
                print_table(hepti, directory, kind, tokens, agents, repeat)
        finally:
            site.close()


def print_table(hepti: Hepti, directory: Path, kind: str, tokens: int, agents: list[str], repeat: int) -> None:
    """Check and time every strategy."""
    hepti.wait_ready("model", 300)
    with Checkpoint.open(directory, "model") as checkpoint:
        body = random_input(checkpoint.spec, tokens if checkpoint.spec.text else 1, seed=0)
        prepared = prepare(checkpoint, {**body, "want": "hidden"})
        hidden, _ = models.reference(checkpoint.spec, checkpoint.tensors(), prepared.inputs, prepared.shape)
        graph = models.graph(checkpoint.spec, prepared.shape)
    methods = {"single": {"strategy": "single", "devices": agents[:1]}}
    for s in STRATEGIES.values():
        if s.most_devices is None and s.unsupported(graph) is None:
            for options in s.options:
                name = "/".join([s.name, *options.values()])
                methods[name] = {"strategy": s.name, "options": dict(options), "devices": agents}
    times: dict[str, list[float]] = {name: [] for name in methods}
    errors, last = {}, {}
    for name, pins in methods.items():
        got = hepti.infer("model", **body, **pins, want="hidden", timeout_s=300).hidden
        errors[name] = float(np.abs(got - hidden).max())
        assert errors[name] < BOUND, f"{name} is wrong by {errors[name]}"
    for _ in range(3):
        for name, pins in methods.items():
            hepti.infer("model", **body, **pins, timeout_s=300)  # a new plan is loaded: not timed
            for _ in range(max(repeat // 3, 1)):
                last[name] = hepti.infer("model", **body, **pins, report=True, timeout_s=300)
                times[name].append(last[name].latency_ms)
    one = statistics.median(times["single"])
    print(f"{kind}, {prepared.shape.tokens} tokens, {len(agents)} agents of one thread, f32, Mosquitto on loopback\n")
    print("| strategy | median ms | single / this | predicted ms | bytes sent | max error |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, values in times.items():
        median, raw = statistics.median(values), last[name].raw
        print(
            f"| {name} | {median:.0f} | {one / median:.2f} | {raw['predicted_ms']:.0f} | "
            f"{raw['bytes_on_wire']} | {errors[name]:.0e} |"
        )
    described = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((ln.split(":")[1].strip() for ln in described if ln.startswith("model name")), platform.machine())
    print(
        f"\n{os.cpu_count()} × {cpu}, Python {platform.python_version()}, NumPy {np.__version__}, Hepti {__version__}"
    )


if __name__ == "__main__":
    main()
