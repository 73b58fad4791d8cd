"""The motivation of the Hepti paper as Programs: five chained MatMuls [m, 1024] x [1024, 1024] on one device or two.

The chain is a small family, and what it measures is method `row` of it: the rows of the left matrix are split, the
secondary gets the last ones in one scatter and gives its product back in one gather. In several chunks, one is computed
while others travel: the executor runs whatever is ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.errors import ConfigError
from hepti_mqtt.lowering import PLANNER_PLACE, Graph, Lowered, Net, Set, Table, on, roles, span, tile
from hepti_mqtt.program import Program

WIDTH: Final = 1024
MATMULS: Final = 5
PRIMARY: Final = "primary"
SECONDARY: Final = "secondary"

# work: rows are computed where they are. echo: they travel and nothing is computed. parts: they are computed and
# nothing travels, so that nothing disturbs either device.
Kind = Literal["work", "echo", "parts"]
KINDS: Final[tuple[Kind, ...]] = ("work", "echo", "parts")

_NAMES: Final = tuple(f"chain.{i}" for i in range(MATMULS))


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement: m rows, of which `share` percent on the secondary device, in `chunks` pieces.

    Raises ConfigError for numbers that mean nothing.
    """

    rows: int
    share: int = 0
    chunks: int = 1
    kind: Kind = "work"

    def __post_init__(self) -> None:
        if self.rows < 1 or not 0 <= self.share <= 100 or self.chunks < 1 or self.kind not in KINDS:
            raise ConfigError(
                f"{self} cannot be measured: need rows >= 1, a share of 0 to 100 percent, chunks >= 1 and a kind of "
                f"{', '.join(KINDS)}"
            )

    @property
    def away(self) -> int:
        """Return the rows of the secondary device."""
        return (2 * self.rows * self.share + 100) // 200

    def pieces(self) -> tuple[tuple[int, int], ...]:
        """Return the ranges of rows that travel, one a chunk; none without rows for the secondary."""
        count = min(self.chunks, self.away)
        edges = [self.rows - self.away + self.away * i // count for i in range(count + 1)] if count else []
        return tuple(pairwise(edges))


@cache
def programs(case: Case) -> dict[str, Program]:
    """Return the Programs of the devices that have work, by name.

    The primary takes x f32 [m, 1024] from its planner and gives it the product of the same shape; in kind `parts` each
    device takes and gives only its own rows.
    """
    home = case.rows - case.away
    if case.kind == "parts":
        rows = {PRIMARY: home, SECONDARY: case.away}
        return {
            name: Lowered(_graph(n, True), _table([(0, span(0, n))]), (name,)).program(name)
            for name, n in rows.items()
            if n
        }
    pieces = [(0, span(0, home)), *((1, span(*rows)) for rows in case.pieces())]
    made = Lowered(_graph(case.rows, case.kind != "echo"), _table(pieces), (PRIMARY, SECONDARY))
    return {name: made.program(name) for name in (PRIMARY, SECONDARY) if name == PRIMARY or case.away}


def _graph(rows: int, computes: bool) -> Graph:
    """Return the chain as a graph: x [m, 1024] -> its product with every matrix; without them rows only travel."""
    net = Net()
    x = net.rows("given", net.input("x", (rows, WIDTH), "f32"), roles.STEM)
    if not computes:
        x = net.rows("echoed", x, roles.DENSE)
    for name in _NAMES if computes else ():
        x = net.linear(name, x, roles.DENSE, {name: WIDTH}, bias=False)
    net.rows("product", x, roles.TASK)
    return net.graph()


def _table(pieces: Sequence[tuple[int, Set]]) -> Table:
    """Return method `row` of this chain: a device has the same rows of every product; the first has the input's."""
    return Table(
        {
            roles.INPUT: on(PLANNER_PLACE),
            roles.STEM: tile((0, {0: rows}) for _, rows in pieces),
            roles.DENSE: tile((device, {0: rows}) for device, rows in pieces),
            roles.TASK: on(0),
        }
    )


def weights(seed: int) -> dict[str, NDArray[np.float32]]:
    """Return the right matrices, scaled so that a product is of the size of its left matrix."""
    rng = np.random.default_rng([seed, 1])
    return {
        f"{name}.weight": rng.standard_normal((WIDTH, WIDTH), np.float32) / np.float32(WIDTH**0.5) for name in _NAMES
    }


def left(seed: int, rows: int) -> NDArray[np.float32]:
    """Return the left matrix [rows, 1024]."""
    return np.random.default_rng([seed, 2, rows]).standard_normal((rows, WIDTH), np.float32)


def reference(case: Case, x: NDArray[Any], matrices: dict[str, NDArray[np.float32]]) -> NDArray[Any]:
    """Return what the case must give, by NumPy in the input's precision."""
    for name in _NAMES if case.kind != "echo" else ():
        x = x @ matrices[f"{name}.weight"]
    return x
