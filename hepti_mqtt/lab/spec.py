"""What a lab file says: hosts with their speed and memory, their links, and who runs broker and planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, Final, Literal, cast

from hepti_mqtt.config import load_yaml, mapping
from hepti_mqtt.config.settings import parse_size
from hepti_mqtt.errors import BadNameError, ConfigError, LabError
from hepti_mqtt.ids import check_name

Kind = Literal["emulated", "ssh", "local"]
HUB: Final = "hub"
SWITCH: Final = "switch"
KINDS: Final = ("emulated", "ssh", "local")
Yardstick = Literal["numpy", "kernel"]
YARDSTICKS: Final = ("numpy", "kernel")
RATE_MBIT: Final = (0.1, 40_000.0)  # tbf counts the bucket in 32 bits and packets by the tick
GFLOPS: Final = (0.01, 100_000.0)
MEMORY_BYTES: Final = (16 * 2**20, 2**44)
THREADS: Final = (1, 1024)
HUB_CPU: Final = (0.01, 64.0)
DEFAULT_HUB_CPU: Final = 0.3
MAX_HOSTS: Final = 64
DILATION: Final = (1.0, 100.0)
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
_MAX_NAME: Final = 32


@dataclass(frozen=True, slots=True)
class HostSpec:
    """One host as the file wants it.

    gflops: float32 speed on [256, 1024] x [1024, 1024] (None: as fast as it is). memory_bytes: limit of all its
    processes together (None: none). threads: of its agent. rate_mbit: its link's goodput each way instead of the lab's.
    ssh: user@host[:port]; python: the interpreter there that has Hepti; command: the program that carries commands to
    the host instead of `ssh`.
    """

    name: str
    gflops: float | None = None
    memory_bytes: int | None = None
    threads: int = 1
    rate_mbit: float | None = None
    ssh: str | None = None
    python: str | None = None
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LabSpec:
    """A lab.

    rate_mbit: goodput of every link each way (None: not shaped). broker, planner: names of hosts, None: the lab's own
    host `hub` and beside the broker. hub_cpu: the hub's share of one core. address: where boards reach the hub.
    calibrate: whose speed `gflops` is, NumPy's or that of Hepti's kernel. dilation: how many times as slow as said here
    hosts compute and links carry, so that everything takes so many times as long (Gupta and others, "To Infinity and
    Beyond: Time-Warped Network Emulation", 2006). isa: the instruction set that hosts are held to, a key of `HELD_TO`:
    a host of some speed is a larger part of a core with narrower vectors (None: what the machine has).
    """

    name: str
    kind: Kind
    hosts: tuple[HostSpec, ...]
    rate_mbit: float | None = None
    broker: str | None = None
    hub_cpu: float = DEFAULT_HUB_CPU
    planner: str | None = None
    address: str | None = None
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
        """Return the link rate in Mbit/s of a host or of the hub, None where it is not shaped."""
        own = None if name == HUB else self.host(name).rate_mbit
        return self.rate_mbit if own is None else own

    def slowed(self, figure: float | None) -> float | None:
        """Return what a speed or a rate of this lab is when it is emulated, None for None."""
        return None if figure is None else figure / self.dilation

    def with_rate(self, rate_mbit: float) -> LabSpec:
        """Return the same lab with this rate on every link; raises ConfigError for one that cannot be."""
        if self.kind != "emulated":
            raise ConfigError(
                f"lab {self.name} is of kind {self.kind}: only emulated links have a rate that can be set"
            )
        rate = _number("rate", rate_mbit, RATE_MBIT)
        return replace(self, rate_mbit=rate, hosts=tuple(replace(host, rate_mbit=None) for host in self.hosts))

    def with_dilation(self, times: Any) -> LabSpec:
        """Return the same lab so many times as slow; raises ConfigError where that cannot be."""
        return _check_kind(replace(self, dilation=_number("dilation", times, DILATION)))


def load(path: Path, dilation: float | None = None) -> LabSpec:
    """Return the lab of a file; raises ConfigError that names file and key; dilation: instead of the file's."""
    spec = parse(load_yaml(path), str(path))
    return spec if dilation is None else spec.with_dilation(dilation)


def parse(data: Any, where: str) -> LabSpec:
    """Return the lab that a mapping describes; raises ConfigError that says `where` and names the key."""
    try:
        return _lab(data)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def check_quotas(spec: LabSpec, full_gflops: float, cores: int) -> float:
    """Return the cores that an emulated lab needs, from the measured speed of one core; raises LabError if too many.

    full_gflops: of one unthrottled core. Hosts without `gflops` have no quota and are not counted.
    """
    needs = {HUB: spec.hub_cpu}
    for host in spec.hosts:
        if host.gflops is None:
            continue
        target = host.gflops / spec.dilation
        needs[host.name] = target / full_gflops
        if needs[host.name] > host.threads:
            slower = ceil(host.gflops / full_gflops / host.threads)
            raise LabError(
                f"host {host.name} is to reach {target:g} GFLOP/s with {host.threads} thread(s), and one core of "
                f"this machine gives {full_gflops:.1f}; give it more `threads:` or less `gflops:`, or slow hosts and "
                f"links down alike (--dilation {slower})"
            )
    total = sum(needs.values())
    if total > cores:
        parts = " + ".join(f"{name} {need:.0%}" for name, need in needs.items())
        # The hub's share of a core stays what it is.
        slower = ceil(spec.dilation * (total - spec.hub_cpu) / max(cores - spec.hub_cpu, 0.1))
        raise LabError(
            f"lab {spec.name} needs {total:.0%} of a core ({parts}, at {full_gflops:.1f} GFLOP/s a core), and this "
            f"machine has {cores * 100} %; take fewer or slower hosts, a machine with more cores, or slow hosts and "
            f"links down alike (--dilation {slower})"
        )
    return total


def _lab(data: Any) -> LabSpec:
    fields = mapping("a lab file", data)
    _known("the lab", fields, _LAB_KEYS)
    for key in ("name", "hosts"):
        if key not in fields:
            raise ConfigError(f"the lab needs `{key}:`")
    kind = fields.get("kind", "emulated")
    if kind not in KINDS:
        raise ConfigError(f"`kind` is {kind!r}; it is one of {', '.join(KINDS)}")
    defaults = mapping("`defaults`", fields.get("defaults") or {})
    listed = fields["hosts"]
    if not isinstance(listed, Mapping) or not listed:
        raise ConfigError("`hosts` needs a mapping of names, e.g. `hosts: {pi1: {gflops: 24.6}}`")
    if len(listed) > MAX_HOSTS:
        raise ConfigError(f"`hosts` has {len(listed)} entries; at most {MAX_HOSTS} share a lab")
    yardstick = fields.get("calibrate", "numpy")
    if yardstick not in YARDSTICKS:
        raise ConfigError(f"`calibrate` is {yardstick!r}; it is one of {', '.join(YARDSTICKS)}")
    isa = fields.get("isa")
    if isa is not None and isa not in HELD_TO:
        raise ConfigError(f"`isa` is {isa!r}; hosts can be held to {', '.join(HELD_TO)}")
    hosts = tuple(_host(name, {**defaults, **mapping(f"host {name}", own or {})}, kind) for name, own in listed.items())
    spec = LabSpec(
        _name("lab", fields["name"]),
        cast(Kind, kind),
        hosts,
        _optional("rate", fields, RATE_MBIT),
        _text("broker", fields),
        _number("hub_cpu", fields.get("hub_cpu", DEFAULT_HUB_CPU), HUB_CPU),
        _text("planner", fields),
        _text("address", fields),
        cast(Yardstick, yardstick),
        _number("dilation", fields.get("dilation", 1.0), DILATION),
        isa,
    )
    for role, name in (("broker", spec.broker), ("planner", spec.planner)):
        if name is not None and name != HUB:
            try:
                spec.host(name)
            except ConfigError as error:
                raise ConfigError(f"`{role}`: {error}, and `{HUB}`") from error
    return _check_kind(replace(spec, broker=None if spec.broker == HUB else spec.broker))


def _check_kind(spec: LabSpec) -> LabSpec:
    if spec.kind != "emulated" and spec.rate_mbit is not None:
        raise ConfigError(f"`rate` shapes emulated links only, and the lab is of kind {spec.kind}: take it out")
    if spec.kind != "emulated" and spec.calibrate != "numpy":
        raise ConfigError(f"`calibrate` sets emulated quotas only, and the lab is of kind {spec.kind}: take it out")
    if spec.kind != "emulated" and spec.dilation != 1:
        raise ConfigError(f"`dilation` slows emulated hosts only, and the lab is of kind {spec.kind}: take it out")
    if spec.kind != "emulated" and spec.isa is not None:
        raise ConfigError(f"`isa` holds emulated hosts to it only, and the lab is of kind {spec.kind}: take it out")
    if spec.kind == "ssh" and spec.broker is None and spec.address is None:
        raise ConfigError(
            "a lab of kind ssh needs `address:` (where the boards reach this machine, whose broker they use) or "
            "`broker:` with the name of a host"
        )
    return spec


def _host(name: Any, fields: Mapping[str, Any], kind: str) -> HostSpec:
    _name("host", name)
    if name in (HUB, SWITCH):
        raise ConfigError(f"a host cannot be called {name!r}: the lab has one of its own")
    known = _HOST_KEYS[kind]
    try:
        _known(f"(kind {kind})", fields, known)
        if kind == "ssh" and "ssh" not in fields and "command" not in fields:
            raise ConfigError("needs `ssh: user@host[:port]`")
        memory = fields.get("memory")
        return HostSpec(
            name,
            _optional("gflops", fields, GFLOPS),
            None if memory is None else _memory(memory),
            _whole("threads", fields.get("threads", 1), THREADS),
            _optional("rate", fields, RATE_MBIT),
            _text("ssh", fields),
            _text("python", fields),
            _words("command", fields.get("command", ())),
        )
    except ConfigError as error:
        raise ConfigError(f"host {name}: {error}") from error


_LAB_KEYS: Final = (
    *("name", "kind", "hosts", "defaults", "rate", "broker", "hub_cpu", "planner", "address", "calibrate", "dilation"),
    "isa",
)
_HOST_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "emulated": ("gflops", "memory", "threads", "rate"),
    "ssh": ("ssh", "python", "command", "threads", "memory"),
    "local": ("python", "threads", "memory"),
}


def _known(where: str, fields: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in fields:
        if key not in known:
            raise ConfigError(f"{where} has an unknown key {key!r}; known are {', '.join(known)}")


def _name(kind: str, name: Any) -> str:
    try:
        check_name(kind, name)
    except BadNameError as error:
        raise ConfigError(str(error)) from error
    if len(name) > _MAX_NAME:
        raise ConfigError(f"{kind} name {name!r} is longer than {_MAX_NAME} characters")
    return cast(str, name)


def _number(key: str, value: Any, bounds: tuple[float, float]) -> float:
    low, high = bounds
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"`{key}` is {value!r}; it needs a number from {low:g} to {high:g}")
    return float(value)


def _whole(key: str, value: Any, bounds: tuple[int, int]) -> int:
    if not isinstance(value, int):
        raise ConfigError(f"`{key}` is {value!r}; it needs a whole number")
    return int(_number(key, value, bounds))


def _optional(key: str, fields: Mapping[str, Any], bounds: tuple[float, float]) -> float | None:
    return None if fields.get(key) is None else _number(key, fields[key], bounds)


def _memory(value: Any) -> int:
    if isinstance(value, str):
        try:
            value = parse_size(value)
        except ConfigError as error:
            raise ConfigError(f"`memory`: {error}") from error
    return _whole("memory", value, MEMORY_BYTES)


def _text(key: str, fields: Mapping[str, Any]) -> str | None:
    value = fields.get(key)
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(f"`{key}` is {value!r}; it needs a text")
    return value


def _words(key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(w, str) and w for w in value):
        raise ConfigError(f"`{key}` is {value!r}; it needs a list of words")
    return tuple(value)
