"""Seeded inputs of requests, and how far an answer is from the single-device NumPy reference."""

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
from hepti_mqtt.service.requests import prepare
from hepti_mqtt.spec import ModelSpec

# |error| / |reference| (Euclidean norms of all final hidden states) up to which an answer counts as right, by wire.
BOUNDS: Final[Mapping[str, float]] = {"f32": 1e-4, "f16": 1e-2, "i8": 0.2}


def random_input(spec: ModelSpec, count: int, seed: int) -> dict[str, Any]:
    """Return `count` seeded random token ids, or `count` seeded random pictures for an image model."""
    rng = np.random.default_rng(seed)
    if spec.text is not None:
        if count > spec.max_tokens:
            raise RequestError(f"{count} tokens are more than the {spec.max_tokens} that the model reads")
        return {"ids": rng.integers(0, spec.text.vocab, count).tolist()}
    from PIL import Image

    assert spec.image is not None
    pictures = []
    for _ in range(count):
        pixels = rng.integers(0, 256, (spec.image.size, spec.image.size, 3)).astype(np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        pictures.append(base64.b64encode(buffer.getvalue()).decode())
    return {"images": pictures} if count > 1 else {"image": pictures[0]}


def reference(checkpoint: Checkpoint, body: Mapping[str, Any]) -> NDArray[np.float32]:
    """Return the reference's final hidden states [m, h] for a request."""
    prepared = prepare(checkpoint, {**body, "want": "hidden"})
    hidden, _ = models.reference(checkpoint.spec, checkpoint.tensors(), prepared.inputs, prepared.shape)
    return np.asarray(hidden, np.float32)


def relative_error(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Return |found - expected| / |expected| by Euclidean norms; inf where shapes differ or a value is not finite."""
    if found.shape != expected.shape or not np.isfinite(found).all():
        return float("inf")
    scale = float(np.linalg.norm(expected.astype(np.float64)))
    return float(np.linalg.norm(found.astype(np.float64) - expected)) / max(scale, 1e-30)
