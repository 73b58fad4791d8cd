"""A linear programme by the dual simplex method: a few dozen rows, exact up to rounding, the same on every machine."""

from __future__ import annotations

from itertools import count
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
SMALL: Final = 1e-10
FAST: Final = 5  # steps for each row


def least(costs: Array, rows: Array, bounds: Array) -> Array | None:
    """Return the x >= 0 with rows x >= bounds for which costs x is least, None if there is none.

    costs [n], none below 0; rows [m, n], bounds [m]. With such costs x = 0 is optimal, if not feasible, and each step
    of the dual method repairs one row (Lemke, 1954). What takes too long goes on by number (Bland, 1977), and so
    ends.
    """
    m, n = rows.shape
    # A tableau row: -rows x + slack = -bounds; the last one holds the reduced costs, the last column the values.
    tableau = np.zeros((m + 1, n + m + 1))
    tableau[:m, :n], tableau[:m, n : n + m], tableau[:m, -1] = -rows, np.eye(m), -bounds
    tableau[m, :n] = costs
    basis = np.arange(n, n + m)
    for step in count():
        below = np.flatnonzero(tableau[:m, -1] < -SMALL)
        if not len(below):
            break
        # The row that is furthest off needs the fewest steps, but only the first one is sure to end.
        row = below[np.argmin(tableau[below, -1] if step < FAST * m else basis[below])]
        able = np.flatnonzero(tableau[row, :-1] < -SMALL)
        if not len(able):
            return None
        ratios = tableau[m, able] / -tableau[row, able]
        column = able[np.flatnonzero(ratios <= ratios.min() + SMALL)[0]]
        tableau[row] /= tableau[row, column]
        others = np.arange(m + 1) != row
        tableau[others] -= np.outer(tableau[others, column], tableau[row])
        basis[row] = column
    x = np.zeros(n + m)
    x[basis] = tableau[:m, -1]
    return x[:n]
