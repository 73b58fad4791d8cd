"""How far the weights are: bars on a terminal, elsewhere a line every few seconds; and lines about other progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from hepti_mqtt.cli import output

EVERY_S: Final = 3.0  # between two lines about the same load


class LoadDisplay:
    """Shows loads by name, on `console`; a context manager that leaves no bar behind.

    clock: seconds that only grow. Any one thread at a time may call it.
    """

    def __init__(self, console: Console = output.err, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._told_s: dict[str, float] = {}
        self._said: dict[str, str] = {}

    def update(self, name: str, done_bytes: int, total_bytes: int) -> None:
        """Show that `done_bytes` of `total_bytes` are there."""
        if self._console.is_terminal:
            self._draw(name, done_bytes, total_bytes)
            return
        now = self._clock()
        if now - self._told_s.get(name, float("-inf")) >= EVERY_S:
            self._told_s[name] = now
            self._console.print(
                f"loading {name}: {done_bytes / output.MIB:.1f} of {total_bytes / output.MIB:.1f} MiB", markup=False
            )

    def print_status(self, name: str, words: str) -> None:
        """Print what is done now, if that has changed; not more often than every few seconds."""
        now = self._clock()
        if words and words != self._said.get(name) and now - self._told_s.get(name, float("-inf")) >= EVERY_S:
            self._told_s[name], self._said[name] = now, words
            self._console.print(words, markup=False)

    def finish(self, name: str, said: str | None = None) -> None:
        """Take the load away; `said` is the last word about it."""
        self._told_s.pop(name, None)
        task = self._tasks.pop(name, None)
        if self._bars is not None and task is not None:
            self._bars.remove_task(task)
        if not self._tasks:  # a display that nothing moves on must not redraw itself for hours
            self._close()
        if said is not None:
            self._console.print(said, markup=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _draw(self, name: str, done_bytes: int, total_bytes: int) -> None:
        if self._bars is None:
            columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn(binary_units=True))
            self._bars = Progress(*columns, console=self._console, transient=True)
            self._bars.start()
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total_bytes)
        self._bars.update(self._tasks[name], completed=done_bytes, total=total_bytes)

    def _close(self) -> None:
        bars, self._bars = self._bars, None
        self._tasks.clear()
        if bars is not None:
            bars.stop()
