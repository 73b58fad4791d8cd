"""`megatron`: Megatron-LM's division (Shoeybi et al., 2019) with equal shares.

Query, key, value and the first MLP matrix by columns, the other two by rows; the partial sums meet by an all-reduce,
direct or in a ring. Norms run everywhere.
"""

from __future__ import annotations

from hepti_mqtt.lowering import Table, roles
from hepti_mqtt.lowering.layouts import direct, ring
from hepti_mqtt.strategies.method import HEADS, MLP, ROWS, Division, Method


def table(division: Division) -> Table:
    """Return the layouts: the partial sums, and who adds which rows of them."""
    reduce = ring if division.option("reduce") == "ring" else direct
    rows = division.parts(ROWS)
    return Table(
        {
            roles.ATTENTION_OUT: reduce(division.parts(HEADS), rows),
            roles.MLP_DOWN: reduce(division.parts(MLP), rows),
        }
    )


METHOD = Method(
    "megatron",
    "Megatron-LM: own heads and MLP columns, equal shares, all-reduce",
    table,
    shares=(ROWS, HEADS, MLP),
    options=({"reduce": "direct"}, {"reduce": "ring"}),
    equal=True,
    offered=False,
)
