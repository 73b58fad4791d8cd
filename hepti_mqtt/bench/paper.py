"""What section 3 of the Hepti paper (ICS 2024) says of five chained MatMuls, as data.

Only figures that its text states are here; of the curves in its figures (a) and (b) no other point could be had, and of
the values of m only 256 is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class Split(NamedTuple):
    """How the latency at one share divides, in percent of it."""

    compute: float
    communication: float


# Figure (a), 940 Mbit/s, 90 % of the rows on the secondary device.
ROWS: Final = 256
ALONE_MS: Final = 109.3
COMPUTE_MS: Final = 34.2  # of the slower of the two devices
COMMUNICATION_MS: Final = 20.8
TOGETHER_MS: Final = 55.1
LEAST_GAIN_PERCENT: Final = 25.1  # over every m of the figure
LARGEST_GAIN_PERCENT: Final = 64.2

# Figure (b), m = 256: the best share of the secondary device in percent, by (Mbit/s, percent of its CPU).
BEST_SHARE: Final[Mapping[tuple[int, int], int]] = {(940, 100): 90, (240, 100): 70, (940, 25): 50, (240, 25): 30}

# Figure (b), 940 Mbit/s and 100 % CPU, by share of the secondary device in percent.
SPLITS: Final[Mapping[int, Split]] = {10: Split(89.3, 10.69), 100: Split(57.5, 42.5)}
