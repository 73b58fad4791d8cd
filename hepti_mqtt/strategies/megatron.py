"""`megatron`: Megatron-LM's division (Shoeybi et al., 2019) with equal shares.

Query, key, value and the first MLP matrix by columns, the other two by rows; the partial sums meet by an all-reduce,
direct or in a ring. Norms run everywhere.
"""

from __future__ import annotations

from hepti_mqtt.lowering import Table, roles
from hepti_mqtt.lowering.layouts import reduce_scatter, ring_all_reduce
from hepti_mqtt.strategies.method import HEADS, MLP, ROWS, Division, Method


def table(division: Division) -> Table:
    """Return the layouts: the partial sums, and who adds which rows of them."""
    reduce = ring_all_reduce if division.option("reduce") == "ring" else reduce_scatter
    rows = division.device_sets(ROWS)
    return Table(
        {
            roles.ATTENTION_OUT: reduce(division.device_sets(HEADS), rows),
            roles.MLP_DOWN: reduce(division.device_sets(MLP), rows),
        }
    )


METHOD = Method(
    "megatron",
    "Megatron-LM: own heads and MLP columns, equal shares, all-reduce",
    table,
    shares=(ROWS, HEADS, MLP),
    options=({"reduce": "direct"}, {"reduce": "ring"}),
    equal_shares=True,
    automatic=False,
)
