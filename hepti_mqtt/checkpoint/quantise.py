"""Quantises matrices of a checkpoint to blocks on reading (`--weights q8`, `q4`), and measures the errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hepti_mqtt.checkpoint.storage import TensorReader
from hepti_mqtt.core.errors import UnsupportedModelError
from hepti_mqtt.core.storage import Storage
from hepti_mqtt.models import TensorSource

_SAMPLED: Final = 256  # rows of each matrix for the measured error
_LARGEST: Final = float(np.finfo(np.float16).max)  # larger weights might need a scale beyond f16


def quantised_reader(name: str, reader: TensorReader, storage: Storage) -> TensorReader:
    """Return the reader of a matrix in blocks; reading raises UnsupportedModelError for values that do not fit."""

    def raw(start: int, stop: int, columns: int) -> npt.NDArray[np.uint8]:
        values = np.asarray(reader.read(start, stop, columns), np.float32)
        if not np.abs(values).max(initial=0) <= _LARGEST:
            raise UnsupportedModelError(
                f"{name} has weights that are not finite or beyond {_LARGEST:,.0f}, which {storage.name} cannot hold; "
                "leave out --weights"
            )
        return storage.stored(values)

    return TensorReader(reader.shape, storage.name, lambda *place: storage.rows(raw(*place)), raw)


class Quantisation(NamedTuple):
    """The errors of quantised weights, measured on at most 256 rows of each matrix."""

    #: Storage that matrices were quantised to.
    storage: str
    #: Median and largest |W - Q| / |W| over the layers, by kind of matrix.
    errors: Mapping[str, tuple[float, float]]
    #: Matrices that were not quantised.
    left: tuple[str, ...]

    def text(self) -> str:
        """Return it in one line."""
        errors = ", ".join(f"{kind} {middle:.2g} (worst {worst:.2g})" for kind, (middle, worst) in self.errors.items())
        left = f"; {', '.join(self.left)} stay as they are: no whole blocks" if self.left else ""
        return f"weights in {self.storage}, median relative error: {errors}{left}"


def measured(
    storage: str, pairs: Iterable[tuple[TensorSource, TensorReader, TensorReader]], left: tuple[str, ...]
) -> Quantisation:
    """Return the errors of quantised matrices; pairs: (source, reader before, reader after); left: see the field."""
    by_kind: dict[str, list[float]] = {}
    for source, before, after in pairs:
        kind = source.name.removesuffix(".weight").rpartition(".")[2]
        by_kind.setdefault(kind, []).append(_error(before, after, *source.matrix_shape))
    errors = {kind: (float(np.median(each)), max(each)) for kind, each in by_kind.items()}
    return Quantisation(storage, errors, left)


def _error(before: TensorReader, after: TensorReader, rows: int, columns: int) -> float:
    chosen = np.unique(np.linspace(0, rows - 1, min(rows, _SAMPLED)).astype(int)).tolist()
    parts = [(chosen[0], chosen[-1] + 1)] if len(chosen) == rows else [(row, row + 1) for row in chosen]
    wrong = whole = 0.0
    for start, stop in parts:
        values = _read(before, start, stop, columns)
        wrong += float(np.square(_read(after, start, stop, columns) - values).sum())
        whole += float(np.square(values).sum())
    return float(np.sqrt(wrong / whole)) if whole else 0.0


def _read(reader: TensorReader, start: int, stop: int, columns: int) -> npt.NDArray[Any]:
    return np.asarray(reader.read(start, stop, columns), np.float64)
