"""Who is asked for a cell: Hepti's site through its driver, or the outside baselines on the same hosts."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

from hepti_mqtt.bench.contenders import AUTO, CONTENDERS
from hepti_mqtt.bench.experiment import FREE, Cell, Experiment
from hepti_mqtt.bench.outside import Outside
from hepti_mqtt.lab.lab import Lab
from hepti_mqtt.lab.site import LabSite
from hepti_mqtt.lab.spec import LabSpec

ANSWER_S: Final = 900.0  # a turn with a swap of plans and a slow host
# After a turn of a baseline: agents' probes found their hosts busy, and from those the planner knows of links.
SETTLE_S: Final = 2.5


class Source(Protocol):
    """Who can be asked for the cells of a group, one after the other."""

    def begin(self, cell: Cell, body: Mapping[str, Any], reference: Path) -> None:
        """Take the request of a cell's group, and the hidden states (.npy) that it must give."""
        ...

    def measure(self, cell: Cell, describe: bool) -> dict[str, Any]:
        """Return what a turn's record has; describe: with what a time line is drawn from."""
        ...


class Site:
    """Hepti's own strategies and choice, asked by a driver on the hub's host."""

    def __init__(self, experiment: Experiment, lab: Lab, site: LabSite) -> None:
        self._experiment, self._lab, self._site = experiment, lab, site
        self._driver = site.talk("driver", ["-m", "hepti_mqtt.bench.driver"])

    def begin(self, cell: Cell, body: Mapping[str, Any], reference: Path) -> None:
        """Give the driver a group's request and reference."""
        load = {"do": "load", "key": _key(cell), "model": cell.model, "body": body}
        self._ask({**load, "reference": self._lab.hub.provide(reference)})

    def measure(self, cell: Cell, describe: bool) -> dict[str, Any]:
        """Return what the driver says of a turn."""
        # Weights are loaded at full speed: an experiment of large models would wait for little else.
        self._site.throttle(False)
        turn = self._ask(order(cell, self._lab.spec, do="bring"))
        self._site.throttle(True)
        e = self._experiment
        fields = {"warmup": e.warmup, "repetitions": e.repetitions, "describe": describe, "requests": cell.requests}
        if turn["ok"] and e.settle and cell.strategy == AUTO:
            turn |= self._ask(order(cell, self._lab.spec, do="settle", most_s=e.settle))
        if turn["ok"]:
            turn |= self._ask(order(cell, self._lab.spec, do="measure", **fields))
        return turn

    def once(self, cell: Cell) -> dict[str, Any]:
        """Return what the driver says of one request."""
        return self._ask(order(cell, self._lab.spec, do="once"))

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        self._driver.send(json.dumps(question))
        answer: dict[str, Any] = json.loads(self._driver.receive(ANSWER_S))
        return answer


class Baselines:
    """The outside baselines, which the agents of the site stand still for.

    memory: of every host that has a limit, for what a baseline holds; see `with_room`.
    """

    def __init__(
        self,
        experiment: Experiment,
        lab: Lab,
        models: Mapping[str, Path],
        memory: Mapping[str, int | None],
        outside: Outside,
    ) -> None:
        self._experiment, self._lab, self._models, self._outside = experiment, lab, models, outside
        self._memory = memory
        self._request: tuple[Mapping[str, Any], Path]

    def begin(self, cell: Cell, body: Mapping[str, Any], reference: Path) -> None:
        """Keep a group's request and reference for its turns."""
        del cell  # its model is named in every turn
        self._request = body, reference

    def measure(self, cell: Cell, describe: bool) -> dict[str, Any]:
        """Return what a turn's record has."""
        del describe  # there is no plan
        hosts = [self._lab.host(name) for name in cell.devices]
        e, model = self._experiment, self._models[cell.model]
        turn = self._outside.turn(cell.strategy, hosts, model, *self._request, e.warmup, e.repetitions)
        time.sleep(SETTLE_S)
        for name, held in zip(cell.devices, turn.get("rss_bytes", ()), strict=False):
            limit = self._memory[name]
            if limit is not None and held > limit:
                message = f"{cell.strategy} holds {held / 1e9:.2f} GB on {name}, which has {limit / 1e9:.2f}"
                return {"ok": False, "unix_s": turn["unix_s"], "code": "memory", "message": message}
        return turn


def with_room(spec: LabSpec) -> LabSpec:
    """Return a lab whose limits of memory hold an agent and a baseline, each with as much as the lab file says.

    Agents keep weights while they stand still, as much as their budget allows.
    """
    hosts = (h if h.memory_bytes is None else replace(h, memory_bytes=2 * h.memory_bytes) for h in spec.hosts)
    return replace(spec, hosts=tuple(hosts))


def order(cell: Cell, spec: LabSpec, **fields: Any) -> dict[str, Any]:
    """Return what the driver is told; the planner's own choice among all hosts pins no devices."""
    contender = CONTENDERS[cell.strategy]
    free = cell.strategy == AUTO and len(cell.devices) == len(spec.hosts)
    return {
        "key": _key(cell),
        "strategy": contender.strategy or cell.strategy,
        "options": dict(contender.options or {}),
        "devices": None if free else list(cell.devices),
        "wire": cell.wire,
        "weights": cell.weights,
        "route": None if cell.route == FREE else cell.route,
        "objective": cell.objective,
        **fields,
    }


def _key(cell: Cell) -> str:
    return f"{cell.model}-{cell.tokens or 'picture'}"
