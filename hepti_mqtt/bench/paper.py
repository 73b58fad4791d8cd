"""What section 3 of the Hepti paper (ICS 2024) says of five chained MatMuls, as data.

Only figures that its text states are here; of the curves in its figures (a) and (b) no other point could be had, and of
the values of m only 256 is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# Figure (a), 940 Mbit/s, 90 % of the rows on the secondary device.
ROWS: Final = 256
ALONE_MS: Final = 109.3
TOGETHER_MS: Final = 55.1
LEAST_GAIN_PERCENT: Final = 25.1  # over every m of the figure
LARGEST_GAIN_PERCENT: Final = 64.2

# Figure (b), m = 256: the best share of the secondary device in percent, by (Mbit/s, percent of its CPU).
BEST_SHARE: Final[Mapping[tuple[int, int], int]] = {(940, 100): 90, (240, 100): 70, (940, 25): 50, (240, 25): 30}
