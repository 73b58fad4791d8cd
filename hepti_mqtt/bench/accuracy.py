"""How far an answer may be from the single-device NumPy reference, and how far it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

# |error| / |reference| (Euclidean norms of all final hidden states) up to which an answer counts as right, by wire.
BOUNDS: Final[Mapping[str, float]] = {"f32": 1e-4, "f16": 1e-2, "i8": 0.2}
# The same by how the layers' matrices are kept.
WEIGHTS: Final[Mapping[str, float]] = {"f32": 1e-4, "f16": 1e-2, "w8a32": 0.1, "w8a8": 0.2}


def relative_error(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Return |found - expected| / |expected| by Euclidean norms; inf where shapes differ or a value is not finite."""
    if found.shape != expected.shape or not np.isfinite(found).all():
        return float("inf")
    scale = float(np.linalg.norm(expected.astype(np.float64)))
    return float(np.linalg.norm(found.astype(np.float64) - expected)) / max(scale, 1e-30)
