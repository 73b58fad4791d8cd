"""What an answer is checked with: seeded inputs, and the single-device NumPy reference."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.errors import RequestError
from hepti_mqtt.models.reads import Pictures, Text
from hepti_mqtt.service.requests import prepare
from hepti_mqtt.spec import Spec


def random_input(spec: Spec, count: int, seed: int) -> dict[str, Any]:
    """Return `count` seeded random token ids, or `count` seeded random pictures for an image model."""
    rng = np.random.default_rng(seed)
    reads = spec.reads
    if isinstance(reads, Text):
        if count > reads.longest:
            raise RequestError(f"{count} tokens are more than the {reads.longest} that the model reads")
        return {"ids": rng.integers(0, reads.vocab, count).tolist()}
    assert isinstance(reads, Pictures)
    from PIL import Image

    pictures = []
    for _ in range(count):
        pixels = rng.integers(0, 256, (reads.size, reads.size, 3)).astype(np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        pictures.append(base64.b64encode(buffer.getvalue()).decode())
    return {"images": pictures} if count > 1 else {"image": pictures[0]}


def reference(checkpoint: Checkpoint, body: Mapping[str, Any]) -> NDArray[np.float32]:
    """Return the reference's final hidden states [m, h] for a request."""
    prepared = prepare(checkpoint, {**body, "want": "hidden"})
    hidden, _ = models.reference(checkpoint.spec, checkpoint.tensors(), prepared.inputs, prepared.shape)
    return np.asarray(hidden, np.float32)
