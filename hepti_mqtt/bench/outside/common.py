"""What every outside baseline shares: its part in a group, and the model and input as it takes them.

A baseline is a module here whose `make` returns what computes the hidden states; `worker` talks to the runner for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.errors import BenchError
from hepti_mqtt.models import encoder
from hepti_mqtt.models.transformer import ModelSpec
from hepti_mqtt.service.requests import prepare

Array = NDArray[Any]

FAMILIES: Final = ("bert", "vit")  # whose layers the baselines compute


@dataclass(frozen=True, slots=True)
class Options:
    """rank, world, master: of the group; a baseline of one process has world 1. variant: of the baseline, or empty.

    packed: weights in the layout of the library that multiplies.
    """

    rank: int = 0
    world: int = 1
    master: str = ""
    variant: str = ""
    packed: bool = False


@dataclass(frozen=True, slots=True)
class Task:
    """A model, and one input: `values` is token ids i32 [m], or normalised patches f32 [n, channels p p].

    tensors: read when asked for and not kept, so that a host holds a weight once.
    """

    spec: ModelSpec
    tensors: Mapping[str, Array]
    values: Array

    @property
    def rows(self) -> int:
        """Return m, the rows of the hidden states."""
        return len(self.values) + (self.spec.image is not None)


class Made(NamedTuple):
    """compute: the hidden states, None where a rank has none. together: returns when every rank has called it.

    leave: ends the rank's part in the group.
    """

    compute: Callable[[], Array | None]
    versions: dict[str, str]
    together: Callable[[], None] = lambda: None
    leave: Callable[[], None] = lambda: None


def task(checkpoint: Checkpoint, body: Mapping[str, Any]) -> Task:
    """Return the task of a request as Hepti reads it; raises RequestError, BenchError for another family."""
    inputs = prepare(checkpoint, {**body, "want": "hidden"}).inputs
    spec = encoder(checkpoint.spec)
    if spec.family not in FAMILIES:
        raise BenchError(f"outside baselines do not compute {spec.architecture}; supported: {', '.join(FAMILIES)}")
    return Task(spec, checkpoint.tensors(), inputs if spec.image is None else _patches(spec, inputs))


def _patches(spec: ModelSpec, pixels: Array) -> Array:
    image = spec.image
    assert image is not None
    mean, std = (np.array(v, np.float32)[:, None, None] for v in (image.mean, image.std))
    values = (pixels[0].astype(np.float32) / 255 - mean) / std
    p, side = image.patch, image.size // image.patch
    blocks = values.reshape(image.channels, side, p, side, p).transpose(1, 3, 0, 2, 4)
    return np.ascontiguousarray(blocks.reshape(image.patches, -1))
