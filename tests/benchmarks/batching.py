"""50 requests of 9 tokens from one `mosquitto_pub -l`, run together and each by itself, on this machine.

Run by hand: `make bench-batching` (MODEL=kind, TOKENS=n, REQUESTS=n, REPEAT=n, SITES="one device,the demo's").
Two sites share a broker; one packs what waits and one does not. With AGAINST=DIRECTORY, a work tree of another
revision whose kernels are compiled, the other site is that revision's instead. They take turns, so that a drifting
machine hits both alike. Answers are checked against the NumPy reference before anything is timed. Prints medians and
ratios.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from site_processes import PATIENCE_S, ROOT, Site, User, poll

from hepti_mqtt import __version__, models
from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.cli.demo import AGENTS
from hepti_mqtt.client import Hepti
from hepti_mqtt.config.options import AgentOptions
from hepti_mqtt.embedded_broker import start_broker
from hepti_mqtt.kernels import Workers
from hepti_mqtt.kernels.peak import multiply_adds
from hepti_mqtt.service.requests import prepare
from hepti_mqtt.transport import BrokerUrl

BOUND = 5e-5
TOGETHER = "together"
PLANS: Mapping[str, tuple[Sequence[AgentOptions], tuple[str, ...]]] = {
    "one device": ([AgentOptions("agent0", 1, "1GiB")], ()),
    "one of two threads": ([AgentOptions("agent0", 2, "1GiB")], ()),
    "two devices": ([AgentOptions(f"agent{i}", 1, "1GiB") for i in range(2)], ("--strategy", "row", "--variant", "kv")),
    "the demo's": (AGENTS, ()),
}


class Revision(Site):
    """A site of another work tree's processes, which measure themselves."""

    measured = None
    root = ROOT

    @property
    def environment(self) -> dict[str, str]:
        return {**super().environment, "PYTHONPATH": str(self.root)}


class Sender:
    """One user of a site, who sends by `mosquitto_pub -l`."""

    def __init__(self, url: str, site: str) -> None:
        self.broker = BrokerUrl.parse(url)
        self.user = User(url, "bench", site)

    def send(self, lines: Sequence[str]) -> tuple[float, dict[str, dict[str, Any]]]:
        """Return the seconds from the first line to the last answer, and the answers by id."""
        topic = self.user.topics.request("model", "bench")
        address = ["-h", self.broker.host, "-p", str(self.broker.port)]
        with subprocess.Popen(["mosquitto_pub", *address, "-q", "1", "-t", topic, "-l"], stdin=subprocess.PIPE) as pub:
            assert pub.stdin is not None
            time.sleep(0.2)  # it connects meanwhile, which is not what is measured
            started = time.perf_counter()
            pub.stdin.write("".join(f"{line}\n" for line in lines).encode())
            pub.stdin.close()
            answers = [self.user.answers.get(timeout=PATIENCE_S)[1] for _ in lines]
            seconds = time.perf_counter() - started
        return seconds, {answer["id"]: answer for answer in answers}

    def ask(self, line: str) -> float:
        """Return the seconds that one request takes while no other waits."""
        started = time.perf_counter()
        _, answer = self.user.ask("model", line.encode())
        assert answer["ok"], answer
        return time.perf_counter() - started


def requests(vocab: int, tokens: int, count: int, seed: int) -> list[str]:
    """Return lines of token ids, none of which comes twice."""
    rng = np.random.default_rng(seed)
    return [json.dumps({"id": f"r{seed}-{i}", "ids": rng.integers(0, vocab, tokens).tolist()}) for i in range(count)]


def checked(checkpoint: Checkpoint, lines: Sequence[str], answers: Mapping[str, Mapping[str, Any]]) -> float:
    """Return the largest error of any answer; raises AssertionError for one that is missing or wrong."""
    worst = 0.0
    for line in lines:
        body = json.loads(line)
        answer = answers[body["id"]]
        assert answer["ok"], answer
        prepared = prepare(checkpoint, body)
        _, wanted = models.reference(checkpoint.spec, checkpoint.tensors(), prepared.inputs, prepared.shape)
        worst = max(worst, float(np.abs(np.array(answer["result"]["embedding"]) - wanted[0]).max()))
    assert worst < BOUND, f"wrong by {worst}"
    return worst


def main() -> None:
    """Measure one device of one thread and of two, two that share every layer, and the demo's three."""
    kind, repeat = os.environ.get("MODEL", "minilm"), int(os.environ.get("REPEAT", "15"))
    tokens, count = int(os.environ.get("TOKENS", "9")), int(os.environ.get("REQUESTS", "50"))
    against = Path(os.environ["AGAINST"]).resolve() if os.environ.get("AGAINST") else None
    chosen = os.environ.get("SITES") or ",".join(PLANS)
    print(f"{count} requests of {tokens} tokens at once from one client, {kind}; medians of {repeat} turns\n")
    print("| | requests/s | ms for all | one request alone, ms | max error | throughput |")
    print("|---|---:|---:|---:|---:|---:|")
    with TemporaryDirectory(prefix="hepti-batching-") as scratch:
        directory = make_model(kind, Path(scratch) / "model")
        with Checkpoint.open(directory, "model") as checkpoint:
            for plan in chosen.split(","):
                with started(Path(scratch) / plan.replace(" ", "-"), directory, plan, against) as senders:
                    measure(checkpoint, senders, plan, tokens, count, repeat)
    print(
        f"\nThe last column is the median of the turns' ratios. {os.cpu_count()} CPUs, {platform.machine()}, "
        f"{roof():.0f} GFLOP/s at most on one, Python {platform.python_version()}, NumPy {np.__version__}, "
        f"Hepti {__version__}"
    )


def roof() -> float:
    """Return the GFLOP/s that one thread of this machine does on registers at this time, which no run exceeds."""
    loop, times = multiply_adds(Workers(1)), []
    for _ in range(50):
        begun = time.perf_counter()
        loop.run()
        times.append(time.perf_counter() - begun)
    return loop.amount / min(times) / 1e9


@contextmanager
def started(directory: Path, model: Path, plan: str, against: Path | None) -> Iterator[dict[str, Sender]]:
    """Yield a user of each of both sites, which share a broker; the first is the one to compare with."""
    agents, pins = PLANS[plan]
    other = ("alone", ROOT, ("--batch", "1")) if against is None else ("before", against, ())
    sites: dict[str, Site] = {}
    with start_broker() as broker:
        try:
            for name, root, options in (other, (TOGETHER, ROOT, ())):
                (directory / name).mkdir(parents=True)
                site = sites[name] = Revision(directory / name, broker, {"model": model}, name=name)
                site.root = root
                for agent in agents:  # one after the other, so that each measures itself undisturbed
                    site.agent(agent.device, str(agent.memory), "--threads", str(agent.threads))
                    poll(lambda site=site, agent=agent: "is online" in site.log(agent.device), agent.device, 300)
                site.planner(*options, *pins)
            for name, site in sites.items():
                with Hepti.connect(site.url, site=name, client_id="wait") as hepti:
                    hepti.wait_ready("model", PATIENCE_S)
            yield {name: Sender(site.url, name) for name, site in sites.items()}
        finally:
            for site in sites.values():
                site.close()


def measure(
    checkpoint: Checkpoint, senders: Mapping[str, Sender], plan: str, tokens: int, count: int, repeat: int
) -> None:
    """Let both sites answer by turns; print what they took."""
    vocab = checkpoint.spec.reads.below
    errors = {}
    for name, sender in senders.items():
        for seed in range(3):  # Programs are built meanwhile
            lines = requests(vocab, tokens, count, seed)
            errors[name] = checked(checkpoint, lines, sender.send(lines)[1])
    many: dict[str, list[float]] = {name: [] for name in senders}
    single: dict[str, list[float]] = {name: [] for name in senders}
    for turn in range(repeat):
        for name, sender in senders.items():
            seconds, answers = sender.send(requests(vocab, tokens, count, 10 + turn))
            assert all(answer["ok"] for answer in answers.values()), name
            shared = [answer.get("batched_with", 0) > 0 for answer in answers.values()]
            assert any(shared) == (name == TOGETHER), name
            many[name].append(seconds)
            single[name] += [sender.ask(line) for line in requests(vocab, tokens, 10, 1000 + turn)]
    gain = statistics.median(a / b for a, b in zip(*many.values(), strict=True))
    for name in senders:
        seconds, alone = statistics.median(many[name]), statistics.median(single[name])
        print(
            f"| {plan}, {name} | {count / seconds:.0f} | {seconds * 1e3:.0f} | {alone * 1e3:.1f} | "
            f"{errors[name]:.0e} | {gain if name == TOGETHER else 1:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
