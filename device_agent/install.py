"""Installation files of one device: its directories, and the lock that keeps a second agent out."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import platformdirs

from hepti_mqtt.errors import ConfigError
from hepti_mqtt.ids import check_name

APP: Final = "hepti"


class Directories(NamedTuple):
    """Where one device keeps its state (boot counter, lock, measurement) and its weight tiles."""

    state: Path
    tiles: Path


def directories(root: Path | None, site: str, device: str) -> Directories:
    """Return the directories of one device, made if missing: below `root`, or in the user's own places.

    Raises BadNameError for names that cannot stand in topics, ConfigError if a directory cannot be made.
    """
    state = root if root is not None else platformdirs.user_state_path(APP) / "agents"
    cache = root if root is not None else platformdirs.user_cache_path(APP) / "agents"
    own = Path(check_name("site", site)) / check_name("device", device)
    found = Directories(state / own, cache / own / "tiles")
    for path in found:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise ConfigError(f"cannot make the agent's directory {path}: {exc}; choose another with --cache") from exc
    return found


@contextmanager
def device_lock(directory: Path) -> Iterator[None]:
    """Hold the lock of one device's directory; the system lets go of it when the process ends, however it ends.

    Raises ConfigError if another agent holds it.
    """
    path = directory / "lock"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as exc:
        raise ConfigError(f"cannot open {path}: {exc}; choose another place with --cache") from exc
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            holder = os.read(handle, 32).decode("ascii", "replace").strip()
            raise ConfigError(
                f"another agent (process {holder or 'unknown'}) already runs as this device: {path} is locked; "
                "stop it, or start this one with another --id"
            ) from exc
        with suppress(OSError):  # on a full disk the lock holds all the same; only who holds it is not told
            os.ftruncate(handle, 0)
            os.write(handle, str(os.getpid()).encode("ascii"))
        yield
    finally:
        os.close(handle)
