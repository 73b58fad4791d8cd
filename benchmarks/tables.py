"""Tables in Markdown, and medians and ratios with the intervals that stand in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Final, NamedTuple

from tabulate import tabulate

LEVEL: Final = 0.95


def table(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Return the lines of a Markdown table; None is an empty cell, floats have five digits."""
    return str(tabulate(list(rows), list(names), tablefmt="github", missingval="", floatfmt=".5g")).splitlines()


class Interval(NamedTuple):
    """A median with its confidence interval; level: the coverage that it really has."""

    median: float
    low: float
    high: float
    level: float

    def words(self, digits: int = 1) -> str:
        """Return the interval for a table."""
        return f"{self.low:.{digits}f} to {self.high:.{digits}f} ({self.level:.0%})"


def median_interval(values: Iterable[float], level: float = LEVEL) -> Interval:
    """Return the median of independent values with the order-statistic interval of at least `level`.

    The interval is [x(k), x(n+1-k)] with the largest k whose coverage 1 - 2 P(Binomial(n, 1/2) < k) reaches `level`;
    below six values no k does, and it is [min, max] with the coverage that this has. No distribution is assumed but a
    continuous one. Raises ValueError without values. Source: David, Nagaraja, Order Statistics, 7.1.
    """
    ordered = sorted(values)
    n = len(ordered)
    if not n:
        raise ValueError("a median needs at least one value")
    # In integers: of more than a thousand values the numbers are larger than a float. below / all: P(Binomial < k).
    k, below, ways, every = 1, 1, n, 2**n
    while k < (n + 1) // 2 and (every - 2 * (below + ways)) / every >= level:
        k, below, ways = k + 1, below + ways, ways * (n - k) // (k + 1)
    return Interval(median(ordered), ordered[k - 1], ordered[n - k], max((every - 2 * below) / every, 0.0))


def ratio(a: Mapping[int, float], b: Mapping[int, float]) -> Interval:
    """Return a / b from the rounds that both have: slow drift of the machine hits both sides of a round alike.

    a, b: round -> median time in it. Raises ValueError if they share no round.
    """
    return median_interval(a[r] / b[r] for r in sorted(a.keys() & b.keys()))
