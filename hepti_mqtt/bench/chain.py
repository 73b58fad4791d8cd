"""The motivation of the Hepti paper as Programs: five chained MatMuls [m, 1024] x [1024, 1024] on one device or two.

The rows of the left matrix are split: the secondary gets the last ones in one scatter and gives its product back in
one gather. In several chunks, one is computed while others travel: the executor runs whatever is ready.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.errors import ConfigError
from hepti_mqtt.program import PLANNER, Builder, Program, Slot, WeightRef

WIDTH: Final = 1024
MATMULS: Final = 5
PRIMARY: Final = "primary"
SECONDARY: Final = "secondary"

# work: rows are computed where they are. echo: they travel and nothing is computed. parts: they are computed and
# nothing travels, so that nothing disturbs either device.
Kind = Literal["work", "echo", "parts"]
KINDS: Final[tuple[Kind, ...]] = ("work", "echo", "parts")

_REFS: Final = tuple(WeightRef(f"chain.{i}", (0, WIDTH), (0, WIDTH)) for i in range(MATMULS))


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
    alone = case.kind == "parts"
    home = case.rows - case.away
    out = {}
    if home or not alone:
        out[PRIMARY] = _alone(PRIMARY, home) if alone else _primary(case, home)
    if case.away:
        out[SECONDARY] = _alone(SECONDARY, case.away) if alone else _secondary(case)
    return out


def _primary(case: Case, home: int) -> Program:
    b = Builder(PRIMARY)
    x = b.recv((case.rows, WIDTH), PLANNER, "input")
    pieces = case.pieces()
    for b.layer, rows in enumerate(pieces):
        b.send(x, (SECONDARY,), "scatter", rows)
    b.layer = 0
    parts: list[Slot] = []
    if home:
        own = b.compute("take_rows", (x,), (home, WIDTH), rows=tuple(range(home))) if pieces else x
        parts.append(_chain(b, own, case.kind))
    for b.layer, (start, stop) in enumerate(pieces):
        parts.append(b.recv((stop - start, WIDTH), SECONDARY, "gather"))
    b.layer = 0
    whole = parts[0] if len(parts) == 1 else b.compute("concat_rows", parts, (case.rows, WIDTH))
    b.send(whole, (PLANNER,), "output")
    return b.build()


def _secondary(case: Case) -> Program:
    b = Builder(SECONDARY)
    for b.layer, (start, stop) in enumerate(case.pieces()):
        rows = b.recv((stop - start, WIDTH), PRIMARY, "scatter")
        b.send(_chain(b, rows, case.kind), (PRIMARY,), "gather")
    return b.build()


def _alone(device: str, rows: int) -> Program:
    b = Builder(device)
    b.send(_chain(b, b.recv((rows, WIDTH), PLANNER, "input"), "parts"), (PLANNER,), "output")
    return b.build()


def _chain(b: Builder, x: Slot, kind: Kind) -> Slot:
    """Emit the MatMuls; nothing where rows only travel."""
    for ref in _REFS if kind != "echo" else ():
        x = b.compute("linear", (x,), b.shape(x), (ref,), bias=False, activation=None, residual=False)
    return x


def weights(seed: int) -> dict[str, NDArray[np.float32]]:
    """Return the right matrices, scaled so that a product is of the size of its left matrix."""
    rng = np.random.default_rng([seed, 1])
    return {ref.tensor: rng.standard_normal((WIDTH, WIDTH), np.float32) / np.float32(WIDTH**0.5) for ref in _REFS}


def left(seed: int, rows: int) -> NDArray[np.float32]:
    """Return the left matrix [rows, 1024]."""
    return np.random.default_rng([seed, 2, rows]).standard_normal((rows, WIDTH), np.float32)


def reference(case: Case, x: NDArray[Any], matrices: dict[str, NDArray[np.float32]]) -> NDArray[Any]:
    """Return what the case must give, by NumPy in the input's precision."""
    for ref in _REFS if case.kind != "echo" else ():
        x = x @ matrices[ref.tensor]
    return x
