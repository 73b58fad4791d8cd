"""Sizes as people write them."""

from __future__ import annotations

import re
from typing import Final

from hepti_mqtt.errors import ConfigError

_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_size(text: str) -> int:
    """Return bytes from "400MiB", "2GB" or a plain number; raises ConfigError otherwise."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?|)b?", text.strip().lower())
    if match is None:
        raise ConfigError(f"{text!r} is no size; write e.g. 400MiB or 2GB")
    return int(float(match[1]) * _UNITS[match[2]])
