"""`column`: every device holds own columns of every matrix (docs/methods/column.md; reconstructed).

No partial sums: each output element is computed whole, in the same order as on one device. What lies between the
matrices (norms, residuals) is computed by everyone who needs it.
"""

from __future__ import annotations

from hepti_mqtt.lowering import Table, roles, split_along
from hepti_mqtt.strategies.method import COLUMNS, HEADS, MLP, Division, Method


def table(division: Division) -> Table:
    """Return the layouts."""
    own = split_along(division.device_sets(COLUMNS), 1)
    return Table(
        {
            roles.ATTENTION: split_along(division.device_sets(HEADS), 1),
            roles.ATTENTION_OUT: own,
            roles.MLP_HIDDEN: split_along(division.device_sets(MLP), 1),
            roles.MLP_DOWN: own,
        }
    )


METHOD = Method("column", "own columns of every matrix, no partial sums", table, shares=(HEADS, COLUMNS, MLP))
