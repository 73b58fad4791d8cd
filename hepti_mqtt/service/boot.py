"""The planner's boot counter: it grows with every start, whatever the clock says."""

from __future__ import annotations

import fcntl
from pathlib import Path

from platformdirs import user_state_path

from hepti_mqtt.config import state
from hepti_mqtt.errors import ConfigError


def state_of(site: str, directory: Path | None = None) -> Path:
    """Return where the planner of a site keeps what must outlive it; directory: instead of the user's."""
    return (directory or user_state_path("hepti")) / "planner" / site


def next_boot(site: str, unix_s: float, directory: Path | None = None) -> int:
    """Return max(stored + 1, unix_s) for the planner of `site`, and store it; two starts never get the same.

    directory: instead of the user's state directory. Raises ConfigError if nothing can be stored there.
    """
    place = state_of(site, directory)
    try:
        place.mkdir(parents=True, exist_ok=True)
        lock = (place / "lock").open("w")
    except OSError as error:
        raise ConfigError(
            f"the planner's state cannot be kept in {place}: {error.strerror or error}; make it writable, or set "
            "XDG_STATE_HOME"
        ) from error
    with lock:  # two planners may start at the same moment; the one that comes later must be the newer
        fcntl.flock(lock, fcntl.LOCK_EX)
        return state.next_boot(place, lambda: unix_s)
