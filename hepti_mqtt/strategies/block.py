"""`block`: own heads and MLP columns, then own rows of the next matrix; partial sums meet by reduce-scatter and
all-gather (docs/methods/block.md; reconstructed). Norms and residuals run on own token rows between the two.
"""

from __future__ import annotations

from hepti_mqtt.lowering import Table, between_blocks, roles, split_along
from hepti_mqtt.strategies.method import HEADS, MLP, ROWS, Division, Method


def table(division: Division) -> Table:
    """Return the layouts."""
    partial = {
        roles.ATTENTION_OUT: split_along(division.device_sets(HEADS), 2),
        roles.MLP_DOWN: split_along(division.device_sets(MLP), 2),
    }
    return Table(partial, between_blocks(split_along(division.device_sets(ROWS), 0), division.root))


METHOD = Method(
    "block", "own heads and MLP columns, partial sums reduced on own rows", table, shares=(ROWS, HEADS, MLP)
)
