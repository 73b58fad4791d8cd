"""50 texts of 9 tokens from one `mosquitto_pub -l`, with and without batching, on this machine.

Run by hand: `make bench-batching` (MODEL=kind, TOKENS=n, REQUESTS=n, REPEAT=n). Two sites share a broker, one packs
what waits and one does not; they take turns, so that a drifting machine hits both alike. All answers are checked
before anything is timed. Prints medians and ratios.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from site_processes import PATIENCE_S, Site, User, poll

from hepti_mqtt import __version__, models
from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.client import Hepti
from hepti_mqtt.embedded_broker import start_broker
from hepti_mqtt.service.requests import prepare
from hepti_mqtt.transport import BrokerUrl

BOUND = 5e-5
SITES: Mapping[str, tuple[str, ...]] = {"batching": (), "one by one": ("--batch", "1")}


class Sender:
    """One user of a site, who sends by `mosquitto_pub -l`."""

    def __init__(self, url: str, site: str) -> None:
        self.broker = BrokerUrl.parse(url)
        self.user = User(url, "bench", site)

    def send(self, lines: Sequence[str]) -> tuple[float, dict[str, dict[str, object]]]:
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


def checked(checkpoint: Checkpoint, lines: Sequence[str], answers: Mapping[str, Mapping[str, object]]) -> float:
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
    """Start both sites, check, time, print a table."""
    kind, tokens = os.environ.get("MODEL", "minilm"), int(os.environ.get("TOKENS", "9"))
    count, repeat = int(os.environ.get("REQUESTS", "50")), int(os.environ.get("REPEAT", "15"))
    with TemporaryDirectory(prefix="hepti-batching-") as scratch, start_broker() as broker:
        directory = make_model(kind, Path(scratch) / "model")
        sites = {}
        try:
            for name, options in SITES.items():
                (Path(scratch) / name).mkdir()
                site = sites[name] = Site(
                    Path(scratch) / name, broker, {"model": directory}, name=name.replace(" ", "-")
                )
                site.agent("agent", "1GiB")
                poll(lambda site=site: "is online" in site.log("agent"), f"agent of {name} online", 300)
                site.planner(*options)
            senders = {}
            for name, site in sites.items():
                with Hepti.connect(site.url, site=site.name, client_id="wait") as hepti:
                    hepti.wait_ready("model", PATIENCE_S)
                senders[name] = Sender(site.url, site.name)
            with Checkpoint.open(directory, "model") as checkpoint:
                measure(checkpoint, senders, tokens, count, repeat)
        finally:
            for site in sites.values():
                site.close()


def measure(checkpoint: Checkpoint, senders: Mapping[str, Sender], tokens: int, count: int, repeat: int) -> None:
    """Let both sites answer by turns; print what they took."""
    vocab = checkpoint.spec.reads.below
    errors = {}
    for name, sender in senders.items():
        for seed in range(3):  # Programs are built meanwhile
            lines = requests(vocab, tokens, count, seed)
            errors[name] = checked(checkpoint, lines, sender.send(lines)[1])
    many: dict[str, list[float]] = {name: [] for name in senders}
    single: dict[str, list[float]] = {name: [] for name in senders}
    together: list[float] = []
    for turn in range(repeat):
        for name, sender in senders.items():
            lines = requests(vocab, tokens, count, 10 + turn)
            seconds, answers = sender.send(lines)
            assert all(answer["ok"] for answer in answers.values()), name
            many[name].append(seconds)
            if name == "batching":
                together.append(statistics.fmean(1 + a["batched_with"] for a in answers.values()))
            single[name] += [sender.ask(line) for line in requests(vocab, tokens, 10, 1000 + turn)]
    print(
        f"{count} requests of {tokens} tokens at once from one client, {checkpoint.spec.architecture}; "
        f"medians of {repeat} turns\n"
    )
    print("| | requests/s | ms for all | one request alone, ms | max error |")
    print("|---|---:|---:|---:|---:|")
    for name in senders:
        seconds, alone = statistics.median(many[name]), statistics.median(single[name])
        print(f"| {name} | {count / seconds:.0f} | {seconds * 1e3:.0f} | {alone * 1e3:.1f} | {errors[name]:.0e} |")
    both = zip(many["one by one"], many["batching"], strict=True)
    print(
        f"\nthroughput: {statistics.median(a / b for a, b in both):.1f} times (median of the turns' ratios); "
        f"{statistics.fmean(together):.1f} requests in the run of one\n{os.cpu_count()} CPUs, {platform.machine()}, "
        f"Python {platform.python_version()}, NumPy {np.__version__}, Hepti {__version__}"
    )


if __name__ == "__main__":
    main()
