"""How much memory a payload holds while it waits."""

from __future__ import annotations

from typing import Final

GRAIN: Final = 16_384  # buffers of payloads are a multiple of it, so that those of nearly one size share them


def held_bytes(nbytes: int) -> int:
    """Return the size of the buffer that a payload of so many bytes keeps from being used again."""
    return -(-max(nbytes, 1) // GRAIN) * GRAIN
