"""Types of arguments for argparse: each returns a value, or raises ArgumentTypeError with what is wrong."""

from __future__ import annotations

import argparse
import math
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args

from hepti_mqtt.config.settings import Settings, parse_size
from hepti_mqtt.errors import ConfigError
from hepti_mqtt.ids import check_name
from hepti_mqtt.plan import Objective, Route, WeightDtype, WireDtype

if TYPE_CHECKING:
    from hepti_mqtt.runtime.coordinator.requests import Pins


def size_text(text: str) -> str:
    """Return the text of a size such as "400MiB", "2GB" or a plain number, which `parse_size` takes."""
    try:
        parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def named_directory(text: str) -> tuple[str, Path]:
    """Return (name, directory) from NAME=DIR."""
    name, sep, path = text.partition("=")
    if not sep or not name or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=DIRECTORY")
    return name, Path(path)


def comma_separated(text: str) -> tuple[str, ...]:
    """Return the names of a comma-separated list."""
    return tuple(part for part in text.split(",") if part)


def index_range(text: str) -> range:
    """Return the numbers of N, or of A:B without B."""
    begin, sep, end = text.partition(":")
    first, stop = _whole(begin), _whole(end)
    if first is None or (sep and stop is None):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor a range A:B")
    numbers = range(first, first + 1 if stop is None else stop)
    if not numbers:
        raise argparse.ArgumentTypeError(f"the range {text!r} is empty")
    return numbers


def positive_int(text: str) -> int:
    """Return a whole number above zero."""
    if not (number := _whole(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return number


def non_negative_int(text: str) -> int:
    """Return a whole number from zero."""
    if (number := _whole(text)) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from zero")
    return number


def tcp_port(text: str) -> int:
    """Return the number of a TCP port."""
    number = _whole(text)
    if number is None or not 0 < number < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 1 to 65535")
    return number


def positive_seconds(text: str) -> float:
    """Return a time above zero."""
    return _above_zero(text, "seconds")


def delay_ms(text: str) -> float:
    """Return a time from zero to a minute, in milliseconds."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 60_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of milliseconds from 0 to 60000")
    return value


def error_fraction(text: str) -> float:
    """Return a part of an answer, above zero and at most all of it."""
    value = _above_zero(text, "parts of the answer, such as 1e-3,")
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is more than all of the answer; give a part of it, such as 1e-3")
    return value


def positive_mbit(text: str) -> float:
    """Return a rate above zero."""
    return _above_zero(text, "Mbit/s")


def _whole(text: str) -> int | None:
    """Return the number that digits say, None for all else and for more digits than any number here has."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None


def _above_zero(text: str, unit: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of {unit} above zero")
    return value


# ----------------------------------------------------------------------------------------------------------------------
# The options of an agent, a planner and their site: added to a parser, read from it, written as arguments again.
#
# Whoever starts one of them, from a command line or as a child process, goes by these tables.


RequestPins = Literal["any", "none"]
REQUEST_PINS: Final[tuple[RequestPins, ...]] = get_args(RequestPins)
IN_FLIGHT: Final = 2  # runs at once per model, unless a planner is told otherwise
BATCH: Final = 16  # requests that one run is of at most; of more, the next ones run while these are answered


def host_name() -> str:
    """Return this host's name without its domain, as a device's id: a container's is different for each."""
    return socket.gethostname().partition(".")[0].lower()


class _Option(NamedTuple):
    """One option: the name of its value, its flag, and what `add_argument` takes besides."""

    name: str
    flag: str
    more: Mapping[str, Any]

    def to_argv(self, value: Any) -> list[str]:
        """Return the arguments that give the option a value; none for what it is without them."""
        action = self.more.get("action")
        if action in ("store_true", "store_false"):
            return [self.flag] if value == (action == "store_true") else []
        if value == self.more.get("default"):
            return []
        return [self.flag, ",".join(value) if isinstance(value, tuple) else str(value)]


_SITE: Final = (
    _Option(
        "broker",
        "--broker",
        {
            "metavar": "URL|FILE",
            "help": "mqtt[s]://host:port, or a login file as `hepti site` writes it (default: HEPTI_BROKER)",
        },
    ),
    _Option("site", "--site", {"help": "name of the site (default: HEPTI_SITE, else home)"}),
)
_PINS: Final = (
    _Option("strategy", "--strategy", {"metavar": "NAME", "help": "pin the strategy (auto: let the planner choose)"}),
    _Option(
        "variant",
        "--variant",
        {
            "metavar": "NAME",
            "help": "pin the strategy's variant: kv of row, ring of megatron, 2 of grid, groups=2 of replicas, ...",
        },
    ),
    _Option("devices", "--devices", {"type": comma_separated, "metavar": "A,B,C", "help": "pin the devices"}),
    _Option("wire", "--wire", {"choices": get_args(WireDtype), "help": "pin the dtype of exchanged activations"}),
    _Option(
        "accuracy",
        "--accuracy",
        {
            "type": error_fraction,
            "metavar": "ERROR",
            "help": "let the planner choose that dtype: the largest relative error of an answer, e.g. 1e-3",
        },
    ),
    _Option(
        "weights", "--weights", {"choices": get_args(WeightDtype), "help": "pin how the layers' matrices are kept"}
    ),
    _Option(
        "route", "--route", {"choices": (*get_args(Route), "auto"), "help": "pin who carries exchanges between devices"}
    ),
    _Option(
        "objective",
        "--objective",
        {
            "choices": get_args(Objective),
            "help": "least latency of one request (default), most throughput, least memory",
        },
    ),
)
_AGENT: Final = (
    _Option("device", "--id", {"metavar": "NAME", "help": "name of this device in topics (default: its host's)"}),
    _Option("threads", "--threads", {"type": positive_int, "help": "threads that compute (default: all cores)"}),
    _Option(
        "memory",
        "--memory",
        {"type": size_text, "metavar": "SIZE", "help": "budget for weights and activations (default: 80 %% of free)"},
    ),
    _Option("cache", "--cache", {"type": Path, "metavar": "DIR", "help": "where tiles of weights are kept"}),
    _Option(
        "cache_size",
        "--cache-size",
        {"type": size_text, "metavar": "SIZE", "help": "limit of the tile cache; 0 for no cache (default: 4GiB)"},
    ),
    _Option(
        "mesh_host",
        "--mesh-host",
        {
            "metavar": "ADDRESS",
            "help": "where peers reach this device directly (default: its own address on the way to the broker)",
        },
    ),
    _Option("mesh_port", "--mesh-port", {"type": tcp_port, "help": "the port there (default: a free one)"}),
    _Option(
        "mesh_tls",
        "--mesh-tls",
        {"type": Path, "metavar": "FILE", "help": "this device's own certificate and key (PEM), for peers by TLS"},
    ),
    _Option("mesh", "--no-mesh", {"action": "store_false", "help": "leave all exchanges to the broker"}),
    _Option("retry", "--no-retry", {"action": "store_false", "help": "end if the broker cannot be reached"}),
)
_MODEL: Final = _Option(
    "models",
    "--model",
    {
        "type": named_directory,
        "action": "append",
        "required": True,
        "metavar": "NAME=DIR",
        "help": "serve a model; repeat it for more",
    },
)
_PLANNER: Final = (
    _Option(
        "request_pins",
        "--request-pins",
        {
            "choices": REQUEST_PINS,
            "default": "any",
            "help": "whether requests may pin strategy, devices, wire or weights for themselves (default any)",
        },
    ),
    _Option(
        "in_flight",
        "--in-flight",
        {"type": positive_int, "default": IN_FLIGHT, "help": f"runs at once per model (default {IN_FLIGHT})"},
    ),
    _Option(
        "batch",
        "--batch",
        {
            "type": positive_int,
            "default": BATCH,
            "metavar": "N",
            "help": f"waiting requests run together, at most N of them (default {BATCH}; 1: each by itself)",
        },
    ),
    _Option(
        "batch_delay_ms",
        "--batch-delay",
        {
            "type": delay_ms,
            "default": 0.0,
            "metavar": "MS",
            "help": "milliseconds that a request waits for others to join its run (default 0)",
        },
    ),
    _Option(
        "broker_mbit",
        "--broker-mbit",
        {
            "type": positive_mbit,
            "metavar": "MBIT",
            "help": "rate of the broker's own link, which carries a copy for each receiver (default: as the fastest "
            "device's)",
        },
    ),
)


def _add(parser: argparse.ArgumentParser, options: Iterable[_Option]) -> None:
    for option in options:
        parser.add_argument(option.flag, dest=option.name, **option.more)


def _read(args: argparse.Namespace, options: Iterable[_Option]) -> dict[str, Any]:
    return {option.name: getattr(args, option.name) for option in options}


def _write(values: object, options: Iterable[_Option]) -> list[str]:
    return [word for option in options for word in option.to_argv(getattr(values, option.name))]


def add_site_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what every command takes: the broker and the site."""
    _add(parser, _SITE)


def settings_from_args(args: argparse.Namespace) -> Settings:
    """Return broker and site from parsed arguments, else from the environment."""
    return Settings.from_environment(args.broker, args.site)


def site_argv(settings: Settings) -> list[str]:
    """Return the arguments that name a broker and a site."""
    return _write(settings, _SITE)


def add_pin_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what a user can fix of a plan."""
    _add(parser, _PINS)


@dataclass(frozen=True, slots=True)
class PinOptions:
    """What a user fixed of a plan; None is the planner's choice. weights: how the layers' matrices are kept."""

    strategy: str | None = None
    variant: str | None = None
    devices: tuple[str, ...] | None = None
    wire: WireDtype | None = None
    weights: WeightDtype | None = None
    route: Route | Literal["auto"] | None = None
    objective: Objective | None = None
    accuracy: float | None = None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> PinOptions:
        """Return what the arguments of `add_pin_arguments` say."""
        return cls(**_read(args, _PINS))

    def to_argv(self) -> list[str]:
        """Return the arguments that say the same."""
        return _write(self, _PINS)

    def to_pins(self) -> Pins:
        """Return them as the planner takes them; raises ConfigError where they contradict each other."""
        from hepti_mqtt.runtime.coordinator.requests import Pins  # not at the top: `hepti --help` needs no NumPy

        if self.wire is not None and self.accuracy is not None:
            raise ConfigError(f"--wire {self.wire} leaves nothing for --accuracy to choose; give one of the two")
        route = None if self.route == "auto" else self.route
        kept = self.weights or "f32"
        strategy = None if self.strategy == "auto" else self.strategy
        options, objective = variant_options(strategy, self.variant), self.objective or "latency"
        return Pins(strategy, options, self.devices, self.wire or "f32", kept, route, objective, self.accuracy)


def variant_options(strategy: str | None, variant: str | None) -> dict[str, str]:
    """Return the options of a strategy's variant, by its name or as OPTION=VALUE.

    Of one that it does not have, those that the planner refuses by name.
    """
    from hepti_mqtt.strategies import STRATEGIES  # not at the top: see above

    if not variant:
        return {}
    name, given, value = variant.partition("=")
    if given:
        return {name: value}
    known = STRATEGIES[strategy].all_variants() if strategy is not None and strategy in STRATEGIES else {}
    return dict(known.get(variant, {"variant": variant}))


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """How an agent is started; None is its own default. memory, cache_size: as people write them, such as 400MiB."""

    device: str
    threads: int | None = None
    memory: str | None = None
    cache: Path | None = None
    cache_size: str | None = None
    mesh_host: str | None = None
    mesh_port: int | None = None
    mesh_tls: Path | None = None
    mesh: bool = True
    retry: bool = True

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add the options to a parser."""
        _add(parser, _AGENT)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> AgentOptions:
        """Return what the arguments of `add` say."""
        return cls(**{**_read(args, _AGENT), "device": args.device or host_name()})

    def to_argv(self) -> list[str]:
        """Return the arguments that say the same."""
        return _write(self, _AGENT)


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """How a planner is started. models: directory by name; pins: of all of them."""

    models: Mapping[str, str | Path]
    pins: PinOptions = field(default_factory=PinOptions)
    in_flight: int = IN_FLIGHT
    batch: int = BATCH
    batch_delay_ms: float = 0.0
    broker_mbit: float | None = None
    request_pins: RequestPins = "any"

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add the options to a parser."""
        _add(parser, (_MODEL, *_PLANNER, *_PINS))

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> PlannerOptions:
        """Return what the arguments of `add` say; raises ConfigError for a model that is named twice."""
        models: dict[str, str | Path] = {}
        for name, directory in getattr(args, _MODEL.name):
            if check_name("model", name) in models:
                raise ConfigError(f"--model {name} is given twice")
            models[name] = directory
        return cls(models, PinOptions.from_args(args), **_read(args, _PLANNER))

    def to_argv(self) -> list[str]:
        """Return the arguments that say the same."""
        models = [word for entry in self.models.items() for word in _MODEL.to_argv("=".join(map(str, entry)))]
        return [*models, *_write(self, _PLANNER), *self.pins.to_argv()]
