"""Where somebody may speak in a recording, by the energy of its frames; models invent words for silence."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from hepti_mqtt.models.mel import RATE

FRAME_S: Final = 0.03
LEAST_S: Final = 0.1  # of sound; nobody says a word in less
QUIETEST: Final = 1e-3  # RMS of a frame (-60 dB of full scale): a microphone's noise
#: speech changes its loudness within a second by more than its quietest frames do. That is asked of recordings below
#: -40 dB alone, so that no loud one is taken for a quiet room.
QUIET, CHANGES = 1e-2, 3.0
PAUSE_S: Final = 1.0

Floats = npt.NDArray[np.float32]


def is_silent(samples: Floats) -> bool:
    """Return whether nobody speaks in samples [n] at 16 kHz: they are too short, too quiet, or an even noise."""
    if len(samples) < LEAST_S * RATE:
        return True
    levels = _levels(samples)
    loudest = float(np.quantile(levels, 0.98))
    if loudest < QUIETEST:
        return True
    return loudest < QUIET and loudest < CHANGES * float(np.quantile(levels, 0.1))


def has_pause(samples: Floats) -> bool:
    """Return whether samples [n] go on after a pause: there a text without times may end."""
    levels = _levels(samples)
    loud = np.flatnonzero(levels > max(QUIETEST, float(levels.max(initial=0.0)) / 30))
    return bool((np.diff(loud) > PAUSE_S / FRAME_S).any())


def _levels(samples: Floats) -> Floats:
    """Return the RMS of each whole frame of samples, without their mean."""
    size = round(FRAME_S * RATE)
    frames = samples[: len(samples) // size * size].reshape(-1, size)
    return np.asarray(frames.std(axis=1), np.float32)
