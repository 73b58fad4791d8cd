"""The golden files' cases: which model, which inputs. Shared by the script that writes and the test that reads."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hepti_mqtt.checkpoint import KINDS
from hepti_mqtt.models import single_sequence
from hepti_mqtt.models.shapes import DecoderInput, ImageInput, TokenBatch, fixed_point
from hepti_mqtt.models.speech import SpeechInput

GOLDEN = Path(__file__).resolve().parent.parent / "golden"

TEXTS = (
    "The sensor in the cold room reports a temperature of 4.2 degrees.",
    "It is warm.",
    "MQTT carries small messages between machines; this one is a little longer than the others, with 27 numbers.",
)


class Case(NamedTuple):
    """A seeded random model: a golden file keeps every `stride`-th row of its final hidden states.

    thin: of the inputs, every so many along their last dimension.
    """

    kind: str
    layers: int | None = None
    seed: int = 7
    stride: int = 1
    thin: int = 1

    @property
    def file(self) -> Path:
        return GOLDEN / f"{self.kind}.npz"


# Of these, transformers and torchvision know those that have a file: `make_golden` writes one for each architecture.
CANDIDATES = (
    Case("bert-base", layers=2, stride=2),
    Case("vit-base", layers=2, stride=7),
    Case("resnet18", thin=16),
    Case("mobilenet-v2", thin=16),
    *(Case(kind) for kind, recipe in KINDS.items() if kind.startswith("tiny-") and "text_config" not in recipe.config),
)
CASES = tuple(case for case in CANDIDATES if case.file.exists())
MINILM = GOLDEN / "minilm.npz"
# Tokens that follow the first `PROMPT` ids of each decoder's case, by kind.
GREEDY, PROMPT, STEPS = GOLDEN / "greedy.json", 10, 20


def request(spec):
    """Return inputs and shape of a case: two texts of 21 and 9 tokens, or one picture (tiny: two)."""
    reads = spec.input_spec
    if isinstance(reads, ImageInput):
        side = reads.size
        images = 1 if side > 100 else 2
        b, c, y, x = np.ogrid[:images, :3, :side, :side]
        pixels = (x * x // 16 + 3 * y * (c + 1) + x * y // 8 + 50 * b) % 256
        return pixels.astype(np.uint8), reads.batch(images)
    if isinstance(reads, SpeechInput):  # the longest sound, whose frames rise and fall, and some tokens
        shape = reads.run(5, reads.longest)
        frames = np.sin(0.37 * np.arange(2 * reads.longest)[:, None] * (1 + np.arange(reads.bands)) / reads.bands)
        ids = np.arange(5) * 7919 % reads.vocab
        return np.concatenate([[0], ids, fixed_point(frames)]).astype(np.int32), shape
    # Ids from 5 on: no special token among them, RoBERTa's padding id least of all, which shifts positions there.
    ids = 5 + np.arange(30) * 7919 % (reads.vocab - 5)
    if reads.end is not None:
        ids[[20, 29]] = reads.end
    if isinstance(reads, DecoderInput):  # one text of all of them
        shape, inputs = single_sequence(spec, ids.astype(np.int32))
        return inputs, shape
    masks = (3, 20, 25) if reads.masks else ()
    return ids.astype(np.int32), TokenBatch((21, 9), mask_rows=masks)


def checksum(tensors):
    """Return the SHA-256 of all weights, so that a changed random stream is not taken for a wrong model."""
    digest = hashlib.sha256()
    for name in tensors:
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(tensors[name]).data)
    return digest.hexdigest()
