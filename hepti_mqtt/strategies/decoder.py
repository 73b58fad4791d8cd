"""`decoder`: each device keeps keys and values of its own heads, and has its own MLP columns.

Partial sums of the attention's output and of the MLP go to everyone, who adds them (a one-shot all-reduce: one round,
which is what counts where one token at a time is computed). Norms and residuals are computed by everyone.
"""

from __future__ import annotations

from hepti_mqtt.lowering import Piece, Table, region_with, roles, shift, split_along, union
from hepti_mqtt.lowering.ops import Op
from hepti_mqtt.strategies.method import HEADS, MLP, Division, Method


def table(division: Division) -> Table:
    """Return the layouts."""
    heads = division.device_sets(HEADS)

    def cache(op: Op) -> list[Piece]:
        half = op.space[1] // 2  # keys, then values
        return [Piece(i, region_with(op, {1: union(part, shift(part, half))})) for i, part in enumerate(heads)]

    return Table(
        {
            roles.CACHE: cache,
            roles.ATTENTION_OUT: split_along(heads, 2),
            roles.MLP_DOWN: split_along(division.device_sets(MLP), 2),
        }
    )


METHOD = Method(
    "decoder",
    "own heads with their cache, and own MLP columns; everyone adds the partial sums",
    table,
    shares=(HEADS, MLP),
    needs=(roles.CACHE, roles.ATTENTION, roles.AFTER_MLP),
    keeps_cache=True,
)
