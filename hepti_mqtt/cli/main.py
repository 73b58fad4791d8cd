"""The arguments of every command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn, get_args

from hepti_mqtt import __version__
from hepti_mqtt.cli import bench, doctor, gateway, output, site, wyoming
from hepti_mqtt.config import settings
from hepti_mqtt.config.options import (
    IN_FLIGHT,
    PlannerOptions,
    add_agent_arguments,
    add_pin_arguments,
    add_site_arguments,
    index_range,
    non_negative_int,
    positive_int,
    positive_number,
    positive_seconds,
    tcp_port,
)
from hepti_mqtt.config.settings import Settings, check_environment
from hepti_mqtt.core.errors import HeptiError
from hepti_mqtt.core.plan import Objective, Quantised


class Command(NamedTuple):
    """One command. entry: the function that runs it, as module:name; fill: adds its arguments."""

    about: str
    fill: Callable[[argparse.ArgumentParser], None]
    entry: str
    #: Whether it takes --broker and --site.
    at_a_site: bool = True


class Parser(argparse.ArgumentParser):
    """A parser with errors of one line, which name the nearest valid word."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with 2; name a misspelled option before a missing one."""
        if "required" in message and (unknown := next(filter(self._is_unknown, self._words), None)):
            message = self._unknown(unknown)
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def _is_unknown(self, word: str) -> bool:
        name = word.partition("=")[0]
        return name.startswith("--") and not any(option.startswith(name) for option in self._option_string_actions)

    def _unknown(self, word: str) -> str:
        options = [*self._option_string_actions]
        return f"unknown argument {word!r}{settings.nearest(word, options) if word.startswith('-') else ''}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = [*map(str, action.choices or ())]
        if choices and value not in (action.choices or ()):
            raise argparse.ArgumentError(action, f"{value!r} is none of them{settings.nearest(str(value), choices)}")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the parsed arguments; for an unknown one name the nearest option of the command."""
        self._words = [*(sys.argv[1:] if args is None else args)]
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown(unknown[0]))
        return parsed, unknown


def subparsers(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Return a parser's commands, by name."""
    actions = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return next((action.choices for action in actions), {})


def build() -> argparse.ArgumentParser:
    """Return the parser of `hepti`."""
    parser = Parser(prog="hepti", description="Run one neural network across the small computers of a site, over MQTT.")
    parser.add_argument("--version", action="version", version=f"hepti {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=command.about,
            description=command.about,
            epilog=f"examples:{EXAMPLES[name]}" if name in EXAMPLES else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_common_arguments(sub, command.at_a_site)
        command.fill(sub)
    return parser


def add_common_arguments(parser: argparse.ArgumentParser, at_a_site: bool = True) -> None:
    """Add the options of every command, which may stand before or after its name."""
    if at_a_site:
        add_site_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("-v", "--verbose", action="store_true", help="log more on stderr")


def _drawing(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    explain = "also print the work factor, the throughput, each device's Program and the time line"
    add("--explain", action="store_true", help=explain)
    layers = "layers that --explain prints and --layout-svg draws (default 1)"
    add("--layer", type=index_range, default=range(1, 2), metavar="N|A:B", help=layers)
    add("--svg", type=Path, metavar="FILE", help="write the time line as a picture")
    add("--layout-svg", type=Path, metavar="FILE", help="draw who holds which part of each tensor, and what travels")


def _agent(sub: argparse.ArgumentParser) -> None:
    action = "instead of running here: install a service of systemd with these options, restart it with the installed "
    action += "version, or remove it with all its data"
    sub.add_argument("action", nargs="?", choices=("install", "upgrade", "uninstall"), help=action)
    sub.add_argument("--user", action="store_true", help="the service of this user, without root")
    preview = "with install: print files and commands, and change nothing"
    sub.add_argument("--dry-run", action="store_true", help=preview)
    add_agent_arguments(sub)


def _demo(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add("--text", action="append", metavar="TEXT", help="a further text of your own; repeatable")
    add("--details", action="store_true", help="print all methods with times, bytes and shares")
    add("--repeat", type=positive_int, default=3, help="timed requests per method (default 3)")
    add("--dashboard", action="store_true", help="also start the gateway, and keep all running: a web page")
    add("--port", type=tcp_port, help=f"of --dashboard (default {gateway.PORT})")
    question, chat = "What is the capital of France?", "ask a small language model instead of the encoder"
    add("--chat", nargs="?", const=question, metavar="QUESTION", help=chat)


def _infer(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", help="name of the model, as the planner serves it")
    of = sub.add_argument_group("input (one of them)").add_mutually_exclusive_group(required=True).add_argument
    of("--text", action="append", help="a text; several make a batch")
    of("--pair", nargs=2, metavar=("A", "B"), action="append", help="two texts; several make a batch")
    of("--query", metavar="TEXT", help="what the texts of --document are ranked by")
    of("--question", metavar="TEXT", help="what the text of --context answers")
    of("--image", type=Path, action="append", help="a picture; several make a batch")
    of("--audio", type=Path, metavar="FILE", help="a recording of speech: WAV")
    of("--ids", help="token ids, separated by commas")
    of("--tokens", type=positive_int, metavar="N", help="N seeded random token ids (or N random pictures)")
    add = sub.add_argument_group("more about the input").add_argument
    add("--document", metavar="TEXT", action="append", help="a text that --query is compared with")
    add("--context", metavar="TEXT", help="the text that the answer to --question is part of")
    add("--label", metavar="TEXT", action="append", help="a label of your own for --text or --image")
    prompt = "the model's prompt before a text: query, document, ...; of a recording, the text before it"
    add("--prompt", metavar="NAME", help=prompt)
    add("--truncate", action="store_true", help="cut texts that are too long")
    add("--language", metavar="CODE", help="of a recording, as en or de (default: detected)")
    add("--window", type=positive_seconds, metavar="S", help="seconds in which a recording is read")
    add("--seed", type=non_negative_int, default=0, help="seed of --tokens (default 0)")
    add = sub.add_argument_group("answer").add_argument
    want = "the task's result (default), or final hidden states of all tokens"
    add("--want", choices=("task", "hidden"), help=want)
    add("--top-k", type=positive_int, metavar="N", help="how many labels or tokens to name")
    add("--dimensions", type=positive_int, metavar="N", help="the first N numbers of an embedding")
    generated = "tokens that a decoder generates, shown as they come"
    add("--max-new-tokens", type=positive_int, metavar="N", help=generated)
    add("--translate", action="store_true", help="write a recording's text in English")
    when = "name the times at which a recording's parts are said"
    add("--timestamps", action="store_const", const=True, help=when)
    add("--word-times", action="store_const", const="word", dest="timestamps", help=f"{when}, and those of its words")
    add = sub.add_argument_group("sending").add_argument
    add("--client", metavar="NAME", help="your name in topics (default: that of the broker's user)")
    add("--repeat", type=positive_int, default=1, help="how many times to send the request, one after the other")
    add("--plan-only", action="store_true", help="load the plan and print its prediction; compute nothing")
    add("--check", action="store_true", help="compare hidden states with a single-device reference")
    add("--model-dir", type=Path, help="the model's files for --check (default: the planner's)")
    deadline = "milliseconds until the request ends with the error `deadline`"
    add("--deadline-ms", type=positive_int, help=deadline)
    patience = "seconds to wait for an answer (default 120); if given, also for a broker, a planner and a first plan"
    add("--timeout", type=positive_seconds, help=patience)
    add_pin_arguments(sub)


def _plan(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", nargs="?", help="name of the model (default: the only one)")
    order = "what --explain orders the candidates by (default latency)"
    sub.add_argument("--objective", choices=get_args(Objective), help=order)
    sub.add_argument("--story", action="store_true", help="also print the last plans' transitions and their causes")
    _drawing(sub)


def _model(sub: argparse.ArgumentParser) -> None:
    actions = sub.add_subparsers(dest="action", required=True, metavar="make|inspect|verify")
    make = actions.add_parser("make", help="write a seeded random model with the real shapes of KIND")
    make.add_argument("kind", metavar="KIND", help="bert-base, bert-large, vit-base, ... (a wrong one lists them all)")
    make.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new or empty directory")
    make.add_argument("--seed", type=non_negative_int, default=0, help="seed of the weights (default 0)")
    make.add_argument("--layers", type=positive_int, help="fewer layers, or more, than KIND has")
    for name, text in (
        ("inspect", "print what a model directory holds"),
        ("verify", "check a file of any size: compute a request with kernels and reference, an op's weights at a time"),
    ):
        sub_action = actions.add_parser(name, help=text)
        sub_action.add_argument("directory", type=Path, metavar="DIR", help="a Hugging Face directory, or a GGUF file")
        quantise = "quantise a decoder's matrices, and say how far that moves them"
        sub_action.add_argument("--weights", choices=get_args(Quantised), help=quantise)


def _simulate(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    model = "a model by name (llama-3.2-1b, qwen3-4b, bert-large, ...), a directory with config.json, an ONNX or GGUF "
    add("model", help=f"{model}file; weights are not needed")
    boards = "pi4-2gb, pi4-4gb, pi4-8gb, pi5-4gb, pi5-8gb, pi5-16gb, pi-zero-2w, n100-8gb, n100-16gb, orin-nano-8gb"
    site = "devices and links: a site file, the name of a bundled file (four-pi4, mixed-four, ...), or "
    site += "COUNT-BOARD[-wifi|-100mbit] such as four-pi5-8gb"
    add("--devices-file", type=Path, metavar="YAML|NAME", help=site)
    add("--board", metavar="BOARD", help=f"instead: a table of 1 to 8 boards of a kind: {boards}")
    network = "network of --board (default gigabit)"
    add("--network", choices=("gigabit", "100mbit", "wifi"), default="gigabit", help=network)
    enough = "with --board: also print the fewest boards that reach so many tokens/s"
    add("--tokens-per-s", type=positive_number, metavar="N", help=enough)
    add("--tokens", type=positive_int, help="tokens of each sequence, or of a prompt (default 128)")
    context = "tokens of a decoder's text that devices have room for (default 4096)"
    add("--context", type=positive_int, default=4096, metavar="N", help=context)
    sequences = "of the request, as many as fit into one run"
    add("--sequences", type=positive_int, default=1, metavar="N", help=sequences)
    several = "simulate N requests at once (per replica), and print each method's throughput"
    add("--requests", type=positive_int, metavar="N", help=several)
    at_once = f"requests that run at once, as the planner has it (default {IN_FLIGHT})"
    add("--in-flight", type=positive_int, default=IN_FLIGHT, metavar="N", help=at_once)
    _drawing(sub)
    add_pin_arguments(sub, opens=True)


def _devices(sub: argparse.ArgumentParser) -> None:
    _top(sub)
    sub.add_argument("--watch", action="store_true", help="show them until q is pressed")


def _top(sub: argparse.ArgumentParser) -> None:
    heartbeats = "seconds to listen for heartbeats (default 1.5)"
    sub.add_argument("--wait", type=positive_seconds, default=1.5, help=heartbeats)


def _broker(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--kind", choices=("mosquitto", "amqtt"), help="use this kind of broker")
    sub.add_argument("--bind", metavar="ADDRESS", help="address to listen on (default 127.0.0.1; all with --closed)")
    sub.add_argument("--port", type=tcp_port, help="port to listen on (default: a free one; the site's with --closed)")
    sub.add_argument("--closed", type=Path, metavar="DIR", help="run the broker of a site of `hepti site init`")


def _health(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("part", choices=("agent", "planner"), help="what must be online")
    sub.add_argument("--id", metavar="NAME", help="name of the device (default: its host's)")
    sub.add_argument("--timeout", type=positive_seconds, default=5.0, help="seconds to wait for its status (default 5)")


# Modules are imported when their command runs: `hepti --help` must not wait for Numba.
COMMANDS: Final[Mapping[str, Command]] = {
    "demo": Command("start a broker, a planner and three agents here, and show what they do", _demo, "demo:demo"),
    "agent": Command("run this device's agent, or manage its service", _agent, "processes:agent"),
    "planner": Command("run a site's planner", PlannerOptions.add_arguments, "processes:planner"),
    "infer": Command("send a request and print the answer", _infer, "infer:infer"),
    "plan": Command("show how a model is split over the devices, and why", _plan, "show:plan"),
    "devices": Command("list the site's devices", _devices, "show:devices"),
    "top": Command("watch devices and plans in the terminal", _top, "show:top"),
    "model": Command("make, inspect or verify a model directory", _model, "model:model", False),
    "simulate": Command(
        "predict every method's time on devices described in a file", _simulate, "simulate:simulate", False
    ),
    "doctor": Command(
        "check this machine, the broker and the site, and suggest fixes", doctor.arguments, "doctor:doctor"
    ),
    "health": Command("exit with 0 if the planner or a device is online", _health, "health:health"),
    "site": Command(
        "make a closed site and add users: certificate, passwords and access list", site.arguments, "site:site", False
    ),
    "bench": Command("measure what each method takes on your devices", bench.arguments, "bench:bench"),
    "broker": Command("run a broker here until interrupted", _broker, "processes:broker", False),
    "completion": Command(
        'print completions for bash and zsh: eval "$(hepti completion)"', lambda _: None, "completion:completion", False
    ),
    "gateway": Command("answer HTTP as OpenAI, TEI and Ollama do", gateway.arguments, "gateway:gateway"),
    "dashboard": Command(
        "show the site on a web page: the gateway serves it at /", gateway.arguments, "gateway:gateway"
    ),
    "wyoming": Command("be the speech-to-text service of Home Assistant", wyoming.arguments, "wyoming:wyoming"),
}
#: shown below a command's options
EXAMPLES: Final[Mapping[str, str]] = {
    "agent": """
  hepti agent --broker mqtt://192.168.1.10 --id kitchen-pi  # on every device
  hepti agent --broker /etc/hepti/kitchen-pi.login --memory 400MiB  # of a closed site, within a budget
  sudo /opt/hepti/bin/hepti-agent install --broker kitchen-pi.login  # as a service, from now on""",
    "planner": """
  hepti planner --model minilm=/models/all-MiniLM-L6-v2  # on one machine
  hepti planner --model bert=~/bert --weights w8a32 --accuracy 1e-3  # with fewer bytes""",
    "infer": """
  hepti infer minilm --text "The laundry is done."  # one text
  hepti infer resnet --image door.jpg --top-k 3  # a picture
  hepti infer reranker --query "warm?" --document "It is hot." --document "Rain."  # documents by a query
  hepti infer nli --text "Lamp off!" --label light --label heating  # labels of your own
  hepti infer qa --question "Who?" --context "Ada came home."  # a part of a text
  hepti infer whisper --audio command.wav --language en  # speech
  hepti infer minilm --tokens 128 --repeat 20 --check  # measured, and compared with the reference""",
    "plan": """
  hepti plan minilm --explain  # the reason for this division
  hepti plan --story  # the plans before it""",
    "devices": """
  hepti --broker mqtt://192.168.1.10 devices  # their status, and why a device is not used""",
    "model": """
  hepti model inspect /models/all-MiniLM-L6-v2  # the architecture of a directory
  hepti model verify /models/SmolLM2-135M --weights q4  # the error of quantised weights
  hepti model make bert-base --out /tmp/bert-base  # a random one, for tests""",
    "simulate": """
  hepti simulate bert-large --devices-file four-pi4 --tokens 128 --explain  # before you buy boards""",
    "site": """
  hepti site init --dir mysite --host broker.home  # a closed site
  hepti site add device kitchen-pi --dir mysite  # a login for a device""",
    "bench": """
  hepti bench minilm  # all methods on the site's devices""",
}


# ----------------------------------------------------------------------------------------------------------------------
# `hepti` and `hepti-agent`: parse, run one command, translate errors to exit codes.


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hepti`; return its exit code (0 done, 1 failed, 2 usage, 3 broker, 4 no plan, 5 deadline, 6 refused)."""
    output.escape_unencodable()
    parser = build()
    args = parser.parse_args(_command_first(sys.argv[1:] if argv is None else argv))
    if args.command is None:
        parser.print_help()
        return 0
    output.setup_logging(args.verbose)
    module, _, name = COMMANDS[args.command].entry.partition(":")
    try:
        check_environment()
        given = Settings.from_environment(getattr(args, "broker", None), getattr(args, "site", None))
        args.named_site = getattr(args, "site", None) or os.environ.get("HEPTI_SITE") or None
        args.broker, args.site = given.broker, given.site
        command: Callable[[argparse.Namespace], int] = getattr(import_module(f"hepti_mqtt.cli.{module}"), name)
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
    for place, word in enumerate(argv):
        if word not in COMMANDS:
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
