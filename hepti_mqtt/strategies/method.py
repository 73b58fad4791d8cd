"""What a parallel method is: a table of layouts, and the plans that it can make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple

from hepti_mqtt.cluster import Power
from hepti_mqtt.lowering import PLANNER_PLACE, Graph, Rule, Set, Table, on, roles, span, union
from hepti_mqtt.plan import Plan, Range, apportion

MOST_NAMED: Final = 64  # devices up to which options that depend on their number are known by name

Options = Mapping[str, str]
Weights = Sequence[float]


@dataclass(frozen=True)
class Share:
    """A kind of share: what part of one dimension of the tensors of a role each device has.

    by_length: the dimension depends on the request, so plans keep weights, from which ranges follow by one function;
    else they keep ranges, in whole units of that dimension.
    """

    kind: str
    role: str
    dim: int
    by_length: bool = False

    def total(self, graph: Graph) -> int:
        """Return how many indices there are to share."""
        return graph.first(self.role).space[self.dim]

    def ranges(self, graph: Graph, weights: Weights) -> tuple[Range, ...]:
        """Return one range of indices per device, in whole units; empty ones where a model has nothing of the role."""
        if self.role not in graph.roles:
            return ((0, 0),) * len(weights)
        total = self.total(graph)
        unit = min(graph.first(self.role).unit(self.dim), total)
        parts = apportion(-(-total // unit), weights)
        return tuple((min(a * unit, total), min(z * unit, total)) for a, z in parts)


@dataclass(frozen=True)
class Branches(Share):
    """Branches of a layer."""

    def total(self, graph: Graph) -> int:
        """Return how many branches there are."""
        return max(op.branch for op in graph.ops) + 1

    def ranges(self, graph: Graph, weights: Weights) -> tuple[Range, ...]:
        """Return consecutive branches per device."""
        return apportion(self.total(graph), weights)


ROWS: Final = Share("rows", roles.AFTER_MLP, 0, by_length=True)
HEADS: Final = Share("heads", roles.ATTENTION, 1)
MLP: Final = Share("mlp", roles.MLP_UP, 1)
COLUMNS: Final = Share("columns", roles.ATTENTION_OUT, 1)
PARTS: Final = Branches("parts", roles.SLICE, 1)
STAGES: Final = Share("stages", roles.AFTER_MLP, 0)


class Lane(NamedTuple):
    """What a method that solves for shares knows of a device beside its speed.

    bytes_per_s, latency_s: of its link, one way. memory_bytes: what it has for weights and maps. row_flops_per_s: with
    one row, for which a device does little but read weights; None if it is as fast as with many. power: what it draws,
    if that is known; deadline_s: by when the site wants an answer.
    """

    bytes_per_s: float = inf
    latency_s: float = 0.0
    memory_bytes: float = inf
    row_flops_per_s: float | None = None
    power: Power | None = None
    deadline_s: float = inf


Shares = tuple[dict[str, tuple[float, ...]], dict[str, tuple[Range, ...]]]


class Division(NamedTuple):
    """A graph, and the plan under which it is divided: what a table is made from."""

    graph: Graph
    plan: Plan

    @property
    def devices(self) -> int:
        """Return how many devices there are."""
        return len(self.plan.devices)

    @property
    def head(self) -> int:
        """Return the number of the head device."""
        return self.plan.index(self.plan.head)

    def parts(self, share: Share) -> list[Set]:
        """Return each device's part of a dimension."""
        if share.by_length:
            return [span(*r) for r in apportion(share.total(self.graph), self.plan.weights[share.kind])]
        return [span(*r) for r in self.plan.ranges[share.kind]]

    def equal(self, share: Share, devices: int) -> list[Set]:
        """Return equal parts of a dimension, in whole units."""
        return [span(*r) for r in share.ranges(self.graph, [1.0] * devices)]

    def option(self, name: str, default: str = "") -> str:
        """Return an option of the plan."""
        return self.plan.options.get(name, default)


@dataclass(frozen=True)
class Method:
    """A parallel method: its table, and the plans that it can make.

    shares: what a plan of it divides. needs: roles that a graph must have; one_of: of which one will do. options:
    variants to price against each other; variants: the same where they depend on the number of devices. solve: finds
    a plan's (weights, ranges) from devices' speeds in FLOP/s and their links, where one weight per device does not say
    it all. differs: whether a variant is one of its own for a graph; others are priced only where they are asked for.
    most_devices: None means any number. equal: every device gets the same, however fast. keeps_cache: its table says
    where sessions keep keys and values. offered: False keeps it out of the planner's own choice; it can be pinned.
    throughput: it is offered where throughput is the objective. settled: its shares stay as they are solved, instead of
    following what one request keeps busy. few: it divides few units, so that shares are tried step by step too, where
    rounding hides what keeps a device busy. settles: whether a variant chooses devices and shares by itself, for the
    least energy, which takes the watts of all devices. groups: of a method whose plans are replicas side by side, which
    devices make up each of them. bag: into how many tasks a variant divides its work that are leased
    while a request runs, 0 for none; its table is then made for a place per task and one more, the head's.
    """

    name: str
    summary: str
    table: Callable[[Division], Table]
    shares: tuple[Share, ...] = ()
    needs: tuple[str, ...] = (roles.ATTENTION, roles.AFTER_MLP)
    one_of: tuple[str, ...] = ()
    options: tuple[Options, ...] = ({},)
    variants: Callable[[int], Sequence[Options]] | None = None
    solve: Callable[[Graph, Options, Weights, Sequence[Lane]], Shares] | None = None
    differs: Callable[[Graph, Options], bool] | None = None
    most_devices: int | None = None
    equal: bool = False
    keeps_cache: bool = False
    offered: bool = True
    settled: bool = False
    few: bool = False
    settles: Callable[[Options], bool] = lambda _: False
    throughput: bool = False
    groups: Callable[[Options, Weights], Sequence[Sequence[int]]] | None = None
    bag: Callable[[Options], int] = lambda _: 0

    def choices(self, devices: int, graph: Graph | None = None) -> Sequence[Options]:
        """Return the variants to price against each other for a number of devices, and for a graph if it is given."""
        found = self.options if self.variants is None else self.variants(devices)
        if graph is None or self.differs is None:
            return found
        return [options for options in found if self.differs(graph, options)]

    def every(self, most: int = MOST_NAMED) -> dict[str, Options]:
        """Return every variant that there is for up to `most` devices, by its name: the values of its options."""
        more = () if self.variants is None else (o for n in range(1, most + 1) for o in self.variants(n))
        return {"/".join(options.values()): options for options in (*self.options, *more)}

    def knows(self, options: Options) -> bool:
        """Return whether these are options of the method, for some number of devices."""
        return any(dict(options) == dict(known) for known in self.every().values())

    def unsupported(self, graph: Graph) -> str | None:
        """Return why a graph cannot be divided by this method, None if it can."""
        missing = [role for role in self.needs if role not in graph.roles]
        if self.one_of and not graph.roles & set(self.one_of):
            missing.append(" or ".join(self.one_of))
        if missing:
            return f"{self.name} divides {', '.join(missing)}, which this model does not have"
        if roles.CACHE in graph.roles and not self.keeps_cache:
            return f"{self.name} does not say which device keeps the cache of a decoder"
        for share in self.shares:
            sizes = {op.space[share.dim] for op in graph.ops if op.role == share.role}
            if len(sizes) > 1:
                return f"{self.name} shares out {share.kind} alike in all layers, and this model has {sorted(sizes)}"
        return None

    def divide(self, graph: Graph, options: Options, weights: Weights, lanes: Sequence[Lane] = ()) -> Shares:
        """Return (weights, ranges) of a plan in which every kind of share follows one weight per device.

        lanes: of the devices; without any, links are taken to cost nothing.
        """
        if self.solve is not None:
            return self.solve(graph, options, weights, lanes or [Lane()] * len(weights))
        used = [1.0] * len(weights) if self.equal else list(weights)
        ranges = {s.kind: s.ranges(graph, used) for s in self.shares if not s.by_length}
        return {s.kind: tuple(used) for s in self.shares if s.by_length}, ranges


def frame(division: Division) -> Table:
    """Return where every method begins and ends: what the planner sends, stem and task on the head device."""
    head = on(division.head)
    return Table(where_present={roles.INPUT: on(PLANNER_PLACE), roles.STEM: head, roles.TASK: head, roles.CACHE: head})


# -- layouts that several methods use ---------------------------------------------------------------------------------

BETWEEN: Final = (roles.BEFORE_ATTENTION, roles.AFTER_ATTENTION, roles.BEFORE_MLP, roles.AFTER_MLP)


def between(rule: Rule, head: int | None = None) -> dict[str, Rule]:
    """Return lines that place what lies between the blocks: norms and residuals.

    head: computes the first norm, of the embedding, since it has all of that and sends it on anyway.
    """
    lines = dict.fromkeys(BETWEEN, rule)
    if head is not None:
        first = on(head)
        lines[roles.BEFORE_ATTENTION] = lambda op: (rule if op.layer else first)(op)
    return lines


def qkv_of(division: Division, heads: Set, which: str = "qkv") -> Set:
    """Return the columns of the joint query, key and value matrix that belong to heads (columns of attention)."""
    attention = division.graph.first(roles.ATTENTION)
    first = dict(zip("qkv", attention.columns, strict=True))  # type: ignore[attr-defined]
    return union(*(tuple((a + first[w], z + first[w]) for a, z in heads) for w in which))


def after(parts: Sequence[Set], device: int) -> list[Set]:
    """Return the parts in a ring: that of the device after this one first, its own last."""
    return [*parts[device + 1 :], *parts[: device + 1]]


def joined(parts: Sequence[Set], by: int) -> list[Set]:
    """Return the unions of `by` parts each."""
    return [union(*parts[i : i + by]) for i in range(0, len(parts), by)]
