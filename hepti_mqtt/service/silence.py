"""Detection of speech in a recording by the energy of its frames, because models invent words for silence."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from hepti_mqtt.models.mel import RATE

FRAME_S: Final = 0.03
LEAST_S: Final = 0.1  # minimum length of a word
QUIETEST: Final = 1e-3  # RMS of a frame (-60 dB of full scale): a microphone's noise
#: Below QUIET (-40 dB), a recording is speech only if its loudest frames exceed its quietest frames by CHANGES. Louder
#: recordings are always speech.
QUIET, CHANGES = 1e-2, 3.0
PAUSE_S: Final = 1.0

Floats = npt.NDArray[np.float32]


def is_silent(samples: Floats) -> bool:
    """Return whether samples [n] at 16 kHz have no speech: they are too short, too quiet, or even noise."""
    if len(samples) < LEAST_S * RATE:
        return True
    levels = _levels(samples)
    loudest = float(np.quantile(levels, 0.98))
    if loudest < QUIETEST:
        return True
    return loudest < QUIET and loudest < CHANGES * float(np.quantile(levels, 0.1))


def has_pause(samples: Floats) -> bool:
    """Return whether samples [n] continue after a pause, where a text without timestamps may end."""
    levels = _levels(samples)
    loud = np.flatnonzero(levels > max(QUIETEST, float(levels.max(initial=0.0)) / 30))
    return bool((np.diff(loud) > PAUSE_S / FRAME_S).any())


def _levels(samples: Floats) -> Floats:
    """Return the RMS of each whole frame of samples, without their mean."""
    size = round(FRAME_S * RATE)
    frames = samples[: len(samples) // size * size].reshape(-1, size)
    return np.asarray(frames.std(axis=1), np.float32)
