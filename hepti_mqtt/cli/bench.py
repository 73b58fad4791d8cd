"""`hepti bench`: the time of each method on your own devices, measured through the broker."""

from __future__ import annotations

import argparse
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from hepti_mqtt.cli import output
from hepti_mqtt.config.options import non_negative_int, positive_int, positive_seconds
from hepti_mqtt.config.settings import nearest
from hepti_mqtt.core.errors import ConfigError, HeptiError, RemoteError

if TYPE_CHECKING:
    from hepti_mqtt.client import Hepti
    from hepti_mqtt.core.spec import Spec

AUTO: Final = "auto"
ALONE: Final = "single"
# |error| / |reference| (Euclidean norms of all final hidden states) up to which an answer counts as right, by wire.
BOUNDS: Final[Mapping[str, float]] = {"f32": 1e-4, "f16": 1e-2, "i8": 0.2}


def arguments(sub: argparse.ArgumentParser) -> None:
    """Add the arguments of `hepti bench`."""
    sub.add_argument("model", nargs="?", help="name of the model, as the planner serves it (default: the only one)")
    methods = "such as auto,single,row/kv (default: the planner's choice, and each method that it may choose)"
    sub.add_argument("--methods", type=_words, metavar="NAME,..", help=methods)
    sub.add_argument("--lengths", type=_lengths, default=(128,), metavar="N,..", help="tokens of a text (default 128)")
    sub.add_argument("--wire", choices=tuple(BOUNDS), default="f32", help="how tensors travel (default f32)")
    sub.add_argument("--rounds", type=positive_int, default=5, help="turns of each method (default 5)")
    sub.add_argument("--repeat", type=positive_int, default=3, help="timed requests in a turn (default 3)")
    sub.add_argument("--seed", type=non_negative_int, default=0, help="seed of the inputs and the order (default 0)")
    timeout = "seconds to wait for an answer (default 300)"
    sub.add_argument("--timeout", type=positive_seconds, default=300.0, help=timeout)
    sub.add_argument("--plot", type=Path, metavar="FILE", help="also draw the times (needs matplotlib)")


def _words(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(map(positive_int, _words(text)))


@dataclass
class Cell:
    """One method with inputs of one length; times in ms, by round.

    pins: what a request asks for. error: of the hidden states, relative to one device's; None before it is checked.
    failed: why there are no times.
    """

    method: str
    tokens: int
    pins: Mapping[str, Any]
    times: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    plan: Mapping[str, Any] | None = None
    predicted_ms: float | None = None
    bytes_on_wire: int | None = None
    error: float | None = None
    failed: str = ""

    @property
    def rounds(self) -> dict[int, float]:
        """Return the median of each round."""
        return {number: statistics.median(times) for number, times in self.times.items()}

    @property
    def ms(self) -> float:
        """Return the median of the rounds."""
        return statistics.median(self.rounds.values())

    def speed_up(self, alone: Cell | None) -> float | None:
        """Return the median ratio to one device within rounds: slow drift of the machines is in both."""
        if alone is None:
            return None
        shared = self.rounds.keys() & alone.rounds.keys()
        return statistics.median(alone.rounds[n] / self.rounds[n] for n in shared) if shared else None

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        figures = {"method": self.method, "tokens": self.tokens, "rounds_ms": list(self.rounds.values())}
        figures |= {"plan": self.plan, "predicted_ms": self.predicted_ms, "bytes_on_wire": self.bytes_on_wire}
        return {**figures, "error": self.error, "median_ms": self.ms if self.times else None, "failed": self.failed}


def bench(args: argparse.Namespace) -> int:
    """Check every method's answer, time all in turns, and print one table."""
    from hepti_mqtt.cli.shared import PLANNER_S, check_readable, only_model, require_broker
    from hepti_mqtt.client import Hepti
    from hepti_mqtt.models import spec_from_dict
    from hepti_mqtt.strategies import STRATEGIES

    for name in args.methods or ():
        if (method := name.partition("/")[0]) not in (methods := [AUTO, *STRATEGIES]):
            raise ConfigError(f"--methods: there is no method {method!r}{nearest(method, methods)}")
    with Hepti.connect(require_broker(args), site=args.site) as hepti:
        model = args.model or only_model(hepti)
        with check_readable("the model"):
            spec = spec_from_dict((record := hepti.wait_ready(model, args.timeout, patience_s=PLANNER_S))["spec"])
        devices = sorted(d["device"] for d in hepti.devices() if d["status"] == "online")
        cells = cells_of(spec, devices, args.methods, args.lengths, args.wire)
        measure(hepti, model, spec, cells, args, lambda line: output.err.print(line, markup=False))
    drawn = None if args.plot is None else _plot(cells, model, args.plot)
    if args.json:
        output.print_json({"ok": True, "model": model, "devices": devices, "cells": [c.to_dict() for c in cells]})
        return 0
    report(cells, model, devices, record)
    if drawn is not None:
        output.print_lines([drawn])
    return 0


def cells_of(
    spec: Spec, devices: Sequence[str], methods: Sequence[str] | None, lengths: Sequence[int], wire: str
) -> list[Cell]:
    """Return the cells to measure; raises ConfigError if a method is unknown or cannot divide the model."""
    from hepti_mqtt.models import graph, largest_shape
    from hepti_mqtt.models.shapes import ImageInput
    from hepti_mqtt.strategies import STRATEGIES

    pins: dict[str, Mapping[str, Any]] = {AUTO: {}, ALONE: {"strategy": ALONE}}
    usual = [AUTO, ALONE]
    whole = graph(spec, largest_shape(spec))
    for s in STRATEGIES.values():
        if s.max_devices == 1 or len(devices) < 2 or s.why_unsupported(whole) is not None:
            continue
        for options in s.variants_for(len(devices), whole):
            name = "/".join([s.name, *options.values()])
            pins[name] = {"strategy": s.name, "options": dict(options), "devices": list(devices)}
            usual += [name] if s.automatic and len(options) < 2 else []
    chosen = list(methods or usual)
    if unknown := [name for name in chosen if name not in pins]:
        raise ConfigError(
            f"{unknown[0]} is no method for this model on {len(devices)} devices; there are {', '.join(pins)}"
        )
    if ALONE not in chosen:
        chosen.append(ALONE)  # what answers are checked against
    sizes = [largest_shape(spec).size] if isinstance(spec.input_spec, ImageInput) else lengths
    return [Cell(name, tokens, {**pins[name], "wire": wire}) for tokens in sizes for name in chosen]


def measure(
    hepti: Hepti, model: str, spec: Spec, cells: Sequence[Cell], args: argparse.Namespace, say: Callable[[str], None]
) -> None:
    """Check each cell once against one device, then time all in turns; what fails has its reason instead of times.

    args: rounds, repeat, seed, timeout, wire.
    """
    from hepti_mqtt.client.described import random_input
    from hepti_mqtt.models.shapes import ImageInput

    of_pictures = isinstance(spec.input_spec, ImageInput)
    for tokens in dict.fromkeys(cell.tokens for cell in cells):
        own = sorted((cell for cell in cells if cell.tokens == tokens), key=lambda cell: cell.method != ALONE)
        body = random_input(spec, 1 if of_pictures else tokens, args.seed, photographs=True)
        expected = None
        for cell in own:
            say(f"checking {cell.method}, {tokens} tokens")
            try:
                hidden = hepti.infer(model, **body, **cell.pins, want="hidden", timeout_s=args.timeout).hidden
                expected = hidden if expected is None else expected  # one device's, or the first that answers
                cell.error = relative_error(hidden, expected)
                if not cell.error <= BOUNDS[args.wire]:
                    raise RemoteError(f"the answer is off by {cell.error:.1e} of its norm: it is not timed")
            except HeptiError as error:
                cell.failed = str(error).splitlines()[0]
        for number in range(args.rounds):
            say(f"round {number + 1} of {args.rounds}, {tokens} tokens")
            good = [cell for cell in own if not cell.failed]
            for cell in random.Random(f"{args.seed}/{number}").sample(good, len(good)):
                try:
                    _turn(hepti, model, body, cell, number, args)
                except HeptiError as error:
                    cell.failed = str(error).splitlines()[0]


def _turn(hepti: Hepti, model: str, body: Mapping[str, Any], cell: Cell, number: int, args: argparse.Namespace) -> None:
    """Bring the plan up, warm it up with a request, and time others from publish to answer."""
    request = {**body, **cell.pins, "timeout_s": args.timeout}
    hepti.infer(model, **request, want="plan")
    hepti.infer(model, **request)
    answers = [hepti.infer(model, **request, report=True) for _ in range(args.repeat)]
    cell.times[number] += [answer.latency_ms for answer in answers]
    last = hepti.foretold(answers[-1], **request).raw
    cell.plan, cell.predicted_ms, cell.bytes_on_wire = last["plan"], last["predicted_ms"], last["bytes_on_wire"]


def relative_error(hidden: Any, expected: Any) -> float:
    """Return |hidden - expected| / |expected| by Euclidean norms; inf where shapes differ or a value is not finite."""
    import numpy as np

    if hidden.shape != expected.shape or not np.isfinite(hidden).all():
        return float("inf")
    scale = float(np.linalg.norm(expected.astype(np.float64)))
    return float(np.linalg.norm(hidden.astype(np.float64) - expected)) / max(scale, 1e-30)


def report(
    cells: Sequence[Cell], model: str, devices: Sequence[str], record: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Print the table, and the fastest method of each length. record: of the model's plans."""
    rows: list[tuple[Any, ...]] = []
    lines: list[str] = []
    for tokens in dict.fromkeys(cell.tokens for cell in cells):
        own = [cell for cell in cells if cell.tokens == tokens]
        alone = next((cell for cell in own if cell.method == ALONE and cell.times), None)
        for cell in sorted(own, key=lambda cell: cell.ms if cell.times else float("inf")):
            if not cell.times:
                rows.append((tokens, cell.method, *["-"] * 7, cell.failed))
                continue
            low, high, gain = min(cell.rounds.values()), max(cell.rounds.values()), cell.speed_up(alone)
            times = (f"{cell.ms:.1f}", f"{low:.1f} to {high:.1f}", "-" if gain is None else f"{gain:.2f}")
            of = (cell.plan or {}).get("devices", ())
            predicted = "-" if cell.predicted_ms is None else output.predicted(record, of, cell.predicted_ms)
            figures = (predicted, output.size(cell.bytes_on_wire or 0), f"{cell.error:.0e}", _plan_words(cell))
            rows.append((tokens, cell.method, *times, *figures, cell.failed))
        if timed := [cell for cell in own if cell.times]:
            best = min(timed, key=lambda cell: cell.ms)
            gain = best.speed_up(alone)
            gains = f", speed-up {gain:.2f} over one device" if gain is not None and best is not alone else ""
            lines.append(f"Fastest with {tokens} tokens: {best.method} ({_plan_words(best)}), {best.ms:.1f} ms{gains}.")
    names = ["tokens", "method", "median ms", "rounds", "speed-up", "predicted ms", "sent", "error", "plan", "failure"]
    if not any(row[-1] for row in rows):
        names, rows = names[:-1], [row[:-1] for row in rows]
    output.print_table(f"{model} on {', '.join(devices)}", names, rows)
    output.print_lines(lines or ["No method gave an answer that could be timed."])


def _plan_words(cell: Cell) -> str:
    plan = cell.plan or {"strategy": cell.method, "options": {}, "devices": ()}
    return f"{'/'.join([plan['strategy'], *plan['options'].values()])} on {', '.join(plan['devices'])}"


def _plot(cells: Sequence[Cell], model: str, file: Path) -> str:
    """Draw the median times with the span of the rounds, a panel for each length; return what to say of it."""
    timed = [cell for cell in cells if cell.times]
    if find_spec("matplotlib") is None or not timed:
        return "No picture: " + ("nothing was timed." if not timed else "install matplotlib (pip install matplotlib).")
    from matplotlib.figure import Figure

    lengths = list(dict.fromkeys(cell.tokens for cell in timed))
    figure = Figure(figsize=(6.4 * len(lengths), 1.5 + 0.3 * len(timed) / len(lengths)), layout="constrained")
    for place, tokens in enumerate(lengths, 1):
        own = sorted((cell for cell in timed if cell.tokens == tokens), key=lambda cell: -cell.ms)
        axis = figure.add_subplot(1, len(lengths), place)
        spans = [(cell.ms - min(cell.rounds.values()), max(cell.rounds.values()) - cell.ms) for cell in own]
        axis.barh([cell.method for cell in own], [cell.ms for cell in own], xerr=list(zip(*spans, strict=True)))
        axis.set(title=f"{model}, {tokens} tokens", xlabel="ms (median of the rounds, and their span)")
    figure.savefig(file)
    return f"wrote {file}"
