"""The arguments of every command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Final, get_args

from hepti_mqtt import __version__
from hepti_mqtt.cli import bench, doctor, gateway, output, site, wyoming
from hepti_mqtt.config.options import (
    IN_FLIGHT,
    PlannerOptions,
    add_agent_arguments,
    add_pin_arguments,
    add_site_arguments,
    index_range,
    non_negative_int,
    positive_int,
    positive_seconds,
    settings_from_args,
    tcp_port,
)
from hepti_mqtt.config.settings import check_environment
from hepti_mqtt.errors import HeptiError
from hepti_mqtt.plan import Objective, Quantised


def build() -> argparse.ArgumentParser:
    """Return the parser of `hepti`."""
    parser = argparse.ArgumentParser(
        prog="hepti", description="Answer one transformer inference with several small computers over MQTT."
    )
    parser.add_argument("--version", action="version", version=f"hepti {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help_text, fill in _COMMANDS:
        sub = commands.add_parser(
            name,
            help=help_text,
            description=help_text,
            epilog=_examples(name),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_common_arguments(sub)
        fill(sub)
    return parser


def _examples(command: str) -> str | None:
    lines = [f"  {line}  # {what}" for line, what in _EXAMPLES.get(command, ())]
    return "\n".join(["examples:", *lines]) if lines else None


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what every command takes, before its name or after it."""
    add_site_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("-v", "--verbose", action="store_true", help="log more on stderr")


def _drawing(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--explain",
        action="store_true",
        help="also print the work factor, the throughput, each device's Program and the time line",
    )
    sub.add_argument(
        "--layer",
        type=index_range,
        default=range(1, 2),
        metavar="N|A:B",
        help="layers that --explain prints and --layout-svg draws (default 1)",
    )
    sub.add_argument("--svg", type=Path, metavar="FILE", help="write the time line as a picture")
    sub.add_argument(
        "--layout-svg", type=Path, metavar="FILE", help="draw who holds which part of each tensor, and what travels"
    )


def _agent(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "action",
        nargs="?",
        choices=("install", "upgrade", "uninstall"),
        help="instead of running here: install a service of systemd with these options, take what is installed now and "
        "restart, or remove it with all that it kept",
    )
    sub.add_argument("--user", action="store_true", help="the service of this user, without root")
    add_agent_arguments(sub)


def _demo(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--repeat", type=positive_int, default=10, help="requests per strategy (default 10)")
    sub.add_argument(
        "--dashboard", action="store_true", help="also start the gateway, and keep all running: a web page"
    )
    sub.add_argument("--port", type=tcp_port, default=gateway.PORT, help=f"of --dashboard (default {gateway.PORT})")
    sub.add_argument(
        "--chat",
        nargs="?",
        const="What is the capital of France?",
        metavar="QUESTION",
        help="ask a small language model instead of the encoder",
    )


def _infer(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", help="name of the model, as the planner serves it")
    what = sub.add_mutually_exclusive_group(required=True)
    what.add_argument("--text", action="append", help="a text; several make a batch")
    what.add_argument("--pair", nargs=2, metavar=("A", "B"), action="append", help="two texts; several make a batch")
    what.add_argument("--query", metavar="TEXT", help="what the texts of --document are ranked by")
    what.add_argument("--question", metavar="TEXT", help="what the text of --context answers")
    what.add_argument("--image", type=Path, action="append", help="a picture; several make a batch")
    what.add_argument("--audio", type=Path, metavar="FILE", help="a recording of speech: WAV")
    what.add_argument("--ids", help="token ids, separated by commas")
    what.add_argument(
        "--tokens", type=positive_int, metavar="N", help="N seeded random token ids (or N random pictures)"
    )
    sub.add_argument("--document", metavar="TEXT", action="append", help="a text that --query is compared with")
    sub.add_argument("--context", metavar="TEXT", help="the text that the answer to --question is part of")
    sub.add_argument("--label", metavar="TEXT", action="append", help="a label of your own for --text")
    sub.add_argument(
        "--prompt",
        metavar="NAME",
        help="the model's prompt before a text: query, document, ...; of a recording, what was said before",
    )
    sub.add_argument("--dimensions", type=positive_int, metavar="N", help="the first N numbers of an embedding")
    sub.add_argument("--seed", type=non_negative_int, default=0, help="seed of --tokens (default 0)")
    sub.add_argument("--client", metavar="NAME", help="your name in topics (default: that of the broker's user)")
    sub.add_argument(
        "--repeat", type=positive_int, default=1, help="how many times to send the request, one after the other"
    )
    sub.add_argument("--plan-only", action="store_true", help="load the plan and print its prediction; compute nothing")
    sub.add_argument("--check", action="store_true", help="compare hidden states with a single-device reference")
    sub.add_argument("--model-dir", type=Path, help="the model's files for --check (default: the planner's)")
    sub.add_argument("--truncate", action="store_true", help="cut texts that are too long")
    sub.add_argument(
        "--want", choices=("task", "hidden"), help="the task's result (default), or final hidden states of all tokens"
    )
    sub.add_argument("--language", metavar="CODE", help="of a recording, as en or de (default: it is found)")
    sub.add_argument("--translate", action="store_true", help="write a recording's text in English")
    sub.add_argument("--timestamps", action="store_true", help="name the times at which a recording's parts are said")
    sub.add_argument("--window", type=positive_seconds, metavar="S", help="seconds in which a recording is read")
    sub.add_argument("--top-k", type=positive_int, metavar="N", help="how many labels or tokens to name")
    sub.add_argument(
        "--max-new-tokens", type=positive_int, metavar="N", help="tokens that a decoder generates, shown as they come"
    )
    sub.add_argument(
        "--deadline-ms", type=positive_int, help="milliseconds until the request ends with the error `deadline`"
    )
    sub.add_argument(
        "--timeout",
        type=positive_seconds,
        help="seconds to wait for an answer (default 120); if given, also for a planner and a first plan",
    )
    add_pin_arguments(sub)


def _plan(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", nargs="?", help="name of the model (default: the only one)")
    sub.add_argument(
        "--objective", choices=get_args(Objective), help="what --explain orders the candidates by (default latency)"
    )
    sub.add_argument("--story", action="store_true", help="also print the last plans' transitions and their causes")
    _drawing(sub)


def _model(sub: argparse.ArgumentParser) -> None:
    actions = sub.add_subparsers(dest="action", required=True, metavar="make|inspect|verify")
    make = actions.add_parser("make", help="write a seeded random model with the real shapes of KIND")
    make.add_argument("kind", metavar="KIND", help="bert-base, bert-large, vit-base, ... (a wrong one lists them all)")
    make.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new or empty directory")
    make.add_argument("--seed", type=non_negative_int, default=0, help="seed of the weights (default 0)")
    make.add_argument("--layers", type=positive_int, help="fewer layers, or more, than KIND has")
    for name, text in (("inspect", "print what a model directory holds"), ("verify", "load it and compute with it")):
        sub_action = actions.add_parser(name, help=text)
        sub_action.add_argument("directory", type=Path, metavar="DIR", help="a Hugging Face directory, or a GGUF file")
        quantise = "quantise a decoder's matrices, and say how far that moves them"
        sub_action.add_argument("--weights", choices=get_args(Quantised), help=quantise)


def _simulate(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", help="a model directory, an ONNX or GGUF file, or a kind that `hepti model make` knows")
    sub.add_argument(
        "--devices-file", type=Path, required=True, metavar="YAML", help="devices and links (configs/sites)"
    )
    sub.add_argument("--tokens", type=positive_int, default=128, help="tokens of each sequence (default 128)")
    sub.add_argument(
        "--sequences", type=positive_int, default=1, metavar="N", help="of the request, as many as fit into one run"
    )
    sub.add_argument(
        "--requests",
        type=positive_int,
        metavar="N",
        help="simulate N requests at once (per replica), and print each method's throughput",
    )
    sub.add_argument(
        "--in-flight",
        type=positive_int,
        default=IN_FLIGHT,
        metavar="N",
        help=f"requests that run at once, as the planner has it (default {IN_FLIGHT})",
    )
    sub.add_argument(
        "--weather",
        metavar="KIND|FILE",
        help="play the site over time with a real planner: still, stalls, walk, changes, liar, restless, sprinter, "
        "or a file of recorded heartbeats (JSON lines); prints what its changes of plan were worth, and --svg draws "
        "them",
    )
    sub.add_argument("--minutes", type=positive_int, default=30, help="minutes of --weather (default 30)")
    sub.add_argument("--seed", type=non_negative_int, default=0, help="seed of --weather (default 0)")
    _drawing(sub)
    add_pin_arguments(sub, opens=True)


def _devices(sub: argparse.ArgumentParser) -> None:
    _top(sub)
    sub.add_argument("--watch", action="store_true", help="show them until q is pressed")


def _top(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--wait", type=positive_seconds, default=1.5, help="seconds to listen for heartbeats (default 1.5)"
    )


def _nothing_more(_sub: argparse.ArgumentParser) -> None:
    """Nothing beside what every command has."""


def _broker(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--kind", choices=("mosquitto", "amqtt"), help="use this kind of broker")
    sub.add_argument("--bind", metavar="ADDRESS", help="address to listen on (default 127.0.0.1; all with --closed)")
    sub.add_argument("--port", type=tcp_port, help="port to listen on (default: a free one; the site's with --closed)")
    sub.add_argument("--closed", type=Path, metavar="DIR", help="run the broker of a site made by `hepti site`")


def _health(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("part", choices=("agent", "planner"), help="what must be online")
    sub.add_argument("--id", metavar="NAME", help="name of the device (default: its host's)")
    sub.add_argument("--timeout", type=positive_seconds, default=5.0, help="seconds to wait for its status (default 5)")


_COMMANDS: tuple[tuple[str, str, Callable[[argparse.ArgumentParser], None]], ...] = (
    ("demo", "start a broker, a planner and three agents here, and show what they do", _demo),
    ("agent", "run this device's agent, or manage its service", _agent),
    ("planner", "run a site's planner", PlannerOptions.add_arguments),
    ("infer", "send a request and print the answer", _infer),
    ("plan", "show how a model is split over the devices, and why", _plan),
    ("devices", "list the site's devices", _devices),
    ("top", "watch devices and plans in the terminal", _top),
    ("model", "make, inspect or verify a model directory", _model),
    ("simulate", "predict every method's time on devices described in a file", _simulate),
    ("doctor", "check this machine, the broker and the site, and suggest fixes", doctor.arguments),
    ("health", "exit with 0 if the planner or a device is online", _health),
    ("site", "make a closed site and add users: certificate, passwords and access list", site.arguments),
    ("bench", "measure what each method takes on your devices", bench.arguments),
    ("broker", "run a broker here until interrupted", _broker),
    ("completion", 'print completions for bash and zsh: eval "$(hepti completion)"', _nothing_more),
    ("gateway", "answer HTTP as OpenAI, TEI and Ollama do", gateway.arguments),
    ("dashboard", "show the site on a web page: the gateway, whose / it is", gateway.arguments),
    ("wyoming", "be the speech-to-text service of Home Assistant", wyoming.arguments),
)
# Shown below the options of a command.
_EXAMPLES: Final[Mapping[str, Sequence[tuple[str, str]]]] = {
    "agent": (
        ("hepti agent --broker mqtt://192.168.1.10 --id kitchen-pi", "on every device"),
        ("hepti agent --broker /etc/hepti/kitchen-pi.login --memory 400MiB", "of a closed site, within a budget"),
        ("sudo /opt/hepti/bin/hepti-agent install --broker kitchen-pi.login", "as a service, from now on"),
    ),
    "planner": (
        ("hepti planner --model minilm=/models/all-MiniLM-L6-v2", "on one machine"),
        ("hepti planner --model bert=~/bert --weights w8a32 --accuracy 1e-3", "with fewer bytes"),
    ),
    "infer": (
        ('hepti infer minilm --text "The laundry is done."', "one text"),
        ("hepti infer resnet --image door.jpg --top-k 3", "a picture"),
        ('hepti infer reranker --query "warm?" --document "It is hot." --document "Rain."', "documents by a query"),
        ('hepti infer nli --text "Lamp off!" --label light --label heating', "labels of your own"),
        ('hepti infer qa --question "Who?" --context "Ada came home."', "a part of a text"),
        ("hepti infer whisper --audio command.wav --language en", "speech"),
        ("hepti infer minilm --tokens 128 --repeat 20 --check", "measured, and compared with the reference"),
    ),
    "plan": (("hepti plan minilm --explain", "why it is divided so"), ("hepti plan --story", "what became of plans")),
    "devices": (("hepti --broker mqtt://192.168.1.10 devices", "who is there, and why a device is not used"),),
    "model": (
        ("hepti model inspect /models/all-MiniLM-L6-v2", "what Hepti makes of a directory"),
        ("hepti model verify /models/SmolLM2-135M --weights q4", "what quantising costs"),
        ("hepti model make bert-base --out /tmp/bert-base", "a random one, for tests"),
    ),
    "simulate": (
        ("hepti simulate bert-large --devices-file four-pi4 --tokens 128 --explain", "before you buy boards"),
    ),
    "site": (
        ("hepti site init --host broker.home mysite", "a closed site"),
        ("hepti site add device kitchen-pi --dir mysite", "a login for a device"),
    ),
    "bench": (("hepti bench minilm", "all methods on the site's devices"),),
}


# ----------------------------------------------------------------------------------------------------------------------
# `hepti` and `hepti-agent`: parse, run one command, translate errors to exit codes.


# Modules are imported when their command runs: `hepti --help` must not wait for Numba.
_ENTRY_POINTS: Final[Mapping[str, tuple[str, str]]] = {
    "agent": ("hepti_mqtt.cli.processes", "agent"),
    "planner": ("hepti_mqtt.cli.processes", "planner"),
    "broker": ("hepti_mqtt.cli.processes", "broker"),
    "infer": ("hepti_mqtt.cli.infer", "infer"),
    "plan": ("hepti_mqtt.cli.show", "plan"),
    "devices": ("hepti_mqtt.cli.show", "devices"),
    "top": ("hepti_mqtt.cli.show", "top"),
    "simulate": ("hepti_mqtt.cli.simulate", "simulate"),
    "model": ("hepti_mqtt.cli.model", "model"),
    "demo": ("hepti_mqtt.cli.demo", "demo"),
    "bench": ("hepti_mqtt.cli.bench", "bench"),
    "gateway": ("hepti_mqtt.cli.gateway", "gateway"),
    "dashboard": ("hepti_mqtt.cli.gateway", "gateway"),
    "wyoming": ("hepti_mqtt.cli.wyoming", "wyoming"),
    "site": ("hepti_mqtt.cli.site", "site"),
    "health": ("hepti_mqtt.cli.health", "health"),
    "doctor": ("hepti_mqtt.cli.doctor", "doctor"),
    "completion": ("hepti_mqtt.cli.completion", "completion"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hepti`; return its exit code (0 done, 1 failed, 2 usage, 3 broker, 4 no plan, 5 deadline, 6 refused)."""
    output.escape_unencodable()
    args = build().parse_args(_command_first(sys.argv[1:] if argv is None else argv))
    output.setup_logging(args.verbose)
    module, name = _ENTRY_POINTS[args.command]
    try:
        check_environment()
        settings = settings_from_args(args)
        args.named_site = args.site or os.environ.get("HEPTI_SITE") or None
        args.broker, args.site = settings.broker, settings.site
        command: Callable[[argparse.Namespace], int] = getattr(import_module(module), name)
        return command(args)
    except HeptiError as error:
        if args.json:
            output.print_json({"ok": False, "error": {"code": error.code, "message": str(error)}})
        else:
            output.err.print(f"hepti: {error}", markup=False)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _command_first(argv: Sequence[str]) -> list[str]:
    """Return the arguments with the command first, also where common options stand before it."""
    common = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_common_arguments(common)
    commands = {name for name, _, _ in _COMMANDS}
    for place, word in enumerate(argv):
        if word not in commands:
            continue
        try:
            before = common.parse_known_args(argv[:place])[1]
        except (argparse.ArgumentError, SystemExit):  # the word is an option's value: --site plan devices
            continue
        if not before:
            return [word, *argv[:place], *argv[place + 1 :]]
    return list(argv)


def agent_main() -> int:
    """Run `hepti-agent`, the same as `hepti agent`."""
    return main(["agent", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
