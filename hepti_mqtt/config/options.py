"""Options shared by commands, and argument types for argparse, which raise ArgumentTypeError."""

from __future__ import annotations

import argparse
import math
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, get_args

from hepti_mqtt.config.settings import Settings, parse_size
from hepti_mqtt.core.errors import ConfigError
from hepti_mqtt.core.ids import check_name
from hepti_mqtt.core.plan import CacheDtype, Objective, Quantised, Route, WeightDtype, WireDtype

if TYPE_CHECKING:
    from hepti_mqtt.runtime.coordinator.requests import Pins


HOME_ASSISTANT: Final = "homeassistant"
NO_ANNOUNCE_HELP: Final = "do not announce the site by mDNS, which is done with the extra `discovery`"
METRICS_HELP: Final = "serve numbers for Prometheus there (needs the extra `metrics`; default: nowhere)"


def size_text(text: str) -> str:
    """Return a text that `parse_size` accepts."""
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


def discovery_prefix(text: str) -> str | None:
    """Return a topic prefix of Home Assistant's discovery, None for off."""
    if not text or set(text) & set("+#\0") or text.startswith("/") or text.endswith("/"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a topic; Home Assistant's own is {HOME_ASSISTANT}")
    return None if text == "off" else text


def metrics_address(text: str) -> tuple[str, int]:
    """Return (host, port) from HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not host:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, such as 127.0.0.1:9301")
    return host.removeprefix("[").removesuffix("]"), tcp_port(port)


def index_range(text: str) -> range:
    """Return the range of N or A:B (half-open)."""
    begin, sep, end = text.partition(":")
    first, stop = _whole(begin), _whole(end)
    if first is None or (sep and stop is None):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor a range A:B")
    numbers = range(first, first + 1 if stop is None else stop)
    if not numbers:
        raise argparse.ArgumentTypeError(f"the range {text!r} is empty")
    return numbers


def _whole_in(low: int, high: float, what: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number = _whole(text)
        if number is None or not low <= number <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return number

    return parse


def _number_where(valid: Callable[[float], bool], what: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not valid(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return parse


def _whole(text: str) -> int | None:
    """Return the number of at most 19 digits, None for other texts."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None


positive_int = _whole_in(1, math.inf, "a whole number above zero")
non_negative_int = _whole_in(0, math.inf, "a whole number from zero")
tcp_port = _whole_in(1, 65535, "a port from 1 to 65535")
positive_seconds = _number_where(lambda value: 0 < value < math.inf, "a number of seconds above zero")
positive_number = _number_where(lambda value: 0 < value < math.inf, "a number above zero")
positive_mbit = _number_where(lambda value: 0 < value < math.inf, "a number of Mbit/s above zero")
delay_ms = _number_where(lambda value: 0 <= value <= 60_000, "a number of milliseconds from 0 to 60000")
error_fraction = _number_where(lambda value: 0 < value <= 1, "a part of the answer, such as 1e-3")


# ----------------------------------------------------------------------------------------------------------------------
# Options of agents, planners and sites.


RequestPins = Literal["any", "none"]
REQUEST_PINS: Final[tuple[RequestPins, ...]] = get_args(RequestPins)
FrameTags = Literal["header", "whole"]
IN_FLIGHT: Final = 2  # default of --in-flight
BATCH: Final = 16  # default of --batch
# Default of --max-weight-error. The real MiniLM moves by 0.03 under w8a32 and by 0.05 under w8a8; a checkpoint with a
# few large columns by 0.5.
MAX_WEIGHT_ERROR: Final = 0.15
_KEPT: Final[Mapping[str, WeightDtype]] = {dtype: dtype for dtype in get_args(WeightDtype)}
_QUANTISED: Final[Mapping[str, Quantised]] = {how: how for how in get_args(Quantised)}


def host_name() -> str:
    """Return this host's name without its domain, the default id of a device."""
    return socket.gethostname().partition(".")[0].lower()


def add_site_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of all commands: broker and site."""
    broker = "mqtt[s]:// or ws[s]://host:port, or a login file as `hepti site` writes it (default: HEPTI_BROKER)"
    parser.add_argument("--broker", metavar="URL|FILE", help=broker)
    parser.add_argument("--site", help="name of the site (default: HEPTI_SITE, else home)")


def settings_from_args(args: argparse.Namespace) -> Settings:
    """Return broker and site from arguments, else from the environment."""
    return Settings.from_environment(args.broker, args.site)


def add_pin_arguments(parser: argparse.ArgumentParser, opens: bool = False) -> None:
    """Add the options that pin parts of a plan; opens: whether the command opens models and may quantise weights."""
    add = parser.add_argument_group("parts of the plan to fix").add_argument
    variants = "kv of row, ring of megatron, 2 of grid, groups=2 of replicas, ..."
    add("--strategy", metavar="NAME", help="pin the strategy (auto: let the planner choose)")
    add("--variant", metavar="NAME", help=f"pin the strategy's variant: {variants}")
    add("--devices", type=comma_separated, metavar="A,B,C", help="pin the devices")
    add("--wire", choices=get_args(WireDtype), help="pin the dtype of exchanged activations")
    accuracy = "let the planner choose that dtype: the largest relative error of an answer, e.g. 1e-3"
    add("--accuracy", type=error_fraction, metavar="ERROR", help=accuracy)
    kept = "pin the dtype of the layers' weight matrices"
    kept += "; q8, q4: quantise a decoder's matrices when it is opened" if opens else ""
    if opens:
        cached = "how decoders keep keys and values (default f32; f16 takes half the memory, and near ties may change)"
        add("--kv-cache", choices=get_args(CacheDtype), default="f32", help=cached)
    add("--weights", choices=(*get_args(WeightDtype), *(get_args(Quantised) if opens else ())), help=kept)
    route = "pin the route of tensors between devices: broker or mesh"
    add("--route", choices=(*get_args(Route), "auto"), help=route)
    objective = "least latency of one request (default), most throughput, least memory"
    add("--objective", choices=get_args(Objective), help=objective)


def add_agent_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for `device_agent.AgentConfig.from_args`."""
    add = parser.add_argument
    add("--id", dest="device", metavar="NAME", help="name of this device in topics (default: its host's)")
    add("--threads", type=positive_int, help="threads that compute (default: all cores)")
    memory = "budget for weights and activations (default: 80 %% of free)"
    add("--memory", type=size_text, metavar="SIZE", help=memory)
    add("--cache", type=Path, metavar="DIR", help="where tiles of weights are kept")
    limit = "limit of the tile cache, beside which saved KV caches take an eighth of it; 0 for none (default: 4GiB)"
    add("--cache-size", type=size_text, metavar="SIZE", help=limit)
    host = "where peers reach this device directly (default: its own address on the way to the broker)"
    add("--mesh-host", metavar="ADDRESS", help=host)
    add("--mesh-port", type=tcp_port, help="the port there (default: a free one)")
    certificate = "this device's own certificate and key (PEM), for peers by TLS"
    add("--mesh-tls", type=Path, metavar="FILE", help=certificate)
    add("--no-mesh", dest="mesh", action="store_false", help="send all tensors through the broker")
    add("--no-retry", dest="retry", action="store_false", help="exit if the broker cannot be reached")
    add("--metrics", type=metrics_address, metavar="HOST:PORT", help=METRICS_HELP)


@dataclass(frozen=True, slots=True)
class PinOptions:
    """Parts of a plan that a user pinned; None leaves the choice to the planner."""

    strategy: str | None = None
    variant: str | None = None
    devices: tuple[str, ...] | None = None
    wire: WireDtype | None = None
    weights: WeightDtype | Quantised | None = None  #: dtype of the layers' matrices
    route: Route | Literal["auto"] | None = None
    objective: Objective | None = None
    accuracy: float | None = None
    kv_cache: CacheDtype = "f32"

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> PinOptions:
        """Return the arguments of `add_pin_arguments`."""
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})

    @property
    def quantised(self) -> Quantised | None:
        """Return the quantisation of weights when a model is opened, None for none."""
        return _QUANTISED.get(self.weights or "")

    def to_pins(self) -> Pins:
        """Return the planner's pins. Raises ConfigError for contradicting options."""
        from hepti_mqtt.runtime.coordinator.requests import Pins

        if self.wire is not None and self.accuracy is not None:
            raise ConfigError(f"--wire {self.wire} leaves nothing for --accuracy to choose; give one of the two")
        route = None if self.route == "auto" else self.route
        kept = _KEPT.get(self.weights or "f32", "f32")
        strategy = None if self.strategy == "auto" else self.strategy
        options, objective = variant_options(strategy, self.variant), self.objective or "latency"
        return Pins(strategy, options, self.devices, self.wire or "f32", kept, route, objective, self.accuracy)


def variant_options(strategy: str | None, variant: str | None) -> dict[str, str]:
    """Return the options of a strategy's variant, given by name or as OPTION=VALUE.

    An unknown variant becomes an option that the planner refuses by name.
    """
    from hepti_mqtt.strategies import STRATEGIES  # slow to import

    if not variant:
        return {}
    name, equals, value = variant.partition("=")
    if equals:
        return {name: value}
    variants = STRATEGIES[strategy].all_variants() if strategy is not None and strategy in STRATEGIES else {}
    return dict(variants.get(variant, {"variant": variant}))


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """Options of a planner."""

    models: Mapping[str, str | Path]  #: directory by name
    pins: PinOptions = field(default_factory=PinOptions)  #: of all models
    in_flight: int = IN_FLIGHT
    batch: int = BATCH
    batch_delay_ms: float = 0.0
    broker_mbit: float | None = None
    request_pins: RequestPins = "any"
    frame_tags: FrameTags = "header"
    max_weight_error: float = MAX_WEIGHT_ERROR
    home_assistant: str | None = HOME_ASSISTANT
    metrics: tuple[str, int] | None = None
    shared: str | None = None

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add the options to a parser."""
        add = parser.add_argument
        serve = "serve a model; repeat it for more"
        add(
            "--model",
            dest="models",
            type=named_directory,
            action="append",
            required=True,
            metavar="NAME=DIR",
            help=serve,
        )
        pins = "whether requests may pin strategy, devices, wire or weights (default any)"
        add("--request-pins", choices=REQUEST_PINS, default="any", help=pins)
        tags = "what the tags of frames cover: the header, or the whole frame, which costs time (default header)"
        add("--frame-tags", choices=get_args(FrameTags), default="header", help=tags)
        moved = f"refuse narrow weights that move an answer by more than this part of it (default {MAX_WEIGHT_ERROR})"
        add("--max-weight-error", type=error_fraction, default=MAX_WEIGHT_ERROR, metavar="ERROR", help=moved)
        runs = f"runs at once per model (default {IN_FLIGHT})"
        add("--in-flight", type=positive_int, default=IN_FLIGHT, help=runs)
        together = f"waiting requests run together, at most N of them (default {BATCH}; 1: each by itself)"
        add("--batch", type=positive_int, default=BATCH, metavar="N", help=together)
        delay = "milliseconds that a request waits for others to join its run (default 0)"
        add("--batch-delay", dest="batch_delay_ms", type=delay_ms, default=0.0, metavar="MS", help=delay)
        rate = (
            "rate of the broker's own link, which carries a copy for each receiver (default: as the fastest device's)"
        )
        add("--broker-mbit", type=positive_mbit, metavar="MBIT", help=rate)
        home = f"prefix of Home Assistant's MQTT discovery (default {HOME_ASSISTANT}; off: announce nothing)"
        add("--home-assistant", type=discovery_prefix, default=HOME_ASSISTANT, metavar="PREFIX", help=home)
        add("--metrics", type=metrics_address, metavar="HOST:PORT", help=METRICS_HELP)
        share = "answer a share of the requests to this site too, beside other planners with the same option (MQTT 5)"
        add("--shared", metavar="SITE", help=share)
        add("--no-announce", dest="announce", action="store_false", help=NO_ANNOUNCE_HELP)
        add_pin_arguments(parser, opens=True)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> PlannerOptions:
        """Return the options of arguments. Raises ConfigError for a repeated model name."""
        models: dict[str, str | Path] = {}
        for name, directory in args.models:
            if check_name("model", name) in models:
                raise ConfigError(f"--model {name} is given twice")
            models[name] = directory
        values = {option.name: getattr(args, option.name) for option in fields(cls) if option.name != "pins"}
        shared = None if args.shared is None else check_name("site", args.shared)
        return cls(**{**values, "models": models, "shared": shared}, pins=PinOptions.from_args(args))
