"""Token rows that helpers compute behind the attention of one device, which goes on with its own rows meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hepti_mqtt.lowering import Graph, roles
from hepti_mqtt.program import ITEMSIZE
from hepti_mqtt.shares.share import Lane, Options, Shares, Weights
from hepti_mqtt.shares.stages import PARTS, chain_of


def rows_behind(kind: str) -> Callable[[Graph, Options, Weights, Sequence[Lane]], Shares]:
    """Return what finds rows by the devices' speeds; where one device attends for all, by what comes back in time."""

    def solve(graph: Graph, options: Options, weights: Weights, lanes: Sequence[Lane]) -> Shares:
        alone = options.get("variant") == "mlp" and sum(weights) > 0
        return {kind: _behind(graph, weights, lanes) if alone else tuple(weights)}, {}

    return solve


def _behind(graph: Graph, weights: Weights, lanes: Sequence[Lane]) -> tuple[float, ...]:
    """Return the share of rows of each device, the first one being that which attends.

    A helper's rows travel there, take what follows attention, and travel back; all that while the first device has a
    whole layer of its own rows to compute: so helpers have as much as comes back by then.
    """
    total, width = graph.first(roles.AFTER_MLP).space[:2]
    flops = [part / total for part in chain_of(graph).flops[:PARTS]]
    own_s = sum(flops) / max(weights[0], 1.0)
    away_s = [
        sum(flops[1:]) / max(weight, 1.0) + 2 * ITEMSIZE["f32"] * width / lane.bytes_per_s
        for weight, lane in zip(weights[1:], lanes[1:], strict=True)
    ]
    shares = [1.0, *(own_s / seconds for seconds in away_s)]
    return tuple(share / sum(shares) for share in shares)
