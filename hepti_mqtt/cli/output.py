"""Results on stdout, progress and logs on stderr; tables on a terminal, plain text or JSON elsewhere."""

from __future__ import annotations

import atexit
import io
import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from hepti_mqtt.config import process

MIB: Final = 2**20
EVERY_S: Final = 10.0  # between two progress lines of a name where no terminal is
CLOCK_ADVICE: Final = "set it (timedatectl): certificates and logs go by it, nothing else does"
MAX_ACTIVITY_CHARS: Final = 60  # characters of what a device says it is doing

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    out: Console
    err: Console


@cache
def _console(stderr: bool) -> Console:
    from rich.console import Console  # here: a planner that starts again has no time for it

    return Console(stderr=stderr, highlight=False, emoji=False, soft_wrap=True)


def __getattr__(name: str) -> Console:
    """Return `out` or `err`, the consoles of stdout and stderr."""
    if name not in {"out", "err"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _console(name == "err")


def escape_unencodable() -> None:
    """Let stdout write what its encoding has no character for as an escape, such as `\\xfc`, as stderr does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def print_json(data: Any) -> None:
    """Print one JSON object on stdout."""
    sys.stdout.write(json.dumps(data, indent=2 if sys.stdout.isatty() else None) + "\n")
    sys.stdout.flush()


def print_lines(lines: Iterable[str]) -> None:
    """Print lines as they are, without markup."""
    for line in lines:
        _console(stderr=False).print(line, markup=False)


def print_text(text: str) -> None:
    """Print text at once, without a line's end."""
    out = _console(stderr=False)
    out.print(text, end="", markup=False)
    out.file.flush()


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table: drawn on a terminal, columns of plain text elsewhere. Numbers are aligned to the right."""
    cells = [[str(value) for value in row] for row in rows]
    right = [all(_numeric(row[i]) for row in cells) for i in range(len(columns))]
    out = _console(stderr=False)
    longest = [
        max(len(word) for row in [columns, *cells] for word in row[i].split() or [""]) for i in range(len(columns))
    ]
    if out.is_terminal and sum(longest) + 3 * len(columns) + 1 <= out.width:  # else it would break words
        from rich.table import Table

        table = Table(title=title, title_justify="left")
        for name, is_number, least in zip(columns, right, longest, strict=True):
            table.add_column(name, justify="right" if is_number else "left", min_width=least, overflow="fold")
        for row in cells:
            table.add_row(*row)
        out.print(table)
        return
    widths = [max(len(row[i]) for row in [list(columns), *cells]) for i in range(len(columns))]
    print_lines([title])
    for row in [list(columns), *cells]:
        parts = [
            value.rjust(width) if is_number else value.ljust(width)
            for value, width, is_number in zip(row, widths, right, strict=True)
        ]
        print_lines(["  ".join(parts).rstrip()])


def print_items(title: str, columns: Mapping[str, Callable[[Any], object]], items: Iterable[Any]) -> None:
    """Print a table of items; columns: by heading, what it shows of an item."""
    print_table(title, list(columns), [[show(item) for show in columns.values()] for item in items])


def print_result(as_json: bool, data: Any, lines: Iterable[str]) -> None:
    """Print a command's result: as one JSON object, or as lines for people."""
    if as_json:
        print_json(data)
    else:
        print_lines(lines)


def watch(show: Callable[[], None], every_s: float) -> None:
    """Show on a terminal what `show` prints, again and again until q or Ctrl-C; elsewhere print it once."""
    out = _console(stderr=False)
    if not (out.is_terminal and sys.stdin.isatty()):
        show()
        return
    import select
    import termios
    import tty

    from rich.text import Text

    kept = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        with out.screen() as screen:
            while True:
                with out.capture() as shown:
                    show()
                lines = Text.from_ansi(shown.get()).split()
                screen.update(Text("\n").join([*lines[: out.height - 1], Text("q leaves", style="dim")]))
                if select.select([sys.stdin], [], [], every_s)[0] and sys.stdin.read(1) in ("q", ""):
                    return
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, kept)


def size(nbytes: float) -> str:
    """Return a number of bytes with its unit."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes:.0f} bytes"


def predicted(record: Mapping[str, Any], devices: Iterable[str], ms: float) -> str:
    """Return a prediction in ms; of devices that share a machine it holds for idle cores. record: of the plans."""
    machines: Mapping[str, str] = record.get("machines", {})  # a planner may be older
    hosts = [machines[device] for device in devices if device in machines]
    return f"{ms:.1f}" + (" on idle cores" if len(set(hosts)) < len(hosts) else "")


def status_text(device: Mapping[str, Any]) -> str:
    """Return a device's status with its activity and progress while it starts, or its reason for being offline."""
    if device["status"] != "starting":
        reason = str(device.get("reason", ""))[:MAX_ACTIVITY_CHARS]
        return f"{device['status']}: {reason}" if reason else str(device["status"])
    steps = f" {device['done']} of {device['total']}" if device["total"] else ""
    return f"starting: {device['doing'][:MAX_ACTIVITY_CHARS]}{steps}" if device["doing"] else "starting"


def _numeric(text: str) -> bool:
    return text in {"", "-"} or text.lstrip("-").replace(".", "", 1).replace("e-", "", 1).replace("%", "").isdigit()


def setup_logging(verbose: bool) -> None:
    """Send the project's log to stderr: coloured on a terminal, plain elsewhere."""
    if sys.stderr.isatty() and (err := _console(stderr=True)).is_terminal:
        from rich.logging import RichHandler

        process.setup_logging(RichHandler(console=err, show_path=False), "%(message)s", verbose)
    else:
        process.setup_logging(logging.StreamHandler(sys.stderr), "%(asctime)s %(levelname)s %(message)s", verbose)


class ProgressLines:
    """Progress by name on stderr: lines that are rewritten on a terminal, elsewhere a line per name every `EVERY_S`.

    For one thread at a time. clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._printed: dict[str, tuple[float, str]] = {}
        self._live: Live | None = None

    def print(self, name: str, text: str) -> None:
        """Show the current state of a name."""
        now, (last_s, last) = self._clock(), self._printed.get(name, (float("-inf"), ""))
        if text in ("", last):
            return
        if _console(stderr=True).is_terminal:
            self._printed[name] = now, text
            self._draw()
        elif now - last_s >= EVERY_S:
            self._printed[name] = now, text
            _console(stderr=True).print(f"{name}: {text}", markup=False)

    def print_load(self, name: str, done_bytes: int, total_bytes: int) -> None:
        """Show how much of the weights is there."""
        self.print(name, f"loading {done_bytes / MIB:.1f} of {total_bytes / MIB:.1f} MiB")

    def finish(self, name: str, text: str) -> None:
        """Print the last line of a name."""
        self._printed.pop(name, None)
        if self._live is not None:
            self._draw()
        _console(stderr=True).print(text, markup=False)

    def close(self) -> None:
        """Leave the lines as they are; further ones begin below."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self) -> None:
        from rich.live import Live
        from rich.text import Text

        if self._live is None:
            self._live = Live(
                console=_console(stderr=True), auto_refresh=False, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()
            atexit.register(self.close)  # the cursor is hidden meanwhile
        lines = "\n".join(f"{name}: {text}" for name, (_, text) in self._printed.items())
        self._live.update(Text(lines), refresh=True)
