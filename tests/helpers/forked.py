"""Processes of `hepti` that have imported everything when they begin: another process forks them.

Importing and loading kernels takes a second of a core; a suite starts more than a hundred planners and agents.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import socket
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any

LARGEST = 1 << 17  # bytes of arguments and environment
SUBREAPER = 36  # of prctl: whose children end become those of the next process above that says so
ROOT = Path(__file__).resolve().parents[2]
POSSIBLE = sys.platform == "linux"

_one_at_a_time = Lock()


class Forked(subprocess.Popen[bytes]):
    """As `Popen` of `python -m hepti_mqtt.cli` with these arguments: a child of this process with files as its output.

    Its own server's arguments are those that the system shows.
    """

    def _execute_child(self, args: Any, *others: Any) -> None:
        cwd, env, (stdin, _, _, stdout, _, stderr) = others[4], others[5], others[9:15]
        with _one_at_a_time:
            door, set_option = _server(), ctypes.CDLL(None).prctl
            set_option(SUBREAPER, 1, 0, 0, 0)
            try:
                message = json.dumps([args, str(cwd), dict(env)]).encode()
                socket.send_fds(door, [message], [stdin, stdout, stderr])
                self.pid = int(door.recv(LARGEST))
                door.recv(LARGEST)  # its parent has ended
            finally:
                set_option(SUBREAPER, 0, 0, 0, 0)
                self._close_pipe_fds(*others[9:15])
        self._child_created = True


@cache
def _server() -> socket.socket:
    """Return the end of a connection at whose other end processes are forked, until this process ends."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = subprocess.Popen(
        [sys.executable, "-P", __file__, str(far.fileno())],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        pass_fds=[far.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    far.close()
    atexit.register(server.wait)
    atexit.register(near.close)  # which is called first, and ends the server
    return near


def serve(door: socket.socket) -> None:
    """Return once in each process that is forked: it is the one that was asked for. Ends with the connection."""
    while (received := socket.recv_fds(door, LARGEST, 3))[0]:
        message, descriptors, *_ = received
        if (between := os.fork()) == 0:
            if child := os.fork():
                door.send(str(child).encode())
                os._exit(0)
            door.close()
            arguments, directory, environment = json.loads(message)
            for place, descriptor in enumerate(descriptors):
                os.dup2(descriptor, place)
                os.close(descriptor)
            os.chdir(directory)
            os.environ.clear()
            os.environ.update(environment)
            sys.argv[1:] = arguments
            return
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(between, 0)
        door.send(b"gone")
    os._exit(0)


if __name__ == "__main__":
    for module in ("device_agent", "hepti_mqtt.cli.main", "hepti_mqtt.gateway", "hepti_mqtt.service.planner"):
        import_module(module)
    from hepti_mqtt.cli.main import main
    from hepti_mqtt.kernels.jit import compile_first

    compile_first()
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])))
    sys.exit(main())
