"""Consecutive ranges for devices in their order, so that the slowest is as fast as can be: by dynamic programming."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.plan import Range

Array = NDArray[np.float64]


def consecutive(costs: Array) -> tuple[Range, ...]:
    """Return a range of points for each device, for which the largest cost is least; exact, in whole points.

    costs [N, P, P]: of device i having start..stop, inf where it cannot. Of equal solutions that which gives the later
    devices least.
    """
    devices, points, _ = costs.shape
    best = np.full(points, np.inf)
    best[0] = 0.0
    chosen = np.zeros((devices, points), int)
    for i in range(devices):
        through = np.maximum(best[:, None], costs[i])
        chosen[i] = points - 1 - np.argmin(through[::-1], axis=0)
        best = through[chosen[i], np.arange(points)]
    at, out = points - 1, []
    for i in reversed(range(devices)):
        start = int(chosen[i, at])
        out.append((start, at))
        at = start
    return tuple(reversed(out))
