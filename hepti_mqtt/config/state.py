"""State on disk: atomic file replacement."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

PRIVATE: Final = 0o600  # file mode: only the owner may read it


def write_atomically(path: Path, data: bytes | Sequence[bytes | memoryview], mode: int = 0o666) -> os.stat_result:
    """Replace a file's content atomically and return its status. Raises OSError.

    data: the content or its parts. mode: permissions, reduced by the umask.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            file.flush()
            stat = os.fstat(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    return stat
