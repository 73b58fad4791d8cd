"""Requests with pictures to models that see: shared by the script that writes their golden files and the tests."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "pictures"
TOKENS = 20  # that are generated


class PictureCase(NamedTuple):
    """A seeded random model and a prompt with pictures of some sizes (width, height)."""

    kind: str
    sizes: tuple[tuple[int, int], ...]
    text: str
    seed: int = 7

    @property
    def file(self) -> Path:
        name = "-".join(f"{width}x{height}" for width, height in self.sizes)
        return GOLDEN / f"{self.kind}-{name}.npz"


CASES = (
    PictureCase("tiny-smolvlm", ((20, 20),), "<image> what is in the room"),
    PictureCase("tiny-smolvlm", ((64, 48), (30, 90)), "the door <image> and the window <image> are new"),
    PictureCase("tiny-gemma3-eyes", ((33, 21), (24, 70)), "the door <start_of_image> and <start_of_image> the window"),
    PictureCase("tiny-idefics3", ((33, 21), (24, 70)), "<image><image> what is in the room"),
)


def picture(width: int, height: int) -> np.ndarray:
    """Return a picture [height, width, 3] whose colours run and have edges."""
    y, x, c = np.ogrid[:height, :width, :3]
    values = 40 + 5 * x + 3 * y * (c + 1) + 90 * ((x // 7 + y // 5 + c) % 2)
    return (values % 256).astype(np.uint8)


def encoded(width: int, height: int) -> str:
    """Return the same picture as PNG in base64."""
    file = io.BytesIO()
    Image.fromarray(picture(width, height)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
