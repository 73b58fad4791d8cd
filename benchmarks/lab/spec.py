"""What a lab file says: hosts with their speed and memory, and their links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, Final, Literal, cast

from benchmarks.errors import LabError
from hepti_mqtt.config import load_yaml, mapping
from hepti_mqtt.config.settings import parse_size
from hepti_mqtt.core.errors import ConfigError
from hepti_mqtt.core.ids import check_name

Kind = Literal["emulated", "local"]
Yardstick = Literal["numpy", "kernel"]
HUB: Final = "hub"
SWITCH: Final = "switch"
KINDS: Final = ("emulated", "local")
YARDSTICKS: Final = ("numpy", "kernel")
BOUNDS: Final[Mapping[str, tuple[float, float]]] = {
    "rate": (0.1, 40_000.0),  # tbf counts the bucket in 32 bits and packets by the tick
    "gflops": (0.01, 100_000.0),
    "memory": (16 * 2**20, 2**44),
    "threads": (1, 1024),
    "hub_cpu": (0.01, 64.0),
    "dilation": (1.0, 100.0),
}
# Instruction sets that hosts may be held to, and what Hepti's kernels, NumPy and PyTorch must be told.
HELD_TO: Final[Mapping[str, Mapping[str, str]]] = {
    "avx2": {
        "HEPTI_KERNELS_ISA": "avx2",
        "OPENBLAS_CORETYPE": "Haswell",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
    }
}
_MAX_NAME, _MAX_HOSTS = 32, 64
_LAB_KEYS: Final = ("name", "kind", "hosts", "defaults", "rate", "hub_cpu", "calibrate", "dilation", "isa")
_EMULATED_KEYS: Final = ("rate", "hub_cpu", "calibrate", "dilation", "isa")
_HOST_KEYS: Final = {"emulated": ("gflops", "memory", "threads", "rate"), "local": ("threads", "memory")}


@dataclass(frozen=True, slots=True)
class HostSpec:
    """One host as the file wants it.

    gflops: float32 speed on [256, 1024] x [1024, 1024] (None: as fast as it is). memory_bytes: limit of all its
    processes together (None: none). threads: of its agent. rate_mbit: its link's goodput each way instead of the lab's.
    """

    name: str
    gflops: float | None = None
    memory_bytes: int | None = None
    threads: int = 1
    rate_mbit: float | None = None


@dataclass(frozen=True, slots=True)
class LabSpec:
    """A lab: its hosts, and one of its own, the hub, with broker, planner and clients.

    rate_mbit: goodput of every link each way (None: not shaped). hub_cpu: the hub's share of one core. calibrate: whose
    speed `gflops` is, NumPy's or that of Hepti's kernel. dilation: how many times slower than said here hosts compute
    and links carry (Gupta and others, "To Infinity and Beyond: Time-Warped Network Emulation", 2006). isa: the
    instruction set that hosts are held to, a key of `HELD_TO` (None: what the machine has).
    """

    name: str
    kind: Kind
    hosts: tuple[HostSpec, ...]
    rate_mbit: float | None = None
    hub_cpu: float = 0.3
    calibrate: Yardstick = "numpy"
    dilation: float = 1.0
    isa: str | None = None

    def host(self, name: str) -> HostSpec:
        """Return the host of a name; raises ConfigError that lists the names."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise ConfigError(f"lab {self.name} has no host {name!r}; it has {', '.join(h.name for h in self.hosts)}")

    def rate_of(self, name: str) -> float | None:
        """Return the link rate in Mbit/s of a host or of the hub as emulated, None where it is not shaped."""
        own = None if name == HUB else self.host(name).rate_mbit
        return self.slowed(self.rate_mbit if own is None else own)

    def slowed(self, figure: float | None) -> float | None:
        """Return what a speed or a rate of this lab is when it is emulated, None for None."""
        return None if figure is None else figure / self.dilation

    def with_rate(self, rate_mbit: float | None) -> LabSpec:
        """Return the same lab with this rate on every link, itself for None; raises ConfigError."""
        if rate_mbit is None:
            return self
        if self.kind != "emulated":
            raise ConfigError(f"lab {self.name} is of kind {self.kind}: only emulated links have a rate to set")
        rate = bounded("rate", rate_mbit)
        return replace(self, rate_mbit=rate, hosts=tuple(replace(host, rate_mbit=None) for host in self.hosts))

    def with_dilation(self, times: Any) -> LabSpec:
        """Return the same lab slowed down so many times, itself for None; raises ConfigError."""
        if times is None:
            return self
        if self.kind != "emulated":
            raise ConfigError(f"lab {self.name} is of kind {self.kind}: `dilation` slows emulated hosts only")
        return replace(self, dilation=bounded("dilation", times))


def bounded(key: str, value: Any) -> float:
    """Return a number within the bounds of its key; raises ConfigError."""
    low, high = BOUNDS[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"`{key}` is {value!r}; it needs a number from {low:g} to {high:g}")
    return float(value)


def memory(value: Any) -> int:
    """Return bytes, or those of a size such as 2GiB; raises ConfigError."""
    return int(bounded("memory", parse_size(value) if isinstance(value, str) else value))


def one_of(key: str, value: Any, allowed: Sequence[str]) -> str:
    """Return one of the words that are allowed; raises ConfigError that names them."""
    if value not in allowed:
        raise ConfigError(f"`{key}` is {value!r}; it is one of {', '.join(allowed)}")
    return str(value)


def only(what: str, fields: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise ConfigError for a key that is not known."""
    if unknown := [str(key) for key in fields if key not in known]:
        raise ConfigError(f"{what} has the unknown key {unknown[0]!r}; known are {', '.join(known)}")


def load(path: Path, dilation: float | None = None) -> LabSpec:
    """Return the lab of a file; raises ConfigError that names file and key; dilation: instead of the file's."""
    return parse(load_yaml(path), str(path)).with_dilation(dilation)


def parse(data: Any, where: str) -> LabSpec:
    """Return the lab that a mapping describes; raises ConfigError that says `where` and names the key."""
    try:
        return _lab(mapping("a lab file", data))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _lab(fields: Mapping[str, Any]) -> LabSpec:
    only("the lab", fields, _LAB_KEYS)
    listed = fields.get("hosts")
    if "name" not in fields or not isinstance(listed, Mapping) or not 0 < len(listed) <= _MAX_HOSTS:
        raise ConfigError(f"the lab needs `name:` and 1 to {_MAX_HOSTS} `hosts:`, e.g. {{pi1: {{gflops: 24.6}}}}")
    kind = one_of("kind", fields.get("kind", "emulated"), KINDS)
    if kind != "emulated" and (wrong := [key for key in _EMULATED_KEYS if key in fields]):
        raise ConfigError(f"`{wrong[0]}` is of emulated hosts only, and the lab is of kind {kind}: take it out")
    defaults = mapping("`defaults`", fields.get("defaults") or {})
    hosts = tuple(_host(name, {**defaults, **mapping(f"host {name}", own or {})}, kind) for name, own in listed.items())
    isa = fields.get("isa")
    return LabSpec(
        _name("lab", fields["name"]),
        cast(Kind, kind),
        hosts,
        _optional("rate", fields),
        bounded("hub_cpu", fields.get("hub_cpu", 0.3)),
        cast(Yardstick, one_of("calibrate", fields.get("calibrate", "numpy"), YARDSTICKS)),
        bounded("dilation", fields.get("dilation", 1.0)),
        None if isa is None else one_of("isa", isa, tuple(HELD_TO)),
    )


def _host(name: Any, fields: Mapping[str, Any], kind: str) -> HostSpec:
    _name("host", name)
    if name in (HUB, SWITCH):
        raise ConfigError(f"a host cannot be called {name!r}: the lab has one of its own")
    try:
        only(f"(kind {kind})", fields, _HOST_KEYS[kind])
        limit = None if fields.get("memory") is None else memory(fields["memory"])
        threads = int(bounded("threads", fields.get("threads", 1)))
        return HostSpec(name, _optional("gflops", fields), limit, threads, _optional("rate", fields))
    except ConfigError as error:
        raise ConfigError(f"host {name}: {error}") from error


def _name(kind: str, name: Any) -> str:
    check_name(kind, name)
    if len(name) > _MAX_NAME:
        raise ConfigError(f"{kind} name {name!r} is longer than {_MAX_NAME} characters")
    return cast(str, name)


def _optional(key: str, fields: Mapping[str, Any]) -> float | None:
    return None if fields.get(key) is None else bounded(key, fields[key])


def check_quotas(spec: LabSpec, full_gflops: float, cores: int) -> float:
    """Return the cores that an emulated lab needs; raises LabError if the machine has fewer.

    full_gflops: of one unthrottled core. Hosts without `gflops` have no quota and are not counted.
    """
    needs = {HUB: spec.hub_cpu}
    needs |= {h.name: h.gflops / spec.dilation / full_gflops for h in spec.hosts if h.gflops is not None}
    total = sum(needs.values())
    slower = spec.dilation * (total - spec.hub_cpu) / max(cores - spec.hub_cpu, 0.1)
    for host in spec.hosts:
        if needs.get(host.name, 0.0) > host.threads:
            slower = max(slower, spec.dilation * needs[host.name] / host.threads)
    if slower > spec.dilation:
        parts = " + ".join(f"{name} {need:.0%}" for name, need in needs.items())
        raise LabError(
            f"lab {spec.name} needs {total:.0%} of a core ({parts}, at {full_gflops:.1f} GFLOP/s a core), more than "
            f"the threads of a host or the {cores * 100} % of this machine; take fewer or slower hosts, or slow hosts "
            f"and links down alike (--dilation {ceil(slower)})"
        )
    return total
