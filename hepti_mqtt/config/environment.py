"""Variables that change how a process works, beside those that `settings.py` reads: a wrong one is told at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from hepti_mqtt.errors import ConfigError

KERNELS: Final = "HEPTI_KERNELS_"
DATA_LINK: Final = "HEPTI_DATA_LINK"
# Who carries tensors over the broker: our own link where the broker lets it, or paho always.
DATA_LINKS: Final = ("own", "paho")


def data_link(environment: Mapping[str, str] | None = None) -> str:
    """Return which of `DATA_LINKS` HEPTI_DATA_LINK asks for, the first if it is unset or empty; raises ConfigError."""
    chosen = (os.environ if environment is None else environment).get(DATA_LINK) or DATA_LINKS[0]
    if chosen not in DATA_LINKS:
        raise ConfigError(f"{DATA_LINK}={chosen!r} is no link for tensors; use one of {list(DATA_LINKS)}, or unset it")
    return chosen


def check_environment() -> None:
    """Raise ConfigError if a variable asks for kernels or a link that there are not.

    Numba is imported only where a variable of the kernels is set: most commands do without it.
    """
    data_link()
    if any(value for name, value in os.environ.items() if name.startswith(KERNELS)):
        from hepti_mqtt.kernels.machine.jit import check_settings

        check_settings()
