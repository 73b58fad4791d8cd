"""Log-mel frames of sound as Whisper reads them (Radford et al., 2022), on the mel scale of Slaney's Auditory Toolbox.

Hann windows of 400 samples at 16 kHz, 160 apart and around their samples (mirrored at the ends), power, triangular
filters of unit area, log10, at most 8 below the largest value, then (x + 4) / 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hepti_mqtt.models.config import JsonConfig

Floats = npt.NDArray[np.float32]

RATE: Final = 16_000  # samples per second
HOP: Final = 160  # samples between frames
_WINDOW: Final = 400
_FLOOR: Final = 1e-10
_RANGE: Final = 8.0  # powers of ten below the loudest
_BLOCK: Final = 512  # frames that are transformed at once

_FILES: Final = {"preprocessor_config.json": None, "processor_config.json": "feature_extractor"}


def check_preprocessor(extras: Mapping[str, Any], bands: int, frames: int) -> None:
    """Raise UnsupportedModelError if a model's files ask for other frames of sound; frames: of the longest sound."""
    for file, inside in _FILES.items():
        data = extras.get(file, {})
        config = JsonConfig(file, data if inside is None else data.get(inside, {}))
        for key, value in (
            ("feature_size", bands),
            ("sampling_rate", RATE),
            ("hop_length", HOP),
            ("n_fft", _WINDOW),
            ("nb_max_frames", frames),
            ("do_normalize", False),
            ("dither", 0.0),
        ):
            config.require_one_of(key, value, value)


# The scale is linear up to this frequency, then by powers.
_BREAK_HZ, _HZ_PER_MEL = 1000.0, 200.0 / 3
_LOG_STEP: Final = np.log(6.4) / 27


def _hz(mel: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    bend = _BREAK_HZ / _HZ_PER_MEL
    return np.where(mel < bend, mel * _HZ_PER_MEL, _BREAK_HZ * np.exp(_LOG_STEP * (mel - bend)))


@lru_cache(maxsize=4)
def filters(bands: int) -> npt.NDArray[np.float64]:
    """Return the weights of each frequency in each band, [201, bands]."""
    top = _BREAK_HZ / _HZ_PER_MEL + np.log(RATE / 2 / _BREAK_HZ) / _LOG_STEP
    edges = _hz(np.linspace(0.0, top, bands + 2))
    rise = np.linspace(0, RATE / 2, _WINDOW // 2 + 1)[:, None] - edges  # [201, bands + 2]
    width = np.diff(edges)
    up, down = rise[:, :-2] / width[:-1], -rise[:, 2:] / width[1:]
    return np.asarray(np.maximum(0, np.minimum(up, down)) * (2 / (edges[2:] - edges[:-2])))


def log_mel(samples: Floats, bands: int) -> Floats:
    """Return the frames of samples [HOP n] of a recording at 16 kHz, between -1 and 1: [n, bands], from -1.5 on."""
    count = len(samples) // HOP
    padded = np.pad(samples.astype(np.float64), _WINDOW // 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)[::HOP][:count]  # [n, 400]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_WINDOW) / _WINDOW)
    logs = np.empty((count, bands), np.float64)
    for first in range(0, count, _BLOCK):
        block = slice(first, first + _BLOCK)
        spectrum = np.fft.rfft(windows[block] * hann)
        power = spectrum.real**2 + spectrum.imag**2  # [frames, 201]
        logs[block] = np.log10(np.maximum(power @ filters(bands), _FLOOR))
    return np.asarray((np.maximum(logs, logs.max() - _RANGE) + 4) / 4, np.float32)
