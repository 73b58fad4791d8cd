"""Methods for convolutional nets, and `pipeline`, which divides every model: rows, tiles or stages.

The request brings its picture to every device, so no device sends the first map. Rows of maps need a halo from the
neighbours. After a cut the root device continues alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from hepti_mqtt.core.plan import Range, apportion
from hepti_mqtt.lowering import roles
from hepti_mqtt.lowering.graph import Graph
from hepti_mqtt.lowering.layouts import Piece, Rule, Table, on_device, region_with
from hepti_mqtt.lowering.ops import Op
from hepti_mqtt.lowering.regions import span
from hepti_mqtt.shares import Options
from hepti_mqtt.shares.maps import (
    TILES,
    after_cut,
    borders_first,
    boundary_maps,
    coedge_shares,
    cut_dimension,
    dense_kind,
    edgeflow_ranges,
    is_rows_kind,
    map_heights,
    means,
    modnn_shares,
    owned_tiles,
    ranges_by_size,
    rows_kind,
)
from hepti_mqtt.shares.share import assign_greedily
from hepti_mqtt.shares.stages import VARIANTS, is_distinct, micro_batches, parts_of, placed_roles, stages_of
from hepti_mqtt.strategies.method import STAGES, Division, Method

CUT: Final = "cut"
NO_CUT: Final = "none"
CUTS: Final[tuple[Options, ...]] = tuple({CUT: name} for name in (NO_CUT, "1", "2", "3", "4", "5"))


def cut_number(options: Options) -> int:
    """Return the number of a cut, 0 for no cut."""
    name = options.get(CUT, NO_CUT)
    return 0 if name == NO_CUT else int(name)


def divides_behind_cut(graph: Graph, options: Options) -> bool:
    """Return whether a cut divides the graph differently from all smaller cuts."""
    cut = cut_number(options)
    return not cut or (cut < len(map_heights(graph)) and after_cut(graph, cut) != after_cut(graph, 0))


def map_table(division: Division, maps: Rule, dense: Rule, uniform: bool = True) -> Table:
    """Return the table that places maps and dense layers by rules up to the cut, and then on the root device."""
    cut = cut_number(division.plan.options)
    root, left = on_device(division.root), after_cut(division.graph, cut)

    def before(rule: Rule) -> Rule:
        return lambda op: (root if op.name in left else rule)(op)

    # Every device has the picture and computes what it needs of the first map.
    # Every device adds up its own parts of the means that scale maps, so that only rows travel.
    squeezed = means(division.graph, before(maps))
    optional = {roles.DENSE: before(dense), roles.SQUEEZE: squeezed, roles.STEM: lambda _: None}
    return Table({roles.MAP: before(maps)}, optional, uniform=uniform and not cut)


def _along(dim: int, ranges: Callable[[int], tuple[Range, ...]]) -> Rule:
    """Return the layout along a dimension, by each device's range of its extent."""
    return lambda op: [Piece(i, region_with(op, {dim: span(*r)})) for i, r in enumerate(ranges(op.space[dim]))]


def _dense_columns(division: Division) -> Rule:
    return _along(1, lambda n: division.plan.ranges[dense_kind(n)])


# -- own rows of every feature map ----------------------------------------------------------------------------------

HALO: Final = "halo"
AHEAD: Final = "ahead"


def map_rows_table(division: Division) -> Table:
    """`map_rows`: own rows of every feature map, own columns of dense layers, one device alone after a cut.

    Maps of equal height have one division into rows, by speed, which the planner balances on the simulator. Variants
    `ahead` first compute the rows that neighbours wait for.
    """
    rows = _along(0, lambda n: division.plan.ranges[rows_kind(n)])
    whole = map_table(division, rows, _dense_columns(division))
    return borders_first(division.graph, whole) if division.option(HALO) == AHEAD else whole


MAP_ROWS: Final = Method(
    "map_rows",
    "own rows of every feature map, halo from the neighbours",
    map_rows_table,
    needs=(roles.MAP,),
    order_matters=True,
    options=(*CUTS, *({**cut, HALO: AHEAD} for cut in CUTS)),
    solve=ranges_by_size,
    is_distinct=divides_behind_cut,
    coarse=True,
    is_free_of_weights=is_rows_kind,
)


def modnn_table(division: Division) -> Table:
    """`modnn`: rows of each map, assigned greedily to the device that finishes first, as in MoDNN (Mao et al., 2017).

    Fully connected layers are divided by columns in the same way.
    """
    speeds = division.plan.shares["speeds"]
    return map_table(division, _along(0, lambda n: assign_greedily(n, speeds)), _dense_columns(division))


MODNN: Final = Method(
    "modnn",
    "rows of each map greedily to the device that finishes first",
    modnn_table,
    needs=(roles.MAP,),
    order_matters=True,
    solve=modnn_shares,
)


def coedge_table(division: Division) -> Table:
    """`coedge`: the same share of the rows of each map, by a linear programme, as in CoEdge (Zeng et al., 2021).

    The programme weighs computation, links and memory. Dense layers run on the root device. Variant `energy` minimises
    energy under a deadline if the site states the devices' power; otherwise a plan minimises time.
    """
    shares = division.plan.shares["coedge_rows"]
    return map_table(division, _along(0, lambda n: apportion(n, shares)), on_device(division.root))


def _is_energy(options: Options) -> bool:
    return options.get("goal") == "energy"


COEDGE: Final = Method(
    "coedge",
    "own rows of every feature map, shares by a linear programme",
    coedge_table,
    needs=(roles.MAP,),
    options=({}, {"goal": "energy"}),
    is_distinct=lambda _, options: not _is_energy(options),
    chooses_devices=_is_energy,
    solve=lambda graph, options, speeds, resources: (
        {"coedge_rows": coedge_shares(graph, speeds, resources, _is_energy(options))},
        {},
    ),
)


def edgeflow_table(division: Division) -> Table:
    """`edgeflow`: each layer in ranges of its own, solved layer by layer, as in EdgeFlow (Hu and Li, 2022).

    The ranges determine what a unit needs and which device forwards it.
    """
    ranges = division.plan.ranges

    def rule(op: Op) -> list[Piece]:
        return [Piece(i, region_with(op, {cut_dimension(op): span(*r)})) for i, r in enumerate(ranges[op.name])]

    return map_table(division, rule, rule, uniform=False)


EDGEFLOW: Final = Method(
    "edgeflow",
    "rows of each map in shares of its own, solved layer by layer",
    edgeflow_table,
    needs=(roles.MAP,),
    order_matters=True,
    solve=lambda graph, _options, speeds, resources: ({}, edgeflow_ranges(graph, speeds, resources)),
)


# -- tiles, and stages ----------------------------------------------------------------------------------------------


def fused_tiles_table(division: Division) -> Table:
    """`fused_tiles`: tiles of the maps that are read after the cut, each with all maps before it, halo included.

    As in DeepThings (Zhao et al., 2018); after the cut one device continues. Tiles have fixed owners, by speed, or wait
    in a task queue from which free devices lease the next one (`leased`).
    """
    speeds = division.plan.shares["tiles"]
    # Leased tiles wait for no other tile: each computes all inputs of its means.
    apart = "owners" in division.plan.options
    ends = boundary_maps(division.graph, cut_number(division.plan.options), apart)

    def tiled(op: Op) -> list[Piece] | None:
        return [Piece(d, region_with(op, at)) for d, at in owned_tiles(op, speeds)] if op.name in ends else None

    return map_table(division, tiled, on_device(division.root))


FUSED_TILES: Final = Method(
    "fused_tiles",
    "tiles of a feature map, all below them computed with their halo",
    fused_tiles_table,
    needs=(roles.MAP,),
    options=(*CUTS[:4], *({**cut, "owners": "leased"} for cut in CUTS[:4])),
    solve=lambda _graph, _options, speeds, _resources: ({"tiles": tuple(speeds)}, {}),
    # Owners by speed are as fast unless a device slows down during a request, so leases must be pinned.
    is_distinct=lambda graph, options: "owners" not in options and divides_behind_cut(graph, options),
    task_count=lambda options: TILES if "owners" in options else 0,
)


def pipeline_table(division: Division) -> Table:
    """`pipeline`: consecutive parts of the model per device, with micro-batches (PipeEdge, Hu et al., 2022).

    Every tensor of a stage is on its device, with a piece and a turn per micro-batch.
    """
    graph, owners, part_of = division.graph, division.owners(STAGES), parts_of(division.graph)
    cuts = list(enumerate(micro_batches(graph, int(division.option("micro", "1")))))

    def stage(op: Op) -> list[Piece]:
        return [Piece(owners[part_of(op)], region_with(op, cut), order=turn) for turn, cut in cuts]

    if roles.MAP in graph.roles:
        return map_table(division, stage, stage, uniform=False)
    return Table(dict.fromkeys(placed_roles(graph), stage), uniform=False)


PIPELINE: Final = Method(
    "pipeline",
    "consecutive parts of layers per device, micro-batches in flight",
    pipeline_table,
    shares=(STAGES,),
    needs=(),
    needs_any=(roles.AFTER_MLP, roles.MAP),
    options=VARIANTS[:1],
    variants=lambda _: VARIANTS,
    solve=lambda graph, options, speeds, resources: ({}, {STAGES.kind: stages_of(graph, speeds, resources, options)}),
    is_distinct=is_distinct,
    automatic=False,
    for_throughput=True,
    fixed_shares=True,
)
