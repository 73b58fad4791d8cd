"""Bands: ranges of rows of a map that one convolution computes, whatever lies between them.

Attribute `bands`, where there are several: for each (first row of x that it sees, the one behind the last, rows of
zeros above those and below, its first row on the whole map). Bands may see the same rows of x, and see none but their
own. What is written has their rows one behind the other. `pad` has no rows then: 0 above and below.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.kernels.base import Array, Check
from hepti_mqtt.kernels.conv.windows import Window, fitting, measured, patches_of
from hepti_mqtt.program import Compute, SlotSpec


class Band(NamedTuple):
    """Rows first..stop of x, with rows of zeros above and below, make `out` rows, from row `origin` of a map on."""

    first: int
    stop: int
    top: int
    bottom: int
    origin: int
    out: int


def banded(check: Check, op: Compute) -> tuple[Window, tuple[Band, ...]]:
    """Return the window of an op as `window_of` does, whose rows written are those of all bands, and the bands."""
    window, (top, _, bottom, _) = measured(check, op), op.attrs["pad"]
    given = op.attrs.get("bands")
    if given is None:
        row = op.attrs.get("origin", (0, 0))[0]
        bands: tuple[Band, ...] = (Band(0, window.rows, top, bottom, row, window.out_rows),)
    else:
        check.that(top == bottom == 0, f"pad {op.attrs['pad']} must have no rows where bands have their own")
        bands = tuple([_band(check, op, window, *band) for band in given])
        window = window._replace(out_rows=sum(band.out for band in bands))
    check.shape(check.writes[0], (window.out_rows, window.out_columns, check.writes[0].shape[2]))
    return window, bands


def _band(check: Check, op: Compute, window: Window, *given: int) -> Band:
    check.that(len(given) == 5, f"band {given} must have 5 numbers")
    first, stop, top, bottom, origin = given
    check.that(0 <= first <= stop <= window.rows, f"band {given} must lie within the {window.rows} rows of the map")
    check.that(min(top, bottom, origin) >= 0, f"band {given} must have no number below 0")
    return Band(first, stop, top, bottom, origin, fitting(op, 0, stop - first + top + bottom))


def lines(bands: Sequence[Band], stride: int) -> NDArray[np.int64]:
    """Return, for each row written, (the first row of x that it sees, the first one of its band, the last one + 1)."""
    found = [(b.first + i * stride - b.top, b.first, b.stop) for b in bands for i in range(b.out)]
    return np.asarray(found, np.int64).reshape(-1, 3)


def patches_of_bands(op: Compute, x: Array, out: SlotSpec) -> Array:
    """Return the patches of x, each band as if it were alone, one behind the other; for references."""
    if "bands" not in op.attrs:
        return patches_of(op, x, out, 0.0)
    found, (_, left, _, right) = [], op.attrs["pad"]
    for first, stop, top, bottom, _ in op.attrs["bands"]:
        alone = op._replace(attrs={**op.attrs, "pad": (top, left, bottom, right)})
        rows = fitting(op, 0, stop - first + top + bottom)
        found.append(patches_of(alone, x[first:stop], SlotSpec((rows, *out.shape[1:])), 0.0))
    return np.concatenate(found)
