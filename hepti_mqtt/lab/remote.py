"""What a board runs around every command: a process group of its own, and its end with the connection.

    python -I -S -c SOURCE DIRECTORY NAME COMMAND ARGUMENT...

Sent as source text, so that it needs nothing installed there but Python; imports nothing of Hepti. stderr of the
command goes to DIRECTORY/NAME.log if NAME is not empty, and so does stdout if NAME ends with "!".
The number of the group is in DIRECTORY/NAME.pid, which is empty once it has ended.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading

PR_SET_PDEATHSIG = 1
MISSING = 127  # the shell's exit code for a program that is not there


def _die_with_us() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _tell(name: str, number: str) -> None:
    """Write the group's number, or nothing once it has ended, so that nobody sees half of it."""
    if name:
        with open(name + ".part", "w") as file:
            file.write(number)
        os.replace(name + ".part", name + ".pid")


def main(directory: str, name: str, command: list[str]) -> int:
    """Run `command` until it ends or whoever reads our output is gone; return its exit code as a shell would."""
    os.makedirs(directory, exist_ok=True)
    os.chdir(directory)
    whole = name.endswith("!")
    name = name.rstrip("!")
    log = open(name + ".log", "ab") if name else None  # noqa: SIM115 - open until the process ends
    try:
        child = subprocess.Popen(
            command,
            stdout=log if whole else None,
            stderr=log,
            start_new_session=True,
            preexec_fn=_die_with_us,  # noqa: PLW1509 - there is one thread so far
        )
    except OSError as error:
        os.write(log.fileno() if log else 2, f"{command[0]}: {error.strerror}\n".encode())
        _tell(name, "")
        return MISSING
    _tell(name, str(child.pid))
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(child.pid, signal.SIGKILL))

    def watch() -> None:
        # No events asked for: poll returns only when the other end of our output is closed, which is the connection.
        poller = select.poll()
        poller.register(1, 0)
        poller.poll()
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    code = child.wait()
    _tell(name, "")
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
