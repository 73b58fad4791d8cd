"""`voltage`: equal shares of the token rows, gathered once a layer; everyone computes keys and values of all rows
(Voltage, Hu and Li, 2024). The order of the product of queries and keys is not chosen by cost here.
"""

from __future__ import annotations

from hepti_mqtt.lowering import Table, roles, split
from hepti_mqtt.strategies.method import ROWS, Division, Method


def table(division: Division) -> Table:
    """Return the layouts: only the rows between layers have a place."""
    return Table({roles.AFTER_MLP: split(division.parts(ROWS), 0)})


METHOD = Method("voltage", "own token rows, gathered once a layer", table, shares=(ROWS,), equal=True, offered=False)
