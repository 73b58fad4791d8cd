"""What a parallel method is: a table of layouts, and the plans that it can make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, get_args

from hepti_mqtt.lowering import Graph, IndexSet, Rewrite, Table, roles, span
from hepti_mqtt.lowering.layouts import Piece, Rule, split_along
from hepti_mqtt.lowering.ops import Op
from hepti_mqtt.lowering.regions import index_count
from hepti_mqtt.plan import Plan, Range, WeightDtype, apportion
from hepti_mqtt.program import DTYPE_BYTES
from hepti_mqtt.shares import Branches, DeviceResources, Options, Share, Shares, Speeds

# What methods share out.
ROWS: Final = Share("rows", roles.AFTER_MLP, 0, by_length=True)
HEADS: Final = Share("heads", roles.ATTENTION, 1)
MLP: Final = Share("mlp", roles.MLP_UP, 1)
MLP_IN_PROPORTION: Final = replace(MLP, in_proportion=True)
COLUMNS: Final = Share("columns", roles.ATTENTION_OUT, 1)
BRANCHES: Final = Branches("parts", roles.SLICE, 1)
STAGES: Final = Share("stages", roles.AFTER_MLP, 0)
# Of every plan of several devices, whatever its method. Kernels keep this many columns side by side: cut there,
# a device's own words are a part of all that it has for embeddings.
WORDS: Final = Share("words", roles.WORDS, 1, unit=64)
# Of plans that divide the table of words too: the same words. Such a plan says so, since it sends more for each token.
EMBEDDINGS: Final = Share("embeddings", roles.EMBEDDINGS, 2)

WORTH_SPLITTING: Final = 0.7  # of the head's time: what the exchange takes beside links and bytes is not known here

MAX_NAMED_DEVICES: Final = 64  # devices up to which options that depend on their number are known by name


class Division(NamedTuple):
    """A graph, and the plan under which it is divided: what a table is made from."""

    graph: Graph
    plan: Plan

    @property
    def devices(self) -> int:
        """Return how many devices there are."""
        return len(self.plan.devices)

    @property
    def root(self) -> int:
        """Return the number of the head device."""
        return self.plan.index(self.plan.root)

    def device_sets(self, share: Share) -> list[IndexSet]:
        """Return each device's part of a dimension."""
        if share.by_length:
            return [span(*r) for r in apportion(share.unit_count(self.graph), self.plan.shares[share.kind])]
        return [span(*r) for r in self.plan.ranges[share.kind]]

    def split(self, share: Share, dim: int) -> Rule:
        """Return the layout in which a dimension is shared out; in proportion where it has another extent."""
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
        """Return the layout that the plan has for runs of as many rows; empty: the method's usual one."""
        rows = ROWS.unit_count(self.graph)
        return max((most, name) for name, most in {"": -1, **self.plan.layouts}.items() if rows > most)[1]

    @property
    def divides_embeddings(self) -> bool:
        """Return whether devices have the embeddings of their own words, so that none has them all."""
        return EMBEDDINGS.kind in self.plan.ranges

    def owners(self, share: Share) -> dict[int, int]:
        """Return the device of each part, by its number."""
        return {part: i for i, (first, stop) in enumerate(self.plan.ranges[share.kind]) for part in range(first, stop)}

    def equal_sets(self, share: Share, devices: int) -> list[IndexSet]:
        """Return equal parts of a dimension, in whole units."""
        return [span(*r) for r in share.ranges(self.graph, [1.0] * devices)]

    def option(self, name: str, default: str = "") -> str:
        """Return an option of the plan."""
        return self.plan.options.get(name, default)


def word_ranges(graph: Graph, root: int, weights: Speeds, lanes: Sequence[DeviceResources]) -> tuple[Range, ...]:
    """Return each device's words of the logits: by how fast it reads weights, or all of them on the head device.

    A token takes the time of reading a matrix of all words, of which nothing but the logits or the likeliest
    words has to be sent. lanes: of the devices; without any, links are taken to cost nothing.
    """
    resources = lanes or [DeviceResources()] * len(weights)
    speeds = [lane.row_flops_per_s or weight for lane, weight in zip(resources, weights, strict=True)]
    divided = WORDS.ranges(graph, speeds)
    if lanes and speeds[root] > 0:
        _, words, width = graph.first_with_role(roles.WORDS).space
        alone_s = 2.0 * words * width / speeds[root]
        own = divided[root][1] - divided[root][0]
        rate, delay_s = min(lane.bytes_per_s for lane in lanes), max(lane.latency_s for lane in lanes)
        meet = words - own  # numbers that the others send, where they do not choose the likeliest of their own
        if roles.CANDIDATES in graph.roles:
            meet = (len(weights) - 1) * graph.first_with_role(roles.CANDIDATES).space[1]
        sent_s = 2 * delay_s + DTYPE_BYTES["f32"] * meet / rate
        if alone_s * own / words + sent_s > WORTH_SPLITTING * alone_s:
            return WORDS.ranges(graph, [float(i == root) for i in range(len(weights))])
    return divided


@dataclass(frozen=True)
class Method:
    """A parallel method: its table, and the plans that it can make.

    shares: what a plan of it divides. needs: roles that a graph must have; needs_any: of which one will do. options:
    variants to price against each other; variants: the same where they depend on the number of devices. solve: finds
    the (weights, ranges) of which one weight per device does not say it all, from devices' speeds in FLOP/s and links.
    is_distinct: whether a variant is one of its own for a graph; others are priced only where they are asked for.
    max_devices: None means any number. equal_shares: every device gets the same, however fast. keeps_cache: its table
    says where sessions keep keys and values. automatic: False keeps it out of the planner's own choice; it can be
    pinned. for_throughput: it is offered where throughput is the objective. fixed_shares: its shares stay as they are
    solved, instead of following what one request keeps busy. coarse: it divides few units, so that shares are tried
    step by step too, where rounding hides what keeps a device busy. order_matters: a device exchanges with those
    before and behind it, so that their order counts. chooses_devices: whether a variant chooses devices and shares by
    itself, for the least energy, which takes the watts of all devices. groups: of a method whose plans are replicas
    side by side, which devices make up each of them. task_count: into how many tasks a variant divides its work that
    are leased while a request runs, 0 for none; its table is then made for a place per task and one more, the head's.
    rewrite: of a request, what makes the family's graph the one that is computed: as many tensors, and the same
    weights. is_free_of_weights: whether ranges of a kind may change and no device needs other weights. weight_dtypes:
    how the weights of a variant may be kept. layouts: others of its table, for runs of more and
    more rows; the planner finds from how many on each is faster.
    """

    name: str
    summary: str
    table: Callable[[Division], Table]
    shares: tuple[Share, ...] = ()
    needs: tuple[str, ...] = (roles.ATTENTION, roles.AFTER_MLP)
    needs_any: tuple[str, ...] = ()
    options: tuple[Options, ...] = ({},)
    variants: Callable[[int], Sequence[Options]] | None = None
    solve: Callable[[Graph, Options, Speeds, Sequence[DeviceResources]], Shares] | None = None
    is_distinct: Callable[[Graph, Options], bool] | None = None
    max_devices: int | None = None
    equal_shares: bool = False
    keeps_cache: bool = False
    automatic: bool = True
    fixed_shares: bool = False
    coarse: bool = False
    order_matters: bool = False
    chooses_devices: Callable[[Options], bool] = lambda _: False
    for_throughput: bool = False
    groups: Callable[[Options, Speeds], Sequence[Sequence[int]]] | None = None
    task_count: Callable[[Options], int] = lambda _: 0
    rewrite: Callable[[Division], Rewrite] | None = None
    is_free_of_weights: Callable[[str], bool] = lambda _: False
    weight_dtypes: Callable[[Options], Sequence[WeightDtype]] = lambda _: get_args(WeightDtype)
    layouts: tuple[str, ...] = ()

    def variants_for(self, devices: int, graph: Graph | None = None) -> Sequence[Options]:
        """Return the variants to price against each other for a number of devices, and for a graph if it is given."""
        found = self.options if self.variants is None else self.variants(devices)
        if graph is None or self.is_distinct is None:
            return found
        return [options for options in found if self.is_distinct(graph, options)]

    def all_variants(self, most: int = MAX_NAMED_DEVICES) -> dict[str, Options]:
        """Return every variant that there is for up to `most` devices, by its name: the values of its options."""
        more = () if self.variants is None else (o for n in range(1, most + 1) for o in self.variants(n))
        return {"/".join(options.values()): options for options in (*self.options, *more)}

    def accepts(self, options: Options) -> bool:
        """Return whether these are options of the method, for some number of devices."""
        return any(dict(options) == dict(known) for known in self.all_variants().values())

    def why_unsupported(self, graph: Graph) -> str | None:
        """Return why a graph cannot be divided by this method, None if it can."""
        missing = [role for role in self.needs if role not in graph.roles]
        words = dict.fromkeys(map(roles.describe, missing))
        if self.needs_any and not graph.roles & set(self.needs_any):
            words[" or ".join(map(roles.describe, self.needs_any))] = None
        if words:
            has = " and ".join(words)
            return f"{self.name} needs a model with {has}{roles.missing_role_hint(missing)}"
        if roles.CACHE in graph.roles and not self.keeps_cache:
            return f"{self.name} does not say which device keeps the cache of a decoder"
        for share in self.shares:
            sizes = {op.space[share.dim] for op in graph.ops if op.role == share.role}
            if len(sizes) > 1 and not share.in_proportion:
                return f"{self.name} shares out {share.kind} alike in all layers, and this model has {sorted(sizes)}"
        return None

    def make_shares(
        self, graph: Graph, options: Options, weights: Speeds, lanes: Sequence[DeviceResources] = ()
    ) -> Shares:
        """Return (weights, ranges) of a plan in which what `solve` does not say follows one weight per device.

        lanes: of the devices; without any, links are taken to cost nothing.
        """
        used = [1.0] * len(weights) if self.equal_shares else list(weights)
        by_length = {s.kind: tuple(used) for s in self.shares if s.by_length}
        ranges = {s.kind: s.ranges(graph, used) for s in self.shares if not s.by_length}
        if self.solve is not None:
            solved = self.solve(graph, options, weights, lanes or [DeviceResources()] * len(weights))
            by_length, ranges = by_length | solved[0], ranges | solved[1]
        return by_length | {s.kind: s.cap_devices(graph, by_length[s.kind]) for s in self.shares if s.by_length}, ranges
