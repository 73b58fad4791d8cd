"""`python -m hepti_mqtt.service.searcher`: the process in which a planner has long searches made.

It reads commands from stdin, and answers on stdout with `Solved`, or first with a plan whose accuracy is to be
measured, which is done where the weights are. It has the least priority, so that a search on a busy machine ends later,
not a request, and it ends with whoever started it.
"""

from __future__ import annotations

import os
import pickle
import queue
import sys
import threading
from collections.abc import Mapping
from typing import IO, Any, Final

from hepti_mqtt.plan import Plan, WireDtype
from hepti_mqtt.planner.wires import Narrowed
from hepti_mqtt.service.solver import load, put, solve

LEAST_PRIORITY: Final = 19


class _Asks:
    """The accuracy of a model, as far as it is known, and of the rest as the planner measures it."""

    def __init__(self, known: dict[Narrowed, float], heard: queue.SimpleQueue[Any], out: IO[bytes]) -> None:
        self.known, self._heard, self._out = known, heard, out

    def measure(self, plan: Plan) -> Mapping[WireDtype, float]:
        """Return the errors of narrow dtypes under a plan."""
        put(self._out, plan)
        found: Mapping[WireDtype, float] = self._heard.get()
        return found


def _listen(heard: queue.SimpleQueue[Any]) -> None:
    """Hear what is said; end the process in whatever it does when the planner is no more."""
    try:
        while True:
            heard.put(pickle.load(sys.stdin.buffer))
    except (EOFError, OSError):
        os._exit(0)


def main() -> int:
    """Carry out commands until the planner ends."""
    os.nice(LEAST_PRIORITY)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(heard,), daemon=True).start()
    load()
    while True:
        command, known = heard.get()
        put(out, solve(command, _Asks(known, heard, out)))


if __name__ == "__main__":
    sys.exit(main())
