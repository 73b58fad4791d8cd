"""`replicas`: several complete plans of one model side by side, each run under one of them (data parallelism).

By default every device is a replica by itself; `groups` makes so many replicas of several devices each. Which plan a
replica has inside is the planner's choice. No exchange goes from one to another, and a device knows only its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from hepti_mqtt.shares import Options, Speeds
from hepti_mqtt.shares.share import balanced_groups
from hepti_mqtt.strategies import single
from hepti_mqtt.strategies.method import Method


def groups(options: Options, weights: Speeds) -> Sequence[Sequence[int]]:
    """Return the devices of each replica: as even as can be, the fastest device dealt out first.

    Raises ValueError for more groups than devices.
    """
    count = int(options.get("groups", len(weights)))
    if not 1 <= count <= len(weights):
        raise ValueError(f"{count} groups of {len(weights)} devices; use 1 to {len(weights)}")
    return balanced_groups(count, weights)


METHOD = Method(
    "replicas",
    "several complete plans side by side, each request on one of them",
    single.table,  # a run is under a replica's own plan, which has its own table
    needs=(),
    variants=lambda n: [{}, *({"groups": str(count)} for count in range(2, n))],
    keeps_cache=True,
    automatic=False,
    for_throughput=True,
    groups=groups,
)
