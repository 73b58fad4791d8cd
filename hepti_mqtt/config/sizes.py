"""Sizes as people write them."""

from __future__ import annotations

import re
from typing import Final

from hepti_mqtt.errors import ConfigError

_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_MOST: Final = 2**63  # more than anything has, and than is told on the wire


def parse_size(text: str) -> int:
    """Return bytes from "400MiB", "2GB" or a plain number; raises ConfigError otherwise."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmg]i?|)b?", text.strip().lower())
    nbytes = 0.0 if match is None else float(match[1]) * _UNITS[match[2]]
    if match is None or nbytes >= _MOST:
        raise ConfigError(f"{text!r} is no size; write e.g. 400MiB or 2GB")
    return int(nbytes)
