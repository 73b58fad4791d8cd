"""`hepti bench transport --lab`: an all-gather between the hosts of a lab, the mesh beside raw TCP."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hepti_mqtt.bench import transport
from hepti_mqtt.bench.transport import KB, Options
from hepti_mqtt.bench.transport_crew import ENVIRONMENT, MODULE, Crew, Record
from hepti_mqtt.config import settings
from hepti_mqtt.lab.calibrate import calibrate
from hepti_mqtt.lab.calibrate import markdown as calibration_table
from hepti_mqtt.lab.changes import Change
from hepti_mqtt.lab.lab import Lab
from hepti_mqtt.lab.spec import HUB, LabSpec, load

SIZES: Final = (128 * KB, 512 * KB)
WAYS: Final = ("raw TCP", "mesh")
REPEAT: Final = 8


@dataclass(frozen=True, slots=True)
class InLab:
    """lab: whose hosts exchange. rates: of their links in Mbit/s; none: as the lab's file has it, also for boards.

    calibrations: a directory of earlier ones, None for one of its own. say: hears what a person wants to know.
    """

    lab: LabSpec
    rates: tuple[float, ...]
    calibrations: Path | None
    say: Callable[[str], None]


def place(
    file: Path, dilation: float | None, rates: Iterable[float], calibrations: Path | None, say: Callable[[str], None]
) -> InLab:
    """Return the lab of a file, or one of ours by name; raises ConfigError for what it cannot have."""
    spec = load(settings.find_bundled_config("lab", file), dilation)
    for rate in rates:
        spec.with_rate(rate)
    return InLab(spec, tuple(rates), calibrations, say)


def options(out: Path, command: str, *, quick: bool) -> Options:
    """Return what is measured in a lab."""
    rounds = 3 if quick else 9
    return Options(out, SIZES, ("all-gather",), WAYS, rounds=rounds, repeat=REPEAT, command=command)


def run(options: Options, place: InLab) -> dict[str, Any]:
    """Measure at every rate, throttled; write JSON and a report and return what the JSON holds; raises HeptiError."""
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(place.lab, options.out.resolve() / "logs"))
        hosts = list(lab.hosts.values())
        ranks = [host.talk("transport", [host.python, "-m", MODULE], ENVIRONMENT) for host in hosts]
        crew = Crew(ranks, [host.address for host in hosts], options.ways, max(options.sizes))
        kept = place.calibrations or options.out / "calibration"
        tables: list[str] = []
        records = list(_at_every_rate(lab, crew, options, place, kept, tables))
    return transport.write(options, records, {"lab": place.lab.name, "hosts": len(hosts), "calibrations": tables})


def _at_every_rate(
    lab: Lab, crew: Crew, options: Options, place: InLab, kept: Path, tables: list[str]
) -> Iterator[Record]:
    for rate in place.rates or (None,):
        spec = place.lab if rate is None else place.lab.with_rate(rate)
        if rate is not None:
            for name in (HUB, *lab.hosts):
                lab.apply(Change(0.0, "rate", name, mbit=rate))
        figures = calibrate(spec, lab.hub, lab.hosts, kept, place.say)
        tables.append(calibration_table(figures))
        for miss in figures.misses():
            place.say(f"warning: {miss}")
        for host in lab.hosts.values():
            host.throttle(True)
        for record in transport.measure(crew, options):
            yield record._replace(rate=spec.rate_mbit)
        for host in lab.hosts.values():
            host.throttle(False)
