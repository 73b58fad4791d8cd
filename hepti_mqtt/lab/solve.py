"""Finds the CPU quota at which a host reaches a speed, from measurements that are noisy and not proportional to it.

Throttled speed is not share times full speed: a group that is refilled many times a second finds its caches warm, its
clock higher and its overdraft forgiven, each by an amount that differs from machine to machine. So it is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from hepti_mqtt.errors import LabError

WITHIN: Final = 0.05  # of the target: what a last, independent measurement must show
AIM: Final = 0.02  # of the target: what the search looks for before that
MEASUREMENTS: Final = 24
LEAST: Final = 0.005  # of one core


@dataclass(frozen=True, slots=True)
class Solution:
    """A quota as a share of one core, the speed of the last measurement at it, and how many were made in all."""

    cpu: float
    speed: float
    measurements: int


def solve(measure: Callable[[float], float], target: float, most: float, start: float | None = None) -> Solution:
    """Return the quota at which `measure(quota)` is the target within 5 %, seen again by a measurement of its own.

    measure: speed at a quota. most: the largest quota, in cores. start: where to look first. Raises LabError with the
    figures if the target lies out of reach or the measurements contradict one another for too long.
    """
    cpu = min(max(start if start is not None else most / 2, LEAST), most)
    below: tuple[float, float] | None = None  # the largest quota seen too slow, and its speed
    above: tuple[float, float] | None = None  # the smallest quota seen too fast
    seen: list[str] = []
    looking = True
    while len(seen) < MEASUREMENTS:
        speed = measure(cpu)
        seen.append(f"{cpu:.3f}: {speed:.3g}")
        off = speed / target - 1 if target > 0 else 0.0
        if abs(off) <= (AIM if looking else WITHIN):
            if not looking:
                return Solution(cpu, speed, len(seen))
            looking = False  # the same again: what was searched for is found too easily in noise
            continue
        looking = True
        if (off < 0 and cpu >= most) or (off > 0 and cpu <= LEAST):
            raise LabError(
                f"{target:g} GFLOP/s is out of reach: with {cpu:.3g} of a core this host has {speed:.3g}; "
                "change `gflops:` in the lab file"
            )
        if off < 0:
            below, above = (cpu, speed), above if above is not None and above[0] > cpu else None
        else:
            above, below = (cpu, speed), below if below is not None and below[0] < cpu else None
        if below is not None and above is not None and above[0] - below[0] < AIM * cpu:
            below = above = None  # closer than any speed can be told apart: the machine has drifted since
        cpu = min(max(_next(cpu, speed, target, below, above), LEAST), most)
    raise LabError(
        f"no quota was found for {target:g} GFLOP/s (of a core: GFLOP/s): {', '.join(seen)}; the machine is "
        "too busy or its clock too restless: stop what else runs and try again"
    )


def _next(
    cpu: float, speed: float, target: float, below: tuple[float, float] | None, above: tuple[float, float] | None
) -> float:
    """Return the next quota: on the line between both sides where there are two, else in proportion."""
    if below is None or above is None:
        # At most fourfold at once: a quota of a few microseconds measures nothing but its own granularity.
        return cpu * min(max(target / max(speed, 1e-12), 0.25), 4.0)
    (low, slow), (high, fast) = below, above
    part = (target - slow) / (fast - slow)
    # Not closer to an end than a tenth: noise there would keep the other end where it is for ever.
    return low + (high - low) * min(max(part, 0.1), 0.9)
