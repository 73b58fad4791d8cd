"""What an answer is checked with: seeded inputs, and the single-device NumPy reference."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.errors import RequestError
from hepti_mqtt.models.reads import Pictures, Text
from hepti_mqtt.service.requests import prepare
from hepti_mqtt.spec import Spec

PATCHES: Final = 9  # of colour along a side of a photograph
NOISE: Final = 4.0  # of its sensor, of 256 steps
QUALITY: Final = 90


def random_input(spec: Spec, count: int, seed: int, photographs: bool = False) -> dict[str, Any]:
    """Return `count` seeded random token ids, or `count` seeded random pictures for an image model.

    photographs: JPEG files of the size that cameras make of such pictures, where others are PNG files of noise, which
    every decoder reads alike.
    """
    rng = np.random.default_rng(seed)
    reads = spec.reads
    if isinstance(reads, Text):
        if count > reads.longest:
            raise RequestError(f"{count} tokens are more than the {reads.longest} that the model reads")
        return {"ids": rng.integers(0, reads.vocab, count).tolist()}
    assert isinstance(reads, Pictures)
    file = _photograph if photographs else _noise
    pictures = [base64.b64encode(file(rng, reads.size)).decode() for _ in range(count)]
    return {"images": pictures} if count > 1 else {"image": pictures[0]}


def _noise(rng: np.random.Generator, size: int) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (size, size, 3)).astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def _photograph(rng: np.random.Generator, size: int) -> bytes:
    """Return patches of colour that run into each other, with noise: so much of it that the file is of a usual size."""
    from PIL import Image

    patches = Image.fromarray(rng.integers(0, 256, (PATCHES, PATCHES, 3)).astype(np.uint8))
    seen = np.asarray(patches.resize((size, size), Image.Resampling.BICUBIC), np.float32)
    pixels = np.clip(seen + rng.normal(0, NOISE, seen.shape), 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=QUALITY, subsampling=0)
    return buffer.getvalue()


def reference(checkpoint: Checkpoint, body: Mapping[str, Any]) -> NDArray[np.float32]:
    """Return the reference's final hidden states [m, h] for a request."""
    prepared = prepare(checkpoint, {**body, "want": "hidden"})
    hidden, _ = models.reference(checkpoint.spec, checkpoint.tensors(), prepared.inputs, prepared.shape)
    return np.asarray(hidden, np.float32)
