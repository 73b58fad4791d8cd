"""What a process keeps on disk between its starts: files replaced whole, and boot counters that only grow."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from hepti_mqtt.errors import ConfigError
from hepti_mqtt.protocol.plausible import MAX_BOOT

_log: Final = logging.getLogger(__name__)
DISK_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})  # a disk that takes nothing more


def write_atomically(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replace a file by one with `data`: a reader, or a crash, meets the old file or the new one; raises OSError.

    mode: its permissions, of which the umask takes away.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(data)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def next_boot(
    directory: Path, clock: Callable[[], float] = time.time, free_space: Callable[[], object] | None = None
) -> int:
    """Return this start's boot counter, max(stored + 1, unix seconds), and store it.

    It grows even where the clock stands still or goes back (boards without a battery). A counter that cannot be read,
    or that no start can have had, counts as 0. free_space: called once if the disk is full. If it stays full the clock
    alone must make the counter grow, and that is logged. Raises ConfigError if it cannot be stored for another reason,
    because the next start could then repeat it.
    """
    path = directory / "boot"
    try:
        stored = int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        stored = 0
    if not 0 <= stored < MAX_BOOT:
        stored = 0
    boot = max(stored + 1, int(clock()))
    try:
        _store(path, str(boot).encode("ascii"), free_space)
    except OSError as exc:
        if exc.errno not in DISK_FULL_ERRNOS:
            raise ConfigError(
                f"cannot store the boot counter in {path}: {exc}; make the place writable, or choose another (an "
                "agent's --cache, or XDG_STATE_HOME)"
            ) from exc
        _log.warning("cannot store the boot counter in %s: %s; going on, but make room there", path, exc)
    return boot


def _store(path: Path, data: bytes, make_room: Callable[[], object] | None) -> None:
    """Write a small file, on a full disk over the old one, whose room is there already; raises OSError."""
    if _fits(path, data):
        return
    if make_room is not None:
        make_room()
    if _fits(path, data):
        return
    if not path.exists():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    with path.open("r+b") as file:
        file.write(data)
        file.truncate()


def _fits(path: Path, data: bytes) -> bool:
    """Write a file if the disk takes it; raises OSError for any other reason."""
    try:
        write_atomically(path, data)
    except OSError as exc:
        if exc.errno not in DISK_FULL_ERRNOS:
            raise
        return False
    return True
