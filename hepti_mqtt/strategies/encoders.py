"""Methods for transformers, and `single` and `replicas`: for each its table and its variants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, get_args

from hepti_mqtt.core.plan import WeightDtype
from hepti_mqtt.lowering import roles
from hepti_mqtt.lowering.layouts import (
    ROWWISE_ROLES,
    Piece,
    Rule,
    Table,
    between_blocks,
    explicit,
    merge_parts,
    qkv_columns,
    reduce_scatter,
    region_with,
    ring_all_gather,
    ring_all_reduce,
    ring_order,
    ring_reduce_scatter,
    split_along,
    split_into_groups,
)
from hepti_mqtt.lowering.ops import Op
from hepti_mqtt.lowering.regions import IndexSet
from hepti_mqtt.lowering.rewrites import choose_product_order
from hepti_mqtt.shares import Options, Speeds
from hepti_mqtt.shares.share import PLACEMENTS, assign_sub_blocks, balanced_groups
from hepti_mqtt.shares.stages import offload_rows
from hepti_mqtt.strategies.method import BRANCHES, COLUMNS, HEADS, MLP, MLP_IN_PROPORTION, ROWS, Division, Method


def single_table(_: Division) -> Table:
    """`single`, the baseline: an empty table, so the root device computes everything."""
    return Table()


SINGLE: Final = Method(
    "single", "one device computes everything", single_table, needs=(), max_devices=1, keeps_cache=True
)


def row_table(division: Division) -> Table:
    """`row`: every device holds all weights and computes its own token rows (docs/methods/row.md; reconstructed).

    Variant `kv` gathers K and V once per layer and attends to each source's block as it arrives. `heads` turns token
    rows into heads and back (all-to-all), for the next device first; with two `groups` of rows per device, one's
    matmuls hide the other's exchanges. In `mlp` the root device attends for all, for others' rows first.
    """
    groups = split_into_groups(division.device_sets(ROWS), int(division.option("groups", "1")))
    own = [(i, rows) for group in groups for i, rows in enumerate(group)]
    lines = {roles.AFTER_MLP: explicit((i, {0: r}) for i, r in own)}
    if division.option("variant", "kv") == "kv":
        whole = division.graph.first_with_role(roles.ATTENTION).full_region[1]
        columns = [qkv_columns(division.graph, whole, which) for which in ("kv", "q")]
        lines[roles.QKV] = explicit((i, {0: r, 1: c}) for i, r in own for c in columns)
        lines[roles.ATTENTION] = explicit((i, {0: r, 2: keys}) for i, r in own for _, keys in own)
    elif division.option("variant") == "heads":
        heads = division.device_sets(HEADS)
        qkv = [qkv_columns(division.graph, h) for h in heads]
        lines[roles.QKV] = explicit((i, {0: r, 1: c}) for i, r in own for c in ring_order(qkv, i))
        rings = [(i, h, r) for i, h in enumerate(heads) for group in groups for r in ring_order(group, i)]
        lines[roles.ATTENTION] = explicit((i, {0: r, 1: h}) for i, h, r in rings)
    elif division.option("variant") == "mlp":
        order = [(division.root, {0: r}) for r in ring_order(groups[0], division.root)]
        lines[roles.ATTENTION], lines[roles.QKV] = explicit(order), explicit(reversed(order))
    return Table(lines, dict.fromkeys(ROWWISE_ROLES, lines[roles.AFTER_MLP]) if len(groups) > 1 else {})


ROW: Final = Method(
    "row",
    "own token rows, all weights everywhere",
    row_table,
    shares=(ROWS, HEADS),
    options=({"variant": "kv"}, {"variant": "heads"}, {"variant": "mlp"}, {"variant": "heads", "groups": "2"}),
    is_distinct=lambda _, options: "groups" not in options,
    solve=offload_rows(ROWS.kind),
)


def column_table(division: Division) -> Table:
    """`column`: every device holds own columns of every matrix (docs/methods/column.md; reconstructed).

    No partial sums: each output element is computed whole, in the same order as on one device. Every device computes
    the norms and residuals that it needs.
    """
    own = split_along(division.device_sets(COLUMNS), 1)
    return Table(
        {
            roles.ATTENTION: split_along(division.device_sets(HEADS), 1),
            roles.ATTENTION_OUT: own,
            roles.MLP_HIDDEN: split_along(division.device_sets(MLP), 1),
            roles.MLP_DOWN: own,
        }
    )


COLUMN: Final = Method(
    "column", "own columns of every matrix, no partial sums", column_table, shares=(HEADS, COLUMNS, MLP)
)


def block_table(division: Division) -> Table:
    """`block`: own heads and MLP columns, then own rows of the next matrix (docs/methods/block.md; reconstructed).

    Partial sums meet by reduce-scatter and all-gather; norms and residuals run on own token rows between the two.
    """
    partial = {
        roles.ATTENTION_OUT: split_along(division.device_sets(HEADS), 2),
        roles.MLP_DOWN: split_along(division.device_sets(MLP), 2),
    }
    return Table(partial, between_blocks(split_along(division.device_sets(ROWS), 0), division.root))


BLOCK: Final = Method(
    "block", "own heads and MLP columns, partial sums reduced on own rows", block_table, shares=(ROWS, HEADS, MLP)
)


def grid_table(division: Division) -> Table:
    """`grid`: devices in Nt x Ns; heads and MLP columns over Nt, token rows over Ns (ours, between `row` and `block`).

    Device s Nt + t holds heads and columns t and computes rows s; between the blocks it has its own part of them.
    """
    n, nt = division.devices, int(division.option("nt", "1"))
    own = division.device_sets(ROWS)
    rows, heads, mlp = merge_parts(own, nt), division.equal_sets(HEADS, nt), division.equal_sets(MLP, nt)
    at = [(s * nt + t, s, t) for s in range(n // nt) for t in range(nt)]
    columns = {t: [qkv_columns(division.graph, heads[t], which) for which in ("kv", "q")] for t in range(nt)}
    return Table(
        {
            roles.QKV: explicit((i, {0: rows[s], 1: c}) for i, s, t in at for c in columns[t]),
            roles.ATTENTION: explicit((i, {0: rows[s], 1: heads[t], 2: keys}) for i, s, t in at for keys in rows),
            roles.ATTENTION_OUT: explicit((i, {0: rows[s], 2: heads[t]}) for i, s, t in at),
            roles.MLP_DOWN: explicit((i, {0: rows[s], 2: mlp[t]}) for i, s, t in at),
        },
        between_blocks(split_along(own, 0)),
    )


GRID: Final = Method(
    "grid",
    "heads and columns over some devices, token rows over the others",
    grid_table,
    shares=(ROWS,),
    options=({"nt": "1"},),
    variants=lambda n: [{"nt": str(t)} for t in range(1, n + 1) if n % t == 0],
    automatic=False,
)


def megatron_table(division: Division) -> Table:
    """`megatron`: Megatron-LM's division (Shoeybi et al., 2019) with equal shares.

    Query, key, value and the first MLP matrix by columns, the other two by rows; partial sums meet by an all-reduce,
    direct or in a ring. Norms run everywhere.
    """
    reduce = ring_all_reduce if division.option("reduce") == "ring" else reduce_scatter
    rows = division.device_sets(ROWS)
    return Table(
        {
            roles.ATTENTION_OUT: reduce(division.device_sets(HEADS), rows),
            roles.MLP_DOWN: reduce(division.device_sets(MLP), rows),
        }
    )


MEGATRON: Final = Method(
    "megatron",
    "Megatron-LM: own heads and MLP columns, equal shares, all-reduce",
    megatron_table,
    shares=(ROWS, HEADS, MLP),
    options=({"reduce": "direct"}, {"reduce": "ring"}),
    equal_shares=True,
    automatic=False,
)


def two_d_table(division: Division) -> Table:
    """`two_d`: weights in X x Y tiles (Pope et al., 2022), activations by columns, norms from partial moments.

    Device y X + x holds tile (x, y). X, an option of the plan, is 1 by default: that sends least for few devices.
    """
    nx = int(division.option("x", "1"))
    ny = division.devices // nx
    at = [(y * nx + x, x, y) for y in range(ny) for x in range(nx)]
    heads, mlp, turned = (division.device_sets(share) for share in (HEADS, MLP, COLUMNS))
    wide, heads_y, mlp_y = merge_parts(turned, ny), merge_parts(heads, nx), merge_parts(mlp, nx)
    columns = [turned[x * ny + y] for _, x, y in at]
    own = split_along(columns, 1)
    return Table(
        {
            roles.ATTENTION: split_along(heads, 1),
            roles.ATTENTION_OUT: explicit((i, {1: wide[x], 2: heads_y[y]}) for i, x, y in at),
            roles.MLP_UP: explicit((i, {1: mlp_y[y], 2: wide[x]}) for i, x, y in at),
            roles.MLP_HIDDEN: split_along(mlp, 1),
            roles.MLP_DOWN: explicit((i, {1: wide[x], 2: mlp_y[y]}) for i, x, y in at),
            roles.MOMENTS: split_along(columns, 2),
        },
        {**between_blocks(own), roles.ATTENTION_SUM: own, roles.MLP_SUM: own},
    )


TWO_D: Final = Method(
    "two_d",
    "weights in X x Y tiles, activations by columns",
    two_d_table,
    shares=(HEADS, MLP, COLUMNS),
    options=({"x": "1"},),
    variants=lambda n: [{"x": str(x)} for x in range(1, n + 1) if n % x == 0],
    equal_shares=True,
    automatic=False,
)


def galaxy_table(division: Division) -> Table:
    """`galaxy`: `block` with uneven shares by capacity and overlapped exchanges (Ye et al., 2024).

    A matmul next to an exchange is cut into rows: one part travels while the next is computed, direct or, as in the
    paper, in a ring.
    """
    rows, heads, mlp = division.device_sets(ROWS), division.device_sets(HEADS), division.device_sets(MLP)
    n, qkv = division.devices, [qkv_columns(division.graph, own) for own in heads]
    ring = division.option("exchange", "direct") == "ring"
    # The order of rows in which each device computes: in a ring as they arrive, its own first.
    order = [(i, (i - t) % n if ring else t) for i in range(n) for t in range(n)]

    def by_rows(parts: list[IndexSet], dim: int) -> Rule:
        return explicit((i, {0: rows[c], dim: parts[i]}) for i, c in order)

    return Table(
        {
            roles.QKV: by_rows(qkv, 1),
            roles.ATTENTION_OUT: ring_reduce_scatter(heads, rows) if ring else by_rows(heads, 2),
            roles.MLP_HIDDEN: by_rows(mlp, 1),
            roles.MLP_DOWN: ring_reduce_scatter(mlp, rows) if ring else by_rows(mlp, 2),
        },
        between_blocks(ring_all_gather(rows) if ring else split_along(rows, 0), division.root),
    )


GALAXY: Final = Method(
    "galaxy",
    "heads and MLP columns, norms on token shares, exchanges overlapped",
    galaxy_table,
    shares=(ROWS, HEADS, MLP),
    options=({"exchange": "direct"}, {"exchange": "ring"}),
)


def voltage_table(division: Division) -> Table:
    """`voltage`: shares of the token rows, gathered once a layer (Voltage, Hu and Li, 2024).

    Shares are equal, or follow the devices' speeds (`shares: uneven`). Every device computes all keys and values, or
    attends to the rows themselves, whichever is faster for a request (`order: kept` or `reordered` pins it).
    """
    return Table({roles.AFTER_MLP: split_along(division.device_sets(ROWS), 0)})


_ORDERS: Final[Sequence[Options]] = ({}, {"order": "kept"}, {"order": "reordered"})
_VOLTAGE: Final = tuple({"shares": shares, **order} for shares in ("equal", "uneven") for order in _ORDERS)

VOLTAGE: Final = Method(
    "voltage",
    "own token rows, gathered once a layer",
    voltage_table,
    shares=(ROWS,),
    options=_VOLTAGE[:1],
    variants=lambda _: _VOLTAGE,
    is_distinct=lambda _, options: "order" not in options,
    rewrite=lambda division: choose_product_order(
        division.graph, division.option("order", "cost"), division.device_sets(ROWS), division.plan.weight_dtype
    ),
    solve=lambda _graph, options, speeds, _resources: (
        {ROWS.kind: tuple(speeds) if options.get("shares") == "uneven" else (1.0,) * len(speeds)},
        {},
    ),
    weight_dtypes=lambda options: ("f32",) if options.get("order") == "reordered" else get_args(WeightDtype),
)


def decoupled_table(division: Division) -> Table:
    """`decoupled`: DeTransformer's placement (DATE 2024) of a decoupled transformer: sub-blocks on own devices.

    The end of every sub-block has a place, by time, bytes sent and memory; the ops before it follow. Every device that
    continues computes the original layers (plan i), or they are divided as in `megatron` (plan ii); after the last
    group the root computes them alone, or they are divided.
    """
    owners = division.owners(BRANCHES)
    inner, end = division.option("original"), division.graph.layer_count() - 1
    outer = division.option("last", inner)

    def ends(op: Op) -> list[Piece] | None:
        return [Piece(owners[op.branch], region_with(op, {}))] if op.branch >= 0 else None

    def whole(rule: Rule) -> Rule:
        return lambda op: rule(op) if op.branch < 0 and (outer if op.layer == end else inner) == "megatron" else None

    shared = megatron_table(division).rules if "megatron" in (inner, outer) else {}
    return Table({roles.AFTER_MLP: ends, **{role: whole(rule) for role, rule in shared.items()}})


DECOUPLED: Final = Method(
    "decoupled",
    "DeTransformer: independent sub-blocks on devices of their own",
    decoupled_table,
    shares=(BRANCHES, ROWS, HEADS, MLP),
    needs=(roles.SLICE, roles.JOIN),
    options=PLACEMENTS,
    solve=lambda graph, _, speeds, resources: (
        {},
        {BRANCHES.kind: assign_sub_blocks(graph, BRANCHES.unit_count(graph), speeds, resources)},
    ),
)


def decoder_table(division: Division) -> Table:
    """`decoder`: each device keeps keys and values of its own heads, and has its own MLP columns.

    In runs of few rows every device receives all partial sums and adds them (a one-shot all-reduce in one round, since
    rounds dominate the time of a single token), and computes norms and residuals. Runs of more rows have another
    layout if the planner finds it faster. `block` reduces sums on own rows. `row` computes own rows with all weights,
    as the method `row` does, and sends queries, keys and values to the devices with the cache of their heads. So the
    cache is the same in all layouts.
    """
    heads, rows = division.device_sets(HEADS), split_along(division.device_sets(ROWS), 0)

    def cache(op: Op) -> list[Piece]:
        parts = [qkv_columns(division.graph, part, "kv") for part in heads]
        return [Piece(i, region_with(op, {1: part})) for i, part in enumerate(parts)]

    if division.layout == "row":
        return Table(
            {roles.CACHE: cache, roles.QKV: rows, roles.ATTENTION: split_along(heads, 1), roles.AFTER_MLP: rows}
        )
    embedded = None if division.divides_embeddings else division.root
    return Table(
        {
            roles.CACHE: cache,
            roles.ATTENTION_OUT: split_along(heads, 2),
            roles.MLP_DOWN: division.split(MLP_IN_PROPORTION, 2),
        },
        between_blocks(rows, embedded) if division.layout == "block" else {},
    )


DECODER: Final = Method(
    "decoder",
    "own heads with their cache, and own MLP columns; many rows: sums on own ones, or own rows with all weights",
    decoder_table,
    shares=(ROWS, HEADS, MLP_IN_PROPORTION),
    needs=(roles.CACHE, roles.ATTENTION, roles.AFTER_MLP),
    keeps_cache=True,
    layouts=("block", "row"),
)


def replica_groups(options: Options, speeds: Speeds) -> Sequence[Sequence[int]]:
    """Return the devices of each replica (data parallelism): every device alone, or `groups` groups of even speed.

    Raises ValueError for more groups than devices.
    """
    count = int(options.get("groups", len(speeds)))
    if not 1 <= count <= len(speeds):
        raise ValueError(f"{count} groups of {len(speeds)} devices; use 1 to {len(speeds)}")
    return balanced_groups(count, speeds)


# The planner chooses the plan inside a replica. Replicas exchange nothing, and a device knows only its own replica.
REPLICAS: Final = Method(
    "replicas",
    "several complete plans side by side, each request on one of them",
    single_table,  # a run uses a replica's own plan, which has its own table
    needs=(),
    variants=lambda n: [{}, *({"groups": str(count)} for count in range(2, n))],
    keeps_cache=True,
    automatic=False,
    for_throughput=True,
    groups=replica_groups,
)
