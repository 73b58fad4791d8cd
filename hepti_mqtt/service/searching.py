"""The threads that search, and the process for long searches: no request waits for an interpreter that one holds."""

from __future__ import annotations

import logging
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from hepti_mqtt.errors import PlanError
from hepti_mqtt.planner.wires import narrowed
from hepti_mqtt.runtime.planner.commands import Solve
from hepti_mqtt.runtime.planner.events import Solved
from hepti_mqtt.service.solver import Accuracy, put, solve

LONG_S: Final = 0.1  # of processor time; what takes less is over before another process has begun
IDLE_S: Final = 60.0  # then the process ends, and what it needs of memory with it
ROOT: Final = Path(__file__).parents[2]

_log = logging.getLogger(__name__)


class Searches:
    """The searches of a planner, one after the other, and hurried ones beside them.

    Those of models whose last one was long are made in another process while requests are served. accuracy: by model.
    serving: returns whether requests are served. found: takes what was found. `run` and `run_hurried` are the bodies of
    threads, all else may be called on any.
    """

    def __init__(
        self, accuracy: Mapping[str, Accuracy], serving: Callable[[], bool], found: Callable[[Solved], None]
    ) -> None:
        self._accuracy, self._serving, self._found = accuracy, serving, found
        self._wanted: queue.SimpleQueue[Solve | None] = queue.SimpleQueue()
        self._hurried: queue.SimpleQueue[Solve | None] = queue.SimpleQueue()  # they wait for no other search
        self._process: subprocess.Popen[bytes] | None = None
        self._guard = threading.Lock()  # of the process: it is not started any more when this is closed
        self._closed = False
        self._long: set[str] = set()

    def ask(self, command: Solve) -> None:
        """Have a command carried out."""
        (self._hurried if command.hurried else self._wanted).put(command)

    def run(self) -> None:
        """Carry out commands until `close`."""
        while True:
            try:
                command = self._wanted.get(timeout=IDLE_S)
            except queue.Empty:
                self._rest()
                continue
            if command is None:
                return
            self._found(self.solve(command))

    def run_hurried(self) -> None:
        """Carry out hurried commands until `close`."""
        while (command := self._hurried.get()) is not None:
            self._found(solve(command, self._accuracy[command.model]))

    def close(self) -> None:
        """End both threads, and the process for good; a search that it carries out fails."""
        with self._guard:
            self._closed = True
        self._wanted.put(None)
        self._hurried.put(None)
        self._rest()

    def solve(self, command: Solve) -> Solved:
        """Return what `solver.solve` does, for one thread at a time."""
        accuracy = self._accuracy[command.model]
        if command.model in self._long and self._serving():
            try:
                return self._elsewhere(command, accuracy)
            except (OSError, EOFError, pickle.PickleError) as error:
                self._rest()
                if self._closed:
                    return Solved(command.model, command.ticket, None, None, PlanError("the planner ends"))
                _log.warning("the process that searches has ended (%r); the planner searches itself", error)
        begun_s = time.thread_time()
        found = solve(command, accuracy)
        if time.thread_time() - begun_s > LONG_S:
            self._long.add(command.model)
        return found

    def _rest(self) -> None:
        """End the process until it is needed again."""
        with self._guard:
            process, self._process = self._process, None
        if process is not None:
            _end(process)

    def _elsewhere(self, command: Solve, accuracy: Accuracy) -> Solved:
        """Return what the process says; raises OSError, EOFError or PickleError if it is no more."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        put(process.stdin, (command, accuracy.known))
        while not isinstance(said := pickle.load(process.stdout), Solved):
            found = accuracy.measure(said)
            accuracy.known.update({narrowed(said, wire): error for wire, error in found.items()})
            put(process.stdin, found)
        return said

    def _running(self) -> subprocess.Popen[bytes]:
        with self._guard:
            if self._closed:
                raise EOFError
            if self._process is None:
                path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "hepti_mqtt.service.searcher"],
                    env={**os.environ, "PYTHONPATH": path},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,  # an interrupt is for the planner, which ends it
                )
            return self._process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # what was not written yet is for nobody
                continue
