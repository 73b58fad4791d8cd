"""The type of a parallel method: its table of layouts, and the plans that it can make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, get_args

from hepti_mqtt.core.plan import Plan, Range, WeightDtype, apportion
from hepti_mqtt.core.program import DTYPE_BYTES
from hepti_mqtt.lowering import roles
from hepti_mqtt.lowering.graph import Graph
from hepti_mqtt.lowering.layouts import Piece, Rule, Table, split_along
from hepti_mqtt.lowering.ops import Op
from hepti_mqtt.lowering.regions import IndexSet, index_count, span
from hepti_mqtt.lowering.rewrites import Rewrite
from hepti_mqtt.shares import Branches, DeviceResources, Options, Share, Shares, Speeds

# Kinds of shares.
ROWS: Final = Share("rows", roles.AFTER_MLP, 0, by_length=True)
HEADS: Final = Share("heads", roles.ATTENTION, 1)
MLP: Final = Share("mlp", roles.MLP_UP, 1)
MLP_IN_PROPORTION: Final = replace(MLP, in_proportion=True)
COLUMNS: Final = Share("columns", roles.ATTENTION_OUT, 1)
BRANCHES: Final = Branches("parts", roles.SLICE, 1)
STAGES: Final = Share("stages", roles.AFTER_MLP, 0)
# Tokens of the logits that each device computes, in a plan of any method for several devices. The unit is the kernels'
# panel width, so a device's tokens are a view of its embedding table if it has the whole table.
WORDS: Final = Share("words", roles.LOGITS, 1, unit=64)
# Tokens whose embeddings each device has: those of WORDS, in plans that divide the embedding table. They send more.
EMBEDDINGS: Final = Share("embeddings", roles.EMBEDDINGS, 2)

# Logits are divided if that takes at most this part of the root's time alone: an exchange costs more than its bytes.
WORTH_SPLITTING: Final = 0.7

MAX_NAMED_DEVICES: Final = 64  # largest number of devices for which options have names


class Division(NamedTuple):
    """A graph, and the plan that divides it: the input of a table."""

    graph: Graph
    plan: Plan

    @property
    def devices(self) -> int:
        """Return the number of devices."""
        return len(self.plan.devices)

    @property
    def root(self) -> int:
        """Return the root device's number."""
        return self.plan.devices.index(self.plan.root)

    def device_sets(self, share: Share) -> list[IndexSet]:
        """Return each device's part of a dimension."""
        if share.by_length:
            return [span(*r) for r in apportion(share.unit_count(self.graph), self.plan.shares[share.kind])]
        return [span(*r) for r in self.plan.ranges[share.kind]]

    def split(self, share: Share, dim: int) -> Rule:
        """Return the layout that divides a dimension by a share; in proportion if its extent differs."""
        parts, whole = self.device_sets(share), share.unit_count(self.graph)

        def rule(op: Op) -> list[Piece] | None:
            extent, unit = op.space[dim], op.share_unit(dim)
            if extent == whole:
                return split_along(parts, dim)(op)
            units = apportion(-(-extent // unit), [index_count(part) for part in parts])
            return split_along([span(a * unit, min(z * unit, extent)) for a, z in units], dim)(op)

        return rule

    @property
    def layout(self) -> str:
        """Return the plan's layout for runs of the graph's number of rows; empty: the method's usual layout."""
        rows = ROWS.unit_count(self.graph)
        return max((most, name) for name, most in {"": -1, **self.plan.layouts}.items() if rows > most)[1]

    @property
    def divides_embeddings(self) -> bool:
        """Return whether each device has only its own tokens' embeddings."""
        return EMBEDDINGS.kind in self.plan.ranges

    def owners(self, share: Share) -> dict[int, int]:
        """Return the device of each part, by the part's number."""
        return {part: i for i, (first, stop) in enumerate(self.plan.ranges[share.kind]) for part in range(first, stop)}

    def equal_sets(self, share: Share, devices: int) -> list[IndexSet]:
        """Return equal parts of a dimension, in whole units."""
        return [span(*r) for r in share.ranges(self.graph, [1.0] * devices)]

    def option(self, name: str, default: str = "") -> str:
        """Return an option of the plan."""
        return self.plan.options.get(name, default)


def word_ranges(graph: Graph, root: int, speeds: Speeds, resources: Sequence[DeviceResources]) -> tuple[Range, ...]:
    """Return the tokens whose logits each device computes, by its speed in reading weights; or all at the root device.

    Logits take the time of reading their matrix, and the others send their logits or their likeliest tokens.
    resources: of the devices; without them, links cost nothing.
    """
    given = resources or [DeviceResources()] * len(speeds)
    row_speeds = [resource.row_flops_per_s or speed for resource, speed in zip(given, speeds, strict=True)]
    divided = WORDS.ranges(graph, row_speeds)
    if resources and row_speeds[root] > 0:
        _, words, width = graph.first_with_role(roles.LOGITS).space
        alone_s = 2.0 * words * width / row_speeds[root]
        own = divided[root][1] - divided[root][0]
        rate, delay_s = (
            min(resource.bytes_per_s for resource in resources),
            max(resource.latency_s for resource in resources),
        )
        received = words - own  # numbers that the others send: logits, or their likeliest tokens
        if roles.CANDIDATES in graph.roles:
            received = (len(speeds) - 1) * graph.first_with_role(roles.CANDIDATES).space[1]
        sent_s = 2 * delay_s + DTYPE_BYTES["f32"] * received / rate
        if alone_s * own / words + sent_s > WORTH_SPLITTING * alone_s:
            return WORDS.ranges(graph, [float(i == root) for i in range(len(speeds))])
    return divided


@dataclass(frozen=True)
class Method:
    """A parallel method: its table, and the plans that it can make."""

    name: str
    summary: str
    table: Callable[[Division], Table]
    shares: tuple[Share, ...] = ()  #: divided dimensions of a plan
    #: Roles that a graph must have; of `needs_any` one is enough.
    needs: tuple[str, ...] = (roles.ATTENTION, roles.AFTER_MLP)
    needs_any: tuple[str, ...] = ()
    options: tuple[Options, ...] = ({},)  #: variants that the planner compares
    variants: Callable[[int], Sequence[Options]] | None = None  #: the same, if they depend on the number of devices
    #: Returns (shares, ranges) that one number per device cannot express, given speeds in FLOP/s and links.
    solve: Callable[[Graph, Options, Speeds, Sequence[DeviceResources]], Shares] | None = None
    #: A variant differs from all others for a graph; variants that do not are priced only if pinned.
    is_distinct: Callable[[Graph, Options], bool] | None = None
    max_devices: int | None = None  #: None: any number
    equal_shares: bool = False  #: every device has the same share, whatever its speed
    keeps_cache: bool = False  #: the table places the keys and values of sessions
    #: The planner considers it without a pin; if False, only with `for_throughput`.
    automatic: bool = True
    fixed_shares: bool = False  #: the solved shares stay, in place of shares refined by the load of one request
    #: It divides few units, so the planner also varies shares step by step, because rounding hides a device's load.
    coarse: bool = False
    order_matters: bool = False  #: a device exchanges with its neighbours in the order of the plan
    #: A variant itself chooses devices and shares, for least energy; it needs the power of all devices.
    chooses_devices: Callable[[Options], bool] = lambda _: False
    for_throughput: bool = False  #: the planner considers it without a pin if the objective is throughput
    #: The devices of each replica, for a method with plans of replicas.
    groups: Callable[[Options, Speeds], Sequence[Sequence[int]]] | None = None
    #: Number of leased tasks of a variant, 0 for none; its table then has a place per task and one for the root device.
    task_count: Callable[[Options], int] = lambda _: 0
    #: Returns the rewrite of a family's graph: equally many tensors, and the same weights.
    rewrite: Callable[[Division], Rewrite] | None = None
    #: Ranges of a kind may change without changing any device's weights.
    is_free_of_weights: Callable[[str], bool] = lambda _: False
    #: Storages of weights that a variant supports.
    weight_dtypes: Callable[[Options], Sequence[WeightDtype]] = lambda _: get_args(WeightDtype)
    #: Further layouts of the table, for runs of ever more rows; the planner measures from which number each is faster.
    layouts: tuple[str, ...] = ()

    def variants_for(self, devices: int, graph: Graph | None = None) -> Sequence[Options]:
        """Return the variants to compare for a number of devices, and for a graph if given."""
        variants = self.options if self.variants is None else self.variants(devices)
        if graph is None or self.is_distinct is None:
            return variants
        return [options for options in variants if self.is_distinct(graph, options)]

    def all_variants(self, most: int = MAX_NAMED_DEVICES) -> dict[str, Options]:
        """Return every variant for up to `most` devices, by its name: the values of its options."""
        more = () if self.variants is None else (o for n in range(1, most + 1) for o in self.variants(n))
        return {"/".join(options.values()): options for options in (*self.options, *more)}

    def accepts(self, options: Options) -> bool:
        """Return whether these are options of the method for some number of devices."""
        return any(dict(options) == dict(variant) for variant in self.all_variants().values())

    def why_unsupported(self, graph: Graph) -> str | None:
        """Return the reason why this method cannot divide a graph, None if it can."""
        missing = [role for role in self.needs if role not in graph.roles]
        words = dict.fromkeys(map(roles.describe, missing))
        if self.needs_any and not graph.roles & set(self.needs_any):
            words[" or ".join(map(roles.describe, self.needs_any))] = None
        if words:
            has = " and ".join(words)
            return f"{self.name} needs a model with {has}{roles.missing_role_hint(missing)}"
        if roles.CACHE in graph.roles and not self.keeps_cache:
            return f"{self.name} does not place the KV cache of a decoder"
        for share in self.shares:
            sizes = {op.space[share.dim] for op in graph.ops if op.role == share.role}
            if len(sizes) > 1 and not share.in_proportion:
                return f"{self.name} divides {share.kind} equally in all layers, but this model has {sorted(sizes)}"
        return None

    def make_shares(
        self, graph: Graph, options: Options, speeds: Speeds, resources: Sequence[DeviceResources] = ()
    ) -> Shares:
        """Return (shares, ranges) of a plan; kinds that `solve` leaves out follow the speeds.

        resources: of the devices; without them, links cost nothing.
        """
        used = [1.0] * len(speeds) if self.equal_shares else list(speeds)
        by_length = {s.kind: tuple(used) for s in self.shares if s.by_length}
        ranges = {s.kind: s.ranges(graph, used) for s in self.shares if not s.by_length}
        if self.solve is not None:
            solved = self.solve(graph, options, speeds, resources or [DeviceResources()] * len(speeds))
            by_length, ranges = by_length | solved[0], ranges | solved[1]
        return by_length | {s.kind: s.cap_devices(graph, by_length[s.kind]) for s in self.shares if s.by_length}, ranges
