"""The experiment kind `chain`: what its file says, and the cases that it stands for under each condition."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from hepti_mqtt.bench.chain import PRIMARY, SECONDARY, Case
from hepti_mqtt.bench.chain_pair import cases
from hepti_mqtt.bench.chain_results import Condition
from hepti_mqtt.bench.experiment import lab_of
from hepti_mqtt.bench.values import listed, number, whole
from hepti_mqtt.errors import ConfigError
from hepti_mqtt.lab.spec import LabSpec

KIND: Final = "chain"
_KEYS: Final = ("name", "kind", "lab", "rates", "cpu", "rows", "shares", "chunks", "rounds", "seed", "dilation")


@dataclass(frozen=True, slots=True)
class ChainExperiment:
    """A file of kind `chain`.

    rates: Mbit/s, empty: links as they are. cpu: percents of the secondary's speed. rows: values of m. shares: percents
    of the rows on the secondary. chunks: pieces of the overlapped run.
    """

    name: str
    lab: LabSpec
    rates: tuple[float, ...]
    cpu: tuple[int, ...]
    rows: tuple[int, ...]
    shares: tuple[int, ...]
    chunks: int
    rounds: int
    seed: int
    source: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """Return a hash of what is measured: the file and its lab."""
        content = json.dumps([self.source, asdict(self.lab)], sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """Return every condition, the first named first."""
        rates = self.rates or (self.lab.rate_mbit,)
        return tuple(Condition(None if rate is None else round(rate), cpu) for rate in rates for cpu in self.cpu)

    @property
    def wanted(self) -> tuple[Case, ...]:
        """Return the cases of one round under one condition."""
        return cases(self.rows, self.shares, self.chunks)

    def spec(self, condition: Condition) -> LabSpec:
        """Return the lab under a condition: its rate, and the secondary's target in GFLOP/s."""
        spec = self.lab if condition.rate_mbit is None else self.lab.with_rate(condition.rate_mbit)
        hosts = tuple(
            replace(host, gflops=host.gflops * condition.cpu_percent / 100)
            if host.name == SECONDARY and host.gflops is not None
            else host
            for host in spec.hosts
        )
        return replace(spec, hosts=hosts)


def parse(data: Mapping[str, Any], base: Path) -> ChainExperiment:
    """Return the experiment of a mapping; `base`: where its paths begin. Raises ConfigError that names the key."""
    for key in data:
        if key not in _KEYS:
            raise ConfigError(f"unknown key {key!r} in an experiment of kind {KIND}; known are {', '.join(_KEYS)}")
    for key in ("name", "lab", "rows", "shares"):
        if key not in data:
            raise ConfigError(f"an experiment of kind {KIND} needs `{key}:`")
    lab = lab_of(data["lab"], base, data.get("dilation"))
    for name in (PRIMARY, SECONDARY):
        lab.host(name)
    made = ChainExperiment(
        name=str(data["name"]),
        lab=lab,
        rates=tuple(number("rates", rate) for rate in listed("rates", data.get("rates", []))),
        cpu=_several("cpu", data.get("cpu", [100]), 1, 100),
        rows=_several("rows", data["rows"], 1, 1 << 16),
        shares=_several("shares", data["shares"], 1, 100),
        chunks=whole("chunks", data.get("chunks", 1), 1),
        rounds=whole("rounds", data.get("rounds", 5), 1),
        seed=whole("seed", data.get("seed", 0), 0),
        source=dict(data),
    )
    if made.cpu != (100,) and (lab.kind != "emulated" or lab.host(SECONDARY).gflops is None):
        raise ConfigError(f"`cpu` needs an emulated lab whose host {SECONDARY} has `gflops:` to take a part of")
    for condition in made.conditions:
        made.spec(condition)
    return made


def _several(key: str, value: Any, least: int, most: int) -> tuple[int, ...]:
    found: Sequence[int] = [whole(key, each, least) for each in listed(key, value)]
    if not found or max(found) > most or len(set(found)) < len(found):
        raise ConfigError(f"`{key}` is {value!r}; it needs different whole numbers from {least} to {most}")
    return tuple(found)
